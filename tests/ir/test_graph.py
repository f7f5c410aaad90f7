"""Replacing and inserting the nodes of a graph."""

from __future__ import annotations

import numpy as np

from bnncc.ir.evaluate import evaluate
from bnncc.ir.graph import Graph, Node, TensorType

KIND = TensorType((3,), "float32")
X = np.array([-2.0, 0.0, 3.0], np.float32)


def a_graph() -> Graph:
    """Return ``y = Abs(Neg(x))``, and ``z = Relu(Neg(x))``."""
    nodes = [
        Node("Neg", ["x"], ["m"]),
        Node("Abs", ["m"], ["y"]),
        Node("Relu", ["m"], ["z"]),
    ]
    return Graph(nodes, ["x"], ["y", "z"], {}, dict.fromkeys("xmyz", KIND))


def test_a_rule_replaces_nodes_and_keeps_others() -> None:
    graph = a_graph()
    before = list(graph.nodes)

    def doubled(node: Node) -> list[Node] | None:
        if node.op != "Relu":
            return None
        graph.types["r"] = KIND
        return [Node("Relu", node.inputs, ["r"]), Node("Add", ["r", "r"], node.outputs)]

    graph.replace(doubled)
    assert graph.nodes[:2] == before[:2]  # the very same
    values = evaluate(graph, {"x": X}, ["y", "z"])
    np.testing.assert_array_equal(values["y"], [2, 0, 3])
    np.testing.assert_array_equal(values["z"], [4, 0, 0])


def test_nodes_are_inserted_behind_inputs_and_nodes() -> None:
    graph = a_graph()
    first = Node("Abs", ["x"], ["a"])
    behind = [Node("Neg", ["m"], ["b"]), Node("Neg", ["b"], ["c"])]
    graph.types.update(dict.fromkeys("abc", KIND))
    graph.put_behind({"x": [first], "m": behind, "unknown": [Node("Neg", ["x"], ["d"])]})
    assert [node.outputs[0] for node in graph] == ["a", "m", "b", "c", "y", "z"]
    np.testing.assert_array_equal(evaluate(graph, {"x": X}, ["c"])["c"], [2, 0, -3])
