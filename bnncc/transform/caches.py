"""Key/value caches that grow in memory of the caller: which outputs continue an input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bnncc.errors import UsageError
from bnncc.ir.graph import Graph, Node


def caches(
    graph: Graph, inputs: Sequence[str], outputs: Sequence[str], asked: Mapping[str, str]
) -> dict[str, str]:
    """Return pairs of an input and an output of a graph that may share memory.

    Parameters
    ----------
    graph : Graph
        The physical graph.
    inputs, outputs : sequence of str
        What the model calls those of `graph`.
    asked : mapping of str to str
        Outputs of the model by input.

    Raises
    ------
    UsageError
        If a name is unknown, or the output is not the input with something appended, or rows
        written into it, and nothing else reads the input.
    """
    found = {}
    producers = graph.producers()
    for past, present in asked.items():
        option = f"--in-place {past}={present}"
        for name, known, what in ((past, inputs, "input"), (present, outputs, "output")):
            if name not in known:
                listed = ", ".join(known)
                raise UsageError(f"{option}: no {what} is called `{name}`; there are {listed}")
        given = graph.inputs[inputs.index(past)]
        made = graph.outputs[outputs.index(present)]
        steps = _steps(graph, producers.get(made), given)
        if not steps:
            raise UsageError(
                f"{option}: the output is not a Concat of the input and one other tensor, nor a "
                "ScatterND into either"
            )
        for name, step in zip([given, *(n.outputs[0] for n in steps)], steps, strict=False):
            others = [n.name for n in graph.nodes if name in n.inputs and n is not step]
            if others or name in graph.outputs:
                reader = f"by `{others[0]}`" if others else "as an output"
                what = "input" if name == given else "Concat"
                raise UsageError(f"{option}: the {what} is also read {reader}")
        found[given] = made
    return found


def _steps(graph: Graph, node: Node | None, given: str) -> list[Node]:
    """Return the nodes that make a cache of the input `given`, of which `node` is the last."""
    if node is None:
        return []
    if node.op == "Concat" and len(node.inputs) == 2 and node.inputs[0] == given:
        return [node]
    if node.op != "ScatterND" or node.attrs.get("reduction", "none") != "none":
        return []
    if node.inputs[0] == given:
        return [node]
    base = graph.producers().get(node.inputs[0])
    before = _steps(graph, base, given) if base is not None and base.op == "Concat" else []
    return [*before, node] if before else []
