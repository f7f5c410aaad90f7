"""Move per-row scales and zero points across the products that read them.

    before: d = Div(q, s); y = MatMul(d, W)            q levels, s one number for each row
    after:  t = MatMul(q, W); y = Div(t, s)

    before: d = Sub(q, z); y = MatMul(d, W)            z one number for each row
    after:  t = MatMul(q, V); u = Sub(t, Mul(z, sum(V))); y = Mul(u, scale)     W = V * scale

Reshapes and transposes between the quantizer and the product move before the quantizer, and scales
are moved likewise. A convolution has a scale for each image, or for each pixel if its kernel is
1x1.

Dynamically quantized activations look like this: a scale depends on the data of a row. With levels
and integer weights the sums are exact; the model's own operators follow in their order. A model
that divides first sums rounded quotients; that sum is taken to be the one of the integers, as
everywhere if operands are multiples of a scale (docs/semantics.md). So it is if quotients are
rounded to half precision, which generated code does not do; a `Narrow` rounding stays.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from bnncc.ir.dims import Dim, channel_shape, product
from bnncc.ir.graph import Graph, Node, TensorType
from bnncc.ir.halves import ROUND
from bnncc.ir.infer import infer_into
from bnncc.ir.magnitude import EXACT_BELOW
from bnncc.ir.moves import VIEW, VIEWS
from bnncc.ir.pieces import Expression, view
from bnncc.ir.quantizers import LEVELS
from bnncc.recognise.filters import Weights, few_bit_weights, two_valued_filters
from bnncc.recognise.lattice import Lattice, as_multiples, lattices
from bnncc.recognise.operands import filters_of

Axes = Collection[int]

PART = "bnncc.part"
"""Attribute of a node that is part of a layer which another node represents in the report."""

MOVED = "bnncc.moved"
"""Attribute of a product whose rows had scales or zero points: a note for the report."""


def move_row_scales(graph: Graph) -> None:
    """Let products read levels, and apply scales and zero points of rows to their sums.

    Parameters
    ----------
    graph : Graph
        After `recognise_quantizers` and before `flatten_rows`; modified in place.
    """
    look = _Look(graph, lattices(graph), graph.producers())
    nodes: list[Node] = []
    for node in graph.nodes:
        nodes += _moved(node, look) or [node]
    graph.nodes = nodes
    graph.prune()


@dataclass(frozen=True)
class _Step:
    """An operator between levels and the product that reads them."""

    node: Node
    place: int
    """Index of the operand that is data."""

    @property
    def moves(self) -> bool:
        """Whether it only moves the data."""
        return self.node.op not in _ARITHMETIC


@dataclass(frozen=True)
class _Look:
    """A graph, its lattices and producers, and what has been moved."""

    graph: Graph
    held: dict[str, Lattice]
    producers: dict[str, Node]
    again: dict[tuple[str, ...], str] = field(default_factory=dict)
    """Moved tensors, by the tensor and the results of the moves."""


_ARITHMETIC = ("Mul", "Div", "Add", "Sub")
_OFFSETS = {"Add", "Sub"}


def _moved(node: Node, look: _Look) -> list[Node] | None:
    graph = look.graph
    weight = graph.constants.get(node.inputs[1]) if node.op in _PRODUCTS else None
    if weight is None or node.inputs[0] in look.held or (node.op != "Conv" and weight.ndim != 2):
        return None
    rank = len(graph.types[node.inputs[0]].shape)
    name, steps = _chain(node.inputs[0], {1 if node.op == "Conv" else rank - 1}, look)
    filters = filters_of(node, weight)
    if name not in look.held or isinstance(filters, tuple):
        return None
    if not all(_follows(node, step, graph) for step in steps if not step.moves):
        return None
    found = few_bit_weights(filters)
    if found is None and two_valued_filters(filters) is None:
        return None
    if graph.types[name].dtype != graph.types[node.outputs[0]].dtype:
        return None
    made = _Written(node, look, filters, found).after(name, steps)
    if made is not None:
        product = next(n for n in made if n.op in _PRODUCTS)
        product.attrs.update({k: True for k in (PART,) if node.attrs.get(k)})
        product.attrs[MOVED] = _said(look.held[name], found, steps)
    return made


_PRODUCTS = ("Conv", "Gemm", "MatMul")


def levels_behind_scales(
    name: str, axis: int, graph: Graph, held: dict[str, Lattice], producers: dict[str, Node]
) -> str:
    """Return the first tensor that a tensor is computed from by scales of rows and moves.

    Parameters
    ----------
    name : str
        The tensor.
    axis : int
        The axis along which its rows lie.
    graph : Graph
        The graph.
    held : dict of str to Lattice
        From `lattices`.
    producers : dict of str to Node
        From the graph.

    Returns
    -------
    str
        Levels, if it is in `held`.
    """
    return _chain(name, {axis}, _Look(graph, held, producers))[0]


def _chain(name: str, axes: Axes, look: _Look) -> tuple[str, list[_Step]]:
    """Return the levels that a product's data are computed from, and the steps in between."""
    graph = look.graph
    steps: list[_Step] = []
    while name not in look.held:
        made = look.producers.get(name)
        if made is None:
            break
        if made.op == ROUND:
            name = made.inputs[0]
            continue
        place, before = 0, axes
        if made.op in _ARITHMETIC:
            places = operands_of_rows(made, graph, axes)
            if not places:
                break
            place = next((k for k in places if made.inputs[k] in look.held), places[0])
        else:
            found = axes_before(made, graph, axes)
            if found is None:
                break
            before = found
        steps.insert(0, _Step(made, place))
        name, axes = made.inputs[place], before
    return name, steps


