"""Rising and falling functions of one number, by evaluating their own nodes on float32 numbers.

The float32 numbers are counted: *place* 0 is 0, place 1 the least above it. So a step of such a
function is found by bisection over all numbers there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bnncc.ir.evaluate import evaluate_node
from bnncc.ir.graph import Graph, Node
from bnncc.ir.halves import ROUND
from bnncc.ir.quantizers import MULTI_THRESHOLD, QUANT

Array = np.ndarray[Any, Any]

MONOTONE = {
    "Add", "Sub", "Mul", "Div", "Neg", "Relu", "Clip", "Min", "Max", "Identity", "Floor", "Ceil",
    "Round", "Tanh", "Sigmoid", "HardSigmoid", "Cast", "QuantizeLinear", "DequantizeLinear", QUANT,
    MULTI_THRESHOLD, ROUND,
}  # fmt: skip
"""Rising or falling where their other operands are constants."""


def monotone_operand(node: Node, graph: Graph) -> str | None:
    """Return the tensor that `node` is a rising or falling function of, element by element.

    Parameters
    ----------
    node : Node
        In normal form.
    graph : Graph
        Holds its constants.

    Returns
    -------
    str or None
        Its other operands are one finite number each.
    """
    if node.op not in MONOTONE or len([o for o in node.outputs if o]) != 1:
        return None
    data = [i for i in node.inputs if i and i not in graph.constants]
    if len(data) != 1 or (node.op == "Div" and node.inputs[0] != data[0]):
        return None
    if node.op not in ("Add", "Sub", "Mul", "Min", "Max") and node.inputs[0] != data[0]:
        return None
    if graph.types[data[0]].shape != graph.types[node.outputs[0]].shape:
        return None
    others = [graph.constants[i] for i in node.inputs if i and i != data[0]]
    if node.op == MULTI_THRESHOLD:
        return data[0]
    if any(v.size != 1 for v in others):
        return None
    kind = graph.types[data[0]].dtype
    if np.dtype(_numpy_name(kind)).kind == "b":
        return None
    if not all(np.isfinite(np.asarray(v, np.float64)).all() for v in others):
        return None
    return data[0]


def _numpy_name(dtype: str) -> str:
    return dtype if hasattr(np, dtype) else "int8"


def evaluate_at(nodes: Sequence[Node], x: Array, graph: Graph) -> Array:
    """Evaluate a chain of such nodes at numbers of its source.

    Parameters
    ----------
    nodes : sequence of Node
        In order.
    x : ndarray, shape (count,)
        Numbers.
    graph : Graph
        Holds the constants.

    Returns
    -------
    ndarray, shape (count,)
    """
    value = np.asarray(x, np.float32).reshape(-1, 1)
    for node in nodes:
        args = [
            None if not i else np.asarray(graph.constants[i]).reshape(_shape(node, i, graph))
            if i in graph.constants else value
            for i in node.inputs
        ]  # fmt: skip
        value = np.asarray(evaluate_node(node, args)[0])
    return value.reshape(-1)


def _shape(node: Node, name: str, graph: Graph) -> tuple[int, ...]:
    return graph.constants[name].shape if node.op == MULTI_THRESHOLD else ()


def float_at(places: Array) -> Array:
    """Return the float32 numbers that are so many steps above (or below) 0."""
    bits = np.where(places >= 0, places, -places + (1 << 31)).astype(np.uint32)
    return bits.view(np.float32)


def place_of(number: float) -> int:
    """Return how many float32 numbers `number` is above 0, or below it."""
    bits = int(np.array(number, np.float32).view(np.int32))
    return bits if bits >= 0 else -(bits & 0x7FFFFFFF)
