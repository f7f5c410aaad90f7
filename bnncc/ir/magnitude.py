"""Bound the rounding error of each value: ``sum|terms|`` in the tie rule of docs/semantics.md.

Each tensor is accompanied by a magnitude. It is 0 for exact values (inputs, constants, decisions,
sums and products of small integers), and otherwise a conservative sum of the absolute values of all
terms that were rounded to compute it. Correct implementations differ by a few ``eps`` times that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from bnncc.ir import numeric
from bnncc.ir.dims import channel_shape
from bnncc.ir.evaluate import evaluate_node
from bnncc.ir.graph import Graph, Node
from bnncc.ir.halves import COARSE, KINDS, NARROW, ROUND, is_float, spacing
from bnncc.ir.moves import MOVES, PIXEL_SHUFFLES, REPEATS
from bnncc.ir.quantizers import LEVELS, MULTI_THRESHOLD, QUANT, QUANTIZED_CONV

Array = np.ndarray[Any, Any]

EXACT_BELOW = 2.0**24
"""Integers below this are exact in float32."""

PRODUCTS = frozenset(("Conv", "ConvTranspose", "Gemm", "MatMul"))
"""Operators that sum products of two operands."""

DECISIONS = frozenset((
    "Sign", "Round", "Floor", "Ceil", "Greater", "GreaterOrEqual", "Less", "LessOrEqual",
    "Equal", "Not", "And", "Or", "Xor", "ArgMax", "ArgMin", "QuantizeLinear", "IsNaN", "IsInf",
    "Shape", "Size", QUANT, MULTI_THRESHOLD, LEVELS,
))  # fmt: skip
"""Operators with exact results, except at a tie."""

JUMPS = frozenset(("Shrink", "ThresholdedRelu", "Mod"))
"""Operators that propagate the error of their data, and also have discontinuities."""

_MOVES = MOVES | REPEATS | PIXEL_SHUFFLES | {
    "Concat", "MaxPool", "GlobalMaxPool", "Dropout", "Neg", "Abs", "Relu",
}  # fmt: skip
SUMS = PRODUCTS | {"AveragePool", "GlobalAveragePool", "ReduceMean", "ReduceSum"}
"""Operators whose results are sums."""


_ROUNDING = 8 * float(np.finfo(np.float32).eps)
NORMAL = float(np.finfo(np.float32).smallest_normal)
"""Smallest number that no processor flushes to 0; smaller results may be off by this much."""


def magnitudes(graph: Graph, feeds: Mapping[str, Array]) -> dict[str, tuple[Array, Array]]:
    """Evaluate `graph` together with the magnitudes of its tensors.

    Parameters
    ----------
    graph : Graph
        In canonical form.
    feeds : mapping of str to ndarray
        Its inputs, assumed exact.

    Returns
    -------
    dict of str to pair of ndarray
        For each output of the graph: the value, and the magnitude in the same shape.
    """
    values: dict[str, Array] = {**graph.constants, **{k: np.asarray(v) for k, v in feeds.items()}}
    sizes: dict[str, Array] = {}
    for _ in walked(graph, values, sizes):
        pass
    return {
        name: (values[name], np.broadcast_to(sizes.get(name, ZERO), values[name].shape))
        for name in graph.outputs
    }


def walked(
    graph: Graph, values: dict[str, Array], sizes: dict[str, Array]
) -> Iterator[tuple[Node, list[Array | None], list[Array], list[Array]]]:
    """Evaluate a graph and the magnitudes of its tensors, node by node.

    Parameters
    ----------
    graph : Graph
        In canonical form.
    values, sizes : dict of str to ndarray
        Known values, and magnitudes of those that are rounded; results are added.

    Yields
    ------
    tuple
        Each node after it is evaluated, with its inputs, their magnitudes, and its outputs.
    """
    for node in graph.nodes:
        ins = [values[name] if name else None for name in node.inputs]
        errs = [sizes.get(name, ZERO) for name in node.inputs]
        outs = evaluate_node(node, ins, graph.types)
        for k, (name, out) in enumerate(zip(node.outputs, outs, strict=False)):
            if name:
                values[name] = out
                sizes[name] = magnitude(node, ins, errs, out, k)
        yield node, ins, errs, outs


ZERO = np.zeros(())
"""Magnitude of an exact value."""


def magnitude(
    node: Node, ins: list[Array | None], errs: list[Array], out: Array, index: int
) -> Array:
    """Return the magnitude of one output of a node.

    Parameters
    ----------
    node : Node
        In canonical form.
    ins, errs : list of ndarray
        Its inputs, and their magnitudes.
    out : ndarray
        The output.
    index : int
        Index of the output.

    Returns
    -------
    ndarray
        Broadcasts to the shape of `out`.
    """
    if not is_float(out) or node.op in DECISIONS:
        return ZERO
    rule = _RULES.get(node.op)
    if rule is not None:
        size = rule(node, ins, errs, out)
        return np.where(size > 0, np.maximum(size, NORMAL), size) if np.any(size) else size
    if node.op in _MOVES or node.op in ("Pad", "Cast"):
        return _moved(node, ins, errs, out, index)
    if node.op in SUMS:
        return _summed(node, ins, errs, out)
    return _anything(ins, errs, out)


def coarseness(graph: Graph, computed: bool = True) -> dict[str, float]:
    """Return tolerances of tensors that depend on half precision, relative to the largest value.

    Parameters
    ----------
    graph : Graph
        In canonical form.
    computed : bool
        Whether to include roundings performed by generated code (`NARROW`). Their results may be
        off by as much, although each is correct for its own data.

    Returns
    -------
    dict of str to float
        For tensors that depend on rounded ones without a decision in between: eight roundings.
    """
    table: dict[str, float] = {}
    for node in graph.nodes:
        slack = max((table.get(i, 0.0) for i in node.inputs), default=0.0)
        if node.op == ROUND or (computed and node.op == NARROW):
            slack = max(slack, COARSE[str(node.attrs["to"])])
        if slack and node.op not in DECISIONS:
            floats = [o for o in node.outputs if o and "float" in graph.types[o].dtype]
            table.update(dict.fromkeys(floats, slack))
    return table


def _moved(node: Node, ins: list[Array | None], errs: list[Array], out: Array, index: int) -> Array:
    if node.op == "Cast":
        return _narrowed(ins[0], errs[0], out, out.dtype.name)
    if not any(e.any() for e in errs):
        return ZERO
    data = len(ins) if node.op == "Concat" else 1
    moved: list[Array | None] = list(ins)
    for k in range(data):
        value = ins[k]
        if value is not None:
            moved[k] = np.broadcast_to(errs[k], value.shape).astype(np.float32)
    if node.op == "Pad" and len(moved) > 2:
        moved[2] = np.zeros((), np.float32)
    if node.op == "Neg":
        return errs[0]
    return evaluate_node(node, moved)[index].astype(np.float64)


def _summed(node: Node, ins: list[Array | None], errs: list[Array], out: Array) -> Array:
    present = [v for v in ins[:2] if v is not None]
    both = node.op in PRODUCTS and len(ins) > 1 and bool(errs[1].any())
    size: list[Array | None] = []
    for k, (value, err) in enumerate(zip(ins, errs, strict=True)):
        if value is None or value.dtype.kind != "f":
            size.append(value)
        else:
            with np.errstate(over="ignore"):
                size.append((np.abs(value) + (0 if both and k == 1 else err)).astype(np.float32))
    attrs = {k: abs(v) if k in ("alpha", "beta") else v for k, v in node.attrs.items()}
    if node.op in PRODUCTS:
        attrs[numeric.FLOAT_SUM] = "float32"
    twin = Node(node.op, node.inputs, node.outputs, attrs, node.name)
    total = evaluate_node(twin, size)[0].astype(np.float64)
    if both and ins[0] is not None and ins[1] is not None:
        shaken = np.broadcast_to(errs[1], ins[1].shape).astype(np.float32)
        data = (np.abs(ins[0]) + _ROUNDING * errs[0]).astype(np.float32)
        total = total + evaluate_node(twin, [data, shaken])[0]
    exact = not any(e.any() for e in errs) and float(total.max(initial=0.0)) < EXACT_BELOW
    whole = node.op in PRODUCTS or node.op == "ReduceSum"
    if exact and whole and all(map(_integers, present)) and _integers(out):
        return ZERO
    return total


def _added(node: Node, ins: list[Array | None], errs: list[Array], out: Array) -> Array:
    values = [v for v in ins if v is not None]
    err = sum(errs, ZERO)
    if all(map(_integers, values)) and float(np.abs(out).max(initial=0.0)) < EXACT_BELOW:
        return err
    if sum(bool(v.any()) for v in values) <= 1:
        return err
    return err + sum((np.abs(v).astype(np.float64) for v in values), ZERO)


def _multiplied(node: Node, ins: list[Array | None], errs: list[Array], out: Array) -> Array:
    a, b = (np.abs(np.asarray(v)).astype(np.float64) for v in ins)
    if node.op == "Div":
        with np.errstate(all="ignore"):
            b = np.where(b > 0, 1 / b, 0.0)
            part = np.minimum(_times(_ROUNDING * errs[1], b), 0.5)  # of the divisor
            errs = [errs[0], _times(errs[1], b * b) / (1 - part)]
    # If a factor is 0 up to rounding, its square is 0 up to the square of that.
    err = _times(errs[0], b) + _times(a, errs[1]) + _ROUNDING * _times(errs[0], errs[1])
    if powers_of_two(b) or (node.op == "Mul" and powers_of_two(a)):
        return err
    if node.op == "Mul" and _integers(a) and _integers(b) and float(out.max(initial=0)) < 2**24:
        return err
    return err + np.maximum(np.abs(out), a * b)  # the result may have underflowed to 0


def _times(a: Array, b: Array) -> Array:
    """Multiply sizes; 0 times what has no bound is 0, because values are finite."""
    with np.errstate(all="ignore"):
        return np.where((a == 0) | (b == 0), 0.0, a * b)


def _inverted(node: Node, ins: list[Array | None], errs: list[Array], out: Array) -> Array:
    return _multiplied(replace(node, op="Div"), [np.ones(1), ins[0]], [ZERO, errs[0]], out)


def _curved(node: Node, ins: list[Array | None], errs: list[Array], out: Array) -> Array:
    """Bound a function of non-negative numbers that is monotone: move its data either way."""
    x, power = np.abs(np.asarray(ins[0], np.float64)), 1.0
    if node.op == "Pow":
        exponent = np.asarray(ins[1])
        if exponent.size != 1 or errs[1].any():
            return _anything(ins, errs, out)
        power = float(exponent.reshape(()))
    step = _ROUNDING * errs[0]
    points = [x, np.maximum(x - step, 0), x + step]
    with np.errstate(all="ignore"):
        if node.op == "Pow":
            here, *ends = (point**power for point in points)
        else:
            here, *ends = map(np.sqrt if node.op == "Sqrt" else np.log, points)
        moved = np.maximum(*(np.abs(end - here) for end in ends))
    return np.where(np.isnan(moved), np.inf, moved) / _ROUNDING + np.abs(out)


def _exponential(node: Node, ins: list[Array | None], errs: list[Array], out: Array) -> Array:
    with np.errstate(over="ignore"):
        return _times(np.abs(out), np.expm1(_ROUNDING * errs[0]) / _ROUNDING + 1)


def _softmax(node: Node, ins: list[Array | None], errs: list[Array], out: Array) -> Array:
    """Bound each exponential, the largest data being subtracted first, and their sum."""
    x, axis = np.asarray(ins[0], np.float64), int(node.attrs.get("axis", -1))
    shaken = errs[0] + np.broadcast_to(errs[0], x.shape).max(axis, keepdims=True)
    with np.errstate(all="ignore"):
        below = np.where(out > 0, x.max(axis, keepdims=True) - x, 0.0)
        factor = np.expm1(_ROUNDING * (shaken + below)) / _ROUNDING + 1
        return _times(np.abs(out), factor + _times(np.abs(out), factor).sum(axis, keepdims=True))


def _gentle(node: Node, ins: list[Array | None], errs: list[Array], out: Array) -> Array:
    """Bound a function of limited slope; the range of the bent ones is about 1."""
    return _SLOPES[node.op] * errs[0] + np.maximum(np.abs(out), 1.0)


def _greatest(node: Node, ins: list[Array | None], errs: list[Array], out: Array) -> Array:
    x = np.asarray(ins[0])
    most = Node("ReduceMax", node.inputs, node.outputs, node.attrs, node.name)
    shaken = np.broadcast_to(errs[0], x.shape).astype(np.float64)
    return evaluate_node(most, [shaken, *ins[1:]])[0] if errs[0].any() else ZERO


_SLOPES = {"Sigmoid": 0.25, "Tanh": 1.0, "Erf": 1.2, "Sin": 1.0, "Cos": 1.0, "Softplus": 1.0}
"""Functions of limited slope, and an upper bound of it."""


def _normalized(node: Node, ins: list[Array | None], errs: list[Array], out: Array) -> Array:
    x, scale, bias, mean, var = (np.asarray(v) for v in ins[:5])
    size = (np.abs(x) + errs[0]).astype(np.float32)
    inputs = [size, np.abs(scale), np.abs(bias), -np.abs(mean), var]
    return evaluate_node(node, inputs)[0].astype(np.float64)


def _standardised(node: Node, ins: list[Array | None], errs: list[Array], out: Array) -> Array:
    """Bound a normalization in terms of its data: near-constant rows are divided by little."""
    x, scale, bias = (np.zeros(1) if v is None else v.astype(np.float64) for v in (*ins, None)[:3])
    axes = tuple(
        range(
            2 if node.op == "InstanceNormalization" else node.attrs.get("axis", -1) % x.ndim, x.ndim
        )
    )
    if node.op == "InstanceNormalization":
        scale, bias = (np.reshape(v, channel_shape(x.ndim)) for v in (scale, bias))
    size = np.abs(x) + errs[0]
    size = size + size.mean(axes, keepdims=True)
    apart = np.abs(x - x.mean(axes, keepdims=True))
    variance = x.var(axes, keepdims=True) + float(node.attrs.get("epsilon", 1e-5))
    stretched = (apart * size).mean(axes, keepdims=True) / variance + 1
    with np.errstate(all="ignore"):
        inner = (size + apart * stretched) / np.sqrt(variance)
    return np.asarray(np.abs(scale) * inner + np.abs(bias))


def _limited(node: Node, ins: list[Array | None], errs: list[Array], out: Array) -> Array:
    return sum(errs, ZERO)


def _rectified(node: Node, ins: list[Array | None], errs: list[Array], out: Array) -> Array:
    if not errs[0].any() and (np.asarray(ins[0]) >= 0).all():
        return ZERO
    slope = np.abs(np.asarray(ins[1])) if len(ins) > 1 else abs(node.attrs.get("alpha", 0.01))
    return errs[0] * np.maximum(1.0, slope) + np.abs(out).astype(np.float64)


def _rounded(node: Node, ins: list[Array | None], errs: list[Array], out: Array) -> Array:
    """Return the magnitude of a convolution whose data are exact."""
    bias = np.abs(node.attrs["bias"]).reshape(1, -1, 1, 1)
    if node.attrs["operands"] == "int8":  # exact sums
        return np.abs(out).astype(np.float64) + 2 * bias
    attrs = {**node.attrs, "bias": bias, "zero_points": ()}
    twin = Node(node.op, node.inputs, node.outputs, attrs, node.name)
    data, weight = (np.abs(np.asarray(v)) for v in ins[:2])
    return evaluate_node(twin, [data, weight])[0].astype(np.float64)


def _to_half(node: Node, ins: list[Array | None], errs: list[Array], out: Array) -> Array:
    return _narrowed(ins[0], errs[0], out, str(node.attrs["to"]))


def _to_half_alone(node: Node, ins: list[Array | None], errs: list[Array], out: Array) -> Array:
    """Return the magnitude of a rounding in generated code: 0 if its data are exact."""
    return np.where(errs[0] > 0, _to_half(node, ins, errs, out), 0.0)


def _narrowed(x: Array | None, err: Array, out: Array, kind: str) -> Array:
    """Return the magnitude after rounding `x` to half precision, which has fewer digits."""
    if kind not in KINDS:
        return err
    wide = out.astype(np.float64)
    changed = (err > 0) | (np.asarray(x, np.float64) != wide)
    digits = spacing(kind) / float(np.finfo(np.float32).eps)
    least = float(ml_dtypes.finfo(KINDS[kind]).smallest_normal)  # spacing is constant below
    return err + np.where(changed, digits * np.maximum(np.abs(wide), least), 0.0)


def _chosen(node: Node, ins: list[Array | None], errs: list[Array], out: Array) -> Array:
    return np.where(np.asarray(ins[0]), errs[1], errs[2])


def _anything(ins: list[Array | None], errs: list[Array], out: Array) -> Array:
    floats = [v for v in ins if v is not None and v.dtype.kind == "f"]
    top = sum(float(np.abs(v).max(initial=0.0)) for v in [*floats, out])
    top += sum(float(e.max(initial=0.0)) for e in errs)
    return np.full(out.shape, top)


_RULES: dict[str, Callable[[Node, list[Array | None], list[Array], Array], Array]] = {
    "Add": _added,
    "Sub": _added,
    "Sum": _added,
    "Mul": _multiplied,
    "Div": _multiplied,
    "Reciprocal": _inverted,
    "Pow": _curved,
    "Sqrt": _curved,
    "Log": _curved,
    "Exp": _exponential,
    "Softmax": _softmax,
    **dict.fromkeys(_SLOPES, _gentle),
    "ReduceMax": _greatest,
    "ReduceMin": _greatest,
    "BatchNormalization": _normalized,
    "Clip": _limited,
    "Max": _limited,
    "Min": _limited,
    "InstanceNormalization": _standardised,
    "LayerNormalization": _standardised,
    "PRelu": _rectified,
    "Shrink": _limited,
    "ThresholdedRelu": _limited,
    "LeakyRelu": _rectified,
    "Where": _chosen,
    QUANTIZED_CONV: _rounded,
    ROUND: _to_half,
    NARROW: _to_half_alone,
}


def _integers(values: Array) -> bool:
    return values.dtype.kind in "iub" or bool((np.rint(values) == values).all())


def powers_of_two(values: Array) -> bool:
    """Whether all values are powers of two, or 0."""
    mantissa = np.frexp(values)[0]
    return bool(((np.abs(mantissa) == 0.5) | (values == 0)).all())
