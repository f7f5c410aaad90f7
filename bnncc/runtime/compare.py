"""Differences of tensors, and when they count as equal: floats up to rounding."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from bnncc.ir.halves import COARSE, is_float

Array = np.ndarray[Any, Any]

RELATIVE = 1e-4
"""How far floats may be apart, of the largest value of their tensor."""

_CANCELLED = 2.0**-16
"""How much smaller than its terms a tensor's largest sum may be."""


def apart(mine: Array, wanted: Array) -> Array:
    """Return how far the numbers of one shape are apart; NaN is not apart from NaN."""
    a, b = mine.astype(np.float64), wanted.astype(np.float64)
    with np.errstate(all="ignore"):
        return np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))


def agree(mine: Array, wanted: Array, top: float | None = None, relative: float = RELATIVE) -> bool:
    """Whether `mine` is `wanted`: integers exactly, floats but for rounding.

    Parameters
    ----------
    mine, wanted : ndarray
        To compare.
    top : float, optional
        What rounding is measured by; the largest value of `wanted` if not given.
    relative : float
        How far floats may be apart, in its units; types of half precision have their own bound.
    """
    if mine.shape != wanted.shape or mine.dtype != wanted.dtype:
        return False
    return not differs(mine, wanted, top, relative).any()


def differs(
    mine: Array, wanted: Array, top: float | None = None, relative: float = RELATIVE
) -> Array:
    """Return where two tensors disagree, as `agree` has it; everywhere if types or shapes do."""
    if mine.shape != wanted.shape or mine.dtype != wanted.dtype:
        return np.ones(wanted.shape, bool)
    if not is_float(mine):
        return np.asarray(mine != wanted)
    top = largest(wanted) if top is None else top
    return ~(apart(mine, wanted) <= tolerance(wanted, relative) * max(top, 1e-30))


def tolerance(wanted: Array, relative: float = RELATIVE) -> float:
    """Return how far a float tensor may be off, of its largest value."""
    return max(relative, COARSE.get(wanted.dtype.name, 0.0))


def within(mine: Array, wanted: Array, room: Array) -> Array:
    """Return where numbers are off by at most `room`, be that little of their tensor or not."""
    with np.errstate(all="ignore"):
        return np.asarray(np.abs(mine.astype(np.float64) - wanted.astype(np.float64)) <= room)


def overflows(mine: Array, wanted: Array) -> Array:
    """Return where results cannot be compared because sums of large terms have overflowed.

    In another order, other sums overflow, or none, or infinities of both signs make NaN. An
    infinity among small numbers is no such sum.
    """
    if not is_float(wanted):
        return np.zeros(wanted.shape, bool)
    finite = np.isfinite(wanted)
    most = float(ml_dtypes.finfo(wanted.dtype).max)
    large = not finite.any() or largest(wanted) > most * _CANCELLED
    return np.isnan(wanted) | (large & ~(finite & np.isfinite(mine)))


def largest(values: Array) -> float:
    """Return the largest finite magnitude."""
    wide = values.astype(np.float64)
    return float(np.abs(wide[np.isfinite(wide)]).max(initial=0.0))


def gap(mine: Array, wanted: Array) -> float:
    """Return the largest difference; infinity for other shapes, and where one side alone is NaN."""
    if mine.shape != wanted.shape:
        return float("inf")
    most = float(apart(mine, wanted).max(initial=0.0))
    return float("inf") if np.isnan(most) else most
