"""Kernels for NVIDIA GPUs, written as CUDA C++ around the spec of a layer.

TVM makes the kernel that is launched, its checks and its launch; its body is one call of the
function that is written here (docs/design.md says why).
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from bnncc.schedules.cuda import binary, float_tiles, plain, text
from bnncc.schedules.space import Point, Space
from bnncc.topi_binary import tiles
from bnncc.topi_binary.spec import BinaryConv2d, Conv2d, Spec, to_json

if TYPE_CHECKING:
    from tvm import tirx

    from bnncc.targets.spec import TargetSpec


def space(spec: Spec, target: TargetSpec) -> Space:
    """Return what can be chosen for the kernel of `spec` on `target`."""
    if isinstance(spec, BinaryConv2d) and spec.weight_order in tiles.ORDERS:
        return binary.space(spec, target.engine)
    return float_tiles.space(spec) if isinstance(spec, Conv2d) else Space()


def schedule(spec: Spec, target: TargetSpec, point: Point) -> tirx.PrimFunc:
    """Return the kernel of `spec` for `target` as a function that launches it.

    Parameters
    ----------
    spec : Spec
        What it computes.
    target : TargetSpec
        The GPUs.
    point : mapping of str to int
        Of `space`.

    Returns
    -------
    tirx.PrimFunc

    Raises
    ------
    TargetError
        If there is none.
    """
    from bnncc.schedules.cuda import shell

    return shell.prim_func(spec, kernel(spec, cut_of(spec, point)))


def cut_of(spec: Spec, point: Point) -> binary.Cut | float_tiles.Cut | None:
    """Return how a point of `space` says that the kernel of `spec` shares its work."""
    if not point:
        return None
    return binary.Cut(**point) if isinstance(spec, BinaryConv2d) else float_tiles.Cut(**point)


def kernel(spec: Spec, cut: binary.Cut | float_tiles.Cut | None = None) -> text.Kernel:
    """Write the kernel of `spec`.

    Parameters
    ----------
    spec : Spec
        A binary convolution has one of the orders of weights in `tiles.ORDERS`; see
        `binary.weight_order`.
    cut : Cut, optional
        How a convolution shares its work.

    Returns
    -------
    Kernel
        The same text for the same arguments.
    """
    name = f"bnncc_{hashlib.sha256(f'{to_json(spec)}{cut}'.encode()).hexdigest()[:12]}"
    if isinstance(spec, BinaryConv2d):
        assert cut is None or isinstance(cut, binary.Cut)
        return binary.kernel(name, spec, cut)
    if isinstance(spec, Conv2d) and float_tiles.fits(spec):
        assert cut is None or isinstance(cut, float_tiles.Cut)
        return float_tiles.kernel(name, spec, cut)
    return plain.kernel(name, spec)
