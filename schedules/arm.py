"""Binary convolution on NEON: register tiles of data vectors x four output channels."""

from __future__ import annotations

from tvm import tirx

from bnncc.schedules import grain
from bnncc.schedules.columns import cut
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import layout, quad_order
from bnncc.topi_binary.conv2d import conv2d, image
from bnncc.topi_binary.neon import BYTES, MAX_STEPS, Machine
from bnncc.topi_binary.spec import BinaryConv2d

VECTORS = 2
"""Data vectors in a tile, or 3 in one tile of an odd width. They have 8 accumulators; with 16, LLVM
spills some of them where it schedules for processors that execute in order. It spills of 12 too
where as many sums of 16 bits are in use: then the last tile has 1 instead."""


def apply(spec: BinaryConv2d, target: TargetSpec, threads: int) -> tirx.PrimFunc:
    """Return the kernel of `spec`, whose weights are in the order ``vectors`` or ``halves``."""
    parallel = grain.shared(spec, target, threads)
    return conv2d(spec, tiling=choose(spec, target, parallel))


def choose(spec: BinaryConv2d, target: TargetSpec, parallel: bool = False) -> quad_order.Quads:
    """Return the default tiling of `spec`, from the registers of `target`."""
    arch = "aarch64" if target.arch.startswith("aarch64") else "arm"
    unit = 2 if spec.weight_order == "halves" else 1
    _, _, width = image(spec)
    places = -(-width // unit)
    words = layout.words(spec.channels // spec.groups)
    steps = spec.kernel[0] * -(-words * spec.kernel[1] // (BYTES // 4))
    wide = target.popcount != "neon-dot" and (steps > MAX_STEPS or spec.ternary)
    count = -(-places // VECTORS) if wide else max(1, places // VECTORS)
    sizes = [(places // count + (i < places % count)) * unit for i in range(count)]
    sizes[-1] -= places * unit - width
    machine = Machine(arch, target.popcount == "neon-dot")
    return quad_order.Quads(machine, cut(spec, sizes), parallel)
