"""Recognise quantizers, however they are written.

    before: c = Clip(x, 0, 1); m = Mul(c, 3); r = Round(m); y = Div(r, 3)
    after:  y = bnncc.Levels(x)

A chain of monotone functions of one number with constants, one of which rounds, is a step function:
it takes a few values, each from a certain float32 number on. Values and thresholds are found by
evaluating the chain's own nodes, by bisection over all float32 numbers. So the result does not
depend on the spelling of a quantizer or its rounding mode. Chains with two values become
`bnncc.Sign`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bnncc.ir.graph import Graph, Node, TensorType
from bnncc.ir.quantizers import LEVELS, MULTI_THRESHOLD, QUANT
from bnncc.recognise.lattice import UNEVEN, decided_as_rows, decision, even, unevenness
from bnncc.recognise.monotone import evaluate_at, float_at, monotone_operand, place_of

Array = np.ndarray

MAX_COUNT = 255
"""Number of thresholds of an 8-bit quantizer."""

_ROUND = {"Round", "Floor", "Ceil"}
_ROUNDING = _ROUND | {"QuantizeLinear", "Cast", QUANT, MULTI_THRESHOLD}
_KEEPS_WHOLE = {"Add", "Sub", "Mul", "Neg", "Clip", "Min", "Max", "Relu", "Cast", "Identity"}


@dataclass(frozen=True)
class _Chain:
    """A tensor as a function of a source tensor: the nodes in between."""

    source: str
    nodes: tuple[Node, ...]
    rounds: bool


@dataclass(frozen=True)
class _Steps:
    """The step function of a chain: attributes of `Levels`."""

    thresholds: Array
    values: Array


def recognise_quantizers(graph: Graph) -> None:
    """Replace quantizers by `bnncc.Levels` and `bnncc.Sign` nodes.

    Runs after `recognise_signs`.
    """
    found = _find(graph)
    uneven = unevenness(graph)
    tips = graph.tips(found)

    def decided(node: Node) -> list[Node] | None:
        out = node.outputs[0]
        if out not in tips:
            return None
        (chain, steps), kind = found[out], graph.types[out]
        held = even(steps.values, uneven.get(out, UNEVEN))
        if held is None or kind.dtype != "float32" or not _fits(steps, kind):
            return None
        values = np.array(held.values, np.float32)
        return decision(graph, chain.source, out, steps.thresholds, values, node.name)

    graph.replace(decided)
    graph.sort()
    graph.prune()


def _fits(steps: _Steps, kind: TensorType) -> bool:
    """Whether a kernel can apply the decision to images or rows of this type."""
    by_channel = steps.thresholds.ndim > 1
    return len(kind.shape) in (2, 4) or (not by_channel and decided_as_rows(kind))


def _find(graph: Graph) -> dict[str, tuple[_Chain, _Steps]]:
    """Return the step function of every tensor that is one."""
    chains: dict[str, _Chain] = {}
    found: dict[str, tuple[_Chain, _Steps]] = {}
    whole: set[str] = set()
    for node in graph.nodes:
        if _is_whole(node, graph, whole):
            whole.update(node.outputs)
        data = monotone_operand(node, graph)
        if data is None:
            continue
        before = chains.get(data)
        if before is None:
            if graph.types[data].dtype != "float32":
                continue  # a reader of an input's Cast may start a chain
            # Bounded integers are levels already: rounding does not change them.
            start = (Node("Round", [data], [data]),) if data in whole else ()
            before = _Chain(data, start, bool(start))
        if node.op == MULTI_THRESHOLD and graph.constants[node.inputs[1]].shape[0] > 1:
            entry = _by_channel(node, data, graph)
            if entry is not None:
                found[node.outputs[0]] = entry
            continue
        if data in found and found[data][1].thresholds.ndim == 2:
            entry = _mapped(node, found[data], graph)
            if entry is not None:
                found[node.outputs[0]] = entry
            continue
        rounds = before.rounds or _rounds(node, graph)
        chain = _Chain(before.source, (*before.nodes, node), rounds)
        chains[node.outputs[0]] = chain
        if not rounds:
            continue
        steps = _steps(chain.nodes, graph)
        if steps is not None:
            found[node.outputs[0]] = chain, steps
    return found


def _is_whole(node: Node, graph: Graph, whole: set[str]) -> bool:
    """Whether a node gives integers, of any type, if the tensors in `whole` are integers."""
    if node.op in _ROUND or (_rounds(node, graph) and node.op == "Cast"):
        return True
    if node.op == LEVELS:
        return bool((np.rint(node.attrs["values"]) == node.attrs["values"]).all())
    fixed = (graph.constants[i] for i in node.inputs if i in graph.constants)
    return (
        node.op in _KEEPS_WHOLE
        and all(i in whole or i in graph.constants for i in node.inputs if i)
        and all(bool((np.rint(v) == v).all()) for v in fixed)
    )


def _rounds(node: Node, graph: Graph) -> bool:
    if node.op == "Cast":
        return np.dtype(graph.types[node.outputs[0]].dtype).kind in "iu"
    return node.op in _ROUNDING


def _steps(nodes: Sequence[Node], graph: Graph) -> _Steps | None:
    """Find all steps of a chain by bisection; None if there are none, or too many."""
    top = place_of(float(np.finfo(np.float32).max))
    low, high = np.array([-top], np.int64), np.array([top], np.int64)

    def at(places: Array) -> Array:
        return evaluate_at(nodes, float_at(places), graph).astype(np.float32)

    left, right = at(low), at(high)
    if not np.isfinite([left[0], right[0]]).all() or left[0] == right[0]:
        return None
    cuts: list[tuple[int, float]] = []
    first = float(left[0])
    while low.size:
        done = high - low == 1
        cuts += zip(high[done].tolist(), right[done].tolist(), strict=True)
        low, high, left, right = (v[~done] for v in (low, high, left, right))
        if not low.size:
            break
        middle = (low + high) // 2
        value = at(middle)
        low, high = np.concatenate([low, middle]), np.concatenate([middle, high])
        left, right = np.concatenate([left, value]), np.concatenate([value, right])
        differ = left != right
        low, high, left, right = (v[differ] for v in (low, high, left, right))
        if low.size + len(cuts) > MAX_COUNT:
            return None
    cuts.sort()
    values = np.array([first, *(v for _, v in cuts)], np.float32)
    change = np.diff(values)
    if not ((change > 0).all() or (change < 0).all()):
        return None
    return _Steps(float_at(np.array([c for c, _ in cuts], np.int64)), values)


def _by_channel(node: Node, data: str, graph: Graph) -> tuple[_Chain, _Steps] | None:
    """Return the step function of a MultiThreshold with thresholds per channel."""
    limits = np.sort(graph.constants[node.inputs[1]].astype(np.float32), axis=1)
    if not 0 < limits.shape[1] <= MAX_COUNT or graph.types[data].dtype != "float32":
        return None
    scale = np.float32(node.attrs.get("out_scale", 1))
    values = scale * np.arange(limits.shape[1] + 1, dtype=np.float32)
    values = values + np.float32(node.attrs.get("out_bias", 0))
    return (_Chain(data, (node,), True), _Steps(limits, values)) if scale else None


def _mapped(
    node: Node, before: tuple[_Chain, _Steps], graph: Graph
) -> tuple[_Chain, _Steps] | None:
    """Return the step function of `node` applied to the values of another step function."""
    chain, steps = before
    values = evaluate_at([node], steps.values, graph).astype(np.float32)
    change = np.diff(values)
    if not np.isfinite(values).all() or not ((change > 0).all() or (change < 0).all()):
        return None
    return _Chain(chain.source, (*chain.nodes, node), True), _Steps(steps.thresholds, values)
