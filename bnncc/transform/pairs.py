"""Rewrite the ArgMax of two numbers, and comparisons of a number with its negative."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from bnncc.ir.graph import Node
from bnncc.transform.rewrite import Result, Walk

_COMPARED = {
    ("ArgMax", False): "Greater",
    ("ArgMax", True): "GreaterOrEqual",
    ("ArgMin", False): "Less",
    ("ArgMin", True): "LessOrEqual",
}
"""Comparison that selects the second number; on ties, the first or the last is selected."""


def larger_of_two(node: Node, state: Walk) -> Result:
    """Rewrite an ArgMax or ArgMin of two numbers.

        ArgMax(Concat(a, b))    ->   Cast(Greater(b, a))

    Returns
    -------
    list of Node or None
        None if there are not two numbers, or the result is an output of the network.
    """
    graph = state.graph
    shape = graph.types[node.inputs[0]].shape
    axis = int(node.attrs.get("axis", 0)) % max(1, len(shape))
    if not shape or shape[axis] != 2 or node.outputs[0] in graph.outputs:
        return None
    keep = bool(node.attrs.get("keepdims", 1))
    pieces: list[Node] = []
    joined = state.producer(node.inputs[0], "Concat")
    places = graph.constant(np.array([axis], np.int64), f"{node.name}.axis")
    if joined is not None and len(joined.inputs) == 2 and joined.attrs["axis"] % len(shape) == axis:
        names = list(joined.inputs)
    else:
        names = []
        for k in range(2):
            bounds = [graph.constant(np.array([k + j], np.int64), "bound") for j in range(2)]
            names.append(graph.fresh(f"{node.inputs[0]}.{k}"))
            pieces.append(
                Node("Slice", [node.inputs[0], *bounds, places], names[-1:], {}, node.name)
            )
    inner = [_before_unsqueeze(name, axis, state) for name in names]
    compared = graph.fresh(f"{node.outputs[0]}.second")
    op = _COMPARED[node.op, bool(node.attrs.get("select_last_index", 0))]
    squeezed = not keep and None not in inner
    second, first = [i for i in inner[::-1] if i is not None] if squeezed else names[::-1]
    pieces.append(Node(op, [second, first], [compared], {}, node.name))
    if not keep and not squeezed:
        single = graph.fresh(f"{node.outputs[0]}.one")
        pieces.append(Node("Squeeze", [compared, places], [single], {}, node.name))
        compared = single
    cast = {"to": TensorProto.INT64}
    return [*pieces, Node("Cast", [compared], list(node.outputs), cast, node.name)]


def _before_unsqueeze(name: str, axis: int, state: Walk) -> str | None:
    """Return the tensor from which `name` was made by inserting an axis of size 1, or None."""
    made = state.producer(name, "Unsqueeze", "Reshape")
    if made is None:
        return None
    shape, wide = (state.graph.types[n].shape for n in (made.inputs[0], name))
    return made.inputs[0] if shape == (*wide[:axis], *wide[axis + 1 :]) else None


def with_negative(node: Node, state: Walk) -> Result:
    """Rewrite a comparison of a number with its negative.

    Greater(x, Neg(x))      ->   Greater(x, 0)
    """
    left, right = node.inputs
    kind = state.graph.types[left]
    if not kind.dtype.startswith("float"):
        return None
    for side, (x, other) in enumerate(((left, right), (right, left))):
        negative = state.producer(other, "Neg")
        if negative is None or negative.inputs[0] != x:
            continue
        zero = state.graph.constant(np.zeros((), kind.dtype), f"{node.name}.zero")
        inputs = [x, zero] if side == 0 else [zero, x]
        return [Node(node.op, inputs, list(node.outputs), {}, node.name)]
    return None
