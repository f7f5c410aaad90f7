"""What the float and bit-moving kernels compute, in NumPy: the oracle of their tests.

Plain loops over taps, sums in float64, rounded once; then the epilogue in float32. Nothing is
shared with the operators, not even the packing of weights (but for the matrices of minimal
filtering). Every function takes the kernel's inputs in their order and returns its outputs in their
order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from bnncc.topi_binary import filtering
from bnncc.topi_binary.reference.epilogue import apply_steps
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
from bnncc.topi_binary.step import step_inputs

Array = Any


def conv2d(spec: Conv2d, inputs: Sequence[Array]) -> list[Array]:
    """Compute a float convolution with its pooling and epilogue, every product done directly."""
    data = _to_nhwc(inputs[0], spec.data_layout, spec.rank).astype(np.float64)
    taps, depth = spec.kernel, spec.channels // spec.groups
    unit = np.ones(data.shape[0])
    if spec.operands != "float32":
        data, unit = _rounded(spec, data)
        weight = _unpacked(spec, inputs[1])
    elif spec.method == "direct":
        weight = _unblock(inputs[1], spec.out_channels, (*taps, depth)).astype(np.float64)
    else:
        weight = _unfiltered(inputs[1], spec)
    height, width = _extent(spec, 0), _extent(spec, 1)
    out = np.zeros((data.shape[0], height, width, spec.out_channels))
    per_group = spec.out_channels // spec.groups
    top, left, bottom, right = spec.pads
    padded = np.pad(data, ((0, 0), (top, bottom), (left, right), (0, 0)))
    for i in range(taps[0]):
        for j in range(taps[1]):
            seen = _tap(spec, padded, i, j, (height, width))
            for g in range(spec.groups):
                made = slice(g * per_group, (g + 1) * per_group)
                read = slice(g * depth, (g + 1) * depth)
                out[..., made] += seen[..., read] @ weight[made, i, j].T
    out *= unit[:, None, None, None]
    if spec.pool is None:
        return _epilogue(spec.steps, out, inputs[2:], spec.rank)
    pool, taken = spec.pool, 2 + sum(map(step_inputs, spec.pool.before))
    rows = _epilogue((*pool.before, Step("store")), out, inputs[2:taken], spec.rank)
    after = Pool2d(
        spec.n, height, width, spec.out_channels, "max", pool.kernel, pool.strides,
        pads=pool.pads, ceil_extra=pool.ceil_extra, steps=spec.steps,
    )  # fmt: skip
    return pool2d(after, [*rows, *inputs[taken:]])


def _rounded(spec: Conv2d, data: Array) -> tuple[Array, Array]:
    """Return NHWC data as operands of `spec`, and what a unit of each image's sums is worth."""
    ones = np.ones(data.shape[0])
    if spec.zero_points:
        return data - np.array(spec.zero_points), ones
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
    """Read quantised weights: blocks of 16 output channels, lanes of `packed` taps each."""
    size = spec.kernel[0] * spec.kernel[1] * spec.channels
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
        out[channel] = lane[:size].reshape(out.shape[1:])
    return out


def pool2d(spec: Pool2d, inputs: Sequence[Array]) -> list[Array]:
    """Compute a float pooling with its epilogue."""
    data = _to_nhwc(inputs[0], spec.data_layout, spec.rank).astype(np.float64)
    size = _extent(spec, 0), _extent(spec, 1)
    top, left, bottom, right = spec.pads
    more = spec.ceil_extra
    around = ((0, 0), (top, bottom + more[0]), (left, right + more[1]), (0, 0))
    largest = spec.kind == "max"
    padded = np.pad(data, around, constant_values=-np.inf if largest else 0.0)
    inside = np.pad(np.ones((1, spec.height, spec.width, 1)), around)
    if spec.kind == "avg_full" and more != (0, 0):  # what ceil_mode adds never counts
        inside[:, : spec.height + top + bottom, : spec.width + left + right] = 1
    elif spec.kind == "avg_full":
        inside[:] = 1
    out = np.full((data.shape[0], *size, spec.channels), -np.inf if largest else 0.0)
    count = np.zeros((1, *size, 1))
    for i in range(spec.kernel[0]):
        for j in range(spec.kernel[1]):
            seen = _tap(spec, padded, i, j, size)
            out = np.maximum(out, seen) if largest else out + seen
            count += _tap(spec, inside, i, j, size)
    rank = 2 if spec.squeeze or spec.rank == 2 else 4
    return _epilogue(spec.steps, out if largest else out / count, inputs[1:], rank)


def elementwise(spec: Elementwise, inputs: Sequence[Array]) -> list[Array]:
    """Compute an epilogue without an anchor."""
    if spec.planes:
        data = read_levels(inputs[: spec.planes], spec.channels, "planes").astype(np.float64)
        data = _to_nhwc(data, "NHWC", spec.rank)
        return _epilogue(spec.steps, data, inputs[spec.planes :], spec.rank)
    if not spec.from_bits:
        data = _to_nhwc(inputs[0], spec.data_layout, spec.rank).astype(np.float64)
        return _epilogue(spec.steps, data, inputs[1:], spec.rank)
    ones = _to_nhwc(words_to_bits(inputs[0], spec.channels), "NHWC", spec.rank)
    data = np.where(ones, 1.0, 0.0 if spec.mode == "and" else -1.0)
    if spec.ternary:
        zeros = _to_nhwc(words_to_bits(inputs[1], spec.channels), "NHWC", spec.rank)
        data = np.where(zeros, 0.0, data)
    return _epilogue(spec.steps, data, inputs[1 + spec.ternary :], spec.rank)


