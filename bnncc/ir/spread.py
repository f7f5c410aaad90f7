"""How far rounding may take a tensor that is computed from given ones, ties included."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bnncc.ir import numeric
from bnncc.ir.evaluate import evaluate_node
from bnncc.ir.graph import Graph, Node
from bnncc.ir.magnitude import (
    DECISIONS,
    EXACT_BELOW,
    PRODUCTS,
    SUMS,
    ZERO,
    magnitude,
    powers_of_two,
)

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Spread:
    """What rounding may make of a tensor.

    Attributes
    ----------
    value : ndarray
        What the graph computes.
    low, high : ndarray
        The least and the most that another order of rounding could give.
    """

    value: Array
    low: Array
    high: Array


def spread(
    graph: Graph,
    known: Mapping[str, Array],
    name: str,
    *,
    near: float,
    whole: bool = False,
    dyadic: bool = False,
    relaxed: bool = False,
) -> Spread:
    """Compute one tensor from others, and how far rounding may take it, ties included.

    A decision within `near` times its magnitude of its threshold may fall either way; what follows
    is evaluated both ways.

    Parameters
    ----------
    graph : Graph
        In normal form.
    known : mapping of str to ndarray
        Tensors taken to be exact: all inputs, and any others that need not be computed.
    name : str
        The tensor asked for, computed even if it is known.
    near : float
        How near, in units of the magnitude.
    whole : bool
        Whether products of small multiples of scales are sums of integers: where such a sum is 0,
        nothing was rounded.
    dyadic : bool
        Whether also other sums are exact, where all numbers are multiples of a power of two: not so
        if data only happen to be that, and are computed as multiples of something else.
    relaxed : bool
        Whether decisions on exact zeros may fall either way, too.

    Returns
    -------
    Spread
    """
    values: dict[str, Array] = {**graph.constants, **known}
    sizes: dict[str, Array] = {}
    ends: dict[str, tuple[Array, Array]] = {}
    for node in _between(graph, known, name):
        ins = [values[i] if i else None for i in node.inputs]
        errs = [sizes.get(i, ZERO) for i in node.inputs]
        outs = evaluate_node(node, ins, graph.types)
        around = _around(node, ins, errs, ends, near, relaxed)
        others = _outcomes(node, ins, around, outs)
        for k, (made, out) in enumerate(zip(node.outputs, outs, strict=False)):
            if not made or (made in known and made != name):
                continue
            values[made] = out
            size = _of_integers(node, ins, errs, out, dyadic) if whole else None
            sizes[made] = magnitude(node, ins, errs, out, k) if size is None else size
            if others:
                with np.errstate(all="ignore"):
                    low = np.minimum.reduce([out, *(o[k] for o in others)])
                    high = np.maximum.reduce([out, *(o[k] for o in others)])
                ends[made] = low, high
    out, room = values[name], near * sizes.get(name, ZERO)
    low, high = ends.get(name, (out, out))
    if not np.any(room):
        return Spread(out, low, high)
    with np.errstate(invalid="ignore"):  # an infinity has no bound
        return Spread(out, low - room, high + room)


def _between(graph: Graph, known: Mapping[str, Array], name: str) -> list[Node]:
    """Return the nodes that compute `name` from `known`, in order."""
    wanted, nodes = {name}, []
    for node in reversed(graph.nodes):
        if wanted.intersection(node.outputs):
            nodes.append(node)
            wanted.update(i for i in node.inputs if i and i not in known)
    return nodes[::-1]


def _around(
    node: Node, ins: list[Array | None], errs: list[Array], ends: Mapping[str, tuple[Array, Array]],
    near: float, relaxed: bool,
) -> dict[int, tuple[Array, Array]]:  # fmt: skip
    """Return by number of an input the least and the most it may be, where that matters."""
    out: dict[int, tuple[Array, Array]] = {}
    for k, (name, value, err) in enumerate(zip(node.inputs, ins, errs, strict=True)):
        if value is None:
            continue
        low, high = ends.get(name, (value, value))
        if node.op in DECISIONS and value.dtype.kind == "f":
            room = near * err
            if relaxed:
                room = np.where(value == 0, np.maximum(room, _LEAST), room)
            if np.any(room):
                low = (low - room).astype(value.dtype)
                high = (high + room).astype(value.dtype)
        if low is not high:
            out[k] = low, high
    return out


def _outcomes(
    node: Node, ins: list[Array | None], around: Mapping[int, tuple[Array, Array]],
    outs: list[Array],
) -> list[list[Array]]:  # fmt: skip
    """Return what a node gives for inputs as far off as they may be."""
    if not around:
        return []
    if node.op in SUMS:
        far: list[Array | None] = [
            None if v is None else np.abs(v) if v.dtype.kind == "f" else v for v in ins
        ]
        data = ins[0]
        assert data is not None
        low, high = around.get(0, (data, data))
        far[0] = np.maximum(high - data, data - low).astype(data.dtype)
        if len(far) > 2 and node.op in ("Conv", "Gemm", "ConvTranspose"):
            far[2] = None
        room = evaluate_node(Node(node.op, node.inputs, node.outputs, node.attrs, node.name), far)
        return [[outs[0] - room[0]], [outs[0] + room[0]]]
    made = []
    for choice in itertools.product((0, 1), repeat=min(len(around), _MOST_LOOSE)):
        given = list(ins)
        for place, (k, pair) in enumerate(around.items()):
            given[k] = pair[choice[min(place, len(choice) - 1)]]
        made.append(evaluate_node(node, given))
    return made


_MOST_LOOSE = 3
"""Inputs that are looked at in all combinations; the others go with the last of these."""

_LEAST = float(np.finfo(np.float32).tiny)


def _of_integers(
    node: Node, ins: list[Array | None], errs: list[Array], out: Array, dyadic: bool
) -> Array | None:
    """Return the magnitude of a product of small multiples of scales; None if it is none.

    Its accumulator is an exact integer: where that is 0, the result is the bias, or exactly 0.
    """
    if node.op in ("Add", "Sub", "Sum") and dyadic:
        values = [v for v in ins if v is not None]
        return sum(errs, ZERO) if all(map(are_dyadic, (*values, out))) else None
    if node.op not in PRODUCTS or any(e.any() for e in errs):
        return None
    data, weight = ins[:2]
    assert data is not None
    assert weight is not None
    if weight.ndim < 2:
        return None
    axis: int | None = weight.ndim - 1
    if node.op == "Conv" or node.attrs.get("transB"):
        axis = 0
    if node.op == "ConvTranspose" or (node.op == "MatMul" and weight.ndim != 2):
        axis = None
    parts = [numeric.multiples(weight, axis), numeric.multiples(data)]
    if any(part is None for part in parts):
        return None
    bias = np.zeros(1) if len(ins) < 3 or ins[2] is None else np.asarray(ins[2])
    if node.op in ("Conv", "ConvTranspose"):
        bias = bias.reshape((1, -1) + (1,) * (out.ndim - 2))
    exact = all(part is not None and powers_of_two(part[1]) for part in parts)
    if dyadic and exact and are_dyadic(bias) and are_dyadic(out):
        return ZERO
    bias = np.abs(bias.astype(np.float64)) * (2 + abs(float(node.attrs.get("beta", 1.0))))
    return np.abs(out) + np.broadcast_to(bias, out.shape)


def are_dyadic(values: Array) -> bool:
    """Whether float32 sums of such values are exact: multiples of 1/1024, not too large."""
    scaled = values.astype(np.float64) * 1024
    small = np.abs(scaled).max(initial=0.0) < EXACT_BELOW
    return bool(small) and bool((np.rint(scaled) == scaled).all())
