"""Elementwise kernels and moves of bits."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx

from bnncc.schedules import multithreading
from bnncc.schedules.space import Point, Space, powers, with_threads
from bnncc.schedules.templates import bit_moves
from bnncc.schedules.templates import elementwise as template
from bnncc.schedules.templates.image_bits import image_bits as make_image_bits
from bnncc.schedules.templates.weights_of_rows import weights_of_rows
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
        {"vectors": powers(min(MAX_VECTORS, blocks)) if template.in_vectors(spec) else ()},
        {"vectors": min(VECTORS, blocks)},
        threads > 1,
        multithreading.shared(spec, target, threads),
    )


def elementwise(spec: Elementwise, target: TargetSpec, threads: int, point: Point) -> tirx.PrimFunc:
    """Unroll over a few channel vectors."""
    tile = template.Tile(point["vectors"], bool(point.get("divide", 0)))
    return multithreading.one_region(template.elementwise(spec, tile))


def moves_space(spec: Spec, target: TargetSpec, threads: int) -> Space:
    """Return a space without choices."""
    return Space()


def image_bits(spec: ImageBits, target: TargetSpec, threads: int, point: Point) -> tirx.PrimFunc:
    """Write the bits of an image with the products that `target` has."""
    return make_image_bits(spec, "x86-512" if target.vector_bits == 512 else "")


def moves(spec: Spec, target: TargetSpec, threads: int, point: Point) -> tirx.PrimFunc:
    """Write concatenation, selection, padding and turning of bits: straight code."""
    return _MOVES[type(spec).__name__](spec)


_MOVES: dict[str, Callable[..., tirx.PrimFunc]] = {
    "ConcatBits": bit_moves.concat_bits,
    "PadBits": bit_moves.pad_bits,
    "SliceBits": bit_moves.slice_bits,
    "WeightsOfRows": weights_of_rows,
}