def operands_of_rows(node: Node, graph: Graph, axes: Axes) -> list[int]:
    """Return the operands of a node that may be data: those whose other operand is one per row.

    Parameters
    ----------
    node : Node
        A Mul, Div, Add or Sub.
    graph : Graph
        Holds its types.
    axes : collection of int
        The axes of its result along which a row lies.

    Returns
    -------
    list of int
        Indices of operands: of both, if rows have one element.
    """
    kinds = [graph.types[i] for i in node.inputs]
    return [
        place
        for place, kind in enumerate(kinds)
        if kind == graph.types[node.outputs[0]]
        and all(_broadcast(kinds[1 - place].shape, len(kind.shape))[axis] == 1 for axis in axes)
        and not (node.op == "Div" and place)
    ]


def _broadcast(shape: Sequence[Dim], rank: int) -> tuple[Dim, ...]:
    return (1,) * (rank - len(shape)) + tuple(shape)


def axes_before(node: Node, graph: Graph, axes: Axes) -> Axes | None:
    """Return the axes of a move's data that become `axes` of its result, and perhaps others.

    Parameters
    ----------
    node : Node
        Any operator.
    graph : Graph
        Holds its types.
    axes : collection of int
        Axes of its result.

    Returns
    -------
    collection of int or None
        None if the operator is no view, transpose or slice of other axes.
    """
    if node.op == "Transpose":
        return {int(node.attrs["perm"][axis]) for axis in axes}
    if node.op == "Slice":
        return axes if not ({*axes, None} & _sliced(node, graph)) else None
    if node.op not in VIEWS | {VIEW}:
        return None
    before, after = (graph.types[i].shape for i in (node.inputs[0], node.outputs[0]))
    if all(after[axis] == 1 for axis in axes) and 1 in before:
        return {before.index(1)}
    blocks = _blocks(before, after)
    return {k for old, new in blocks if {*axes} & {*new} for k in old}


def _blocks(before: Sequence[Dim], after: Sequence[Dim]) -> list[tuple[range, range]]:
    """Return the axes of two shapes of a tensor in blocks, as small as possible, of equal size."""
    blocks: list[tuple[range, range]] = []
    first, other = 0, 0
    for end in range(1, len(before) + 1):
        size = product(before[first:end])
        for stop in range(other + 1, len(after) + 1):
            if product(after[other:stop]) == size:
                blocks.append((range(first, end), range(other, stop)))
                first, other = end, stop
                break
    if not blocks:
        return [(range(len(before)), range(len(after)))]
    old, new = blocks[-1]  # ones may be left
    blocks[-1] = range(old.start, len(before)), range(new.start, len(after))
    return blocks


