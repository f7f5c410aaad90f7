"""The inputs of a network's checks, and the expected outputs.

The number of checks, and how much of the outputs they cover, depend on the estimated cost of
evaluating the graph; the estimate is the same on every machine.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from bnncc.errors import BnnccError
from bnncc.ir.dims import symbols_of
from bnncc.ir.evaluate import evaluate
from bnncc.ir.graph import Graph
from bnncc.ir.halves import is_float
from bnncc.ir.magnitude import coarseness, magnitudes
from bnncc.ir.region import Box, Region, region, slices, whole
from bnncc.ir.ties import TIE, rounded_otherwise, tied
from bnncc.runtime.compare import RELATIVE, apart, largest, overflows
from bnncc.runtime.manifest import infos
from bnncc.runtime.selfcheck import LEAST_BYTES, SHARE, STYLES, Check, Source, draw, pack
from bnncc.verification.inputs import Inputs, finite, sources

_MOST_CHECKS, _MOST_OF_LITTLE, _LITTLE = 4, 24, 64
"""How many checks there are at most: more where outputs are fewer than so many integers."""

_SECONDS = 0.3
"""What evaluating a graph for all checks may take by `cost`, but for the first of them."""

_SPARES, _SPARE_SECONDS = 3, 1.0
"""How many checks replace the others, at most, if ties decide those: fewer where evaluating the
graph for them takes more by `cost`."""

_LARGE = 0.6
"""Of graphs that take more by `cost`, parts are evaluated, where they have parts."""

_PARTS, _HUGE = 2, 4e7
"""How many checks there are then, each in another place; one, if so many numbers go in and out."""

_MOST_SURE, _OTHERS, _ROOM, _COARSEST = 0.5, 3, 4.0, 0.1
"""If fewer of an output's values are sure than `_MOST_SURE`, it is evaluated with `_OTHERS` other
roundings, or one if it is large. Floats may then be off by `_ROOM` times what these change, unless
that is more than `_COARSEST` of the largest value."""

_SIZES = (7, 19, 23), (3, 5, 7), (2, 3, 4)
"""Sizes of the first symbolic dimensions, and again of those after them: none is a multiple of a
tile. The largest are taken that can be evaluated in `_SECONDS`."""

_PRODUCTS_A_SECOND = 1e10
_ELEMENTS_A_SECOND = 4e8


class _Ties(NamedTuple):
    """What is known of a check's ties."""

    sure: dict[str, np.ndarray]
    """Which elements of each output depend on none."""
    rounded: dict[str, np.ndarray]
    """Which elements of each tensor are rounded."""


