"""Store the sum of a residual block in place of the residual.

    before: y, b = Kernel(d, r; ..., add r, store y, bits b)      nobody reads r later
    after:  y, b = Kernel(d, r; ..., add r, store over r, bits b)

Two feature maps of an early stage do not fit the L2 cache together; one does. The residual must
have no later reader.
"""

from __future__ import annotations

from bnncc.ir.graph import Graph, Node
from bnncc.ir.moves import VIEW, VIEWS
from bnncc.topi_binary.build import aliases, over_residual
from bnncc.topi_binary.spec import BinaryConv2d
from bnncc.transform.physical import KERNEL


def store_in_place(graph: Graph) -> None:
    """Mark stores that may overwrite the tensor they add.

    Runs on the physical graph.
    """
    made_by = graph.producers()
    last_reader: dict[str, int] = {}
    for position, node in enumerate(graph.nodes):
        for name in node.inputs:
            last_reader[name] = position
    viewed = {i for n in graph.nodes if n.op in (VIEW, *VIEWS) for i in n.inputs}
    for position, node in enumerate(graph.nodes):
        spec = node.attrs.get("spec")
        if node.op != KERNEL or not isinstance(spec, BinaryConv2d):
            continue
        changed = over_residual(spec)
        if changed == spec:
            continue
        target = node.inputs[max(aliases(changed))]
        producer = made_by.get(target)
        if (
            producer is not None
            and producer.op == KERNEL
            and last_reader[target] == position
            and node.inputs.count(target) == 1
            and target not in viewed
            and target not in graph.outputs
            and _same(graph, node, changed, target)
        ):
            node.attrs["spec"] = changed


def _same(graph: Graph, node: Node, spec: BinaryConv2d, target: str) -> bool:
    """Whether the residual and the stored result have the same type."""
    output = node.outputs[next(i for i, over in enumerate(aliases(spec)) if over >= 0)]
    return graph.types[output] == graph.types[target]
