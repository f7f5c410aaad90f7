"""Storage of levels and weights in few-bit convolutions, for each method.

With data levels k (planes ``d_j`` of bits, ``k = sum 2**j d_j``) and integer weights q:

* ``xor``: weights are odd, ``q = sum 2**i t_i`` with signs t. A product of planes is
  ``popcount(t_i) - popcount(d_j ^ t_i)``. The first term depends on weights only and is part of the
  initial values; the kernel subtracts ``sum 2**(i + j) popcount(d_j ^ t_i)`` from them.
* ``and``: weights are two's complement, ``q = sum 2**i u_i - 2**(W - 1) u_(W - 1)`` (the sum is
  over the lower planes), and a product of planes is ``popcount(d_j & u_i)``. Ternary weights have
  two planes: nonzero, and negative.
* ``bytes``: a word holds four unsigned levels or four signed weights; one instruction multiplies
  and adds them.
* ``pairs``: the same with two 16-bit numbers.
* ``floats``: each is a float32; sums below 2**24 are exact.
* ``packed``: levels as in ``bytes``. Codes of 1, 2 or 4 bits stay packed until they are multiplied:
  ``q = step * code + first`` with codes >= 0, so a sum is ``step * sum(k * code) + first *
  sum(k)``. In a word of codes, bits ``8 * b + W * j`` belong to channel ``4 * j + b``, so a shift
  and a mask extract the bytes that correspond to four adjacent levels.

This module does not import TVM: passes pack weights with it, and kernels read the result.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from bnncc.topi_binary.borders import classes, inside
from bnncc.topi_binary.layout import (
    LANES,
    WORD_BITS,
    blocks,
    level_words,
    pack_bits,
    pad_lanes,
)
from bnncc.topi_binary.spec import LEVEL_FORM, FewBitConv2d

METHODS = tuple(LEVEL_FORM)
"""Methods of computing products."""

CODES = {1: (2, -1), 2: (1, -2), 4: (1, -8)}
"""Step and first weight of ``packed`` weights, by bits per code."""

MAX_FLOAT = 2**24
"""Bound of the sums of ``floats``, and of their initial values."""

TOGETHER = 4
"""Blocks of output channels whose ``packed`` words are interleaved, so that a kernel that processes
several blocks reads one contiguous stream."""

MAX_PACKED = 2**19
"""Number of channels up to which sums of products of codes, scaled by up to 8, fit in 32 bits."""

MAX_SHORT = 2**15 - 1
"""Largest int16."""

PER_WORD = {"bytes": 4, "pairs": 2, "floats": 1}
"""Levels per word, in the forms other than planes."""


def group_words(spec: FewBitConv2d) -> int:
    """Return the number of words of one group and pixel."""
    return -(-spec.channels_per_group // per_word(spec))


def per_word(spec: FewBitConv2d) -> int:
    """Return the channels per word of weights (of one plane, if there are planes)."""
    if spec.method == "packed":
        return WORD_BITS // spec.weight_bits
    return PER_WORD.get(spec.form, WORD_BITS)


def sums_of_word(spec: FewBitConv2d) -> int:
    """Return the number of sums per word of weights: one per position of a code in half a byte."""
    return 4 // spec.weight_bits if spec.method == "packed" else 1


def short_words(spec: FewBitConv2d) -> int:
    """Return the number of words of ``packed`` weights whose products are added in 16 bits.

    As many as sums of pairs of products, if all are the largest, can be in int16; a divisor of the
    number of all words if there is one of at least half of that.
    """
    largest = (2**spec.weight_bits - 1) * (2**spec.data_bits - 1)
    most = max(1, MAX_SHORT // (2 * largest) // (8 // spec.weight_bits))
    count = group_words(spec)
    equal = max(size for size in range(1, min(count, most) + 1) if count % size == 0)
    return equal if 2 * equal > most else -(-count // -(-count // most))


def code_bits(bits: int, signs: bool) -> int:
    """Return the bits per code of weights of `bits` bits in two's complement.

    Weights that are all -1 or 1 are `signs`. If no code holds the weights, it is `bits` itself.
    """
    widths = [width for width in CODES if width >= bits and (signs or width > 1)]
    return min([1] * signs + widths, default=bits)


def packs(spec: FewBitConv2d) -> bool:
    """Return whether the method ``packed`` can compute a layer; kernels must be 1x1.

    A word of weights must not extend beyond the levels of a pixel.
    """
    stored = level_words(spec.channels, "bytes") * PER_WORD["bytes"]
    fits = group_words(spec) * per_word(spec) <= stored and spec.channels <= MAX_PACKED
    return spec.pointwise and spec.groups == 1 and spec.weight_bits in CODES and fits


def weight_planes(spec: FewBitConv2d) -> int:
    """Return the number of weight planes; 1 if weights are numbers."""
    return spec.weight_bits if spec.form == "planes" else 1


def constants(spec: FewBitConv2d) -> list[tuple[tuple[int, ...], str]]:
    """Return shape and dtype of the weights and of the initial values."""
    taps = spec.window_size * group_words(spec) * weight_planes(spec)
    size = blocks(spec.out_channels) * LANES
    dtype = "float32" if spec.method == "floats" else "uint32"
    start = [((len(classes(spec, 0)) * len(classes(spec, 1)) * size,), "int32")]
    return [((size * taps,), dtype), *(start if spec.starts else [])]


def planes_of(weight: np.ndarray, bits: int, method: str) -> np.ndarray:
    """Decompose integer weights into planes.

    Parameters
    ----------
    weight : ndarray of int
        For ``xor``, odd and less than ``2**bits`` in magnitude; otherwise two's complement.
    bits : int
        Number of planes.
    method : {"xor", "and"}
        Method of the layer.

    Returns
    -------
    ndarray of bool, shape (bits, ...)
    """
    whole = weight.astype(np.int64)
    unsigned = (whole + 2**bits - 1) // 2 if method == "xor" else whole & (2**bits - 1)
    return np.stack([(unsigned >> i & 1).astype(bool) for i in range(bits)])


def pack_weight(weight: np.ndarray, spec: FewBitConv2d) -> np.ndarray:
    """Pack integer weights in the order in which kernels read them.

    Parameters
    ----------
    weight : ndarray of int, shape (out_channels, kernel_h, kernel_w, channels_per_group)
        Weights of `spec`.

    Returns
    -------
    ndarray, one-dimensional, see `constants`
        Blocks of `LANES` output channels, the last one padded with zeros; within a block the order
        is (plane, kh, kw, word, lane). ``packed`` weights are interleaved in groups of `TOGETHER`
        blocks, the last group possibly of fewer: (word, block, lane).
    """
    if spec.form == "planes":
        planes = planes_of(weight, spec.weight_bits, spec.method)
        packed = pack_bits(planes).transpose(1, 0, 2, 3, 4)
    else:
        count, together = group_words(spec), per_word(spec)
        dtype = {4: "<i1", 2: "<i2", 1: "<f4"}.get(together, "<u1")
        filled = np.zeros((*weight.shape[:3], count * together), dtype)
        step, first = CODES[spec.weight_bits] if spec.method == "packed" else (1, 0)
        filled[..., : weight.shape[3]] = (weight - first) // step
        if spec.method == "packed":
            filled = _side_by_side(filled.reshape(*weight.shape[:3], count, -1, 4))
        packed = filled.view("<f4" if together == 1 else "<u4")
    rows = packed.reshape(weight.shape[0], -1)
    cut = pad_lanes(rows).reshape(-1, LANES, rows.shape[1]).transpose(0, 2, 1)
    if spec.method != "packed":
        return np.ascontiguousarray(cut).reshape(-1)
    firsts = range(0, len(cut), TOGETHER)
    return np.concatenate([cut[i : i + TOGETHER].swapaxes(0, 1).reshape(-1) for i in firsts])


def _side_by_side(codes: np.ndarray) -> np.ndarray:
    """Pack codes (..., words, positions in a byte, 4) to bytes (..., words * 4)."""
    *outer, count, places, together = codes.shape
    moved = codes << (8 // places * np.arange(places, dtype=np.uint8))[:, None]
    return np.bitwise_or.reduce(moved, axis=-2).reshape(*outer, count * together)


def start_values(
    weight: np.ndarray, spec: FewBitConv2d, outside: float, offset: int = 0
) -> np.ndarray:
    """Return the initial value of the sums, for each border class and output channel.

    Parameters
    ----------
    weight : ndarray of int, shape (out_channels, kernel_h, kernel_w, channels_per_group)
        Weights of `spec`.
    outside : float
        Level of pixels outside the image; if it is a half-integer, `spec` is doubled.
    offset : int, default 0
        Added to every level, inside the image and outside.

    Returns
    -------
    ndarray of int32, shape (row classes * column classes * padded out_channels,)
    """
    whole = weight.astype(np.int64)
    factor = 2 if spec.doubled else 1
    missing = whole.sum(axis=3) * round(factor * outside)
    present = np.zeros_like(missing)
    if spec.method == "xor":
        bits = planes_of(whole, spec.weight_bits, "xor").sum(axis=4, dtype=np.int64)
        scaled = (bits << np.arange(spec.weight_bits).reshape(-1, 1, 1, 1)).sum(axis=0)
        present = scaled * (2**spec.data_bits - 1) * factor
    moved = factor * offset * whole.sum(axis=(1, 2, 3))
    places = [*product(classes(spec, 0), classes(spec, 1))]
    out = np.zeros((len(places), blocks(weight.shape[0]) * LANES), np.int32)
    for number, place in enumerate(places):
        sums = np.where(inside(spec, *place), present, missing).sum(axis=(1, 2)) + moved
        out[number, : weight.shape[0]] = sums
    return out.reshape(-1)
