"""Float convolution and dense layers: a tile of columns and vectors of channels in registers.

Lanes are output channels. A datum is broadcast against the weights of a vector, or lanes load data
of their own where each channel is a group. The sums of a tile stay in registers over the whole
reduction, and the epilogue takes them from there. Ranges of columns whose taps lie alike are
scheduled alone: rows outside the image are left out by the bounds of a loop, columns by tests that
are known there.
"""

from __future__ import annotations

from tvm import s_tir, tirx

from bnncc.schedules import channel_tiles, epilogue, generic, multithreading, ranges
from bnncc.schedules.ranges import Bounds
from bnncc.schedules.space import Point
from bnncc.schedules.templates.channel_tiles import Group, groups
from bnncc.schedules.templates.window import Segment, segments
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary.definitions.taps import flattened
from bnncc.topi_binary.layout import LANES
from bnncc.topi_binary.spec import Conv2d


def direct(
    func: tirx.PrimFunc, spec: Conv2d, target: TargetSpec, threads: int, point: Point
) -> tirx.PrimFunc | None:
    """Schedule a convolution of floats; None if it has a ring of rows, transformed or pooled."""
    if spec.method != "direct" or spec.operands != "float32":
        return None
    if spec.pool is not None:  # no pass pools other groups in their kernel
        ringed = spec.groups == 1 or spec.depthwise
        return None if ringed else generic.schedule(func, target, threads)
    parallel, vectors = bool(point.get("divide", 0)), point["vectors"]
    rows = _flat_rows(spec, point["columns"], vectors, threads) if parallel else 1
    flat = flattened(spec, rows)
    func = _laid(func, rows) if rows > 1 else func
    per_group = flat.out_channels // flat.groups
    while flat.shared and flat.groups > 1 and per_group // LANES % vectors:
        vectors -= 1
    nests = []
    for group in groups(flat.out_channels, vectors, apart=not flat.shared):
        parts = [
            _tiles(func, flat, target, group, segment, point, parallel)
            for segment in segments(flat, point["columns"])
        ]
        nests.append(ranges.joined(parts, 1 if parallel else 3))
    return multithreading.one_region(ranges.joined(nests, 0))


def _laid(func: tirx.PrimFunc, rows: int) -> tirx.PrimFunc:
    """Lay the pixels of one long row in several."""
    sch = s_tir.Schedule(func)
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        _, h, w, *_ = sch.get_loops(block)
        sch.fuse(h, sch.split(w, [rows, None])[0])
    return sch.mod["main"]


def _flat_rows(spec: Conv2d, columns: int, vectors: int, threads: int) -> int:
    """Return into how many rows to lay the pixels of a pointwise layer, for equal shares."""
    flat = flattened(spec)
    width = flat.output_hw[1]
    if spec.rank == 2 or (flat.height, flat.width) == (spec.height, spec.width):
        return 1
    images = spec.images
    blocks = images * -(-spec.out_channels // (LANES * vectors))
    fitting = [r for r in range(1, width // columns + 1) if width % r == 0]
    return next(
        (r for r in fitting if multithreading.balanced(r * blocks, threads)), max([1, *fitting])
    )


def _tiles(
    func: tirx.PrimFunc, spec: Conv2d, target: TargetSpec, group: Group, segment: Segment,
    point: Point, parallel: bool,
) -> tirx.PrimFunc:  # fmt: skip
    """Schedule a range of columns and vectors of channels."""
    vectors, rest = len(group.lanes), group.lanes[-1] < LANES
    lanes = LANES if spec.shared else group.lanes[-1]
    # 1 normalise
    columns = (segment.start, segment.width * segment.tiles)
    channels = (group.first * LANES, group.count * vectors * lanes)
    cut: dict[str, Bounds] = {"operand": {}, "sum": {2: columns, 3: channels}}
    if vectors > rest:
        cut["out"] = {2: columns, 3: (group.first, group.count * (vectors - rest))}
    if rest:
        cut["out_last"] = {2: columns}
    sch = s_tir.Schedule(ranges.part(func, cut))
    # 2 tile
    order = "nhow" if point["rows_outside"] else "nohw"
    names = [name for name in epilogue.BLOCKS if name in cut]
    tiles = []
    for name in names:
        n, h, w, o = sch.get_loops(name)
        tile, column = sch.split(w, [segment.tiles, segment.width])
        outer, vector = sch.split(o, [group.count, None])
        outside = {"n": n, "h": h, "o": outer, "w": tile}
        sch.reorder(*(outside[axis] for axis in order), vector, column)
        for loop in (vector, column):
            sch.unroll(loop)
        tiles.append(tile)
    if len(names) > 1:
        sch.merge(*tiles)
    # 3 stage
    *image, tile = sch.get_loops(names[0])[:4]
    sch.compute_at("sum", tile, preserve_unit_loops=True)
    # 5 vectorize, unroll, parallel
    if parallel:
        sch.parallel(sch.fuse(*image))
    _sums(sch, spec, (vectors, lanes), point)
    for name in names:
        epilogue.vectorize(sch, sch.get_sblock(name), spec.out_channels, target)
    return channel_tiles.bounded(sch.mod["main"])


def _sums(sch: s_tir.Schedule, spec: Conv2d, cells: tuple[int, int], point: Point) -> None:
    """Schedule the sums of a tile of vectors and lanes."""
    *_, column, channel, kh, kw, c = sch.get_loops("sum")
    vector, lane = sch.split(channel, [*cells])
    taps, body = [kw], [vector, column]
    if point["kw_inside"]:
        taps, body = [], [kw, *body]
    if point["unroll"] > 1 and spec.channels // spec.groups % point["unroll"] == 0:
        c, part = sch.split(c, [None, point["unroll"]])
        body = [part, *body]
    sch.reorder(kh, *taps, c, *body, lane)
    channel_tiles.in_registers(sch, [*taps, *body, lane])
    if spec.collected:
        sch.compute_at("operand", column, preserve_unit_loops=True)
        *_, lane, _, _, _ = sch.get_loops("operand")
        sch.unroll(lane)
    start = sch.decompose_reduction("sum", kh)
    channel_tiles.in_registers(sch, sch.get_loops(start)[-3:])
    channel_tiles.mark(sch, kh, 0)
