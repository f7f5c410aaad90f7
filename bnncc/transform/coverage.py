"""Which nodes of the model each node of a physical graph computes, for reports.

The passes replace nodes freely, but the tensors between kernels are mostly tensors of the model: a
kernel computes what lies between those that it makes and those made before. A kernel whose results
are no tensors of the model (a sign moved before a pooling) has at least the name of a node.
"""

from __future__ import annotations

from collections.abc import Mapping

from bnncc.ir.graph import Graph, Node
from bnncc.ir.moves import VIEW, VIEWS


def covered(physical: Graph, model: Graph) -> list[tuple[str, ...]]:
    """Return the nodes of the model that each physical node computes.

    Parameters
    ----------
    physical : Graph
        From `bnncc.transform.pipeline.to_physical`.
    model : Graph
        The graph before the passes.

    Returns
    -------
    list of tuple of str
        Names by node of `physical`: first the node that the kernel is named after, then the others
        in the order of the model. For kernels that only convert a tensor, the node that made it.
        Empty for what the passes added, such as conversions of inputs.
    """
    makers = {o: n for n in model.nodes for o in n.outputs if o}
    by_name: dict[str, list[Node]] = {}
    for node in model.nodes:
        by_name.setdefault(node.name, []).append(node)
    position = {name: number for number, name in enumerate(by_name)}
    held = _held(physical, model, makers)
    made = {*model.inputs, *model.constants}
    found = []
    for node in physical.nodes:
        own = [name for name in (node.name, *node.covers) if name in by_name]
        tensors = {t for o in node.outputs for t in held.get(o, ())}
        if node.op in (VIEW, *VIEWS):
            names = set()
        elif new := tensors - made:
            names = _between(new, made, makers)
        elif tensors:
            names = {makers[t].name for t in tensors if t in makers}
        else:
            tensors = {o for name in own for n in by_name[name] for o in n.outputs}
            names = _between(tensors, made, makers)
        made |= tensors
        found.append(tuple(dict.fromkeys([*own, *sorted(names, key=lambda n: position[n])])))
    return found


def _held(physical: Graph, model: Graph, makers: Mapping[str, Node]) -> dict[str, set[str]]:
    """Return the tensors of the model that each physical tensor holds, in whatever form."""
    held = {
        name: {form.tensor for form in forms if form.tensor in makers}
        for name, forms in physical.forms.items()
    }
    for name, tensor in zip(physical.outputs, model.outputs, strict=True):
        held.setdefault(name, set()).add(tensor)
    for node in reversed(physical.nodes):
        if node.op in (VIEW, *VIEWS):
            held.setdefault(node.inputs[0], set()).update(held.get(node.outputs[0], ()))
    return held


def _between(tensors: set[str], made: set[str], makers: Mapping[str, Node]) -> set[str]:
    """Return the nodes that compute `tensors` from those in `made`."""
    names: set[str] = set()
    stack = list(tensors - made)
    seen = set(stack)
    while stack:
        node = makers.get(stack.pop())
        if node is None:
            continue
        names.add(node.name)
        new = [i for i in node.inputs if i and i not in made and i not in seen]
        seen.update(new)
        stack += new
    return names
