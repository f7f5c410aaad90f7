"""Few-bit convolutions: register tiles."""

from __future__ import annotations

from tvm import tirx

from bnncc.schedules import multithreading
from bnncc.schedules.space import Point, Space, tile_sizes, with_threads
from bnncc.schedules.templates import few_bit_conv2d, few_bit_products
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import few_bit_data, layout
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
            "columns": tile_sizes(few_bit_conv2d.flattened(spec).output_hw[1], registers),
            "vectors": range(1, min(blocks, MAX_VECTORS) + 1),
            "rows_outside": (0, 1),
        },
        choose(spec, target),
        threads > 1,
        multithreading.shared(spec, target, threads),
        lambda point: (point["columns"] + 1) * point["vectors"] <= max(3, registers - 2),
    )


def apply(spec: FewBitConv2d, target: TargetSpec, threads: int, point: Point) -> tirx.PrimFunc:
    """Tile a few-bit convolution or dense layer as `point` says."""
    ours = machine(target)
    if spec.method == "pairs" and ours == few_bit_products.VNNI:
        ours = f"x86-{target.vector_bits}"
    outside, parallel = bool(point["rows_outside"]), bool(point.get("divide", 0))
    tile = few_bit_conv2d.Tile(point["columns"], point["vectors"], outside, parallel, ours)
    return multithreading.one_region(few_bit_conv2d.conv2d(spec, tile))


def machine(target: TargetSpec) -> str:
    """Return whose instructions multiply several numbers at once, see `few_bit_products.add`."""
    if target.vector_bits == 512 and "avx512_vnni" in target.features:
        return few_bit_products.VNNI
    x86 = "ssse3" in target.features
    return f"x86-{target.vector_bits}" if x86 else ""


def choose(spec: FewBitConv2d, target: TargetSpec) -> dict[str, int]:
    """Return the default tile of `spec`, from the registers and caches of `target`."""
    flat = few_bit_conv2d.flattened(spec)
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
