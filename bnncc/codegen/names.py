"""A limit for the expressions that names stand for.

LLVM's code generator in TVM tells its analyzer what each name stands for, and the analyzer writes
all of it out. A chain of n leaky ReLUs, each of which reads its operand three times, has n names
and 3**n leaves.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

LIMIT = 2000
"""Visits of an expression with all names written out, above which it is stored in a register."""


def short_names(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Bind names of large expressions to a load from a buffer, which the analyzer does not enter.

    LLVM promotes the buffers, of one element, to registers.

    Parameters
    ----------
    func : tirx.PrimFunc
        With flat buffers, before allocations are lowered to calls.
    """
    visits: dict[Any, int] = {}
    long: set[Any] = set()

    def bind(node: tirx.Bind) -> None:
        total = _visits(node.value, visits)
        if total > LIMIT and not _index(node.var):
            long.add(node.var)
            total = 1
        visits[node.var] = total

    tvm_ffi.structural_walk(func.body, (tirx.Bind, bind), order="pre")
    if not long:
        return func

    def stored(node: tirx.Bind) -> Any:
        if node.var not in long:
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


def _index(var: tirx.Var) -> bool:
    """Whether a name may be an index, of which later passes want to know more."""
    return str(var.ty) in ("int32", "int64")


def _visits(expr: Any, visits: dict[Any, int]) -> int:
    """Return how many nodes the analyzer visits; those of a Select twice."""
    total, selects = 1, 0

    def read(var: tirx.Var) -> None:
        nonlocal total
        total += visits.get(var, 1)

    def select(_: tirx.Select) -> None:
        nonlocal selects
        selects += 1

    tvm_ffi.structural_walk(expr, [(tvm.ir.Var, read), (tirx.Select, select)])
    return total * 2**selects
