"""Replace internal operators that no kernel computes by ONNX operators, or drop them.

    before: y = bnncc.Quant(x, s, z, bits)    after: y = (Round(Clip(x / s + z)) - z) * s
    before: y = bnncc.MultiThreshold(x, T)    after: y = a * ReduceSum(Cast(x[..., None] >= T)) + b
    before: m = Mul(x, s); y = bnncc.Round(m)  after: y = Mul(x, s)

The ONNX operators compute what `bnncc.ir.quantizers` evaluates, so the rewrite is exact in float32.
A dropped rounding to half precision only makes the result more accurate.
"""

from __future__ import annotations

from bnncc.ir.graph import Graph, Node
from bnncc.ir.halves import ROUND, rounds_integer_sums
from bnncc.ir.infer import infer_into
from bnncc.ir.pieces import Expression
from bnncc.ir.quantizers import MULTI_THRESHOLD, QUANT, integer_range, rounded


def write_plain(graph: Graph) -> None:
    """Replace internal quantizers of `graph` in place; drop roundings that affect no integers.

    The rounding of a float sum depends on its order, so such sums stay in float32, which is closer
    to what the model means. A rounding stays if a decision on an exact sum depends on it.
    """
    nodes: list[Node] = []
    producers = graph.producers()
    same: dict[str, str] = {}
    for node in graph.nodes:
        node.inputs = [same.get(i, i) for i in node.inputs]
        if node.op == ROUND and not rounds_integer_sums(node, graph, producers):
            if node.outputs[0] not in graph.outputs:
                same[node.outputs[0]] = node.inputs[0]
                continue
            node.op, node.attrs = "Identity", {}
        rule = _RULES.get(node.op)
        if rule is None:
            nodes.append(node)
            continue
        write = Expression(node, graph)
        for piece in write.result(rule(write)):
            infer_into(piece, graph)
            nodes.append(piece)
    graph.nodes = nodes
    if same:
        graph.prune()


def _quant(write: Expression) -> str:
    x, scale, zero, width = write.node.inputs
    a, constants = write.node.attrs, write.graph.constants
    shift = bool(constants[zero].any())
    level = write("Div", x, scale)
    if shift:
        level = write("Add", level, zero)
    bits, signed = float(constants[width].reshape(-1)[0]), bool(a["signed"])
    if bits == 1 and signed:
        positive = write("GreaterOrEqual", level, write.constant(0))
        whole = write("Where", positive, write.constant(1), write.constant(-1))
    else:
        limits = integer_range(bits, signed=signed, narrow=bool(a["narrow"]))
        limited = write("Clip", level, *map(write.constant, limits))
        whole = rounded(write, a["rounding_mode"], limited)
    return write("Mul", write("Sub", whole, zero) if shift else whole, scale)


def _multi_threshold(write: Expression) -> str:
    (x, name), a = write.node.inputs, write.node.attrs
    table, rank = write.graph.constants[name], len(write.type().shape)
    column = write.constant(table.reshape(-1, *(1,) * (rank - 2), table.shape[1]))
    reached = write("GreaterOrEqual", write.unsqueeze(x, -1), column)
    count = write("ReduceSum", write.cast(reached, "float32"), write.ints(-1), keepdims=0)
    scaled = write("Mul", count, write.constant(a["out_scale"]))
    return write("Add", scaled, write.constant(a["out_bias"]))


_RULES = {QUANT: _quant, MULTI_THRESHOLD: _multi_threshold}
