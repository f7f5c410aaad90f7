"""How large a tensor may be."""

from __future__ import annotations

from collections.abc import Iterable

from bnncc.errors import ShapeError
from bnncc.ir.graph import Dim

MAX_RANK = 8
MAX_ELEMENTS = 1 << 29
"""Most elements of one tensor (2 GiB of float32), counting a symbolic dimension as 1."""


def elements(dims: Iterable[Dim], where: str) -> int:
    """Return the number of elements, a symbol counting as 1.

    Raises
    ------
    ShapeError
        If a dimension is negative or the tensor is too large.
    """
    count = 1
    shape = list(dims)
    if len(shape) > 64:
        raise ShapeError(f"{where}: {len(shape)} dimensions, at most 64 are wanted")
    for dim in shape:
        if isinstance(dim, str):
            continue
        if dim < 0:
            raise ShapeError(f"{where}: dimension {dim} is negative in shape {shape}")
        count *= dim
    if count > MAX_ELEMENTS or any(isinstance(d, int) and d > MAX_ELEMENTS for d in shape):
        raise ShapeError(
            f"{where}: shape {shape} has {count} elements, more than the limit of {MAX_ELEMENTS}"
        )
    return count
