"""Recognise binary products of two activations, as in attention.

    before: s = bnncc.Sign(q); k = Transpose(bnncc.Sign(r)); y = MatMul(s, k)     [N, H, T, K]
    after:  s = bnncc.Sign(rows of q); k = bnncc.Sign(rows of r)                  [N*H*T, K]
            y = Reshape(bnncc.BinaryProduct(s, k))

Both operands become rows of bits along the reduction axis, so signs are moved across the transposes
and reshapes before the product. Operators after the product that treat all elements alike, such as
a scale or a sign, are applied to rows too, in the same kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

from bnncc.ir.dims import Dim, product
from bnncc.ir.graph import Graph, Node, TensorType
from bnncc.ir.moves import PERMUTATIONS, VIEW
from bnncc.ir.pieces import view
from bnncc.recognise.lattice import REMAPS, Lattice, sign_lattices
from bnncc.recognise.operands import maker

BINARY_PRODUCT = "bnncc.BinaryProduct"
"""Operator that multiplies rows ``[batch * rows, K]`` by rows ``[batch * columns, K]``, separately
for each matrix, to ``[batch * rows, columns]``. Attributes: ``batch``, ``rows``, ``columns``,
``scale`` (of a dot product) and ``mode``, see `topi_binary.spec.BinaryConv2d`."""

_ALIKE = REMAPS | {"bnncc.Sign"}
"""Operators that treat all elements alike if their constants are scalars."""

_WHY = "products of two activations are binary if both are signs, or the first one is {0, h}"


def pair_products(graph: Graph) -> None:
    """Rewrite products of two computed matrices that are binary.

    Runs after `flatten_rows` and `commute_moves`.
    """
    graph.replace(_Writer(graph).written)
    graph.prune()


def why_not(
    node: Node, graph: Graph, values: dict[str, Lattice], producers: dict[str, Node]
) -> tuple[str, str]:
    """Return why a product of two activations is not binary, and a remedy.

    Parameters
    ----------
    node : Node
        A layer with computed weights that `pair_products` did not rewrite.
    values : dict of str to Lattice
        Signs of the graph, from `lattices`.

    Returns
    -------
    tuple of str
        Reason and remedy.
    """
    if node.inputs[0] in graph.constants:
        return "its weights are the left operand, and they or its data take many values", _WHY
    found = _operands(node, graph, values, producers)
    if found is None:
        return "its weights are computed at run time", "give it constant weights, or use MatMul"
    if not isinstance(found, tuple):
        return "kernels of products of two activations are for CPUs", "give it constant weights"
    return found


@dataclass(frozen=True)
class _Operand:
    """An operand: its sign, its values, and the moves between sign and product."""

    sign: Node
    value: Lattice
    moves: tuple[Node, ...]


@dataclass(frozen=True)
class _Product:
    """A binary product: its operands and extents."""

    left: _Operand
    right: _Operand
    batch: Dim
    rows: int
    columns: int


def _operands(
    node: Node, graph: Graph, values: dict[str, Lattice], producers: dict[str, Node]
) -> _Product | tuple[str, str] | None:
    """Return a binary product, or a reason and a remedy; None for other nodes."""
    if node.op != "MatMul" or any(i in graph.constants for i in node.inputs):
        return None
    kinds = [graph.types[i] for i in node.inputs]
    shapes = [kind.shape for kind in kinds]
    if any(kind.dtype != "float32" or len(kind.shape) < 2 for kind in kinds):
        return "its operands are not float32 matrices", "cast them"
    if shapes[0][:-2] != shapes[1][:-2]:
        return "its operands are repeated along axes of one another", "expand them"
    sizes = (shapes[0][-2], shapes[0][-1], shapes[1][-1])
    rows, depth, columns = (d if isinstance(d, int) else 0 for d in sizes)
    if not rows or not depth or not columns:
        return "the size of its matrices is unknown", "fix it: --input-shape"
    sides = []
    for name in node.inputs:
        two = values.get(name)
        if two is None:
            return f"its operand `{name}` is real-valued{maker(name, producers)}", _WHY
        traced = _trace(name, two, graph, producers)
        if traced is None:
            return f"its operand `{name}` is not a sign that was only moved", _WHY
        sides.append(traced)
    left, right = sides
    if not right.value.bipolar or (not left.value.bipolar and left.value.lo):
        return "the values of its operands are neither -h and h, nor 0 and h on the left", _WHY
    return _Product(left, right, product(shapes[0][:-2]), rows, columns)


def _trace(name: str, value: Lattice, graph: Graph, producers: dict[str, Node]) -> _Operand | None:
    moves: list[Node] = []
    while (node := producers.get(name)) is not None:
        if node.op == "bnncc.Sign":
            return _Operand(node, value, tuple(moves[::-1]))
        data = graph.computed(node.inputs)
        if len(data) != 1 or node.op not in PERMUTATIONS | REMAPS:
            return None
        if node.op in PERMUTATIONS:
            moves.append(node)
        name = data[0]
    return None


class _Writer:
    """Writes the new nodes; `rows` maps tensors to their rows."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.producers, self.values = graph, graph.producers(), sign_lattices(graph)
        self.nodes: list[Node] = []
        self.rows: dict[str, str] = {}

    def written(self, node: Node) -> list[Node] | None:
        """Return the replacement of `node`, or None."""
        self.nodes = []
        found = _operands(node, self.graph, self.values, self.producers)
        if isinstance(found, _Product):
            self._product(node, found)
        elif not self._alike(node):
            return None
        return self.nodes

    def _product(self, node: Node, found: _Product) -> None:
        """Append a binary product that replaces `node`."""
        out = node.outputs[0]
        signs = [self._side(found.left, False), self._side(found.right, True)]
        left, right = found.left.value, found.right.value
        attrs = {
            "batch": found.batch,
            "rows": found.rows,
            "columns": found.columns,
            "scale": (left.hi if left.bipolar else left.hi - left.lo) * right.hi,
            "mode": "xor" if left.bipolar else "and",
        }
        kind = TensorType((product((found.batch, found.rows)), found.columns), "float32")
        made = self._add(Node(BINARY_PRODUCT, signs, [], attrs, node.name, (node.name,)), out, kind)
        self._seen(made, out)

    def _alike(self, node: Node) -> bool:
        """Append `node` on rows, if all its inputs are rows and it treats all elements alike."""
        data = self.graph.computed(node.inputs)
        if len(data) != 1 or data[0] not in self.rows:
            return False
        if node.op in ("Reshape", VIEW) and self._type(node.outputs[0]) == self._type(
            self.rows[data[0]]
        ):
            self._seen(self.rows[data[0]], node.outputs[0])
            return True
        if node.op not in _ALIKE:
            return False
        others = [self.graph.constants[i] for i in node.inputs if i and i != data[0]]
        out, constants = node.outputs[0], self.graph.constants
        if any(c.size != 1 for c in others) or self._type(out) != self._type(data[0]):
            return False
        rows = self.rows[data[0]]
        inputs = [
            rows if i == data[0] else self.graph.constant(constants[i].reshape(()), i) if i else ""
            for i in node.inputs
        ]
        kind = self._type(rows)
        made = Node(node.op, inputs, [], dict(node.attrs), node.name, node.covers)
        self._seen(self._add(made, out, kind), out)
        return True

    def _type(self, name: str) -> TensorType:
        return self.graph.types[name]

    def _seen(self, rows: str, out: str) -> None:
        """Define `out` as a view of `rows`."""
        self.rows[out] = rows
        self._reshape(rows, out, self._type(out))

    def _add(self, node: Node, stem: str, kind: TensorType) -> str:
        node.outputs = [self.graph.fresh(f"{stem}.rows")]
        self.graph.types[node.outputs[0]] = kind
        self.nodes.append(node)
        self.producers[node.outputs[0]] = node
        return node.outputs[0]

    def _reshape(self, name: str, out: str, kind: TensorType) -> str:
        node = view(self.graph, name, out, kind)
        self.nodes.append(node)
        self.producers[out] = node
        return out

    def _side(self, operand: _Operand, turned: bool) -> str:
        """Return the signs of an operand as rows along the reduction axis."""
        source, steps = self._before_steps(operand.sign.inputs[0])
        name = source
        for move in operand.moves:
            kind = TensorType(self.graph.types[move.outputs[0]].shape, "float32")
            copy = Node(move.op, [name, *move.inputs[1:]], [], dict(move.attrs), move.name)
            name = self._add(copy, move.outputs[0], kind)
        if turned:
            name = self._turned(name)
        shape = self.graph.types[name].shape
        kind = TensorType((product(shape[:-1]), shape[-1]), "float32")
        while self._type(name) != kind and self._is_view(name):
            name = self.producers[name].inputs[0]
        if self._type(name) != kind:
            name = self._reshape(name, self.graph.fresh(f"{name}.rows"), kind)
        value, sign = operand.value, operand.sign
        if name == source and self._as(sign, value):
            return sign.outputs[0]
        for step in steps[::-1]:
            inputs = [i if i in self.graph.constants else name for i in step.inputs]
            copy = Node(step.op, inputs, [], dict(step.attrs), step.name, step.covers)
            name = self._add(copy, step.outputs[0], kind)
        attrs = {"lo": value.lo, "hi": value.hi, "zero": sign.attrs["zero"]}
        return self._add(Node("bnncc.Sign", [name], [], attrs, sign.name), sign.outputs[0], kind)

    def _before_steps(self, name: str) -> tuple[str, list[Node]]:
        """Return the tensor before the steps that treat all elements alike, and these steps."""
        steps: list[Node] = []
        constants = self.graph.constants
        while (node := self.producers.get(name)) is not None and node.op in REMAPS:
            data = [i for i in node.inputs if i not in constants]
            if len(data) != 1 or any(constants[i].size != 1 for i in node.inputs if i != data[0]):
                break
            if not data[0] or self._type(data[0]) != self._type(name):
                break
            steps.append(node)
            name = data[0]
        return name, steps

    def _is_view(self, name: str) -> bool:
        made = self.producers.get(name)
        return made is not None and made.op in ("Reshape", "Flatten", "Squeeze", "Unsqueeze", VIEW)

    @staticmethod
    def _as(sign: Node, value: Lattice) -> bool:
        return (sign.attrs["lo"], sign.attrs["hi"]) == (value.lo, value.hi)

    def _turned(self, name: str) -> str:
        """Return a tensor with its last two axes swapped."""
        shape = self.graph.types[name].shape
        perm = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
        inner = self.producers.get(name)
        if inner is not None and inner.op == "Transpose":
            perm = [int(inner.attrs["perm"][p]) for p in perm]
            name = inner.inputs[0]
            if perm == list(range(len(perm))):
                return name
        shape = self.graph.types[name].shape
        kind = TensorType(tuple(shape[p] for p in perm), "float32")
        return self._add(Node("Transpose", [name], [], {"perm": perm}, name), name, kind)
