"""Conventions every part of bnncc shares: bit sense, bit order, word size, layouts.

* Bit 1 means +1, bit 0 means -1 (for unipolar data: 1 and 0).
* Channel ``c`` is bit ``c % WORD_BITS`` of word ``c // WORD_BITS``, least significant first. Tail
  bits are 0 in data *and* weight, so that they cancel in XOR and AND.
* A packed activation is uint32 ``[N, H, W, words(C)]`` (``[N, words(C)]`` for dense layers).
* A tensor that may hold exact zeros (three values: -1, 0, +1) travels as two such planes: ``sign``
  (bit = value >= 0) and ``zero`` (bit = value == 0). The zero plane is all 0 in the usual case.
* Float activations inside a compiled network are NHWC, unpadded.
* With K taps inside the image: ``dot = K - 2 * popcount(data ^ weight)``.

Weights are stored in the order the kernels read them, see `pack_conv_weight`. This module imports
nothing of ours.
"""

from __future__ import annotations

import numpy as np

WORD_BITS = 32
"""Bits in one packed word."""

LANES = 16
"""Output channels that one vector of accumulators holds (16 x 32 bits: one AVX-512 register, two of
AVX2, four of SSE or NEON)."""


def words(channels: int) -> int:
    """Return how many words hold `channels` bits."""
    return -(-channels // WORD_BITS)


def blocks(channels: int) -> int:
    """Return how many vectors of `LANES` hold `channels` values."""
    return -(-channels // LANES)


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


def pack_conv_weight(bits: np.ndarray) -> np.ndarray:
    """Pack convolution weights in the order the kernels read them.

    Output channels are cut into blocks of `LANES`; inside a block the order is (kh, kw, word,
    lane), so that one vector load fetches one word of `LANES` output channels. A last block of
    fewer lanes is stored with just those lanes; kernels load full vectors from it and drop the
    lanes beyond, so the array ends in ``LANES`` spare words when there is such a block.

    Parameters
    ----------
    bits : ndarray of bool, shape (out_channels, kernel_h, kernel_w, channels_per_group)
        True means +1.

    Returns
    -------
    ndarray of uint32, one-dimensional
        ``out_channels * kernel_h * kernel_w * words(channels_per_group)`` words, plus `LANES` if
        `out_channels` is not a multiple of `LANES`.
    """
    packed = pack_bits(bits)
    return _lane_major(packed.reshape(packed.shape[0], -1))


def pack_float_weight(weight: np.ndarray) -> np.ndarray:
    """Store float convolution weights in the order the kernels read them.

    The same blocks of output channels as `pack_conv_weight`.

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


def pad_lanes(vector: np.ndarray, fill: float = 0) -> np.ndarray:
    """Pad a per-channel vector to whole blocks, so that kernels can load it lane by lane.

    Parameters
    ----------
    vector : ndarray, shape (channels,)
        One value per output channel.
    fill : float, default 0
        Value of the lanes beyond.

    Returns
    -------
    ndarray, shape (blocks(channels) * LANES,)
        Same dtype.
    """
    out = np.full(blocks(vector.shape[0]) * LANES, fill, vector.dtype)
    out[: vector.shape[0]] = vector
    return out


def _lane_major(rows: np.ndarray) -> np.ndarray:
    full = rows.shape[0] // LANES * LANES
    parts = [rows[:full].reshape(-1, LANES, rows.shape[1]).transpose(0, 2, 1).ravel()]
    if full < rows.shape[0]:
        parts += [rows[full:].T.ravel(), np.zeros(LANES, rows.dtype)]
    return np.ascontiguousarray(np.concatenate(parts))
