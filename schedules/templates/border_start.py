"""Where the accumulators of a binary convolution start.

Taps outside the image take no part in the loops over taps: what they count is there from the start.
If padding is 0, that is their share (`taps.Kernel.share`). If it is +1 or -1, it is the number of
bits in which their weights differ from the words of such a pixel. Rows (columns) of which the same
taps are outside form a class; the number depends on nothing but the two classes of a pixel, so a
table of it is filled once per kernel call (blocks ``taps_i`` and ``borders_i``). Mode ``and``
starts at minus the bits of all weights (``weights_i``), which the table includes if there is one;
the kernel is given them if each image has weights of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm.tirx.script import builder as T

from bnncc.schedules.intrin_portable import popcount
from bnncc.schedules.templates.taps import Kernel, Piece
from bnncc.topi_binary.layout import LANES

Buffer = Any
Expr = Any


class Tables:
    """The counts that the accumulators of some channel blocks start from.

    Writes the blocks that count. The last axes of each table are block and lane.

    Parameters
    ----------
    kernel : Kernel
        The function being written.
    piece : Piece
        Any piece of these channel blocks.
    name : str
        A name for them.
    """

    def __init__(self, kernel: Kernel, piece: Piece, name: str) -> None:
        self._kernel, self._piece = kernel, piece
        self.weights = self.borders = None
        if kernel.spec.mode == "and" and kernel.starts is None:
            self.weights = self._count(f"weights_{name}", ())
        outside = [side for axis in (0, 1) for side in kernel.leaves(axis, kernel.whole)]
        if not kernel.pads_zeros and any(outside):
            taps = self._count(f"taps_{name}", (0, 1), pad=True)
            self.borders = self._sum(f"borders_{name}", taps)

    def _count(self, name: str, keep: Sequence[int], pad: bool = False) -> Buffer:
        """Count differing bits for each row (axis 0) or column (1) of the kernel to `keep`."""
        kernel, piece = self._kernel, self._piece
        kept = [kernel.spec.kernel[axis] for axis in keep]
        summed = [kernel.reduction[axis] for axis in range(3) if axis not in keep]
        table = T.sblock_alloc_buffer((*kept, piece.blocks, LANES), "int32")
        kinds = "S" * (len(kept) + 2) + "R" * len(summed)
        with T.grid(*kept, piece.blocks, LANES, *summed) as loops, T.sblock(name):
            axes = list(T.axis.remap(kinds, list(loops)))
            here = tuple(axes[: len(kept) + 2])
            o, lane = here[-2:]
            taps = (*axes[: len(kept)], *axes[len(kept) + 2 :])
            weight = kernel.weight[kernel.weight_index(piece, o, lane, taps)]
            T.reads(weight)
            T.writes(table[here])
            with T.init():
                T.buffer_store(table, T.int32(0), here)
            word = kernel.pad_word(taps[2]) if pad else T.uint32(0)
            bits = T.Cast("int32", popcount(weight ^ word))
            T.buffer_store(table, table[here] + bits, here)
        return table

    def _sum(self, name: str, taps: Buffer) -> Buffer:
        """Sum the counts of the taps outside the image, for each class of rows and columns."""
        kernel, piece, weights = self._kernel, self._piece, self.weights
        classes = [len(kernel.border_classes(axis)) for axis in (0, 1)]
        table = T.sblock_alloc_buffer((*classes, piece.blocks, LANES), "int32")
        extents = (*classes, piece.blocks, LANES, *kernel.spec.kernel)
        with T.grid(*extents) as loops, T.sblock(name):
            row, column, o, lane, kh, kw = T.axis.remap("SSSSRR", list(loops))
            T.reads(taps[kh, kw, o, lane], *([weights[o, lane]] if weights is not None else []))
            T.writes(table[row, column, o, lane])
            here = [row, column, o, lane]
            with T.init():
                first = T.int32(0) if weights is None else -weights[o, lane]
                T.buffer_store(table, first, here)
            inside = [
                kernel.inside(axis, self._first(axis, number), tap, kernel.whole)
                for axis, number, tap in ((0, row, kh), (1, column, kw))
            ]
            tests = [test for test in inside if test is not None]
            both = T.And(*tests) if len(tests) == 2 else tests[0]
            count = T.Select(both, T.int32(0), taps[kh, kw, o, lane])
            T.buffer_store(table, table[tuple(here)] + count, here)
        return table

    def _first(self, axis: int, number: Expr) -> Expr:
        """Return the first row (or column) of a class."""
        firsts = self._kernel.border_classes(axis)
        place: Expr = T.int32(0)
        for i in range(1, len(firsts)):
            place = place + T.Cast("int32", number >= i) * (firsts[i] - firsts[i - 1])
        return place


class Start:
    """What the accumulators of one piece start at.

    Parameters
    ----------
    kernel : Kernel
        The function being written.
    piece : Piece
        The piece.
    tables : Tables
        Those of its channel blocks.
    masked : bool
        Whether the accumulators are doubled because of a zero plane.
    """

    def __init__(self, kernel: Kernel, piece: Piece, tables: Tables, masked: bool) -> None:
        self._kernel, self._piece, self._tables = kernel, piece, tables
        self._masked = masked

    def regions(self, o: Expr, lane: Expr, n: Expr = 0) -> list[Expr]:
        """Return what `value` reads."""
        if self._kernel.starts is not None:
            first = (o + self._piece.block) * LANES
            if isinstance(lane, slice):
                return [self._kernel.starts[n, first + lane.start : first + lane.stop]]
            return [self._kernel.starts[n, first + lane]]
        table = self._table
        if table is None:
            return []
        classes = [slice(0, extent) for extent in table.shape[:-2]]
        return [table[tuple([*classes, o, lane])]]

    @property
    def _table(self) -> Buffer | None:
        return self._tables.weights if self._tables.borders is None else self._tables.borders

    def value(self, h: Expr, w: Expr, o: Expr, lane: Expr | None = None, n: Expr = 0) -> Expr:
        """Return the start for an output pixel: one lane, or all of them."""
        kernel, tables = self._kernel, self._tables
        if kernel.starts is not None:
            return kernel.starts[n, (o + self._piece.block) * LANES + lane]
        if tables.borders is not None:
            row, column = (self._class(axis, place) for axis, place in ((0, h), (1, w)))
            count = tables.borders[row, column, o, T.Ramp(0, 1, LANES) if lane is None else lane]
            return count + count if self._masked else count
        if tables.weights is not None:
            return -tables.weights[o, T.Ramp(0, 1, LANES) if lane is None else lane]
        share = kernel.share(h, w, self._piece, self._masked)
        return T.Broadcast(share, LANES) if lane is None else share

    def _class(self, axis: int, place: Expr) -> Expr:
        """Return the class of a row (or column) of the piece."""
        firsts = self._kernel.border_classes(axis)
        low, high = 0, self._kernel.height - 1
        if axis == 1:
            low, high = self._piece.column, self._piece.column + self._piece.columns - 1
        number: Expr = T.int32(sum(first <= low for first in firsts[1:]))
        for first in firsts[1:]:
            if low < first <= high:
                number = number + T.Cast("int32", place >= first)
        return number
