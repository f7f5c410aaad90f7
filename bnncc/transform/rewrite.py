"""Infrastructure of rewriting passes: a forward walk, aliases, and typed new nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bnncc.ir.graph import Graph, Node
from bnncc.ir.infer import infer_into

Array = np.ndarray[Any, Any]


@dataclass
class Walk:
    """State of a forward walk."""

    graph: Graph
    """The graph being rewritten."""
    made: dict[str, Node] = field(default_factory=dict)
    """Producers of the tensors visited so far."""
    alias: dict[str, str] = field(default_factory=dict)
    """Tensors replaced by others."""

    def value(self, name: str) -> Array | None:
        """Return a constant's value, or None."""
        return self.graph.constants.get(name)

    def scalar(self, name: str) -> Any:
        """Return the value of a one-element constant, or None."""
        value = self.graph.constants.get(name)
        return value.reshape(-1)[0] if value is not None and value.size == 1 else None

    def producer(self, name: str, *ops: str) -> Node | None:
        """Return the node that makes `name` if its operator is in `ops`, or None."""
        node = self.made.get(name)
        return node if node is not None and node.op in ops else None


Result = str | list[Node] | None
Rule = Callable[[Node, Walk], Result]


def walk(graph: Graph, rule: Rule) -> bool:
    """Apply `rule` to each node in topological order.

    Parameters
    ----------
    graph : Graph
        Modified in place.
    rule : callable
        Returns None to keep the node, the name of a tensor that equals its only output, or
        replacement nodes (typed by the walk).

    Returns
    -------
    bool
        Whether anything changed.
    """
    state = Walk(graph)
    nodes: list[Node] = []
    changed = False

    def put(node: Node) -> None:
        nodes.append(node)
        for name in node.outputs:
            if name:
                state.made[name] = node

    for node in graph.nodes:
        node.inputs = [state.alias.get(i, i) for i in node.inputs]
        result = rule(node, state)
        if result is None:
            put(node)
            continue
        if isinstance(result, str):
            if node.outputs[0] not in graph.outputs:
                state.alias[node.outputs[0]] = result
                changed = True
            else:
                changed |= node.op != "Identity"
                put(Node("Identity", [result], node.outputs[:1], {}, node.name))
            continue
        changed = True
        for piece in result:
            if any(o not in graph.types for o in piece.outputs if o) or piece is not result[-1]:
                infer_into(piece, graph)
            put(piece)
    graph.nodes = nodes
    return changed


def alias_outputs(state: Walk, node: Node, other: Node) -> bool:
    """Replace `node`'s outputs by those of `other`; return whether that was possible."""
    if any(o in state.graph.outputs for o in node.outputs):
        return False
    for mine, theirs in zip(node.outputs, other.outputs, strict=True):
        if mine and not theirs:
            return False
    state.alias.update((m, t) for m, t in zip(node.outputs, other.outputs, strict=True) if m)
    return True


def settle_outputs(graph: Graph) -> None:
    """Remove Identity nodes before graph outputs by renaming what they read."""
    made = graph.producers()
    rename: dict[str, str] = {}
    dropped: set[int] = set()
    for node in graph.nodes:
        source, out = node.inputs[0] if node.inputs else "", node.outputs[0]
        if node.op != "Identity" or out not in graph.outputs:
            continue
        if source in made and source not in graph.outputs and source not in rename:
            rename[source] = out
            dropped.add(id(node))
    if not rename:
        return
    graph.nodes = [n for n in graph.nodes if id(n) not in dropped]
    for node in graph.nodes:
        node.inputs = [rename.get(i, i) for i in node.inputs]
        node.outputs = [rename.get(o, o) for o in node.outputs]
