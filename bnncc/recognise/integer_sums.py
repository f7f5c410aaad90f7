"""Compute matrix products of integers in float32, where that is exact.

    before: i = Cast(q, int8); j = Cast(i, int32); s = MatMul(j, W)            W int32
    after:  f = Cast(j, float32); t = MatMul(f, W); s = Cast(t, int32)         W float32

Float32 holds every integer below 2^24, so all sums of products that stay below that are exact, in
any order. The types that data were cast to bound them. Kernels for few bits, and for floats, then
compute what would otherwise be a generic loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bnncc.ir.graph import Graph, Node
from bnncc.ir.infer import infer_into
from bnncc.ir.magnitude import EXACT_BELOW
from bnncc.ir.moves import PERMUTATIONS, VIEW
from bnncc.ir.pieces import Expression

_VIEWS = (*PERMUTATIONS, VIEW)
_ROUND = ("Round", "Floor", "Ceil")


@dataclass(frozen=True)
class _Operand:
    """An operand of a product: integers of some magnitude."""

    top: float
    """Bound of the magnitude."""
    source: str
    """The integers, of any type; behind `moves` they are the operand."""
    moves: tuple[Node, ...] = ()


def float_integer_products(graph: Graph) -> None:
    """Replace matrix products of int32 or int64 by those of float32 if all sums are below 2^24.

    Parameters
    ----------
    graph : Graph
        Before `recognise_quantizers`; modified in place.
    """
    producers = graph.producers()

    def replaced(node: Node) -> list[Node] | None:
        kind = graph.types[node.outputs[0]]
        if kind.dtype not in ("int32", "int64") or not _plain(node):
            return None
        operands = [_operand(name, graph, producers) for name in node.inputs[:2]]
        if _bound(node, operands, graph) >= EXACT_BELOW:
            return None
        write = Expression(node, graph)
        floats = [_as_float(write, one) for one in operands]
        made = write(node.op, *floats, covers=node.covers, **node.attrs)
        made = write.cast(made, kind.dtype)
        for piece in write.nodes:
            infer_into(piece, graph)
        return write.result(made)

    graph.replace(replaced)
    graph.prune()


def _plain(node: Node) -> bool:
    """Whether a node is a product of two operands, and nothing else."""
    if node.op == "Gemm":
        return not node.input(2) and float(node.attrs.get("alpha", 1)) == 1
    return node.op == "MatMul"


def _bound(node: Node, operands: Sequence[_Operand], graph: Graph) -> float:
    """Return a bound of the sums of a product, and of all operands."""
    left, right = (one.top for one in operands)
    shape = graph.types[node.inputs[0]].shape
    axis = -2 if node.op == "Gemm" and node.attrs.get("transA") else -1
    terms = shape[axis] if shape else 0
    if not isinstance(terms, int):
        return float("inf")
    weight = graph.constants.get(node.inputs[1])
    if weight is not None and weight.ndim == 2:  # less than if all were the largest
        side = 1 if node.op == "Gemm" and node.attrs.get("transB") else 0
        sums = np.abs(weight.astype(np.float64)).sum(axis=side).max(initial=0)
        return max(left, right, left * float(sums))
    return max(left, right, left * right * terms)


def _as_float(write: Expression, operand: _Operand) -> str:
    graph = write.graph
    value = graph.constants.get(operand.source)
    if value is not None:
        return write.constant(value)
    made = operand.source
    if graph.types[made].dtype != "float32":
        made = write.cast(made, "float32")
    for move in operand.moves:
        made = write(move.op, made, *move.inputs[1:], **move.attrs)
    return made


def _operand(name: str, graph: Graph, producers: dict[str, Node]) -> _Operand:
    """Return an operand as its author wrote it before moves and conversions."""
    value = graph.constants.get(name)
    if value is not None:
        return _Operand(float(np.abs(value.astype(np.float64)).max(initial=0)), name)
    moves: list[Node] = []
    inner, limits = name, _range(graph.types[name].dtype)
    while (node := producers.get(inner)) is not None and node.op in ("Cast", *_VIEWS):
        before = graph.types[node.inputs[0]].dtype
        if node.op != "Cast":
            moves.insert(0, node)
        elif before == "float32":
            found = _limits(node.inputs[0], graph, producers)
            if found is None or not _within(found, limits):
                break
            return _Operand(max(-found[0], found[1]), node.inputs[0], tuple(moves))
        elif np.dtype(before).kind not in "biu" or not _within(_range(before), limits):
            break  # may wrap around
        else:
            limits = _range(before)
        inner = node.inputs[0]
    return _Operand(max(-limits[0], limits[1]), name)


_Range = tuple[float, float]


def _range(dtype: str) -> _Range:
    """Return the bounds of an integer type."""
    if dtype == "bool":
        return 0.0, 1.0
    info = np.iinfo(dtype)
    return float(info.min), float(info.max)


def _within(inner: _Range, outer: _Range) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _limits(name: str, graph: Graph, producers: dict[str, Node]) -> _Range | None:
    """Return the bounds of a float tensor that is rounded, limited (in either order) and moved."""
    first = producers.get(name)
    while first is not None and first.op in _VIEWS:
        first = producers.get(first.inputs[0])
    second = producers.get(first.inputs[0]) if first is not None else None
    if first is None or second is None:
        return None
    limit, rounding = (first, second) if first.op == "Clip" else (second, first)
    if limit.op != "Clip" or rounding.op not in _ROUND:
        return None
    ends = [graph.constants.get(limit.input(k)) for k in (1, 2)]
    low, high = (float("nan") if v is None or v.size != 1 else float(v.item()) for v in ends)
    whole = np.isfinite([low, high]).all() and low == round(low) and high == round(high)
    return (low, high) if whole else None
