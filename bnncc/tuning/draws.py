"""Random numbers that are the same on every machine and in every version of NumPy.

NumPy guarantees the bits of its bit generators, but not the numbers that its `Generator` derives
from them. A kernel that is measured elsewhere must get the inputs of its expected outputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Size = int | Sequence[int]

_UNIT = 2.0**-53
_TERMS = 4  # of a sum that is nearly normal: three quarters of it lie within one deviation


class Draws:
    """The methods of `numpy.random.Generator` that cases need.

    Parameters
    ----------
    seed : int
        Seed; the same numbers for the same seed.

    Examples
    --------
    >>> Draws(0).integers(0, 100, 5)
    array([71, 17, 24, 33, 71])
    """

    def __init__(self, seed: int) -> None:
        self._source = np.random.PCG64(seed)

    def _raw(self, size: Size) -> np.ndarray:
        shape = (size,) if isinstance(size, int) else tuple(size)
        return self._source.random_raw(math.prod(shape)).reshape(shape)

    def bits(self, size: Size) -> np.ndarray:
        """Return bools, each as likely true as false."""
        shape = (size,) if isinstance(size, int) else tuple(size)
        count = math.prod(shape)
        words = self._raw(-(-count // 64)).astype("<u8")
        return np.unpackbits(words.view(np.uint8), count=count).reshape(shape).astype(bool)

    def random(self, size: Size) -> np.ndarray:
        """Return floats from 0 to 1, without 1."""
        return (self._raw(size) >> np.uint64(11)) * _UNIT

    def integers(self, low: int, high: int, size: Size, dtype: Any = np.int64) -> np.ndarray:
        """Return whole numbers from `low` to `high`, without `high`."""
        return (low + (self._raw(size) % np.uint64(high - low)).astype(np.int64)).astype(dtype)

    def standard_normal(self, size: Size, dtype: Any = np.float64) -> np.ndarray:
        """Return floats of mean 0 and deviation 1, nearly normal: a sum, which rounds the same."""
        total = sum((self.random(size) for _ in range(_TERMS)), np.float64(-_TERMS / 2))
        return np.asarray(total * math.sqrt(12 / _TERMS)).astype(dtype)

    def normal(self, middle: float, spread: float, size: Size) -> np.ndarray:
        """Return floats of this mean and deviation."""
        return middle + spread * self.standard_normal(size)
