"""Few-bit convolution and dense layer: a register tile of output columns times channel vectors.

One kernel for all methods of `few_bit_data`: a word of data, planes of bits or several numbers,
meets a vector of weight words of `LANES` output channels, and their product is added to an int32
(or float32) accumulator. Planes take turns from the highest significance down: before each lower
one the accumulators double (Horner's rule), so every product costs what a binary one does. Taps
outside the image are skipped; what they count is among the start values.

The blocks are those of `channel_tiles`. For planes, those of the sums of a tile lie inside of
``out_i``, one for each pair of planes, with ``zero_i`` and ``double_i`` that set and double sums.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from tvm.tirx.script import builder as T

from bnncc.schedules.intrin import TensorPair, Window
from bnncc.schedules.intrin_portable import (
    AND_POPCOUNT,
    DOT_ADD,
    MULTIPLY_ADD,
    MULTIPLY_ADD_LANES,
    XOR_POPCOUNT,
)
from bnncc.schedules.templates.channel_tiles import Pixel, Product, Range, groups, named, whole
from bnncc.schedules.templates.epilogue import emit, views
from bnncc.schedules.templates.kernel import Expr, const, load
from bnncc.schedules.templates.window import segments
from bnncc.topi_binary import few_bit_data
from bnncc.topi_binary.definitions.place import Place
from bnncc.topi_binary.definitions.taps import flattened
from bnncc.topi_binary.layout import LANES, blocks
from bnncc.topi_binary.signature import Operator, aliased
from bnncc.topi_binary.spec import FewBitConv2d

UNROLLED_PAIRS = 4
"""Pairs of planes that are written one after another; more are a loop, for the code's sake."""

NUMBERS = {"bytes": "uint8", "pairs": "int16"}
"""Type of a level, in forms with several in a word."""


