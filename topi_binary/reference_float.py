"""What the float and bit-moving kernels compute, in NumPy: the oracle of their tests.

Plain loops over taps and channels in float64, cast at the end; nothing is shared with the
operators, not even the packing of weights. Every function takes the kernel's inputs in their order
and returns its outputs in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from bnncc.topi_binary.reference_few_bit import level_outputs, read_levels
from bnncc.topi_binary.spec import (
    BitwiseMaxPool,
    ConcatBits,
    Conv2d,
    Elementwise,
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
    if spec.operands == "float32":
        weight = _unblock(inputs[1], spec.out_channels, (*taps, depth)).astype(np.float64)
    else:
        data, unit = _rounded(spec, data)
        weight = _unpacked(spec, inputs[1])
    height, width = _extent(spec, 0), _extent(spec, 1)
    out = np.zeros((data.shape[0], height, width, spec.out_channels))
    per_group = spec.out_channels // spec.groups
    for y in range(height):
        for x in range(width):
            for i in range(taps[0]):
                for j in range(taps[1]):
                    row = y * spec.strides[0] - spec.pads[0] + i * spec.dilations[0]
                    column = x * spec.strides[1] - spec.pads[1] + j * spec.dilations[1]
                    if not (0 <= row < spec.height and 0 <= column < spec.width):
                        continue
                    pixel = data[:, row, column].reshape(-1, spec.groups, depth)
                    part = weight[:, i, j].reshape(spec.groups, per_group, depth)
                    products = np.einsum("ngc,goc->ngo", pixel, part)
                    out[:, y, x] += products.reshape(-1, spec.out_channels)
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
        elif spec.packed == 2:
            lane = (lane.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
        out[channel] = lane[:size].reshape(out.shape[1:])
    return out


def pool2d(spec: Pool2d, inputs: Sequence[Array]) -> list[Array]:
    """Compute a float pooling with its epilogue."""
    data = _to_nhwc(inputs[0], spec.data_layout, spec.rank).astype(np.float64)
    height, width = _extent(spec, 0), _extent(spec, 1)
    out = np.zeros((data.shape[0], height, width, spec.channels))
    for y in range(height):
        for x in range(width):
            values, size = [], 0
            for row, column in _window(spec, y, x):
                if 0 <= row < spec.height and 0 <= column < spec.width:
                    values.append(data[:, row, column])
                below = row < spec.height + spec.pads[2] or spec.ceil_extra == (0, 0)
                right = column < spec.width + spec.pads[3] or spec.ceil_extra == (0, 0)
                size += below and right
            if spec.kind == "max":
                empty = np.full((data.shape[0], spec.channels), -np.inf)
                out[:, y, x] = np.max(values, axis=0) if values else empty
            else:
                total = np.sum(values, axis=0)
                out[:, y, x] = total / (len(values) if spec.kind == "avg" else size)
    rank = 2 if spec.squeeze or spec.rank == 2 else 4
    return _epilogue(spec.steps, out, inputs[1:], rank)


def elementwise(spec: Elementwise, inputs: Sequence[Array]) -> list[Array]:
    """Compute an epilogue without an anchor."""
    if spec.planes:
        data = read_levels(inputs[: spec.planes], spec.channels, "planes").astype(np.float64)
        data = _to_nhwc(data, "NHWC", spec.rank)
        return _epilogue(spec.steps, data, inputs[spec.planes :], spec.rank)
    if not spec.from_bits:
        data = _to_nhwc(inputs[0], spec.data_layout, spec.rank).astype(np.float64)
        return _epilogue(spec.steps, data, inputs[1:], spec.rank)
    ones = _to_nhwc(_bits(inputs[0], spec.channels), "NHWC", spec.rank)
    data = np.where(ones, 1.0, 0.0 if spec.mode == "and" else -1.0)
    if spec.ternary:
        zeros = _to_nhwc(_bits(inputs[1], spec.channels), "NHWC", spec.rank)
        data = np.where(zeros, 0.0, data)
    return _epilogue(spec.steps, data, inputs[1 + spec.ternary :], spec.rank)


def bitwise_maxpool(spec: BitwiseMaxPool, inputs: Sequence[Array]) -> list[Array]:
    """Compute max (or min) pooling of bits."""
    data = inputs[0]
    height, width = _extent(spec, 0), _extent(spec, 1)
    if spec.planes > 1:
        return _level_maxpool(spec, inputs)
    out = np.zeros((data.shape[0], height, width, data.shape[3]), np.uint32)
    for y in range(height):
        for x in range(width):
            values = [
                data[:, row, column]
                for row, column in _window(spec, y, x)
                if 0 <= row < spec.height and 0 <= column < spec.width
            ]
            if values:
                join = np.bitwise_and if spec.minimum else np.bitwise_or
                out[:, y, x] = join.reduce(np.stack(values), axis=0)
    return [out ^ inputs[1] if spec.flip else out]


def _level_maxpool(spec: BitwiseMaxPool, inputs: Sequence[Array]) -> list[Array]:
    """Compute max pooling of levels."""
    bits = [_bits(plane, spec.channels).astype(np.int64) for plane in inputs]
    data = sum(plane << j for j, plane in enumerate(bits))
    height, width = _extent(spec, 0), _extent(spec, 1)
    out = np.zeros((data.shape[0], height, width, spec.channels), np.int64)
    for y in range(height):
        for x in range(width):
            for row, column in _window(spec, y, x):
                if 0 <= row < spec.height and 0 <= column < spec.width:
                    out[:, y, x] = np.maximum(out[:, y, x], data[:, row, column])
    return [_words((out >> j & 1).astype(bool)) for j in range(spec.planes)]


def concat_bits(spec: ConcatBits, inputs: Sequence[Array]) -> list[Array]:
    """Concatenate planes along the channels."""
    planes = [_bits(x, c) for x, c in zip(inputs, spec.channels, strict=True)]
    return [_words(np.concatenate(planes, axis=-1))]


def slice_bits(spec: SliceBits, inputs: Sequence[Array]) -> list[Array]:
    """Pick channels of a plane."""
    plane = _bits(inputs[0], spec.channels)
    picked = [plane[..., c] if c >= 0 else np.zeros(plane.shape[:-1], bool) for c in spec.index]
    return [_words(np.stack(picked, axis=-1))]


def pad_bits(spec: PadBits, inputs: Sequence[Array]) -> list[Array]:
    """Pad a plane at the border of the image."""
    plane = _bits(inputs[0], spec.channels)
    top, left, bottom, right = spec.pads
    width = ((0, 0), (top, bottom), (left, right), (0, 0))
    return [_words(np.pad(plane, width, constant_values=bool(spec.bit)))]


def _epilogue(
    steps: Sequence[Step], value: Array, params: Sequence[Array], rank: int
) -> list[Array]:
    """Apply `steps` to NHWC values, one after the other."""
    left, outputs = iter(params), []
    channels = value.shape[-1]

    def vector() -> Array:
        return next(left)[:channels].astype(np.float64)

    def tensor(step: Step) -> Array:
        return _to_nhwc(next(left), step.layout, rank).astype(np.float64)

    def laid_out(array: Array, where: str) -> Array:
        if rank == 2:
            return array[:, 0, 0]
        return np.ascontiguousarray(array.transpose(0, 3, 1, 2)) if where == "NCHW" else array

    for step in steps:
        if step.op == "affine":
            value = value * vector() + vector()
        elif step.op == "scale":
            value = value * vector()
        elif step.op == "shift":
            value = value + vector()
        elif step.op == "add":
            value = value + tensor(step)
        elif step.op == "rsub":
            value = tensor(step) - value
        elif step.op == "mul":
            value = value * tensor(step)
        elif step.op == "gate":
            value = value * next(left)[:, None, None, :].astype(np.float64)
        elif step.op == "relu":
            value = np.maximum(value, 0)
        elif step.op == "clip":
            value = np.clip(value, step.lo, step.hi)
        elif step.op == "prelu":
            value = np.where(value >= 0, value, value * vector())
        elif step.op == "store":
            outputs.append(laid_out(value, step.layout).astype(np.float32))
        elif step.op == "bits":
            plane = value >= 0 if step.compare == "ge" else value > 0
            outputs.append(_words(laid_out(plane, "NHWC")))
            if step.zero:
                outputs.append(_words(laid_out(value == 0, "NHWC")))
        elif step.op == "levels":
            where = step if rank == 4 else replace(step, layout="NHWC")
            made = level_outputs(where, value, None, left)
            outputs += [laid_out(array, "NHWC") for array in made]
        else:
            raise ValueError(f"{step.op} is not a step of a float kernel")
    return outputs


def _to_nhwc(array: Array, where: str, rank: int) -> Array:
    if rank == 2:
        return array[:, None, None, :]
    return array.transpose(0, 2, 3, 1) if where == "NCHW" else array


def _extent(spec: Conv2d | Pool2d | BitwiseMaxPool, axis: int) -> int:
    size = (spec.height, spec.width)[axis] + spec.pads[axis] + spec.pads[axis + 2]
    size += 0 if isinstance(spec, Conv2d) else spec.ceil_extra[axis]
    reach = (spec.kernel[axis] - 1) * spec.dilations[axis] + 1
    return (size - reach) // spec.strides[axis] + 1


def _window(spec: Pool2d | BitwiseMaxPool, y: int, x: int) -> list[tuple[int, int]]:
    return [
        (
            y * spec.strides[0] - spec.pads[0] + i * spec.dilations[0],
            x * spec.strides[1] - spec.pads[1] + j * spec.dilations[1],
        )
        for i in range(spec.kernel[0])
        for j in range(spec.kernel[1])
    ]


def _unblock(packed: Array, channels: int, taps: tuple[int, ...]) -> Array:
    """Read weights stored in blocks of 16 output channels, the last one of fewer."""
    size = int(np.prod(taps))
    out = np.zeros((channels, size), packed.dtype)
    for channel in range(channels):
        first = channel // 16 * 16
        lanes = min(16, channels - first)
        for tap in range(size):
            out[channel, tap] = packed[first * size + tap * lanes + channel - first]
    return out.reshape(channels, *taps)


def _bits(packed: Array, channels: int) -> Array:
    numbers = np.arange(channels)
    return (packed[..., numbers // 32] >> (numbers % 32).astype(np.uint32)) & 1 == 1


def _words(bits: Array) -> Array:
    out = np.zeros((*bits.shape[:-1], -(-bits.shape[-1] // 32)), np.uint32)
    for channel in range(bits.shape[-1]):
        out[..., channel // 32] |= bits[..., channel].astype(np.uint32) << np.uint32(channel % 32)
    return out
