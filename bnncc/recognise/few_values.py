"""Find tensors that take few values, whatever their origin, and read them as signs or levels.

    before: i = ArgMax(...); t = Gather([0, 2, 3], i); y = Conv(t, W)
    after:  i = ArgMax(...); t = Gather([0, 2, 3], i); l = bnncc.Levels(t); y = Conv(l, W)

Sets of values are propagated through operators by evaluating these on all combinations. If a layer
reads a float32 tensor of few, evenly spaced values (some may be missing) that no sign or quantizer
produced, an additional decision that returns the same numbers gives the layer bits to read. Inputs
of 8 bits take few values, too, but images do not pay: their pixels fill no words.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bnncc.errors import BnnccError
from bnncc.ir.dims import Dim
from bnncc.ir.evaluate import evaluate_node
from bnncc.ir.graph import Graph, Node
from bnncc.ir.halves import NARROW, ROUND
from bnncc.ir.infer import COMPARE, ELEMENTWISE
from bnncc.recognise.filters import binary_weight, few_bit_weights, two_valued_filters
from bnncc.recognise.lattice import (
    MAX_FILLED,
    UNEVEN,
    decided_as_rows,
    decision,
    evenly,
    kept,
    lattices,
    of_decision,
    unevenness,
)
from bnncc.recognise.operands import filters_of
from bnncc.recognise.step_functions import interval
from bnncc.topi_binary.layout import WORD_BITS

Array = np.ndarray[Any, Any]

_MOST_COMBINATIONS = 4096
_LARGEST_CONSTANT = 1 << 16
_BOOLEAN = {*COMPARE, "IsNaN", "IsInf", "Not", "And", "Or", "Xor"}
_ROUNDINGS = {"Round", "Floor", "Ceil"}
_ROUNDED = 1e-5
"""Relative margin that covers the rounding of a bound."""

_BYTES = ("int8", "uint8")
_LAYERS = {"Conv", "Gemm", "MatMul"}


def few_values(graph: Graph) -> dict[str, Array]:
    """Return the tensors of a canonical graph that take few values, with these values.

    Returns
    -------
    dict of str to ndarray
        By tensor, all values it can take, ascending, at most `MAX_FILLED`; or up to 256 that follow
        from an input of 8 bits.
    """
    table: dict[str, Array] = {}
    producers = graph.producers()
    for name in graph.inputs:
        kind = graph.datatypes.get(name)
        dtype = graph.types[name].dtype
        if dtype == "bool":
            table[name] = np.array([False, True])
        elif dtype in _BYTES:
            limits = np.iinfo(dtype)
            table[name] = np.arange(limits.min, limits.max + 1).astype(dtype)
        elif kind is not None and 1 < kind.count <= MAX_FILLED:
            declared = kind.low + kind.step * np.arange(kind.count)
            table[name] = declared.astype(graph.types[name].dtype)
    for node in graph.nodes:
        values = _held(node, graph, table, producers)
        if values is None:
            continue
        values = np.unique(values)
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            continue
        most = max((len(table.get(i, ())) for i in node.inputs), default=0)
        if 0 < len(values) <= max(most, MAX_FILLED):
            table.update({out: values for out in node.outputs if out})
    return table


def _held(
    node: Node, graph: Graph, table: dict[str, Array], producers: dict[str, Node]
) -> Array | None:
    a, dtype = node.attrs, graph.types[node.outputs[0]].dtype
    if (decided := of_decision(node)) is not None:
        return np.array(decided.values, np.float32)
    if node.op in ("ArgMax", "ArgMin"):
        shape = graph.types[node.inputs[0]].shape
        size = shape[int(a.get("axis", 0))] if shape else 1
        return np.arange(size) if isinstance(size, int) and size <= MAX_FILLED else None
    if (taken := kept(node, graph)) is not None:
        parts = [*(table.get(i) for i in taken[0]), *map(_few, taken[1])]
        held = [p for p in parts if p is not None]
        if len(held) == len(parts):
            return np.concatenate([p.astype(held[0].dtype) for p in held])
    made = _rounded(node, graph, producers) if node.op in _ROUNDINGS else None
    if made is None and (node.op in ELEMENTWISE or node.op in (ROUND, NARROW, "Gather")):
        made = _combined(node, graph, table)
    if made is not None:
        return made
    if node.op in ("Mod", "BitwiseAnd") and dtype.startswith(("int", "uint")):
        return _remainders(node, graph)
    if node.op == "Sign":
        return np.array([0, 1] if dtype.startswith("u") else [-1, 0, 1], _kind(dtype))
    if node.op in _BOOLEAN or (node.op == "Cast" and dtype == "bool"):
        return np.array([False, True])
    return None


def _rounded(node: Node, graph: Graph, producers: dict[str, Node]) -> Array | None:
    """Return the integers that a bounded number rounds to, including one more at each end."""
    dtype = graph.types[node.inputs[0]].dtype
    bounds = np.array(interval(node.inputs[0], graph, producers))
    if dtype not in ("float32", "float64") or not np.isfinite(bounds).all():
        return None
    wide = bounds + _ROUNDED * np.abs(bounds) * [-1, 1]
    low, high = evaluate_node(node, [wide])[0]
    return None if high - low >= MAX_FILLED else np.arange(low, high + 1).astype(dtype)


def _remainders(node: Node, graph: Graph) -> Array | None:
    """Return the possible remainders of integers divided or masked by a constant."""
    value = graph.constants.get(node.inputs[1])
    if value is None or value.size != 1:
        return None
    by, dtype = int(value.reshape(())), graph.types[node.outputs[0]].dtype
    most = abs(by) - 1 if node.op == "Mod" else by
    if not 0 <= most < MAX_FILLED:
        return None
    both = node.op == "Mod" and node.attrs.get("fmod", 0) and not dtype.startswith("u")
    low = -most if both or (node.op == "Mod" and by < 0) else 0
    high = most if both or low == 0 else 0
    return np.arange(low, high + 1).astype(dtype)


def _kind(dtype: str) -> str:
    return dtype if hasattr(np, dtype) else "float32"


def _of(name: str, graph: Graph, table: dict[str, Array]) -> Array | None:
    value = graph.constants.get(name)
    return table.get(name) if value is None else _few(value)


def _few(value: Array) -> Array | None:
    """Return the distinct values of a constant, if they are few."""
    if not 0 < value.size <= _LARGEST_CONSTANT:
        return None
    held = np.unique(value)
    return held if len(held) <= MAX_FILLED else None


def _combined(node: Node, graph: Graph, table: dict[str, Array]) -> Array | None:
    """Return the results of an operator for all combinations of its operands' values."""
    names = list(dict.fromkeys(i for i in node.inputs if i))
    whole = node.inputs[0] if node.op == "Gather" else ""
    if whole and (whole not in graph.constants or graph.constants[whole].ndim != 1):
        return None
    sets = {i: _of(i, graph, table) for i in names if i != whole}
    if any(v is None for v in sets.values()) or not sets:
        return None
    held = [v for v in sets.values() if v is not None]
    if np.prod([len(v) for v in held], dtype=np.float64) > _MOST_COMBINATIONS:
        return None
    grid = dict(zip(sets, (g.reshape(-1) for g in np.meshgrid(*held)), strict=True))
    if whole:
        grid[whole] = graph.constants[whole]
    args: list[Array | None] = [grid[i] if i else None for i in node.inputs]
    if node.op == "Clip":
        if any(i and len(grid[i]) and (grid[i] != grid[i][0]).any() for i in node.inputs[1:]):
            return None
        args[1:] = [v if v is None else v[:1].reshape(()) for v in args[1:]]
    try:
        with np.errstate(all="ignore"):
            return np.asarray(evaluate_node(node, args)[0]).reshape(-1)
    except BnnccError:
        return None


