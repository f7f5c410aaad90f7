"""Symbolic sizes as arguments of kernels: always in the order of their names.

TVM collects the sizes that a kernel reads from no shape, such as ``P`` of ``P + T``, in a set of
variables hashed by address. Two compilations of a network would differ in the order of arguments,
and in which kernels are found to be equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator


def symbols_of(sizes: Iterable[Any]) -> list[tirx.Var]:
    """Return the symbols in sizes, sorted by name."""
    found: dict[str, tirx.Var] = {}
    for size in sizes:
        for var in () if isinstance(size, int) else tirx.analysis.undefined_vars(size):
            found[var.name] = var
    return [found[name] for name in sorted(found)]


@tvm.transform.module_pass(opt_level=0, name="SortSizes")
class SortSizes:
    """Sort the sizes among the arguments of each kernel, and merge kernels that are then equal."""

    def transform_module(self, module: tvm.IRModule, _: Any) -> tvm.IRModule:
        """Return the module with sorted sizes; one whose kernels have no two sizes as it is."""
        kernels = [f for f in module.functions.values() if isinstance(f, tirx.PrimFunc)]
        if all(len(_sizes(func.params)) < 2 for func in kernels):
            return module
        return _Sorter(module).rebuilt()


def _sizes(values: Iterable[Any]) -> list[int]:
    """Return the positions of sizes among parameters or arguments; the others are tensors."""
    return [k for k, value in enumerate(values) if tvm.ir.is_prim_expr(value)]


@mutator
class _Sorter(PyExprMutator):
    """Adds kernels to a new module in the order of their calls; its builder merges equal ones."""

    def __init__(self, module: tvm.IRModule) -> None:
        super().__init__()
        self.module = module

    def rebuilt(self) -> tvm.IRModule:
        functions = {
            var: self.visit_expr(func)
            for var, func in self.module.functions_items()
            if isinstance(func, relax.Function)
        }
        return tvm.IRModule({**dict(self.builder_.get().functions_items()), **functions})

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        if getattr(call.op, "name", "") != "relax.call_tir":
            return call
        kernel, args = call.args[0], list(call.args[1].fields)
        func = self.module[kernel]
        params, places = list(func.params), _sizes(args)
        order = sorted(places, key=lambda k: str(params[k].name))
        if order != places:
            old = params[:], args[:]
            for to, place in zip(places, order, strict=True):
                params[to], args[to] = old[0][place], old[1][place]
            func = tirx.PrimFunc(params, func.body, func.ret_type, func.attrs)
        sorted_kernel = self.builder_.add_func(func, self._hint(kernel.name_hint))
        made = call.ty
        kinds = list(made.fields) if isinstance(made, relax.TupleType) else made
        return relax.call_tir(sorted_kernel, args, kinds)

    def _hint(self, name: str) -> str:
        """Return a name without the number that TVM gave to tell it from another kernel's."""
        hint = name.rstrip("0123456789")
        return hint if hint in {v.name_hint for v in self.module.get_global_vars()} else name
