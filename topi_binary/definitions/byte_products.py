"""Binary, few-bit and float convolutions as matrix products of bytes or bfloat16.

Bits of data become bytes +1 and -1 (1 and 0 in mode ``and``), bits of weights +1 and -1. Levels and
their weights are bytes already. Floats become bfloat16, stored as uint16. Exact zeros, zero padding
and channels beyond the last become 0, so a sum is the dot product itself; for levels, the
contribution of padding with other values is added separately.

An image is stored as *planes*, one for each phase of the strides. In a plane, adjacent windows are
one pixel apart whatever the stride, and a tap is a constant offset. Rows of a plane are contiguous,
so the windows of several rows form one *line*, either without a gap or so that each row begins a
tile. The last windows of each row in a line may have no output, and their sums are not read. If the
padding at the end of one row can also serve as the padding at the start of the next, rows are
stored shorter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product

from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.topi_binary import few_bit_data, layout, quantization
from bnncc.topi_binary.definitions import binary_operands
from bnncc.topi_binary.definitions.blocks import (
    Buffer,
    Expr,
    accumulate,
    bit,
    buffer,
    compute,
    extent,
    int64,
)
from bnncc.topi_binary.definitions.taps import inside, pixel
from bnncc.topi_binary.definitions.terms import bfloat16, to_bfloat16, weight_of_code
from bnncc.topi_binary.definitions.weights import packed_vector
from bnncc.topi_binary.layout import DEPTH, LANES, WORD_BITS
from bnncc.topi_binary.signature import aliased
from bnncc.topi_binary.spec import BinaryConv2d, Conv2d, FewBitConv2d

Layer = BinaryConv2d | FewBitConv2d | Conv2d

FORM = "products"
"""Form of `binary_conv2d`, `few_bit_conv2d` and `conv2d`; the numbers of `Lines` follow it."""

_TERM_OF: tuple[Callable[[Expr], Expr], ...] = (
    lambda i: i * 8 % 10 // 4,
    lambda i: (i * 11 + 14) % 23 // 7,
)
"""Indices of the terms of data and of weights in each entry of `quantization.PRODUCTS`.