def read_again(graph: Graph) -> None:
    """Insert signs or levels before layers that read few-valued tensors.

    Runs after `recognise_quantizers`.
    """
    known = set(lattices(graph))
    held, uneven = few_values(graph), unevenness(graph)
    full = {name: evenly(v, uneven.get(name, UNEVEN)) for name, v in held.items()}
    producers = graph.producers()
    renamed: dict[str, str] = {}
    behind: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if node.op not in _LAYERS or node.inputs[1] not in graph.constants:
            continue
        name = _first_usable(node.inputs[0], graph, producers, full, known)
        values = None if name is None else full[name]
        if name is None or name in renamed or values is None or not _counted(node, graph):
            continue
        if len(values) > MAX_FILLED and not fills_words(node, graph):
            continue
        made = graph.fresh(f"{name}.again")
        graph.types[made] = graph.types[name]
        label = producers[name].name if name in producers else name
        numbers = values.astype(np.float32)
        middles = (numbers[:-1] + numbers[1:]) / 2
        behind[name] = decision(graph, name, made, middles, numbers, label)
        renamed[name] = made
    for node in graph.nodes:
        node.inputs = [renamed.get(i, i) for i in node.inputs]
    graph.put_behind(behind)


def _counted(node: Node, graph: Graph) -> bool:
    """Whether the weights of a layer make it binary or few-bit if its data take few values."""
    filters = filters_of(node, graph.constants[node.inputs[1]])
    if isinstance(filters, tuple):
        return False
    return any(f(filters) is not None for f in (binary_weight, few_bit_weights, two_valued_filters))


def depth(node: Node, graph: Graph) -> Dim:
    """Return the numbers per pixel, or per row, of the data of a layer."""
    if node.op == "Conv":
        return int(graph.constants[node.inputs[1]].shape[1])
    return graph.types[node.inputs[0]].shape[-1]


def fills_words(node: Node, graph: Graph) -> bool:
    """Whether a pixel, or a row, of the data of a layer fills enough of a word."""
    terms = depth(node, graph)
    return isinstance(terms, int) and terms >= WORD_BITS // 2


def _first_usable(
    name: str,
    graph: Graph,
    producers: dict[str, Node],
    full: dict[str, Array | None],
    known: set[str],
) -> str | None:
    """Return the first tensor before a layer that can become levels, unless one is already."""
    found = None
    while name in full and name not in known:
        kind, values = graph.types[name], full[name]
        usable = kind.dtype == "float32" and values is not None
        fits = len(kind.shape) in (2, 4) or decided_as_rows(kind)
        if usable and values is not None and (fits or len(values) == 2):
            found = name
        node = producers.get(name)
        if node is None or node.op == "Concat" or kept(node, graph) is None:
            return found
        name = node.inputs[0]
    return None if name in known else found
