"""Products of two computed tensors in Relax, which read their operands through views."""

from __future__ import annotations

from typing import Any

from tvm import relax, te, topi

from bnncc.codegen.ops import OPAQUE
from bnncc.codegen.views import (
    Index,
    IndexFunction,
    axis_of_last,
    same,
    shape_of,
    source_of,
)
from bnncc.ir.graph import Graph, Node

Expr = Any

FEW_ROWS = 8
"""With fewer rows, summing along the second operand's memory is cheaper than transposing it."""


def matmul(bb: relax.BlockBuilder, node: Node, args: list[Any], graph: Graph) -> relax.Expr | None:
    """Return a float32 MatMul that reads through views, or None if there are no views."""
    first, second = (graph.types[name].shape for name in node.inputs)
    if graph.types[node.inputs[0]].dtype != "float32" or len(first) < 3:
        return None
    if first[:-2] != second[:-2]:
        return None
    left, right = (shape_of(arg) for arg in args)
    (a, a_at), (b, b_at) = (source_of(arg, bb) for arg in args)
    many = not isinstance(left[-2], int) or left[-2] >= FEW_ROWS
    if b is not args[1] and many:
        axis = axis_of_last(b_at, right)
        # If several axes depend on the last one, the view itself is computed.
        b, b_at = (args[1], same) if axis is None else _columns_last(bb, b, b_at, axis)
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


def _columns_last(
    bb: relax.BlockBuilder, source: Expr, place: IndexFunction, axis: int
) -> tuple[Expr, IndexFunction]:
    """Transpose the tensor that a view reads, so that one of its axes is the last one.

    Heads that share keys are transposed once.
    """
    if axis == len(source.ty.shape.values) - 1:
        return source, place
    order = [k for k in range(len(source.ty.shape.values)) if k != axis] + [axis]
    moved = bb.emit_te(
        topi.transpose, source, order,
        primfunc_name_hint="transpose", primfunc_attrs={"op_pattern": OPAQUE},
    )  # fmt: skip

    def index(at: Index) -> Index:
        found = place(at)
        return [found[k] for k in order]

    return moved, index
