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

If a whole kernel row of bfloat16 pixels fits into a row of a tile (first layers with few channels),
its columns are multiplied like channels: tile rows then overlap in memory, each a stride of the
convolution from the one before. Max-pooling is fused by computing the rows of its windows; those
that two lines need are computed twice.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
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
from bnncc.topi_binary.definitions.taps import as_number, inside, pixel, within
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


def folds(spec: Layer) -> bool:
    """Return whether the columns of a kernel are multiplied at once, like channels."""
    if not isinstance(spec, Conv2d) or spec.operands != "bfloat16" or spec.groups > 1:
        return False
    words = spec.kernel[1] * quantization.words_of_pixel(spec)
    return spec.kernel[1] > 1 == spec.dilations[1] and words <= LANES


def windows(spec: Layer) -> Layer:
    """Return the convolution whose sums are computed.

    It is `spec` itself, unless that has a pooling: then it also has the rows that the padding of
    the pooling adds, and none that no window of the pooling reads. If `spec` folds, its pixels are
    as many as its columns of outputs, and the columns of its kernel are channels.
    """
    if not isinstance(spec, Conv2d):
        return spec
    made, pool = spec.unpooled, spec.pool
    if pool is not None:
        high = (spec.output_hw[0] - 1) * pool.strides[0] + pool.kernel[0]
        top, left, _, right = spec.pads
        top += pool.pads[0] * spec.strides[0]
        read = (high - 1) * spec.strides[0] + (spec.kernel[0] - 1) * spec.dilations[0] + 1
        made = replace(made, pads=(top, left, read - spec.height - top, right))
    if folds(spec):
        made = replace(
            made, kernel=(made.kernel[0], 1), strides=(made.strides[0], 1),
            dilations=(made.dilations[0], 1), pads=(made.pads[0], 0, made.pads[2], 0),
            width=made.output_hw[1],
            channels=made.kernel[1] * quantization.words_of_pixel(spec) * 2,
        )  # fmt: skip
    return made


@dataclass(frozen=True)
class Lines:
    """Memory layout of the pixels of an image, and the grouping of its rows into lines."""

    layer: Layer
    rows: int
    """Output rows per line; divides the output height. With a pooling, these are its rows."""
    places: int = 0
    """Windows per line for which sums are computed, at least `needed`."""
    width: int = 0
    """Windows per output row, or per `together` ones, if each of these begins a tile; 0 for all
    `pitch` pixels of a row."""
    columns: int = 0
    """Pixels per row, if the layer has been `flattened` to several rows."""
    chunks: int = 1
    """Parts of the channels of a kernel of one pixel, whose sums are stored separately."""
    together: int = 1
    """Output rows per tile, if `width` is for more than one; they are `pitch` windows apart."""

    @property
    def form(self) -> str:
        """The form of the definition."""
        numbers = self.rows, self.places, self.width, self.columns, self.chunks, self.together
        return "-".join([FORM, *map(str, numbers)])

    @cached_property
    def spec(self) -> Layer:
        """The convolution whose sums are computed, see `windows`."""
        return windows(self.layer)

    @property
    def count(self) -> int:
        """Lines per image."""
        return self.layer.output_hw[0] // self.rows

    @property
    def _pooled(self) -> tuple[int, int]:
        """Rows per window of the pooling, and from one to the next."""
        pool = getattr(self.layer, "pool", None)
        return (1, 1) if pool is None else (pool.kernel[0], pool.strides[0])

    @property
    def step(self) -> int:
        """Rows of sums from the first one of a line to the first one of the next."""
        return self.rows * self._pooled[1]

    @property
    def high(self) -> int:
        """Rows of sums per line."""
        return self.step - self._pooled[1] + self._pooled[0]

    @property
    def cells(self) -> int:
        """Pixels of data from one window to the next: the horizontal stride, if columns fold."""
        return self.layer.strides[1] if folds(self.layer) else 1

    @property
    def needed(self) -> int:
        """Windows from the first output of a line to the last one."""
        return int(self.window(self.high - 1, self.spec.output_hw[1] - 1)) + 1

    def window(self, row: Expr, column: Expr) -> Expr:
        """Return the index, within its line, of the window of a sum."""
        if self.together == 1:
            return row * (self.width or self.pitch) + column
        return row // self.together * self.width + row % self.together * self.pitch + column

    def first(self, place: Expr) -> Expr:
        """Return the pixel, within a line of a plane, at which a window begins."""
        if not self.width:
            return place
        return place // self.width * (self.together * self.pitch) + place % self.width

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
        """Windows from one row of a plane to the next, of `cells` pixels each."""
        width, layer = self.spec.output_hw[1], self.layer
        if folds(layer):
            behind = layout.blocks(max(0, layer.kernel[1] - self.cells), self.cells)
            # A whole row of the image is stored, also pixels that no window reads.
            return max(width + behind, layout.blocks(layer.pads[1] + layer.width, self.cells))
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
        behind = (self.count - 1) * self.step * self.pitch + self.first(self.places - 1) + last + 1
        planes = self.phases[0] * self.phases[1]
        read = max(planes * self.plane[0] * self.plane[1], behind) * self.cells
        return read + max(0, self.layer.kernel[1] - self.cells) * folds(self.layer)


