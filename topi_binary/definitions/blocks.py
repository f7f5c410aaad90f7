"""Helpers that write definitions: a function with a spec's parameters, and named blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from bnncc.topi_binary import layout

Buffer = Any
Expr = Any


def int64(value: int) -> Expr:
    """Return an int64 constant, the type of indices."""
    return tirx.IntImm("int64", value)


def buffer(name: str, shape: Sequence[Any], dtype: str) -> Buffer:
    """Declare an intermediate tensor."""
    made = T.sblock_alloc_buffer(tuple(shape), dtype)
    IRBuilder.name(name, made)
    return made


def compute(
    name: str,
    target: Buffer,
    extents: Sequence[Any],
    value: Callable[..., Expr],
    at: Callable[..., Sequence[Expr]] | None = None,
) -> Buffer:
    """Write a block: ``target[at(*i)] = value(*i)`` for all `i` within `extents`.

    Parameters
    ----------
    name : str
        Name of the block.
    target : Buffer
        Tensor to write.
    extents : sequence of int or Expr
        Loop extents.
    value : callable
        Takes one index for each loop.
    at : callable, optional
        Index in `target`; default: the loop indices.

    Returns
    -------
    Buffer
        `target`.
    """
    with T.grid(*map(extent, extents)) as loops, T.sblock(name):
        axes = _axes("S" * len(extents), loops)
        T.buffer_store(target, value(*axes), list(at(*axes) if at else axes))
    return target


def accumulate(
    name: str,
    target: Buffer,
    extents: Sequence[Any],
    reduced: Sequence[Any],
    start: Expr,
    step: Callable[..., Expr],
    at: Callable[..., Sequence[Expr]] | None = None,
    tests: Callable[..., Sequence[Expr]] | None = None,
) -> Buffer:
    """Write a reduction: ``target[at(*i)] = step(target[at(*i)], *i, *r)`` for each `r` in order.

    Parameters
    ----------
    name, target, extents
        As for `compute`.
    reduced : sequence of int
        Extents of the reduction loops.
    start : Expr
        Initial value.
    step : callable
        Takes the current value, the loop indices, and the reduction indices.
    at : callable, optional
        As for `compute`.
    tests : callable, optional
        Takes the same arguments but the current value; a step runs only if all tests hold.

    Returns
    -------
    Buffer
        `target`.
    """
    count = len(extents)
    with T.grid(*map(extent, [*extents, *reduced])) as loops, T.sblock(name):
        axes = _axes("S" * count + "R" * len(reduced), loops)
        here = list(at(*axes[:count]) if at else axes[:count])
        with T.init():
            T.buffer_store(target, start, here)
        with under(*(tests(*axes) if tests else ())):
            T.buffer_store(target, step(target[tuple(here)], *axes), here)
    return target


def accumulate_lanes(
    name: str,
    target: Buffer,
    extents: Sequence[Any],
    reduced: Sequence[Any],
    start: Callable[..., Expr],
    term: Callable[..., Expr],
    tests: Callable[..., Sequence[Expr]],
    first: int = 0,
    together: int = 1,
) -> Buffer:
    """Write sums whose innermost loop, over lanes, is a separate block that can be tensorized.

    ``target[*i, o * LANES + lane] = start(*i, o, lane) + sum(term(*i, o, *r, lane))``, where o is
    the last axis of `extents`. The blocks are ``name``, ``name_start`` and ``name_add``.

    Parameters
    ----------
    name, target, extents, reduced
        As for `accumulate`.
    start : callable
        Takes the indices and a lane; returns the initial value.
    term : callable
        Takes the indices, the reduction indices and a lane; returns the term to add.
    tests : callable
        Takes the indices and the reduction indices; a term is added only if all of them hold.
    first : int, default 0
        First value of ``o``.
    together : int, default 1
        How many consecutive terms ``name_add`` adds, in a loop inside that over lanes; a divisor of
        the last extent of `reduced`.

    Returns
    -------
    Buffer
        `target`.
    """
    count, reduced = len(extents), [*reduced[:-1], reduced[-1] // together]

    def add(lane: Expr, axes: Sequence[Expr]) -> None:
        here = (*axes[: count - 1], axes[count - 1] * layout.LANES + lane)
        T.buffer_store(target, target[here] + term(*axes, lane), list(here))

    with T.grid(*map(extent, [*extents, *reduced])) as loops, T.sblock(name):
        loops = [*loops]
        where = _axes("S" * (count - 1), loops[: count - 1])
        o = T.axis.spatial(extent(extents[-1] + first), loops[count - 1] + first)
        axes = [*where, o, *_axes("R" * len(reduced), loops[count:])]
        with T.init(), lane_of(f"{name}_start") as lane:
            T.buffer_store(target, start(*where, o, lane), [*where, o * layout.LANES + lane])
        with under(*tests(*axes)):
            if together == 1:
                with lane_of(f"{name}_add") as lane:
                    add(lane, axes)
            else:
                with T.grid(layout.LANES, together) as inner, T.sblock(f"{name}_add"):
                    lane, one = T.axis.remap("SR", [*inner])
                    add(lane, [*axes[:-1], axes[-1] * together + one])
    return target


def compute_lanes(
    name: str,
    target: Buffer,
    extents: Sequence[Any],
    value: Callable[..., Expr],
    first: int = 0,
    lanes: int = layout.LANES,
) -> Buffer:
    """Write vectors whose innermost loop, over lanes, is the block ``name_lane``.

    ``target[*i, o * LANES + lane] = value(*i, o, lane)``, with ``o`` as in `accumulate_lanes`.
    """
    with T.grid(*map(extent, extents)) as loops, T.sblock(name):
        loops = [*loops]
        where = _axes("S" * (len(extents) - 1), loops[:-1])
        o = T.axis.spatial(extent(extents[-1] + first), loops[-1] + first)
        with lane_of(f"{name}_lane", lanes) as lane:
            T.buffer_store(target, value(*where, o, lane), [*where, o * layout.LANES + lane])
    return target


@contextmanager
def lane_of(name: str, lanes: int = layout.LANES) -> Iterator[Expr]:
    """Open a loop over lanes, with a block for each lane; yield the lane."""
    with T.grid(int64(lanes)) as loop, T.sblock(name):
        yield T.axis.spatial(int64(lanes), loop)


class Window:
    """A run of consecutive lanes of a tensor, written by blocks over single lanes."""

    def __init__(self, made: Buffer, at: Sequence[Expr], first: Expr, count: int) -> None:
        self.at = at
        self._made, self._first, self._count = made, first, count

    @property
    def region(self) -> Expr:
        """The whole run, as a region."""
        return self._made[tuple([*self.at, slice(self._first, self._first + self._count)])]

    def clear(self, lanes: int = 0) -> None:
        """Set the run to 0, `lanes` lanes at a time (default: 128 bits)."""
        lanes = lanes or 128 // int(self._made.dtype.removeprefix("uint"))
        with T.init():
            for vector in range(0, self._count, lanes):
                with T.vectorized(0, lanes) as lane:
                    where = [*self.at, self._first + (lane + vector)]
                    T.buffer_store(self._made, T.Cast(self._made.dtype, T.int32(0)), where)

    def write(self, name: str, value: Callable[[Expr], Expr], old: bool = False) -> None:
        """Write a value to each lane; with `old`, the block also reads the run."""
        with T.grid(int64(self._count)) as loop, T.sblock(name):
            lane = T.axis.spatial(int64(self._count), loop)
            where = *self.at, self._first + lane
            made = value(lane)
            T.buffer_store(self._made, self._made[where] + made if old else made, list(where))

    def add(self, name: str, value: Callable[[Expr], Expr]) -> None:
        """Add a value to each lane."""
        self.write(name, value, old=True)


@contextmanager
def axes(
    name: str, spatial: Mapping[str, Any], reduced: Mapping[str, Any]
) -> Iterator[dict[str, Expr]]:
    """Open a block; yield its axes by name."""
    every = {**spatial, **reduced}
    with T.grid(*map(extent, every.values())) as loops, T.sblock(name):
        values = T.axis.remap("S" * len(spatial) + "R" * len(reduced), list(loops))
        yield dict(zip(every, values, strict=True))


@contextmanager
def under(*tests: Expr | None) -> Iterator[None]:
    """Open nested conditions; a condition that is None always holds."""
    with ExitStack() as stack:
        for test in tests:
            if test is not None:
                stack.enter_context(T.If(test))
                stack.enter_context(T.Then())
        yield


def extent(value: Any) -> Any:
    """Return the extent of a loop, as an int64 constant if it is an int."""
    return int64(value) if isinstance(value, int) else value


def _axes(kinds: str, loops: Any) -> list[Expr]:
    # TVM returns a single variable, not a list, for one loop.
    loops = [loops] if len(kinds) == 1 else list(loops)
    axes = T.axis.remap(kinds, loops)
    return [axes] if len(kinds) == 1 else list(axes)


def bit(word: Expr, number: Expr) -> Expr:
    """Return one bit of a word as a condition."""
    moved = T.shift_right(word, T.Cast("uint32", number))
    return T.bitwise_and(moved, T.uint32(1)) == T.uint32(1)


def differ(one: Expr, other: Expr) -> Expr:
    """Return the XOR of two conditions."""
    return T.Cast("int32", one) != T.Cast("int32", other)


def bit_of(plane: Buffer, where: Sequence[Expr], channel: Expr) -> Expr:
    """Return the bit of `channel` in a packed tensor at index `where`, without the word axis."""
    word = plane[tuple([*where, channel // layout.WORD_BITS])]
    return bit(word, channel % layout.WORD_BITS)


def pack(
    name: str,
    target: Buffer,
    extents: Sequence[Any],
    channels: int,
    condition: Callable[..., Expr],
    at: Callable[..., Sequence[Expr]] | None = None,
) -> Buffer:
    """Write ``condition(*i, channel)`` as packed bits; bits beyond the last channel are 0."""
    extents = [*extents, layout.words(channels)]

    def step(word: Expr, *axes: Expr) -> Expr:
        *where, number, low = axes
        channel = number * layout.WORD_BITS + low
        last = T.min(channel, int64(channels - 1))
        one = T.shift_left(T.Cast("uint32", condition(*where, last)), T.Cast("uint32", low))
        return word | T.if_then_else(channel < channels, one, T.uint32(0))

    return accumulate(name, target, extents, [layout.WORD_BITS], T.uint32(0), step, at)
