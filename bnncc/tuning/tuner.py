"""Tune the kernels of a network: choose which gets the next trials, and record the results."""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bnncc import schedules
from bnncc._version import __version__
from bnncc.console import Console
from bnncc.files import scratch_folder
from bnncc.records import database as records
from bnncc.records import race
from bnncc.records.database import Writer
from bnncc.records.workload import Workload
from bnncc.schedules.space import Point
from bnncc.targets import host
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary.spec import BinaryConv2d
from bnncc.tuning.interrupts import Interrupts
from bnncc.tuning.pool import Pool, Setup
from bnncc.tuning.search import Search
from bnncc.tuning.task import Task, key_of
from bnncc.tuning.trials import Plan, Same, Trials, shortest

CONTESTANTS = 3
"""Points that are compared with the default when a kernel is done."""

TURNS = 3
"""Turns of that comparison."""


@dataclass
class Result:
    """Result of a run."""

    tasks: list[Task] = field(default_factory=list)
    """Kernels with something to choose, and their results."""
    trials: int = 0
    """In this run."""
    seconds: float = 0.0
    measuring: float = 0.0
    """`seconds`, `measuring`: that it took, and how much of it were measurements."""
    interrupted: bool = False
    """Whether the user stopped it."""


def tasks_of(kernels: Sequence[tuple[str, int]], target: TargetSpec, threads: int) -> list[Task]:
    """Return a task for each distinct kernel that has something to choose.

    A binary layer whose weights can have several orders has a kernel for each: the rule's own order
    comes first.

    Parameters
    ----------
    kernels : sequence of (str, int)
        JSON of the specs, and how often the network runs each.
    threads : int
        That share kernels which are long enough.
    """
    weights: dict[Workload, int] = {}
    for spec, count in kernels:
        shared = schedules.space_of(Workload.of(spec).kernel, target, threads)
        workload = Workload.of(spec, threads if shared.default.get("divide") else 1)
        weights[workload] = weights.get(workload, 0) + count
    tasks: dict[Workload, Task] = {}
    for workload, count in weights.items():
        made = [
            Task(w, count, schedules.space_of(w.kernel, target, w.threads))
            for w in _orders(workload, target)
        ]
        if sum(len(task.all) for task in made) > 1:
            tasks |= {task.workload: task for task in made if task.workload not in tasks}
    return list(tasks.values())


def _orders(workload: Workload, target: TargetSpec) -> list[Workload]:
    """Return the kernels of a layer, one for each order of weights; first that of `workload`."""
    kernel = workload.kernel
    if not isinstance(kernel, BinaryConv2d) or kernel.per_image:
        return [workload]
    found = schedules.weight_orders(kernel, target)
    orders = [order for order in found if order != kernel.weight_order] if found[1:] else []
    others = [replace(kernel, weight_order=order) for order in orders]
    return [workload, *(Workload.of(other, workload.threads) for other in others)]


