"""Kernels for NVIDIA GPUs, generated as CUDA C++ from the spec of a layer.

TVM generates the launched kernel, its checks and its launch; the kernel's body is a call of the
device function generated here (docs/design.md explains why).
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
    """Return a function that launches the kernel of `spec` on `target`.

    Parameters
    ----------
    spec : Spec
        Spec of the kernel.
    target : TargetSpec
        The GPU target.
    point : mapping of str to int
        A point of the kernel's search space.

    Returns
    -------
    tirx.PrimFunc

    Raises
    ------
    TargetError
        If there is no such kernel.
    """
    from bnncc.schedules.cuda import shell

    return shell.prim_func(spec, kernel(spec, cut_of(spec, point)))


def cut_of(spec: Spec, point: Point) -> Any:
    """Return the partition of work that a point of the search space means for `spec`."""
    return function(row(spec).gpu_cut)(**point) if point else None


def kernel(spec: Spec, cut: Any = None) -> text.Kernel:
    """Generate the kernel of `spec`.

    Parameters
    ----------
    spec : Spec
        For a binary convolution, the weight order must be one of `tiles.ORDERS`; see
        `binary.weight_order`.
    cut : Cut, optional
        Partition of the work of a convolution.

    Returns
    -------
    Kernel
        Its text depends on the arguments only.

    Raises
    ------
    TargetError
        If there is no GPU kernel for `spec`.
    """
    name = f"bnncc_{hashlib.sha256(f'{to_json(spec)}{cut}'.encode()).hexdigest()[:12]}"
    maker = row(spec).gpu
    if not maker:
        raise TargetError(f"there is no GPU kernel for {type(spec).__name__}")
    made: text.Kernel = function(maker)(name, spec, *([] if cut is None else [cut]))
    return made
