"""Decompose filters into small integers: signs, two values, or multiples of a scale."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from bnncc.ir.numeric import noise

WEIGHT_TOLERANCE = 1e-5
"""Relative spread of ``|w|`` in a filter up to which it has one magnitude. Residues of the
straight-through estimator in trained weights reach 4e-6; a larger bound would change results."""

MAX_WEIGHT = 128
"""Largest magnitude of integer weights, which have up to 8 bits."""

SAMPLE = 64
"""Number of weights per filter that are examined first."""

BLOCK = 1 << 15
"""Number of weights that are examined at a time: as float64, they fit the L2 cache."""


def binary_weight(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Split weights (out_channels, ...) into signs and one scale per output channel.

    Returns
    -------
    bits : ndarray of bool, same shape
        True where the weight is positive (anything in an all-zero filter).
    scale : ndarray of float64, shape (out_channels,)
        ``weight == scale * (2 * bits - 1)`` within `WEIGHT_TOLERANCE`; zero for all-zero filters.
        None is returned if any filter has more than one magnitude, or if all are zero.
    """
    flat = weight.reshape(weight.shape[0], -1)
    flat = np.abs(flat if flat.dtype.kind == "f" else flat.astype(np.float64))
    if flat.shape[1] == 0:
        return None
    top, low = flat.max(axis=1).astype(np.float64), flat.min(axis=1)
    if (top - low > WEIGHT_TOLERANCE * top).any() or not top.any():
        return None
    scale, uneven = top, low != top
    scale[uneven] = flat[uneven].astype(np.float64).mean(axis=1)
    return weight > 0, scale


def two_valued_filters(filters: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Decompose filters of two values each into signs around their mean.

    Parameters
    ----------
    filters : ndarray, shape (out_channels, ...)
        Weights.

    Returns
    -------
    tuple or None
        Bits, of the shape of `filters`; half the difference and the mean of the values, float64.
    """
    flat = filters.reshape(len(filters), -1).astype(np.float64)
    if not flat.size:
        return None
    low, high = flat.min(axis=1), flat.max(axis=1)
    bits = flat > ((low + high) / 2)[:, None]
    near = WEIGHT_TOLERANCE * np.maximum(np.abs(low), np.abs(high))[:, None]
    if (np.abs(flat - np.where(bits, high[:, None], low[:, None])) > near).any():
        return None
    count = bits.sum(axis=1)
    upper = np.where(count, (flat * bits).sum(axis=1) / np.maximum(count, 1), high)
    rest = flat.shape[1] - count
    lower = np.where(rest, (flat * ~bits).sum(axis=1) / np.maximum(rest, 1), low)
    return bits.reshape(filters.shape), (upper - lower) / 2, (upper + lower) / 2


@dataclass(frozen=True)
class Weights:
    """Filters as integers times a scale."""

    whole: np.ndarray
    """int16, shape (out_channels, ...): the integers."""
    scale: np.ndarray
    """float64, shape (out_channels,): value of the integer 1."""
    odd: bool
    """Whether all integers are odd, i.e. sums of signs times powers of two."""
    bits: int
    """Number of planes: of signs if odd, otherwise of two's complement."""

    @property
    def complement_bits(self) -> int:
        """Number of planes in two's complement."""
        low, high = int(self.whole.min()), int(self.whole.max())
        return max((-low - 1).bit_length() if low < 0 else 0, high.bit_length()) + 1


def few_bit_weights(weight: np.ndarray) -> Weights | None:
    """Split weights (out_channels, ...) into integers of up to 8 bits and one scale per channel.

    Returns
    -------
    Weights or None
        With the smallest integers that are close enough by `bnncc.ir.numeric.multiples`: any few
        real numbers are approximate multiples of something.
    """
    flat = weight.reshape(weight.shape[0], -1)
    if not flat.size:
        return None
    rows = max(1, BLOCK // flat.shape[1])
    parts = []
    for first in range(0, len(flat), rows):
        part = _as_multiples(flat[first : first + rows].astype(np.float64))
        if part is None:
            return None
        parts.append(part)
    whole, top, multiple = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    # n + 1 bits hold -2**n, but not 2**n.
    sign = np.where(whole.max(axis=1) > -whole.min(axis=1), -1, 1).astype(np.int16)
    odd = bool((whole[top > 0] % 2 == 1).all())
    if odd:
        whole[top == 0] = 1
        sign[:] = 1
    whole *= sign[:, None]
    found = Weights(whole.reshape(weight.shape), sign * top / multiple, odd, 1)
    bits = int(np.abs(whole).max()).bit_length() if odd else found.complement_bits
    return replace(found, bits=bits) if bits <= 8 else None


def _as_multiples(flat: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Return rows as integers, the largest magnitude of each row, and the integer it becomes."""
    top = np.abs(flat).max(axis=1)
    ratio = flat / np.where(top == 0, 1.0, top)[:, None]
    sample = ratio[:, :: max(1, ratio.shape[1] // SAMPLE)]
    multiple = np.zeros(len(flat), np.int64)
    multiple[top == 0] = 1
    for number in range(1, MAX_WEIGHT + 1):
        left = np.flatnonzero(multiple == 0)
        if not left.size:
            break
        fits = _near(sample[left], number)
        left = left[fits]
        multiple[left[_near(ratio[left], number)]] = number
    if not multiple.all():
        return None
    return np.rint(ratio * multiple[:, None]).astype(np.int16), top, multiple


def _near(ratio: np.ndarray, number: int) -> np.ndarray:
    scaled = ratio * number
    return np.asarray((np.abs(scaled - np.rint(scaled)) <= noise(number)).all(axis=1))
