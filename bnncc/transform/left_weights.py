"""Rewrite products of weights by data as products of rows by weights, for bits and levels.

before: s = bnncc.Sign(x); y = MatMul(W, s)                       x: [N, K, T], W constant [O, K]
after:  t = Transpose(s); u = MatMul(t, W.T); y = Transpose(u)    t: [N, T, K]

before: y = MatMul(W, x)                                      x: [K], W constant [O, K]
after:  y = MatMul(x, W.T)

before: y = MatMul(x, W)                                      W constant [1, K, O]
after:  y = MatMul(x, V)                                      V constant [K, O]
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bnncc.ir.graph import Graph, Node, TensorType
from bnncc.ir.quantizers import LEVELS
from bnncc.recognise.few_values import few_values
from bnncc.recognise.filters import few_bit_weights, two_valued_filters
from bnncc.recognise.lattice import lattices
from bnncc.recognise.row_scales import levels_behind_scales
from bnncc.transform.layout import push_down
from bnncc.transform.rewrite import Result, Walk, settle_outputs, walk
from bnncc.transform.simplify import transpose

Array = np.ndarray[Any, Any]


def turn_left_weights(graph: Graph) -> None:
    """Move few-valued weights from the left operand to the right, where layers expect them.

    Runs after `recognise_signs` and `recognise_quantizers`.
    """
    held = lattices(graph)
    few = {*held, *few_values(graph)}
    producers = graph.producers()
    for node in graph.nodes:  # levels times a scale of rows, which follows the product
        if node.op == "MatMul" and node.inputs[0] in graph.constants:
            data = node.inputs[1]
            axis = max(len(graph.types[data].shape) - 2, 0)
            if levels_behind_scales(data, axis, graph, held, producers) in held:
                few.add(data)

    def rule(node: Node, state: Walk) -> Result:
        if node.op == "Transpose":
            return transpose(node, state)
        if node.op != "MatMul":
            return None
        left, right = node.inputs
        if state.value(left) is None:
            return _of_one(node, state)
        return _turned(node, state) if right in few else None

    if any(n.op == "MatMul" and any(i in graph.constants for i in n.inputs) for n in graph.nodes):
        walk(graph, rule)
        push_down(graph)
        walk(graph, lambda n, state: transpose(n, state) if n.op == "Transpose" else None)
        settle_outputs(graph)
        graph.prune()


def _matrix(name: str, graph: Graph) -> Array | None:
    """Return a constant as a matrix, if it is one or a batch of one."""
    weight = graph.constants.get(name)
    if weight is None or weight.ndim < 2 or weight.size != np.prod(weight.shape[-2:]):
        return None
    return weight.reshape(weight.shape[-2:])


def _of_one(node: Node, state: Walk) -> Result:
    """Remove leading axes of size 1 from a weight matrix."""
    (data, name), graph = node.inputs, state.graph
    weight = _matrix(name, graph)
    if weight is None or graph.constants[name].ndim == 2 or len(graph.types[data].shape) < 2:
        return None
    made, nodes = _raised(node, graph, graph.constants[name].ndim - len(graph.types[data].shape))
    inputs = [data, graph.constant(weight, name)]
    return [Node("MatMul", inputs, [made], {}, node.name, node.covers), *nodes]


def _raised(node: Node, graph: Graph, missing: int) -> tuple[str, list[Node]]:
    """Return the name to compute, and the nodes that restore its missing leading axes."""
    out = node.outputs[0]
    if missing <= 0:
        return out, []
    made = graph.fresh(f"{out}.matrix")
    axes = graph.constant(np.arange(missing), f"{node.name}.axes")
    return made, [Node("Unsqueeze", [made, axes], [out], {}, f"{node.name}.unsqueeze")]


def _turned(node: Node, state: Walk) -> Result:
    graph, (name, data) = state.graph, node.inputs
    weight, shape = _matrix(name, graph), graph.types[data].shape
    if weight is None or not shape:
        return None
    if two_valued_filters(weight) is None and few_bit_weights(weight) is None:
        return None
    given = graph.constants[name].shape
    if len(shape) == 1 and len(given) > 2:
        return None
    graph.in_file.setdefault(node.name, (node.op, graph.types[node.outputs[0]].shape, given))
    turned = graph.constant(np.ascontiguousarray(weight.T), name)
    if len(shape) == 1:  # a vector is a row and a column
        return [Node("MatMul", [data, turned], [node.outputs[0]], {}, node.name, node.covers)]
    perm = {"perm": [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]}
    out, last = _raised(node, graph, len(given) - len(shape))
    rows, made = graph.fresh(f"{data}.turned"), graph.fresh(f"{out}.turned")
    nodes = [Node("Transpose", [data], [rows], perm, f"{node.name}.data")]
    decided = state.producer(data, "bnncc.Sign", LEVELS)
    by_channel = decided is not None and np.ndim(decided.attrs.get("thresholds", 0)) > 1
    if decided is not None and len(decided.inputs) == 1 and not by_channel:  # pack once, as rows
        (source,) = decided.inputs
        before = graph.fresh(f"{source}.turned")
        kind = tuple(shape[k] for k in perm["perm"]), graph.types[data].dtype
        graph.types[rows] = TensorType(*kind)
        nodes = [
            Node("Transpose", [source], [before], perm, f"{node.name}.data"),
            Node(decided.op, [before], [rows], dict(decided.attrs), decided.name),
        ]
    return [
        *nodes,
        Node("MatMul", [rows, turned], [made], {}, node.name, node.covers),
        Node("Transpose", [made], [out], perm, f"{node.name}.transpose"),
        *last,
    ]  # fmt: skip
