"""Remove the transposes of channels-last graphs, such as tf2onnx writes around every Conv.

A *last* transpose takes (batch, channels, ...) to (batch, ..., channels); *first* is its inverse.
Last transposes are pushed towards the outputs and first ones pulled towards the inputs, so that
pairs meet and cancel; what remains computes channels-first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from bnncc.ir.dims import is_static
from bnncc.ir.graph import Graph, Node
from bnncc.ir.halves import NARROW, ROUND
from bnncc.ir.infer import BROADCAST, COMPARE, UNARY, infer_into
from bnncc.ir.moves import inverse
from bnncc.transform.rewrite import Result, Walk, walk

_ONE_INPUT = UNARY | {"Cast", "IsNaN", "IsInf", ROUND, NARROW}
_SEVERAL = BROADCAST | COMPARE | {"Where"}
_WITH_AXES = {"LogSoftmax", "Pad", "Slice", "Softmax", "Split"}
_REDUCE = {f"Reduce{k}" for k in ("Max", "Mean", "Min", "Prod", "L1", "L2", "Sum", "SumSquare")}


def _last(rank: int) -> list[int]:
    return [0, *range(2, rank), 1]


def _first(rank: int) -> list[int]:
    return [0, rank - 1, *range(1, rank - 1)]


def _permuted(graph: Graph, name: str, perm: list[int]) -> str:
    """Return the constant `name` at full rank (so that it broadcasts), with its axes permuted."""
    value = graph.constants[name]
    if value.size == 1:
        return name if value.ndim == 0 else graph.constant(value.reshape(()), name)
    full = value.reshape((1,) * (len(perm) - value.ndim) + value.shape)
    return graph.constant(np.ascontiguousarray(full.transpose(perm)), name)


def _moved(
    node: Node, graph: Graph, perm: list[int], source: Callable[[str], str | None]
) -> tuple[Node, list[int]] | None:
    """Return the node on untransposed inputs, and the transpose that its output then needs.

    Parameters
    ----------
    node : Node
        An operator whose inputs are transposed by `perm`.
    graph : Graph
        Receives new constants.
    perm : list of int
        The transpose to move from inputs to outputs.
    source : callable
        Returns the tensor whose transpose an input is, or None.
    """
    rank, inputs, attrs = len(perm), list(node.inputs), dict(node.attrs)
    if graph.types[node.inputs[0]].shape and len(graph.types[node.outputs[0]].shape) > rank:
        return None
    if node.op in _SEVERAL or node.op == "Concat":
        moved = range(len(inputs))
    elif node.op in _ONE_INPUT or node.op in _WITH_AXES or node.op in _REDUCE:
        moved = range(1)
    else:
        return None
    out_perm = _turn_axes(node, graph, perm, inputs, attrs)
    if out_perm is None:
        return None
    for k in moved:
        if not inputs[k]:
            continue
        if inputs[k] in graph.constants and node.op != "Concat":
            if graph.constants[inputs[k]].ndim > rank:
                return None
            inputs[k] = _permuted(graph, inputs[k], inverse(perm))
        elif inputs[k] in graph.constants:
            value = graph.constants[inputs[k]].transpose(inverse(perm))
            inputs[k] = graph.constant(np.ascontiguousarray(value), inputs[k])
        else:
            name = source(inputs[k])
            if name is None:
                return None
            inputs[k] = name
    return Node(node.op, inputs, list(node.outputs), attrs, node.name, node.covers), out_perm


def _turn_axes(
    node: Node, graph: Graph, perm: list[int], inputs: list[str], attrs: dict[str, Any]
) -> list[int] | None:
    """Replace the axes that a node names, as for `_moved`.

    Parameters
    ----------
    inputs, attrs : list and dict
        The node's; modified.

    Returns
    -------
    list of int or None
        The transpose that the output needs; None if the axes are not constant.
    """
    rank = len(perm)
    if node.op in ("Concat", "Split", "Softmax", "LogSoftmax"):
        attrs["axis"] = perm[attrs.get("axis", 0) % rank]
    elif node.op == "Pad":
        pads = graph.constants.get(inputs[1])
        if pads is None:
            return None
        turned = pads.reshape(2, rank)[:, inverse(perm)].reshape(-1)
        inputs[1] = graph.constant(np.ascontiguousarray(turned), f"{node.name}.pads")
    elif node.op == "Slice":
        starts, axes = (graph.constants.get(node.input(k)) for k in (1, 3))
        if starts is None or (axes is None and node.input(3)):
            return None
        listed = axes.tolist() if axes is not None else list(range(starts.size))
        inputs += [""] * (4 - len(inputs))
        inputs[3] = _constant_axes(graph, perm, listed, node)
    elif node.op in _REDUCE:
        axes = graph.constants.get(node.input(1))
        if axes is None:
            return None
        listed = [a % rank for a in axes.reshape(-1).tolist()]
        inputs[1] = _constant_axes(graph, perm, listed, node)
        if not attrs.get("keepdims", 1):
            kept = [perm[a] for a in range(rank) if a not in listed]
            return [sorted(kept).index(a) for a in kept]
    return perm


def _constant_axes(graph: Graph, perm: list[int], axes: list[int], node: Node) -> str:
    return graph.constant(np.array([perm[a] for a in axes], np.int64), f"{node.name}.axes")


def push_down(graph: Graph) -> bool:
    """Push transposes to channels-last through operators that do not depend on the axis order.

    Conv -> Transpose(0,2,3,1) -> Sign -> ...   ->   Conv -> Sign -> Transpose(0,2,3,1) -> ...
    """
    turned: dict[tuple[str, tuple[int, ...]], str] = {}

    def rule(node: Node, state: Walk) -> Result:
        if node.op == "Transpose":
            inner = state.producer(node.inputs[0], "Transpose")
            if inner is not None and inner.attrs["perm"] == inverse(node.attrs["perm"]):
                return inner.inputs[0]
            turned.setdefault((node.inputs[0], tuple(node.attrs["perm"])), node.outputs[0])
            return None
        perm: list[int] | None = None
        for name in node.inputs:
            made = state.producer(name, "Transpose") if name else None
            if made is not None and made.attrs["perm"] == _last(len(made.attrs["perm"])):
                perm = made.attrs["perm"]
                break
        if perm is None or len(perm) < 3:
            return None
        before: list[Node] = []

        def source(name: str) -> str | None:
            made = state.producer(name, "Transpose")
            if made is not None and made.attrs["perm"] == perm:
                return made.inputs[0]
            rank = len(perm)
            if rank == 3 or len(graph.types[name].shape) != rank:
                return None
            key = (name, tuple(_first(rank)))
            if key in turned and turned[key] in state.made:
                return turned[key]
            if name not in graph.inputs and key not in planned:
                return None
            out = graph.fresh(f"{name}.first")
            turned[key] = out
            before.append(Node("Transpose", [name], [out], {"perm": _first(rank)}, out))
            return out

        result = _moved(node, graph, perm, source)
        if result is None:
            return None
        inner_node, out_perm = result
        if out_perm == list(range(len(out_perm))):
            return [*before, inner_node]
        after: list[Node] = []
        for k, out in enumerate(node.outputs):
            if out:
                plain = graph.fresh(f"{out}.plain")
                inner_node.outputs[k] = plain
                name = f"{node.name}.transpose"
                after.append(Node("Transpose", [plain], [out], {"perm": out_perm}, name))
        return [*before, inner_node, *after]

    planned = {(n.inputs[0], tuple(n.attrs["perm"])) for n in graph.nodes if n.op == "Transpose"}
    return walk(graph, rule)


def pull_up(graph: Graph) -> bool:
    """Pull transposes to channels-first towards the inputs.

    x -> Sign -> Pad -> Transpose(0,3,1,2) -> Conv  ->  x -> Transpose -> Sign -> Pad -> Conv
    """
    producers, consumers = graph.producers(), graph.consumers()
    pending = [n for n in graph.nodes if n.op == "Transpose"]
    inserted: dict[int, list[Node]] = {}
    removed: set[int] = set()
    while pending:
        node = pending.pop()
        perm = node.attrs["perm"]
        rank = len(perm)
        maker = producers.get(node.inputs[0])
        if rank < 4 or perm != _first(rank) or maker is None or id(node) in removed:
            continue
        if maker.op in _REDUCE or len(maker.outputs) != 1 or maker.outputs[0] in graph.outputs:
            continue
        if len(consumers.get(maker.outputs[0], [])) != 1:
            continue
        real = graph.computed(maker.inputs)
        if maker.op in (*_ONE_INPUT, "Pad", "Slice"):
            real = real[:1]
        if len(set(real)) != 1 or len(graph.types[real[0]].shape) != rank:
            continue
        pulled = graph.fresh(f"{real[0]}.first")
        result = _moved(maker, graph, inverse(perm), lambda name, out=pulled: out)  # type: ignore[misc]
        if result is None:
            continue
        moved, _ = result
        up = Node("Transpose", real[:1], [pulled], {"perm": perm}, f"{maker.name}.transpose")
        infer_into(up, graph)
        consumers[real[0]] = [n for n in consumers[real[0]] if n is not maker] + [up]
        maker.inputs, maker.attrs = moved.inputs, moved.attrs
        maker.outputs = list(node.outputs)
        for name in {i for i in maker.inputs if i}:
            consumers.setdefault(name, []).append(maker)
        producers[maker.outputs[0]] = maker
        producers[pulled] = up
        inserted.setdefault(id(maker), []).append(up)
        removed.add(id(node))
        pending.append(up)
    if not removed:
        return False
    nodes: list[Node] = []
    for node in graph.nodes:
        nodes.extend(n for n in inserted.get(id(node), []) if id(n) not in removed)
        if id(node) not in removed:
            nodes.append(node)
    graph.nodes = nodes
    graph.sort()
    return True


def reorder_flatten(graph: Graph) -> bool:
    """Flatten in channels-first order, and permute the weights of the dense layers after it.

    Transpose(0,2,3,1) -> Reshape(N, H*W*C) -> MatMul(W)  ->  Reshape(N, C*H*W) -> MatMul(W')
    """
    readers = graph.consumers()
    made = graph.producers()
    changed = False
    for node in graph.nodes:
        if node.op not in ("Reshape", "Flatten"):
            continue
        before = made.get(node.inputs[0])
        if before is None or before.op != "Transpose":
            continue
        perm = before.attrs["perm"]
        shape = graph.types[before.inputs[0]].shape
        flat = graph.types[node.outputs[0]].shape
        if perm != _last(len(perm)) or len(flat) != 2 or flat[0] != shape[0]:
            continue
        if not is_static(shape[1:]):
            continue
        sizes = [int(d) for d in shape[1:]]
        count = math.prod(sizes)
        order = np.arange(count).reshape(sizes).transpose([p - 1 for p in perm[1:]]).reshape(-1)
        edits = _edits(node.outputs[0], order, graph, readers)
        if edits is None:
            continue
        for target, index, value in edits:
            target.inputs[index] = graph.constant(value, f"{target.name}.reordered")
        node.inputs[0] = before.inputs[0]
        if node.op == "Reshape":
            dims = [0 if isinstance(flat[0], str) else flat[0], count]
            node.inputs[1] = graph.constant(np.array(dims, np.int64), f"{node.name}.shape")
        changed = True
    return changed


def _edits(
    start: str, order: Any, graph: Graph, readers: dict[str, list[Node]]
) -> list[tuple[Node, int, Any]] | None:
    """Return the constants to permute so that column j of `start` may come from ``order[j]``."""
    count = order.size
    back = np.empty(count, np.int64)  # channels-last position of each new column
    back[order] = np.arange(count)
    edits: list[tuple[Node, int, Any]] = []
    pending, seen = [start], {start}
    while pending:
        name = pending.pop()
        if name in graph.outputs:
            return None
        for node in readers.get(name, []):
            data = [k for k, i in enumerate(node.inputs) if i == name]
            others = [
                (k, graph.constants.get(i)) for k, i in enumerate(node.inputs) if i and i != name
            ]
            if any(v is None and node.inputs[k] not in seen for k, v in others):
                return None
            constants = [(k, v) for k, v in others if v is not None]
            if node.op in ("MatMul", "Gemm"):
                weight = graph.constants.get(node.inputs[1])
                if data != [0] or weight is None or weight.ndim != 2 or node.attrs.get("transA"):
                    return None
                turned = weight[:, back] if node.attrs.get("transB") else weight[back]
                edits.append((node, 1, np.ascontiguousarray(turned)))
                continue
            if node.op == "BatchNormalization":
                edits.extend((node, k, v[back]) for k, v in constants)
            elif node.op in _SEVERAL:
                for k, v in constants:
                    if v.size > 1 and v.shape[-1] == count:
                        edits.append((node, k, np.ascontiguousarray(v[..., back])))
                    elif v.size > 1:
                        return None
            elif node.op not in _ONE_INPUT:
                return None
            if node.outputs[0] not in seen:
                seen.add(node.outputs[0])
                pending.append(node.outputs[0])
    return edits


def squeeze_transposes(graph: Graph) -> bool:
    """Replace a Transpose that only moves axes of size 1 by a Reshape."""

    def rule(node: Node, state: Walk) -> Result:
        if node.op != "Transpose":
            return None
        shape, perm = graph.types[node.inputs[0]].shape, node.attrs["perm"]
        moving = [p for p in perm if shape[p] != 1]
        if moving != sorted(moving):
            return None
        target = graph.types[node.outputs[0]].shape
        dims = [
            d if isinstance(d, int) else 0 if shape[i] == d else -1 for i, d in enumerate(target)
        ]
        if dims.count(-1) > 1:
            return None
        name = graph.constant(np.array(dims, np.int64), f"{node.name}.shape")
        return [Node("Reshape", [node.inputs[0], name], node.outputs, {}, node.name)]

    return walk(graph, rule)
