"""Repeat values as late as possible: compute with them first.

    before: e = Expand(m); s = Div(127, e); y = Mul(x, s)                m one number for each row
    after:  s = Div(127, m); y = Mul(x, s)

`expand_as` hides that a scale is one number for each row, and makes every element compute it.
"""

from __future__ import annotations

from bnncc.ir.graph import Node
from bnncc.transform.rewrite import Result, Walk

_TWO_OPERANDS = frozenset(("Add", "Div", "Max", "Min", "Mul", "Sub"))

EXPANDED_LATE = _TWO_OPERANDS | {"Abs", "Cast", "Clip", "Neg", "Reciprocal", "Sqrt"}
"""Operators to which the rule applies."""


def late_expand(node: Node, state: Walk) -> Result:
    """Compute before an `Expand`, or without it where the operator itself repeats the values.

    Parameters
    ----------
    node : Node
        One of `EXPANDED_LATE`.
    state : Walk
        Producers of its inputs.

    Returns
    -------
    list of Node or None
        None if the operator stays as it is.
    """
    repeats = {k: made for k, i in enumerate(node.inputs) if (made := state.producer(i, "Expand"))}
    if not repeats or len(node.outputs) != 1:
        return None
    types = state.graph.types
    whole = types[node.outputs[0]].shape
    small = {types[made.inputs[0]].shape for made in repeats.values()}
    others = [types[i].shape for k, i in enumerate(node.inputs) if i and k not in repeats]
    alike = len(small) == 1 and all(shape in ((), (1,), *small) for shape in others)
    if alike and all(types[made.outputs[0]].shape == whole for made in repeats.values()):
        out = state.graph.fresh(f"{node.outputs[0]}.before")
        inputs = [repeats[k].inputs[0] if k in repeats else i for k, i in enumerate(node.inputs)]
        inner = Node(node.op, inputs, [out], node.attrs, node.name, node.covers)
        first = next(iter(repeats.values()))
        return [inner, Node("Expand", [out, first.inputs[1]], node.outputs, {}, first.name)]
    if node.op not in _TWO_OPERANDS or len(node.inputs) != 2:
        return None
    for k, made in repeats.items():
        if types[node.inputs[1 - k]].shape == whole:
            inputs = [*node.inputs]
            inputs[k] = made.inputs[0]
            return [Node(node.op, inputs, node.outputs, node.attrs, node.name, node.covers)]
    return None
