"""Eliminate tensor sequences: torch exports `split` as SplitToSequence and SequenceAt."""

from __future__ import annotations

from collections.abc import MutableMapping

import numpy as np

from bnncc.errors import ShapeError, UnsupportedOp
from bnncc.ir.graph import Graph, Node
from bnncc.ir.nodechecks import checked_axis


def plain_tensors(node: Node, graph: Graph, sequences: MutableMapping[str, list[str]]) -> Node:
    """Return a node without sequences that replaces one that makes or reads a sequence.

        SplitToSequence -> SequenceAt(1)    ->    Split -> Identity(its output 1)

    Parameters
    ----------
    node : Node
        Any node.
    graph : Graph
        Has types and constants of the preceding nodes.
    sequences : mapping of str to list of str
        The tensors of each sequence so far; extended.

    Raises
    ------
    ShapeError
        If a position is out of range.
    UnsupportedOp
        If sizes or positions are not constant, or another operator reads a sequence.
    """
    where = node.where
    if node.op == "SplitToSequence":
        parts = _sizes(node, graph, where)
        names = [graph.fresh(node.outputs[0]) for _ in parts]
        graph.types.update(dict.fromkeys(names, graph.types[node.inputs[0]]))  # reserved
        sequences[node.outputs[0]] = names
        sizes = graph.constant(np.array(parts, np.int64), f"{node.name}.split")
        attrs = {"axis": node.attrs.get("axis", 0)}
        return Node("Split", [node.inputs[0], sizes], names, attrs, node.name)
    if node.op == "SequenceAt" and node.inputs[0] in sequences:
        position = graph.constants.get(node.inputs[1])
        if position is None or position.size != 1:
            raise UnsupportedOp(f"{where}: its position is not constant")
        index, tensors = int(position.reshape(-1)[0]), sequences[node.inputs[0]]
        if not -len(tensors) <= index < len(tensors):
            raise ShapeError(f"{where}: position {index} of a sequence of {len(tensors)}")
        return Node("Identity", [tensors[index]], node.outputs, {}, node.name)
    if any(i in sequences for i in node.inputs):
        raise UnsupportedOp(f"{where}: reads a sequence of tensors, which is not supported")
    return node


def _sizes(node: Node, graph: Graph, where: str) -> list[int]:
    shape = graph.types[node.inputs[0]].shape
    size = shape[checked_axis(node.attrs.get("axis", 0), len(shape), where)]
    split = graph.constants.get(node.input(1))
    if not isinstance(size, int) or split is None or split.size == 0:
        raise UnsupportedOp(f"{where}: its sizes are not constant")
    if split.ndim:
        return [int(v) for v in split.reshape(-1)]
    step = int(split)
    if step <= 0 or size // step > 4096:
        raise ShapeError(f"{where}: splits an axis of {size} into parts of {step}")
    return [min(step, size - low) for low in range(0, size, step)]
