"""Per-channel functions with constants, which an epilogue can compute without another tensor."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bnncc.ir.graph import Graph, Node
from bnncc.ir.halves import ROUND

Affine = tuple[np.ndarray, np.ndarray]
"""Scale and bias, float64, one per channel."""


def channel_vector(value: np.ndarray, channels: int, rank: int) -> np.ndarray | None:
    """Return a constant as one float64 per channel, if it broadcasts along the channels only.

    Parameters
    ----------
    value : ndarray
        Operand of an elementwise operator on ``[n, channels, h, w]`` or ``[n, channels]``.
    channels : int
        Channels of the other operand.
    rank : int
        4 or 2.

    Returns
    -------
    ndarray of float64, shape (channels,), or None
    """
    if value.size == 1:
        return np.full(channels, float(value.reshape(())), np.float64)
    shape = (1,) * (rank - value.ndim) + value.shape
    if len(shape) != rank or shape[1] != channels or value.size != channels:
        return None
    return value.reshape(channels).astype(np.float64)


def centred_affine(node: Node, graph: Graph) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what a BatchNormalization subtracts, multiplies by, and then adds, by channel."""
    gamma, beta, mean, var = (graph.constants[i].astype(np.float64) for i in node.inputs[1:5])
    return mean, gamma / np.sqrt(var + float(node.attrs.get("epsilon", 1e-5))), beta


def affine_of(node: Node, graph: Graph, channels: int, rank: int) -> Affine | None:
    """Return ``(scale, bias)`` if `node` is a per-channel affine operator with constants."""
    if node.op == "BatchNormalization":
        mean, scale, beta = centred_affine(node, graph)
        return scale, beta - mean * scale
    ones, zeros = np.ones(channels), np.zeros(channels)
    if node.op == "Neg":
        return -ones, zeros
    if node.op not in ("Add", "Sub", "Mul", "Div") or len(node.inputs) != 2:
        return None
    left = node.inputs[0] in graph.constants
    vector = channel_vector(graph.constants[node.inputs[0 if left else 1]], channels, rank)
    if vector is None or not np.isfinite(vector).all():  # reordering needs finite constants
        return None
    if node.op == "Add":
        return ones, vector
    if node.op == "Sub":
        return (-ones, vector) if left else (ones, -vector)
    if node.op == "Mul":
        return vector, zeros
    return None if left or not vector.all() else (1.0 / vector, zeros)


def has_constant_form(node: Node, graph: Graph, channels: int, rank: int) -> bool:
    """Whether `node` is a per-channel function with constants that an epilogue step computes."""
    consts = [i in graph.constants for i in node.inputs[1:] if i]
    if node.op in ("Relu", "Neg", "LeakyRelu", ROUND):
        return True
    if node.op == "BatchNormalization":
        return all(consts) and len([o for o in node.outputs if o]) == 1
    if node.op == "Clip":
        return all(consts) and all(graph.constants[i].size == 1 for i in node.inputs[1:] if i)
    if node.op == "PRelu":
        return (
            all(consts)
            and channel_vector(graph.constants[node.inputs[1]], channels, rank) is not None
        )
    if sum(i in graph.constants for i in node.inputs) != 1:
        return False
    return affine_of(node, graph, channels, rank) is not None


MAX_CHAIN = 16
"""Maximum number of operators in a chain; a kernel can fuse more than twice as many."""


def chain_above(
    graph: Graph, name: str, producers: dict[str, Node], stop: str, follows: Callable[[str], bool]
) -> tuple[Node, list[Node]] | None:
    """Follow per-channel functions with constants upwards, to a node with operator `stop`.

    Parameters
    ----------
    name : str
        The image.
    stop : str
        The operator searched for.
    follows : callable
        Whether a tensor, including `name`, may be part of the chain.

    Returns
    -------
    tuple or None
        That node, and the nodes after it, in order; None if there is no such chain.
    """
    chain: list[Node] = []
    while follows(name) and (node := producers.get(name)) is not None:
        if node.op == stop:
            return node, chain[::-1]
        data = graph.computed(node.inputs)
        if len(data) != 1 or graph.types[data[0]] != graph.types[name] or len(chain) == MAX_CHAIN:
            return None
        shape = graph.types[name].shape
        if len(shape) != 4 or not isinstance(shape[1], int):
            return None
        if not has_constant_form(node, graph, shape[1], 4):
            return None
        chain.append(node)
        name = data[0]
    return None
