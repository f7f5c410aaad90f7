"""Binary convolution on NEON: register tiles of data vectors x four output channels."""

from __future__ import annotations

from collections.abc import Iterable

from tvm import s_tir, tirx

from bnncc.schedules import multithreading
from bnncc.schedules.columns import cut
from bnncc.schedules.intrin_arm import BYTES
from bnncc.schedules.space import Point, Space, with_threads
from bnncc.schedules.templates import lookup, neon_conv2d
from bnncc.schedules.templates.binary_conv2d import conv2d, image
from bnncc.schedules.templates.neon_conv2d import ALL_UNROLLED, MAX_STEPS, Quads, Steps
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import layout
from bnncc.topi_binary.spec import BinaryConv2d

VECTORS = 2
"""Data vectors in a tile, or 3 in one tile of an odd width. They have 8 accumulators; with 16, LLVM
spills some of them where it schedules for processors that execute in order. It spills of 12 too
where as many sums of 16 bits are in use: then the last tile has 1 instead."""


MAX_VECTORS = 4
"""The most data vectors that a tile is tried with."""

UNROLLED = 6
"""Vectors of a run in one loop body."""


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
    tiling = Quads(cut(spec, sizes), _arch(target), target.popcount == "neon-dot")
    # 1 normalise: write the definition in pieces, borders apart from the rest
    sch = s_tir.Schedule(conv2d(spec, tiling=tiling))
    for masked in (False, True)[: 1 + spec.ternary]:
        cuts = lookup.narrowed(spec, tiling, image(spec)[2]) if masked else tiling
        steps = Steps(spec, cuts, masked)
        for part in neon_conv2d.channels(spec, masked):
            if point.get("divide", 0):
                sch.parallel(sch.fuse(*sch.get_loops(f"row_{part.name}")))
            for kind in neon_conv2d.inner_rows(spec)[1]:
                for i, (width, tile) in enumerate(cuts.columns):
                    tiles = -(-width // unit), -(-tile // unit)
                    _nest(sch, f"{part.name}_{kind}_{i}", steps, tiles, kind == "inner", point)
    return sch.mod["main"]


def _nest(
    sch: s_tir.Schedule, name: str, steps: Steps, extents: tuple[int, int], inner: bool,
    point: Point,
) -> None:  # fmt: skip
    """Schedule the loops over `extents`: the places of a piece, and those of a tile."""
    # 2 tile
    width, tile = extents
    tiles, place = sch.split(sch.get_loops(f"out_{name}")[-1], [width // tile, tile])
    unrolled = [place]
    # 3 stage: the sums of a tile and a quad under the epilogue of the tile
    acc = sch.get_sblock(f"acc_{name}")
    sch.compute_at(acc, tiles, preserve_unit_loops=True)
    *_, w, quad = sch.get_loops(acc)
    sch.reorder(quad, w)
    unrolled.append(w)
    under, turns = quad, []
    if steps.widen is not None:
        wide = sch.get_sblock(f"wide_{name}")
        sch.compute_at(wide, quad, preserve_unit_loops=True)
        w, _, *turns = sch.get_loops(wide)[-2 - len(steps.turns) :]
        sch.reorder(*turns, w)
        init = sch.decompose_reduction(wide, turns[0])
        unrolled += [w, sch.get_loops(init)[-1]]
        under = turns[-1]
    sums = sch.get_sblock(f"sums_{name}")
    sch.compute_at(sums, under, preserve_unit_loops=True)
    # 5 unroll
    axes = ["w", *steps.turns, "q", *steps.reduced]
    loops = dict(zip(axes, sch.get_loops(sums)[-len(axes) :], strict=True))
    part = steps.reduced["x"]
    size = max(u for u in range(1, point["unroll"] + 1) if part % u == 0)
    x, some = sch.split(loops.pop("x"), [part // size, size])
    outer = [loops[axis] for axis in steps.reduced if axis in loops]
    sch.reorder(*outer, x, some, loops["w"])
    init = sch.decompose_reduction(sums, [*outer, x][0])
    unrolled += [some, loops["w"], sch.get_loops(init)[-1]]
    if inner and point["flat"] and steps.short:
        unrolled += [*outer, x]
    elif steps.halves and "run" in loops:
        unrolled.append(loops["run"])
    for loop in unrolled:
        sch.unroll(loop)
    if "count" not in steps.counts:  # the last vectors of a run are code of their own
        for loop in [x] * (part > size) + turns[-1:]:
            sch.annotate(loop, "pragma_loop_partition_hint", 1)
    # 4 tensorize
    for kind, pair in {**steps.counts, "widen": steps.widen, "total": steps.total}.items():
        if pair is not None:
            sch.tensorize(sch.get_loops(f"{kind}_{name}")[-1], pair.register())


def choose(spec: BinaryConv2d, target: TargetSpec) -> dict[str, int]:
    """Return the default for one thread, from the registers of `target`."""
    places = _places(spec)
    words = layout.words(spec.channels // spec.groups)
    steps = spec.kernel[0] * -(-words * spec.kernel[1] // (BYTES // 4))
    wide = target.popcount != "neon-dot" and (steps > MAX_STEPS or spec.ternary)
    tiles = -(-places // VECTORS) if wide else max(1, places // VECTORS)
    flat = 1
    taps = spec.kernel[0] * spec.kernel[1]
    if _arch(target) == "arm" and spec.weight_order == "halves" and 1 < taps <= ALL_UNROLLED:
        tiles, flat = places, 0  # of so much code, LLVM spills more than loops cost
    return {"tiles": tiles, "unroll": UNROLLED, "flat": flat}


def _arch(target: TargetSpec) -> str:
    return "aarch64" if target.arch.startswith("aarch64") else "arm"


def _unit(spec: BinaryConv2d) -> int:
    """Return how many columns share a data vector."""
    return 2 if spec.weight_order == "halves" else 1


def _places(spec: BinaryConv2d) -> int:
    """Return how many data vectors cover the width."""
    return -(-image(spec)[2] // _unit(spec))
