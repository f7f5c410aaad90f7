"""Operands of grouped convolutions in bit slices, which leave no bits of words unused.

In the weight order ``sliced``, each lane is a single bit: bit c of a vector of words belongs to
output channel c. For groups of ``g`` channels in and out, data are rotated within groups ``g``
times: in rotation i, channel ``j`` of a group holds the group's channel ``(j + i) % g``. So each
product is one XOR of a rotated data word and a word of weights, for 32 output channels at once.
Differing bits are counted by adders built from logic operations (`schedules.templates.bit_sliced`).
A depthwise convolution has one rotation, the data themselves, which need not be repacked.

The kernel's count treats bits outside the image as -1 (+1 if `pad_value` is 1), and counts 1/2 for
an exact zero; if the spec is ``ternary``, everything counts twice. The accumulator is ``step *
count + offset[class]`` with an offset per border class and channel. If all steps are thresholds,
these are adjusted instead and stored in slices too: the bit is ``count < limit[class]``. The
adjustment is done here, when weights are packed.
"""

from __future__ import annotations

from itertools import product
from typing import TypeGuard

import numpy as np

from bnncc.topi_binary import borders
from bnncc.topi_binary.layout import LANES, SLICED, WORD_BITS, blocks, pack_bits, pad_lanes, words
from bnncc.topi_binary.spec import BinaryConv2d, Spec

ORDER = SLICED
"""Value of `BinaryConv2d.weight_order`."""


def fits(spec: BinaryConv2d) -> bool:
    """Return whether the kernel supports `spec`: small groups, as many inputs as outputs."""
    alike = spec.channels == spec.out_channels
    small = spec.channels_per_group < WORD_BITS
    return spec.groups > 1 and alike and small and spec.rank == 4 and not spec.per_image


def turns(spec: BinaryConv2d) -> int:
    """Return the number of rotations: the channels per group."""
    return spec.channels_per_group


def rows(spec: BinaryConv2d) -> int:
    """Return the number of weight rows of `words`: one per tap and rotation."""
    return spec.window_size * turns(spec)


def masks(spec: BinaryConv2d) -> int:
    """Return the number of mask rows, which mark where a rotation crosses the end of a group.

    0 if groups divide words, so that a constant mask suffices.
    """
    return 0 if WORD_BITS % turns(spec) == 0 else turns(spec) - 1


def unit(spec: BinaryConv2d) -> int:
    """Return the count of one differing bit."""
    return 2 if spec.ternary else 1


def step(spec: BinaryConv2d) -> int:
    """Return the factor between count and accumulator."""
    return (2 if spec.doubled else 1) // unit(spec)


def planes(spec: BinaryConv2d) -> int:
    """Return the bits per limit; limits are at most one above the largest count."""
    return (unit(spec) * spec.taps + 1).bit_length()


def compared(spec: BinaryConv2d) -> bool:
    """Return whether all steps are thresholds, so that counts need not be converted to numbers."""
    return bool(spec.steps) and all(one.op == "threshold" for one in spec.steps)


def limited(spec: Spec) -> TypeGuard[BinaryConv2d]:
    """Return whether the thresholds of `spec` are stored as limits, see `limits`."""
    return isinstance(spec, BinaryConv2d) and spec.weight_order == ORDER and compared(spec)


def classes(spec: BinaryConv2d) -> tuple[list[int], list[int]]:
    """Return the first row and the first column of each border class with an offset of its own."""
    if spec.mode == "and" or spec.pad_value or not any(spec.pads):
        return [0], [0]
    return borders.classes(spec, 0), borders.classes(spec, 1)


def has_offsets(spec: BinaryConv2d) -> bool:
    """Return whether a table of offsets follows the weights."""
    zeros = any(spec.pads) and not spec.pad_value
    return not compared(spec) and (spec.mode == "and" or zeros)


def limit_shape(spec: BinaryConv2d) -> tuple[int, ...]:
    """Return the shape of a threshold's limits: class, plane, word."""
    high, wide = classes(spec)
    return len(high) * len(wide), planes(spec), words(spec.channels)


def weight_size(spec: BinaryConv2d) -> int:
    """Return the number of words that `pack` returns."""
    size = (rows(spec) + masks(spec)) * words(spec.channels)
    if has_offsets(spec):
        high, wide = classes(spec)
        size += len(high) * len(wide) * blocks(spec.channels) * LANES
    return size


def pack(spec: BinaryConv2d, bits: np.ndarray) -> np.ndarray:
    """Pack weights in the order in which the kernel reads them.

    Parameters
    ----------
    spec : BinaryConv2d
        Spec of the layer, with its steps.
    bits : ndarray of bool, shape (out_channels, kernel_h, kernel_w, channels_per_group)
        True means +1.

    Returns
    -------
    ndarray of uint32, shape (weight_size(spec),)
        Rows of words in the order (kh, kw, rotation); then masks; then int32 offsets by class.
    """
    size = turns(spec)
    place = np.arange(spec.channels) % size
    turned = (place[:, None] + np.arange(size)) % size
    weights = np.take_along_axis(bits, turned[:, None, None, :], axis=3)
    parts = [pack_bits(weights.transpose(1, 2, 3, 0)).ravel()]
    if masks(spec):
        parts.append(pack_bits(place + np.arange(1, size)[:, None] < size).ravel())
    if has_offsets(spec):
        table = pad_lanes(_offsets(spec, bits).T).T
        parts.append(table.ravel().astype(np.int32).view(np.uint32))
    return np.concatenate(parts)


def limits(spec: BinaryConv2d, bits: np.ndarray, threshold: np.ndarray) -> np.ndarray:
    """Convert the thresholds of a spec that is `compared` to limits, and pack them.

    Parameters
    ----------
    spec : BinaryConv2d
        Spec of the layer.
    bits : ndarray of bool, shape (out_channels, kernel_h, kernel_w, channels_per_group)
        Its weights.
    threshold : ndarray of int32, shape (lanes,)
        In the form that other kernels take: the bit is ``acc <= threshold[c]``.

    Returns
    -------
    ndarray of uint32, shape limit_shape(spec)
        Bit c of word w in plane k is bit k of the limit of channel ``32 * w + c``. Beyond the last
        channel, limits are 0, so that bits are 0.
    """
    moved = threshold[: spec.channels].astype(np.int64) - _offsets(spec, bits)
    found = np.clip(moved // step(spec) + 1, 0, unit(spec) * spec.taps + 1)
    sliced = found[:, None] >> np.arange(planes(spec))[:, None] & 1
    return pack_bits(sliced.astype(bool))


def _offsets(spec: BinaryConv2d, bits: np.ndarray) -> np.ndarray:
    """Return ``acc - step * count`` by class and channel."""
    ones = bits.sum(axis=3, dtype=np.int64)
    high, wide = classes(spec)
    if spec.mode == "and":
        return -ones.sum(axis=(1, 2))[None]
    table = np.zeros((len(high) * len(wide), spec.channels), np.int64)
    if spec.pad_value == 0:
        whole = 2 if spec.doubled else 1
        half = whole * turns(spec) // 2 - whole * ones
        for number, place in enumerate(product(high, wide)):
            table[number] = np.where(borders.inside(spec, *place), 0, half).sum(axis=(1, 2))
    return table
