"""Single trials: cases, libraries and times, through pools of workers."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bnncc import osutil
from bnncc.console import Console
from bnncc.records.workload import Workload
from bnncc.schedules.space import Point
from bnncc.tuning.bench import KEPT
from bnncc.tuning.pool import Answer, Job, Pool
from bnncc.tuning.task import Task, key_of

BATCH = 8
"""Trials of one kernel between two updates of the cost model."""

CASE_SECONDS = 300.0
"""For the oracle to compute what a kernel should."""


@dataclass(frozen=True)
class Plan:
    """How to tune."""

    trials: int = 512
    """Total, including those of earlier runs in the same folder."""
    each: int | None = None
    """Trials of every kernel, one after the other, instead of `trials` by their share of the
    time."""
    time_limit: float | None = None
    """Seconds after which no batch starts."""
    jobs: int = 1
    """Kernels built at a time."""
    measurers: int = 1
    """Kernels measured at a time: 1, or as many as there are devices."""
    batch: int = BATCH
    """Trials of one kernel at a time."""
    build_seconds: float = 60.0
    measure_seconds: float = 30.0
    """`build_seconds`, `measure_seconds`: after which a kernel is given up."""
    repeat_seconds: float = 0.03
    """Approximate seconds of timing one kernel."""
    seed: int = 0
    """Of the search."""
    from_default: bool = True
    """Whether the rule's default is each kernel's first trial."""
    lock: Path | None = None
    """File to lock while kernels are measured, for machines on which other programs measure too."""
    command: str = ""
    """For the index."""
    device: str = ""
    """Device that is measured, for the index."""


class Same:
    """Result in place of times: the kernel equals that of a point measured before."""


class Trials:
    """Builds, checks and times points.

    Parameters
    ----------
    plan : Plan
        What to try.
    builders, measurers : Pool
        Worker processes.
    scratch : Path
        Folder for cases and libraries.
    console : Console
        For warnings.

    Attributes
    ----------
    measuring : float
        Seconds that measurements have taken.
    """

    def __init__(
        self, plan: Plan, builders: Pool, measurers: Pool, scratch: Path, console: Console
    ) -> None:
        self.plan, self.console = plan, console
        self.measuring = 0.0
        self._builders, self._measurers, self._scratch = builders, measurers, scratch
        self._built = 0
        self._libraries: list[Path] = []
        self._numbers: dict[Workload, int] = {}

    def _number(self, task: Task) -> int:
        return self._numbers.setdefault(task.workload, len(self._numbers))

    def cases(self, tasks: Sequence[Task]) -> None:
        """Compute missing cases with the oracle; a kernel without a case is not tuned."""
        missing = [task for task in tasks if not self._case(task).exists()]
        jobs: list[Job] = [
            {"task": "case", "spec": task.workload.spec, "path": str(self._case(task))}
            for task in missing
        ]
        for task, answer in zip(missing, self._builders.run(jobs, CASE_SECONDS), strict=True):
            if "error" in answer:
                self.console.warning(f"{task.workload.name}: no oracle: {answer['error']}")
                task.left.clear()

    def _remove_libraries(self) -> None:
        for library in self._libraries:
            library.unlink(missing_ok=True)

    def _case(self, task: Task) -> Path:
        return self._scratch / f"{self._number(task)}.npz"

    def build(self, pairs: Sequence[tuple[Task, Point]], anew: bool = False) -> list[Answer]:
        """Build kernels, `anew` even if they were built before."""
        self._libraries = []
        for _ in pairs:  # names of their own: a worker may have the last one still open
            self._libraries.append(self._scratch / f"{self._built}.so")
            self._built += 1
        jobs: list[Job] = [
            {
                "task": "build",
                "spec": task.workload.spec,
                "threads": task.workload.threads,
                "point": dict(point),
                "known": [] if anew else list(task.kernels),
                "library": str(self._libraries[number]),
            }
            for number, (task, point) in enumerate(pairs)
        ]
        return self._builders.run(jobs, self.plan.build_seconds)

    def measure(
        self, pairs: Sequence[tuple[Task, Point]], built: Sequence[Answer]
    ) -> list[list[float] | str | Same]:
        """Return the times of each point, or why there are none."""
        results: list[list[float] | str | Same] = [answer.get("error", "") for answer in built]
        numbers, jobs = [], []
        for number, (task, point) in enumerate(pairs):
            answer = built[number]
            made = answer.get("hash") or answer.get("same")
            known = task.kernels.setdefault(str(made), key_of(point)) if made else None
            if made is None:
                continue
            if known != key_of(point):  # the same kernel as another point's
                results[number] = Same()
                continue
            numbers.append(number)
            jobs.append(self._job(task, number))
        answers = self._timed(jobs)
        for number, answer in zip(numbers, answers, strict=True):
            results[number] = answer.get("error") or answer["times"]
        self._remove_libraries()
        return results

    def _job(self, task: Task, number: int, place: int = 0) -> Job:
        return {
            "task": "measure",
            "spec": task.workload.spec,
            "case": str(self._case(task)),
            "library": str(self._libraries[number]),
            "seconds": self.plan.repeat_seconds,
            "place": place,
        }

    def turns(
        self, pairs: Sequence[tuple[Task, Point]], count: int
    ) -> list[list[list[float]]] | None:
        """Measure points in interleaved runs, forwards and backwards, each elsewhere in memory.

        Parameters
        ----------
        pairs : sequence of (Task, Point)
            Tasks and their points.
        count : int
            Turns.

        Returns
        -------
        list of list of list of float, or None
            The shortest times of each turn, by point; None if one of them fails.
        """
        built = self.build(pairs, anew=True)
        if any("hash" not in answer for answer in built):
            return None
        order = [(n, turn) for turn in range(count) for n in _direction(len(pairs), turn)]
        answers = self._timed([self._job(pairs[n][0], n, turn) for n, turn in order])
        self._remove_libraries()
        if any("times" not in answer for answer in answers):
            return None
        times: list[list[list[float]]] = [[] for _ in pairs]
        for (number, _), answer in zip(order, answers, strict=True):
            times[number].append(answer["times"])
        return times

    def _timed(self, jobs: list[Job]) -> list[Answer]:
        before = time.monotonic()
        with _locked(self.plan.lock):
            answers = self._measurers.run(jobs, self.plan.measure_seconds)
        self.measuring += time.monotonic() - before
        return answers


def shortest(turns: Sequence[Sequence[float]]) -> list[float]:
    """Return the times of some turns to record."""
    return sorted(time for turn in turns for time in turn)[:KEPT]


def _direction(count: int, turn: int) -> list[int]:
    return list(range(count))[:: 1 if turn % 2 == 0 else -1]


@contextlib.contextmanager
def _locked(path: Path | None) -> Iterator[None]:
    """Hold the lock file, if one is given."""
    if path is None:
        yield
        return
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        osutil.lock(handle)
        yield
    finally:
        os.close(handle)
