"""Convolutions whose lanes are output channels: sums of products as blocks, a tile at a time.

The output is cut into ranges of columns (`window.segments`: tiles of equal width and equal taps)
and of vectors of channels (`groups`). Range i has the block ``acc_i``, a reduction over the taps
inside the image for one vector of channels of one pixel, in which ``product_i`` is a loop over
lanes; and ``out_i``, which takes the sums of a tile further. Both are written for single tiles, in
any order: `schedules.channel_tiles` says how they run. They are the tiles of kernels with a ring of
rows, which are templates for its sake (`line_buffer`) and tested against `definitions.conv2d`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from bnncc.schedules.intrin import TensorPair, Window
from bnncc.schedules.templates.kernel import Buffer, Expr
from bnncc.schedules.templates.window import Segment, Windowed, taps_inside
from bnncc.topi_binary.definitions.taps import tap_bounds
from bnncc.topi_binary.layout import LANES


@dataclass(frozen=True)
class Group:
    """Tiles of equally many vectors of channels, one after the other."""

    count: int
    """How many tiles."""
    first: int
    """The first vector."""
    lanes: tuple[int, ...]
    """Channels in each vector of a tile: fewer than `LANES` in the last of all."""


def groups(channels: int, vectors: int, apart: bool = False) -> list[Group]:
    """Cut `channels` into tiles of `vectors`, and what is left as one, or `apart`.

    Examples
    --------
    >>> groups(100, 4)
    [Group(count=1, first=0, lanes=(16, 16, 16, 16)), Group(count=1, first=4, lanes=(16, 16, 4))]
    """
    full, tail = divmod(channels, LANES)
    whole, rest = divmod(full, vectors)
    found = [Group(whole, 0, (LANES,) * vectors)] if whole else []
    last = (LANES,) * rest, (tail,) * bool(tail)
    for lanes in filter(None, last if apart else [last[0] + last[1]]):
        found.append(Group(1, sum(g.count * len(g.lanes) for g in found), lanes))
    return found


Names = list[tuple[Group, list[tuple[str, Segment]]]]
"""By tiles of channels: ranges of columns, from left to right, and the ends of their names."""


def named(channels: Sequence[Group], columns: Sequence[Segment], kind: str = "") -> Names:
    """Name the ranges of a kernel, or of something else in it."""
    return [
        (group, [(f"{kind}{i}_{j}", segment) for j, segment in enumerate(columns)])
        for i, group in enumerate(channels)
    ]


class Pixel(NamedTuple):
    """One vector of channels of one pixel of the output."""

    n: Expr
    h: Expr
    w: Expr
    block: Expr
    """Which vector."""


class Product(NamedTuple):
    """What is added for one tap."""

    pair: TensorPair
    """Whose ``desc`` says what: the loop over lanes that a schedule replaces."""
    operands: tuple[Window, ...]
    """What it reads, besides the sum."""

    def regions(self) -> list[Expr]:
        """Return what is read besides the sum."""
        kinds = self.pair.operands[:-1]
        return [at.region(kind.shape[0]) for at, kind in zip(self.operands, kinds, strict=True)]


@dataclass(frozen=True)
class Range:
    """A range of columns and of vectors of channels.

    Attributes
    ----------
    name : str
        Ends the names of its blocks.
    segment : Segment
        The columns.
    group : Group
        The vectors.
    at : tuple of Expr
        Image and row, perhaps the first vector, where other loops are at.
    """

    name: str
    segment: Segment
    group: Group
    at: tuple[Expr, ...]

    @property
    def tiles(self) -> list[Expr]:
        """Extents of the loops over tiles: perhaps tiles of vectors; tiles of columns."""
        return [self.group.count, self.segment.tiles][len(self.at) - 2 :]

    @property
    def cells(self) -> tuple[int, int]:
        """Columns and vectors of a tile."""
        return self.segment.width, len(self.group.lanes)

    def pixel(self, tile: Sequence[Expr], column: Expr = 0, vector: Expr = 0) -> Pixel:
        """Return a column and vector of a tile."""
        n, h, *rest = [*self.at, *tile]
        if len(self.at) < 3:
            rest[0] = rest[0] * len(self.group.lanes) + self.group.first
        first = rest[1] * self.segment.width + self.segment.start
        return Pixel(n, h, first + column, rest[0] + vector)

    def sums(
        self, spec: Windowed | None, words: int, product: Callable[..., Product],
        dtype: str = "float32", start: Callable[[Pixel, Expr], Expr] | None = None,
    ) -> Buffer:  # fmt: skip
        """Write the block ``acc_i``.

        Parameters
        ----------
        spec : Conv2d or FewBitConv2d, optional
            Whose taps are summed: kernel rows, kernel columns, words. Else words alone.
        words : int
            In one tap.
        product : callable
            Takes a `Pixel`, kernel row, kernel column and word; returns a `Product`.
        dtype : str, default "float32"
            Of the sums.
        start : callable, optional
            Takes a `Pixel` and a lane, and returns what sums start from, if that is not 0.

        Returns
        -------
        Buffer
            The sums.
        """
        width, vectors = self.cells
        acc = T.sblock_alloc_buffer((*self.tiles, width, vectors * LANES), dtype)
        IRBuilder.name(f"acc_{self.name}", acc)
        extents = [*self.tiles, *self.cells]
        reduced = *(spec.kernel if spec is not None else (1, 1)), words
        with T.grid(*extents, *reduced) as loops, T.sblock(f"acc_{self.name}"):
            axes = T.axis.remap("S" * len(extents) + "RRR", list(loops))
            *tile, column, vector, kh, kw, word = axes
            pixel = self.pixel(tile, column, vector)
            total = Window(acc, *tile, column, vector * LANES)
            made = product(pixel, kh, kw, word)
            T.reads(*made.regions())
            T.writes(total.region(LANES))
            with T.init(), T.vectorized(0, LANES) as lane:
                first = start(pixel, lane) if start is not None else tirx.const(0, dtype)
                T.buffer_store(acc, first, list(total.index(lane)))
            with ExitStack() as stack:
                for test in self._inside(spec, pixel.h, column, kh, kw) if spec is not None else ():
                    stack.enter_context(T.If(test))
                    stack.enter_context(T.Then())
                self._add(made, acc, total)
        return acc

    def _add(self, made: Product, acc: Buffer, total: Window) -> None:
        if made.pair.lanes == 1:  # TVM drops such a loop, and does not find it again
            for place, value in made.pair.impl(*made.operands, total):
                T.buffer_store(acc, value, list(total.index(place)))
            return
        with T.serial(0, made.pair.lanes) as loop, T.sblock(f"product_{self.name}"):
            lane = T.axis.spatial(made.pair.lanes, loop)
            for place, value in made.pair.desc(lane, *made.operands, total):
                T.buffer_store(acc, value, list(total.index(place)))

    def _inside(self, spec: Windowed, h: Expr, column: Expr, kh: Expr, kw: Expr) -> list[Expr]:
        """Return the tests that a tap is in the image, but for those that always hold."""
        taps, rows = spec.kernel[0], range(spec.window_hw[0])
        patterns = (
            {taps_inside(spec, 0, row) for row in (*rows[:taps], *rows[-taps - 1 :])},
            set(self.segment.taps),
        )
        # All tiles of a segment have the same taps in each column: the first one tells.
        places = h, column + self.segment.start
        tests = []
        for axis, (place, tap) in enumerate(zip(places, (kh, kw), strict=True)):
            # As bounds of the tap, which can become those of a loop over it. All windows that have
            # no tap inside are one pattern.
            low, high = tap_bounds(spec, axis, place)
            if any(not taps or taps.start > 0 for taps in patterns[axis]):
                tests.append(tap >= low)
            if any(not taps or taps.stop < spec.kernel[axis] for taps in patterns[axis]):
                tests.append(tap < high)
        return tests

    @contextmanager
    def each(self, acc: Buffer) -> Iterator[tuple[Expr, ...]]:
        """Open the block ``out_i``, of one tile, which reads its sums."""
        count = len(self.tiles)
        with T.grid(*self.tiles) as loops, T.sblock(f"out_{self.name}"):
            # One loop is a variable, not a list of one.
            axes = T.axis.remap("S" * count, list(loops) if count > 1 else [loops])
            tile = tuple(axes) if count > 1 else (axes,)
            columns, vectors = self.cells
            whole = [*tile, slice(0, columns), slice(0, vectors * LANES)]
            T.reads(acc[tuple(whole)])
            T.writes()
            yield tile

    def vector(self, acc: Buffer, tile: Sequence[Expr], column: int, vector: int) -> Expr:
        """Return the sums of one vector of a tile."""
        return acc[tuple([*tile, column, T.Ramp(vector * LANES, 1, LANES)])]
