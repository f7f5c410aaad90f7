"""Read the channels-last operators to which QONNX and FINN lower convolutions.

    MaxPoolNHWC(x), channels_last.Conv(x, w)    ->  Transposes, MaxPool or Conv, Transpose
    Im2Col(x)                                   ->  Transpose, Pad, Slices, Concat, Transpose
    MatMul(Im2Col(x), W)                        ->  Transpose, Pad, Conv, Transpose

Most transposes are removed in `bnncc.transform.layout`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from bnncc.errors import ShapeError
from bnncc.ir.dims import is_static
from bnncc.ir.graph import Node
from bnncc.ir.numeric import window_spans
from bnncc.ir.pieces import Expression, Reader

MAX_TAPS = 1024


FIRST, LAST = [0, 3, 1, 2], [0, 2, 3, 1]
"""Permutations from channels-last to channels-first, and back."""


def _turned(write: Expression) -> str:
    # its attributes are those of ONNX's operator
    node, rank = write.node, len(write.type().shape)
    if rank < 3:
        raise ShapeError(
            f"{write.where}: input has {rank} axes, expected (batch, spatial..., channels)"
        )
    first, last = [0, rank - 1, *range(1, rank - 1)], [0, *range(2, rank), 1]
    op, inputs = node.op.removesuffix("NHWC"), list(node.inputs)
    for k in range(2 if op == "Conv" else 1):  # filters have the same layout as images
        inputs[k] = write("Transpose", inputs[k], perm=first)
    return write("Transpose", write(op, *inputs, covers=node.covers, **node.attrs), perm=last)


def _pair(node: Node, key: str, default: int) -> tuple[int, int]:
    value = node.attrs.get(key, default)
    values = [value, value] if isinstance(value, int) else list(value)
    if len(values) != 2 or any(v < 1 for v in values):
        raise ShapeError(f"{node.where}: `{key}` is {values[:8]}, expected two sizes")
    return values[0], values[1]


def window(node: Node) -> dict[str, Any]:
    """Return the attributes of the convolution that an Im2Col is part of.

    Raises
    ------
    ShapeError
        If they are invalid.
    """
    pads = node.attrs.get("pad_amount", 0)
    pads = [pads] * 4 if isinstance(pads, int) else list(pads)
    if len(pads) != 4 or any(p < 0 for p in pads):
        raise ShapeError(f"{node.where}: `pad_amount` is {pads[:8]}, expected four numbers")
    return {
        "kernel_shape": list(_pair(node, "kernel_size", 1)),
        "strides": list(_pair(node, "stride", 1)),
        "dilations": list(_pair(node, "dilations", 1)),
        "pads": pads,
        "group": 1,
    }


@dataclass(frozen=True)
class Columns:
    """The source of an Im2Col's columns."""

    image: str
    """The padded image, channels first."""
    window: dict[str, Any]
    """Attributes of a Conv on the image."""
    channels: int
    """Channels of the image."""


def im2col(write: Expression) -> tuple[str, Columns]:
    """Write an Im2Col; return its result and its source."""
    node, shape, where = write.node, write.type().shape, write.where
    attrs = window(node)
    kernel, strides, dilations = (attrs[k] for k in ("kernel_shape", "strides", "dilations"))
    if len(shape) != 4 or not is_static(shape[1:]):
        raise ShapeError(f"{where}: input of shape {list(shape)}, expected known sizes NHWC")
    if kernel[0] * kernel[1] > MAX_TAPS:
        raise ShapeError(f"{where}: {kernel[0]}x{kernel[1]} taps, expected at most {MAX_TAPS}")
    x = write("Transpose", node.inputs[0], perm=FIRST)
    top, left, bottom, right = attrs["pads"]
    if any(attrs["pads"]):
        around = write.ints(0, 0, top, left, 0, 0, bottom, right)
        value = write.constant(float(node.attrs.get("pad_value", 0)))
        x = write("Pad", x, around, value, mode="constant")
    sizes = (int(shape[1]) + top + bottom, int(shape[2]) + left + right)
    spans = window_spans(kernel, dilations)
    if any(size < span for size, span in zip(sizes, spans, strict=True)):
        raise ShapeError(
            f"{where}: kernel spans {spans}, larger than the padded image {list(sizes)}"
        )
    counts = [(n - s) // t + 1 for n, s, t in zip(sizes, spans, strides, strict=True)]
    axes, steps = write.ints(2, 3), write.ints(*strides)
    taps = []
    for tap in np.ndindex(*kernel):
        start = [t * d for t, d in zip(tap, dilations, strict=True)]
        end = [s + (c - 1) * t + 1 for s, c, t in zip(start, counts, strides, strict=True)]
        taps.append(write("Slice", x, write.ints(*start), write.ints(*end), axes, steps))
    joined = write("Concat", *taps, axis=1)
    found = Columns(x, {**attrs, "pads": [0] * 4}, int(shape[3]))
    return write("Transpose", joined, perm=LAST), found


def convolution(write: Expression, found: Columns) -> str:
    """Replace a MatMul of columns and constant weights by a convolution.

    Parameters
    ----------
    write : Expression
        For a MatMul, or an XnorPopcountMatMul without its domain.
    found : Columns
        Source of its first input.

    Returns
    -------
    str
        The result, or "" if it is not a convolution.
    """
    weight = write.graph.constants.get(write.node.inputs[1])
    taps = math.prod(found.window["kernel_shape"])
    if weight is None or weight.ndim != 2 or weight.shape[0] != taps * found.channels:
        return ""
    image, bits, depth = found.image, write.node.op == "XnorPopcountMatMul", len(weight)
    if bits:
        weight, image = 2 * weight - 1, bipolar(write, image)
    filters = weight.T.reshape(-1, *found.window["kernel_shape"], found.channels)
    filters = write.constant(np.ascontiguousarray(filters.transpose(0, 3, 1, 2)))
    dot = write("Conv", image, filters, covers=(write.node.name,), **found.window)
    return write("Transpose", matches(write, dot, depth) if bits else dot, perm=LAST)


def bipolar(write: Expression, x: str) -> str:
    """Convert bits to signs."""
    return write("Sub", write("Mul", x, write.constant(2)), write.constant(1))


def matches(write: Expression, dot: str, depth: int) -> str:
    """Return how many of `depth` signs agree, given their dot product."""
    return write("Mul", write("Add", dot, write.constant(depth)), write.constant(0.5))


OPERATORS: dict[str, Reader] = {
    "BatchNormalization": _turned,
    "Conv": _turned,
    "MaxPool": _turned,
    "MaxPoolNHWC": _turned,
}
"""Readers of operators other than Im2Col."""
