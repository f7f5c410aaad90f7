"""Float convolution by minimal filtering (Winograd), along rows or in both directions.

For each strip of rows, the data are transformed once for all output channels (`filtered_data`).
Then, for each tile of transforms x channel vectors and for each point, products are summed in
registers over kernel rows, parts and channels, and stored. The inverse transform gives the results,
which go to the epilogue or the pooling (`line_buffer`). `filtering` defines the transforms.

This is a template because its algorithm consists of the ring buffers of transformed rows, from
which a strip reads several at once, and of the sums stored point by point. `definitions.conv2d`
defines the same sums, and is what the kernel is tested against.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.schedules.intrin_portable import fused_multiply_add
from bnncc.schedules.templates.channel_tiles import groups
from bnncc.schedules.templates.filtered_data import Filtered, make
from bnncc.schedules.templates.kernel import Expr, Register, bind, f32, load, loop, splat, store
from bnncc.schedules.templates.line_buffer import Line, Rows, Strip, when
from bnncc.schedules.templates.transforms import combine
from bnncc.schedules.templates.window import row_taps
from bnncc.topi_binary import filtering
from bnncc.topi_binary.layout import LANES
from bnncc.topi_binary.signature import Operator
from bnncc.topi_binary.spec import Conv2d


@dataclass(frozen=True)
class Tile:
    """Parameters of a filtered convolution.

    Attributes
    ----------
    tiles : int, default 1
        Transforms side by side per register tile.
    vectors : int, default 1
        Vectors of output channels per register tile.
    rows : int, default 1
        Output rows (rows of transforms, if filtered in both directions) per strip.
    unroll : int, default 1
        Input channels per iteration of the innermost loop.
    chunks : int, default 1
        Pieces per image.
    parallel : bool, default False
        Whether images and pieces are divided among threads.
    """

    tiles: int = 1
    vectors: int = 1
    rows: int = 1
    unroll: int = 1
    chunks: int = 1
    parallel: bool = False


def conv2d(spec: Conv2d, tile: Tile) -> tuple[tirx.PrimFunc, Rows]:
    """Write a filtered float convolution with its epilogue.

    Parameters
    ----------
    spec : Conv2d
        Spec of the kernel, with a filtered method.
    tile : Tile
        Its parameters.

    Returns
    -------
    func : PrimFunc
        The kernel, equal to the direct convolution up to rounding.
    rows : Rows
        Its pooling must still be scheduled.
    """
    with Operator(spec) as kernel:
        conv = _Conv(kernel, spec, tile)
        conv.write()
    return kernel.func, conv.rows


@dataclass(frozen=True)
class _Piece:
    """Transforms ``first .. first + width`` of a row, times channel vectors ``block ..``."""

    first: Expr
    width: int
    block: Expr
    lanes: tuple[int, ...]

    @property
    def cells(self) -> list[tuple[int, int]]:
        return [(t, v) for t in range(self.width) for v in range(len(self.lanes))]


class _Conv:
    def __init__(self, kernel: Operator, spec: Conv2d, tile: Tile) -> None:
        self.spec, self.tile = spec, tile
        self.weight = kernel.inputs[1]
        self.vertical, self.axis = filtering.axes(spec)
        self.rows_per_tile = self.vertical.outputs if self.vertical else 1
        self.rows = Rows(
            kernel, spec, tile.rows * self.rows_per_tile, tile.chunks, self.rows_per_tile,
            self.axis.outputs, tile.parallel,
        )  # fmt: skip
        self.rows.declare(tile.vectors * self.rows_per_tile)
        self.data: Filtered = make(spec, kernel.inputs[0], tile.rows)
        self.width = spec.unpooled.output_hw[1]
        self.terms = filtering.block_terms(spec)
        held = min(tile.tiles, self.data.tiles), tile.vectors
        self.products = T.sblock_alloc_buffer((self.axis.points, *held, LANES), "float32")
        if self.vertical:
            points, outputs = self.vertical.points, self.vertical.outputs
            self.column = T.sblock_alloc_buffer((points, *held, LANES), "float32")
            self.products = T.sblock_alloc_buffer(
                (self.axis.points, outputs, *held, LANES), "float32"
            )

    def write(self) -> None:
        """Write the loops over strips, blocks of channels, rows and tiles."""
        with self.rows.strips(self.data.begin) as strip:
            self.data.fill(strip)
            for group in groups(self.spec.out_channels, self.tile.vectors):
                with loop(group.count) as number:
                    block = bind(number * len(group.lanes) + group.first)
                    height = self.rows_per_tile
                    turns = strip.rows if height == 1 else (strip.rows + (height - 1)) // height
                    with loop(turns) as turn:
                        self._row(strip, turn, block, group.lanes)

    def _row(self, strip: Strip, turn: Expr, block: Expr, lanes: tuple[int, ...]) -> None:
        pieces = -(-self.data.tiles // self.tile.tiles)
        small, wider = divmod(self.data.tiles, pieces)
        start = 0
        self.rows.begin()
        for width, same in groupby([small + (i < wider) for i in range(pieces)]):
            count = len(list(same))
            with loop(count) as number:
                piece = _Piece(bind(number * width + start), width, block, lanes)
                for points in self._points(self.axis):
                    with loop(len(points)) as turn_q:
                        q = bind(turn_q + points.start)
                        if self.vertical is None:
                            self._point_1d(strip, turn, piece, q, points)
                        else:
                            self._point_2d(turn, piece, q, points)
                self._results(strip, turn, piece)
            start += count * width
        for vector in range(len(lanes)):
            for i in range(self.rows_per_tile):
                self.rows.end(self._line(strip, turn, block, lanes, vector, i))

    def _line(
        self, strip: Strip, turn: Expr, block: Expr, lanes: tuple[int, ...], vector: int, i: int
    ) -> Line:
        """Return row `i` of a row of tiles, for one of the vectors from `block` on."""
        row = bind(strip.row + turn * self.rows_per_tile + i)
        key = vector * self.rows_per_tile + i
        return Line(strip.n, row, bind(block + vector), lanes[vector], key)

    @staticmethod
    def _points(axis: filtering.Axis) -> list[range]:
        """Return the points, grouped by equal parts."""
        last = axis.points - 1
        if axis.at(last) == axis.at(0):
            return [range(axis.points)]
        return [range(last), range(last, axis.points)]

    # ---- products ---------------------------------------------------------------------------

    def _point_1d(self, strip: Strip, turn: Expr, piece: _Piece, q: Expr, points: range) -> None:
        """Write the products of one point, over the kernel rows inside the image."""
        spec = self.spec.unpooled
        parts = self.axis.at(points.start)
        per_row = len(parts) * spec.channels
        sums = self._zeros(piece)
        row = bind(strip.row + turn)
        low, taps = row_taps(spec, row)
        before = spec.kernel[0] * len(self.axis.parts) * spec.channels  # terms per earlier point
        with loop(taps) as number:
            kh = bind(number + low)
            slot = self.data.slot(row * spec.strides[0] - spec.pads[0] + kh)
            first = bind(q * before + kh * per_row)
            self._sum(piece, [(slot, q, part) for part in parts], first, sums)
        self._keep(self.products, [q], piece, sums)

    def _point_2d(self, turn: Expr, piece: _Piece, q: Expr, points: range) -> None:
        """Write the products of one column of points, and their vertical inverse transform."""
        assert self.vertical is not None
        vertical, channels = self.vertical, self.spec.channels
        parts = self.axis.at(points.start)
        rows = [vertical.at(p) for p in range(vertical.points)]
        # Terms per column of points: the offset to the next column.
        whole = sum(map(len, rows)) * len(self.axis.parts) * channels
        for group in self._points(vertical):
            terms = [(i, j) for i in rows[group.start] for j in parts]
            with loop(len(group)) as number:
                p = bind(number + group.start)
                sums = self._zeros(piece)
                # All points except the last have as many terms as the first.
                first = bind(q * whole + p * (len(rows[0]) * len(parts) * channels))
                places = [(turn, q, p, i * len(self.axis.parts) + j) for i, j in terms]
                self._sum(piece, places, first, sums)
                self._keep(self.column, [p], piece, sums)
        for tile, vector in piece.cells:
            column = [load(self.column, [p, tile, vector, 0]) for p in range(vertical.points)]
            for i, value in enumerate(combine(vertical.transform.inverse, column)):
                store(self.products, [q, i, tile, vector, 0], value)

    def _zeros(self, piece: _Piece) -> dict[tuple[int, int], Register]:
        sums = {cell: Register() for cell in piece.cells}
        for total in sums.values():
            total.set(f32(0.0))
        return sums

    def _sum(
        self, piece: _Piece, places: list[Any], first: Expr, sums: dict[tuple[int, int], Register]
    ) -> None:
        """Add the products of all channels at `places`, with weights from term `first` on."""
        channels = self.spec.channels
        unroll = self.tile.unroll if channels % self.tile.unroll == 0 else 1
        for number, place in enumerate(places):
            with loop(channels // unroll) as turn:
                for one in range(unroll):
                    channel = bind(turn * unroll + one)
                    term = first + number * channels + channel
                    self._products(piece, place, channel, term, sums)

    def _products(
        self, piece: _Piece, place: Any, channel: Expr, term: Expr, sums: dict[Any, Register]
    ) -> None:
        weights = [
            load(self.weight, [((piece.block + v) * self.terms + term) * LANES])
            for v in range(len(piece.lanes))
        ]
        for tile in range(piece.width):
            datum = splat(self.data.at(place, piece.first + tile, channel))
            for vector, weight in enumerate(weights):
                total = sums[tile, vector]
                total.set(fused_multiply_add(datum, weight, total.value))

    def _keep(
        self, buffer: Any, where: list[Expr], piece: _Piece, sums: dict[Any, Register]
    ) -> None:
        for tile, vector in piece.cells:
            store(buffer, [*where, tile, vector, 0], sums[tile, vector].value)

    # ---- results ----------------------------------------------------------------------------

    def _results(self, strip: Strip, turn: Expr, piece: _Piece) -> None:
        """Write the inverse transform along the row, and pass on its results."""
        matrix, outputs = self.axis.transform.inverse, self.axis.outputs
        sure = self.width % outputs or outputs
        for vector in range(len(piece.lanes)):
            with loop(piece.width) as tile:
                start = bind((piece.first + tile) * outputs)
                for i in range(self.rows_per_tile):
                    upper = [i] if self.vertical else []
                    kept = [
                        load(self.products, [q, *upper, tile, vector, 0])
                        for q in range(self.axis.points)
                    ]
                    row = turn * self.rows_per_tile + i
                    with when(i > 0, row < strip.rows):
                        line = self._line(strip, turn, piece.block, piece.lanes, vector, i)
                        self.rows.put(line, start, combine(matrix, kept), sure)
