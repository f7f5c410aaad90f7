"""What `neon_conv2d` reads: data and weights as vectors of bytes, and what borders count.

Its head says why these are no blocks of `definitions.binary_conv2d`, which tests compare.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from tvm.tirx.script import builder as T

from bnncc.schedules.intrin_arm import BYTES, TOTAL, WIDENING_ADD_PAIRS, mask
from bnncc.schedules.intrin_portable import popcount
from bnncc.schedules.templates.lookup import whole
from bnncc.schedules.templates.taps import Kernel, Piece, under
from bnncc.topi_binary import layout
from bnncc.topi_binary.layout import LANES, QUAD
from bnncc.topi_binary.signature import aliased

Buffer = Any
Expr = Any


class Data:
    """The planes of data: in place, or copied so that each vector is one load.

    Rows follow each other; a row holds, for each phase of the stride (``halves`` only, else there
    is one), pixels. The copy is made to put a border of pixels around the image, the words of a
    group side by side, or the columns of a stride side by side.

    Parameters
    ----------
    source : Kernel
        The function being written.
    kernel : Kernel
        The same on data with the border that `lookup.padded` adds.
    masked : bool
        Whether to make two planes, with exact zeros as 1 and as 0.

    Attributes
    ----------
    bytes : Buffer of uint8, one-dimensional
        All of it.
    """

    def __init__(self, source: Kernel, kernel: Kernel, masked: bool) -> None:
        self._source, self._kernel = source, kernel
        spec = self._spec = kernel.spec
        self._planes = [source.data, *([source.zero] if masked else [])]
        self._halves = spec.weight_order == "halves"
        self._words = kernel.group_words
        self._columns = kernel.width if kernel.rows_are_columns else source.spec.width
        # What the copy has more than the source: rows and columns of padding that is not skipped.
        self._top = source.spec.pads[0] - spec.pads[0]
        self._left, self._right = source.spec.pads[1], source.spec.pads[3]
        self._width = self._columns + self._left + self._right
        self._phases = spec.strides[1] if self._halves else 1
        self._pitch = -(-self._width // self._phases)
        run = self._words * (spec.kernel[1] if spec.dilations[1] == 1 else 1)
        filled = kernel.width % 2 == 0 if self._halves else run % 4 == 0
        padded = self._left or self._right or spec.height != source.spec.height
        copied = padded or spec.groups > 1 or masked or self._phases > 1 or not filled
        size = _size(source.data) * 4
        self.bytes = self._copy() if copied else aliased(source.data, [size], "uint8")

    def _line(self, plane: Expr, n: Expr, group: Expr, row: Expr) -> Expr:
        """Return the number of the first word of a row."""
        line = ((plane * self._kernel.n + n) * self._spec.groups + group) * self._spec.height + row
        return line * (self._phases * self._pitch * self._words)

    def _pixel(self, column: Expr) -> Expr:
        """Return where in a row the words of a pixel begin."""
        if self._phases > 1:
            column = column % self._phases * self._pitch + column // self._phases
        return column * self._words

    def vector(
        self, plane: Expr, n: Expr, group: Expr, h: Expr, kh: Expr, column: Expr, run: Expr
    ) -> Expr:
        """Return where the first vector of a run lies for an output column, in bytes."""
        spec, kernel = self._spec, self._kernel
        row = h if spec.rank == 2 else kernel.position(0, h, kh)
        if kernel.rows_are_columns:
            row = T.int32(0)
        step = 1 if self._halves else spec.strides[1]
        place = self._line(plane, n, group, row) + column * (step * self._words)
        return (place + self._pixel(run * spec.dilations[1])) * 4

    def _copy(self) -> Buffer:
        """Write the copy (block ``data``)."""
        spec, source, words = self._spec, self._source.spec, self._words
        n, planes, columns = self._kernel.n, len(self._planes), self._columns
        # The last vector may read beyond the row.
        total = self._line(planes, T.int32(0), T.int32(0), T.int32(0)) + BYTES // 4
        made = T.sblock_alloc_buffer((total,), "uint32")
        flat = [aliased(b, [_size(b)]) for b in self._planes]
        row = spec.groups == 1 and self._phases == 1  # is copied at once
        size = columns * words if row else words
        lanes = math.gcd(size, 4)
        with T.sblock("data"):
            T.reads(*(whole(buffer) for buffer in self._planes))
            T.writes(whole(made))
            self._border(made)
            for phase in range(self._phases):
                first, end = (
                    -(-(c - phase) // self._phases) for c in (self._left, self._left + columns)
                )
                count = 1 if row else end - first
                with T.grid(n, source.height, count, spec.groups, size // lanes) as loops:
                    i, h, x, group, c = loops
                    column = (x + first) * self._phases + (phase - self._left)
                    start = ((i * source.height + h) * columns + column) * spec.groups + group
                    values = [b[_lanes(start * words + c * lanes, lanes)] for b in flat]
                    if planes > 1:
                        bits, zero = (T.Bind(value) for value in values)
                        values = [bits | zero, bits & ~zero]
                    to = (x + first + phase * self._pitch) * words + c * lanes
                    for plane, value in enumerate(values):
                        place = self._line(T.int32(plane), i, group, h + self._top) + to
                        T.buffer_store(made, value, [_lanes(place, lanes)])
        return T.decl_buffer((total * 4,), "uint8", data=made.data)

    def _border(self, made: Buffer) -> None:
        """Fill the pixels outside the image."""
        rows, left = self._spec.height, self._left + self._columns
        below = self._top + self._source.spec.height
        for first, end, column, width in (
            (0, self._top, 0, self._width),
            (below, rows, 0, self._width),
            (0, rows, 0, self._left),
            (0, rows, left, self._right),
        ):
            if first == end or not width:
                continue
            lines = len(self._planes), self._kernel.n, self._spec.groups, end - first
            extents = (*lines, width, self._words)
            with T.grid(*extents) as (plane, n, group, h, x, c):
                place = self._line(plane, n, group, h + first) + self._pixel(x + column) + c
                T.buffer_store(made, self._source.pad_word(c), [place])


def weights_of(kernel: Kernel, runs: int, vectors: int) -> Buffer:
    """Return the weights as bytes, by quad, kernel row, run, vector, and byte of four channels.

    In the order ``halves`` each tap is copied into both halves of a vector (block ``twice``).
    """
    stored = kernel.weight
    size = int(stored.shape[0]) * 4
    if kernel.spec.weight_order == "halves":
        taps = T.decl_buffer((size // 8,), "uint64", data=stored.data)
        made = T.sblock_alloc_buffer((size // 4,), "uint64")
        with T.sblock("twice"):
            T.reads(whole(stored))
            T.writes(whole(made))
            with T.serial(0, size // 8) as i:
                T.buffer_store(made, T.Broadcast(taps[i], 2), [T.Ramp(i * 2, 1, 2)])
        stored, size = made, size * 2
    row = runs * vectors * QUAD * BYTES
    shape = (size // (kernel.spec.kernel[0] * row), kernel.spec.kernel[0], runs, vectors)
    return T.decl_buffer((*shape, QUAD * BYTES), "uint8", data=stored.data)


class Border:
    """What taps left and right of the image, where data are 0, count too much.

    That is the bits of their weights less their share. In mode ``and`` it is the bits of all
    weights, which are always subtracted.

    Parameters
    ----------
    kernel : Kernel
        The function being written, on data with a border.
    weights : Buffer
        What `weights_of` returned.
    arch : str
        The architecture.
    share : int
        What a tap outside the image should count.
    planes : int
        How often each is counted.

    Attributes
    ----------
    table : Buffer of int32, shape (kernel rows + 1, kinds, channels)
        By which taps are outside; the last row is the sum of the others.
    """

    def __init__(self, kernel: Kernel, weights: Buffer, arch: str, share: int, planes: int) -> None:
        self._kernel, self._weights, self._arch = kernel, weights, arch
        self._share, self._planes = share, planes
        spec = self._kernel.spec
        found = map(self._taps, self._kernel.border_classes(1))
        self._kinds = [*dict.fromkeys(filter(None, found))]
        height = self._height = spec.kernel[0]
        shape = (height + 1, len(self._kinds), layout.blocks(spec.out_channels) * LANES)
        self.table = T.sblock_alloc_buffer(shape, "int32")
        with T.sblock("border"):
            T.reads(whole(weights))
            T.writes(whole(self.table))
            with T.serial(0, layout.blocks(spec.out_channels, QUAD)) as quad:
                for number, kind in enumerate(self._kinds):
                    sum_of_rows = (height, number, T.Ramp(quad * QUAD, 1, QUAD))
                    zero = T.Broadcast(T.int32(0), QUAD)
                    T.buffer_store(self.table, zero, list(sum_of_rows))
                    with T.serial(0, height) as kh:
                        count = T.Bind(self._count(quad, kh, kind))
                        T.buffer_store(self.table, count, [kh, *sum_of_rows[1:]])
                        count = self.table[sum_of_rows] + count
                        T.buffer_store(self.table, count, list(sum_of_rows))

    def _kind(self, column: int) -> int | None:
        """Return the number of the taps that are counted too much in `column`, if there are any."""
        taps = self._taps(column)
        return self._kinds.index(taps) if taps else None

    def _taps(self, column: int) -> tuple[int, ...]:
        """Return the taps of `column` that lie left or right of the image; all in mode ``and``."""
        spec = self._kernel.spec
        if spec.mode == "and":
            return tuple(range(spec.kernel[1]))
        places = [self._kernel.position(1, column, kw) for kw in range(spec.kernel[1])]
        return tuple(kw for kw, x in enumerate(places) if not 0 <= x < spec.width)

    def _count(self, quad: Expr, kh: Expr, kind: Sequence[int]) -> Expr:
        """Count the weights of the taps `kind` of one quad and kernel row."""
        sums = T.sblock_alloc_buffer((QUAD * 8,), "uint16")
        channels = [T.Ramp(i * 8, 1, 8) for i in range(QUAD)]
        for channel in channels:
            T.buffer_store(sums, T.Broadcast(T.uint16(0), 8), [channel])

        def add(run: int, vector: Expr, first: int = 0, last: int = BYTES) -> None:
            for i, channel in enumerate(channels):
                weight = self._weights[quad, kh, run, vector, T.Ramp(i * BYTES, 1, BYTES)]
                if last - first < BYTES:
                    weight = weight & mask(first, last)
                count = WIDENING_ADD_PAIRS[self._arch, 8](popcount(weight))
                T.buffer_store(sums, sums[channel] + count, [channel])

        size = self._kernel.group_words * 4
        for kw in kind:
            if self._kernel.spec.weight_order == "halves":  # the other half is a copy
                add(kw, T.int32(0), 0, BYTES // 2)
                continue
            run, begin = (kw, 0) if self._weights.shape[2] > 1 else (0, kw * size)
            first, last = -(-begin // BYTES), (begin + size) // BYTES
            if first > last:  # inside one vector
                add(run, T.int32(last), begin % BYTES, (begin + size) % BYTES)
                continue
            if begin % BYTES:
                add(run, T.int32(first - 1), begin % BYTES)
            with T.serial(first, last) as vector:
                add(run, vector)
            if (begin + size) % BYTES:
                add(run, T.int32(last), 0, (begin + size) % BYTES)
        ((_, total),) = TOTAL[self._arch, 16, 0, False].impl(sums, None)
        total = total * T.Broadcast(T.int32(self._planes), QUAD)
        share = 0 if self._kernel.spec.mode == "and" else len(kind) * self._share
        return total - T.Broadcast(T.int32(share), QUAD)

    def subtracted(self, raw: Expr, piece: Piece, at: tuple[Expr, Expr, Expr], inner: bool) -> Expr:
        """Return `raw` less what is counted too much for a column of `piece`, row and block."""
        column, h, block = at
        kinds = {piece.column + i: self._kind(piece.column + i) for i in range(piece.columns)}
        kinds = {x: kind for x, kind in kinds.items() if kind is not None}
        if not kinds:
            return raw
        numbers = iter(kinds.items())
        _, number = next(numbers)
        for x, kind in numbers:
            number = T.Select(column == x, T.int32(kind), number)
        left = T.sblock_alloc_buffer((LANES,), "int32")
        lanes, channels = T.Ramp(0, 1, LANES), T.Ramp(block * LANES, 1, LANES)

        def subtract(row: Expr) -> None:
            T.buffer_store(left, left[lanes] - self.table[row, number, channels], [lanes])

        T.buffer_store(left, raw, [lanes])
        here = functools.reduce(T.Or, (column == x for x in kinds))
        with under(here if len(kinds) < piece.columns else None):
            if inner:
                subtract(T.int32(self._height))
            else:
                with (
                    T.serial(0, self._height) as kh,
                    T.If(self._kernel.inside(0, h, kh, piece)),
                    T.Then(),
                ):
                    subtract(kh)
        return left[lanes]


def _size(buffer: Buffer) -> Expr:
    """Return how many words `buffer` has."""
    size: Expr = 1
    for extent in buffer.shape:
        size = size * extent
    return size


def _lanes(first: Expr, lanes: int) -> Expr:
    """Return the index of so many neighbours."""
    return T.Ramp(first, 1, lanes) if lanes > 1 else first
