"""Rows of a convolution on their way to the epilogue, directly or through fused max-pooling.

A convolution with fused pooling keeps its last few rows in a ring buffer, already pooled
horizontally (`HorizontalMax`), and never stores its whole result. As soon as the rows of a window
are complete, they are pooled vertically and go through the epilogue. `Rows` is the outer loop of
such kernels, with or without pooling. It is a template because windows are pooled horizontally
while a tile is in registers, and windows that extend into the next tile are carried over; schedule
primitives cannot derive that from `definitions.conv2d`, against which it is tested. Alternatives
are slower with AVX-512. For first layers, a ring buffer of unpooled columns (as `rolling_buffer`
could make) takes 1.03 to 1.20 times as long, and separate convolution and pooling kernels 1.04 to
1.24 times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple

from tvm.sym import Analyzer
from tvm.tirx.script import builder as T

from bnncc.schedules.intrin import Window
from bnncc.schedules.intrin_portable import MAX
from bnncc.schedules.templates.channel_tiles import (
    Group,
    Names,
    Pixel,
    Product,
    Range,
    groups,
    named,
)
from bnncc.schedules.templates.epilogue import emit, views
from bnncc.schedules.templates.kernel import Expr, bind, const, f32, load, loop, loops, splat, store
from bnncc.schedules.templates.window import Windowed, segments
from bnncc.topi_binary.definitions.place import Place
from bnncc.topi_binary.layout import LANES, blocks
from bnncc.topi_binary.signature import Operator
from bnncc.topi_binary.spec import Conv2d, Pool2d, RowPool
from bnncc.topi_binary.step import step_inputs

MAX_CARRIES = 2
"""Maximum number of windows that extend beyond a tile; more cost what the columns save."""

POOLED_COLUMNS = 2
"""Windows side by side per tile of the pooling."""

POOLED_VECTORS = 4
"""Channel vectors per tile of the pooling."""


class Strip(NamedTuple):
    """Rows of the convolution that are computed together."""

    n: Expr
    """Image."""
    row: Expr
    """First row."""
    rows: Expr
    """Number of rows."""
    first: Expr
    """First row of this thread, from which its strips follow each other."""


class Line(NamedTuple):
    """One channel vector of one row."""

    n: Expr
    """Image."""
    row: Expr
    """Row of the convolution."""
    block: Expr
    """Index of the vector."""
    lanes: int
    """Channels of the vector: fewer than `LANES` in the last one."""
    key: int
    """Index among the lines that are processed together."""


class HorizontalMax:
    """Maxima of windows along a row, whose columns arrive tile by tile.

    They are computed while the columns of a tile are in registers, so the ring buffer holds one
    value per window. The partial maximum of a window that extends into the next tile is kept in a
    carry. All rows of a strip have the same windows.

    Window x covers `kernel` columns of the row from column ``x * stride - pad``. If the stride does
    not divide the tiles, or windows overlap too much, windows are single columns.

    Parameters
    ----------
    pool : RowPool
        The pooling, of which only the horizontal extents are used.
    width : int
        Columns of a row; columns beyond are -inf.
    windows : int
        Columns of the pooled row.
    unit : int
        Widths of tiles, except the last, are multiples of this.

    Attributes
    ----------
    kernel, stride, pad : int
        Parameters of the windows made here.
    done : bool
        Whether these are the windows of the pooling.
    shift : int
        Window x is passed to `keep` as ``x + shift``, which is at least 0.
    places : int
        Upper bound of these positions.
    """

    def __init__(self, pool: RowPool, width: int, windows: int, unit: int) -> None:
        self.kernel, self.stride, self.pad = pool.kernel[1], pool.strides[1], pool.pads[1]
        carries = -(-self.kernel // self.stride) - 1
        self.done = unit % self.stride == 0 and carries <= MAX_CARRIES
        if not self.done:
            self.kernel, self.stride, self.pad, windows = 1, 1, 0, width
        # Windows open at a column divisible by the stride, relative to that column.
        self.open = range((self.pad - self.kernel) // self.stride + 1, -(-self.pad // self.stride))
        self.shift = -min(self.open.start, 0)
        # The last tile is padded with -inf to a multiple of the stride, or of `unit`.
        end = -(-width // unit) * unit
        self.last = end // self.stride + self.open.start
        self.windows = windows
        self.places = self.shift + max(windows, self.last)

    def declare(self, keys: int) -> None:
        """Allocate the carries for `keys` lines that are processed together."""
        self.keys = keys
        if self.open:
            self.carry = T.sblock_alloc_buffer((keys, len(self.open), LANES), "float32")

    def begin(self) -> None:
        """Write the code before the first column of each row."""
        for key in range(self.keys):
            for slot in range(len(self.open)):
                store(self.carry, [key, slot, 0], f32(float("-inf")))

    def put(
        self, start: Expr, values: list[Expr], key: int, keep: Callable[[Expr, Expr], None]
    ) -> None:
        """Process the columns from `start` on; pass windows that end there to `keep`."""
        values = [T.Bind(value) for value in values]
        width = -(-len(values) // self.stride) * self.stride
        first = T.floordiv(start, const(self.stride))
        slots = {window: slot for slot, window in enumerate(self.open)}
        for window in range(self.open.start, width // self.stride + self.open.stop):
            low = window * self.stride - self.pad
            parts = values[max(low, 0) : max(low + self.kernel, 0)]
            if window in slots:
                parts = [load(self.carry, [key, slots[window], 0]), *parts]
            if not parts:
                value = f32(float("-inf"))
            else:
                value = reduce(lambda a, b: T.Bind(T.max(a, b)), parts)
            if low + self.kernel <= width:
                keep(first + (window + self.shift), value)
            else:
                slot = slots[window - width // self.stride]
                store(self.carry, [key, slot, 0], value)

    def end(self, key: int, keep: Callable[[Expr, Expr], None]) -> None:
        """Pass on the windows that extend beyond the last column."""
        for slot, window in enumerate(range(self.last, self.windows)):
            inside = slot < len(self.open)
            value = load(self.carry, [key, slot, 0]) if inside else f32(float("-inf"))
            keep(const(window + self.shift), value)


class Rows:
    """The rows of a convolution.

    Parameters
    ----------
    kernel : Operator
        The kernel, which must be open.
    spec : Conv2d
        Spec of the kernel.
    step : int, default 1
        Rows per strip; the last strip may have fewer.
    chunks : int, default 1
        Pieces per image.
    aligned : int, default 1
        Strips start at multiples of this in all pieces, so that rounding is independent of threads.
    unit : int, optional
        Columns come in multiples of this, except the last ones; default: the stride of the
        pooling.
    parallel : bool, default False
        Whether images and pieces are divided among threads.
    """

    def __init__(
        self, kernel: Operator, spec: Conv2d, step: int = 1, chunks: int = 1, aligned: int = 1,
        unit: int = 0, parallel: bool = False,
    ) -> None:  # fmt: skip
        self.aligned, self.parallel = aligned, parallel
        self.unit = unit or (spec.pool.strides[1] if spec.pool is not None else 1)
        self.n: Expr = None
        self.kernel, self.spec, self.step, self.chunks = kernel, spec, step, chunks
        self.height, self.width = spec.unpooled.output_hw
        self.outputs = views(spec.steps, kernel.outputs, spec.out_channels)
        self.params = kernel.inputs[2:]
        self.pooled: Names = []
        self.ring_spec: Pool2d | None = None
        if spec.pool is None:
            return
        taken = sum(map(step_inputs, spec.pool.before))
        self.before, self.params = self.params[:taken], self.params[taken:]
        self.slots = ring_size(spec.pool.kernel[0] + step - 1)
        self.across = HorizontalMax(spec.pool, self.width, spec.output_hw[1], self.unit)
        shape = (self.slots, self.across.places, blocks(spec.out_channels) * LANES)
        self.ring = T.sblock_alloc_buffer(shape, "float32")

    def declare(self, keys: int) -> None:
        """Declare how many lines (rows, or channel vectors of a row) are processed together."""
        if self.spec.pool is not None:
            self.across.declare(keys)

    def begin(self) -> None:
        """Write the code before the first columns of a set of rows."""
        if self.spec.pool is not None:
            self.across.begin()

    def put(self, line: Line, start: Expr, values: list[Expr], sure: int | None = None) -> None:
        """Process vectors of the convolution's result: columns of one row, from left to right.

        Parameters
        ----------
        line : Line
            Row and channels.
        start : Expr
            First column.
        values : list of Expr
            One per column.
        sure : int, optional
            Number of columns known to be inside the image; default: all.
        """
        spec = self.spec
        sure = len(values) if sure is None else sure
        made = []
        for number, value in enumerate(values):
            column = bind(start + number)
            at = Place(
                line.n, line.row, column, line.block, spec.out_channels, line.lanes, spec.rank
            )
            if spec.pool is None:
                with when(number >= sure, column < self.width):
                    emit(spec.steps, value, self.params, self.outputs, at)
                continue
            value = emit(spec.pool.before, value, self.before, [], at)
            if number >= sure:
                value = T.Select(splat(column < self.width), value, f32(float("-inf")))
            made.append(value)
        if spec.pool is not None:
            self.across.put(start, made, line.key, self._keeper(line))

    def end(self, line: Line) -> None:
        """Mark a row as complete."""
        if self.spec.pool is not None:
            self.across.end(line.key, self._keeper(line))

    def _keeper(self, line: Line) -> Callable[[Expr, Expr], None]:
        slot = T.bitwise_and(line.row, const(self.slots - 1))
        return lambda place, value: store(self.ring, [slot, place, line.block * LANES], value)

    def take(
        self, part: Range, acc: Any, finished: Callable[[Expr], Expr] = lambda value: value
    ) -> None:
        """Write the block ``out_i``, which processes the sums of a tile.

        Parameters
        ----------
        part : Range
            Range of the tile.
        acc : Buffer
            The sums.
        finished : callable, optional
            Conversion that is first applied to each vector of sums.
        """
        with part.each(acc) as tile:
            pixel = part.pixel(tile)
            for line in _lines(pixel, part.group):
                sums = [part.vector(acc, tile, c, line.key) for c in range(part.segment.width)]
                self.put(line, pixel.w, [finished(value) for value in sums])

    def each(self, strip: Strip, names: Names, write: Callable[[Range], None]) -> None:
        """Write the ranges of one row, in one block per channel tile.

        Parameters
        ----------
        strip : Strip
            The row.
        names : Names
            The ranges.
        write : callable
            Writes a range.
        """
        for number, (group, ranges) in enumerate(names):
            extents = self.kernel.n, const(self.height), const(group.count)
            with loop(group.count) as turn, T.sblock(f"row_{number}"):
                where = zip(extents, (strip.n, strip.row, turn), strict=True)
                n, row, turn = (T.axis.spatial(extent, place) for extent, place in where)
                T.reads()
                T.writes()
                self.begin()
                at = n, row, turn * len(group.lanes) + group.first
                parts = [Range(name, segment, group, at=at) for name, segment in ranges]
                for part in parts:
                    write(part)
                for line in _lines(parts[0].pixel((0,)), group):
                    self.end(line)

    @contextmanager
    def strips(self, begin: Callable[[], None] | None = None) -> Iterator[Strip]:
        """Open the loops over images and strips; windows follow the strip that completes them.

        Parameters
        ----------
        begin : callable, optional
            Writes the code before the first strip of a thread.

        Yields
        ------
        Strip
        """
        with self._pieces() as (n, start, end):
            self.n = n
            if begin is not None:
                begin()
            if self.spec.pool is not None:
                keep(self.ring)
            low, high = self._conv_rows(start, end)
            turns = T.floordiv(high - low + (self.step - 1), const(self.step))
            with loop(_simple(turns)) as turn:
                row = bind(low + turn * self.step)
                whole = self.step == 1 or (self.chunks == 1 and self.height % self.step == 0)
                rows = const(self.step) if whole else bind(T.min(const(self.step), high - row))
                yield Strip(n, row, rows, low)
                if self.spec.pool is not None:
                    first = T.max(self._done(row), start)
                    last = T.min(self._done(row + rows), end)
                    self._pool(n, bind(first), bind(last))

    @contextmanager
    def _pieces(self) -> Iterator[tuple[Expr, Expr, Expr]]:
        """Open the loops over images and pieces of the output's rows."""
        height = self.spec.output_hw[0]
        share = -(-height // self.chunks)
        if self.spec.pool is None:
            share = -(-share // self.step) * self.step
        with loops([self.kernel.n, self.chunks], parallel=self.parallel) as (n, piece):
            start = bind(_simple(piece * share))
            end = bind(_simple(T.min(start + share, const(height))))
            yield n, start, end

    def _conv_rows(self, start: Expr, end: Expr) -> tuple[Expr, Expr]:
        """Return the rows of the convolution that output rows `start` to `end` need."""
        pool = self.spec.pool
        if pool is None:
            return start, end
        stride, pad = pool.strides[0], pool.pads[0]
        low = T.max(start * stride - pad, const(0))
        low = T.floordiv(low, const(self.aligned)) * self.aligned
        high = T.min((end - 1) * stride - pad + pool.kernel[0], const(self.height))
        return bind(_simple(low)), bind(_simple(high))

    def _done(self, row: Expr) -> Expr:
        """Return the number of output rows that need no convolution row from `row` on."""
        pool = self.spec.pool
        assert pool is not None
        reach = row + (pool.pads[0] - pool.kernel[0] + pool.strides[0])
        count = T.max(T.floordiv(reach, const(pool.strides[0])), const(0))
        everything = const(self.spec.output_hw[0])
        return T.Select(row >= self.height, everything, T.min(count, everything))

    def _pool(self, n: Expr, first: Expr, last: Expr) -> None:
        spec = self.spec.pooling
        if self.across.done:
            width = spec.output_hw[1]
            kernel, strides = (spec.kernel[0], 1), (spec.strides[0], 1)
            pads, extra = (spec.pads[0], 0, spec.pads[2], 0), (spec.ceil_extra[0], 0)
            spec = replace(
                spec, width=width, kernel=kernel, strides=strides, pads=pads, ceil_extra=extra
            )
        self.ring_spec = spec
        vectors = min(POOLED_VECTORS, max(1, spec.channels // LANES))
        cut = groups(spec.channels, vectors, apart=True)
        self.pooled = named(cut, segments(spec, POOLED_COLUMNS), "pooled_")
        with loop(_simple(last - first)) as number, T.sblock("pooled"):
            height = const(spec.output_hw[0])
            at = T.axis.spatial(self.kernel.n, n), T.axis.spatial(height, first + number)
            T.reads()
            T.writes()
            for group, ranges in self.pooled:
                for name, segment in ranges:
                    self._windows(spec, Range(name, segment, group, at=at))

    def _windows(self, spec: Pool2d, part: Range) -> None:
        """Write the blocks of a range of windows that read the ring buffer."""

        def product(pixel: Pixel, kh: Expr, kw: Expr, _: Expr) -> Product:
            y = pixel.h * spec.strides[0] - spec.pads[0] + kh * spec.dilations[0]
            x = pixel.w * spec.strides[1] - spec.pads[1] + kw * spec.dilations[1]
            place = [T.floormod(y, self.slots), x + self.across.shift, pixel.block * LANES]
            return Product(MAX, (Window(self.ring, *place),))

        acc = part.sums(spec, 1, product, start=lambda pixel, lane: T.float32(float("-inf")))
        with part.each(acc) as tile:
            pixel = part.pixel(tile)
            for column in range(part.segment.width):
                for vector, valid in enumerate(part.group.lanes):
                    x, block = pixel.w + column, pixel.block + vector
                    at = Place(pixel.n, pixel.h, x, block, spec.channels, valid, spec.output_rank)
                    value = part.vector(acc, tile, column, vector)
                    emit(spec.steps, value, self.params, self.outputs, at)


def _lines(pixel: Pixel, group: Group) -> list[Line]:
    """Return the vectors of a tile."""
    return [
        Line(pixel.n, pixel.h, pixel.block + number, lanes, number)
        for number, lanes in enumerate(group.lanes)
    ]


class when:
    """Context of an ``if``, if the condition is in doubt."""

    def __init__(self, doubt: bool, condition: Expr) -> None:
        self.frames = [T.If(condition), T.Then()] if doubt else []

    def __enter__(self) -> None:
        """Open it."""
        for frame in self.frames:
            frame.__enter__()

    def __exit__(self, *error: Any) -> None:
        """Close it."""
        for frame in reversed(self.frames):
            frame.__exit__(*error)


def keep(buffer: Any) -> None:
    """Keep scratch memory alive across strips: TVM allocates it in the scope of all its uses."""
    T.buffer_store(buffer, T.float32(0), [const(0)] * len(buffer.shape))


def within_height(spec: Windowed, row: Expr) -> Expr:
    """Return `row`, at least 0 and at most the height of the image."""
    return bind(T.min(T.max(row, const(0)), const(spec.height)))


def ring_size(rows: int) -> int:
    """Return the least power of two that is at least `rows`."""
    return 1 << (rows - 1).bit_length()


def _simple(value: Expr) -> Expr:
    """Return `value` with constants folded."""
    return Analyzer().simplify(value)
