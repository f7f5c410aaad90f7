"""Products, pools and normalization for `bnncc.ir.evaluate`: in float64, rounded once.

If both operands of a product are integer multiples of a scale (up to the rounding that
straight-through estimators leave in weights), the accumulator is an exact integer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from bnncc.ir import shaping
from bnncc.ir.dims import channel_shape

Array = np.ndarray[Any, Any]

NOISE = 1e-5
"""Relative tolerance within which a number counts as a multiple of the scale."""

UNITS = (*range(1, 129), 255)
"""Allowed values of the largest multiple, in units of the scale."""

_FEWEST = 4
"""Fewer numbers than this are approximate multiples of something by chance."""

FLOAT_SUM = "float_sum"
"""Attribute of a product: the float type in which to accumulate, even multiples of a scale.

``float64`` is exact enough for values, ``float32`` for magnitudes.
"""

_CHUNK_BYTES = 1 << 21
_SPLIT_BYTES, _HEAD = 1 << 20, 1024
"""Bytes of what is split into multiples at a time; numbers that are tried before all others."""


def multiples(x: Array, axis: int | None = None) -> tuple[Array, Array] | None:
    """Split `x` into integers and a scale.

    Parameters
    ----------
    x : ndarray
        Finite numbers.
    axis : int, optional
        Axis along which the scale may differ; default: a single scale.

    Returns
    -------
    tuple of ndarray or None
        Integers (as float64) and a scale that broadcasts against them; None if `x` does not
        consist of small multiples of a scale.
    """
    found = _multiples(x, axis)
    return None if found is None else (found[0].astype(np.float64, copy=False), found[1])


def _multiples(x: Array, axis: int | None) -> tuple[Array, Array, float] | None:
    """Like `multiples`, but with integers of any dtype, and also the largest of them."""
    one = np.ones((1,) * x.ndim)
    if x.size == 0:
        return None
    if x.dtype.kind in "iub":
        whole = x.astype(np.float64)
        return whole, one, float(np.abs(whole).max())
    rows = x.reshape(1, -1) if axis is None else np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1)
    top = np.maximum(rows.max(axis=1, keepdims=True), -rows.min(axis=1, keepdims=True))
    top = top.astype(np.float64)
    if not np.isfinite(top).all():
        return None
    if top.max() < 2**20 and np.array_equal(np.rint(x), x):
        return x, one, float(top.max())
    numbers = UNITS if x.size >= _FEWEST else UNITS[:1]
    whole, scale = np.empty(rows.shape), np.empty(top.shape)
    if not _plausible(rows[0, :_HEAD], top[0], numbers):
        return None  # most tensors are rejected here, cheaply
    count = max(1, _SPLIT_BYTES // (8 * rows.shape[1]))
    for first in range(0, len(rows), count):  # of a size that stays in a cache
        part = slice(first, first + count)
        found = _scaled(rows[part], top[part], numbers)
        if found is None:
            return None
        whole[part], scale[part] = found
    most = float(max(whole.max(), -whole.min()))
    if axis is None:
        return whole.reshape(x.shape), scale.reshape(one.shape), most
    front = (x.shape[axis], *np.delete(x.shape, axis))
    column = [1] * x.ndim
    column[axis] = -1
    return np.moveaxis(whole.reshape(front), 0, axis), scale.reshape(column), most


def _scaled(rows: Array, top: Array, numbers: Sequence[int]) -> tuple[Array, Array] | None:
    """Return the integers and the scale of each row, or None."""
    safe = np.where(top == 0, 1.0, top)
    units = _units(rows, safe, numbers)
    if units is None:
        return None
    whole = np.rint(rows / safe * units)
    used, size = np.abs(whole), np.abs(rows)
    exact = (size == top * used).all(axis=1, keepdims=True)
    count = used.sum(axis=1, keepdims=True)
    # The mean magnitude averages out the noise of straight-through estimators.
    mean = (size * used).sum(axis=1, keepdims=True, dtype=np.float64) / np.maximum(count, 1)
    return whole, np.where(exact | (units > 1) | (count == 0), safe / units, mean)


def _plausible(row: Array, top: Array, numbers: Sequence[int]) -> bool:
    """Whether some numbers, of which the largest is `top`, may be multiples of a scale."""
    ratio = row.reshape(-1, 1) / (top or 1.0) * np.array(numbers)
    return bool((np.abs(ratio - np.rint(ratio)).max(axis=0) <= [noise(n) for n in numbers]).any())


def _units(rows: Array, top: Array, numbers: Sequence[int]) -> Array | None:
    """Return the smallest number of units in each row's largest value, or None."""
    step = max(1, rows.shape[1] // 64)
    found = np.zeros(len(rows), np.int64)
    for number in numbers:
        left = np.flatnonzero(found == 0)
        if not left.size:
            break
        for part in (slice(None, None, step), slice(None)):
            ratio = rows[left, part] / top[left] * number
            left = left[(np.abs(ratio - np.rint(ratio)) <= noise(number)).all(axis=1)]
        found[left] = number
    return found.reshape(-1, 1) if found.all() else None


def noise(levels: int) -> float:
    """Return the tolerance of multiples, in units: with many units, float32 rounds coarsely."""
    return NOISE * max(1.0, levels / 16)


def operands(
    x: Array, w: Array, w_axis: int | None, float_sum: str | None = None
) -> tuple[Array, Array, Array, Array]:
    """Return operands to multiply and accumulate, as integers if both hold multiples of a scale.

    Parameters
    ----------
    x, w : ndarray
        Operands.
    w_axis : int or None
        Axis of `w` along which the scale may differ.
    float_sum : str, optional
        Type of both results (`FLOAT_SUM`); by default, look for multiples first.

    Returns
    -------
    x, w : ndarray
        In a float type, by default float64; or integers whose sums are exact in float32.
    x_scale : ndarray
        A number by which the sum must be multiplied, in float64.
    w_scale : ndarray
        One scale for each index of `w` along `w_axis`, or a single one.
    """
    wm = _multiples(w, w_axis) if float_sum is None else None
    xm = None if wm is None else _multiples(x, None)
    if xm is None or wm is None:
        a, b = (v.astype(float_sum or "float64", copy=False) for v in (x, w))
        return a, b, np.ones(1), np.ones(1)
    taps = max(1, w.size // max(1, w.shape[w_axis] if w_axis is not None else 1))
    exact = xm[2] * wm[2] * taps < 2**24  # float32 suffices, and is faster
    kind = np.float32 if exact else np.float64
    a, b = xm[0].astype(kind, copy=False), wm[0].astype(kind, copy=False)
    return a, b, xm[1].reshape(-1), wm[1].reshape(-1)


def window(
    attrs: dict[str, Any], spatial: Sequence[int], kernel: Sequence[int]
) -> tuple[list[int], list[int], list[int]]:
    """Return strides, dilations and explicit pads (begins, then ends) of a Conv or pool."""
    rank = len(kernel)
    strides = list(attrs.get("strides") or [1] * rank)
    dilations = list(attrs.get("dilations") or [1] * rank)
    auto = attrs.get("auto_pad", "NOTSET")
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        pads = [0] * 2 * rank
        for i, span in enumerate(window_spans(kernel, dilations)):
            out = -(-spatial[i] // strides[i])
            total = max(0, (out - 1) * strides[i] + span - spatial[i])
            small, large = total // 2, total - total // 2
            pads[i], pads[i + rank] = (small, large) if auto == "SAME_UPPER" else (large, small)
        return strides, dilations, pads
    if auto == "VALID":
        return strides, dilations, [0] * 2 * rank
    return strides, dilations, list(attrs.get("pads") or [0] * 2 * rank)


def window_spans(kernel: Sequence[int], dilations: Sequence[int]) -> list[int]:
    """Return how far a window reaches along each axis."""
    return [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]


def _pad(x: Array, pads: Sequence[int], value: float = 0) -> Array:
    rank = x.ndim - 2
    whole = np.array([0, 0, *pads[:rank], 0, 0, *pads[rank:]])
    return shaping.pad({}, [x, whole, np.array(value)], 1)[0] if any(pads) else x


def _windows(
    x: Array, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> Array:
    """View (batch, channels, *out, *kernel) of a padded (batch, channels, *spatial) array."""
    spans = window_spans(kernel, dilations)
    out = [(n - s) // t + 1 for n, s, t in zip(x.shape[2:], spans, strides, strict=True)]
    steps = x.strides[2:]
    return as_strided(
        x,
        (*x.shape[:2], *out, *kernel),
        (
            *x.strides[:2],
            *(t * b for t, b in zip(strides, steps, strict=True)),
            *(d * b for d, b in zip(dilations, steps, strict=True)),
        ),
        writeable=False,
    )


def convolve(
    x: Array,
    w: Array,
    attrs: dict[str, Any],
    finish: Callable[[Array], Array] | None = None,
    dtype: Any = None,
) -> Array:
    """Convolve (batch, channels, *spatial) with (units, channels/group, *kernel).

    `finish` is applied to each part of an image, (units, *spatial), and its result is stored as
    `dtype`; parts are small enough to stay in a cache.
    """
    kernel = w.shape[2:]
    rank = len(kernel)
    strides, dilations, pads = window(attrs, x.shape[2:], kernel)
    group = int(attrs.get("group", 1))
    view = _windows(_pad(x, pads), kernel, strides, dilations)
    batch, out = view.shape[0], view.shape[2 : 2 + rank]
    units = w.shape[0] // group
    flat_w = w.reshape(group, units, -1)
    spatial = tuple(range(2, 2 + rank))
    taps = tuple(range(2 + rank, 2 + 2 * rank))
    result = np.empty((batch, group * units, *out), dtype or np.result_type(x, w))
    row_bytes = int(np.prod(view.shape[1:])) // max(1, out[0]) * x.itemsize
    rows = max(1, min(out[0], _CHUNK_BYTES // max(1, row_bytes)))
    for n in range(batch):
        for lo in range(0, out[0], rows):
            part = view[n : n + 1, :, lo : lo + rows]
            shape = part.shape[2 : 2 + rank]
            # Pixels last, so that contiguous rows are copied; otherwise copying dominates.
            cols = part[0].transpose(0, *(t - 1 for t in taps), *(s - 1 for s in spatial))
            cols = cols.reshape(group, flat_w.shape[2], int(np.prod(shape)))
            made = np.matmul(flat_w, cols).reshape(-1, *shape)
            result[n, :, lo : lo + rows] = made if finish is None else finish(made)
    return result


def conv(x: Array, w: Array, bias: Array | None, attrs: dict[str, Any]) -> Array:
    """Evaluate ONNX Conv; the bias is added before the one rounding."""
    column = (-1,) + (1,) * (x.ndim - 2)
    float_sum = attrs.get(FLOAT_SUM)
    a, b, x_scale, w_scale = operands(x, w, 0, float_sum)
    if float_sum is None and _lost(x, a, 1):
        a, b, x_scale, w_scale = operands(x, w, 0, "float64")
    scale = (float(x_scale[0]) * w_scale).reshape(column)
    offset = None if bias is None else bias.astype(np.float64).reshape(column)

    def finish(part: Array) -> Array:
        wide = part.astype(np.float64)
        wide *= scale
        if offset is not None:
            wide += offset
        return wide

    with np.errstate(all="ignore"):
        return convolve(a, b, attrs, finish, x.dtype)


def conv_transpose(x: Array, w: Array, bias: Array | None, attrs: dict[str, Any]) -> Array:
    """Evaluate ONNX ConvTranspose as a Conv of zero-interleaved data with the flipped kernel."""
    rank, size = x.ndim - 2, x.shape[2:]
    ones, zeros = [1] * rank, [0] * rank
    strides, dilations = (list(attrs.get(k) or ones) for k in ("strides", "dilations"))
    more, group = list(attrs.get("output_padding") or zeros), int(attrs.get("group", 1))
    spans = [d * (k - 1) for d, k in zip(dilations, w.shape[2:], strict=True)]
    full = [
        s * (n - 1) + span + 1 + m for s, n, span, m in zip(strides, size, spans, more, strict=True)
    ]
    pads = transposed_pads(attrs, size, strides, full)
    stuffed = np.zeros(
        (*x.shape[:2], *(s * (n - 1) + 1 for s, n in zip(strides, size, strict=True))), x.dtype
    )
    every = slice(None), slice(None)
    between: tuple[Any, ...] = (*every, *(slice(None, None, s) for s in strides))
    stuffed[between] = x
    around = [(span - pads[i], span - pads[i + rank] + more[i]) for i, span in enumerate(spans)]
    stuffed = np.pad(stuffed, [(0, 0), (0, 0), *((max(0, a), max(0, b)) for a, b in around)])
    inside: tuple[Any, ...] = (
        *every,
        *(slice(max(0, -a), stuffed.shape[2 + i] - max(0, -b)) for i, (a, b) in enumerate(around)),
    )
    filters = w.reshape(group, -1, *w.shape[1:]).swapaxes(1, 2)
    filters = np.flip(filters.reshape(-1, *filters.shape[2:]), tuple(range(2, 2 + rank)))
    plain = {"strides": ones, "dilations": dilations, "pads": zeros * 2, "group": group}
    plain |= {"auto_pad": "NOTSET", FLOAT_SUM: attrs.get(FLOAT_SUM)}
    return conv(stuffed[inside], filters, bias, plain)


def transposed_pads(
    attrs: dict[str, Any], size: Sequence[int], strides: Sequence[int], full: Sequence[int]
) -> list[int]:
    """Return pads at the beginnings, then at the ends; `full` is the result without any."""
    auto, wanted = attrs.get("auto_pad", "NOTSET"), attrs.get("output_shape")
    if not wanted and auto in ("NOTSET", "VALID"):
        return list(attrs.get("pads") or [0] * 2 * len(size))
    out = list(wanted or (n * s for n, s in zip(size, strides, strict=True)))[-len(size) :]
    total = [f - o for f, o in zip(full, out, strict=True)]
    first = [max(0, t // 2 if auto == "SAME_UPPER" else t - t // 2) for t in total]
    return [*first, *(t - f for t, f in zip(total, first, strict=True))]


def matmul(a: Array, b: Array, float_sum: str | None = None) -> Array:
    """Evaluate ONNX MatMul in float64 (integers exactly), not yet rounded.

    Sums are in `float_sum` (`FLOAT_SUM`) if it is given.
    """
    axis = b.ndim - 1 if b.ndim == 2 else None
    left, right, a_scale, b_scale = operands(a, b, axis, float_sum)
    sides = ((a, left, -1), (b, right, -2))
    if not float_sum and any(x.ndim > 1 and _lost(x, made, along) for x, made, along in sides):
        left, right, a_scale, b_scale = operands(a, b, axis, "float64")
    acc = np.matmul(left, right).astype(np.float64, copy=False)
    return np.asarray(acc * (float(a_scale[0]) * (b_scale if b_scale.size > 1 else b_scale[0])))


def _lost(x: Array, whole: Array, axis: int) -> bool:
    """Whether a row, of numbers that are summed, is so small that its integers would all be 0."""
    left = np.abs(whole).max(axis=axis, initial=0) > 0
    return bool((np.abs(x).max(axis=axis, initial=0)[~left] > 0).any())


def gemm(a: Array, b: Array, c: Array | None, attrs: dict[str, Any]) -> Array:
    """Evaluate ONNX Gemm; `alpha`, `beta` and C are applied before the single rounding."""
    a = a.T if attrs.get("transA") else a
    b = b.T if attrs.get("transB") else b
    y = matmul(a, b, attrs.get(FLOAT_SUM)) * np.float64(attrs.get("alpha", 1.0))
    if c is not None:
        y = y + np.float64(attrs.get("beta", 1.0)) * c.astype(np.float64)
    return y.astype(a.dtype)


def pooled_sizes(
    sizes: Sequence[int], spans: list[int], strides: list[int], pads: list[int], ceil: bool
) -> list[int]:
    """Return the number of windows along each axis; `pads` are all begins, then all ends."""
    rank, outs = len(sizes), []
    for k, (n, span, stride) in enumerate(zip(sizes, spans, strides, strict=True)):
        room = n + pads[k] + pads[k + rank] - span
        count = (-(-room // stride) if ceil else room // stride) + 1
        if ceil and (count - 1) * stride >= n + pads[k]:  # would start in the padding
            count -= 1
        outs.append(count)
    return outs


def _pool_geometry(
    x: Array, attrs: dict[str, Any]
) -> tuple[list[int], list[int], list[int], list[int], list[int]]:
    kernel = list(attrs["kernel_shape"])
    spatial = x.shape[2:]
    strides, dilations, pads = window(attrs, spatial, kernel)
    extra = [0] * len(kernel)
    if attrs.get("ceil_mode"):
        spans = window_spans(kernel, dilations)
        outs = pooled_sizes(spatial, spans, strides, pads, ceil=True)
        for i, out in enumerate(outs):
            room = spatial[i] + pads[i] + pads[i + len(kernel)] - spans[i]
            extra[i] = max(0, (out - 1) * strides[i] - room)
    return kernel, strides, dilations, pads, extra


def max_pool(x: Array, attrs: dict[str, Any]) -> Array:
    """Evaluate ONNX MaxPool's first output; padding is never the maximum."""
    kernel, strides, dilations, pads, extra = _pool_geometry(x, attrs)
    rank = len(kernel)
    low: Any = np.iinfo(x.dtype).min if x.dtype.kind in "iu" else -np.inf
    wide = [*pads[:rank], *(p + e for p, e in zip(pads[rank:], extra, strict=True))]
    view = _windows(_pad(x, wide, low), kernel, strides, dilations)
    result: Array | None = None
    for tap in np.ndindex(*kernel):
        at = (..., *tap)
        part = view[at]
        result = part.copy() if result is None else np.maximum(result, part, out=result)
    assert result is not None
    return result


def average_pool(x: Array, attrs: dict[str, Any]) -> Array:
    """Evaluate ONNX AveragePool."""
    kernel, strides, dilations, pads, extra = _pool_geometry(x, attrs)
    rank = len(kernel)
    wide = [*pads[:rank], *(p + e for p, e in zip(pads[rank:], extra, strict=True))]
    data = _pad(x.astype(np.float64), wide)
    counted = np.ones((1, 1, *x.shape[2:]))
    counted = _pad(counted, pads, 1.0 if attrs.get("count_include_pad") else 0.0)
    counted = _pad(counted, [0] * rank + extra)
    total = np.zeros(())
    count = np.zeros(())
    values = _windows(data, kernel, strides, dilations)
    counts = _windows(counted, kernel, strides, dilations)
    for tap in np.ndindex(*kernel):
        at = (..., *tap)
        total = total + values[at]
        count = count + counts[at]
    return (total / count).astype(x.dtype)


def batch_norm(ins: Sequence[Array], attrs: dict[str, Any]) -> Array:
    """Evaluate inference BatchNormalization in float64, rounded once."""
    x = ins[0]
    column = channel_shape(x.ndim)
    gamma, beta, mean, var = (v.astype(np.float64).reshape(column) for v in ins[1:5])
    epsilon = float(np.float32(attrs.get("epsilon", 1e-5)))
    scale = gamma / np.sqrt(var + epsilon)
    made = np.subtract(x, mean, dtype=np.float64)
    made *= scale
    made += beta
    return made.astype(x.dtype)


def mean(x: Array, axes: tuple[int, ...] | None, keepdims: bool) -> Array:
    """Average over `axes` in float64, rounded once."""
    return np.asarray(x.mean(axis=axes, keepdims=keepdims, dtype=np.float64)).astype(x.dtype)
