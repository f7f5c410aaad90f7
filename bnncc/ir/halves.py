"""Numbers of half precision among float32 ones: what is rounded, and how coarse that is.

A float16 or bfloat16 tensor is a float32 tensor of the same numbers; what an operator computes in
float32 is rounded once to its type by `ROUND`. The nodes say what the model means: passes evaluate
them where a decision depends on them, generated code computes on in float32. Where nothing but a
`Cast` makes numbers of half precision, rounding is all that it is for, and code does it: `NARROW`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from bnncc.ir.graph import Graph, Node

Array = np.ndarray[Any, Any]

ROUND = "bnncc.Round"
"""Operator: rounds float32 to the numbers of attribute ``to``, a key of `KINDS`, ties to even."""

NARROW = "bnncc.Narrow"
"""Operator: the same, as a step of its own that generated code computes."""

KINDS: Mapping[str, Any] = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
"""Types of half precision."""

_BETWEEN = frozenset((
    "Add", "Sub", "Mul", "Div", "Neg", "Relu", "LeakyRelu", "PRelu", "Clip", "BatchNormalization",
    "MaxPool", ROUND,
))  # fmt: skip
"""What may lie between a sum of integers and a decision that becomes a threshold of it."""

COARSE: Mapping[str, float] = {"float16": 2.0**-7, "bfloat16": 2.0**-4}
"""How far results may be off, of their largest value: eight roundings."""


def is_float(values: Array) -> bool:
    """Whether `values` are floats: NumPy's kind of bfloat16 is another."""
    return values.dtype.kind == "f" or values.dtype.name in KINDS


def round_to(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    """Evaluate `ROUND` or `NARROW`."""
    return [ins[0].astype(KINDS[attrs["to"]]).astype(np.float32)]


def spacing(kind: str) -> float:
    """Return the distance of 1 from the next number of a type."""
    return float(ml_dtypes.finfo(KINDS[kind]).eps)


def rounds_integer_sums(node: Node, graph: Graph, producers: Mapping[str, Node]) -> bool:
    """Whether rounding `node` decides on integers: behind an exact sum and nothing but constants.

    Parameters
    ----------
    node : Node
        A `ROUND`.
    graph : Graph
        After `bnncc.recognise.binarize`.
    producers : mapping of str to Node
        Of the graph.
    """
    name: str | None = node.outputs[0]
    while name is not None and (made := producers.get(name)) is not None:
        if made.op.startswith("bnncc.") and made.op.endswith("Conv"):
            return True
        if made.op not in _BETWEEN:
            return False
        data = [i for i in made.inputs if i and i not in graph.constants]
        name = data[0] if len(data) == 1 else None
    return False
