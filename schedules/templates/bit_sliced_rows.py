"""Rows of data for convolutions in bit slices: a ring of padded rows, turned within groups.

They are part of the template `bit_sliced`, whose definition is `definitions.binary_conv2d`.
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
    """How pixels and channels of a convolution lie in vectors of words.

    Parameters
    ----------
    spec : BinaryConv2d
        In the order ``sliced``.
    most : int
        Words in a vector, at most.

    Attributes
    ----------
    words : int
        Of a pixel.
    lanes : int
        Words in a vector.
    run : int
        Words in a row of the result.
    columns : int
        Pixels in a line: a row of padded data, in one phase.
    phases : list of int
        Columns modulo the stride that taps read, each a line of its own.
    line : int
        Words from one line to the next, a vector more than it has.
    reach : int
        Rows of data under one row of the result.
    fresh : int
        How many of them are not under the row before.
    """

    def __init__(self, spec: BinaryConv2d, most: int) -> None:
        self.spec, self.words, self.turns = spec, words(spec.channels), sliced_data.turns(spec)
        self.height, self.width = spec.output_hw
        self.run = self.width * self.words
        # Several pixels share a vector where they are shorter.
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
        """Whether vectors reach across pixels."""
        return self.lanes > self.words

    def vectors(self, columns: int, write: Callable[[Expr, Expr, Expr], None]) -> None:
        """Call `write` with place, pixel and word for vectors that cover `columns`.

        The last one of a pixel or row begins earlier where it would reach over the end. Across
        pixels, the word is that of the first pixel it begins in, and the pixel of no meaning.
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
    """The rows of one plane of data under a row of the result, in all turns.

    Parameters
    ----------
    cut : Cut
        How rows lie in memory.
    logic : Logic
        Of vectors of that many lanes.
    data : Buffer
        The plane.
    outside : int
        The word that pixels outside the image are.
    masks : callable
        Returns a vector of a row of masks, from a word of the pixel on; see `sliced_data.masks`.
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
        """Return where the lines of a row begin; rows count from the first one of the padding."""
        cut = self.cut
        return bind(row % cut.reach * (cut.turns * len(cut.phases) * cut.line) + cut.lanes)

    def load(self, start: Expr, tap: int, turn: int) -> Expr:
        """Return a vector of what a tap in a row of the kernel reads; `start` is in its slot."""
        cut = self.cut
        step, phase = divmod(tap * self.spec.dilations[1], self.spec.strides[1])
        skip = turn * len(cut.phases) + cut.phases.index(phase)
        return get(self.memory, [start + (skip * cut.line + step * cut.words)], cut.lanes)

    def fill(self, n: Expr, row: Expr) -> None:
        """Store a row of the padded image, in all turns."""
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
        """Store the columns of one phase, with the padding at both ends."""
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
        """Copy `count` words, the last vector over words that are copied already."""
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
        """Make the other turns of a line: channels of a group come down by some, and round."""
        size, lanes = self.cut.turns, self.cut.lanes
        within = WORD_BITS % size == 0

        def shifted(word: Expr, by: int) -> Expr:
            """Return words moved up by so many bits, or down."""
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
    """Return the bits of a word whose channel stays in its group when moved down by `turn`."""
    return sum(1 << bit for bit in range(WORD_BITS) if bit % size + turn < size)


def _at(where: list[Any], lanes: int) -> list[Any]:
    *outer, last = where
    return [*outer, last if lanes == 1 else ramp(last, lanes)]


def get(buffer: Buffer, where: list[Any], lanes: int) -> Expr:
    """Load `lanes` words; one alone is no vector."""
    return buffer[tuple(_at(where, lanes))]


def put(buffer: Buffer, where: list[Any], value: Expr, lanes: int) -> None:
    """Store `lanes` words."""
    T.buffer_store(buffer, value, _at(where, lanes))


def splat_word(value: int, lanes: int) -> Expr:
    """Return a word in every lane."""
    word = tirx.IntImm("uint32", value)
    return word if lanes == 1 else tirx.Broadcast(word, lanes)
