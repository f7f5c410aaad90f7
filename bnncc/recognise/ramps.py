"""Recognise ramps (linear between two bounds) written as sums of piecewise linear functions.

    before: y = 0.5 * (Abs(x) - Abs(x - a) + a)      after: y = Clip(x, 0, a)
    before: y = Relu(x) - Relu(x - a)                after: y = Clip(x, 0, a)

In real numbers both sides are equal. In float32, the left side suffers from cancellation of numbers
of the size of x; the right side computes what is meant (by PACT, for example).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bnncc.ir.graph import Graph, Node
from bnncc.ir.halves import ROUND
from bnncc.ir.infer import infer_into

Array = np.ndarray

_MOST_KNOTS = 16
_NEAR = 1e-6
"""Tolerated deviation of a bound from a line, relative to the numbers that cancelled."""


@dataclass(frozen=True)
class _Bent:
    """A piecewise linear function: ``slopes[k] * x + offsets[k]`` between knots k - 1 and k.

    `size` is the magnitude of the summands; `joined` tells whether there were several.
    """

    source: str
    knots: Array
    slopes: Array
    offsets: Array
    size: float
    joined: bool = False

    def at(self, knots: Array) -> tuple[Array, Array]:
        """Return slopes and offsets for a superset of the knots."""
        ends = np.concatenate([knots, [np.inf]])
        place = np.searchsorted(self.knots, ends, side="left")
        return self.slopes[place], self.offsets[place]


class Ramp(NamedTuple):
    """``slope * source + offset``, clipped to two bounds."""

    source: str
    slope: float
    offset: float
    low: float
    high: float


def recognise_ramps(graph: Graph) -> None:
    """Replace sums of piecewise linear functions that are ramps by Clips.

    Runs after `simplify`.
    """
    ramps = find_ramps(graph)
    if not ramps:
        return
    seen = {name: ramps[name] for name in graph.tips(ramps)}
    graph.replace(lambda node: _clipped(node, seen.get(node.outputs[0]), graph))
    graph.prune()


def find_ramps(graph: Graph) -> dict[str, Ramp]:
    """Return the tensors that are ramps; computing them as Clips omits the rounding of sums.

    Parameters
    ----------
    graph : Graph
        In canonical form.
    """
    bent: dict[str, _Bent] = {}
    for node in graph.nodes:
        made = _bent(node, graph, bent)
        if made is not None and len(made.knots) <= _MOST_KNOTS:
            bent[node.outputs[0]] = made
    return {name: ramp for name, line in bent.items() if (ramp := _ramp(line)) is not None}


def _clipped(node: Node, ramp: Ramp | None, graph: Graph) -> list[Node] | None:
    if ramp is None:
        return None
    dtype = graph.types[ramp.source].dtype
    nodes, name = [], ramp.source

    def scalar(value: float) -> str:
        return graph.constant(np.array(value, dtype), f"{node.name}.ramp")

    for op, value, neutral in (("Mul", ramp.slope, 1.0), ("Add", ramp.offset, 0.0)):
        if value != neutral:
            made = graph.fresh(f"{node.outputs[0]}.line")
            nodes.append(Node(op, [name, scalar(value)], [made], {}, node.name))
            infer_into(nodes[-1], graph)
            name = made
    bounds = [scalar(ramp.low), scalar(ramp.high)]
    return [*nodes, Node("Clip", [name, *bounds], list(node.outputs), {}, node.name)]


def _ramp(line: _Bent) -> Ramp | None:
    """Return slope, offset and bounds of a function that is linear between bounds, or None."""
    knots, slopes, offsets = line.knots, line.slopes, line.offsets
    if not line.joined or len(slopes) < 3:
        return None
    flat = np.abs(slopes) <= _NEAR * np.abs(slopes).max()
    steep = np.flatnonzero(~flat)
    if not flat[0] or not flat[-1] or not len(steep) or (np.diff(steep) != 1).any():
        return None
    slope, offset = float(slopes[steep[0]]), float(offsets[steep[0]])
    near = _NEAR * line.size
    alike = np.abs(slopes[steep] - slope) <= _NEAR * abs(slope)
    if not alike.all() or (np.abs(offsets[steep] - offset) > near).any():
        return None
    first, last = float(offsets[0]), float(offsets[-1])
    bounds = [(offsets[: steep[0]], first), (offsets[steep[-1] + 1 :], last)]
    if any((np.abs(some - one) > near).any() for some, one in bounds):
        return None
    ends = slope * knots[steep[0] - 1] + offset, slope * knots[steep[-1]] + offset
    if abs(ends[0] - first) > near or abs(ends[1] - last) > near:
        return None  # discontinuous
    offset = offset if abs(offset) > near else 0.0
    return Ramp(line.source, slope, offset, min(first, last), max(first, last))


def _bent(node: Node, graph: Graph, bent: dict[str, _Bent]) -> _Bent | None:
    """Return a node's output as a piecewise linear function of a source tensor, or None."""
    if len([o for o in node.outputs if o]) != 1:
        return None
    rule = _RULES.get(node.op)
    kind = graph.types[node.outputs[0]]
    data = graph.computed(node.inputs)
    if rule is None or not data or not kind.dtype.startswith("float"):
        return None
    if any(graph.types[i] != kind for i in data):
        return None
    numbers = [graph.constants.get(i) if i else None for i in node.inputs]
    if any(v is not None and (v.size != 1 or not np.isfinite(v).all()) for v in numbers):
        return None
    values = [None if v is None else float(v.reshape(-1)[0]) for v in numbers]
    if len(set(data)) == 1:
        lines = [bent.get(data[0]) or _line(data[0])] * len(data)
    else:
        lines = [bent.get(i) or _line(i) for i in data]
        if len({line.source for line in lines}) > 1:
            return None
    given = iter(lines)
    operands = [next(given) if i in data else v for i, v in zip(node.inputs, values, strict=True)]
    return rule(*operands)


