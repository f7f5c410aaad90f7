"""Make sure of a fresh artifact: run it on inputs made for its graph, and compare.

TVM converts and compiles the operators that are not ours; a mistake there (or here) must not reach
a user unseen. Where the compiling machine can run the code, no artifact leaves the compiler that
disagrees with the NumPy evaluation of its model, but for ties (docs/semantics.md): an output may
differ where it depends on one, and then only if every kernel alone is right.
"""

from __future__ import annotations

import functools
import itertools
import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from bnncc.codegen.link import normal_arch
from bnncc.errors import VerificationError
from bnncc.ir.evaluate import evaluate
from bnncc.ir.graph import Graph, Node
from bnncc.ir.region import Box, Region, region, slices, whole
from bnncc.ir.ties import TIE, tied
from bnncc.runtime.artifact import Artifact
from bnncc.runtime.manifest import infos
from bnncc.runtime.selfcheck import LEAST_BYTES, SHARE, STYLES, Check, Source, differs, draw, pack
from bnncc.targets.catalog import missing_features
from bnncc.targets.gpus import missing
from bnncc.targets.spec import TargetSpec
from bnncc.verification.inputs import sources

if TYPE_CHECKING:
    from bnncc.driver import Lowered
    from bnncc.options import CompileOptions

LOOSER = {"filtered-2d": 4}
"""How many times further apart ties may be with a value of ``--float-conv``."""

_MOST_CHECKS, _MOST_OF_LITTLE, _LITTLE = 4, 24, 64
"""How many checks there are at most: more where outputs are fewer than so many integers."""

_SECONDS = 0.3
"""What evaluating a graph for all checks may take by `cost`, but for the first of them."""

_LARGE = 0.6
"""Of graphs that take more by `cost`, parts are evaluated, where they have parts."""

_PARTS, _HUGE = 2, 4e7
"""How many checks there are then, each in another place; one, if so many numbers go in and out."""

_PRODUCTS_A_SECOND = 1e10
_ELEMENTS_A_SECOND = 4e8


