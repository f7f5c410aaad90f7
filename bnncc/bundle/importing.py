"""Convert the results of a bundle to tuning records."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bnncc import schedules
from bnncc._version import __version__
from bnncc.bundle.candidates import digest, label
from bnncc.bundle.results import Results
from bnncc.errors import TuningError
from bnncc.records import database as records
from bnncc.records.tools import MIN_GAIN
from bnncc.records.workload import Workload
from bnncc.schedules.space import Point
from bnncc.targets.catalog import resolve
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary.spec import BinaryConv2d
from bnncc.tuning import cases
from bnncc.tuning.search import Search
from bnncc.tuning.task import Task, key_of
from bnncc.tuning.tuner import tasks_of


@dataclass
class Imported:
    """Result of an import."""

    folder: Path
    """Of the target's records."""
    records: int = 0
    """Written."""
    kernels: list[dict[str, Any]] = field(default_factory=list)
    """Of each that was timed: ``kernel``, ``candidates``, ``failed``, ``default_us``, ``best_us``,
    ``best``."""
    warnings: list[str] = field(default_factory=list)
    """Kernels that were ignored, and why."""


def take(results: Results, folder: Path, *, target: TargetSpec | None, command: str) -> Imported:
    """Record the default of each kernel, and points that are faster by more than noise.

    Parameters
    ----------
    results : Results
        From `results.read`.
    folder : Path
        Of records, with a folder for each target.
    target : TargetSpec or None
        Expected target, if one was given.
    command : str
        For the index.

    Raises
    ------
    TuningError
        If they are for another target, or contain nothing to record.
    """
    ran = _target(results, target)
    if not results.kernels:
        raise TuningError(
            f"{results.path}: contains no kernels to choose from",
            hint="`bnncc tune MODEL --bundle FOLDER` makes a bundle that tries some",
        )
    made = Imported(folder / records.folder_of(ran), warnings=list(results.warnings))
    cpus = {str(session.get("cpu", "")) for session in results.sessions}
    search = Search(ran, cpu=cpus.pop() if len(cpus) == 1 else "")
    with records.Writer(made.folder) as writer:
        for session in results.sessions:
            kept = {k: v for k, v in session.items() if k in _OF_SESSION}
            writer.note(
                {
                    **kept, "measured": "clock", "target": ran.name, "tvm": results.tvm,
                    "bnncc": __version__, "command": command,
                }
            )  # fmt: skip
        for lines in results.kernels.values():
            try:
                _Kernel(lines, ran).write(made, writer, search)
            except _PassedOver as why:
                made.warnings.append(f"{results.path}: {lines[0]['kernel']}: {why}; not recorded")
    return made


def _target(results: Results, asked: TargetSpec | None) -> TargetSpec:
    """Return the measured target, which must be the expected one."""
    if asked is not None and asked.family != results.family:
        raise TuningError(
            f"{results.path}: was measured with {results.family}, not {asked.name}",
            hint=f"omit --target, or give --target {results.family}",
        )
    if asked is not None and asked.name == results.target:
        return asked  # perhaps of a file
    ran = resolve(results.target)
    return ran if ran.family == results.family else resolve(results.family)


_OF_SESSION = ("session", "device", "cpu", "torch", "cuda")
"""Fields of a session to keep."""


class _PassedOver(Exception):
    """Why a kernel's results are not recorded."""


class _Kernel:
    """The candidates for one kernel, and their results.

    Parameters
    ----------
    lines : list of dict
        Of results; the last one of a candidate counts.
    target : TargetSpec
        What they ran on.
    """

    def __init__(self, lines: list[dict[str, Any]], target: TargetSpec) -> None:
        self.name = lines[0]["kernel"]
        try:
            first = Workload.of(lines[0]["spec"], lines[0]["threads"])
            spec = first.kernel
            if isinstance(spec, BinaryConv2d):
                spec = schedules.with_weight_order(spec, target)
            check = digest(spec, cases.kept(spec, cases.small(spec)))
            workload = Workload.of(spec, first.threads)
            tasks = tasks_of([(workload.spec, 1)], target, first.threads)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise _PassedOver(f"is not a kernel of this version: {error}") from error
        if lines[0]["check"] != check:
            raise _PassedOver("was checked against results that differ from this version's oracle")
        self.tasks = {task.workload: task for task in tasks}
        self.default = workload
        self.failed: dict[Workload, dict[str, str]] = {}
        self.times: dict[tuple[Workload, str], tuple[Point, float]] = {}
        for line in lines:
            self._take(line)

    def _take(self, line: dict[str, Any]) -> None:
        try:
            workload = Workload.of(line["spec"], line["threads"])
            task = self.tasks[workload]
            point = task.space.complete(line["point"])
        except (LookupError, ValueError):  # `UnfitPoint`, or an order that is no more
            return
        if line["right"]:
            self.times[workload, key_of(point)] = point, line["us"] * 1e-6
        else:
            self.failed.setdefault(workload, {})[key_of(point)] = str(line.get("error", "wrong"))

    def write(self, made: Imported, writer: records.Writer, search: Search) -> None:
        """Record the default, and faster points."""
        task = self.tasks.get(self.default)
        at_default = task and self.times.get((self.default, key_of(task.space.default)))
        if not task or not at_default:
            raise _PassedOver("the default of this version was not timed")
        limit = at_default[1] * (1 - MIN_GAIN)
        chosen = [
            (self.tasks[workload], point, seconds)
            for (workload, _), (point, seconds) in self.times.items()
            if seconds <= limit
        ]
        for one, point, seconds in [(task, *at_default), *chosen]:
            number = writer.workload(one.workload, search.workload_line(one))
            writer.record(number, search.record_line(one, point, [seconds]))
            made.records += 1
        for one in {id(one): one for one, _, _ in [(task, *at_default), *chosen]}.values():
            writer.note(self._note(one))
        best = min(chosen, key=lambda found: found[2], default=(task, *at_default))
        made.kernels.append(
            {
                "kernel": self.name,
                "spec": self.default.spec,
                "candidates": len(self.times),
                "failed": sum(map(len, self.failed.values())),
                "default_us": at_default[1] * 1e6,
                "best_us": best[2] * 1e6,
                "best": label(best[0], best[1]),
            }
        )

    def _note(self, task: Task) -> dict[str, Any]:
        failed = self.failed.get(task.workload, {})
        tried = sum(workload == task.workload for workload, _ in self.times)
        return {
            "kernel": task.workload.spec,
            "threads": task.workload.threads,
            "trials": tried + len(failed),
            "failed": failed,
        }


def summary(made: Imported) -> dict[str, Any]:
    """Return the result of an import, for JSON."""
    return {
        "format": 1, "records": str(made.folder), "written": made.records, "kernels": made.kernels,
    }  # fmt: skip


def text(made: Imported) -> list[str]:
    """Return the result of an import: a line for each kernel, and a total."""
    lines = []
    for kernel in made.kernels:
        default, best = kernel["default_us"], kernel["best_us"]
        gained = f" ({100 * (1 - best / default):.1f} % less than the default)"
        lines.append(
            f"{kernel['kernel']}: {best:.2f} us {kernel['best']}"
            f"{gained if best < default else ', the default'}"
        )
    return [*lines, f"{made.folder}: {made.records} records of {len(made.kernels)} kernels"]
