"""Search space of grouped binary convolutions in bit slices: vector length, division by threads."""

from __future__ import annotations

from tvm import tirx

from bnncc.schedules import multithreading
from bnncc.schedules.space import Point, Space, powers, with_threads
from bnncc.schedules.templates import bit_sliced
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import layout
from bnncc.topi_binary.spec import BinaryConv2d


def space(spec: BinaryConv2d, target: TargetSpec, threads: int) -> Space:
    """Return the search space: words per vector."""
    most = target.vector_bits // layout.WORD_BITS
    return with_threads(
        {"lanes": powers(most)},
        {"lanes": most},
        threads > 1,
        multithreading.shared(spec, target, threads),
    )


def apply(spec: BinaryConv2d, target: TargetSpec, threads: int, point: Point) -> tirx.PrimFunc:
    """Write the kernel for a point of the search space."""
    images = spec.images
    tile = bit_sliced.Tile(
        lanes=point["lanes"],
        bands=-(-threads // images),
        parallel=bool(point.get("divide", 0)),
        ternlog=target.vector_bits == 512,
    )
    return multithreading.one_region(bit_sliced.conv2d(spec, tile))
