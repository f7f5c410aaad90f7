"""Kernels for NVIDIA GPUs, written as CUDA C++ around the spec of a layer.

TVM makes the kernel that is launched, its checks and its launch; its body is one call of the
function that is written here (docs/design.md says why).
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from bnncc.errors import TargetError
from bnncc.schedules.cuda import binary, plain, text
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
    return Space()


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

    relaxed = isinstance(spec, Conv2d) and spec.operands != "float32"
    if relaxed:
        raise TargetError(
            "--first-layer is not available on GPUs", hint="leave it out: layers stay in float32"
        )
    cut = binary.Cut(**point) if isinstance(spec, BinaryConv2d) else None
    return shell.prim_func(spec, kernel(spec, cut))


def kernel(spec: Spec, cut: binary.Cut | None = None) -> text.Kernel:
    """Write the kernel of `spec`.

    Parameters
    ----------
    spec : Spec
        A binary convolution has one of the orders of weights in `tiles.ORDERS`; see
        `binary.weight_order`.
    cut : Cut, optional
        How a binary convolution shares its work.

    Returns
    -------
    Kernel
        The same text for the same arguments.
    """
    name = f"bnncc_{hashlib.sha256(f'{to_json(spec)}{cut}'.encode()).hexdigest()[:12]}"
    if isinstance(spec, BinaryConv2d):
        return binary.kernel(name, spec, cut)
    return plain.kernel(name, spec)
