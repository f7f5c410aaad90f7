"""Constant folding and type inference in one forward walk.

A node with constant inputs becomes a constant, unless that would be much larger. Shape vectors that
contain a dynamic batch are tracked element by element, so operators that use them (Reshape, Expand,
ConstantOfShape, Pad, Resize) get constant targets. If a tensor is a smaller one broadcast (Expand,
ConstantOfShape, a full-size constant), readers that broadcast use the smaller one instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bnncc.errors import BnnccError, ModelError, ShapeError
from bnncc.ir.elements import ARITHMETIC, multiply_all, taken_as_positive
from bnncc.ir.evaluate import evaluate_node
from bnncc.ir.graph import Graph, Node, TensorType
from bnncc.ir.infer import BROADCAST, COMPARE, ELEMENTWISE, infer
from bnncc.ir.nodechecks import check_node
from bnncc.ir.operators import FUNCTIONS
from bnncc.ir.pieces import reshape_target
from bnncc.ir.shaperules import Partial, broadcast, resized_to

Array = np.ndarray[Any, Any]

SMALL = 1 << 22
"""Number of elements up to which a folded constant is never too large for its inputs."""
GROWTH = 4
"""Larger folded constants may have this many times the elements of their inputs."""
BUDGET = 1 << 26
"""Maximum total of elements of folded constants, beyond 16 times those of the file."""

_MOVES = {"Concat", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Unsqueeze"}
_SPREAD = BROADCAST | COMPARE | {"Where"}


def fold(graph: Graph) -> Graph:
    """Return the graph with constants folded, and with a type for every tensor.

    Parameters
    ----------
    graph : Graph
        In canonical form; only the types of inputs and constants are required.

    Returns
    -------
    Graph
        A new graph; nodes are reused.

    Raises
    ------
    ShapeError
        If shapes are inconsistent or too large.
    ModelError
        If a node cannot be evaluated or typed.
    """
    folder = Folder(graph)
    nodes, graph.nodes = graph.nodes, []
    for node in nodes:
        folder.emit(node)
    return folder.finish()


def find_sizes(graph: Graph) -> None:
    """Set `Graph.sizes`: integer vectors of a typed graph that consist of dimensions."""
    folder = Folder(graph)
    for node in graph.nodes:
        if not node.op.startswith("bnncc.") and node.outputs[0] in graph.types:
            folder.know(node, [graph.types[o] for o in node.outputs if o])


@dataclass
class Folder:
    """Builds a graph node by node."""

    graph: Graph
    """Contains inputs and constants with their types; nodes are appended."""
    small: dict[str, str] = field(default_factory=dict)
    """By tensor: a smaller tensor with the same values that broadcasts to it."""
    _shrunk: dict[str, str] = field(default_factory=dict)
    _budget: int = 0

    @property
    def partial(self) -> dict[str, Partial]:
        """Known elements of integer vectors that are not constant."""
        return self.graph.sizes

    def __post_init__(self) -> None:
        self._budget = BUDGET + 16 * sum(v.size for v in self.graph.constants.values())

    def emit(self, node: Node) -> None:
        """Type, check and fold a node whose inputs have been emitted."""
        graph = self.graph
        self._without_empty(node)
        check_node(node, graph)
        types = infer(node, graph, self.partial)
        if self.know(node, types) or self._evaluate(node, types):
            return
        types = self._empty_outputs(node, types)
        if not types:
            return
        for name, kind in zip(node.outputs, types, strict=False):
            if name:
                graph.types[name] = kind
        self._target(node)
        if node.op in ELEMENTWISE:
            self._track(node, types[0])
            self._shrink(node, types[0])
        elif node.op == "Expand":
            self.small[node.outputs[0]] = self.small.get(node.inputs[0], node.inputs[0])
        elif node.op == "ConstantOfShape":
            value = node.attrs.get("value", np.zeros(1, np.float32)).reshape(())
            self.small[node.outputs[0]] = graph.constant(value, f"{node.outputs[0]}.value")
        graph.nodes.append(node)

    def constant(self, node: Node) -> bool:
        """Fold a node with constant inputs as it is; return whether that was possible.

        Used for operators that are otherwise decomposed: onnx.reference implements them.
        """
        graph = self.graph
        if node.op in FUNCTIONS or graph.computed(node.inputs):
            return False
        try:
            types = infer(node, graph, self.partial)
            return self._evaluate(node, types)
        except BnnccError:
            return False  # its parts are typed and evaluated separately

    def finish(self) -> Graph:
        """Drop unused tensors and return the graph.

        Raises
        ------
        ShapeError
            If a tensor that is computed at run time is empty.
        """
        self.graph.prune()
        read = {name for node in self.graph.nodes for name in node.inputs} | set(self.graph.outputs)
        for node in self.graph.nodes:
            if node.op == "Split" and len(node.inputs) > 1:  # symbolic, so that it is no constant
                empty = [o for o in node.outputs if 0 in self.graph.types[o].shape]
                if empty and not read.intersection(empty):
                    self._keep(node, [k for k, o in enumerate(node.outputs) if o not in empty])
            for name in node.outputs:
                if name and 0 in self.graph.types[name].shape:
                    shape = list(self.graph.types[name].shape)
                    raise ShapeError(f"{node.where}: output is empty, its shape {shape}")
        return self.graph

    # -------------------------------------------------------------------------------- empty tensors

    def _without_empty(self, node: Node) -> None:
        """Drop operands of a Concat that have no elements."""
        if node.op != "Concat":
            return
        full = [i for i in node.inputs if 0 not in self.graph.types[i].shape]
        ranks = {len(self.graph.types[i].shape) for i in node.inputs}
        if full and len(full) < len(node.inputs) and len(ranks) == 1:
            node.inputs = full

    def _empty_outputs(self, node: Node, types: Sequence[TensorType]) -> list[TensorType]:
        """Turn empty outputs into constants; return the types of the others."""
        rest = []
        for k, (name, kind) in enumerate(zip(node.outputs, types, strict=False)):
            if kind.static and 0 in kind.shape:
                if name:
                    self.graph.set_constant(
                        name, np.zeros([int(d) for d in kind.shape], kind.dtype)
                    )
            else:
                rest.append(k)
        if len(rest) == len(types):
            return list(types)
        if node.op == "Split" and len(node.inputs) > 1:
            self._keep(node, rest)
            return [types[k] for k in rest]
        for k in set(range(len(types))) - set(rest):
            if k < len(node.outputs) and node.outputs[k]:
                node.outputs[k] = ""
        return list(types) if any(node.outputs) else []

    def _keep(self, node: Node, rest: Sequence[int]) -> None:
        """Drop the outputs of a Split that are not in `rest`, because they are empty."""
        sizes = self.graph.constants[node.inputs[1]][list(rest)]
        node.inputs[1] = self.graph.constant(sizes, f"{node.name}.split")
        node.outputs = [node.outputs[k] for k in rest]
        if len(rest) == 1:
            node.op, node.attrs, node.inputs = "Identity", {}, node.inputs[:1]

    # ---------------------------------------------------------------------------- whole constants

    def _evaluate(self, node: Node, types: Sequence[TensorType]) -> bool:
        graph = self.graph
        if graph.computed(node.inputs):
            return False
        if not all(t.static for t in types):
            return False
        values = [graph.constants[i] if i else None for i in node.inputs]
        made = sum(math.prod(int(d) for d in t.shape) for t in types)
        limit = max(SMALL, GROWTH * sum(v.size for v in values if v is not None))
        if made > min(limit, self._budget):
            return False
        self._budget -= made
        try:
            results = evaluate_node(node, values, graph.types)
        except BnnccError:
            raise
        except Exception as error:
            reason = str(error) or type(error).__name__
            raise ModelError(f"{node.where}: cannot be evaluated: {reason}") from error
        for name, value, kind in zip(node.outputs, results, types, strict=False):
            if name:
                value = np.ascontiguousarray(value, np.dtype(kind.dtype)).reshape(value.shape)
                self.graph.set_constant(name, value)
        return True

    # ------------------------------------------------------------------------------ shape vectors

    def know(self, node: Node, types: Sequence[TensorType]) -> bool:
        """Track integer vectors; return whether all outputs of the node became constants."""
        if types[0].dtype not in ("int64", "int32", "bool") or len(types[0].shape) > 1:
            return False
        results = self._partial_results(node, types)
        if results is None:
            return False
        complete = True
        for name, value, kind in zip(node.outputs, results, types, strict=False):
            elements = tuple(value.reshape(-1).tolist())
            if all(isinstance(e, (int, bool)) for e in elements):
                self.graph.set_constant(name, np.array(elements, kind.dtype).reshape(value.shape))
            elif any(e is not None for e in elements):
                self.partial[name] = elements
                complete = False
            else:
                complete = False
        return complete

    def _partial_results(self, node: Node, types: Sequence[TensorType]) -> list[Array] | None:
        graph = self.graph
        if node.op == "Shape":
            dims = graph.types[node.inputs[0]].shape
            return [_objects(dims[node.attrs.get("start", 0) : node.attrs.get("end")])]
        if node.op == "Size":
            return [_objects([multiply_all(graph.types[node.inputs[0]].shape)]).reshape(())]
        if not any(i in self.partial for i in node.inputs):
            return None
        values: list[Array | None] = []
        for name in node.inputs:
            if name in self.partial:
                shape = [int(d) for d in graph.types[name].shape]
                values.append(_objects(self.partial[name]).reshape(shape))
            elif name:
                if name not in graph.constants:
                    return None
                values.append(graph.constants[name])
            else:
                values.append(None)
        if node.op == "Cast":
            return [values[0]] if types[0].dtype != "bool" and values[0] is not None else None
        if node.op in _MOVES:
            if any(i in self.partial for i in node.inputs[1:]) and node.op != "Concat":
                return None
            mixed = [
                v.astype(object) if v is not None and (k == 0 or node.op == "Concat") else v
                for k, v in enumerate(values)
            ]
            return evaluate_node(node, mixed)
        if node.op == "ReduceProd" and values[0] is not None:
            result = _objects([multiply_all(values[0].reshape(-1).tolist())])
            return [result.reshape([int(d) for d in types[0].shape])]
        if node.op == "Where" and values[0] is not None and node.inputs[0] in graph.constants:
            yes, no = (v.astype(object) for v in values[1:] if v is not None)
            return [np.asarray(np.where(values[0], yes, no))]
        function = ARITHMETIC.get(node.op)
        if function is not None and len(values) == 2:
            pairs = np.broadcast(*(v.astype(object) for v in values if v is not None))
            graph.positive |= taken_as_positive(node.op, [*pairs])
            pairs.reset()
            return [_objects([function(a, b) for a, b in pairs]).reshape(pairs.shape)]
        return None

    def _target(self, node: Node) -> None:
        """Give Reshape and Resize a constant target, and Pad one pair of pads per axis.

        A Tile whose only counts are symbolic becomes an Expand: it repeats axes of size 1.
        """
        graph = self.graph
        if node.op == "Reshape":
            shape = graph.types[node.outputs[0]].shape
            source = graph.types[node.inputs[0]].shape
            dims = reshape_target(source, shape)
            if dims.count(-1) <= 1 and not any(d == 0 for d in shape):
                target = np.array(dims, np.int64)
                old = graph.constants.get(node.inputs[1])
                if old is None or not np.array_equal(old, target):
                    node.inputs[1] = graph.constant(target, f"{node.name}.shape")
                node.attrs.pop("allowzero", None)
        elif node.op == "Pad" and node.input(3):
            axes, pads = (graph.constants.get(node.inputs[k]) for k in (3, 1))
            if axes is not None and pads is not None:
                full = np.zeros((2, len(graph.types[node.inputs[0]].shape)), np.int64)
                full[:, axes] = pads.reshape(2, -1)
                node.inputs[1] = graph.constant(full.reshape(-1), f"{node.name}.pads")
                del node.inputs[3:]
                if not node.inputs[2]:
                    del node.inputs[2:]
        elif node.op == "Tile" and (times := self.partial.get(node.inputs[1])) is not None:
            if all(t == 1 or isinstance(t, str) for t in times):
                node.op = "Expand"
        elif node.op == "Resize" and (sizes := resized_to(node, graph, self.partial)) is not None:
            if not sizes:  # all axes keep their size
                node.op, node.inputs, node.attrs = "Identity", node.inputs[:1], {}
                return
            target = np.array(list(sizes.values()), np.int64)
            node.attrs["axes"] = list(sizes)
            node.inputs[1:] = ["", "", graph.constant(target, f"{node.name}.sizes")]

    # --------------------------------------------------------------------------- spread-out values

    def _track(self, node: Node, kind: TensorType) -> None:
        """Record the small form of an elementwise result of small constants."""
        graph = self.graph
        names = [self.small.get(i, i) for i in node.inputs]
        if names == node.inputs or graph.computed(names):
            return
        value = evaluate_node(node, [graph.constants[i] if i else None for i in names])[0]
        if value.size <= SMALL:
            self.small[node.outputs[0]] = graph.constant(value, f"{node.outputs[0]}.value")

    def _shrink(self, node: Node, kind: TensorType) -> None:
        """Use the small form of inputs if the shape of the result does not change."""
        if node.op not in _SPREAD:
            return
        graph = self.graph
        for k, name in enumerate(node.inputs):
            if not name or (node.op == "PRelu" and k == 0):
                continue
            others = [graph.types[i].shape for j, i in enumerate(node.inputs) if i and j != k]
            small = self.small.get(name) or self._compress(name)
            if small is None:
                continue
            try:
                fits = broadcast([*others, graph.types[small].shape], node.name) == kind.shape
            except ShapeError:
                fits = False
            if fits:
                node.inputs[k] = small

    def _compress(self, name: str) -> str | None:
        """Return a smaller constant that broadcasts to the constant `name`, if there is one."""
        graph = self.graph
        value = graph.constants.get(name)
        if value is None or value.size <= 1:
            return None
        if name not in self._shrunk:
            small = value
            for axis in range(value.ndim):
                if small.shape[axis] > 1:
                    first = small.take([0], axis)
                    if np.array_equal(np.broadcast_to(first, small.shape), small):
                        small = first
            if small.size == 1:
                small = small.reshape(())
            self._shrunk[name] = (
                name if small.size == value.size else graph.constant(small, f"{name}.value")
            )
        return self._shrunk[name]


def _objects(values: Sequence[Any]) -> Array:
    result = np.empty(len(values), object)
    result[:] = list(values)
    return result
