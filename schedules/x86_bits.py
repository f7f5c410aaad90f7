"""Elementwise kernels and moves of bits on x86."""

from __future__ import annotations

from tvm import tirx

from bnncc.schedules import grain
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import bitpack, layout
from bnncc.topi_binary.spec import ConcatBits, Elementwise, PadBits, SliceBits, Spec


def elementwise(
    func: tirx.PrimFunc, spec: Spec, target: TargetSpec, threads: int
) -> tirx.PrimFunc | None:
    """Unroll over a few channel vectors."""
    if not isinstance(spec, Elementwise) or target.kind != "llvm":
        return None
    tile = bitpack.Tile(
        vectors=min(4, layout.blocks(spec.channels)),
        parallel=grain.shared(spec, target, threads),
    )
    return grain.one_region(bitpack.elementwise(spec, tile))


def moves(
    func: tirx.PrimFunc, spec: Spec, target: TargetSpec, threads: int
) -> tirx.PrimFunc | None:
    """Keep concatenation, selection and padding of bits as they are: straight code per pixel."""
    return func if isinstance(spec, (ConcatBits, SliceBits, PadBits)) else None
