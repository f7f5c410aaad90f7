"""Binary convolution by table lookup, for x86 processors that cannot count the bits of a vector.

A *nibble* is four channels. Row t of a table holds ``popcount(t ^ i)`` for i = 0 .. 15, repeated to
a whole line. A row, chosen by a nibble of data, holds the differing bits for each nibble of weight;
a vector of weight nibbles, one byte for each output channel, picks from the row in one instruction
(``pshufb``), and one addition of bytes ends four products of every channel.

Blocks, in the order in which they are written: ``table``; ``rows``, data nibbles as places of rows;
for each range of output channels ``nibbles``, its weights; for each tile of columns ``sums``, the
lookups summed in bytes, ``acc``, those in 16 bits, and ``out``, the epilogue. All but the first
are loops over single values, or over blocks of lanes to be tensorized; `binary_lookup` schedules.

Bounds: a lookup is at most 4, so a byte takes 63 of them (`MAX_LOOKUPS`: 63 * 4 = 252). Sums of 16
bits, also of pairs of bytes, are exact modulo 2**16: `fits` admits no more products than that.

Why a template: `definitions.binary_conv2d`, which is the same word by word and what tests compare,
has no tables, no nibbles and no sums in bytes, and no primitive makes a lookup of a count of bits.

With a plane z of exact zeros, ``2 * popcount((d ^ w) & ~z) + popcount(z)`` is ``popcount((d | z) ^
w) + popcount((d & ~z) ^ w)``: the same loops, over two planes of data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.schedules.columns import cut
from bnncc.schedules.intrin import Window
from bnncc.schedules.intrin_portable import I32, SPREAD_NIBBLES, WIDENING_ADD, popcount
from bnncc.schedules.templates import epilogue
from bnncc.schedules.templates.taps import Kernel, Piece, under
from bnncc.topi_binary import layout
from bnncc.topi_binary.definitions.blocks import buffer
from bnncc.topi_binary.definitions.place import Place
from bnncc.topi_binary.layout import LANES, NIBBLE_LANES
from bnncc.topi_binary.signature import aliased
from bnncc.topi_binary.spec import BinaryConv2d

Buffer = Any
Expr = Any

MIN_PIXELS = 4
"""Output pixels, or rows of a dense layer, that share the work on a call's weights."""

MIN_CHANNELS = LANES + 1
"""Output channels: fewer are half of the `NIBBLE_LANES` computed together, a draw with words."""

MAX_LOOKUPS = 63
"""Lookups of at most 4 that a byte can sum."""

MAX_PRODUCTS = 2**16 - 1
"""What a sum of 16 bits can count."""

NIBBLES = layout.WORD_BITS // 4
"""Nibbles in a word."""

ROW_UNIT = 16
"""A data nibble t is stored as ``16 * t``, which an address scaled by 4 makes the row's place."""

ROW = 64
"""Bytes from one row of the table to the next: rows lie in one cache line each, and the table is so
large that TVM does not put it on the stack, where it would not be aligned."""

CONVERTED = 32
"""Bytes of data converted at a time."""

Finish = Callable[..., None]
"""Writes the epilogue, given a piece, where the vector lies, the sums, and views of the outputs."""


@dataclass(frozen=True)
class Lookup:
    """How the kernel is cut into register tiles.

    Attributes
    ----------
    size : int
        Bytes of a vector.
    columns : tuple of tuple (width, tile)
        Pieces of the width, each a multiple of its tile; those at a border are one tile.
    vectors : int
        Vectors of output channels in a tile, a multiple of `layout.NIBBLE_LANES` channels.
    """

    size: int
    columns: tuple[tuple[int, int], ...]
    vectors: int

    @property
    def unit(self) -> int:
        """The fewest channels that a tile can have."""
        return max(self.size, NIBBLE_LANES)


class Channels(NamedTuple):
    """A range of output channels, cut into equal tiles."""

    name: str
    first: int
    """The first vector."""
    tiles: int
    vectors: int
    """Of a tile."""