def blocks_per_group(spec: Layer) -> int:
    """Return the number of blocks of channels, each as deep as a tile, per group and tap."""
    return layout.blocks(_WORDS_PER_GROUP[type(spec)](spec), LANES)


def _words_of_levels(spec: FewBitConv2d) -> int:
    return few_bit_data.group_words(spec) * few_bit_data.per_word(spec) // 4


def _words_of_bits(spec: BinaryConv2d) -> int:
    return layout.blocks(spec.channels_per_group, 4)


_WORDS_PER_GROUP: dict[type, Callable[..., int]] = {
    BinaryConv2d: _words_of_bits,
    Conv2d: quantization.words_of_pixel,
    FewBitConv2d: _words_of_levels,
}
"""By kind of layer: takes it, and returns the words of bytes or bfloat16 per group and pixel."""


def products_of(spec: Layer) -> int:
    """Return the number of products of terms that are summed for one product of two elements."""
    three = isinstance(spec, Conv2d) and spec.operands == "bfloat16x3"
    return len(quantization.PRODUCTS) if three else 1


def columns_of(form: str) -> int:
    """Return `Lines.columns` of a form; 0 for other forms."""
    return int(form.split("-")[4]) if form.startswith(FORM) else 0


@dataclass(frozen=True)
class Operands:
    """Operands of a matrix product, converted to bytes or bfloat16."""

    spec: Layer
    types: tuple[str, str]
    """Types of data and weight: int8 or uint8, or uint16 for bfloat16."""
    lanes: int
    """Data elements converted at a time."""
    datum: Callable[..., Expr]
    """Takes image, row, column (possibly outside the image), group, block of `lanes` elements, and
    lane; returns a data element. See also `packed`. If columns are `folded`, it takes image, row,
    column and lane of a pixel inside the image."""
    weight: Callable[..., Expr]
    """Takes vector of output channels, kernel row and column, block of `depth` channels, word in
    the block and element in the word (and, if `places` > 1, the place); returns a weight."""
    packed: tuple[Callable[..., Expr], ...] = ()
    """For data stored as bits: each takes the arguments of `datum`, without the lane, and returns a
    word. `datum` takes these words, and a lane."""
    words: int = LANES
    """Words of data per block."""
    folded: int = 1
    """Pixels per block, if it holds the pixels of a kernel row."""
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
    def steps(self) -> int:
        """Blocks of `depth` channels per group."""
        return blocks_per_group(self.spec)

    @property
    def products(self) -> int:
        """Products of terms that are summed for one product of two elements."""
        return products_of(self.spec)

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
        """Channels per block, of all its pixels."""
        return self.words * self.together

    @property
    def stored(self) -> int:
        """Elements of a pixel in a block."""
        return self.depth // self.folded

    def product(self, one: Expr, other: Expr) -> Expr:
        """Return the product of two elements, in the type of the sum."""
        if self.types[0] == "uint16":
            return bfloat16(T.Cast("uint32", one)) * bfloat16(T.Cast("uint32", other))
        return T.Cast("int32", one) * T.Cast("int32", other)


