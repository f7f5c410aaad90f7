"""Data as `neon_conv2d` reads it: in place, or copied so that each vector is one load."""

from __future__ import annotations

from typing import Any

from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from bnncc.schedules.intrin_arm import BYTES
from bnncc.schedules.templates.lookup import whole
from bnncc.schedules.templates.taps import Kernel

Buffer = Any
Expr = Any


class Data:
    """The planes of data.

    Rows follow each other; a row holds, for each phase of the stride (``halves`` only, else there
    is one), pixels of `size` bytes.

    Parameters
    ----------
    source : Kernel
        The function being written.
    kernel : Kernel
        The same on data with the border that `lookup.padded` adds.
    halves : bool
        Whether vectors hold two neighbouring columns.
    masked : bool
        Whether to make two planes, with exact zeros as 1 and as 0.

    Attributes
    ----------
    bytes : Buffer of uint8, one-dimensional
        All of it.
    """

    def __init__(self, source: Kernel, kernel: Kernel, halves: bool, masked: bool) -> None:
        self._source, self._kernel, self._halves, self._masked = source, kernel, halves, masked
        spec = self._spec = kernel.spec
        self._words = 2 if halves else kernel.group_words
        self.size = self._words * 4
        self._n = kernel.n
        self._height, columns = spec.height, source.spec.width
        if kernel.rows_are_columns:
            columns = kernel.width
        # What the copy has more than the source: rows and columns of padding that is not skipped.
        self._top = source.spec.pads[0] if spec.pads != source.spec.pads else 0
        self._left, self._right = source.spec.pads[1], source.spec.pads[3]
        self._columns = columns
        self._phases = spec.strides[1] if halves else 1
        width = columns + self._left + self._right
        self._pitch = -(-width // self._phases)
        run = kernel.group_words * (spec.kernel[1] if spec.dilations[1] == 1 else 1)
        whole_vectors = self._phases == 1 and (
            (kernel.group_words == 2 and kernel.width % 2 == 0) if halves else run % 4 == 0
        )
        padded = self._left or self._right or self._height != source.spec.height
        self.copied = padded or spec.groups > 1 or masked or not whole_vectors

    @property
    def _row_words(self) -> int:
        return self._phases * self._pitch * self._words

    def place(self, plane: Expr, n: Expr, group: Expr, h: Expr, kh: Expr, column: Expr) -> Expr:
        """Return where the first tap of `column` lies in the data, in bytes."""
        spec, kernel = self._spec, self._kernel
        row = h if spec.rank == 2 else kernel.position(0, h, kh)
        if kernel.rows_are_columns:
            row = T.int32(0)
        line = ((plane * self._n + n) * spec.groups + group) * self._height + row
        step = 1 if self._halves else spec.strides[1]
        return line * (self._row_words * 4) + column * (step * self.size)

    def offset(self, run: Expr) -> Expr:
        """Return how far the vectors of tap `run` are from `place`."""
        spec = self._spec
        tap, stride = run * spec.dilations[1], spec.strides[1]
        if self._halves and stride > 1:
            return (tap % stride * self._pitch + tap // stride) * self.size
        return tap * self.size

    def write(self) -> None:
        """Write the copy (block ``data``)."""
        source = self._source.data
        if not self.copied:
            size = 4
            for extent in source.shape:
                size = size * extent
            self.bytes = T.decl_buffer((size,), "uint8", data=source.data)
            return
        spec = self._spec
        planes = 1 + self._masked
        n: Expr = self._n
        rows = planes * n * spec.groups * self._height
        total: Expr = rows * self._row_words + BYTES // 4  # the last vector may read beyond the row
        made = T.sblock_alloc_buffer((total,), "uint32")
        IRBuilder.name("copied", made)
        self.bytes = T.decl_buffer((total * 4,), "uint8", data=made.data)
        sources = [source, *([self._source.zero] if self._masked else [])]
        with T.sblock("data"):
            T.reads(*(whole(buffer) for buffer in sources))
            T.writes(whole(made))
            self._border(made)
            depth = spec.groups * self._kernel.group_words
            height = self._height if self._spec.pads == self._source.spec.pads else None
            height = self._source.spec.height if height is None else height
            flat = [
                T.decl_buffer((self._n * height * self._columns * depth,), "uint32", data=b.data)
                for b in sources
            ]
            with T.grid(self._n, height) as (n, h):
                self._copy_row(made, flat, n, h, height)

    def _line(self, plane: Expr, n: Expr, group: Expr, row: Expr) -> Expr:
        line = ((plane * self._n + n) * self._spec.groups + group) * self._height + row
        return line * self._row_words

    def _put(self, made: Buffer, flat: list[Buffer], n: Expr, group: Expr, h: Expr, to: Expr,
             start: Expr, lanes: int) -> None:  # fmt: skip
        """Copy `lanes` words, to word `to` of the row."""
        index = T.Ramp(start, 1, lanes) if lanes > 1 else start
        values = [plane[index] for plane in flat]
        if self._masked:
            values = [T.Bind(value) for value in values]
            values = [values[0] | values[1], values[0] & ~values[1]]
        for plane, value in enumerate(values):
            place = self._line(plane, n, group, h + self._top) + to
            T.buffer_store(made, value, [T.Ramp(place, 1, lanes) if lanes > 1 else place])

    def _copy_row(self, made: Buffer, flat: list[Buffer], n: Expr, h: Expr, height: int) -> None:
        spec, words = self._spec, self._kernel.group_words
        depth = spec.groups * words
        first = T.Bind((n * height + h) * (self._columns * depth))
        if spec.groups == 1 and self._phases == 1 and words == self._words:
            size, group = self._columns * words, T.int32(0)
            to = self._left * words
            with T.serial(0, size // 4) as i:
                self._put(made, flat, n, group, h, to + i * 4, first + i * 4, 4)
            for i in range(size // 4 * 4, size):
                self._put(made, flat, n, group, h, T.int32(to + i), first + i, 1)
            return
        for phase in range(self._phases):
            begin = -(-(self._left - phase) // self._phases) if self._left > phase else 0
            end = -(-(self._left + self._columns - phase) // self._phases)
            if end <= begin:
                continue
            with T.serial(begin, end) as x, T.serial(0, spec.groups) as group:
                column = x * self._phases + (phase - self._left)
                start = first + column * depth + group * words
                to = (x + phase * self._pitch) * self._words
                if words == 2:
                    self._put(made, flat, n, group, h, to, start, 2)
                    continue
                with T.serial(0, words) as c:
                    self._put(made, flat, n, group, h, to + c, start + c, 1)

    def _border(self, made: Buffer) -> None:
        """Fill the pixels outside the image."""
        spec, words = self._spec, self._kernel.group_words
        rows, wide = self._height, self._columns + self._left + self._right
        bottom = rows - self._source.spec.height - self._top
        if self._kernel.rows_are_columns or self._kernel.pads_zeros:
            bottom = 0

        def fill(first: int, count: int, left: int, width: int) -> None:
            if count <= 0 or width <= 0:
                return
            extents = (1 + self._masked, self._n, spec.groups, count, width, words)
            with T.grid(*extents) as (plane, n, group, h, x, c):
                column = x + left
                pixel = column
                if self._phases > 1:
                    pixel = column % self._phases * self._pitch + column // self._phases
                place = self._line(plane, n, group, h + first) + pixel * self._words + c
                T.buffer_store(made, self._source.pad_word(c), [place])

        fill(0, self._top, 0, wide)
        fill(rows - bottom, bottom, 0, wide)
        fill(0, rows, 0, self._left)
        fill(0, rows, self._left + self._columns, self._right)
