"""Recognise signs and other decisions, however they are written.

    before: c = GreaterOrEqual(x, 0); y = Where(c, 1, -1)    after: y = bnncc.Sign(x)
    before: s = Sign(x); t = Add(s, 0.1); y = Sign(t)        after: y = bnncc.Sign(x)
    before: c = Greater(x, T); f = Cast(c)                   after: d = Sub(x, T); f = bnncc.Sign(d)
    before: a = Greater(x, t); b = Less(x, u); y = Sub(a, b)      after: y = bnncc.Levels(x)

A tensor is analysed as a *step function* of one real source tensor: constant on each piece between
a few cuts of the real line. Comparisons and `Sign` start one. An elementwise operator on step
functions of the same source (and scalar constants), or a table indexed by one, gives another, which
is computed by evaluating the operator on the pieces. If sources differ but are monotone functions
of one tensor, cuts are expressed in that tensor. Apart from the start, no operator name matters, so
every spelling with `Where`, `Cast`, `Not`, `Mul`, `Add`, `Clip`, `Equal`, ... is recognised. The
last tensor of a chain with two values becomes a `bnncc.Sign` node. So does one with a third value,
the mean of both, at a single point. One with evenly spaced values becomes a `bnncc.Levels` node.

`bnncc.Sign` has attributes ``lo`` and ``hi``, the values for negative and positive input, and
``zero``: ``ge`` (0 gives `hi`), ``gt`` (0 gives `lo`) or ``mid`` (0 gives ``(lo + hi) / 2``, as
`Sign` of ONNX and PyTorch).
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
    """Replace each sign or quantizer chain in `graph` by one `bnncc.Sign` or `bnncc.Levels` node.

    Parameters
    ----------
    graph : Graph
        Modified in place.
    sign_zero : {"exact", "+1", "-1"}
        Value of a three-valued sign at zero: ``exact`` keeps the graph's own 0.
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
    """How a step function is written: an operator applied to the source minus `cut`."""

    op: str
    attrs: dict[str, object]
    cut: float = 0.0
    note: str = ""


def _parts_of_longer(
    graph: Graph, consumers: dict[str, list[Node]], forms: dict[str, _Form | None]
) -> set[str]:
    """Return step functions that only other, rewritten step functions (or parts of them) read."""
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
    if producer is not None and producer.op in _NON_NEGATIVE:  # negative pieces are unreachable
        first = int(np.searchsorted(cuts, 0.0, side="right"))
        if first < len(cuts):  # else it is constant, as x >= 0 behind a Relu: still a sign
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
    """Return a scaled and shifted `Sign` for a function with a separate value at one point only."""
    attrs = {"lo": below, "hi": above, "zero": "mid"}
    nowhere = bool(np.isnan(at))  # x / |x|: no bit can stand for the model's result at 0
    half_way = abs(at - (below + above) / 2) <= uneven * max(abs(below), abs(above))
    if not (half_way or (nowhere and sign_zero != "exact")):
        return None
    if sign_zero == "exact":
        return _Form("bnncc.Sign", attrs, cut)
    upper, lower = ("ge", "gt") if above > below else ("gt", "ge")
    zero = upper if sign_zero == "+1" else lower
    return _Form("bnncc.Sign", {**attrs, "zero": zero}, cut, f"taken as {sign_zero}, by option")
