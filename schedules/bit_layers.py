"""Elementwise kernels and moves of bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import s_tir, tirx

from bnncc.schedules import epilogue, multithreading
from bnncc.schedules.space import Point, Space, powers, with_threads
from bnncc.schedules.templates import bit_moves
from bnncc.schedules.templates import elementwise as template
from bnncc.schedules.templates.image_bits import image_bits as make_image_bits
from bnncc.schedules.templates.weights_of_rows import weights_of_rows as make_weights_of_rows
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import layout
from bnncc.topi_binary.spec import Elementwise, ImageBits, Spec

VECTORS = 4
"""Vectors of channels in one turn of the loop over pixels."""

MAX_VECTORS = 16
"""The most that are tried."""


def elementwise_space(spec: Elementwise, target: TargetSpec, threads: int) -> Space:
    """Return what can be chosen for an elementwise kernel."""
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
    """Schedule a kernel whose lanes are channels, a few vectors in one turn of a loop."""
    if not _lanes_are_channels(spec):
        return None
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
    """Write a kernel whose lanes are pixels, at least where it reads or writes."""
    return multithreading.one_region(template.elementwise(spec, bool(point.get("divide", 0))))


def _lanes_are_channels(spec: Elementwise) -> bool:
    return template.layouts(spec) <= {"NHWC"}


def _unrolled(count: int, vectors: int) -> int:
    """Return how many of `count` turns, nearly `vectors`, are one turn of a loop without a rest."""
    if count < 2 * vectors:
        return count
    fitting = [size for size in range(1, 2 * vectors) if count % size == 0]
    return min(fitting, key=lambda size: (abs(size - vectors), size))


def image_bits(spec: ImageBits, target: TargetSpec, threads: int, point: Point) -> tirx.PrimFunc:
    """Write the bits of an image with the products that `target` has."""
    return make_image_bits(spec, "x86-512" if target.vector_bits == 512 else "")


def _straight(make: Callable[[Any], tirx.PrimFunc]) -> Callable[..., tirx.PrimFunc]:
    """Return the rule of a kernel that is the same code on every target."""

    def rule(spec: Spec, target: TargetSpec, threads: int, point: Point) -> tirx.PrimFunc:
        return make(spec)

    return rule


concat_bits = _straight(bit_moves.concat_bits)
pad_bits = _straight(bit_moves.pad_bits)
slice_bits = _straight(bit_moves.slice_bits)
weights_of_rows = _straight(make_weights_of_rows)
