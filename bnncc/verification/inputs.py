"""Choose the inputs on which a graph is checked, near the steps and kinks of its nodes.

Random numbers around 0 miss most of what can go wrong: a clip at 6, a step at 127.5, an index. So
functions of single values are followed from each input, and where one of them has a step or a kink,
its place, in terms of the input, becomes a *point* of the input's `Source`. On an exact way (moves,
powers of two) the point and its neighbours are taken; where values are rounded on the way, the
nearest numbers that rounding cannot bring to the other side, so that points make no ties.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from bnncc.errors import BnnccError
from bnncc.ir.evaluate import evaluate
from bnncc.ir.graph import Graph, Node
from bnncc.ir.halves import NARROW, ROUND, is_float
from bnncc.ir.magnitude import NORMAL
from bnncc.ir.moves import MOVES, PIXEL_SHUFFLES, REPEATS
from bnncc.ir.quantizers import LEVELS, MULTI_THRESHOLD, QUANT, integer_range
from bnncc.runtime.manifest import TensorInfo
from bnncc.runtime.selfcheck import STYLES, Source, draw

Array = np.ndarray[Any, Any]
Range = tuple[float, float]

_MOST_POINTS = 96
_MOST_WAYS = 32
_MOST_STEPS = 256
_SMALLEST = 1e-6
"""Points nearer to 0 do not say what range an input has."""
_NARROWER = ((0, 126), (0, 15), (0, 3), (0, 1), (0, 0), (1, 1))
"""Ranges tried where a graph cannot be evaluated on ordinary integers."""
_NARROW_FLOATS = ((0.5, 0.125), (0.0, 2.0**-10), (3.5, 0.125), (-0.5, 0.125))
"""The same for floats from which indices or divisors are computed: mean and standard deviation."""

_ULPS = 64 * float(np.finfo(np.float32).eps)
_MOVES = MOVES | REPEATS | PIXEL_SHUFFLES | {
    "Pad", "Concat", "MaxPool", "GlobalMaxPool", "Dropout", "Cast", "Resize",
}  # fmt: skip
_KINKS: dict[str, tuple[float, ...]] = {
    "Relu": (0.0,), "LeakyRelu": (0.0,), "PRelu": (0.0,), "Abs": (0.0,), "Sign": (0.0,),
    "HardSwish": (-3.0, 3.0), "Elu": (0.0,), "Selu": (0.0,), "Celu": (0.0,),
}  # fmt: skip
_ROUNDING = frozenset(("Round", "Floor", "Ceil"))
_COMPARISONS = frozenset(("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal"))


@dataclass(frozen=True)
class _Way:
    """How a tensor comes from an input: ``slope * input + offset``, exactly or rounded."""

    source: str
    slope: float = 1.0
    offset: float = 0.0
    exact: bool = True


class Inputs(NamedTuple):
    """How to draw the inputs of a graph."""

    sources: tuple[Source, ...]
    """One for each input, with which the graph can be evaluated."""
    styles: tuple[str, ...]
    """The styles to draw."""
    outputs: tuple[dict[str, Array], ...] = ()
    """If it was tried: what the graph makes of inputs of these styles, with seeds in a row."""


def sources(
    graph: Graph, infos: Sequence[TensorInfo], seed: int = 0, styles: Sequence[str] = STYLES
) -> Inputs:
    """Return where the values of each input of `graph` come from.

    Parameters
    ----------
    graph : Graph
        As loaded.
    infos : sequence of TensorInfo
        Of its inputs.
    seed : int
        Of the inputs that it is tried with.
    styles : sequence of str
        What to draw; the first alone if floats are used as indices or divisors.

    Returns
    -------
    Inputs
        With `outputs` if `graph` was tried, which it is unless any inputs will do.

    Raises
    ------
    BnnccError
        If there are none: the error of the evaluation.
    """
    changes = points(graph)
    made = [_source(info, changes.get(info.name, [])) for info in infos]
    whole = any(info.dtype[0] in "iu" for info in infos)
    if not _delicate(graph) and not whole:
        return Inputs(tuple(made), STYLES)
    failed: BnnccError | None = None
    best: Inputs | None = None
    most = -1
    for integers, floats in _narrower(infos):
        tried = tuple(
            _narrowed(source, info, integers, floats)
            for source, info in zip(made, infos, strict=True)
        )
        if best and floats is not None:
            break
        drawn = tuple(styles if floats is None else styles[:1])
        try:
            values = [
                evaluate(graph, draw(infos, tried, style, seed + number))
                for number, style in enumerate(drawn)
            ]
        except BnnccError as error:
            failed = failed or error
            continue
        # A mask may be multiplied by the least number; magnitudes of floats may be too large.
        count = sum(map(finite, values))
        found = Inputs(tried, drawn, tuple(values))
        if not whole or all(map(finite, values[: STYLES.index("wide")])):
            return found
        if count > most:
            best, most = found, count
    if best:
        return best
    assert failed is not None
    raise failed


def finite(values: Mapping[str, Array]) -> bool:
    """Whether all numbers are finite."""
    return all(np.isfinite(v.astype(np.float64)).all() for v in values.values() if is_float(v))


def _narrower(infos: Sequence[TensorInfo]) -> Iterator[tuple[Range | None, Range | None]]:
    """Yield ranges of integers, and means and deviations of floats, to try."""
    integers: tuple[Range | None, ...] = (None,)
    if any(info.dtype[0] in "iu" for info in infos):
        integers += _NARROWER
    floats: tuple[Range | None, ...] = (None,)
    if any(info.dtype[0] == "f" for info in infos):
        floats += _NARROW_FLOATS
    for other in floats:
        for span in integers:
            yield span, other


def _delicate(graph: Graph) -> bool:
    """Whether evaluation may fail on some integers."""
    from bnncc.ir.demands import demands

    return any(demands(node, graph.types) is not None for node in graph.nodes)


def _narrowed(
    source: Source, info: TensorInfo, integers: Range | None, floats: Range | None
) -> Source:
    if info.dtype[0] in "iu" and integers is not None:
        low, high = max(integers[0], source.low), min(integers[1], source.high)
        return replace(source, low=int(low), high=int(high)) if low <= high else source
    if info.dtype[0] == "f" and floats is not None:
        return replace(source, center=floats[0], scale=floats[1])
    return source


def _source(info: TensorInfo, found: list[float]) -> Source:
    source = Source.of(info.dtype, info.limits)
    if info.dtype[0] != "f":
        return source
    kept = _thinned(found)
    center, scale = 0.0, 1.0
    if kept:
        low, high = min(kept), max(kept)
        reach = max(abs(low), abs(high))
        if reach > 8 or _SMALLEST < reach < 0.125:  # its real range
            center = (low + high) / 2 if low >= 0 or high <= 0 else 0.0
            scale = max((high - low) / 3, reach / 3)
    return replace(source, points=tuple(kept), center=center, scale=scale)


def _thinned(found: Iterable[float]) -> list[float]:
    with np.errstate(over="ignore"):
        values = np.unique(np.array(list(found), np.float32))
    values = values[np.isfinite(values)]
    if values.size > _MOST_POINTS:
        values = values[np.linspace(0, values.size - 1, _MOST_POINTS).round().astype(int)]
    return [float(v) for v in values]


def points(graph: Graph) -> dict[str, list[float]]:
    """Return, for each float input, where a function of its single values has steps or kinks."""
    ways: dict[str, tuple[_Way, ...]] = {
        name: (_Way(name),) for name in graph.inputs if graph.types[name].dtype[0] == "f"
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for node in graph.nodes:
        data = next((i for i in node.inputs if i in ways), None)
        if data is None:
            continue
        for way in ways[data]:
            for place in _places(node, data, graph):
                found[way.source] += _around(way, place)
        onward = _onward(node, data, ways[data], graph)
        if onward:
            ways.update(dict.fromkeys((o for o in node.outputs if o), onward))
    return found


def _around(way: _Way, place: float) -> list[float]:
    """Return the input that `way` maps to `place`, and its neighbours."""
    if not way.slope or not np.isfinite(place):
        return []
    x = (place - way.offset) / way.slope
    near = np.float32(x)
    if way.exact and float(near) == x:
        if abs(near) < NORMAL:  # what is less, some processors take for 0
            return [-NORMAL, 0.0, NORMAL]
        return [float(near), *(float(np.nextafter(near, np.float32(d))) for d in (-np.inf, np.inf))]
    slack = _ULPS * (abs(x) + (abs(way.offset) + abs(place)) / abs(way.slope))
    return [x - slack, x + slack]


def _constant(name: str, graph: Graph) -> list[float] | None:
    """Return the different values of a constant, if there are few."""
    value = graph.constants.get(name)
    if value is None or value.dtype.kind not in "fiu" or not value.size:
        return None
    different = np.unique(value.astype(np.float64))
    return [float(v) for v in different[:: max(1, different.size // _MOST_WAYS)]]


def _places(node: Node, data: str, graph: Graph) -> list[float]:
    """Return at which values of `data` the node's function has a step or a kink."""
    if node.op in _KINKS:
        return list(_KINKS[node.op])
    if node.op in ("Clip", "Max", "Min", *_COMPARISONS):
        others = [_constant(i, graph) for i in node.inputs if i and i != data]
        return [v for values in others if values for v in values if abs(v) < 1e30]
    if node.op in _ROUNDING:
        half = 0.5 if node.op == "Round" else 0.0
        return [sign * (k + half) for k in (*range(9), 14, 15, 126, 127, 254) for sign in (-1, 1)]
    if node.op == "HardSigmoid":
        alpha, beta = float(node.attrs.get("alpha", 0.2)), float(node.attrs.get("beta", 0.5))
        return [-beta / alpha, (1 - beta) / alpha] if alpha else []
    if node.op == "ThresholdedRelu":
        return [float(node.attrs.get("alpha", 1.0))]
    if node.op in ("HardTanh", "Shrink"):
        bound = float(node.attrs.get("lambd", 0.5))
        return [-bound, bound]
    if node.op == LEVELS:
        return [float(v) for v in np.unique(node.attrs["thresholds"])][:_MOST_STEPS]
    if node.op == MULTI_THRESHOLD:
        return _constant(node.inputs[1], graph) or []
    if node.op in (QUANT, "QuantizeLinear"):
        return _steps(node, graph)
    return []


