"""Binary convolution by table lookup on x86: when, and in which register tiles.

A tile of columns x vectors of output channels keeps its sums of bytes in registers while the
nibbles of a few words, for all taps of a kernel row, are looked up; then they are widened.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from tvm import s_tir, tirx

from bnncc.schedules import multithreading
from bnncc.schedules.columns import cut, shares
from bnncc.schedules.intrin_portable import SPREAD_NIBBLES, WIDENING_ADD
from bnncc.schedules.intrin_x86 import LOOKUP_ADD
from bnncc.schedules.space import Point, Space, powers, tile_sizes, with_threads
from bnncc.schedules.templates import lookup
from bnncc.schedules.templates.binary_conv2d import conv2d, image
from bnncc.schedules.templates.lookup import Lookup
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import layout
from bnncc.topi_binary.spec import BinaryConv2d

_TILES = {16: (4, 4, False), 32: (6, 1, False), 64: (7, 1, True)}
"""Columns of a tile, nibbles in a loop body and whether taps share rows, by the bytes of a vector.

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
    """Return what can be chosen for `spec`, whose weights are in the order ``nibbles``.

    With ``shared``, a row of the table stays in a register for all taps of a kernel row that read
    the same pixel, with the taps unrolled; else it is loaded again for each tap.
    """
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
    """Schedule the kernel of `spec`, whose weights are in the order ``nibbles``."""
    columns = cut(spec, shares(image(spec)[2], point["columns"]))
    tiling = Lookup(point["bytes"], columns, point["vectors"])
    # 1 normalise: write the definition in pieces, borders apart from the rest
    sch = s_tir.Schedule(conv2d(spec, tiling=tiling))
    for masked in (False, True)[: 1 + spec.ternary]:
        cuts = lookup.narrowed(spec, tiling, image(spec)[2]) if masked else tiling
        prefix = "zero_" if masked else ""
        sch.vectorize(sch.get_loops(f"{prefix}table")[-1])
        for plane in range(1 + masked):
            _spread(sch, f"{prefix}spread_{plane}")
        for plane in range(2 * masked):
            *_, row = sch.get_loops(f"plane_{plane}")
            lanes = math.gcd(int(sch.get(row).extent), lookup.CONVERTED)
            sch.vectorize(sch.split(row, [None, lanes])[1])
        for part in lookup.channels(spec, cuts, masked):
            _channels(sch, spec, cuts, part, point)
    return sch.mod["main"]


def _spread(sch: s_tir.Schedule, name: str) -> None:
    """Tensorize the copy of the data."""
    loop = sch.get_loops(name)[-1]
    sch.tensorize(loop, SPREAD_NIBBLES[int(sch.get(loop).extent)].register())


def _channels(
    sch: s_tir.Schedule, spec: BinaryConv2d, tiling: Lookup, part: lookup.Channels, point: Point
) -> None:
    """Schedule a range of output channels: one nest of loops over its tiles, images and rows.

    In it the tiles of columns follow each other, so that a tile's weights are unpacked once.
    """
    parallel = bool(point.get("divide", 0))
    # 2 tile
    rows, tiles = [], []
    for i, (width, tile) in enumerate(tiling.columns):
        o, n, h, w = sch.get_loops(f"out_{part.name}_{i}")
        w1, w2 = sch.split(w, [width // tile, tile])
        sch.unroll(w2)
        if parallel:  # few rows are divided evenly, and few threads write to the same words
            sch.reorder(n, h, o)
        rows.append(o if parallel else h)
        tiles.append(w1)
    if len(rows) > 1:
        sch.merge(*rows)
    outer = sch.get_loops(f"out_{part.name}_0")[:3]
    # 3 stage: sums under a tile of columns, weights (and their bits) under a tile of channels
    names = [f"{part.name}_{i}" for i in range(len(tiles))]
    for name, where in zip(names, tiles, strict=True):
        sch.compute_at(f"acc_{name}", where, preserve_unit_loops=True)
        _stage(sch, name)
    nibbles = sch.get_sblock(f"nibbles_{part.name}")
    if spec.mode == "and":
        names.append(f"{part.name}_bits")
        if not parallel:
            sch.compute_at(f"acc_{names[-1]}", outer[0], preserve_unit_loops=True)
        _stage(sch, names[-1])
    if not parallel:
        sch.compute_at(nibbles, outer[0], preserve_unit_loops=True)
    # 5 vectorize, unroll, parallel
    if parallel:
        sch.parallel(sch.fuse(*outer))
        sch.parallel(sch.get_loops(nibbles)[0])
    *_, side, vector, some, lane = sch.get_loops(nibbles)
    for loop in (side, vector, some):
        sch.unroll(loop)
    sch.vectorize(lane)
    alone = [width == tile for width, tile in tiling.columns]  # perhaps at a border
    for name, split in zip(names, [*alone, False], strict=False):
        _sum(sch, name, tiling.size, point, split)


def _stage(sch: s_tir.Schedule, name: str) -> None:
    """Move sums of bytes under those of 16 bits, with a turn of the reduction outermost."""
    *_, w, o, plane, kh, turn = sch.get_loops(f"acc_{name}")
    sch.reorder(plane, kh, turn, w, o)
    sch.compute_at(f"sums_{name}", turn, preserve_unit_loops=True)


def _sum(sch: s_tir.Schedule, name: str, size: int, point: Point, split: bool) -> None:
    """Schedule the sums of a tile; with `split`, taps are told apart even if they share no rows."""
    acc, sums = sch.get_sblock(f"acc_{name}"), sch.get_sblock(f"sums_{name}")
    *_, plane, _, _, w, o = sch.get_loops(acc)
    unrolled = [w, o]
    init = sch.decompose_reduction(acc, plane)
    unrolled += sch.get_loops(init)[-2:]
    *_, w, _, _, _, o, kw, nibble = sch.get_loops(sums)
    nibble, *body = sch.split(nibble, [None, point["unroll"]])
    outer = [nibble] if point["shared"] else [kw, nibble]
    if point["shared"]:  # rows stay in registers from tap to tap, or weights from column to column
        extents = [int(sch.get(loop).extent) for loop in (w, kw, o)]
        body += [w, kw] if extents[0] > extents[1] * extents[2] else [kw, w]
    else:
        body.append(w)
    body.append(o)
    sch.reorder(*outer, *body)
    unrolled += [*body, *([kw] if split and not point["shared"] else [])]
    init = sch.decompose_reduction(sums, outer[0])
    unrolled += sch.get_loops(init)[-2:]
    for loop in unrolled:
        sch.unroll(loop)
    # 4 tensorize
    sch.tensorize(sch.get_loops(f"lookup_{name}")[-2], LOOKUP_ADD[size].register())
    sch.tensorize(sch.get_loops(f"widen_{name}")[-1], WIDENING_ADD[size].register())


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
