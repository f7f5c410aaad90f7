"""Decisions next to 0, on processors that take denormal numbers for 0 too."""

from __future__ import annotations

import numpy as np
import pytest

import bnncc
from bnncc.recognise.monotone import NORMAL, step_at
from bnncc.topi_binary.reference import evaluate_kernel
from tests.collection.builder import Net
from tests.kernel_harness import EMULATED, HERE
from tests.physical_networks import passed
from tests.random_code import processor

LEAST = np.float32(1e-45)
INPUTS = np.array([0, 1, -1, 1e-30, -1e-30, NORMAL, -NORMAL, 0.004, 0.3, 0.5, 2, -0.0], np.float32)


def decided(spelling: str) -> Net:
    """Return a network that tells 0 from what is above or below it."""
    net = Net(seed=0)
    x = net.input("x", [1, 3, 2, 2])
    bound = {"above": LEAST, "below": -LEAST, "near": np.float32(3e-40), "at": NORMAL}
    if spelling in bound:
        made = net.where(net.op("GreaterOrEqual", x, net.const(bound[spelling])), 1.0, -1.0)
    elif spelling == "both":  # 0 is a level of its own
        above = net.cast(net.op("Greater", x, net.const(0.5)))
        made = net.op("Add", net.op("Sign", x), above)
    else:
        count = {"ceil of 3": 3.0, "ceil of 100": 100.0}[spelling]
        made = net.op("Ceil", net.op("Mul", net.clip(x, 0, 1), net.const(count)))
    net.channels[made] = 3
    net.output(net.conv(made, np.ones((16, 3, 1, 1), np.float32)))
    return net


@pytest.mark.parametrize(
    "spelling", ["above", "below", "near", "at", "both", "ceil of 3", "ceil of 100"]
)
@pytest.mark.parametrize("target", [HERE[-1], *EMULATED[-1:]])
def test_an_exact_zero_is_on_the_side_that_the_model_says(target: str, spelling: str) -> None:
    _, physical, _ = passed(decided(spelling).model(), target)
    first = next(n.attrs["spec"] for n in physical.nodes if n.attrs.get("spec") is not None)
    limits = [physical.constants[i] for i in physical.nodes[0].inputs if i in physical.constants]
    inputs = [INPUTS.reshape(1, 3, 2, 2), *limits]
    made = processor([first], target)(first, inputs)
    for one, other in zip(made, evaluate_kernel(first, inputs), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_step_within_the_normal_numbers_is_taken_on_the_side_of_zero() -> None:
    for cut, zero in ((LEAST, "gt"), (1e-40, "gt"), (0, "ge"), (-LEAST, "ge"), (-1e-40, "ge")):
        kind, at = step_at(np.array([cut], np.float32))
        assert kind == zero
        assert at[0] == (np.nextafter(np.float32(cut), -np.float32(1)) if zero == "gt" else cut)
    assert step_at(np.array([1, LEAST], np.float32))[0] == "gt"


@pytest.mark.parametrize("op", ["PRelu", "LeakyRelu"])
def test_slopes_of_zeros_and_of_what_is_no_number(op: str) -> None:
    values = np.array([0, -0.0, 1, -1, 1e-40, -1e-40, np.inf, -np.inf, np.nan, -np.nan], "f4")
    slope = np.array([0.25, -2, 0, 1e30] if op == "PRelu" else [-2], "f4").reshape(-1, 1, 1)
    net = Net(seed=0)
    x = net.input("x", [1, slope.size, 1, values.size])
    if op == "PRelu":
        y = net.op(op, x, net.const(slope))
    else:
        y = net.op(op, x, alpha=float(slope.item()))
    net.output(net.op("Abs", y))
    data = np.tile(values, (1, slope.size, 1, 1))
    with np.errstate(all="ignore"):
        wanted = np.abs(np.where(data >= 0, data, data * slope))
    (made,) = bnncc.compile(net.model(), threads=1).run({"x": data}).values()
    np.testing.assert_array_equal(made, wanted)
