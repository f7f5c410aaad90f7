"""Whether float16 holds what a network was asked to hold in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bnncc.errors import UsageError
from bnncc.ir.evaluate import evaluate
from bnncc.ir.graph import Graph, Node
from bnncc.ir.halves import ROUND
from bnncc.verification.evaluator import evaluate_physical

Feeds = Mapping[str, np.ndarray]


def refuse_overflow(model: Graph, feeds: Feeds) -> None:
    """Refuse a graph that rounds numbers beyond those of float16.

    Parameters
    ----------
    model : Graph
        After `bnncc.transform.half_floats.round_floats`.
    feeds : mapping of str to ndarray
        Its inputs.

    Raises
    ------
    UsageError
        If a finite number becomes infinite.
    """
    rounds = {n.outputs[0]: n.inputs[0] for n in model.nodes if n.op == ROUND}
    values = evaluate(model, feeds, [*rounds, *rounds.values()])
    for name, raw in rounds.items():
        if (np.isinf(values[name]) & np.isfinite(values[raw])).any():
            raise UsageError(_beyond(model, name), hint=_HINT)


def refuse_overflow_of_kernels(physical: Graph, feeds: Feeds) -> None:
    """Refuse a physical graph that stores such numbers.

    Parameters
    ----------
    physical : Graph
        After `bnncc.transform.half_floats.store_halves`.
    feeds : mapping of str to ndarray
        Its inputs.

    Raises
    ------
    UsageError
        If an infinite number is stored as float16.
    """

    def seen(_: Node, name: str, value: Any) -> Any:
        if value.dtype == np.float16 and np.isinf(value).any():
            raise UsageError(_beyond(physical, physical.forms[name][0].tensor), hint=_HINT)
        return value

    evaluate_physical(physical, feeds, seen)


def _beyond(graph: Graph, tensor: str) -> str:
    what = f"`{tensor}` has numbers beyond 65504, where float16 ends"
    return f"{graph.source}: --float-type float16: {what}"


_HINT = "leave the option out, or scale the layer that makes them"
