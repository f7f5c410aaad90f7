"""Binary convolution by table lookup, for x86 processors that cannot count the bits of a vector.

A row of a table, chosen by a nibble of data, holds the differing bits for each nibble of weight
(`lookup_data`). A vector of weight nibbles, one byte for each output channel, picks from the row in
one instruction (``pshufb``), and one addition of bytes ends four products of every channel.

With a plane z of exact zeros, ``2 * popcount((d ^ w) & ~z) + popcount(z)`` is ``popcount((d | z) ^
w) + popcount((d & ~z) ^ w)``: the same loops, over two planes of data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from bnncc.schedules.templates import epilogue, lookup_data
from bnncc.schedules.templates.lookup_data import NIBBLES, ROW, ROW_UNIT, whole
from bnncc.schedules.templates.lookup_sums import MAX_LOOKUPS, MAX_PRODUCTS, Sums
from bnncc.schedules.templates.taps import Kernel, Piece
from bnncc.topi_binary.build import output_hw
from bnncc.topi_binary.layout import LANES, NIBBLE_LANES
from bnncc.topi_binary.spec import BinaryConv2d

Buffer = Any
Expr = Any

MIN_PIXELS = 4
"""Output pixels, or rows of a dense layer, that share the work on a call's weights."""

MIN_CHANNELS = LANES + 1
"""Output channels: fewer are half of the `NIBBLE_LANES` computed together, a draw with words."""


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
    parallel : bool, default False
        Whether threads share the rows.
    unroll : int, default 1
        Nibbles in one loop body.
    shared : bool, default False
        Whether a row of the table stays in a register for all taps of a kernel row that read the
        same pixel, with the taps unrolled; else it is loaded again for each tap.
    """

    size: int
    columns: tuple[tuple[int, int], ...]
    vectors: int
    parallel: bool = False
    unroll: int = 1
    shared: bool = False


def fits(spec: BinaryConv2d) -> bool:
    """Return whether this kernel can compute `spec`."""
    uniform = spec.groups == 1 or (spec.out_channels // spec.groups) % NIBBLE_LANES == 0
    counted = spec.taps * (1 + spec.ternary) <= MAX_PRODUCTS
    return uniform and counted and spec.kernel[1] * NIBBLES <= MAX_LOOKUPS


def pays(spec: BinaryConv2d) -> bool:
    """Return whether this kernel can compute `spec`, and is faster than counting words."""
    pixels = output_hw(spec)[0] * output_hw(spec)[1]
    if spec.rank == 2:
        pixels = spec.images
    return fits(spec) and pixels >= MIN_PIXELS and spec.out_channels >= MIN_CHANNELS


def plain(kernel: Kernel, tiling: Lookup | None = None) -> Lookup:
    """Return the smallest tiling (of the vectors of `tiling`): one column, borders apart."""
    runs: list[tuple[int, int]] = []
    inner = False
    for column in range(kernel.width):
        inside = not any(kernel.leaves(1, Piece(column, 1, 0, 1, LANES)))
        if inner and inside:
            runs[-1] = (runs[-1][0] + 1, 1)
        else:
            runs.append((1, 1))
        inner = inside
    tiling = tiling or Lookup(NIBBLE_LANES, (), 1)
    return replace(tiling, columns=tuple(runs))


Finish = Callable[[Piece, "epilogue.Place", Expr], None]
"""Writes the epilogue of one vector of accumulators."""


class Writer:
    """Writes the loops of a kernel, as they are to run.

    Parameters
    ----------
    kernel : Kernel
        The function being written.
    tiling : Lookup
        How to cut it.
    masked : bool
        Whether there is a plane of zeros that matters.
    finish : callable
        Writes the epilogue of one vector.
    """

    def __init__(self, kernel: Kernel, tiling: Lookup, masked: bool, finish: Finish) -> None:
        self.source, self.tiling, self.finish = kernel, tiling, finish
        self.kernel = lookup_data.padded(kernel)
        self.masked = masked
        self.chunk = _chunk(kernel.spec.kernel[1], kernel.group_words)

    def write(self) -> None:
        """Write everything."""
        self.table = lookup_data.table(self.tiling.size)
        self.offsets = lookup_data.offsets(self.source, self.masked)
        size = self.tiling.size
        unit = max(size, NIBBLE_LANES)  # the fewest channels that a tile can have
        tile = self.tiling.vectors * size // unit
        full, rest = divmod(self.kernel.spec.out_channels, unit)
        main = full // tile
        if main:
            self._channels(0, main, tile * unit // size)
        if full % tile or rest:
            self._channels(main * tile * unit // size, 1, (full % tile + (rest > 0)) * unit // size)

    def _channels(self, first: int, count: int, tile: int) -> None:
        """Write the loops of `count` tiles of `tile` vectors of channels from vector `first`."""
        kernel, lanes = self.kernel, tile * self.tiling.size
        height, width, words = kernel.reduction
        slots = count if self.tiling.parallel else 1
        split = T.sblock_alloc_buffer((slots, height * width * words * NIBBLES, lanes), "uint8")
        IRBuilder.name("split", split)
        counts = None
        if kernel.spec.mode == "and":
            counts = T.sblock_alloc_buffer((slots, lanes), "int32")
            IRBuilder.name("counts", counts)

        def prepare(o: Expr, slot: Expr) -> None:
            lookup_data.split(
                self.source, split, slot, (o * tile + first) * self.tiling.size, lanes
            )
            if counts is not None:
                self._count_weights(split, counts, slot, tile)

        def row(n: Expr, h: Expr, o: Expr, slot: Expr) -> None:
            start = 0
            for extent, columns in self.tiling.columns:
                piece = Piece(start, extent, 0, 1, LANES)
                with T.serial(0, extent // columns) as w:
                    column = w * columns + start if extent > columns else start
                    at = (n, h, column, (o * tile + first) * self.tiling.size // LANES)
                    self._tile(piece, at, columns, tile, split, counts, slot)
                start += extent

        if not self.tiling.parallel:
            with T.serial(0, count) as loop:
                o = loop if count > 1 else T.int32(0)
                prepare(o, T.int32(0))
                with T.grid(kernel.n, kernel.height) as (n, h):
                    row(n, h, o, T.int32(0))
            return
        with T.parallel(0, count) as o:
            prepare(o, o)
        # Few rows are still divided evenly, while few threads write to the same words.
        with T.parallel(0, kernel.n * kernel.height * count) as flat:
            o = T.Bind(flat % count) if count > 1 else T.int32(0)
            both = T.Bind(flat // count)
            row(both // kernel.height, both % kernel.height, o, o)

    def _weight(self, split: Buffer, slot: Expr, row: Expr, vector: int) -> Expr:
        size = self.tiling.size
        return T.Bind(split[slot, row, T.Ramp(vector * size, 1, size)])

    def _count_weights(self, split: Buffer, counts: Buffer, slot: Expr, tile: int) -> None:
        """Count the bits of each channel's weights: what they differ in from data 0."""
        size = self.tiling.size
        step = NIBBLES
        with T.sblock("weights"):
            T.reads(whole(split), whole(self.table))
            T.writes(whole(counts))
            sums = Sums.make(size, 1, tile)
            sums.start()
            with T.serial(0, int(split.shape[1]) // step) as part:
                sums.clear()
                with T.serial(0, step) as nibble:
                    for o in range(tile):
                        weight = self._weight(split, slot, part * step + nibble, o)
                        sums.add(0, o, self.table[T.Ramp(0, 1, size)], weight)
                sums.widen()
            for block in range(tile * size // LANES):
                lanes = T.Ramp(block * LANES, 1, LANES)
                T.buffer_store(counts, sums.total(0, block), [slot, lanes])

    def _tile(
        self,
        piece: Piece,
        at: tuple[Expr, Expr, Expr, Expr],
        columns: int,
        tile: int,
        split: Buffer,
        counts: Buffer | None,
        slot: Expr,
    ) -> None:
        """Write one register tile: its counts, then its epilogue."""
        kernel, spec = self.kernel, self.kernel.spec
        n, h, column, block = at
        fixed = piece.columns == columns
        with T.sblock("tile"):
            T.reads(whole(split), whole(self.table), whole(self.offsets))
            T.writes()
            sums = Sums.make(self.tiling.size, columns, tile)
            sums.start()
            with T.serial(0, 1 + self.masked) as plane, T.serial(0, spec.kernel[0]) as kh:

                def one_row() -> None:
                    with T.serial(0, kernel.group_words // self.chunk) as part:
                        sums.clear()
                        tap = (plane, n, h, column, block, kh, part)
                        taps = range(spec.kernel[1])
                        if not fixed or not any(kernel.leaves(1, piece)):
                            inside = {kw: list(range(columns)) for kw in taps}
                        else:
                            inside = {kw: self._inside(piece, kw) for kw in taps}
                        if self.tiling.shared:
                            self._taps(sums, inside, tap, split, slot)
                        elif all(len(c) == columns for c in inside.values()):
                            with T.serial(0, spec.kernel[1]) as kw:
                                self._taps(sums, {kw: inside[0]}, tap, split, slot)
                        else:
                            for kw in taps:
                                self._taps(sums, {kw: inside[kw]}, tap, split, slot)
                        sums.widen()

                test = kernel.inside(0, h, kh, piece)
                if test is None:
                    one_row()
                else:
                    with T.If(test), T.Then():
                        one_row()
            for c in range(columns):
                for b in range(tile * self.tiling.size // LANES):
                    self._finish(sums, piece, (n, h, column + c, block + b), c, b, counts, slot)

    def _inside(self, piece: Piece, kw: int) -> list[int]:
        """Return the columns of `piece` whose tap `kw` is inside the image."""
        width = self.kernel.spec.width
        places = [self.kernel.position(1, piece.column + c, kw) for c in range(piece.columns)]
        return [c for c, place in enumerate(places) if 0 <= place < width]

    def _taps(
        self,
        sums: Sums,
        inside: Mapping[Expr, Sequence[int]],
        tap: tuple[Any, ...],
        split: Buffer,
        slot: Expr,
    ) -> None:
        """Write the lookups of some taps of a kernel row: all words of a part.

        `inside` names them, each with the columns for which it is inside the image.
        """
        kernel, spec = self.kernel, self.kernel.spec
        plane, n, h, column, block, kh, part = tap
        pixels: dict[Any, list[tuple[int, Expr]]] = {}
        for kw, columns in inside.items():
            for c in columns:
                alone = (c, 0) if len(inside) == 1 else c * spec.strides[1] + kw * spec.dilations[1]
                pixels.setdefault(alone, []).append((c, kw))
        if not pixels:
            return
        depth = spec.groups * kernel.group_words * NIBBLES
        word = kernel.word(Piece(0, 1, 0, 1, LANES), block, 0, part * self.chunk)
        line = h if spec.rank == 2 else kernel.position(0, h, kh)
        unroll = self.tiling.unroll
        with T.serial(0, self.chunk * NIBBLES // unroll) as step, T.unroll(0, unroll) as one:
            nibble = step * unroll + one
            weights = {}
            for kw, columns in inside.items():
                row = (kh * spec.kernel[1] + kw) * kernel.group_words + part * self.chunk
                if columns:
                    weights[kw] = [
                        self._weight(split, slot, row * NIBBLES + nibble, o)
                        for o in range(sums.vectors)
                    ]
            for readers in pixels.values():
                c, kw = readers[0]
                position = column + c
                if spec.rank == 4:
                    position = kernel.position(1, position, kw)
                offset = self.offsets[plane, n, line, position * depth + word * NIBBLES + nibble]
                first = T.Cast("int32", offset) * (ROW // ROW_UNIT)
                found = T.Bind(self.table[T.Ramp(first, 1, self.tiling.size)])
                for c, kw in readers:
                    for o, weight in enumerate(weights[kw]):
                        sums.add(c, o, found, weight)

    def _finish(
        self,
        sums: Sums,
        piece: Piece,
        at: tuple[Expr, Expr, Expr, Expr],
        column: int,
        block: int,
        counts: Buffer | None,
        slot: Expr,
    ) -> None:
        kernel, spec = self.kernel, self.kernel.spec
        n, h, w, o = at
        number = getattr(T.int32(0) + o, "value", None)
        lanes = LANES if number is None else min(LANES, spec.out_channels - number * LANES)
        if lanes <= 0:
            return
        raw = sums.total(column, block)
        raw = raw + T.Broadcast(kernel.share(h, w, piece, self.masked), LANES)
        if counts is not None:
            raw = raw - counts[slot, T.Ramp(block * LANES, 1, LANES)]
        place = kernel.place(n, h, w, o, lanes)
        self.finish(piece, place, T.Bind(raw))


def _chunk(taps: int, words: int) -> int:
    """Return how many words, of each of a row's `taps`, can be summed in bytes."""
    fitting = [
        c for c in range(1, words + 1) if words % c == 0 and taps * c * NIBBLES <= MAX_LOOKUPS
    ]
    return max(fitting, default=0)
