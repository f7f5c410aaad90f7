"""Convolutions whose lanes are output channels: blocks for the sums of one tile at a time.

The output is divided into ranges of columns (`window.segments`: tiles of equal width with equal
taps) and of channel vectors (`groups`). Range i has the block ``acc_i``, a reduction over the taps
inside the image for one channel vector of one pixel, with the inner loop ``product_i`` over lanes;
and the block ``out_i``, which processes the sums of a tile. `schedules.channel_tiles` schedules
both. They are used by kernels with a ring buffer of rows, which are templates because of it
(`line_buffer`), and are tested against `definitions.conv2d`.
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
from bnncc.schedules.templates.window import Segment, Windowed, rows_inside
from bnncc.topi_binary.definitions.taps import tap_bounds
from bnncc.topi_binary.layout import LANES


@dataclass(frozen=True)
class Group:
    """Consecutive tiles with the same number of channel vectors."""

    count: int
    """Number of tiles."""
    first: int
    """Index of the first vector."""
    lanes: tuple[int, ...]
    """Channels in each vector of a tile: fewer than `LANES` only in the last vector of all."""


def groups(channels: int, vectors: int, apart: bool = False) -> list[Group]:
    """Divide `channels` into tiles of `vectors`; the rest is one tile, or `apart`.

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
"""By group of channel tiles: the segments of columns from left to right, with name suffixes."""


def named(channels: Sequence[Group], columns: Sequence[Segment], kind: str = "") -> Names:
    """Name the ranges of a kernel, or (by `kind`) of a stage in it."""
    return [
        (group, [(f"{kind}{i}_{j}", segment) for j, segment in enumerate(columns)])
        for i, group in enumerate(channels)
    ]


class Pixel(NamedTuple):
    """One channel vector of one output pixel."""

    n: Expr
    h: Expr
    w: Expr
    block: Expr
    """Index of the vector."""


class Product(NamedTuple):
    """The product of one tap."""

    pair: TensorPair
    """Its ``desc`` is the loop over lanes that a schedule replaces."""
    operands: tuple[Window, ...]
    """Input operands, without the sum."""

    def regions(self) -> list[Expr]:
        """Return the regions that are read, without the sum."""
        kinds = self.pair.operands[:-1]
        return [at.region(kind.shape[0]) for at, kind in zip(self.operands, kinds, strict=True)]


@dataclass(frozen=True)
class Range:
    """A range of columns and channel vectors.

    Attributes
    ----------
    name : str
        Suffix of the names of its blocks.
    segment : Segment
        The columns.
    group : Group
        The channel vectors.
    at : tuple of Expr
        Image and row, and optionally the first vector, as given by outer loops.
    """

    name: str
    segment: Segment
    group: Group
    at: tuple[Expr, ...]

    @property
    def tiles(self) -> list[Expr]:
        """Extents of the loops over tiles: of vectors (if not given by `at`), and of columns."""
        return [self.group.count, self.segment.tiles][len(self.at) - 2 :]

    @property
    def cells(self) -> tuple[int, int]:
        """Columns and vectors per tile."""
        return self.segment.width, len(self.group.lanes)

    def pixel(self, tile: Sequence[Expr], column: Expr = 0, vector: Expr = 0) -> Pixel:
        """Return the place of a column and vector within a tile."""
        n, h, *rest = [*self.at, *tile]
        if len(self.at) < 3:
            rest[0] = rest[0] * len(self.group.lanes) + self.group.first
        first = rest[1] * self.segment.width + self.segment.start
        return Pixel(n, h, first + column, rest[0] + vector)

    def sums(
        self, spec: Windowed | None, words: int, product: Callable[..., Product],
        dtype: str = "float32", start: Callable[[Pixel, Expr], Expr] | None = None,
    ) -> Buffer:  # fmt: skip
        """Write the block ``acc_i``: the sums.

        Parameters
        ----------
        spec : Conv2d or FewBitConv2d, optional
            Its taps are the reduction: kernel rows, kernel columns, words. Default: words only.
        words : int
            Words per tap.
        product : callable
            Takes a `Pixel`, kernel row, kernel column and word; returns a `Product`.
        dtype : str, default "float32"
            Type of the sums.
        start : callable, optional
            Takes a `Pixel` and a lane; returns the initial value, if not 0.

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
        if made.pair.lanes == 1:  # TVM removes such a loop, and then cannot match it
            for place, value in made.pair.impl(*made.operands, total):
                T.buffer_store(acc, value, list(total.index(place)))
            return
        with T.serial(0, made.pair.lanes) as loop, T.sblock(f"product_{self.name}"):
            lane = T.axis.spatial(made.pair.lanes, loop)
            for place, value in made.pair.desc(lane, *made.operands, total):
                T.buffer_store(acc, value, list(total.index(place)))

    def _inside(self, spec: Windowed, h: Expr, column: Expr, kh: Expr, kw: Expr) -> list[Expr]:
        """Return the conditions under which a tap is inside the image, unless they always hold."""
        patterns = rows_inside(spec), set(self.segment.taps)
        # All tiles of a segment have the same taps in each column; use the first one.
        places = h, column + self.segment.start
        tests = []
        for axis, (place, tap) in enumerate(zip(places, (kh, kw), strict=True)):
            # As bounds of the tap, which can become bounds of a loop over it. A window without any
            # tap inside the image needs both.
            low, high = tap_bounds(spec, axis, place)
            if any(not taps or taps.start > 0 for taps in patterns[axis]):
                tests.append(tap >= low)
            if any(not taps or taps.stop < spec.kernel[axis] for taps in patterns[axis]):
                tests.append(tap < high)
        return tests

    @contextmanager
    def each(self, acc: Buffer) -> Iterator[tuple[Expr, ...]]:
        """Open the block ``out_i`` of one tile, which reads its sums."""
        count = len(self.tiles)
        with T.grid(*self.tiles) as loops, T.sblock(f"out_{self.name}"):
            # TVM returns a single variable, not a list, for one loop.
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
