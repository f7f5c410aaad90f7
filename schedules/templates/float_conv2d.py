"""Float convolution and dense layer: a register tile of output columns times channel vectors.

The lanes of a vector are `LANES` output channels. Each datum is read as it lies in the tensor, NHWC
or NCHW, and broadcast against them; where every channel is a group of its own, lanes load data as a
vector instead. A tile of columns x vectors of accumulators stays in registers while the reduction
runs outside it, and the epilogue takes the accumulators from there. Taps outside the image are
skipped: rows by the bounds of the loop, columns by leaving them out of the code of the tiles
at the border. `Tile` says how big the pieces are, and is all that a schedule decides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.schedules.intrin_portable import fused_multiply_add
from bnncc.schedules.templates.kernel import (
    Expr,
    Register,
    bind,
    const,
    f32,
    flat,
    gather,
    index,
    load,
    loop,
    loops,
    ramp,
    splat,
)
from bnncc.schedules.templates.rows import Line, Rows
from bnncc.schedules.templates.window import Segment, row_taps, segments
from bnncc.topi_binary.layout import LANES
from bnncc.topi_binary.signature import Operator
from bnncc.topi_binary.spec import Conv2d


@dataclass(frozen=True)
class Tile:
    """How a float convolution is cut.

    Attributes
    ----------
    columns : int, default 1
        Output columns in a register tile; less where it does not divide the width.
    vectors : int, default 1
        Vectors of output channels in a register tile.
    kw_inside : bool, default True
        Whether the taps of a row are unrolled inside the loop over channels, or the outer loop.
    rows_outside : bool, default False
        Whether rows run outside the blocks of output channels: for images larger than weights.
    unroll : int, default 1
        Input channels in one turn of the innermost loop.
    parallel : bool, default False
        Whether rows and channel blocks are divided among threads.
    chunks : int, default 1
        Into how many pieces the rows are divided instead, if they are pooled.
    flat_rows : int, default 1
        Into how many rows the pixels of a layer that looks at one at a time are laid.
    """

    columns: int = 1
    vectors: int = 1
    kw_inside: bool = True
    rows_outside: bool = False
    unroll: int = 1
    parallel: bool = False
    chunks: int = 1
    flat_rows: int = 1


def flattened(spec: Conv2d, rows: int = 1) -> Conv2d:
    """Return `spec` with its pixels in `rows` long rows, if its kernel only looks at one pixel.

    The images of a dense layer's batch are pixels too, so that weights are read once for several.
    """
    if spec.rank == 2:
        if not isinstance(spec.n, int) or any(step.op == "gate" for step in spec.steps):
            return spec
        steps = tuple(dataclasses.replace(step, layout="NHWC") for step in spec.steps)
        return dataclasses.replace(spec, n=1, width=spec.n, rank=4, data_layout="NHWC", steps=steps)
    pointwise = spec.kernel == (1, 1) and spec.strides == (1, 1) and not any(spec.pads)
    planar = spec.data_layout == "NCHW" or any(s.layout == "NCHW" for s in spec.steps)
    if not pointwise or planar or spec.pool is not None:
        return spec
    return dataclasses.replace(spec, height=rows, width=spec.height * spec.width // rows)


def conv2d(spec: Conv2d, tile: Tile | None = None) -> tirx.PrimFunc:
    """Define a float convolution with its epilogue.

    Parameters
    ----------
    spec : Conv2d
        What it computes.
    tile : Tile, optional
        How it is cut; one vector at a time if not given.

    Returns
    -------
    tirx.PrimFunc
        ``out[n, y, x, o] = epilogue(sum data[n, y * s - p + i * d, ...] * weight[o, i, j, c])``.
    """
    with Operator(spec) as kernel:
        tile = tile or Tile()
        flat = flattened(spec, tile.flat_rows)
        if flat is not spec:
            kernel.reshape(flat)
        _Conv(kernel, flat, tile).write()
    return kernel.func


class _Block(NamedTuple):
    """Vectors of output channels that share a tile."""

    first: Expr
    """Number of the first vector."""
    lanes: tuple[int, ...]
    """Valid lanes of each."""


class _Conv:
    """Writes one convolution into an open kernel."""

    def __init__(self, kernel: Operator, spec: Conv2d, tile: Tile) -> None:
        self.kernel, self.spec, self.tile = kernel, spec.unpooled, tile
        self.data, self.weight = kernel.inputs[:2]
        self.unit = spec.pool.strides[1] if spec.pool is not None else 1
        self.rows = Rows(kernel, spec, chunks=tile.chunks, unit=self.unit, parallel=tile.parallel)
        self.height, self.width = spec.unpooled.output_hw
        self.depth = spec.channels // spec.groups
        self.per_group = spec.out_channels // spec.groups
        self.full, self.tail = divmod(spec.out_channels, LANES)
        # Whether all lanes of a vector read the same datum.
        self.shared = spec.groups == 1 or self.per_group % LANES == 0
        limit = tile.vectors
        while self.shared and spec.groups > 1 and self.per_group // LANES % limit:
            limit -= 1
        self.vectors = max(1, limit)
        self.rows.declare(self.vectors)

    def write(self) -> None:
        """Write the loops over images, rows and channel blocks, in the order of the tile."""
        rows = self.height
        parallel = self.tile.parallel
        if self.rows.spec.pool is not None:
            self._write_pooled()
            return
        for count, first, lanes in self._block_groups():
            extents: list[Any] = [self.kernel.n]
            extents += [rows, count] if self.tile.rows_outside else [count, rows]
            with loops(extents, parallel=parallel) as (n, one, two):
                row, group = (one, two) if self.tile.rows_outside else (two, one)
                block = _Block(bind(group * len(lanes) + first), lanes)
                self._row(n, row, block)

    def _write_pooled(self) -> None:
        """Write the loops where each row goes to the pooling as soon as it is there."""
        with self.rows.strips() as strip:
            for count, first, lanes in self._block_groups():
                with loop(count) as group:
                    block = _Block(bind(group * len(lanes) + first), lanes)
                    self._row(strip.n, strip.row, block)

    def _block_groups(self) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        whole, rest = divmod(self.full, self.vectors)
        if whole:
            yield whole, 0, (LANES,) * self.vectors
        if rest or self.tail:
            yield 1, whole * self.vectors, (LANES,) * rest + (self.tail,) * bool(self.tail)

    def _row(self, n: Expr, row: Expr, block: _Block) -> None:
        low, taps = row_taps(self.spec, row)
        lines = [
            Line(n, row, bind(block.first + vector), lanes, vector)
            for vector, lanes in enumerate(block.lanes)
        ]
        self.rows.begin()
        for segment in segments(self.spec, self.tile.columns, self.unit):
            with loop(segment.tiles) as number:
                start = bind(number * segment.width + segment.start)
                self._tile(lines, block, segment, start, low, taps)
        for line in lines:
            self.rows.end(line)

    def _tile(
        self,
        lines: list[Line],
        block: _Block,
        segment: Segment,
        start: Expr,
        low: Expr,
        taps: Expr,
    ) -> None:
        n, row = lines[0].n, lines[0].row
        columns, vectors = range(segment.width), range(len(block.lanes))
        sums = [[Register() for _ in vectors] for _ in columns]
        for total in chain.from_iterable(sums):
            total.set(f32(0.0))
        with loop(taps) as turn:
            kh = bind(turn + low)
            y = bind(row * self.spec.strides[0] - self.spec.pads[0] + kh * self.spec.dilations[0])
            x = bind(start * self.spec.strides[1] - self.spec.pads[1])
            self._reduce(n, y, x, kh, block, segment, sums)
        for vector, line in enumerate(lines):
            self.rows.put(line, start, [sums[column][vector].value for column in columns])

    def _reduce(
        self, n: Expr, y: Expr, x: Expr, kh: Expr, block: _Block, segment: Segment, sums: Any
    ) -> None:
        """Write the reduction over channels and the taps of one kernel row."""
        unroll = self.tile.unroll if self.depth % self.tile.unroll == 0 else 1
        taps = range(self.spec.kernel[1])
        turns = self.depth // unroll
        for together in [taps] if self.tile.kw_inside else [[kw] for kw in taps]:
            with loop(turns) as turn:
                for part in range(unroll):
                    channel = bind(turn * unroll + part)
                    for kw in together:
                        self._products(n, y, x, kh, kw, channel, block, segment, sums)

    def _products(
        self, n: Expr, y: Expr, x: Expr, kh: Expr, kw: int, channel: Expr, block: _Block,
        segment: Segment, sums: Any,
    ) -> None:  # fmt: skip
        tap = (kh * self.spec.kernel[1] + kw) * self.depth + channel
        for vector, lanes in enumerate(block.lanes):
            weight = self._weight(block.first + vector, lanes, tap)
            for column in range(segment.width):
                if kw not in segment.taps[column]:
                    continue
                at = x + (column * self.spec.strides[1] + kw * self.spec.dilations[1])
                data = self._datum(n, y, at, channel, block.first + vector, lanes)
                total = sums[column][vector]
                total.set(fused_multiply_add(data, weight, total.value))

    def _weight(self, block: Expr, lanes: int, tap: Expr) -> Expr:
        # A block of fewer lanes is stored dense; the lanes beyond read what follows it.
        size = self.spec.kernel[0] * self.spec.kernel[1] * self.depth
        return load(self.weight, [block * (LANES * size) + tap * lanes])

    def _datum(self, n: Expr, y: Expr, x: Expr, channel: Expr, block: Expr, lanes: int) -> Expr:
        if self.shared:
            group = index(0) if self.spec.groups == 1 else block * LANES // self.per_group
            return splat(self.data[tuple(self._at(n, y, x, group * self.depth + channel))])
        first = block * LANES
        if self.depth == self.per_group == 1 and self.spec.data_layout == "NHWC":
            return load(self.data, self._at(n, y, x, first), lanes)
        channels = T.min(ramp(first), splat(const(self.spec.out_channels - 1)))
        if self.per_group > 1:
            channels = T.floordiv(channels, splat(const(self.per_group)))
        where = channels * splat(const(self.depth)) + splat(channel)
        place = self._at(n, y, x, where)
        axis = 1 if self.spec.rank == 2 or self.spec.data_layout == "NCHW" else 3
        return gather(flat(self.data), self.data.shape, place, axis)

    def _at(self, n: Expr, y: Expr, x: Expr, channel: Expr) -> list[Expr]:
        if self.spec.rank == 2:
            return [n, channel]
        if self.spec.data_layout == "NCHW":
            return [n, channel, y, x]
        return [n, y, x, channel]
