"""Kernels of the oracle: layers in float64 with exact integer accumulators, and their error terms.

See `oracle` for what they are for. Each kernel takes a node and its input `Value`s (None for a
missing optional input) and returns the outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.lib.stride_tricks import sliding_window_view
from onnx import helper

EPS = float(np.finfo(np.float32).eps)
TIE = 8 * EPS
NOISE = 1e-5  # relative noise under which values still count as multiples of one scale
UNITS = (*range(1, 129), 255)  # how many the largest of multiples may be: docs/semantics.md


@dataclass
class Value:
    """A tensor and the magnitude of the rounded terms behind each of its elements."""

    data: np.ndarray
    err: np.ndarray | float = 0.0


# ---------------------------------------------------------------------------------- exact multiples


def _multiples(x: np.ndarray, axis: int | None = None) -> tuple[np.ndarray, np.ndarray] | None:
    """Split `x` into integers and a scale (one, or one per index of `axis`), or return None."""
    if x.dtype.kind in "iub":
        return x.astype(np.float64), np.ones(1)
    x = x.astype(np.float64)
    if not np.isfinite(x).all() or x.size == 0:
        return None
    if (np.abs(x) < 2**20).all() and (x == np.rint(x)).all():
        return x, np.ones(1)
    rows = x.reshape(1, -1) if axis is None else np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1)
    top = np.abs(rows).max(axis=1, keepdims=True)
    safe = np.where(top == 0, 1.0, top)
    ratio = rows / safe
    numbers = UNITS if x.size >= 4 else UNITS[:1]
    if not any(_fits(ratio[:1, :256], number).all() for number in numbers):
        return None
    units = np.zeros((len(rows), 1))
    for number in numbers:  # each filter has a scale of its own
        left = np.flatnonzero(units == 0)
        if left.size:
            left = left[_fits(ratio[left, :256], number)]
            units[left[_fits(ratio[left], number)]] = number
    if not units.all():
        return None
    whole = np.rint(ratio * units)
    used = np.abs(whole)
    exact = (np.abs(rows) == top * used).all(axis=1, keepdims=True)
    count = used.sum(axis=1, keepdims=True)
    # The mean magnitude averages the noise out.
    mean = (np.abs(rows) * used).sum(axis=1, keepdims=True) / np.where(count == 0, 1, count)
    scale = np.where((units > 1) | exact | (count == 0), safe / units, mean)
    if axis is None:
        return whole.reshape(x.shape), scale.reshape((1,) * x.ndim)
    front = (x.shape[axis], *np.delete(x.shape, axis))
    column = [-1 if k == axis else 1 for k in range(x.ndim)]
    return np.moveaxis(whole.reshape(front), 0, axis), scale.reshape(column)


def _fits(ratio: np.ndarray, number: int) -> np.ndarray:
    """Tell of each row whether all are whole, once multiplied by `number`."""
    gap = np.abs(ratio * number - np.rint(ratio * number))
    return (gap <= NOISE * max(1, number / 16)).all(axis=1)


# ------------------------------------------------------------------------------------------ kernels


def attributes(node: onnx.NodeProto) -> dict:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def _window_pads(
    attrs: dict, shape: tuple[int, ...], kernel: list[int]
) -> tuple[list[int], list[int], list[int]]:
    """Return strides, dilations and explicit pads (begins then ends) of a Conv or pool."""
    rank = len(kernel)
    strides = list(attrs.get("strides", [1] * rank))
    dilations = list(attrs.get("dilations", [1] * rank))
    pads = list(attrs.get("pads", [0] * 2 * rank))
    auto = attrs.get("auto_pad", b"NOTSET")
    auto = auto.decode() if isinstance(auto, bytes) else auto
    if auto == "VALID":
        pads = [0] * 2 * rank
    elif auto.startswith("SAME"):
        pads = [0] * 2 * rank
        for i in range(rank):
            out = -(-shape[i] // strides[i])
            total = max(0, (out - 1) * strides[i] + (kernel[i] - 1) * dilations[i] + 1 - shape[i])
            small, large = total // 2, total - total // 2
            pads[i], pads[i + rank] = (small, large) if auto == "SAME_UPPER" else (large, small)
    return strides, dilations, pads


def _windows(
    x: np.ndarray, kernel: list[int], strides: list[int], dilations: list[int]
) -> np.ndarray:
    """View (N, C, *out, *kernel) of an already padded (N, C, *spatial) array."""
    rank = len(kernel)
    span = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    view = sliding_window_view(x, span, axis=tuple(range(2, 2 + rank)))
    outer = tuple(slice(None, None, s) for s in strides)
    inner = tuple(slice(None, None, d) for d in dilations)
    return view[(slice(None), slice(None), *outer, *inner)]


def _conv64(x: np.ndarray, w: np.ndarray, attrs: dict) -> np.ndarray:
    kernel = list(w.shape[2:])
    strides, dilations, pads = _window_pads(attrs, x.shape[2:], kernel)
    rank = len(kernel)
    group = attrs.get("group", 1)
    x = np.pad(x, [(0, 0), (0, 0)] + [(pads[i], pads[i + rank]) for i in range(rank)])
    cols = _windows(x, kernel, strides, dilations)
    batch, out = cols.shape[0], cols.shape[2 : 2 + rank]
    cols = np.moveaxis(cols, 1, 1 + rank)  # N, *out, C, *kernel
    step, units = w.shape[1], w.shape[0] // group
    parts = []
    for g in range(group):
        part = cols[(slice(None),) * (1 + rank) + (slice(g * step, (g + 1) * step),)]
        flat = part.reshape(batch * int(np.prod(out)), step * int(np.prod(kernel)))
        parts.append(flat @ w[g * units : (g + 1) * units].reshape(units, -1).T)
    y = np.concatenate(parts, axis=1).reshape(batch, *out, w.shape[0])
    return np.moveaxis(y, -1, 1)


def _product(
    x: Value, w: Value, bias: Value | None, w_axis: int | None, mul: Callable, spread: Callable
) -> Value:
    """Multiply-accumulate by `mul`, exactly where both operands are integer multiples.

    `spread` shapes a weight scale (1 or one per output unit) so that it broadcasts against the
    result.
    """
    dtype = x.data.dtype
    xm, wm = _multiples(x.data), _multiples(w.data, w_axis)
    if xm is not None and wm is not None:
        acc = mul(xm[0], wm[0])
        scale = xm[1].reshape(-1)[0] * spread(wm[1])
        y = acc * scale
        err = np.where(y == y.astype(np.float32), 0.0, np.abs(y))
    else:
        y = mul(x.data.astype(np.float64), w.data.astype(np.float64))
        ax, aw = np.abs(x.data.astype(np.float64)), np.abs(w.data.astype(np.float64))
        err = mul(ax + x.err, aw) + (
            mul(ax, np.broadcast_to(w.err, aw.shape)) if np.any(w.err) else 0
        )
    if bias is not None:
        b = bias.data.astype(np.float64)
        total = y + b
        clean = (err == 0) & (total == total.astype(np.float32))
        err = np.where(clean, 0.0, err + np.abs(y) + np.abs(b)) + bias.err
        y = total
    return Value(y.astype(dtype), err)


def _conv(node: onnx.NodeProto, ins: list[Value | None]) -> list[Value]:
    attrs = attributes(node)
    x, w = ins[0], ins[1]
    shape = (1, -1) + (1,) * (x.data.ndim - 2)
    bias = ins[2] if len(ins) > 2 and ins[2] is not None else None
    if bias is not None:
        bias = Value(
            bias.data.reshape(shape), np.reshape(np.broadcast_to(bias.err, bias.data.shape), shape)
        )
    return [
        _product(
            x, w, bias, 0,
            lambda a, b: _conv64(a, b, attrs),
            lambda s: s.reshape(shape) if s.size > 1 else s.reshape(-1)[0],
        )
    ]  # fmt: skip


def _gemm(node: onnx.NodeProto, ins: list[Value | None]) -> list[Value]:
    attrs = attributes(node)
    alpha, beta = attrs.get("alpha", 1.0), attrs.get("beta", 1.0)
    a, b = ins[0], ins[1]
    if attrs.get("transA"):
        a = Value(a.data.T, np.broadcast_to(a.err, a.data.shape).T)
    if attrs.get("transB"):
        b = Value(b.data.T, np.broadcast_to(b.err, b.data.shape).T)
    c = ins[2] if len(ins) > 2 else None
    if c is not None and beta != 1:
        c = mul_values(c, Value(np.float32(beta)))
    y = _product(
        a,
        b,
        None,
        1,
        lambda p, q: p @ q,
        lambda s: s.reshape(1, -1) if s.size > 1 else s.reshape(-1)[0],
    )
    if alpha != 1:
        y = mul_values(y, Value(np.float32(alpha)))
    return [y if c is None else add_values(y, c)]


def _matmul(node: onnx.NodeProto, ins: list[Value | None]) -> list[Value]:
    a, b = ins[0], ins[1]
    axis = b.data.ndim - 1 if b.data.ndim == 2 else None

    def spread(scale: np.ndarray) -> np.ndarray:
        return scale.reshape(-1) if scale.size > 1 else scale.reshape(-1)[0]

    return [_product(a, b, None, axis, np.matmul, spread)]


def _pool(node: onnx.NodeProto, ins: list[Value | None]) -> list[Value]:
    attrs = attributes(node)
    x = ins[0]
    kernel = list(attrs["kernel_shape"])
    rank = len(kernel)
    strides, dilations, pads = _window_pads(attrs, x.data.shape[2:], kernel)
    is_max = node.op_type == "MaxPool"
    extra = [0] * rank
    if attrs.get("ceil_mode"):
        for i in range(rank):
            span = (kernel[i] - 1) * dilations[i] + 1
            room = x.data.shape[2 + i] + pads[i] + pads[i + rank] - span
            out = -(-room // strides[i]) + 1
            if (out - 1) * strides[i] >= x.data.shape[2 + i] + pads[
                i
            ]:  # a window wholly in the end padding
                out -= 1
            extra[i] = max(0, (out - 1) * strides[i] - room)

    def views(a: np.ndarray, fill: float, fill_extra: float) -> np.ndarray:
        a = np.pad(
            a, [(0, 0)] * 2 + [(pads[i], pads[i + rank]) for i in range(rank)], constant_values=fill
        )
        a = np.pad(a, [(0, 0)] * 2 + [(0, e) for e in extra], constant_values=fill_extra)
        return _windows(a, kernel, strides, dilations)

    last = tuple(range(2 + rank, 2 + 2 * rank))
    err = np.broadcast_to(x.err, x.data.shape).astype(np.float64)
    data = x.data.astype(np.float64)
    if is_max:
        y = views(data, -np.inf, -np.inf).max(axis=last)
        return [Value(y.astype(x.data.dtype), views(err, 0, 0).max(axis=last))]
    padded = 1.0 if attrs.get("count_include_pad") else 0.0
    count = views(np.ones_like(data), padded, 0.0).sum(axis=last)
    exact = _multiples(x.data) is not None
    y = (views(data, 0, 0).sum(axis=last) / count).astype(x.data.dtype)
    terms = np.abs(y) if exact else views(np.abs(data), 0, 0).sum(axis=last) / count
    clean = exact & (y == 0)
    return [Value(y, np.where(clean, 0, terms) + views(err, 0, 0).sum(axis=last) / count)]


def _global_average(node: onnx.NodeProto, ins: list[Value | None]) -> list[Value]:
    del node
    x = ins[0]
    axes = tuple(range(2, x.data.ndim))
    return [_mean(x, axes, True)]


def _mean(x: Value, axes: tuple[int, ...], keep: bool) -> Value:
    data = x.data.astype(np.float64)
    y = data.mean(axis=axes, keepdims=keep).astype(x.data.dtype)
    if _multiples(x.data) is not None:
        terms = np.abs(y).astype(np.float64)
    else:
        terms = np.abs(data).mean(axis=axes, keepdims=keep)
    return Value(y, terms + np.broadcast_to(x.err, data.shape).mean(axis=axes, keepdims=keep))


def _reduce_mean(node: onnx.NodeProto, ins: list[Value | None]) -> list[Value]:
    attrs = attributes(node)
    x = ins[0]
    axes = attrs.get("axes")
    if len(ins) > 1 and ins[1] is not None:
        axes = ins[1].data.tolist()
    if not axes:
        axes = [] if attrs.get("noop_with_empty_axes") else list(range(x.data.ndim))
    return [_mean(x, tuple(axes), bool(attrs.get("keepdims", 1)))] if axes else [x]


def _batch_norm(node: onnx.NodeProto, ins: list[Value | None]) -> list[Value]:
    x = ins[0]
    shape = (1, -1) + (1,) * (x.data.ndim - 2)
    gamma, beta, mean, var = (v.data.reshape(shape).astype(np.float64) for v in ins[1:5])
    scale = gamma / np.sqrt(var + np.float64(np.float32(attributes(node).get("epsilon", 1e-5))))
    data = x.data.astype(np.float64)
    y = scale * (data - mean) + beta
    err = np.abs(scale) * (np.abs(data) + np.abs(mean) + x.err) + np.abs(beta)
    flat = np.broadcast_to(gamma == 0, data.shape)  # beta alone, whatever the input: no rounding
    steps = (
        scale,
        scale * data,
        scale * mean,
        y,
    )  # no step rounds, in whatever order they are taken
    clean = np.logical_and.reduce(
        [np.broadcast_to(s == s.astype(np.float32), data.shape) for s in steps]
    )
    return [
        Value(y.astype(x.data.dtype), np.where(flat | clean & (np.asarray(x.err) == 0), 0.0, err))
    ]


def _exact(wide: np.ndarray, y: np.ndarray, a: Value, b: Value) -> np.ndarray:
    return (wide == y) & (np.asarray(a.err) == 0) & (np.asarray(b.err) == 0)


def add_values(a: Value, b: Value, sign: int = 1) -> Value:
    p, q = a.data.astype(np.float64), sign * b.data.astype(np.float64)
    wide = p + q
    y = wide.astype(a.data.dtype)
    err = np.where(_exact(wide, y, a, b), 0.0, np.abs(p) + np.abs(q) + a.err + b.err)
    return Value(y, err)


def mul_values(a: Value, b: Value) -> Value:
    p, q = a.data.astype(np.float64), b.data.astype(np.float64)
    wide = p * q
    y = wide.astype(a.data.dtype)
    err = np.abs(p) * b.err + np.abs(q) * a.err
    # one rounded product keeps its sign: what matters later is its size
    return Value(y, err + np.where(_exact(wide, y, a, b), 0.0, np.abs(wide)))


def _log_softmax(node: onnx.NodeProto, ins: list[Value | None]) -> list[Value]:
    """Replace the reference's log(softmax(x)), which underflows to -inf."""
    x = ins[0].data.astype(np.float64)
    axis = attributes(node).get("axis", -1)
    y = x - x.max(axis=axis, keepdims=True)
    y = (y - np.log(np.exp(y).sum(axis=axis, keepdims=True))).astype(ins[0].data.dtype)
    return [Value(y, np.abs(y) + np.abs(x).max(axis=axis, keepdims=True) + np.max(ins[0].err))]


KERNELS: dict[str, Callable[[onnx.NodeProto, list], list[Value]]] = {
    "Conv": _conv,
    "LogSoftmax": _log_softmax,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "MaxPool": _pool,
    "AveragePool": _pool,
    "GlobalAveragePool": _global_average,
    "ReduceMean": _reduce_mean,
    "BatchNormalization": _batch_norm,
}
