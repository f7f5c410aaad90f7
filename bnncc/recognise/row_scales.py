"""Move per-row scales and zero points across the products that read them.

    before: d = Div(q, s); y = MatMul(d, W)            q levels, s one number for each row
    after:  t = MatMul(q, W); y = Div(t, s)

    before: d = Sub(q, z); y = MatMul(d, W)            z one number for each row
    after:  t = MatMul(q, V); u = Sub(t, Mul(z, sum(V))); y = Mul(u, scale)     W = V * scale

Dynamically quantized activations look like this: a scale depends on the data of a row. With levels
and integer weights the sums are exact; the model's own operators follow in their order. A model
that divides first sums rounded quotients; that sum is taken to be the one of the integers, as
everywhere if operands are multiples of a scale (docs/semantics.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bnncc.ir.graph import Graph, Node
from bnncc.ir.infer import infer_into
from bnncc.ir.magnitude import EXACT_BELOW
from bnncc.ir.pieces import Expression
from bnncc.recognise.filters import Weights, few_bit_weights
from bnncc.recognise.lattice import Lattice, as_multiples, lattices
from bnncc.recognise.operands import filters_of

MOVED = "bnncc.moved"
"""Attribute of a product whose rows had scales or zero points: a note for the report."""


def move_row_scales(graph: Graph) -> None:
    """Let products read levels, and apply scales and zero points of rows to their sums.

    Parameters
    ----------
    graph : Graph
        After `recognise_quantizers` and before `flatten_rows`; modified in place.
    """
    held, producers = lattices(graph), graph.producers()
    nodes: list[Node] = []
    for node in graph.nodes:
        nodes += _moved(node, graph, held, producers) or [node]
    graph.nodes = nodes
    graph.prune()


def _moved(
    node: Node, graph: Graph, held: dict[str, Lattice], producers: dict[str, Node]
) -> list[Node] | None:
    weight = graph.constants.get(node.inputs[1]) if node.op in ("Gemm", "MatMul") else None
    if weight is None or node.inputs[0] in held or weight.ndim != 2:
        return None
    name, steps = _chain(node.inputs[0], graph, held, producers)
    filters = filters_of(node, weight)
    if name not in held or isinstance(filters, tuple):
        return None
    found = few_bit_weights(filters)
    if found is None or graph.types[name].dtype != graph.types[node.outputs[0]].dtype:
        return None
    offsets = any(step.op in ("Add", "Sub") for step, _ in steps)
    made = _written(node, graph, name, steps, filters, found if offsets else None)
    made[0].attrs[MOVED] = _said(held[name], found, steps)
    return made


def _chain(
    name: str, graph: Graph, held: dict[str, Lattice], producers: dict[str, Node]
) -> tuple[str, list[tuple[Node, int]]]:
    """Return the levels that a tensor is computed from, and the steps: node and operand index."""
    steps: list[tuple[Node, int]] = []
    while name not in held:
        node = producers.get(name)
        places = [] if node is None else _of_rows(node, graph)
        if node is None or not places:
            break
        place = next((k for k in places if node.inputs[k] in held), places[0])
        steps.insert(0, (node, place))
        name = node.inputs[place]
    return name, steps


def _of_rows(node: Node, graph: Graph) -> list[int]:
    """Return the operands of a node that may be data: those whose other operand is one per row.

    Both are, if rows have one element.
    """
    if node.op not in ("Mul", "Div", "Add", "Sub"):
        return []
    kinds = [graph.types[i] for i in node.inputs]
    return [
        place
        for place, kind in enumerate(kinds)
        if kind == graph.types[node.outputs[0]]
        and kinds[1 - place].shape[-1:] in ((), (1,))
        and not (node.op == "Div" and place)
    ]


def _written(
    node: Node, graph: Graph, name: str, steps: Sequence[tuple[Node, int]], filters: np.ndarray,
    found: Weights | None,
) -> list[Node]:  # fmt: skip
    """Return a product of levels and the nodes after it; zero points require `found`."""
    write, kind = Expression(node, graph), graph.types[node.outputs[0]]
    weights = filters if found is None else found.whole
    graph.in_file.setdefault(node.name, (node.op, kind.shape, graph.types[node.inputs[1]].shape))
    value = write("MatMul", name, write.constant(weights.T, kind.dtype))
    sums = write.constant(weights.sum(axis=1), kind.dtype) if found is not None else ""
    for step, place in steps:
        other = step.inputs[1 - place]
        if step.op in ("Add", "Sub"):
            other = write("Mul", other, sums)
        operands = [value, other] if place == 0 else [other, value]
        value = write(step.op, *operands)
    if found is not None and (found.scale != 1).any():
        value = write("Mul", value, write.constant(found.scale, kind.dtype))
    if node.input(2):
        bias = graph.constants.get(node.inputs[2])
        other = node.inputs[2]
        if (beta := float(node.attrs.get("beta", 1.0))) != 1 and bias is not None:
            other = write.constant(beta * bias, kind.dtype)
        value = write("Add", value, other)
    for made in write.nodes:
        infer_into(made, graph)
    return write.result(value)


def _said(known: Lattice, found: Weights, steps: Sequence[tuple[Node, int]]) -> str:
    """Return a description of what was moved, with a bound of the integer sums."""
    ops = {step.op for step, _ in steps}
    kinds = (("zero points", {"Add", "Sub"}), ("scales", {"Mul", "Div"}))
    said = " and ".join(name for name, some in kinds if ops & some)
    said += " of rows are applied to its sums"
    multiples = as_multiples(known.values)
    if multiples is None:
        return said
    first, step, _ = multiples
    top = max(abs(first), abs(first + step * known.count))
    total = int(np.abs(found.whole).reshape(len(found.whole), -1).sum(axis=1).max()) * top
    if total >= EXACT_BELOW:
        return f"{said}, integers that may exceed 2^24, above which float32 rounds them"
    return f"{said}, integers of at most {total:,}"
