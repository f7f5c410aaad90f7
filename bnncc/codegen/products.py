"""Products of two computed tensors in Relax, which read their operands through views.

Attention splits heads by reshapes and transpositions, and repeats shared heads; a product can read
through all of these without copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from tvm import relax, te, tirx
from tvm.ir import Range
from tvm.sym import Analyzer

from bnncc.ir.graph import Graph, Node
from bnncc.schedules.expressions import depends

Expr = Any
Index = Sequence[Expr]
Place = Callable[[Index], Index]

FEW_ROWS = 8
"""With fewer rows, summing along the second operand's memory is cheaper than transposing it."""


def matmul(bb: relax.BlockBuilder, node: Node, args: list[Any], graph: Graph) -> relax.Expr | None:
    """Return a float32 MatMul that reads through views, or None if there are no views."""
    first, second = (graph.types[name].shape for name in node.inputs)
    if graph.types[node.inputs[0]].dtype != "float32" or len(first) < 3:
        return None
    if first[:-2] != second[:-2]:
        return None
    left, right = (_shape(arg) for arg in args)
    (a, a_at), (b, b_at) = (source_of(arg, bb) for arg in args)
    many = not isinstance(left[-2], int) or left[-2] >= FEW_ROWS
    if b is not args[1] and many and not _along_last(b, b_at, right):
        b, b_at = args[1], _same
    if a is args[0] and b is args[1]:
        return None

    def compute(sizes: list[Expr], *tensors: te.Tensor) -> te.Tensor:
        x, y = tensors[0], tensors[-1]
        *rows, depth, columns = sizes
        k = te.reduce_axis((0, depth), "k")

        def total(*at: Expr) -> Expr:
            *batch, row, column = at
            one, other = a_at([*batch, row, k]), b_at([*batch, k, column])
            return te.sum(x(*one) * y(*other), axis=k)

        return te.compute([*rows, columns], total, name="product")

    operands = [a] if a is b else [a, b]
    sizes = relax.ShapeExpr([*left, right[-1]])
    return bb.emit_te(compute, sizes, *operands, primfunc_name_hint="matmul")


def _same(at: Index) -> Index:
    return at


def _along_last(source: Expr, place: Place, shape: Sequence[Any]) -> bool:
    """Return whether the last axis of a view is contiguous in its source."""
    at = [tirx.Var(f"i{k}", "int64") for k in range(len(shape))]
    known = Analyzer()
    for var, size in zip(at, shape, strict=True):
        known.bind(var, Range(0, size))
    moved = [known.simplify(index) for index in place(at)]
    last = known.simplify(moved[-1] - at[-1])
    return not any(depends(index, at[-1]) for index in [*moved[:-1], last])


def source_of(expr: Expr, bb: relax.BlockBuilder) -> tuple[Expr, Place]:
    """Return the tensor of which an expression is a view, and the index function of the view."""
    made = bb.lookup_binding(expr) if isinstance(expr, relax.Var) else None
    name = str(getattr(getattr(made, "op", None), "name", ""))
    rule = _VIEWS.get(name)
    if made is None or rule is None or (view := rule(made)) is None:
        return expr, _same
    outer: Place = view
    source, inner = source_of(made.args[0], bb)
    if rule is _reshaped and source.same_as(made.args[0]) and _mixes(made):
        return expr, _same  # the same memory, with simpler indices
    return source, lambda at: inner(outer(at))


def _shape(expr: Expr) -> list[Any]:
    """Return the sizes of a tensor, as numbers where they are known."""
    return [int(d) if isinstance(d, tirx.IntImm) else d for d in expr.ty.shape.values]


def _permuted(call: relax.Call) -> Place:
    rank = len(_shape(call))
    axes = call.attrs.axes
    order = [int(k) for k in axes] if axes is not None else [*range(rank)][::-1]
    return lambda at: [at[order.index(k)] for k in range(rank)]


def _reshaped(call: relax.Call) -> Place | None:
    """Return the index function of a reshape; None if it would divide by a symbolic size."""
    have, made = _shape(call.args[0]), _shape(call)
    ends, others = _products(have), _products(made)
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
        [str(size) for size in _shape(expr) if not _is_one(size)] for expr in (call.args[0], call)
    )
    return have != made


def _products(shape: Sequence[Any]) -> dict[tuple[int, tuple[str, ...]], int]:
    """Return how many of the first axes have how many elements: a number and symbolic sizes.

    Where two shapes have one in common, a reshape does not mix the axes before and behind.
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


def _broadcast(call: relax.Call) -> Place | None:
    have, made = _shape(call.args[0]), _shape(call)
    kept = made[len(made) - len(have) :]
    ones = [_is_one(size) for size in have]
    if not all(one or str(a) == str(b) for one, a, b in zip(ones, have, kept, strict=True)):
        return None
    return lambda at: [
        tirx.const(0, "int64") if one else index
        for one, index in zip(ones, at[len(at) - len(have) :], strict=True)
    ]


_VIEWS: dict[str, Callable[[relax.Call], Place | None]] = {
    "relax.permute_dims": _permuted,
    "relax.reshape": _reshaped,
    "relax.expand_dims": _reshaped,
    "relax.squeeze": _reshaped,
    "relax.broadcast_to": _broadcast,
}
