"""Schedule of direct float convolutions and dense layers: register tile of columns x vectors.

Lanes are output channels. A data element is broadcast and multiplied by a vector of weights; in
depthwise layers, each lane loads its own element. The sums of a tile stay in registers over the
whole reduction and go directly to the epilogue. Ranges of columns with the same taps inside the
image are scheduled separately: rows outside the image are excluded by the bounds of a loop, columns
by conditions that are constant within the range.

Weights that are codes become floats where they are multiplied, if there is one tile of columns;
otherwise once for all tiles, in memory that the L2 cache holds.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from tvm import s_tir, tirx

from bnncc.schedules import (
    bfloat16_conv2d,
    channel_tiles,
    generic,
    multithreading,
    nchw,
    ranges,
    tile_choice,
)
from bnncc.schedules.float_layers import single_vectors
from bnncc.schedules.ranges import Bounds
from bnncc.schedules.space import Point
from bnncc.schedules.templates.channel_tiles import Group
from bnncc.schedules.templates.window import Segment
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary.definitions.conv2d import CODED
from bnncc.topi_binary.definitions.taps import flattened
from bnncc.topi_binary.layout import LANES, WORD_BITS
from bnncc.topi_binary.spec import Conv2d


def writes_nchw(spec: Conv2d, target: TargetSpec) -> bool:
    """Return whether the kernel of `spec` writes NCHW results itself."""
    flat = spec.method == "direct" and spec.pool is None and not spec.code_bits
    if not flat or tile_choice.pays(spec, target):
        return False
    plain = spec.operands == "float32" or spec.apart
    return plain and nchw.fits(spec, target)


def direct(
    func: tirx.PrimFunc, spec: Conv2d, target: TargetSpec, threads: int, point: Point
) -> tirx.PrimFunc | None:
    """Schedule a direct float convolution; None for kernels with a ring buffer of rows."""
    if spec.method == "direct" and spec.apart:
        return bfloat16_conv2d.apply(func, spec, target, threads, point)
    if spec.method != "direct" or spec.operands != "float32":
        return None
    if spec.pool is not None:  # no pass fuses a pooling into other grouped convolutions
        ringed = spec.groups == 1 or spec.depthwise
        return None if ringed else generic.schedule(func, target, threads)
    flat, vectors = flattened(spec), point["vectors"]
    per_group = flat.out_channels // flat.groups
    while flat.shared and flat.groups > 1 and per_group // LANES % vectors:
        vectors -= 1
    divided = 0
    if point.get("divide", 0):
        # One long row of pixels has too few channel tiles for some numbers of threads.
        blocks = spec.images * -(-spec.out_channels // (LANES * vectors))
        long = spec.rank == 4 and (flat.height, flat.width) != (spec.height, spec.width)
        by_tile = long and not spec.code_bits and not multithreading.balanced(blocks, threads)
        divided = 4 if by_tile else 3
    rule = partial(_tiles, flat, target, point, divided)
    return channel_tiles.ranged(
        func, flat, target, point, rule, vectors, divided, apart=not flat.shared,
        single=single_vectors(spec, target), fixed=(CODED,),
    )  # fmt: skip


def _tiles(
    spec: Conv2d, target: TargetSpec, point: Point, divided: int, func: tirx.PrimFunc,
    group: Group, segment: Segment, rows: int,
) -> tirx.PrimFunc:  # fmt: skip
    """Schedule a range of columns and channel vectors; threads share `divided` loops."""
    vectors = len(group.lanes)
    lanes = LANES if spec.shared else group.lanes[-1]
    # 1 normalize
    columns, _ = channel_tiles.axes(group, segment)
    channels = (group.first * LANES, group.count * vectors * lanes)
    cut: dict[str, Bounds] = {"operand": {}, "sum": {2: columns, 3: channels}}
    cut |= {CODED: {1: channels}} if spec.code_bits else {}
    # 2 tile
    sch, outer = channel_tiles.tiles(func, cut, group, segment, point, rows)
    # 3 stage
    sch.compute_at("sum", outer[-1], preserve_unit_loops=True)
    if spec.code_bits:
        _weights(sch, spec, outer[-2], segment, (vectors, lanes))
    # 5 vectorize, unroll, parallel
    if divided:
        sch.parallel(sch.fuse(*outer[:divided]))
    _sums(sch, spec, (vectors, lanes), point)
    made = channel_tiles.finished(sch, spec.out_channels, target)
    return ranges.unless_empty(made, segment.tiles) if spec.code_bits else made


def _weights(
    sch: s_tir.Schedule, spec: Conv2d, at: Any, segment: Segment, cells: tuple[int, int]
) -> None:
    """Look up weights that are codes."""
    several = not isinstance(segment.tiles, int) or segment.tiles > 1
    if segment.width == 1 or not several:
        sch.compute_inline(CODED)
        return
    sch.compute_at(CODED, at, preserve_unit_loops=True)
    *_, number, channel = sch.get_loops(CODED)
    vector, lane = sch.split(channel, [*cells])
    # With the codes of a word unrolled, tests are for constants.
    number, inside = sch.split(number, [None, math.gcd(spec.taps, WORD_BITS // spec.code_bits)])
    sch.reorder(vector, number, inside, lane)
    channel_tiles.in_registers(sch, [inside, lane])
    sch.annotate(vector, ranges.WHERE_ANY, 1)


def _sums(sch: s_tir.Schedule, spec: Conv2d, cells: tuple[int, int], point: Point) -> None:
    """Schedule the sums of a tile."""
    *_, column, channel, kh, kw, c = sch.get_loops("sum")
    vector, lane = sch.split(channel, [*cells])
    taps, body = [kw], [vector, column]
    if point["kw_inside"]:
        taps, body = [], [*channel_tiles.by_phase(sch, kw, spec), *body]
    if point["unroll"] > 1 and spec.channels_per_group % point["unroll"] == 0:
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