@dataclass(frozen=True)
class Sums:
    """Dot products for vectors of output channels."""

    lines: Lines
    stored: Buffer
    first: int
    """Index of the first vector."""

    def dot(self, n: Expr, h: Expr, w: Expr, o: Expr, lane: Expr) -> Expr:
        """Return the sum of an output: row, column, vector of channels, and lane."""
        return self._at(n, h // self.lines.rows, h % self.lines.rows, w, o, lane)

    def largest(
        self, of: Callable[[Expr], Expr], n: Expr, h: Expr, w: Expr, o: Expr, lane: Expr
    ) -> Expr:
        """Return the maximum of a function of the sums in a window of the pooling.

        Of sums outside the image, those at its nearest edge are read, which belong to the window.
        """
        layer, lines = self.lines.layer, self.lines
        assert isinstance(layer, Conv2d)
        assert layer.pool is not None
        pool, (height, width), line = layer.pool, layer.window_hw, h // lines.rows
        found: Expr = None
        for kh, kw in product(*map(range, pool.kernel)):
            row = within(h * pool.strides[0] + (kh - pool.pads[0]), height) + pool.pads[0]
            column = within(w * pool.strides[1] + (kw - pool.pads[1]), width)
            value = of(self._at(n, line, row - line * lines.step, column, o, lane))
            found = value if found is None else T.max(found, value)
        return found

    def _at(self, n: Expr, line: Expr, row: Expr, w: Expr, o: Expr, lane: Expr) -> Expr:
        place = self.lines.window(row, w)
        parts = range(self.lines.chunks)
        sums = (self.stored[n, line, o - self.first, part, place, lane] for part in parts)
        return reduce(operator.add, sums)


def summed(met: Operands, n: Expr, form: str) -> list[Sums]:
    """Write the dot products in the form `form`.

    Last channels that do not fill a vector get blocks and tensors of their own, because a tile is
    identified by its position in a tensor.

    Returns
    -------
    list of Sums
        A second one, if any, is for the last channels.
    """
    lines = Lines(met.spec, *map(int, form.split("-")[1:]))
    spec, (full, rest) = lines.spec, divmod(met.spec.out_channels, LANES)
    held = met.parts * met.steps
    data = buffer("bytes", (n, held, lines.pixels, met.stored), met.types[0])
    (_expand if met.folded == 1 else _collect)(met, n, lines, data)
    blocks = spec.groups * met.products * met.steps
    taps = [*map(extent, (n, lines.count, *spec.kernel, blocks, lines.places, met.depth))]

    def read(n: Expr, line: Expr, kh: Expr, kw: Expr, c: Expr, place: Expr, k: Expr) -> Expr:
        begin = line * (lines.step * lines.pitch) + lines.first(place) + lines.tap(kh, kw)
        if met.folded == 1:
            return data[n, met.block(0, c), begin, k]
        return data[n, c, begin * lines.cells + k // met.stored, k % met.stored]

    window = compute("window", buffer("window", taps, met.types[0]), taps, read)
    ends = [("", 0, full)] * (full > 0) + [("_last", full, 1)] * (rest > 0)
    return [_sums(met, n, lines, window, *end) for end in ends]


def _expand(met: Operands, n: Expr, lines: Lines, data: Buffer) -> None:
    """Write the data, padded by zeros."""
    spec, parts = lines.spec, met.depth // met.lanes

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


def _collect(met: Operands, n: Expr, lines: Lines, data: Buffer) -> None:
    """Write the data of folded columns, `LANES` pixels at a time, and the padding beside them.

    The last pixels of a row may be written twice. Rows outside the image are zero.
    """
    layer, spec = met.spec, lines.spec
    run = min(LANES, layer.width)
    (phases, _), (rows, pitch) = lines.phases, lines.plane

    def row_of(high: Expr, row: Expr) -> Expr:
        return row * spec.strides[0] + high - spec.pads[0]

    def inside_rows(high: Expr, row: Expr) -> Expr:
        y = row_of(high, row)
        every = T.uint16(2**16 - 1)
        return T.Select(T.And(y >= 0, y < layer.height), every, T.uint16(0))

    existing = buffer("inside", (phases, rows), "uint16")
    compute("inside", existing, (phases, rows), inside_rows)

    def column(turn: Expr, x: Expr) -> Expr:
        first = turn * run
        return (T.min(first, int64(layer.width - run)) if layer.width % run else first) + x

    def at(n: Expr, high: Expr, row: Expr, x: Expr, lane: Expr) -> list[Expr]:
        return [n, 0, lines.place((high, int64(0)), row, int64(0)) * lines.cells + x, lane]

    def value(*i: Expr) -> Expr:
        n, high, _, row, turn, _, x, lane = i
        y = within(row_of(high, row), layer.height)
        return T.bitwise_and(met.datum(n, y, column(turn, x), lane), existing[high, row])

    def where(*i: Expr) -> list[Expr]:
        n, high, _, row, turn, _, x, lane = i
        return at(n, high, row, column(turn, x) + layer.pads[1], lane)

    outer = (n, phases, 1, rows)
    extents = (*outer, layout.blocks(layer.width, run), 1, run, met.stored)
    compute("data", data, extents, value, where)
    beside = pitch * lines.cells - layer.width

    def margin(*i: Expr) -> list[Expr]:
        n, high, _, row, x, lane = i
        return at(n, high, row, T.Select(x < layer.pads[1], x, x + layer.width), lane)

    none = T.uint16(0)
    compute("margin", data, (*outer, beside, met.stored), lambda *_: none, margin)


def _sums(
    met: Operands, n: Expr, lines: Lines, window: Buffer, end: str, first: int, count: int
) -> Sums:
    """Write the weights as bytes and the dot products for `count` channel vectors from `first`."""
    spec, steps = lines.spec, met.steps
    outer, every = (count, *spec.kernel, met.products * steps), met.together
    row = LANES * every
    shape = [*map(extent, (*outer, met.words, row))]
    panel = buffer(f"panel{end}", shape, met.types[1])
    each = met.products * steps // lines.chunks
    grid = map(extent, (*outer, met.words // met.places, row))
    with T.grid(*grid) as loops, T.sblock(f"panel{end}"):
        o, kh, kw, c, word, byte = T.axis.remap("SSSSSS", list(loops))
        for place in range(met.places):
            which = [place] * (met.places > 1)
            made = met.weight(first + o, kh, kw, met.block(1, c), word, byte, *which)
            T.buffer_store(panel, made, [o, kh, kw, c, word * met.places + place, byte])

    def term(total: Expr, *i: Expr) -> Expr:
        n, line, o, chunk, place, lane, kh, kw, c, k = i
        c = chunk * each + c
        channel = (first + o) * LANES
        group = channel // (spec.out_channels // spec.groups) if spec.groups > 1 else 0
        one = window[n, line, kh, kw, group * steps + c, place, k]
        other = panel[o, kh, kw, c, k // every, lane * every + k % every]
        return total + met.product(one, other)

    outputs = [*map(extent, (n, lines.count, count, lines.chunks, lines.places, LANES))]
    dtype = "float32" if met.types[0] == "uint16" else "int32"
    sums = buffer(f"sums{end}", outputs, dtype)
    start, reduced = tirx.const(0, dtype), (*spec.kernel, each, met.depth)
    accumulate(f"sum{end}", sums, outputs, reduced, start, term)

    return Sums(lines, sums, first)


def of_bits(met: binary_operands.Operands) -> Operands:
    """Return the operands of a binary layer whose weights are in the order ``fours``."""
    spec, steps = met.spec, blocks_per_group(met.spec)
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
    return Operands(spec, ("int8", "int8"), lanes, datum, weight, packed)


def of_levels(spec: FewBitConv2d, data: Buffer, weights: Buffer) -> Operands:
    """Return the operands of a few-bit layer of the method ``bytes`` or ``packed``."""
    words = _words_of_levels(spec)
    together = math.gcd(words, LANES)
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
        return Operands(spec, types, together * 4, datum, weight)
    width, places = spec.weight_bits, 8 // spec.weight_bits
    rows = layout.blocks(spec.out_channels) * few_bit_data.group_words(spec)
    packed = aliased(weights, [*map(extent, (rows, LANES))])
    return Operands(spec, types, together * 4, datum, unpacked, places=places)


def of_floats(spec: Conv2d, data: Buffer, weights: Buffer) -> Operands:
    """Return the operands of a layer in bfloat16, two elements per word."""
    words, folded = quantization.words_of_pixel(spec), folds(spec)
    terms = quantization.TERMS if spec.operands == "bfloat16x3" else 1
    together = math.gcd(spec.channels, LANES * 2)
    columns, held = (1, spec.kernel[1] * words) if folded else (spec.kernel[1], LANES)
    taps = layout.blocks(spec.out_channels), spec.kernel[0], columns
    ragged = [*map(extent, (*taps, words, LANES * 2))]
    tiled = [*map(extent, (*taps, terms * blocks_per_group(spec), held, LANES * 2))]
    stored = aliased(weights, tiled if in_tiles(spec) else ragged, "uint16")

    def datum(n: Expr, y: Expr, x: Expr, group: Expr, part: Expr, lane: Expr) -> Expr:
        channel = part * together + lane
        there = T.And(inside(spec, y, x), part * together < spec.channels)
        number = as_number(spec, data[tuple(pixel(spec, n, y, x, channel))], channel)
        half = _term(number, group if terms > 1 else None)
        return T.if_then_else(there, T.Cast("uint16", half), T.uint16(0))

    def collected(n: Expr, y: Expr, x: Expr, lane: Expr) -> Expr:
        return half_of_pixel(spec, lambda channel: data[tuple(pixel(spec, n, y, x, channel))], lane)

    def weight(o: Expr, kh: Expr, kw: Expr, step: Expr, word: Expr, number: Expr) -> Expr:
        if in_tiles(spec):
            return stored[o, kh, kw, step, word, number]
        word = step * LANES + word
        return T.if_then_else(word < words, stored[o, kh, kw, word, number], T.uint16(0))

    if folded:
        return Operands(
            spec, _HALVES, 1, collected, weight, words=held, folded=spec.kernel[1]
        )  # fmt: skip
    return Operands(spec, _HALVES, together, datum, weight, terms=terms)


def half_of_pixel(spec: Conv2d, datum: Callable[[Expr], Expr], lane: Expr) -> Expr:
    """Return an element of a pixel whose columns fold, as bfloat16; zero beyond the channels.

    `datum` takes a channel that exists.
    """
    channel = lane
    if spec.channels % 2:  # TVM simplifies an index that can only be 0
        last = int64(spec.channels - 1)
        channel = T.min(lane, last) if spec.channels > 1 else last
    number = as_number(spec, datum(channel), channel)
    half = T.Cast("uint16", to_bfloat16(number, flush=True))
    if spec.channels % 2 == 0:
        return half
    return T.if_then_else(lane < spec.channels, half, T.uint16(0))


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
    whole = folds(spec) or quantization.words_of_pixel(spec) % LANES == 0
    return spec.operands == "bfloat16x3" or whole
