"""Schedule of few-bit convolutions and dense layers: register tile of columns x channel vectors.

A data word (bits of a plane, or several numbers) is combined with a vector of weight words of
`LANES` output channels, and the result is added to a vector of sums, by one instruction pair. Sums
of a pair of planes continue in the registers of the previous pair, so each product costs as much as
a binary one. Taps outside the image are skipped; the initial values account for them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tvm import s_tir, tirx

from bnncc.schedules import (
    byte_products,
    channel_tiles,
    intrin_x86,
    level_instructions,
    nchw,
    prefetch,
    ranges,
    tile_choice,
)
from bnncc.schedules.intrin import TensorPair
from bnncc.schedules.intrin_levels import DOT_ADD
from bnncc.schedules.intrin_portable import (
    AND_POPCOUNT,
    MULTIPLY_ADD,
    MULTIPLY_ADD_LANES,
    XOR_POPCOUNT,
)
from bnncc.schedules.space import Point, Space
from bnncc.schedules.templates.channel_tiles import Group
from bnncc.schedules.templates.window import Segment
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import few_bit_data, layout
from bnncc.topi_binary.definitions import define
from bnncc.topi_binary.definitions.few_bit_conv2d import NUMBERS, SHORT
from bnncc.topi_binary.definitions.taps import flattened
from bnncc.topi_binary.layout import LANES
from bnncc.topi_binary.spec import FewBitConv2d

MAX_TILE = 14
"""Maximum number of accumulators; more hide no more latency and only lengthen the code."""

PLANE_TILES = {1: 8, 2: 8}
"""The same for planes, by words per pixel: if LLVM unrolls the loop over words, more columns would
spill accumulators."""

PLANE_TILE = 10
"""The same for other numbers of words."""

MAX_VECTORS = 4
"""Maximum number of channel vectors that share a data word."""

CODE_SUMS = 16
"""Maximum number of vectors of sums in a tile of packed weights; TVM keeps 1 kB on the stack, from
where LLVM moves it to registers."""

SHORT_SPARE = 8
"""Registers for a level, a product, a mask, and codes, beside sums in 16 bits."""

LEVELS = "levels"
"""Block of the sums of levels of each pixel, which all tiles of packed weights read."""

CODES = "codes"
"""Block of codes, each in a byte of its own, which do not depend on the pixel."""


def space(spec: FewBitConv2d, target: TargetSpec, threads: int) -> Space:
    """Return the search space of a few-bit convolution or dense layer."""
    if tile_choice.pays(spec, target):
        return byte_products.space(spec, target, threads)
    default, sums = choose(spec, target), _sums_of_vector(spec, target)
    return channel_tiles.space(spec, target, threads, MAX_VECTORS, default, sums)


def writes_nchw(spec: FewBitConv2d, target: TargetSpec) -> bool:
    """Return whether the kernel of `spec` writes NCHW results itself."""
    return nchw.fits(spec, target)


def apply(
    func: tirx.PrimFunc, spec: FewBitConv2d, target: TargetSpec, threads: int, point: Point
) -> tirx.PrimFunc:
    """Schedule a few-bit convolution or dense layer."""
    if tile_choice.pays(spec, target):
        return byte_products.apply(func, spec, target, threads, point)
    flat, vectors = flattened(spec), min(point["vectors"], layout.blocks(spec.out_channels))
    per_group = flat.out_channels // flat.groups // LANES
    while flat.groups > 1 and per_group and per_group % vectors:
        vectors -= 1
    divided, rule = 3 * point.get("divide", 0), partial(_tiles, flat, target, point)
    before = (LEVELS,) if spec.method == "packed" else ()
    if _short(spec, target) is not None:
        func = ranges.with_parameters(define(spec, SHORT), func)
    single = _vectors(spec, target, 1)
    made = channel_tiles.ranged(
        func, flat, target, point, rule, vectors, divided, before=before, single=single,
        fixed=(CODES,),
    )  # fmt: skip
    return prefetch.weights(made, spec, target)


def _tiles(
    spec: FewBitConv2d, target: TargetSpec, point: Point, func: tirx.PrimFunc, group: Group,
    segment: Segment, rows: int,
) -> tirx.PrimFunc:  # fmt: skip
    """Schedule a range of columns and channel vectors."""
    # 1 normalize
    columns, vectors = channel_tiles.axes(group, segment)
    axes = {b.name_hint: [i.iter_type for i in b.iter_vars] for b in ranges.blocks(func)}
    names = [name for name in axes if name.startswith(("sum", "count"))]
    first = {name: axes[name].count(0) - 2 for name in names}  # after planes and parts
    cut = {name: {axis: columns, axis + 1: vectors} for name, axis in first.items()}
    cut["acc"] = {2: columns, 3: (vectors[0] * LANES, vectors[1] * LANES)}
    short = _short(spec, target)
    if short is not None:
        cut |= {CODES: {0: vectors}, "short": {3: columns, 4: vectors}}
    # 2 tile
    sch, tile = channel_tiles.tiles(func, cut, group, segment, point, rows, (LEVELS,))
    # 3 stage
    sch.compute_at("acc", tile[-1], preserve_unit_loops=True)
    *_, column, channel = sch.get_loops("acc")
    vector, lane = sch.split(channel, [None, LANES])
    channel_tiles.in_registers(sch, [column, vector, lane])
    # 5 parallel: only loops outside whole reductions
    if point.get("divide", 0):
        sch.parallel(sch.fuse(*tile[:3]))
    # 4 tensorize
    at, source = tile[-1], ""
    if short is not None:
        _short_sums(sch, short, at)
        names, source = [], short[0].source
    for name in reversed(names):
        if sch.get_child_blocks(sch.get_sblock(name)):
            pair = _pair(sch, name, spec, target)
            # With others, an order of taps that needs fewer registers gains nothing, or loses 4 %.
            phased = spec if spec.method == "floats" or pair is intrin_x86.VNNI else None
            channel_tiles.sums(sch, name, pair, at, spec=phased)
            at, source = tile[-1], pair.source
            continue
        sch.compute_at(name, at, preserve_unit_loops=True)
        *_, column, vector, at = sch.get_loops(name)
        sch.reorder(at, vector, column)
        channel_tiles.unrolled(sch, [vector, column])
        channel_tiles.unrolled(sch, sch.get_loops(sch.decompose_reduction(name, at))[-2:])
    if source:
        sch.annotate(tile[-1], "pragma_import_llvm", source)
    return channel_tiles.finished(sch, spec.out_channels, target)


def _short_sums(sch: s_tir.Schedule, pairs: tuple[TensorPair, TensorPair], tile: Any) -> None:
    """Schedule sums in 32 bits under a tile, and those in 16 bits and codes under each turn."""
    sch.compute_at("sum", tile, preserve_unit_loops=True)
    *_, column, vector, turn = sch.get_loops("sum")
    sch.reorder(turn, column, vector)
    sch.compute_at("short", turn, preserve_unit_loops=True)
    first = [column, vector, *sch.get_loops(sch.decompose_reduction("sum", turn))[-2:]]
    *_, column, vector, word, place = sch.get_loops("short")
    sch.reorder(word, place, vector, column)
    sch.compute_at(CODES, vector, preserve_unit_loops=True)
    sch.annotate(place, prefetch.REPEATED, 1)
    first += [place, vector, column]
    channel_tiles.unrolled(sch, first)
    channel_tiles.unrolled(sch, sch.get_loops(sch.decompose_reduction("short", word))[-2:])
    for block, pair in zip(("short_add", "sum_add"), pairs, strict=True):
        sch.tensorize(sch.get_loops(block)[-1], pair.register())


def _pair(sch: s_tir.Schedule, name: str, spec: FewBitConv2d, target: TargetSpec) -> TensorPair:
    """Return the instruction for the products in a block of sums."""
    if spec.method == "packed":
        return level_instructions.codes(target)[spec.weight_bits]
    if spec.method in NUMBERS:
        dtype = NUMBERS[spec.method]
        return level_instructions.dot_add(spec, target).get(dtype, DOT_ADD[dtype])
    if spec.method == "floats":
        return MULTIPLY_ADD_LANES[LANES] if spec.depthwise else MULTIPLY_ADD
    (product,) = sch.get_child_blocks(sch.get_sblock(name))
    subtracted = isinstance(sch.get(product).body.value, tirx.Sub)
    return XOR_POPCOUNT if spec.method == "xor" else AND_POPCOUNT[-1 if subtracted else 1]


def _short(spec: FewBitConv2d, target: TargetSpec) -> tuple[TensorPair, TensorPair] | None:
    """Return the instructions for sums that begin in 16 bits, if the layer has such."""
    return level_instructions.short(target) if spec.method == "packed" else None


def _sums_of_vector(spec: FewBitConv2d, target: TargetSpec) -> int:
    """Return the number of vectors of sums for each vector of outputs."""
    return 1 if _short(spec, target) is not None else few_bit_data.sums_of_word(spec)


def _budget(spec: FewBitConv2d, target: TargetSpec) -> int:
    """Return the maximum number of accumulators in a tile."""
    per_vector, sums = target.registers_per_vector(LANES), _sums_of_vector(spec, target)
    spare, most = 2 * per_vector + 2, MAX_TILE
    if _short(spec, target) is not None:
        spare = SHORT_SPARE
    elif spec.method == "packed":  # with 128 bits, decoded codes need as many registers as words
        spare, most = per_vector * (4 if target.vector_bits == 128 else 2), CODE_SUMS // sums
    if spec.form == "planes":
        most = PLANE_TILES.get(few_bit_data.group_words(spec), PLANE_TILE)
    return max(1, min(most, (target.vector_registers - spare) // per_vector // sums))


def _vectors(spec: FewBitConv2d, target: TargetSpec, columns: int) -> int:
    """Return the channel vectors in a tile of so many columns."""
    budget = _budget(spec, target)
    if _short(spec, target) is not None:  # a vector of words stays in registers, too
        room = (target.vector_registers - SHORT_SPARE) // target.registers_per_vector(LANES)
        # Tiles of a symbolic number of rows share memory with those of a rest.
        most = CODE_SUMS // 2 if channel_tiles.any_rows(flattened(spec)) else CODE_SUMS
        budget = min(most, room // (columns + 1) * columns)
    return max(1, min(budget // columns, MAX_VECTORS, layout.blocks(spec.out_channels)))


def choose(spec: FewBitConv2d, target: TargetSpec) -> dict[str, int]:
    """Return the default tile of `spec`, from the registers and caches of `target`."""
    flat, budget = flattened(spec), _budget(spec, target)
    width = channel_tiles.width_of(flat, min(budget, channel_tiles.MOST_ROWS))
    count = -(-width // budget)
    columns = -(-width // count)
    blocks = layout.blocks(spec.out_channels)
    one = target.registers_per_vector(LANES) == 1
    if spec.method == "packed" and one and columns > budget // 2 and blocks > 1:
        columns = budget // 2  # as many loads as products, otherwise
    vectors = _vectors(spec, target, columns)
    (size,), _ = few_bit_data.constants(spec)[0]
    data = spec.height * spec.width * spec.channels // 8 * spec.data_bits
    outside = size * 4 < min(target.l2_bytes // 2, max(data, target.l1_bytes))
    return {"columns": columns, "vectors": vectors, "rows_outside": int(outside)}
