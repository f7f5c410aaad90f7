"""How deep expressions nest, and which parts of them to compute first.

C compilers need not accept more than 63 levels of brackets, and clang accepts 256. Kernels of
networks with long chains of operators have expressions of any depth.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx

DEEPEST = 20
"""Most operations that an expression nests; in C, each takes up to three levels of brackets."""

_FIELDS = ("a", "b", "value", "condition", "true_value", "false_value")
"""Operands of operations that are no calls."""

Expr = Any


def parts(expr: Expr) -> list[tuple[Expr, Expr | None]]:
    """Return parts of an expression to compute first, so that the rest is not deep.

    Returns
    -------
    list of tuple
        Parts, each after those that it contains, and the condition under which the expression
        computes it: None if always. Where it does not hold, the part may not be computed: it may
        read outside a tensor.
    """
    found: list[tuple[Expr, Expr | None]] = []
    depths: dict[Expr, int] = {}
    left: list[tuple[Expr, Expr | None, bool]] = [(expr, None, False)]
    while left:  # not recursive: Python's stack is not deep enough
        node, when, visited = left.pop()
        operands = _operands(node, when)
        if not visited:
            left.append((node, when, True))
            left += [(*operand, False) for operand in reversed(operands)]
        elif operands:
            depths[node] = 1 + max(depths.get(operand, 0) for operand, _ in operands)
            if depths[node] == DEEPEST and node is not expr:
                found.append((node, when))
                depths[node] = 0
    return found


def _operands(expr: Expr, when: Expr | None) -> list[tuple[Expr, Expr | None]]:
    """Return the operands of an expression, and when each is computed."""
    if isinstance(expr, tvm.ir.Call) and expr.op.name == "prim.if_then_else":
        test, yes, no = expr.args
        return [(test, when), (yes, _both(when, test)), (no, _both(when, tirx.Not(test)))]
    if isinstance(expr, tirx.And):
        return [(expr.a, when), (expr.b, _both(when, expr.a))]
    if isinstance(expr, tirx.Or):
        return [(expr.a, when), (expr.b, _both(when, tirx.Not(expr.a)))]
    if isinstance(expr, tvm.ir.Call):
        return [(arg, when) for arg in expr.args]
    if isinstance(expr, tvm.ir.TensorLoad):
        return [(index, when) for index in expr.indices]
    fields = (getattr(expr, name, None) for name in _FIELDS)
    return [(field, when) for field in fields if isinstance(field, tvm.ir.Expr)]


def _both(one: Expr | None, other: Expr) -> Expr:
    return other if one is None else tirx.And(one, other)
