"""The rules' spaces: the default is in each, and every point computes the same."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest

from bnncc import schedules
from bnncc.schedules.space import UnfitPoint, space
from bnncc.targets import catalog
from bnncc.topi_binary import reference
from bnncc.topi_binary.build import output_types
from bnncc.topi_binary.definitions import define
from bnncc.topi_binary.spec import (
    BinaryConv2d,
    BitwiseMaxPool,
    Conv2d,
    Elementwise,
    Pool2d,
    RowPool,
    Spec,
    Step,
)
from tests import kernel_harness
from tests.binary_cases import check, make_inputs
from tests.kernel_harness import HERE, TARGETS, clear_tails, small_integers

pytestmark = pytest.mark.sampled(3)

POINTS = 24 if os.environ.get("BNNCC_TEST_ALL") else 1
FLOATS = (Step("affine"), Step("add"), Step("store"), Step("bits"))
STORE = (Step("store"),)

BINARY = [
    BinaryConv2d(1, 5, 11, 64, 48, (3, 3), pads=(1, 1, 1, 1), steps=(Step("threshold"),)),
    BinaryConv2d(2, 6, 6, 96, 40, (3, 3), (2, 2), pads=(1, 1, 1, 1), pad_value=1, steps=FLOATS),
    BinaryConv2d(1, 4, 7, 128, 64, (3, 2), groups=2, steps=(Step("threshold"),)),
    BinaryConv2d(1, 4, 9, 64, 33, (3, 3), pads=(1, 1, 1, 1), ternary=True, steps=FLOATS),
    BinaryConv2d(6, 1, 1, 320, 100, (1, 1), rank=2, steps=(Step("threshold"),)),
    BinaryConv2d("n", 1, 1, 100, 50, (1, 1), rank=2, steps=FLOATS),
    BinaryConv2d(3, 1, 1, 512, 40, (1, 1), rank=2, steps=STORE),
    BinaryConv2d(1, 7, 6, 192, 9, (3, 3), pads=(1, 1, 1, 1), steps=STORE),
]
OTHERS = [
    Conv2d(1, 6, 9, 8, 40, (3, 3), pads=(1, 1, 1, 1), steps=STORE),
    Conv2d(1, 8, 8, 3, 20, (3, 3), pads=(1, 1, 1, 1), steps=STORE,
           pool=RowPool((3, 3), (2, 2), (1, 1, 1, 1))),
    Conv2d(2, 5, 5, 32, 32, (3, 3), groups=32, pads=(1, 1, 1, 1), steps=STORE),
    Conv2d(2, 5, 5, 16, 24, (1, 1), groups=4, steps=STORE),
    Conv2d(3, 1, 1, 12, 37, (1, 1), rank=2, steps=STORE),
    Conv2d(6, 1, 1, 64, 70, (1, 1), rank=2, steps=STORE, code_bits=2, code_block=32),
    Pool2d(1, 7, 9, 70, "max", (3, 3), (2, 2), steps=STORE),
    Elementwise(1, 3, 5, 70, steps=(Step("bits"),)),
    BitwiseMaxPool(1, 6, 10, 70, (2, 2), (2, 2)),
]  # fmt: skip
TILED = [
    BinaryConv2d(1, 9, 9, 128, 80, (1, 1), steps=FLOATS),
    BinaryConv2d(1, 7, 7, 512, 1024, (7, 7), steps=FLOATS),
    BinaryConv2d(1, 9, 9, 20, 40, (3, 3), pads=(1, 1, 1, 1), steps=(Step("threshold"),)),
    Conv2d(1, 9, 9, 20, 20, (3, 3), groups=20, steps=STORE),
    Pool2d(1, 8, 8, 200, "max", (2, 2), (2, 2), steps=STORE),
    Pool2d(1, 7, 7, 500, "avg", (7, 7), steps=STORE),
]
"""Kernels that rules for tiles treat in ways of their own."""

ORACLES: dict[type, Any] = {
    Conv2d: reference.conv2d,
    Pool2d: reference.pool2d,
    Elementwise: reference.elementwise,
    BitwiseMaxPool: reference.bitwise_maxpool,
}
IDS = [f"{type(s).__name__}{i}" for i, s in enumerate((*BINARY, *OTHERS))]


def some_points(spec: Spec, target: str, threads: int) -> list[dict[str, int]]:
    """Return a few points of the space, different ones for each target."""
    _, *others = schedules.space_of(spec, catalog.resolve(target), threads).points()
    return random.Random(f"{spec}{target}").sample(others, min(POINTS, len(others)))


def built(spec: Spec, target: str, threads: int, points: list[dict[str, int]]) -> Any:
    chosen = catalog.resolve(target)
    functions = {
        f"k{i}": schedules.schedule(define(spec), chosen, threads, point)
        for i, point in enumerate(points)
    }
    return kernel_harness.build(functions, chosen)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("spec", BINARY, ids=IDS[: len(BINARY)])
def test_every_point_of_a_binary_kernel_equals_the_oracle(spec: BinaryConv2d, target: str) -> None:
    if spec.ternary and target not in HERE and POINTS == 1:
        pytest.skip("slow: both kernels in the emulator")
    spec = schedules.with_weight_order(spec, catalog.resolve(target))
    threads = 2 if target in HERE else 1
    points = some_points(spec, target, threads)
    library = built(spec, target, threads, points)
    inputs = make_inputs(spec, np.random.default_rng(1))

    def checked() -> None:
        for number in range(len(points)):
            check(library, number, spec, inputs)

    kernel_harness.with_two_threads(checked)


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("divide", [1, 2])
def test_threads_wait_for_what_they_share(divide: int, order: int) -> None:
    target = "x86-64-v4-vpopcntdq"
    if target not in HERE:
        pytest.skip("needs VPOPCNTDQ, which adds with carry-save adders")
    point = {"order": order, "carry_save": 1, "divide": divide, "columns": 2, "vectors": 1}
    library = built(BINARY[1], target, 2, [point])

    def checked() -> None:
        for seed in range(5):
            check(library, 0, BINARY[1], make_inputs(BINARY[1], np.random.default_rng(seed)))

    kernel_harness.with_two_threads(checked)


@pytest.mark.parametrize("target", [HERE[-1], HERE[0]])
@pytest.mark.parametrize("spec", OTHERS, ids=IDS[len(BINARY) :])
def test_every_point_of_another_kernel_equals_the_oracle(spec: Spec, target: str) -> None:
    import tvm

    points = some_points(spec, target, 2)
    library = built(spec, target, 2, points)
    inputs = small_integers(spec, np.random.default_rng(1))
    if isinstance(spec, BitwiseMaxPool):
        inputs[0] = clear_tails(inputs[0], spec.channels)
    wanted = ORACLES[type(spec)](spec, inputs)
    for number in range(len(points)):
        outputs = [
            tvm.runtime.tensor(np.full(shape, 0x5A5A5A5A, "uint32").view(dtype))
            for shape, dtype in output_types(spec)
        ]
        library[f"k{number}"](*map(tvm.runtime.tensor, inputs), *outputs)
        kernel_harness.same([out.numpy() for out in outputs], wanted)


@pytest.mark.parametrize("target", list(catalog.CATALOG))
@pytest.mark.parametrize("threads", [1, 4])
def test_the_default_is_a_point(target: str, threads: int) -> None:
    machine = catalog.resolve(target)
    for spec in (*BINARY, *OTHERS, *TILED):
        if isinstance(spec, BinaryConv2d):
            spec = schedules.with_weight_order(spec, machine)
        made = schedules.space_of(spec, machine, threads)
        assert made.complete(None) == next(made.points()) == dict(made.default)
        assert set(made.default) == set(made.choices)


def test_what_one_thread_found_serves_several() -> None:
    machine = catalog.resolve("x86-64-v4-vpopcntdq")
    one = next(schedules.space_of(BINARY[0], machine, 1).points())
    several = schedules.space_of(BINARY[0], machine, 2)
    assert several.complete(one) == {**several.default, **one}
    shared = next(several.points())
    assert schedules.space_of(BINARY[0], machine, 1).complete(shared) == one


@pytest.mark.parametrize(
    ("point", "says"),
    [({"columns": 3}, "columns is 3, not one of: 2, 4"), ({"rows": 1}, "rows is 1.*no such choice"),
     ({"columns": 4, "vectors": 2}, "columns=4 vectors=2 do not go together")],
)  # fmt: skip
def test_a_point_of_another_space_is_refused(point: dict[str, int], says: str) -> None:
    made = space(
        {"columns": (2, 4), "vectors": (1, 2)},
        {"columns": 2, "vectors": 1},
        lambda p: p["columns"] * p["vectors"] < 8,
    )
    with pytest.raises(UnfitPoint, match=says):
        made.complete(point)
