"""Schedule of convolutions and dense layers in bfloat16: words of two channels.

First all data are rounded to bfloat16 (to nearest); two adjacent channels of a pixel form a word,
which is multiplied by a vector of weight words of `LANES` output channels. Sums of a tile of
columns and vectors stay in registers over the whole reduction, as in `float_conv2d`. Without a
bfloat16 instruction, words are single float32 numbers with the same values.
"""

from __future__ import annotations

import math
from functools import partial

from tvm import s_tir, tirx

from bnncc.schedules import (
    byte_products,
    channel_tiles,
    ranges,
    tile_choice,
)
from bnncc.schedules.intrin_portable import MULTIPLY_ADD
from bnncc.schedules.intrin_x86 import DOT_ADD_BFLOAT16, ROUND_BFLOAT16
from bnncc.schedules.space import Point, Space
from bnncc.schedules.templates.channel_tiles import Group
from bnncc.schedules.templates.window import Segment
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import layout, quantization
from bnncc.topi_binary.definitions.taps import flattened
from bnncc.topi_binary.layout import LANES
from bnncc.topi_binary.spec import Conv2d

PAIRS = {1: MULTIPLY_ADD, 2: DOT_ADD_BFLOAT16}
"""Multiply-add instruction, by the number of operands per word."""

MAX_TILE = 24
"""Maximum number of accumulators; more hide no more latency and only lengthen the code."""

MAX_VECTORS = 7
"""Maximum number of channel vectors that share a data word."""

SHARED = ("operand",)
"""Blocks whose tensors several loop nests share."""


def space(spec: Conv2d, target: TargetSpec, threads: int) -> Space:
    """Return the search space of a bfloat16 layer."""
    if tile_choice.pays(spec, target):
        return byte_products.space(spec, target, threads)
    return channel_tiles.space(spec, target, threads, MAX_VECTORS, choose(spec, target))


def choose(spec: Conv2d, target: TargetSpec) -> dict[str, int]:
    """Return the default tile of `spec`, from the registers and caches of `target`."""
    flat, blocks = flattened(spec), layout.blocks(spec.out_channels)
    registers = target.vector_registers // target.registers_per_vector(LANES)
    budget = max(1, min(MAX_TILE, registers - 4))
    width = channel_tiles.width_of(flat, min(budget, channel_tiles.MOST_ROWS))
    vectors = min(2 if budget >= 8 else 1, blocks)
    if width < budget // 2:
        vectors = max(1, min(budget // width, MAX_VECTORS, blocks))
    columns = -(-width // -(-width // max(1, budget // vectors)))
    data = spec.height * spec.width * spec.channels * 2
    weight = quantization.weight_type(spec)[0] * 4
    outside = weight < min(data, target.l2_bytes // 2)
    return {"columns": columns, "vectors": vectors, "rows_outside": int(outside)}


def apply(
    func: tirx.PrimFunc, spec: Conv2d, target: TargetSpec, threads: int, point: Point
) -> tirx.PrimFunc:
    """Schedule a bfloat16 layer."""
    if tile_choice.pays(spec, target):
        return byte_products.apply(func, spec, target, threads, point)
    flat, divided, vectors = flattened(spec), 3 * point.get("divide", 0), point["vectors"]
    operand, rule = _operand(func, flat, bool(divided)), partial(_tiles, flat, target, point)
    sums = channel_tiles.ranged(func, flat, target, point, rule, vectors, divided)
    return ranges.followed([operand, sums])  # with a barrier between them


def _operand(func: tirx.PrimFunc, spec: Conv2d, divided: bool) -> tirx.PrimFunc:
    """Schedule the rounding of the data."""
    sch = s_tir.Schedule(ranges.part(func, {"operand": {}}, SHARED))
    n, y, x, c = sch.get_loops("operand")
    depth = quantization.words_of_pixel(spec) * spec.packed
    if spec.data_layout == "NHWC" and depth == spec.channels:
        lanes = math.gcd(depth, LANES)
        outer, vector = sch.split(c, [None, lanes])
        if lanes == LANES and spec.packed == 2:
            sch.tensorize(vector, ROUND_BFLOAT16.register())
            sch.annotate(outer, "pragma_import_llvm", ROUND_BFLOAT16.source)
        elif lanes > 1:
            sch.vectorize(vector)
    if divided:
        sch.parallel(sch.fuse(n, y, x))
    return sch.mod["main"]


def _tiles(
    spec: Conv2d, target: TargetSpec, point: Point, func: tirx.PrimFunc, group: Group,
    segment: Segment, rows: int,
) -> tirx.PrimFunc:  # fmt: skip
    """Schedule a range of columns and channel vectors."""
    # 1 normalize
    columns, vectors = channel_tiles.axes(group, segment)
    # 2 tile
    cut = {"sum": {2: columns, 3: vectors}}
    sch, tile = channel_tiles.tiles(func, cut, group, segment, point, rows, SHARED)
    # 5 parallel: only loops outside whole reductions
    if point.get("divide", 0):
        sch.parallel(sch.fuse(*tile[:3]))
    # 3 stage, 4 tensorize
    pair = PAIRS[spec.packed]
    channel_tiles.sums(sch, "sum", pair, tile[-1], kw_inside=False)
    if pair.source:
        sch.annotate(tile[-1], "pragma_import_llvm", pair.source)
    return channel_tiles.finished(sch, spec.out_channels, target)
