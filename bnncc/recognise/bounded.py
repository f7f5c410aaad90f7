"""Find roundings whose results are bounded by how their data are computed.

    before: s = Div(127, ReduceMax(Abs(x))); r = Round(Mul(x, s))
    after:  s = Div(127, ReduceMax(Abs(x))); q = Round(Mul(x, s)); r = Clip(q, -127, 127)

Quantizers of BinaryBERT, TernaryBERT and LLM-QAT have no Clip: a number divided by the largest one
of its row, or of its tensor, is at most 1, also after rounding, since division is monotone. The
Clip changes no number, and makes `recognise_quantizers` find the levels.

A row of zeros without an epsilon is 0 / 0. What is rounded is then multiplied by ``m / m``, which
is exactly 1 for all other rows, so that the result is NaN as the model's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bnncc.ir.dims import Dim
from bnncc.ir.graph import Graph, Node
from bnncc.ir.infer import infer_into
from bnncc.ir.moves import VIEW, VIEWS
from bnncc.ir.pieces import Expression

_SLACK = 1e-5
"""Relative bound of the rounding errors of a handful of operators."""

_LEVELS = 256
"""Maximum number of integers that a quantizer of 8 bits gives."""

_SAME_ORDER = VIEWS | {VIEW}
_ABOVE, _BELOW = "at least x", "at least -x"
_OTHER = {_ABOVE: _BELOW, _BELOW: _ABOVE}


def bound_roundings(graph: Graph) -> None:
    """Limit roundings to the integers that they can give, if these are at most 256.

    Parameters
    ----------
    graph : Graph
        Before `recognise_quantizers`; modified in place.
    """
    look, consumers = _Look(graph, graph.producers()), graph.consumers()

    def limited(node: Node) -> list[Node] | None:
        if node.op not in _BOUNDS or graph.types[node.outputs[0]].dtype != "float32":
            return None
        readers = consumers.get(node.outputs[0], [])
        if all(r.op == "Clip" and all((r.input(1), r.input(2))) for r in readers):
            return None
        found = look.range_of(node.inputs[0])
        if found is None:
            return None
        low, high = _BOUNDS[node.op](found)
        if not 0 < high - low < _LEVELS:
            return None
        write = Expression(node, graph)
        made = write(node.op, *node.inputs, **node.attrs)
        made = write("Clip", made, write.constant(low), write.constant(high))
        wraps = any(r.op == "Cast" for r in readers)  # NaN as an integer is undefined
        if not wraps and not look.positive(found.by):
            made = write("Mul", made, write("Div", found.by, found.by))
        for piece in write.nodes:
            infer_into(piece, graph)
        return write.result(made)

    graph.replace(limited)


@dataclass(frozen=True)
class _Range:
    """Bounds of a tensor that is a quotient, up to rounding errors."""

    low: float
    high: float
    by: str
    """What it was divided by: not negative, and it may be 0."""

    def times(self, factor: float) -> _Range:
        """Return the bounds of the tensor times a number."""
        ends = sorted((self.low * factor, self.high * factor))
        return _Range(ends[0], ends[1], self.by)

    def plus(self, number: float) -> _Range:
        """Return the bounds of the tensor plus a number."""
        return _Range(self.low + number, self.high + number, self.by)

    def ends(self) -> tuple[float, float]:
        """Return the bounds with rounding errors."""
        slack = _SLACK * max(abs(self.low), abs(self.high))
        return self.low - slack, self.high + slack


_BOUNDS = {
    "Round": lambda found: tuple(float(np.rint(end)) for end in found.ends()),
    "Floor": lambda found: tuple(float(np.floor(end)) for end in found.ends()),
    "Ceil": lambda found: tuple(float(np.ceil(end)) for end in found.ends()),
}


@dataclass(frozen=True)
class _Look:
    """A graph and its producers; what its tensors are known to be at least, or at most."""

    graph: Graph
    producers: dict[str, Node]

    def made(self, name: str, *ops: str) -> Node | None:
        """Return the producer of a tensor if it is one of some operators."""
        node = self.producers.get(name)
        return node if node is not None and node.op in ops else None

    def number(self, name: str) -> float | None:
        """Return the value of a constant with one element, if it is finite."""
        value = self.graph.constants.get(name)
        if value is None or value.size != 1 or not np.isfinite(value).all():
            return None
        return float(value.reshape(-1)[0])

    def by_number(self, node: Node | None) -> tuple[str, float, bool] | None:
        """Return the data and number of an operator on both, and whether the number is first."""
        if node is None or len(node.inputs) != 2:
            return None
        for place in (1, 0):
            value = self.number(node.inputs[place])
            if value is not None:
                return node.inputs[1 - place], value, place == 0
        return None

    # ------------------------------------------------------------------------------- quotients

    def range_of(self, name: str) -> _Range | None:
        """Return the bounds of a tensor that is a quotient, times and plus numbers."""
        node = self.made(name, "Mul", "Div", "Add", "Sub")
        if node is None:
            return None
        found = self.by_number(node)
        if found is not None:
            data, value, first = found
            inner = None if first and node.op == "Div" else self.range_of(data)
            if inner is None:
                return None
            if node.op in ("Mul", "Div"):
                return inner.times(value if node.op == "Mul" else 1 / value) if value else None
            if node.op == "Add":
                return inner.plus(value)
            return inner.times(-1).plus(value) if first else inner.plus(-value)
        if node.op == "Div":
            return self.quotient(node.inputs[0], node.inputs[1])
        if node.op == "Mul":
            for data, other in (node.inputs, node.inputs[::-1]):
                inverse = self.inverse(other)
                held = None if inverse is None else self.quotient(data, inverse[0])
                if inverse is not None and held is not None:
                    return held.times(inverse[1])
        return None

    def inverse(self, name: str) -> tuple[str, float] | None:
        """Return b and c if a tensor is c / b, c > 0."""
        node = self.made(name, "Div", "Reciprocal", "Mul")
        if node is None:
            return None
        if node.op == "Reciprocal":
            return node.inputs[0], 1.0
        found = self.by_number(node)
        if found is None or found[1] <= 0:
            return None
        data, value, first = found
        if node.op == "Div" and first:
            return data, value
        inner = self.inverse(data)
        return inner and (inner[0], inner[1] * (value if node.op == "Mul" else 1 / value))

    def quotient(self, data: str, by: str) -> _Range | None:
        """Return the bounds of a quotient whose divisor is at least as large as its data."""
        factor, inner = 1.0, by
        while True:
            if self.spans(inner, data):
                return _Range(0.0, factor, by)
            if self.reach(inner, data) == {_ABOVE, _BELOW}:
                return _Range(-factor, factor, by)
            node = self.made(inner, "Mul", "Div", "Clip", "Add", "Expand", "Identity")
            if node is not None and self.grows(node):
                inner = self.grown(node)
                continue
            found = self.by_number(node) if node is not None else None
            if node is None or found is None or found[1] <= 0 or node.op not in ("Mul", "Div"):
                break
            if node.op == "Div" and found[2]:
                break
            inner = found[0]
            factor = factor / found[1] if node.op == "Mul" else factor * found[1]
        node = self.made(data, "Mul", "Div")
        found = self.by_number(node)
        if node is None or found is None or not found[1] or (node.op == "Div" and found[2]):
            return None
        held = self.quotient(found[0], by)
        return held and held.times(found[1] if node.op == "Mul" else 1 / found[1])

    # ---------------------------------------------------------------------------- inequalities

    def grows(self, node: Node) -> bool:
        """Whether a node gives its data or larger numbers, each in its place."""
        if node.op == "Clip":
            return bool(node.input(1)) and not node.input(2)
        if node.op == "Add":
            found = self.by_number(node)
            return found is not None and found[1] >= 0
        shapes = (self.graph.types[i].shape for i in (node.inputs[0], node.outputs[0]))
        return node.op == "Identity" or (node.op == "Expand" and len({len(s) for s in shapes}) == 1)

    def grown(self, node: Node) -> str:
        """Return the data of a node that `grows`."""
        return node.inputs[1] if node.inputs[0] in self.graph.constants else node.inputs[0]

    def reach(self, name: str, data: str) -> set[str]:
        """Return which of x and -x a tensor is at least, for the elements x of `data`."""
        node = self.producers.get(name)
        if node is None:
            return set()
        if (held := self.reduced(name, "ReduceMax", data)) is not None:
            if held == data:
                return {_ABOVE}
            inner = self.made(held, "Abs", "Neg")
            same = inner is not None and inner.inputs[0] == data
            return (
                ({_ABOVE, _BELOW} if inner.op == "Abs" else {_BELOW}) if inner and same else set()
            )
        if node.op == "Max":
            return set().union(*(self.reach(i, data) for i in node.inputs))
        if node.op == "Abs":
            below = self.below(node.inputs[0], data)
            return self.reach(node.inputs[0], data) | {_OTHER[one] for one in below}
        if node.op == "Neg":
            return {_OTHER[one] for one in self.below(node.inputs[0], data)}
        return self.reach(self.grown(node), data) if self.grows(node) else set()

    def below(self, name: str, data: str) -> set[str]:
        """Return which of x and -x a tensor is at most: by the names of `reach`."""
        node = self.producers.get(name)
        if node is None:
            return set()
        if (held := self.reduced(name, "ReduceMin", data)) is not None:
            return {_ABOVE} if held == data else set()
        if node.op == "Min":
            return set().union(*(self.below(i, data) for i in node.inputs))
        if node.op == "Neg":
            return {_OTHER[one] for one in self.reach(node.inputs[0], data)}
        if node.op == "Clip" and node.input(2) and not node.input(1):
            return self.below(node.inputs[0], data)
        return set()

    def spans(self, by: str, data: str) -> bool:
        """Whether ``by = high - low`` and ``data = x - low`` with low <= x <= high."""
        part = self.made(data, "Sub")
        whole = self.made(self.origin(by), "Sub")
        if part is None or whole is None:
            return False
        (x, low), (high, other) = part.inputs, whole.inputs
        if _ABOVE not in self.below(low, x):
            return False
        if other == low:
            return whole.outputs[0] == by and _ABOVE in self.reach(high, x)
        # Subtracted without the reduced axis: both in the order, and the shape, of `low`.
        most = self.made(self.origin(high), "ReduceMax")
        least = self.made(self.origin(low), "ReduceMin")
        if self.origin(other) != self.origin(low) or most is None or least is None:
            return False
        types = self.graph.types
        kept = [_kept(end, self.graph, types[x].shape) for end in (most, least)]
        same = most.inputs[0] == least.inputs[0] == x and kept[0] == kept[1]
        shapes = [types[i].shape for i in (high, other)]
        return same and shapes[0] == shapes[1] and types[by].shape == types[low].shape

    def origin(self, name: str) -> str:
        """Return the tensor with the same values in the same order that is computed first."""
        while (node := self.made(name, *_SAME_ORDER)) is not None:
            name = node.inputs[0]
        return name

    def reduced(self, name: str, op: str, data: str) -> str | None:
        """Return what a tensor is the maximum or minimum of, so that it broadcasts with `data`.

        It must have the shape of `data` with 1 for the axes of the reduction, or one element.
        """
        kind = self.graph.types[name].shape
        single = all(d == 1 for d in kind)
        node = self.made(self.origin(name), op)
        if node is None:
            return None
        source = node.inputs[0]
        shape = self.graph.types[source].shape
        if shape != self.graph.types[data].shape:
            return None
        kept = _kept(node, self.graph, shape)
        if kept is None or (kind != kept and not (single and all(d == 1 for d in kept))):
            return None
        return source

    def positive(self, name: str) -> bool:
        """Whether a divisor, which is not negative, cannot be 0."""
        node = self.made(name, "Clip", "Add", "Mul", "Div", "Expand", *_SAME_ORDER)
        if node is None:
            return False
        if node.op == "Clip" and (low := self.number(node.input(1))) is not None and low > 0:
            return True
        found = self.by_number(node)
        if node.op == "Add" and found is not None:
            return found[1] > 0 or self.positive(found[0])
        if node.op in ("Mul", "Div") and found is not None:
            return not (node.op == "Div" and found[2]) and self.positive(found[0])
        return node.op in ("Expand", *_SAME_ORDER) and self.positive(node.inputs[0])


def _kept(node: Node, graph: Graph, shape: tuple[Dim, ...]) -> tuple[Dim, ...] | None:
    """Return the shape of a reduction's data with 1 for its axes."""
    axes = graph.constants.get(node.input(1))
    if node.input(1) and axes is None:
        return None
    if axes is None or not axes.size:
        if node.attrs.get("noop_with_empty_axes"):
            return None
        places = set(range(len(shape)))
    else:
        places = {int(a) % len(shape) for a in axes.reshape(-1)}
    return tuple(1 if k in places else d for k, d in enumerate(shape))
