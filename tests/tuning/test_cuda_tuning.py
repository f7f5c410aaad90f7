"""Tuning GPU kernels, on an emulated GPU; and records of it in a compiled network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bnncc import schedules
from bnncc.console import Console
from bnncc.records import database as records
from bnncc.records.workload import Workload
from bnncc.schedules import cuda
from bnncc.targets import catalog
from bnncc.topi_binary.spec import BinaryConv2d, Conv2d, Step
from bnncc.tuning.pool import Setup
from bnncc.tuning.tuner import Plan, Tuner, tasks_of
from tests.cuda_emulator import COMPILER

LAYER = BinaryConv2d(1, 8, 8, 256, 64, (3, 3), pads=(1, 1, 1, 1), steps=(Step("threshold"),))


STEM = Conv2d(1, 32, 32, 3, 64, (7, 7), (2, 2), pads=(3, 3, 3, 3), steps=(Step("store"),))


def test_space_of_a_layer() -> None:
    for name, layer, choices in (
        ("cuda-sm80", LAYER, {"rows": (1, 2), "splits": (1, 2, 4)}),
        ("cuda-sm120", LAYER, {"rows": (1,), "splits": (1, 2, 4)}),
        ("cuda-sm90a", LAYER, {"rows": (1, 2), "splits": (1, 2, 4)}),
        ("cuda-sm90a", replace(LAYER, n=4096), {"teams": (1, 2, 4), "eager": (0, 1)}),
        ("cuda-sm80", STEM, {"rows": (2, 4, 8), "splits": (1, 2)}),
    ):
        target = catalog.resolve(name)
        spec = layer
        if isinstance(layer, BinaryConv2d):
            spec = schedules.with_weight_order(layer, target)
        space = schedules.space_of(spec, target)
        assert space.choices == choices
        for point in space.points():
            assert cuda.schedule(spec, target, space.complete(point)) is not None


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="needs g++ on x86-64")
def test_kernels_are_tuned_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BNNCC_FAKE_GPU", "80")
    target = catalog.resolve("cuda-sm80")
    kernel = Workload.of(schedules.with_weight_order(LAYER, target))
    tasks = tasks_of([(kernel.spec, 1)], target, 1)
    plan = Plan(trials=6, jobs=1, repeat_seconds=0.002)
    setup = Setup(target, preload=("tests.cuda_gpu_here",))
    result = Tuner(tasks, setup, tmp_path, plan, Console(-1)).run()
    assert result.trials == 6
    log = records.read(tmp_path / records.folder_of(target))
    tried = {record.workload.kernel.weight_order for record in log.records}
    assert tried == set(schedules.weight_orders(LAYER, target))  # their defaults come first
    assert len({(r.workload, tuple(sorted(r.point.items()))) for r in log.records}) == 6
