"""Few-bit convolution and dense layer: a register tile of output columns times channel vectors.

One kernel for all methods of `few_bit_data`: a word of data, planes of bits or several numbers, is
broadcast against a vector of weight words of `LANES` output channels, and their product is added to
an int32 (or float32) accumulator. Planes take turns from the highest significance down: before each
lower one the accumulators double (Horner's rule), so every product costs what a binary one does.
Taps outside the image are skipped; what they count is among the start values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.schedules.intrin import imported
from bnncc.schedules.templates import few_bit_products
from bnncc.schedules.templates.epilogue import emit, views
from bnncc.schedules.templates.kernel import Expr, Register, bind, const, load, loop, loops, splat
from bnncc.schedules.templates.place import Place
from bnncc.schedules.templates.window import Segment, row_taps, segments
from bnncc.topi_binary import few_bit_data
from bnncc.topi_binary.layout import LANES, blocks
from bnncc.topi_binary.signature import Operator
from bnncc.topi_binary.spec import FewBitConv2d

UNROLLED_PAIRS = 4
"""Pairs of planes that are written one after another; more are a loop, for the code's sake."""


@dataclass(frozen=True)
class Tile:
    """How a few-bit convolution is cut.

    Attributes
    ----------
    columns : int, default 1
        Output columns in a register tile.
    vectors : int, default 1
        Vectors of output channels in a register tile.
    rows_outside : bool, default False
        Whether rows run outside the blocks of output channels: for images larger than weights.
    parallel : bool, default False
        Whether rows and channel blocks are divided among threads.
    machine : str, default ""
        Whose instructions multiply several numbers, see `few_bit_products`.
    """

    columns: int = 1
    vectors: int = 1
    rows_outside: bool = False
    parallel: bool = False
    machine: str = ""


def conv2d(spec: FewBitConv2d, tile: Tile | None = None) -> tirx.PrimFunc:
    """Define a few-bit convolution with its epilogue.

    Parameters
    ----------
    spec : FewBitConv2d
        What it computes.
    tile : Tile, optional
        How it is cut; one vector at a time if not given.

    Returns
    -------
    tirx.PrimFunc
        ``out[n, y, x, o] = epilogue(start + sum k[n, y + i, x + j, c] * q[o, i, j, c])``.
    """
    tile = tile or Tile()
    with Operator(spec) as kernel:
        flat = flattened(spec)
        if flat is not spec:
            kernel.reshape(flat)
        with imported(few_bit_products.imported(spec.method, tile.machine)):
            _Conv(kernel, flat, tile).write()
    return kernel.func


def flattened(spec: FewBitConv2d) -> FewBitConv2d:
    """Return `spec` with its pixels (or rows) in one long row, if its kernel looks at one pixel."""
    if spec.rank == 2:
        if not isinstance(spec.n, int) or any(step.op == "gate" for step in spec.steps):
            return spec
        steps = tuple(replace(step, layout="NHWC") for step in spec.steps)
        return replace(spec, n=1, width=spec.n, rank=4, steps=steps)
    pointwise = spec.kernel == (1, 1) and spec.strides == (1, 1) and not any(spec.pads)
    if not pointwise or any(s.layout == "NCHW" for s in spec.steps):
        return spec
    return replace(spec, height=1, width=spec.height * spec.width)


