"""Bounds of a tensor computed from given ones, under any allowed rounding, including ties."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bnncc.ir import numeric
from bnncc.ir.dims import channel_shape
from bnncc.ir.evaluate import evaluate_node
from bnncc.ir.graph import Graph, Node
from bnncc.ir.halves import is_float
from bnncc.ir.magnitude import (
    DECISIONS,
    EXACT_BELOW,
    JUMPS,
    NORMAL,
    PRODUCTS,
    SUMS,
    ZERO,
    magnitude,
    powers_of_two,
)
from bnncc.ir.moves import PERMUTATIONS

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Spread:
    """A tensor with the bounds that rounding allows."""

    value: Array
    """Value computed by the graph."""
    low: Array
    high: Array
    """`low`, `high`: bounds of the results of all allowed roundings."""


def spread(
    graph: Graph,
    known: Mapping[str, Array],
    name: str,
    *,
    near: float,
    whole: float | None = None,
    dyadic: bool = False,
    relaxed: bool = False,
) -> Spread:
    """Compute a tensor from others, with bounds for all allowed roundings, including ties.

    A decision whose input is within `near` times its magnitude of the threshold may go either way;
    then the following nodes are evaluated for both results.

    Parameters
    ----------
    graph : Graph
        In canonical form.
    known : mapping of str to ndarray
        Tensors assumed exact: all inputs, and any others that need not be computed.
    name : str
        The tensor to compute, even if it is in `known`.
    near : float
        Width of a tie, in units of the magnitude.
    whole : float, optional
        If given, products of small multiples of scales are integer sums, which are exact until a
        constant is added after scaling; the value is the bound of the data's multiples. Otherwise
        operands may merely be close to such multiples, and float sums are correct as well.
    dyadic : bool
        Whether other operators are exact too if all numbers are multiples of a power of two. Not
        valid if data happen to be such multiples, but are computed as multiples of something else.
    relaxed : bool
        Whether decisions on exact zeros may also go either way.
    """
    values: dict[str, Array] = {**graph.constants, **known}
    sizes: dict[str, Array] = {}
    owed: dict[str, Array] = {}
    between: dict[str, Array] = {}
    ends: dict[str, tuple[Array, Array]] = {}
    for node in _between(graph, known, name):
        ins = [values[i] if i else None for i in node.inputs]
        errs = [sizes.get(i, ZERO) for i in node.inputs]
        outs = evaluate_node(node, ins, graph.types)
        around = _around(node, ins, errs, outs, ends, near, relaxed)
        others = _outcomes(node, ins, around, outs)
        if whole is None and node.op in PRODUCTS:
            twin = replace(node, attrs={**node.attrs, numeric.FLOAT_SUM: "float64"})
            floats = evaluate_node(twin, ins, graph.types)
            if not np.array_equal(floats[0], outs[0]):
                others.append(floats)
        for k, (made, out) in enumerate(zip(node.outputs, outs, strict=False)):
            if not made or (made in known and made != name):
                continue
            values[made] = out
            sizes[made] = _size(node, ins, errs, out, k, whole, dyadic, owed, between)
            if others:
                with np.errstate(all="ignore"):
                    low = np.minimum.reduce([out, *(o[k] for o in others)])
                    high = np.maximum.reduce([out, *(o[k] for o in others)])
                ends[made] = low, high
    out, room = values[name], near * sizes.get(name, ZERO)
    low, high = ends.get(name, (out, out))
    if not np.any(room):
        return Spread(out, low, high)
    with np.errstate(invalid="ignore"):  # infinities have no bounds
        return Spread(out, low - room, high + room)


def _between(graph: Graph, known: Mapping[str, Array], name: str) -> list[Node]:
    """Return the nodes that compute `name` from `known`, in topological order."""
    wanted, nodes = {name}, []
    for node in reversed(graph.nodes):
        if wanted.intersection(node.outputs):
            nodes.append(node)
            wanted.update(i for i in node.inputs if i and i not in known)
    return nodes[::-1]


def _around(
    node: Node, ins: list[Array | None], errs: list[Array], outs: list[Array],
    ends: Mapping[str, tuple[Array, Array]], near: float, relaxed: bool,
) -> dict[int, tuple[Array, Array]]:  # fmt: skip
    """Return bounds of the inputs whose uncertainty matters, by input index."""
    out: dict[int, tuple[Array, Array]] = {}
    decides = node.op in DECISIONS | JUMPS or not is_float(outs[0])
    for k, (name, value, err) in enumerate(zip(node.inputs, ins, errs, strict=True)):
        if value is None:
            continue
        low, high = ends.get(name, (value, value))
        if decides and value.dtype.kind == "f":
            room = near * err
            if relaxed:
                room = np.where(value == 0, np.maximum(room, NORMAL), room)
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
    """Return the outputs of a node for the extreme values of its inputs."""
    if not around:
        return []
    if node.op in SUMS:
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
"""Number of inputs whose bounds are combined in all ways; others vary with the last of these."""


def _size(
    node: Node, ins: list[Array | None], errs: list[Array], out: Array, index: int,
    whole: float | None, dyadic: bool, owed: dict[str, Array], between: dict[str, Array],
) -> Array:  # fmt: skip
    """Return the magnitude of a result of kernels with integer accumulators.

    Parameters
    ----------
    node, ins, errs, out, index
        As for `magnitude`.
    whole, dyadic
        As for `spread`.
    owed : dict of str to ndarray
        By tensor that is an integer product followed only by operators with constants: the terms
        of that product, which count when a constant is added. That constant is merged with the one
        that separates the accumulator from the product (K in ``K - 2 * acc``, or the levels'
        offset from multiples of their step).
    between : dict of str to ndarray
        By tensor that is padded with a value that is not a multiple of its unit: a mask of the
        padding. There a product is an integer plus a constant, which is rounded.
    """
    size, terms = None, None
    if node.op == "Pad" and whole is not None and (mark := _pad_between(ins, out)) is not None:
        between[node.outputs[index]] = mark
    held = [k for k, name in enumerate(node.inputs) if name in owed]
    if whole is not None and node.op in PRODUCTS:
        found = _of_integers(node, ins, errs, out, whole, dyadic)
        if found is not None:
            size, terms = found
            mark = between.get(node.inputs[0])
            if mark is not None:
                meets = _far(node, mark, [mark, ins[1]]) > 0  # ignoring the bias
                size = np.where(meets, np.maximum(size, _far(node, ins[0], ins)), size)
        elif not any(e.any() for e in errs):
            size, terms = _of_two_values(node, ins, whole)
    elif held and _is_affine(node, ins, held[0]):
        scale, offset = _affine(node, ins, out, held[0])
        rounded = owed[node.inputs[held[0]]]
        terms = rounded * np.abs(scale)
        errs = list(errs)
        joined = np.where(offset != 0, rounded + np.abs(offset), 0.0)  # merged to one constant
        errs[held[0]] = errs[held[0]] + joined
    elif held == [0] and node.op in PERMUTATIONS | {"Slice", "Split"}:
        data = ins[0]
        assert data is not None
        terms = evaluate_node(node, [np.broadcast_to(owed[node.inputs[0]], data.shape), *ins[1:]])[
            index
        ]
    if terms is not None:
        owed[node.outputs[index]] = terms
    if size is None:
        size = magnitude(node, ins, errs, out, index)
    if dyadic and node.op in _EXACT and np.any(size):
        size = np.where(_all_dyadic(node, ins, errs, out), 0.0, size)
    return size


_EXACT = frozenset(("Add", "Sub", "Sum", "Mul", "BatchNormalization", "PRelu", "LeakyRelu"))
"""Operators with exact results, in any order of evaluation, if all operands are dyadic."""


def _is_affine(node: Node, ins: list[Array | None], data: int) -> bool:
    """Whether an input is only scaled and shifted, by scalars or per index of one axis."""
    if node.op in ("Neg", "BatchNormalization"):
        return data == 0
    other = ins[1 - data] if len(ins) == 2 else None
    if node.op not in ("Add", "Sub", "Mul", "Div") or other is None or (node.op == "Div" and data):
        return False
    return sum(extent > 1 for extent in other.shape) <= 1


def _affine(node: Node, ins: list[Array | None], out: Array, data: int) -> tuple[Array, Array]:
    """Return scale and offset of such a node, in float64; they broadcast to its result."""
    if node.op == "Neg":
        return -np.ones(()), ZERO
    if node.op == "BatchNormalization":
        column = channel_shape(out.ndim)
        gamma, beta, mean, var = (np.asarray(v, np.float64).reshape(column) for v in ins[1:5])
        scale = gamma / np.sqrt(var + float(np.float32(node.attrs.get("epsilon", 1e-5))))
        return scale, beta - mean * scale
    other = np.asarray(ins[1 - data], np.float64)
    if node.op in ("Add", "Sub"):
        return np.ones(()), other
    with np.errstate(all="ignore"):
        return other if node.op == "Mul" else 1 / other, ZERO


def _all_dyadic(node: Node, ins: list[Array | None], errs: list[Array], out: Array) -> Array:
    """Return a mask of the elements that depend on dyadic numbers only."""
    values = [np.asarray(v) for v in ins if v is not None]
    if node.op == "BatchNormalization":
        scale, offset = _affine(node, ins, out, 0)
        values = [values[0], scale, offset]
    elif node.op == "LeakyRelu":
        values.append(np.float64(node.attrs.get("alpha", 0.01)))
    exact = _dyadic(out)
    for value in values:
        exact = exact & _dyadic(value)
    for err in errs:
        exact = exact & (err == 0)
    return np.asarray(exact)


def _of_integers(
    node: Node, ins: list[Array | None], errs: list[Array], out: Array, whole: float, dyadic: bool
) -> tuple[Array, Array] | None:
    """Return magnitude and terms of a product of small multiples of scales, or None for others.

    Its accumulator is an exact integer: if that is 0, the result is the bias, or exactly 0. Data
    may have been rounded, as those of a straight-through estimator are (``t + (sign(t) - t)``): the
    kernel's are not, and its constants are merged as ever.
    """
    if any(e.any() for e in errs[1:]):
        return None
    data, weight = ins[:2]
    assert data is not None
    assert weight is not None
    if weight.ndim < 2:
        return None
    axis = _filters_axis(node, weight)
    parts = [numeric.multiples(weight, axis), numeric.multiples(data)]
    if any(part is None for part in parts):
        return None
    top = max(whole, float(np.abs(data).max(initial=0.0)))
    size = np.abs(weight.astype(np.float64)) * top
    column = channel_shape(out.ndim) if node.op == "Conv" else (1, -1)
    if axis is None:
        terms = size.sum(keepdims=True).reshape((1,) * out.ndim)
    else:
        terms = np.moveaxis(size, axis, 0).reshape(size.shape[axis], -1).sum(axis=1)
        terms = terms.reshape(column)
    terms = terms * abs(float(node.attrs.get("alpha", 1.0)))
    bias = np.zeros(1) if len(ins) < 3 or ins[2] is None else np.asarray(ins[2])
    if node.op in ("Conv", "ConvTranspose"):
        bias = bias.reshape(channel_shape(out.ndim))
    exact = all(part is not None and powers_of_two(part[1]) for part in parts)
    rounded = magnitude(node, ins, errs, out, 0) if errs[0].any() else ZERO
    if dyadic and exact and are_dyadic(bias) and are_dyadic(out):
        return rounded, terms
    bias = np.abs(bias.astype(np.float64)) * (2 + abs(float(node.attrs.get("beta", 1.0))))
    return rounded + np.abs(out) + bias + np.where(bias != 0, terms, 0.0), terms


def _pad_between(ins: list[Array | None], out: Array) -> Array | None:
    """Return a mask of padding with values that are not multiples of the data's unit, or None."""
    data, pads = ins[:2]
    value = float(np.asarray(ins[2]).reshape(())) if len(ins) > 2 and ins[2] is not None else 0.0
    parts = None if data is None or not value else numeric.multiples(data)
    if parts is None or data is None or pads is None or len(ins) > 3:
        return None
    if value / float(parts[1].reshape(-1)[0]) % 1 == 0:
        return None
    mark = np.ones(out.shape)
    inside = zip(pads.tolist(), data.shape, strict=False)
    mark[tuple(slice(max(0, low), max(0, low + size)) for low, size in inside)] = 0.0
    return mark


