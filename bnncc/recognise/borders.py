"""Padding by a number that the data of a layer do not hold: a constant of each place of the result.

before: x = {-0.25, 0.75}; y = Conv(x, W), padded by 0
after:  u = bnncc.BinaryConv(x), padded by nothing; y = Add(u, C)
"""

from __future__ import annotations

from typing import Any

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


def with_border(made: Node, border: Array, graph: Graph, *, exact: bool, unit: Array) -> list[Node]:
    """Return a layer with a constant of each place added to its sums.

    Parameters
    ----------
    made : Node
        Gives ``scale * sum + bias``; changed.
    border : ndarray, shape (1, out_channels, height, width)
        To be added to sums, in their unit.
    graph : Graph
        Gets constants.
    exact : bool
        Whether sums and `border` are integers: then they are added before they are scaled, so that
        what is 0 stays 0.
    unit : ndarray, shape (out_channels,)
        What one of `border` is worth.

    Returns
    -------
    list of Node
    """
    (out,), column = made.outputs, (1, -1, 1, 1)
    scale, bias = (np.asarray(made.attrs[k], np.float64) for k in ("scale", "bias"))
    if exact:
        steps = [("Add", border), ("Mul", scale), ("Add", bias)]
        made.attrs |= {"scale": np.ones_like(scale), "bias": np.zeros_like(bias)}
    else:
        steps = [("Add", border * unit.reshape(column) + bias.reshape(column))]
        made.attrs["bias"] = np.zeros_like(bias)
    steps = [(op, v) for op, v in steps if op == "Mul" or v.any()]
    if not steps:  # bias and border may cancel
        return [made]
    names = [graph.fresh(f"{out}.inside") for _ in steps]
    for name in names:
        graph.types[name] = graph.types[out]
    made.outputs = names[:1]
    nodes = [made]
    for (op, value), source, target in zip(steps, names, [*names[1:], out], strict=True):
        shaped: Any = value if value.ndim == 4 else value.reshape(column)
        constant = graph.constant(shaped.astype(graph.types[out].dtype), f"{out}.border")
        nodes.append(Node(op, [source, constant], [target], {}, made.name))
    return nodes
