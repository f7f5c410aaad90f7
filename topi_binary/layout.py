"""Conventions shared by all parts of bnncc: bit sense, bit order, word size, layouts.

* Bit 1 means +1, bit 0 means -1 (for unipolar data: 1 and 0).
* Channel ``c`` is bit ``c % WORD_BITS`` of word ``c // WORD_BITS``, least significant first. Tail
  bits are 0 in data *and* weight, so that they cancel in XOR and AND.
* A packed activation is uint32 ``[N, H, W, words(C)]`` (``[N, words(C)]`` for dense layers).
* A tensor that may hold exact zeros (values -1, 0, +1) is stored as two such planes: ``sign`` (bit
  = value >= 0) and ``zero`` (bit = value == 0). Usually the zero plane is all 0.
* Float activations inside a compiled network are NHWC, unpadded.
* With K taps inside the image: ``dot = K - 2 * popcount(data ^ weight)``.

Weights are stored in the order in which kernels read them, see `pack_conv_weight`. This module
imports no other module of bnncc.
"""

from __future__ import annotations

import numpy as np

WORD_BITS = 32
"""Bits per word."""

LANES = 16
"""Output channels per vector of accumulators (16 x 32 bits: one AVX-512 register, two of AVX2, four
of SSE or NEON)."""

NIBBLE_LANES = 32
"""Output channels per block of weights in the order ``nibbles``."""

QUAD = 4
"""Output channels whose weights are interleaved in the orders ``vectors`` and ``halves``."""

DEPTH = 64
"""Input channels per block of weights in the order ``fours``."""

WEIGHT_ORDERS = ("words", "nibbles", "vectors", "halves", "fours")
"""Orders of binary weights, see `pack_conv_weight`."""

SLICED = "sliced"
"""The order defined in `sliced_data`."""


