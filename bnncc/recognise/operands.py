"""Operands of a Conv, Gemm or MatMul: filters, bias, and the data before pads and reshapes."""

from __future__ import annotations

import math

import numpy as np

from bnncc.ir.dims import is_static
from bnncc.ir.graph import Graph, Node
from bnncc.ir.halves import ROUND
from bnncc.ir.moves import PERMUTATIONS, VIEW
from bnncc.ir.rows import ROW_NORM

Array = np.ndarray

Pads = tuple[int, int, int, int]


def filters_of(node: Node, weight: Array) -> Array | tuple[str, str]:
    """Return weights as (out_channels, ...), or a reason and a remedy."""
    if node.op == "Conv":
        return weight
    if weight.ndim != 2:
        return f"its weights have {weight.ndim} dimensions", "use a matrix"
    if node.op == "Gemm":
        if node.attrs.get("transA"):
            return "its data is transposed", "transpose it before the sign"
        return weight if node.attrs.get("transB") else weight.T
    return weight.T


def layer_filters(node: Node, graph: Graph) -> Array | tuple[str, str]:
    """Return the filters of a layer with constant weights, or why bits are no use, and a remedy.

    Parameters
    ----------
    node : Node
        A Conv, Gemm or MatMul.
    graph : Graph
        Holds its weights.

    Returns
    -------
    ndarray, or tuple of str
        Of shape (out_channels, ...); or a reason and the remedy.
    """
    kind = graph.types[node.inputs[0]]
    rank, weight = len(kind.shape), graph.types[node.inputs[1]].shape
    if node.op == "MatMul" and len(weight) > 2:
        return (
            f"its weights are {math.prod(int(d) for d in weight[:-2])} matrices",
            "write a product for each matrix, and concatenate them",
        )
    if kind.dtype not in ("float32", "float64"):
        return f"its data is {kind.dtype}", "compute it in float32"
    if rank != (4 if node.op == "Conv" else 2):
        return f"its data has {rank} dimensions", "images need 4 (Conv) and rows 2 (Gemm, MatMul)"
    if not is_static(kind.shape[1:]):
        return "its data has an unknown size", "fix it: --input-shape NAME:1x3x224x224"
    return filters_of(node, graph.constants[node.inputs[1]])


def unmoved(name: str, producers: dict[str, Node]) -> str:
    """Return the tensor whose values `name` holds, possibly rounded to half precision."""
    while (made := producers.get(name)) is not None and made.op in (*PERMUTATIONS, VIEW, ROUND):
        name = made.inputs[0]
    return name


def maker(name: str, producers: dict[str, Node]) -> str:
    """Return a phrase that names the operator which computes a tensor."""
    made = producers.get(unmoved(name, producers))
    return f" (from {operator(made)} `{made.name}`)" if made is not None else " (a graph input)"


def operator(node: Node) -> str:
    """Return what a model's author calls an operator."""
    if node.op == ROW_NORM:
        return "LayerNorm" if node.attrs.get("centred") else "RMSNorm"
    return _SAID.get(node.op, node.op.removeprefix("bnncc."))


_SAID = {
    "bnncc.BinaryConv": "binary layer",
    "bnncc.BinaryProduct": "binary MatMul",
    "bnncc.FewBitConv": "few-bit layer",
    "bnncc.Interleave": "upsampling",
    "bnncc.QuantizedConv": "Conv",
}


def pad_of(node: Node, graph: Graph) -> tuple[tuple[int, int, int, int], float] | None:
    """Return ``((top, left, bottom, right), value)`` of a `Pad` that pads an image by a constant.

    Returns
    -------
    tuple or None
        None for other modes, negative pads, padded batch or channels, or unknown pads.
    """
    if (
        str(node.attrs.get("mode", "constant")) != "constant"
        or len(graph.types[node.inputs[0]].shape) != 4
    ):
        return None
    given = [*node.inputs[1:], "", "", ""][:3]
    if given[2] or graph.computed(given) or not given[0]:
        return None
    pads = [int(p) for p in graph.constants[given[0]].reshape(-1)]
    if len(pads) != 8 or any(pads[i] for i in (0, 1, 4, 5)) or min(pads) < 0:
        return None
    value = float(graph.constants[given[1]].reshape(-1)[0]) if given[1] else 0.0
    return (pads[2], pads[3], pads[6], pads[7]), value


def padded_source(node: Node, graph: Graph, producers: dict[str, Node]) -> tuple[str, Pads, float]:
    """Return the tensor before the `Pad` nodes of a Conv, the total padding, and its value."""
    name = node.inputs[0]
    pads = tuple(int(p) for p in node.attrs["pads"])
    pad_value = 0.0
    while (pad := producers.get(name)) is not None and pad.op == "Pad":
        layer = pad_of(pad, graph)
        if layer is None:
            break
        inner, value = layer
        if any(inner):
            if any(pads) and value != pad_value:
                break
            pads, pad_value = tuple(a + b for a, b in zip(pads, inner, strict=True)), value
        name = pad.inputs[0]
    return name, (pads[0], pads[1], pads[2], pads[3]), pad_value


def flattened_source(
    name: str, graph: Graph, producers: dict[str, Node]
) -> tuple[str, tuple[int, int, int]] | None:
    """Return the image that `name` flattens, and its channels, height and width."""
    source = name
    while (move := producers.get(source)) is not None and move.op in (
        "Flatten",
        "Reshape",
        "Squeeze",
    ):
        source = move.inputs[0]
        shape = graph.types[source].shape
        flat = graph.types[name].shape
        if len(shape) != 4 or not is_static(shape[1:]):
            continue
        channels, height, width = (int(d) for d in shape[1:])
        if flat[0] == shape[0] and flat[1] == channels * height * width:
            return source, (channels, height, width)
    return None


def channels_last(node: Node, filters: Array, image: tuple[int, int, int] | None) -> Array:
    """Return filters as (out_channels, kernel_h, kernel_w, channels)."""
    if node.op == "Conv":
        return np.ascontiguousarray(filters.transpose(0, 2, 3, 1))
    if image is not None:
        return np.ascontiguousarray(filters.reshape(-1, *image).transpose(0, 2, 3, 1))
    return np.ascontiguousarray(filters[:, None, None, :])


def bias_of(node: Node, graph: Graph, channels: int) -> Array:
    """Return the bias of each output channel, in float64."""
    zero = np.zeros(channels, np.float64)
    if len(node.inputs) < 3 or not node.inputs[2]:
        return zero
    value = graph.constants[node.inputs[2]].astype(np.float64)
    return zero + value.reshape(-1) * (
        float(node.attrs.get("beta", 1.0)) if node.op == "Gemm" else 1.0
    )
