"""Elementwise kernels and moves of bits on x86."""

from __future__ import annotations

from tvm import tirx

from bnncc.schedules import grain
from bnncc.schedules.space import Point, Space, powers, with_threads
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import bitpack, layout
from bnncc.topi_binary.image_bits import image_bits as make_image_bits
from bnncc.topi_binary.spec import Elementwise, ImageBits, Spec

VECTORS = 4
"""Vectors of channels in one turn of the loop over pixels."""

MAX_VECTORS = 16
"""The most that are tried."""


def elementwise_space(spec: Elementwise, target: TargetSpec, threads: int) -> Space:
    """Return what can be chosen for an elementwise kernel."""
    blocks = layout.blocks(spec.channels)
    return with_threads(
        {"vectors": powers(min(MAX_VECTORS, blocks)) if bitpack.in_vectors(spec) else ()},
        {"vectors": min(VECTORS, blocks)},
        threads > 1,
        grain.shared(spec, target, threads),
    )


def elementwise(
    func: tirx.PrimFunc, spec: Elementwise, target: TargetSpec, threads: int, point: Point
) -> tirx.PrimFunc | None:
    """Unroll over a few channel vectors."""
    if target.kind != "llvm":
        return None
    tile = bitpack.Tile(point["vectors"], bool(point.get("divide", 0)))
    return grain.one_region(bitpack.elementwise(spec, tile))


def moves_space(spec: Spec, target: TargetSpec, threads: int) -> Space:
    """Return a space without choices."""
    return Space()


def image_bits(
    func: tirx.PrimFunc, spec: ImageBits, target: TargetSpec, threads: int, point: Point
) -> tirx.PrimFunc:
    """Write the bits of an image with the products that `target` has."""
    return make_image_bits(spec, "x86-512" if target.vector_bits == 512 else "")


def moves(
    func: tirx.PrimFunc, spec: Spec, target: TargetSpec, threads: int, point: Point
) -> tirx.PrimFunc:
    """Keep concatenation, selection and padding as they are: straight code."""
    return func
