"""Padding by a number that the data of a layer do not hold: a constant of each place of the result.

before: x = {-0.25, 0.75}; y = Conv(x, W), padded by 0
after:  u = bnncc.BinaryConv(x), padded by nothing; y = Add(u, C)
"""

from __future__ import annotations

import numpy as np

from bnncc.ir import numeric
from bnncc.ir.graph import Graph, Node, TensorType

Array = np.ndarray


def outside_sums(
    node: Node, weight: Array, pads: tuple[int, int, int, int], data: TensorType, kind: TensorType
) -> Array:
    """Return the sums of the weights that lie outside the image.

    Parameters
    ----------
    node : Node
        A Conv of known size.
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
        # A stride may leave rows at the end that no window reaches, of the padding or of the data.
        inside = np.zeros((int(kind.shape[2 + axis]) - 1) * strides[axis] + span)
        inside[pads[axis] : pads[axis] + int(data.shape[2 + axis])] = 1
        inner.append(inside)
    outside = 1 - inner[0][:, None] * inner[1]
    attrs = {"strides": strides, "dilations": dilations, "pads": [0] * 4}
    taps = weight.astype(np.float64).sum(axis=1, keepdims=True)
    return numeric.convolve(outside[None, None], taps, attrs)


def with_border(made: Node, graph: Graph, counted: Array | None, added: Array) -> list[Node]:
    """Return a layer with constants of each place: in its sums, and in its result.

    Parameters
    ----------
    made : Node
        Gives ``scale * sum + bias``; changed.
    graph : Graph
        Gets constants.
    counted : ndarray of integers, shape (1, out_channels, height, width), optional
        Added to sums before they are scaled, so that what is 0 stays 0.
    added : ndarray, shape (1, out_channels, height or 1, width or 1)
        Added afterwards, in the place of the bias.
    """
    (out,), column = made.outputs, (1, -1, 1, 1)
    scale = np.asarray(made.attrs["scale"], np.float64)
    made.attrs["bias"] = np.zeros_like(scale)
    steps = [("Add", added)]
    if counted is not None and counted.any():
        made.attrs["scale"] = np.ones_like(scale)
        steps = [("Add", counted), ("Mul", scale.reshape(column)), *steps]
    steps = [(op, v) for op, v in steps if op == "Mul" or v.any()]
    if not steps:  # bias and border may cancel
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
    """Return what `with_border` needs where data are ``inside_value`` plus what a kernel counts.

    Windows that lie in nothing but padding get ``pad_value * sum(w)`` and not a last bit beside it:
    a sign may follow.

    Parameters
    ----------
    outside : ndarray, shape (1, out_channels, height, width)
        As `outside_sums` returns them.
    sums : ndarray, shape (out_channels,)
        Of all weights of each filter.
    inside_value, pad_value : float
        In the unit of the layer's sums.
    whole : bool
        Whether `inside_value` is an integer and the layer's sums have ``inside_value * sums`` in
        them; else the result of the layer has no such part.

    Returns
    -------
    tuple of (ndarray or None, ndarray)
        ``counted``, and what is added afterwards but for scale and bias.
    """
    if not whole:
        inside = sums.reshape(1, -1, 1, 1) - outside
        return None, inside_value * inside + pad_value * outside
    if pad_value == np.rint(pad_value):
        return (pad_value - inside_value) * outside, np.zeros((1, len(sums), 1, 1))
    return -inside_value * outside, pad_value * outside