def _steps(node: Node, graph: Graph) -> list[float]:
    """Return where a quantizer steps."""
    scales = _constant(node.inputs[1], graph)
    if not scales:
        return []
    zeros = _constant(node.inputs[2], graph) if node.input(2) else None
    zero = zeros[0] if zeros else 0.0
    if node.op == QUANT:
        widths = _constant(node.inputs[3], graph)
        bits = widths[0] if widths else 8.0
        low, high = integer_range(
            bits, signed=bool(node.attrs.get("signed", 1)), narrow=bool(node.attrs.get("narrow", 0))
        )
    else:
        kind = graph.types[node.outputs[0]].dtype
        low, high = (0.0, 255.0) if kind.startswith("u") else (-128.0, 127.0)
    count = min(int(high - low) + 1, _MOST_STEPS)
    levels = np.unique(np.linspace(low, high, count).round())
    return [(float(v) + 0.5 - zero) * scale for scale in scales[:4] for v in levels]


def _onward(node: Node, data: str, ways: tuple[_Way, ...], graph: Graph) -> tuple[_Way, ...]:
    """Return the ways to the outputs of `node`; none if it is not a function of single values."""
    if node.op in _MOVES or node.op in (
        "Relu",
        "Clip",
        "LeakyRelu",
        "PRelu",
        "Abs",
        "Max",
        "Min",
        ROUND,
        NARROW,
    ):
        return ways if graph.types[node.outputs[0]].dtype[0] == "f" else ()
    if node.op in _ROUNDING:  # by at most a half: good enough for ranges
        return tuple(replace(w, exact=False) for w in ways)
    if node.op == "Neg":
        return tuple(replace(w, slope=-w.slope, offset=-w.offset) for w in ways)
    if node.op == "BatchNormalization" and data == node.inputs[0]:
        params = [graph.constants.get(i) for i in node.inputs[1:5]]
        if any(p is None for p in params):
            return ()
        gamma, beta, mean, var = (np.asarray(p, np.float64).reshape(-1) for p in params)
        slope = gamma / np.sqrt(var + float(node.attrs.get("epsilon", 1e-5)))
        return _mapped(ways, [(float(a), float(b)) for a, b in zip(slope, beta - mean * slope,
                                                                   strict=True)])  # fmt: skip
    if node.op in ("Add", "Sub", "Mul", "Div") and len(node.inputs) == 2:
        first = node.inputs[0] == data
        values = _constant(node.inputs[1 if first else 0], graph)
        if not values or (node.op == "Div" and (not first or 0.0 in values)):
            return ()
        lines = {
            "Add": [(1.0, v) for v in values],
            "Sub": [(1.0, -v) if first else (-1.0, v) for v in values],
            "Mul": [(v, 0.0) for v in values],
            "Div": [(1 / v, 0.0) for v in values] if 0.0 not in values else [],
        }
        return _mapped(ways, lines[node.op])
    return ()


def _mapped(ways: tuple[_Way, ...], lines: Sequence[tuple[float, float]]) -> tuple[_Way, ...]:
    made = [
        _Way(
            w.source, a * w.slope, a * w.offset + b,
            w.exact and not b and not w.offset and abs(np.frexp(a)[0]) == 0.5,
        )
        for a, b in lines
        for w in ways
    ]  # fmt: skip
    return tuple(made[:: max(1, -(-len(made) // _MOST_WAYS))])
