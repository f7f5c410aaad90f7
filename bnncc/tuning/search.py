"""The kernels to tune, and MetaSchedule's contexts for them: strategy, cost model, database.

A context holds the definition of its kernel, and its design space annotates that with the choices
of the rule. What is stored is smaller: `bnncc.records.workload` says why.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from bnncc.records.database import numbers
from bnncc.records.workload import Workload, arguments, candidate, module, sampler
from bnncc.schedules.space import Point
from bnncc.targets.spec import TargetSpec
from bnncc.tuning.strategy import candidates, points_of, ranking
from bnncc.tuning.task import Task, key_of

WARM_UP = 8
"""Measurements before the cost model is used."""


def tune_context(module: Any, target: Any, space: Any, strategy: Any, name: str) -> Any:
    """Return MetaSchedule's context of a task, with a generator of its space and a strategy.

    The constructor of TVM first imports the tensor intrinsics of every GPU, which takes half a
    minute of parsing; none of them is in our spaces.
    """
    from tvm.s_tir.meta_schedule import TuneContext, _ffi_api

    made = TuneContext.__new__(TuneContext)
    threads, seed, logger = 1, 1, None
    made.__init_handle_by_constructor__(
        _ffi_api.TuneContext, module, target, space, strategy, name, threads, seed, logger
    )
    _ffi_api.TuneContextInitialize(made)
    return made


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
        Seed of all random choices.
    from_default : bool
        Whether the rule's default is the first point that is tried, and then what other CPUs found.
    cpu : str
        CPU on which kernels are measured, for the records; empty if it is not this machine's.
    """

    def __init__(
        self, target: TargetSpec, seed: int = 0, from_default: bool = True, cpu: str = ""
    ) -> None:
        self._random = random.Random(seed)
        self._target = target
        self._from_default = from_default
        self._cpu = {"model": cpu} if cpu else {}
        self._contexts: dict[Workload, tuple[Any, Any]] = {}
        self._model: Any = None
        self._known = 0

    def propose(self, task: Task, count: int) -> list[Point]:
        """Return up to `count` points to try next, best first."""
        context = self._begun(task, count)
        found = context.generate_measure_candidates() or []
        context.post_tuning()
        return [task.left[key_of(point)] for point in points_of(found)]

    def learn(self, task: Task, measured: Sequence[tuple[Point, float]]) -> None:
        """Train the cost model on measurements."""
        from tvm.s_tir import meta_schedule as ms

        if not measured:
            return
        if self._model is None:
            from bnncc.tuning.features import extractor

            self._model = ms.cost_model.XGBModel(
                extractor=extractor(), num_warmup_samples=1, num_tuning_cores=1
            )
        self._known += len(measured)
        results = [ms.runner.RunnerResult([seconds], None) for _, seconds in measured]
        context = self._begun(task, 0)
        points = [point for point, _ in measured]
        made = candidates(context.mod, points, self._context(task)[1], _arguments(task))
        try:
            context.notify_runner_results(made, results)
        except Exception:  # without it, points are chosen at random, and nothing is lost
            self._model, self._known = None, 0

    def _begun(self, task: Task, count: int) -> Any:
        """Return the context of a task, ready for a batch of `count` points."""
        context, design = self._context(task)
        known = self._model if self._known >= WARM_UP or not count else None
        context.pre_tuning(len(task.left), count, [design], cost_model=known)
        return context

    def workload_line(self, task: Task) -> list[Any]:
        """Return the task's workload as a line of MetaSchedule's database."""
        from tvm.s_tir import meta_schedule as ms

        return numbers(ms.database.Workload(module(task.workload)).as_json())

    def record_line(self, task: Task, point: Point, times: Sequence[float]) -> list[Any]:
        """Return a measurement as a line of MetaSchedule's database, without the workload."""
        from tvm.s_tir import meta_schedule as ms

        context, design = self._context(task)
        stored = module(task.workload)
        record = ms.database.TuningRecord(
            candidate(stored, point, design.trace).trace,
            ms.database.Workload(stored),
            list(times),
            context.target,
            _arguments(task),
        )
        return numbers(record.as_json())

    def _context(self, task: Task) -> tuple[Any, Any]:
        """Return MetaSchedule's context of a task, and its design space."""
        import tvm
        from tvm.s_tir import meta_schedule as ms

        from bnncc.codegen.pipeline import tvm_target
        from bnncc.topi_binary.definitions import define

        if task.workload not in self._contexts:
            target = tvm_target(self._target)
            plain = dict((target.host if self._target.gpus else target).export())
            plain = {k: v for k, v in plain.items() if k not in ("tag", "keys")}
            args = _arguments(task)
            context = tune_context(
                tvm.IRModule({"main": define(task.workload.kernel)}),
                tvm.target.Target({**plain, **self._cpu, "num-cores": 1}),
                ms.space_generator.ScheduleFn(
                    sampler(task.space.choices), sch_rules=[], postprocs=[], mutator_probs={}
                ),
                ranking(task, self._random, args, self._from_default),
                task.workload.name,
            )
            (design,) = context.generate_design_space()
            self._contexts[task.workload] = context, design
        return self._contexts[task.workload]
