"""Functions that compute sizes: the same for every compilation of a network.

VMShapeLower writes them with stores in the order of addresses, and TVM's builder shares those that
happen to be equal. So the order of stores, the number of functions and their names would differ.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator

_PREFIX = "shape_func"


@tvm.transform.module_pass(opt_level=0, name="ShareShapeFunctions")
class ShareShapeFunctions:
    """Sort the stores of shape functions, share equal ones, and number them as they are called.

    Stores are independent of each other: they read only sizes of inputs.
    """

    def transform_module(self, module: tvm.IRModule, _: Any) -> tvm.IRModule:
        """Return the module; to run after ``VMShapeLower``."""
        functions = dict(module.functions_items())
        found = [var for var in functions if var.name_hint.startswith(_PREFIX)]
        found.sort(key=lambda var: (len(var.name_hint), var.name_hint))
        if not found:
            return module
        shared = _Shared(found, {var: _sorted(functions.pop(var)) for var in found})
        for var in sorted(functions, key=lambda var: str(var.name_hint)):
            if isinstance(functions[var], relax.Function):
                functions[var] = shared.visit_expr(functions[var])
        kept = dict(zip(found, shared.kept, strict=False))
        return tvm.IRModule({**functions, **kept}, attrs=module.attrs)


def _sorted(func: tirx.PrimFunc) -> tirx.PrimFunc:
    if not isinstance(func.body, tirx.SeqStmt):
        return func
    stores = sorted(func.body.seq, key=lambda store: int(store.indices[0]))
    return func.with_body(tirx.SeqStmt(stores))


@mutator
class _Shared(PyExprMutator):
    """Calls the first of equal functions; they all have the same type.

    Parameters
    ----------
    names : list of tvm.ir.GlobalVar
        Variables to use in turn.
    functions : dict
        By variable.
    """

    def __init__(
        self, names: list[tvm.ir.GlobalVar], functions: dict[tvm.ir.GlobalVar, tirx.PrimFunc]
    ) -> None:
        super().__init__()
        self.names = names
        self.functions = functions
        self.kept: list[tirx.PrimFunc] = []

    def visit_global_var_(self, var: tvm.ir.GlobalVar) -> relax.Expr:
        func = self.functions.get(var)
        if func is None:
            return var
        for name, other in zip(self.names, self.kept, strict=False):
            if tvm_ffi.structural_equal(func, other, map_free_vars=True):
                return name
        self.kept.append(func)
        return self.names[len(self.kept) - 1]
