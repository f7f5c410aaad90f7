"""Key/value caches that grow in memory of the caller: which outputs continue an input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bnncc.errors import UsageError
from bnncc.ir.graph import Graph


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
        If a name is unknown, or the output is not the input with something appended that nothing
        else reads.
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
        node = producers.get(made)
        if node is None or node.op != "Concat" or len(node.inputs) != 2 or node.inputs[0] != given:
            raise UsageError(
                f"{option}: the output is not a Concat of the input and one other tensor"
            )
        others = [n.name for n in graph.nodes if given in n.inputs and n is not node]
        if others or given in graph.outputs:
            reader = f"by `{others[0]}`" if others else "as an output"
            raise UsageError(f"{option}: the input is also read {reader}")
        found[given] = made
    return found
