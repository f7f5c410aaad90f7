"""Merge sibling convolutions whose results are concatenated.

    before: a = Add(BatchNormalization(BinaryConv(s, v)), x)
            b = Add(BatchNormalization(BinaryConv(s, w)), x)      y = Concat(a, b)
    after:  y = bnncc.AddRepeated(BatchNormalization(BinaryConv(s, [v, w])), x)

One kernel reads the data once, writes complete rows, and includes what follows the concatenation.
Exact: each channel is computed as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bnncc.ir.graph import Graph, Node
from bnncc.recognise.affine import channel_vector
from bnncc.recognise.lattice import sign_lattices
from bnncc.topi_binary.layout import LANES

ADD_REPEATED = "bnncc.AddRepeated"
"""``y[c] = a[c] + b[c % channels of b]``; `b` is available before the convolution of `a` runs."""

_MAX_CHAIN = 8


def merge_siblings(graph: Graph) -> None:
    """Merge binary convolutions of the same data whose results only a ``Concat`` reads.

    Runs after `binarize`.
    """
    graph.replace(_Merger(graph).merged)
    graph.prune()


@dataclass
class _Merger:
    graph: Graph

    def __post_init__(self) -> None:
        self.producers, self.consumers = self.graph.producers(), self.graph.consumers()
        self.values = sign_lattices(self.graph)
        self.nodes: list[Node] = []
        self.base: Node | None = None

    def merged(self, node: Node) -> list[Node] | None:
        """Return the replacement of a concatenation of siblings, or None."""
        if node.op != "Concat":
            return None
        shape = self.graph.types[node.outputs[0]].shape
        if len(shape) != 4 or int(node.attrs["axis"]) % 4 != 1:
            return None
        self.nodes, self.base = [], None
        if not self.siblings(node.inputs, _MAX_CHAIN):
            return None
        self.nodes[-1].outputs = list(node.outputs)
        self.producers.update({out: node for node in self.nodes for out in node.outputs})
        return self.nodes

    def siblings(self, names: Sequence[str], left: int) -> str:
        """Append nodes that compute the concatenation of `names`; return its name, or ""."""
        nodes = [self.producers.get(name) for name in names]
        if left == 0 or len(set(names)) != len(names):
            return ""
        found = []
        for name, node in zip(names, nodes, strict=True):
            lone = len(self.consumers.get(name, [])) == 1 and name not in self.graph.outputs
            if node is None or not lone or name in self.values or len(node.outputs) != 1:
                return ""
            found.append(node)
        first = found[0]
        if any(n.op != first.op for n in found):
            return ""
        if first.op == "bnncc.BinaryConv":
            return self._convolutions(found)
        if first.op == "Relu":
            below = self.siblings([n.inputs[0] for n in found], left - 1)
            return self._append(found, [below]) if below else ""
        if first.op in ("BatchNormalization", "PRelu"):
            return self._constants(found, left)
        return self._add(found, left) if first.op == "Add" else ""

    def _convolutions(self, nodes: list[Node]) -> str:
        first = nodes[0]
        own = ("bits", "scale", "bias", "first")
        common = {k: v for k, v in first.attrs.items() if k not in own}
        kernel = np.asarray(first.attrs["bits"]).shape[1:]
        for node in nodes:
            rest = {k: v for k, v in node.attrs.items() if k not in own}
            if rest != common or np.asarray(node.attrs["bits"]).shape[1:] != kernel:
                return ""
            if not self._same_data(first.inputs[0], node.inputs[0]):
                return ""
        if common["groups"] != 1:
            return ""
        parts = {k: np.concatenate([np.asarray(n.attrs[k]) for n in nodes]) for k in own}
        self.base = first
        covers = tuple(c for n in nodes for c in n.covers)
        return self._append(nodes, list(first.inputs), {**common, **parts}, covers)

    def _same_data(self, left: str, right: str) -> bool:
        """Whether two tensors are the same, or the same sign of the same tensor."""
        if left == right:
            return True
        a, b = self.producers.get(left), self.producers.get(right)
        if a is None or b is None or a.op != "bnncc.Sign" or b.op != a.op:
            return False
        plain = "flip" not in a.attrs and "flip" not in b.attrs
        return plain and a.inputs == b.inputs and a.attrs == b.attrs

    def _constants(self, nodes: list[Node], left: int) -> str:
        """Merge nodes whose other inputs are constants with one element per channel."""
        graph = self.graph
        if any(n.attrs != nodes[0].attrs for n in nodes):
            return ""
        columns: list[np.ndarray] = []
        for inputs in zip(*(n.inputs[1:] for n in nodes), strict=True):
            if not all(i in graph.constants for i in inputs):
                return ""
            rank = 1 if nodes[0].op == "BatchNormalization" else 4
            parts = [
                graph.constants[i].reshape(-1).astype(np.float64)
                if rank == 1
                else channel_vector(graph.constants[i], self._channels(n.outputs[0]), 4)
                for i, n in zip(inputs, nodes, strict=True)
            ]
            if any(p is None for p in parts):
                return ""
            column = np.concatenate(parts).astype(np.float32)  # type: ignore[arg-type]
            columns.append(column if rank == 1 else column.reshape(-1, 1, 1))
        below = self.siblings([n.inputs[0] for n in nodes], left - 1)
        if not below:
            return ""
        constants = [graph.constant(c, nodes[0].name) for c in columns]
        return self._append(nodes, [below, *constants])

    def _add(self, nodes: list[Node], left: int) -> str:
        """Merge additions of the same tensor, or of constants."""
        graph = self.graph
        sides = [[i for i in n.inputs if i in graph.constants] for n in nodes]
        if all(len(side) == 1 for side in sides):
            swapped = [
                replace(n, inputs=[next(i for i in n.inputs if i not in side), side[0]])
                for n, side in zip(nodes, sides, strict=True)
            ]
            return self._constants(swapped, left)
        shared = set(nodes[0].inputs).intersection(*(n.inputs for n in nodes[1:]))
        if any(sides) or len(shared) != 1:
            return ""
        (other,) = shared
        values = [next((i for i in n.inputs if i != other), "") for n in nodes]
        kinds = {graph.types[name] for name in (other, *values) if name}
        if "" in values or len(kinds) != 1 or self._channels(other) % LANES:
            return ""
        below = self.siblings(values, left - 1)
        if not below or self.base is None or not self._above(other, self.base.inputs[0]):
            return ""
        return self._append(nodes, [below, other], {}, op=ADD_REPEATED)

    def _channels(self, name: str) -> int:
        return int(self.graph.types[name].shape[1])

    def _above(self, name: str, below: str) -> bool:
        """Whether `below` is computed from `name`."""
        stack, seen = [below], set()
        while stack:
            at = stack.pop()
            if at == name:
                return True
            if at not in seen and at in self.producers:
                seen.add(at)
                stack += self.producers[at].inputs
        return False

    def _append(
        self,
        nodes: list[Node],
        inputs: list[str],
        attrs: dict[str, Any] | None = None,
        covers: tuple[str, ...] = (),
        op: str = "",
    ) -> str:
        graph, first = self.graph, nodes[0]
        out = graph.fresh(f"{first.outputs[0]}.merged")
        kind = graph.types[first.outputs[0]]
        channels = sum(self._channels(n.outputs[0]) for n in nodes)
        graph.types[out] = replace(kind, shape=(kind.shape[0], channels, *kind.shape[2:]))
        given = dict(first.attrs) if attrs is None else attrs
        self.nodes.append(Node(op or first.op, inputs, [out], given, first.name, covers))
        return out
