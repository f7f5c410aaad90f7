"""Products of two computed tensors in Relax, which read their operands through views.

Attention splits heads by reshapes and transpositions, and repeats shared heads; a product can read
through all of these without copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import relax, te, tirx
from tvm.ir import Range
from tvm.sym import Analyzer

from bnncc.ir.dims import is_static
from bnncc.ir.graph import Graph, Node
from bnncc.schedules.epilogue import depends

Expr = Any
Index = Sequence[Expr]
Place = Callable[[Index], Index]

FEW_ROWS = 8
"""With fewer rows, summing along the second operand's memory is cheaper than transposing it."""


def matmul(bb: relax.BlockBuilder, node: Node, args: list[Any], graph: Graph) -> relax.Expr | None:
    """Return a float32 MatMul that reads through views, or None if there are no views."""
    shapes = [graph.types[name].shape for name in node.inputs]
    left, right = shapes
    fixed = is_static(d for shape in shapes for d in shape)
    if graph.types[node.inputs[0]].dtype != "float32" or not fixed or len(left) < 3:
        return None
    if left[:-2] != right[:-2]:
        return None
    (a, a_at), (b, b_at) = (source_of(arg, bb) for arg in args)
    if b is not args[1] and int(left[-2]) >= FEW_ROWS and not _along_last(b, b_at, right):
        b, b_at = args[1], _same
    if a is args[0] and b is args[1]:
        return None

    def compute(*tensors: te.Tensor) -> te.Tensor:
        x, y = tensors[0], tensors[-1]
        k = te.reduce_axis((0, left[-1]), "k")

        def total(*at: Expr) -> Expr:
            *batch, row, column = at
            one, other = a_at([*batch, row, k]), b_at([*batch, k, column])
            return te.sum(x(*one) * y(*other), axis=k)

        return te.compute([*left[:-1], right[-1]], total, name="product")

    operands = [a] if a is b else [a, b]
    return bb.emit_te(compute, *operands, primfunc_name_hint="matmul")


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
    if made is None or rule is None or not _fixed(expr) or not _fixed(made.args[0]):
        return expr, _same
    source, inner = source_of(made.args[0], bb)
    if rule is _reshaped and source.same_as(made.args[0]):
        return expr, _same  # the same memory, with simpler indices
    outer = rule(made)
    return source, lambda at: inner(outer(at))


def _shape(expr: Expr) -> list[Any]:
    return [int(d) for d in expr.ty.shape.values]


def _fixed(expr: Expr) -> bool:
    shape = getattr(getattr(expr, "ty", None), "shape", None)
    return shape is not None and all(isinstance(d, tirx.IntImm) for d in shape.values)


def _permuted(call: relax.Call) -> Place:
    rank = len(_shape(call))
    axes = call.attrs.axes
    order = [int(k) for k in axes] if axes is not None else [*range(rank)][::-1]
    return lambda at: [at[order.index(k)] for k in range(rank)]


def _reshaped(call: relax.Call) -> Place:
    have, made = _shape(call.args[0]), _shape(call)

    def place(at: Index) -> Index:
        flat: Expr = tirx.const(0, "int64")
        for size, index in zip(made, at, strict=True):
            flat = flat * size + index
        found: list[Expr] = []
        for size in reversed(have):
            found.insert(0, tirx.floormod(flat, size))
            flat = tirx.floordiv(flat, size)
        return found

    return place


def _broadcast(call: relax.Call) -> Place:
    have = _shape(call.args[0])
    return lambda at: [
        tirx.const(0, "int64") if size == 1 else index
        for size, index in zip(have, at[len(at) - len(have) :], strict=True)
    ]


_VIEWS: dict[str, Callable[[relax.Call], Place]] = {
    "relax.permute_dims": _permuted,
    "relax.reshape": _reshaped,
    "relax.expand_dims": _reshaped,
    "relax.squeeze": _reshaped,
    "relax.broadcast_to": _broadcast,
}
