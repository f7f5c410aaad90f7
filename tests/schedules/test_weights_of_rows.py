"""Products of two activations: weights packed at run time, and the kernels that read them."""

from __future__ import annotations

import numpy as np
import pytest
import tvm

from bnncc import schedules
from bnncc.targets import catalog
from bnncc.topi_binary import layout, reference
from bnncc.topi_binary.build import output_types
from bnncc.topi_binary.definitions import define
from bnncc.topi_binary.spec import BinaryConv2d, Step, WeightsOfRows
from bnncc.tuning.cases import run_time_weights
from tests import binary_cases, kernel_harness

pytestmark = pytest.mark.sampled(3)

TARGETS = [*kernel_harness.TARGETS, "native"]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("rows", "channels"), [(1, 1), (16, 32), (17, 33), (40, 100), (15, 64)])
def test_rows_become_lanes(target: str, rows: int, channels: int) -> None:
    spec = WeightsOfRows(3, rows, channels, count=True)
    chosen = catalog.resolve(target)
    func = schedules.schedule(define(spec), chosen)
    library = kernel_harness.build({"k": func}, chosen)
    rng = np.random.default_rng(rows)
    data = layout.pack_bits(rng.random((3, rows, channels)) < 0.5)
    outputs = [tvm.runtime.tensor(np.full(shape, 77, dtype)) for shape, dtype in output_types(spec)]
    library["k"](tvm.runtime.tensor(data), *outputs)
    for got, want in zip(outputs, reference.weights_of_rows(spec, [data]), strict=True):
        np.testing.assert_array_equal(got.numpy(), want)


def spec_of(number: int) -> BinaryConv2d:
    rng = np.random.default_rng(number)
    mode = ("xor", "and")[number % 2]
    steps = ((Step("affine"), Step("store")), (Step("threshold"),), (Step("store"), Step("bits")))
    return BinaryConv2d(
        n=("n", 1, 3)[number % 3],
        height=1,
        width=int(rng.choice([1, 2, 13, 16, 29])),
        channels=int(rng.choice([1, 7, 32, 33, 64, 70, 128])),
        out_channels=int(rng.choice([1, 5, 16, 17, 40, 64, 100])),
        kernel=(1, 1),
        mode=mode,
        ternary=mode == "xor" and number % 4 == 2,
        weight_zeros=number // 4 % 2 == 1,
        per_image=True,
        steps=steps[number // 3 % 3],
    )


def inputs_of(spec: BinaryConv2d, rng: np.random.Generator) -> list[np.ndarray]:
    """Return inputs; every second time with zeros where there may be some."""
    n = spec.n if isinstance(spec.n, int) else 2
    shape, rows = (n, 1, spec.width, spec.channels), (n, spec.out_channels, spec.channels)
    some = rng.random() < 0.5
    bits, zeros = rng.random(shape) < 0.5, (rng.random(shape) < 0.1 * some)
    inputs = [layout.pack_bits(bits | zeros if spec.ternary else bits)]
    inputs += [layout.pack_bits(zeros)] * spec.ternary
    nothing = rng.random(rows) < 0.1 * some
    weight = rng.random(rows) < 0.5
    inputs += run_time_weights(spec, weight | nothing if spec.weight_zeros else weight, nothing)
    lanes = layout.blocks(spec.out_channels) * layout.LANES
    for step in spec.steps:
        if step.op == "affine":
            inputs += [(rng.integers(-8, 9, lanes) / 4).astype(np.float32) for _ in range(2)]
        elif step.op == "threshold":
            inputs.append(rng.integers(-5, 20, lanes).astype(np.int32))
    return inputs


@pytest.mark.parametrize("target", TARGETS)
def test_products_equal_the_oracle(target: str) -> None:
    specs = [spec_of(number) for number in range(24)]
    library = binary_cases.build(specs, target)
    for number, spec in enumerate(specs):
        rng = np.random.default_rng(number)
        for _ in range(2):
            binary_cases.check(library, number, spec, inputs_of(spec, rng))
