"""Few-bit convolutions: register tiles."""

from __future__ import annotations

from tvm import s_tir, tirx

from bnncc.schedules import channel_tiles, multithreading
from bnncc.schedules.intrin import TensorPair
from bnncc.schedules.intrin_x86 import DOT_ADD
from bnncc.schedules.space import Point, Space, tile_sizes, with_threads
from bnncc.schedules.templates import few_bit_conv2d
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import few_bit_data, layout
from bnncc.topi_binary.definitions.taps import flattened
from bnncc.topi_binary.spec import FewBitConv2d

MAX_TILE = 14
"""Accumulators beyond this many hide no more latency and only lengthen the code."""

PLANE_TILES = {1: 8, 2: 8}
"""The same for planes, by the words of a pixel: where LLVM unrolls the loop over words, more
columns would move accumulators between registers and memory."""

PLANE_TILE = 10
"""For other numbers of words."""

MAX_VECTORS = 4
"""Vectors of output channels that share a datum."""


def space(spec: FewBitConv2d, target: TargetSpec, threads: int) -> Space:
    """Return what can be chosen for a few-bit convolution or dense layer."""
    blocks = layout.blocks(spec.out_channels)
    registers = target.vector_registers // target.registers_per_vector(layout.LANES)
    return with_threads(
        {
            "columns": tile_sizes(flattened(spec).output_hw[1], registers),
            "vectors": range(1, min(blocks, MAX_VECTORS) + 1),
            "rows_outside": (0, 1),
        },
        choose(spec, target),
        threads > 1,
        multithreading.shared(spec, target, threads),
        lambda point: (point["columns"] + 1) * point["vectors"] <= max(3, registers - 2),
    )


def apply(spec: FewBitConv2d, target: TargetSpec, threads: int, point: Point) -> tirx.PrimFunc:
    """Schedule a few-bit convolution or dense layer as `point` says."""
    # 1 normalise: write the definition in ranges, borders apart from the rest
    kernel = few_bit_conv2d.Kernel(spec, point["columns"], point["vectors"])
    sch = s_tir.Schedule(kernel.func)
    ours = instructions(target).get(few_bit_conv2d.NUMBERS.get(spec.method, ""))
    for _, ranges in kernel.ranges:
        names = [name for name, _ in ranges]
        order = "nhow" if point["rows_outside"] else "nohw"
        channel_tiles.outer(sch, names, order, 3, bool(point.get("divide", 0)))
        for name in names:
            for part, pair in kernel.pairs[name].items():
                channel_tiles.sums(sch, part, ours or pair, under=spec.form == "planes")
    if ours is not None and ours.source:
        loop, *_ = sch.get_loops(f"out_{names[0]}")
        sch.annotate(loop, "pragma_import_llvm", ours.source)
    return multithreading.one_region(channel_tiles.bounded(sch.mod["main"]))


def instructions(target: TargetSpec) -> dict[str, TensorPair]:
    """Return what adds several products at once on `target`, by the type of the data."""
    return {
        dtype: pair
        for (dtype, bits), pair in DOT_ADD.items()
        if bits == target.vector_bits and pair.feature in target.features
    }


def choose(spec: FewBitConv2d, target: TargetSpec) -> dict[str, int]:
    """Return the default tile of `spec`, from the registers and caches of `target`."""
    flat = flattened(spec)
    width = flat.output_hw[1]
    per_vector = target.registers_per_vector(layout.LANES)
    spare = 2 * per_vector + 2
    most = MAX_TILE
    if spec.form == "planes":
        most = PLANE_TILES.get(few_bit_data.group_words(spec), PLANE_TILE)
    budget = max(1, min(most, (target.vector_registers - spare) // per_vector))
    count = -(-width // budget)
    columns = -(-width // count)
    vectors = max(1, min(budget // columns, MAX_VECTORS, layout.blocks(spec.out_channels)))
    (size,), _ = few_bit_data.constants(spec)[0]
    data = spec.height * spec.width * spec.channels // 8 * spec.data_bits
    outside = size * 4 < min(target.l2_bytes // 2, max(data, target.l1_bytes))
    return {"columns": columns, "vectors": vectors, "rows_outside": int(outside)}
