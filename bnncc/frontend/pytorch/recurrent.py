"""Recurrent layers and cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from bnncc.frontend.pytorch.site import Name, Rule, Site, Value

_ORDER = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN": (0,)}
"""Positions of ONNX's gates in torch's: (i, o, f, c) in (i, f, g, o), (z, r, h) in (r, z, n)."""
_STEPS = 1024


class _Layer(NamedTuple):
    """One layer of a stack: its input and, by direction, its weights."""

    op: str
    activation: str
    x: Name
    weights: list[list[Value]]
    biased: bool
    initial: Sequence[Name]


def _layers(op: str, site: Site, *, activation: str = "") -> list[Any]:
    """Write stacked layers over a sequence."""
    if "data" in site.call.args:
        raise site.refuse("reads a packed sequence", hint="pass padded sequences")
    if site.get("dropout"):
        site.refuse_training("train")
    x: Name = site.tensor("input")
    states = site.get("hx")
    states = [site.value(s) for s in (states if isinstance(states, list) else [states])]
    params = [site.value(p) for p in site.get("params")]
    several = bool(site.get("bidirectional"))
    count, directions = site.get("num_layers"), 2 if several else 1
    each = len(params) // (count * directions)
    if each * count * directions != len(params) or each not in (2, 3, 4, 5):
        raise site.refuse(f"{len(params)} weights for {count} layers")
    first = bool(site.get("batch_first"))
    if first:
        x = site.transpose(x, [1, 0, 2])
    biased = bool(site.get("has_biases"))
    layer = _projected if each in (3, 5) else _layer
    lasts: list[list[Name]] = [[] for _ in states]
    for k in range(count):
        at = k * directions
        weights = [params[(at + d) * each : (at + d + 1) * each] for d in range(directions)]
        initial = [s if count == 1 else site.slice(s, 0, at, at + directions) for s in states]
        x, *ends = layer(site, _Layer(op, activation, x, weights, biased, initial))
        for last, end in zip(lasts, ends, strict=True):
            last.append(end)
    if first:
        x = site.transpose(x, [1, 0, 2])
    ends = [e[0] if count == 1 else site.emit("Concat", e, axis=0) for e in lasts]
    return [x, *ends]


def _layer(site: Site, layer: _Layer) -> list[Name]:
    """Emit the ONNX operator; return the sequence and the last states."""
    op, activation, x, weights, biased, initial = layer
    hidden = int(weights[0][1].shape[1])
    order = _ORDER[op]
    stacked = [_stacked(site, [_gates(site, w[k], hidden, order) for w in weights]) for k in (0, 1)]
    bias: Name = ""
    if biased:
        both = [
            site.emit("Concat", [_gates(site, w[k], hidden, order) for k in (2, 3)], axis=0)
            for w in weights
        ]
        bias = _stacked(site, both)
    attrs: dict[str, Any] = {"hidden_size": hidden}
    if len(weights) == 2:
        attrs["direction"] = "bidirectional"
    if activation:
        attrs["activations"] = [activation] * len(weights)
    if op == "GRU":
        attrs["linear_before_reset"] = 1
    made = site.emit_many(op, [x, *stacked, bias, "", *initial], 1 + len(initial), **attrs)
    return [_joined(site, made[0], len(weights)), *made[1:]]


def _joined(site: Site, sequence: Name, directions: int) -> Name:
    """Convert [length, directions, batch, hidden] to torch's layout."""
    if directions == 1:
        return site.emit("Squeeze", [sequence, site.ints_const([1])])
    return site.reshape(site.transpose(sequence, [0, 2, 1, 3]), [0, 0, -1])


def _gates(site: Site, weight: Value, hidden: int, order: Sequence[int]) -> Name:
    if len(order) == 1:
        return weight
    parts = [site.slice(weight, 0, k * hidden, (k + 1) * hidden) for k in order]
    return site.emit("Concat", parts, axis=0)


def _stacked(site: Site, parts: Sequence[Name]) -> Name:
    zero = site.ints_const([0])
    each = [site.emit("Unsqueeze", [p, zero]) for p in parts]
    return each[0] if len(each) == 1 else site.emit("Concat", each, axis=0)


