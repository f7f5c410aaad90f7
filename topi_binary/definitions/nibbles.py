"""Popcounts by table lookup, four channels (a *nibble*) at a time.

Row t of the table holds ``popcount(t ^ i)`` for i = 0 .. 15, repeated to `ROW` bytes. A nibble of
data selects a row. A vector holds one nibble of weights per byte, for one output channel each, and
each selects an entry of that row. Entries are accumulated in bytes, and these in 16 bits: once the
pair of bytes as one number, ``even + 256 * odd``, and once the odd byte alone. The even byte is
``pair - 256 * odd`` modulo 2**16, which is exact within the limits of `byte_sums.fits`.

Padding with +1 or -1 is a border in the copy of the data that holds the table rows. Padding with
zeros, which one bit cannot represent, means that taps are skipped.

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

ROW_UNIT = 16
"""A data nibble t is stored as ``16 * t``: scaled by 4 in an address, the offset of its row."""

ROW = 64
"""Bytes from one row of the table to the next. Each row has its own cache line, and the table is
too large for TVM to put it on the stack, where it would not be aligned."""


class NibbleSums(Sums):
    """Sums in a form that begins with `FORM`: popcounts by table lookup."""

    def __init__(self, met: Operands, n: Expr, form: str) -> None:
        super().__init__(met, n, form)
        self.spec, self._planes = bordered(met.spec), 1 + form.endswith(ZEROS)
        self._size = int(form.removeprefix(FORM).removesuffix(ZEROS))
        self._unit = max(self._size, NIBBLE_LANES)
        self._lanes = layout.blocks(self.spec.out_channels, self._unit) * self._unit
        self._row = met.spec.groups * met.words * NIBBLES
        fitting = [c for c in range(1, met.words + 1) if met.words % c == 0]
        taps = self.spec.kernel[1] * NIBBLES
        # Words, of each tap of a kernel row, that are accumulated in bytes.
        self._chunk = max((c for c in fitting if taps * c <= MAX_LOOKUPS), default=1)
        self._pixel = {"n": n, "h": self.spec.output_hw[0], "w": self.spec.output_hw[1]}
        count = met.words // self._chunk
        self._turns = {"plane": self._planes, "kh": self.spec.kernel[0], "turn": count}

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
        wide = self._wide(self._sums(self._table(), self._rows(), self._nibbles()))
        half, per = self._unit // 2, self._unit // LANES

        def total(n: Expr, h: Expr, w: Expr, o: Expr, lane: Expr) -> Expr:
            pair = o // per * self._unit + o % per // 2 * LANES + lane
            one, odd = wide[n, h, w, pair], wide[n, h, w, pair + half]
            return T.Cast("int32", T.Select(o % 2 == 0, one - odd * T.uint16(256), odd))

        return total

    def _table(self) -> Buffer:
        return compute(
            "table", buffer("table", (17 * ROW,), "uint8"), (17, ROW),
            lambda row, i: T.popcount(T.Cast("uint8", row) ^ T.Cast("uint8", i % 16)),
            lambda row, i: (row * ROW + i,),
        )  # fmt: skip

    def _rows(self) -> Buffer:
        """Write the data as offsets of table rows: plane, image, row, nibble of a row of pixels."""
        spec, outer, (n, row) = self._met.spec, self.spec, (self._n, self._row)
        top, left = (a - b for a, b in zip(spec.pads[:2], outer.pads[:2], strict=True))
        made = buffer("rows", (self._planes, n, outer.height, outer.width * row), "uint8")
        if outer is not spec:  # the interior is overwritten below
            # Loop over pixels innermost: LLVM takes minutes to merge adjacent stores of different
            # constants.
            compute(
                "border", made,
                (self._planes, n, row // NIBBLES, outer.height, outer.width, NIBBLES),
                lambda plane, i, c, h, w, nibble: T.Cast(
                    "uint8", self._pad_word(c) >> T.Cast("uint32", nibble * 4)
                ) % T.uint8(16) * T.uint8(ROW_UNIT),
                lambda plane, i, c, h, w, nibble: (plane, i, h, w * row + c * NIBBLES + nibble),
            )  # fmt: skip
        shape = n, spec.height, spec.width * row // 2
        data = aliased(self._met.data, shape, "uint8")
        for number in range(self._planes):
            plane = data if self._planes == 1 else self._plane(number, data)

            def nibble(i: Expr, h: Expr, x: Expr, plane: Buffer = plane) -> Expr:
                moved = T.shift_right(plane[i, h, x // 2], T.Cast("uint8", x % 2 * 4))
                return T.shift_left(moved, T.uint8(4))

            compute(
                f"rows_{number}", made, (n, spec.height, spec.width * row), nibble,
                lambda i, h, x, number=number: (int64(number), i, h + top, x + left * row),
            )  # fmt: skip
        return made

    def _plane(self, number: int, data: Buffer) -> Buffer:
        """Write one of the two planes of data that are looked up: exact zeros as 1, or as 0."""
        zero = aliased(self._met.zero, data.shape, "uint8")

        def either(*i: Expr) -> Expr:
            return data[i] & ~zero[i] if number else data[i] | zero[i]

        name = f"plane_{number}"
        return compute(name, buffer(name, data.shape, "uint8"), data.shape, either)

    def _pad_word(self, c: Expr) -> Expr:
        """Return word `c` of a padding pixel."""
        words, rest = self._met.words, self._met.depth % layout.WORD_BITS
        ones = tirx.IntImm("uint32", 2**layout.WORD_BITS - 1)
        if self.spec.pad_value != 1:
            return T.uint32(0)
        return T.Select(c % words == words - 1, T.uint32(2**rest - 1), ones) if rest else ones

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

    def _sums(self, table: Buffer, rows: Buffer, nibbles: Buffer) -> Buffer:
        """Write sums of lookups in bytes."""
        spec, size, steps = self.spec, self._size, self._chunk * NIBBLES
        spatial = self._pixel | self._turns
        made = buffer("sum", (*spatial.values(), self._lanes), "uint8")
        every = {**spatial, "o": self._lanes // size}
        with axes("sum", every, {"kw": spec.kernel[1], "c": steps}) as i:
            here = Window(made, [i[axis] for axis in spatial], i["o"] * size, size)
            row, column = place(spec, i["h"], i["w"], i["kh"], i["kw"])
            nibble = i["turn"] * steps + i["c"]
            start = self._group(i["o"]) + nibble
            datum = rows[i["plane"], i["n"], row, column * self._row + start]
            first = T.Cast("int64", datum) * (ROW // ROW_UNIT)
            weight = nibbles[i["kh"], i["kw"], nibble, i["o"] * size : i["o"] * size + size]
            # A tap outside the image is skipped, but TVM needs a valid index for the region.
            inside = within(row, spec.height), within(column, spec.width) * self._row + start
            T.reads(
                weight, table[first : first + size], rows[i["plane"], i["n"], inside[0], inside[1]]
            )
            T.writes(here.region)
            here.clear(size)
            tests = *tests_of(spec, 0, i["h"], i["kh"]), *tests_of(spec, 1, i["w"], i["kw"])
            with under(*tests), T.grid(int64(size), int64(16)) as inner, T.sblock("sum_lookup"):
                lane, entry = T.axis.remap("SR", list(inner))
                weight = nibbles[i["kh"], i["kw"], nibble, i["o"] * size + lane]
                found = table[first + (lane // 16 * 16 + entry)]
                at = *here.at, i["o"] * size + lane
                T.reads(made[at], weight, found)  # the index of the row, declared explicitly
                T.writes(made[at])
                meant = weight == T.Cast("uint8", entry)
                T.buffer_store(made, made[at] + T.if_then_else(meant, found, T.uint8(0)), list(at))
        return made

    def _group(self, vector: Expr) -> Expr:
        """Return the first nibble within a pixel of the group that a vector of channels reads."""
        spec = self.spec
        if spec.groups == 1:
            return int64(0)
        channel = vector * self._size // LANES * LANES
        return channel // (spec.out_channels // spec.groups) * (self._met.words * NIBBLES)

    def _wide(self, sums: Buffer) -> Buffer:
        """Write 16-bit sums for each unit: those of byte pairs, then those of the odd bytes."""
        unit, half = self._unit, self._unit // 2
        made = buffer("wide", (*self._pixel.values(), self._lanes), "uint16")
        with axes("wide", {**self._pixel, "o": self._lanes // unit}, self._turns) as i:
            at, first = [i[axis] for axis in self._pixel], i["o"] * unit
            here, narrow = Window(made, at, first, unit), (*at, *(i[axis] for axis in self._turns))
            T.reads(sums[tuple([*narrow, slice(first, first + unit)])])
            T.writes(here.region)
            here.clear(self._size // 2)
            with T.grid(int64(half)) as loop, T.sblock("wide_add"):
                lane = T.axis.spatial(int64(half), loop)
                even, odd = (
                    T.Cast("uint16", sums[tuple([*narrow, first + (lane * 2 + side)])])
                    for side in range(2)
                )
                for place_, value in ((lane, even + odd * T.uint16(256)), (lane + half, odd)):
                    where = tuple([*at, first + place_])
                    T.buffer_store(made, made[where] + value, list(where))
        return made


def bordered(spec: BinaryConv2d) -> BinaryConv2d:
    """Return `spec` for data to which the padding has been added as a border."""
    if spec.rank == 2 or (spec.mode == "xor" and spec.pad_value == 0) or not any(spec.pads):
        return spec
    top, left, bottom, right = spec.pads
    height, width = spec.height + top + bottom, spec.width + left + right
    return replace(spec, height=height, width=width, pads=(0, 0, 0, 0))
