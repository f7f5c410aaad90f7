"""Sliding windows: taps inside the image, and the division of a row of windows into tiles."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

from tvm.tirx.script import builder as T

from bnncc.schedules.templates.kernel import Expr, bind, const
from bnncc.topi_binary.definitions.taps import tap_bounds
from bnncc.topi_binary.spec import (
    BinaryConv2d,
    BitwiseMaxPool,
    Conv2d,
    Dim,
    FewBitConv2d,
    Pool2d,
)
from bnncc.topi_binary.spec import taps_inside as taps_inside

Windowed = BinaryConv2d | Conv2d | Pool2d | BitwiseMaxPool | FewBitConv2d


class Segment(NamedTuple):
    """Consecutive tiles with equal width and equal taps."""

    start: Any
    """First output column."""
    width: int
    """Columns per tile."""
    tiles: Any
    """Number of tiles: an int, or like `start` an expression if the columns are symbolic."""
    taps: tuple[range, ...]
    """For each column of a tile, the taps of a kernel row that are inside the image."""

    @property
    def columns(self) -> tuple[Any, Any]:
        """The first column, and the number of columns."""
        return self.start, self.width * self.tiles


def image(spec: BinaryConv2d) -> tuple[Dim, int, int]:
    """Return the extents of the loops over output pixels: images, rows, columns.

    The rows of a dense layer become columns of one image, so that schedules tile them alike.
    """
    if spec.rank == 2 and isinstance(spec.n, int):
        return 1, 1, spec.n
    return (spec.n, *spec.output_hw)


def segments(spec: Windowed, columns: int, unit: int = 1) -> list[Segment]:
    """Divide the output width into tiles of at most `columns`, and merge equal neighbours.

    All tiles but the last have a multiple of `unit` columns.

    Examples
    --------
    >>> stem = Conv2d(1, 224, 224, 3, 64, (7, 7), (2, 2), pads=(3, 3, 3, 3))
    >>> [(s.start, s.width, s.tiles) for s in segments(stem, 7)]
    [(0, 7, 1), (7, 7, 14), (105, 7, 1)]
    """
    units = -(-spec.output_hw[1] // unit)
    return joined_tiles(spec, tile_widths(spec, -(-units // max(1, columns // unit)), unit))


def tile_widths(spec: Windowed, tiles: int, unit: int = 1) -> list[int]:
    """Return the widths of `tiles` tiles of a row, from left to right.

    They differ by at most one unit, and are ordered to give the fewest segments. If it helps more,
    the tiles at both ends are narrower than all others.

    Examples
    --------
    >>> tile_widths(BinaryConv2d(1, 14, 14, 64, 64, (3, 3), pads=(1, 1, 1, 1)), 4)
    [4, 3, 3, 4]
    >>> tile_widths(BinaryConv2d(1, 56, 56, 64, 64, (3, 3), pads=(1, 1, 1, 1)), 10)
    [4, 6, 6, 6, 6, 6, 6, 6, 6, 4]
    """
    width = spec.output_hw[1]
    units = -(-width // unit)
    small, wider = divmod(units, tiles)
    wide, narrow = [small + 1] * wider, [small] * (tiles - wider)
    left, half = -(-wider // 2), -(-len(narrow) // 2)
    orders = [
        wide + narrow, wide[:left] + narrow + wide[left:], narrow[:half] + wide + narrow[half:]
    ]  # fmt: skip
    rest = units - (small + 1) * (tiles - 2)
    if wide and tiles > 2 and rest > 1:
        orders.append([-(-rest // 2), *[small + 1] * (tiles - 2), rest // 2])
    found = []
    for order in orders:
        sizes = [size * unit for size in order]
        sizes[-1] -= units * unit - width
        found.append(sizes)
    return min(found, key=lambda sizes: len(joined_tiles(spec, sizes)))


def joined_tiles(spec: Windowed, sizes: Sequence[int], apart: bool = True) -> list[Segment]:
    """Return tiles of given widths, from left to right, as segments.

    If not `apart`, consecutive tiles of one width are one segment, without taps.
    """
    cut, start = [], 0
    for size in sizes:
        taps = tuple(taps_inside(spec, 1, start + column) for column in range(size * apart))
        cut.append((start, size, taps))
        start += size
    out = []
    for (size, taps), group in groupby(cut, key=lambda t: (t[1], t[2])):
        first, *rest = group
        out.append(Segment(first[0], size, 1 + len(rest), taps))
    return out


def rows_inside(spec: Windowed) -> set[range]:
    """Return the sets of kernel rows that are inside the image in some window."""
    taps, rows = spec.kernel[0], range(spec.window_hw[0])
    return {taps_inside(spec, 0, row) for row in (*rows[:taps], *rows[-taps - 1 :])}


def row_taps(spec: Windowed, row: Expr) -> tuple[Expr, Expr]:
    """Return the first tap inside the image of the window at output row `row`, and the count."""
    taps = spec.kernel[0]
    if rows_inside(spec) == {range(taps)}:
        return const(0), const(taps)
    low, high = tap_bounds(spec, 0, row)
    low = bind(low)
    return low, bind(T.max(high - low, const(0)))
