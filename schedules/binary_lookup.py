"""Schedule of binary convolution by table lookup, for x86 and WebAssembly.

A register tile of columns x channel vectors keeps byte accumulators while the nibbles of a few
words are looked up, for all taps of a kernel row; then the accumulators are widened to 16 bits.
Each lookup serves two columns, see `definitions.nibbles`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

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
from bnncc.schedules.intrin_portable import SPLIT_ADD, SPREAD_NIBBLES, WIDENING_ADD
from bnncc.schedules.ranges import Bounds
from bnncc.schedules.space import Point, Space, powers, tile_sizes, with_threads
from bnncc.schedules.templates.channel_tiles import Group, groups
from bnncc.schedules.templates.window import image
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import layout
from bnncc.topi_binary.definitions import byte_sums, define, nibbles
from bnncc.topi_binary.definitions.nibbles import PIXELS
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

TABLES = "counts", "table", "border", "plane", "rows", "pairs", "ones", "starts"
"""Name prefixes of the blocks that are computed before all sums."""

_TILES = {16: (4, 2), 32: (4, 2), 64: (6, 2)}
"""By vector size in bytes: columns and channel vectors per tile."""

_FEW_COLUMNS = 2, 4
"""The tile of shorter vectors where weights stay in the L1 cache, and with SSE: each weight is used
once, on AVX2 as an operand in memory. That takes fewer instructions, and fewer registers of SSE,
but weights are loaded twice as often. WebAssembly does without."""

_ONE_VECTOR = 8
"""Columns per tile of one channel vector, whose 16-bit sums fit in registers of AVX-512."""

MAX_ACCUMULATORS = {16: 8, 32: 8, 64: 18}
"""By vector size in bytes: columns times channel vectors of a tile whose accumulators, and sums of
a few lookups, fit in registers beside the operands."""

MAX_COLUMNS = 9
"""Maximum number of pairs of columns per tile."""

MAX_UNROLL = 4
"""Steps per loop body."""


def pays(spec: BinaryConv2d) -> bool:
    """Return whether this kernel can compute `spec` and beats popcounts of words."""
    if spec.groups > 1 and spec.out_channels // spec.groups % NIBBLE_LANES:
        return False
    if not byte_sums.fits(spec):
        return False
    if spec.kernel[1] * nibbles.per_word(spec) > nibbles.MAX_LOOKUPS:
        return False
    many = spec.images if spec.rank == 2 else spec.output_hw[0] * spec.output_hw[1]
    return many >= MIN_PIXELS and spec.out_channels >= MIN_CHANNELS


def space(spec: BinaryConv2d, target: TargetSpec, threads: int) -> Space:
    """Return the search space for `spec`, whose weights are in the order ``nibbles``.

    Columns are those of the output, of which each lookup serves two.
    """
    choices: dict[str, Iterable[int]] = {
        "bytes": [size for size in _TILES if size * 8 <= target.vector_bits],
        "columns": [PIXELS * size for size in tile_sizes(_pairs(spec), MAX_COLUMNS)],
        "vectors": powers(4),
        "unroll": powers(MAX_UNROLL),
    }
    divided = multithreading.shared(spec, target, threads)

    def fits(point: Point) -> bool:
        size, vectors = point["bytes"], point["vectors"]
        if not _divides(spec, size, vectors):
            return False
        return point["columns"] * vectors <= MAX_ACCUMULATORS[size]

    return with_threads(choices, choose(spec, target), threads > 1, divided, fits)


def apply(
    func: tirx.PrimFunc, spec: BinaryConv2d, target: TargetSpec, point: Point
) -> tirx.PrimFunc:
    """Schedule a binary convolution whose weights are in the order ``nibbles``."""
    made = _Form(func, spec, target, "", point).scheduled()
    if not spec.ternary:
        return made
    single = {**point, "columns": PIXELS}  # rarely executed: keep the code small
    other = _Form(func, spec, target, nibbles.ZEROS, single).scheduled()
    return zeros.either(func, zero_planes(spec), made, other)


class _Range(NamedTuple):
    """Consecutive tiles of equal width, in pairs of columns."""

    first: int
    """First pair."""
    width: int
    """Pairs per tile."""
    tiles: int
    """Number of tiles."""
    columns: int
    """Columns of all of them: the last pair of a row may have only one."""


def _ranges(width: int, columns: int) -> list[_Range]:
    """Divide a row of `width` outputs into tiles of at most `columns`.

    Examples
    --------
    >>> [tuple(part) for part in _ranges(13, 4)]
    [(0, 2, 3, 12), (6, 1, 1, 1)]
    """
    made: list[_Range] = []
    first, pairs = 0, layout.blocks(width, PIXELS)
    for size in shares(pairs, columns // PIXELS):
        end = min(width, (first + size) * PIXELS)
        if made and made[-1].width == size:
            last = made.pop()
            made.append(_Range(last.first, size, last.tiles + 1, end - last.first * PIXELS))
        else:
            made.append(_Range(first, size, 1, end - first * PIXELS))
        first += size
    return made


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
            columns = _ranges(self._spec.output_hw[1], self._point["columns"])
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
        if name.startswith("rows_"):
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

    def _tiles(self, group: Group, part: _Range) -> tirx.PrimFunc:
        """Schedule the tiles of a range of channels and columns."""
        # 1 normalize
        columns, last = (part.first * PIXELS, part.columns), group.lanes[-1] < LANES
        looked_up = part.first, part.width * part.tiles
        lanes = [self._vectors(group, size) for size in (self._size, self._unit)]
        cut: dict[str, Bounds] = {
            "few": {2: looked_up, 9: lanes[0]},
            "sum": {2: looked_up, 6: lanes[0]},
            "wide": {2: looked_up, 3: lanes[1]},
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
            tile, column = sch.split(w, [part.tiles, None])
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
        self._sums(sch, sch.get_loops(f"out{ends[0]}")[len(nest)])
        # 5 vectorize
        for end in ends:
            epilogue.vectorize(
                sch, sch.get_sblock(f"out{end}"), self._spec.out_channels, self._target
            )
        return channel_tiles.bounded(sch.mod["main"])

    def _sums(self, sch: s_tir.Schedule, tile: s_tir.schedule.LoopRV) -> None:
        """Schedule the sums of a tile: those in bytes inside the loop over 16-bit sums."""
        point, size = self._point, self._size
        sch.compute_at("wide", tile, preserve_unit_loops=True)
        *_, w, o, plane, kh, turn = sch.get_loops("wide")
        sch.reorder(plane, kh, turn, w, o)
        sch.compute_at("sum", turn, preserve_unit_loops=True)
        channel_tiles.mark(sch, kh, 1)
        unrolled = [w, o, *sch.get_loops(sch.decompose_reduction("wide", plane))[-2:]]
        *_, w, _, _, _, o, kw, c, part = sch.get_loops("sum")
        c, body = sch.split(c, [None, point["unroll"]])
        sch.reorder(kw, c, body, part, w, o)
        sch.compute_at("few", part, preserve_unit_loops=True)
        unrolled += [body, part, w, o]
        unrolled += sch.get_loops(sch.decompose_reduction("sum", kw))[-2:]
        *_, w, _, _, _, _, _, _, o, lookup = sch.get_loops("few")
        sch.reorder(lookup, w, o)
        unrolled += [lookup, w, o, *sch.get_loops(sch.decompose_reduction("few", lookup))[-2:]]
        channel_tiles.unrolled(sch, unrolled)
        # 4 tensorize
        wasm = intrin_wasm.FEATURE in self._target.features
        pair = (intrin_wasm if wasm else intrin_x86).LOOKUP_ADD[size]
        sch.tensorize(sch.get_loops("few_lookup")[-2], pair.register())
        sch.tensorize(sch.get_loops("sum_add")[-1], SPLIT_ADD[size].register())
        sch.tensorize(sch.get_loops("wide_add")[-1], WIDENING_ADD[size].register())
        if 8 * size < self._target.vector_bits:
            # TVM lets larger vectors share memory, and LLVM then merges sums of two columns.
            sch.set_scope("sum_update", 0, "local")
            sch.set_scope("few_update", 0, "local")


def _pairs(spec: BinaryConv2d) -> int:
    """Return the pairs of columns per row, of which the last may have only one."""
    return layout.blocks(image(spec)[2], PIXELS)


def _divides(spec: BinaryConv2d, size: int, vectors: int) -> bool:
    """Return whether tiles of `vectors` vectors of `size` bytes have the channels of one group."""
    per_group, lanes = spec.out_channels // spec.groups, size * vectors
    if lanes % NIBBLE_LANES or (size > NIBBLE_LANES and per_group % size):
        return False
    if vectors == 1 or lanes <= NIBBLE_LANES:
        return True
    if spec.groups > 1 and per_group % lanes:
        return False
    return lanes <= layout.blocks(per_group, NIBBLE_LANES) * NIBBLE_LANES  # no wider than necessary


def _stays(spec: BinaryConv2d, target: TargetSpec, lanes: int) -> bool:
    """Return whether the weights of a tile stay in the L1 cache, beside the table."""
    words = layout.words(spec.channels_per_group)
    weights = words * nibbles.per_word(spec) * spec.window_size
    return weights * lanes + nibbles.table_bytes(NIBBLE_LANES) <= target.l1_bytes * 3 // 4


def _few_columns(spec: BinaryConv2d, target: TargetSpec, size: int) -> bool:
    """Return whether tiles of vectors of `size` bytes are `_FEW_COLUMNS`."""
    vectors = _FEW_COLUMNS[1]
    if size == nibbles.MAX_BYTES or intrin_wasm.FEATURE in target.features:
        return False
    return _divides(spec, size, vectors) and (size == 16 or _stays(spec, target, size * vectors))


def choose(spec: BinaryConv2d, target: TargetSpec) -> dict[str, int]:
    """Return the default point for one thread, from the registers and caches of `target`."""
    per_group = spec.out_channels // spec.groups
    widest = min(target.vector_bits // 8, 64)
    size = NIBBLE_LANES if per_group % widest and widest > NIBBLE_LANES else widest
    columns, vectors = _FEW_COLUMNS if _few_columns(spec, target, size) else _TILES[size]
    if per_group <= size or (spec.groups > 1 and per_group % (vectors * size)):
        columns, vectors = _ONE_VECTOR, 1
    return {
        "bytes": size,
        "columns": PIXELS * shares(_pairs(spec), columns // PIXELS)[0],
        "vectors": max(vectors, NIBBLE_LANES // size),
        "unroll": 1,
    }
