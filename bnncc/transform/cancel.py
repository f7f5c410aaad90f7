"""Cancel the residue of straight-through estimators: ``a - b + b`` becomes ``a``."""

from __future__ import annotations

from bnncc.errors import ShapeError
from bnncc.ir.graph import Graph, Node
from bnncc.ir.halves import ROUND
from bnncc.ir.shaperules import broadcast
from bnncc.transform.rewrite import Result, Walk, walk

_LINEAR = {"Add": (1, 1), "Sub": (1, -1), "Neg": (-1,), ROUND: (1,)}
_MAX_TERMS = 16
_MAX_LEFT = 3


def cancel(graph: Graph) -> bool:
    """Cancel equal terms of opposite sign in sums of Add, Sub and Neg, however they are associated.

        s = Sign(x); c = Clip(x); y = Add(Sub(s, c), c)     ->     y = s

    Notes
    -----
    This is the only rewrite that changes values: it omits the rounding of ``a - b + b``.
    Constants do not cancel, since ``x + c - c`` may be meant to round.
    """
    position = {o: k for k, n in enumerate(graph.nodes) for o in n.outputs}

    def rule(node: Node, state: Walk) -> Result:
        if node.op not in ("Add", "Sub"):
            return None
        kind = graph.types[node.outputs[0]]
        if not kind.dtype.startswith(("float", "bfloat")):
            return None
        terms = _cancelled(node, state, position)
        if terms is None:
            return None
        return _rebuild(node, terms, graph)

    return walk(graph, rule)


def _cancelled(node: Node, state: Walk, position: dict[str, int]) -> dict[str, int] | None:
    """Expand a sum, latest tensors first, until a term cancels; return the remaining terms."""
    terms: dict[str, int] = {}
    for name, sign in zip(node.inputs, _LINEAR[node.op], strict=True):
        terms[name] = terms.get(name, 0) + sign
    constants = state.graph.constants
    for _ in range(_MAX_TERMS):
        zero = [n for n, k in terms.items() if k == 0]
        if any(n not in constants for n in zero):
            return {n: k for n, k in terms.items() if k}
        if zero or len(terms) > _MAX_TERMS:
            return None
        inner = [n for n in terms if n in state.made and state.made[n].op in _LINEAR]
        if not inner:
            return None
        latest = max(inner, key=lambda n: position.get(n, -1))
        count = terms.pop(latest)
        source = state.made[latest]
        for name, sign in zip(source.inputs, _LINEAR[source.op], strict=True):
            terms[name] = terms.get(name, 0) + sign * count
    return None


def _rebuild(node: Node, terms: dict[str, int], graph: Graph) -> Result:
    shapes = [graph.types[n].shape for n in terms]
    try:
        fits = broadcast(shapes, node.name) == graph.types[node.outputs[0]].shape
    except ShapeError:
        fits = False
    if not terms or not fits or len(terms) > _MAX_LEFT or any(abs(k) != 1 for k in terms.values()):
        return None
    names = sorted(terms, key=lambda n: -terms[n])  # additions first; stable
    if terms[names[0]] < 0:
        return [Node("Neg", names, node.outputs, {}, node.name)] if len(names) == 1 else None
    if len(names) == 1:
        return names[0]
    nodes: list[Node] = []
    total = names[0]
    for k, name in enumerate(names[1:], 2):
        out = node.outputs[0] if k == len(names) else graph.fresh(node.outputs[0])
        op = "Add" if terms[name] > 0 else "Sub"
        nodes.append(Node(op, [total, name], [out], {}, node.name))
        total = out
    return nodes
