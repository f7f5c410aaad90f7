"""Binary convolution by table lookup on x86: when, and in which register tiles."""

from __future__ import annotations

from dataclasses import replace

from tvm import tirx

from bnncc.schedules import grain
from bnncc.schedules.columns import cut
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import layout, lookup
from bnncc.topi_binary.conv2d import conv2d, image
from bnncc.topi_binary.spec import BinaryConv2d

_TILES = {16: (4, 4), 32: (6, 1), 64: (7, 1)}
"""Columns of a tile and nibbles in a loop body, by the bytes of a vector.

The fastest of those tried on the layers of ``benchmarks/layers.py``. With two vectors of channels
there are 8, 12 or 14 accumulators; SSE needs registers for copies, as its lookup overwrites the
row.
"""


def apply(spec: BinaryConv2d, target: TargetSpec, threads: int) -> tirx.PrimFunc:
    """Return the kernel of `spec`, whose weights are in the order ``nibbles``."""
    parallel = grain.shared(spec, target, threads)
    return conv2d(spec, tiling=replace(choose(spec, target), parallel=parallel))


def choose(spec: BinaryConv2d, target: TargetSpec) -> lookup.Lookup:
    """Return the default tiling of `spec`, from the registers of `target`."""
    per_group = spec.out_channels // spec.groups  # all channels of a tile read the same group
    size = min(target.vector_bits // 8, 64)
    if per_group % size and size > layout.NIBBLE_LANES:
        size = layout.NIBBLE_LANES
    tile = 1 if per_group <= size or (spec.groups > 1 and per_group % (2 * size)) else 2
    tile = max(tile, layout.NIBBLE_LANES // size)
    budget, unroll = _TILES[size]
    _, _, width = image(spec)
    count = -(-width // budget)
    sizes = [width // count + (i < width % count) for i in range(count)]
    return lookup.Lookup(size, cut(spec, sizes), tile, unroll=unroll)
