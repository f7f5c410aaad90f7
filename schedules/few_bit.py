"""Few-bit convolutions: register tiles."""

from __future__ import annotations

from tvm import tirx

from bnncc.schedules import grain
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import few_bit, few_bit_data, layout, products
from bnncc.topi_binary.build import output_hw
from bnncc.topi_binary.spec import FewBitConv2d, Spec

MAX_TILE = 14
"""Accumulators beyond this many hide no more latency and only lengthen the code."""

MAX_VECTORS = 4
"""Vectors of output channels that share a datum."""


def apply(
    func: tirx.PrimFunc, spec: Spec, target: TargetSpec, threads: int
) -> tirx.PrimFunc | None:
    """Tile a few-bit convolution or dense layer."""
    if not isinstance(spec, FewBitConv2d) or target.kind != "llvm":
        return None
    return grain.one_region(
        few_bit.conv2d(spec, choose(spec, target, grain.shared(spec, target, threads)))
    )


def machine(target: TargetSpec) -> str:
    """Return whose instructions multiply several numbers on `target`, see `products.add`."""
    if target.vector_bits == 512 and "avx512_vnni" in target.features:
        return products.VNNI
    x86 = "ssse3" in target.features
    return f"x86-{target.vector_bits}" if x86 else ""


def choose(spec: FewBitConv2d, target: TargetSpec, parallel: bool = False) -> few_bit.Tile:
    """Return the default tile of `spec`, from the registers and caches of `target`."""
    flat = few_bit.flattened(spec)
    width = output_hw(flat)[1]
    per_vector = target.registers_per_vector(layout.LANES)
    spare = 2 * per_vector + 2
    budget = max(1, min(MAX_TILE, (target.vector_registers - spare) // per_vector))
    count = -(-width // budget)
    columns = -(-width // count)
    vectors = max(1, min(budget // columns, MAX_VECTORS, layout.blocks(spec.out_channels)))
    (size,), _ = few_bit_data.constants(spec)[0]
    data = spec.height * spec.width * spec.channels // 8 * spec.data_bits
    outside = size * 4 < min(target.l2_bytes // 2, max(data, target.l1_bytes))
    ours = machine(target)
    if spec.method == "pairs" and ours == products.VNNI:
        ours = f"x86-{target.vector_bits}"
    return few_bit.Tile(columns, vectors, outside, parallel, ours)
