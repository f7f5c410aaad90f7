"""How each operator runs on each instruction set."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bnncc.topi_binary.spec import Spec, from_json

if TYPE_CHECKING:
    from tvm import tirx

    from bnncc.targets.spec import TargetSpec


def schedule(func: tirx.PrimFunc, target: TargetSpec, threads: int = 1) -> tirx.PrimFunc:
    """Schedule the kernel of a spec for `target`.

    Parameters
    ----------
    func : tirx.PrimFunc
        A definition from ``topi_binary``, with its spec as the attribute ``bnncc.spec``.
    target : TargetSpec
        The machine.
    threads : int, default 1
        How many threads the kernel may use. Only kernels long enough to gain from it do.

    Returns
    -------
    tirx.PrimFunc
        Same name and parameters. A definition whose loops are already the schedule comes back as it
        is.
    """
    spec = from_json(str(func.attrs["bnncc.spec"]))
    result = _rule(type(spec).__name__)(func, spec, target, threads)
    if result is None:
        return func
    if not isinstance(result, type(func)):
        result = result.mod["main"]
    if "global_symbol" in func.attrs:
        result = result.with_attr("global_symbol", func.attrs["global_symbol"])
    return result.with_attr("tirx.is_scheduled", True)


_RULES = {
    "BinaryConv2d": ("x86", "apply"),
    "BitwiseMaxPool": ("x86_float", "bitwise_maxpool"),
    "ConcatBits": ("x86_bits", "moves"),
    "Conv2d": ("x86_float", "conv2d"),
    "Elementwise": ("x86_bits", "elementwise"),
    "PadBits": ("x86_bits", "moves"),
    "Pool2d": ("x86_float", "pool2d"),
    "SliceBits": ("x86_bits", "moves"),
}
"""Module and function of the rule for each class of spec.

A rule takes the definition, its spec, the target and the number of threads, and returns a schedule,
a function or, where the target is not its own, None.
"""


def _rule(kind: str) -> Callable[..., Any]:
    module, name = _RULES[kind]
    return getattr(importlib.import_module(f"bnncc.schedules.{module}"), name)


__all__ = ["Spec", "schedule"]
