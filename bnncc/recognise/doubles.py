"""Binary and few-bit layers in float64 networks: exact integer sums, with float64 around them.

    before: y = Conv(t, W)                       t: float64 of few values
    after:  k = bnncc.Levels((t - t0) / step); a = bnncc.FewBitConv(k); y = s * Cast(a) + b

`k` is the index of the value of `t`, and `a` a sum of integers; both are exact in float32. All that
follows the sum, and the decisions that produce `t`, are computed in float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from onnx import TensorProto

from bnncc.ir.dims import channel_shape
from bnncc.ir.graph import Graph, Node, TensorType
from bnncc.recognise.lattice import Lattice, decision, evenly
from bnncc.recognise.operands import flattened_source, padded_source

Array = np.ndarray[Any, Any]

EXACT = 2.0**24
"""Integers below this are exact in float32."""

DOUBLE = "float64"


def number_doubles(graph: Graph, held: Mapping[str, Array]) -> dict[str, tuple[str, Array]]:
    """Add float32 tensors of value indices for the few-valued float64 tensors that layers read.

    Parameters
    ----------
    graph : Graph
        Before `binarize`; nodes are added.
    held : mapping of str to ndarray
        From `few_values`.

    Returns
    -------
    dict of str to tuple
        By name of the float64 tensor: the tensor of indices, and the evenly spaced values.
    """
    producers = graph.producers()
    table: dict[str, tuple[str, Array]] = {}
    behind: dict[str, list[Node]] = {}
    for node in graph.nodes:
        for name in _data_of(node, graph, producers):
            values = evenly(held[name]) if name in held and name not in table else None
            if values is None:
                continue
            label = producers[name].name if name in producers else name
            number, behind[name] = _numbered(name, values, graph, label)
            table[name] = number, values
    graph.put_behind(behind)
    return table


def _data_of(node: Node, graph: Graph, producers: dict[str, Node]) -> list[str]:
    """Return the float64 tensors that may be a layer's data: before padding, flattened or not."""
    if node.op not in ("Conv", "Gemm", "MatMul") or node.inputs[1] not in graph.constants:
        return []
    name = node.inputs[0]
    rank = 4 if node.op == "Conv" else 2
    kind = graph.types[name]
    if kind.dtype != DOUBLE or len(kind.shape) != rank:
        return []
    if rank == 4:
        return [padded_source(node, graph, producers)[0]]
    image = flattened_source(name, graph, producers)
    return [name] if image is None else [name, image[0]]


def _numbered(name: str, values: Array, graph: Graph, label: str) -> tuple[str, list[Node]]:
    """Return the tensor of value indices, and the nodes that compute it."""
    count, shape = len(values) - 1, graph.types[name].shape
    step = (values[-1] - values[0]) / count
    names = [graph.fresh(f"{name}.{what}") for what in ("from_first", "steps", "near", "number")]
    for made, dtype in zip(names, (DOUBLE, DOUBLE, "float32", "float32"), strict=True):
        graph.types[made] = TensorType(shape, dtype)
    first = graph.constant(np.array(values[0]), f"{name}.first")
    unit = graph.constant(np.array(step), f"{name}.step")
    nodes = [
        Node("Sub", [name, first], names[:1], {}, label),
        Node("Div", [names[0], unit], names[1:2], {}, label),
        Node("Cast", names[1:2], names[2:3], {"to": TensorProto.FLOAT}, label),
    ]
    numbers = np.arange(count + 1, dtype=np.float32)
    limits = numbers[:-1] + np.float32(0.5)
    return names[3], [*nodes, *decision(graph, names[2], names[3], limits, numbers, label)]


def meanings(numbered: Mapping[str, tuple[str, Array]]) -> dict[str, Lattice]:
    """Return the values of the tensors of indices, in the form of `lattices`."""
    held = {name: tuple(map(float, values)) for name, (_, values) in numbered.items()}
    return {name: Lattice(values, signs=len(values) == 2) for name, values in held.items()}


def in_double(
    made: list[Node], graph: Graph, numbered: Mapping[str, tuple[str, Array]]
) -> list[Node] | tuple[str, str]:
    """Return a layer with exact float32 integer sums that are scaled and shifted in float64.

    Parameters
    ----------
    made : list of Node
        A binary or few-bit layer of a float64 tensor, and the nodes after it.
    graph : Graph
        Receives constants and types.
    numbered : mapping of str to tuple
        From `number_doubles`.

    Returns
    -------
    list of Node, or tuple of str
        Reason and remedy, if sums may exceed the exact range.
    """
    layer, *rest = made
    a, (out,) = layer.attrs, layer.outputs
    scale, bias = (np.asarray(a[k], np.float64) for k in ("scale", "bias"))
    steps: list[tuple[str, Array]] = [("Mul", scale), ("Add", bias)]
    if "spec" in a:
        factor, first = a["dot"]
        if a["top"] * abs(factor) + np.abs(first).max(initial=0) >= EXACT:
            return "its sums may exceed 2^24, in a float64 network", "compute it in float32"
    else:
        steps = [("Mul", np.full_like(scale, a["step"])), ("Add", np.asarray(a["first"])), *steps]
        a |= {"step": 1, "first": np.zeros_like(scale)}
    a |= {"scale": np.ones_like(scale), "bias": np.zeros_like(bias)}
    layer.inputs[0] = numbered[layer.inputs[0]][0]
    shape = graph.types[out].shape
    total, name = graph.fresh(f"{out}.total"), graph.fresh(f"{out}.wide")
    graph.types[total], graph.types[name] = TensorType(shape, "float32"), graph.types[out]
    layer.outputs = [total]
    nodes = [layer, Node("Cast", [total], [name], {"to": TensorProto.DOUBLE}, layer.name)]
    column = channel_shape(len(shape))
    for op, value in steps:
        if (value == (op == "Mul")).all():
            continue
        constant = graph.constant(value.reshape(column).astype(np.float64), f"{out}.{op}")
        after = graph.fresh(f"{out}.wide")
        graph.types[after] = graph.types[out]
        nodes.append(Node(op, [name, constant], [after], {}, layer.name))
        name = after
    nodes[-1].outputs = [out]
    return [*nodes, *rest]
