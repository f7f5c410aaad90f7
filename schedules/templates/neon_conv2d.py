"""Binary convolution on NEON: vectors of input channels, four output channels at a time.

A *quad* is four output channels. A vector of 16 bytes of data meets the same bytes of four
channels' weights; ``cnt`` counts the bits of each byte that differ. There are two ways to fill a
vector with data:

* order ``vectors``: the words that a kernel row takes from one output column are one run of memory
  (or, with dilation, one run for each tap), cut into vectors; the last may be partly masked;
* order ``halves``, for layers of two words or less: the same tap of two neighbouring columns, with
  the weights of the tap in both halves. The two columns are one *place*.

Blocks: ``data``, ``twice`` and ``border``, see `neon_operands`; for each range of output channels
``row``, what follows for one image, row and 16 channels. In it, for each piece of columns,
``sums``, the counts summed in bytes, ``wide``, those in 16 bits, ``acc``, the lanes of each channel
added up, and ``out``, the epilogue. All are loops over single values, or over blocks of lanes to be
tensorized; `binary_neon` schedules. Rows of which all taps are inside the image have code of their
own, without tests.

Bounds: a count is at most 8, so bytes take `MAX_STEPS` of them (31 * 8 = 248); then they are
widened. What 16 bits count is at most all bits that differ, `MAX_PRODUCTS`. With the dot product
of Armv8.2, counts are added to sums of 32 bits at once.

Padding with +1 or -1 is in the copied data and costs nothing more. Padding with zeros skips the
rows outside; columns outside are words of 0, and what they count is subtracted.

Why a template: `definitions.binary_conv2d`, which is the same word by word and what tests compare,
has no vectors that cross columns and no sums in bytes, and no primitive makes them of its words.

With a plane z of exact zeros, ``2 * popcount((d ^ w) & ~z) + popcount(z)`` is ``popcount((d | z) ^
w) + popcount((d & ~z) ^ w)``: the same loops, over two planes of data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.schedules import intrin_arm
from bnncc.schedules.intrin import TensorPair, Window
from bnncc.schedules.intrin_arm import BYTES
from bnncc.schedules.templates import epilogue
from bnncc.schedules.templates.lookup import MAX_PRODUCTS, Finish, padded, whole
from bnncc.schedules.templates.neon_operands import Border, Data, weights_of
from bnncc.schedules.templates.taps import Kernel, Piece, under
from bnncc.topi_binary import layout
from bnncc.topi_binary.definitions.blocks import buffer
from bnncc.topi_binary.layout import LANES, QUAD
from bnncc.topi_binary.signature import aliased
from bnncc.topi_binary.spec import BinaryConv2d

Buffer = Any
Expr = Any

ALL_UNROLLED = 18
"""Vectors of all kernel rows that are code without loops."""

MAX_STEPS = 31
"""Counts of at most 8 that a byte can sum."""

MIN_FILLED = 0.75
"""Fraction of a vector that data must fill: with less, counting words is as fast."""


@dataclass(frozen=True)
class Quads:
    """How the kernel is cut.

    Attributes
    ----------
    columns : tuple of tuple (width, tile)
        Pieces of the width, each a multiple of its tile; those at a border are one tile.
    arch : str, default "aarch64"
        Or ``arm``.
    dot : bool, default False
        Whether to sum with the dot product.
    """

    columns: tuple[tuple[int, int], ...]
    arch: str = "aarch64"
    dot: bool = False


def order(spec: BinaryConv2d) -> str:
    """Return the order of weights in which this kernel reads them, or "" if it does not pay."""
    per_group = spec.channels // spec.groups
    words = layout.words(per_group)
    if spec.out_channels // spec.groups % QUAD and spec.groups > 1:
        return ""
    if spec.taps * (1 + spec.ternary) > MAX_PRODUCTS:
        return ""
    pixels = spec.n if spec.rank == 2 else 2
    if words == 2 and spec.kernel[1] <= MAX_STEPS and (isinstance(pixels, int) and pixels > 1):
        return "halves"
    run = words * (spec.kernel[1] if spec.dilations[1] == 1 else 1)
    if run / (-(-run // 4) * 4) < MIN_FILLED or (spec.dilations[1] > 1 and words % 4):
        return ""
    return "vectors" if spec.dilations[1] == 1 or spec.kernel[1] <= MAX_STEPS else ""


class Steps:
    """How the sum of one output is cut, and which instructions add it up.

    Attributes
    ----------
    runs : int
        Runs of memory in a kernel row.
    full, tail : int
        Whole vectors of a run, and words of the one that is not.
    vectors : int
        All of them.
    turns : dict of str to int
        Extents of the loops over sums in bytes, if not 1: planes, rows of the kernel, parts of a
        run. With the dot product there are none.
    reduced : dict of str to int
        Extents of the loops that are one such sum: planes, rows, runs; and vectors, ``x``.
    short : bool
        Whether the sum is so short that it can be code without loops.
    counts : dict of str to TensorPair
        What counts a vector, by the name of its block: ``count``, or ``whole`` and ``tail``.
    widen, total : TensorPair
        What widens bytes (None if only `total` does), and what adds lanes.
    """

    def __init__(self, spec: BinaryConv2d, tiling: Quads, masked: bool) -> None:
        words, halves = layout.words(spec.channels // spec.groups), spec.weight_order == "halves"
        apart = spec.dilations[1] > 1 or halves
        self.runs = spec.kernel[1] if apart else 1
        self.full, self.tail = divmod(words * (1 if apart else spec.kernel[1]), 4)
        if halves:
            self.full, self.tail = 1, 0
        self.vectors = self.full + (self.tail > 0)
        planes, rows = 1 + masked, spec.kernel[0]
        # Rows of a kernel that are too many for bytes are widened one by one.
        split = self.runs * rows > MAX_STEPS
        together = self.runs * (1 if split else rows)
        part = _part(self.full, self.vectors, max(1, MAX_STEPS // together))
        turns = {"plane": planes, "kh": rows if split else 1, "turn": -(-self.vectors // part)}
        reduced = {"kh": 1 if split else rows, "run": self.runs, "x": part}
        if tiling.dot:
            turns, reduced = {}, {"plane": planes, "kh": rows, "run": self.runs, "x": self.vectors}
        self.turns = {axis: extent for axis, extent in turns.items() if extent > 1}
        self.reduced = {a: extent for a, extent in reduced.items() if extent > 1 or a == "x"}
        self.halves, self.short = halves, self.runs * rows * self.vectors <= ALL_UNROLLED
        self.count = intrin_arm.XOR_POPCOUNT[BYTES, tiling.dot]
        self.counts = {"count": self.count}
        self.ragged = self.turns.get("turn", 1) * self.reduced["x"] > self.vectors
        if self.ragged or self.tail:
            self.counts = {"whole": self.count}
        if self.tail:
            self.counts["tail"] = intrin_arm.XOR_POPCOUNT[self.tail * 4, tiling.dot]
        self.widen, kind = None, (32, 0)
        if not tiling.dot and not self.turns:
            # How often sums of bytes can be doubled.
            kind = 8, min(2, (255 // (8 * together * part)).bit_length() - 1)
        elif not tiling.dot:
            self.widen, kind = intrin_arm.WIDENING_ADD[tiling.arch], (16, 0)
        self.total = intrin_arm.TOTAL[(tiling.arch, kind[0], kind[1], halves)]


def _part(full: int, vectors: int, most: int) -> int:
    """Return how many vectors of a run are summed in bytes: equal parts, if they need not be small.

    Examples
    --------
    >>> _part(12, 12, 10), _part(18, 19, 10), _part(15, 15, 10)
    (6, 9, 8)
    """
    if vectors <= most:
        return vectors
    sizes = range(most, most // 2, -1)
    equal = (size for count in (vectors, full) for size in sizes if count % size == 0)
    return next(equal, -(-vectors // -(-vectors // most)))


class Channels(NamedTuple):
    """A range of output channels: blocks of `LANES`."""

    name: str
    first: int
    blocks: int
    quads: int
    """Of a block."""


def channels(spec: BinaryConv2d, masked: bool) -> list[Channels]:
    """Return the ranges of output channels: full blocks, then what is left."""
    full, rest = divmod(spec.out_channels, LANES)
    prefix = "zero_" if masked else ""
    ranges = (0, full, LANES // QUAD), (full, 1 if rest else 0, -(-rest // QUAD))
    return [Channels(f"{prefix}{i}", *r) for i, r in enumerate(ranges) if r[1]]


def inner_rows(spec: BinaryConv2d) -> tuple[range, list[str]]:
    """Return the output rows of which all taps are inside the image, or are not skipped.

    And which rows there are: these, ``inner``, which need no tests, and others, ``outer``.
    """
    height = spec.output_hw[0] if spec.rank == 4 else 1
    if spec.rank == 2 or spec.mode == "and" or spec.pad_value:
        return range(height), ["inner"]
    reach = (spec.kernel[0] - 1) * spec.dilations[0]
    first = [h * spec.strides[0] - spec.pads[0] for h in range(height)]
    rows = [h for h in range(height) if first[h] >= 0 and first[h] + reach < spec.height]
    inner = range(rows[0], rows[-1] + 1) if rows else range(0)
    return inner, ["inner"] * bool(inner) + ["outer"] * (len(inner) < height)


class Writer:
    """Writes the blocks of a kernel.

    Parameters
    ----------
    kernel : Kernel
        The function being written.
    tiling : Quads
        How to cut it.
    masked : bool
        Whether there is a plane of zeros that matters.
    views : sequence of Buffer
        The outputs, as `epilogue.views` gives them.
    finish : callable
        Writes the epilogue of one vector.
    """

    def __init__(
        self, kernel: Kernel, tiling: Quads, masked: bool, views: Sequence[Buffer], finish: Finish
    ) -> None:
        self.kernel, self.tiling, self.masked = padded(kernel), tiling, masked
        self._source = kernel
        self._views, self._finish = views, finish
        spec = self.spec = self.kernel.spec
        self.sides = 1 + (spec.weight_order == "halves")
        self.steps = Steps(spec, tiling, masked)
        # What a tap outside the image counts if padding is 0; halves are `Kernel.share`'s.
        per_group = self.kernel.group_channels
        self.share = per_group if masked else 0 if per_group % 2 else per_group // 2
        # Of one type: threads share the product of these extents, and TVM follows no casts.
        self._extent = T.int64 if isinstance(kernel.n, tirx.Var) else int

    def write(self) -> None:
        """Write everything."""
        kernel, (inner, kinds) = self.kernel, inner_rows(self.spec)
        self._data = Data(self._source, kernel, self.masked)
        self._weights = weights_of(kernel, self.steps.runs, self.steps.vectors)
        self._border: Border | None = None
        if self.spec.mode == "and" or (kernel.pads_zeros and any(kernel.leaves(1, kernel.whole))):
            tables = kernel, self._weights, self.tiling.arch
            self._border = Border(*tables, self.share, 1 + self.masked)
        for part in channels(self.spec, self.masked):
            extents = (self._extent(part.blocks), kernel.n, self._extent(kernel.height))
            with T.grid(*extents) as loops, self._block(f"row_{part.name}"):
                o, n, h = T.axis.remap("SSS", list(loops))
                at = n, h, o + part.first if part.blocks > 1 else T.int32(part.first)
                tests = {}
                if len(kinds) > 1:
                    inside = T.And(h >= inner[0], h <= inner[-1])
                    tests = {"inner": inside, "outer": T.Not(inside)}
                for kind in kinds:
                    with under(tests.get(kind)), self._block(f"{kind}_{part.name}"):
                        self._row(part, at, kind == "inner")

    @contextmanager
    def _block(self, name: str) -> Iterator[None]:
        """Open a block around all of a row, or what runs for some rows."""
        tables = [self._border.table] if self._border is not None else []
        views = self._own_views()
        with T.sblock(name):
            read = [self._weights, self._data.bytes, *tables, *self.kernel.params]
            T.reads(*(whole(b) for b in read))
            T.writes(*(whole(b) for b in views))
            yield

    def _own_views(self) -> list[Buffer]:
        # Of each block its own: TVM lets no two write to the same tensor where threads share work.
        return [aliased(b) for b in self._views]

    def _row(self, part: Channels, at: tuple[Expr, Expr, Expr], inner: bool) -> None:
        """Write the blocks of one image, row and block of channels."""
        start = 0
        for i, (extent, _) in enumerate(self.tiling.columns):
            piece = Piece(start, extent, 0, 1, LANES)
            name = f"{part.name}_{'inner' if inner else 'outer'}_{i}"
            sums = self._sums(name, part, piece, at, inner)
            self._out(name, part, piece, at, inner, self._totals(name, part, sums))
            start += extent

    def _sums(
        self, name: str, part: Channels, piece: Piece, at: tuple[Expr, Expr, Expr], inner: bool
    ) -> Buffer:
        """Count the bits that differ: of each place, turn, quad, channel and byte."""
        steps, pair, (n, h, block) = self.steps, self.steps.count, at
        extents = {"w": -(-piece.columns // self.sides), **steps.turns, "q": part.quads}
        shape = (*list(extents.values())[:-1], part.quads * pair.lanes)
        sums = buffer(f"sums_{name}", shape, pair.dtype)
        extents |= steps.reduced
        with T.grid(*extents.values()) as loops, T.sblock(f"sums_{name}"):
            kinds = "".join("R" if axis in steps.reduced else "S" for axis in extents)
            i = dict(zip(extents, T.axis.remap(kinds, list(loops)), strict=True))
            total = Window(sums, i["w"], *(i[axis] for axis in steps.turns), i["q"] * pair.lanes)
            plane, kh, run = (i.get(axis, T.int32(0)) for axis in ("plane", "kh", "run"))
            x = i["x"] + (i["turn"] * steps.reduced["x"] if "turn" in i else 0)
            quad = block * (LANES // QUAD) + i["q"]
            column = piece.column + i["w"] * self.sides
            start = self._data.vector(plane, n, self._group(quad), h, kh, column, run)
            data = Window(self._data.bytes, start + x * BYTES)
            weight = Window(self._weights, quad, kh, run, x, 0)
            T.reads(data.region(BYTES), weight.region(QUAD * BYTES))
            T.writes(total.region(pair.lanes))
            with T.init():
                _clear(total, pair)
            test = None if inner else self.kernel.inside(0, h, kh, piece)
            with under(test):
                self._vector(name, x, (data, weight, total))
        return sums

    def _vector(self, name: str, x: Expr, operands: tuple[Window, Window, Window]) -> None:
        """Count vector `x` of a run, if it exists; perhaps it is not whole."""
        tests = {"whole": x < self.steps.full, "tail": x == self.steps.full}
        data, weight, total = operands
        for kind, pair in self.steps.counts.items():
            # A block around each: TVM knows no two that write to the same tensor.
            with under(tests.get(kind)), T.sblock(f"only_{kind}_{name}"):
                written = total.region(pair.lanes)
                T.reads(written, data.region(BYTES), weight.region(QUAD * BYTES))
                T.writes(written)
                pair.loop(f"{kind}_{name}", *operands)

    def _group(self, quad: Expr) -> Expr:
        if self.spec.groups == 1:
            return T.int32(0)
        return quad * QUAD // (self.spec.out_channels // self.spec.groups)

    def _totals(self, name: str, part: Channels, sums: Buffer) -> Buffer:
        """Add the lanes of each place, quad, side and channel; before that, perhaps widen them."""
        steps, places, turns = self.steps, sums.shape[0], self.steps.turns.values()
        size = steps.total.operands[0].shape[0]
        if steps.widen is not None:
            narrow, count = sums, steps.count.lanes
            sums = buffer(f"wide_{name}", (places, part.quads * size), "uint16")
            with T.grid(places, part.quads, *turns) as loops, T.sblock(f"wide_{name}"):
                w, q, *turn = T.axis.remap("SS" + "R" * len(turns), list(loops))
                made = Window(sums, w, q * size)
                T.reads(Window(narrow, w, *turn, q * count).region(count))
                T.writes(made.region(size))
                with T.init():
                    _clear(made, steps.widen)
                steps.widen.loop(f"widen_{name}", Window(narrow, w, *turn, q * count), made)
        acc = T.sblock_alloc_buffer(
            (places, part.quads * steps.total.lanes), "int32", scope="local"
        )
        with T.grid(places, part.quads) as loops, T.sblock(f"acc_{name}"):
            w, q = T.axis.remap("SS", list(loops))
            read = Window(sums, w, q * size)
            made = Window(acc, w, q * steps.total.lanes)
            T.reads(read.region(size))
            T.writes(made.region(steps.total.lanes))
            steps.total.loop(f"total_{name}", read, made)
        return acc

    def _out(
        self, name: str, part: Channels, piece: Piece, at: tuple[Expr, Expr, Expr], inner: bool,
        acc: Buffer,
    ) -> None:  # fmt: skip
        """Write the epilogue of the pixels of a piece, place by place."""
        spec, kernel, (n, h, block) = self.spec, self.kernel, at
        views = self._own_views()
        lanes = LANES if part.blocks > 1 else min(LANES, spec.out_channels - part.first * LANES)
        with T.serial(acc.shape[0]) as loop, T.sblock(f"out_{name}"):
            w = T.axis.spatial(acc.shape[0], loop)
            columns = [piece.column + w * self.sides + side for side in range(self.sides)]
            where = [kernel.place(n, h, column, block, lanes) for column in columns]
            regions = [epilogue.regions(spec.steps, kernel.params, views, p) for p in where]
            T.reads(acc[w, 0 : acc.shape[1]], *(one for reads, _ in regions for one in reads))
            T.writes(*(one for _, writes in regions for one in writes))
            for side, (column, place) in enumerate(zip(columns, where, strict=True)):
                last = piece.column + piece.columns
                with under(column < last if side and piece.columns % 2 else None):
                    raw = self._raw(acc, w, side, part)
                    if self._border is not None:
                        raw = self._border.subtracted(raw, piece, (column, h, block), inner)
                    if not inner and self.share:
                        tests = [kernel.inside(0, h, kh, piece) for kh in range(spec.kernel[0])]
                        left = sum((T.Cast("int32", T.Not(t)) for t in tests), T.int32(0))
                        raw = raw + T.Broadcast(left * (spec.kernel[1] * self.share), LANES)
                    self._finish(piece, place, T.Bind(raw), views)

    def _raw(self, acc: Buffer, w: Expr, side: int, part: Channels) -> Expr:
        """Return the counts of `LANES` channels, 0 of those beyond the last quad."""
        if self.sides == 1 and part.quads * QUAD == LANES:
            return acc[w, T.Ramp(0, 1, LANES)]
        starts = range(side * QUAD, part.quads * self.steps.total.lanes, self.steps.total.lanes)
        quads = [acc[w, T.Ramp(start, 1, QUAD)] for start in starts]
        zero = T.Broadcast(T.int32(0), QUAD)
        quads += [zero] * (LANES // QUAD - part.quads)
        return T.Shuffle(quads, [T.int32(i) for i in range(LANES)])


def _clear(sums: Window, pair: TensorPair) -> None:
    """Set what `pair` adds to to 0, vector by vector."""
    size = 128 // int(pair.dtype.removeprefix("uint"))
    for first in range(0, pair.lanes, size):
        with T.vectorized(0, size) as lane:
            zero = T.Cast(pair.dtype, T.int32(0))
            T.buffer_store(sums.buffer, zero, list(sums.index(first + lane)))
