"""A variant of the network whose outputs are written to memory of the caller."""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import relax

INTO = "main_into"
"""Name of the variant. It exists only if all outputs of ``main`` have memory of their own."""


def values(func: relax.Function) -> dict[Any, Any]:
    """Return the value bound to each variable of a function."""
    return {b.var: b.value for block in func.body.blocks for b in block.bindings}


def origin(expr: Any, bound: dict[Any, Any]) -> Any:
    """Resolve aliases of `expr` to a variable bound to a call, a parameter, or similar."""
    if isinstance(expr, relax.Tuple):
        return expr
    if isinstance(expr, relax.TupleGetItem):
        whole = origin(expr.tuple_value, bound)
        return origin(whole.fields[expr.index], bound) if isinstance(whole, relax.Tuple) else expr
    value = bound.get(expr)
    another = isinstance(value, relax.Tuple | relax.TupleGetItem | relax.Var)
    return origin(value, bound) if another else expr


def operator(value: Any) -> str:
    """Return the name of the operator that a value calls, or ""."""
    return getattr(getattr(value, "op", None), "name", "")


def _made(expr: Any, bound: dict[Any, Any]) -> Any:
    """Resolve aliases and reshapes of `expr`."""
    var = origin(expr, bound)
    value: Any = bound.get(var)
    return _made(value.args[0], bound) if operator(value) == "relax.reshape" else var


def with_outputs(module: tvm.IRModule, _: Any) -> tvm.IRModule:
    """Add a function that writes its outputs to parameters.

    main(x): y = alloc_tensor(..); kernel(x, y); return y
    ->   main_into(x, y): kernel(x, y); return y, beside ``main``

    Omitted if an output is an input, a constant, part of other memory, or returned twice.

    Parameters
    ----------
    module : tvm.IRModule
        After TVM's ``StaticPlanBlockMemory``, which leaves the outputs' memory to ``main``.
    """
    main = module["main"]
    bound = values(main)
    result = origin(main.body.body, bound)
    results = result.fields if isinstance(result, relax.Tuple) else [result]
    made = [_made(field, bound) for field in results]
    names = [operator(bound.get(var)) for var in made]
    if set(names) != {"relax.builtin.alloc_tensor"} or len(set(made)) != len(made):
        return module
    given = {
        var: relax.Var(f"out{k}", field.ty)
        for k, (var, field) in enumerate(zip(made, results, strict=True))
    }

    def placed(binding: Any) -> Any:
        var = binding.var
        if var not in given:
            return binding
        same = tvm_ffi.structural_equal(given[var].ty, var.ty)
        return relax.VarBinding(
            var, given[var] if same else relax.op.reshape(given[var], var.ty.shape)
        )

    blocks = [relax.BindingBlock([*map(placed, block.bindings)]) for block in main.body.blocks]
    body = relax.SeqExpr(blocks, main.body.body)
    params = [*main.params, *given.values()]
    into = relax.Function(params, body, main.ret_ty, main.is_pure, main.attrs)
    module = module.clone()
    module[INTO] = relax.utils.copy_with_new_vars(into.with_attr("global_symbol", INTO))
    return module
