"""NumPy oracle of the few-bit kernels, from packed inputs on.

Levels and weights are unpacked by the definitions in `few_bit_data` and `step`, without their code,
and then multiplied as plain integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bnncc.topi_binary.reference import windows
from bnncc.topi_binary.reference.epilogue import finished, nhwc
from bnncc.topi_binary.reference.packing import read_levels, words_to_bits
from bnncc.topi_binary.spec import FewBitConv2d

Array = Any


def few_bit_conv2d(spec: FewBitConv2d, inputs: Sequence[Array]) -> list[Array]:
    """Compute a few-bit convolution with its epilogue."""
    stream = iter(inputs)
    count = spec.data_bits if spec.method in ("xor", "and") else 1
    data = [nhwc(next(stream)) for _ in range(count)]
    form = {"xor": "planes", "and": "planes", "packed": "bytes"}.get(spec.method, spec.method)
    levels = read_levels(data, spec.channels, form)
    weight = _read_weight(spec, next(stream))
    sums, inside = _accumulate(spec, levels, weight)
    acc = sums * (2 if spec.doubled else 1)
    if spec.method == "xor":
        # The kernel subtracts counts of differing bits of data and weight planes.
        full = (2**spec.data_bits - 1) * (inside @ _plane_weights(spec, weight))
        acc = acc - full * (2 if spec.doubled else 1)
    if spec.starts:
        table = next(stream)
        acc = acc + _starts(spec, table, acc.shape)
    return finished(spec, acc, stream, acc)


def _read_weight(spec: FewBitConv2d, packed: Array) -> Array:
    """Return integer weights, shape (out_channels, kernel_h, kernel_w, channels per group)."""
    depth = spec.channels_per_group
    planes = spec.weight_bits if spec.method in ("xor", "and") else 1
    blocks = -(-spec.out_channels // 16)
    if spec.method == "packed":  # four blocks lie side by side, or those that are left
        words = packed.size // (blocks * 16)
        ends = range(0, packed.size, 4 * words * 16)
        runs = [packed[i : i + 4 * words * 16].reshape(words, -1, 16) for i in ends]
        packed = np.concatenate([run.swapaxes(0, 1) for run in runs])
    rows = packed.reshape(blocks, -1, 16).transpose(0, 2, 1).reshape(blocks * 16, -1)
    rows = np.ascontiguousarray(rows[: spec.out_channels])
    if spec.method == "packed":
        return _read_codes(spec, rows)[..., :depth]
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


def _read_codes(spec: FewBitConv2d, words: Array) -> Array:
    """Return the weights of words (out_channels, words): those of each byte, its low bits first."""
    bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little").astype(np.int64)
    bits = bits.reshape(len(words), -1, 4, 8 // spec.weight_bits, spec.weight_bits)
    codes = (bits << np.arange(spec.weight_bits)).sum(axis=-1).swapaxes(2, 3)
    codes = codes.reshape(spec.out_channels, *spec.kernel, -1)
    return 2 * codes - 1 if spec.weight_bits == 1 else codes - 2 ** (spec.weight_bits - 1)


def _plane_weights(spec: FewBitConv2d, weight: Array) -> Array:
    """Return ``sum 2**i popcount(t_i)`` for each tap, shape (taps, out_channels)."""
    top = 2**spec.weight_bits - 1
    unsigned = (weight + top) // 2
    return unsigned.sum(axis=3).reshape(spec.out_channels, -1).T


def _accumulate(spec: FewBitConv2d, levels: Array, weight: Array) -> tuple[Array, Array]:
    """Return the sums over the taps inside, and a mask of these taps, shape (h, w, taps)."""
    padded = windows.pad(spec, levels.astype(np.float64))
    total = windows.products(spec, padded, weight.astype(np.float64))
    real = windows.pad(spec, np.ones((1, *levels.shape[1:3], 1), np.int64))
    inside = np.concatenate([seen[0] for _, _, seen in windows.taps(spec, real)], axis=-1)
    return np.rint(total).astype(np.int64), inside


def _starts(spec: FewBitConv2d, table: Array, shape: tuple[int, ...]) -> Array:
    """Return the initial value of each output."""
    high, wide = (windows.classes(spec, axis) for axis in (0, 1))
    lanes = -(-spec.out_channels // 16) * 16
    grid = table.reshape(high[-1] + 1, wide[-1] + 1, lanes)[..., : spec.out_channels]
    return np.broadcast_to(grid[high][:, wide].astype(np.int64), shape)
