"""Read FlatBuffers and FlexBuffers, checking every offset before it is followed.

A FlatBuffer [1]_ is read in place, by offsets stored in the file. These are not trusted: an offset
that leads outside the file raises a `ModelError` with its position.

References
----------
.. [1] FlatBuffers documentation, "FlatBuffer internals" and "FlexBuffers".
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from bnncc.errors import ModelError

MAX_TABLES = 1 << 20
"""Maximum number of tables per vector."""
MAX_TEXT = 1 << 16
"""Maximum string length in bytes."""

_FORMATS = {
    "bool": "<?", "int8": "<b", "uint8": "<B", "int16": "<h", "uint16": "<H", "int32": "<i",
    "uint32": "<I", "int64": "<q", "uint64": "<Q", "float32": "<f",
}  # fmt: skip


class Table:
    """A table of a FlatBuffer.

    Parameters
    ----------
    data : bytes
        The whole file.
    position : int
        Position of the table.

    Raises
    ------
    ModelError
        If the table or its list of fields is not inside the file.
    """

    def __init__(self, data: bytes, position: int) -> None:
        self._data, self._start = data, position
        self._fields = position - _read(data, position, "int32")
        size = int(_read(data, self._fields, "uint16"))
        if size < 4 or size % 2:
            raise _damaged(self._fields, f"a list of fields of {size} bytes")
        _check(data, self._fields, size)
        self._count = size // 2 - 2

    @classmethod
    def root(cls, data: bytes) -> Table:
        """Return the root table of a file."""
        return cls(data, int(_read(data, 0, "uint32")))

    def _at(self, slot: int) -> int:
        """Return the position of a field, or 0 if it is absent."""
        if slot >= self._count:
            return 0
        offset = int(_read(self._data, self._fields + 4 + 2 * slot, "uint16"))
        return self._start + offset if offset else 0

    def _target(self, slot: int) -> int:
        """Return the target of a field's offset, or 0 if it is absent."""
        at = self._at(slot)
        return at + int(_read(self._data, at, "uint32")) if at else 0

    def has(self, slot: int) -> bool:
        """Whether a field is present."""
        return bool(self._at(slot))

    def scalar(self, slot: int, kind: str, default: Any = 0) -> Any:
        """Return a number; `kind` is ``int32``, ``bool``, ``float32``, ..."""
        at = self._at(slot)
        return _read(self._data, at, kind) if at else default

    def table(self, slot: int) -> Table | None:
        """Return a table, or None if the field is absent."""
        at = self._target(slot)
        return Table(self._data, at) if at else None

    def text(self, slot: int) -> str:
        """Return a string; invalid UTF-8 is replaced."""
        at = self._target(slot)
        if not at:
            return ""
        size = int(_read(self._data, at, "uint32"))
        if size > MAX_TEXT:
            raise _damaged(at, f"a name of {size} bytes")
        _check(self._data, at + 4, size)
        return self._data[at + 4 : at + 4 + size].decode("utf-8", "replace")

    def tables(self, slot: int) -> list[Table]:
        """Return a vector of tables."""
        at, count = self._vector(slot, 4)
        if count > MAX_TABLES:
            raise _damaged(at, f"a vector of {count} tables")
        places = range(at, at + 4 * count, 4)
        return [Table(self._data, p + int(_read(self._data, p, "uint32"))) for p in places]

    def numbers(self, slot: int, dtype: str) -> np.ndarray[Any, Any]:
        """Return a vector of numbers, as a view of the file."""
        kind = np.dtype(dtype).newbyteorder("<")
        at, count = self._vector(slot, kind.itemsize)
        return np.frombuffer(self._data, kind, count, at if count else 0)

    def _vector(self, slot: int, size: int) -> tuple[int, int]:
        """Return the position of a vector's first element, and the number of elements."""
        at = self._target(slot)
        if not at:
            return 0, 0
        count = int(_read(self._data, at, "uint32"))
        _check(self._data, at + 4, count * size)
        return at + 4, count


def flex_map(data: bytes) -> dict[str, int | float | bool]:
    """Parse a FlexBuffer that maps names to numbers.

    Raises
    ------
    ModelError
        If it is damaged, or contains anything else.
    """
    if len(data) < 3:
        raise ModelError(f"its options are {len(data)} bytes, expected a FlexBuffer map")
    width, kind = data[-1], data[-2]
    if kind >> 2 != _MAP or width not in _WIDTHS:
        raise ModelError("its options are damaged: expected a FlexBuffer map")
    place = len(data) - 2 - width
    start = place - _uint(data, place, width)
    width = 1 << (kind & 3)
    count = _uint(data, start - width, width)
    key_place = start - 3 * width
    keys = key_place - _uint(data, key_place, width)
    key_width = _uint(data, start - 2 * width, width)
    if key_width not in _WIDTHS or count > len(data):
        raise ModelError(f"its options are damaged: a map of {count} entries")
    types = start + count * width
    result: dict[str, int | float | bool] = {}
    for k in range(count):
        at = keys + k * key_width
        name = _key(data, at - _uint(data, at, key_width))
        result[name] = _value(data, start + k * width, width, _uint(data, types + k, 1), name)
    return result


_WIDTHS = (1, 2, 4, 8)
_MAP, _BOOL = 9, 26
_INLINE = {1: "i", 2: "u", 3: "f", _BOOL: "u"}
_INDIRECT = {6: "i", 7: "u", 8: "f"}
_KINDS = {
    ("i", 1): "int8", ("i", 2): "int16", ("i", 4): "int32", ("i", 8): "int64",
    ("u", 1): "uint8", ("u", 2): "uint16", ("u", 4): "uint32", ("u", 8): "uint64",
    ("f", 4): "float32",
}  # fmt: skip


def _value(data: bytes, at: int, width: int, packed: int, name: str) -> int | float | bool:
    kind = packed >> 2
    if kind in _INDIRECT:
        at, width = at - _uint(data, at, width), 1 << (packed & 3)
    letter = _INLINE.get(kind) or _INDIRECT.get(kind)
    if letter == "f" and width == 8:
        _check(data, at, 8)
        return float(struct.unpack_from("<d", data, at)[0])
    if letter is None or (letter, width) not in _KINDS:
        raise ModelError(f"its option `{name}` is not a number")
    value = _read(data, at, _KINDS[letter, width])
    return bool(value) if kind == _BOOL else value


def _uint(data: bytes, at: int, width: int) -> int:
    return int(_read(data, at, _KINDS["u", width]))


def _key(data: bytes, at: int) -> str:
    _check(data, at, 1)
    end = data.find(b"\0", at, at + 256)
    if end < 0:
        raise ModelError("its options are damaged: a name without end")
    return data[at:end].decode("utf-8", "replace")


def _read(data: bytes, at: int, kind: str) -> Any:
    form = _FORMATS[kind]
    _check(data, at, struct.calcsize(form))
    return struct.unpack_from(form, data, at)[0]


def _check(data: bytes, at: int, size: int) -> None:
    if at < 0 or size < 0 or at + size > len(data):
        raise _damaged(at, f"expected {size} bytes there, the file has {len(data)} in all")


def _damaged(at: int, what: str) -> ModelError:
    return ModelError(f"damaged or truncated: at byte {at}: {what}")
