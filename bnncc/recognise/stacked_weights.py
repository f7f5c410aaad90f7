"""Write products by several matrices of weights as products by one matrix each.

    before: y = MatMul(q, W)                  q: [N, G, T, K], W constant [G, K, O]
    after:  q1, q2, ... = Slice(q); y = Concat(MatMul(q1, W1), MatMul(q2, W2), ...)

    before: y = MatMul(q, W)                  q: [N, 1, T, K]
    after:  u = MatMul(q, V); y = Transpose(Reshape(u))         V: [K, G * O]; u: [N, 1, T, G * O]

Experts that are computed side by side, and layers with a matrix for each head or group, store their
weights like this. Kernels for bits and few bits multiply by one matrix.
"""

from __future__ import annotations

import numpy as np

from bnncc.ir.graph import Graph, Node, TensorType
from bnncc.ir.pieces import view
from bnncc.recognise.few_values import few_values
from bnncc.recognise.filters import few_bit_weights, two_valued_filters
from bnncc.recognise.lattice import lattices
from bnncc.recognise.row_scales import PART, levels_behind_scales

MAX_MATRICES = 64
"""Maximum number of products; each is a kernel."""


def unstack_weights(graph: Graph) -> None:
    """Split products by several matrices if weights and data are of few bits.

    Parameters
    ----------
    graph : Graph
        After `recognise_signs` and `recognise_quantizers`; modified in place.
    """
    if not any(_weights(node, graph) is not None for node in graph.nodes):
        return
    held, producers = lattices(graph), graph.producers()
    few = {*held, *few_values(graph)}

    def replaced(node: Node) -> list[Node] | None:
        weight = _weights(node, graph)
        if weight is None:
            return None
        data = node.inputs[0]
        last = len(graph.types[data].shape) - 1
        if data not in few and levels_behind_scales(data, last, graph, held, producers) not in held:
            return None
        filters = weight.swapaxes(-1, -2).reshape(-1, weight.shape[-2])
        if few_bit_weights(filters) is None and two_valued_filters(filters) is None:
            return None
        kind = graph.types[node.outputs[0]]
        graph.in_file.setdefault(
            node.name, (node.op, kind.shape, graph.types[node.inputs[1]].shape)
        )
        shape = graph.types[data].shape
        if len(shape) < 3 or shape[-3] == 1:
            return _side_by_side(node, graph, weight)
        return _one_by_one(node, graph, weight)

    graph.replace(replaced)


def _weights(node: Node, graph: Graph) -> np.ndarray | None:
    """Return the weights of a product by several matrices, [matrices, channels, units]."""
    weight = graph.constants.get(node.inputs[1]) if node.op == "MatMul" else None
    if weight is None or weight.ndim < 3 or node.inputs[0] in graph.constants:
        return None
    count, shape = weight.shape[-3], graph.types[node.inputs[0]].shape
    whole = weight.size == np.prod(weight.shape[-3:]) and len(shape) >= 2
    if not whole or not 1 < count <= MAX_MATRICES or shape[-3:-2] not in ((), (1,), (count,)):
        return None
    return weight.reshape(weight.shape[-3:])


def _side_by_side(node: Node, graph: Graph, weight: np.ndarray) -> list[Node]:
    """Multiply the same data by all matrices: by a wide one."""
    count, channels, units = weight.shape
    (out,), kind = node.outputs, graph.types[node.outputs[0]]
    shape = graph.types[node.inputs[0]].shape
    wide = graph.constant(weight.transpose(1, 0, 2).reshape(channels, -1), node.inputs[1])
    made, apart, turned = (graph.fresh(f"{out}.{k}") for k in ("wide", "apart", "turned"))
    graph.types[made] = TensorType((*shape[:-1], count * units), kind.dtype)
    outer = shape[:-3]
    rank = len(outer) + 3
    perm = [*range(rank - 3), rank - 2, rank - 3, rank - 1]
    split = TensorType((*outer, shape[-2], count, units), kind.dtype)
    graph.types[turned] = TensorType((*outer, count, shape[-2], units), kind.dtype)
    return [
        Node("MatMul", [node.inputs[0], wide], [made], {}, node.name, node.covers),
        view(graph, made, apart, split),
        Node("Transpose", [apart], [turned], {"perm": perm}, f"{node.name}.transpose"),
        view(graph, turned, out, kind),
    ]


def _one_by_one(node: Node, graph: Graph, weight: np.ndarray) -> list[Node]:
    """Multiply each part of the data by its matrix."""
    (out,), kind = node.outputs, graph.types[node.outputs[0]]
    data, nodes, results = graph.types[node.inputs[0]], [], []
    axis = len(data.shape) - 3
    for k, matrix in enumerate(weight):
        part, limits = graph.fresh(f"{node.inputs[0]}.part"), []
        for number in (k, k + 1, axis):
            limits.append(graph.constant(np.array([number], np.int64), f"{node.name}.part"))
        nodes.append(Node("Slice", [node.inputs[0], *limits], [part], {}, node.name))
        made = graph.fresh(f"{out}.part")
        graph.types[part] = TensorType((*data.shape[:axis], 1, *data.shape[-2:]), data.dtype)
        shape = (*data.shape[:axis], 1, data.shape[-2], weight.shape[-1])
        graph.types[made] = TensorType(shape, kind.dtype)
        attrs = {PART: True} if k else {}
        held = graph.constant(matrix, node.inputs[1])
        nodes.append(Node("MatMul", [part, held], [made], attrs, node.name, node.covers))
        results.append(made)
    shape = (*data.shape[:axis], len(weight), data.shape[-2], weight.shape[-1])
    if shape == kind.shape:
        return [*nodes, Node("Concat", results, [out], {"axis": axis}, node.name)]
    joined = graph.fresh(f"{out}.joined")
    graph.types[joined] = TensorType(shape, kind.dtype)
    nodes.append(Node("Concat", results, [joined], {"axis": axis}, node.name))
    return [*nodes, view(graph, joined, out, kind)]