def _of_two_values(
    node: Node, ins: list[Array | None], whole: float
) -> tuple[Array | None, Array | None]:
    """Return magnitude and terms of a product of filters, or data, with two arbitrary values.

    The product is two integers, each multiplied by a real number: half the difference of the
    values, and their mean, which together are as large as the larger value. Terms are computed for
    the largest data, because they separate accumulators from constants. None for other products.
    """
    data, weight, *bias = ins
    assert data is not None
    assert weight is not None
    axis = _filters_axis(node, weight)
    if weight.ndim < 2 or axis is None:
        return None, None
    most = np.full_like(data, whole)
    if numeric.multiples(data) is None:
        if numeric.multiples(weight, axis) is None or np.unique(data).size > 2:
            return None, None
        return (terms := _far(node, most, ins)), terms
    rest = tuple(k for k in range(weight.ndim) if k != axis)
    low, high = weight.min(rest, keepdims=True), weight.max(rest, keepdims=True)
    if not ((weight == low) | (weight == high)).all():
        return None, None
    larger = np.broadcast_to(np.maximum(np.abs(low), np.abs(high)), weight.shape)
    terms = _far(node, most, [data, larger, *bias])
    added = any(b is not None and b.any() for b in bias)
    return terms if added else _far(node, data, [data, larger, *bias]), terms


