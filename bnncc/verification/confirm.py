"""Make sure of a fresh artifact: run it on inputs made for its graph, and compare.

TVM converts and compiles the operators that are not ours; a mistake there (or here) must not reach
a user unseen. Where the compiling machine can run the code, no artifact leaves the compiler that
disagrees with the NumPy evaluation of its model, but for ties (docs/semantics.md): an output may
differ where it depends on one, and then only if every kernel alone is right.
"""

from __future__ import annotations

import functools
import itertools
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from bnncc.codegen.link import normal_arch
from bnncc.errors import VerificationError
from bnncc.ir.evaluate import evaluate
from bnncc.ir.graph import Graph, Node
from bnncc.ir.halves import is_float
from bnncc.ir.magnitude import coarseness
from bnncc.ir.ties import TIE, tied
from bnncc.runtime.artifact import Artifact
from bnncc.runtime.manifest import infos
from bnncc.runtime.selfcheck import (
    LEAST_BYTES,
    RELATIVE,
    SHARE,
    STYLES,
    Check,
    Source,
    differs,
    draw,
    pack,
)
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

_SECONDS = 1.2
"""What evaluating a graph for all checks may take by `cost`, but for the first of them."""

_PRODUCTS_A_SECOND = 1e10
_ELEMENTS_A_SECOND = 1e8


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
        self.infos = infos(graph, graph.inputs)

    @functools.cached_property
    def sources(self) -> tuple[Source, ...]:
        """Where the values of the inputs come from."""
        return sources(self._graph, self.infos)

    @functools.cached_property
    def coarse(self) -> dict[str, float]:
        """How far outputs may be off that depend on tensors of half precision."""
        table = coarseness(self._graph)
        return {name: table[name] for name in self._graph.outputs if name in table}

    @functools.cached_property
    def checks(self) -> list[Check]:
        """All checks: as many as can be had in the time, by the size of the graph alone.

        Inputs that a network cannot be judged by, for it makes infinities or no numbers of them,
        are left out, unless there are no others.
        """
        most = _MOST_CHECKS if self._tells_much() else _MOST_OF_LITTLE
        count = int(min(most, max(1.0, _SECONDS / max(cost(self._graph), 1e-9))))
        made = [self.check(number) for number in range(count)]
        finite = [c for c in made if all(map(_finite, c.outputs.values()))]
        return finite or made[:1]

    def _tells_much(self) -> bool:
        """Whether outputs are more than a few integers, such as the number of a class."""
        kinds = [
            (self._graph.types[o].dtype, _elements(self._graph, o)) for o in self._graph.outputs
        ]
        return any(dtype[0] == "f" for dtype, _ in kinds) or sum(n for _, n in kinds) >= _LITTLE

    def inputs(self, number: int) -> dict[str, np.ndarray]:
        """Return the inputs of a check."""
        return draw(self.infos, self.sources, *self._drawn(number))

    def _drawn(self, number: int) -> tuple[str, int]:
        return STYLES[number % len(STYLES)], self._seed + number

    def check(self, number: int) -> Check:
        """Return the check of a number; every one is another."""
        feeds = self.inputs(number)
        made = evaluate(self._graph, feeds)
        return Check(feeds, made, *self._drawn(number), coarse=self.coarse)

    def pair(self, number: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Return inputs and right outputs by name; every `number` gives others."""
        check = self.check(number)
        return dict(check.inputs), dict(check.outputs)

    def packed(self, checks: Sequence[Check], library: bytes) -> bytes:
        """Return `checks` as they are stored beside `library`."""
        limit = int(max(LEAST_BYTES, SHARE * len(library)))
        return pack(
            checks, self.infos, infos(self._graph, self._graph.outputs), self.sources, limit
        )

    def surely(self, check: Check, *, near: float, zeros: bool) -> dict[str, np.ndarray]:
        """Return which elements of each output depend on no tie."""
        found = tied(self._graph, check.inputs, near=near, zeros=zeros)
        return {name: ~mask for name, mask in found.items()}


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
    return not is_float(values) or bool(np.isfinite(values.astype(np.float64)).all())


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
    spare = (judge.another(n) for n in range(_FIRST_SPARE, _FIRST_SPARE + _SPARES))
    agreed: list[Check] = []
    partly: list[Check] = []
    for check in itertools.chain(checks, spare):
        if check not in checks and (agreed or partly):
            break  # no more are needed
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
        name: _differs(made[name], wanted, check.coarse.get(name, RELATIVE))
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


def _differs(mine: np.ndarray, wanted: np.ndarray, relative: float) -> np.ndarray:
    if mine.shape != wanted.shape or mine.dtype != wanted.dtype:
        return np.ones(wanted.shape, bool)
    return differs(mine, wanted, relative=relative)
