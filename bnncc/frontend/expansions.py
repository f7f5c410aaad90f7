"""Decomposition of operators into simpler ones."""

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
"""Writes the replacement, or nothing to keep the node."""

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
    """Return the decomposition of `node`, or None to keep it.

    Parameters
    ----------
    node : Node
        In the form of the newest opset.
    graph : Graph
        Has the types of its inputs; receives constants.

    Raises
    ------
    UnsupportedOp
        If its attributes or sizes cannot be decomposed.
    ShapeError
        If shapes are inconsistent.
    """
    rule = _TABLE.get(node.op)
    if rule is None:
        return None
    write = Expression(node, graph)
    rule(write)
    return write if write.nodes else None