def bitwise_maxpool(spec: BitwiseMaxPool, inputs: Sequence[Array]) -> list[Array]:
    """Compute max (or min) pooling of bits, or max pooling of levels."""
    planes = [
        words_to_bits(plane, spec.channels).astype(np.int64) for plane in inputs[: spec.planes]
    ]
    data: Array = sum(plane << j for j, plane in enumerate(planes))
    size = _extent(spec, 0), _extent(spec, 1)
    around = ((0, 0), *(
        (spec.pads[axis], spec.pads[axis + 2] + spec.ceil_extra[axis]) for axis in (0, 1)
    ), (0, 0))  # fmt: skip
    padded = np.pad(data, around, constant_values=-1)  # less than all levels
    out = np.full((data.shape[0], *size, spec.channels), -1)
    for i in range(spec.kernel[0]):
        for j in range(spec.kernel[1]):
            seen = _tap(spec, padded, i, j, size)
            if spec.minimum:  # of what is inside the image
                lower = np.where(out < 0, seen, np.minimum(out, seen))
                out = np.where(seen < 0, out, lower)
            else:
                out = np.maximum(out, seen)
    out = np.maximum(out, 0)
    made = [bits_to_words((out >> j & 1).astype(bool)) for j in range(spec.planes)]
    return [made[0] ^ inputs[1]] if spec.flip else made


def image_bits(spec: ImageBits, inputs: Sequence[Array]) -> list[Array]:
    """Compute the bits of an image of bytes, pixel values as Python would compare them."""
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
    """Pick channels of a plane."""
    plane = words_to_bits(inputs[0], spec.channels)
    picked = [plane[..., c] if c >= 0 else np.zeros(plane.shape[:-1], bool) for c in spec.index]
    return [bits_to_words(np.stack(picked, axis=-1))]


def pad_bits(spec: PadBits, inputs: Sequence[Array]) -> list[Array]:
    """Pad a plane at the border of the image."""
    plane = words_to_bits(inputs[0], spec.channels)
    top, left, bottom, right = spec.pads
    width = ((0, 0), (top, bottom), (left, right), (0, 0))
    return [bits_to_words(np.pad(plane, width, constant_values=bool(spec.bit)))]


def _epilogue(
    steps: Sequence[Step], value: Array, params: Sequence[Array], rank: int
) -> list[Array]:
    """Apply `steps` to NHWC values, rounded to float32 as in a register."""
    if rank == 2:
        steps = [replace(step, layout="NHWC") for step in steps]
    made = apply_steps(steps, value.astype(np.float32), iter(params))
    return [array[:, 0, 0] if rank == 2 else np.ascontiguousarray(array) for array in made]


def _tap(
    spec: Conv2d | Pool2d | BitwiseMaxPool, padded: Array, row: int, column: int,
    size: tuple[int, int],
) -> Array:  # fmt: skip
    """Return what one tap of the window sees of padded NHWC data, for all outputs."""
    first = row * spec.dilations[0], column * spec.dilations[1]
    rows, columns = (slice(f, None, s) for f, s in zip(first, spec.strides, strict=True))
    return padded[:, rows, columns][:, : size[0], : size[1]]


def _to_nhwc(array: Array, where: str, rank: int) -> Array:
    if rank == 2:
        return array[:, None, None, :]
    return array.transpose(0, 2, 3, 1) if where == "NCHW" else array


def _extent(spec: Conv2d | Pool2d | BitwiseMaxPool, axis: int) -> int:
    size = (spec.height, spec.width)[axis] + spec.pads[axis] + spec.pads[axis + 2]
    size += spec.ceil_extra[axis]
    reach = (spec.kernel[axis] - 1) * spec.dilations[axis] + 1
    return (size - reach) // spec.strides[axis] + 1


def _unblock(packed: Array, channels: int, taps: tuple[int, ...]) -> Array:
    """Read weights stored in blocks of 16 output channels, the last one of fewer."""
    size = int(np.prod(taps))
    out = np.zeros((channels, size), packed.dtype)
    for first in range(0, channels, 16):
        lanes = min(16, channels - first)
        block = packed[first * size : first * size + lanes * size]
        out[first : first + lanes] = block.reshape(size, lanes).T
    return out.reshape(channels, *taps)


def _unfiltered(packed: Array, spec: Conv2d) -> Array:
    """Read weights that were transformed for minimal filtering: the ones whose transforms they are.

    The transform has more points than taps, so that this also tells transforms from other numbers.

    Raises
    ------
    ArithmeticError
        If they are the transforms of no weights.
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
    """Return by part and point what each tap of a direction counts; without `axis`, taps as such.

    Rows that are not filtered are parts of their own, with one point.
    """
    if axis is None:
        return np.eye(taps)[:, None, :]
    points = filtering.as_array(axis.transform.kernel)
    out = np.zeros((len(axis.parts), axis.points, taps))
    for number, part in enumerate(axis.parts):
        out[number][:, list(part)] = points[:, : len(part)]
    return out