def _projected(site: Site, layer: _Layer) -> list[Name]:
    """Emit an LSTM with projected state, which ONNX lacks, step by step."""
    _, _, x, weights, biased, initial = layer
    length = site.tensor("input").shape[1 if site.get("batch_first") else 0]
    if not isinstance(length, int) or length > _STEPS:
        raise site.refuse(f"projects over {length} steps, at most {_STEPS} can be")
    sequences: list[Name] = []
    ends: list[list[Name]] = [[], []]
    for k, each in enumerate(weights):
        h, c = (_row(site, s, k) for s in initial)
        project = site.transpose(each[-1], [1, 0])
        made: list[Name] = []
        for t in range(length) if k == 0 else reversed(range(length)):
            h, c = _lstm_step(site, _row(site, x, t), h, c, _weights(each, biased))
            h = site.emit("MatMul", [h, project])
            made.append(h)
        made = made if k == 0 else made[::-1]
        sequences.append(_stacked(site, made))
        for end, state in zip(ends, (h, c), strict=True):
            end.append(state)
    joined = sequences[0] if len(sequences) == 1 else site.emit("Concat", sequences, axis=2)
    return [joined, *(_stacked(site, e) for e in ends)]


def _row(site: Site, x: Name, index: int) -> Name:
    return site.emit("Gather", [x, site.const(index, "int64")], axis=0)


# -------------------------------------------------------------------------------------------- cells


def _weights(params: Sequence[Name], biased: bool) -> list[Name]:
    return [*params[:2], *(params[2:4] if biased else ("", ""))]


def _sums(site: Site, x: Name, h: Name, weights: Sequence[Name]) -> list[Name]:
    """Return the contributions of input and state to the gates."""
    w, u, b, c = weights
    return [
        site.emit("Gemm", [value, weight, bias], transB=1)
        for value, weight, bias in ((x, w, b), (h, u, c))
    ]


def _lstm_step(site: Site, x: Name, h: Name, c: Name, weights: Sequence[Name]) -> tuple[Name, Name]:
    total = site.emit("Add", _sums(site, x, h, weights))
    i, f, g, o = site.emit_many("Split", [total], 4, axis=1, num_outputs=4)
    i, f, o = (site.emit("Sigmoid", [v]) for v in (i, f, o))
    kept = site.emit("Mul", [f, c])
    c = site.emit("Add", [kept, site.emit("Mul", [i, site.emit("Tanh", [g])])])
    return site.emit("Mul", [o, site.emit("Tanh", [c])]), c


def _lstm_cell(site: Site, x: Name, states: Sequence[Name], weights: Sequence[Name]) -> list[Any]:
    return list(_lstm_step(site, x, states[0], states[1], weights))


def _gru_cell(site: Site, x: Name, states: Sequence[Name], weights: Sequence[Name]) -> Name:
    h = states[0]
    ours, theirs = (
        site.emit_many("Split", [s], 3, axis=1, num_outputs=3) for s in _sums(site, x, h, weights)
    )
    reset, update = (site.emit("Sigmoid", [site.emit("Add", [ours[k], theirs[k]])]) for k in (0, 1))
    new = site.emit("Tanh", [site.emit("Add", [ours[2], site.emit("Mul", [reset, theirs[2]])])])
    return site.emit("Add", [new, site.emit("Mul", [update, site.emit("Sub", [h, new])])])


def _plain_cell(
    activation: str, site: Site, x: Name, states: Sequence[Name], weights: Sequence[Name]
) -> Name:
    return site.emit(activation, [site.emit("Add", _sums(site, x, states[0], weights))])


def _cell(step: Callable[..., Any], site: Site) -> Name | list[Any]:
    states = site.get("hx")
    states = [site.value(s) for s in (states if isinstance(states, list) else [states])]
    weights = [site.optional(k) for k in ("w_ih", "w_hh", "b_ih", "b_hh")]
    return step(site, site.tensor("input"), states, weights)


RULES: dict[str, Rule] = {
    **{f"lstm.{k}": partial(_layers, "LSTM") for k in ("input", "data")},
    **{f"gru.{k}": partial(_layers, "GRU") for k in ("input", "data")},
    **{f"rnn_tanh.{k}": partial(_layers, "RNN", activation="Tanh") for k in ("input", "data")},
    **{f"rnn_relu.{k}": partial(_layers, "RNN", activation="Relu") for k in ("input", "data")},
    "gru_cell.default": partial(_cell, _gru_cell),
    "lstm_cell.default": partial(_cell, _lstm_cell),
    "rnn_relu_cell.default": partial(_cell, partial(_plain_cell, "Relu")),
    "rnn_tanh_cell.default": partial(_cell, partial(_plain_cell, "Tanh")),
}
"""Rules, by operator."""