def fits(spec: BinaryConv2d) -> bool:
    """Return whether this kernel can compute `spec`."""
    uniform = spec.groups == 1 or (spec.out_channels // spec.groups) % NIBBLE_LANES == 0
    counted = spec.taps * (1 + spec.ternary) <= MAX_PRODUCTS
    return uniform and counted and spec.kernel[1] * NIBBLES <= MAX_LOOKUPS


def pays(spec: BinaryConv2d) -> bool:
    """Return whether this kernel can compute `spec`, and is faster than counting words."""
    pixels = spec.output_hw[0] * spec.output_hw[1]
    if spec.rank == 2:
        pixels = spec.images
    return fits(spec) and pixels >= MIN_PIXELS and spec.out_channels >= MIN_CHANNELS


def narrowed(spec: BinaryConv2d, tiling: Lookup, width: int) -> Lookup:
    """Return `tiling` with tiles of one column, for code that is small and rarely runs."""
    return replace(tiling, columns=cut(spec, [1] * width))


def channels(spec: BinaryConv2d, tiling: Lookup, masked: bool) -> list[Channels]:
    """Return the ranges of output channels: equal tiles, then what is left as one."""
    per_unit = tiling.unit // tiling.size
    tile = tiling.vectors // per_unit
    full, rest = divmod(spec.out_channels, tiling.unit)
    tiles, left = full // tile, full % tile + (rest > 0)
    ranges = ((0, tiles, tiling.vectors), (tiles * tiling.vectors, min(left, 1), left * per_unit))
    prefix = "zero_" if masked else ""
    return [Channels(f"{prefix}{i}", *r) for i, r in enumerate(ranges) if r[1]]


def padded(kernel: Kernel) -> Kernel:
    """Return `kernel` as it is on data with a border of the pixels that padding means.

    Padding with +1 or -1 (or 0 in mode ``and``) is in the copied data, so no tap leaves the image.
    Padding with zeros, which one bit does not hold, stays: those taps are skipped.
    """
    spec = kernel.spec
    if kernel.pads_zeros or spec.rank == 2:
        return kernel
    top, left, bottom, right = spec.pads
    height, width = spec.height + top + bottom, spec.width + left + right
    return replace(kernel, spec=replace(spec, height=height, width=width, pads=(0, 0, 0, 0)))


def whole(buffer: Buffer, *first: Expr) -> Expr:
    """Return the region of all of `buffer` that begins with some indices."""
    rest = (slice(0, extent) for extent in buffer.shape[len(first) :])
    return buffer[tuple([*first, *rest])]


class Writer:
    """Writes the blocks of a kernel.

    Parameters
    ----------
    kernel : Kernel
        The function being written.
    tiling : Lookup
        How to cut it.
    masked : bool
        Whether there is a plane of zeros that matters.
    views : sequence of Buffer
        The outputs, as `epilogue.views` gives them.
    finish : callable
        Writes the epilogue of one vector.
    """

    def __init__(
        self, kernel: Kernel, tiling: Lookup, masked: bool, views: Sequence[Buffer], finish: Finish
    ) -> None:
        self._source, self._tiling, self._views, self._finish = kernel, tiling, views, finish
        self._kernel = padded(kernel)
        self._masked, self._prefix = masked, "zero_" if masked else ""
        self._words = kernel.group_words
        taps = kernel.spec.kernel[1] * NIBBLES
        fitting = [c for c in range(1, self._words + 1) if self._words % c == 0]
        # Of one type: threads share the product of these extents, and TVM follows no casts.
        self._extent = T.int64 if isinstance(kernel.n, tirx.Var) else int
        self._image = kernel.n, self._extent(kernel.height)
        # Words, of each of a row's taps, that are summed in bytes.
        self._chunk = max((c for c in fitting if taps * c <= MAX_LOOKUPS), default=1)

    def write(self) -> None:
        """Write everything."""
        self._table = self._write_table()
        self._rows = self._write_rows()
        spec = self._kernel.spec
        parts = channels(spec, self._tiling, self._masked)
        # Of each piece its own: in one nest of loops, TVM takes no result from two blocks.
        count = len(parts) * len(self._tiling.columns)
        views = iter([[aliased(b) for b in self._views] for _ in range(count)])
        for part in parts:
            nibbles = self._write_nibbles(part)
            bits = None
            if spec.mode == "and":  # what weights differ in from data 0
                bits = self._accumulate(part, "bits", nibbles, (1, 1, 1), None)
            start = 0
            for i, (extent, _) in enumerate(self._tiling.columns):
                piece = Piece(start, extent)
                acc = self._accumulate(part, str(i), nibbles, (*self._image, extent), piece)
                self._out(part, str(i), piece, acc, bits, next(views))
                start += extent

    def _write_table(self) -> Buffer:
        table = buffer("table", (17 * ROW,), "uint8")
        with T.grid(17, ROW) as loops, T.sblock(f"{self._prefix}table"):
            row, i = T.axis.remap("SS", list(loops))
            differ = T.Cast("uint8", row) ^ T.Cast("uint8", i % 16)
            T.buffer_store(table, T.Cast("uint8", popcount(differ)), [row * ROW + i])
        return table

    def _write_rows(self) -> Buffer:
        """Copy the data as places of rows, with the border of `padded`.

        The shape is (planes, n, height, nibbles of a row). Rows of a dense layer are columns.
        """
        spec, outer = self._source.spec, self._kernel.spec
        depth = spec.groups * self._words * 4
        height, width = spec.height, spec.width
        if self._source.rows_are_columns:
            height, width = 1, self._source.width
        top, left = (a - b for a, b in zip(spec.pads[:2], outer.pads[:2], strict=True))
        high, wide = height + outer.height - spec.height, width + outer.width - spec.width
        n, planes = self._source.n, 1 + self._masked
        made = buffer("rows", (planes, n, high, wide * depth * 2), "uint8")
        sources: list[Any] = [self._source.data, self._source.zero][:planes]
        shape = (n, height, width * depth)
        data = [T.decl_buffer(shape, "uint8", data=b.data) for b in sources]
        if self._masked:
            data = [self._either(data, plane) for plane in range(planes)]
        count = math.gcd(width * depth, CONVERTED)
        with T.serial(n) as image, T.sblock(f"{self._prefix}rows"):
            i = T.axis.spatial(n, image)
            T.reads(*(whole(source, i) for source in data))
            T.writes(*(whole(made, plane, i) for plane in range(planes)))
            if (high, wide) != (height, width):  # the inside is written again
                # One word of all pixels after the other: LLVM takes minutes to merge stores of
                # unequal constants side by side.
                with T.grid(planes, depth // 4, high, wide) as loops, T.vectorized(8) as nibble:
                    plane, c, h, w = loops
                    word = self._source.pad_word(c % self._words)
                    value = T.Cast("uint8", word >> T.Cast("uint32", nibble * 4))
                    value = (value & T.uint8(15)) * T.uint8(ROW_UNIT)
                    T.buffer_store(made, value, [plane, i, h, w * depth * 2 + c * 8 + nibble])
            for plane, source in enumerate(data):
                with T.grid(height, width * depth // count) as loops, T.sblock("row"):
                    h, x = T.axis.remap("SS", list(loops))
                    start = (x * count + left * depth) * 2
                    T.reads(source[i, h, x * count : x * count + count])
                    T.writes(made[plane, i, h + top, start : start + count * 2])
                    operands = (
                        Window(source, i, h, x * count),
                        Window(made, plane, i, h + top, start),
                    )
                    SPREAD_NIBBLES[count].loop(f"{self._prefix}spread_{plane}", *operands)
        return made

    def _either(self, data: Sequence[Buffer], plane: int) -> Buffer:
        """Write one of the planes that are looked up: zeros as 1, or as 0."""
        made = buffer(f"plane_{plane}", data[0].shape, "uint8")
        with T.grid(*made.shape) as loops, T.sblock(f"plane_{plane}"):
            where = tuple(T.axis.remap("SSS", list(loops)))
            bits, zero = (b[where] for b in data)
            T.buffer_store(made, bits & ~zero if plane else bits | zero, list(where))
        return made

    def _write_nibbles(self, part: Channels) -> Buffer:
        """Copy the weights of some channels, one nibble to a byte."""
        size, taps = self._tiling.size, self._kernel.spec.kernel
        depth = self._words * 4
        blocks = layout.blocks(self._kernel.spec.out_channels, NIBBLE_LANES)
        packed = T.decl_buffer(
            (blocks, *taps, depth, NIBBLE_LANES), "uint8", data=self._kernel.weight.data
        )
        # The vectors of a tile lie side by side, and are read as one stream.
        shape = (part.tiles, *taps, depth * 2, part.vectors * size)
        made = buffer(f"nibbles_{part.name}", shape, "uint8")
        lanes = min(size, NIBBLE_LANES)
        extents = (part.tiles, *taps, depth, 2, part.vectors, size // lanes, lanes)
        with T.grid(*extents) as loops, T.sblock(f"nibbles_{part.name}"):
            o, kh, kw, b, side, v, some, lane = T.axis.remap("SSSSSSSS", list(loops))
            vector = o * part.vectors + v + part.first
            if size < NIBBLE_LANES:
                block, first = vector * size // NIBBLE_LANES, vector * size % NIBBLE_LANES
            else:  # lanes beyond the last block are read by nobody
                block, first = T.min(vector * (size // lanes) + some, blocks - 1), 0
            pair = packed[block, kh, kw, b, first + lane]
            nibble = (pair >> T.Cast("uint8", side * 4)) & T.uint8(15)
            place = v * size + (some * lanes + lane)
            T.buffer_store(made, nibble, [o, kh, kw, b * 2 + side, place])
        return made

    def _accumulate(
        self, part: Channels, name: str, nibbles: Buffer, extents: Sequence[Expr],
        piece: Piece | None,
    ) -> Buffer:  # fmt: skip
        """Sum lookups in bytes, and those in 16 bits: of the pixels of a piece, or of data 0."""
        kernel, size, unit = self._kernel, self._tiling.size, self._tiling.unit
        (height, width, words), steps = kernel.reduction, self._chunk * NIBBLES
        vectors, name = part.tiles * part.vectors, f"{part.name}_{name}"
        turns = (1 + self._masked if piece else 1, height, words // self._chunk)
        lanes = vectors * size
        sums = buffer(f"sums_{name}", (*extents, *turns, lanes), "uint8")
        acc = buffer(f"acc_{name}", (*extents, lanes), "uint16")
        grid = (*extents, *turns, self._extent(vectors), width, steps)
        with T.grid(*grid) as loops, T.sblock(f"sums_{name}"):
            n, h, w, plane, kh, turn, o, kw, c = T.axis.remap("SSSSSSSRR", list(loops))
            here = (n, h, w, plane, kh, turn)
            nibble = turn * steps + c
            row: Expr = T.int32(0)
            tests, reads = [], []
            if piece is not None:
                tests = self._inside(piece, h, w, kh, kw)
                at = self._place((plane, n, h, w + piece.column), (kh, kw, nibble), part, o)
                row = self._rows[at]
                # A tap outside the image reads nothing, but TVM wants a place there is.
                last = [extent - 1 for extent in self._rows.shape]
                within = [T.max(0, T.min(i, end)) for i, end in zip(at, last, strict=True)]
                reads = [self._rows[tuple(within)]]
            where = slice(o * size, o * size + size)
            first = T.Cast("int32", row) * (ROW // ROW_UNIT)
            tile, start = o // part.vectors, o % part.vectors * size
            weights = nibbles[tile, kh, kw, nibble, start : start + size]
            T.reads(weights, self._table[first : first + size], *reads)
            T.writes(sums[tuple([*here, where])])
            with T.init(), T.vectorized(0, size) as lane:
                T.buffer_store(sums, T.uint8(0), [*here, o * size + lane])
            with under(*tests), T.grid(size, 16) as inner, T.sblock(f"lookup_{name}"):
                lane, entry = T.axis.remap("SR", list(inner))
                weight = nibbles[tile, kh, kw, nibble, start + lane]
                meant = T.Cast("int32", weight) == entry
                found = self._table[first + (lane // 16 * 16 + entry)]
                place = (*here, o * size + lane)
                T.reads(sums[place], weight, found)  # the place of the row is known
                T.writes(sums[place])
                value = sums[place] + T.if_then_else(meant, found, T.uint8(0))
                T.buffer_store(sums, value, list(place))
        with (
            T.grid(*extents, self._extent(vectors * size // unit), *turns) as loops,
            T.sblock(f"acc_{name}"),
        ):
            n, h, w, o, plane, kh, turn = T.axis.remap("SSSSRRR", list(loops))
            where = slice(o * unit, o * unit + unit)
            T.reads(sums[n, h, w, plane, kh, turn, where])
            T.writes(acc[n, h, w, where])
            with T.init():
                for i in range(0, unit, size // 2):
                    with T.vectorized(0, size // 2) as lane:
                        T.buffer_store(acc, T.uint16(0), [n, h, w, o * unit + i + lane])
            narrow = Window(sums, n, h, w, plane, kh, turn, o * unit)
            WIDENING_ADD[size].loop(f"widen_{name}", narrow, Window(acc, n, h, w, o * unit))
        return acc

    def _place(self, at: Any, tap: Any, part: Channels, o: Expr) -> tuple[Expr, ...]:
        """Return where a nibble of data is."""
        plane, n, h, position = at
        kh, kw, nibble = tap
        kernel, spec = self._kernel, self._kernel.spec
        channel = (o + part.first) * self._tiling.size // LANES * LANES
        line = h if spec.rank == 2 else kernel.position(0, h, kh)
        if spec.rank == 4:
            position = kernel.position(1, position, kw)
        first = kernel.first_word(channel) * NIBBLES
        depth = spec.groups * self._words * NIBBLES
        return plane, n, line, position * depth + (first + nibble)

    def _inside(self, piece: Piece, h: Expr, w: Expr, kh: Expr, kw: Expr) -> list[Expr | None]:
        kernel = self._kernel
        return [kernel.inside(0, h, kh, piece), kernel.inside(1, w + piece.column, kw, piece)]

    def _out(
        self, part: Channels, name: str, piece: Piece, acc: Buffer, bits: Buffer | None,
        views: Sequence[Buffer],
    ) -> None:  # fmt: skip
        """Write the epilogue of the pixels of a piece, a tile of channels at a time."""
        kernel, tile = self._kernel, part.vectors * self._tiling.size
        extents = (self._extent(part.tiles), *self._image, piece.columns)
        with T.grid(*extents) as loops, T.sblock(f"out_{part.name}_{name}"):
            o, n, h, w = T.axis.remap("SSSS", list(loops))
            turn = o if part.tiles > 1 else T.int32(0)
            column = w + piece.column
            places = list(self._places(part, (n, h, column, turn)))
            steps, params = kernel.spec.steps, kernel.params
            regions = [epilogue.regions(steps, params, views, at) for _, at in places]
            lanes = slice(turn * tile, turn * tile + tile)
            mine = [acc[n, h, w, lanes], *([bits[0, 0, 0, lanes]] if bits is not None else [])]
            T.reads(*mine, *(one for reads, _ in regions for one in reads))
            T.writes(*(one for _, writes in regions for one in writes))
            for start, at in places:
                raw = self._total(acc, (n, h, w), turn * tile, start)
                share = kernel.share(h, column, piece, self._masked)
                raw = raw + T.Broadcast(share, LANES)
                if bits is not None:
                    zero = T.int32(0)
                    raw = raw - self._total(bits, (zero, zero, zero), turn * tile, start)
                self._finish(piece, at, T.Bind(raw), views)

    def _places(self, part: Channels, at: Any) -> Iterator[tuple[int, Place]]:
        """Yield each block of `LANES` channels of a tile, and where its results lie."""
        n, h, column, turn = at
        tile = part.vectors * self._tiling.size
        for start in range(0, tile, LANES):
            first = part.first * self._tiling.size + start
            lanes = min(LANES, self._kernel.spec.out_channels - first)
            if part.tiles > 1 or lanes > 0:
                block = turn * (tile // LANES) + first // LANES
                yield start, self._kernel.place(n, h, column, block, min(lanes, LANES))

    def _total(self, acc: Buffer, at: Any, first: Expr, start: int) -> Expr:
        """Return the sums of the channels from `start` of a tile on.

        Of `NIBBLE_LANES` bytes, the even ones are the lower `LANES` channels. A unit has the sums
        of pairs, then those of odd bytes: the even ones are ``pairs - 256 * odds``, modulo 2**16.
        """
        half, unit = self._tiling.size // 2, self._tiling.unit
        offset = start % unit
        begin = start - offset + offset // NIBBLE_LANES * LANES

        def lanes(begin: int) -> Expr:
            vector, inner = divmod(begin, half)
            ramps = [T.Ramp(first + (vector + i) * half, 1, half) for i in range(-(-LANES // half))]
            parts = [acc[tuple([*at, ramp])] for ramp in ramps]
            if half == LANES:
                return parts[0]
            return T.Shuffle(parts, [T.int32(inner + i) for i in range(LANES)])

        count = lanes(begin + unit // 2)
        if offset // LANES % 2 == 0:
            count = lanes(begin) - (count << T.Broadcast(T.uint16(8), LANES))
        return T.Cast(I32, count)