def _sliced(node: Node, graph: Graph) -> set[int | None]:
    """Return the axes of a Slice; with None if they or the limits are computed."""
    given = [graph.constants.get(i) for i in node.inputs[1:] if i]
    if len(given) < 3 or any(value is None for value in given):
        return {None}
    rank = len(graph.types[node.inputs[0]].shape)
    return {int(a) % rank for a in graph.constants[node.inputs[3]].reshape(-1)}


def _follows(node: Node, step: _Step, graph: Graph) -> bool:
    """Whether a step can follow a product: if that is a convolution, only a step of pixels."""
    if node.op != "Conv":
        return True
    a, shape = node.attrs, graph.types[node.inputs[1]].shape
    if step.node.op in _OFFSETS and any(a["pads"]):
        return False
    one = [*shape[2:], *(a.get("strides") or [1])]
    if all(k == 1 for k in one) and not any(a["pads"]):
        return True
    other = graph.types[step.node.inputs[1 - step.place]].shape
    rank = len(graph.types[step.node.outputs[0]].shape)
    return all(d == 1 for d in _broadcast(other, rank)[1:])


class _Written:
    """Writes a product of levels, and the steps behind it."""

    def __init__(self, node: Node, look: _Look, filters: np.ndarray, found: Weights | None) -> None:
        self.node, self.look, self.graph = node, look, look.graph
        self.filters, self.found = filters, found
        self.write = Expression(node, look.graph)
        self.kind = look.graph.types[node.outputs[0]]
        self.again = dict(look.again)

    def after(self, name: str, steps: Sequence[_Step]) -> list[Node] | None:
        """Return the nodes, or None if a scale has no shape behind the moves."""
        write, node, graph = self.write, self.node, self.graph
        others = []
        for k, step in enumerate(steps):
            if step.moves:
                continue
            moves = [later for later in steps[k + 1 :] if later.moves]
            other = self.beside(step.node.inputs[1 - step.place], step, moves)
            if other is None:
                return None
            others.append((step, other))
        graph.in_file.setdefault(
            node.name, (node.op, self.kind.shape, graph.types[node.inputs[1]].shape)
        )
        value = self.product(self.levels(name, [step.node for step in steps if step.moves]))
        whole = self.filters if self.found is None else self.found.whole
        sums = whole.reshape(len(whole), -1).sum(axis=1)
        for step, other in others:
            if step.node.op in _OFFSETS:
                other = write("Mul", other, self.by_channel(sums))
            operands = [value, other] if step.place == 0 else [other, value]
            value = write(step.node.op, *operands)
        if self.found is not None and (self.found.scale != 1).any():
            value = write("Mul", value, self.by_channel(self.found.scale))
        if node.input(2):
            bias = graph.constants.get(node.inputs[2])
            other = node.inputs[2]
            beta = float(node.attrs.get("beta", 1.0)) if node.op == "Gemm" else 1.0
            if bias is not None and (beta != 1 or node.op == "Conv"):
                scaled = beta * bias
                other = (
                    self.by_channel(scaled)
                    if node.op == "Conv"
                    else write.constant(scaled, self.kind.dtype)
                )
            value = write("Add", value, other)
        for made in write.nodes:
            if made.outputs[0] not in graph.types:
                infer_into(made, graph)
        self.look.again.update(self.again)
        return write.result(value)

    def by_channel(self, values: np.ndarray) -> str:
        """Return a constant of the channels of the result."""
        shape = channel_shape(len(self.kind.shape)) if self.node.op == "Conv" else (-1,)
        return self.write.constant(values.reshape(shape), self.kind.dtype)

    def product(self, levels: str) -> str:
        """Write the product of integers."""
        weights = self.filters if self.found is None else self.found.whole
        write, node = self.write, self.node
        if node.op == "Conv":
            held = write.constant(weights, self.kind.dtype)
            return write("Conv", levels, held, covers=node.covers, **node.attrs)
        return write("MatMul", levels, write.constant(weights.T, self.kind.dtype))

    def levels(self, name: str, moves: Sequence[Node]) -> str:
        """Write moved levels: what they are a decision about is moved, if they are one's result."""
        if not moves:
            return name
        graph, again = self.graph, self.again
        key = (name, *(move.outputs[0] for move in moves))
        if key not in again:
            made = self.look.producers.get(name)
            by_channel = made is not None and np.ndim(made.attrs.get("thresholds", ())) > 1
            decides = made is not None and made.op in ("bnncc.Sign", LEVELS) and not by_channel
            value = made.inputs[0] if made is not None and decides else name
            for move in moves:
                value = self.write(move.op, value, *move.inputs[1:], **move.attrs)
                kind = graph.types[move.outputs[0]]
                graph.types[value] = TensorType(kind.shape, graph.types[name].dtype)
            if made is not None and decides:
                value = self.write(made.op, value, **made.attrs)
                graph.types[value] = graph.types[moves[-1].outputs[0]]
            again[key] = value
        return again[key]

    def beside(self, name: str, step: _Step, moves: Sequence[_Step]) -> str | None:
        """Write a scale or zero point as moved as the data; None if that takes repetition."""
        graph, write = self.graph, self.write
        kind = graph.types[name]
        if not moves:
            return name
        whole = graph.types[step.node.outputs[0]].shape
        shape = _broadcast(kind.shape, len(whole))
        if all(d == 1 for d in shape):
            return name if not kind.shape else write.scalar(name)
        key = (name, *(move.node.outputs[0] for move in moves))
        if key in self.again:
            return self.again[key]
        value = name
        for move in moves:
            before = whole
            whole = graph.types[move.node.outputs[0]].shape
            if move.node.op == "Transpose":
                value = self.viewed(value, TensorType(shape, kind.dtype))
                perm = move.node.attrs["perm"]
                shape = tuple(shape[p] for p in perm)
                value = write("Transpose", value, perm=list(perm))
                graph.types[value] = TensorType(shape, kind.dtype)
                continue
            if move.node.op == "Slice":
                axes = {axis for axis in _sliced(move.node, graph) if axis is not None}
                if any(shape[axis] == before[axis] for axis in axes):
                    if any(shape[axis] != before[axis] for axis in axes):
                        return None
                    value = self.viewed(value, TensorType(shape, kind.dtype))
                    value = write("Slice", value, *move.node.inputs[1:])
                    shape = tuple(whole[k] if k in axes else d for k, d in enumerate(shape))
                    graph.types[value] = TensorType(shape, kind.dtype)
                continue
            after = _shape_after(shape, before, whole)
            if after is None:
                return None
            shape = after
            value = self.viewed(value, TensorType(shape, kind.dtype))
        self.again[key] = value
        return value

    def viewed(self, name: str, kind: TensorType) -> str:
        """Write a tensor of another shape."""
        if self.graph.types[name] == kind:
            return name
        out = self.graph.fresh(f"{name}.moved")
        self.write.nodes.append(view(self.graph, name, out, kind))
        return out


