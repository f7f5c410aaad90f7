"""Round the operands of the first convolutions (`--first-layer`).

    before: y = Conv(x, W, b)                                 x an input of the network
    after:  y = bnncc.QuantizedConv(x, round(W))              scales and b are attributes

Only data that are known exactly are rounded: an input, possibly moved or padded by zeros, or bytes
with a scale and an offset per channel, which are folded into weights and bias. Computed data may
differ in the last bit between correct implementations, and rounding would amplify the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from bnncc.ir.dims import is_static
from bnncc.ir.graph import Graph, Node
from bnncc.ir.quantizers import QUANTIZED_CONV
from bnncc.recognise.affine import affine_of
from bnncc.recognise.operands import pad_of
from bnncc.report import Layer
from bnncc.report.facts import FLOAT_BITS
from bnncc.topi_binary import quantization

_MOVES = ("Transpose", "Identity", "Slice", "Reshape", "Squeeze", "Unsqueeze", "Pad")
_AFFINE = ("Add", "Sub", "Mul", "Div", "Neg", "BatchNormalization")


@dataclass
class Relaxed:
    """The layers that were rounded, and why others were not."""

    layers: list[str] = field(default_factory=list)
    """Output tensors of the rounded layers."""
    names: list[str] = field(default_factory=list)
    """Their names."""
    kept: dict[str, str] = field(default_factory=dict)
    """By name, why a candidate layer stays in float32."""


def float_layers(
    graph: Graph, layers: Iterable[Layer], why_not: Callable[[Node, Graph], str | None]
) -> Relaxed:
    """Return the float layers that can be rounded, and why others cannot.

    Parameters
    ----------
    graph : Graph
        As loaded.
    layers : iterable of Layer
        How each layer is computed.
    why_not : callable
        Returns why a layer cannot be rounded, or ""; None for layers that are not meant.
    """
    result, named = Relaxed(), {node.name: node for node in graph.nodes}
    for layer in layers:
        node = named.get(layer.name)
        if layer.kind != "float" or layer.bits != (FLOAT_BITS, FLOAT_BITS) or node is None:
            continue
        why = why_not(node, graph)
        if why:
            result.kept[layer.name] = why
        elif why is not None:
            result.layers.append(node.outputs[0])
            result.names.append(layer.name)
    return result


@dataclass(frozen=True)
class _Data:
    """The data of a convolution: ``scale * tensor + bias`` per channel, padded by zeros."""

    tensor: str
    pads: tuple[int, int, int, int]
    scale: np.ndarray
    bias: np.ndarray


def relax_first_layer(graph: Graph, operands: str) -> Relaxed:
    """Replace the convolutions that read inputs of `graph` by ones with rounded operands.

    Parameters
    ----------
    graph : Graph
        As loaded; modified in place.
    operands : {"float32", "bfloat16", "int8", "float16"}
        Format of the operands; float32 changes nothing.
    """
    result = Relaxed()
    if operands == "float32":
        return result
    producers = graph.producers()
    for position, node in enumerate(graph.nodes):
        if node.op != "Conv" or not reads_input(node.inputs[0], graph, producers):
            continue
        made = _try(node, graph, producers, operands)
        if isinstance(made, Node):
            graph.nodes[position] = made
            result.layers.append(made.outputs[0])
            result.names.append(node.name)
        else:
            result.kept[node.name] = made
    graph.prune()
    return result


def reads_input(name: str, graph: Graph, producers: dict[str, Node]) -> bool:
    """Whether `name` is an input, apart from data movement and per-channel functions."""
    while (node := producers.get(name)) is not None:
        if node.op not in (*_MOVES, *_AFFINE, "Cast", "Clip"):
            return False
        data = graph.computed(node.inputs)
        if len(data) != 1:
            return False
        name = data[0]
    return name in graph.inputs


def _try(node: Node, graph: Graph, producers: dict[str, Node], operands: str) -> Node | str:
    """Return the rounded convolution, or the reason why there is none."""
    if graph.computed(node.inputs[1:]):
        return "its weights are computed at run time"
    weight = graph.constants[node.inputs[1]].astype(np.float64)
    shape = graph.types[node.inputs[0]].shape
    if len(shape) != 4 or not is_static(shape[1:]):
        return "its data are not an image"
    if int(node.attrs.get("group", 1)) != 1:
        return "it has groups"
    if tuple(node.attrs.get("dilations", (1, 1))) != (1, 1):
        return "it is dilated"
    if weight.shape[1] > quantization.MAX_CHANNELS:
        return f"it reads more than {quantization.MAX_CHANNELS} channels"
    found = _source(node, graph, producers)
    if isinstance(found, str):
        return found
    bias = np.zeros(weight.shape[0])
    if node.input(2):
        bias = bias + graph.constants[node.inputs[2]].astype(np.float64).reshape(-1)
    zero_points: tuple[int, ...] = ()
    scale = np.ones(weight.shape[0])
    bytewise = graph.types[found.tensor].dtype == "uint8"
    if bytewise:
        middle = -found.bias / found.scale
        zeros = np.clip(np.rint(middle), 0, 255)
        if any(found.pads) and (np.abs(zeros - middle) > 0.5).any():
            return "no byte represents the 0 that it pads with"
        zero_points = tuple(int(z) for z in zeros)
        weight = weight * found.scale.reshape(1, -1, 1, 1)
    if operands == "int8":
        rounded, scale = quantization.quantize_weight(weight)
        largest = 255 if bytewise else quantization.LEVELS
        if np.abs(rounded).sum(axis=(1, 2, 3)).max() * largest >= quantization.MAX_SUM:
            return "its sums could be too large to be exact"
    elif operands == "float16":
        if np.abs(weight).max(initial=0.0) > np.finfo(np.float16).max:
            return "its weights are beyond the numbers of float16"
        rounded = weight.astype(np.float16)
    else:
        rounded = quantization.to_bfloat16(weight.astype(np.float32))
    if bytewise:
        bias = bias + scale * (rounded.sum(axis=(2, 3), dtype=np.float64) @ (zeros - middle))
    attrs = {
        **node.attrs,
        "pads": list(found.pads),
        "operands": operands,
        "scale": scale,
        "bias": bias,
        "zero_points": zero_points,
    }
    name = graph.constant(rounded.astype(np.float32), f"{node.name}.weight")
    return Node(
        QUANTIZED_CONV, [found.tensor, name], list(node.outputs), attrs, node.name, (node.name,)
    )


def _source(node: Node, graph: Graph, producers: dict[str, Node]) -> _Data | str:
    """Return the exactly known data of `node`, or the reason why they are not known exactly."""
    name, pads = node.inputs[0], tuple(int(p) for p in node.attrs["pads"])
    while (made := producers.get(name)) is not None and made.op == "Pad":
        padded = pad_of(made, graph)
        if padded is None or padded[1] != 0.0:
            break
        pads = tuple(a + b for a, b in zip(pads, padded[0], strict=True))
        name = made.inputs[0]
    channels = int(graph.types[name].shape[1])
    scale, bias = np.ones(channels), np.zeros(channels)
    tensor = name
    while (made := producers.get(tensor)) is not None and made.op in _AFFINE:
        step = affine_of(made, graph, channels, 4)
        if step is None:
            break
        scale, bias = scale * step[0], bias + scale * step[1]
        tensor = next(i for i in made.inputs if i not in graph.constants)
    four = (pads[0], pads[1], pads[2], pads[3])
    if made is not None and made.op == "Cast" and graph.types[made.inputs[0]].dtype == "uint8":
        if (scale == 0).any():
            return "a channel of its data is constant"
        return _Data(made.inputs[0], four, scale, bias)
    source = name
    while (move := producers.get(source)) is not None and move.op in _MOVES:
        source = move.inputs[0]
    if source not in graph.inputs or graph.types[name].dtype != "float32":
        return f"its data are computed (`{name}`); take the image as bytes, or normalize it outside"
    return _Data(name, four, np.ones(channels), np.zeros(channels))
