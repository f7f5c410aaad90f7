"""Quantised convolutions on x86: which of their operands share a word, and their tiles."""

from __future__ import annotations

from bnncc.schedules.intrin_x86 import DOT_ADD
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import layout, quantization
from bnncc.topi_binary.spec import Conv2d

PAIRS = {quantization.PACKED["int8"]: DOT_ADD["uint8", 512]}
"""What multiplies several operands of a lane at once, by how many, where not defined by itself."""

INSTRUCTION = {"bfloat16": "avx512_bf16", "int8": "avx512_vnni"}
"""The feature of a machine that multiplies several operands of a lane at once."""

VECTORS = 4
"""Vectors of output channels that share a datum."""


def packed(operands: str, target: TargetSpec) -> int:
    """Return how many operands share a word on `target`."""
    if target.kind == "cuda":  # tensor cores multiply pairs, Turing's those of float16 alone
        paired = operands == "bfloat16" and "sm_75" not in target.gpus
        return quantization.PACKED[operands] if paired else 1
    has = target.vector_bits == 512 and INSTRUCTION.get(operands) in target.features
    return quantization.PACKED[operands] if has else 1


def limits(spec: Conv2d, target: TargetSpec) -> tuple[int, int]:
    """Return the most vectors in a tile, and how many registers of 16 lanes there are."""
    per_vector = target.registers_per_vector(layout.LANES)
    registers = target.vector_registers // per_vector
    return min(VECTORS if registers >= 32 else 1, layout.blocks(spec.out_channels)), registers


def choose(spec: Conv2d, target: TargetSpec) -> dict[str, int]:
    """Return the default tile of `spec`, for one thread."""
    vectors, registers = limits(spec, target)
    # Besides accumulators: a vector of weights each, a datum and a spare.
    return {"columns": max(1, (registers - vectors - 2) // vectors), "vectors": vectors}
