"""Read the operators on channels-last images that QONNX and FINN lower convolutions to.

    MaxPoolNHWC(x), channels_last.Conv(x, w)    ->  Transposes, MaxPool or Conv, Transpose
    Im2Col(x)                                   ->  Transpose, Pad, Slices, Concat, Transpose
    MatMul(Im2Col(x), W)                        ->  Transpose, Pad, Conv, Transpose

Most transposes vanish in `bnncc.passes.layout`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from bnncc.errors import ShapeError
from bnncc.ir.graph import Graph, Node
from bnncc.ir.pieces import Pieces, Reader

MAX_TAPS = 1024


def _orders(node: Node, graph: Graph) -> tuple[list[int], list[int]]:
    rank = len(graph.types[node.inputs[0]].shape)
    if rank < 3:
        raise ShapeError(
            f"{node.op} `{node.name}`: input has {rank} axes, (batch, spatial..., channels) is "
            "wanted"
        )
    return [0, rank - 1, *range(1, rank - 1)], [0, *range(2, rank), 1]


def _turned(node: Node, graph: Graph, make: Pieces) -> Iterator[Node]:
    # its attributes are those of ONNX's operator
    first, last = _orders(node, graph)
    op, inputs, y = node.op.removesuffix("NHWC"), list(node.inputs), make.tensor("computed")
    images = 2 if op == "Conv" else 1  # filters lie as images do
    for k in range(images):
        inputs[k] = make.tensor("first")
        yield make("Transpose", [node.inputs[k]], inputs[k], {"perm": first})
    yield make(op, inputs, y, node.attrs, covers=node.covers)
    yield make("Transpose", [y], node.outputs[0], {"perm": last})


def _pair(node: Node, key: str, default: int) -> tuple[int, int]:
    value = node.attrs.get(key, default)
    values = [value, value] if isinstance(value, int) else list(value)
    if len(values) != 2 or any(v < 1 for v in values):
        raise ShapeError(f"{node.op} `{node.name}`: `{key}` is {values[:8]}, two sizes are wanted")
    return values[0], values[1]


def window(node: Node) -> dict[str, Any]:
    """Return the attributes of the convolution that an Im2Col belongs to.

    Raises
    ------
    ShapeError
        If they make no sense.
    """
    pads = node.attrs.get("pad_amount", 0)
    pads = [pads] * 4 if isinstance(pads, int) else list(pads)
    if len(pads) != 4 or any(p < 0 for p in pads):
        raise ShapeError(
            f"{node.op} `{node.name}`: `pad_amount` is {pads[:8]}, four numbers are wanted"
        )
    return {
        "kernel_shape": list(_pair(node, "kernel_size", 1)),
        "strides": list(_pair(node, "stride", 1)),
        "dilations": list(_pair(node, "dilations", 1)),
        "pads": pads,
        "group": 1,
    }


def _im2col(node: Node, graph: Graph, make: Pieces) -> Iterator[Node]:
    shape = graph.types[node.inputs[0]].shape
    attrs = window(node)
    kernel, strides, dilations = (attrs[k] for k in ("kernel_shape", "strides", "dilations"))
    where = f"{node.op} `{node.name}`"
    if len(shape) != 4 or not all(isinstance(d, int) for d in shape[1:]):
        raise ShapeError(f"{where}: input of shape {list(shape)}, known sizes NHWC are wanted")
    if kernel[0] * kernel[1] > MAX_TAPS:
        raise ShapeError(f"{where}: {kernel[0]}x{kernel[1]} taps, at most {MAX_TAPS} are wanted")
    x = make.tensor("first")
    yield make("Transpose", node.inputs[:1], x, {"perm": [0, 3, 1, 2]})
    top, left, bottom, right = attrs["pads"]
    if any(attrs["pads"]):
        padded = make.tensor("padded")
        around = np.array([0, 0, top, left, 0, 0, bottom, right], np.int64)
        value = make.constant(float(node.attrs.get("pad_value", 0)))
        amounts = graph.constant(around, f"{node.name}.pads")
        yield make("Pad", [x, amounts, value], padded, {"mode": "constant"})
        x = padded
    sizes = (int(shape[1]) + top + bottom, int(shape[2]) + left + right)
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    if any(size < span for size, span in zip(sizes, spans, strict=True)):
        raise ShapeError(
            f"{where}: kernel spans {spans}, larger than the padded image {list(sizes)}"
        )
    counts = [(n - s) // t + 1 for n, s, t in zip(sizes, spans, strides, strict=True)]
    axes, steps = (graph.constant(np.array(v, np.int64), node.name) for v in ([2, 3], strides))
    taps = []
    for tap in np.ndindex(*kernel):
        start = [t * d for t, d in zip(tap, dilations, strict=True)]
        end = [s + (c - 1) * t + 1 for s, c, t in zip(start, counts, strides, strict=True)]
        bounds = [graph.constant(np.array(v, np.int64), node.name) for v in (start, end)]
        taps.append(make.tensor("tap"))
        yield make("Slice", [x, *bounds, axes, steps], taps[-1])
    joined = make.tensor("columns")
    yield make("Concat", taps, joined, {"axis": 1})
    yield make("Transpose", [joined], node.outputs[0], {"perm": [0, 2, 3, 1]})


@dataclass(frozen=True)
class Columns:
    """What an Im2Col makes columns of.

    Attributes
    ----------
    image : str
        Padded, channels first.
    window : dict
        Attributes of a Conv on it.
    channels : int
        Of the image.
    """

    image: str
    window: dict[str, Any]
    channels: int


def columns(node: Node, pieces: list[Node], graph: Graph) -> Columns:
    """Return what the `pieces` in place of an Im2Col make columns of."""
    image = next(p for p in pieces if p.op == "Slice").inputs[0]
    attrs = {**window(node), "pads": [0] * 4}
    return Columns(image, attrs, int(graph.types[image].shape[1]))


def convolution(node: Node, found: Columns, graph: Graph) -> Iterator[Node] | None:
    """Return nodes in place of a MatMul of columns with constant weights; else None.

    Parameters
    ----------
    node : Node
        A MatMul, or an XnorPopcountMatMul without its domain.
    found : Columns
        Of its first input.
    graph : Graph
        What comes before.

    Returns
    -------
    iterator of Node, or None
    """
    weight = graph.constants.get(node.inputs[1])
    taps = math.prod(found.window["kernel_shape"])
    if weight is None or weight.ndim != 2 or weight.shape[0] != taps * found.channels:
        return None
    return _convolution(node, found, weight, Pieces(node, graph))


def _convolution(node: Node, found: Columns, weight: Any, make: Pieces) -> Iterator[Node]:
    image, bits = found.image, node.op == "XnorPopcountMatMul"
    if bits:
        weight = 2 * weight - 1
        twice, image = make.tensor("twice"), make.tensor("signs")
        yield make("Mul", [found.image, make.constant(2.0)], twice)
        yield make("Sub", [twice, make.constant(1.0)], image)
    filters = weight.T.reshape(-1, *found.window["kernel_shape"], found.channels)
    filters = np.ascontiguousarray(filters.transpose(0, 3, 1, 2))
    dot = make.tensor("dot")
    yield make("Conv", [image, make.constant(filters)], dot, found.window, covers=(node.name,))
    if bits:
        total, dot_of_bits = make.tensor("total"), make.tensor("half")
        yield make("Add", [dot, make.constant(float(len(weight)))], total)
        yield make("Mul", [total, make.constant(0.5)], dot_of_bits)
        dot = dot_of_bits
    yield make("Transpose", [dot], node.outputs[0], {"perm": [0, 2, 3, 1]})


OPERATORS: dict[str, Reader] = {
    "BatchNormalization": _turned,
    "Conv": _turned,
    "Im2Col": _im2col,
    "MaxPool": _turned,
    "MaxPoolNHWC": _turned,
}
"""How each operator is read."""
