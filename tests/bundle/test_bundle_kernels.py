"""The worker of a bundle: kernels of every kind are called, checked and timed as they should."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm

from bnncc import schedules
from bnncc.bundle import build, candidates
from bnncc.bundle.candidates import Trial
from bnncc.bundle.device.place import Place, Unfit, in_turns
from bnncc.bundle.device.worker import Late, Worker
from bnncc.records.workload import Workload
from bnncc.targets import catalog
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary.spec import (
    BinaryConv2d,
    BitwiseMaxPool,
    Conv2d,
    Elementwise,
    FewBitConv2d,
    Spec,
    Step,
)
from bnncc.tuning.task import Task
from bnncc.tuning.worker import Worker as Builder
from tests.cuda_emulator import COMPILER
from tests.cuda_tools import on_emulated_gpu

RESIDUAL = BinaryConv2d(
    5, 6, 5, 64, 64, (3, 3), pads=(1, 1, 1, 1),
    steps=(Step("affine"), Step("add"), Step("store", in_place=True), Step("bits")),
)  # fmt: skip
SPECS = [
    RESIDUAL,
    replace(RESIDUAL, n="n"),
    BitwiseMaxPool(4, 8, 8, 64, (2, 2), (2, 2)),
    Elementwise(7, 3, 3, 40, steps=(Step("bits"),)),
    Conv2d(4, 6, 6, 3, 16, (3, 3), steps=(Step("store"), Step("bits"))),
    FewBitConv2d(
        4, 6, 6, 32, 32, (3, 3), data_bits=2, weight_bits=2,
        steps=(Step("levels", count=3, way="acc", forms=("planes",)),),
    ),
]  # fmt: skip


def part_of(specs: list[Spec], target: TargetSpec, folder: Path) -> dict[str, Any]:
    """Build the default kernel of each spec of a layer; return the part of an index."""
    builder = Builder(
        {"target": asdict(target), "preload": (), "device": None, "threads": 1, "method": "none"}
    )
    made = []
    for number, spec in enumerate(specs):
        workload = Workload.of(spec)
        task = Task(workload, 1, schedules.space_of(workload.kernel, target))
        job = {
            "spec": workload.spec, "threads": 1, "point": task.space.default, "known": [],
            "library": str(folder / f"{number}.so"),
        }  # fmt: skip
        assert "hash" in builder.build(job)
        trial = Trial(task, task.space.default, number == 0)
        made.append(
            build.Candidate(
                workload.spec, trial.point, Path(job["library"]), str(number), trial.default
            )
        )
    kernel = candidates._kernel(trial, "layer", made)
    return build._add_kernel(kernel, 0, folder)


def lines_of(place: Place, part: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Return what a worker says of the candidates."""
    said: list[dict[str, Any]] = []
    until = time.monotonic() + 300
    Worker(folder, place, part, set(), until, lambda **line: said.append(line)).run()
    return [line for line in said if "key" in line]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    root = tmp_path_factory.mktemp("place")
    (root / "lib").symlink_to(Path(str(tvm.__file__)).parent / "lib")
    return Place("cpu", root)


def test_a_machine_without_the_features_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unfit, match="needs CPU features this machine lacks: amx_int3, sve9"):
        Place("cpu", tmp_path, ["sve9", "amx_int3"])


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{type(spec).__name__}-{spec.n}")
def test_kernels_of_every_kind(spec: Spec, place: Place, tmp_path: Path) -> None:
    native = catalog.native()
    if isinstance(spec, BinaryConv2d):
        spec = schedules.with_weight_order(spec, native)
    part = part_of([spec], native, tmp_path)
    (line,) = lines_of(place, json.loads(json.dumps(part)), tmp_path)
    assert line["right"], line
    assert line["us"] > 0
    path = tmp_path / part["case"]
    arrays = dict(np.load(path))
    name = next(name for name in sorted(arrays) if name.startswith("output"))
    arrays[name].view(np.uint32).flat[0] ^= 0x7F7F7F7F
    np.savez(path, **arrays)
    (line,) = lines_of(place, part, tmp_path)
    assert "values of output 0 are wrong" in line["error"]
    assert line["right"] is False


def test_nothing_is_begun_when_the_time_is_up(place: Place, tmp_path: Path) -> None:
    part = part_of([SPECS[2]], catalog.native(), tmp_path)
    said: list[dict[str, Any]] = []
    worker = Worker(
        tmp_path, place, part, set(), time.monotonic() - 1, lambda **line: said.append(line)
    )
    with pytest.raises(Late):
        worker.run()
    assert said == []


def test_times_are_taken_in_turns(place: Place) -> None:
    order: list[str] = []
    timers = [place.timer(lambda name=name: order.append(name), 1) for name in "abc"]
    order.clear()
    times = in_turns(timers, 3)
    assert "".join(order) == "abccbaabc"
    assert [len(taken) for taken in times] == [3, 3, 3]


ON_A_GPU = """
import pathlib
from dataclasses import replace
import tvm, tvm_ffi
from bnncc import schedules
from bnncc.bundle.device import place
from bnncc.targets import catalog
from tests.bundle import test_bundle_kernels as kernels

class Emulated(place.Place):
    # What needs PyTorch, by TVM.
    def __init__(self):
        self.device, self.ffi = "cuda", tvm_ffi
    def tensor(self, array):
        return tvm.runtime.tensor(array, tvm.cuda(0))
    def filled(self, tensor, array):
        return tensor.copyfrom(array)
    def array(self, tensor):
        return tensor.numpy()
    def wait(self):
        tvm.cuda(0).sync()
    def timer(self, call, launches=None):
        return place._Clock(call, 1)

target = catalog.resolve("cuda-sm80")
orders = [o for o in schedules.weight_orders(kernels.RESIDUAL, target) if o != "fragments-128"]
specs = [replace(kernels.RESIDUAL, weight_order=order) for order in orders]
folder = pathlib.Path(FOLDER)
part = kernels.part_of(specs, target, folder)
lines = kernels.lines_of(Emulated(), part, folder)
assert len(lines) == len(orders) >= 3, lines
assert all(line["right"] for line in lines), lines
"""


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="needs g++ on x86-64")
def test_candidates_of_an_emulated_gpu(tmp_path: Path) -> None:
    done = on_emulated_gpu(ON_A_GPU.replace("FOLDER", repr(str(tmp_path))), tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
