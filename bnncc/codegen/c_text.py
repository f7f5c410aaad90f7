"""Parts of the text of a network in C: names, types, places, and a description of kernels."""

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
"""Alignment of each tensor within its memory, in bytes (TVM's)."""

C_ALIGNMENT = 8
"""Alignment of the memory that C code receives, in bytes: that of the largest number."""

C_TYPES = {
    "float32": "float", "float64": "double", "float16": "uint16_t", "bfloat16": "uint16_t",
    "bool": "uint8_t",
    **{f"{u}int{bits}": f"{u}int{bits}_t" for u in ("", "u") for bits in (8, 16, 32, 64)},
}  # fmt: skip


PLACES = ".at"
"""Suffix of the name of an array with the positions of an output's stored values."""


@dataclass(frozen=True)
class Place:
    """Place of a tensor."""

    root: str
    """``base`` (the arena), ``constants`` (the weights), or an argument."""
    dtype: str
    offset: int = 0
    """In bytes."""
    step: int = 0
    """In a loop: by how many bytes it advances each time."""


@dataclass(frozen=True)
class Call:
    """A call of a kernel."""

    kernel: str
    args: tuple[Place, ...]
    """A place for each of its tensors."""


@dataclass(frozen=True)
class Move:
    """A copy of `count` pieces of memory, in order; no piece overlaps its own destination."""

    to: Place
    origin: Place
    size: int
    """Bytes of each piece."""
    count: int = 1
    apart: tuple[int, int] = (0, 0)
    """Bytes from one piece to the next, in the destination and in the origin."""


@dataclass(frozen=True)
class Clear:
    """Zeros for `size` bytes."""

    to: Place
    size: int


Step = Call | Move | Clear


@dataclass(frozen=True)
class Loop:
    """Statements that are executed several times."""

    times: int
    body: tuple[Step, ...]


Statement = Step | Loop


@dataclass
class Order:
    """The calls of a network, with the place of every tensor."""

    statements: list[Statement] = field(default_factory=list)
    """In order."""
    copies: list[tuple[Place, Place, int]] = field(default_factory=list)
    """Outputs that are not written in place: destination, source, bytes."""
    weights: list[np.ndarray] = field(default_factory=list)
    """Constants, in the order of the file."""
    arena: int = 0
    weight_bytes: int = 0
    """`arena`, `weight_bytes`: sizes in bytes."""
    live: list[int] = field(default_factory=list)
    """Bytes of the arena in use during each call of the network."""
    rows: list[int] = field(default_factory=list)
    """For each call of the network, how many rows it computes at a time; 0 if all."""
    variants: dict[str, str] = field(default_factory=dict)
    """Kernels for bands, and the kernel of which each computes a part."""

    @property
    def calls(self) -> list[tuple[int, Call]]:
        """The calls, and how often each is executed."""
        loops = [s if isinstance(s, Loop) else Loop(1, (s,)) for s in self.statements]
        return [(x.times, one) for x in loops for one in x.body if isinstance(one, Call)]

    def whole(self, kernel: str) -> str:
        """Return the kernel of the network that a kernel is, or computes a part of."""
        return self.variants.get(kernel, kernel)


@dataclass(frozen=True)
class Sizes:
    """Sizes in bytes of tensors between kernels, of scratch memory, and of weights."""

    tensors: int
    scratch: int
    weights: int

    @property
    def arena(self) -> int:
        """Bytes of the arena that the caller provides."""
        return max(self.tensors + self.scratch, ALIGNMENT)


class Kernels(NamedTuple):
    """Kernels as C functions: ``int32_t name(T *first, ..., void *scratch)``.

    They take a pointer for each tensor, outputs last, and one to scratch memory. They return 0, or
    -1 if an index or divisor is invalid (`bnncc.codegen.guards`).
    """

    code: bytes
    """An object file, or C text."""
    scratch: dict[str, int]
    """Bytes of scratch memory, by kernel."""
    parameters: dict[str, list[str]]
    """Declarations of the tensors, by kernel."""
    stack: dict[str, int]
    """Bytes of stack, by kernel; empty for C text, where it depends on the compiler."""
    floats: dict[str, Counter[str]]
    """Float operations by type, by kernel; empty for C text."""


