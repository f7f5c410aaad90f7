"""Choose and build the candidates of a bundle for the kernels of some models."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bnncc.bundle.build import Candidate, Kernel
from bnncc.console import Console
from bnncc.records.workload import Workload
from bnncc.schedules.space import Point, text
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary.spec import Spec
from bnncc.tuning import cases
from bnncc.tuning.pool import Pool, Setup
from bnncc.tuning.task import Task
from bnncc.tuning.tuner import tasks_of

BUILD_SECONDS = 120.0
"""Seconds after which building a candidate is stopped."""


@dataclass(frozen=True)
class Trial:
    """A point of one of the kernels of a layer."""

    task: Task
    """The kernel."""
    point: Point
    """Of its space."""
    default: bool = False
    """Whether the rules choose this kernel and this point."""


def layers_of(
    kernels: Sequence[tuple[str, int]], target: TargetSpec, threads: int = 1
) -> list[list[Trial]]:
    """Return all possible trials of each distinct layer, the most promising first.

    Parameters
    ----------
    kernels : sequence of (str, int)
        JSON of the specs as the rules choose them, and how often networks run each.
    threads : int
        Threads that share kernels.

    Returns
    -------
    list of list of Trial
        Of each layer first the default, then that of each other order of weights, then what
        differs from these in one choice, in two, and so on.
    """
    groups: dict[tuple[str, int], list[Task]] = {}
    for task in tasks_of(kernels, target, threads):
        groups.setdefault((task.workload.layer, task.workload.threads), []).append(task)
    found = []
    for tasks in groups.values():
        trials = [(_changes(t, p), i, Trial(t, p)) for i, t in enumerate(tasks) for p in t.all]
        trials.sort(key=lambda ranked: ranked[:2])
        first = Trial(tasks[0], tasks[0].space.default, default=True)
        found.append([first, *(trial for _, _, trial in trials[1:])])
    return found


def _changes(task: Task, point: Point) -> int:
    return sum(point[name] != value for name, value in task.space.default.items())


def limited(layers: Sequence[list[Trial]], most: int) -> list[list[Trial]]:
    """Return up to `most` trials: the first of each layer, then the second, and so on."""
    taken: list[list[Trial]] = [[] for _ in layers]
    for rank in range(max(map(len, layers), default=0)):
        for number, trials in enumerate(layers):
            if rank < len(trials) and most > 0:
                taken[number].append(trials[rank])
                most -= 1
    return [trials for trials in taken if trials[1:]]


def build(
    layers: Sequence[Sequence[Trial]],
    target: TargetSpec,
    folder: Path,
    *,
    jobs: int,
    console: Console,
    preload: tuple[str, ...] = (),
    names: Callable[[Trial], tuple[str, str]] | None = None,
    kernel: Callable[[Trial, str, Sequence[Candidate]], Kernel] | None = None,
) -> list[Kernel]:
    """Build candidates, and compute their expected outputs.

    Parameters
    ----------
    layers : sequence of sequence of Trial
        What to build.
    folder : Path
        For libraries.
    jobs : int
        Number of parallel builds.
    console : Console
        For progress and failures.
    preload : tuple of str
        Modules that the building processes import first.
    names : callable, optional
        Gives a trial the names of its kernel and of itself.
    kernel : callable, optional
        Makes a kernel of its first trial, its name and its candidates; by default with a case that
        is drawn.

    Returns
    -------
    list of Kernel
        Without candidates whose code equals that of an earlier one.
    """
    named = names or _names
    flat = [trial for trials in layers for trial in trials]
    asked: list[dict[str, Any]] = [
        {
            "task": "build", "spec": trial.task.workload.spec,
            "threads": trial.task.workload.threads, "point": dict(trial.point), "known": [],
            "library": str(folder / f"{number}.so"),
        }
        for number, trial in enumerate(flat)
    ]  # fmt: skip

    def done(number: int, _: Any) -> None:
        console.progress(f"{number + 1}/{len(flat)} {' '.join(named(flat[number]))}")

    with Pool(Setup(target, preload=preload, method="none"), jobs) as pool:
        answers = pool.run(asked, BUILD_SECONDS, done)
    results = iter(zip(flat, asked, answers, strict=True))
    made = []
    for trials in layers:
        candidates, seen = [], set()
        for _ in trials:
            trial, job, answer = next(results)
            if "error" in answer:
                console.warning(f"{' '.join(named(trial))}: not built: {answer['error']}")
            elif answer["hash"] not in seen:
                seen.add(answer["hash"])
                candidates.append(
                    Candidate(
                        trial.task.workload.spec, trial.point, Path(str(job["library"])),
                        named(trial)[1], trial.default, trial.task.workload.threads,
                    )
                )  # fmt: skip
        if candidates:
            made.append((kernel or _kernel)(trials[0], named(trials[0])[0], candidates))
    return made


def _kernel(trial: Trial, name: str, candidates: Sequence[Candidate]) -> Kernel:
    spec = trial.task.workload.kernel
    case = cases.kept(spec, cases.small(spec))
    return Kernel(name, candidates, case, digest(spec, case), spec.macs)


def digest(spec: Spec, case: Mapping[str, np.ndarray]) -> str:
    """Return a digest of the expected outputs, without floats, which machines round differently.

    Parameters
    ----------
    case : mapping of str to ndarray
        From `cases.kept`.

    Returns
    -------
    str
        SHA-256.
    """
    found = hashlib.sha256(Workload.of(spec).layer.encode())
    for name in sorted(case):
        array = np.ascontiguousarray(case[name])
        found.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        found.update(array.tobytes() if spec.exact else b"")
    return found.hexdigest()


def _names(trial: Trial) -> tuple[str, str]:
    """Return names for people; a layer has one for each batch."""
    workload = trial.task.workload
    layer = Workload(workload.layer, workload.threads)
    n = workload.kernel.n
    batch = f" x{n}" if isinstance(n, int) and n > 1 else ""
    return f"{layer.name}{batch}", label(trial.task, trial.point)


def label(task: Task, point: Point) -> str:
    """Return a label that distinguishes a candidate from the others for a layer."""
    kernel = task.workload.kernel
    order = kernel.weight_order if kernel.weight_order != "words" else ""
    return " ".join(filter(None, [order, text(point)])) or "default"
