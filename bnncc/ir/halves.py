"""Half-precision numbers in float32 tensors: roundings, and how coarse they are.

A float16 or bfloat16 tensor is represented as a float32 tensor of the same numbers: an operator's
float32 result is rounded once to its type by `ROUND`. Passes evaluate these nodes where a decision
depends on them; generated code continues in float32. If only a `Cast` produces half precision, the
rounding itself is intended, and generated code performs it: `NARROW`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from bnncc.ir.graph import Graph, Node

Array = np.ndarray[Any, Any]

ROUND = "bnncc.Round"
"""Operator: rounds float32 to type ``to`` (a key of `KINDS`), ties to even; for evaluation."""

NARROW = "bnncc.Narrow"
"""Operator: the same rounding, which generated code performs."""

KINDS: Mapping[str, Any] = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
"""Half-precision types."""

_BETWEEN = frozenset((
    "Add", "Sub", "Mul", "Div", "Neg", "Relu", "LeakyRelu", "PRelu", "Clip", "BatchNormalization",
    "MaxPool", ROUND,
))  # fmt: skip
"""Operators that may lie between a sum of integers and a decision that becomes a threshold."""

COARSE: Mapping[str, float] = {"float16": 2.0**-7, "bfloat16": 2.0**-4}
"""Tolerance of results, relative to the largest value: eight roundings."""


def is_float(values: Array) -> bool:
    """Whether `values` are floats; NumPy's kind of bfloat16 is not ``f``."""
    return values.dtype.kind == "f" or values.dtype.name in KINDS


def round_to(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    """Evaluate `ROUND` or `NARROW`."""
    return [ins[0].astype(KINDS[attrs["to"]]).astype(np.float32)]


def spacing(kind: str) -> float:
    """Return the distance from 1 to the next number of a type."""
    return float(ml_dtypes.finfo(KINDS[kind]).eps)


def rounds_integer_sums(node: Node, graph: Graph, producers: Mapping[str, Node]) -> bool:
    """Whether `node` rounds an exact integer sum, with only constant operands in between.

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
        data = graph.computed(made.inputs)
        name = data[0] if len(data) == 1 else None
    return False
