"""Quantize the data of linear layers when the network runs (`--activations`).

    before: y = MatMul(x, W)                               W: few bits times a scale per output
    after:  r = Div(127, Max(ReduceMax(Abs(x)), tiny))     of each row
            q = Clip(Round(Mul(x, r)), -127, 127)
            y = Div(MatMul(q, W), r)

These nodes define the reference result; later passes find a few-bit layer in them, as in models
that were trained with such a quantizer (BitNet b1.58: Ma et al., 2024, arXiv 2402.17764).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np

from bnncc.ir.graph import Graph, Node
from bnncc.report import Layer
from bnncc.transform.first_layer import Relaxed
from bnncc.transform.rewrite import Walk, walk

LARGEST = 127
"""The greatest magnitude of a quantized number."""

TINY = 1e-30
"""Rows whose greatest magnitude is smaller are quantized as if it were this."""


def why_not(node: Node, graph: Graph) -> str | None:
    """Return why the data of a float layer cannot be quantized, or ""; None if it is not dense."""
    if node.op not in ("Gemm", "MatMul"):
        return None
    if graph.computed(node.inputs[1:]):
        return "weights or bias are computed at run time"
    data = graph.types[node.inputs[0]]
    if data.dtype != "float32" or not data.shape or node.attrs.get("transA"):
        return "data are not float32 rows"
    return ""


def of_few_bits(asked: Relaxed, layers: Iterable[Layer]) -> Relaxed:
    """Return those of the `asked` layers that are computed with few bits once they are quantized.

    Parameters
    ----------
    asked : Relaxed
        Float dense layers, from `first_layer.float_layers`.
    layers : iterable of Layer
        How each layer of the quantized graph is computed.
    """
    kinds, kept = {layer.name: layer.kind for layer in layers}, dict(asked.kept)
    result = Relaxed(kept=kept)
    for out, name in zip(asked.layers, asked.names, strict=True):
        if kinds.get(name) == "few_bit":
            result.layers.append(out)
            result.names.append(name)
        else:
            kept[name] = "weights are not integers of at most 8 bits times a scale per output"
    return result


def quantize_rows(graph: Graph, layers: Collection[str]) -> None:
    """Quantize the data of the layers with outputs `layers`; modifies `graph`."""
    made: dict[str, tuple[str, str]] = {}

    def quantized(node: Node, _: Walk) -> list[Node] | None:
        if not set(layers).intersection(node.outputs):
            return None
        data, weight, *bias = node.inputs
        nodes: list[Node] = []
        if data not in made:
            nodes, *names = _quantizer(data, graph)
            made[data] = (names[0], names[1])
        whole, scale = made[data]
        total, scaled = (graph.fresh(f"{node.outputs[0]}.{end}") for end in ("sum", "scaled"))
        attrs = {**node.attrs, **({"beta": 1.0} if node.op == "Gemm" else {})}
        nodes.append(Node(node.op, [whole, weight], [total], attrs, node.name))
        last = [scaled] if bias and bias[0] else node.outputs
        nodes.append(Node("Div", [total, scale], list(last), {}, f"{node.name}.scaled"))
        if last != node.outputs:
            value = graph.constants[bias[0]] * np.float32(node.attrs.get("beta", 1))
            added = graph.constant(value.astype(np.float32), f"{node.name}.bias")
            nodes.append(Node("Add", [scaled, added], node.outputs, {}, f"{node.name}.biased"))
        return nodes

    if walk(graph, quantized):
        graph.prune()


def _quantizer(data: str, graph: Graph) -> tuple[list[Node], str, str]:
    """Return the nodes that quantize the rows of a tensor, the integers, and their scale."""

    def constant(value: float) -> str:
        return graph.constant(np.float32(value), f"{data}.{value:g}")

    nodes: list[Node] = []

    def put(op: str, end: str, *inputs: str, **attrs: int) -> str:
        out = graph.fresh(f"{data}.{end}")
        nodes.append(Node(op, list(inputs), [out], attrs, out))
        return out

    axis = graph.constant(np.array([-1], np.int64), f"{data}.axis")
    size = put("ReduceMax", "greatest", put("Abs", "size", data), axis, keepdims=1)
    scale = put("Div", "scale", constant(LARGEST), put("Max", "least", size, constant(TINY)))
    rounded = put("Round", "rounded", put("Mul", "divided", data, scale))
    whole = put("Clip", "whole", rounded, constant(-LARGEST), constant(LARGEST))
    return nodes, whole, scale
