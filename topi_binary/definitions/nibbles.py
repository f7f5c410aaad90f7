"""Popcounts by table lookup, four channels (a *nibble*) of two pixels at a time.

Row (t, u) of the table holds ``popcount(t ^ i) + 16 * popcount(u ^ i)`` for i = 0 .. 15. Nibbles of
the data of two adjacent outputs select a row. A vector holds one nibble of weights per byte, for
one output channel each, and each selects an entry of that row: the counts of both outputs.

Up to `FEW` entries fit in a byte, as each count is at most 4. Their sums are accumulated in two
bytes: as they are, modulo 256, and the count of the second output alone, from which that of the
first follows. So three lookups of two outputs take three additions of entries, and three more
instructions to take the second output apart: nine instructions instead of the twelve of lookups
for single outputs.

These bytes in turn are accumulated in 16 bits: once the pair of bytes as one number, ``even + 256 *
odd``, and once the odd byte alone. The even byte is ``pair - 256 * odd`` modulo 2**16, which is
exact within the limits of `byte_sums.fits`.

Padding with +1 or -1 is a border in the copy of the data, and so are columns of zero padding, which
one bit cannot represent: they select rows of the table that count nothing (`NONE`). Rows of zero
padding are skipped.

If a plane marks exact zeros, forms with `ZEROS` sum over two planes of data, see `byte_sums`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.topi_binary import layout
from bnncc.topi_binary.definitions.binary_operands import Operands, Sums
from bnncc.topi_binary.definitions.blocks import (
    Buffer,
    Expr,
    Window,
    accumulate,
    axes,
    buffer,
    compute,
    int64,
    under,
)
from bnncc.topi_binary.definitions.taps import place, tests_of, within
from bnncc.topi_binary.layout import LANES, NIBBLE_LANES
from bnncc.topi_binary.signature import aliased
from bnncc.topi_binary.spec import BinaryConv2d

FORM, ZEROS = "nibbles-", "-zeros"
"""Forms of `binary_conv2d`: `FORM`, bytes of a vector, and optionally `ZEROS`."""

NIBBLES = layout.WORD_BITS // 4
"""Nibbles per word."""

MAX_LOOKUPS = 63
"""Lookups, of at most 4 each, that a byte can accumulate."""

FEW = 3
"""Lookups, of at most 4 each, that half a byte can accumulate."""

NONE, KINDS = 16, 17
"""Data that differs from no weights, beside the sixteen nibbles; the number of all."""

ROW = 16
"""Entries of a row of the table."""

MAX_BYTES = 64
"""Bytes of the largest vector."""

PIXELS = 2
"""Adjacent outputs per lookup."""


def row_bytes(size: int) -> int:
    """Return the bytes of a row for vectors of `size` bytes.

    Vectors of 64 bytes have four copies of each row, which they load whole: on a Zen 4, loading 16
    bytes into each quarter of a vector takes the unit that shuffles bytes, which lookups need.
    """
    return size if size == MAX_BYTES else ROW


def in_row(lane: Expr, entry: Expr, size: int) -> Expr:
    """Return where a row has an entry for a lane; sixteen lanes may have a copy of their own."""
    return lane // ROW * ROW % row_bytes(size) + entry


def table_bytes(size: int) -> int:
    """Return the bytes of the table for vectors of `size` bytes."""
    return KINDS * KINDS * row_bytes(size)


def per_word(spec: BinaryConv2d) -> int:
    """Return the nibbles of a word that are looked up: fewer if one word has all channels."""
    return min(NIBBLES, layout.blocks(spec.channels_per_group, 4))


class NibbleSums(Sums):
    """Sums in a form that begins with `FORM`: popcounts by table lookup."""

    def __init__(self, met: Operands, n: Expr, form: str) -> None:
        super().__init__(met, n, form)
        self.spec, self._planes = bordered(met.spec), 1 + form.endswith(ZEROS)
        self._laid = laid(met.spec)
        self._size = int(form.removeprefix(FORM).removesuffix(ZEROS))
        self._unit, self._row_bytes = max(self._size, NIBBLE_LANES), row_bytes(self._size)
        self._lanes = layout.blocks(self.spec.out_channels, self._unit) * self._unit
        self._row = met.spec.groups * met.words * NIBBLES
        self._image = _filled(self._laid.height * self._laid.width * self._row)
        # Columns whose pairs are looked up: without a second tap, those of even outputs alone.
        self._step = 1 if self.spec.kernel[1] > 1 else PIXELS * self.spec.strides[1]
        self._across = layout.blocks(self._laid.width, self._step)
        fitting = [c for c in range(1, met.words + 1) if met.words % c == 0]
        self._used = per_word(met.spec)
        taps = self.spec.kernel[1] * self._used
        # Words, of each tap of a kernel row, that are accumulated in bytes.
        chunk = max((c for c in fitting if taps * c <= MAX_LOOKUPS), default=1)
        (rows, columns), pairs = self.spec.kernel, layout.blocks(self.spec.output_hw[1], PIXELS)
        self._pixel = {"n": n, "h": self.spec.output_hw[0], "w": pairs}
        self._turns = {"plane": self._planes, "kh": rows, "turn": met.words // chunk}
        # Lookups of three taps are added first, or those of three nibbles of a word: 3, 3 and 2.
        # With few channels, those of three nibbles of a kernel row.
        self._of_taps = columns % FEW == 0 and self._used == NIBBLES
        self._steps = {"kw": columns, "c": chunk, "part": layout.blocks(NIBBLES, FEW)}
        if self._of_taps:
            self._steps = {"kw": columns // FEW, "c": chunk * NIBBLES, "part": 1}
        elif self._used < NIBBLES:
            self._steps = {"kw": 1, "c": 1, "part": layout.blocks(columns * self._used, FEW)}

    def weight_bits(self) -> Buffer:
        """Write the popcount of each tap's weights, by kernel row, kernel column and channel."""
        kernel, depth = self.spec.kernel, self._met.words * 4
        blocks = layout.blocks(self.spec.out_channels, NIBBLE_LANES)
        pairs = aliased(self._met.weight, (blocks, *kernel, depth, LANES), "uint16")
        extents = (*kernel, layout.blocks(self.spec.out_channels))
        made = buffer("ones", (*extents[:2], extents[2] * LANES), "int32")

        def count(total: Expr, *i: Expr) -> Expr:
            kh, kw, o, lane, byte = i
            odd = T.Cast("uint16", o % 2 * 8)
            weight = T.shift_right(pairs[o // 2, kh, kw, byte, lane], odd) & T.uint16(255)
            return total + T.Cast("int32", T.popcount(weight))

        return accumulate(
            "ones", made, (*extents, LANES), (depth,), T.int32(0), count,
            lambda kh, kw, o, lane: (kh, kw, o * LANES + lane),
        )  # fmt: skip

    def summed(self) -> Callable[..., Expr]:
        """Write the sums; return a reader that takes a pixel, a channel vector and a lane."""
        wide = self._wide(self._sums(self._few(self._table(), self._pairs(), self._nibbles())))
        half, per = self._unit // 2, self._unit // LANES

        def total(n: Expr, h: Expr, w: Expr, o: Expr, lane: Expr) -> Expr:
            pair = (o // per * PIXELS + w % PIXELS) * self._unit + o % per // 2 * LANES + lane
            one, odd = (wide[n, h, w // PIXELS, pair + k] for k in (0, half))
            return T.Cast("int32", T.Select(o % 2 == 0, one - odd * T.uint16(256), odd))

        return total

    def _table(self) -> Buffer:
        counts = compute(
            "counts", buffer("counts", (KINDS, ROW), "uint8"), (KINDS, ROW),
            lambda row, i: T.Select(
                row < NONE, T.popcount(T.Cast("uint8", row) ^ T.Cast("uint8", i)), T.uint8(0)
            ),
        )  # fmt: skip
        made, width = buffer("table", (table_bytes(self._size),), "uint8"), self._row_bytes
        return compute(
            "table", made, (KINDS, KINDS, width // ROW, ROW),
            lambda second, first, _, i: counts[first, i] + counts[second, i] * T.uint8(16),
            lambda second, first, copy, i: ((second * KINDS + first) * width + (copy * ROW + i),),
        )  # fmt: skip

    def _pairs(self) -> Buffer:
        """Write offsets of table rows: plane, image, nibble of the columns that are looked up.

        Each is that of the nibble there, and of the same nibble of the next output's pixel. (At the
        end of a row that is a pixel of the next one, which no output reads.)
        """
        rows, next_one = self._rows(), self.spec.strides[1] * self._row

        def offset(plane: Expr, i: Expr, x: Expr) -> Expr:
            first, second = (T.Cast("uint16", rows[plane, i, x + k]) for k in (0, next_one))
            return (first + second * T.uint16(KINDS)) * T.uint16(self._row_bytes)

        if self._step == 1:
            made = buffer("pairs", (self._planes, self._n, self._image), "uint16")
            return compute("pairs", made, made.shape, offset)
        (height, width), row = (self._laid.height, self._laid.width), self._row
        made = buffer("pairs", (self._planes, self._n, height * self._across * row), "uint16")
        return compute(
            "pairs", made, (self._planes, self._n, height, self._across, row),
            lambda plane, i, h, w, x: offset(plane, i, (h * width + w * self._step) * row + x),
            lambda plane, i, h, w, x: (plane, i, (h * self._across + w) * row + x),
        )  # fmt: skip

    def _rows(self) -> Buffer:
        """Write the nibbles of the data, with a border: plane, image, nibble of the image."""
        spec, laid, (n, row) = self._met.spec, self._laid, (self._n, self._row)
        top, left = (a - b for a, b in zip(spec.pads[:2], laid.pads[:2], strict=True))
        beyond = _filled(self.spec.strides[1] * row)  # is read by pairs that no output reads
        made = buffer("rows", (self._planes, n, self._image + beyond), "uint8")
        if (laid.height, laid.width) != (spec.height, spec.width):
            self._border(made)  # the interior is overwritten below
        shape = n, spec.height, spec.width * row // 2
        data = aliased(self._met.data, shape, "uint8")
        for number in range(self._planes):
            plane = data if self._planes == 1 else self._plane(number, data)

            def nibble(i: Expr, h: Expr, x: Expr, plane: Buffer = plane) -> Expr:
                moved = T.shift_right(plane[i, h, x // 2], T.Cast("uint8", x % 2 * 4))
                return moved & T.uint8(15)

            compute(
                f"rows_{number}", made, (n, spec.height, spec.width * row), nibble,
                lambda i, h, x, number=number: (
                    int64(number), i, (h + top) * (laid.width * row) + (x + left * row)
                ),
            )  # fmt: skip
        return made

    def _border(self, rows: Buffer) -> None:
        """Fill images with padding."""
        spec, laid, (n, row) = self._met.spec, self._laid, (self._n, self._row)
        rest = self._met.depth % layout.WORD_BITS
        if spec.pad_value != 1 or not rest:
            zeros = spec.mode == "xor" and spec.pad_value == 0
            value = NONE if zeros else 15 * (spec.pad_value == 1)
            compute("border", rows, rows.shape, lambda *_: T.uint8(value))
            return

        def padding(plane: Expr, i: Expr, c: Expr, h: Expr, w: Expr, nibble: Expr) -> Expr:
            words, ones = self._met.words, tirx.IntImm("uint32", 2**layout.WORD_BITS - 1)
            word = T.Select(c % words == words - 1, T.uint32(2**rest - 1), ones)
            return T.Cast("uint8", word >> T.Cast("uint32", nibble * 4)) & T.uint8(15)

        # Loop over pixels innermost: LLVM takes minutes to merge adjacent stores of different
        # constants.
        compute(
            "border", rows, (self._planes, n, row // NIBBLES, laid.height, laid.width, NIBBLES),
            padding,
            lambda plane, i, c, h, w, nibble: (
                plane, i, h * (laid.width * row) + (w * row + (c * NIBBLES + nibble))
            ),
        )  # fmt: skip

    def _plane(self, number: int, data: Buffer) -> Buffer:
        """Write one of the two planes of data that are looked up: exact zeros as 1, or as 0."""
        zero = aliased(self._met.zero, data.shape, "uint8")

        def either(*i: Expr) -> Expr:
            return data[i] & ~zero[i] if number else data[i] | zero[i]

        name = f"plane_{number}"
        return compute(name, buffer(name, data.shape, "uint8"), data.shape, either)

    def _nibbles(self) -> Buffer:
        """Write weights, one nibble per byte: kernel row, kernel column, nibble of a tap, lane."""
        kernel, depth = self.spec.kernel, self._met.words * 4
        blocks = layout.blocks(self.spec.out_channels, NIBBLE_LANES)
        packed = aliased(self._met.weight, (blocks, *kernel, depth, NIBBLE_LANES), "uint8")

        def nibble(kh: Expr, kw: Expr, byte: Expr, side: Expr, lane: Expr) -> Expr:
            block = T.min(lane // NIBBLE_LANES, int64(blocks - 1))  # lanes beyond are not used
            both = packed[block, kh, kw, byte, lane % NIBBLE_LANES]
            return T.shift_right(both, T.Cast("uint8", side * 4)) & T.uint8(15)

        made = buffer("nibbles", (*kernel, depth * 2, self._lanes), "uint8")
        return compute(
            "nibbles", made, (*kernel, depth, 2, self._lanes), nibble,
            lambda kh, kw, byte, side, lane: (kh, kw, byte * 2 + side, lane),
        )  # fmt: skip

    def _few(self, table: Buffer, pairs: Buffer, nibbles: Buffer) -> Buffer:
        """Write sums of up to `FEW` lookups."""
        laid, size, steps = self._laid, self._size, self._steps
        spatial = self._pixel | self._turns | steps
        made = buffer("few", (*spatial.values(), self._lanes), "uint8")
        every = {**spatial, "o": self._lanes // size}
        with axes("few", every, {"i": FEW}) as i:
            here = Window(made, [i[axis] for axis in spatial], i["o"] * size, size)
            if self._of_taps:
                kw, nibble, test = i["kw"] * FEW + i["i"], i["c"], None
            elif self._used < NIBBLES:
                number, count = i["part"] * FEW + i["i"], self.spec.kernel[1] * self._used
                test, number = number < count, T.min(number, int64(count - 1))
                kw, nibble = number // self._used, number % self._used
            else:
                number = i["part"] * FEW + i["i"]
                kw, test = i["kw"], number < NIBBLES
                nibble = i["c"] * NIBBLES + T.min(number, int64(NIBBLES - 1))
            nibble = i["turn"] * (steps["c"] * (1 if self._of_taps else NIBBLES)) + nibble
            row, column = place(laid, i["h"], i["w"] * PIXELS, i["kh"], kw)
            row = within(row, laid.height)  # others are skipped, see `_wide`
            pixel = row * self._across + column // self._step
            at = pixel * self._row + self._group(i["o"]) + nibble
            offset = pairs[i["plane"], i["n"], at]
            first = T.Cast("int64", offset)
            weight = nibbles[i["kh"], kw, nibble, i["o"] * size : i["o"] * size + size]
            T.reads(weight, table[first : first + self._row_bytes], offset)
            T.writes(here.region)
            here.clear(size)
            with under(test), T.grid(int64(size), int64(ROW)) as inner, T.sblock("few_lookup"):
                lane, entry = T.axis.remap("SR", list(inner))
                weight = nibbles[i["kh"], kw, nibble, i["o"] * size + lane]
                found = table[first + in_row(lane, entry, size)]
                where = *here.at, i["o"] * size + lane
                T.reads(made[where], weight, found)  # the index of the row, declared explicitly
                T.writes(made[where])
                meant = weight == T.Cast("uint8", entry)
                added = made[where] + T.if_then_else(meant, found, T.uint8(0))
                T.buffer_store(made, added, list(where))
        return made

    def _sums(self, few: Buffer) -> Buffer:
        """Write sums of these in two bytes: both outputs, modulo 256, and the second alone."""
        size, spatial = self._size, self._pixel | self._turns
        made = buffer("sum", (*spatial.values(), 2 * self._lanes), "uint8")
        with axes("sum", {**spatial, "o": self._lanes // size}, self._steps) as i:
            here = Window(made, [i[axis] for axis in spatial], i["o"] * (2 * size), 2 * size)
            narrow, first = (*here.at, *(i[axis] for axis in self._steps)), i["o"] * size
            T.reads(few[tuple([*narrow, slice(first, first + size)])])
            T.writes(here.region)
            here.clear(size)
            with T.grid(int64(size)) as loop, T.sblock("sum_add"):
                lane = T.axis.spatial(int64(size), loop)
                both = few[tuple([*narrow, first + lane])]
                for which, value in enumerate((both, T.shift_right(both, T.uint8(4)))):
                    where = (*here.at, i["o"] * (2 * size) + (lane + which * size))
                    T.buffer_store(made, made[where] + value, list(where))
        return made

    def _group(self, vector: Expr) -> Expr:
        """Return the first nibble within a pixel of the group that a vector of channels reads."""
        spec = self.spec
        if spec.groups == 1:
            return int64(0)
        channel = vector * self._size // LANES * LANES
        return channel // (spec.out_channels // spec.groups) * (self._met.words * NIBBLES)

    def _wide(self, sums: Buffer) -> Buffer:
        """Write 16-bit sums for each unit, of both outputs: byte pairs, then the odd bytes."""
        unit, size = self._unit, self._size
        made = buffer("wide", (*self._pixel.values(), PIXELS * self._lanes), "uint16")
        with axes("wide", {**self._pixel, "o": self._lanes // unit}, self._turns) as i:
            at, first = [i[axis] for axis in self._pixel], i["o"] * (2 * unit)
            here, narrow = Window(made, at, first, 2 * unit), (i[axis] for axis in self._turns)
            turn = *at, *narrow
            T.reads(sums[tuple([*turn, slice(first, first + 2 * unit)])])
            T.writes(here.region)
            here.clear(size // 2)

            def byte(number: Expr) -> Expr:
                return sums[tuple([*turn, first + number])]

            inside = under(*tests_of(self._laid, 0, i["h"], i["kh"]))
            with inside, T.grid(int64(unit // 2)) as loop, T.sblock("wide_add"):
                lane = T.axis.spatial(int64(unit // 2), loop)
                for place_, value in widened(byte, lane, size):
                    where = (*at, first + place_)
                    T.buffer_store(made, made[where] + value, list(where))
        return made


def widened(byte: Callable[[Expr], Expr], lane: Expr, size: int) -> list[tuple[Expr, Expr]]:
    """Return what two bytes of the sums of a unit add to its 16-bit sums.

    Parameters
    ----------
    byte : callable
        Takes an index; returns a byte of the sums of a unit. Each vector has two of them: sums of
        both outputs, modulo 256, then those of the second output.
    lane : Expr
        Number of a pair of bytes.
    size : int
        Bytes per vector.

    Returns
    -------
    list of tuple of Expr
        Indices among the 16-bit sums, and values.
    """
    unit = max(size, NIBBLE_LANES)
    at = lane * 2
    if size < unit:
        at = at // size * (2 * size) + at % size
    second = [byte(at + (side + size)) for side in range(2)]
    first = [byte(at + side) - second[side] * T.uint8(16) for side in range(2)]
    made = []
    for number, pair in enumerate((first, second)):
        even, odd = (T.Cast("uint16", one) for one in pair)
        made.append((lane + number * unit, even + odd * T.uint16(256)))
        made.append((lane + (number * unit + unit // 2), odd))
    return made


def _filled(count: int) -> int:
    """Return a number of bytes, rounded up to whole vectors of any size."""
    return layout.blocks(count, MAX_BYTES) * MAX_BYTES


def laid(spec: BinaryConv2d) -> BinaryConv2d:
    """Return `spec` for the copy of the data: with a border, and all columns that are looked up."""
    made = bordered(spec)
    top, left, bottom, right = made.pads
    outputs = layout.blocks(made.output_hw[1], PIXELS) * PIXELS
    last = (outputs - 1) * made.strides[1] + (made.kernel[1] - 1) * made.dilations[1]
    width = max(made.width + left + right, last + 1)
    return replace(made, width=width, pads=(top, 0, bottom, 0))


def bordered(spec: BinaryConv2d) -> BinaryConv2d:
    """Return `spec` for data to which the padding has been added as a border."""
    if spec.rank == 2 or (spec.mode == "xor" and spec.pad_value == 0) or not any(spec.pads):
        return spec
    top, left, bottom, right = spec.pads
    height, width = spec.height + top + bottom, spec.width + left + right
    return replace(spec, height=height, width=width, pads=(0, 0, 0, 0))