They are expressions, not tables, so that TVM can derive the regions that are read."""

_HALVES = ("uint16", "uint16")
"""Types of data and weights stored as the bits of bfloat16."""

WORDS = "word", "kept"
"""Blocks of words of data: bits, and which of them are not exact zeros."""


@dataclass(frozen=True)
class Lines:
    """Memory layout of the pixels of an image, and the grouping of its rows into lines."""

    spec: Layer
    rows: int
    """Output rows per line; divides the output height."""
    places: int = 0
    """Windows per line for which sums are computed, at least `needed`."""
    width: int = 0
    """Windows per output row, if each row begins a tile; 0 for all `pitch` pixels of a row."""

    @property
    def form(self) -> str:
        """The form of the definition."""
        return f"{FORM}-{self.rows}-{self.places}-{self.width}"

    @property
    def count(self) -> int:
        """Lines per image."""
        return self.spec.output_hw[0] // self.rows

    @property
    def apart(self) -> int:
        """Windows from the first one of a row to the first one of the next."""
        return self.width or self.pitch

    @property
    def needed(self) -> int:
        """Windows from the first output of a line to the last one."""
        return (self.rows - 1) * self.apart + self.spec.output_hw[1]

    def first(self, place: Expr) -> Expr:
        """Return the pixel, within a line of a plane, at which a window begins."""
        return place // self.width * self.pitch + place % self.width if self.width else place

    @cached_property
    def phases(self) -> tuple[int, int]:
        """Planes per image: the number of row phases and of column phases that taps use."""
        high, wide = (max(phase for phase, _ in self._taps(axis)) + 1 for axis in (0, 1))
        return high, wide

    def _taps(self, axis: int) -> list[tuple[int, int]]:
        """Return the phase and the offset within its plane of each tap along an axis."""
        spec = self.spec
        moves = (tap * spec.dilations[axis] for tap in range(spec.kernel[axis]))
        return [(move % spec.strides[axis], move // spec.strides[axis]) for move in moves]

    @cached_property
    def pitch(self) -> int:
        """Pixels from one row of a plane to the next."""
        width = self.spec.output_hw[1]
        least = range(width, width + self._taps(1)[-1][1])
        return next((pitch for pitch in least if self._shares(pitch)), least.stop)

    def _shares(self, pitch: int) -> bool:
        """Whether, with this pitch, everything read past the end of a row is padding.

        It must be padding for that row and for the next one, at whose start it lies.
        """
        spec = self.spec
        for (phase, move), w in product(self._taps(1), range(spec.output_hw[1])):
            first, beyond = phase - spec.pads[1], w + move - pitch
            image = (w + move) * spec.strides[1] + first, beyond * spec.strides[1] + first
            if beyond >= 0 and (image[0] < spec.width or image[1] >= 0):
                return False
        return True

    @cached_property
    def plane(self) -> tuple[int, int]:
        """Rows and columns of a plane; with shared padding, the last row is padding only."""
        reach = [self._taps(axis)[-1][1] for axis in (0, 1)]
        shares = self.pitch < self.spec.output_hw[1] + reach[1]
        return self.spec.output_hw[0] + reach[0] + shares, self.pitch

    def place(self, phase: tuple[Expr, Expr], row: Expr, column: Expr) -> Expr:
        """Return the index of a pixel of a plane within the image."""
        rows, pitch = self.plane
        return ((phase[0] * self.phases[1] + phase[1]) * rows + row) * pitch + column

    def tap(self, kh: Expr, kw: Expr) -> Expr:
        """Return the offset of a tap from the start of its window."""
        moves = [tap * step for tap, step in zip((kh, kw), self.spec.dilations, strict=True)]
        phase, move = (
            [op(m, s) for m, s in zip(moves, self.spec.strides, strict=True)]
            for op in (lambda m, s: m % s, lambda m, s: m // s)
        )
        return self.place((phase[0], phase[1]), *move)

    @property
    def pixels(self) -> int:
        """Pixels of all planes, plus those that only windows without an output read."""
        taps = product(*map(range, self.spec.kernel))
        last = max(int(self.tap(*tap)) for tap in taps)
        behind = (self.count - 1) * self.rows * self.pitch + self.first(self.places - 1) + last + 1
        planes = self.phases[0] * self.phases[1]
        return max(planes * self.plane[0] * self.plane[1], behind)


@dataclass(frozen=True)
class Operands:
    """Operands of a matrix product, converted to bytes or bfloat16."""

    spec: Layer
    types: tuple[str, str]
    """Types of data and weight: int8 or uint8, or uint16 for bfloat16."""
    steps: int
    """Blocks of `depth` channels per group."""
    lanes: int
    """Data elements converted at a time."""
    datum: Callable[..., Expr]
    """Takes image, row, column (possibly outside the image), group, block of `lanes` elements, and
    lane; returns a data element. See also `packed`."""
    weight: Callable[..., Expr]
    """Takes vector of output channels, kernel row and column, block of `depth` channels, word in
    the block and element in the word (and, if `places` > 1, the place); returns a weight."""
    packed: tuple[Callable[..., Expr], ...] = ()
    """For data stored as bits: each takes the arguments of `datum`, without the lane, and returns a
    word. `datum` takes these words, and a lane."""
    terms: int = 1
    """Number of terms whose sum is a data element, or a weight. Terms of data are stored like
    groups, those of weights consecutively."""

    places: int = 1
    """Words that a stored word of packed weights expands to."""

    @property
    def parts(self) -> int:
        """Groups or terms of the data; only one of the two may exceed 1."""
        return self.spec.groups * self.terms

    @property
    def products(self) -> int:
        """Products of terms that are summed for one product of two elements."""
        return len(quantization.PRODUCTS) if self.terms > 1 else 1

    def block(self, which: int, number: Expr) -> Expr:
        """Return the index of the data (`which` = 0) or weight (1) block that a product reads."""
        if self.terms == 1:
            return number
        return _TERM_OF[which](number // self.steps) * self.steps + number % self.steps

    @property
    def together(self) -> int:
        """Elements per 32-bit word."""
        return 2 if self.types[0] == "uint16" else 4

    @property
    def depth(self) -> int:
        """Channels per block."""
        return LANES * self.together

    def product(self, one: Expr, other: Expr) -> Expr:
        """Return the product of two elements, in the type of the sum."""
        if self.types[0] == "uint16":
            return bfloat16(T.Cast("uint32", one)) * bfloat16(T.Cast("uint32", other))
        return T.Cast("int32", one) * T.Cast("int32", other)


def summed(met: Operands, n: Expr, form: str) -> list[Callable[..., Expr]]:
    """Write the dot products in the form `form`.

    Last channels that do not fill a vector get blocks and tensors of their own, because a tile is
    identified by its position in a tensor.

    Returns
    -------
    list of callable
        Each takes a pixel, a vector of channels and a lane, and reads a sum. A second one, if any,
        is for the last channels.
    """
    spec, numbers = met.spec, map(int, form.split("-")[1:])
    lines, (full, rest) = Lines(spec, *numbers), divmod(spec.out_channels, LANES)
    held = met.parts * met.steps
    data = buffer("bytes", (n, held, lines.pixels, met.depth), met.types[0])
    parts = met.depth // met.lanes

    def under(value: Callable[..., Expr], n: Expr, *i: Expr) -> Expr:
        high, wide, row, column, *channel = i
        y = row * spec.strides[0] + high - spec.pads[0]
        x = column * spec.strides[1] + wide - spec.pads[1]
        return value(n, y, x, *channel)

    def datum(*i: Expr) -> Expr:
        if met.packed:
            return met.datum(*(words[i[:-1]] for words in words_of), i[-1])
        return under(met.datum, *i)

    def where(n: Expr, *i: Expr) -> list[Expr]:
        high, wide, row, column, group, part, lane = i
        place = lines.place((high, wide), row, column)
        return [n, group * met.steps + part // parts, place, part % parts * met.lanes + lane]

    extents = (n, *lines.phases, *lines.plane, met.parts, met.steps * parts)
    kind = f"uint{met.lanes}"
    words_of = [buffer(name, [*map(extent, extents)], kind) for name in WORDS[: len(met.packed)]]
    for name, words, value in zip(WORDS, words_of, met.packed, strict=False):
        compute(name, words, extents, partial(under, value))
    compute("data", data, (*extents, met.lanes), datum, where)
    blocks = spec.groups * met.products * met.steps
    taps = [*map(extent, (n, lines.count, *spec.kernel, blocks, lines.places, met.depth))]
    window = compute(
        "window", buffer("window", taps, met.types[0]), taps,
        lambda n, line, kh, kw, c, place, k: data[
            n, met.block(0, c),
            line * (lines.rows * lines.pitch) + lines.first(place) + lines.tap(kh, kw), k,
        ],
    )  # fmt: skip
    ends = [("", 0, full)] * (full > 0) + [("_last", full, 1)] * (rest > 0)
    return [_sums(met, n, lines, window, *end) for end in ends]


def _sums(
    met: Operands, n: Expr, lines: Lines, window: Buffer, end: str, first: int, count: int
) -> Callable[..., Expr]:
    """Write the weights as bytes and the dot products for `count` channel vectors from `first`."""
    spec, steps = met.spec, met.steps
    outer, every = (count, *spec.kernel, met.products * steps), met.together
    shape = [*map(extent, (*outer, LANES, met.depth))]
    panel = buffer(f"panel{end}", shape, met.types[1])
    grid = map(extent, (*outer, LANES // met.places, met.depth))
    with T.grid(*grid) as loops, T.sblock(f"panel{end}"):
        o, kh, kw, c, word, byte = T.axis.remap("SSSSSS", list(loops))
        for place in range(met.places):
            which = [place] * (met.places > 1)
            made = met.weight(first + o, kh, kw, met.block(1, c), word, byte, *which)
            T.buffer_store(panel, made, [o, kh, kw, c, word * met.places + place, byte])

    def term(total: Expr, *i: Expr) -> Expr:
        n, line, o, place, lane, kh, kw, c, k = i
        channel = (first + o) * LANES
        group = channel // (spec.out_channels // spec.groups) if spec.groups > 1 else 0
        one = window[n, line, kh, kw, group * steps + c, place, k]
        other = panel[o, kh, kw, c, k // every, lane * every + k % every]
        return total + met.product(one, other)

    outputs = [*map(extent, (n, lines.count, count, lines.places, LANES))]
    dtype = "float32" if met.types[0] == "uint16" else "int32"
    sums = buffer(f"sums{end}", outputs, dtype)
    start, reduced = tirx.const(0, dtype), (*spec.kernel, met.products * steps, met.depth)
    accumulate(f"sum{end}", sums, outputs, reduced, start, term)

    def dot(n: Expr, h: Expr, w: Expr, o: Expr, lane: Expr) -> Expr:
        return sums[n, h // lines.rows, o - first, h % lines.rows * lines.apart + w, lane]

    return dot


def of_bits(met: binary_operands.Operands) -> Operands:
    """Return the operands of a binary layer whose weights are in the order ``fours``."""
    spec, steps = met.spec, layout.blocks(met.depth, DEPTH)
    shape = [*map(extent, (layout.blocks(spec.out_channels), *spec.kernel, steps, LANES))]
    stored = T.decl_buffer(shape, "uint64", data=met.weight.data)
    lanes = math.gcd(layout.words(met.depth) * WORD_BITS, DEPTH)
    count, rest, kind = layout.blocks(met.depth, lanes), met.depth % lanes, f"uint{lanes}"
    planes = [
        aliased(plane, [*plane.shape[:-1], int64(count * spec.groups)], kind)
        for plane in (met.data, met.zero)
        if plane is not None
    ]
    none = tirx.const(0, kind)
    every = T.bitwise_not(none)

    def kept(n: Expr, y: Expr, x: Expr, group: Expr, word: Expr) -> Expr:
        where = tuple(pixel(spec, n, y, x, group * count + word))
        here = T.bitwise_not(planes[1][where]) if planes[1:] else every
        there = T.if_then_else(inside(spec, y, x), here, every if spec.pad_value else none)
        if rest:
            existing = T.Select(word == count - 1, tirx.const(2**rest - 1, kind), every)
            there = T.bitwise_and(there, existing)
        return T.if_then_else(word < count, there, none)

    def word_of(n: Expr, y: Expr, x: Expr, group: Expr, word: Expr) -> Expr:
        where = tuple(pixel(spec, n, y, x, group * count + word))
        loaded = T.if_then_else(
            T.And(inside(spec, y, x), word < count),
            planes[0][where],
            every if spec.pad_value > 0 else none,
        )
        return T.bitwise_and(loaded, kept(n, y, x, group, word))

    def datum(*i: Expr) -> Expr:
        one, *there, lane = i
        zero = T.Select(bit(there[0], lane), T.int8(-1), T.int8(0)) if there else T.int8(0)
        return T.Select(bit(one, lane), T.int8(1), zero)

    def weight(*i: Expr) -> Expr:
        *where, byte = i
        return T.Select(bit(stored[tuple(where)], byte), T.int8(1), T.int8(-1))

    packed = (word_of, kept)[: 1 + (spec.mode == "xor")]
    return Operands(spec, ("int8", "int8"), steps, lanes, datum, weight, packed)


def of_levels(spec: FewBitConv2d, data: Buffer, weights: Buffer) -> Operands:
    """Return the operands of a few-bit layer of the method ``bytes`` or ``packed``."""
    words = few_bit_data.group_words(spec) * few_bit_data.per_word(spec) // 4
    steps, together = layout.blocks(words, LANES), math.gcd(words, LANES)
    levels = aliased(data, [*data.shape[:-1], data.shape[-1] * 4], "uint8")
    shape = [*map(extent, (layout.blocks(spec.out_channels), *spec.kernel, words, LANES * 4))]
    stored = aliased(weights, shape, "int8")

    def datum(n: Expr, y: Expr, x: Expr, group: Expr, part: Expr, lane: Expr) -> Expr:
        channel = group * (words * 4) + part * (together * 4) + lane
        there = T.And(inside(spec, y, x), part * together < words)
        return T.if_then_else(there, levels[tuple(pixel(spec, n, y, x, channel))], T.uint8(0))

    def weight(o: Expr, kh: Expr, kw: Expr, step: Expr, four: Expr, byte: Expr) -> Expr:
        word = step * LANES + four
        return T.if_then_else(word < words, stored[o, kh, kw, word, byte], T.int8(0))

    def unpacked(
        o: Expr, kh: Expr, kw: Expr, step: Expr, word: Expr, byte: Expr, place: int
    ) -> Expr:
        row = packed_vector(spec, o, step * (LANES // places) + word)
        affine = few_bit_data.CODES[width]
        return weight_of_code(packed[row, byte // 4], width, place, byte % 4, affine)

    types = "uint8", "int8"
    if spec.method == "bytes":
        return Operands(spec, types, steps, together * 4, datum, weight)
    width, places = spec.weight_bits, 8 // spec.weight_bits
    rows = layout.blocks(spec.out_channels) * few_bit_data.group_words(spec)
    packed = aliased(weights, [*map(extent, (rows, LANES))])
    return Operands(spec, types, steps, together * 4, datum, unpacked, places=places)


def of_floats(spec: Conv2d, data: Buffer, weights: Buffer) -> Operands:
    """Return the operands of a layer in bfloat16, two elements per word."""
    words, depth = quantization.words_of_pixel(spec), LANES * 2
    terms = quantization.TERMS if spec.operands == "bfloat16x3" else 1
    steps, together = layout.blocks(words, LANES), math.gcd(spec.channels, depth)
    count = layout.blocks(spec.out_channels)
    ragged = [*map(extent, (count, *spec.kernel, words, LANES * 2))]
    tiled = [*map(extent, (count, *spec.kernel, terms * steps, LANES, depth))]
    stored = aliased(weights, tiled if in_tiles(spec) else ragged, "uint16")

    def datum(n: Expr, y: Expr, x: Expr, group: Expr, part: Expr, lane: Expr) -> Expr:
        channel = part * together + lane
        there = T.And(inside(spec, y, x), part * together < spec.channels)
        half = _term(data[tuple(pixel(spec, n, y, x, channel))], group if terms > 1 else None)
        return T.if_then_else(there, T.Cast("uint16", half), T.uint16(0))

    def weight(o: Expr, kh: Expr, kw: Expr, step: Expr, word: Expr, number: Expr) -> Expr:
        if in_tiles(spec):
            return stored[o, kh, kw, step, word, number]
        word = step * LANES + word
        return T.if_then_else(word < words, stored[o, kh, kw, word, number], T.uint16(0))

    return Operands(spec, _HALVES, steps, together, datum, weight, terms=terms)


def _term(datum: Expr, number: Expr | None) -> Expr:
    """Return, as uint32 bits, term `number` of the bfloat16 numbers whose sum is `datum`."""
    first = to_bfloat16(datum)
    if number is None:
        return first
    rest = datum - bfloat16(first)
    second = to_bfloat16(rest)
    third = to_bfloat16(rest - bfloat16(second))
    bits = T.bitwise_and(T.reinterpret("uint32", datum), T.uint32(0x7FFFFFFF))
    seen = T.Select(bits > T.uint32(0x7F800000), T.uint32(0x7FC0), first)  # NaN stays NaN
    return T.Select(number == 0, seen, T.Select(number == 1, second, third))


def in_tiles(spec: Layer) -> bool:
    """Whether weights are stored in the layout of tiles."""
    if not isinstance(spec, Conv2d):
        return False
    return spec.operands == "bfloat16x3" or quantization.words_of_pixel(spec) % LANES == 0
