"""Turn a `bnncc.Levels` node into the step of a kernel that computes and stores levels.

    before: y = FewBitConv(x); z = BatchNormalization(y); q = bnncc.Levels(z)
    after:  k[c] = number of thresholds thr[c] that the accumulator reaches

If only monotone functions lie between an integer accumulator and the levels, the level is a step
function of the accumulator. Its thresholds are found by bisection, evaluating the model's own
float32 nodes. If one multiplication, addition and rounding of the accumulator reproduces the levels
on both sides of every threshold, the kernel does that; if not, it compares the accumulator with
the thresholds, unless they are too many. In all other cases the level is found from the float
value and the thresholds of the quantizer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from bnncc.ir.graph import Graph, Node
from bnncc.ir.magnitude import NORMAL
from bnncc.recognise.few_bit import FEW_BIT_CONV
from bnncc.recognise.lattice import exact_line, sign_values
from bnncc.recognise.monotone import direction, first_reached
from bnncc.topi_binary.layout import pad_lanes
from bnncc.topi_binary.spec import FewBitConv2d
from bnncc.topi_binary.step import Step, plane_count
from bnncc.transform.kernel_group import Event, Group, Writer
from bnncc.transform.physical import Physical, Planes
from bnncc.transform.thresholds import evaluate_chain

Array = np.ndarray[Any, Any]

MAX_COMPARED = 15
"""Up to this many levels, all thresholds are compared; above, those around an estimate. Without
vectors, an estimate takes less time than `MIN_SCALED` comparisons, and its table less memory."""

MIN_SCALED = 4
"""From this many levels on, a multiplication is cheaper than comparisons."""

MAX_ROUNDED = 2.0**20
"""Range in which adding and subtracting a constant rounds, see `bnncc.topi_binary.algebra`."""

EXACT = 2**24
"""Accumulators below this are exact in float32."""

_FAR = 2.0**24
"""Bound of the bias of a line; larger ones would lose digits of the product."""

_SMALLEST = np.float32(1e-45)


class Chain:
    """The value of a group as a function of its integer accumulator.

    Parameters
    ----------
    group : Group
        The group being realised.
    graph : Graph
        The logical graph.
    """

    def __init__(self, group: Group, graph: Graph) -> None:
        self.group, self.graph = group, graph
        self.nodes: list[Node] = []
        self.pure = group.spec.exact
        self.scale, self.offset = group.scale, group.offset
        self.low, self.high = -group.top, group.top

    def follow(self, event: Event) -> None:
        """Apply an event to the function."""
        if event.kind in ("tensor", "function", "pool"):
            self.pure = False
        elif event.kind == "apply" and event.node is not None:
            self.nodes.append(event.node)
            way = direction(event.node, self.graph, self.group.channels, self.group.rank)
            self.pure = self.pure and way is not None

    def at(self, acc: Array) -> Array:
        """Return the values for accumulators, both of shape (rows, channels)."""
        a, b = self.group.dot or (1, np.zeros(1))
        value = ((a * acc + b) * self.scale + self.offset).astype(np.float32)
        shape = (*value.shape, *(1,) * (self.group.rank - 2))
        return evaluate_chain(self.graph, self.nodes, value.reshape(shape)).reshape(value.shape)

    def thresholds(self, limits: Array) -> tuple[Array, Array]:
        """Return the accumulators from which on `limits` are reached.

        Parameters
        ----------
        limits : ndarray of float32, shape (count, channels)
            Thresholds of the value, ascending.

        Returns
        -------
        thresholds : ndarray of int64, shape (count, channels)
            For a channel that falls, thresholds of the negated accumulator.
        falling : ndarray of bool, shape (channels,)
            Whether the value falls with the accumulator.
        """
        channels = self.scale.shape[0]
        ends = [self.at(np.full((1, channels), end, np.int64))[0] for end in (self.low, self.high)]
        falling = ends[0] > ends[1]
        sign = np.where(falling, -1, 1)
        low = np.full(limits.shape, min(self.low, -self.high) - 1, np.int64)
        return first_reached(lambda at: self.at(at * sign) >= limits, low, -low), falling


def write(event: Event, writer: Writer, chain: Chain) -> None:
    """Write the step of a ``levels`` event and register its outputs.

    Parameters
    ----------
    event : Event
        A ``levels`` event; `layouts` are the forms required.
    chain : Chain
        The value up to the event.
    """
    assert event.node is not None
    values, forms = np.asarray(event.node.attrs["values"], np.float32), event.layouts
    line = exact_line(values) if "value" in forms else (0.0, 0.0)
    if line is None:
        forms = tuple("table" if form == "value" else form for form in forms)
    first, step = line or (0.0, 0.0)
    base = Step("levels", count=len(values) - 1, forms=forms, lo=first, hi=step)
    limits = np.asarray(event.node.attrs["thresholds"])
    _write(event.tensor, base, limits, writer, chain, [values] if line is None else [])


def _write(
    tensor: str,
    base: Step,
    limits: Array,
    writer: Writer,
    chain: Chain,
    table: Sequence[Array] = (),
) -> None:
    group, physical = writer.group, writer.physical
    rows = _rows(limits, group.channels)
    names = {
        form: [
            physical.graph.fresh(f"{tensor}.{form}")
            for _ in range(plane_count(base.count) if form == "planes" else 1)
        ]
        for form in base.forms
    }
    outputs = [name for form in base.forms for name in names[form]]
    exact = _from_accumulator(base, rows, chain) if chain.pure else None
    if exact is None:
        writer.flush()
        target = physical.target
        most = MIN_SCALED if target is not None and target.scalar else MAX_COMPARED
        exact = _from_value(base, limits, rows, most)
    step, inputs = exact
    given = [physical.constant(value, f"{tensor}.{step.way}") for value in inputs]
    given += [physical.constant(value, f"{tensor}.values") for value in table]
    writer.step(step, given, outputs)
    physical.levels[tensor] = {"value" if f == "table" else f: n for f, n in names.items()}


def _rows(limits: Array, channels: int) -> Array:
    if limits.ndim == 1:
        return np.repeat(limits[:, None], channels, axis=1)
    return np.ascontiguousarray(np.broadcast_to(limits, (channels, limits.shape[1])).T)


def _from_accumulator(base: Step, rows: Array, chain: Chain) -> tuple[Step, list[Array]] | None:
    """Return the step on integers and its inputs; None if it would need too many comparisons."""
    found, falling = chain.thresholds(rows)
    if base.count >= MIN_SCALED and chain.high < EXACT:
        line = _line(found, falling, chain)
        if line is not None:
            return replace(base, way="acc-scale"), [pad_lanes(v) for v in line]
    if base.count > MAX_COMPARED:
        return None
    # The step reads ~acc, which is -acc - 1: one less than the negated accumulator.
    wanted = found - falling
    lanes = np.stack([pad_lanes(row.astype(np.int32)) for row in wanted])
    if not falling.any():
        return replace(base, way="acc"), [lanes]
    return replace(base, way="acc", flip=True), [lanes, pad_lanes(-falling.astype(np.int32))]


def _line(found: Array, falling: Array, chain: Chain) -> tuple[Array, Array] | None:
    """Return scale and bias for which truncation gives the level of every accumulator, or None."""
    count = len(found)
    levels = np.arange(1, count + 1)[:, None]
    least, most = min(chain.low, -chain.high), max(chain.high, -chain.low)
    # In terms of the (negated) accumulator: `above` reaches the level, `below` does not.
    always, never = found <= least, found > most
    above = np.where(never, np.nan, np.clip(found, least, most))
    below = np.where(always, np.nan, np.clip(found - 1.0, least, most))
    inner = ~(always | never)
    first, last = inner.argmax(axis=0), count - 1 - inner[::-1].argmax(axis=0)
    channel = np.arange(found.shape[1])
    span = found[last, channel] - found[first, channel]
    steep = np.where(inner.any(axis=0) & (span > 0), (last - first) / np.maximum(span, 1), 0.0)
    steep = np.where(inner.any(axis=0) & (span <= 0), 1.0, steep)

    def room(scale: Array) -> tuple[Array, Array]:
        """Return the interval of biases for which a line with this scale is exact."""
        with np.errstate(all="ignore"):
            low = np.nanmax(np.where(np.isnan(above), -np.inf, levels - scale * above), axis=0)
            high = np.nanmin(np.where(np.isnan(below), np.inf, levels - scale * below), axis=0)
        return np.maximum(low, -_FAR), np.minimum(high, _FAR)

    # The width of this interval is concave in the scale: ternary search finds its maximum.
    ends = [steep * 0.75, steep * 1.5]
    for _ in range(50):
        inside = [ends[0] + (ends[1] - ends[0]) * part for part in (1 / 3, 2 / 3)]
        one, two = (high - low for low, high in map(room, inside))
        ends = [np.where(one < two, inside[0], ends[0]), np.where(one < two, ends[1], inside[1])]
    scale = (ends[0] + ends[1]) / 2
    low, high = room(scale)
    bias = ((low + high) / 2).astype(np.float32)
    factor = (scale * np.where(falling, -1, 1)).astype(np.float32)
    sign = np.where(falling, -1, 1)
    for fused in (False, True):
        for places, reached in ((above, True), (below, False)):
            given = np.where(np.isnan(places), 0, places) * sign
            acc = given.astype(np.float32)
            if fused:
                made = (acc.astype(np.longdouble) * factor + bias).astype(np.float32)
            else:
                made = acc * factor + bias
            level = np.trunc(np.clip(made, 0, count))
            right = (level >= levels) == reached
            if not (right | np.isnan(places)).all():
                return None
    return factor, bias


def _from_value(base: Step, limits: Array, rows: Array, most: int) -> tuple[Step, list[Array]]:
    """Return the step on floats and its inputs; it compares at most `most` thresholds if it can."""
    small = (np.abs(limits) < NORMAL) & (limits != 0)
    base = replace(base, compare="place" if small.any() else "ge")
    if base.count >= MIN_SCALED and (ends := _rounding(limits)) is not None:
        return replace(base, way="round"), [ends]
    if base.count > most and limits.ndim == 1:
        table = _guess(limits)
        if table is not None:
            return replace(base, way="search"), [table]
    lanes = np.stack([pad_lanes(row.astype(np.float32), np.inf) for row in rows])
    return replace(base, way="value"), [lanes]


def _rounding(limits: Array) -> Array | None:
    """Return the first and last integer if thresholds are the ties between them; else None."""
    if limits.ndim > 1 or np.abs(limits).max() >= MAX_ROUNDED:
        return None
    first = np.float32(np.floor(limits[0]))
    ties = first + np.arange(len(limits), dtype=np.float32) + np.float32(0.5)
    ups = np.rint(ties) > ties
    exact = np.where(ups, ties, np.nextafter(ties, np.float32(np.inf)))
    return np.array([first, first + len(limits)], np.float32) if (exact == limits).all() else None


def _guess(limits: Array) -> Array | None:
    """Return the table of a search, if a linear estimate is off by at most one level."""
    count = len(limits)
    span = np.float64(limits[-1]) - np.float64(limits[0])
    if not span > 0:
        return None
    slope = np.float32((count - 1) / span)
    offset = np.float32(1 - np.float64(limits[0]) * slope)
    levels = np.arange(1, count + 1)
    at = np.trunc(np.clip(limits * slope + offset, 0, count))
    under = np.nextafter(limits, np.float32(-np.inf))
    before = np.trunc(np.clip(under * slope + offset, 0, count))
    if (np.abs(at - levels) > 1).any() or (np.abs(before - (levels - 1)) > 1).any():
        return None
    ends = np.float32(np.inf)
    return np.concatenate([[slope, offset, -ends], limits, [ends]]).astype(np.float32)


def sign(event: Event, writer: Writer, chain: Chain) -> bool:
    """Write a sign after a few-bit layer as a level of one bit.

    Parameters
    ----------
    event : Event
        A ``sign`` event.
    chain : Chain
        The value up to the event.

    Returns
    -------
    bool
        False if it must be written like other signs.
    """
    node = event.node
    assert node is not None
    kind = str(node.attrs["zero"])
    if not isinstance(writer.group.spec, FewBitConv2d) or not chain.pure or kind == "mid":
        return False
    if node.attrs.get("flip") is not None:
        return False
    limit = np.array([0.0 if kind == "ge" else _SMALLEST], np.float32)
    _write(event.tensor, Step("levels", count=1, forms=("planes",)), limit, writer, chain)
    (plane,) = writer.physical.levels.pop(event.tensor)["planes"]
    value = sign_values(float(node.attrs["lo"]), float(node.attrs["hi"]))
    writer.physical.planes[event.tensor] = Planes(plane, None, value)
    return True


def settle(
    event: Event, group: Group, physical: Physical,
    logical: Callable[[str, Group, Physical], str],
) -> None:  # fmt: skip
    """Reshape outputs of a ``levels`` event to the graph's rank; ``value`` becomes a float form."""
    names = physical.levels[event.tensor]
    names = {f: [logical(name, group, physical) for name in made] for f, made in names.items()}
    value = names.pop("value", None)
    if value is not None:
        layout = "NHWC" if group.rank == 4 else "NCHW"
        physical.floats.setdefault(event.tensor, {})[layout] = value[0]
    physical.levels[event.tensor] = names
    if not names:
        del physical.levels[event.tensor]


def wanted_forms(
    graph: Graph, few: Collection[str], routed: Collection[str]
) -> dict[str, tuple[str, ...]]:
    """Return the forms in which each few-valued tensor is read.

    Parameters
    ----------
    few : collection of str
        Few-valued tensors of the graph, except signs.
    routed : collection of str
        Operators that move planes.

    Returns
    -------
    dict of str to tuple of str
        Forms of `step.FORMS`.
    """
    wanted: dict[str, set[str]] = {name: set() for name in few}
    for name in graph.outputs:
        wanted.get(name, set()).add("value")
    for node in reversed(graph.nodes):
        for name in node.inputs:
            if name not in wanted:
                continue
            if node.op == FEW_BIT_CONV:
                wanted[name].add(node.attrs["spec"].form)
                continue
            out = wanted.get(node.outputs[0], {"value"})
            if node.op in routed and out - {"value"}:
                wanted[name].add("planes")
            else:
                wanted[name].add("value")
    return {name: tuple(sorted(forms)) for name, forms in wanted.items()}
