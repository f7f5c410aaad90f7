"""Read MXNet's parameter files (``.params``): a list of arrays and their names.

    u64 0x112, u64 reserved, u64 count, count arrays, u64 count, count names (u64 length, bytes)

In the oldest format, an array is ``u32 axes, u32 sizes[axes]``; later formats start with a magic
number and have 64-bit sizes. A device (two i32), a type (i32) and the values follow in all formats.
The file is untrusted: every count is compared with the remaining bytes before it is used.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np

from bnncc.errors import ModelError, UnsupportedOp
from bnncc.files import read_bytes
from bnncc.ir.graph import elements

Array = np.ndarray[Any, Any]

LIST_MAGIC = struct.pack("<Q", 0x112)
_SIZES_OF_64_BITS, _WITH_STORAGE, _NUMPY_SHAPES = 0xF993FAC8, 0xF993FAC9, 0xF993FACA
_DTYPES = {
    0: "<f4", 1: "<f8", 2: "<f2", 3: "u1", 4: "<i4", 5: "i1", 6: "<i8", 7: "?",
}  # fmt: skip
_MAX_AXES = 32


def read_params(path: str | os.PathLike[str]) -> dict[str, Array]:
    """Read a parameter file.

    Returns
    -------
    dict of str to ndarray
        By name, without ``arg:`` and ``aux:``; read-only views of the file's bytes.

    Raises
    ------
    ModelError
        If the file cannot be read, is damaged, or is something else.
    """
    file = Path(path)
    data = read_bytes(file, "an MXNet parameter file")
    try:
        return _Reader(data).arrays()
    except ModelError as error:
        raise error.within(file) from None


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def arrays(self) -> dict[str, Array]:
        if self._data[:8] != LIST_MAGIC:
            raise ModelError("this is not an MXNet parameter file: its first bytes are wrong")
        self._at = 16
        count = self._count("arrays", 4)
        values = [self._array(f"array {number}") for number in range(count)]
        named = self._count("names", 8)
        if named != count:
            raise ModelError(f"{count} arrays have {named} names, expected as many")
        names = [self._name(number) for number in range(count)]
        if self._at != len(self._data):
            raise ModelError(f"{len(self._data) - self._at} bytes follow the last name")
        table: dict[str, Array] = {}
        for name, value in zip(names, values, strict=True):
            kind, colon, plain = name.partition(":")
            key = plain if colon and kind in ("arg", "aux") else name
            if key in table:
                raise ModelError(f"two arrays are called `{key}`")
            if value is not None:
                table[key] = value
        return table

    def _take(self, size: int, what: str) -> int:
        """Skip `size` bytes; return their position."""
        start, left = self._at, len(self._data) - self._at
        if size > left:
            raise ModelError(f"{what} needs {size} bytes, {left} are left: the file is truncated")
        self._at = start + size
        return start

    def _number(self, code: str, what: str) -> int:
        start = self._take(struct.calcsize("<" + code), what)
        return int(struct.unpack_from("<" + code, self._data, start)[0])

    def _count(self, what: str, least: int) -> int:
        """Read the number of following `what`, each of at least `least` bytes."""
        count = self._number("Q", f"the number of {what}")
        if count * least > len(self._data) - self._at:
            raise ModelError(f"{count} {what} are announced, which this file cannot hold")
        return count

    def _name(self, number: int) -> str:
        size = self._number("Q", f"name {number}")
        start = self._take(size, f"name {number}")
        try:
            return self._data[start : self._at].decode()
        except UnicodeDecodeError:
            raise ModelError(f"name {number} is not UTF-8") from None

    def _sizes(self, axes: int, code: str, where: str) -> tuple[int, ...]:
        if not 0 <= axes <= _MAX_AXES:
            raise ModelError(f"{where} has {axes} axes, expected at most {_MAX_AXES}")
        start = self._take(axes * struct.calcsize(code), where)
        return struct.unpack_from(f"<{axes}{code}", self._data, start)

    def _array(self, where: str) -> Array | None:
        """Read one array; None for one without shape and values."""
        first = self._number("I", where)
        kinds = (_WITH_STORAGE, _NUMPY_SHAPES)
        if first in kinds and (storage := self._number("i", where)):
            raise UnsupportedOp(f"{where} is stored sparsely (kind {storage}), not as plain values")
        if first in (_SIZES_OF_64_BITS, _WITH_STORAGE, _NUMPY_SHAPES):
            axes = self._number("i", where)
            empty = -1 if first == _NUMPY_SHAPES else 0
            shape = self._sizes(axes, "q", where) if axes != empty else None
        else:
            shape = self._sizes(first, "I", where) if first else None
        if shape is None:
            return None
        self._take(8, where)  # the device it was on
        kind = self._number("i", where)
        if kind not in _DTYPES:
            raise UnsupportedOp(f"{where} has type {kind}, which bnncc does not know")
        dtype = np.dtype(_DTYPES[kind])
        count = elements(shape, where)
        start = self._take(count * dtype.itemsize, where)
        return np.frombuffer(self._data, dtype, count, start).reshape(shape)
