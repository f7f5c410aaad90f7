"""Control flow that can be resolved at compile time.

    If, constant condition   ->  the branch
    If                       ->  both branches, and Where
    Loop, Scan               ->  the body, once per iteration

With static shapes, the number of iterations is nearly always known. If it depends on data, the
model is rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import onnx

from bnncc.errors import ModelError, ShapeError, UnsupportedOp
from bnncc.frontend.inline import Versions
from bnncc.ir.evaluate import OPSET
from bnncc.ir.graph import Graph, Node
from bnncc.ir.pieces import Expression

_NEWEST: Versions = {"": OPSET}


class Reader(Protocol):
    """Interface of `bnncc.frontend.reader.Reader` that the rules use."""

    graph: Graph

    def read(self, node: Node, versions: Versions) -> None:
        """Add a node that was written for the opsets `versions`."""

    def subgraph(
        self, body: onnx.GraphProto, inputs: Sequence[str], versions: Versions, node: Node
    ) -> list[str]:
        """Add the nodes of a subgraph and return the names of its outputs."""

    def unfolds(self, node: Node, body: onnx.GraphProto, times: int) -> None:
        """Raise an error if that many iterations would give too many nodes."""


def _formal(node: Node) -> list[str]:
    """Return the inputs of a node, without those that only its subgraphs read."""
    inputs = node.inputs[: node.attrs["inputs"]]
    while inputs and not inputs[-1]:
        inputs.pop()
    return inputs


def _give(write: Expression, values: Sequence[str], reader: Reader) -> None:
    for k, name in enumerate(values):
        write.give(name, k)
    for part in write.nodes:
        reader.read(part, _NEWEST)


def _if(node: Node, versions: Versions, reader: Reader) -> None:
    graph, where = reader.graph, f"If `{node.name}`"
    branches = [node.attrs[k] for k in ("then_branch", "else_branch")]
    name = _formal(node)[0]
    condition = graph.constants.get(name)
    write = Expression(node, graph)
    if condition is not None:
        chosen = branches[0 if _truth(condition, where) else 1]
        _give(write, reader.subgraph(chosen, [], versions, node), reader)
        return
    yes, no = (reader.subgraph(branch, [], versions, node) for branch in branches)
    if graph.types[name].shape:
        name = write("Reshape", name, graph.constant(np.zeros(0, np.int64), node.name))
    chosen_values = []
    for a, b, made in zip(yes, no, node.outputs, strict=False):
        if graph.types[a] != graph.types[b]:
            raise ShapeError(
                f"{where}: its condition is computed, and its branches give `{made}` of different "
                "shapes"
            )
        chosen_values.append(write("Where", name, a, b))
    _give(write, chosen_values, reader)


def _truth(value: np.ndarray, where: str) -> bool:
    if value.size != 1:
        raise ShapeError(f"{where}: its condition has shape {list(value.shape)}, expected []")
    return bool(value.reshape(-1)[0])


def _loop(node: Node, versions: Versions, reader: Reader) -> None:
    graph, where = reader.graph, f"Loop `{node.name}`"
    inputs = [*_formal(node), "", ""]
    limit, go = (_known(name, reader, where) for name in inputs[:2])
    state, body = [i for i in inputs[2:] if i], node.attrs["body"]
    going = go is None or _truth(go, where)
    count = None if limit is None else int(limit.reshape(-1)[0])
    if count is None and go is None:
        raise ModelError(f"{where}: has neither a trip count nor a condition, and never ends")
    scans: list[list[str]] = [[] for _ in range(len(body.output) - 1 - len(state))]
    if going and count is not None and _never_stops(body):
        reader.unfolds(node, body, count)
    k = 0
    while going and (count is None or k < count):
        index = graph.constant(np.array(k, np.int64), f"{node.name}.iteration")
        true = graph.constant(np.array(True), f"{node.name}.condition")
        made = reader.subgraph(body, [index, true, *state], versions, node)
        after = _known(made[0], reader, f"{where}, iteration {k}")
        going = after is None or _truth(after, where)
        state = made[1 : 1 + len(state)]
        for rows, name in zip(scans, made[1 + len(state) :], strict=True):
            rows.append(name)
        k += 1
    write = Expression(node, graph)
    _give(write, [*state, *(_stacked(write, rows, 0, where) for rows in scans)], reader)


def _never_stops(body: onnx.GraphProto) -> bool:
    """Whether a Loop's body returns the condition unchanged."""
    same = {body.input[1].name}
    for node in body.node:
        if node.op_type == "Identity" and node.input[0] in same:
            same.add(node.output[0])
    return body.output[0].name in same


