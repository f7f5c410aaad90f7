"""Remove casts of integer sums to integer types and back to float32.

    before: s = MatMul(q, W); i = Cast(s, int32); f = Cast(i, float32)        q and W integers
    after:  s = MatMul(q, W)

Float32 holds every integer below 2^24 exactly, so neither Cast changes a value. `MatMulInteger`
returns int32, and most models continue in float.
"""

from __future__ import annotations

import numpy as np

from bnncc.ir.graph import Graph, Node
from bnncc.ir.magnitude import EXACT_BELOW
from bnncc.recognise.lattice import Lattice, lattices

_SAME = {"Reshape", "Transpose", "Identity", "Neg"}
_SIGNED = ("int8", "int16", "int32", "int64", "float32", "float64")
"""Types to which a cast cannot enlarge integers: unsigned ones wrap around, float16 overflows."""


def drop_integer_casts(graph: Graph) -> None:
    """Drop casts of integer-valued tensors to integer types and back to float32.

    Parameters
    ----------
    graph : Graph
        After `move_row_scales`; modified in place.
    """
    held, producers = lattices(graph), graph.producers()
    tops: dict[str, float] = {}
    alias: dict[str, str] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        node.inputs = [alias.get(i, i) for i in node.inputs]
        if (top := _top(node, graph, tops, held)) is not None:
            tops[node.outputs[0]] = top
        source = _before_casts(node, graph, producers)
        if tops.get(source, EXACT_BELOW) < EXACT_BELOW and node.outputs[0] not in graph.outputs:
            alias[node.outputs[0]] = source
        else:
            nodes.append(node)
    graph.nodes = nodes
    graph.prune()


def _before_casts(node: Node, graph: Graph, producers: dict[str, Node]) -> str:
    """Return the float32 tensor that a node casts back to float32, or ""."""
    inner = producers.get(node.inputs[0]) if node.op == "Cast" else None
    if inner is None or inner.op != "Cast" or graph.types[inner.outputs[0]].dtype not in _WIDE:
        return ""
    ends = (node.outputs[0], inner.inputs[0])
    return inner.inputs[0] if all(graph.types[i].dtype == "float32" for i in ends) else ""


_WIDE = ("int32", "int64")


def _top(
    node: Node, graph: Graph, tops: dict[str, float], held: dict[str, Lattice]
) -> float | None:
    """Return a bound of the integers that a node gives; None if they may not be integers."""

    def of(name: str) -> float | None:
        if name in held:
            return _largest(np.array(held[name].values))
        value = graph.constants.get(name)
        return tops.get(name) if value is None else _largest(value)

    if node.op in _SAME or (node.op == "Cast" and graph.types[node.outputs[0]].dtype in _SIGNED):
        return of(node.inputs[0])
    if node.op not in ("MatMul", "Add", "Sub", "Mul"):
        return None
    left, right = (of(name) for name in node.inputs)
    if left is None or right is None:
        return None
    if node.op == "MatMul":
        weight = graph.constants.get(node.inputs[1])
        if weight is None or weight.ndim != 2:
            return None
        return left * float(np.abs(weight.astype(np.float64)).sum(axis=0).max(initial=0))
    return left * right if node.op == "Mul" else left + right


def _largest(values: np.ndarray) -> float | None:
    """Return the largest magnitude of integers; None if some are not integers."""
    if values.dtype.kind not in "fiu" or not values.size or not np.isfinite(values).all():
        return None
    whole = bool((np.rint(values) == values).all())
    return float(np.abs(values.astype(np.float64)).max()) if whole else None
