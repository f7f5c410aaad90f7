"""Find codes of the weights of layers with real-valued data: few values, or steps of a scale.

before: rows = [[-0.5, 0.5, 0.0, -0.5]]                                           float32
after:  codes = [[-1, 1, 0, -1]], numbers = [[[0.5]]], bits = 2
"""

from __future__ import annotations

import numpy as np

from bnncc.recognise.filters import few_bit_weights
from bnncc.topi_binary.weight_codes import BITS, Codes

BLOCKS = (256, 128, 64, 32, 16)
"""Numbers of consecutive weights that may have a scale of their own."""

PROBED = 64
"""Number of rows that are examined first."""


def weight_codes(rows: np.ndarray) -> Codes | None:
    """Return weights as codes from which their float32 values follow exactly.

    Parameters
    ----------
    rows : ndarray of float32, shape (out_channels, K)
        The weights of each output channel.

    Returns
    -------
    Codes or None
        With one scale per output channel if possible, otherwise with one per block.

    Examples
    --------
    >>> found = weight_codes(np.array([[0.5, -0.5, 0.0], [3, -3, 3]], np.float32))
    >>> found.codes.tolist(), found.numbers.tolist(), found.bits
    ([[1, -1, 0], [1, -1, 1]], [[[0.5]], [[3.0]]], 2)
    """
    depth = rows.shape[1]
    if not rows.size:
        return None
    for size in (depth, *(size for size in BLOCKS if size < depth and depth % size == 0)):
        cut = rows.reshape(-1, size)
        if _coded(cut[:PROBED]) is not None and (found := _coded(cut)) is not None:
            numbers = found.numbers.reshape(len(rows), depth // size, -1)
            return Codes(found.codes.reshape(rows.shape), numbers, found.bits)
    return None


def _coded(cut: np.ndarray) -> Codes | None:
    """Return codes of rows that are one block each."""
    low, high = cut.min(axis=1), cut.max(axis=1)
    upper = cut == high[:, None]
    if (upper | (cut == low[:, None])).all():
        return Codes(upper.astype(np.int16), np.stack([low, high], axis=1)[:, None], 1)
    found = few_bit_weights(cut)
    if found is None:
        return None
    whole, scale = found.whole, found.scale
    if found.odd:  # k = 2 * code + 1
        whole, scale = (whole - 1) // 2, 2 * scale
    least, most = whole.min(axis=1), whole.max(axis=1)
    bits = next(bits for bits in BITS[1:] if (most - least).max() < 1 << bits)
    half = 1 << (bits - 1)
    numbers = scale.astype(np.float32)[:, None, None]
    if found.odd or least.min() < -half or most.max() >= half:
        moved = least + half
        whole = whole - moved[:, None]
        zeros = np.float32(-0.5 * found.odd) - moved[:, None, None].astype(np.float32)
        numbers = np.concatenate([zeros, numbers], axis=2)
    rounded, left = numbers[..., -1].copy(), np.ones(len(cut), bool)
    for way in (0, np.inf, -np.inf):  # the largest weight may be a rounded multiple of the scale
        other = np.nextafter(rounded, np.float32(way)) if way else rounded
        numbers[left, :, -1] = other[left]
        left[left] = (Codes(whole[left], numbers[left], bits).values != cut[left]).any(axis=1)
    return None if left.any() else Codes(whole, numbers, bits)
