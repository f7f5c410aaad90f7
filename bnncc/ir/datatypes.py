"""Declared value types of inputs: the data types of QONNX and FINN of up to 8 bits."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

MAX_BITS = 8
"""Maximum number of bits; kernels cannot use wider types."""

_LONGEST_NAME = 20
_INTEGER = re.compile(r"(U?)INT(\d+)")
_FIXED = re.compile(r"FIXED<(\d+),(-?\d+)>")


@dataclass(frozen=True)
class Datatype:
    """The set of numbers ``low``, ``low + step``, ..., `count` of them."""

    name: str
    """Name in the file: ``BIPOLAR``, ``BINARY``, ``TERNARY``, ``UINT4``, ``FIXED<8,4>``, ..."""
    low: float
    step: float
    """`low`, `step`: the smallest number, and the distance between neighbours."""
    count: int
    """Number of values."""

    def holds(self, values: np.ndarray) -> np.ndarray:
        """Return a mask of the `values` that belong to this type."""
        level = (values.astype(np.float64) - self.low) / self.step
        with np.errstate(invalid="ignore"):
            return (level == np.rint(level)) & (level >= 0) & (level < self.count)

    def holds_all(self, values: np.ndarray) -> bool:
        """Return whether all `values` belong to this type; float32 for speed, as it runs often."""
        if self.low == -self.step / 2 and self.count == 2:
            return bool((np.abs(values) == -self.low).all())
        if self.step != 1 or not values.size:
            return bool(self.holds(values).all())
        high = self.low + self.count - 1
        inside = values.min() >= self.low and values.max() <= high
        return bool(inside and (np.rint(values) == values).all())

    def random(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Return random values of this type as float32."""
        return (self.low + self.step * rng.integers(0, self.count, shape)).astype(np.float32)

    def __str__(self) -> str:
        high = self.low + self.step * (self.count - 1)
        steps = "" if self.step == 1 else f" in steps of {self.step:g}"
        return f"{self.name}: {self.low:g} to {high:g}{steps}"


def datatype(name: str) -> Datatype | None:
    """Return the type with a given name, if it is narrow.

    Parameters
    ----------
    name : str
        Value of a ``finn_datatype`` annotation.

    Returns
    -------
    Datatype or None
        None for float, wide and scaled types, and unknown names.

    Examples
    --------
    >>> str(datatype("UINT4")), str(datatype("BIPOLAR")), datatype("FLOAT32")
    ('UINT4: 0 to 15', 'BIPOLAR: -1 to 1 in steps of 2', None)
    """
    if name in _NAMED:
        return Datatype(name, *_NAMED[name])
    if len(name) > _LONGEST_NAME:
        return None
    if (found := _INTEGER.fullmatch(name)) and 1 <= int(found[2]) <= MAX_BITS:
        bits = int(found[2])
        return Datatype(name, 0.0 if found[1] else -(2.0 ** (bits - 1)), 1.0, 2**bits)
    if (found := _FIXED.fullmatch(name)) and 1 <= int(found[1]) <= MAX_BITS:
        bits, whole = int(found[1]), int(found[2])
        if abs(whole) > 64:
            return None
        step = 2.0 ** (whole - bits)
        return Datatype(name, -(2.0 ** (bits - 1)) * step, step, 2**bits)
    return None


_NAMED = {"BIPOLAR": (-1.0, 2.0, 2), "BINARY": (0.0, 1.0, 2), "TERNARY": (-1.0, 1.0, 3)}
