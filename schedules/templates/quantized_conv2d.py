"""Float convolution with bfloat16 or int8 operands, several to a word.

Like `float_conv2d`, a register tile of output columns times vectors of output channels, but the
reduction goes over words of taps that lie side by side (`quantized_data`): one instruction
multiplies the two or four operands of each lane and adds them up. Where the machine has no such
instruction, words are single float32 numbers of the same values (`quantization`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.schedules.intrin import imported
from bnncc.schedules.intrin_portable import fused_multiply_add
from bnncc.schedules.intrin_x86 import DOT_BFLOAT16, DOT_BYTES
from bnncc.schedules.templates.kernel import Expr, Register, bind, f32, load, loop, splat
from bnncc.schedules.templates.quantized_data import Taps
from bnncc.schedules.templates.rows import Line, Rows
from bnncc.schedules.templates.window import Segment, segments
from bnncc.topi_binary import quantization
from bnncc.topi_binary.layout import LANES
from bnncc.topi_binary.signature import Operator
from bnncc.topi_binary.spec import Conv2d


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
    with Operator(spec) as kernel:
        paired = spec.packed == quantization.PACKED["bfloat16"]
        with imported(DOT_BFLOAT16.source if paired else ""):
            _Conv(kernel, spec, tile or Tile()).write()
    return kernel.func


class _Conv:
    def __init__(self, kernel: Operator, spec: Conv2d, tile: Tile) -> None:
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
            return DOT_BYTES(total, data, weight)
        if self.spec.packed == 1:
            return fused_multiply_add(data, weight, total)
        return DOT_BFLOAT16(total, data, weight)

    def _finished(self, total: Expr) -> Any:
        value = T.Cast(f"float32x{LANES}", total) if self.whole else total
        return value if self.taps.scale is None else value * splat(self.taps.scale)
