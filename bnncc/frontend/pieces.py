"""Make the nodes that stand in place of one node of the file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bnncc.ir.graph import Graph, Node


@dataclass(frozen=True)
class Pieces:
    """Makes nodes under the name of another, and tensors and constants between them.

    Attributes
    ----------
    node : Node
        What the nodes stand for.
    graph : Graph
        Gets the constants.
    """

    node: Node
    graph: Graph

    def __call__(
        self,
        op: str,
        inputs: Sequence[str],
        output: str,
        attrs: Mapping[str, Any] | None = None,
        *,
        covers: tuple[str, ...] = (),
    ) -> Node:
        """Return a node with one output."""
        return Node(op, list(inputs), [output], dict(attrs or {}), self.node.name, covers)

    def tensor(self, what: str) -> str:
        """Return a name for a tensor on the way."""
        return self.graph.fresh(f"{self.node.outputs[0]}.{what}")

    def constant(self, value: Any) -> str:
        """Return the name of a float32 constant."""
        return self.graph.constant(np.asarray(value, np.float32), self.node.outputs[0])
