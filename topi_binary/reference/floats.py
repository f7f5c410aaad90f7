"""NumPy oracle of the float kernels and of those that move bits.

Plain loops over taps, with sums in float64 that are rounded once; then the epilogue in float32. No
code is shared with the operators, not even for packing weights (except the matrices of minimal
filtering). Every function takes the kernel's inputs in order and returns its outputs in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np

from bnncc.topi_binary import filtering
from bnncc.topi_binary.reference import windows
from bnncc.topi_binary.reference.epilogue import finished, nhwc
from bnncc.topi_binary.reference.packing import bits_to_words, read_levels, words_to_bits
from bnncc.topi_binary.spec import (
    GREY,
    BitwiseMaxPool,
    ConcatBits,
    Conv2d,
    Elementwise,
    ImageBits,
    PadBits,
    Pool2d,
    SliceBits,
    Step,
)

Array = Any


def conv2d(spec: Conv2d, inputs: Sequence[Array]) -> list[Array]:
    """Compute a float convolution with its pooling and epilogue, without filtering."""
    data = nhwc(inputs[0], spec.data_layout).astype(np.float64)
    taps, depth = spec.kernel, spec.channels_per_group
    unit = np.ones(data.shape[0])
    if spec.operands != "float32":
        data, unit = _rounded(spec, data)
    if spec.method == "direct" and spec.operands != "float32":
        weight = _unpacked(spec, inputs[1])
    elif spec.code_bits:
        weight = _looked_up(spec, *inputs[1:3])
    elif spec.method == "direct":
        weight = windows.unblocked(inputs[1], spec.out_channels, (*taps, depth)).astype(np.float64)
    else:
        weight = _unfiltered(inputs[1], spec)
    out = windows.products(spec, windows.pad(spec, data), weight)
    out *= unit[:, None, None, None]
    if spec.pool is None:
        return finished(spec, out, iter(inputs[2 + (spec.code_bits > 0) :]))
    stream = iter(inputs[2:])
    rows = finished(spec, out, stream, steps=(*spec.pool.before, Step("store")))
    return pool2d(spec.pooling, [*rows, *stream])


def _rounded(spec: Conv2d, data: Array) -> tuple[Array, Array]:
    """Return NHWC data rounded to the operands of `spec`, and the unit of each image's sums."""
    ones = np.ones(data.shape[0])
    if spec.zero_points:
        return data - np.array(spec.zero_points), ones
    if spec.operands == "bfloat16x3":  # as exact as float32
        return data, ones
    if spec.operands == "float16":
        return data.astype(np.float32).astype(np.float16).astype(np.float64), ones
    if spec.operands == "bfloat16":
        mantissa, exponent = np.frexp(data)
        return np.ldexp(np.rint(mantissa * 256) / 256, exponent), ones
    top = np.maximum(np.abs(data).max(axis=(1, 2, 3)), 2.0**-100).astype(np.float32)
    factor = np.float32(127) / top
    scaled = data.astype(np.float32) * factor[:, None, None, None]
    return np.rint(scaled).astype(np.float64), (top / np.float32(127)).astype(np.float64)


