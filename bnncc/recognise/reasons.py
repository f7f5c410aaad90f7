"""Reasons why a layer is not binary, and remedies, one sentence for each case."""

from __future__ import annotations

import numpy as np

from bnncc.ir.dims import Dim
from bnncc.ir.graph import Graph, Node
from bnncc.ir.moves import PERMUTATIONS
from bnncc.recognise.filters import WEIGHT_TOLERANCE, Weights
from bnncc.recognise.lattice import Lattice
from bnncc.recognise.operands import maker, operator, unmoved

Why = tuple[str, str]
"""Reason and remedy."""

_IMAGE = (
    "the first layer usually stays float (--first-layer bfloat16 or int8 makes it faster); sign() "
    "on the input, or --input-transform, makes it binary"
)
_INPUT = "the first layer usually stays float; sign() on the input makes it binary"
_DENSE = "; --activations int8 quantizes the data at run time, on CPUs"
_SIGNED_WEIGHTS = "scale[o] * sign(w), with one scale for each output channel o"


def weights(filters: np.ndarray, values: int) -> Why:
    """Return why filters are not small integers times a scale.

    Parameters
    ----------
    filters : ndarray, shape (out_channels, channels, ...)
        Weights.
    values : int
        Number of values that the data take.
    """
    shared = _shared_scales(filters)
    if shared:
        return (
            f"its weights have a separate scale for each {shared}, which a sum of bits cannot "
            "apply",
            f"train them as {_SIGNED_WEIGHTS}",
        )
    return (
        f"its weights are float, while its data have {values} values",
        f"export the binarized weights, {_SIGNED_WEIGHTS}, not the float weights used in training; "
        "or quantize them to integers of at most 8 bits times such a scale",
    )


def _shared_scales(filters: np.ndarray) -> str:
    """Return the axis along which all filters have the same scales, or ""."""
    size = np.abs(filters.astype(np.float64))
    flat = size.reshape(len(size), -1)
    if not flat.size or not flat.all():
        return ""
    flat = flat / flat.max(axis=1, keepdims=True)
    if len(flat) < 2 or np.ptp(flat, axis=0).max() > WEIGHT_TOLERANCE:
        return ""
    each = flat[0].reshape(filters.shape[1], -1)  # channels, kernel positions
    if np.ptp(each, axis=1).max() <= WEIGHT_TOLERANCE:
        return "input channel"
    return "kernel position" if np.ptp(each, axis=0).max() <= WEIGHT_TOLERANCE else "weight"


def data(node: Node, name: str, graph: Graph, producers: dict[str, Node]) -> Why:
    """Return why the data of a layer with binary weights are not binary."""
    source = unmoved(name, producers)
    reason = f"its input `{source}` is real-valued" + maker(source, producers)
    made = producers.get(source)
    remedy = "apply sign() to the input of the layer, or quantize it to at most 8 bits"
    if made is None:
        remedy = _of_input(node, source, graph)
    elif made.op == "Relu":
        remedy = "apply sign() after the Relu (0 and 1 are binary too), or instead of it"
    return reason, remedy + _DENSE * (node.op != "Conv")


def few_bytes(node: Node, name: str, graph: Graph, producers: dict[str, Node], depth: Dim) -> Why:
    """Return why a layer is float that reads pixels, or rows, of `depth` bytes."""
    source, what = unmoved(name, producers), "pixels" if node.op == "Conv" else "rows"
    return (
        f"its input `{source}`{maker(source, producers)} has {what} of {depth} bytes, whose bits "
        "fill too little of a word",
        _of_input(node, source, graph),
    )


def few_bit_weights(
    node: Node, name: str, graph: Graph, producers: dict[str, Node], found: Weights
) -> Why:
    """Return why a layer with few-bit weights is float: because of its data."""
    reason, remedy = data(node, name, graph, producers)
    if unmoved(name, producers) in producers:
        remedy = "quantize its data to at most 8 bits, too" + _DENSE * (node.op != "Conv")
    else:
        remedy = f"declare what the input holds, or quantize it to at most 8 bits; {remedy}"
    return f"{reason}, while its weights have {found.bits} bits", remedy


def _of_input(node: Node, name: str, graph: Graph) -> str:
    """Return the remedy for a layer that reads input `name`; options are for images."""
    image = node.op == "Conv" and len(graph.types[name].shape) == 4
    return _IMAGE if image else _INPUT


def neither(node: Node, name: str, graph: Graph, producers: dict[str, Node], values: int) -> Why:
    """Return how a layer is computed if neither data nor weights are binary.

    Parameters
    ----------
    name : str
        The tensor that it reads.
    values : int
        Number of values that the tensor is known to take; 0 if many.
    """
    both = "apply sign() to inputs and weights to make it binary"
    if values:
        return f"its weights are float, and its data take {values} values that are not signs", both
    name = unmoved(name, producers)
    made = producers.get(name)
    source = f"from {operator(made)}" if made is not None else "a graph input"
    reason = f"its data ({source}) and its weights are float"
    if made is None:
        return reason, _of_input(node, name, graph)
    edge = "last" if _is_last(node, graph) else "first" if _is_first(made, graph, producers) else ""
    if edge:
        usual = f"the {edge} layer usually stays float"
        return reason, f"{usual}; sign() on data and weights makes it binary"
    return reason, both


def _is_last(node: Node, graph: Graph) -> bool:
    """Whether only a function of the class scores, if anything, follows a layer."""
    consumers = graph.consumers()
    while node.outputs[0] not in graph.outputs:
        readers = consumers.get(node.outputs[0], [])
        if len(readers) != 1 or readers[0].op not in _AFTER_SCORES:
            return False
        node = readers[0]
    return True


def _is_first(made: Node | None, graph: Graph, producers: dict[str, Node]) -> bool:
    """Whether a layer reads an input of the graph that is only normalized before."""
    while made is not None and made.op in _NORMALIZING:
        name = made.inputs[0]
        if name in graph.inputs:
            return True
        made = producers.get(name)
    return False


_AFTER_SCORES = ("Softmax", "LogSoftmax", "Sigmoid", "Flatten", "Reshape", "Squeeze", "Identity")
_NORMALIZING = {"BatchNormalization", "Sub", "Add", "Mul", "Div", "Cast", *PERMUTATIONS}


def described(known: Lattice, found: Weights) -> tuple[str, str]:
    """Return descriptions of data and weights: ``ternary`` or a number of bits."""
    three = not found.odd and int(np.abs(found.whole).max()) == 1
    return (
        "ternary" if known.count == 2 and known.bipolar else f"{known.bits}-bit",
        "ternary" if three else f"{found.bits}-bit",
    )


def of_zeros(data: str, weights: str) -> str:
    """Return how a few-bit layer becomes binary, if removing zeros suffices; otherwise ""."""
    threes = [name for name, said in (("data", data), ("weights", weights)) if said == "ternary"]
    if not threes or not {data, weights} <= {"ternary", "1-bit"}:
        return ""
    return (
        f"the zeros of ternary {' and '.join(threes)} need a second bit: a sign without zeros, "
        "Where(x >= 0, 1, -1), makes the layer binary"
    )