def _far(node: Node, data: Array | None, ins: list[Array | None]) -> Array:
    """Return the sum of the magnitudes of a product's terms, with `data` as first operand."""
    far = [None if v is None else np.abs(v) for v in (data, *ins[1:])]
    twin = replace(node, attrs={**node.attrs, numeric.FLOAT_SUM: "float64"})
    return evaluate_node(twin, far)[0]


def _filters_axis(node: Node, weight: Array) -> int | None:
    """Return the axis of output channels in a product's weights, or None."""
    if node.op == "ConvTranspose" or (node.op == "MatMul" and weight.ndim != 2):
        return None
    return 0 if node.op == "Conv" or node.attrs.get("transB") else weight.ndim - 1


def exactly_whole(
    graph: Graph, known: Mapping[str, Array], name: str, read: Collection[str],
    rounded: Collection[str] = (),
) -> bool:  # fmt: skip
    """Whether a tensor is a function of one integer sum, which is not rounded.

    Weights of products must be exact multiples of scales; for approximate ones, the scale itself
    depends on rounding. After the last product, only constants may follow: in ``x - y - x``, which
    passes simplify to ``-y``, the model rounds numbers of the size of `x`.

    Parameters
    ----------
    graph : Graph
        In canonical form.
    known : mapping of str to ndarray
        As for `spread`.
    name : str
        The tensor.
    read : collection of str
        Its sources, if there is no product.
    rounded : collection of str
        Tensors that are computed without the model's rounding.
    """
    alone = set(read)
    nodes = _between(graph, known, name)
    for node in nodes:
        weight = graph.constants.get(node.inputs[1]) if node.op in PRODUCTS else None
        if node.op in PRODUCTS:
            alone = set(node.outputs)
        if weight is None:
            continue
        parts = numeric.multiples(weight, _filters_axis(node, weight))
        if parts is None or (parts[0] * parts[1] != weight).any():
            return False
    for node in nodes:
        if any(made in rounded for made in node.outputs):
            return False
        data = set(graph.computed(node.inputs))
        if alone & data:
            if not data <= alone:
                return False
            alone.update(node.outputs)
    return name in alone


def are_multiples(values: Sequence[float]) -> bool:
    """Whether float32 numbers are exact multiples of one of them, or of 1."""
    numbers = np.array(values, np.float32).astype(np.float64)
    sizes = np.abs(numbers[numbers != 0])
    unit = 1.0 if (numbers == np.rint(numbers)).all() else sizes.min(initial=np.inf)
    return bool((numbers / unit == np.rint(numbers / unit)).all())


def are_dyadic(values: Array) -> bool:
    """Whether float32 sums of such values are exact: multiples of 1/1024 of limited size."""
    return bool(_dyadic(values).all())


def _dyadic(values: Array) -> Array:
    """Return a mask of such numbers."""
    scaled = np.asarray(values, np.float64) * 1024
    return np.asarray((np.abs(scaled) < EXACT_BELOW) & (np.rint(scaled) == scaled))
