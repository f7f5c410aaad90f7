"""A variant of the network whose outputs are written to memory of the caller."""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import relax

from bnncc.codegen.sizes import symbols_of

INTO = "main_into"
"""Name of the variant. It exists only if all outputs of ``main`` have memory of their own."""

CALLS = 100
"""Number of kernels from which on ``main`` calls the variant. This takes 0.7 us on a Zen 3, which a
network of ten kernels would feel, and spares the time to compile all calls twice."""


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
    bb = relax.BlockBuilder(module)
    bb.add_func(relax.utils.copy_with_new_vars(into.with_attr("global_symbol", INTO)), INTO)
    return bb.get().with_attrs(module.attrs) if module.attrs else bb.get()


def through_outputs(module: tvm.IRModule, _: Any) -> tvm.IRModule:
    """Have ``main`` of a large network allocate its outputs, and call `INTO`.

    main(x): y = alloc_tensor(..); kernel(x, y); return y
    ->   main(x): y = alloc_tensor(..); return main_into(x, y)

    ``main`` stays as it is if sizes of outputs are not made of sizes of inputs.

    Parameters
    ----------
    module : tvm.IRModule
        From `with_outputs`.
    """
    variants = [var for var in module.get_global_vars() if var.name_hint == INTO]
    kernels = [value for value in values(module["main"]).values() if _calls_kernel(value)]
    if not variants or len(kernels) < CALLS:
        return module
    main = relax.utils.copy_with_new_vars(module["main"])
    kinds = main.ret_ty.fields if isinstance(main.ret_ty, relax.TupleType) else [main.ret_ty]
    sizes = symbols_of(size for kind in kinds for size in kind.shape.values)
    known = [size for param in main.params for size in param.ty.shape.values]
    if not set(sizes) <= set(known):
        return module
    allocate = relax.op.builtin.alloc_tensor
    bindings = [
        relax.VarBinding(relax.Var(f"out{k}", kind), allocate(kind.shape, str(kind.dtype), 0))
        for k, kind in enumerate(kinds)
    ]
    given = [*main.params, *(binding.var for binding in bindings)]
    result = relax.Var("result", main.ret_ty)
    bindings.append(relax.VarBinding(result, relax.Call(variants[0], given, ret_ty=main.ret_ty)))
    body = relax.SeqExpr([relax.BindingBlock(bindings)], result)
    module = module.clone()
    module["main"] = relax.Function(main.params, body, main.ret_ty, main.is_pure, main.attrs)
    return module


def _calls_kernel(value: Any) -> bool:
    return isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.GlobalVar)
