"""Binary, few-bit and float convolutions as products of matrices of bytes, or of bfloat16.

Bits of data become bytes, +1 and -1 (in mode ``and``, 1 and 0), those of weights +1 and -1. Levels
and their weights are bytes already; floats become bfloat16, whose bits are uint16. Exact zeros,
padding with 0 and channels beyond the last are 0: so a sum is the dot product itself, for levels
without what padding with others adds.

Bytes of an image lie in *planes*, one for each place of a pixel within a stride: in these a window
moves by one pixel whatever the stride is, and a tap is a distance. Rows follow one another, so that
windows of several rows are one *line*, whose last few of a row belong to no output: their sums are
not read. Where padding on one side does for the other side of the row before, rows are shorter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
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
)
from bnncc.topi_binary.definitions.taps import inside, pixel
from bnncc.topi_binary.definitions.terms import bfloat16, to_bfloat16, weight_of_code
from bnncc.topi_binary.definitions.weights import packed_vector
from bnncc.topi_binary.layout import DEPTH, LANES, WORD_BITS
from bnncc.topi_binary.signature import aliased
from bnncc.topi_binary.spec import BinaryConv2d, Conv2d, FewBitConv2d

Layer = BinaryConv2d | FewBitConv2d | Conv2d

FORM = "products"
"""Of `binary_conv2d` and `few_bit_conv2d`, with the numbers of `Lines` behind it."""

_TERM_OF: tuple[Callable[[Expr], Expr], ...] = (
    lambda i: i * 8 % 10 // 4,
    lambda i: (i * 11 + 14) % 23 // 7,
)
"""By its place in `quantization.PRODUCTS`, which term of a datum a product has, and which of a
weight: in arithmetic of which TVM finds what is read."""

_HALVES = ("uint16", "uint16")
"""Types of data and weights that are bits of bfloat16."""

_ALL = 2**WORD_BITS - 1


@dataclass(frozen=True)
class Lines:
    """Where pixels lie."""

    spec: Layer
    rows: int
    """Rows of the output in a line: they divide its height."""
    places: int = 0
    """Windows of a line for which there are sums, at least `needed`."""

    @property
    def form(self) -> str:
        """The form of the definition."""
        return f"{FORM}-{self.rows}-{self.places}"

    @property
    def count(self) -> int:
        """Lines of an image."""
        return self.spec.output_hw[0] // self.rows

    @property
    def needed(self) -> int:
        """Windows from the first output of a line to its last one."""
        return (self.rows - 1) * self.pitch + self.spec.output_hw[1]

    @cached_property
    def phases(self) -> tuple[int, int]:
        """Planes of an image, as rows and columns of them."""
        high, wide = (max(phase for phase, _ in self._taps(axis)) + 1 for axis in (0, 1))
        return high, wide

    def _taps(self, axis: int) -> list[tuple[int, int]]:
        """Return the plane, and the distance there, of each tap of an axis."""
        spec = self.spec
        moves = (tap * spec.dilations[axis] for tap in range(spec.kernel[axis]))
        return [(move % spec.strides[axis], move // spec.strides[axis]) for move in moves]

    @cached_property
    def pitch(self) -> int:
        """Pixels of a row of a plane."""
        width = self.spec.output_hw[1]
        least = range(width, width + self._taps(1)[-1][1])
        return next((pitch for pitch in least if self._shares(pitch)), least.stop)

    def _shares(self, pitch: int) -> bool:
        """Whether what is read behind rows of `pitch` pixels is padding, there and in the next."""
        spec = self.spec
        for (phase, move), w in product(self._taps(1), range(spec.output_hw[1])):
            first, beyond = phase - spec.pads[1], w + move - pitch
            image = (w + move) * spec.strides[1] + first, beyond * spec.strides[1] + first
            if beyond >= 0 and (image[0] < spec.width or image[1] >= 0):
                return False
        return True

    @cached_property
    def plane(self) -> tuple[int, int]:
        """Rows and columns of a plane; the last row is padding where rows share it."""
        reach = [self._taps(axis)[-1][1] for axis in (0, 1)]
        shares = self.pitch < self.spec.output_hw[1] + reach[1]
        return self.spec.output_hw[0] + reach[0] + shares, self.pitch

    def place(self, phase: tuple[Expr, Expr], row: Expr, column: Expr) -> Expr:
        """Return where a pixel of a plane lies."""
        rows, pitch = self.plane
        return ((phase[0] * self.phases[1] + phase[1]) * rows + row) * pitch + column

    def tap(self, kh: Expr, kw: Expr) -> Expr:
        """Return how far a tap is from its window."""
        moves = [tap * step for tap, step in zip((kh, kw), self.spec.dilations, strict=True)]
        phase, move = (
            [op(m, s) for m, s in zip(moves, self.spec.strides, strict=True)]
            for op in (lambda m, s: m % s, lambda m, s: m // s)
        )
        return self.place((phase[0], phase[1]), *move)

    @property
    def pixels(self) -> int:
        """Of all planes, and those that only windows without an output read."""
        taps = product(*map(range, self.spec.kernel))
        last = max(int(self.tap(*tap)) for tap in taps)
        behind = (self.count - 1) * self.rows * self.pitch + self.places + last
        planes = self.phases[0] * self.phases[1]
        return max(planes * self.plane[0] * self.plane[1], behind)


@dataclass(frozen=True)
class Operands:
    """What is multiplied."""

    spec: Layer
    types: tuple[str, str]
    """Of numbers of data and weight: bytes, or bits of bfloat16."""
    steps: int
    """Blocks of `depth` channels in a group."""
    lanes: int
    """Numbers of data that are made at once."""
    datum: Callable[..., Expr]
    """The number of an image, row and column, which may be outside, a group, so many lanes of it,
    and a lane."""
    weight: Callable[..., Expr]
    """The number of a vector of output channels, a tap, a block of `depth` channels, a word of
    these, and one of the numbers that such words have; with several `places`, of one of them."""
    terms: int = 1
    """Numbers that a datum, and a weight, is the sum of; data have one for each group, weights one
    after the other."""

    places: int = 1
    """Words of numbers that a stored word becomes."""

    @property
    def parts(self) -> int:
        """Groups of channels, or terms, that data have: not both."""
        return self.spec.groups * self.terms

    @property
    def products(self) -> int:
        """Products that one of sums of terms takes."""
        return len(quantization.PRODUCTS) if self.terms > 1 else 1

    def block(self, which: int, number: Expr) -> Expr:
        """Return which block of data (0) or weights (1) a block of products reads."""
        if self.terms == 1:
            return number
        return _TERM_OF[which](number // self.steps) * self.steps + number % self.steps

    @property
    def together(self) -> int:
        """Numbers in a word of 32 bits."""
        return 2 if self.types[0] == "uint16" else 4

    @property
    def depth(self) -> int:
        """Channels in a block."""
        return LANES * self.together

    def product(self, one: Expr, other: Expr) -> Expr:
        """Return what is added to a sum."""
        if self.types[0] == "uint16":
            return bfloat16(T.Cast("uint32", one)) * bfloat16(T.Cast("uint32", other))
        return T.Cast("int32", one) * T.Cast("int32", other)


def summed(met: Operands, n: Expr, form: str) -> list[Callable[..., Expr]]:
    """Write the dot products of a form.

    Those of the last channels, if they fill no vector, are blocks and tensors of their own: a tile
    is known by its place in a tensor.

    Returns
    -------
    list of callable
        What reads them: of a pixel, a vector of channels and a lane; perhaps another one for the
        last channels.
    """
    spec, (rows, places) = met.spec, map(int, form.split("-")[1:])
    lines, (full, rest) = Lines(spec, rows, places), divmod(spec.out_channels, LANES)
    held = met.parts * met.steps
    data = buffer("bytes", (n, held, lines.pixels, met.depth), met.types[0])
    parts = met.depth // met.lanes

    def datum(n: Expr, *i: Expr) -> Expr:
        high, wide, row, column, *channel = i
        y = row * spec.strides[0] + high - spec.pads[0]
        x = column * spec.strides[1] + wide - spec.pads[1]
        return met.datum(n, y, x, *channel)

    def where(n: Expr, *i: Expr) -> list[Expr]:
        high, wide, row, column, group, part, lane = i
        place = lines.place((high, wide), row, column)
        return [n, group * met.steps + part // parts, place, part % parts * met.lanes + lane]

    extents = (*lines.phases, *lines.plane, met.parts, met.steps * parts, met.lanes)
    compute("data", data, (n, *extents), datum, where)
    blocks = spec.groups * met.products * met.steps
    taps = [*map(extent, (n, lines.count, *spec.kernel, blocks, places, met.depth))]
    window = compute(
        "window", buffer("window", taps, met.types[0]), taps,
        lambda n, line, kh, kw, c, place, k: data[
            n, met.block(0, c), line * (rows * lines.pitch) + place + lines.tap(kh, kw), k
        ],
    )  # fmt: skip
    ends = [("", 0, full)] * (full > 0) + [("_last", full, 1)] * (rest > 0)
    return [_sums(met, n, lines, window, *end) for end in ends]


def _sums(
    met: Operands, n: Expr, lines: Lines, window: Buffer, end: str, first: int, count: int
) -> Callable[..., Expr]:
    """Write bytes of weights, and dot products, for `count` vectors of channels from `first` on."""
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
        return sums[n, h // lines.rows, o - first, h % lines.rows * lines.pitch + w, lane]

    return dot


def of_bits(met: binary_operands.Operands) -> Operands:
    """Return the bytes of a binary layer, whose weights are in the order ``fours``."""
    spec, count = met.spec, layout.words(met.depth)
    outside = T.uint32(_ALL * (spec.pad_value != 0)), T.uint32(_ALL * (spec.pad_value > 0))
    steps = layout.blocks(met.depth, DEPTH)
    shape = [*map(extent, (layout.blocks(spec.out_channels), *spec.kernel, steps, LANES))]
    stored = T.decl_buffer(shape, "uint64", data=met.weight.data)

    def datum(n: Expr, y: Expr, x: Expr, group: Expr, word: Expr, lane: Expr) -> Expr:
        where = tuple(pixel(spec, n, y, x, group * count + word))
        here, there = inside(spec, y, x), word < count
        zeros = T.uint32(0) if met.zero is None else met.zero[where]
        rest = met.depth % WORD_BITS
        existing: Expr = T.uint32(_ALL)
        if rest:
            existing = T.Select(word == count - 1, T.uint32(2**rest - 1), existing)
        keep = T.bitwise_and(T.if_then_else(here, T.bitwise_not(zeros), outside[0]), existing)
        keep = T.if_then_else(there, keep, T.uint32(0))
        loaded = T.if_then_else(T.And(here, there), met.data[where], outside[1])
        one, other = bit(T.bitwise_and(loaded, keep), lane), bit(keep, lane)
        low = T.int8(-1) if spec.mode == "xor" else T.int8(0)
        return T.Select(one, T.int8(1), T.Select(other, low, T.int8(0)))

    def weight(*i: Expr) -> Expr:
        *where, byte = i
        return T.Select(bit(stored[tuple(where)], byte), T.int8(1), T.int8(-1))

    return Operands(spec, ("int8", "int8"), steps, WORD_BITS, datum, weight)


def of_levels(spec: FewBitConv2d, data: Buffer, weights: Buffer) -> Operands:
    """Return the bytes of a few-bit layer of the method ``bytes``, or ``packed``."""
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
    """Return the numbers of a layer with operands of bfloat16, two in a word."""
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

    return Operands(spec, _HALVES, steps, together, datum, weight, terms)


def _term(datum: Expr, number: Expr | None) -> Expr:
    """Return the bits of one of the numbers of bfloat16 that `datum` is the sum of, as uint32."""
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
    """Whether weights are stored as tiles hold them."""
    if not isinstance(spec, Conv2d):
        return False
    return spec.operands == "bfloat16x3" or quantization.words_of_pixel(spec) % LANES == 0
