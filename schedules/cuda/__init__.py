"""Kernels for NVIDIA GPUs, written as CUDA C++ around the spec of a layer.

TVM makes the kernel that is launched, its checks and its launch; its body is one call of the
function that is written here (docs/design.md says why).
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from bnncc.errors import TargetError
from bnncc.schedules.cuda import text
from bnncc.schedules.registry import function, row
from bnncc.schedules.space import Point
from bnncc.topi_binary.spec import Spec, to_json

if TYPE_CHECKING:
    from tvm import tirx

    from bnncc.targets.spec import TargetSpec


def schedule(spec: Spec, target: TargetSpec, point: Point) -> tirx.PrimFunc:
    """Return the kernel of `spec` for `target` as a function that launches it.

    Parameters
    ----------
    spec : Spec
        What it computes.
    target : TargetSpec
        The GPUs.
    point : mapping of str to int
        Of the space of the kernel.

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


def cut_of(spec: Spec, point: Point) -> Any:
    """Return how a point of the space says that the kernel of `spec` shares its work."""
    return function(row(spec).gpu_cut)(**point) if point else None


def kernel(spec: Spec, cut: Any = None) -> text.Kernel:
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

    Raises
    ------
    TargetError
        If there is no such kernel for GPUs.
    """
    name = f"bnncc_{hashlib.sha256(f'{to_json(spec)}{cut}'.encode()).hexdigest()[:12]}"
    maker = row(spec).gpu
    if not maker:
        raise TargetError(f"there is no GPU kernel for {type(spec).__name__}")
    made: text.Kernel = function(maker)(name, spec, *([] if cut is None else [cut]))
    return made
