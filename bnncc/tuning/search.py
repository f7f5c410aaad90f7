"""Which points to try next: MetaSchedule's contexts and cost model over a rule's space.

Spaces are small enough to be listed, so no evolution is needed to find what the cost model likes:
it ranks the points not tried yet, all of them or a sample with the neighbours of the best. Some are
chosen at random all the same, to learn from.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bnncc.records.database import Record, numbers
from bnncc.records.workload import Workload, arguments, candidate, function, sampler
from bnncc.schedules.space import Point, Space, text
from bnncc.targets.spec import TargetSpec

RANKED = 320
"""Points that the cost model ranks at a time."""

RANDOM_SHARE = 0.25
"""Of a batch, chosen at random."""

WARM_UP = 8
"""Measurements before the cost model is asked."""


def tune_context(module: Any, target: Any, space: Any, name: str) -> Any:
    """Return MetaSchedule's context of a task, with a generator of its space.

    The constructor of TVM first imports the tensor intrinsics of every GPU, which takes half a
    minute of parsing; none of them is in our spaces.
    """
    from tvm.s_tir.meta_schedule import TuneContext, _ffi_api

    made = TuneContext.__new__(TuneContext)
    strategy, threads, seed, logger = None, 1, 1, None
    made.__init_handle_by_constructor__(
        _ffi_api.TuneContext, module, target, space, strategy, name, threads, seed, logger
    )
    _ffi_api.TuneContextInitialize(made)
    return made


def key_of(point: Mapping[str, int]) -> str:
    """Return a point as text, whatever the order of its choices."""
    return text(dict(sorted(point.items())))


@dataclass
class Task:
    """The search for one kernel."""

    workload: Workload
    """The kernel."""
    weight: int
    """How often the network runs it."""
    space: Space
    """What can be chosen."""
    times: dict[str, float] = field(default_factory=dict)
    """Seconds of the points measured, by `key_of`."""
    points: dict[str, Point] = field(default_factory=dict)
    """Those points."""
    kernels: dict[str, str] = field(default_factory=dict)
    """The first point that made a kernel, by the kernel's hash."""
    failed: dict[str, str] = field(default_factory=dict)
    """Points that failed, and how."""
    trials: int = 0
    """Points built and measured, those that failed included."""

    def __post_init__(self) -> None:
        self.all = list(self.space.points())
        self.left = {key_of(point): point for point in self.all}

    @property
    def default(self) -> float | None:
        """Seconds of the rule's default, if it was measured."""
        return self.times.get(key_of(self.space.default))

    @property
    def best(self) -> tuple[Point, float] | None:
        """The fastest point so far, and its seconds."""
        if not self.times:
            return None
        key = min(self.times, key=self.times.__getitem__)
        return self.points[key], self.times[key]

    def note(self, point: Point, seconds: float) -> None:
        """Take a measurement."""
        key = key_of(point)
        self.times[key], self.points[key] = seconds, point
        self.left.pop(key, None)

    def fail(self, point: Point, why: str) -> None:
        """Take a failure: the point is not tried again."""
        self.failed[key_of(point)] = why
        self.left.pop(key_of(point), None)

    def resume(self, records: Sequence[Record], note: Mapping[str, Any] | None) -> None:
        """Take what an earlier run found."""
        for record in records:
            if record.workload == self.workload and key_of(record.point) in self.left | self.times:
                self.note(record.point, record.seconds)
        self.trials = len(self.times)
        if note is not None:
            for key, why in dict(note.get("failed", {})).items():
                self.failed[str(key)] = str(why)
                self.left.pop(str(key), None)
            self.trials = max(self.trials, int(note.get("trials", 0)))


def _arguments(task: Task) -> list[Any]:
    from tvm.s_tir import meta_schedule as ms

    return [ms.arg_info.TensorInfo(dtype, shape) for dtype, shape in arguments(task.workload)]


