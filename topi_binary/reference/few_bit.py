"""What few-bit kernels compute, in NumPy: the oracle of their tests, from packed inputs on.

Levels and weights are read back from their packed forms by the definitions in `few_bit_data` and
`step`, not by their code, then multiplied as plain integers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from bnncc.topi_binary.reference.epilogue import apply_steps
from bnncc.topi_binary.reference.packing import read_levels, words_to_bits
from bnncc.topi_binary.spec import FewBitConv2d

Array = Any


def few_bit_conv2d(spec: FewBitConv2d, inputs: Sequence[Array]) -> list[Array]:
    """Compute a few-bit convolution with its epilogue."""
    stream = iter(inputs)
    count = spec.data_bits if spec.method in ("xor", "and") else 1
    data = [next(stream) for _ in range(count)]
    if spec.rank == 2:
        data = [one[:, None, None, :] for one in data]
    form = "planes" if spec.method in ("xor", "and") else spec.method
    levels = read_levels(data, spec.channels, form)
    weight = _read_weight(spec, next(stream))
    sums, inside = _accumulate(spec, levels, weight)
    acc = sums * (2 if spec.doubled else 1)
    if spec.method == "xor":
        # What the kernel subtracts: planes of data and weights that differ.
        full = (2**spec.data_bits - 1) * (inside @ _plane_weights(spec, weight))
        acc = acc - full * (2 if spec.doubled else 1)
    if spec.starts:
        table = next(stream)
        acc = acc + _starts(spec, table, acc.shape)
    steps = spec.steps
    if spec.rank == 2:
        steps = tuple(dataclasses.replace(step, layout="NHWC") for step in steps)
    results = apply_steps(steps, acc.astype(np.float32), stream, acc)
    return [r[:, 0, 0, :] if spec.rank == 2 else r for r in results]


def _read_weight(spec: FewBitConv2d, packed: Array) -> Array:
    """Return integer weights, shape (out_channels, kernel_h, kernel_w, channels per group)."""
    depth = spec.channels // spec.groups
    planes = spec.weight_bits if spec.method in ("xor", "and") else 1
    blocks = -(-spec.out_channels // 16)
    rows = packed.reshape(blocks, -1, 16).transpose(0, 2, 1).reshape(blocks * 16, -1)
    rows = np.ascontiguousarray(rows[: spec.out_channels])
    if planes == 1 and spec.method not in ("xor", "and"):
        kind = {"bytes": "<i1", "pairs": "<i2", "floats": "<f4"}[spec.method]
        return (
            rows.reshape(spec.out_channels, *spec.kernel, -1)
            .view(kind)[..., :depth]
            .astype(np.int64)
        )
    bits = words_to_bits(rows.reshape(spec.out_channels, planes, *spec.kernel, -1), depth)
    bits = bits.astype(np.int64)
    if spec.method == "xor":
        return sum((2 * bits[:, i] - 1) << i for i in range(planes))
    total = -(bits[:, planes - 1] << (planes - 1))
    return total + sum((bits[:, i] << i for i in range(planes - 1)), np.zeros_like(total))


def _plane_weights(spec: FewBitConv2d, weight: Array) -> Array:
    """Return ``sum 2**i popcount(t_i)`` for each tap, shape (taps, out_channels)."""
    top = 2**spec.weight_bits - 1
    unsigned = (weight + top) // 2
    return unsigned.sum(axis=3).reshape(spec.out_channels, -1).T


def _accumulate(spec: FewBitConv2d, levels: Array, weight: Array) -> tuple[Array, Array]:
    """Return sums over the taps inside, and which taps are, shape (h, w, taps)."""
    top, left, bottom, right = spec.pads
    around = ((0, 0), (top, bottom), (left, right), (0, 0))
    values = np.pad(levels.astype(np.float64), around)
    real = np.pad(np.ones(levels.shape[1:3]), around[1:3])
    reach = [d * (k - 1) for d, k in zip(spec.dilations, spec.kernel, strict=True)]
    height, width = (
        (extent - r - 1) // s + 1
        for extent, r, s in zip(values.shape[1:3], reach, spec.strides, strict=True)
    )
    per_in, per_out = spec.channels // spec.groups, spec.out_channels // spec.groups
    total = np.zeros((values.shape[0], height, width, spec.out_channels))
    inside = np.zeros((height, width, spec.kernel[0] * spec.kernel[1]), np.int64)
    for kh in range(spec.kernel[0]):
        for kw in range(spec.kernel[1]):
            rows = slice(kh * spec.dilations[0], None, spec.strides[0])
            columns = slice(kw * spec.dilations[1], None, spec.strides[1])
            seen = values[:, rows, columns][:, :height, :width]
            inside[:, :, kh * spec.kernel[1] + kw] = real[rows, columns][:height, :width]
            for g in range(spec.groups):
                taps = weight[g * per_out : (g + 1) * per_out, kh, kw].astype(np.float64)
                part = seen[..., g * per_in : (g + 1) * per_in]
                total[..., g * per_out : (g + 1) * per_out] += part @ taps.T
    return np.rint(total).astype(np.int64), inside


def _starts(spec: FewBitConv2d, table: Array, shape: tuple[int, ...]) -> Array:
    """Return the start value of each output."""

    def numbers(axis: int) -> Array:
        """Return the class of each row or column: a new one where other taps are inside."""
        first = np.arange(shape[1 + axis]) * spec.strides[axis] - spec.pads[axis]
        taps = first[:, None] + np.arange(spec.kernel[axis]) * spec.dilations[axis]
        inside = (taps >= 0) & (taps < (spec.height, spec.width)[axis])
        changed = (inside[1:] != inside[:-1]).any(axis=1)
        return np.concatenate([[0], np.cumsum(changed)])

    high, wide = numbers(0), numbers(1)
    lanes = -(-spec.out_channels // 16) * 16
    grid = table.reshape(high[-1] + 1, wide[-1] + 1, lanes)[..., : spec.out_channels]
    return np.broadcast_to(grid[high][:, wide].astype(np.int64), shape)