def _line(name: str) -> _Bent:
    return _Bent(name, np.zeros(0), np.ones(1), np.zeros(1), 0.0)


def _add(a: _Bent | float, b: _Bent | float) -> _Bent | None:
    if isinstance(b, _Bent) and not isinstance(a, _Bent):
        a, b = b, a
    if not isinstance(a, _Bent):
        return None
    if not isinstance(b, _Bent):
        return _Bent(a.source, a.knots, a.slopes, a.offsets + b, a.size + abs(b), a.joined)
    knots = np.unique(np.concatenate([a.knots, b.knots]))
    (s, o), (t, p) = a.at(knots), b.at(knots)
    return _Bent(a.source, knots, s + t, o + p, a.size + b.size, True)


def _scale(a: _Bent | float, b: _Bent | float) -> _Bent | None:
    if isinstance(b, _Bent) and not isinstance(a, _Bent):
        a, b = b, a
    if not isinstance(a, _Bent) or isinstance(b, _Bent) or b == 0:
        return None
    return _Bent(a.source, a.knots, a.slopes * b, a.offsets * b, a.size * abs(b), a.joined)


def _subtract(a: _Bent | float, b: _Bent | float) -> _Bent | None:
    less = _scale(b, -1.0) if isinstance(b, _Bent) else -b
    return None if less is None else _add(a, less)


def _divide(a: _Bent | float, b: _Bent | float) -> _Bent | None:
    return None if isinstance(b, _Bent) or not b else _scale(a, 1 / b)


def _above(a: _Bent, bound: float, below: float) -> _Bent:
    """Return `a` where it is at least `bound`, otherwise ``below * (a - bound) + bound``."""
    with np.errstate(all="ignore"):
        crossing = (bound - a.offsets) / a.slopes
    ends = np.concatenate([[-np.inf], a.knots, [np.inf]])
    inner = crossing[(a.slopes != 0) & (crossing > ends[:-1]) & (crossing < ends[1:])]
    knots = np.unique(np.concatenate([a.knots, inner]))
    slopes, offsets = a.at(knots)
    edges = np.concatenate([[-np.inf], knots, [np.inf]])
    low, high = np.where(np.isinf(edges[:-1]), edges[1:] - 1, edges[:-1]), edges[1:]
    with np.errstate(invalid="ignore", over="ignore"):  # without knots, there are no ends
        middle = np.where(np.isinf(high), low + 1, (low + high) / 2)
    middle = np.where(np.isfinite(middle), middle, 0.0)
    under = slopes * middle + offsets < bound
    slopes = np.where(under, below * slopes, slopes)
    offsets = np.where(under, below * (offsets - bound) + bound, offsets)
    return _Bent(a.source, knots, slopes, offsets, a.size + abs(bound), a.joined)


def _abs(a: _Bent) -> _Bent:
    return _above(a, 0.0, -1.0)


def _relu(a: _Bent) -> _Bent:
    return _above(a, 0.0, 0.0)


def _clip(a: _Bent | float, low: float | None = None, high: float | None = None) -> _Bent | None:
    if not isinstance(a, _Bent):
        return None
    made: _Bent | None = a if low is None else _above(a, low, 0.0)
    if high is not None and made is not None:
        turned = _scale(made, -1.0)
        made = None if turned is None else _scale(_above(turned, -high, 0.0), -1.0)
    return made


_RULES: dict[str, Callable[..., _Bent | None]] = {
    "Add": _add, "Sub": _subtract, "Mul": _scale, "Div": _divide, "Abs": _abs, "Relu": _relu,
    "Neg": lambda a: _scale(a, -1.0), "Clip": _clip, "Identity": lambda a: a, ROUND: lambda a: a,
}  # fmt: skip
