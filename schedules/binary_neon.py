"""Binary convolution on NEON: register tiles of data vectors x four output channels."""

from __future__ import annotations

from collections.abc import Iterable

from tvm import tirx

from bnncc.schedules import multithreading
from bnncc.schedules.columns import cut
from bnncc.schedules.space import Point, Space, with_threads
from bnncc.schedules.templates import neon_tiling
from bnncc.schedules.templates.binary_conv2d import conv2d, image
from bnncc.schedules.templates.neon_sums import BYTES, MAX_STEPS, Machine
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import layout
from bnncc.topi_binary.spec import BinaryConv2d

VECTORS = 2
"""Data vectors in a tile, or 3 in one tile of an odd width. They have 8 accumulators; with 16, LLVM
spills some of them where it schedules for processors that execute in order. It spills of 12 too
where as many sums of 16 bits are in use: then the last tile has 1 instead."""


MAX_VECTORS = 4
"""The most data vectors that a tile is tried with."""


def space(spec: BinaryConv2d, target: TargetSpec, threads: int) -> Space:
    """Return what can be chosen for `spec`, whose weights are in ``vectors`` or ``halves``."""
    places = _places(spec)
    choices: dict[str, Iterable[int]] = {
        "tiles": {-(-places // size) for size in range(1, MAX_VECTORS + 1)},
        "unroll": (1, 2, 3),
        "flat": (0, 1),
    }
    divided = multithreading.shared(spec, target, threads)
    return with_threads(choices, choose(spec, target), threads > 1, divided)


def apply(spec: BinaryConv2d, target: TargetSpec, point: Point) -> tirx.PrimFunc:
    """Return the kernel of `spec`, whose weights are in the order ``vectors`` or ``halves``."""
    places, count = _places(spec), point["tiles"]
    unit = _unit(spec)
    sizes = [(places // count + (i < places % count)) * unit for i in range(count)]
    sizes[-1] -= places * unit - image(spec)[2]
    arch = "aarch64" if target.arch.startswith("aarch64") else "arm"
    machine = Machine(arch, target.popcount == "neon-dot")
    parallel = bool(point.get("divide", 0))
    tiling = neon_tiling.Quads(
        machine, cut(spec, sizes), parallel, point["unroll"], bool(point["flat"])
    )
    return conv2d(spec, tiling=tiling)


def choose(spec: BinaryConv2d, target: TargetSpec) -> dict[str, int]:
    """Return the default for one thread, from the registers of `target`."""
    places = _places(spec)
    words = layout.words(spec.channels // spec.groups)
    steps = spec.kernel[0] * -(-words * spec.kernel[1] // (BYTES // 4))
    wide = target.popcount != "neon-dot" and (steps > MAX_STEPS or spec.ternary)
    tiles = -(-places // VECTORS) if wide else max(1, places // VECTORS)
    return {"tiles": tiles, "unroll": neon_tiling.UNROLLED, "flat": 1}


def _unit(spec: BinaryConv2d) -> int:
    """Return how many columns share a data vector."""
    return 2 if spec.weight_order == "halves" else 1


def _places(spec: BinaryConv2d) -> int:
    """Return how many data vectors cover the width."""
    return -(-image(spec)[2] // _unit(spec))
