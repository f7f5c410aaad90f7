"""Float convolution with bfloat16 or int8 operands, several to a word.

Like `float_conv2d`, a register tile of output columns times vectors of output channels, but the
reduction goes over words of taps that lie side by side (`quantized_data`): one instruction
multiplies the two or four operands of each lane and adds them up. Where the machine has no such
instruction, words are single float32 numbers of the same values (`quantization`).

Why a template: rows that are pooled are computed by turns (`line_buffer` says what that is worth),
and so they are rounded by turns, into a ring. `definitions.conv2d` is what tests compare. Kernels
without pooling are the same but for what takes their rows. Rounding the whole image first, as a
block of the definition would, gives them 0.98 to 1.02 of the speed, 0.87 where others use the
caches: a rule for these alone would be a second form of this kernel, and no faster.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tvm.tirx.script import builder as T

from bnncc.schedules.intrin import Window
from bnncc.schedules.intrin_portable import DOT_ADD, MULTIPLY_ADD
from bnncc.schedules.intrin_x86 import DOT_ADD_BFLOAT16
from bnncc.schedules.templates.channel_tiles import Pixel, Product, Range, groups, named
from bnncc.schedules.templates.kernel import Expr, splat
from bnncc.schedules.templates.line_buffer import Rows
from bnncc.schedules.templates.quantized_data import Taps
from bnncc.schedules.templates.window import segments
from bnncc.topi_binary import quantization
from bnncc.topi_binary.layout import LANES
from bnncc.topi_binary.signature import Operator
from bnncc.topi_binary.spec import Conv2d

PAIRS = {1: MULTIPLY_ADD, 2: DOT_ADD_BFLOAT16, 4: DOT_ADD["uint8"]}
"""What a product is, by how many operands share a word."""


class Kernel:
    """A quantised convolution with its epilogue: that of `float_conv2d`, of rounded operands.

    Parameters
    ----------
    spec : Conv2d
        What it computes; its `operands` are not float32.
    columns, vectors : int
        Output columns, and vectors of output channels, of a tile.
    chunks : int
        Pieces of each image.
    parallel : bool
        Whether images and their pieces are divided among threads.

    Attributes
    ----------
    func : PrimFunc
        Not scheduled.
    ranges : Names
        What the output is cut into.
    rows : Rows
        Whose pooling is to be scheduled.
    pair : TensorPair
        What a product is.
    """

    def __init__(
        self, spec: Conv2d, columns: int, vectors: int, chunks: int, parallel: bool
    ) -> None:
        with Operator(spec) as kernel:
            self.spec, self.weight = spec, kernel.inputs[1]
            self.rows = Rows(kernel, spec, chunks=chunks, parallel=parallel)
            self.rows.declare(vectors)
            self.taps = Taps(spec, kernel.inputs[0])
            self.pair = PAIRS[spec.packed]
            self.whole = spec.packed == quantization.PACKED["int8"]
            self.per_block = quantization.rows_of_weight(spec) * LANES
            # Padding is among the data, so all columns are alike.
            _, left, _, right = spec.pads
            wide = replace(spec.unpooled, width=spec.width + left + right, pads=(0, 0, 0, 0))
            columns_of = segments(wide, columns, self.rows.unit)
            self.ranges = named(groups(spec.out_channels, vectors), columns_of)
            with T.sblock("root"):
                T.reads()
                T.writes()
                with self.rows.strips(lambda: self.taps.begin(self.rows.n)) as strip:
                    self.taps.fill(strip)
                    self.rows.each(strip, self.ranges, self._range)
        self.func = kernel.func

    def _range(self, part: Range) -> None:
        terms, dtype = quantization.words(self.spec), "int32" if self.whole else "float32"
        start = self._start if self.whole else None
        self.rows.take(part, part.sums(None, terms, self._product, dtype, start), self._finished)

    def _start(self, pixel: Pixel, lane: Expr) -> Expr:
        return T.reinterpret("int32", self.weight[pixel.block * self.per_block + lane])

    def _product(self, pixel: Pixel, kh: Expr, kw: Expr, term: Expr) -> Product:
        first = pixel.block * self.per_block + (term + self.whole) * LANES
        data = Window(self.taps.line, self.taps.place(pixel.w, term))
        return Product(self.pair, (data, Window(self.weight, first)))

    def _finished(self, total: Expr) -> Any:
        value = T.Cast(f"float32x{LANES}", total) if self.whole else total
        return value if self.taps.scale is None else value * splat(self.taps.scale)