def _unpacked(spec: Conv2d, packed: Array) -> Array:
    """Read quantized weights: blocks of 16 output channels, lanes of `packed` taps each."""
    depth = spec.channels
    if spec.operands == "bfloat16x3":
        return _joined_terms(spec, packed)
    if spec.apart:
        depth += -depth % spec.packed
    size = spec.window_size * depth
    starts = spec.packed == 4
    rows = -(-size // spec.packed) + starts
    out = np.zeros((spec.out_channels, *spec.kernel, spec.channels))
    for channel in range(spec.out_channels):
        first = channel // 16 * 16 * rows + channel % 16
        lane = packed[first : first + 16 * rows : 16][starts:].copy()
        if spec.packed == 4:
            lane = lane.view(np.int8)
        elif spec.packed == 2 and spec.operands == "float16":
            lane = lane.view(np.float16)
        elif spec.packed == 2:
            lane = (lane.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
        out[channel] = lane[:size].reshape(*spec.kernel, depth)[..., : spec.channels]
    return out


def _looked_up(spec: Conv2d, words: Array, numbers: Array) -> Array:
    """Read weights that are codes: lane by lane, as little-endian streams of bits."""
    bits, size = spec.code_bits, spec.taps
    streams = words.reshape(-1, -(-size * bits // 32), 16).transpose(0, 2, 1)
    each = np.unpackbits(np.ascontiguousarray(streams).view(np.uint8), axis=2, bitorder="little")
    digits = each.reshape(-1, each.shape[2])[: spec.out_channels, : size * bits]
    places = 1 << np.arange(bits)
    places[-1] *= 1 if bits == 1 else -1  # two's complement
    codes = digits.reshape(-1, size, bits) @ places
    count = 2 if bits == 1 or spec.code_zeros else 1
    held = numbers.reshape(len(streams), -1, count, 16).transpose(0, 3, 1, 2)
    held = held.reshape(len(streams) * 16, -1, count)[: spec.out_channels]
    first, last = np.repeat(held, spec.code_block, axis=1).transpose(2, 0, 1)[[0, -1]]
    if bits == 1:
        weight = np.where(codes == 1, last, first)
    else:
        weight = (codes.astype(np.float32) - (first if count == 2 else 0)) * last
    return weight.astype(np.float64).reshape(-1, *spec.kernel, spec.channels)


def _joined_terms(spec: Conv2d, packed: Array) -> Array:
    """Read weights that are sums of three bfloat16 numbers."""
    words = -(-spec.channels // 32) * 16
    cut = packed.reshape(-1, 3, words, 16).view(np.uint16).reshape(-1, 3, words, 16, 2)
    numbers = (cut.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    rows = numbers.sum(axis=1).transpose(0, 2, 1, 3).reshape(-1, words * 2)
    return rows[: spec.out_channels, None, None, : spec.channels]


def pool2d(spec: Pool2d, inputs: Sequence[Array]) -> list[Array]:
    """Compute a float pooling with its epilogue."""
    data = nhwc(inputs[0], spec.data_layout).astype(np.float64)
    (top, left, bottom, right), more = spec.pads, spec.ceil_extra
    largest = spec.kind == "max"
    padded = windows.pad(spec, data, -np.inf if largest else 0.0)
    inside = windows.pad(spec, np.ones((1, spec.height, spec.width, 1)))
    if spec.kind == "avg_full" and more != (0, 0):  # taps added by ceil_mode are not counted
        inside[:, : spec.height + top + bottom, : spec.width + left + right] = 1
    elif spec.kind == "avg_full":
        inside[:] = 1
    seen = [one for *_, one in windows.taps(spec, padded)]
    count: Array = sum(one for *_, one in windows.taps(spec, inside))
    out = reduce(np.maximum, seen) if largest else sum(seen) / count
    return finished(spec, out, iter(inputs[1:]))


def elementwise(spec: Elementwise, inputs: Sequence[Array]) -> list[Array]:
    """Compute an epilogue without an anchor."""
    if spec.planes:
        data = read_levels(inputs[: spec.planes], spec.channels, "planes").astype(np.float64)
        data = nhwc(data)
        return finished(spec, data, iter(inputs[spec.planes :]))
    if not spec.from_bits:
        data = nhwc(inputs[0], spec.data_layout).astype(np.float64)
        return finished(spec, data, iter(inputs[1:]))
    ones = nhwc(words_to_bits(inputs[0], spec.channels))
    data = np.where(ones, 1.0, 0.0 if spec.mode == "and" else -1.0)
    if spec.ternary:
        zeros = nhwc(words_to_bits(inputs[1], spec.channels))
        data = np.where(zeros, 0.0, data)
    return finished(spec, data, iter(inputs[1 + spec.ternary :]))


def bitwise_maxpool(spec: BitwiseMaxPool, inputs: Sequence[Array]) -> list[Array]:
    """Compute max (or min) pooling of bits, or max pooling of levels."""
    data = read_levels(inputs[: spec.planes], spec.channels, "planes")
    seen = [one for *_, one in windows.taps(spec, windows.pad(spec, data, -1))]
    out = reduce(np.maximum, seen)
    if spec.minimum:  # over the taps inside the image
        out = np.minimum(out, reduce(np.minimum, (np.where(one < 0, 1, one) for one in seen)))
    out = np.maximum(out, 0)
    made = [bits_to_words((out >> j & 1).astype(bool)) for j in range(spec.planes)]
    return [made[0] ^ inputs[1]] if spec.flip else made


def image_bits(spec: ImageBits, inputs: Sequence[Array]) -> list[Array]:
    """Compute the bits of a uint8 image, comparing pixel values as Python integers."""
    pixels = inputs[0] if spec.data_layout == "NHWC" else inputs[0].transpose(0, 2, 3, 1)
    pixels = pixels.astype(np.int64)
    if spec.kind == "threshold":
        bits = pixels >= np.array(spec.thresholds)
        return [bits_to_words(bits != (np.array(spec.flip or (0,)) == 1))]
    grey = sum(weight * pixels[..., c] for c, weight in enumerate(GREY))
    if spec.kind == "grey":
        bits = np.stack([grey >= spec.thresholds[0]] * spec.out_channels, axis=-1)
        return [bits_to_words(bits)]
    around = np.pad(grey, ((0, 0), (1, 1), (1, 1)))
    top_left, bottom_left = around[:, :-2, :-2], around[:, 2:, :-2]
    others = [top_left, around[:, 1:-1, 2:], bottom_left]
    return [bits_to_words(np.stack([other > grey for other in others], axis=-1))]


def concat_bits(spec: ConcatBits, inputs: Sequence[Array]) -> list[Array]:
    """Concatenate planes along the channels."""
    planes = [words_to_bits(x, c) for x, c in zip(inputs, spec.channels, strict=True)]
    return [bits_to_words(np.concatenate(planes, axis=-1))]


def slice_bits(spec: SliceBits, inputs: Sequence[Array]) -> list[Array]:
    """Select channels of a plane."""
    plane = words_to_bits(inputs[0], spec.channels)
    picked = [plane[..., c] if c >= 0 else np.zeros(plane.shape[:-1], bool) for c in spec.index]
    return [bits_to_words(np.stack(picked, axis=-1))]


def pad_bits(spec: PadBits, inputs: Sequence[Array]) -> list[Array]:
    """Pad a plane at the border of the image."""
    plane = words_to_bits(inputs[0], spec.channels)
    top, left, bottom, right = spec.pads
    width = ((0, 0), (top, bottom), (left, right), (0, 0))
    return [bits_to_words(np.pad(plane, width, constant_values=bool(spec.bit)))]


def _unfiltered(packed: Array, spec: Conv2d) -> Array:
    """Recover weights from their transforms for minimal filtering.

    A transform has more points than taps, so numbers that are not a transform are detected.

    Raises
    ------
    ArithmeticError
        If they are not the transforms of any weights.
    """
    rows, columns = filtering.axes(spec)
    of_row, of_column = _transform(rows, spec.kernel[0]), _transform(columns, spec.kernel[1])
    lanes = -(-spec.out_channels // 16) * 16
    stored = packed.astype(np.float64).reshape(lanes // 16, -1, spec.channels, 16)
    stored = stored.transpose(1, 0, 3, 2).reshape(stored.shape[1], lanes, spec.channels)
    matrix = np.stack([
        np.outer(of_row[i, p], of_column[j, q]).reshape(-1)
        for (p, q), terms in filtering.places(spec) for i, j in terms
    ])  # fmt: skip
    flat = np.linalg.pinv(matrix) @ stored.reshape(len(matrix), -1)
    off = np.abs(matrix @ flat - stored.reshape(len(matrix), -1)).max(initial=0.0)
    if off > 1e-4 * np.abs(stored).max(initial=0.0):
        raise ArithmeticError("the weights of a filtered convolution are no transforms")
    weight = flat.reshape(*spec.kernel, lanes, spec.channels)[:, :, : spec.out_channels]
    return np.ascontiguousarray(weight.transpose(2, 0, 1, 3))


def _transform(axis: filtering.Axis | None, taps: int) -> Array:
    """Return the contribution of each tap to each part and point; without `axis`, the identity.

    Rows that are not filtered are parts with a single point.
    """
    if axis is None:
        return np.eye(taps)[:, None, :]
    points = filtering.as_array(axis.transform.kernel)
    out = np.zeros((len(axis.parts), axis.points, taps))
    for number, part in enumerate(axis.parts):
        out[number][:, list(part)] = points[:, : len(part)]
    return out
