"""Schedule of binary convolution by table lookup, for x86 and WebAssembly.

A register tile of columns x channel vectors keeps byte accumulators while the nibbles of a few
words are looked up, for all taps of a kernel row; then the accumulators are widened to 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from tvm import s_tir, tirx

from bnncc.schedules import (
    channel_tiles,
    epilogue,
    intrin_wasm,
    intrin_x86,
    multithreading,
    nchw,
    ranges,
    zeros,
)
from bnncc.schedules.columns import shares
from bnncc.schedules.intrin_portable import SPREAD_NIBBLES, WIDENING_ADD
from bnncc.schedules.ranges import Bounds
from bnncc.schedules.space import Point, Space, powers, tile_sizes, with_threads
from bnncc.schedules.templates.channel_tiles import Group, groups
from bnncc.schedules.templates.window import Segment, image, segments
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary.definitions import byte_sums, define, nibbles
from bnncc.topi_binary.definitions.taps import flattened
from bnncc.topi_binary.layout import LANES, NIBBLE_LANES
from bnncc.topi_binary.spec import BinaryConv2d, zero_planes

MIN_PIXELS = 4
"""Minimum number of output pixels (rows of a dense layer) that share the per-call weight setup."""

MIN_CHANNELS = LANES + 1
"""Minimum number of output channels. Fewer fill only half of `NIBBLE_LANES`, which are computed
together; that is no faster than popcounts of words."""

CONVERTED = 32
"""Bytes of data converted at a time."""

TABLES = "table", "border", "plane", "rows", "ones", "starts"
"""Name prefixes of the blocks that are computed before all sums."""

_TILES = {16: (4, 2, 4, False), 32: (6, 2, 1, False), 64: (14, 1, 1, True)}
"""By vector size in bytes: columns and channel vectors per tile, nibbles per loop body, and whether
taps share table rows.