class Tuner:
    """Tunes tasks and keeps what it finds.

    Parameters
    ----------
    tasks : list of Task
        From `tasks_of`.
    setup : Setup
        Setup of the workers that measure.
    folder : Path
        Folder of records, in which the target's folder is made.
    plan : Plan
        How.
    console : Console
        For progress.
    """

    def __init__(
        self, tasks: list[Task], setup: Setup, folder: Path, plan: Plan, console: Console
    ) -> None:
        self.tasks, self.setup, self.plan = tasks, setup, plan
        self.folder = folder / records.folder_of(setup.target, setup.method)
        self.console = console
        here = setup.device is None and setup.method == "clock"
        self.cpu = host.core_model() if here else ""
        self.search = Search(setup.target, plan.seed, plan.from_default, self.cpu)
        self.result = Result(tasks)

    def run(self) -> Result:
        """Tune until the trials or the time are used up, or the user stops it.

        Raises
        ------
        TuningError
            If nothing can be measured, or records cannot be written.
        """
        started = time.monotonic()
        limit = self.plan.time_limit
        self.until = None if limit is None else started + limit
        builds = Setup(self.setup.target, preload=self.setup.preload, method="none")
        with (
            Interrupts() as self.interrupts,
            Writer(self.folder) as self.writer,
            scratch_folder("tune") as scratch,
            Pool(builds, self.plan.jobs) as builders,
            Pool(self.setup, self.plan.measurers) as measurers,
        ):
            self.trials = Trials(self.plan, builders, measurers, Path(scratch), self.console)
            self._resume()
            most = self.plan.trials if self.plan.each is None else self.plan.each * len(self.tasks)
            total = min(most, self._done() + sum(len(t.left) for t in self.tasks))
            unit = "s" if self.setup.method == "clock" else self.setup.method
            self.progress = Progress(self.console, total, self.until, unit)
            try:
                self._teach()
                if self.plan.each is not None:
                    self._tune_each(self.plan.each)
                else:
                    self._tune()
            except KeyboardInterrupt:
                self.result.interrupted = True
            self.result.measuring = self.trials.measuring
            self.result.seconds = time.monotonic() - started
            self.progress.end(self.tasks)
        return self.result

    @property
    def won(self) -> bool:
        """Whether this run compared kernels, and keeps any that differs from the rules' default."""
        raced = any(task.gain is not None for task in self.tasks)
        changed = (task.kept not in (None, self._unchanged(task)) for task in self.tasks)
        return raced and any(changed)

    def _unchanged(self, task: Task) -> str:
        """Return what is kept of a kernel where the rule's default is kept of its layer."""
        return key_of(task.space.default) if task is self._layer(task)[0] else ""

    def verdicts(self) -> list[tuple[str | None, int]]:
        """Return the point kept for each kernel, and the trials before."""
        return [(task.kept, task.raced) for task in self.tasks]

    def defaults(self, again: bool = False) -> list[tuple[str | None, int]]:
        """Return verdicts for the rules' defaults; `again` if kernels are to be compared again."""
        kept = (None if task.kept is None else self._unchanged(task) for task in self.tasks)
        return [(k, 0 if again else t.raced) for k, t in zip(kept, self.tasks, strict=True)]

    def keep(self, verdicts: Sequence[tuple[str | None, int]]) -> None:
        """Record the point kept for each kernel, and the trials before it was chosen."""
        with Writer(self.folder) as self.writer:
            for task, (kept, raced) in zip(self.tasks, verdicts, strict=True):
                if kept is not None:
                    task.kept, task.raced = kept, raced
                    self._note(task)

    # ---- what happens next -----------------------------------------------------------------

    def _done(self) -> int:
        return sum(task.trials for task in self.tasks)

    def _resume(self) -> None:
        """Continue from the records, and note this session in the index."""
        known = records.load(self.setup.target, [self.folder.parent])
        log, _ = records.that_count(self.writer.log, self.setup.target)
        notes = log.notes()
        for task in self.tasks:
            workload = task.workload
            task.elsewhere = known.candidates(workload.spec, workload.threads)
            task.resume(log.records, notes.get(workload))
        import importlib.metadata

        self.writer.note(
            {
                "session": datetime.datetime.now(datetime.timezone.utc).isoformat("T", "seconds"),
                "device": self.plan.device,
                **({"cpu": host.identity()} if self.cpu else {}),
                "measured": self.setup.method,
                "target": self.setup.target.name,
                "tvm": importlib.metadata.version("apache-tvm"),
                "bnncc": __version__,
                "command": self.plan.command,
            }
        )

    def _tune(self) -> None:
        new = [task for task in self.tasks if not task.times and task.left]
        if self.plan.from_default and new:  # all defaults first: they say where the time goes
            self._trials([(task, 1) for task in new][: max(0, self._rest())])
        while self._rest() > 0 and not self._late():
            task = self._neediest()
            if task is None:
                break
            self._trials([(task, min(self.plan.batch, self._rest()))])
        for task in self.tasks:
            self._race(self._layer(task))

    def _tune_each(self, trials: int) -> None:
        for task in self.tasks:
            while task.left and task.trials < trials and not self._late():
                count = min(self.plan.batch, trials - task.trials)
                self._trials([(task, count)])
            layer = self._layer(task)
            if task is layer[-1]:
                self._race(layer)

    def _teach(self) -> None:
        """Train the cost model on the measurements of kernels that are to be tuned further."""
        most = self.plan.each
        for task in self.tasks:
            if task.left and (most is None or task.trials < most):
                with self.interrupts.shield():
                    self.search.learn(task, [(task.points[k], s) for k, s in task.times.items()])

    def _rest(self) -> int:
        return self.plan.trials - self._done()

    def _late(self) -> bool:
        return self.until is not None and time.monotonic() > self.until

    def _neediest(self) -> Task | None:
        """Return the kernel whose trials are fewest for its share of the measured time."""
        open_ = [task for task in self.tasks if task.left]
        never = [task for task in open_ if not task.times and not task.failed]
        if never or not open_:
            return never[0] if never else None

        def need(task: Task) -> float:
            seconds = task.best[1] if task.best is not None else 0.0
            return task.weight * seconds / (task.trials + self.plan.batch)

        return max(open_, key=need)

    # ---- trials ----------------------------------------------------------------------------

    def _trials(self, chosen: Sequence[tuple[Task, int]]) -> None:
        """Build, check and measure points of some tasks, and record those with correct results."""
        with self.interrupts.shield():
            pairs = [(task, p) for task, count in chosen for p in self.search.propose(task, count)]
        self.trials.cases([task for task, _ in chosen])
        times = self.trials.measure(pairs, self.trials.build(pairs))
        with self.interrupts.shield():
            self._take([task for task, _ in chosen], pairs, times)

    def _take(
        self,
        tasks: Sequence[Task],
        pairs: Sequence[tuple[Task, Point]],
        found: Sequence[list[float] | str | Same],
    ) -> None:
        """Record measurements, and train the cost model on them."""
        measured: dict[int, list[tuple[Point, float]]] = {}
        for (task, point), times in zip(pairs, found, strict=True):
            if isinstance(times, Same):
                task.left.pop(key_of(point), None)
                continue
            task.trials += 1
            self.result.trials += 1
            if isinstance(times, str):
                task.fail(point, times)
                self.console.progress(f"{task.workload.name}: {key_of(point)}: {times}")
                continue
            self._keep(task, point, times)
            measured.setdefault(id(task), []).append((point, _mean(times)))
        for task in tasks:
            self.search.learn(task, measured.get(id(task), []))
            self._note(task)
            self.progress.show(self._done(), task)

    def _keep(self, task: Task, point: Point, times: Sequence[float]) -> None:
        number = self.writer.workload(task.workload, self.search.workload_line(task))
        self.writer.record(number, self.search.record_line(task, point, times))
        task.note(point, _mean(times))

    def _note(self, task: Task) -> None:
        kept, own = task.kept, self._layer(task)[0]
        if kept is None and key_of(own.space.default) in own.times:
            kept = self._unchanged(task)  # what is only measured is no gain yet
        self.writer.note(
            {
                "kernel": task.workload.spec,
                "threads": task.workload.threads,
                "trials": task.trials,
                "failed": task.failed,
                "raced": task.raced,
                **({"cpu": self.cpu} if self.cpu else {}),
                **({} if kept is None else {records.KEPT: kept}),
            }
        )

    def _layer(self, task: Task) -> list[Task]:
        """Return the kernels of a task's layer, that of the rule's own order of weights first."""
        layer, threads = task.workload.layer, task.workload.threads
        return [t for t in self.tasks if (t.workload.layer, t.workload.threads) == (layer, threads)]

    def _race(self, layer: Sequence[Task]) -> None:
        """Compare the best points of a layer with its default, interleaved; keep the fastest."""
        own, default = layer[0], key_of(layer[0].space.default)
        if default not in own.times or all(task.raced == task.trials for task in layer):
            return
        self.trials.cases(layer)
        best = [(task, key) for task in layer for key in task.times]
        best.sort(key=lambda found: found[0].times[found[1]])
        chosen = list(dict.fromkeys([*best[:CONTESTANTS], (own, default)]))
        if chosen[1:]:
            self._turns(chosen, TURNS)
        winner, key = min(chosen, key=lambda found: found[0].times[found[1]])
        faster, gain = False, None
        if (winner, key) != (own, default):
            found = self._turns([(own, default), (winner, key)], race.TURNS)
            if found is not None:
                gain = race.Gain.of(*([min(times) for times in turns] for turns in found))
                faster = gain.faster
            else:
                self.console.warning(f"{own.workload.name}: cannot be measured in interleaved runs")
        for task in layer:
            task.kept, task.raced, task.gain = "", task.trials, gain
        if faster:
            winner.kept = key
        else:
            own.kept = default
        with self.interrupts.shield():
            for task in layer:
                self._note(task)

    def _turns(
        self, chosen: Sequence[tuple[Task, str]], count: int
    ) -> list[list[list[float]]] | None:
        """Measure points in interleaved runs, and record the shortest times; None if one fails."""
        pairs = [(task, task.points[key]) for task, key in chosen]
        found = self.trials.turns(pairs, count)
        if found is not None:
            with self.interrupts.shield():
                for (task, point), turns in zip(pairs, found, strict=True):
                    self._keep(task, point, shortest(turns))
        return found


