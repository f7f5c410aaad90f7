"""Find tensors that are step functions of one real tensor, by evaluating their operators.

Comparisons, `Sign` and roundings of a small range start one; an elementwise operator on step
functions of the same source and scalar constants gives another, see `bnncc.recognise.signs`.

Values may be filled in one range after the other, as ``x[x >= 0] = 1; x[x < 0] = -1`` does:

    before: y = Where(x >= 0, 1, x); z = Where(y < 0, -1, y)      after: z = -1 below 0, 1 from 0 on

Only the last of these is a step function. The others are `_Filled`: constant on some pieces, and on
the others still the tensor that is being filled.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bnncc.errors import InputError
from bnncc.ir.evaluate import evaluate_node
from bnncc.ir.graph import Graph, Node, TensorType
from bnncc.ir.halves import NARROW, ROUND
from bnncc.recognise.monotone import (
    evaluate_at,
    first_reached,
    float_at,
    monotone_operand,
    place_of,
)

Array = np.ndarray

MAX_CUTS = 255
"""Number of thresholds of an 8-bit quantizer."""

FAR = np.float32(np.inf)

_MAX_CHAIN = 16
_LARGEST = float(np.finfo(np.float32).max)
_COMPARES = {"Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal"}
_ELEMENTWISE = {
    "Add", "Sub", "Mul", "Div", "Neg", "Abs", "Sign", "Relu", "Clip", "Where", "Cast", "Not", "And",
    "Or", "Xor", "Min", "Max", "Identity", "Floor", "Ceil", "Round", "LeakyRelu", "Tanh", "Sum",
    "HardSigmoid", "Sigmoid", "Pow", "Sqrt", "BitwiseNot", "Mean", "IsNaN", "Gather", ROUND,
    NARROW, *_COMPARES,
}  # fmt: skip
_ROUNDINGS = {"Round", "Floor", "Ceil"}
_SIGN_PRESERVING = {"Tanh", "Softsign", "Erf", "Atan", "Sinh", "Asinh"}
"""Strictly increasing operators with f(0) = 0 that never round a nonzero value to zero."""


@dataclass(frozen=True)
class StepFunction:
    """A piecewise constant function of one source tensor."""

    source: str
    """The real-valued tensor."""
    cuts: Array
    """Shape (count,), ascending: the first number of each piece except the first piece."""
    values: Array
    """Shape (count + 1,): the value of each piece; adjacent values differ."""


@dataclass(frozen=True)
class _Filled:
    """A tensor of which some values were replaced by those of a step function."""

    rest: str
    """The tensor before any value was replaced."""
    kept: StepFunction
    """Whether a value is still that of `rest`."""
    values: StepFunction
    """The values that replace others; meaningless where `kept`. Same source and pieces."""


def analyse(graph: Graph) -> dict[str, StepFunction]:
    """Return the step function of every tensor that is one.

    Parameters
    ----------
    graph : Graph
        After `simplify`; comparisons of two tensors become comparisons of their difference with 0.
    """
    steps: dict[str, StepFunction] = {}
    filled: dict[str, _Filled] = {}
    producers = graph.producers()
    rewritten: list[Node] = []
    for node in graph.nodes:
        step = None
        if len([o for o in node.outputs if o]) == 1 and node.op in _ELEMENTWISE:
            step = _compose(node, graph, steps, producers)
            step = step or _start(node, graph, producers, rewritten)
            step = step or _fill(node, graph, steps, filled, producers)
        if step is not None:
            steps[node.outputs[0]] = step
        rewritten.append(node)
    graph.nodes = rewritten
    return steps


def _step_function(source: str, cuts: Array, values: Array) -> StepFunction | None:
    """Return a step function without redundant cuts; None if there are too many."""
    with np.errstate(invalid="ignore"):
        differ = (values[1:] != values[:-1]) & ~(np.isnan(values[1:]) & np.isnan(values[:-1]))
    if differ.sum() > MAX_CUTS:
        return None
    return StepFunction(source, cuts[differ], np.append(values[:1], values[1:][differ]))


def _scalar(graph: Graph, name: str) -> np.ndarray | None:
    value = graph.constants.get(name)
    if value is None or value.size == 0:
        return None
    if value.size == 1 or (value == value.flat[0]).all():
        return value.reshape(-1)[:1]
    return None


def _compose(
    node: Node, graph: Graph, steps: dict[str, StepFunction], producers: dict[str, Node]
) -> StepFunction | None:
    """Return the step function of an operator applied to step functions of one source."""
    names = [i for i in dict.fromkeys(node.inputs) if i in steps]
    own = _common([steps[i] for i in names], graph, producers)
    if not own:
        return None
    if graph.types[node.outputs[0]].shape != graph.types[own[0].source].shape:
        return None
    cuts, pieces = _on_common_pieces(own)
    table = dict(zip(names, pieces, strict=True))
    args: list[Array | None] = []
    for name in node.inputs:
        if not name:
            args.append(None)
        elif name in table:
            args.append(table[name])
        elif node.op == "Gather" and graph.types[name].shape and name in graph.constants:
            args.append(graph.constants[name])
        else:
            value = _scalar(graph, name)
            if value is None:
                return None
            args.append(value.reshape(()) if node.op == "Clip" else value)
    if node.op == "Gather" and (args[0] is None or args[0].ndim != 1 or node.inputs[0] in table):
        return None
    try:
        with np.errstate(all="ignore"):
            values = np.asarray(evaluate_node(node, args)[0])
    except InputError:
        return None  # an index out of range: an error at run time, if it occurs
    if values.size == 1:
        values = np.broadcast_to(values.reshape(-1), (len(cuts) + 1,))
    if values.shape != (len(cuts) + 1,):
        return None
    return _step_function(own[0].source, cuts, values)


def _on_common_pieces(steps: list[StepFunction]) -> tuple[Array, list[Array]]:
    """Return the cuts of all step functions of one source, and the values of each in between."""
    cuts = np.unique(np.concatenate([s.cuts for s in steps]))
    places = [np.searchsorted(s.cuts, cuts, side="right") for s in steps]
    values = [s.values[np.append(0, at)] for s, at in zip(steps, places, strict=True)]
    return cuts, values


def _fill(
    node: Node, graph: Graph, steps: dict[str, StepFunction], filled: dict[str, _Filled],
    producers: dict[str, Node],
) -> StepFunction | None:  # fmt: skip
    """Return the step function of a `Where` that replaces the last values of a tensor.

    One that leaves some of them is added to `filled`.
    """
    if node.op != "Where" or node.inputs[0] not in steps:
        return None
    condition, rest = steps[node.inputs[0]], ""
    other: StepFunction | Array | None = None
    for name in node.inputs[1:]:
        value = steps.get(name, _scalar(graph, name))
        if value is None and not rest:
            rest = name
        else:
            other = value
    if not rest or other is None or graph.types[rest].dtype != "float32":
        return None
    shape = graph.types[node.outputs[0]].shape
    if graph.types[rest].shape != shape or graph.types[condition.source].shape != shape:
        return None
    before = filled.get(rest)
    own = [condition] if before is None else [condition, before.kept, before.values]
    if before is not None and condition.source == rest:
        own[0] = StepFunction(before.rest, condition.cuts, condition.values)
    if isinstance(other, StepFunction):
        own.append(other)
    if not (own := _common(own, graph, producers)):
        return None
    cuts, pieces = _on_common_pieces(own)
    chosen = pieces[0].astype(bool)
    values = pieces[-1] if isinstance(other, StepFunction) else other
    if before is not None and condition.source == rest:  # decided on what replaced values earlier
        at = np.searchsorted(condition.cuts, pieces[2], side="right")
        chosen = np.where(pieces[1], chosen, condition.values[at].astype(bool))
    kept = chosen == (node.inputs[1] == rest)
    if before is not None:
        values, kept = np.where(kept, pieces[2], values), kept & pieces[1]
    values = np.broadcast_to(values, kept.shape)
    source = own[0].source
    if not kept.any():
        return _step_function(source, cuts, values)
    rest = rest if before is None else before.rest
    made = StepFunction(source, cuts, kept), StepFunction(source, cuts, values)
    filled[node.outputs[0]] = _Filled(rest, *made)
    return None


def _common(
    steps: list[StepFunction], graph: Graph, producers: dict[str, Node]
) -> list[StepFunction]:
    """Express step functions in terms of one common tensor; return [] if there is none."""
    if len({s.source for s in steps}) < 2:
        return steps
    chains = [_chain_above(s.source, graph, producers) for s in steps]
    for name in chains[0]:
        if all(name in chain for chain in chains):
            moved = [
                _moved_up(step, name, chain[name], graph)
                for step, chain in zip(steps, chains, strict=True)
            ]
            return [s for s in moved if s is not None] if None not in moved else []
    return []


def _chain_above(
    name: str, graph: Graph, producers: dict[str, Node]
) -> dict[str, tuple[Node, ...]]:
    """Return the tensors of which `name` is a monotone function, with the nodes in between."""
    table: dict[str, tuple[Node, ...]] = {name: ()}
    nodes: tuple[Node, ...] = ()
    while len(nodes) < _MAX_CHAIN and (node := producers.get(name)) is not None:
        data = monotone_operand(node, graph)
        if data is None or graph.types[data].dtype != "float32":
            break
        nodes = (node, *nodes)
        name = data
        table[name] = nodes
    return table


def _moved_up(
    step: StepFunction, source: str, nodes: tuple[Node, ...], graph: Graph
) -> StepFunction | None:
    """Express a step function in terms of a tensor whose monotone function is its source."""
    if not nodes:
        return step
    ends = evaluate_at(nodes, np.array([-_LARGEST, _LARGEST]), graph)
    falls = bool(ends[0] > ends[1])
    if not len(step.cuts) or np.isnan(ends).any() or ends[0] == ends[1]:
        return None
    # The first number at which the (rising) function reaches a cut or the (falling) one leaves it.
    low = np.full(len(step.cuts), place_of(-_LARGEST) - 1, np.int64)
    high = np.full(len(step.cuts), place_of(_LARGEST) + 1, np.int64)
    high = first_reached(
        lambda at: (evaluate_at(nodes, float_at(at), graph) >= step.cuts) ^ falls, low, high
    )
    values = step.values
    if falls:
        high, values = high[::-1], values[::-1]
    inside = high <= place_of(_LARGEST)  # the other cuts are never reached
    if not inside.all():
        high, values = high[inside], values[np.append(True, inside)]
    if not len(high):
        return StepFunction(source, step.cuts[:0], values[:1])
    cuts, first = np.unique(high, return_index=True)
    # Of several pieces that become empty, keep the last.
    last = np.append(first[1:], len(high)) - 1
    return _step_function(source, float_at(cuts), np.append(values[:1], values[1:][last]))


def _start(
    node: Node, graph: Graph, producers: dict[str, Node], rewritten: list[Node]
) -> StepFunction | None:
    """Return the step function of a `Sign`, or of a comparison with a constant."""
    if node.op == "Sign":
        source = _through_monotone(node.inputs[0], graph, producers)
        if graph.types[source].dtype != "float32":
            return None
        return _around(source, 0.0, np.array([-1, 0, 1], np.float32))
    if node.op == "Div":
        return _start_division(node, graph, producers)
    if node.op in _ROUNDINGS:
        return _start_rounding(node, graph, producers)
    if node.op not in _COMPARES:
        return None
    left, right = node.inputs
    swap = left in graph.constants
    data, bound = (right, left) if swap else (left, right)
    if data in graph.constants or graph.types[data].dtype != "float32":
        return None
    if graph.types[node.outputs[0]].shape != graph.types[data].shape:
        return None
    if bound in graph.constants and (cut := _scalar(graph, bound)) is not None:
        if not np.isfinite(cut[0]):
            return None
        point = float(cut[0])
        source = _through_monotone(data, graph, producers) if point == 0.0 else data
    else:  # in IEEE arithmetic with subnormals, x >= t is exactly x - t >= 0
        source, point = graph.fresh(f"{data}.minus"), 0.0
        graph.types[source] = TensorType(graph.types[data].shape, "float32")
        rewritten.append(Node("Sub", [data, bound], [source], {}, node.name))
    around = np.array([-1, 0, 1], np.float32)
    zero = np.zeros(1, np.float32)
    args: list[Array | None] = [zero, around] if swap else [around, zero]
    return _around(source, point, np.asarray(evaluate_node(node, args)[0]).reshape(-1))


def _around(source: str, cut: float, values: Array) -> StepFunction | None:
    """Return the step function that has `values` below, at and above `cut`."""
    first = np.float32(cut) + np.float32(0)  # no -0
    return _step_function(source, np.array([first, np.nextafter(first, FAR)]), values)


def _start_division(node: Node, graph: Graph, producers: dict[str, Node]) -> StepFunction | None:
    """Return the step function of ``x / |x|``: -1 or 1, undefined at 0."""
    for data, other in (node.inputs, node.inputs[::-1]):
        size = producers.get(other)
        if size is not None and size.op == "Abs" and size.inputs[0] == data:
            if graph.types[data].dtype != "float32":
                return None
            source = _through_monotone(data, graph, producers)
            return _around(source, 0.0, np.array([-1, np.nan, 1], np.float32))
    return None


def _start_rounding(node: Node, graph: Graph, producers: dict[str, Node]) -> StepFunction | None:
    """Return the step function of a rounding whose range holds one step, as in 1-bit DoReFa."""
    source = node.inputs[0]
    low, high = interval(source, graph, producers)
    if not (np.isfinite(low) and np.isfinite(high)) or graph.types[source].dtype != "float32":
        return None
    ends = evaluate_node(node, [np.array([low, high], np.float32)])[0]
    if ends[1] - ends[0] != 1:
        return None
    cut = {"Round": (ends[0] + ends[1]) / 2, "Floor": ends[1], "Ceil": ends[0]}[node.op]
    at = evaluate_node(node, [np.array([cut], np.float32)])[0][0]
    return _around(source, float(cut), np.array([ends[0], at, ends[1]], np.float32))


def interval(name: str, graph: Graph, producers: dict[str, Node]) -> tuple[float, float]:
    """Return bounds of a tensor's values, derived from Clips and similar operators before it.

    Returns
    -------
    tuple of float
        Up to rounding; infinite if unknown.
    """
    low, high = -np.inf, np.inf
    factor = 1.0
    while (node := producers.get(name)) is not None:
        scalars = [s for i in node.inputs[1:] if i and (s := _scalar(graph, i)) is not None]
        if node.op in ("Relu", "Abs"):
            low = max(low, 0.0)
        elif node.op in ("Sigmoid", "HardSigmoid"):
            low, high = max(low, 0.0), min(high, 1.0 * factor)
            break
        elif node.op == "Clip":
            bounds = [_scalar(graph, i) if i else None for i in (node.input(1), node.input(2))]
            low = low if bounds[0] is None else max(low, float(bounds[0][0]) * factor)
            high = high if bounds[1] is None else min(high, float(bounds[1][0]) * factor)
        elif node.op in ("Min", "Max") and len(node.inputs) == 2 and scalars:
            bound = float(scalars[0][0]) * factor
            low, high = (low, min(high, bound)) if node.op == "Min" else (max(low, bound), high)
        elif node.op == "Mul" and scalars and scalars[0][0] > 0:
            factor *= float(scalars[0][0])
        else:
            break
        if np.isfinite(low) and np.isfinite(high):
            break
        name = node.inputs[0]
    return low, high


def _through_monotone(name: str, graph: Graph, producers: dict[str, Node]) -> str:
    """Skip operators that preserve the sign of every value, e.g. hardtanh before a sign."""
    while (node := producers.get(name)) is not None:
        clip = node.op == "Clip" and _straddles_zero(node, graph)
        if not clip and node.op not in _SIGN_PRESERVING:
            break
        name = node.inputs[0]
    return name


def _straddles_zero(node: Node, graph: Graph) -> bool:
    names = node.input(1), node.input(2)
    bounds = [graph.constants.get(i) if i else None for i in names]
    if any(i and b is None for i, b in zip(names, bounds, strict=True)):
        return False
    low, high = bounds
    return (low is None or float(low.reshape(-1)[0]) < 0) and (
        high is None or float(high.reshape(-1)[0]) > 0
    )
