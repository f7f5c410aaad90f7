"""Symbolic sizes as arguments of kernels: always in the order of their names.

TVM collects the sizes that a kernel reads from no shape, such as ``P`` of ``P + T``, in a set of
variables hashed by address. Two compilations of a network then differ in the order of arguments,
and in which kernels are found to be equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tvm
from tvm import tirx
from tvm.relax import block_builder


def symbols_of(sizes: Iterable[Any]) -> list[tirx.Var]:
    """Return the symbols in sizes, sorted by name."""
    found: dict[str, tirx.Var] = {}
    for size in sizes:
        for var in () if isinstance(size, int) else tirx.analysis.undefined_vars(size):
            found[var.name] = var
    return [found[name] for name in sorted(found)]


def register() -> None:
    """Have ``BlockBuilder.call_te`` and ``emit_te`` sort sizes, once per process."""
    unsorted = block_builder.gen_call_tir_inputs
    if getattr(unsorted, "sorts", False):
        return

    def by_name(*args: Any, **kwargs: Any) -> tuple[tirx.PrimFunc, list[Any], Any]:
        func, given, kinds = unsorted(*args, **kwargs)
        return (*_sorted(func, given), kinds)

    by_name.sorts = True  # type: ignore[attr-defined]
    block_builder.gen_call_tir_inputs = by_name


def _sorted(func: tirx.PrimFunc, given: list[Any]) -> tuple[tirx.PrimFunc, list[Any]]:
    """Sort the parameters of `func` that are sizes, and the arguments for them."""
    places = [k for k, value in enumerate(given) if tvm.ir.is_prim_expr(value)]
    order = sorted(places, key=lambda k: str(func.params[k].name))
    if order == places:
        return func, given
    params, values = list(func.params), list(given)
    for to, place in zip(places, order, strict=True):
        params[to], values[to] = func.params[place], given[place]
    made = tirx.PrimFunc(params, func.body, func.ret_type, func.attrs)
    return made, values
