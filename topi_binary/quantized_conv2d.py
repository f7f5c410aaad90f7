"""Float convolution with bfloat16 or int8 operands, several to a word.

Like `float_conv2d`, a register tile of output columns times vectors of output channels, but the
reduction goes over words of taps that lie side by side (`quantized_data`): one instruction
multiplies the two or four operands of each lane and adds them up. Where the machine has no such
instruction, words are single float32 numbers of the same values (`quantization`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.topi_binary import quantization
from bnncc.topi_binary.emit import (
    Expr,
    Kernel,
    Register,
    bind,
    f32,
    fmuladd,
    load,
    loop,
    splat,
)
from bnncc.topi_binary.layout import LANES
from bnncc.topi_binary.quantized_data import Taps
from bnncc.topi_binary.rows import Line, Rows
from bnncc.topi_binary.spec import Conv2d
from bnncc.topi_binary.window import Segment, segments

DOT_BFLOAT16 = f"""
declare <{LANES} x float> @llvm.x86.avx512bf16.dpbf16ps.512(
    <{LANES} x float>, <{2 * LANES} x bfloat>, <{2 * LANES} x bfloat>)
define linkonce_odr hidden <{LANES} x float> @bnncc_dot_bfloat16(
    <{LANES} x float> %sum, <{LANES} x i32> %data, <{LANES} x i32> %weight) alwaysinline nounwind {{
  %d = bitcast <{LANES} x i32> %data to <{2 * LANES} x bfloat>
  %w = bitcast <{LANES} x i32> %weight to <{2 * LANES} x bfloat>
  %r = call <{LANES} x float> @llvm.x86.avx512bf16.dpbf16ps.512(
      <{LANES} x float> %sum, <{2 * LANES} x bfloat> %d, <{2 * LANES} x bfloat> %w)
  ret <{LANES} x float> %r
}}
"""
"""The instruction as a function: TVM changes vectors of bfloat16 before LLVM sees them."""


@dataclass(frozen=True)
class Tile:
    """How a quantised convolution is cut.

    Attributes
    ----------
    columns : int, default 1
        Output columns in a register tile.
    vectors : int, default 1
        Vectors of output channels in a register tile.
    chunks : int, default 1
        Pieces of each image.
    parallel : bool, default False
        Whether images and their pieces are divided among threads.
    """

    columns: int = 1
    vectors: int = 1
    chunks: int = 1
    parallel: bool = False


def conv2d(spec: Conv2d, tile: Tile | None = None) -> tirx.PrimFunc:
    """Define a quantised convolution with its epilogue.

    Parameters
    ----------
    spec : Conv2d
        What it computes; its `operands` are not float32.
    tile : Tile, optional
        How it is cut; one vector at a time if not given.

    Returns
    -------
    tirx.PrimFunc
        What `float_conv2d.conv2d` computes, of rounded data and weights.
    """
    with Kernel(spec) as kernel:
        if spec.packed == quantization.PACKED["bfloat16"]:
            imported = T.attr(tirx.IntImm("int32", 0), "pragma_import_llvm", DOT_BFLOAT16)
        else:
            imported = nullcontext()
        with imported:
            _Conv(kernel, spec, tile or Tile()).write()
    return kernel.func


class _Conv:
    def __init__(self, kernel: Kernel, spec: Conv2d, tile: Tile) -> None:
        self.spec, self.tile = spec, tile
        self.weight = kernel.inputs[1]
        unit = spec.pool.strides[1] if spec.pool is not None else 1
        self.rows = Rows(kernel, spec, chunks=tile.chunks, unit=unit, parallel=tile.parallel)
        self.rows.declare(tile.vectors)
        self.taps = Taps(spec, kernel.inputs[0])
        self.whole = spec.packed == quantization.PACKED["int8"]
        self.terms = quantization.words(spec)
        self.per_block = quantization.rows_of_weight(spec) * LANES
        # Padding is among the data, so all columns are alike.
        _, left, _, right = spec.pads
        wide = replace(spec.unpooled, width=spec.width + left + right, pads=(0, 0, 0, 0))
        self.segments = segments(wide, tile.columns, unit)

    def write(self) -> None:
        """Write the loops over rows, blocks of channels and tiles."""
        with self.rows.strips(lambda: self.taps.begin(self.rows.n)) as strip:
            self.taps.fill(strip)
            for count, first, lanes in self._blocks():
                with loop(count) as group:
                    block = bind(group * len(lanes) + first)
                    lines = [
                        Line(strip.n, strip.row, bind(block + v), valid, v)
                        for v, valid in enumerate(lanes)
                    ]
                    self.rows.begin()
                    for segment in self.segments:
                        with loop(segment.tiles) as number:
                            start = bind(number * segment.width + segment.start)
                            self._tile(lines, segment, start)
                    for line in lines:
                        self.rows.end(line)

    def _blocks(self) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        full, tail = divmod(self.spec.out_channels, LANES)
        whole, rest = divmod(full, self.tile.vectors)
        if whole:
            yield whole, 0, (LANES,) * self.tile.vectors
        if rest or tail:
            yield 1, whole * self.tile.vectors, (LANES,) * rest + (tail,) * bool(tail)

    def _tile(self, lines: list[Line], segment: Segment, start: Expr) -> None:
        columns, vectors = range(segment.width), range(len(lines))
        bases = [bind(line.block * self.per_block) for line in lines]
        dtype = "int32" if self.whole else "float32"
        sums = [[Register(dtype) for _ in vectors] for _ in columns]
        for v in vectors:
            first = self._start(bases[v])
            for column in columns:
                sums[column][v].set(first)
        skipped = LANES if self.whole else 0
        with loop(self.terms) as term:
            weights = [load(self.weight, [base + (skipped + term * LANES)]) for base in bases]
            for column in columns:
                word = self.taps.word(start + column, term)
                for v in vectors:
                    total = sums[column][v]
                    total.set(self._dot(total.value, word, weights[v]))
        for v, line in enumerate(lines):
            self.rows.put(line, start, [self._finished(sums[c][v].value) for c in columns])

    def _start(self, base: Expr) -> Expr:
        if not self.whole:
            return f32(0.0)
        return T.reinterpret(f"int32x{LANES}", load(self.weight, [base]))

    def _dot(self, total: Expr, data: Expr, weight: Expr) -> Expr:
        if self.whole:
            bytes_of = [T.reinterpret(f"int8x{4 * LANES}", word) for word in (data, weight)]
            name = "llvm.x86.avx512.vpdpbusd.512"
            return T.call_llvm_pure_intrin(f"int32x{LANES}", name, total, *bytes_of)
        if self.spec.packed == 1:
            return fmuladd(data, weight, total)
        return T.call_pure_extern(f"float32x{LANES}", "bnncc_dot_bfloat16", total, data, weight)

    def _finished(self, total: Expr) -> Any:
        value = T.Cast(f"float32x{LANES}", total) if self.whole else total
        return value if self.taps.scale is None else value * splat(self.taps.scale)
