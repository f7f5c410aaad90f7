"""Recognise binary layers.

    before: b = bnncc.Sign(x); p = Pad(b, 0); y = Conv(p, W)      W = s[o] * {-1, +1}
    after:  b = bnncc.Sign(x); y = bnncc.BinaryConv(b)            pads merged, bits and scale of W

A Conv, Gemm or MatMul becomes `bnncc.BinaryConv` if its data take two values (see `lattice`) and
every filter is one magnitude times signs. Real factors of the data's values (their size, an offset)
and of the weights (their scale, the bias) go into the node's float64 ``scale`` and ``bias`` per
output channel: ``y = scale * (step * dot + first) + bias``. The integers ``step`` and ``first`` are
1 and 0 unless the two values differ in magnitude. For every Conv, Gemm and MatMul of the file, a
`report.Layer` tells how it is computed, and why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from bnncc.ir.dims import Dim
from bnncc.ir.graph import Graph, Node
from bnncc.ir.quantizers import QUANTIZED_CONV
from bnncc.recognise import levels_behind, reasons, transposed
from bnncc.recognise.borders import constants_outside, outside_sums, with_border
from bnncc.recognise.channel_scales import scaled_source
from bnncc.recognise.doubles import EXACT, in_double, meanings, number_doubles
from bnncc.recognise.few_bit import FEW_BIT_CONV, Choose, attempt
from bnncc.recognise.few_values import depth, few_values, fills_words
from bnncc.recognise.filters import Weights, binary_weight, few_bit_weights
from bnncc.recognise.lattice import MAX_FILLED, Lattice, as_multiples, in_units, lattices
from bnncc.recognise.operands import (
    bias_of,
    channels_last,
    flattened_source,
    layer_filters,
    padded_source,
)
from bnncc.recognise.products import BINARY_PRODUCT, why_not
from bnncc.recognise.row_scales import MOVED, PART
from bnncc.report import Layer
from bnncc.topi_binary.layout import WORD_BITS, words

Array = np.ndarray

_TRANSPOSED = (
    "give it constant weights, known sizes, explicit pads and a kernel of at least its stride"
)


Slices = Callable[[int], bool]
"""Returns whether groups of the given number of channels are computed in bit slices."""


def binarize(
    graph: Graph, choose: Choose | None = None, slices: Slices = lambda _: False
) -> list[Layer]:
    """Rewrite the binary and few-bit layers of `graph` and describe all layers.

    Parameters
    ----------
    graph : Graph
        After `recognise_signs` and `recognise_quantizers`; modified in place.
    choose : callable, optional
        Selects the method of few-bit layers, see `recognise.few_bit`; default: bit planes.
    slices : callable, optional
        Returns whether groups of a number of channels are computed in bit slices, which waste no
        bits of words; default: never.

    Returns
    -------
    list of Layer
        One per Conv, Gemm and MatMul of the file, in order.
    """
    held = few_values(graph)
    numbered = number_doubles(graph, held)
    known = lattices(graph) | meanings(numbered)
    producers = graph.producers()
    layers = []
    behind: dict[int, list[Node]] = {}
    for position, node in enumerate(graph.nodes):
        if node.op == "ConvTranspose":
            layers.append(_layer(node, graph, (transposed.why_not(node, graph), _TRANSPOSED)))
        if node.op == BINARY_PRODUCT:
            layers.append(_product_layer(node, graph))
        if node.op == QUANTIZED_CONV:
            layers.append(_rounded_layer(node, graph))
        if node.op not in ("Conv", "Gemm", "MatMul"):
            continue
        made = _try(node, _Look(graph, known, held, producers), choose)
        if isinstance(made, list) and made[0].inputs[0] in numbered:
            made = in_double(made, graph, numbered)
        if isinstance(made, list):
            graph.nodes[position], *behind[position] = made
            producers.update({o: one for one in made for o in one.outputs})
        if not node.attrs.pop(PART, False):
            layers.append(_layer(node, graph, made[0] if isinstance(made, list) else made, slices))
    graph.nodes = [one for k, n in enumerate(graph.nodes) for one in (n, *behind.get(k, ()))]
    graph.prune()
    return transposed.joined(layers, graph)


def _rounded_layer(node: Node, graph: Graph) -> Layer:
    operands = str(node.attrs["operands"])
    how = f"first layer in {operands}"
    if operands == "int8":
        how += ", the image with its own scale"
    if node.attrs["zero_points"]:
        how = f"first layer in {operands}, the image as its bytes"
    plain = Node("Conv", node.inputs, node.outputs, {}, node.name)
    bits = (8, 8) if operands == "int8" else (16, 16)
    return replace(_layer(plain, graph, (f"{how} (--first-layer {operands})", "")), bits=bits)


def _product_layer(node: Node, graph: Graph) -> Layer:
    a = node.attrs
    depth = int(graph.types[node.inputs[0]].shape[1])
    batch = np.prod([int(d) for d in str(a["batch"]).split("*") if d.isdigit()], dtype=np.int64)
    macs = int(batch) * a["rows"] * depth * a["columns"]
    left = "signs" if a["mode"] == "xor" else "zeros and ones"
    reason = f"{left} times signs, the second operand packed when it runs"
    out, weight = (a["batch"], a["rows"], a["columns"]), (a["batch"], depth, a["columns"])
    return Layer(node.name, "MatMul", "binary", reason, "", macs, "", out, weight, (1, 1))


def _layer(
    node: Node, graph: Graph, made: Node | tuple[str, str], slices: Slices = lambda _: False
) -> Layer:
    weight = _weight_shape(node, graph)
    out = graph.types[node.outputs[0]].shape
    op, made_shape, weight_shape = graph.in_file.get(node.name, (node.op, out, weight))
    if node.op in ("Conv", "ConvTranspose"):
        macs = _count(out[2:]) * _count(weight)
    else:  # rows of the file may be joined: those of one batch element count
        each = made_shape[1:] if len(made_shape) > 1 else made_shape  # a vector has no batch
        macs = _count(each) * _count(weight[-2:]) // max(1, _count(out[-1:]))
    reason, remedy = ("", "") if isinstance(made, Node) else made
    kind = "binary" if isinstance(made, Node) else "float"
    bits = (1, 1) if isinstance(made, Node) else (32, 32)
    if isinstance(made, Node) and made.attrs.get("groups", 1) > 1:
        reason = _filled(made, slices)
    if isinstance(made, Node) and made.op == FEW_BIT_CONV:
        kind, bits, reason = "few_bit", made.attrs["bits"], made.attrs["reason"]
        remedy = made.attrs["remedy"]
    reason = "; ".join(filter(None, (reason, node.attrs.pop(MOVED, ""))))
    return Layer(node.name, op, kind, reason, remedy, macs, "", made_shape, weight_shape, bits)


def _count(shape: Sequence[Dim]) -> int:
    """Return the number of elements, with 1 for symbols."""
    return math.prod(d for d in shape if isinstance(d, int))


def _filled(made: Node, slices: Slices) -> str:
    """Return a note on how much of its words a group uses, or "" if it fills them."""
    out_channels, *_, channels = made.attrs["bits"].shape
    held = words(channels) * WORD_BITS
    if channels == held:
        return ""
    if slices(channels) and out_channels // made.attrs["groups"] % channels == 0:
        return (
            "depthwise, in bit slices" if channels == 1 else f"groups of {channels}, in bit slices"
        )
    return f"groups of {channels} channels fill {100 * channels / held:.0f} % of their words"


def _weight_shape(node: Node, graph: Graph) -> tuple[int, ...]:
    shape = graph.types[node.inputs[1]].shape
    return tuple(d if isinstance(d, int) else 1 for d in shape)


@dataclass(frozen=True)
class _Look:
    """Facts about a graph: lattices, value sets of tensors, and producers."""

    graph: Graph
    known: dict[str, Lattice]
    held: dict[str, Array]
    producers: dict[str, Node]

    def count(self, name: str) -> int:
        """Return how many values a tensor takes; 0 if they are many, as those of an image are."""
        count = len(self.held.get(name, ()))
        return count if count <= MAX_FILLED else 0

    def few_bytes(self, node: Node, name: str) -> tuple[str, str] | None:
        """Return why a layer that reads pixels of few bytes is float, else None."""
        if len(self.held.get(name, ())) <= MAX_FILLED or fills_words(node, self.graph):
            return None
        return reasons.few_bytes(node, name, self.graph, self.producers, depth(node, self.graph))


def _try(node: Node, look: _Look, choose: Choose | None) -> list[Node] | tuple[str, str]:
    """Return a binary or few-bit layer and the nodes after it, or a reason and a remedy."""
    graph, producers = look.graph, look.producers
    if node.inputs[1] not in graph.constants:
        signs = {name: one for name, one in look.known.items() if one.signs}
        return why_not(node, graph, signs, producers)
    filters = layer_filters(node, graph)
    if isinstance(filters, tuple):
        return filters
    few = cache(lambda: few_bit_weights(filters))
    made = _try_binary(node, look, filters, few)
    if isinstance(made, list):
        return made
    return attempt(node, graph, filters, few, look.known, producers, choose) or made


def _try_binary(
    node: Node, look: _Look, filters: Array, few: Callable[[], Weights | None]
) -> list[Node] | tuple[str, str]:
    signs, data = binary_weight(filters), _data(node, look)
    name = _source(node, look)
    if signs is None:
        if not isinstance(data, tuple):
            return reasons.weights(filters, len(data.value.values))
        found = few()
        shown = levels_behind.why(
            node, look.graph, look.known, look.producers, filters, few=found is not None
        )
        if shown is not None:
            return shown
        if found is not None:
            return look.few_bytes(node, name) or reasons.few_bit_weights(
                node, name, look.graph, look.producers, found
            )
        return reasons.neither(node, name, look.graph, look.producers, look.count(name))
    if isinstance(data, tuple):
        shown = _why_real(node, look)
        return (
            shown
            or levels_behind.why(node, look.graph, look.known, look.producers, filters, few=True)
            or data
        )
    return _make(node, look.graph, data, *signs, filters)


def _source(node: Node, look: _Look) -> str:
    """Return the tensor that a layer reads, before any pads."""
    if node.op != "Conv":
        return node.inputs[0]
    return padded_source(node, look.graph, look.producers)[0]


def _why_real(node: Node, look: _Look) -> tuple[str, str] | None:
    """Return why few-valued data are not binary, with a remedy; None if they are not few-valued."""
    graph, producers = look.graph, look.producers
    name = _source(node, look)
    scaled = scaled_source(name, graph, producers)
    known = look.known.get(scaled[0]) if scaled is not None else None
    if known is not None and known.signs:
        return (
            "its data have a separate scale for each channel, and its sums run over channels",
            "use one scale for all channels, or apply it after the layer; depthwise layers can "
            "have both",
        )
    if (why := _divided(name, graph, producers)) is not None:
        return why
    count = look.count(name)
    if count < 3:
        return None
    return (
        f"its data take {count} values that are not evenly spaced",
        "space them evenly, or use two values",
    )


def _divided(name: str, graph: Graph, producers: dict[str, Node]) -> tuple[str, str] | None:
    """Return why ``x / |x|``, or a similar quotient, is no sign; None if `name` is neither."""
    node = producers.get(name)
    if node is None or node.op != "Div":
        return None
    sizes = [producers.get(i) for i in node.inputs]
    plain = "binarize by Where(x >= 0, 1, -1), which is a bit for every number"
    for data, size in zip(node.inputs, sizes[::-1], strict=True):
        if size is None:
            continue
        if size.op == "Abs" and size.inputs[0] == data:
            return (
                "its data are x / |x|, which is NaN where x is 0",
                f"{plain}; or define it at 0: --sign-zero +1",
            )
        inner = [producers.get(i) for i in size.inputs]
        if size.op == "Add" and any(
            n is not None and n.op == "Abs" and n.inputs[0] == data for n in inner
        ):
            return "its data are x / (|x| + c), which is not a sign near 0", plain
        if size.op == "Sqrt" and inner[0] is not None and set(inner[0].inputs) == {data}:
            return (
                "its data are x / sqrt(x * x), which is not a sign where x * x is 0 or infinite",
                plain,
            )
    return None


@dataclass(frozen=True)
class _Data:
    """A two-valued tensor that a layer reads, and the padding merged into the layer."""

    name: str
    value: Lattice
    pads: tuple[int, int, int, int]
    pad_value: float
    image: tuple[int, int, int] | None = None
    """Channels, height and width if the layer reads a flattened image."""
    centered: bool = False
    """Whether the bits are treated as signs around the mean of the two values."""


def _data(node: Node, look: _Look) -> _Data | tuple[str, str]:
    name, pads, pad_value, image = node.inputs[0], (0, 0, 0, 0), 0.0, None
    if node.op == "Conv":
        name, pads, pad_value = padded_source(node, look.graph, look.producers)
    two = look.known.get(name)
    if two is None or not two.signs:
        return look.few_bytes(node, name) or reasons.data(node, name, look.graph, look.producers)
    centered = two.zero and not two.bipolar
    if any(pads):
        allowed = (0.0, two.lo, two.hi) if two.bipolar else (two.lo, two.hi)
        centered |= pad_value not in allowed or (not two.bipolar and two.lo != 0.0)
    if node.op != "Conv":
        flattened = flattened_source(name, look.graph, look.producers)
        name, image = flattened or (name, None)
    return _Data(name, two, pads, pad_value, image, centered)


def _make(
    node: Node, graph: Graph, data: _Data, bits: Array, scale: Array, filters: Array
) -> list[Node]:
    if data.centered:
        return _make_centered(node, graph, data, bits, scale)
    two = data.value
    unit = two.hi if two.bipolar else two.hi - two.lo
    bias = bias_of(node, graph, filters.shape[0])
    step, first = 1, np.zeros(filters.shape[0])
    if not two.bipolar and two.lo:  # x = lo + (hi - lo) * bit
        multiples = as_multiples((two.lo, two.hi))
        if multiples is None:
            flat = filters.reshape(filters.shape[0], -1).astype(np.float64)
            bias = bias + two.lo * flat.sum(axis=1)
        else:  # the sum stays an integer
            step, unit = multiples[1:]
            first = multiples[0] * (2.0 * bits - 1).reshape(bits.shape[0], -1).sum(axis=1)
    pad_value = 0 if data.pad_value == 0.0 else 1 if data.pad_value == two.hi else -1
    if not two.bipolar and data.pad_value == two.lo:
        pad_value = 0
    attrs = {
        "step": step,
        "first": first,
        "scale": scale * unit,
        "bias": bias,
        "pad_value": pad_value,
        "mode": "xor" if two.bipolar else "and",
    }
    return [_conv(node, data, bits, attrs)]


def _conv(node: Node, data: _Data, bits: Array, attrs: dict[str, Any]) -> Node:
    shared = {
        "bits": channels_last(node, bits, data.image),
        "strides": tuple(node.attrs.get("strides", (1, 1))),
        "dilations": tuple(node.attrs.get("dilations", (1, 1))),
        "pads": data.pads,
        "groups": int(node.attrs.get("group", 1)),
    }
    attrs = {**shared, **attrs}
    return Node("bnncc.BinaryConv", [data.name], list(node.outputs), attrs, node.name, (node.name,))


def _make_centered(node: Node, graph: Graph, data: _Data, bits: Array, scale: Array) -> list[Node]:
    """Return a layer with data ``center + half * s``, s being signs, padded by any number.

    ``sum(w * x)`` is ``half * sum(w * s) + center * sum(w)``, with s = 0 outside the image. If the
    padding is not `center`, a constant per output position corrects for it. If center, half and
    padding are multiples of one unit, they are expressed in it, so that the sum stays an integer.
    """
    two, signs = data.value, 2.0 * bits - 1
    numbers = [two.lo, two.hi, data.pad_value if any(data.pads) else 0.0]
    whole = in_units(numbers) or in_units(numbers[:2])
    if whole is not None and 4 * max(map(abs, whole[0])) * signs[0].size >= EXACT:
        whole = None
    (lo, hi, *among), unit = whole or (numbers, 1.0)
    pad = 2 * (among[0] if among else numbers[2] / unit)
    center, half, unit = lo + hi, hi - lo, unit / 2  # so that the center is an integer, too
    bias, sums = bias_of(node, graph, len(bits)), signs.reshape(len(bits), -1).sum(axis=1)
    attrs = {"pad_value": 0, "mode": "xor", "scale": scale * unit, "bias": bias}
    if whole is None:
        attrs |= {"step": 1, "first": 0.0 * sums, "scale": scale * unit * half}
        attrs["bias"] = bias + scale * unit * center * sums
    else:
        attrs |= {"step": int(half), "first": center * sums}
    made = _conv(node, data, bits, attrs)
    if not any(data.pads) or pad == center:
        return [made]
    kinds = (graph.types[name] for name in (data.name, node.outputs[0]))
    outside = outside_sums(node, signs, data.pads, *kinds)
    counted, rest = constants_outside(outside, sums, center, pad, whole=whole is not None)
    column = (1, -1, 1, 1)
    return with_border(
        made, graph, counted, rest * (scale * unit).reshape(column) + bias.reshape(column)
    )
