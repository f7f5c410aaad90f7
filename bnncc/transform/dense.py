"""Normalize dense layers to Gemm(data, constant (inputs, units), constant (units,))."""

from __future__ import annotations

import numpy as np

from bnncc.ir.graph import Graph, Node
from bnncc.transform.rewrite import Result, Walk, walk


def computed_bias(node: Node, state: Walk) -> Result:
    """Turn a computed bias of a convolution into an Add: kernels need constant biases."""
    graph = state.graph
    bias = node.input(2)
    if not bias or state.value(bias) is not None:
        return None
    spatial = len(graph.types[node.outputs[0]].shape) - 2
    shape = graph.constant(np.array([1, -1] + [1] * spatial, np.int64), f"{node.name}.shape")
    column, out = graph.fresh(f"{node.name}.column"), graph.fresh(f"{node.name}.product")
    return [
        Node("Reshape", [bias, shape], [column], {"allowzero": 0}, f"{node.name}.reshape"),
        Node(node.op, node.inputs[:2], [out], node.attrs, node.name, node.covers),
        Node("Add", [out, column], node.outputs, {}, f"{node.name}.bias"),
    ]


def gemm(node: Node, state: Walk) -> Result:
    """Fold the transposes, alpha and beta of a Gemm: Gemm(a, constant (K, N), constant (N,))."""
    graph, attrs = state.graph, node.attrs
    alpha, beta = attrs["alpha"], attrs["beta"]
    a, b = node.inputs[0], node.inputs[1]
    c = node.input(2)
    weight, bias = state.value(b), state.value(c) if c else None
    units = graph.types[node.outputs[0]].shape[1]
    settled = not c or (bias is not None and bias.shape == (units,))
    turned_weight = weight is not None and attrs["transB"]
    if alpha == beta == 1 and not attrs["transA"] and settled and not turned_weight:
        return None
    pieces: list[Node] = []
    if attrs["transA"]:
        turned = graph.fresh(f"{node.name}.transposed")
        pieces.append(Node("Transpose", [a], [turned], {"perm": [1, 0]}, f"{node.name}.transpose"))
        a = turned
    trans = attrs["transB"]
    if weight is not None:
        scaled = weight.T if trans else weight
        trans = 0
        exact = scaled.astype(np.float64) * alpha
        if np.array_equal(exact.astype(weight.dtype), exact):
            scaled, alpha = exact.astype(weight.dtype), 1.0
        b = graph.constant(np.ascontiguousarray(scaled), f"{node.name}.weight")
    if bias is not None:
        bias = (bias.astype(np.float64) * beta).astype(bias.dtype)
        beta = 1.0
        if isinstance(units, int) and (bias.ndim < 2 or bias.shape[0] == 1):
            bias = np.broadcast_to(bias.reshape(-1), (units,)).copy()
        c = graph.constant(bias, f"{node.name}.bias")
    plain = alpha == 1 and beta == 1 and (not c or (bias is not None and bias.ndim == 1))
    base = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": trans}
    if plain:
        inputs = [a, b, c] if c else [a, b]
        pieces.append(Node("Gemm", inputs, node.outputs, base, node.name, node.covers))
        return pieces
    out = graph.fresh(f"{node.name}.product")
    pieces.append(Node("Gemm", [a, b], [out], base, node.name, node.covers))
    dtype = graph.types[node.outputs[0]].dtype

    def times(name: str, factor: float) -> str:
        if factor == 1:
            return name
        scale = graph.constant(np.asarray(factor, dtype), f"{node.name}.scale")
        made = graph.fresh(f"{node.name}.scaled")
        pieces.append(Node("Mul", [name, scale], [made], {}, f"{node.name}.scale"))
        return made

    out = times(out, alpha)
    if c:
        bias_name = times(c, beta)
        pieces.append(Node("Add", [out, bias_name], node.outputs, {}, f"{node.name}.bias"))
    else:
        pieces[-1].outputs = list(node.outputs)
    return pieces


def dense_bias(graph: Graph) -> bool:
    """Turn a MatMul by a constant matrix, and the Add of a constant after it, into a Gemm."""
    readers = graph.consumers()

    def rule(node: Node, state: Walk) -> Result:
        if node.op != "Add":
            return None
        for side in (0, 1):
            product = state.producer(node.inputs[side], "MatMul")
            bias = state.value(node.inputs[1 - side])
            if product is None or bias is None or product.outputs[0] in graph.outputs:
                continue
            weight, a = state.value(product.inputs[1]), product.inputs[0]
            if weight is None or weight.ndim != 2 or len(graph.types[a].shape) != 2:
                continue
            if len(readers.get(product.outputs[0], [])) != 1 or bias.size not in (
                1,
                weight.shape[1],
            ):
                continue
            if bias.size > 1 and bias.shape[-1] != bias.size:
                continue
            full = np.broadcast_to(bias.reshape(-1), (weight.shape[1],)).copy()
            c = graph.constant(full, f"{node.name}.bias")
            attrs = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0}
            inputs = [a, product.inputs[1], c]
            return [Node("Gemm", inputs, node.outputs, attrs, product.name, product.covers)]
        return None

    return walk(graph, rule)
