"""Convolutions whose lanes are output channels: sums of products as blocks, a tile at a time.

The output is cut into ranges of columns (`window.segments`: tiles of equal width and equal taps)
and of vectors of channels (`groups`). Range i has the block ``acc_i``, a reduction over the taps
inside the image for one vector of channels of one pixel, in which ``product_i`` is a loop over
lanes; and ``out_i``, which takes the sums of a tile further. Both are written for single tiles, in
any order: `schedules.channel_tiles` says how they run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from bnncc.schedules.templates.kernel import Buffer, Expr
from bnncc.schedules.templates.window import Segment, Windowed, taps_inside
from bnncc.topi_binary.layout import LANES


class Group(NamedTuple):
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
    left = (LANES,) * rest, (tail,) * bool(tail)
    if not apart:
        left = ((*left[0], *left[1]),)
    for lanes in filter(None, left):
        found.append(Group(1, sum(g.count * len(g.lanes) for g in found), lanes))
    return found


class Pixel(NamedTuple):
    """One vector of channels of one pixel of the output."""

    n: Expr
    h: Expr
    w: Expr
    block: Expr
    """Which vector."""


class Product(NamedTuple):
    """What is added for one tap.

    Attributes
    ----------
    reads : sequence
        Regions, for ``T.reads``.
    add : callable
        Takes the sum and the number of a lane, and returns the new sum; or, without `lanes`, takes
        the sums of a whole vector.
    lanes : int
        Extent of the loop over lanes, to be tensorized; 0 for none.
    """

    reads: Sequence[Any]
    add: Callable[..., Expr]
    lanes: int = LANES


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
    image : tuple of Expr, default ()
        Extents of the loops over images and rows. Without them the loops over these and over the
        tiles of vectors are others.
    at : tuple of Expr, default ()
        Image, row and first vector, then.
    """

    name: str
    segment: Segment
    group: Group
    image: tuple[Expr, ...] = ()
    at: tuple[Expr, ...] = ()

    @property
    def tiles(self) -> list[Expr]:
        """Extents of the loops over tiles: images, rows, tiles of vectors; tiles of columns."""
        outer = [*self.image, self.group.count] if self.image else []
        # Of one type: threads share the product of these extents, and TVM follows no casts.
        symbolic = bool(self.image) and not isinstance(self.image[0], int)
        return [T.int64(e) if symbolic and isinstance(e, int) else e
                for e in (*outer, self.segment.tiles)]  # fmt: skip

    def pixel(self, tile: Sequence[Expr], column: Expr, vector: Expr) -> Pixel:
        """Return a column and vector of a tile."""
        n, h, first = self.at or tile[:2] + (tile[2] * len(self.group.lanes) + self.group.first,)
        start = tile[-1] * self.segment.width + self.segment.start
        return Pixel(n, h, start + column, first + vector)

    def sums(
        self, spec: Windowed, reduced: Sequence[int], start: Expr,
        product: Callable[..., Product],
    ) -> Buffer:  # fmt: skip
        """Write the block ``acc_i``.

        Parameters
        ----------
        spec : Conv2d or FewBitConv2d
            Whose taps are summed.
        reduced : sequence of int
            Extents of the reduction: kernel rows, kernel columns, and what else there is.
        start : Expr
            What sums start from; its type is theirs.
        product : callable
            Takes a `Pixel` and the indices of the reduction; returns a `Product`.

        Returns
        -------
        Buffer
            The sums: tiles, columns, and lanes of the vectors of a tile.
        """
        width, vectors = self.segment.width, len(self.group.lanes)
        shape = (*self.tiles, width, vectors * LANES)
        acc = T.sblock_alloc_buffer(shape, str(start.ty))
        IRBuilder.name(f"acc_{self.name}", acc)
        extents = [*self.tiles, width, vectors]
        kinds = "S" * len(extents) + "R" * len(reduced)
        with T.grid(*extents, *reduced) as loops, T.sblock(f"acc_{self.name}"):
            axes = T.axis.remap(kinds, list(loops))
            *tile, column, vector = axes[: len(extents)]
            taps = axes[len(extents) :]
            pixel = self.pixel(tuple(tile), column, vector)
            made = product(pixel, *taps)
            T.reads(*made.reads)
            T.writes(acc[(*tile, column, slice(vector * LANES, vector * LANES + LANES))])
            with T.init(), T.vectorized(0, LANES) as lane:
                T.buffer_store(acc, start, [*tile, column, vector * LANES + lane])
            with ExitStack() as stack:
                for test in self._inside(spec, pixel.h, column, *taps[:2]):
                    stack.enter_context(T.If(test))
                    stack.enter_context(T.Then())
                self._add(made, acc, (*tile, column), vector)
        return acc

    def _add(self, made: Product, acc: Buffer, place: tuple[Expr, ...], vector: Expr) -> None:
        if not made.lanes:
            where = (*place, T.Ramp(vector * LANES, 1, LANES))
            T.buffer_store(acc, made.add(acc[where]), list(where))
            return
        with T.serial(0, made.lanes) as loop, T.sblock(f"product_{self.name}"):
            lane = T.axis.spatial(made.lanes, loop)
            where = (*place, vector * LANES + lane)
            T.buffer_store(acc, made.add(acc[where], lane), list(where))

    def _inside(self, spec: Windowed, h: Expr, column: Expr, kh: Expr, kw: Expr) -> list[Expr]:
        """Return the tests that a tap is in the image, but for those that always hold."""
        every = range(spec.kernel[0]), range(spec.kernel[1])
        rows = {taps_inside(spec, 0, row) for row in range(spec.window_hw[0])}
        tests = []
        # All tiles of a segment have the same taps in each column, so that of the first one tells.
        places = h, column + self.segment.start
        alike = rows <= {every[0]}, all(taps == every[1] for taps in self.segment.taps)
        for axis, (place, tap) in enumerate(zip(places, (kh, kw), strict=True)):
            if alike[axis]:
                continue
            at = place * spec.strides[axis] + (tap * spec.dilations[axis] - spec.pads[axis])
            tests += [T.And(at >= 0, at < (spec.height, spec.width)[axis])]
        return tests

    def out(
        self, acc: Buffer, tile: Sequence[Expr], column: int, vector: int
    ) -> Expr:
        """Return the sums of one vector of a tile."""
        return acc[(*tile, column, T.Ramp(vector * LANES, 1, LANES))]
