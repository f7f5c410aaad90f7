"""Write what no kernel took of our own operators in ONNX's, or leave it out.

    before: y = bnncc.Quant(x, s, z, bits)    after: y = (Round(Clip(x / s + z)) - z) * s
    before: y = bnncc.MultiThreshold(x, T)    after: y = a * ReduceSum(Cast(x[..., None] >= T)) + b
    before: m = Mul(x, s); y = bnncc.Round(m)  after: y = Mul(x, s)

Operator for operator this is what `bnncc.ir.quantizers` evaluates, so it is exact, in float32;
without its rounding to half precision a number is as near to that as the type can say.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from bnncc.ir.graph import Graph, Node
from bnncc.ir.halves import ROUND, rounds_integer_sums
from bnncc.ir.infer import infer_into
from bnncc.ir.pieces import Pieces
from bnncc.ir.quantizers import MULTI_THRESHOLD, QUANT, integer_range
from bnncc.ir.rounding import rounded


def write_plain(graph: Graph) -> None:
    """Replace internal quantisers of `graph` in place; drop roundings that decide on no integers.

    Sums of floats have no one way to be rounded: they are computed in float32, which is nearer to
    what the model means. Where a decision on an exact sum depends on a rounding, it stays.
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
        for piece in rule(node, graph, Pieces(node, graph)):
            infer_into(piece, graph)
            nodes.append(piece)
    graph.nodes = nodes
    if same:
        graph.prune()


def _quant(node: Node, graph: Graph, make: Pieces) -> Iterator[Node]:
    x, scale, zero, width = node.inputs
    shift, out = bool(graph.constants[zero].any()), node.outputs[0]
    scaled, level, limited, whole, back = (
        make.tensor(k) for k in ("scaled", "level", "limited", "whole", "back")
    )
    yield make("Div", [x, scale], scaled)
    if shift:
        yield make("Add", [scaled, zero], level)
        scaled = level
    bits, signed = float(graph.constants[width].reshape(-1)[0]), bool(node.attrs["signed"])
    if bits == 1 and signed:
        yield make("GreaterOrEqual", [scaled, make.constant(0)], limited)
        yield make("Where", [limited, make.constant(1), make.constant(-1)], whole)
    else:
        limits = integer_range(bits, signed=signed, narrow=bool(node.attrs["narrow"]))
        yield make("Clip", [scaled, *map(make.constant, limits)], limited)
        yield from rounded(make, node.attrs["rounding_mode"], limited, whole)
    if shift:
        yield make("Sub", [whole, zero], back)
        whole = back
    yield make("Mul", [whole, scale], out)


def _multi_threshold(node: Node, graph: Graph, make: Pieces) -> Iterator[Node]:
    x, name = node.inputs
    table, rank = graph.constants[name], len(graph.types[x].shape)
    last = graph.constant(np.array([-1], np.int64), f"{node.name}.axes")
    spread, reached, ones, count, scaled = (
        make.tensor(k) for k in ("spread", "reached", "ones", "count", "scaled")
    )
    column = make.constant(table.reshape(-1, *(1,) * (rank - 2), table.shape[1]))
    yield make("Unsqueeze", [x, last], spread)
    yield make("GreaterOrEqual", [spread, column], reached)
    yield make("Cast", [reached], ones, {"to": 1})
    yield make("ReduceSum", [ones, last], count, {"keepdims": 0})
    scale, bias = node.attrs["out_scale"], node.attrs["out_bias"]
    yield make("Mul", [count, make.constant(scale)], scaled)
    yield make("Add", [scaled, make.constant(bias)], node.outputs[0])


_RULES = {QUANT: _quant, MULTI_THRESHOLD: _multi_threshold}
