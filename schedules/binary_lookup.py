"""Binary convolution by table lookup on x86: when, and in which register tiles."""

from __future__ import annotations

from collections.abc import Iterable

from tvm import tirx

from bnncc.schedules import multithreading
from bnncc.schedules.columns import cut, shares
from bnncc.schedules.space import Point, Space, powers, tile_sizes, with_threads
from bnncc.schedules.templates import lookup
from bnncc.schedules.templates.binary_conv2d import conv2d, image
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import layout
from bnncc.topi_binary.spec import BinaryConv2d

_TILES = {16: (4, 4, False), 32: (6, 1, False), 64: (7, 1, True)}
"""Columns of a tile, nibbles in a loop body and `Lookup.shared`, by the bytes of a vector.

The fastest of those tried on the layers of ``benchmarks/layers.py``. With two vectors of channels
there are 8, 12 or 14 accumulators; SSE needs registers for copies, as its lookup overwrites the
row. Whole lines of 64 bytes are loaded at most twice in a cycle, as many as are looked up, so
those of the table are shared by taps; 16 registers are too few to gain from that.
"""


MAX_ACCUMULATORS = {16: 12, 32: 14, 64: 28}
"""Vectors of sums that fit the registers beside what is added, by the bytes of a vector."""

MAX_UNROLL = 8
"""Nibbles in a loop body: those of a word."""


def space(spec: BinaryConv2d, target: TargetSpec, threads: int) -> Space:
    """Return what can be chosen for `spec`, whose weights are in the order ``nibbles``."""
    per_group = spec.out_channels // spec.groups  # all channels of a tile read the same group
    choices: dict[str, Iterable[int]] = {
        "bytes": [size for size in _TILES if size * 8 <= target.vector_bits],
        "columns": tile_sizes(image(spec)[2], max(MAX_ACCUMULATORS.values())),
        "vectors": powers(4),
        "unroll": powers(MAX_UNROLL),
        "shared": (0, 1),
    }
    divided = multithreading.shared(spec, target, threads)

    def fits(point: Point) -> bool:
        size, lanes = point["bytes"], point["bytes"] * point["vectors"]
        if lanes % layout.NIBBLE_LANES or (size > layout.NIBBLE_LANES and per_group % size):
            return False
        if point["vectors"] > 1 and lanes > layout.NIBBLE_LANES:  # wider than it need be
            blocks = -(-per_group // layout.NIBBLE_LANES)
            if lanes > blocks * layout.NIBBLE_LANES or (spec.groups > 1 and per_group % lanes):
                return False
        return point["columns"] * point["vectors"] <= MAX_ACCUMULATORS[size]

    return with_threads(choices, choose(spec, target), threads > 1, divided, fits)


def apply(spec: BinaryConv2d, point: Point) -> tirx.PrimFunc:
    """Return the kernel of `spec`, whose weights are in the order ``nibbles``."""
    columns = cut(spec, shares(image(spec)[2], point["columns"]))
    parallel = bool(point.get("divide", 0))
    return conv2d(
        spec,
        tiling=lookup.Lookup(
            point["bytes"],
            columns,
            point["vectors"],
            parallel,
            unroll=point["unroll"],
            shared=bool(point["shared"]),
        ),
    )


def choose(spec: BinaryConv2d, target: TargetSpec) -> dict[str, int]:
    """Return the default for one thread, from the registers of `target`."""
    per_group = spec.out_channels // spec.groups
    size = min(target.vector_bits // 8, 64)
    if per_group % size and size > layout.NIBBLE_LANES:
        size = layout.NIBBLE_LANES
    tile = 1 if per_group <= size or (spec.groups > 1 and per_group % (2 * size)) else 2
    budget, unroll, shared = _TILES[size]
    return {
        "bytes": size,
        "columns": shares(image(spec)[2], budget)[0],
        "vectors": max(tile, layout.NIBBLE_LANES // size),
        "unroll": unroll,
        "shared": int(shared),
    }
