"""Demands of operators on integer operands: indices inside a tensor, divisors other than 0.

An ordinary operand only affects the result; a bad index or divisor makes a processor read foreign
memory or trap. If a demand is proved from the graph, nothing is checked at run time; otherwise
generated code checks it (`bnncc.codegen.guards`). Demands on a network's inputs are part of their
description.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bnncc.errors import InputError
from bnncc.ir.dims import is_static
from bnncc.ir.graph import Dim, Graph, Node, TensorType
from bnncc.ir.moves import PERMUTATIONS, REPEATS

WHOLE_MOVES = PERMUTATIONS | REPEATS
_OTHER_MOVES = frozenset(("Slice", "Split", "Concat", "Gather", "GatherElements", "GatherND",
                          "MaxPool", "ReduceMax", "ReduceMin"))  # fmt: skip
_INDEXED = {"Gather": 1, "GatherElements": 1, "GatherND": 1, "ScatterElements": 1, "Scatter": 1,
            "ScatterND": 1, "RoiAlign": 2, "MaxUnpool": 1}  # fmt: skip


MARK = "bnncc check: "
"""Prefix of messages from checks in generated code."""


@dataclass(frozen=True)
class Demand:
    """A demand on one operand of a node."""

    node: Node
    """The node."""
    position: int
    """Index of the operand among the node's inputs."""
    sizes: tuple[Dim, ...] = ()
    """Upper bounds of indices (exclusive): one for all, or one for each element of the operand's
    last axis. Empty for a divisor, which must not be 0."""
    wraps: bool = True
    """Whether indices from ``-size`` on count from the end."""

    @property
    def operand(self) -> str:
        """The tensor's name."""
        return self.node.inputs[self.position]

    def __str__(self) -> str:
        if not self.sizes:
            return f"{self.node.where}: integer division by 0"
        spans = [f"{f'-{size}' if self.wraps else '0'} .. {_last(size)}" for size in self.sizes]
        return f"{self.node.where}: an index lies outside {', '.join(spans)}"


def _last(size: Dim) -> Dim:
    return size - 1 if isinstance(size, int) else f"{size} - 1"


def demands(node: Node, types: Mapping[str, TensorType]) -> Demand | None:
    """Return the demand of `node` on one of its operands, if any."""
    if node.op in ("Div", "Mod"):
        integers = types[node.inputs[1]].dtype.startswith(("int", "uint"))
        return Demand(node, 1) if integers else None
    position = _INDEXED.get(node.op)
    if position is None:
        return None
    shape = types[node.inputs[0]].shape
    if node.op == "RoiAlign":
        return Demand(node, position, shape[:1], wraps=False)
    if node.op == "MaxUnpool":
        made = types.get(node.outputs[0])
        if made is None or not made.static:
            return None
        size = math.prod(d for d in made.shape if isinstance(d, int))
        return Demand(node, position, (size,), wraps=False)
    if node.op in ("GatherND", "ScatterND"):
        first = int(node.attrs.get("batch_dims", 0))
        width = types[node.inputs[1]].shape[-1]
        last = first + width if isinstance(width, int) else first
        return Demand(node, position, shape[first:last])
    axis = int(node.attrs.get("axis", 0))
    return Demand(node, position, (shape[axis],)) if shape else None


def require(node: Node, inputs: Sequence[np.ndarray | None]) -> None:
    """Raise an error if operands of `node` do not meet its demand.

    Parameters
    ----------
    node : Node
        In canonical form.
    inputs : sequence of ndarray or None
        Its operands.

    Raises
    ------
    InputError
        If an index is out of range, or a divisor is 0.
    """
    if node.op not in _INDEXED and node.op not in ("Div", "Mod"):
        return
    types = {
        name: TensorType(value.shape, value.dtype.name)
        for name, value in zip(node.inputs, inputs, strict=False)
        if value is not None
    }
    demand = demands(node, types)
    values = inputs[demand.position] if demand is not None else None
    if demand is None or values is None:
        return
    if not meets(demand, values):
        raise InputError(str(demand))


def meets(demand: Demand, values: np.ndarray) -> bool:
    """Whether values meet the demand; symbolic dimensions are at least 1."""
    if not demand.sizes:
        return not (values == 0).any()
    # One bound, or one for each column.
    size = np.array([s if isinstance(s, int) else 1 for s in demand.sizes])
    wide = values.astype(np.int64)
    return not ((wide < (-size if demand.wraps else 0)) | (wide >= size)).any()


def met(
    demand: Demand,
    ranges: Mapping[str, tuple[int, int]],
    constants: Mapping[str, np.ndarray] | None = None,
) -> bool:
    """Whether the graph alone proves `demand`, from integer ranges or the values of constants."""
    value = (constants or {}).get(demand.operand)
    if value is not None:
        return meets(demand, value)
    if demand.operand not in ranges:
        return False
    low, high = ranges[demand.operand]
    if not demand.sizes:
        return low > 0 or high < 0
    sizes = [size for size in demand.sizes if isinstance(size, int)]
    if len(sizes) < len(demand.sizes):
        return low >= 0 and high < 1  # a symbolic dimension is at least 1
    return low >= (-min(sizes) if demand.wraps else 0) and high < min(sizes)


