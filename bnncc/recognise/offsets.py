"""Split weights of two values with different magnitudes into signs and a sum of the data.

    before: y = Conv(x, W)                       W[o] = m[o] + d[o] * {-1, +1}
    after:  u = Conv(x, d[o] * {-1, +1}); s = Conv(x, 1); y = Add(u, Mul(s, m))

The second convolution has one filter; both are binary if the data are bits.
"""

from __future__ import annotations

import numpy as np

from bnncc.ir.dims import channel_shape
from bnncc.ir.graph import Graph, Node, TensorType
from bnncc.recognise.few_values import few_values
from bnncc.recognise.filters import binary_weight, few_bit_weights, two_valued_filters
from bnncc.recognise.lattice import evenly, lattices
from bnncc.recognise.operands import filters_of, flattened_source, padded_source
from bnncc.recognise.row_scales import PART

Array = np.ndarray


def split_offsets(graph: Graph) -> None:
    """Split layers whose filters take two values each, unless they are signs or small integers.

    Runs before `binarize`.
    """
    held = set(lattices(graph))
    for name, values in few_values(graph).items():
        if graph.types[name].dtype == "float64" and evenly(values) is not None:
            held.add(name)
    producers = graph.producers()
    graph.replace(lambda node: _split(node, graph, producers, held))


def _split(
    node: Node, graph: Graph, producers: dict[str, Node], held: set[str]
) -> list[Node] | None:
    if node.op not in ("Conv", "Gemm", "MatMul"):
        return None
    weight, kind = graph.constants.get(node.inputs[1]), graph.types[node.outputs[0]]
    if weight is None or kind.dtype not in ("float32", "float64") or weight.ndim < 2:
        return None
    if not (held & _sources(node, graph, producers)):
        return None
    filters = filters_of(node, weight)
    if isinstance(filters, tuple) or int(node.attrs.get("group", 1)) > 1:
        return None
    if two_valued_filters(filters[:1]) is None:
        return None
    if binary_weight(filters) is not None or few_bit_weights(filters) is not None:
        return None
    found = two_valued_filters(filters)
    if found is None:
        return None
    bits, half, middle = found
    column = (-1,) + (1,) * (filters.ndim - 1)
    signs = np.where(bits, 1.0, -1.0) * half.reshape(column)
    turned = node.op == "MatMul" or (node.op == "Gemm" and not node.attrs.get("transB"))

    def stored(values: Array, what: str) -> str:
        value = values.astype(kind.dtype)
        return graph.constant(np.ascontiguousarray(value.T if turned else value), what)

    (out,) = node.outputs
    inner, total, shifted = (graph.fresh(f"{out}.{k}") for k in ("signs", "sum", "shift"))
    graph.types[inner] = graph.types[shifted] = kind
    graph.types[total] = TensorType((kind.shape[0], 1, *kind.shape[2:]), kind.dtype)
    rest = channel_shape(len(kind.shape))
    factor = graph.constant(middle.reshape(rest).astype(kind.dtype), f"{node.name}.middle")
    ones = stored(np.ones((1, *filters.shape[1:])), f"{node.name}.ones")
    attrs = {k: v for k, v in node.attrs.items() if k != "beta"}
    first = [node.inputs[0], stored(signs, f"{node.name}.signs"), *node.inputs[2:]]
    data, name = node.inputs[0], node.name
    return [
        Node(node.op, first, [inner], dict(node.attrs), name, node.covers),
        Node(node.op, [data, ones], [total], {**attrs, PART: True}, name, node.covers),
        Node("Mul", [total, factor], [shifted], {}, name),
        Node("Add", [inner, shifted], [out], {}, name),
    ]


def _sources(node: Node, graph: Graph, producers: dict[str, Node]) -> set[str]:
    """Return the tensors that may represent the data of a layer."""
    if node.op == "Conv":
        if len(graph.types[node.inputs[0]].shape) != 4:
            return set()
        return {node.inputs[0], padded_source(node, graph, producers)[0]}
    flat = flattened_source(node.inputs[0], graph, producers)
    return {node.inputs[0]} | ({flat[0]} if flat else set())
