"""Products of two computed tensors in Relax, which read their operands through views.

before: p = MatMul(a, b) [heads, rows, columns]; y = Transpose(p) [rows, heads, columns]
after:  p = product of a and b [rows, heads, columns]; y = p
"""

from __future__ import annotations

import math
from typing import Any

from tvm import relax, te, tirx, topi

from bnncc.codegen.in_place import may_have_strides
from bnncc.codegen.ops import OPAQUE
from bnncc.codegen.views import (
    Index,
    IndexFunction,
    axis_of_last,
    permuted,
    same,
    shape_of,
    source_of,
)
from bnncc.ir.graph import Graph, Node
from bnncc.ir.moves import PERMUTATIONS, REPEATS, VIEW, inverse

Expr = Any

FEW_ROWS = 8
"""With fewer rows, summing along the second operand's memory is cheaper than transposing it."""


def matmul(bb: relax.BlockBuilder, node: Node, args: list[Any], graph: Graph) -> relax.Expr | None:
    """Return a float32 MatMul that reads through views, and has the order of axes that is read.

    None if there are no views, and the order is that of the operands.
    """
    first, second = (graph.types[name].shape for name in node.inputs)
    if graph.types[node.inputs[0]].dtype != "float32" or len(first) < 3:
        return None
    if first[:-2] != second[:-2]:
        return None
    left, right = (shape_of(arg) for arg in args)
    many = not isinstance(left[-2], int) or left[-2] >= FEW_ROWS
    # Numbers of 16 bits are converted once, which calls a function for each on old processors.
    (a, a_at), (b, b_at) = (source_of(arg, bb, widening=not many) for arg in args)
    if b is not args[1] and many:
        axis = axis_of_last(b_at, right)
        # If several axes depend on the last one, the view itself is computed.
        b, b_at = (args[1], same) if axis is None else _columns_last(bb, b, b_at, axis)
    order = _order_read(node, graph) if many else None
    if a is args[0] and b is args[1] and order is None:
        return None
    order = order or [*range(len(left))]

    def compute(sizes: list[Expr], *tensors: te.Tensor) -> te.Tensor:
        x, y = tensors[0], tensors[-1]
        *rows, depth, columns = sizes
        k = te.reduce_axis((0, depth), "k")

        def total(*at: Expr) -> Expr:
            *batch, row, column = (at[order.index(axis)] for axis in range(len(at)))
            one, other = a_at([*batch, row, k]), b_at([*batch, k, column])
            return te.sum(_single(x(*one)) * _single(y(*other)), axis=k)

        extents = [*rows, columns]
        return te.compute([extents[axis] for axis in order], total, name="product")

    operands = [a] if a is b else [a, b]
    sizes = relax.ShapeExpr([*left, right[-1]])
    made = bb.emit_te(compute, sizes, *operands, primfunc_name_hint="matmul")
    if order == [*range(len(order))]:
        return made
    return relax.op.permute_dims(made, inverse(order))


def _single(value: Expr) -> Expr:
    return value if str(value.ty.dtype) == "float32" else value.astype("float32")


def transpose(
    bb: relax.BlockBuilder, node: Node, args: list[Any], graph: Graph
) -> relax.Expr | None:
    """Return what a Transpose undoes, e.g. a product in the order that is read; None otherwise."""
    if (found := permuted(args[0], bb)) is None:
        return None
    source, axes = found
    done = [axes[k] for k in node.attrs.get("perm", ())]
    return source if done == [*range(len(axes))] else None


def read_by_products(name: str, graph: Graph) -> bool:
    """Return whether only matrix products read a tensor, through views."""
    readers = graph.consumers().get(name, [])
    if name in graph.outputs or not readers:
        return False
    return all(
        reader.op == "MatMul"
        or (
            reader.op in (VIEW, *PERMUTATIONS, *REPEATS)
            and reader.inputs[0] == name
            and read_by_products(reader.outputs[0], graph)
        )
        for reader in readers
    )


def _order_read(node: Node, graph: Graph) -> list[int] | None:
    """Return the order of axes in which the only reader of a product reads it, rows as they are.

    None if it reads what is computed.
    """
    made = node.outputs[0]
    readers = graph.consumers().get(made, [])
    if made in graph.outputs or len(readers) != 1 or readers[0].op != "Transpose":
        return None
    order = [int(axis) for axis in readers[0].attrs.get("perm", ())]
    last = len(order) - 1
    return order if order[-1:] == [last] and order != [*range(last + 1)] else None


def _columns_last(
    bb: relax.BlockBuilder, source: Expr, place: IndexFunction, axis: int
) -> tuple[Expr, IndexFunction]:
    """Transpose the tensor that a view reads, so that one of its axes is the last one.

    Heads that share keys are transposed once.
    """
    sizes = source.ty.shape.values
    if axis == len(sizes) - 1:
        return source, place
    order = [k for k in range(len(sizes)) if k != axis] + [axis]
    opaque = {"primfunc_name_hint": "transpose", "primfunc_attrs": {"op_pattern": OPAQUE}}
    fixed = all(isinstance(size, tirx.IntImm) for size in sizes)
    if fixed and not may_have_strides(source, bb):  # as matrices
        outer, rows, columns = (
            math.prod(map(int, part)) for part in (sizes[:axis], [sizes[axis]], sizes[axis + 1 :])
        )
        whole = bb.emit(relax.op.reshape(source, [outer, rows, columns]))
        turned = bb.emit_te(topi.transpose, whole, [0, 2, 1], **opaque)
        moved = bb.emit(relax.op.reshape(turned, [sizes[k] for k in order]))
    else:
        moved = bb.emit_te(topi.transpose, source, order, **opaque)

    def index(at: Index) -> Index:
        found = place(at)
        return [found[k] for k in order]

    return moved, index
