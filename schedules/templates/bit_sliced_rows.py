"""Rows of data for convolutions in bit slices: a ring buffer of padded rows, rotated within groups.

Part of the template `bit_sliced`; the definition is `definitions.binary_conv2d`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.schedules.templates.carry_save_adders import Logic
from bnncc.schedules.templates.kernel import Expr, bind, const, flat, loop, ramp
from bnncc.topi_binary import sliced_data
from bnncc.topi_binary.layout import WORD_BITS, words
from bnncc.topi_binary.spec import BinaryConv2d

Buffer = Any

ONES = 2**WORD_BITS - 1


class Cut:
    """Arrangement of the pixels and channels of a convolution in vectors of words.

    Parameters
    ----------
    spec : BinaryConv2d
        A spec in the order ``sliced``.
    most : int
        Maximum number of words per vector.

    Attributes
    ----------
    words : int
        Words per pixel.
    lanes : int
        Words per vector.
    run : int
        Words per row of the result.
    columns : int
        Pixels per line: a padded row of data, in one phase of the stride.
    phases : list of int
        Phases (columns modulo the stride) that taps read; each has its own line.
    line : int
        Words from one line to the next: one vector more than the line holds.
    reach : int
        Data rows under one output row.
    fresh : int
        How many of these are not under the previous output row.
    """

    def __init__(self, spec: BinaryConv2d, most: int) -> None:
        self.spec, self.words, self.turns = spec, words(spec.channels), sliced_data.turns(spec)
        self.height, self.width = spec.output_hw
        self.run = self.width * self.words
        # Several pixels share a vector if they are shorter.
        fits = self.words >= most
        self.lanes = most if fits else min(most, 1 << self.run.bit_length() - 1)
        taps = [k * spec.dilations[1] for k in range(spec.kernel[1])]
        self.phases = sorted({tap % spec.strides[1] for tap in taps})
        self.columns = self.width + taps[-1] // spec.strides[1]
        self.line = self.columns * self.words + self.lanes
        self.reach = (spec.kernel[0] - 1) * spec.dilations[0] + 1
        self.fresh = min(self.reach, spec.strides[0])

    @property
    def across(self) -> bool:
        """Whether vectors span several pixels."""
        return self.lanes > self.words

    def vectors(self, columns: int, write: Callable[[Expr, Expr, Expr], None]) -> None:
        """Call `write` with position, pixel and word for vectors that cover `columns`.

        The last vector of a pixel or row starts earlier if it would otherwise extend past the end.
        For vectors across pixels, the word is that of the first pixel and the pixel argument is
        unused.
        """
        if self.across:
            total = columns * self.words
            with loop(-(-total // self.lanes)) as number:
                place = number * self.lanes
                if total % self.lanes:
                    place = T.min(place, const(total - self.lanes))
                place = bind(place)
                even = self.lanes % self.words == 0 and total % self.lanes % self.words == 0
                write(place, place, const(0) if even else bind(place % self.words))
            return
        with loop(columns) as pixel, loop(-(-self.words // self.lanes)) as number:
            word = number * self.lanes
            if self.words % self.lanes:
                word = T.min(word, const(self.words - self.lanes))
            word = bind(word)
            write(bind(pixel * self.words + word), pixel, word)


class Ring:
    """The rows of one plane of data under an output row, in all rotations.

    Parameters
    ----------
    cut : Cut
        Memory layout of the rows.
    logic : Logic
        Logic operations on vectors.
    data : Buffer
        The plane.
    outside : int
        Word of pixels outside the image.
    masks : callable
        Returns a vector from a row of masks, from a word of the pixel on; see `sliced_data.masks`.
    """

    def __init__(
        self, cut: Cut, logic: Logic, data: Buffer, outside: int,
        masks: Callable[[int, Expr], Expr],
    ) -> None:  # fmt: skip
        self.cut, self.spec, self.logic = cut, cut.spec, logic
        self.data, self.outside, self.masks = flat(data), outside, masks
        slots = cut.reach * cut.turns * len(cut.phases)
        self.memory = T.sblock_alloc_buffer([slots * cut.line + 2 * cut.lanes], "uint32")

    def slot(self, row: Expr) -> Expr:
        """Return the start of a row in the ring; rows count from the first row of the padding."""
        cut = self.cut
        return bind(row % cut.reach * (cut.turns * len(cut.phases) * cut.line) + cut.lanes)

    def load(self, start: Expr, tap: int, turn: int) -> Expr:
        """Return the vector read by a tap of a kernel row; `start` is an index within its slot."""
        cut = self.cut
        step, phase = divmod(tap * self.spec.dilations[1], self.spec.strides[1])
        skip = turn * len(cut.phases) + cut.phases.index(phase)
        return get(self.memory, [start + (skip * cut.line + step * cut.words)], cut.lanes)

    def fill(self, n: Expr, row: Expr) -> None:
        """Store a row of the padded image, in all rotations."""
        base, lines = self.slot(row), range(len(self.cut.phases))
        y = bind(row - self.spec.pads[0])
        with T.If(T.And(y >= 0, y < self.spec.height)):
            with T.Then():
                for number in lines:
                    self._line(bind(base + number * self.cut.line), n, y, self.cut.phases[number])
            with T.Else():
                for number in lines:
                    self._constant(base + number * self.cut.line, 0, self.cut.columns)
        for number in lines if self.cut.turns > 1 else ():
            self._turn(bind(base + number * self.cut.line))

    def _line(self, base: Expr, n: Expr, y: Expr, phase: int) -> None:
        """Store the columns of one phase, with padding at both ends."""
        spec, stride, size = self.spec, self.spec.strides[1], self.cut.words
        columns, left = self.cut.columns, spec.pads[1]
        low = min(columns, max(0, -(-(left - phase) // stride)))
        high = max(low, min(columns, (spec.width - 1 + left - phase) // stride + 1))
        self._constant(base, 0, low)
        first = (n * spec.height + y) * spec.width + (low * stride + phase - left)
        source, target = bind(first * size), bind(base + low * size)
        if stride == 1:
            self._copy(target, source, (high - low) * size)
        else:
            with loop(high - low) as column:
                self._copy(
                    bind(target + column * size), bind(source + column * (stride * size)), size
                )
        self._constant(base, high, columns)

    def _constant(self, base: Expr, first: int, end: int) -> None:
        if end == first:
            return
        with loop((end - first) * self.cut.words) as place:
            where = base + (place + first * self.cut.words)
            T.buffer_store(self.memory, tirx.IntImm("uint32", self.outside), [where])

    def _copy(self, to: Expr, of: Expr, count: int) -> None:
        """Copy `count` words; the last vector may overlap words that are already copied."""
        if not count:
            return
        lanes = min(self.cut.lanes, 1 << count.bit_length() - 1)
        with loop(-(-count // lanes)) as turn:
            place = turn * lanes
            if count % lanes:
                place = T.min(place, const(count - lanes))
            place = bind(place)
            put(self.memory, [to + place], get(self.data, [of + place], lanes), lanes)

    def _turn(self, base: Expr) -> None:
        """Write the rotations of a line: channels within each group shift down cyclically."""
        size, lanes = self.cut.turns, self.cut.lanes
        within = WORD_BITS % size == 0

        def shifted(word: Expr, by: int) -> Expr:
            """Return words shifted left by `by` bits, or right if it is negative."""
            if by > 0:
                return T.shift_left(word, splat_word(by, lanes))
            return T.shift_right(word, splat_word(-by, lanes))

        def write(place: Expr, _: Expr, word: Expr) -> None:
            here = bind(base + place)
            data = T.Bind(get(self.memory, [here], lanes))
            before = None if within else T.Bind(get(self.memory, [here - 1], lanes))
            after = None if within else T.Bind(get(self.memory, [here + 1], lanes))
            for turn in range(1, size):
                down, up = shifted(data, -turn), shifted(data, size - turn)
                if before is None:
                    mask = splat_word(_mask(size, turn), lanes)
                else:
                    down = down | shifted(after, WORD_BITS - turn)
                    up = up | shifted(before, size - turn - WORD_BITS)
                    mask = T.Bind(self.masks(turn - 1, word))
                to = here + turn * len(self.cut.phases) * self.cut.line
                put(self.memory, [to], self.logic.choose(mask, down, up), lanes)

        self.cut.vectors(self.cut.columns, write)


def _mask(size: int, turn: int) -> int:
    """Return the bits of a word whose channel stays in its group if shifted down by `turn`."""
    return sum(1 << bit for bit in range(WORD_BITS) if bit % size + turn < size)


def _at(where: list[Any], lanes: int) -> list[Any]:
    *outer, last = where
    return [*outer, last if lanes == 1 else ramp(last, lanes)]


def get(buffer: Buffer, where: list[Any], lanes: int) -> Expr:
    """Load `lanes` words; a single word as a scalar."""
    return buffer[tuple(_at(where, lanes))]


def put(buffer: Buffer, where: list[Any], value: Expr, lanes: int) -> None:
    """Store `lanes` words."""
    T.buffer_store(buffer, value, _at(where, lanes))


def splat_word(value: int, lanes: int) -> Expr:
    """Return a word in every lane."""
    word = tirx.IntImm("uint32", value)
    return word if lanes == 1 else tirx.Broadcast(word, lanes)
