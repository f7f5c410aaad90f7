"""Flatten batches of matrices to one matrix of rows.

    before: s = bnncc.Sign(x); y = MatMul(s, W)                  x: [N, T, K], W constant [K, O]
    after:  r = Reshape(x); t = bnncc.Sign(r); u = MatMul(t, W); y = Reshape(u)      r: [N*T, K]

    before: y = MatMul(s, W); z = Div(y, r)                      r: [N, T, 1]
    after:  u = MatMul(t, W); v = Div(u, Reshape(r)); z = Reshape(v)

Kernels work on images and on rows. A matrix product with constant weights, and a decision (`Sign`
or `Levels`), treat every row alike, however many leading axes there are; a vector is one row. So do
arithmetic operators next to them whose other operand has the same shape, or one number per row or
per channel. A tensor of rank 4 counts as an image unless only such products read it.
"""

from __future__ import annotations

from bnncc.ir.dims import product
from bnncc.ir.graph import Graph, Node, TensorType
from bnncc.ir.pieces import view
from bnncc.ir.quantizers import LEVELS
from bnncc.recognise.lattice import decided_as_rows


def flatten_rows(graph: Graph) -> None:
    """Flatten decisions and products by constant matrices on tensors whose rank is not 2.

    Runs after `recognise_signs` and `recognise_quantizers`.
    """
    rows: dict[str, str] = {}
    views: dict[str, Node] = {}
    consumers = graph.consumers()
    nodes: list[Node] = []

    def flat(name: str) -> str:
        if name not in rows:
            kind = graph.types[name]
            shape = (product(kind.shape[:-1]), kind.shape[-1])
            rows[name] = graph.fresh(f"{name}.rows")
            views[name] = view(graph, name, rows[name], TensorType(shape, kind.dtype))
        return rows[name]

    for node in graph.nodes:
        nodes.append(node)
        beside = _beside(node, graph, consumers, rows)
        if not beside and not _applies(node, graph, consumers):
            continue
        kind = graph.types[node.outputs[0]]
        if node.op == "MatMul":
            shape = graph.types[node.inputs[1]].shape
            graph.in_file.setdefault(node.name, (node.op, kind.shape, shape))
        nodes.pop()
        if beside:  # a constant may come first
            inputs = [_turned(i, graph) if i in graph.constants else flat(i) for i in node.inputs]
        else:
            inputs = [flat(node.inputs[0]), *node.inputs[1:]]
        out = node.outputs[0]
        tall = graph.fresh(f"{out}.rows")
        graph.types[tall] = TensorType((product(kind.shape[:-1]), kind.shape[-1]), kind.dtype)
        nodes.append(Node(node.op, inputs, [tall], node.attrs, node.name, node.covers))
        rows[out] = tall
        nodes.append(view(graph, tall, out, kind))
    # Kernels can fuse operators whose other operand is computed before them.
    seen = [views[i] for i in graph.inputs if i in views]
    for node in nodes:
        seen += [node, *(views[o] for o in node.outputs if o in views)]
    graph.nodes = seen
    graph.prune()


def _applies(node: Node, graph: Graph, consumers: dict[str, list[Node]]) -> bool:
    kind = graph.types[node.inputs[0]]
    if node.op == "MatMul":
        weight = graph.constants.get(node.inputs[1])
        known = weight is not None and weight.ndim == 2 and node.inputs[0] not in graph.constants
        return known and len(kind.shape) != 2 and isinstance(kind.shape[-1], int)
    if node.op not in ("bnncc.Sign", LEVELS) or not decided_as_rows(kind):
        return False
    if node.op == LEVELS and node.attrs["thresholds"].ndim > 1:
        return False  # axis 1 is the channels
    if len(kind.shape) != 4:
        return len(kind.shape) != 2
    readers, out = consumers.get(node.outputs[0], []), node.outputs[0]
    by_rows = all(r.op == "MatMul" and _applies(r, graph, consumers) for r in readers)
    return bool(readers) and by_rows and out not in graph.outputs


def _beside(
    node: Node, graph: Graph, consumers: dict[str, list[Node]], rows: dict[str, str]
) -> bool:
    """Whether an operator on elements adjoins a product before it, or a decision after it."""
    kind = graph.types[node.outputs[0]]
    if (
        node.op not in ("Add", "Sub", "Mul", "Div", "Sigmoid")
        or len(kind.shape) < 3
        or kind.dtype != "float32"
    ):
        return False
    *outer, channels = kind.shape
    for name in node.inputs:
        shape = graph.types[name].shape
        if name in graph.constants:
            of_channels = not shape or max(shape[:-1], default=1) == 1 == min(shape[:-1], default=1)
            if not of_channels or len(shape) > len(kind.shape):
                return False
        elif shape not in (kind.shape, (*outer, 1)):
            return False
    readers = consumers.get(node.outputs[0], [])
    decides = bool(readers) and all(
        r.op in ("bnncc.Sign", LEVELS) and _applies(r, graph, consumers) for r in readers
    )
    return channels != 1 and (decides or any(i in rows for i in node.inputs))


def _turned(name: str, graph: Graph) -> str:
    """Return a constant per channel, or a scalar, in the shape that broadcasts with rows."""
    value = graph.constants[name]
    return name if value.ndim < 3 else graph.constant(value.reshape(1, -1), name)