def identifier(text: str) -> str:
    """Return `text` as a C identifier.

    Examples
    --------
    >>> identifier("x/in:0"), identifier("3d")
    ('x_in_0', '_3d')
    """
    made = re.sub(r"[^A-Za-z0-9_]", "_", text)
    return made if made and not made[0].isdigit() else f"_{made}"


def unique(names: list[str], prefix: str, other: str, taken: Collection[str] = ()) -> list[str]:
    """Return `names`, numbered if they clash with each other, with ours, or with C's."""
    clash = any(n in ("weights", "arena", *taken) or is_reserved(n) for n in names)
    starts = f"{prefix.lower()}_", "weights_", "stored_"
    ours = any(n.lower().startswith(starts) or n.endswith("_right") for n in names)
    if not ours and not clash and len(set(names)) == len(names):
        return names
    return [f"{other}_{i}" for i in range(len(names))]


_WORDS = (
    "alignas alignof and and_eq asm auto base bitand bitor bool break case catch char char8_t "
    "char16_t char32_t class code co_await co_return co_yield compl complex concept const "
    "consteval constants constexpr constinit const_cast content continue count decltype default "
    "delete do double dynamic_cast else enum errno explicit export extern fabs failed false "
    "float for friend goto i i386 if inline int linux long main math_errhandling memcpy memory "
    "memset mutable namespace new noexcept not not_eq nullptr operator or or_eq printf private "
    "protected public register reinterpret_cast requires restrict return sched_priority short "
    "signed signgam size_t sizeof static static_assert static_cast stderr stdin stdout struct "
    "switch template this thread_local throw true try typedef typeid typename typeof "
    "typeof_unqual uintptr_t union unix unsigned using virtual void volatile wchar_t while "
    "wrong xor xor_eq"
)
_RESERVED = {*_WORDS.split(), *C_TYPES.values()}
"""Keywords of C and C++, macros in lower case, and names that the generated text uses."""

_MACRO = re.compile(r"I|[A-Z][A-Z0-9_]+|[A-Z]_\w+|_[A-Z_]\w*")
"""Names that C's headers, or the compiler, may define: ``NAN``, ``M_PIf``, ``_Bool``."""


def is_reserved(name: str) -> bool:
    """Whether C or C++ may not take `name` for a parameter, whatever headers are included."""
    return name in _RESERVED or bool(_MACRO.fullmatch(name))


_OTHERS = (
    "alloca assert complex ctype endian errno features fenv float inttypes iso646 libintl limits "
    "locale malloc math memory newlib pthread reent sched search setjmp signal stdalign stdarg "
    "stdatomic stdbit stdbool stdckdint stdcountof stddef stdint stdio stdlib stdmchar stdnoreturn "
    "string strings syslimits tgmath threads time uchar unistd values varargs version wchar wctype "
    "xlocale "
    "all c clean help install m package test"
)
"""Headers of C libraries, and names that CMake or the linker gives to something else."""


def network_prefix(name: str) -> str:
    """Return the prefix of a network's files and symbols.

    Its header must not hide one of C's from programs that search its folder.

    Examples
    --------
    >>> network_prefix("digits"), network_prefix("math")
    ('digits', 'math_network')
    """
    made = identifier(name)
    return f"{made}_network" if made.lower() in _OTHERS.split() else made


Named = list[tuple[str, TensorInfo]]


def arguments(given: Named, made: Named) -> list[str]:
    """Return the parameters for inputs and outputs."""
    read = [f"const {C_TYPES[t.dtype]} *{name}" for name, t in given]
    return [*read, *(f"{C_TYPES[t.dtype]} *{name}" for name, t in made)]


def harmless(name: str) -> str:
    """Return a name from the model in a form that is safe in a comment or table."""
    return re.sub(r"[^ -~]|[|`\\]|\*/|/\*", "?", name)


def itemsize(dtype: str) -> int:
    """Return the bytes of a number."""
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def extents(tensor: TensorInfo) -> str:
    """Return the shape of a tensor, for documentation."""
    return " x ".join(map(str, tensor.shape)) or "1"


def elements(tensor: TensorInfo) -> int:
    """Return the number of elements of an input or output."""
    return math.prod(int(d) for d in tensor.shape)


def nbytes(tensor: TensorInfo) -> int:
    """Return the size of an input or output in bytes."""
    return elements(tensor) * itemsize(tensor.dtype)
