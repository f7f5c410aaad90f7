"""Choose the points to try next, as a search strategy of MetaSchedule.

Spaces are small enough to be listed, so no evolutionary search is needed: the cost model ranks the
points not tried yet, all of them or a sample with the neighbours of the best. Some are chosen at
random nevertheless, to train the model.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

from bnncc.records.workload import candidate, point_of_module
from bnncc.schedules.space import Point
from bnncc.tuning.task import Task, key_of

RANKED = 320
"""Points that the cost model ranks at a time."""

RANDOM_SHARE = 0.25
"""Part of a batch that is chosen at random."""


def candidates(
    module: Any, points: Sequence[Point], design: Any, arguments: Sequence[Any]
) -> list[Any]:
    """Return what MetaSchedule measures: `module` with the decisions of each point."""
    from tvm.s_tir import meta_schedule as ms

    made = (candidate(module, point, design.trace) for point in points)
    return [ms.MeasureCandidate(schedule, arguments) for schedule in made]


def points_of(candidates: Iterable[Any]) -> list[dict[str, int]]:
    """Return the points of candidates."""
    return [point_of_module(made.sch.mod) for made in candidates]


def ranking(task: Task, rng: random.Random, arguments: Sequence[Any], from_default: bool) -> Any:
    """Return the strategy for a kernel.

    Parameters
    ----------
    task : Task
        Says what was tried and how fast it was.
    rng : random.Random
        Source of all random choices.
    arguments : sequence of TensorInfo
        Of the kernel.
    from_default : bool
        Whether the rule's default is the first point that is tried, and then what other CPUs found.

    Returns
    -------
    tvm.s_tir.meta_schedule.search_strategy.SearchStrategy
        `pre_tuning` sets the size of each batch. Without a cost model all choices are random.
    """
    from tvm.ir.utils import derived_object
    from tvm.s_tir import meta_schedule as ms

    @derived_object
    class Ranking(ms.search_strategy.PySearchStrategy):
        def _initialize_with_tune_context(self, context: Any) -> None:
            self._context = context

        def pre_tuning(
            self, max_trials: int, num_trials_per_iter: int, design_spaces: Sequence[Any],
            database: Any = None, cost_model: Any = None,
        ) -> None:  # fmt: skip
            self._count, self._model = num_trials_per_iter, cost_model
            (self._design,) = design_spaces

        def post_tuning(self) -> None:
            self._model = None

        def generate_measure_candidates(self) -> list[Any] | None:
            return self._candidates(self._points()) or None

        def notify_runner_results(self, candidates: list[Any], results: list[Any]) -> None:
            self._model.update(self._context, candidates, results)

        def _points(self) -> list[Point]:
            default = key_of(task.space.default)
            first: list[Point] = []
            if from_default:
                wanted = dict.fromkeys([default, *map(key_of, task.elsewhere)])
                first.extend(task.left[key] for key in wanted if key in task.left)
                del first[self._count :]
            others = sorted(task.left.keys() - {key_of(p) for p in first})
            rng.shuffle(others)
            left = [task.left[key] for key in others]
            room = self._count - len(first)
            if self._model is None or not task.times:
                return first + left[:room]
            at_random = left[: max(1, round(RANDOM_SHARE * room))] if room > 1 else []
            taken = {key_of(p) for p in at_random}
            pool = {key_of(p): p for p in _near(task) + left if key_of(p) not in taken}
            ranked = self._ranked(list(pool.values())[:RANKED])
            return [*first, *ranked[: room - len(at_random)], *at_random][: self._count]

        def _ranked(self, points: list[Point]) -> list[Point]:
            if not points:
                return []
            scores = self._model.predict(self._context, self._candidates(points))
            order = sorted(range(len(points)), key=lambda i: -float(scores[i]))
            return [points[i] for i in order]

        def _candidates(self, points: Sequence[Point]) -> list[Any]:
            return candidates(self._context.mod, points, self._design, arguments)

    return Ranking()


def _near(task: Task) -> list[Point]:
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