def words(channels: int) -> int:
    """Return the number of words that hold `channels` bits."""
    return -(-channels // WORD_BITS)


def blocks(channels: int, lanes: int = LANES) -> int:
    """Return the number of vectors of `lanes` that hold `channels` values."""
    return -(-channels // lanes)


def level_words(channels: int, form: str) -> int:
    """Return the words per pixel for levels of `channels`, in a form of `step.FORMS`.

    Planes are packed like signs, one plane for each bit of the levels. In other forms, pixels are
    padded to whole vectors of channels; values beyond the last channel are undefined.
    """
    if form == "planes":
        return words(channels)
    return blocks(channels) * LANES // {"bytes": 4, "pairs": 2, "floats": 1}[form]


def pack_bits(bits: np.ndarray) -> np.ndarray:
    """Pack the last axis of a bool array into words.

    Parameters
    ----------
    bits : ndarray of bool, shape (..., channels)
        True means +1.

    Returns
    -------
    ndarray of uint32, shape (..., words(channels))
        Tail bits are 0.
    """
    channels = bits.shape[-1]
    padded = np.zeros((*bits.shape[:-1], words(channels) * WORD_BITS), np.uint8)
    padded[..., :channels] = bits
    packed = np.packbits(padded, axis=-1, bitorder="little")
    return np.ascontiguousarray(packed).view("<u4").astype(np.uint32)


def unpack_bits(packed: np.ndarray, channels: int) -> np.ndarray:
    """Invert `pack_bits`.

    Parameters
    ----------
    packed : ndarray of uint32, shape (..., words(channels))
        Packed bits.
    channels : int
        Values per row before packing.

    Returns
    -------
    ndarray of bool, shape (..., channels)
        True means +1.
    """
    as_bytes = np.ascontiguousarray(packed.astype("<u4")).view(np.uint8)
    return np.unpackbits(as_bytes, axis=-1, bitorder="little")[..., :channels].astype(bool)


def pack_conv_weight(bits: np.ndarray, order: str = "words") -> np.ndarray:
    """Pack convolution weights in the order in which kernels read them.

    ``words``: output channels are divided into blocks of `LANES`. Within a block the order is (kh,
    kw, word, lane), so that one vector load fetches one word of `LANES` output channels. A last,
    partial block has only the existing lanes. Kernels load full vectors from it and ignore the
    other lanes, so such an array ends with ``LANES`` additional words.

    ``nibbles``: blocks of `NIBBLE_LANES` output channels, the last one padded with zeros. Within a
    block the order is (kh, kw, word, byte of the word, lane), one byte per lane. Lane ``2 * i`` is
    channel i of the block, and lane ``2 * i + 1`` is channel ``16 + i``: even and odd bytes,
    widened, are the vectors of `LANES` channels.

    ``vectors`` and ``halves``: blocks of `QUAD` output channels, the last one padded with zeros. In
    ``vectors``, all words of a kernel row are contiguous and padded with zeros to whole vectors of
    4 words; within a block the order is (kh, vector, channel, word of the vector). In ``halves``,
    each tap is padded to 2 words; the order is (kh, kw, channel, word).

    ``fours``: blocks of `LANES` output channels and `DEPTH` input channels of a tap, both padded
    with zeros, in the order (block of output channels, kh, kw, block of input channels). Within a
    block, the order of bits is (four input channels, output channel, one of the four).

    Parameters
    ----------
    bits : ndarray of bool, shape (out_channels, kernel_h, kernel_w, channels_per_group)
        True means +1.
    order : {"words", "nibbles", "vectors", "halves", "fours"}
        Order of the result.

    Returns
    -------
    ndarray of uint32, shape (weight_words(...),)
    """
    if order == "fours":
        return _fours(bits)
    packed = pack_bits(bits)
    rows = packed.reshape(packed.shape[0], -1)
    if order == "words":
        return _lane_major(rows)
    if order in ("vectors", "halves"):
        return _quads(packed, order)
    count = blocks(rows.shape[0], NIBBLE_LANES)
    filled = np.zeros((count * NIBBLE_LANES, rows.shape[1]), "<u4")
    filled[: rows.shape[0]] = rows
    halves = filled.view(np.uint8).reshape(count, 2, LANES, -1)
    return np.ascontiguousarray(halves.transpose(0, 3, 2, 1)).reshape(-1).view("<u4").astype("u4")


def _quads(packed: np.ndarray, order: str) -> np.ndarray:
    """Divide weights, shape (out_channels, kh, kw, words), into blocks of `QUAD` channels."""
    out, height = packed.shape[:2]
    unit = 4 if order == "vectors" else 2
    runs = packed.reshape(out, height, 1, -1) if order == "vectors" else packed
    size = -(-runs.shape[3] // unit) * unit
    filled = np.zeros((blocks(out, QUAD) * QUAD, *runs.shape[1:3], size), np.uint32)
    filled[:out, :, :, : runs.shape[3]] = runs
    cut = filled.reshape(-1, QUAD, height, runs.shape[2] * size // unit, unit)
    return np.ascontiguousarray(cut.transpose(0, 2, 3, 1, 4)).reshape(-1)


def _fours(bits: np.ndarray) -> np.ndarray:
    out, height, width, channels = bits.shape
    steps = blocks(channels, DEPTH)
    filled = np.zeros((blocks(out) * LANES, height, width, steps * DEPTH), bool)
    filled[:out, ..., :channels] = bits
    cut = filled.reshape(-1, LANES, height, width, steps, DEPTH // 4, 4)
    return pack_bits(cut.transpose(0, 2, 3, 4, 5, 1, 6).reshape(-1, WORD_BITS)).reshape(-1)


def weight_words(
    out_channels: int, kernel: tuple[int, int], channels: int, order: str = "words"
) -> int:
    """Return the number of words that `pack_conv_weight` returns.

    Parameters
    ----------
    out_channels : int
        Output channels.
    kernel : tuple of int
        Kernel height and width.
    channels : int
        Input channels of a group.
    order : {"words", "nibbles", "vectors", "halves", "fours"}
        Order of the weights.

    Returns
    -------
    int
        ``out_channels * taps * words(channels)`` if output channels fill their blocks. Otherwise
        ``words`` has `LANES` more, and the other orders have whole blocks (and vectors).
    """
    height, width = kernel
    per_channel = height * width * words(channels)
    if order == "fours":
        return (
            blocks(out_channels) * LANES * height * width * words(DEPTH) * blocks(channels, DEPTH)
        )
    if order == "vectors":
        per_channel = height * (-(-width * words(channels) // 4) * 4)
    if order == "halves":
        per_channel = height * width * 2
    if order in ("vectors", "halves"):
        return blocks(out_channels, QUAD) * QUAD * per_channel
    if order == "nibbles":
        return blocks(out_channels, NIBBLE_LANES) * NIBBLE_LANES * per_channel
    return out_channels * per_channel + (LANES if out_channels % LANES else 0)


def pack_float_weight(weight: np.ndarray) -> np.ndarray:
    """Pack float convolution weights in the order in which kernels read them.

    The blocks of output channels are those of `pack_conv_weight` in the order ``words``.

    Parameters
    ----------
    weight : ndarray of float32, shape (out_channels, kernel_h, kernel_w, channels_per_group)
        Weights with the input channel last.

    Returns
    -------
    ndarray of float32, one-dimensional
        All weights, plus `LANES` zeros if `out_channels` is not a multiple of `LANES`.
    """
    return _lane_major(np.ascontiguousarray(weight, np.float32).reshape(weight.shape[0], -1))


def unpack_float_weight(packed: np.ndarray, channels: int, taps: tuple[int, ...]) -> np.ndarray:
    """Invert `pack_float_weight`.

    Parameters
    ----------
    packed : ndarray of float32, one-dimensional
        The result of `pack_float_weight`.
    channels : int
        Output channels.
    taps : tuple of int
        Kernel height and width, and input channels of a group.

    Returns
    -------
    ndarray of float32, shape (channels, *taps)

    Examples
    --------
    >>> weight = np.arange(36, dtype=np.float32).reshape(18, 1, 1, 2)
    >>> bool((unpack_float_weight(pack_float_weight(weight), 18, (1, 1, 2)) == weight).all())
    True
    """
    size = int(np.prod(taps))
    made = np.empty((channels, size), packed.dtype)
    for first in range(0, channels, LANES):
        rows = made[first : first + LANES]
        rows[:] = packed[first * size :][: rows.size].reshape(size, len(rows)).T
    return made.reshape(channels, *taps)


def pad_lanes(vector: np.ndarray, fill: float = 0) -> np.ndarray:
    """Pad per-channel values to whole blocks, so that kernels can load full vectors.

    Parameters
    ----------
    vector : ndarray, shape (channels, ...)
        One value, or row, per output channel.
    fill : float, default 0
        Value of the additional lanes.

    Returns
    -------
    ndarray, shape (blocks(channels) * LANES, ...)
        Same dtype.
    """
    out = np.full((blocks(len(vector)) * LANES, *vector.shape[1:]), fill, vector.dtype)
    out[: vector.shape[0]] = vector
    return out


def _lane_major(rows: np.ndarray) -> np.ndarray:
    full = rows.shape[0] // LANES * LANES
    parts = [rows[:full].reshape(-1, LANES, rows.shape[1]).transpose(0, 2, 1).ravel()]
    if full < rows.shape[0]:
        parts += [rows[full:].T.ravel(), np.zeros(LANES, rows.dtype)]
    return np.ascontiguousarray(np.concatenate(parts))
