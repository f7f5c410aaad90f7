"""Fewer calls of the virtual machine's own functions between those of kernels.

TVM makes the shape of every tensor anew, reshapes one reshape into the next, and keeps tuples that
nothing reads. All of it takes time in each call, in a small transformer a fifth, and LLVM's time.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from bnncc.codegen.outputs import operator, values

_SHAPE = "vm.builtin.make_shape"


def reshaped_once(module: tvm.IRModule, _: Any) -> tvm.IRModule:
    """Have the reshape of a reshape read what that one reads.

    y = reshape(x, ..); z = reshape(y, ..)   ->   y = reshape(x, ..); z = reshape(x, ..)

    Parameters
    ----------
    module : tvm.IRModule
        Before memory is planned, and before TVM's ``DeadCodeElimination``.
    """
    read: dict[Any, Any] = {}

    def once(var: Any, value: Any) -> Any:
        if operator(value) != "relax.reshape":
            return value
        source = value.args[0]
        read[var] = read.get(source, source)
        return _call(value, [read[var], *value.args[1:]])

    return _each_function(module, lambda _: once)


def without_repeats(module: tvm.IRModule, _: Any) -> tvm.IRModule:
    """Make equal shapes once, and no tuple that nothing reads.

    Parameters
    ----------
    module : tvm.IRModule
        After TVM's ``VMShapeLower``, which writes each size to a place of its own.
    """

    def rewrite(func: relax.Function) -> Any:
        made: dict[tuple[Any, ...], Any] = {}
        same: dict[Any, Any] = {}
        read = {var for value in values(func).values() for var in _variables(value)}
        read |= _variables(func.body.body)

        def needed(var: Any, value: Any) -> Any:
            if isinstance(value, relax.Tuple) and var not in read:
                return None
            value = _with(value, same)
            shape = _shape(value)
            first = var if shape is None else made.setdefault(shape, var)
            if first is var:
                return value
            same[var] = first
            return None

        return needed

    return _each_function(module, rewrite)


def _each_function(module: tvm.IRModule, rewrite: Any) -> tvm.IRModule:
    """Rewrite the value of each binding; None drops it.

    Parameters
    ----------
    module : tvm.IRModule
        The module.
    rewrite : callable
        Takes a function, returns what takes a variable and its value and returns another.
    """
    out = tvm.IRModule(dict(module.functions_items()), attrs=module.attrs)
    for name, func in module.functions_items():
        if not isinstance(func, relax.Function):
            continue
        rewritten = rewrite(func)
        blocks = []
        for block in func.body.blocks:
            kept = []
            for binding in block.bindings:
                if not isinstance(binding, relax.VarBinding):
                    kept.append(binding)
                elif (value := rewritten(binding.var, binding.value)) is not None:
                    kept.append(relax.VarBinding(binding.var, value))
            blocks.append(type(block)(kept))
        body = relax.SeqExpr(blocks, func.body.body)
        out[name] = relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)
    return out


def _call(call: relax.Call, args: list[Any]) -> relax.Call:
    """Return a call with other arguments of the same types."""
    return relax.Call(call.op, args, call.attrs, call.ty_args, ret_ty=call.ty)


def _with(value: Any, same: dict[Any, Any]) -> Any:
    """Return a value that reads other variables."""
    if isinstance(value, relax.Tuple):
        return relax.Tuple([_with(field, same) for field in value.fields])
    if isinstance(value, relax.TupleGetItem):
        return relax.TupleGetItem(_with(value.tuple_value, same), value.index)
    if isinstance(value, relax.Call):
        return _call(value, [_with(arg, same) for arg in value.args])
    return same.get(value, value) if isinstance(value, relax.Var) else value


def _variables(value: Any) -> set[Any]:
    """Return the variables that a value reads."""
    if isinstance(value, relax.Var):
        return {value}
    if isinstance(value, relax.TupleGetItem):
        return _variables(value.tuple_value)
    parts = getattr(value, "args", None) or getattr(value, "fields", None) or ()
    return set().union(*map(_variables, parts))


def _shape(value: Any) -> tuple[Any, ...] | None:
    """Return what tells a shape from others; None for other values."""
    if not isinstance(value, relax.Call) or not isinstance(value.op, relax.ExternFunc):
        return None
    heap, *numbers = value.args
    return (heap, *map(int, numbers)) if value.op.global_symbol == _SHAPE else None
