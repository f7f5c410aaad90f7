"""Fuse rotary position embeddings, which rotate pairs of values."""

from __future__ import annotations

from itertools import permutations

from bnncc.ir.graph import Graph, Node
from bnncc.ir.rows import ROTARY
from bnncc.transform.rewrite import Result, Walk, walk


def join_rotations(graph: Graph) -> bool:
    """Replace rotations of the halves of rows by one node each.

        h = Concat(Neg(x[n/2:]), x[:n/2]); y = Add(Mul(x, c), Mul(h, s))  ->  y = Rotary(x, c, s)

    Notes
    -----
    Halves may be taken by Slice or Split; tables of cosines and sines may be computed.
    """

    def rule(node: Node, state: Walk) -> Result:
        types = graph.types
        if node.op != "Add" or types[node.outputs[0]].dtype != "float32":
            return None
        for first, second in permutations(node.inputs):
            straight, turned = state.producer(first, "Mul"), state.producer(second, "Mul")
            for x, cos in permutations(straight.inputs) if straight is not None else ():
                for halves, sin in permutations(turned.inputs) if turned is not None else ():
                    same = types[x] == types[halves] == types[node.outputs[0]]
                    if same and _turned(halves, state) == x:
                        return [Node(ROTARY, [x, cos, sin], node.outputs, {}, node.name)]
        return None

    changed = walk(graph, rule)
    if changed:
        graph.prune()
    return changed


def _turned(name: str, state: Walk) -> str | None:
    """Return x if `name` is the concatenation of its negated second half and its first half."""
    joined = state.producer(name, "Concat")
    if joined is None or len(joined.inputs) != 2:
        return None
    rank = len(state.graph.types[name].shape)
    negated = state.producer(joined.inputs[0], "Neg")
    if negated is None or joined.attrs["axis"] % rank != rank - 1:
        return None
    second, first = (_half(part, state) for part in (negated.inputs[0], joined.inputs[1]))
    found = first is not None and second is not None and (first[1], second[1]) == (0, 1)
    return first[0] if found and first and second and first[0] == second[0] else None


def _half(name: str, state: Walk) -> tuple[str, int] | None:
    """Return a tensor and which half of its last axis (0 or 1) `name` is, or None."""
    node, types = state.producer(name, "Slice", "Split"), state.graph.types
    if node is None:
        return None
    shape, made = types[node.inputs[0]].shape, types[name].shape
    width, rank = shape[-1], len(shape)
    if not isinstance(width, int) or made != (*shape[:-1], width // 2) or width % 2:
        return None
    if node.op == "Split":
        last = node.attrs.get("axis", 0) % rank == rank - 1 and len(node.outputs) == 2
        return (node.inputs[0], node.outputs.index(name)) if last else None
    start, axes, steps = (
        state.scalar(node.inputs[k]) if len(node.inputs) > k and node.inputs[k] else default
        for k, default in ((1, None), (3, 0 if rank == 1 else None), (4, 1))
    )
    if start is None or axes is None or int(axes) % rank != rank - 1 or steps != 1:
        return None
    start = int(start) + width * (start < 0)
    return (node.inputs[0], start // (width // 2)) if start in (0, width // 2) else None
