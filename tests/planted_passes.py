"""Mistakes planted into what the passes make: how soon random networks show each.

A mistake is a function of a physical graph and a random generator that changes the graph and says
whether there was something to change. Each is one that a pass could make: a threshold or a
comparison off by one, an order mixed up, a constant that is nearly right. `networks_until_noticed`
counts the networks that have what a mistake is about, until `compare_passes` finds a difference.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from bnncc.errors import VerificationError
from bnncc.ir.graph import Graph, Node
from bnncc.topi_binary.build import input_types
from bnncc.topi_binary.spec import (
    BinaryConv2d,
    BitwiseMaxPool,
    ConcatBits,
    Conv2d,
    Elementwise,
    FewBitConv2d,
    PadBits,
    Pool2d,
    SliceBits,
)
from bnncc.topi_binary.step import Step, step_inputs
from bnncc.transform.physical import KERNEL
from bnncc.verification.confirm_passes import compare_passes
from tests.physical_networks import passed
from tests.random_models import Maker
from tests.random_passes import TARGETS

Array = np.ndarray[Any, Any]
Mistake = Callable[[Graph, np.random.Generator], bool]

PLANTED: dict[str, Mistake] = {}
"""By what is wrong."""

SEEDS = range(2_000_000, 2_002_000)
"""Of networks that no other run uses."""


def networks_until_noticed(mistake: Mistake, most: int) -> int:
    """Return how many networks with the mistake were seen when it was noticed; 0 if it was not."""
    seen = 0
    for seed in SEEDS:
        maker = Maker(seed)
        before, physical, _ = passed(maker.build(), TARGETS[seed % len(TARGETS)])
        if not mistake(physical, np.random.default_rng(seed)):
            continue
        seen += 1
        try:
            noticed = bool(compare_passes(physical, before, maker.feeds()))
        except VerificationError:
            noticed = True
        if noticed:
            return seen
        if seen == most:
            break
    return 0


def planted(name: str) -> Callable[[Mistake], Mistake]:
    def register(mistake: Mistake) -> Mistake:
        PLANTED[name] = mistake
        return mistake

    return register


# ------------------------------------------------------------------------------ what there is


def _some(graph: Graph, rng: np.random.Generator, *kinds: type) -> Iterator[Node]:
    """Yield the kernels of some kinds, in any order."""
    nodes = [n for n in graph.nodes if n.op == KERNEL and isinstance(n.attrs["spec"], kinds)]
    for at in rng.permutation(len(nodes)):
        yield nodes[at]


def _steps(
    graph: Graph, rng: np.random.Generator, op: str, way: str = ""
) -> Iterator[tuple[Node, int, list[int]]]:
    """Yield kernels with a step, its number, and which inputs are its own."""
    for node in _some(graph, rng, object):
        spec = node.attrs["spec"]
        steps = getattr(spec, "steps", ())
        place = len(input_types(spec)) - sum(map(step_inputs, steps))
        for number, step in enumerate(steps):
            own = list(range(place, place + step_inputs(step)))
            place += step_inputs(step)
            if step.op == op and step.way.startswith(way):
                yield node, number, own


def _change(graph: Graph, node: Node, place: int, change: Callable[[Array], Array]) -> bool:
    """Give a kernel another constant; whether it is another one."""
    name = node.inputs[place]
    old = graph.constants.get(name)
    if old is None:
        return False
    new = change(old.copy())
    if np.array_equal(new, old):
        return False
    node.inputs[place] = graph.constant(new, "planted")
    return True


def _respec(node: Node, **fields: object) -> bool:
    spec = node.attrs["spec"]
    node.attrs["spec"] = replace(spec, **fields)
    return bool(node.attrs["spec"] != spec)


def _restep(node: Node, number: int, **fields: object) -> bool:
    steps = list(node.attrs["spec"].steps)
    steps[number] = replace(steps[number], **fields)
    return _respec(node, steps=tuple(steps))


def _without(node: Node, number: int, own: list[int]) -> bool:
    """Leave a step out, with its inputs."""
    steps = list(node.attrs["spec"].steps)
    del steps[number]
    node.inputs[:] = [name for k, name in enumerate(node.inputs) if k not in own]
    return _respec(node, steps=tuple(steps))


def _constant(op: str, which: int, change: Callable[[Array], Array], way: str = "") -> Mistake:
    """Return a mistake in a constant of a step."""

    def mistake(graph: Graph, rng: np.random.Generator) -> bool:
        return any(
            _change(graph, node, own[which], change) for node, _, own in _steps(graph, rng, op, way)
        )

    return mistake


def _field(kind: type, change: Callable[[Any], dict[str, object] | None]) -> Mistake:
    """Return a mistake in the spec of a kernel."""

    def mistake(graph: Graph, rng: np.random.Generator) -> bool:
        for node in _some(graph, rng, kind):
            fields = change(node.attrs["spec"])
            if fields and _respec(node, **fields):
                return True
        return False

    return mistake


def _one(vector: Array, change: Callable[[Array], Array]) -> Array:
    """Change the first channel of a vector only."""
    vector[..., :1] = change(vector[..., :1])
    return vector


def _next(value: Array) -> Array:
    return np.nextafter(value, np.float32(np.inf))


def _nearly(value: Array) -> Array:
    return value * np.float32(1 + 1e-5)


def _within(vector: Array, change: Callable[[Array], Array]) -> Array:
    """Change integer thresholds that are no stand-ins for never and always."""
    inside = np.abs(vector.astype(np.int64)) < 2**30
    return np.where(inside, change(vector), vector).astype(vector.dtype)


# --------------------------------------------------------------------------------- decisions

PLANTED |= {
    "thresholds one too high": _constant("threshold", 0, lambda v: _within(v, lambda t: t + 1)),
    "thresholds one too low": _constant("threshold", 0, lambda v: _within(v, lambda t: t - 1)),
    "thresholds of the next channel": _constant("threshold", 0, lambda v: np.roll(v, 1)),
    "levels of sums one too high": _constant(
        "levels", 0, lambda v: _within(v, lambda t: t + 1), "acc"
    ),
    "levels of sums one too low": _constant(
        "levels", 0, lambda v: _within(v, lambda t: t - 1), "acc"
    ),
    "the highest level never": _constant(
        "levels", 0, lambda v: np.concatenate([v[:-1], v[-1:] + 1000]) if v.ndim == 2 else v, "acc"
    ),
    "levels of values a last bit off": _constant("levels", 0, _next, "value"),
}


@planted("> for >=")
def _(graph: Graph, rng: np.random.Generator) -> bool:
    return any(
        node.attrs["spec"].steps[number].compare == "ge"
        and not node.attrs["spec"].steps[number].zero
        and _restep(node, number, compare="gt")
        for node, number, _ in _steps(graph, rng, "bits")
    )


@planted(">= for >")
def _(graph: Graph, rng: np.random.Generator) -> bool:
    return any(
        _restep(node, number, compare="ge") for node, number, _ in _steps(graph, rng, "bits")
    )


# ----------------------------------------------------------------------------------- numbers

PLANTED |= {
    "scales of the next channel": _constant("affine", 0, lambda v: np.roll(v, 1)),
    "offsets of the next channel": _constant("affine", 1, lambda v: np.roll(v, 1)),
    "one scale 1e-5 off": _constant("affine", 0, lambda v: _one(v, _nearly)),
    "one offset 1e-5 off": _constant("affine", 1, lambda v: _one(v, _nearly)),
    "slopes of the next channel": _constant("prelu", 0, lambda v: np.roll(v, 1)),
    "factors negated": _constant("scale", 0, np.negative),
}


def _dropped(op: str) -> Mistake:
    return lambda graph, rng: any(_without(*found) for found in _steps(graph, rng, op))


PLANTED |= {"no relu": _dropped("relu"), "no shift": _dropped("shift"), "no gate": _dropped("gate")}


@planted("a limit too low")
def _(graph: Graph, rng: np.random.Generator) -> bool:
    for node, number, _ in _steps(graph, rng, "clip"):
        high = node.attrs["spec"].steps[number].hi
        if abs(high) < 1e30:
            return _restep(node, number, hi=high * (1 - 1e-5))
    return False


@planted("operands of a difference exchanged")
def _(graph: Graph, rng: np.random.Generator) -> bool:
    for node, number, _ in _steps(graph, rng, "rsub"):
        steps = list(node.attrs["spec"].steps)
        steps[number] = Step("add", steps[number].layout)
        return _respec(node, steps=tuple(steps))
    return False


# ----------------------------------------------------------------------------------- layers

PLANTED |= {
    "padding of the other bit": _field(
        BinaryConv2d,
        lambda s: {"pad_value": -s.pad_value} if s.pad_value and any(s.pads) else None,
    ),
    "padding of ones for zeros": _field(
        BinaryConv2d,
        lambda s: {"pad_value": 1} if not s.pad_value and any(s.pads) and not s.doubled else None,
    ),
    "pads turned round": _field(
        (BinaryConv2d, FewBitConv2d, Conv2d), lambda s: {"pads": (*s.pads[2:], *s.pads[:2])}
    ),
    "rows for columns": _field(
        BinaryConv2d, lambda s: {"height": s.width, "width": s.height} if s.rank == 4 else None
    ),
    "the least for the most": _field(
        BitwiseMaxPool, lambda s: None if s.planes > 1 else {"minimum": not s.minimum}
    ),
    "pooling a row off": _field(
        BitwiseMaxPool,
        lambda s: (
            {"pads": (s.pads[0] + 1, s.pads[1], s.pads[2] - 1, s.pads[3])} if s.pads[2] else None
        ),
    ),
    "averages with padding": _field(
        Pool2d, lambda s: {"kind": "avg_full"} if s.kind == "avg" and any(s.pads) else None
    ),
    "channels moved by one": _field(SliceBits, lambda s: {"index": (*s.index[1:], s.index[0])}),
    "padding a plane by the other bit": _field(PadBits, lambda s: {"bit": 1 - s.bit}),
    "bits as 1 and 0": _field(
        Elementwise, lambda s: {"mode": "and"} if s.from_bits and s.mode == "xor" else None
    ),
}


def _weights(kinds: tuple[type, ...], change: Callable[[Array], Array]) -> Mistake:
    def mistake(graph: Graph, rng: np.random.Generator) -> bool:
        for node in _some(graph, rng, *kinds):
            spec = node.attrs["spec"]
            types = input_types(replace(spec, steps=()))
            flat = [k for k, (shape, _) in enumerate(types) if len(shape) == 1]
            if flat and _change(graph, node, flat[0], change):
                return True
        return False

    return mistake


def _flip_a_bit(packed: Array) -> Array:
    packed.view(np.uint32)[0] ^= 1
    return packed


PLANTED |= {
    "one weight of a binary layer": _weights((BinaryConv2d,), _flip_a_bit),
    "filters of the next block of channels": _weights((Conv2d,), lambda v: np.roll(v, 1)),
}


@planted("start values one off")
def _(graph: Graph, rng: np.random.Generator) -> bool:
    for node in _some(graph, rng, FewBitConv2d):
        spec = node.attrs["spec"]
        if spec.starts:
            place = len(input_types(replace(spec, steps=()))) - 1
            return _change(graph, node, place, lambda v: v + 1)
    return False


@planted("planes of levels exchanged")
def _(graph: Graph, rng: np.random.Generator) -> bool:
    for node in _some(graph, rng, FewBitConv2d, Elementwise):
        spec = node.attrs["spec"]
        count = spec.planes if isinstance(spec, Elementwise) else spec.data_bits
        if count > 1 and graph.types[node.inputs[0]] == graph.types[node.inputs[1]]:
            node.inputs[:2] = node.inputs[1::-1]
            return True
    return False


@planted("the sign plane for the zero plane")
def _(graph: Graph, rng: np.random.Generator) -> bool:
    for node in _some(graph, rng, BinaryConv2d, Elementwise):
        if node.attrs["spec"].ternary:
            node.inputs[1] = node.inputs[0]
            return True
    return False


@planted("parts of a concatenation exchanged")
def _(graph: Graph, rng: np.random.Generator) -> bool:
    for node in graph.nodes:
        joins = node.op == KERNEL and isinstance(node.attrs["spec"], ConcatBits)
        if not joins and node.op != "Concat":
            continue
        for first, second in itertools.combinations(range(len(node.inputs)), 2):
            one, other = node.inputs[first], node.inputs[second]
            alike = not joins or len({node.attrs["spec"].channels[k] for k in (first, second)}) == 1
            if one != other and alike and graph.types[one] == graph.types[other]:
                node.inputs[first], node.inputs[second] = other, one
                return True
    return False


@planted("another tensor added")
def _(graph: Graph, rng: np.random.Generator) -> bool:
    for node, _, own in _steps(graph, rng, "add"):
        kind = graph.types[node.inputs[own[0]]]
        made = [i for n in graph.nodes[: graph.nodes.index(node)] for i in n.outputs if i]
        others = [i for i in made if graph.types[i] == kind and i != node.inputs[own[0]]]
        if others:
            node.inputs[own[0]] = others[-1]
            return True
    return False
