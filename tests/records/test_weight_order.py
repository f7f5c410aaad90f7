"""The order of a binary layer's weights: the rule's, unless another was measured to be faster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from bnncc import driver, schedules
from bnncc.options import CompileOptions
from bnncc.records import database as records
from bnncc.records.workload import Workload
from bnncc.targets import catalog
from bnncc.topi_binary.spec import BinaryConv2d, Spec, Step, from_json
from bnncc.tuning.search import Search
from bnncc.tuning.tuner import tasks_of
from bnncc.verification import recorded
from tests.devices import DIGITS

LAYER = BinaryConv2d(1, 8, 8, 256, 64, (3, 3), pads=(1, 1, 1, 1), steps=(Step("threshold"),))
HOPPER = catalog.resolve("cuda-sm90a")


def write(folder: Path, target: str, times: Mapping[Spec, float]) -> Path:
    """Put the default points of kernels on record, with seconds for each; return the folder."""
    spec = catalog.resolve(target)
    search = Search(spec)
    with records.Writer(folder / records.folder_of(spec)) as writer:
        for kernel, seconds in times.items():
            workload = Workload.of(kernel)
            tasks = tasks_of([(workload.spec, 1)], spec, 1)
            task = next(task for task in tasks if task.workload == workload)
            number = writer.workload(workload, search.workload_line(task))
            writer.record(number, search.record_line(task, task.space.default, [seconds]))
    return folder


def binary_layers(folder: Path | None, target: str = "cuda-sm90a") -> list[BinaryConv2d]:
    options = CompileOptions(target=target, records=(folder,) if folder else (), tuned=bool(folder))
    specs = [from_json(spec) for spec, _ in driver.kernels(DIGITS / "digits.onnx", options)]
    return [spec for spec in specs if isinstance(spec, BinaryConv2d)]


def orders(folder: Path | None, target: str = "cuda-sm90a") -> list[str]:
    return [spec.weight_order for spec in binary_layers(folder, target)]


@pytest.mark.parametrize(
    ("target", "wanted"),
    [
        ("cuda-sm90a", {"cores-32", "cores-64", "fragments-32", "fragments-64", "strips"}),
        ("cuda-sm80", {"fragments-32", "fragments-64", "strips"}),
        ("cuda", {"fragments-32", "fragments-64", "strips"}),
        ("x86-64-v4-amx", {"fours", "words"}),
        ("x86-64-v4-vpopcntdq", {"words"}),
    ],
)
def test_each_target_has_the_orders_that_its_engines_read(target: str, wanted: set[str]) -> None:
    machine = catalog.resolve(target)
    found = schedules.weight_orders(LAYER, machine)
    assert set(found) == wanted
    assert found[0] == schedules.with_weight_order(LAYER, machine).weight_order


def test_tiles_fit_into_groups() -> None:
    for groups, wanted in ((2, {"cores-32", "fragments-32", "strips"}), (4, {"strips"})):
        found = schedules.weight_orders(replace(LAYER, groups=groups), HOPPER)
        assert set(found) == wanted


def test_a_layer_has_a_kernel_for_each_order() -> None:
    spec = schedules.with_weight_order(LAYER, HOPPER)
    tasks = tasks_of([(Workload.of(spec).spec, 3), (Workload.of(spec).spec, 1)], HOPPER, 1)
    found = [task.workload.kernel for task in tasks]
    assert [kernel.weight_order for kernel in found] == list(schedules.weight_orders(spec, HOPPER))
    assert {replace(kernel, weight_order="words") for kernel in found} == {LAYER}
    assert {task.weight for task in tasks} == {4}


def test_records_choose_the_order(tmp_path: Path) -> None:
    plain = binary_layers(None)
    first, second = plain[:2]
    other, alone = (replace(spec, weight_order="strips") for spec in (first, second))
    assert first.weight_order != "strips"
    folder = write(tmp_path, "cuda-sm90a", {first: 3e-6, other: 2e-6, alone: 1e-6})
    slower = write(tmp_path / "slower", "cuda-sm90a", {first: 2e-6, other: 3e-6})
    assert orders(folder)[:2] == ["strips", "strips"]
    assert orders(folder)[2:] == [spec.weight_order for spec in plain[2:]]
    assert orders(slower) == [spec.weight_order for spec in plain]


def test_the_last_folder_that_knows_a_layer_decides(tmp_path: Path) -> None:
    first = binary_layers(None)[0]
    strips = replace(first, weight_order="strips")
    early = write(tmp_path / "early", "cuda-sm90a", {first: 9e-6, strips: 1e-6})
    late = write(tmp_path / "late", "cuda-sm90a", {first: 5e-6})
    known = records.load(HOPPER, [early, late])
    found = schedules.with_weight_order(first, HOPPER, known)
    assert found.weight_order == first.weight_order
    known = records.load(HOPPER, [late, early])
    assert schedules.with_weight_order(first, HOPPER, known).weight_order == "strips"


def test_a_record_of_another_order_alone_does_not_replace_tiles(tmp_path: Path) -> None:
    machine = catalog.resolve("x86-64-v4-amx")
    tiles = schedules.with_weight_order(replace(LAYER, height=16, width=16), machine)
    words = replace(tiles, weight_order="words")
    assert tiles.weight_order == "fours"
    for number, (times, wanted) in enumerate(
        [({words: 1e-6}, "fours"), ({words: 1e-6, tiles: 2e-6}, "words")]
    ):
        folder = write(tmp_path / str(number), "x86-64-v4-amx", times)
        known = records.load(machine, [folder], own=False)
        assert schedules.with_weight_order(words, machine, known).weight_order == wanted


def test_an_order_that_the_target_lacks_is_never_taken(tmp_path: Path) -> None:
    spec = schedules.with_weight_order(LAYER, HOPPER)
    folder = write(tmp_path, "cuda-sm90a", {spec: 1e-6})
    known = records.Records()
    known.add(folder / "cuda-sm90a")
    portable = catalog.resolve("cuda")
    found = schedules.with_weight_order(LAYER, portable, known).weight_order
    assert found == schedules.weight_orders(LAYER, portable)[0]
    assert not found.startswith("cores")


def test_where_results_are_stored_makes_no_difference(tmp_path: Path) -> None:
    steps = (Step("affine"), Step("add", "NHWC"), Step("store", "NHWC", in_place=True))
    spec = schedules.with_weight_order(replace(LAYER, steps=steps), HOPPER)
    apart = replace(spec, steps=(*steps[:2], Step("store", "NHWC")))
    strips = replace(spec, weight_order="strips")
    folder = write(tmp_path, "cuda-sm90a", {spec: 2e-6, strips: 1e-6})
    known = records.load(HOPPER, [folder], own=False)
    chosen = schedules.with_weight_order(apart, HOPPER, known)
    assert chosen.weight_order == "strips"
    found = known.find(Workload.of(chosen).spec, 1)
    assert found is not None
    assert found[0] == dict(schedules.space_of(strips, HOPPER).default)


def test_records_of_a_family_serve_a_machine_of_it(tmp_path: Path) -> None:
    spec = schedules.with_weight_order(LAYER, HOPPER)
    folder = write(tmp_path, "cuda-sm90a", {spec: 2e-6, replace(spec, weight_order="strips"): 1e-6})
    here = replace(HOPPER, name="native", base="cuda-sm90a")
    known = records.load(here, [folder], own=False)
    assert schedules.with_weight_order(LAYER, here, known).weight_order == "strips"


def test_verify_lowers_with_the_orders_of_the_artifact(tmp_path: Path) -> None:
    """A user's records choose orders; who has only the artifact must find the same kernels."""
    plain = binary_layers(None)
    other = {
        replace(spec, weight_order=next(o for o in found if o != spec.weight_order)): 1e-9
        for spec in plain
        if len(found := schedules.weight_orders(spec, HOPPER)) > 1
    }
    folder = write(tmp_path, "cuda-sm90a", other)
    options = CompileOptions(target="cuda-sm90a", records=(folder,), confirm=False)
    made = driver.lowered(DIGITS / "digits.onnx", options)
    known = recorded.Orders(recorded.orders_of(made.physical))
    model, bare = DIGITS / "digits.onnx", CompileOptions(target="cuda-sm90a", confirm=False)
    again = driver.lowered(model, bare, known)
    assert [c.spec for c in again.calls] == [c.spec for c in made.calls]
    assert [c.spec for c in driver.lowered(model, bare).calls] != [c.spec for c in made.calls]
