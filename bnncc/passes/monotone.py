"""Which operators rise or fall with their operand: a proof, channel by channel.

IEEE arithmetic is monotone: if a <= b then round(a + c) <= round(b + c), and the same for a product
with a constant, a comparison and a rounding to integers. So a chain of such operators with finite
constants is monotone in float32 as it is in real numbers, for every datum, whatever its magnitude.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bnncc.ir.graph import Graph, Node
from bnncc.ir.halves import ROUND
from bnncc.passes.affine import channel_vector

_RISING = frozenset(("Relu", "Clip", "Identity", "Floor", "Ceil", "Round", ROUND))


def direction(node: Node, graph: Graph, channels: int, rank: int) -> np.ndarray | None:
    """Return which way an elementwise operator goes.

    Parameters
    ----------
    node : Node
        Of one operand that is not constant.
    graph : Graph
        Holds the constants.
    channels, rank : int
        Of the operand: constants may be one for each channel.

    Returns
    -------
    ndarray of int, shape (channels,), or None
        1 where the result never falls while the operand rises, -1 where it never rises, 0 where it
        does not depend on it. None if that is not known of every channel.
    """
    ones = np.ones(channels, np.int64)
    if node.op in _RISING:
        return ones if _finite(graph, node.inputs[1:]) else None
    if node.op == "Neg":
        return -ones
    if node.op == "LeakyRelu":
        return ones if float(node.attrs.get("alpha", 0.01)) >= 0 else None
    if node.op == "PRelu":
        slope = _vector(graph, node.inputs[1], channels, rank)
        return ones if slope is not None and (slope >= 0).all() else None
    if node.op == "BatchNormalization":
        gamma, var = (graph.constants.get(node.inputs[i]) for i in (1, 4))
        if gamma is None or var is None or not _finite(graph, node.inputs[1:5]):
            return None
        spread = var.astype(np.float64) + float(node.attrs.get("epsilon", 1e-5))
        return np.sign(gamma).astype(np.int64) if (spread > 0).all() else None
    if node.op in ("Add", "Sub", "Mul", "Div") and len(node.inputs) == 2:
        return _arithmetic(node, graph, channels, rank)
    return None


def _arithmetic(node: Node, graph: Graph, channels: int, rank: int) -> np.ndarray | None:
    left = node.inputs[0] in graph.constants
    vector = _vector(graph, node.inputs[0 if left else 1], channels, rank)
    if vector is None:
        return None
    ones = np.ones(channels, np.int64)
    if node.op == "Add":
        return ones
    if node.op == "Sub":
        return -ones if left else ones
    if node.op == "Div" and (left or not vector.all()):  # c / x has a pole
        return None
    return np.sign(vector).astype(np.int64)


def _vector(graph: Graph, name: str, channels: int, rank: int) -> np.ndarray | None:
    value = graph.constants.get(name)
    if value is None or not np.isfinite(value).all():
        return None
    return channel_vector(value, channels, rank)


def _finite(graph: Graph, names: Sequence[str]) -> bool:
    """Whether operands are constants without NaN; bounds may be infinite."""
    held = [graph.constants.get(name) for name in names if name]
    return all(value is not None and not np.isnan(value).any() for value in held)


def chain_direction(
    nodes: Sequence[Node], graph: Graph, channels: int, rank: int
) -> np.ndarray | None:
    """Return which way a chain of operators goes, each reading the one before; see `direction`."""
    total = np.ones(channels, np.int64)
    for node in nodes:
        one = direction(node, graph, channels, rank)
        if one is None:
            return None
        total = total * one
    return total
