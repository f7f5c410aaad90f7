"""Remove argument checks between kernels of a network.

TVM makes each kernel compare type, shape, strides, alignment and device of every tensor with its
declaration. That is needed for the caller's tensors. Between kernels, the static plan determines
all tensors, and the checks only add code: a large part of the library, and of its compile time, for
a network with many small layers.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx

from bnncc.codegen.outputs import operator, origin, values

_TRUSTED = "bnncc.trusts_arguments"
_MADE = {"relax.memory.alloc_tensor", "relax.builtin.alloc_tensor"}


def mark_trusting(module: tvm.IRModule, _: Any) -> tvm.IRModule:
    """Mark kernels that only receive constants and tensors allocated by the network.

    Parameters
    ----------
    module : tvm.IRModule
        With all functions that call kernels, after TVM's ``StaticPlanBlockMemory``.
    """
    trusting: dict[str, bool] = {}
    for _var, func in module.functions_items():
        if isinstance(func, relax.Function):
            _note_calls(func, trusting)
    out = tvm.IRModule(dict(module.functions_items()), attrs=module.attrs)
    for var, func in module.functions_items():
        if isinstance(func, tirx.PrimFunc) and trusting.get(var.name_hint):
            out[var] = func.with_attr(_TRUSTED, True)
    return out


def _note_calls(func: relax.Function, trusting: dict[str, bool]) -> None:
    bound = values(func)

    def known(argument: Any) -> bool:
        made = bound.get(origin(argument, bound))
        return isinstance(argument, tvm.ir.GenericConst) or operator(made) in _MADE

    for value in bound.values():
        if isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.GlobalVar):
            name = value.op.name_hint
            trusting[name] = trusting.get(name, True) and all(map(known, value.args))


def without_checks(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Remove the argument checks of a marked, lowered kernel; its own checks remain."""
    if func.attrs is None or _TRUSTED not in func.attrs:
        return func
    bodies: list[Any] = []
    own: set[Any] = set()

    def inside(node: Any) -> None:
        if node.attr_key == "compute_scope":  # marks the kernel without TVM's checks
            bodies.append(node.body)
            tvm_ffi.structural_walk(node.body, (tirx.AssertStmt, own.add))

    def check(node: Any) -> Any:
        return node if node in own else tirx.Evaluate(0)

    tvm_ffi.structural_walk(func.body, (tirx.AttrStmt, inside))
    if not bodies:  # the kernel's own checks cannot be told from TVM's
        return func
    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.AssertStmt, check)))