def _known(name: str, reader: Reader, where: str) -> np.ndarray | None:
    """Return the constant `name`, or None if the input is absent."""
    if not name:
        return None
    value = reader.graph.constants.get(name)
    if value is None:
        raise UnsupportedOp(
            f"{where}: how often it runs depends on values at run time, expected constants",
            hint="give fixed shapes with --input-shape, if it is computed from them",
        )
    return value


def _stacked(write: Expression, rows: Sequence[str], axis: int, where: str) -> str:
    if not rows:
        raise ShapeError(f"{where}: runs no iteration, so that its outputs are empty")
    parts = [write.unsqueeze(row, axis) for row in rows]
    return parts[0] if len(parts) == 1 else write("Concat", *parts, axis=axis)


def _scan(node: Node, versions: Versions, reader: Reader) -> None:
    graph, where = reader.graph, f"Scan `{node.name}`"
    if versions.get("", OPSET) < 9:
        raise UnsupportedOp(f"{where}: the form of opset 8 is not supported; export opset 9")
    count = int(node.attrs["num_scan_inputs"])
    inputs, body = _formal(node), node.attrs["body"]
    if not 0 < count <= len(inputs):
        raise ModelError(f"{where}: `num_scan_inputs` is {count} of {len(inputs)} inputs")
    state, scanned = inputs[: len(inputs) - count], inputs[len(inputs) - count :]
    made_count = len(body.output) - len(state)
    axes = _per(node, "scan_input_axes", count)
    backward = _per(node, "scan_input_directions", count)
    ranks = [len(graph.types[name].shape) for name in scanned]
    for axis, rank in zip(axes, ranks, strict=True):
        if not -rank <= axis < rank:
            raise ShapeError(f"{where}: axis {axis} of a tensor with {rank} axes")
    sizes = {graph.types[name].shape[a] for name, a in zip(scanned, axes, strict=True)}
    if len(sizes) != 1 or not all(isinstance(s, int) for s in sizes):
        raise ShapeError(f"{where}: scans axes of sizes {sorted(map(str, sizes))}, expected one")
    length = int(next(iter(sizes)))
    reader.unfolds(node, body, length)
    scans: list[list[str]] = [[] for _ in range(made_count)]
    for k in range(length):
        read = Expression(node, graph)
        items = [
            read.at(name, length - 1 - k if back else k, axis)
            for name, axis, back in zip(scanned, axes, backward, strict=True)
        ]
        for part in read.nodes:
            reader.read(part, _NEWEST)
        made = reader.subgraph(body, [*state, *items], versions, node)
        state = made[: len(state)]
        for rows, name in zip(scans, made[len(state) :], strict=True):
            rows.append(name)
    write = Expression(node, graph)
    results = []
    out_axes = _per(node, "scan_output_axes", made_count)
    turned = _per(node, "scan_output_directions", made_count)
    for rows, axis, back in zip(scans, out_axes, turned, strict=True):
        results.append(_stacked(write, rows[::-1] if back else rows, axis, where))
    _give(write, [*state, *results], reader)


def _per(node: Node, key: str, count: int) -> list[int]:
    values = list(node.attrs.get(key) or [0] * count)
    if len(values) != count:
        raise ModelError(f"Scan `{node.name}`: `{key}` has {len(values)} values, not {count}")
    return values


RULES: dict[str, Callable[[Node, Versions, Reader], None]] = {
    "If": _if,
    "Loop": _loop,
    "Scan": _scan,
}
"""Readers of operators with subgraphs."""
