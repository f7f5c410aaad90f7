"""Views of tensors in Relax, through which kernels read without copies.

Attention splits heads by reshapes and transpositions, and repeats shared heads by broadcasts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.ir import Range
from tvm.sym import Analyzer

from bnncc.ir.halves import KINDS
from bnncc.schedules.expressions import depends

Expr = Any
Index = Sequence[Expr]
IndexFunction = Callable[[Index], Index]
"""Maps the index of an element of a view to its index in another tensor."""


def same(at: Index) -> Index:
    """Return the index in a tensor that is not a view."""
    return at


def axis_of_last(place: IndexFunction, shape: Sequence[Any]) -> int | None:
    """Return the axis of the source along which the last axis of a view of a shape runs.

    None if it runs along several, or not in steps of one.
    """
    at = [tirx.Var(f"i{k}", "int64") for k in range(len(shape))]
    known = Analyzer()
    for var, size in zip(at, shape, strict=True):
        known.bind(var, Range(0, size))
    moved = [known.simplify(index) for index in place(at)]
    axes = [k for k, index in enumerate(moved) if depends(index, at[-1])]
    if len(axes) != 1 or depends(known.simplify(moved[axes[0]] - at[-1]), at[-1]):
        return None
    return axes[0]


def source_of(
    expr: Expr, bb: relax.BlockBuilder, widening: bool = False
) -> tuple[Expr, IndexFunction]:
    """Return the tensor of which an expression is a view, and the index function of the view.

    With `widening`, float32 numbers are also a view of a float16 or bfloat16 tensor.
    """
    made = bb.lookup_binding(expr) if isinstance(expr, relax.Var) else None
    name = str(getattr(getattr(made, "op", None), "name", ""))
    rule = _VIEWS.get(name)
    if widening and made is not None and _widens(made):
        return source_of(made.args[0], bb)
    if made is None or rule is None or (view := rule(made)) is None:
        return expr, same
    outer: IndexFunction = view
    source, inner = source_of(made.args[0], bb, widening)
    if rule is _reshaped and source.same_as(made.args[0]) and _mixes(made):
        return expr, same  # the same memory, with simpler indices
    return source, lambda at: inner(outer(at))


def _widens(made: Expr) -> bool:
    """Return whether an expression casts numbers of 16 bits to float32."""
    if not isinstance(made, relax.Call) or made.op != tvm.ir.Op.get("relax.astype"):
        return False
    return str(made.ty.dtype) == "float32" and str(made.args[0].ty.dtype) in KINDS


def permuted(expr: Expr, bb: relax.BlockBuilder) -> tuple[Expr, list[int]] | None:
    """Return the tensor and the order if all axes but the last are permuted; None otherwise."""
    made = bb.lookup_binding(expr) if isinstance(expr, relax.Var) else None
    if not isinstance(made, relax.Call) or made.op != tvm.ir.Op.get("relax.permute_dims"):
        return None
    axes = [int(axis) for axis in made.attrs.axes or ()]
    return (made.args[0], axes) if axes and axes[-1] == len(axes) - 1 else None


def shape_of(expr: Expr) -> list[Any]:
    """Return the sizes of a tensor in Relax, as numbers where they are known."""
    return _known(expr.ty.shape.values)


def _known(sizes: Iterable[Any]) -> list[Any]:
    return [int(d) if isinstance(d, tirx.IntImm) else d for d in sizes]


def _permuted(call: relax.Call) -> IndexFunction:
    rank = len(shape_of(call))
    axes = call.attrs.axes
    order = [int(k) for k in axes] if axes is not None else [*range(rank)][::-1]
    return lambda at: [at[order.index(k)] for k in range(rank)]


def _reshaped(call: relax.Call) -> IndexFunction | None:
    """Return the index function of a reshape; None if it would divide by a symbolic size."""
    have, made = shape_of(call.args[0]), shape_of(call)
    ends, others = _prefixes(have), _prefixes(made)
    cuts = [(0, 0), *((ends[size], others[size]) for size in ends if size in others)]
    parts = [
        (have[a:b], range(c, d)) for (a, c), (b, d) in pairwise([*cuts, (len(have), len(made))])
    ]
    for sizes, axes in parts:
        apart = len([size for size in sizes if not _is_one(size)]) > 1 or len(axes) > 1
        if apart and not all(isinstance(s, int) for s in [*sizes, *(made[k] for k in axes)]):
            return None

    def place(at: Index) -> Index:
        found: list[Expr] = []
        for sizes, axes in parts:
            flat: Expr = at[axes[0]] if axes else tirx.const(0, "int64")
            for k in axes[1:]:
                flat = flat * made[k] + at[k]
            where: list[Expr] = []
            longer = [k for k, size in enumerate(sizes) if not _is_one(size)]
            for k in range(len(sizes))[::-1]:
                if k not in longer:
                    where.insert(0, tirx.const(0, "int64"))
                elif k == longer[0]:  # the outermost one, which may be symbolic
                    where.insert(0, flat)
                else:
                    where.insert(0, tirx.floormod(flat, sizes[k]))
                    flat = tirx.floordiv(flat, sizes[k])
            found += where
        return found

    return place


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _mixes(call: relax.Call) -> bool:
    """Return whether a reshape does more than add or drop axes of size 1."""
    have, made = (
        [str(size) for size in shape_of(expr) if not _is_one(size)] for expr in (call.args[0], call)
    )
    return have != made


def _prefixes(shape: Sequence[Any]) -> dict[tuple[int, tuple[str, ...]], int]:
    """Map the size of the first axes, as a number and symbolic sizes, to how many axes they are.

    Where two shapes agree in one, a reshape does not mix the axes before it with those after it.
    """
    number, symbols = 1, list[str]()
    found: dict[tuple[int, tuple[str, ...]], int] = {(1, ()): 0}
    for count, size in enumerate(shape, 1):
        if isinstance(size, int):
            number *= size
        else:
            symbols.append(str(size))
        found[number, tuple(sorted(symbols))] = count
    return found


def _broadcast(call: relax.Call) -> IndexFunction | None:
    have, made = shape_of(call.args[0]), shape_of(call)
    kept = made[len(made) - len(have) :]
    ones = [_is_one(size) for size in have]
    if not all(one or str(a) == str(b) for one, a, b in zip(ones, have, kept, strict=True)):
        return None
    return lambda at: broadcast_index(have, at)


def broadcast_index(sizes: Iterable[Any], at: Index) -> list[Expr]:
    """Return the index of the element of a tensor that is broadcast to `at` in a larger tensor."""
    have = _known(sizes)
    return [
        tirx.const(0, "int64") if _is_one(size) else index
        for size, index in zip(have, at[len(at) - len(have) :], strict=True)
    ]


_VIEWS: dict[str, Callable[[relax.Call], IndexFunction | None]] = {
    "relax.permute_dims": _permuted,
    "relax.reshape": _reshaped,
    "relax.expand_dims": _reshaped,
    "relax.squeeze": _reshaped,
    "relax.broadcast_to": _broadcast,
}
