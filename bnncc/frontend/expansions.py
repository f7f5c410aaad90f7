"""Operators that are written as several simpler ones."""

from __future__ import annotations

from collections.abc import Callable

from bnncc.frontend import (
    arithmetic,
    indexing,
    integer_products,
    recurrent,
    reductions,
    sampling,
    spectral,
)
from bnncc.ir.graph import Graph, Node
from bnncc.ir.pieces import Expression

Expansion = Callable[[Expression], None]
"""Writes nodes, or none where the node is to stay as it is."""

_TABLE: dict[str, Expansion] = {
    **arithmetic.EXPANSIONS,
    **indexing.EXPANSIONS,
    **integer_products.EXPANSIONS,
    **recurrent.EXPANSIONS,
    **reductions.EXPANSIONS,
    **sampling.EXPANSIONS,
    **spectral.EXPANSIONS,
}


def expand(node: Node, graph: Graph) -> Expression | None:
    """Return what computes `node`, or None if it stays as it is.

    Parameters
    ----------
    node : Node
        In the newest opset's form.
    graph : Graph
        Types of its inputs; gets constants.

    Raises
    ------
    UnsupportedOp
        If its attributes or sizes have no such form.
    ShapeError
        If shapes do not fit.
    """
    rule = _TABLE.get(node.op)
    if rule is None:
        return None
    write = Expression(node, graph)
    rule(write)
    return write if write.nodes else None
