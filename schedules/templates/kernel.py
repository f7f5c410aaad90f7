"""Helpers for writing kernels with explicit vectors, tiles and loops in TensorIR.

Templates are loops over vectors of `LANES` values. So they determine the registers they need on
every target: LLVM splits a vector of 16 lanes into as many registers as necessary. All indices are
int64, like Relax shapes. Everything here works inside an `Operator` context, on TVM's IRBuilder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.topi_binary.layout import LANES

Buffer = Any
Expr = Any


def const(value: int) -> Expr:
    """Return an int64 constant."""
    return tirx.IntImm("int64", value)


def index(value: Expr | int) -> Expr:
    """Return `value` as an index expression."""
    return const(value) if isinstance(value, int) else value


def ramp(base: Expr | int, lanes: int = LANES, stride: int = 1) -> Expr:
    """Return the indices ``base, base + stride, ...``."""
    return tirx.Ramp(index(base), const(stride), lanes)


def splat(value: Expr, lanes: int = LANES) -> Expr:
    """Broadcast the scalar `value` to every lane."""
    return tirx.Broadcast(value, lanes)


def f32(value: float) -> Expr:
    """Return a float constant in every lane."""
    return splat(tirx.FloatImm("float32", value))


def u32(value: int, lanes: int = LANES) -> Expr:
    """Return a word in every lane."""
    return splat(tirx.IntImm("uint32", value), lanes)


def first_lanes(valid: int, lanes: int = LANES) -> Expr:
    """Return the mask of the first `valid` lanes."""
    numbers = tirx.Ramp(tirx.IntImm("int32", 0), tirx.IntImm("int32", 1), lanes)
    return numbers < tirx.Broadcast(tirx.IntImm("int32", valid), lanes)


def lane(vector: Expr, number: int) -> Expr:
    """Return one lane of `vector` as a scalar."""
    return tirx.Shuffle([vector], [tirx.IntImm("int32", number)])


def load(
    buffer: Buffer, where: Sequence[Expr | int], valid: int = LANES, lanes: int = LANES
) -> Expr:
    """Load `lanes` consecutive values of the last axis, accessing only the first `valid` ones."""
    *outer, last = (index(i) for i in where)
    if valid == lanes:
        return buffer[tuple([*outer, ramp(last, lanes)])]
    dtype = f"{buffer.dtype}x{lanes}"
    return T.masked_load(dtype, buffer, *outer, ramp(last, lanes), first_lanes(valid, lanes))


def store(
    buffer: Buffer,
    where: Sequence[Expr | int],
    value: Expr,
    valid: int = LANES,
    lanes: int = LANES,
) -> None:
    """Store the first `valid` of `lanes` values along the last axis."""
    *outer, last = (index(i) for i in where)
    if valid == lanes:
        T.buffer_store(buffer, value, [*outer, ramp(last, lanes)])
    else:
        mask = first_lanes(valid, lanes)
        T.evaluate(T.masked_store(buffer, value, *outer, ramp(last, lanes), mask))


def lanes_of(half: Expr) -> Expr:
    """Return a vector of conditions: lane i is bit i of a half word."""
    bit = T.shift_left(u32(1), tirx.Ramp(tirx.IntImm("uint32", 0), tirx.IntImm("uint32", 1), LANES))
    return (splat(T.Cast("uint32", half)) & bit) != u32(0)


def to_float(vector: Expr, dtype: str) -> Expr:
    """Convert a vector of floats or bytes to float32."""
    if dtype == "float32":
        return vector
    return T.Cast(f"float32x{LANES}", T.Cast(f"int32x{LANES}", vector))


def flat(buffer: Buffer) -> Buffer:
    """View `buffer` with one axis."""
    total: Expr = const(1)
    for extent in buffer.shape:
        total = total * extent
    return T.decl_buffer([total], buffer.dtype, data=buffer.data)


class Register:
    """A vector variable.

    Parameters
    ----------
    dtype : str, default "float32"
        Type of a lane.
    lanes : int, default LANES
        Number of lanes.
    """

    def __init__(self, dtype: str = "float32", lanes: int = LANES) -> None:
        self._buffer = T.sblock_alloc_buffer((lanes,), dtype)
        self._range = ramp(0, lanes) if lanes > 1 else const(0)

    @property
    def value(self) -> Expr:
        """Its current value."""
        return self._buffer[self._range]

    def set(self, value: Expr) -> None:
        """Assign a value."""
        T.buffer_store(self._buffer, value, [self._range])


@contextmanager
def loop(extent: Expr | int, *, parallel: bool = False) -> Iterator[Expr]:
    """Open ``for i in range(extent)``; a constant extent of 1 makes no loop."""
    if isinstance(extent, tirx.IntImm):
        extent = int(extent.value)
    if isinstance(extent, int) and extent == 1:
        yield const(0)
        return
    with (T.parallel if parallel else T.serial)(index(extent)) as i:
        yield i


def bind(value: Expr | int) -> Expr:
    """Bind an index expression to a name, unless it is a constant or variable."""
    if isinstance(value, (int, tirx.IntImm, tirx.Var)):
        return index(value)
    return T.Bind(value)


@contextmanager
def loops(extents: Sequence[Expr | int], *, parallel: bool = False) -> Iterator[list[Expr]]:
    """Open nested loops; if `parallel`, they are fused into one parallel loop."""
    total: Expr = 1
    for extent in extents:
        value = int(extent.value) if isinstance(extent, tirx.IntImm) else extent
        total = total * value
    if not parallel:
        with _nest(list(extents)) as indices:
            yield indices
        return
    with loop(total, parallel=True) as flat:
        indices = []
        for extent in reversed(extents[1:]):
            indices.append(bind(flat % index(extent)))
            flat = bind(flat // index(extent))
        yield [flat, *reversed(indices)]


@contextmanager
def _nest(extents: list[Expr | int]) -> Iterator[list[Expr]]:
    if not extents:
        yield []
        return
    with loop(extents[0]) as first, _nest(extents[1:]) as rest:
        yield [first, *rest]
