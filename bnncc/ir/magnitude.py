"""Bound the rounding behind each value: the ``sum|terms|`` of the tie rule in docs/semantics.md.

Beside each tensor runs a magnitude: 0 where a value is exact (inputs, constants, decisions, sums
and products of small integers), else a conservative sum of the absolute values of the terms that
were rounded on the way to it. Two correct implementations differ by a few ``eps`` times that.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bnncc.ir import numeric
from bnncc.ir.evaluate import evaluate_node
from bnncc.ir.graph import Graph, Node
from bnncc.ir.quantized import QUANTIZED_CONV
from bnncc.ir.quantizers import LEVELS, MULTI_THRESHOLD, QUANT

Array = np.ndarray[Any, Any]

_EXACT_BELOW = 2.0**24
_PRODUCTS = frozenset(("Conv", "ConvTranspose", "Gemm", "MatMul"))
_DECISIONS = frozenset((
    "Sign", "Round", "Floor", "Ceil", "Greater", "GreaterOrEqual", "Less", "LessOrEqual",
    "Equal", "Not", "And", "Or", "Xor", "ArgMax", "ArgMin", "QuantizeLinear", "IsNaN", "IsInf",
    "Shape", "Size", QUANT, MULTI_THRESHOLD, LEVELS,
))  # fmt: skip
_MOVES = frozenset((
    "Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Slice", "Gather", "Concat",
    "Split", "Expand", "Tile", "Identity", "DepthToSpace", "SpaceToDepth", "MaxPool",
    "GlobalMaxPool", "Dropout", "Neg", "Abs", "Relu",
))  # fmt: skip
_SUMS = frozenset((
    "Conv", "ConvTranspose", "Gemm", "MatMul", "AveragePool", "GlobalAveragePool", "ReduceMean",
    "ReduceSum",
))  # fmt: skip


def magnitudes(graph: Graph, feeds: Mapping[str, Array]) -> dict[str, tuple[Array, Array]]:
    """Evaluate `graph` and the magnitudes of its tensors.

    Parameters
    ----------
    graph : Graph
        In normal form.
    feeds : mapping of str to ndarray
        Its inputs, taken to be exact.

    Returns
    -------
    dict of str to pair of ndarray
        For each output of the graph: value, and magnitude in the same shape.
    """
    values: dict[str, Array] = {**graph.constants, **{k: np.asarray(v) for k, v in feeds.items()}}
    sizes: dict[str, Array] = {}
    for node in graph.nodes:
        ins = [values[name] if name else None for name in node.inputs]
        errs = [sizes.get(name, _ZERO) for name in node.inputs]
        outs = evaluate_node(node, ins, graph.types)
        for k, (name, out) in enumerate(zip(node.outputs, outs, strict=False)):
            if name:
                values[name] = out
                sizes[name] = _magnitude(node, ins, errs, out, k)
    return {
        name: (values[name], np.broadcast_to(sizes.get(name, _ZERO), values[name].shape))
        for name in graph.outputs
    }


_ZERO = np.zeros(())


def _magnitude(
    node: Node, ins: list[Array | None], errs: list[Array], out: Array, index: int
) -> Array:
    if out.dtype.kind != "f" or node.op in _DECISIONS:
        return _ZERO
    rule = _RULES.get(node.op)
    if rule is not None:
        return rule(node, ins, errs, out)
    if node.op in _MOVES or node.op in ("Pad", "Cast"):
        return _moved(node, ins, errs, out, index)
    if node.op in _SUMS:
        return _summed(node, ins, errs, out)
    return _anything(ins, errs, out)


def _moved(node: Node, ins: list[Array | None], errs: list[Array], out: Array, index: int) -> Array:
    if node.op == "Cast" and out.dtype != np.float16:
        return errs[0]
    if not any(e.any() for e in errs):
        return _ZERO
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
    magnitude: list[Array | None] = []
    for value, err in zip(ins, errs, strict=True):
        if value is None or value.dtype.kind != "f":
            magnitude.append(value)
        else:
            magnitude.append((np.abs(value) + err).astype(np.float32))
    attrs = {k: abs(v) if k in ("alpha", "beta") else v for k, v in node.attrs.items()}
    twin = Node(node.op, node.inputs, node.outputs, attrs, node.name)
    total = evaluate_node(twin, magnitude)[0].astype(np.float64)
    exact = not any(e.any() for e in errs) and float(total.max(initial=0.0)) < _EXACT_BELOW
    whole = node.op in _PRODUCTS or node.op == "ReduceSum"
    if exact and whole and all(map(_integers, present)) and _integers(out):
        return _ZERO
    return total


def _of_integers(
    node: Node, ins: list[Array | None], errs: list[Array], out: Array, dyadic: bool
) -> Array | None:
    """Return the magnitude of a product of small multiples of scales; None if it is none.

    Its accumulator is an exact integer: where that is 0, the result is the bias, or exactly 0.
    """
    if node.op in ("Add", "Sub", "Sum") and dyadic:
        values = [v for v in ins if v is not None]
        return sum(errs, _ZERO) if all(map(are_dyadic, (*values, out))) else None
    if node.op not in _PRODUCTS or any(e.any() for e in errs):
        return None
    data, weight = ins[:2]
    assert data is not None
    assert weight is not None
    if weight.ndim < 2:
        return None
    axis: int | None = weight.ndim - 1
    if node.op == "Conv" or node.attrs.get("transB"):
        axis = 0
    if node.op == "ConvTranspose" or (node.op == "MatMul" and weight.ndim != 2):
        axis = None
    parts = [numeric.multiples(weight, axis), numeric.multiples(data)]
    if any(part is None for part in parts):
        return None
    bias = np.zeros(1) if len(ins) < 3 or ins[2] is None else np.asarray(ins[2])
    if node.op in ("Conv", "ConvTranspose"):
        bias = bias.reshape((1, -1) + (1,) * (out.ndim - 2))
    exact = all(part is not None and _powers_of_two(part[1]) for part in parts)
    if dyadic and exact and are_dyadic(bias) and are_dyadic(out):
        return _ZERO
    bias = np.abs(bias.astype(np.float64)) * (2 + abs(float(node.attrs.get("beta", 1.0))))
    return np.abs(out) + np.broadcast_to(bias, out.shape)


def _added(node: Node, ins: list[Array | None], errs: list[Array], out: Array) -> Array:
    values = [v for v in ins if v is not None]
    err = sum(errs, _ZERO)
    if all(map(_integers, values)) and float(np.abs(out).max(initial=0.0)) < _EXACT_BELOW:
        return err
    if sum(bool(v.any()) for v in values) <= 1:
        return err
    return err + sum((np.abs(v).astype(np.float64) for v in values), _ZERO)


def _multiplied(node: Node, ins: list[Array | None], errs: list[Array], out: Array) -> Array:
    a, b = (np.abs(np.asarray(v)).astype(np.float64) for v in ins)
    if node.op == "Div":
        with np.errstate(all="ignore"):
            b = np.where(b > 0, 1 / b, 0.0)
            errs = [errs[0], errs[1] * b * b]
    err = errs[0] * b + a * errs[1]
    if _powers_of_two(b) or (node.op == "Mul" and _powers_of_two(a)):
        return err
    if node.op == "Mul" and _integers(a) and _integers(b) and float(out.max(initial=0)) < 2**24:
        return err
    return err + np.abs(out).astype(np.float64)


def _normalised(node: Node, ins: list[Array | None], errs: list[Array], out: Array) -> Array:
    x, scale, bias, mean, var = (np.asarray(v) for v in ins[:5])
    size = (np.abs(x) + errs[0]).astype(np.float32)
    inputs = [size, np.abs(scale), np.abs(bias), -np.abs(mean), var]
    return evaluate_node(node, inputs)[0].astype(np.float64)


def _limited(node: Node, ins: list[Array | None], errs: list[Array], out: Array) -> Array:
    return sum(errs, _ZERO)


def _rectified(node: Node, ins: list[Array | None], errs: list[Array], out: Array) -> Array:
    if not errs[0].any() and (np.asarray(ins[0]) >= 0).all():
        return _ZERO
    slope = np.abs(np.asarray(ins[1])) if len(ins) > 1 else abs(node.attrs.get("alpha", 0.01))
    return errs[0] * np.maximum(1.0, slope) + np.abs(out).astype(np.float64)


def _rounded(node: Node, ins: list[Array | None], errs: list[Array], out: Array) -> Array:
    """Return the magnitude of a convolution whose data are exact."""
    bias = np.abs(node.attrs["bias"]).reshape(1, -1, 1, 1)
    if node.attrs["operands"] == "int8":  # sums are exact
        return np.abs(out).astype(np.float64) + 2 * bias
    attrs = {**node.attrs, "bias": bias, "zero_points": ()}
    twin = Node(node.op, node.inputs, node.outputs, attrs, node.name)
    data, weight = (np.abs(np.asarray(v)) for v in ins[:2])
    return evaluate_node(twin, [data, weight])[0].astype(np.float64)


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
    "BatchNormalization": _normalised,
    "Clip": _limited,
    "Max": _limited,
    "Min": _limited,
    "PRelu": _rectified,
    "LeakyRelu": _rectified,
    "Where": _chosen,
    QUANTIZED_CONV: _rounded,
}


def _integers(values: Array) -> bool:
    return values.dtype.kind in "iub" or bool((np.rint(values) == values).all())


def are_dyadic(values: Array) -> bool:
    """Whether float32 sums of such values are exact: multiples of 1/1024, not too large."""
    scaled = values.astype(np.float64) * 1024
    small = np.abs(scaled).max(initial=0.0) < _EXACT_BELOW
    return bool(small) and bool((np.rint(scaled) == scaled).all())


def _powers_of_two(values: Array) -> bool:
    mantissa = np.frexp(values)[0]
    return bool(((np.abs(mantissa) == 0.5) | (values == 0)).all())


@dataclass(frozen=True)
class Spread:
    """What rounding may make of a tensor.

    Attributes
    ----------
    value : ndarray
        What the graph computes.
    low, high : ndarray
        The least and the most that another order of rounding could give.
    """

    value: Array
    low: Array
    high: Array


def spread(
    graph: Graph,
    known: Mapping[str, Array],
    name: str,
    *,
    near: float,
    whole: bool = False,
    dyadic: bool = False,
    relaxed: bool = False,
) -> Spread:
    """Compute one tensor from others, and how far rounding may take it, ties included.

    A decision within `near` times its magnitude of its threshold may fall either way; what follows
    is evaluated both ways.

    Parameters
    ----------
    graph : Graph
        In normal form.
    known : mapping of str to ndarray
        Tensors taken to be exact: all inputs, and any others that need not be computed.
    name : str
        The tensor asked for, computed even if it is known.
    near : float
        How near, in units of the magnitude.
    whole : bool
        Whether products of small multiples of scales are sums of integers: where such a sum is 0,
        nothing was rounded.
    dyadic : bool
        Whether also other sums are exact, where all numbers are multiples of a power of two: not so
        if data only happen to be that, and are computed as multiples of something else.
    relaxed : bool
        Whether decisions on exact zeros may fall either way, too.

    Returns
    -------
    Spread
    """
    values: dict[str, Array] = {**graph.constants, **known}
    sizes: dict[str, Array] = {}
    ends: dict[str, tuple[Array, Array]] = {}
    for node in _between(graph, known, name):
        ins = [values[i] if i else None for i in node.inputs]
        errs = [sizes.get(i, _ZERO) for i in node.inputs]
        outs = evaluate_node(node, ins, graph.types)
        around = _around(node, ins, errs, ends, near, relaxed)
        others = _outcomes(node, ins, around, outs)
        for k, (made, out) in enumerate(zip(node.outputs, outs, strict=False)):
            if not made or (made in known and made != name):
                continue
            values[made] = out
            size = _of_integers(node, ins, errs, out, dyadic) if whole else None
            sizes[made] = _magnitude(node, ins, errs, out, k) if size is None else size
            if others:
                with np.errstate(all="ignore"):
                    low = np.minimum.reduce([out, *(o[k] for o in others)])
                    high = np.maximum.reduce([out, *(o[k] for o in others)])
                ends[made] = low, high
    out, room = values[name], near * sizes.get(name, _ZERO)
    low, high = ends.get(name, (out, out))
    return Spread(out, low - room, high + room) if np.any(room) else Spread(out, low, high)


def _between(graph: Graph, known: Mapping[str, Array], name: str) -> list[Node]:
    """Return the nodes that compute `name` from `known`, in order."""
    wanted, nodes = {name}, []
    for node in reversed(graph.nodes):
        if wanted.intersection(node.outputs):
            nodes.append(node)
            wanted.update(i for i in node.inputs if i and i not in known)
    return nodes[::-1]


def _around(
    node: Node, ins: list[Array | None], errs: list[Array], ends: Mapping[str, tuple[Array, Array]],
    near: float, relaxed: bool,
) -> dict[int, tuple[Array, Array]]:  # fmt: skip
    """Return by number of an input the least and the most it may be, where that matters."""
    out: dict[int, tuple[Array, Array]] = {}
    for k, (name, value, err) in enumerate(zip(node.inputs, ins, errs, strict=True)):
        if value is None:
            continue
        low, high = ends.get(name, (value, value))
        if node.op in _DECISIONS and value.dtype.kind == "f":
            room = near * err
            if relaxed:
                room = np.where(value == 0, np.maximum(room, _LEAST), room)
            if np.any(room):
                low = (low - room).astype(value.dtype)
                high = (high + room).astype(value.dtype)
        if low is not high:
            out[k] = low, high
    return out


def _outcomes(
    node: Node, ins: list[Array | None], around: Mapping[int, tuple[Array, Array]],
    outs: list[Array],
) -> list[list[Array]]:  # fmt: skip
    """Return what a node gives for inputs as far off as they may be."""
    if not around:
        return []
    if node.op in _SUMS:
        far: list[Array | None] = [
            None if v is None else np.abs(v) if v.dtype.kind == "f" else v for v in ins
        ]
        data = ins[0]
        assert data is not None
        low, high = around.get(0, (data, data))
        far[0] = np.maximum(high - data, data - low).astype(data.dtype)
        if len(far) > 2 and node.op in ("Conv", "Gemm", "ConvTranspose"):
            far[2] = None
        room = evaluate_node(Node(node.op, node.inputs, node.outputs, node.attrs, node.name), far)
        return [[outs[0] - room[0]], [outs[0] + room[0]]]
    made = []
    for choice in itertools.product((0, 1), repeat=min(len(around), _MOST_LOOSE)):
        given = list(ins)
        for place, (k, pair) in enumerate(around.items()):
            given[k] = pair[choice[min(place, len(choice) - 1)]]
        made.append(evaluate_node(node, given))
    return made


_MOST_LOOSE = 3
"""Inputs that are looked at in all combinations; the others go with the last of these."""

_LEAST = float(np.finfo(np.float32).tiny)
