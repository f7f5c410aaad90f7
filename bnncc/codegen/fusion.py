"""A limit for the expressions that TVM's fusion makes of a chain of operators.

Fusion writes an operand wherever an operator reads it: a chain of n leaky ReLUs, which read their
operand three times, becomes an expression of 3**n leaves. TVM's simplifiers visit all of them, and
those of a Select twice.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import tvm
from tvm import tirx

from bnncc.codegen.ops import OPAQUE
from bnncc.schedules.expressions import of_kind
from bnncc.schedules.float_functions import FUNCTIONS

LIMIT = 8000
"""Estimated visits of an expression, above which an operator is a kernel of its own. At this limit
compilation takes about one second more."""

_PER_FUNCTION = 100
"""Reads of an operand in the polynomial that replaces a function; see `float_functions`."""

_REDUCTION = 3
"""The first of TVM's patterns whose result later operators do not repeat."""


@tvm.transform.module_pass(opt_level=0, name="LimitFusion")
class LimitFusion:
    """Exclude operators from fusion that would make the expression of a kernel too large."""

    def transform_module(self, module: tvm.IRModule, _: Any) -> tvm.IRModule:
        """Return the module; kernels to exclude have another ``op_pattern``."""
        excluded: dict[tvm.ir.GlobalVar, tirx.PrimFunc] = {}
        factors: dict[str, tuple[list[int], int]] = {}
        visits: dict[Any, int] = {}  # by variable: those of its expression, if it is fused
        for block in module["main"].body.blocks:
            for binding in block.bindings:
                call = binding.value
                if getattr(getattr(call, "op", None), "name", "") != "relax.call_tir":
                    continue
                kernel = call.args[0]
                func = module[kernel]
                pattern = int(func.attrs.get("op_pattern", OPAQUE))
                if pattern >= OPAQUE or kernel in excluded:
                    continue
                if kernel.name_hint not in factors:
                    factors[kernel.name_hint] = _factors(func)
                reads, factor = factors[kernel.name_hint]
                operands = [visits.get(arg, 1) for arg in call.args[1].fields]
                total = factor * sum(map(math.prod, zip(reads, operands, strict=False)))
                if total > LIMIT:
                    excluded[kernel] = func.with_attr("op_pattern", OPAQUE)
                elif pattern < _REDUCTION:
                    visits[binding.var] = total
        return tvm.IRModule({**dict(module.functions_items()), **excluded}, attrs=module.attrs)


def _factors(func: tirx.PrimFunc) -> tuple[list[int], int]:
    """Return how often a kernel reads each operand, and how often each read is visited."""
    body = func.body
    reads = Counter(load.source for load in of_kind(body, tvm.ir.TensorLoad))
    names = (str(getattr(call.op, "name", "")) for call in of_kind(body, tvm.ir.Call))
    functions = sum(name.removeprefix("tirx.") in FUNCTIONS for name in names)
    factor = 2 ** len(of_kind(body, tirx.Select)) * _PER_FUNCTION**functions
    return [reads[param] for param in func.params], factor
