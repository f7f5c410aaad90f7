"""Run-time checks: indices inside their tensor, divisors other than 0.

Each check is a kernel that copies the checked tensor and fails with a one-line message if a demand
is not met (`bnncc.ir.demands`). The readers of the copy are also safe by themselves: indices are
clipped, and a divisor is never 0, nor -1 for the smallest integer, which traps as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from tvm import relax, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from bnncc.codegen.ops import OPAQUE
from bnncc.codegen.sizes import renamed, symbols_of
from bnncc.ir.demands import MARK, Demand


def checked(bb: relax.BlockBuilder, demand: Demand, value: Any, sizes: Sequence[Any]) -> Any:
    """Return `value`, checked at run time.

    Parameters
    ----------
    bb : relax.BlockBuilder
        Inside a dataflow block.
    demand : Demand
        The demand on it.
    value : relax.Expr
        Integers.
    sizes : sequence of int or tirx.Var
        ``demand.sizes``, with symbols as variables.

    Returns
    -------
    relax.Expr
        Indices, with those counted from the end made non-negative.
    """
    name = "check_divisor" if not demand.sizes else "check_index"
    kernel = bb.add_func(_kernel(demand, value.ty, sizes), name)
    bound = {str(d) for d in value.ty.shape.values if isinstance(d, tirx.Var)}
    free = [s for s in symbols_of(sizes) if str(s) not in bound]
    return bb.emit(relax.call_tir(kernel, relax.Tuple([value, *free]), out_ty=value.ty))


def inside(bb: relax.BlockBuilder, value: Any, sizes: Sequence[Any], *, wraps: bool) -> Any:
    """Clip indices to their tensor; with `wraps`, negative ones count from its end."""
    if len(set(map(str, sizes))) > 1 or not all(isinstance(size, int) for size in sizes):
        return value
    size = int(sizes[0])
    return bb.emit(relax.op.clip(value, -size if wraps else 0, size - 1))


def divided(bb: relax.BlockBuilder, op: Any, value: Any, divisor: Any) -> Any:
    """Return ``op(value, divisor)`` for a division, which never traps."""
    dtype = str(divisor.ty.dtype)
    one, zero = relax.const(1, dtype), relax.const(0, dtype)
    safe = relax.op.where(relax.op.equal(divisor, zero), one, divisor)
    if dtype.startswith("u"):
        return bb.emit(op(value, safe))
    last = relax.op.equal(divisor, relax.const(-1, dtype))
    result = op(value, relax.op.where(last, one, safe))
    if op is relax.op.divide:
        # The product is not `where(last, -value, result)`: LLVM reduces that, on vectors, to a
        # division by -1.
        result = relax.op.multiply(result, relax.op.where(last, relax.const(-1, dtype), one))
    return bb.emit(result)


def _kernel(demand: Demand, kind: Any, sizes: Sequence[Any]) -> tirx.PrimFunc:
    """Return the function that checks and copies a tensor."""
    dtype = str(kind.dtype)
    shape = [int(d) if isinstance(d, tirx.IntImm) else tirx.Var(d.name, "int64")
             for d in kind.shape.values]  # fmt: skip
    named = {d.name: d for d in shape if isinstance(d, tirx.Var)}
    free = {s.name: tirx.Var(s.name, "int64") for s in symbols_of(sizes) if s.name not in named}
    limits = [renamed(size, named | free) for size in sizes]
    message = f"{MARK}{_plain(str(demand))}"
    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            T.func_attr({"op_pattern": OPAQUE, "tirx.is_scheduled": True})
            given = T.arg("given", T.buffer(shape, dtype))
            for name, size in free.items():
                T.arg(name, size)
            made = T.arg("checked", T.buffer(shape, dtype))
            whole = tuple(slice(0, extent) for extent in shape)
            with T.sblock("check"):
                T.reads(given[whole])
                T.writes(made[whole])
                with T.grid(*shape) if shape else nullcontext([]) as loops:
                    place = [loops] if isinstance(loops, tirx.Var) else list(loops)
                    ok, result = _judged(demand, given[tuple(place)], place, limits, dtype)
                    with T.Assert(ok, message, "ValueError"):
                        T.buffer_store(made, result, place)
        return builder.get()


def _judged(
    demand: Demand, value: Any, place: list[Any], sizes: Sequence[Any], dtype: str
) -> tuple[Any, Any]:
    """Return whether `value` meets the demand, and the safe value to read."""
    zero = tirx.const(0, dtype)
    if not sizes:
        return value != zero, value
    limits = [tirx.const(s, dtype) if isinstance(s, int) else tirx.Cast(dtype, s) for s in sizes]
    size = limits[-1]
    for k in reversed(range(len(limits) - 1)):
        size = tirx.Select(place[-1] == k, limits[k], size)
    if dtype.startswith("u"):
        return value < size, value
    if not demand.wraps:
        return tirx.all(value >= zero, value < size), value
    ok = tirx.all(value >= zero - size, value < size)
    return ok, tirx.Select(value < zero, value + size, value)


def _plain(message: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in message)[:300]