class Kernel:
    """A few-bit convolution with its epilogue.

    ``out[n, y, x, o] = epilogue(start + sum k[n, y + i, x + j, c] * q[o, i, j, c])``.

    Parameters
    ----------
    spec : FewBitConv2d
        What it computes.
    columns, vectors : int
        Output columns, and vectors of output channels, of a tile.

    Attributes
    ----------
    func : PrimFunc
        Not scheduled.
    ranges : Names
        What the output is cut into.
    pairs : dict of str to dict of str to TensorPair
        By range: its sums by the ends of their names, and what a product is.
    """

    def __init__(self, spec: FewBitConv2d, columns: int, vectors: int) -> None:
        with Operator(spec) as kernel:
            flat = flattened(spec)
            if flat is not spec:
                kernel.reshape(flat)
            self.spec = spec = flat
            count = spec.data_tensors
            self.data, (self.weight, *rest) = kernel.inputs[:count], kernel.inputs[count:]
            self.start = rest.pop(0) if spec.starts else None
            self.params = rest
            self.words = few_bit_data.group_words(spec)
            self.planes = few_bit_data.weight_planes(spec)
            self.per_block = self.planes * spec.kernel[0] * spec.kernel[1] * self.words * LANES
            per_group = spec.out_channels // spec.groups // LANES
            vectors = min(vectors, blocks(spec.out_channels))
            while spec.groups > 1 and per_group and per_group % vectors:
                vectors -= 1
            self.ranges = named(groups(spec.out_channels, vectors), segments(spec, columns))
            self.pairs: dict[str, dict[str, TensorPair]] = {}
            self._write(kernel)
        self.func = kernel.func

    def _write(self, kernel: Operator) -> None:
        spec = self.spec
        with T.sblock("root"):
            T.reads()
            T.writes()
            if spec.method in NUMBERS:
                dtype, per_word = NUMBERS[spec.method], few_bit_data.PER_WORD[spec.form]
                *outer, words = self.data[0].shape
                self.data = [aliased(self.data[0], [*outer, words * per_word], dtype)]
            outputs = views(spec.steps, kernel.outputs, spec.out_channels)
            for part, mine in whole(self.ranges, kernel.n, spec.output_hw[0], outputs):
                self._range(part, mine)

    def _range(self, part: Range, outputs: list[Any]) -> None:
        self.pairs[part.name] = {}
        if self.spec.form == "planes":
            with part.each() as tile:
                acc = self._sums_of_planes(part.within(tile, part.name))
                self._finish(part, tile, acc, (), outputs)
            return
        dtype = "float32" if self.spec.method == "floats" else "int32"
        acc = self._sums(part, self.data[0], 0, 1, dtype=dtype)
        with part.each(acc) as tile:
            self._finish(part, tile, acc, tile, outputs)

    def _sums(self, part: Range, data: Any, plane: Expr, sign: int, **more: Any) -> Any:
        """Write the sums of products of one plane of data with one of weights."""
        pair = self._pair(sign)
        self.pairs[part.name.partition("_of_")[0]][part.name] = pair
        product = partial(self._product, data, plane, pair)
        return part.sums(self.spec, self.words, product, **more)

    def _pair(self, sign: int) -> TensorPair:
        spec = self.spec
        if spec.method in NUMBERS:
            return DOT_ADD[NUMBERS[spec.method]]
        if spec.method == "floats":
            return MULTIPLY_ADD_LANES[LANES] if spec.depthwise else MULTIPLY_ADD
        return XOR_POPCOUNT if spec.method == "xor" else AND_POPCOUNT[sign]

    def _product(
        self, data: Any, plane: Expr, pair: TensorPair, pixel: Pixel, kh: Expr, kw: Expr,
        word: Expr,
    ) -> Product:  # fmt: skip
        spec = self.spec
        y = pixel.h * spec.strides[0] - spec.pads[0] + kh * spec.dilations[0]
        x = pixel.w * spec.strides[1] - spec.pads[1] + kw * spec.dilations[1]
        tap = (plane * spec.kernel[0] + kh) * spec.kernel[1] + kw
        first = pixel.block * self.per_block + (tap * self.words + word) * LANES
        if spec.depthwise:
            channel = pixel.block * LANES
        else:
            per_group = spec.out_channels // spec.groups
            group = pixel.block * LANES // per_group * self.words if spec.groups > 1 else 0
            channel = group + word
            if spec.method in NUMBERS:
                channel = channel * few_bit_data.PER_WORD[spec.form]
        place = [pixel.n, channel] if spec.rank == 2 else [pixel.n, y, x, channel]
        return Product(pair, (Window(data, *place), Window(self.weight, first)))

    def _sums_of_planes(self, part: Range) -> Any:
        """Write the products of all pairs of planes, from the highest significance down."""
        acc, count = part.allocated("int32"), len(self.data)
        columns, vectors = part.cells
        numbers = iter(range(2 * count * (self.planes + count)))

        def every(name: str, value: Any) -> None:
            end = f"{part.name}_{next(numbers)}"
            with T.unroll(columns) as i, T.unroll(vectors) as j, T.sblock(f"{name}_{end}"):
                column, vector = T.axis.remap("SS", [i, j])
                total = Window(acc, column, vector * LANES)
                T.reads(*([total.region(LANES)] if name == "double" else []))
                T.writes(total.region(LANES))
                with T.vectorized(0, LANES) as lane:
                    T.buffer_store(acc, value(total[lane]), list(total.index(lane)))

        def terms(data: Any, plane: Expr, sign: int) -> None:
            name = f"{part.name}_of_{next(numbers)}"
            self._sums(replace(part, name=name), data, plane, sign, acc=acc)

        top, last = self.planes + count - 2, self.planes - 1
        every("zero", lambda _: T.int32(0))
        if self.planes * count <= UNROLLED_PAIRS:
            for significance in range(top, -1, -1):
                if significance < top:
                    every("double", lambda total: total + total)
                for number, data in enumerate(self.data):
                    if 0 <= (plane := significance - number) <= last:
                        negative = self.spec.method == "and" and plane == last
                        terms(data, plane, -1 if negative else 1)
            return acc
        with T.serial(0, top + 1) as turn, T.sblock(f"turn_{part.name}"):
            significance = top - T.axis.spatial(top + 1, turn)
            T.reads()
            T.writes()
            every("double", lambda total: total + total)
            for number, data in enumerate(self.data):
                plane = significance - number
                if self.spec.method == "xor":
                    with T.If(T.And(plane >= 0, plane <= last)), T.Then():
                        terms(data, plane, 1)
                    continue
                with T.If(plane == last), T.Then():
                    terms(data, last, -1)
                if last:
                    with T.If(T.And(plane >= 0, plane < last)), T.Then():
                        terms(data, plane, 1)
        return acc

    def _finish(
        self, part: Range, tile: Any, acc: Any, place: tuple[Expr, ...], outputs: list[Any]
    ) -> None:
        """Write the epilogue of one tile, whose sums are at `place`."""
        spec = self.spec
        rows, columns = (few_bit_data.classes(spec, axis) for axis in (0, 1))
        size = blocks(spec.out_channels) * LANES
        pixel = part.pixel(tile)
        above = const(0)
        if self.start is not None:
            for first, _ in rows[1:]:
                above = above + T.Cast("int64", pixel.h >= first)
        for vector, valid in enumerate(part.group.lanes):
            number = pixel.block + vector
            for column in range(part.segment.width):
                total = part.vector(acc, place, column, vector)
                if spec.method == "floats":
                    total = T.Cast(f"int32x{LANES}", total)
                if spec.doubled:
                    total = total + total
                if self.start is not None:
                    # All tiles of a segment have the same taps in each column.
                    left = sum(first <= part.segment.start + column for first, _ in columns) - 1
                    begin = (above * len(columns) + left) * size + number * LANES
                    begin = load(self.start, [begin])
                    total = begin - total if spec.method == "xor" else begin + total
                at = Place(
                    pixel.n, pixel.h, pixel.w + column, number, spec.out_channels, valid, spec.rank
                )
                emit(spec.steps, None, self.params, outputs, at, acc=T.Bind(total))
