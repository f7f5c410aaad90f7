"""Schedule of binary convolution for NEON: register tiles of data vectors x four output channels.

A *quad* is four output channels. A tile is several *places*, each one column, or two columns that
share a data vector. The bytes of a tile are accumulated for one quad at a time. Rows with all taps
inside the image have code of their own, fully unrolled if there are few vectors.

The rule schedules another form of the definition, `byte_sums.FORM`, with the parameters of the
function it is given. Data that may hold exact zeros are scanned first. If there are none, the
kernel sums over one plane of data; otherwise over two, in compact code.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tvm import s_tir, tirx

from bnncc.schedules import channel_tiles, epilogue, intrin_arm, multithreading, ranges, zeros
from bnncc.schedules.intrin import TensorPair
from bnncc.schedules.intrin_arm import BYTES
from bnncc.schedules.ranges import Bounds
from bnncc.schedules.space import Point, Space, with_threads
from bnncc.schedules.templates.window import Segment, image, joined_tiles, taps_inside, tile_widths
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import layout
from bnncc.topi_binary.definitions import byte_sums, define
from bnncc.topi_binary.definitions.byte_sums import MAX_COUNTS
from bnncc.topi_binary.definitions.taps import flattened
from bnncc.topi_binary.layout import LANES, QUAD
from bnncc.topi_binary.spec import BinaryConv2d, zero_planes

VECTORS = 2
"""Data vectors per tile, or 3 in one tile if the width is odd. They need 8 accumulators. With 16,
LLVM spills some when it schedules for in-order cores. With 12 it spills too if as many 16-bit
sums are live; then the last tile has 1 vector instead of 3."""

MAX_VECTORS = 4
"""Largest number of data vectors per tile in the search space."""

UNROLLED = 6
"""Maximum number of vectors of a run per loop body."""

TABLES = "data", "twice", "ones_total", "starts"
"""Name prefixes of the blocks that are computed before all sums."""

ALL_UNROLLED = 18
"""Total vectors of all kernel rows up to which the loops over them are fully unrolled."""

ROW_UNROLLED = 9
"""Vectors per run up to which a run is fully unrolled, on 64-bit processors."""

MIN_FILLED = 0.75
"""Minimum fraction of a vector that data must fill; below it, counting words is as fast."""


def order(spec: BinaryConv2d) -> str:
    """Return the weight order that this kernel reads, or "" if counting words is as fast."""
    per_group = spec.channels_per_group
    words = layout.words(per_group)
    if spec.out_channels // spec.groups % QUAD and spec.groups > 1:
        return ""
    if not byte_sums.fits(spec):
        return ""
    pixels = spec.n if spec.rank == 2 else 2
    if words == 2 and spec.kernel[1] <= MAX_COUNTS and (isinstance(pixels, int) and pixels > 1):
        return "halves"
    run = words * (spec.kernel[1] if spec.dilations[1] == 1 else 1)
    if run / (-(-run // 4) * 4) < MIN_FILLED or (spec.dilations[1] > 1 and words % 4):
        return ""
    return "vectors" if spec.dilations[1] == 1 or spec.kernel[1] <= MAX_COUNTS else ""


def space(spec: BinaryConv2d, target: TargetSpec, threads: int) -> Space:
    """Return the search space for `spec`, whose weights are in ``vectors`` or ``halves``."""
    places = _places(spec)
    choices: dict[str, Iterable[int]] = {
        "tiles": {-(-places // size) for size in range(1, MAX_VECTORS + 1)},
        "unroll": (1, 2, 3),
        "flat": (0, 1),
    }
    divided = multithreading.shared(spec, target, threads)
    return with_threads(choices, choose(spec, target), threads > 1, divided)


def apply(
    func: tirx.PrimFunc, spec: BinaryConv2d, target: TargetSpec, point: Point
) -> tirx.PrimFunc:
    """Schedule a binary convolution whose weights are in the order ``vectors`` or ``halves``."""
    form = byte_sums.FORM + byte_sums.FOURS * (target.popcount == "neon-dot")
    made = _Form(func, spec, target, form, point).scheduled()
    if spec.ternary:
        single = {**point, "tiles": _places(spec)}  # rarely executed: keep the code small
        other = _Form(func, spec, target, form + byte_sums.ZEROS, single).scheduled()
        made = zeros.either(func, zero_planes(spec), made, other)
    return multithreading.one_region(made)


@dataclass(frozen=True)
class _Rows:
    """A range of output rows.

    `inner` says that all their taps are inside the image. If `ends` is not 0, only so many of the
    rows at each end belong to the range.
    """

    first: int
    count: int
    inner: bool = False
    ends: int = 0


@dataclass(frozen=True)
class _Range:
    """A range of rows and columns, and whether it covers the last channels."""

    rows: _Rows
    columns: Segment
    last: bool


class _Form:
    """Schedules one form of the definition."""

    def __init__(
        self, func: tirx.PrimFunc, spec: BinaryConv2d, target: TargetSpec, form: str, point: Point
    ) -> None:
        self._spec, self._target, self._point = flattened(spec), target, point
        self._func = ranges.with_parameters(define(spec, form), func)
        self._cut, self._arch = byte_sums.cut(self._spec, form), _arch(target)
        self._dot, self._unit = byte_sums.FOURS in form, _unit(spec)
        self._names = [block.name_hint for block in ranges.blocks(self._func)]
        self._tables = [n for n in self._names if n.startswith(TABLES)]
        if channel_tiles.any_rows(self._spec):
            before = {*self._tables, "ones", "ones_wide"}
            swapped = dict.fromkeys((n for n in self._names if n not in before), (0, 2))
            self._func = ranges.exchanged(self._func, swapped)

    def scheduled(self) -> tirx.PrimFunc:
        """Return the scheduled kernel: tables; then channel vectors, rows, and columns as loops."""
        parts = [self._table(name) for name in self._tables if not name.startswith("ones_w")]
        full, rest = divmod(self._spec.out_channels, LANES)
        for last in [False] * bool(full) + [True] * bool(rest):
            parts += [self._range(rows, last) for rows in self._rows()]
        return ranges.joined(parts, 0)

    def _range(self, rows: _Rows, last: bool) -> tirx.PrimFunc:
        """Schedule a range of rows, one vector of channels after the other."""
        some = []
        for columns, ends in self._columns(rows.inner):
            tiles = self._tiles(_Range(rows, columns, last))
            some.append(ranges.ends(tiles, 3, ends) if ends else tiles)
        made, shared = ranges.joined(some, 3), 3
        if rows.ends:
            made, shared = ranges.ends(made, 2, rows.ends), 4
        return ranges.parallel(made, shared) if self._point.get("divide", 0) else made

    def _rows(self) -> list[_Rows]:
        """Return the range of rows with all taps inside the image, and the ranges around it."""
        spec = self._spec
        count = spec.output_hw[0]
        whole = [len(taps_inside(spec, 0, h)) == spec.kernel[0] for h in range(count)]
        first = whole.index(True) if any(whole) else count
        behind = count - first - sum(whole)
        if first and behind and 2 * max(first, behind) < count:
            first = behind = max(first, behind)
            return [_Rows(first, count - 2 * first, True), _Rows(0, count, False, first)]
        found = (
            _Rows(first, count - first - behind, True),
            _Rows(0, first),
            _Rows(count - behind, behind),
        )
        return [rows for rows in found if rows.count]

    def _columns(self, inner: bool) -> list[tuple[Segment, int]]:
        """Return the tiles of a row, whose widths in places differ by at most one.

        In rows whose taps are all inside, tiles whose taps are all inside are separate. For the
        other tiles, the number at each end is returned if they can be one loop.
        """
        if channel_tiles.any_rows(self._spec):
            return [(part, 0) for part in channel_tiles.row_segments(self._func, VECTORS)]
        count = min(self._point["tiles"], -(-self._spec.output_hw[1] // self._unit))
        sizes = tile_widths(self._spec, count, self._unit)
        cut, whole = (joined_tiles(self._spec, sizes, apart) for apart in (True, False))
        if inner and len(cut) == 3 and len(whole) == 1 and cut[0].tiles == cut[2].tiles:
            return [(cut[1], 0), (whole[0], cut[0].tiles)]
        return [(segment, 0) for segment in (cut if inner else whole)]

    def _table(self, name: str) -> tirx.PrimFunc:
        """Schedule a block that is computed before all sums."""
        own: dict[str, Bounds] = {name: {}}
        if name == "ones_total":
            own |= {block: {} for block in ("ones", "ones_wide") if block in self._names}
        sch = s_tir.Schedule(ranges.part(self._func, own, self._tables))
        if name == "ones_total":
            self._ones(sch)
        elif name == "starts":
            row, column, o, lane, kh, kw = sch.get_loops(name)
            sch.reorder(o, row, kh, column, kw, lane)
            sch.vectorize(lane)
            sch.vectorize(sch.get_loops(sch.decompose_reduction(name, kh))[-1])
        else:
            words = sch.get_loops(name)[-1]
            extent = sch.get(words).extent
            size = math.gcd(int(extent), BYTES // 4) if isinstance(extent, tirx.IntImm) else 4
            sch.vectorize(sch.split(words, [None, size])[-1])
        return channel_tiles.bounded(sch.mod["main"])

    def _ones(self, sch: s_tir.Schedule) -> None:
        """Schedule the popcounts of weights: those of one tap and quad at once."""
        kh, kw, quad = sch.get_loops("ones_total")
        sch.reorder(quad, kh, kw)
        sch.unroll(kw)
        wide, under = "ones_wide" in self._names, kw
        if wide:
            sch.compute_at("ones_wide", kw, preserve_unit_loops=True)
            under = sch.get_loops("ones_wide")[-1]
            sch.decompose_reduction("ones_wide", under)
            pair = intrin_arm.WIDENING_ADD[self._arch]
            sch.tensorize(sch.get_loops("ones_wide_add")[-1], pair.register())
        sch.compute_at("ones", under, preserve_unit_loops=True)
        x = sch.get_loops("ones")[-1]
        sch.decompose_reduction("ones", x)
        if layout.words(self._spec.channels // self._spec.groups) % 4:
            sch.unroll(x)  # then the bytes that belong to the tap are known
        channel, lane = sch.split(sch.get_loops("ones_add")[-1], [QUAD, BYTES])
        sch.unroll(channel)
        channel_tiles.mark_lanes(sch, lane)
        pair = intrin_arm.TOTAL_IN_MEMORY[self._arch, 16 if wide else 8]
        sch.tensorize(sch.get_loops("ones_total_add")[-1], pair.register())

    def _tiles(self, at: _Range) -> tirx.PrimFunc:
        """Schedule the tiles of a range."""
        columns, out = at.columns, epilogue.BLOCKS[at.last]
        # 1 normalize
        sch = s_tir.Schedule(ranges.part(self._func, self._bounds(at), self._tables))
        # 2 tile
        n, h, w, o = sch.get_loops(out)
        tile, column = sch.split(w, [None, columns.width])
        sch.reorder(o, n, h, tile, column)
        sch.unroll(column)
        # 3 stage: the sums of a tile and a quad under the tile's epilogue
        acc = "acc_last" if at.last else "acc"
        sch.compute_at(acc, column, preserve_unit_loops=True)
        lane = sch.get_loops(f"{acc}_lane")[-1]
        if self._unit > 1 or at.last:  # lanes of one quad are adjacent
            quad, lane = sch.split(lane, [None, QUAD])
            sch.unroll(quad)
        sch.vectorize(lane)
        sch.compute_at("sum_total", tile, preserve_unit_loops=True)
        *_, w, quad = sch.get_loops("sum_total")
        sch.reorder(quad, w)
        sch.unroll(w)
        turns: list[s_tir.schedule.LoopRV] = []
        if "sum_wide" in self._names:
            sch.compute_at("sum_wide", quad, preserve_unit_loops=True)
            w, _, *turns = sch.get_loops("sum_wide")[-2 - len(self._cut.turns) :]
            sch.reorder(*turns, w)
            init = sch.decompose_reduction("sum_wide", turns[0])
            channel_tiles.unrolled(sch, [w, sch.get_loops(init)[-1]])
        sch.compute_at("sum", [quad, *turns][-1], preserve_unit_loops=True)
        self._sums(sch, at, turns)
        # 4 tensorize
        for block, pair in self._pairs().items():
            sch.tensorize(sch.get_loops(block)[-1], pair.register())
        # 5 vectorize
        epilogue.vectorize(sch, sch.get_sblock(out), self._spec.out_channels, self._target)
        return channel_tiles.bounded(sch.mod["main"])

    def _bounds(self, at: _Range) -> dict[str, Bounds]:
        """Return the bounds of each block's loops that restrict it to a range."""
        full, rest = divmod(self._spec.out_channels, LANES)
        columns, unit, per = at.columns, self._unit, LANES // QUAD
        quads = (full * per, -(-rest // QUAD)) if at.last else (0, full * per)
        rows = at.rows.first, at.rows.count
        pixels = {1: rows, 2: columns.columns}
        places = {1: rows, 2: (columns.start // unit, -(-columns.width // unit) * columns.tiles)}
        found: dict[str, Bounds] = {
            epilogue.BLOCKS[at.last]: pixels,
            "acc_last" if at.last else "acc": pixels,
            "sum_total": places | {3: quads},
            "sum_wide": places | {3: quads},
            "sum": places | {3 + len(self._cut.turns): quads},
        }
        return {name: bounds for name, bounds in found.items() if name in self._names}

    def _sums(self, sch: s_tir.Schedule, at: _Range, turns: list[s_tir.schedule.LoopRV]) -> None:
        """Schedule the byte sums of a tile and a quad."""
        cut, point = self._cut, self._point
        axes = ["w", *(f"turn {axis}" for axis in cut.turns), "q", *cut.reduced]
        loops = dict(zip(axes, sch.get_loops("sum")[-len(axes) :], strict=True))
        part = cut.reduced["x"]
        size = max(u for u in range(1, point["unroll"] + 1) if part % u == 0)
        x, some = sch.split(loops.pop("x"), [part // size, size])
        outer = [loops[axis] for axis in cut.reduced if axis in loops]
        sch.reorder(*outer, x, some, loops["w"])
        init = sch.decompose_reduction("sum", [*outer, x][0])
        channel_tiles.unrolled(sch, [some, loops["w"], sch.get_loops(init)[-1]])
        vectors = cut.runs * self._spec.kernel[0] * cut.vectors
        if at.rows.inner and point["flat"] and vectors <= ALL_UNROLLED:
            channel_tiles.unrolled(sch, [*outer, x])
        elif self._unit > 1 and "run" in loops:
            sch.unroll(loops["run"])
        elif at.rows.inner and part <= ROW_UNROLLED and self._arch == "aarch64":
            sch.unroll(x)
        if not at.rows.inner and "kh" in cut.reduced:
            channel_tiles.mark(sch, loops["kh"], [*cut.reduced].index("kh"))
        if cut.tail or cut.ragged:  # the last vectors of a run get code of their own
            for loop in [x] * (part > size) + turns[-1:]:
                sch.annotate(loop, "pragma_loop_partition_hint", 1)

    def _pairs(self) -> dict[str, TensorPair]:
        """Return the instruction for each block."""
        cut, dot = self._cut, self._dot
        pairs = {"sum_whole_add": intrin_arm.XOR_POPCOUNT[BYTES, dot]}
        if cut.tail:
            pairs["sum_tail_add"] = intrin_arm.XOR_POPCOUNT[cut.tail * 4, dot]
        kind = 32, 0
        if cut.turns:
            pairs["sum_wide_add"], kind = intrin_arm.WIDENING_ADD[self._arch], (16, 0)
        elif not dot:
            # How many times byte sums can be doubled without overflow.
            kind = 8, min(2, (255 // (8 * math.prod(cut.reduced.values()))).bit_length() - 1)
        pairs["sum_total_add"] = intrin_arm.TOTAL[self._arch, kind[0], kind[1], self._unit > 1]
        return pairs


def choose(spec: BinaryConv2d, target: TargetSpec) -> dict[str, int]:
    """Return the default point for one thread, from the registers of `target`."""
    places = _places(spec)
    words = layout.words(spec.channels_per_group)
    steps = spec.kernel[0] * -(-words * spec.kernel[1] // (BYTES // 4))
    wide = target.popcount != "neon-dot" and (steps > MAX_COUNTS or spec.ternary)
    tiles = -(-places // VECTORS) if wide else max(1, places // VECTORS)
    flat = 1
    taps = spec.window_size
    if _arch(target) == "arm" and spec.weight_order == "halves" and 1 < taps <= ALL_UNROLLED:
        tiles, flat = places, 0  # with this much code, spills cost more than loops
    return {"tiles": tiles, "unroll": UNROLLED, "flat": flat}


def _arch(target: TargetSpec) -> str:
    return "aarch64" if target.arch.startswith("aarch64") else "arm"


def _unit(spec: BinaryConv2d) -> int:
    """Return the number of columns that share a data vector."""
    return 2 if spec.weight_order == "halves" else 1


def _places(spec: BinaryConv2d) -> int:
    """Return the number of data vectors that cover the width."""
    return -(-image(spec)[2] // _unit(spec))
