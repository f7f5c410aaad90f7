"""Quantised convolutions on x86: which of their operands share a word, and their tiles."""

from __future__ import annotations

from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import layout, quantization, quantized_conv2d
from bnncc.topi_binary.spec import Conv2d

INSTRUCTION = {"bfloat16": "avx512_bf16", "int8": "avx512_vnni"}
"""The feature of a machine that multiplies several operands of a lane at once."""

VECTORS = 4
"""Vectors of output channels that share a datum."""


def packed(operands: str, target: TargetSpec) -> int:
    """Return how many operands share a word on `target`."""
    has = target.vector_bits == 512 and INSTRUCTION.get(operands) in target.features
    return quantization.PACKED[operands] if has else 1


def choose(spec: Conv2d, target: TargetSpec) -> quantized_conv2d.Tile:
    """Return the default tile of `spec` for one thread."""
    per_vector = target.registers_per_vector(layout.LANES)
    registers = target.vector_registers // per_vector
    vectors = min(VECTORS if registers >= 32 else 1, layout.blocks(spec.out_channels))
    # Besides accumulators: a vector of weights each, a datum and a spare.
    columns = max(1, (registers - vectors - 2) // vectors)
    return quantized_conv2d.Tile(columns, vectors)
