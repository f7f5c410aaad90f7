"""What schedules ask about the expressions of a definition: their variables and their size."""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx

MAX_NODES = 512
"""Maximum size of a block's expression; an expression inlined into two reads counts twice."""


def depends(expr: Any, var: tirx.Var) -> bool:
    """Return whether `expr` contains `var`."""
    return any(other.same_as(var) for other in tirx.analysis.undefined_vars(expr, []))


def of_kind(node: Any, kind: Any) -> list[Any]:
    """Return the nodes of a kind, or of one of several kinds, in a statement or an expression."""
    found: list[Any] = []
    tvm_ffi.structural_walk(node, (kind, found.append), order="post")
    return found


def small_when_inlined(sch: s_tir.Schedule, block: Any) -> bool:
    """Return whether the readers of a block stay small enough if its expression is inlined."""
    made = sch.get(block).writes[0].source
    size = len(of_kind(sch.get(block).body, tvm.ir.Expr))
    for consumer in sch.get_consumers(block):
        found = of_kind(sch.get(consumer).body, tvm.ir.Expr)
        if len(found) + size * sum(e.same_as(made) for e in found) > MAX_NODES:
            return False
    return True
