"""Fuse normalizations of rows, softmax and sigmoid gates into one operator each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from bnncc.ir.graph import Graph, Node
from bnncc.ir.rows import ROW_NORM, ROW_SOFTMAX, SWISH
from bnncc.transform.rewrite import Result, Walk, walk

Readers = dict[str, list[Node]]


def join_normalizations(graph: Graph) -> bool:
    """Replace normalizations of float32 rows by one node each.

        m = ReduceMean(Mul(x, x)); y = Mul(Div(x, Sqrt(Add(m, e))), w)  ->  y = RowNorm(x, w)
        d = Sub(x, ReduceMean(x)); the same of d, then Add(y, b)        ->  y = RowNorm(x, w, b)
        y = LayerNormalization(x, w, b)                                 ->  y = RowNorm(x, w, b)

    Runs before `flatten_rows`, which would flatten a part of them.

    Notes
    -----
    Squares may be written as Mul or Pow, the root as Sqrt or Pow with -0.5, and the division as Div
    or as Mul with a Reciprocal. The order of summation differs, as it may for any ReduceMean.
    """
    readers = graph.consumers()
    return _replaced(graph, lambda node, s: _scaled(node, s, readers) or _normalized(node, s))


def join_softmax(graph: Graph) -> bool:
    """Replace softmax of float32 rows, and sigmoid gates, by one node each.

        y = Softmax(Add(Mul(x, c), m))                                  ->  y = RowSoftmax(x, m)
        y = Mul(x, Sigmoid(x))                                          ->  y = Swish(x)

    Runs after `pair_products`, which looks for softmax.
    """
    readers = graph.consumers()
    return _replaced(graph, lambda node, s: _softmax(node, s, readers) or _gate(node, s))


def _replaced(graph: Graph, rule: Callable[[Node, Walk], Node | None]) -> bool:
    """Apply a rule to the nodes with float32 results."""

    def on_floats(node: Node, state: Walk) -> Result:
        made = rule(node, state) if graph.types[node.outputs[0]].dtype == "float32" else None
        return None if made is None else [made]

    changed = walk(graph, on_floats)
    if changed:
        graph.prune()
    return changed


def _normalized(node: Node, state: Walk) -> Node | None:
    """Return the fused node for a normalization without scale and bias, or for an ONNX operator."""
    made = node.outputs[:1]
    if node.op == "LayerNormalization" and _by_rows(node, state):
        attrs = {"epsilon": float(node.attrs.get("epsilon", 1e-5)), "centred": 1}
        return Node(ROW_NORM, node.inputs, made, attrs, node.name)
    for x, other in _operands(node) if node.op in ("Div", "Mul") else ():
        epsilon = _epsilon(node.op, x, other, state)
        if epsilon is not None:
            source = _centred(x, state)
            attrs = {"epsilon": epsilon, "centred": int(source is not None)}
            return Node(ROW_NORM, [source or x], made, attrs, node.name)
    return None


def _softmax(node: Node, state: Walk, readers: Readers) -> Node | None:
    if node.op != "Softmax" or not _by_rows(node, state):
        return None
    scores, mask, scale = _scores(node.inputs[0], state, readers)
    return Node(ROW_SOFTMAX, [scores, *mask], node.outputs[:1], {"scale": scale}, node.name)


def _gate(node: Node, state: Walk) -> Node | None:
    for x, other in _operands(node) if node.op == "Mul" else ():
        gate = state.producer(other, "Sigmoid")
        if gate is not None and gate.inputs[0] == x:
            return Node(SWISH, [x], node.outputs[:1], {}, node.name)
    return None


def _by_rows(node: Node, state: Walk) -> bool:
    """Whether the operator works along the last axis, of known extent, and has one result."""
    rank = _rank(node.inputs[0], state)
    last = node.attrs.get("axis", -1) % rank == rank - 1
    return last and bool(_width(node.inputs[0], state)) and not any(node.outputs[1:])


def _scaled(node: Node, state: Walk, readers: Readers) -> Node | None:
    """Return the fused node with the scale or bias that follows it."""
    place = {"Mul": 1, "Add": 2}.get(node.op, 0)
    for x, factor in _operands(node) if place else ():
        norm = state.producer(x, ROW_NORM)
        width = _width(x, state)
        value = state.value(factor)
        if (
            norm is None
            or value is None
            or not _alone(x, state, readers)
            or len(norm.inputs) > (place or 0)
        ):
            continue
        if value.size != width or value.shape[-1] != width or value.ndim > _rank(x, state):
            continue
        row = state.graph.constant(value.reshape(-1), f"{node.name}.row")
        inputs = [*norm.inputs, *[""] * (place - len(norm.inputs)), row]
        return Node(ROW_NORM, inputs, node.outputs, dict(norm.attrs), node.name)
    return None


def _scores(name: str, state: Walk, readers: Readers) -> tuple[str, list[str], float]:
    """Return the operand of a softmax: a tensor, its added mask (if any), its constant factor."""
    types = state.graph.types
    added = state.producer(name, "Add") if _alone(name, state, readers) else None
    for x, mask in _operands(added) if added is not None else ():
        shape, other = types[x].shape, types[mask].shape
        fits = types[x] == types[name] and len(other) <= len(shape)
        same = all(d in (1, e) for d, e in zip(other[::-1], shape[::-1], strict=False))
        if fits and same and state.producer(x, "Mul", "Div", "MatMul") is not None:
            source, scale = _factor(x, state, readers)
            return source, [mask], scale
    source, scale = _factor(name, state, readers)
    return source, [], scale


def _factor(name: str, state: Walk, readers: Readers) -> tuple[str, float]:
    """Return a tensor and a constant whose product `name` is."""
    node = state.producer(name, "Mul", "Div") if _alone(name, state, readers) else None
    for x, factor in _operands(node) if node is not None else ():
        value = state.scalar(factor)
        if node is not None and value and state.graph.types[x] == state.graph.types[name]:
            return x, float(value if node.op == "Mul" else 1 / value)
    return name, 1.0


def _alone(name: str, state: Walk, readers: Readers) -> bool:
    """Return whether `name` has exactly one reader."""
    return len(readers.get(name, [])) == 1 and name not in state.graph.outputs


def _operands(node: Node) -> Iterator[tuple[str, str]]:
    first, second = node.inputs
    yield first, second
    if node.op != "Div":
        yield second, first


def _rank(name: str, state: Walk) -> int:
    return len(state.graph.types[name].shape)


def _width(name: str, state: Walk) -> int:
    """Return the extent of the last axis, or 0 if unknown."""
    shape: tuple[Any, ...] = state.graph.types[name].shape
    return int(shape[-1]) if shape and isinstance(shape[-1], int) else 0


def _epsilon(op: str, x: str, other: str, state: Walk) -> float | None:
    """Return epsilon if `op` of `x` and `other` divides by the root of the mean square."""
    total = _root(op, other, state)
    added = state.producer(total, "Add")
    for mean, epsilon in _operands(added) if added is not None else ():
        value, square = state.scalar(epsilon), state.producer(_mean(mean, state), "Mul", "Pow")
        if value is None or square is None or square.inputs[0] != x:
            continue
        twice = square.inputs[1] == x if square.op == "Mul" else state.scalar(square.inputs[1]) == 2
        if twice and _width(x, state):
            return float(value)
    return None


def _root(op: str, name: str, state: Walk) -> str:
    """Return the tensor by whose root `op` with `name` divides, or ""."""
    if op == "Mul":
        power = state.producer(name, "Pow")
        if power is not None and state.scalar(power.inputs[1]) == -0.5:
            return power.inputs[0]
        inverse = state.producer(name, "Reciprocal", "Div")
        if inverse is None or (inverse.op == "Div" and state.scalar(inverse.inputs[0]) != 1):
            return ""
        name = inverse.inputs[-1]
    power = state.producer(name, "Sqrt", "Pow")
    if power is None or (power.op == "Pow" and state.scalar(power.inputs[1]) != 0.5):
        return ""
    return power.inputs[0]


def _mean(name: str, state: Walk) -> str:
    """Return the tensor whose row means `name` holds, or ""."""
    node = state.producer(name, "ReduceMean")
    if node is None or len(node.inputs) < 2 or not node.attrs.get("keepdims", 1):
        return ""
    axes, rank = state.value(node.inputs[1]), _rank(node.inputs[0], state)
    last = axes is not None and axes.size == 1 and int(axes.reshape(())) % rank == rank - 1
    return node.inputs[0] if last else ""


def _centred(name: str, state: Walk) -> str | None:
    """Return x if `name` is x minus the mean of its rows."""
    node = state.producer(name, "Sub")
    same = node is not None and _mean(node.inputs[1], state) == node.inputs[0]
    return node.inputs[0] if node is not None and same else None