class Search:
    """Chooses points, with one cost model for all kernels of a target.

    Parameters
    ----------
    target : TargetSpec
        The machine.
    seed : int
        Of everything random.
    from_default : bool
        Whether the rule's default is the first point that is tried.
    """

    def __init__(self, target: TargetSpec, seed: int = 0, from_default: bool = True) -> None:
        self._random = random.Random(seed)
        self._target = target
        self._from_default = from_default
        self._contexts: dict[Workload, tuple[Any, Any, Any]] = {}
        self._model: Any = None
        self._known = 0

    def propose(self, task: Task, count: int) -> list[Point]:
        """Return up to `count` points to try next, best first."""
        first: list[Point] = []
        default = key_of(task.space.default)
        if self._from_default and default in task.left:
            first = [task.left[default]]
        keys = sorted(task.left.keys() - {key_of(p) for p in first})
        self._random.shuffle(keys)
        left = [task.left[key] for key in keys]
        wanted = count - len(first)
        if self._known < WARM_UP or not task.times:
            return first + left[:wanted]
        at_random = left[: max(1, round(RANDOM_SHARE * wanted))] if wanted > 1 else []
        taken = {key_of(p) for p in at_random}
        pool = [p for p in self._near(task) + left if key_of(p) not in taken]
        pool = list({key_of(p): p for p in pool}.values())[:RANKED]
        ranked = self._ranked(task, pool)
        return [*first, *ranked[: wanted - len(at_random)], *at_random][:count]

    def _near(self, task: Task) -> list[Point]:
        """Return points left that differ from one of the best in one choice."""
        best = sorted(task.times, key=task.times.__getitem__)[:4]
        near: list[Point] = []
        for key in best:
            point = task.points[key]
            for name, values in task.space.choices.items():
                for value in values:
                    changed = key_of({**point, name: value})
                    if changed in task.left:
                        near.append(task.left[changed])
        return near

    def _ranked(self, task: Task, points: Sequence[Point]) -> list[Point]:
        if not points:
            return []
        context, _, _ = self._context(task)
        scores = self._model.predict(context, self._candidates(task, points))
        order = sorted(range(len(points)), key=lambda i: -float(scores[i]))
        return [points[i] for i in order]

    def learn(self, task: Task, measured: Sequence[tuple[Point, float]]) -> None:
        """Teach the cost model what was measured."""
        from tvm.s_tir import meta_schedule as ms

        if not measured:
            return
        if self._model is None:
            from bnncc.tuning.features import extractor

            self._model = ms.cost_model.XGBModel(
                extractor=extractor(), num_warmup_samples=1, num_tuning_cores=1
            )
        context, _, _ = self._context(task)
        results = [ms.runner.RunnerResult([seconds], None) for _, seconds in measured]
        candidates = self._candidates(task, [point for point, _ in measured])
        try:
            self._model.update(context, candidates, results)
        except Exception:  # without it, points are chosen at random, and nothing is lost
            self._model, self._known = None, 0
            return
        self._known += len(measured)

    def workload_line(self, task: Task) -> list[Any]:
        """Return the task's workload as a line of MetaSchedule's database."""
        from tvm.s_tir import meta_schedule as ms

        return numbers(ms.database.Workload(self._context(task)[1]).as_json())

    def record_line(self, task: Task, point: Point, times: Sequence[float]) -> list[Any]:
        """Return a measurement as a line of MetaSchedule's database, without the workload."""
        from tvm.s_tir import meta_schedule as ms

        context, module, design = self._context(task)
        record = ms.database.TuningRecord(
            candidate(module, point, design).trace,
            ms.database.Workload(module),
            list(times),
            context.target,
            _arguments(task),
        )
        return numbers(record.as_json())

    def _candidates(self, task: Task, points: Sequence[Point]) -> list[Any]:
        from tvm.s_tir import meta_schedule as ms

        _, module, design = self._context(task)
        args = _arguments(task)
        return [ms.MeasureCandidate(candidate(module, p, design), args) for p in points]

    def _context(self, task: Task) -> tuple[Any, Any, Any]:
        """Return MetaSchedule's context of a task, its module, and the trace of its design."""
        import tvm
        from tvm.s_tir import meta_schedule as ms

        from bnncc.codegen.pipeline import tvm_target

        if task.workload not in self._contexts:
            module = tvm.IRModule({"main": function(task.workload)})
            target = tvm_target(self._target)
            plain = dict((target.host if self._target.gpus else target).export())
            plain = {k: v for k, v in plain.items() if k not in ("tag", "keys")}
            context = tune_context(
                module,
                tvm.target.Target({**plain, "num-cores": 1}),
                ms.space_generator.ScheduleFn(
                    sampler(task.space.choices), sch_rules=[], postprocs=[], mutator_probs={}
                ),
                task.workload.name,
            )
            design = context.generate_design_space()[0].trace
            self._contexts[task.workload] = context, module, design
        return self._contexts[task.workload]
