"""How each operator runs on each instruction set."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    for rule in _rules():
        scheduled = rule(func, spec, target, threads)
        if scheduled is not None:
            result = scheduled.mod["main"]
            if "global_symbol" in func.attrs:
                result = result.with_attr("global_symbol", func.attrs["global_symbol"])
            return result.with_attr("tirx.is_scheduled", True)
    return func


def _rules() -> list:
    from bnncc.schedules import x86

    return [x86.apply]


__all__ = ["Spec", "schedule"]