class SelfCheck:
    """The inputs that a network is checked on, with their right outputs.

    Parameters
    ----------
    graph : Graph
        As loaded.
    seed : int
        Other seeds, other inputs.
    """

    def __init__(self, graph: Graph, seed: int) -> None:
        self._graph, self._seed = graph, seed
        self._evaluated: dict[int, dict[str, np.ndarray]] = {}
        self.infos = infos(graph, graph.inputs)

    @functools.cached_property
    def sources(self) -> tuple[Source, ...]:
        """Where the values of the inputs come from."""
        return sources(self._graph, self.infos)

    @functools.cached_property
    def checks(self) -> list[Check]:
        """All checks: as many as can be had in the time, by the size of the graph alone.

        Inputs that a network cannot be judged by, for it makes infinities or no numbers of them,
        are left out, unless there are no others.
        """
        most = _MOST_CHECKS if self._tells_much() else _MOST_OF_LITTLE
        count = int(min(most, max(1.0, _SECONDS / max(cost(self._graph), 1e-9))))
        made = [self.check(number) for number in range(len(self._parts) or count)]
        finite = [c for c in made if all(map(_finite, c.outputs.values()))]
        return finite or made[:1]

    def _tells_much(self) -> bool:
        """Whether outputs are more than a few integers, such as the number of a class."""
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
        return STYLES[number % len(STYLES)], self._seed + number

    def values(self, number: int, tensors: Iterable[str]) -> dict[str, np.ndarray]:
        """Return what the graph makes of the inputs of a check, which need not be known again.

        Parameters
        ----------
        number : int
            Of the check.
        tensors : iterable of str
            Which values are wanted, beside the outputs.

        Returns
        -------
        dict of str to ndarray
        """
        found = evaluate(self._graph, self.inputs(number), tensors)
        self._evaluated[number] = {name: found[name] for name in self._graph.outputs}
        return found

    def check(self, number: int) -> Check:
        """Return the check of a number; every one is another."""
        feeds = self.inputs(number)
        if number in self._evaluated:
            return Check(feeds, self._evaluated[number], *self._drawn(number))
        if not self._parts:
            return Check(feeds, evaluate(self._graph, feeds), *self._drawn(number))
        part = self._parts[number % len(self._parts)]
        outputs = evaluate(part.graph, part.of(feeds))
        places = {name: slices(part.boxes[name]) for name in outputs}
        return Check(feeds, outputs, *self._drawn(number), places=places)

    def pair(self, number: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Return inputs and right outputs by name, all of them; every `number` gives others."""
        feeds = self.inputs(number)
        return feeds, evaluate(self._graph, feeds)

    def packed(self, checks: Sequence[Check], library: bytes) -> bytes:
        """Return `checks` as they are stored beside `library`."""
        limit = int(max(LEAST_BYTES, SHARE * len(library)))
        return pack(
            checks, self.infos, infos(self._graph, self._graph.outputs), self.sources, limit
        )

    def surely(self, check: Check, *, near: float, zeros: bool) -> dict[str, np.ndarray]:
        """Return which elements of each output depend on no tie."""
        graph, feeds = self._graph, check.inputs
        if check.places is not None:
            boxes = {n: tuple((s.start, s.stop) for s in p) for n, p in check.places.items()}
            part = region(graph, boxes)
            graph, feeds = part.graph, part.of(feeds)
        found = tied(graph, feeds, near=near, zeros=zeros)
        return {name: ~mask for name, mask in found.items()}


def parts(graph: Graph, seconds: float, count: int) -> list[Region]:
    """Return parts of a large graph that take little time to evaluate.

    Parameters
    ----------
    graph : Graph
        Its shapes are numbers.
    seconds : float
        What one of them may take by `cost`.
    count : int
        How many; images have a corner each, the first and the last one first.

    Returns
    -------
    list of Region
        None if no part costs less than half of the whole.
    """
    total = cost(graph)
    share, made = 1.0, []
    while share > _LEAST_SHARE:
        share /= 2
        made = [region(graph, _boxes(graph, share, number)) for number in range(count)]
        if max(cost(part.graph) for part in made) <= seconds:
            break
    return made if made and max(cost(part.graph) for part in made) <= total / 2 else []


_LEAST_SHARE = 1 / 64
"""Of each axis of an image, at least."""


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


def _finite(values: np.ndarray) -> bool:
    return values.dtype.kind != "f" or bool(np.isfinite(values).all())


def copy_of(graph: Graph) -> Graph:
    """Return a copy of `graph` that passes do not reach; constants are shared."""
    nodes = [
        Node(n.op, list(n.inputs), list(n.outputs), dict(n.attrs), n.name, n.covers)
        for n in graph.nodes
    ]
    return Graph(
        nodes, list(graph.inputs), list(graph.outputs), dict(graph.constants), dict(graph.types),
        graph.source, datatypes=graph.datatypes,
    )  # fmt: skip


def runs_here(target: TargetSpec) -> bool:
    """Whether this machine can run code for `target`."""
    arch = normal_arch(target.triple.split("-")[0]) if target.triple else ""
    return arch in ("", normal_arch(platform.machine())) and not missing_features(target)


def not_run(target: TargetSpec, output: object) -> str:
    """Return what a user should know of `output`, if this machine cannot run it; else nothing."""
    if not target.has_runtime:
        return (
            f"TVM has no runtime for {target.name} on PyPI: unpack {output} for the kernels "
            "(kernels.o, network.h), a C file that calls them in order, and README.md"
        )
    if target.gpus and not runs_here(target):
        return (
            f"code for {target.name} was not run here: {missing(target.gpus)}; `bnncc verify` "
            "checks it where there is such a GPU"
        )
    if not runs_here(target):
        return (
            f"code for {target.name} was not run on this machine: `bnncc deploy` checks it on the "
            "device with the pair of input and output it carries"
        )
    return ""


class Judge:
    """Finds out whether a network that disagrees with its model is wrong, or met ties.

    Parameters
    ----------
    network : Lowered
        What was compiled (`bnncc.driver`).
    artifact : Artifact
        What it was compiled to.
    options : CompileOptions
        What was asked.
    """

    def __init__(self, network: Lowered, artifact: Artifact, options: CompileOptions) -> None:
        self._network, self._artifact = network, artifact
        self.near = TIE * LOOSER.get(options.float_conv, 1)
        self.zeros = options.sign_zero != "exact"

    def surely(self, check: Check) -> dict[str, np.ndarray]:
        """Return which elements of each output depend on no tie."""
        return self._network.checks.surely(check, near=self.near, zeros=self.zeros)

    def wrong_kernel(self, feeds: Mapping[str, np.ndarray]) -> str:
        """Return the first kernel that is wrong when the network reads `feeds`, if there is one."""
        from bnncc.verification import kernels

        session = self._artifact.session()
        walk = kernels.Walk(self._network.module)
        for case in walk.cases([feeds[t.name] for t in self._network.inputs]):
            if case.differences(kernels.run(session, case))[0]:
                return case.name
        return ""

    def another(self, number: int) -> Check:
        """Return a check that is none of the first ones."""
        return self._network.checks.check(number)


def confirmed(
    artifact: Artifact, checks: Sequence[Check], judge: Judge, threads: int | None = None
) -> list[Check]:
    """Run a fresh artifact on its checks.

    Parameters
    ----------
    artifact : Artifact
        To run.
    checks : sequence of Check
        With whole outputs.
    judge : Judge
        Asked where outputs differ.
    threads : int, optional
        The most that the runs use, and those of the calling thread after them.

    Returns
    -------
    list of Check
        Those it agrees with. Where a tie fell the other way, only what does not depend on one is
        left of a check; others take the place of checks of which nothing is left.

    Raises
    ------
    VerificationError
        If it is wrong.
    """
    artifact.session(threads=threads)
    agreed: list[Check] = []
    partly: list[Check] = []
    for number in itertools.count():
        if number >= len(checks) and (agreed or partly or number >= len(checks) + _SPARES):
            break  # no more are needed, or none helps
        check = checks[number] if number < len(checks) else judge.another(_FIRST_SPARE + number)
        wrong = _wrong(artifact, check)
        if not wrong:
            agreed.append(check)
            continue
        sure = judge.surely(check)
        bad = {n: int((mask & sure[n]).sum()) for n, mask in wrong.items()}
        if any(bad.values()):
            name = next(n for n, count in bad.items() if count)
            raise VerificationError(
                _disagreement(check, name, bad[name], wrong[name].size, judge), hint=_BUG
            )
        if any(mask.any() for mask in sure.values()):
            partly.append(replace(check, sure=sure))
    if not agreed:  # it may still be wrong in what all depends on ties
        for check in checks:
            if judge.wrong_kernel(check.inputs):
                name, mask = next(iter(_wrong(artifact, check).items()))
                raise VerificationError(
                    _disagreement(check, name, int(mask.sum()), mask.size, judge), hint=_BUG
                )
    return agreed + partly or [replace(checks[0], sure=judge.surely(checks[0]))]


_FIRST_SPARE, _SPARES = 32, 3


def _wrong(artifact: Artifact, check: Check) -> dict[str, np.ndarray]:
    """Return where outputs disagree, by name, of those that do."""
    made = artifact.run(check.inputs)
    masks = {
        name: _differs(check.part(name, made[name]), wanted)
        for name, wanted in check.outputs.items()
    }
    return {name: mask for name, mask in masks.items() if mask.any()}


_BUG = "this is a bug in bnncc; please report it with the model"


def _disagreement(check: Check, name: str, count: int, size: int, judge: Judge) -> str:
    """Return what to say of an output that is wrong."""
    kernel = judge.wrong_kernel(check.inputs)
    return (
        f"the compiled network disagrees with its model on {check.style or 'given'} inputs: "
        f"{count} of {size} values of `{name}` are wrong"
        + (f", from kernel `{kernel}` on" if kernel else "")
    )


def _differs(mine: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    if mine.shape != wanted.shape or mine.dtype != wanted.dtype:
        return np.ones(wanted.shape, bool)
    return differs(mine, wanted)