The fastest of those tried on the layers of ``benchmarks/layers.py``. They have 8, 12 and up to 14
accumulators. SSE needs registers for copies, because its lookup overwrites the table row; sharing
rows takes 7 % longer with it on Zen 5, and up to 16 % on Zen 4 where row tables leave no registers.
With AVX2 sharing is faster on Zen 4 but, by the port models of llvm-mca, 4 % slower on Intel's
cores. At most two 64-byte lines can be loaded per cycle, which is also the lookup rate, so with 32
registers taps share table rows, and the more columns the more often. That outweighs the 16-bit sums
that registers do not hold: nine columns take 1 to 3 % longer on Zen 5, but 16 take 5 % longer
than 11 where rows have 32 pixels.
"""


_APART = (7, 2, 1, True)
"""The same for 64-byte vectors if taps have few table rows in common, as in 1x1 and strided layers
and in images of at most 7 columns. Two channel vectors share each row instead; one vector takes 4
to 12 % longer on Zen 5."""

MAX_ACCUMULATORS = {16: 12, 32: 14, 64: 28}
"""By vector size in bytes: accumulators that fit in registers beside the operands."""

MAX_UNROLL = 8
"""Nibbles per loop body: one word."""


def pays(spec: BinaryConv2d) -> bool:
    """Return whether this kernel can compute `spec` and beats popcounts of words."""
    if spec.groups > 1 and spec.out_channels // spec.groups % NIBBLE_LANES:
        return False
    if not byte_sums.fits(spec):
        return False
    if spec.kernel[1] * nibbles.NIBBLES > nibbles.MAX_LOOKUPS:
        return False
    many = spec.images if spec.rank == 2 else spec.output_hw[0] * spec.output_hw[1]
    return many >= MIN_PIXELS and spec.out_channels >= MIN_CHANNELS


def space(spec: BinaryConv2d, target: TargetSpec, threads: int) -> Space:
    """Return the search space for `spec`, whose weights are in the order ``nibbles``.

    With ``shared``, a table row stays in a register for all taps of a kernel row that read the
    same pixel, and the taps are unrolled; otherwise each tap loads the row again.
    """
    per_group = spec.out_channels // spec.groups  # all channels of a tile read the same group
    choices: dict[str, Iterable[int]] = {
        "bytes": [size for size in _TILES if size * 8 <= target.vector_bits],
        "columns": tile_sizes(image(spec)[2], max(MAX_ACCUMULATORS.values())),
        "vectors": powers(4),
        "unroll": powers(MAX_UNROLL),
        "shared": (0, 1),
    }
    divided = multithreading.shared(spec, target, threads)

    def fits(point: Point) -> bool:
        size, lanes = point["bytes"], point["bytes"] * point["vectors"]
        if lanes % NIBBLE_LANES or (size > NIBBLE_LANES and per_group % size):
            return False
        if point["vectors"] > 1 and lanes > NIBBLE_LANES:  # wider than necessary
            blocks = -(-per_group // NIBBLE_LANES)
            if lanes > blocks * NIBBLE_LANES or (spec.groups > 1 and per_group % lanes):
                return False
        return point["columns"] * point["vectors"] <= MAX_ACCUMULATORS[size]

    return with_threads(choices, choose(spec, target), threads > 1, divided, fits)


def apply(
    func: tirx.PrimFunc, spec: BinaryConv2d, target: TargetSpec, point: Point
) -> tirx.PrimFunc:
    """Schedule a binary convolution whose weights are in the order ``nibbles``."""
    made = _Form(func, spec, target, "", point).scheduled()
    if not spec.ternary:
        return made
    single = {**point, "columns": 1}  # rarely executed: keep the code small
    other = _Form(func, spec, target, nibbles.ZEROS, single).scheduled()
    return zeros.either(func, zero_planes(spec), made, other)


class _Form:
    """Schedules one form of the definition."""

    def __init__(
        self, func: tirx.PrimFunc, spec: BinaryConv2d, target: TargetSpec, end: str, point: Point
    ) -> None:
        self._spec, self._target = flattened(spec), target
        self._point, self._size = point, point["bytes"]
        form = f"{nibbles.FORM}{self._size}{end}"
        vectors = point["vectors"] * self._size // LANES
        divided = point.get("divide", 0)
        self._rows = 1 if divided else nchw.rows_of(self._spec, target, vectors)
        self._func = nchw.held(
            ranges.with_parameters(define(spec, form), func), self._spec, self._rows
        )
        names = [block.name_hint for block in ranges.blocks(self._func)]
        self._tables = [name for name in names if name.startswith(TABLES)]

    def scheduled(self) -> tirx.PrimFunc:
        """Return the scheduled kernel: tables; per channel tile, its weights and rows of tiles."""
        parts = [self._table(name) for name in self._tables]
        for group in groups(self._spec.out_channels, self._point["vectors"] * self._size // LANES):
            columns = segments(nibbles.bordered(self._spec), self._point["columns"])
            weights, divided = self._weights(group), self._point.get("divide", 0)
            of_row = [self._tiles(group, segment) for segment in columns]
            of_row += nchw.transposed(
                self._func, self._spec, group, "nho" if divided else "onh", count=self._rows
            )
            tiles = ranges.joined(of_row, 3)
            if divided:
                parts += [ranges.parallel(weights, 1), ranges.parallel(tiles, 3)]
            else:
                parts.append(ranges.joined([weights, tiles], 1))
        return ranges.joined(parts, 0)

    def _part(self, bounds: Mapping[str, Bounds]) -> s_tir.Schedule:
        shared = [*self._tables, "nibbles", *epilogue.BLOCKS]
        return s_tir.Schedule(ranges.part(self._func, bounds, shared))

    def _table(self, name: str) -> tirx.PrimFunc:
        """Schedule a block that is computed before all sums."""
        sch = self._part({name: {}})
        if name in ("ones", "starts"):
            channel_tiles.table(sch, name)
            return sch.mod["main"]
        last = sch.get_loops(name)[-1]
        size = math.gcd(int(sch.get(last).extent), 2 * CONVERTED)
        lanes = sch.split(last, [None, size])[1]
        if name.startswith("rows"):
            sch.tensorize(lanes, SPREAD_NIBBLES[size // 2].register())
        else:
            sch.vectorize(lanes)
        return sch.mod["main"]

    def _weights(self, group: Group) -> tirx.PrimFunc:
        """Schedule the weights of a tile, which are stored in the order in which they are read."""
        first, count = self._vectors(group, self._size)
        sch = self._part({"nibbles": {4: (first * self._size, count * self._size)}})
        *taps, side, lane = sch.get_loops("nibbles")
        tile, vector, lane = sch.split(lane, [group.count, None, min(self._size, NIBBLE_LANES)])
        sch.reorder(tile, *taps, side, vector, lane)
        sch.fuse(*taps)  # LLVM would unroll the innermost one
        channel_tiles.in_registers(sch, [side, vector, lane])
        return sch.mod["main"]

    def _vectors(self, group: Group, size: int) -> tuple[int, int]:
        """Return the first `size`-byte vector of a group, and the number of vectors."""
        units = -(-len(group.lanes) * LANES // self._unit) * self._unit // size
        return group.first * LANES // size, units * group.count

    @property
    def _unit(self) -> int:
        return max(self._size, NIBBLE_LANES)

    def _tiles(self, group: Group, segment: Segment) -> tirx.PrimFunc:
        """Schedule the tiles of a range of channels and columns."""
        # 1 normalize
        columns, last = segment.columns, group.lanes[-1] < LANES
        cut: dict[str, Bounds] = {
            "sum": {2: columns, 6: self._vectors(group, self._size)},
            "wide": {2: columns, 3: self._vectors(group, self._unit)},
        }
        ends = [""] * (len(group.lanes) > last) + ["_last"] * last
        for end in ends:
            own = {} if end else {3: (group.first, group.count * (len(group.lanes) - last))}
            cut[f"out{end}"] = {2: columns, **own}
        sch = self._part(cut)
        # 2 tile
        rows = []
        for end in ends:
            n, h, w, o = sch.get_loops(f"out{end}")
            tile, column = sch.split(w, [segment.tiles, segment.width])
            outer, vector = sch.split(o, [group.count, None])
            # Divide few rows evenly, with few threads that write to the same words.
            nest = [n, h, outer] if self._point.get("divide", 0) else [outer, n, h]
            if self._rows > 1:
                nest = [outer, n, *sch.split(h, [None, self._rows])]
            sch.reorder(*nest, tile, column, vector)
            channel_tiles.unrolled(sch, [column, vector])
            rows.append(tile)
        if len(rows) > 1:
            sch.merge(*rows)
        # 3 stage: sums under a tile
        taps = range(self._spec.kernel[1])
        self._sums(
            sch, sch.get_loops(f"out{ends[0]}")[len(nest)], any(t != taps for t in segment.taps)
        )
        # 5 vectorize
        for end in ends:
            epilogue.vectorize(
                sch, sch.get_sblock(f"out{end}"), self._spec.out_channels, self._target
            )
        return sch.mod["main"]

    def _sums(self, sch: s_tir.Schedule, tile: s_tir.schedule.LoopRV, skipped: bool) -> None:
        """Schedule the sums of a tile: byte sums inside the loop over 16-bit sums.

        If taps may be `skipped`, each tap of a row gets its own code.
        """
        point, size = self._point, self._size
        sch.compute_at("wide", tile, preserve_unit_loops=True)
        *_, w, o, plane, kh, turn = sch.get_loops("wide")
        sch.reorder(plane, kh, turn, w, o)
        sch.compute_at("sum", turn, preserve_unit_loops=True)
        unrolled = [w, o, *sch.get_loops(sch.decompose_reduction("wide", plane))[-2:]]
        *_, w, _, _, _, o, kw, nibble = sch.get_loops("sum")
        nibble, *body = sch.split(nibble, [None, point["unroll"]])
        outer = [nibble] if point["shared"] else [kw, nibble]
        # Table rows stay in registers from tap to tap, or weights from column to column.
        if point["shared"]:
            extents = [int(sch.get(loop).extent) for loop in (w, kw, o)]
            body += [w, kw] if extents[0] > extents[1] * extents[2] else [kw, w]
        else:
            body.append(w)
        body.append(o)
        sch.reorder(*outer, *body)
        unrolled += body
        if skipped and not point["shared"]:
            unrolled.append(kw)
        unrolled += sch.get_loops(sch.decompose_reduction("sum", outer[0]))[-2:]
        channel_tiles.unrolled(sch, unrolled)
        # 4 tensorize
        wasm = intrin_wasm.FEATURE in self._target.features
        pair = (intrin_wasm if wasm else intrin_x86).LOOKUP_ADD[size]
        sch.tensorize(sch.get_loops("sum_lookup")[-2], pair.register())
        sch.tensorize(sch.get_loops("wide_add")[-1], WIDENING_ADD[size].register())
        if 8 * size < self._target.vector_bits:
            # TVM lets larger vectors share memory, and LLVM then merges sums of two columns.
            sch.set_scope("sum_update", 0, "local")


def choose(spec: BinaryConv2d, target: TargetSpec) -> dict[str, int]:
    """Return the default point for one thread, from the registers of `target`."""
    per_group = spec.out_channels // spec.groups
    widest = min(target.vector_bits // 8, 64)
    size = NIBBLE_LANES if per_group % widest and widest > NIBBLE_LANES else widest
    width = image(spec)[2]
    apart = spec.kernel[1] == 1 or spec.strides[1] > 1 or width <= _APART[0]
    columns, vectors, unroll, shared = _APART if apart and size == 64 else _TILES[widest]
    if per_group <= size or (spec.groups > 1 and per_group % (vectors * size)):
        vectors, shared = 1, True  # half the lookups per row: separate loads would take longer
    if widest < 64 and spec.strides[1] > 1:
        shared = False  # taps have few rows in common
    return {
        "bytes": size,
        "columns": shares(width, columns)[0],
        "vectors": max(vectors, NIBBLE_LANES // size),
        "unroll": unroll,
        "shared": int(shared),
    }