class SelfCheck:
    """The inputs on which a network is checked, and the correct outputs.

    Parameters
    ----------
    graph : Graph
        As loaded.
    seed : int
        Seed of the inputs.
    near : float
        Width of a tie, relative to the sum of a value's terms.
    zeros : bool
        Whether an exact 0 before a sign is a tie too.
    """

    def __init__(self, graph: Graph, seed: int, *, near: float = TIE, zeros: bool = False) -> None:
        self._graph, self._seed = graph, seed
        self._near, self._zeros = near, zeros
        self._evaluated: dict[int, dict[str, np.ndarray]] = {}
        self._found: WeakKeyDictionary[Check, _Ties] = WeakKeyDictionary()
        self.infos = infos(graph, graph.inputs)

    @functools.cached_property
    def _inputs(self) -> Inputs:
        styles = STYLES if cost(self._graph) <= _SPARE_SECONDS else STYLES[:1]
        found = sources(self._graph, self.infos, self._seed, styles)
        self._evaluated.update(enumerate(found.outputs))
        return found

    @property
    def sources(self) -> tuple[Source, ...]:
        """Where the values of the inputs come from."""
        return self._inputs.sources

    @functools.cached_property
    def coarse(self) -> dict[str, float]:
        """Tolerance of outputs that depend on tensors of half precision."""
        table = coarseness(self._graph)
        return {name: table[name] for name in self._graph.outputs if name in table}

    @functools.cached_property
    def checks(self) -> list[Check]:
        """All checks: as many as fit into the time, estimated from the graph alone.

        Inputs that a network cannot be judged by, for it makes infinities or no numbers of them,
        are left out, unless there are no others.
        """
        most = _MOST_CHECKS if self._tells_much() else _MOST_OF_LITTLE
        count = int(min(most, max(1.0, _SECONDS / max(cost(self._graph), 1e-9))))
        made = [self.check(number) for number in range(len(self._parts) or count)]
        return [check for check in made if finite(check.outputs)] or made[:1]

    @functools.cached_property
    def overflow(self) -> bool:
        """Whether outputs of all checks have sums that overflow."""
        return all(
            any(overflows(made, made).any() for made in check.outputs.values())
            for check in itertools.chain([self.check(0)], self.checks)  # usually, one is enough
        )

    @functools.cached_property
    def larger(self) -> list[Check]:
        """A check in which symbolic dimensions are not 1, as they are in `checks`.

        It is for the compiling machine, and not stored. There is none if no dimension is symbolic,
        or if these sizes take too long or do not fit the graph.
        """
        found = {s: None for info in self.infos for dim in info.shape for s in symbols_of(dim)}
        for sizes in _SIZES if found else ():
            chosen = dict(zip(found, itertools.cycle(sizes), strict=False))
            chosen = {s: min(n, self._graph.bounds.get(s, n)) for s, n in chosen.items()}
            if cost(self._graph) * math.prod(chosen.values()) > _SECONDS:
                continue
            feeds = draw(self.infos, self.sources, STYLES[0], self._seed, chosen)
            try:
                outputs = evaluate(self._graph, feeds)
            except BnnccError:  # integers of the inputs that index beyond these sizes
                return []
            made = Check(feeds, outputs, coarse=self.coarse)
            return [made] if finite(outputs) else []
        return []

    def _tells_much(self) -> bool:
        """Whether outputs hold more than a few integers, such as a class number."""
        kinds = [
            (self._graph.types[o].dtype, _elements(self._graph, o)) for o in self._graph.outputs
        ]
        return any(dtype[0] == "f" for dtype, _ in kinds) or sum(n for _, n in kinds) >= _LITTLE

    @functools.cached_property
    def _parts(self) -> list[Region]:
        """Parts of a graph that is too large to be evaluated as a whole, if it has parts."""
        if cost(self._graph) <= _LARGE or not all(t.static for t in self._graph.types.values()):
            return []
        graph = self._graph
        ends = sum(_elements(graph, name) for name in (*graph.inputs, *graph.outputs))
        return parts(graph, _LARGE / _PARTS, _PARTS if ends < _HUGE else 1)

    def inputs(self, number: int) -> dict[str, np.ndarray]:
        """Return the inputs of a check."""
        return draw(self.infos, self.sources, *self._drawn(number))

    def _drawn(self, number: int) -> tuple[str, int]:
        styles = self._inputs.styles
        return styles[number % len(styles)], self._seed + number

    def values(self, number: int, tensors: Iterable[str]) -> dict[str, np.ndarray]:
        """Evaluate the graph on the inputs of a check, without keeping the result.

        Parameters
        ----------
        number : int
            Number of the check.
        tensors : iterable of str
            Which values to return, beside the outputs.
        """
        found = evaluate(self._graph, self.inputs(number), tensors)
        self._evaluated[number] = {name: found[name] for name in self._graph.outputs}
        return found

    def check(self, number: int) -> Check:
        """Return the check with a number; each number gives a different check."""
        feeds = self.inputs(number)
        if number in self._evaluated:
            return Check(feeds, self._evaluated[number], *self._drawn(number), coarse=self.coarse)
        return replace(self._of(feeds, number), style=self._drawn(number)[0])

    def _of(self, feeds: Mapping[str, np.ndarray], number: int) -> Check:
        """Evaluate the graph, or as much of it as the time limit allows."""
        seed = self._seed + number
        if not self._parts:
            return Check(feeds, evaluate(self._graph, feeds), seed=seed, coarse=self.coarse)
        part = self._parts[number % len(self._parts)]
        outputs = evaluate(part.graph, part.of(feeds))
        places = {name: slices(part.boxes[name]) for name in outputs}
        return Check(feeds, outputs, seed=seed, places=places, coarse=self.coarse)

    def repeated(self, limit: int) -> tuple[dict[str, np.ndarray], Check]:
        """Return a check whose inputs repeat stored values, for devices that cannot draw numbers.

        Parameters
        ----------
        limit : int
            Bytes to store.

        Returns
        -------
        stored : dict of str to ndarray
            The inputs, or values that are repeated to fill them.
        check : Check
            With whole inputs; `settled`.
        """
        feeds = self.inputs(0)
        stored = dict(feeds)
        for name, value in feeds.items():
            room = limit // len(feeds) // value.itemsize
            if value.size > room:
                stored[name] = value.reshape(-1)[: _prime(room)]
                feeds[name] = np.resize(stored[name], value.shape)
        same = all(stored[name].size == value.size for name, value in feeds.items())
        return stored, self.settled(self.check(0) if same else self._of(feeds, 0))

    def pair(self, number: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Return whole inputs and correct outputs by name; each `number` gives different ones."""
        feeds = self.inputs(number)
        return feeds, evaluate(self._graph, feeds)

    def packed(self, checks: Sequence[Check], library: bytes) -> bytes:
        """Return `checks` as they are stored beside `library`."""
        limit = int(max(LEAST_BYTES, SHARE * len(library)))
        return pack(
            checks, self.infos, infos(self._graph, self._graph.outputs), self.sources, limit
        )

    @functools.cached_property
    def spares(self) -> int:
        """How many other checks may be tried if ties decide all: none of a large graph."""
        seconds = max((cost(part.graph) for part in self._parts), default=cost(self._graph))
        return int(min(_SPARES, _SPARE_SECONDS / max(seconds, 1e-9)))

    def surely(self, check: Check) -> dict[str, np.ndarray]:
        """Return which elements of each output depend on no tie."""
        return dict(self._ties(check).sure)

    def _ties(self, check: Check) -> _Ties:
        if check not in self._found:
            rounded: dict[str, np.ndarray] = {}
            found = tied(*self._judged(check), near=self._near, zeros=self._zeros, rounded=rounded)
            self._found[check] = _Ties({name: ~mask for name, mask in found.items()}, rounded)
        return self._found[check]

    def rounding(self, check: Check) -> dict[str, np.ndarray]:
        """Return how far rounding may take each element of each output that meets no tie."""
        found = magnitudes(*self._judged(check))
        return {name: self._near * size for name, (_, size) in found.items()}

    def settled(self, check: Check) -> Check:
        """Return a check that correct code passes however it decides ties.

        Elements that depend on a tie are left out. A quantizer of each token makes ties in each
        token: where few elements are left, all are compared, with a tolerance that is found by
        deciding ties otherwise.
        """
        sure = self.surely(check)
        if all(mask.all() for mask in sure.values()):
            return check
        coarse = dict(check.coarse)
        if any(mask.mean() < _MOST_SURE for mask in sure.values()):
            judged, rounded = self._judged(check), self._ties(check).rounded
            others = [
                rounded_otherwise(*judged, rounded, near=self._near, seed=seed)
                for seed in range(_OTHERS if self.spares else 1)
            ]
            for name, mask in sure.items():
                right = check.outputs[name]
                if mask.mean() >= _MOST_SURE:
                    continue
                gaps = np.max([apart(other[name], right) for other in others], axis=0)
                limit = coarse.get(name, RELATIVE) if is_float(right) else 0.0
                top = max(largest(right), 1e-30)
                room = max(limit, _ROOM * float(gaps.max(initial=0.0)) / top)
                if is_float(right) and room <= max(limit, _COARSEST):
                    coarse[name], sure[name] = room, np.ones_like(mask)
                else:  # compare what has not changed
                    sure[name] = mask | (gaps <= limit * top)
        return replace(check, sure=sure, coarse=coarse)

    def _judged(self, check: Check) -> tuple[Graph, Mapping[str, np.ndarray]]:
        """Return the part of the graph that `check` is of, and its inputs."""
        if check.places is None:
            return self._graph, check.inputs
        boxes = {n: tuple((s.start, s.stop) for s in p) for n, p in check.places.items()}
        part = region(self._graph, boxes)
        return part.graph, part.of(check.inputs)


def parts(graph: Graph, seconds: float, count: int) -> list[Region]:
    """Return parts of a large graph that take little time to evaluate.

    Parameters
    ----------
    graph : Graph
        With fixed shapes.
    seconds : float
        Limit of the estimated time (`cost`) of a part.
    count : int
        Number of parts. Each is a corner of an image; the first and the last image come first.

    Returns
    -------
    list of Region
        Empty if no part costs less than half of the whole.
    """
    total = least = cost(graph)
    share, made = 1.0, []
    while share > _LEAST_SHARE and least > seconds:
        share /= 2
        made = [region(graph, _boxes(graph, share, number)) for number in range(count)]
        before, least = least, max(cost(part.graph) for part in made)
        if share < 0.5 and least > _NO_LESS * before:
            break  # all depends on all, as in a transformer
    return made if least <= total / 2 else []


_LEAST_SHARE, _NO_LESS = 1 / 64, 0.98
"""Of each axis of an image, at least; a part that takes this share of a larger one's time."""


def _boxes(graph: Graph, share: float, number: int) -> dict[str, Box]:
    """Return parts of outputs: one image of a batch, `share` of each of its axes."""
    found = {}
    for name in graph.outputs:
        shape = tuple(int(d) for d in graph.types[name].shape)
        box = list(whole(shape))
        if len(shape) > 1:
            image = number * 7919 % shape[0] if shape[0] else 0
            box[0] = (image, min(image + 1, shape[0]))
        for axis in range(1, len(shape) if len(shape) > 2 else 0):
            size = max(1, math.ceil(share * shape[axis])) if shape[axis] else 0
            last = (number >> (axis - 1) if number > 1 else number) & 1
            start = shape[axis] - size if last else 0
            box[axis] = (start, start + size)
        found[name] = tuple(box)
    return found


def _prime(limit: int) -> int:
    """Return a prime of at most `limit`: a period that does not divide the length of rows."""
    return next(
        n for n in range(max(2, limit), 1, -1) if all(n % k for k in range(2, math.isqrt(n) + 1))
    )


def cost(graph: Graph) -> float:
    """Estimate the seconds that evaluating `graph` takes, the same on every machine."""
    seconds = 0.0
    for node in graph.nodes:
        made = sum(_elements(graph, name) for name in node.outputs if name in graph.types)
        seconds += made / _ELEMENTS_A_SECOND
        if node.op in ("Conv", "Gemm", "MatMul", "ConvTranspose"):
            shape = [d for d in graph.types[node.inputs[1]].shape if isinstance(d, int)]
            terms = float(np.prod(shape[1:] if node.op != "MatMul" else shape[-2:-1]))
            seconds += made * terms / _PRODUCTS_A_SECOND
            if node.op.startswith("Conv"):  # each window becomes a column first
                seconds += made / max(1, shape[0]) * terms / _ELEMENTS_A_SECOND
    return seconds


def _elements(graph: Graph, name: str) -> float:
    return float(np.prod([d if isinstance(d, int) else 1 for d in graph.types[name].shape]))
