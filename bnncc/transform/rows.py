"""Work on rows: batches of matrices as one tall matrix.

    before: s = bnncc.Sign(x); y = MatMul(s, W)                  x: [N, T, K], W constant [K, O]
    after:  r = Reshape(x); t = bnncc.Sign(r); u = MatMul(t, W); y = Reshape(u)      r: [N*T, K]

Kernels work on images and on rows. A matrix product with constant weights and a decision, `Sign` or
`Levels`, do the same to every row, however many axes lead to it. What has four axes counts as an
image, unless such products alone read it.
"""

from __future__ import annotations

from bnncc.ir.dims import product
from bnncc.ir.graph import Graph, Node, TensorType
from bnncc.ir.pieces import view
from bnncc.ir.quantizers import LEVELS
from bnncc.recognise.lattice import decided_as_rows


def flatten_rows(graph: Graph) -> None:
    """Rewrite decisions and constant matrix products on tensors of more (or fewer) than two axes.

    Runs after `recognise_signs` and `recognise_quantizers`.
    """
    rows: dict[str, str] = {}
    consumers = graph.consumers()
    nodes: list[Node] = []

    def flat(name: str) -> str:
        if name not in rows:
            kind = graph.types[name]
            shape = (product(kind.shape[:-1]), kind.shape[-1])
            rows[name] = graph.fresh(f"{name}.rows")
            nodes.append(view(graph, name, rows[name], TensorType(shape, kind.dtype)))
        return rows[name]

    for node in graph.nodes:
        nodes.append(node)
        if not _applies(node, graph, consumers):
            continue
        kind = graph.types[node.outputs[0]]
        nodes.pop()
        data = flat(node.inputs[0])
        out = node.outputs[0]
        tall = graph.fresh(f"{out}.rows")
        graph.types[tall] = TensorType((graph.types[data].shape[0], kind.shape[-1]), kind.dtype)
        nodes.append(
            Node(node.op, [data, *node.inputs[1:]], [tall], node.attrs, node.name, node.covers)
        )
        rows[out] = tall
        nodes.append(view(graph, tall, out, kind))
    graph.nodes = nodes
    graph.prune()


def _applies(node: Node, graph: Graph, consumers: dict[str, list[Node]]) -> bool:
    kind = graph.types[node.inputs[0]]
    if node.op == "MatMul":
        weight = graph.constants.get(node.inputs[1])
        known = weight is not None and weight.ndim == 2 and node.inputs[0] not in graph.constants
        return known and len(kind.shape) >= 3 and isinstance(kind.shape[-1], int)
    if node.op not in ("bnncc.Sign", LEVELS) or not decided_as_rows(kind):
        return False
    if node.op == LEVELS and node.attrs["thresholds"].ndim > 1:
        return False  # the second axis is that of channels
    if len(kind.shape) != 4:
        return len(kind.shape) != 2
    readers, out = consumers.get(node.outputs[0], []), node.outputs[0]
    by_rows = all(r.op == "MatMul" and _applies(r, graph, consumers) for r in readers)
    return bool(readers) and by_rows and out not in graph.outputs