class _Conv:
    """Writes one convolution into an open kernel."""

    def __init__(self, kernel: Operator, spec: FewBitConv2d, tile: Tile) -> None:
        self.kernel, self.spec, self.tile = kernel, spec, tile
        count = spec.data_tensors
        self.data, (self.weight, *rest) = kernel.inputs[:count], kernel.inputs[count:]
        self.start = rest.pop(0) if spec.starts else None
        self.params = rest
        self.outputs = views(spec.steps, kernel.outputs, spec.out_channels)
        self.height, _ = spec.output_hw
        self.words = few_bit_data.group_words(spec)
        self.planes = few_bit_data.weight_planes(spec)
        self.per_block = self.planes * spec.kernel[0] * spec.kernel[1] * self.words * LANES
        self.dtype = "float32" if spec.method == "floats" else "int32"
        per_group = spec.out_channels // spec.groups // LANES
        limit = min(tile.vectors, blocks(spec.out_channels))
        while spec.groups > 1 and per_group and per_group % limit:
            limit -= 1
        self.vectors = limit

    def write(self) -> None:
        """Write the loops over images, rows and channel blocks, in the order of the tile."""
        for count, first, lanes in self._block_groups():
            extents: list[Any] = [self.kernel.n]
            outside = self.tile.rows_outside
            extents += [self.height, count] if outside else [count, self.height]
            with loops(extents, parallel=self.tile.parallel) as (n, one, two):
                row, group = (one, two) if outside else (two, one)
                self._row(n, row, bind(group * len(lanes) + first), lanes)

    def _block_groups(self) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        full, tail = divmod(self.spec.out_channels, LANES)
        whole, rest = divmod(full, self.vectors)
        if whole:
            yield whole, 0, (LANES,) * self.vectors
        if rest or tail:
            yield 1, whole * self.vectors, (LANES,) * rest + (tail,) * bool(tail)

    def _row(self, n: Expr, row: Expr, block: Expr, lanes: tuple[int, ...]) -> None:
        low, taps = row_taps(self.spec, row)
        above = const(0)
        if self.start is not None:
            for first, _ in few_bit_data.classes(self.spec, 0)[1:]:
                above = above + T.Cast("int64", row >= first)
        above = bind(above)
        for segment in segments(self.spec, self.tile.columns):
            with loop(segment.tiles) as number:
                start = bind(number * segment.width + segment.start)
                sums = self._sums(n, row, start, block, lanes, segment, (low, taps))
                self._finish(n, row, start, block, lanes, segment, above, sums)

    def _sums(
        self, n: Expr, row: Expr, start: Expr, block: Expr, lanes: tuple[int, ...],
        segment: Segment, rows: tuple[Expr, Expr],
    ) -> list[list[Register]]:  # fmt: skip
        """Write the sums of one tile; return them by column and vector."""
        sums = [[Register(self.dtype) for _ in lanes] for _ in range(segment.width)]
        for total in (total for column in sums for total in column):
            total.set(splat(tirx.const(0, self.dtype)))
        bases = [bind((block + v) * self.per_block) for v in range(len(lanes))]
        group = const(0)
        if self.spec.groups > 1 and not self.spec.depthwise:
            group = bind(block * LANES // (self.spec.out_channels // self.spec.groups) * self.words)

        def terms(data: Any, plane: Expr, sign: int) -> None:
            low, taps = rows
            with loop(taps) as turn:
                kh = bind(turn + low)
                y = bind(
                    row * self.spec.strides[0] - self.spec.pads[0] + kh * self.spec.dilations[0]
                )
                x = bind(start * self.spec.strides[1] - self.spec.pads[1])
                with loop(self.words) as word:
                    tap = (plane * self.spec.kernel[0] + kh) * self.spec.kernel[1]
                    for kw in range(self.spec.kernel[1]):
                        where = bind(((tap + kw) * self.words + word) * LANES)
                        at = (n, y, x, group + word)
                        self._products(data, at, kw, where, block, bases, segment, sums, sign)

        if self.spec.form != "planes":
            terms(self.data[0], const(0), 1)
            return sums
        self._by_significance(terms, sums)
        return sums

    def _by_significance(self, terms: Any, sums: list[list[Register]]) -> None:
        """Write the products of all pairs of planes, from the highest significance down."""
        top = self.planes + len(self.data) - 2
        if self.planes * len(self.data) <= UNROLLED_PAIRS:
            for significance in range(top, -1, -1):
                if significance < top:
                    self._double(sums)
                for number, data in enumerate(self.data):
                    if 0 <= (plane := significance - number) < self.planes:
                        negative = self.spec.method == "and" and plane == self.planes - 1
                        terms(data, const(plane), -1 if negative else 1)
            return
        with loop(top + 1) as turn:
            significance = bind(top - turn)
            self._double(sums)
            for number, data in enumerate(self.data):
                plane = bind(significance - number)
                if self.spec.method == "xor":
                    with T.If(T.And(plane >= 0, plane < self.planes)), T.Then():
                        terms(data, plane, 1)
                else:
                    with T.If(plane == self.planes - 1), T.Then():
                        terms(data, plane, -1)
                    if self.planes > 1:
                        with T.If(T.And(plane >= 0, plane < self.planes - 1)), T.Then():
                            terms(data, plane, 1)

    def _double(self, sums: list[list[Register]]) -> None:
        for total in (total for column in sums for total in column):
            total.set(total.value + total.value)

    def _products(
        self, data: Any, at: tuple[Expr, ...], kw: int, where: Expr, block: Expr,
        bases: list[Expr], segment: Segment, sums: list[list[Register]], sign: int,
    ) -> None:  # fmt: skip
        spec = self.spec
        n, y, x, word = at
        for vector, base in enumerate(bases):
            weight = load(self.weight, [base + where])
            for column in range(segment.width):
                if kw not in segment.taps[column]:
                    continue
                place = x + (column * spec.strides[1] + kw * spec.dilations[1])
                index = (n, word) if spec.rank == 2 else (n, y, place, word)
                total = sums[column][vector]
                if spec.depthwise:
                    datum = load(data, [n, y, place, block * LANES + vector * LANES])
                else:
                    datum = splat(data[index])
                total.set(
                    few_bit_products.add(
                        spec.method, self.tile.machine, total.value, datum, weight, sign
                    )
                )

    def _finish(
        self, n: Expr, row: Expr, start: Expr, block: Expr, lanes: tuple[int, ...],
        segment: Segment, above: Expr, sums: list[list[Register]],
    ) -> None:  # fmt: skip
        """Write the epilogue of one tile."""
        spec = self.spec
        columns = few_bit_data.classes(spec, 1)
        size = blocks(spec.out_channels) * LANES
        for vector, valid in enumerate(lanes):
            number = bind(block + vector)
            for column in range(segment.width):
                acc = sums[column][vector].value
                if self.dtype == "float32":
                    acc = T.Cast(f"int32x{LANES}", acc)
                if spec.doubled:
                    acc = acc + acc
                if self.start is not None:
                    # All tiles of a segment have the same taps in each column.
                    place = segment.start + column
                    left = sum(first <= place for first, _ in columns) - 1
                    first = (above * len(columns) + left) * size + number * LANES
                    begin = load(self.start, [first])
                    acc = begin - acc if spec.method == "xor" else begin + acc
                at = Place(
                    n, row, bind(start + column), number, spec.out_channels, valid, spec.rank
                )
                emit(spec.steps, None, self.params, self.outputs, at, acc=T.Bind(acc))
