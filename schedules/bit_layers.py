"""Schedules of elementwise kernels and of kernels that move bits."""

from __future__ import annotations

from dataclasses import replace

from tvm import s_tir, tirx

from bnncc.schedules import epilogue, multithreading, portable
from bnncc.schedules.space import Point, Space, powers, with_threads
from bnncc.schedules.templates.image_bits import image_bits as make_image_bits
from bnncc.schedules.templates.planar_elementwise import write_nchw, write_transposed
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import layout
from bnncc.topi_binary.bits_table import needs_table
from bnncc.topi_binary.layout import LANES
from bnncc.topi_binary.signature import Operator
from bnncc.topi_binary.spec import (
    Elementwise,
    ImageBits,
    SliceBits,
    Spec,
    WeightsOfRows,
)
from bnncc.topi_binary.step import TENSORS

VECTORS = 4
"""Channel vectors per iteration of the loop over pixels."""

MAX_VECTORS = 16
"""Largest such number in the search space."""


def elementwise_space(spec: Elementwise, target: TargetSpec, threads: int) -> Space:
    """Return the search space of an elementwise kernel."""
    blocks = layout.blocks(spec.channels)
    return with_threads(
        {"vectors": powers(min(MAX_VECTORS, blocks)) if _lanes_are_channels(spec) else ()},
        {"vectors": min(VECTORS, blocks)},
        threads > 1,
        multithreading.shared(spec, target, threads),
    )


def elementwise(
    func: tirx.PrimFunc, spec: Elementwise, target: TargetSpec, threads: int, point: Point
) -> tirx.PrimFunc | None:
    """Schedule a kernel whose lanes are channels, several vectors per iteration.

    Without vectors, kernels that read or write NCHW are loops, too.
    """
    if not _lanes_are_channels(spec):
        return portable.schedule(func) if target.scalar else None
    sch = s_tir.Schedule(func)
    found = epilogue.blocks(sch)
    pixels = []
    for block in found:
        # 2 tile
        *outer, o = sch.get_loops(block)
        pixels.append(outer[-1])
        unrolled = _unrolled(int(sch.get(o).extent), point["vectors"])
        if unrolled > 1:
            sch.unroll(sch.split(o, [None, unrolled])[1])
        # 4 tensorize, 5 vectorize
        epilogue.vectorize(sch, block, spec.channels, target)
    if len(found) > 1:
        sch.merge(*pixels)
    if point.get("divide", 0):
        sch.parallel(sch.fuse(*sch.get_loops(found[0])[:3]))
    return sch.mod["main"]


def elementwise_planes(
    spec: Elementwise, target: TargetSpec, threads: int, point: Point
) -> tirx.PrimFunc:
    """Write a kernel that reads or writes vectors of pixels."""
    flat = replace(spec, height=1, width=spec.height * spec.width)
    alike = _layouts(spec) == {"NCHW"} and not spec.packed
    with Operator(spec) as kernel:
        kernel.reshape(flat)
        write = write_nchw if alike else write_transposed
        write(kernel, flat, bool(point.get("divide", 0)))
    return multithreading.one_region(kernel.func)


def _lanes_are_channels(spec: Elementwise) -> bool:
    return _layouts(spec) <= {"NHWC"}


def _layouts(spec: Elementwise) -> set[str]:
    """Return the layouts of all tensors that have one; rows (rank 2) have only one layout."""
    if spec.rank == 2:
        return {"NHWC"}
    found = {step.layout for step in spec.steps if step.op in ("store", *TENSORS)}
    if any(step.op == "levels" for step in spec.steps):
        found.add("NHWC")
    return found if spec.packed else found | {spec.data_layout}


def _unrolled(count: int, vectors: int) -> int:
    """Return how many of `count` vectors, about `vectors`, to process per iteration: a divisor."""
    if count < 2 * vectors:
        return count
    fitting = [size for size in range(1, 2 * vectors) if count % size == 0]
    return min(fitting, key=lambda size: (abs(size - vectors), size))


def image_bits(spec: ImageBits, target: TargetSpec, threads: int, point: Point) -> tirx.PrimFunc:
    """Write the kernel for bits of an image, with the dot products that `target` has."""
    return make_image_bits(spec, "x86-512" if target.vector_bits == 512 else "")


def moved(
    func: tirx.PrimFunc, spec: Spec, target: TargetSpec, threads: int, point: Point
) -> tirx.PrimFunc:
    """Return a definition unchanged: it moves whole words, in memory order."""
    return func


def slice_bits(
    func: tirx.PrimFunc, spec: SliceBits, target: TargetSpec, threads: int, point: Point
) -> tirx.PrimFunc:
    """Keep a word that is assembled bit by bit in a register."""
    if not needs_table(spec):
        return func
    sch = s_tir.Schedule(func)
    *_, word, bit = sch.get_loops("slice")
    kept = sch.cache_write("slice", 0, "global")
    sch.reverse_compute_at(kept, word)
    sch.decompose_reduction("slice", bit)
    return sch.mod["main"]


def weights_of_rows(
    func: tirx.PrimFunc, spec: WeightsOfRows, target: TargetSpec, threads: int, point: Point
) -> tirx.PrimFunc:
    """Keep the rows of one vector together, so that each of their words is moved once."""
    sch = s_tir.Schedule(func)
    outer = []
    for name in ("lanes", "count")[: 1 + spec.count]:
        _, row, word = sch.get_loops(name)
        block, lane = sch.split(row, [None, LANES])
        sch.reorder(word, lane)
        outer.append(block)
        if name == "count":
            sch.decompose_reduction(name, word)
    if spec.count and target.vector_bits <= 128:
        sch.merge(*outer)  # SSE and NEON do not gain from a separate popcount, and miss the cache
    return sch.mod["main"]
