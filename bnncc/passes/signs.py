"""Recognise signs in all their spellings.

    before: c = GreaterOrEqual(x, 0); y = Where(c, 1, -1)    after: y = bnncc.Sign(x)
    before: s = Sign(x); t = Add(s, 0.1); y = Sign(t)        after: y = bnncc.Sign(x)
    before: c = Greater(x, T); f = Cast(c)                   after: d = Sub(x, T); f = bnncc.Sign(d)

A tensor is looked at as a *step function* of one real source tensor: constant on the pieces into
which a few cut points divide the real line. Comparisons and `Sign` start one; any elementwise
operator over step functions of the same source (and scalar constants) gives another, computed by
evaluating the operator on the pieces. No operator name but the starting ones matters, so every
spelling made of `Where`, `Cast`, `Not`, `Mul`, `Add`, `Clip`, `Equal`, ... is found. The outermost
tensor of such a chain that takes two values becomes a `bnncc.Sign` node, as does one that takes
three values in the order of sign(x).

`bnncc.Sign` has attributes ``lo`` and ``hi``, its values for negative and positive input, and
``zero``: ``ge`` (0 gives `hi`), ``gt`` (0 gives `lo`) or ``mid`` (0 gives ``(lo + hi) / 2``: ONNX
and torch `Sign`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bnncc.ir.evaluate import evaluate_node
from bnncc.ir.graph import Graph, Node, TensorType
from bnncc.ir.halves import ROUND

_COMPARES = {"Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal"}
_ELEMENTWISE = {
    "Add", "Sub", "Mul", "Div", "Neg", "Abs", "Sign", "Relu", "Clip", "Where", "Cast", "Not", "And",
    "Or", "Xor", "Min", "Max", "Identity", "Floor", "Ceil", "Round", "LeakyRelu", "Tanh", "Sum",
    "HardSigmoid", "Sigmoid", "Pow", "Sqrt", "BitwiseNot", "Mean", "IsNaN", ROUND, *_COMPARES,
}  # fmt: skip
_ROUNDINGS = {"Round", "Floor", "Ceil"}
_SIGN_PRESERVING = {"Tanh", "Softsign", "Erf", "Atan", "Sinh", "Asinh"}
"""Strictly increasing operators with f(0) = 0 that cannot round a nonzero value to zero."""

_NON_NEGATIVE = {"Relu", "Abs", "Sigmoid", "Exp", "Sqrt", "Softmax", "HardSigmoid", "Softplus"}


@dataclass(frozen=True)
class StepFunction:
    """A piecewise constant function of one source tensor.

    Attributes
    ----------
    source : str
        The real tensor.
    cut : float
        The one point where the value may change.
    values : ndarray, shape (3,)
        Value below, at and above `cut`.
    """

    source: str
    cut: float
    values: np.ndarray


def recognise_signs(graph: Graph, *, sign_zero: str = "exact") -> None:
    """Replace every sign chain in `graph` by one `bnncc.Sign` node.

    Parameters
    ----------
    graph : Graph
        Rewritten in place.
    sign_zero : {"exact", "+1", "-1"}
        What a three-valued sign gives for zero: ``exact`` keeps the graph's own 0.
    """
    steps = _analyse(graph)
    consumers = graph.consumers()
    made: dict[str, Node] = {}
    new_nodes: list[Node] = []
    for node in graph.nodes:
        new_nodes.append(node)
        out = node.outputs[0]
        step = steps.get(out)
        if step is None or graph.types[out].dtype != "float32":
            continue
        if not _is_tip(out, graph, consumers, steps):
            continue
        sign = _sign_attrs(step, graph, sign_zero)
        if sign is None:
            continue
        if sign_zero != "exact" and _sign_attrs(step, graph, "exact") != sign:
            graph.sign_zero[node.name] = f"taken as {sign_zero}, by option"
        source = step.source
        if step.cut != 0.0:
            cut = graph.constant(np.float32(step.cut).reshape(()), f"{source}.cut")
            shifted = graph.fresh(f"{source}.minus_cut")
            graph.types[shifted] = graph.types[source]
            new_nodes.insert(
                len(new_nodes) - 1, Node("Sub", [source, cut], [shifted], {}, node.name)
            )
            source = shifted
        made[out] = Node("bnncc.Sign", [source], [out], sign, node.name)
        new_nodes[-1] = made[out]
    graph.nodes = new_nodes
    if made:
        graph.sort()
        graph.prune()


def _is_tip(
    out: str, graph: Graph, consumers: dict[str, list[Node]], steps: dict[str, StepFunction]
) -> bool:
    """Whether some reader of `out` is not itself part of a longer step function."""
    if out in graph.outputs:
        return True
    readers = consumers.get(out, [])
    return any(
        r.outputs[0] not in steps or len(set(steps[r.outputs[0]].values.tolist())) < 2
        for r in readers
    )


def _sign_attrs(step: StepFunction, graph: Graph, sign_zero: str) -> dict[str, object] | None:
    below, at, above = (float(v) for v in step.values)
    producer = graph.producers().get(step.source)
    if step.cut == 0.0 and producer is not None and producer.op in _NON_NEGATIVE:
        below = at  # unreachable
    if not all(np.isfinite((below, at, above))) or below == above:
        return None
    if at == above:
        return {"lo": below, "hi": above, "zero": "ge"}
    if at == below:
        return {"lo": below, "hi": above, "zero": "gt"}
    if below == -above and at == 0.0:
        zero = {
            "exact": "mid",
            "+1": "ge" if above > 0 else "gt",
            "-1": "gt" if above > 0 else "ge",
        }
        return {"lo": below, "hi": above, "zero": zero[sign_zero]}
    return None


def _analyse(graph: Graph) -> dict[str, StepFunction]:
    """Compute the step function of every tensor that is one."""
    steps: dict[str, StepFunction] = {}
    producers = graph.producers()
    rewritten: list[Node] = []
    for node in graph.nodes:
        step = None
        if len([o for o in node.outputs if o]) == 1 and node.op in _ELEMENTWISE:
            step = _compose(node, graph, steps) or _start(node, graph, producers, rewritten)
        if step is not None:
            steps[node.outputs[0]] = step
        rewritten.append(node)
    graph.nodes = rewritten
    return steps


def _scalar(graph: Graph, name: str) -> np.ndarray | None:
    value = graph.constants.get(name)
    if value is None or value.size == 0:
        return None
    if value.size == 1 or (value == value.flat[0]).all():
        return value.reshape(-1)[:1]
    return None


def _compose(node: Node, graph: Graph, steps: dict[str, StepFunction]) -> StepFunction | None:
    """Return the step function of an operator over step functions of one source."""
    own = [steps[i] for i in node.inputs if i in steps]
    if not own or any(s.source != own[0].source or s.cut != own[0].cut for s in own):
        return None
    args: list[np.ndarray | None] = []
    out_shape = graph.types[node.outputs[0]].shape
    if out_shape != graph.types[own[0].source].shape:
        return None
    for name in node.inputs:
        if not name:
            args.append(None)
        elif name in steps:
            args.append(steps[name].values)
        else:
            value = _scalar(graph, name)
            if value is None:
                return None
            args.append(value.reshape(()) if node.op == "Clip" else value)
    with np.errstate(all="ignore"):
        values = np.asarray(evaluate_node(node, args)[0])
    if values.size == 1:
        values = np.broadcast_to(values.reshape(-1), (3,))
    if values.shape != (3,):
        return None
    return StepFunction(own[0].source, own[0].cut, values)


def _start(
    node: Node, graph: Graph, producers: dict[str, Node], rewritten: list[Node]
) -> StepFunction | None:
    """Return the step function that a `Sign` or a comparison with a constant starts."""
    if node.op == "Sign":
        source = _through_monotone(node.inputs[0], graph, producers)
        if graph.types[source].dtype != "float32":
            return None
        return StepFunction(source, 0.0, np.array([-1, 0, 1], np.float32))
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
    else:  # x >= t is exactly x - t >= 0 in IEEE arithmetic with subnormals
        source, point = graph.fresh(f"{data}.minus"), 0.0
        graph.types[source] = TensorType(graph.types[data].shape, "float32")
        rewritten.append(Node("Sub", [data, bound], [source], {}, node.name))
    around = np.array([-1, 0, 1], np.float32)
    zero = np.zeros(1, np.float32)
    args: list[np.ndarray | None] = [zero, around] if swap else [around, zero]
    return StepFunction(source, point, np.asarray(evaluate_node(node, args)[0]).reshape(-1))


def _start_rounding(node: Node, graph: Graph, producers: dict[str, Node]) -> StepFunction | None:
    """Return the step function of rounding where the range holds one step: DoReFa's 1-bit form."""
    source = node.inputs[0]
    low, high = _interval(source, graph, producers)
    if not (np.isfinite(low) and np.isfinite(high)) or graph.types[source].dtype != "float32":
        return None
    ends = evaluate_node(node, [np.array([low, high], np.float32)])[0]
    if ends[1] - ends[0] != 1:
        return None
    cut = {"Round": (ends[0] + ends[1]) / 2, "Floor": ends[1], "Ceil": ends[0]}[node.op]
    at = evaluate_node(node, [np.array([cut], np.float32)])[0][0]
    return StepFunction(source, float(cut), np.array([ends[0], at, ends[1]], np.float32))


def _interval(name: str, graph: Graph, producers: dict[str, Node]) -> tuple[float, float]:
    """Return bounds of a tensor's values, from clips and the like above it."""
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
            bounds = [_scalar(graph, i) if i else None for i in [*node.inputs[1:], "", ""][:2]]
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
    """Skip operators that keep the sign of every value: hardtanh before a sign, for one."""
    while (node := producers.get(name)) is not None:
        clip = node.op == "Clip" and _straddles_zero(node, graph)
        if not clip and node.op not in _SIGN_PRESERVING:
            break
        name = node.inputs[0]
    return name


def _straddles_zero(node: Node, graph: Graph) -> bool:
    names = [*node.inputs[1:], "", ""][:2]
    bounds = [graph.constants.get(i) if i else None for i in names]
    if any(i and b is None for i, b in zip(names, bounds, strict=True)):
        return False
    low, high = bounds
    return (low is None or float(low.reshape(-1)[0]) < 0) and (
        high is None or float(high.reshape(-1)[0]) > 0
    )