def integer_ranges(graph: Graph) -> dict[str, tuple[int, int]]:
    """Return bounds of integer tensors, derived from the operators that compute them."""
    ranges: dict[str, tuple[int, int]] = {}
    for name, value in graph.constants.items():
        if value.dtype.kind in "iub" and value.size:
            ranges[name] = int(value.min()), int(value.max())
    for name in graph.inputs:
        ranges.update(_of_type(name, graph))
    for node in graph.nodes:
        for out in node.outputs:
            if out and out in graph.types:
                ranges.update(_of_type(out, graph))
        span = _of_node(node, graph, ranges)
        if span is not None:
            ranges.update(dict.fromkeys((o for o in node.outputs if o), span))
        if node.op == "TopK" and (size := _extent(graph, node)) is not None:
            ranges[node.outputs[1]] = 0, size - 1
    return ranges


def _of_type(name: str, graph: Graph) -> dict[str, tuple[int, int]]:
    dtype = graph.types[name].dtype
    if dtype == "bool":
        return {name: (0, 1)}
    if dtype in ("int8", "uint8", "int16", "uint16"):
        info = np.iinfo(dtype)
        return {name: (int(info.min), int(info.max))}
    return {}


def _extent(graph: Graph, node: Node) -> int | None:
    shape = graph.types[node.inputs[0]].shape
    default = -1 if node.op == "TopK" else 0
    size = shape[int(node.attrs.get("axis", default))] if shape else 1
    return size if isinstance(size, int) else None


def _of_node(
    node: Node, graph: Graph, ranges: Mapping[str, tuple[int, int]]
) -> tuple[int, int] | None:
    known = [ranges.get(i) for i in node.inputs if i]
    if node.op in ("ArgMax", "ArgMin"):
        size = _extent(graph, node)
        return None if size is None else (0, size - 1)
    if graph.types[node.outputs[0]].dtype[0] not in "iu" or not known:
        return None
    first = known[0]
    if node.op in WHOLE_MOVES or node.op in _OTHER_MOVES:
        parts = known if node.op == "Concat" else known[:1]
        spans = [p for p in parts if p is not None]
        if len(spans) < len(parts):
            return None
        return min(s[0] for s in spans), max(s[1] for s in spans)
    if node.op == "Cast" and first is not None:
        info = np.iinfo(graph.types[node.outputs[0]].dtype)
        return first if info.min <= first[0] and first[1] <= info.max else None
    if node.op == "Clip" and len(known) == 3 and known[1] is not None and known[2] is not None:
        return (known[1][0], known[2][1]) if all(node.inputs[:3]) else None
    if node.op == "Mod" and known[1] is not None and known[1][0] > 0:
        if not node.attrs.get("fmod", 0):
            return 0, known[1][1] - 1  # the result has the sign of the divisor
        return 1 - known[1][1], known[1][1] - 1
    if node.op == "Where" and len(known) == 3 and known[1] is not None and known[2] is not None:
        return min(known[1][0], known[2][0]), max(known[1][1], known[2][1])
    return None


@dataclass(frozen=True)
class Limits:
    """Allowed values of an integer input."""

    low: int | None = None
    high: int | None = None
    """`low`, `high`: inclusive bounds; None if there is no limit."""
    nonzero: bool = False
    """Whether 0 is forbidden."""

    def __str__(self) -> str:
        span = f"{self.low} .. {self.high}" if self.low is not None else ""
        return " and ".join(filter(None, [span, "not 0" if self.nonzero else ""]))

    def broken(self, values: np.ndarray) -> np.ndarray:
        """Return a mask of the `values` that are not allowed."""
        bad = np.zeros(values.shape, bool)
        if self.low is not None and self.high is not None:
            bad |= (values < self.low) | (values > self.high)
        return bad | (values == 0) if self.nonzero else bad


NO_LIMITS = Limits()


def limits_of_inputs(graph: Graph) -> dict[str, Limits]:
    """Return the demands on whole inputs of the graph.

    If an operator uses only some elements of an input as indices, generated code checks them.
    """
    source = {name: name for name in graph.inputs}
    found: dict[str, Limits] = {}
    for node in graph.nodes:
        from_input = source.get(node.inputs[0]) if node.inputs else None
        if from_input is not None and _keeps_all(node, graph):
            source.update(dict.fromkeys(node.outputs, from_input))
        demand = demands(node, graph.types)
        name = source.get(demand.operand) if demand is not None else None
        if demand is None or name is None:
            continue
        old = found.get(name, Limits())
        if not demand.sizes:
            found[name] = Limits(old.low, old.high, True)
        elif is_static(demand.sizes):
            size = min(int(s) for s in demand.sizes)
            low = -size if demand.wraps else 0
            if len(set(demand.sizes)) > 1:  # each column has its own limits
                continue
            found[name] = Limits(
                low if old.low is None else max(low, old.low),
                size - 1 if old.high is None else min(size - 1, old.high),
                old.nonzero,
            )
    return found


def _keeps_all(node: Node, graph: Graph) -> bool:
    """Whether the output contains every element of the first input unchanged."""
    if node.op == "Cast":
        before, after = (graph.types[n].dtype for n in (node.inputs[0], node.outputs[0]))
        return before[0] in "iu" and after[0] in "iu" and np.can_cast(before, after)
    return node.op in WHOLE_MOVES
