"""Padding by a value that the data never hold, corrected by a constant per output position.

before: x = {-0.25, 0.75}; y = Conv(x, W), padded by 0
after:  u = bnncc.BinaryConv(x), without padding; y = Add(u, C)
"""

from __future__ import annotations

import numpy as np

from bnncc.ir import numeric
from bnncc.ir.graph import Graph, Node, TensorType

Array = np.ndarray


def outside_sums(
    node: Node, weight: Array, pads: tuple[int, int, int, int], data: TensorType, kind: TensorType
) -> Array:
    """Return the sum of the weights that lie outside the image, for each output position.

    Parameters
    ----------
    node : Node
        A Conv with static sizes.
    weight : ndarray, shape (out_channels, channels / groups, height, width)
        Filters.
    pads : tuple of int
        Top, left, bottom, right.
    data, kind : TensorType
        Of the data and of the result.

    Returns
    -------
    ndarray of float64, shape (1, out_channels, height, width)
    """
    strides, dilations = (list(node.attrs.get(k) or (1, 1)) for k in ("strides", "dilations"))
    inner = []
    for axis in (0, 1):
        span = (weight.shape[2 + axis] - 1) * dilations[axis] + 1
        # With a stride, the last rows of the padding or the data may not be reached by any window.
        inside = np.zeros((int(kind.shape[2 + axis]) - 1) * strides[axis] + span)
        inside[pads[axis] : pads[axis] + int(data.shape[2 + axis])] = 1
        inner.append(inside)
    outside = 1 - inner[0][:, None] * inner[1]
    attrs = {"strides": strides, "dilations": dilations, "pads": [0] * 4}
    taps = weight.astype(np.float64).sum(axis=1, keepdims=True)
    return numeric.convolve(outside[None, None], taps, attrs)


def with_border(made: Node, graph: Graph, counted: Array | None, added: Array) -> list[Node]:
    """Add constants per output position to a layer: to its integer sums, and to its result.

    Parameters
    ----------
    made : Node
        The layer, which computes ``scale * sum + bias``; modified.
    graph : Graph
        Receives the constants.
    counted : ndarray of integers, shape (1, out_channels, height, width), optional
        Added to sums before scaling, so that a sum that is exactly 0 stays 0.
    added : ndarray, shape (1, out_channels, height or 1, width or 1)
        Added to the result, replacing the bias.
    """
    (out,), column = made.outputs, (1, -1, 1, 1)
    scale = np.asarray(made.attrs["scale"], np.float64)
    made.attrs["bias"] = np.zeros_like(scale)
    steps = [("Add", added)]
    if counted is not None and counted.any():
        made.attrs["scale"] = np.ones_like(scale)
        steps = [("Add", counted), ("Mul", scale.reshape(column)), *steps]
    steps = [(op, v) for op, v in steps if op == "Mul" or v.any()]
    if not steps:  # bias and correction may cancel
        return [made]
    names = [graph.fresh(f"{out}.inside") for _ in steps]
    for name in names:
        graph.types[name] = graph.types[out]
    made.outputs = names[:1]
    nodes = [made]
    for (op, value), source, target in zip(steps, names, [*names[1:], out], strict=True):
        constant = graph.constant(value.astype(graph.types[out].dtype), f"{out}.border")
        nodes.append(Node(op, [source, constant], [target], {}, made.name))
    return nodes


def constants_outside(
    outside: Array, sums: Array, inside_value: float, pad_value: float, *, whole: bool
) -> tuple[Array | None, Array]:
    """Return the arguments of `with_border` for data that are ``inside_value`` plus counted bits.

    Windows that lie entirely in the padding give exactly ``pad_value * sum(w)``, without rounding
    error, because a sign may follow.

    Parameters
    ----------
    outside : ndarray, shape (1, out_channels, height, width)
        From `outside_sums`.
    sums : ndarray, shape (out_channels,)
        The sum of each filter.
    inside_value, pad_value : float
        In units of the layer's sums.
    whole : bool
        Whether `inside_value` is an integer and the layer's sums include ``inside_value * sums``;
        otherwise the layer's result does not include that term.

    Returns
    -------
    tuple of (ndarray or None, ndarray)
        ``counted``, and ``added`` without scale and bias.
    """
    if not whole:
        inside = sums.reshape(1, -1, 1, 1) - outside
        return None, inside_value * inside + pad_value * outside
    if pad_value == np.rint(pad_value):
        return (pad_value - inside_value) * outside, np.zeros((1, len(sums), 1, 1))
    return -inside_value * outside, pad_value * outside
