"""A limit for the values that variables of a kernel are bound to.

LLVM's code generator in TVM tells its analyzer the value of each variable, and the analyzer
replaces variables by their values. In a chain of n leaky ReLUs, each of which reads its operand
three times, the last of n variables has a value of 3**n leaves.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from bnncc.schedules.expressions import of_kind

LIMIT = 2000
"""Visits of a value with all variables replaced, above which it is stored in a register."""


def limit_binds(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Bind variables with large values to a load from a buffer, which the analyzer does not enter.

    LLVM promotes the buffers, of one element, to registers.

    Parameters
    ----------
    func : tirx.PrimFunc
        With flat buffers, before allocations are lowered to calls.
    """
    visits: dict[Any, int] = {}
    large: set[Any] = set()

    def bind(node: tirx.Bind) -> None:
        total = _visits(node.value, visits)
        if total > LIMIT and not _may_be_index(node.var):
            large.add(node.var)
            total = 1
        visits[node.var] = total

    tvm_ffi.structural_walk(func.body, (tirx.Bind, bind), order="pre")
    if not large:
        return func

    def stored(node: tirx.Bind) -> Any:
        if node.var not in large:
            return node
        buffer = tirx.decl_buffer((1,), str(node.var.ty), node.var.name)
        value = tirx.BufferLoad(buffer, [0])
        return tirx.SeqStmt(
            [
                tirx.AllocBuffer(buffer),
                tirx.BufferStore(buffer, node.value, [0]),
                tirx.Bind(node.var, value),
            ]
        )

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.Bind, stored)))


def _may_be_index(var: tirx.Var) -> bool:
    """Whether later passes may need the value of a variable to simplify indices."""
    return str(var.ty) in ("int32", "int64")


def _visits(value: Any, visits: dict[Any, int]) -> int:
    """Return how many nodes the analyzer visits; those of a Select twice."""
    total = 1 + sum(visits.get(var, 1) for var in of_kind(value, tvm.ir.Var))
    return total * 2 ** len(of_kind(value, tirx.Select))
