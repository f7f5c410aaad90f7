"""What the text of a network in C is made of: names, types, places, and what kernels are."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from bnncc.runtime.manifest import TensorInfo

ALIGNMENT = 64
"""Of every tensor from the start of its memory, in bytes; it is TVM's."""

C_ALIGNMENT = 8
"""Of memory that C code is given, in bytes: what the largest number needs."""

C_TYPES = {
    "float32": "float", "float64": "double", "float16": "uint16_t", "bfloat16": "uint16_t",
    "bool": "uint8_t",
    **{f"{u}int{bits}": f"{u}int{bits}_t" for u in ("", "u") for bits in (8, 16, 32, 64)},
}  # fmt: skip


PLACES = ".at"
"""Ends the names of what says where in an output its stored values are."""


@dataclass(frozen=True)
class Place:
    """Where a tensor lies."""

    root: str
    """``base`` (the arena), ``constants`` (the weights), or an argument."""
    dtype: str
    offset: int = 0
    """In bytes."""


@dataclass
class Order:
    """The calls of a network, with a place for every tensor."""

    calls: list[tuple[str, list[Place]]] = field(default_factory=list)
    """In order."""
    copies: list[tuple[Place, Place, int]] = field(default_factory=list)
    """Outputs that no kernel writes in place: to, from, bytes."""
    weights: list[np.ndarray] = field(default_factory=list)
    """Constants, in the order of the file."""
    arena: int = 0
    weight_bytes: int = 0
    """`arena`, `weight_bytes`: sizes."""


@dataclass(frozen=True)
class Sizes:
    """Bytes of tensors between kernels, of kernels' scratch memory, and of weights."""

    tensors: int
    scratch: int
    weights: int

    @property
    def arena(self) -> int:
        """Bytes of memory that the caller provides."""
        return max(self.tensors + self.scratch, ALIGNMENT)


class Kernels(NamedTuple):
    """Kernels as C functions: ``int32_t name(T *first, ..., void *scratch)``.

    They have a pointer for each tensor, outputs last, then one to scratch memory, and return 0, or
    -1 if an index or a divisor is not as demanded (`bnncc.codegen.guards`).
    """

    code: bytes
    """An object file, or C text."""
    scratch: dict[str, int]
    """Bytes of scratch memory, by kernel."""
    parameters: dict[str, list[str]]
    """Declarations of the tensors of each, by kernel."""
    stack: dict[str, int]
    """Bytes of stack that each takes itself, by kernel; none of C text, for compilers decide."""
    floats: dict[str, Counter[str]]
    """Operations of floats by type, by kernel; none of C text."""


def identifier(text: str) -> str:
    """Return `text` as an identifier of C.

    Examples
    --------
    >>> identifier("x/in:0"), identifier("3d")
    ('x_in_0', '_3d')
    """
    made = re.sub(r"[^A-Za-z0-9_]", "_", text)
    return made if made and not made[0].isdigit() else f"_{made}"


def unique(names: list[str], prefix: str, other: str, taken: Collection[str] = ()) -> list[str]:
    """Return `names`, or numbered ones if they clash with each other, ours, or C's."""
    reserved = {*taken, "weights", "arena", *RESERVED}
    starts = f"{prefix.lower()}_", "weights_", "stored_"
    ours = any(n.lower().startswith(starts) or n.endswith("_right") for n in names)
    if not ours and len(set(names)) == len(names) and not reserved.intersection(names):
        return names
    return [f"{other}_{i}" for i in range(len(names))]


RESERVED = (
    "fabs", "printf", "size_t", *(f"{u}int{n}_t" for u in ("", "u") for n in (8, 16, 32, 64)),
    "auto", "break", "case", "char", "const", "continue", "default", "do", "double", "else",
    "enum", "extern", "float", "for", "goto", "if", "inline", "int", "long", "register",
    "restrict", "return", "short", "signed", "sizeof", "static", "struct", "switch", "typedef",
    "union", "unsigned", "void", "volatile", "while", "base", "constants", "content", "failed",
    "main", "memory", "wrong", "i", "count", "code", "and", "bool", "catch", "class", "delete",
    "explicit", "export", "false", "friend", "mutable", "namespace", "new", "not", "operator", "or",
    "private", "protected", "public", "template", "this", "throw", "true", "try", "typename",
    "using", "virtual", "xor",
)  # fmt: skip
"""Words of C and C++, and names that the program text uses itself."""


Named = list[tuple[str, TensorInfo]]


def arguments(given: Named, made: Named) -> list[str]:
    """Return the parameters for inputs and outputs."""
    read = [f"const {C_TYPES[t.dtype]} *{name}" for name, t in given]
    return [*read, *(f"{C_TYPES[t.dtype]} *{name}" for name, t in made)]


def harmless(name: str) -> str:
    """Return a name from the model as it may stand in a comment, or a table."""
    return re.sub(r"[^ -~]|[|`\\]|\*/|/\*", "?", name)


def extents(tensor: TensorInfo) -> str:
    """Return the shape of a tensor, for people."""
    return " x ".join(map(str, tensor.shape)) or "1"


def _elements(tensor: TensorInfo) -> int:
    return math.prod(int(d) for d in tensor.shape)


def nbytes(tensor: TensorInfo) -> int:
    """Return the bytes of an input or output."""
    return _elements(tensor) * np.dtype(tensor.dtype).itemsize
