"""Narrow operands of float convolutions: formats, quantized weights, and packing in words.

``bfloat16`` rounds data and weights to 8 significant bits, ``float16`` to 11; products are summed
in float32. ``int8`` converts both to integers, with one scale per filter and one for the image, and
sums exactly. Up to `PACKED` operands share a 32-bit lane if the target multiplies them so (the
spec's `packed`); otherwise each operand is a float32 of the same value.

This module does not import TVM: passes quantize weights with it, and kernels read the result.
"""

from __future__ import annotations

import numpy as np

from bnncc.topi_binary.layout import LANES, blocks
from bnncc.topi_binary.spec import Conv2d

FORMATS = ("float32", "bfloat16", "int8", "float16", "bfloat16x3")
"""Formats of the operands. ``float16`` is for GPUs; ``bfloat16x3``, for AMX tiles, represents each
float32 as the sum of three bfloat16 numbers."""

PACKED = {"bfloat16": 2, "int8": 4, "float16": 2, "bfloat16x3": 2}
"""Operands per 32-bit lane."""

TERMS = 3
"""bfloat16 numbers per float32: 8 bits each, with a remainder below 2^-24."""

PRODUCTS = ((0, 2), (2, 0), (1, 1), (1, 0), (0, 1), (0, 0))
"""Pairs of a term of data and a term of weights; the smallest products are summed first."""

LEVELS = 127
"""Largest magnitude of an int8 operand."""

MIDDLE = 128
"""Byte that stands for 0 if data are scaled at run time, since bytes are unsigned."""

SMALLEST = 2.0**-100
"""Lower bound of an image's largest value in its scale, so that the reciprocal is finite."""

MAX_CHANNELS = 16
"""Maximum number of input channels that kernels interleave."""

SIDE_BY_SIDE = 8
"""With fewer channels, storing bfloat16 taps contiguously saves enough words to pay."""

MAX_SUM = 2**24
"""Bound of sums of products: float32 holds them exactly, and so does int32."""


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Round to the nearest bfloat16, ties to even.

    Parameters
    ----------
    values : ndarray of float32
        Finite.

    Returns
    -------
    ndarray of float32
        Same shape.

    Examples
    --------
    >>> to_bfloat16(np.array([1.0, 1.00390625, 1.01171875], np.float32)).tolist()
    [1.0, 1.0, 1.015625]
    """
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32).reshape(values.shape)


def terms(values: np.ndarray) -> list[np.ndarray]:
    """Return three bfloat16 numbers for each float32 number, the largest first."""
    made, rest = [], np.asarray(values, np.float32)
    for _ in range(TERMS):
        made.append(to_bfloat16(rest))
        rest = rest - made[-1]
    return made


def quantize_weight(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantize weights to integers, with one scale per filter.

    Parameters
    ----------
    weight : ndarray of float, shape (out_channels, ...)
        Finite.

    Returns
    -------
    integers : ndarray of float32, same shape
        In [-LEVELS, LEVELS].
    scale : ndarray of float64, shape (out_channels,)
        ``weight`` is approximately ``scale * integers``; 1 for a filter of zeros.
    """
    flat = weight.reshape(weight.shape[0], -1).astype(np.float64)
    top = np.abs(flat).max(axis=1, initial=0.0)
    scale = np.where(top > 0, top, LEVELS) / LEVELS
    return np.rint(flat / scale[:, None]).reshape(weight.shape).astype(np.float32), scale


def words(spec: Conv2d) -> int:
    """Return the number of words (vectors of weights) for the taps of one output."""
    taps = spec.window_size
    if spec.operands == "bfloat16x3":
        return TERMS * blocks(words_of_pixel(spec)) * LANES
    if spec.apart:
        return taps * words_of_pixel(spec)
    return -(-taps * spec.channels // spec.packed)


def words_of_pixel(spec: Conv2d) -> int:
    """Return the words per pixel, for layers whose pixels are `apart`."""
    return blocks(spec.channels, spec.packed)


def zero_bytes(spec: Conv2d) -> tuple[int, ...]:
    """Return, for each input channel, the byte that stands for 0 in packed int8 data."""
    return spec.zero_points or (MIDDLE,) * spec.channels


def rows_of_weight(spec: Conv2d) -> int:
    """Return the number of vectors of `LANES` words per block of output channels."""
    return words(spec) + (spec.packed == PACKED["int8"])


def weight_type(spec: Conv2d) -> tuple[int, str]:
    """Return size and dtype of the result of `pack_weight`."""
    size = blocks(spec.out_channels) * LANES * rows_of_weight(spec)
    return size, "float32" if spec.packed == 1 else "uint32"


def pack_weight(weight: np.ndarray, spec: Conv2d) -> np.ndarray:
    """Pack quantized weights in the order in which kernels read them.

    Parameters
    ----------
    weight : ndarray of float32, shape (out_channels, kernel_h, kernel_w, channels)
        Weights in the format of `spec`.

    Returns
    -------
    ndarray, one-dimensional, see `weight_type`
        Blocks of `LANES` output channels, the last one padded with zeros; within a block the order
        is (word, lane, tap of the word), with taps in the order (kh, kw, channel). If pixels are
        `apart`, the last word of each is padded with zeros. Bytes of data are unsigned, so packed
        int8 sums start at ``-sum(zero byte * weight)``, which is the first word.
    """
    if spec.operands == "bfloat16x3":
        rest = words(spec) // TERMS * spec.packed - spec.channels
        filled = np.pad(weight, [(0, 0)] * 3 + [(0, rest)]).astype(np.float32)
        weight = np.concatenate(terms(filled), axis=3)
    elif spec.apart:
        rest = words_of_pixel(spec) * spec.packed - spec.channels
        weight = np.pad(weight, [(0, 0)] * 3 + [(0, rest)])
    filters = weight.reshape(weight.shape[0], -1)
    padded = np.zeros((blocks(weight.shape[0]) * LANES, words(spec) * spec.packed), np.float32)
    padded[: filters.shape[0], : filters.shape[1]] = filters
    if spec.packed == 1:
        lanes = padded
    elif spec.operands == "float16":
        lanes = padded.astype("<f2").view("<u4")
    elif spec.packed == PACKED["bfloat16"]:  # one term, or each of three
        lanes = (padded.view(np.uint32) >> np.uint32(16)).astype("<u2").view("<u4")
    else:
        zeros = np.resize(np.array(zero_bytes(spec), np.int64), filters.shape[1])
        start = np.zeros((padded.shape[0], 1), "<i4")
        start[: filters.shape[0], 0] = -(filters.astype(np.int64) @ zeros)
        lanes = np.hstack([start.view("<u4"), padded.astype(np.int8).view("<u4")])
    cut = lanes.reshape(-1, LANES, lanes.shape[1]).transpose(0, 2, 1)
    return np.ascontiguousarray(cut.reshape(-1)).astype(weight_type(spec)[1])


def fits(spec: Conv2d) -> bool:
    """Whether `spec` can have narrow operands, with contiguous taps."""
    return (
        spec.rank == 4
        and spec.groups == 1
        and spec.dilations == (1, 1)
        and spec.channels <= MAX_CHANNELS
    )


def side_by_side(spec: Conv2d) -> bool:
    """Whether vectors multiply pixels that are side by side, not each in words of its own.

    Bytes with a zero point are, because they are first rounded to operands as a whole image.
    """
    return fits(spec) and (spec.channels < SIDE_BY_SIDE or bool(spec.zero_points))
