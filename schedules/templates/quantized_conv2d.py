"""Float convolution with bfloat16, float16 or int8 operands, several per word.

Like `float_conv2d`, it has register tiles of output columns x channel vectors, but the reduction is
over words of contiguous taps (`quantized_data`): one instruction multiplies and adds the two or
four operands of each lane. Without such an instruction, words are single float32 numbers with the
same values (`quantization`).

It is a template because pooled rows are computed strip by strip (`line_buffer` gives the gain), and
so they are rounded into a ring buffer strip by strip. It is tested against `definitions.conv2d`.
Kernels without pooling differ only in what reads their rows. Rounding the whole image first, as a
schedule of the definition would, runs at 0.98 to 1.02 of the speed, and at 0.87 if other processes
use the caches; a separate rule for these would duplicate the kernel without gain.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from tvm.tirx.script import builder as T

from bnncc.schedules.intrin import TensorPair, Window
from bnncc.schedules.intrin_levels import DOT_ADD
from bnncc.schedules.intrin_portable import MULTIPLY_ADD
from bnncc.schedules.intrin_x86 import DOT_ADD_BFLOAT16
from bnncc.schedules.templates import float_conv2d
from bnncc.schedules.templates.channel_tiles import Group, Pixel, Product, Range
from bnncc.schedules.templates.kernel import Expr, splat
from bnncc.schedules.templates.line_buffer import Strip
from bnncc.schedules.templates.quantized_data import Taps
from bnncc.topi_binary import quantization
from bnncc.topi_binary.layout import LANES
from bnncc.topi_binary.spec import Conv2d

PAIRS = {1: MULTIPLY_ADD, 2: DOT_ADD_BFLOAT16, 4: DOT_ADD["uint8"]}
"""Multiply-add instruction, by operands per word."""


class Kernel(float_conv2d.Kernel):
    """A quantized convolution with its epilogue: `float_conv2d` with rounded operands."""

    def _image(self) -> Conv2d:
        spec = self.spec
        self.taps = Taps(spec, self.data)
        self.whole = spec.packed == quantization.PACKED["int8"]
        self.per_block = quantization.rows_of_weight(spec) * LANES
        # Padding is part of the data, so all columns are alike.
        _, left, _, right = spec.pads
        return replace(spec, width=spec.width + left + right, pads=(0, 0, 0, 0))

    def _begin(self) -> None:
        self.taps.begin(self.rows.n)

    def _fill(self, strip: Strip) -> None:
        self.taps.fill(strip)

    def pair(self, group: Group) -> TensorPair:
        """Return the instruction for products."""
        return PAIRS[self.spec.packed]

    def _range(self, part: Range) -> None:
        terms, dtype = quantization.words(self.spec), "int32" if self.whole else "float32"
        start = self._start if self.whole else None
        product = partial(self._product, part)
        self.rows.take(part, part.sums(None, terms, product, dtype, start), self._finished)

    def _start(self, pixel: Pixel, lane: Expr) -> Expr:
        return T.reinterpret("int32", self.weight[pixel.block * self.per_block + lane])

    def _product(self, part: Range, pixel: Pixel, kh: Expr, kw: Expr, term: Expr) -> Product:
        first = pixel.block * self.per_block + (term + self.whole) * LANES
        data = Window(self.taps.line, self.taps.place(pixel.w, term))
        return Product(self.pair(part.group), (data, Window(self.weight, first)))

    def _finished(self, total: Expr) -> Any:
        value = T.Cast(f"float32x{LANES}", total) if self.whole else total
        return value if self.taps.scale is None else value * splat(self.taps.scale)
