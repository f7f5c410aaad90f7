"""Operands of grouped convolutions in bit slices: no word holds a bit that nobody needs.

In the weight order ``sliced`` lanes are single bits: bit c of a vector of words belongs to output
channel c. For groups of ``g`` channels in and out, data are turned ``g`` times: in turn i, channel
``j`` of a group holds the group's channel ``(j + i) % g``. So each product is one XOR of a turned
data word and a word of weights for 32 output channels, and the bits in which they differ are
counted by adders made of logic (`schedules.templates.bit_sliced`). A depthwise convolution has one
turn, the data themselves, which are not moved to words of their own.

What the kernel counts, ``count``, takes bits outside the image for -1 (or +1 if `pad_value` is 1),
and counts a zero datum 1/2, so twice everything if the spec is ``ternary``. The accumulator is
``step * count + offset[class]`` with an offset for each border class and channel. If nothing but
thresholds is wanted, those are moved instead and stored in slices too: the bit is
``count < limit[class]``. All that is done here, once, when weights are packed.
"""

from __future__ import annotations

from itertools import product
from typing import TypeGuard

import numpy as np

from bnncc.topi_binary import borders
from bnncc.topi_binary.layout import LANES, SLICED, WORD_BITS, blocks, pack_bits, pad_lanes, words
from bnncc.topi_binary.spec import BinaryConv2d, Spec

ORDER = SLICED
"""The value of `BinaryConv2d.weight_order`."""


def fits(spec: BinaryConv2d) -> bool:
    """Return whether the kernel exists for `spec`: small groups with as many channels out as in."""
    alike = spec.channels == spec.out_channels
    small = spec.channels // spec.groups < WORD_BITS
    return spec.groups > 1 and alike and small and spec.rank == 4 and not spec.per_image


def turns(spec: BinaryConv2d) -> int:
    """Return how often data are turned: the channels of a group."""
    return spec.channels // spec.groups


def rows(spec: BinaryConv2d) -> int:
    """Return how many rows of `words` the products need: one for each tap and turn."""
    return spec.kernel[0] * spec.kernel[1] * turns(spec)


def masks(spec: BinaryConv2d) -> int:
    """Return how many rows of masks follow, which say where a turn crosses the end of a group.

    None where groups divide words: then a constant does.
    """
    return 0 if WORD_BITS % turns(spec) == 0 else turns(spec) - 1


def unit(spec: BinaryConv2d) -> int:
    """Return what one bit that differs counts."""
    return 2 if spec.ternary else 1


def step(spec: BinaryConv2d) -> int:
    """Return what the accumulator grows by with the count."""
    return (2 if spec.doubled else 1) // unit(spec)


def planes(spec: BinaryConv2d) -> int:
    """Return how many bits a limit has: limits are one above the highest count at most."""
    return (unit(spec) * spec.taps + 1).bit_length()


def compared(spec: BinaryConv2d) -> bool:
    """Return whether all steps are thresholds, so that accumulators need not be numbers."""
    return bool(spec.steps) and all(one.op == "threshold" for one in spec.steps)


def limited(spec: Spec) -> TypeGuard[BinaryConv2d]:
    """Return whether thresholds of `spec` are stored as limits, see `limits`."""
    return isinstance(spec, BinaryConv2d) and spec.weight_order == ORDER and compared(spec)


def classes(spec: BinaryConv2d) -> tuple[list[int], list[int]]:
    """Return the first row and column of each border class that has an offset of its own."""
    if spec.mode == "and" or spec.pad_value or not any(spec.pads):
        return [0], [0]
    return borders.classes(spec, 0), borders.classes(spec, 1)


def has_offsets(spec: BinaryConv2d) -> bool:
    """Return whether the weights end in a table of offsets."""
    zeros = any(spec.pads) and not spec.pad_value
    return not compared(spec) and (spec.mode == "and" or zeros)


def limit_shape(spec: BinaryConv2d) -> tuple[int, ...]:
    """Return the shape of the limits of a threshold: class, plane, word."""
    high, wide = classes(spec)
    return len(high) * len(wide), planes(spec), words(spec.channels)


def weight_size(spec: BinaryConv2d) -> int:
    """Return how many words `pack` makes."""
    size = (rows(spec) + masks(spec)) * words(spec.channels)
    if has_offsets(spec):
        high, wide = classes(spec)
        size += len(high) * len(wide) * blocks(spec.channels) * LANES
    return size


def pack(spec: BinaryConv2d, bits: np.ndarray) -> np.ndarray:
    """Store weights in the order the kernel reads them.

    Parameters
    ----------
    spec : BinaryConv2d
        What they are for, with its steps.
    bits : ndarray of bool, shape (out_channels, kernel_h, kernel_w, channels_per_group)
        True means +1.

    Returns
    -------
    ndarray of uint32, shape (weight_size(spec),)
        Rows of words in the order (kh, kw, turn); then masks; then int32 offsets, by class.
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
    """Store the thresholds of a spec that is `compared`.

    Parameters
    ----------
    spec : BinaryConv2d
        What they are for.
    bits : ndarray of bool, shape (out_channels, kernel_h, kernel_w, channels_per_group)
        Its weights.
    threshold : ndarray of int32, shape (lanes,)
        As other kernels take it: the bit is ``acc <= threshold[c]``.

    Returns
    -------
    ndarray of uint32, shape limit_shape(spec)
        Bit c of word w in plane k is bit k of the limit of channel ``32 * w + c``; 0, which no
        count is below, beyond the last channel.
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