def _mean(times: Sequence[float]) -> float:
    return sum(times) / len(times)


def summary(result: Result) -> dict[str, Any]:
    """Return the results of a run, for JSON."""
    return {
        "trials": result.trials,
        "seconds": round(result.seconds, 3),
        "measuring_seconds": round(result.measuring, 3),
        "interrupted": result.interrupted,
        "kernels": [
            {
                "kernel": task.workload.name,
                "spec": task.workload.spec,
                "threads": task.workload.threads,
                "weight": task.weight,
                "trials": task.trials,
                "failed": task.failed,
                "default_us": None if task.default is None else task.default * 1e6,
                "best_us": None if task.best is None else task.best[1] * 1e6,
                "best": None if task.best is None else dict(task.best[0]),
                "kept": task.kept,
                "gain": None if task.gain is None else asdict(task.gain),
            }
            for task in result.tasks
        ],
    }


WIDTH = 20
"""Characters of the bar."""


class Progress:
    """Shows the trials done, the current kernel with its best so far, and the time left.

    Parameters
    ----------
    total : int
        Requested trials.
    until : float or None
        `time.monotonic()` after which no trial starts.
    unit : str
        ``s`` if seconds are measured, else what is counted.
    """

    def __init__(self, console: Console, total: int, until: float | None, unit: str) -> None:
        self.console, self.total, self.until, self.unit = console, total, until, unit
        self.started = time.monotonic()
        self.first: int | None = None

    def show(self, done: int, task: Task) -> None:
        """Show the progress after a batch for `task`."""
        if self.first is None:
            self.first = done
        text = f"{done}/{self.total} {task.workload.name}: {self.best(task)}, {self._left(done)}"
        if self.console.live:
            filled = WIDTH * done // max(1, self.total)
            self.console.status(f"[{'#' * filled}{'.' * (WIDTH - filled)}] {text}")
        else:
            self.console.result(text)

    def end(self, tasks: Sequence[Task]) -> None:
        """Print the best of every kernel."""
        if self.console.live:
            self.console.status("")
        for task in tasks:
            trials = "1 trial" if task.trials == 1 else f"{task.trials} trials"
            text = f"{task.workload.name}: {self.best(task)}, {trials}"
            self.console.result(text + self.verdict(task))

    @staticmethod
    def verdict(task: Task) -> str:
        """Return the result of comparing a kernel with its default; empty without a comparison."""
        if task.kept is None:
            return ""
        if not task.kept:
            return "; kept another weight order"
        race = "" if task.gain is None else f"; interleaved runs: {task.gain.text}"
        if task.kept == key_of(task.space.default):
            return f"{race}; kept the default"
        return f"{race}; kept the tuned schedule"

    def best(self, task: Task) -> str:
        """Return the best so far of `task`, beside the default."""
        if task.best is None:
            return "nothing measured"
        text = self.amount(task.best[1])
        if task.default is not None and task.default > task.best[1]:
            text += f" ({100 * (1 - task.best[1] / task.default):.1f} % less than the default)"
        return text

    def amount(self, value: float) -> str:
        """Return a measurement with its unit."""
        return f"{value * 1e6:.2f} us" if self.unit == "s" else f"{value * 1e6:,.0f} {self.unit}"

    def _left(self, done: int) -> str:
        now, made = time.monotonic(), done - (self.first or 0)
        if made <= 0:
            return "time left unknown"
        seconds = (now - self.started) / made * max(0, self.total - done)
        if self.until is not None:
            seconds = min(seconds, max(0.0, self.until - now))
        return f"{int(seconds) // 60}:{int(seconds) % 60:02d} left"
