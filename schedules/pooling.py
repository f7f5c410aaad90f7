"""Schedules of float and bit pooling: a register tile of windows x vectors.

Lanes are channels, or words. Ranges of windows with the same taps inside the image are scheduled
separately: rows outside the image are excluded by the bounds of a loop, columns by conditions that
are constant within the range.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import s_tir, tirx

from bnncc.schedules import channel_tiles, epilogue, multithreading, ranges
from bnncc.schedules.space import Point, Space, tile_sizes, with_threads
from bnncc.schedules.templates.channel_tiles import Group, groups
from bnncc.schedules.templates.window import Segment, segments
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import layout
from bnncc.topi_binary.layout import LANES
from bnncc.topi_binary.spec import BitwiseMaxPool, Pool2d

VECTORS = 4
"""Channel vectors per tile, if pixels are far apart or columns are few."""

FAR_BLOCKS = 8
"""Vectors per pixel from which tiles of poolings and depthwise layers should have fewer columns
(each in cache lines of its own) and more vectors."""

ONE_COLUMN_VECTORS = 12
"""Vectors per tile of a pooling to one column."""

MAX_TILE = 14
"""Maximum number of vectors per tile in the search space."""

WORD_COLUMNS = 4
"""Windows per tile, for bits."""

MAX_PLANES = 2
"""Number of planes of levels up to which all columns of a tile are pooled in registers at once."""

UNROLLED_TAPS = 8
"""Windows with more columns are loops."""


def pool2d_space(spec: Pool2d, target: TargetSpec, threads: int) -> Space:
    """Return the search space of a float pooling."""
    per_vector = target.registers_per_vector(LANES)
    budget = max(1, min(8, target.vector_registers // 2 // per_vector))
    most = max(2, (target.vector_registers - 4) // per_vector)
    blocks, width = layout.blocks(spec.channels), spec.output_hw[1]
    far = spec.data_layout == "NHWC" and blocks >= FAR_BLOCKS and budget > VECTORS
    columns = min(width, budget // VECTORS if far else budget)
    vectors = min(ONE_COLUMN_VECTORS, most) if width == 1 else min(VECTORS, budget // columns)
    default = {"columns": columns, "vectors": max(1, min(vectors, blocks))}
    return with_threads(
        {
            "columns": {*tile_sizes(width, MAX_TILE), min(width, budget)},
            "vectors": range(1, min(blocks, MAX_TILE) + 1),
        },
        default,
        threads > 1,
        multithreading.shared(spec, target, threads),
        lambda point: point["columns"] * point["vectors"] <= min(MAX_TILE, most),
    )


def pool2d(
    func: tirx.PrimFunc, spec: Pool2d, target: TargetSpec, threads: int, point: Point
) -> tirx.PrimFunc:
    """Schedule a float pooling with its epilogue."""
    parallel = bool(point.get("divide", 0))
    parts = [
        _floats(func, spec, target, group, segment, parallel)
        for group in groups(spec.channels, point["vectors"], apart=True)
        for segment in segments(spec, point["columns"])
    ]
    return ranges.joined(parts, 1 if parallel else 2)


def _floats(
    func: tirx.PrimFunc, spec: Pool2d, target: TargetSpec, group: Group, segment: Segment,
    parallel: bool,
) -> tirx.PrimFunc:  # fmt: skip
    """Schedule a range of windows and channel vectors."""
    vectors, lanes = len(group.lanes), group.lanes[-1]
    last = lanes < LANES
    out = epilogue.BLOCKS[last]
    # 1 normalize
    columns, count = segment.columns, group.count * vectors
    values = {2: columns, 3: (group.first * LANES, count * lanes)}
    blocks = {2: columns, 3: (0 if last else group.first, count)}
    sch = s_tir.Schedule(ranges.part(func, {"pooled": values, "mean": values, out: blocks}))
    # 2 tile
    n, h, w, o = sch.get_loops(out)
    tile, column = sch.split(w, [segment.tiles, segment.width])
    outer, vector = sch.split(o, [group.count, vectors])
    sch.reorder(tile, outer, column, vector)
    for loop in (column, vector):
        sch.unroll(loop)
    # 3 stage
    if spec.kind != "max":
        sch.compute_at("mean", outer, preserve_unit_loops=True)
        *_, column, channel = sch.get_loops("mean")
        channel_tiles.in_registers(sch, [column, *sch.split(channel, [vectors, lanes])])
    sch.compute_at("pooled", outer, preserve_unit_loops=True)
    *_, column, channel, kh, kw = sch.get_loops("pooled")
    vector, lane = sch.split(channel, [vectors, lanes])
    sch.reorder(kh, column, kw, vector, lane)
    # 5 vectorize, unroll, parallel
    if parallel:
        sch.parallel(sch.fuse(n, h))
    _taps(sch, "pooled", kh, kw, [column, vector, lane])
    epilogue.vectorize(sch, sch.get_sblock(out), spec.channels, target)
    return channel_tiles.bounded(sch.mod["main"])


def _taps(sch: s_tir.Schedule, name: str, kh: Any, kw: Any, tile: Sequence[Any]) -> None:
    """Schedule the loops over taps of windows and over values; the last one is lanes."""
    rolled = int(sch.get(kw).extent) > UNROLLED_TAPS
    if not rolled:
        sch.unroll(kw)
    channel_tiles.in_registers(sch, tile)
    start = sch.decompose_reduction(name, kh)
    channel_tiles.in_registers(sch, sch.get_loops(start)[-len(tile) :])
    channel_tiles.mark(sch, kh, 0)
    if rolled:
        channel_tiles.mark(sch, kw, 1)


def bitwise_maxpool_space(spec: BitwiseMaxPool, target: TargetSpec, threads: int) -> Space:
    """Return the search space of a pooling of bits."""
    return with_threads(
        {"columns": tile_sizes(spec.output_hw[1], MAX_TILE)},
        {"columns": WORD_COLUMNS},
        threads > 1,
        multithreading.shared(spec, target, threads),
    )


def bitwise_maxpool(
    func: tirx.PrimFunc, spec: BitwiseMaxPool, target: TargetSpec, threads: int, point: Point
) -> tirx.PrimFunc:
    """Schedule a pooling of bits."""
    parallel = bool(point.get("divide", 0))
    parts = [
        _words(func, spec, words, segment, parallel)
        for words in _vectors(layout.words(spec.channels))
        for segment in segments(spec, point["columns"])
    ]
    return ranges.joined(parts, 1 if parallel else 2)


def _words(
    func: tirx.PrimFunc, spec: BitwiseMaxPool, words: tuple[int, int, int], segment: Segment,
    parallel: bool,
) -> tirx.PrimFunc:  # fmt: skip
    """Schedule a range of windows and of word vectors (first, count, lanes)."""
    first, count, lanes = words
    # 1 normalize
    bounds = {2: segment.columns, 3: (first, count * lanes)}
    sch = s_tir.Schedule(ranges.part(func, {"held": bounds, "out": bounds}))
    # 2 tile
    n, h, w, c = sch.get_loops("out")
    tile, column = sch.split(w, [segment.tiles, segment.width])
    vector, lane = sch.split(c, [count, lanes])
    sch.reorder(tile, vector, column, lane)
    channel_tiles.in_registers(sch, [column, lane])
    # 3 stage
    sch.compute_at("held", vector, preserve_unit_loops=True)
    *_, column, lane, kh, kw = sch.get_loops("held")
    together = spec.planes <= MAX_PLANES
    sch.reorder(*((kh, column) if together else (column, kh)), kw, lane)
    # 5 vectorize, unroll, parallel
    if parallel:
        sch.parallel(sch.fuse(n, h))
    _taps(sch, "held", kh, kw, [column, lane])
    return channel_tiles.bounded(sch.mod["main"])


def _vectors(words: int) -> list[tuple[int, int, int]]:
    """Split `words` into vectors with decreasing numbers of lanes."""
    found, first = [], 0
    for lanes in (16, 8, 4, 2, 1):
        count = (words - first) // lanes
        if count:
            found.append((first, count, lanes))
            first += count * lanes
    return found
