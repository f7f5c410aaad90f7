"""Round the operands of float layers to bfloat16 (`--float-precision`).

    before: y = Conv(x, W, b)
    after:  h = bnncc.Narrow(x); y = Conv(h, round(W), b)

These nodes define the reference result. Kernels of the layers that read them round the operands
themselves, see `fuse`. Roundings are placed before operators that only move data, because passes
expect these next to layers.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from bnncc.ir.graph import Graph, Node
from bnncc.ir.halves import NARROW
from bnncc.recognise.operands import pad_of
from bnncc.topi_binary.quantization import to_bfloat16
from bnncc.transform.physical import KERNEL

OPERAND = "operand"
"""Attribute that marks the roundings inserted here."""

_MOVES = ("Transpose", "Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze")


def why_not(node: Node, graph: Graph) -> str:
    """Return why the operands of a float layer cannot be rounded, or ""."""
    if node.op not in ("Conv", "Gemm", "MatMul"):
        return f"there are no kernels for {node.op}"
    if graph.computed(node.inputs[1:]):
        return "its weights are computed at run time"
    rank = 4 if node.op == "Conv" else 2
    if len(graph.types[node.inputs[0]].shape) != rank:
        return f"its data do not have {rank} dimensions"
    if graph.types[node.inputs[0]].dtype != "float32" or node.attrs.get("transA"):
        return "its data are not float32"
    if int(node.attrs.get("group", 1)) != 1:
        return "it has groups"
    return ""


def in_three_terms(physical: Graph) -> set[str]:
    """Return the names of layers that multiply bfloat16 in three terms (`--float-products`)."""
    return {
        name
        for node in physical.nodes
        if node.op == KERNEL and getattr(node.attrs["spec"], "operands", "") == "bfloat16x3"
        for name in node.covers
    }


def round_layers(graph: Graph, layers: Collection[str]) -> None:
    """Round data and weights of the layers with outputs `layers`; modifies `graph`."""
    consumers, producers = graph.consumers(), graph.producers()
    rounded: dict[str, list[tuple[Node, int]]] = {}
    for node in graph.nodes:
        if not set(layers).intersection(node.outputs):
            continue
        weight = graph.constants[node.inputs[1]].astype(np.float32)
        node.inputs[1] = graph.constant(to_bfloat16(weight), f"{node.name}.bfloat16")
        reader, name = node, node.inputs[0]
        while (move := producers.get(name)) is not None and len(consumers[name]) == 1:
            padded = pad_of(move, graph) if move.op == "Pad" else None
            if name in graph.outputs or not (move.op in _MOVES or (padded and padded[1] == 0)):
                break
            reader, name = move, move.inputs[0]
        rounded.setdefault(name, []).append((reader, reader.inputs.index(name)))
    made = {}
    for name, readers in rounded.items():
        out = graph.fresh(f"{name}.bfloat16")
        graph.types[out] = graph.types[name]
        attrs = {"to": "bfloat16", OPERAND: 1}
        made[name] = Node(NARROW, [name], [out], attrs, out)
        for reader, place in readers:
            reader.inputs[place] = out
    first = {id(r): made[name] for name, readers in rounded.items() for r, _ in readers}
    placed: set[int] = set()
    nodes = []
    for node in graph.nodes:
        if (narrow := first.get(id(node))) is not None and id(narrow) not in placed:
            nodes.append(narrow)
            placed.add(id(narrow))
        nodes.append(node)
    graph.nodes = nodes
    graph.prune()
