"""The search strategy, through MetaSchedule's own interface and with times that are made up."""

from __future__ import annotations

import math
from collections.abc import Mapping

import tvm_ffi

from bnncc import schedules
from bnncc.records.workload import Workload
from bnncc.schedules.space import Point
from bnncc.targets import catalog
from bnncc.topi_binary.definitions import define
from bnncc.topi_binary.spec import BinaryConv2d, Step
from bnncc.tuning.search import Search
from bnncc.tuning.strategy import points_of
from bnncc.tuning.task import Task, key_of

TARGET = catalog.resolve("x86-64-v4-vpopcntdq")
LAYER = BinaryConv2d(1, 56, 56, 64, 64, (3, 3), pads=(1, 1, 1, 1), steps=(Step("threshold"),))


def task() -> Task:
    workload = Workload.of(schedules.with_weight_order(LAYER, TARGET))
    return Task(workload, 1, schedules.space_of(workload.kernel, TARGET))


def made_up(point: Mapping[str, int]) -> float:
    """Return seconds that depend on each choice, and on two together."""
    values = [math.log2(1 + value) for value in point.values()]
    return 1e-6 * (
        5 + sum((i + 1) * abs(v - 1) for i, v in enumerate(values)) + values[0] * values[1]
    )


def tried(search: Search, one: Task, points: list[Point]) -> None:
    measured = [(point, made_up(point)) for point in points]
    for point, seconds in measured:
        one.note(point, seconds)
    search.learn(one, measured)


def test_candidates_are_definitions_with_choices() -> None:
    one, search = task(), Search(TARGET)
    context, design = search._context(one)
    context.pre_tuning(100, 5, [design])
    candidates = context.generate_measure_candidates()
    points = points_of(candidates)
    assert key_of(points[0]) == key_of(one.space.default)
    assert len({key_of(p) for p in points}) == 5
    assert all(key_of(p) in one.left for p in points)
    plain = define(one.workload.kernel)
    for candidate in candidates:
        body = candidate.sch.mod["main"].body
        assert tvm_ffi.structural_equal(body.block.body, plain.body.block.body, map_free_vars=True)
    context.post_tuning()


def test_all_points_are_tried_once_and_then_none_is_left() -> None:
    one, search = task(), Search(TARGET)
    kept = dict(list(one.left.items())[:11])
    one.left = kept | {key_of(one.space.default): dict(one.space.default)}
    seen: list[str] = []
    for _ in range(4):
        points = search.propose(one, 4)
        tried(search, one, points)
        seen += [key_of(p) for p in points]
    assert len(seen) == len(set(seen)) == len(kept | {key_of(one.space.default): None})
    assert search.propose(one, 4) == []


def test_what_is_measured_leads_to_better_points() -> None:
    """One of the best three of 519 after 40 trials; points at random are that one time in five."""
    one, search = task(), Search(TARGET)
    ranks = sorted(made_up(point) for point in one.all)
    assert len(ranks) == 519
    for _ in range(5):
        tried(search, one, search.propose(one, 8))
    assert one.best is not None
    assert one.best[1] <= ranks[2]


def test_a_seed_repeats_a_search() -> None:
    runs = []
    for _ in range(2):
        one, search = task(), Search(TARGET, seed=3)
        for _ in range(3):
            tried(search, one, search.propose(one, 6))
        runs.append(list(one.times))
    assert runs[0] == runs[1]
