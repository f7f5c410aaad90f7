"""Recognise decisions in all their spellings.

    before: c = GreaterOrEqual(x, 0); y = Where(c, 1, -1)    after: y = bnncc.Sign(x)
    before: s = Sign(x); t = Add(s, 0.1); y = Sign(t)        after: y = bnncc.Sign(x)
    before: c = Greater(x, T); f = Cast(c)                   after: d = Sub(x, T); f = bnncc.Sign(d)
    before: a = Greater(x, t); b = Less(x, u); y = Sub(a, b)      after: y = bnncc.Levels(x)

A tensor is looked at as a *step function* of one real source tensor: constant on the pieces into
which a few cuts divide the real line. Comparisons and `Sign` start one; any elementwise operator
over step functions of the same source (and scalar constants), or a table looked up by one, gives
another, computed by evaluating the operator on the pieces. Where sources differ but are rising or
falling functions of one tensor, cuts are found in that. No operator name but the starting ones
matters, so every spelling made of `Where`, `Cast`, `Not`, `Mul`, `Add`, `Clip`, `Equal`, ... is
found. The outermost tensor of such a chain that takes two values becomes a `bnncc.Sign` node, as
does one that takes a third one at a single point, half-way; one of evenly spaced values becomes a
`bnncc.Levels` node.

`bnncc.Sign` has attributes ``lo`` and ``hi``, its values for negative and positive input, and
``zero``: ``ge`` (0 gives `hi`), ``gt`` (0 gives `lo`) or ``mid`` (0 gives ``(lo + hi) / 2``: ONNX
and torch `Sign`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bnncc.ir.graph import Graph, Node
from bnncc.ir.quantizers import LEVELS
from bnncc.recognise.lattice import UNEVEN, decided_as_rows, evenly, unevenness
from bnncc.recognise.monotone import step_at
from bnncc.recognise.step_functions import FAR, StepFunction, analyse

_NON_NEGATIVE = {"Relu", "Abs", "Sigmoid", "Exp", "Sqrt", "Softmax", "HardSigmoid", "Softplus"}


def recognise_signs(graph: Graph, *, sign_zero: str = "exact") -> None:
    """Replace every sign chain in `graph` by one `bnncc.Sign` node, or `bnncc.Levels` node.

    Parameters
    ----------
    graph : Graph
        Rewritten in place.
    sign_zero : {"exact", "+1", "-1"}
        What a three-valued sign gives for zero: ``exact`` keeps the graph's own 0.
    """
    steps = analyse(graph)
    consumers, producers = graph.consumers(), graph.producers()
    uneven = unevenness(graph)
    forms = {
        name: _form(step, name, graph, producers, sign_zero, uneven.get(name, UNEVEN))
        for name, step in steps.items()
    }
    longer = _parts_of_longer(graph, consumers, forms)
    before = graph.nodes

    def written(node: Node) -> list[Node] | None:
        out = node.outputs[0]
        form = forms.get(out)
        if form is None or (out in longer and out not in graph.outputs):
            return None
        if form.note:
            graph.sign_zero[node.name] = form.note
        source, shift = steps[out].source, []
        if form.cut != 0.0:
            cut = graph.constant(np.float32(form.cut).reshape(()), f"{source}.cut")
            shifted = graph.fresh(f"{source}.minus_cut")
            graph.types[shifted] = graph.types[source]
            shift, source = [Node("Sub", [source, cut], [shifted], {}, node.name)], shifted
        return [*shift, Node(form.op, [source], [out], form.attrs, node.name)]

    graph.replace(written)
    if graph.nodes != before:
        graph.sort()
        graph.prune()


@dataclass(frozen=True)
class _Form:
    """What a step function is written as: an operator on the source less `cut`."""

    op: str
    attrs: dict[str, object]
    cut: float = 0.0
    note: str = ""


def _parts_of_longer(
    graph: Graph, consumers: dict[str, list[Node]], forms: dict[str, _Form | None]
) -> set[str]:
    """Return the step functions that only others read which are written, or parts of such ones."""
    parts: set[str] = set()
    for node in reversed(graph.nodes):
        out = node.outputs[0]
        if out in forms and all(
            r.outputs[0] in parts or forms.get(r.outputs[0]) is not None
            for r in consumers.get(out, [])
        ):
            parts.add(out)
    return parts


def _form(
    step: StepFunction, name: str, graph: Graph, producers: dict[str, Node], sign_zero: str,
    uneven: float,
) -> _Form | None:  # fmt: skip
    kind = graph.types[name]
    if kind.dtype != "float32" or graph.types[step.source].dtype != "float32":
        return None
    cuts, values = step.cuts, step.values.astype(np.float64)
    producer = producers.get(step.source)
    if producer is not None and producer.op in _NON_NEGATIVE:  # what is below 0 is not reached
        first = int(np.searchsorted(cuts, 0.0, side="right"))
        cuts, values = cuts[first:], values[first:]
    if not np.isfinite(values[[0, -1]]).all() or len(values) < 2:
        return None
    below, above = float(values[0]), float(values[-1])
    if len(values) == 2:
        zero, cut = step_at(np.float32(cuts[:1]))
        return _Form("bnncc.Sign", {"lo": below, "hi": above, "zero": zero}, float(cut[0]))
    if len(values) == 3 and below != above and cuts[1] == np.nextafter(cuts[0], FAR):
        return _at_one_point(below, float(values[1]), above, float(cuts[0]), sign_zero, uneven)
    if len(kind.shape) not in (2, 4) and not decided_as_rows(kind):
        return None
    full = evenly(values, uneven)
    if full is None:
        return None
    level = np.rint((values - full[0]) / (full[-1] - full[0]) * (len(full) - 1)).astype(int)
    rise = np.diff(level)
    if (rise <= 0).any():
        return None
    limits = np.repeat(cuts, rise).astype(np.float32)
    return _Form(LEVELS, {"thresholds": limits, "values": full.astype(np.float32)})


def _at_one_point(
    below: float, at: float, above: float, cut: float, sign_zero: str, uneven: float
) -> _Form | None:
    """Return what takes a value of its own at one point only: a `Sign`, scaled and shifted."""
    attrs = {"lo": below, "hi": above, "zero": "mid"}
    nowhere = bool(np.isnan(at))  # x / |x|: no bit is what the model gives for 0
    half_way = abs(at - (below + above) / 2) <= uneven * max(abs(below), abs(above))
    if not (half_way or (nowhere and sign_zero != "exact")):
        return None
    if sign_zero == "exact":
        return _Form("bnncc.Sign", attrs, cut)
    upper, lower = ("ge", "gt") if above > below else ("gt", "ge")
    zero = upper if sign_zero == "+1" else lower
    return _Form("bnncc.Sign", {**attrs, "zero": zero}, cut, f"taken as {sign_zero}, by option")
