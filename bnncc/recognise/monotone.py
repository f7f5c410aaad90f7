"""Monotone operators, and the inputs at which a chain of them crosses a value.

IEEE arithmetic is monotone: if a <= b then round(a + c) <= round(b + c), and likewise for products
with a constant, comparisons and rounding to integers. So a chain of such operators with finite
constants is monotone in float32 whenever it is in real numbers, channel by channel. This is a
proof for all inputs.

The input at which a monotone function of one number crosses a value is found by bisection over all
float32 numbers. They are enumerated: *place* 0 is 0, and place 1 the smallest positive number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bnncc.ir.evaluate import evaluate_node
from bnncc.ir.graph import Graph, Node
from bnncc.ir.halves import NARROW, ROUND
from bnncc.ir.magnitude import NORMAL
from bnncc.ir.quantizers import MULTI_THRESHOLD, QUANT
from bnncc.recognise.affine import channel_vector

Array = np.ndarray[Any, Any]

_RISING = frozenset(("Relu", "Clip", "Identity", "Floor", "Ceil", "Round", ROUND, NARROW))
_ARITHMETIC = frozenset(("Add", "Sub", "Mul", "Div"))
_BY_NUMBER = frozenset((
    "Min", "Max", "Tanh", "Sigmoid", "HardSigmoid", "Cast", "QuantizeLinear", "DequantizeLinear",
    QUANT, MULTI_THRESHOLD,
))  # fmt: skip
"""Operators that are also monotone if their other operands are scalars. Tanh is monotone over the
reals; NumPy's decreases by one ulp at two float32 numbers, 1.5 and -1.5."""


def direction(node: Node, graph: Graph, channels: int, rank: int) -> np.ndarray | None:
    """Return the direction of an elementwise operator.

    Parameters
    ----------
    node : Node
        A node with one operand that is not constant.
    graph : Graph
        Holds the constants.
    channels, rank : int
        Of the operand; constants may have one element per channel.

    Returns
    -------
    ndarray of int, shape (channels,), or None
        1 if the result never decreases as the operand increases, -1 if it never increases, 0 if it
        is constant. None if that is not known for every channel.
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
    if node.op in _ARITHMETIC and len(node.inputs) == 2:
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
    """Whether operands are constants without NaN; infinite bounds are allowed."""
    held = [graph.constants.get(name) for name in names if name]
    return all(value is not None and not np.isnan(value).any() for value in held)


def chain_direction(
    nodes: Sequence[Node], graph: Graph, channels: int, rank: int
) -> np.ndarray | None:
    """Return the direction of a chain of operators, see `direction`."""
    total = np.ones(channels, np.int64)
    for node in nodes:
        one = direction(node, graph, channels, rank)
        if one is None:
            return None
        total = total * one
    return total


def monotone_operand(node: Node, graph: Graph) -> str | None:
    """Return the tensor of which `node` is an elementwise monotone function.

    Parameters
    ----------
    node : Node
        In canonical form.
    graph : Graph
        Holds its constants.

    Returns
    -------
    str or None
        None unless all other operands are finite scalars.
    """
    data = graph.computed(node.inputs)
    if len(data) != 1 or len([o for o in node.outputs if o]) != 1:
        return None
    kind = graph.types[data[0]]
    if kind.shape != graph.types[node.outputs[0]].shape or kind.dtype == "bool":
        return None
    if node.op == MULTI_THRESHOLD:
        return data[0] if node.inputs[0] == data[0] else None
    others = [graph.constants[i] for i in node.inputs if i and i != data[0]]
    if any(v.size != 1 or not np.isfinite(np.asarray(v, np.float64)).all() for v in others):
        return None
    if node.op in _BY_NUMBER:
        return data[0] if node.inputs[0] == data[0] or node.op in ("Min", "Max") else None
    known = node.op in _RISING | _ARITHMETIC | {"Neg"}
    return data[0] if known and direction(node, graph, 1, 0) is not None else None


def first_reached(reached: Callable[[Array], Array], low: Array, high: Array) -> Array:
    """Return the smallest integers for which a monotone predicate holds.

    Parameters
    ----------
    reached : callable
        The predicate on integers of the shape of `low`; once true, it stays true.
    low, high : ndarray of int64
        The predicate is false at `low` and true at `high`.

    Returns
    -------
    ndarray of int64
    """
    while (high - low > 1).any():
        middle = (low + high) // 2
        after = reached(middle)
        low, high = np.where(after, low, middle), np.where(after, middle, high)
    return high


def evaluate_at(nodes: Sequence[Node], x: Array, graph: Graph) -> Array:
    """Evaluate a chain of nodes at given values of its source.

    Parameters
    ----------
    nodes : sequence of Node
        In order.
    x : ndarray, shape (count,)
        Values of the source.
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
    """Return the float32 numbers at the given places: positive places are above 0."""
    bits = np.where(places >= 0, places, -places + (1 << 31)).astype(np.uint32)
    return bits.view(np.float32)


def step_at(cut: Array) -> tuple[str, Array]:
    """Return steps as comparisons of a difference with 0, choosing the constant with fewer digits.

    Parameters
    ----------
    cut : ndarray of float32
        First number of the upper side, element by element.

    Returns
    -------
    zero : str
        ``ge`` for ``x - c >= 0``, or ``gt`` for ``x - c > 0``.
    c : ndarray of float32
        For a constant within `NORMAL` of 0, on the side that decides an exact 0 correctly even if
        the difference is flushed to 0.
    """
    before = np.nextafter(cut, np.float32(-np.inf))
    small = (np.abs(cut) <= NORMAL) & (cut != 0)
    if small.any():
        above = bool((cut[small] > 0).all() and (cut != 0).all())
        return ("gt", before) if above else ("ge", cut)
    zeros = [min(_trailing_zeros(number) for number in side.flat) for side in (cut, before)]
    return ("ge", cut) if zeros[0] >= zeros[1] else ("gt", before)


def _trailing_zeros(number: np.float32) -> int:
    bits = int(number.view(np.uint32))
    return 32 if not bits & 0x7FFFFFFF else (bits & -bits).bit_length()


def place_of(number: float) -> int:
    """Return the place of a float32 number: how many numbers it is above 0 (below, if negative)."""
    bits = int(np.array(number, np.float32).view(np.int32))
    return bits if bits >= 0 else -(bits & 0x7FFFFFFF)
