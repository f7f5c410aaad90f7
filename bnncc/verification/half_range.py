"""Check that the values of a network fit into float16."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from bnncc.errors import UsageError
from bnncc.ir.evaluate import evaluate
from bnncc.ir.graph import Graph, Node
from bnncc.ir.halves import ROUND
from bnncc.verification.evaluator import evaluate_physical

Feeds = Mapping[str, np.ndarray]


def refuse_overflow(graph: Graph, feeds: Feeds) -> None:
    """Raise an error if numbers of a graph exceed the range of float16.

    Parameters
    ----------
    graph : Graph
        After `bnncc.transform.half_floats.round_floats`, or a physical one after `store_halves`.
    feeds : mapping of str to ndarray
        Its inputs.

    Raises
    ------
    UsageError
        If a finite number is rounded to infinity, or an infinite one is stored as float16.
    """
    for tensor in (_stored if graph.forms else _rounded)(graph, feeds):
        what = f"`{tensor}` has numbers above 65504, the largest of float16"
        raise UsageError(f"{graph.source}: --float-type float16: {what}", hint=_HINT)


def _rounded(graph: Graph, feeds: Feeds) -> Iterator[str]:
    """Yield the tensors that are rounded to infinity."""
    rounds = {n.outputs[0]: n.inputs[0] for n in graph.nodes if n.op == ROUND}
    values = evaluate(graph, feeds, [*rounds, *rounds.values()])
    for name, raw in rounds.items():
        if (np.isinf(values[name]) & np.isfinite(values[raw])).any():
            yield name


def _stored(physical: Graph, feeds: Feeds) -> list[str]:
    """Return the tensors that are stored as infinity."""
    found = []

    def seen(_: Node, name: str, value: Any) -> Any:
        if value.dtype == np.float16 and np.isinf(value).any():
            found.append(physical.forms[name][0].tensor)
        return value

    evaluate_physical(physical, feeds, seen)
    return found


_HINT = "omit the option, or scale the layer that produces them"