def _shape_after(
    shape: Sequence[Dim], before: Sequence[Dim], after: Sequence[Dim]
) -> tuple[Dim, ...] | None:
    """Return the shape of a scale of rows behind a view of the data, or None if it has none."""
    made: list[Dim] = [1] * len(after)
    for old, new in _blocks(before, after):
        held, whole = ([dims[k] for k in old] for dims in (shape, before))
        if all(d == 1 for d in held):
            continue
        if held != whole:
            return None
        made[new.start : new.stop] = after[new.start : new.stop]
    return tuple(made)


def _said(known: Lattice, found: Weights | None, steps: Sequence[_Step]) -> str:
    """Return a description of what was moved, with a bound of the integer sums."""
    ops = {step.node.op for step in steps}
    kinds = (("zero points", _OFFSETS), ("scales", {"Mul", "Div"}))
    said = " and ".join(name for name, some in kinds if ops & some)
    said += " of rows are applied to its sums"
    multiples = as_multiples(known.values)
    if multiples is None or found is None:
        return said
    first, step, _ = multiples
    top = max(abs(first), abs(first + step * known.count))
    total = int(np.abs(found.whole).reshape(len(found.whole), -1).sum(axis=1).max()) * top
    if total >= EXACT_BELOW:
        return f"{said}, integers that may exceed 2^24, above which float32 rounds them"
    return f"{said}, integers of at most {total:,}"
