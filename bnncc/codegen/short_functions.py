"""Call the kernels of a large network from several short functions.

In a compiled Relax function, TVM writes all calls one after the other, with the arguments of each
in the same array on the stack. LLVM's time grows with the square of their number: those of a
network with 200 kernels took longer than the kernels.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx

from bnncc.schedules import ranges

STATEMENTS = 128
"""Maximum number of calls in a function; among them are those that allocate tensors."""

_RELAX = "__vmtir__"
"""Start of the names that TVM gives to the lowered functions of Relax."""


def in_short_functions(module: tvm.IRModule, _: Any) -> tvm.IRModule:
    """Move the calls of long functions of Relax to functions that are called in turn.

    Parameters
    ----------
    module : tvm.IRModule
        Before TVM's lowering: calls share nothing but the function's parameters.

    Returns
    -------
    tvm.IRModule
    """
    out = tvm.IRModule(dict(module.functions_items()), attrs=module.attrs)
    for var, func in module.functions_items():
        statements = _calls(func) if var.name_hint.startswith(_RELAX) else []
        if len(statements) <= STATEMENTS:
            continue
        calls = []
        for first in range(0, len(statements), STATEMENTS):
            name = f"{var.name_hint}_{first // STATEMENTS}"
            body = ranges.sequence(statements[first : first + STATEMENTS])
            part = tirx.PrimFunc(func.params, body, func.ret_type, attrs=func.attrs)
            out[tvm.ir.GlobalVar(name)] = part.with_attr("global_symbol", name)
            calls.append(tirx.Evaluate(tirx.call_cpacked(name, *func.params)))
        out[var] = func.with_body(ranges.sequence(calls))
    return out


def _calls(func: Any) -> list[tirx.Stmt]:
    """Return the statements of a function, if all are calls; none otherwise."""
    found = list(func.body.seq) if isinstance(func.body, tirx.SeqStmt) else []
    return found if all(isinstance(one, tirx.Evaluate) for one in found) else []
