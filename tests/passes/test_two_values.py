"""Layers whose data or filters take any two values."""

from __future__ import annotations

import numpy as np
import pytest

from bnncc.driver import compile_model
from bnncc.frontend.onnx import load
from bnncc.ir.evaluate import evaluate
from bnncc.options import CompileOptions
from tests.spellings import (
    DATA,
    SHAPE,
    WEIGHTS,
    Network,
    check,
    inputs,
    shifted_sign,
    signs,
    where,
)

pytestmark = pytest.mark.sampled(4)


@pytest.mark.parametrize("pads", [0, 1])
def test_any_two_values_in_float64(pads: int) -> None:
    g = Network("float64")
    weight = WEIGHTS["two values of each filter"](g.rng)
    out = g("Conv", DATA["AdaBin"][0](g, "x"), weight, g.rng.normal(0, 1, 24),
            kernel_shape=[3, 3], pads=[pads] * 4)  # fmt: skip
    check(g.model(out, SHAPE), ["few_bit"], inputs("float64"), near=1e-12)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize(("pads", "stride", "fill"), [(1, 2, None), (0, 1, 0.4)])
def test_any_two_values(
    data: str, weights: str, pads: int, stride: int, fill: float | None
) -> None:
    g = Network()
    x = DATA[data][0](g, "x")
    if fill is not None:
        x = g("Pad", x, np.array([0, 0, 1, 1, 0, 0, 1, 0]), fill)
    weight = WEIGHTS[weights](g.rng)
    out = g("Conv", x, weight, g.rng.normal(0, 1, 24), kernel_shape=[3, 3], pads=[pads] * 4,
            strides=[stride] * 2)  # fmt: skip
    check(g.model(out, SHAPE), [DATA[data][1]], inputs())


@pytest.mark.parametrize("stride", [3, 4, 5])
@pytest.mark.parametrize("data", DATA)
def test_rows_and_columns_that_no_window_reaches(data: str, stride: int) -> None:
    """The border is where the data end, not where the last window does."""
    g = Network()
    weight = WEIGHTS["signs"](g.rng)
    out = g("Conv", DATA[data][0](g, "x"), weight, kernel_shape=[3, 3], pads=[1] * 4,
            strides=[stride] * 2)  # fmt: skip
    check(g.model(out, SHAPE), [DATA[data][1]], inputs())


def test_rows_of_two_values_times_columns_of_two_values() -> None:
    g = Network()
    weight = signs(g.rng, 40, 24) * g.rng.uniform(0.2, 1, 24) + g.rng.normal(0, 0.3, 24)
    model = g.model(g("MatMul", shifted_sign(g, "x"), weight), (3, 40))
    check(model, ["binary"], inputs(shape=(3, 40)))


def test_a_sum_of_multiples_that_is_zero_stays_zero_behind_any_padding() -> None:
    """-0.25 and 0.75, padded by 0: sums are multiples of 0.25, and a sign sees which are 0."""
    g = Network()
    x = g("Add", g("Mul", where(g, "x"), 0.5), 0.25)
    scale = g.rng.uniform(0.1, 1, (24, 1, 1, 1))
    sums = g.layer(x, signs(g.rng, 24, 16, 3, 3) * scale, pads=1)
    out = g("Sign", sums)
    model = g.model(out, SHAPE)
    data = inputs()
    made = next(iter(compile_model(model, CompileOptions(threads=1)).run({"x": data}).values()))
    want = next(iter(evaluate(load(model), {"x": data}).values()))
    assert (want == 0).any()
    np.testing.assert_array_equal(made, want)


@pytest.mark.parametrize("most", [1, 3])
@pytest.mark.parametrize("low", [-0.8377904, -0.31830987])
def test_windows_in_nothing_but_padding_are_exactly_zero(low: float, most: int) -> None:
    """A sign sees a last bit that is left where constants cancel."""
    g = Network()
    x = g("Where", g("GreaterOrEqual", "x", 0.0), 1.0, low)
    levels = g.rng.integers(-most, most + 1, (48, 16, 1, 1)) if most > 1 else signs(
        g.rng, 48, 16, 1, 1)  # fmt: skip
    weight = levels * g.rng.uniform(0.1, 1, (48, 1, 1, 1))
    out = g("Sign", g("Conv", x, weight, kernel_shape=[1, 1], pads=[2] * 4))
    model = compile_model(g.model(out, SHAPE), CompileOptions(threads=1))
    made = next(iter(model.run({"x": inputs()}).values()))
    assert (made[:, :, :2] == 0).all()
    assert (made[..., 2:-2, 2:-2] != 0).any()


def test_zero_of_a_shifted_sign_is_its_middle() -> None:
    g = Network()
    model = g.model(g.layer(shifted_sign(g, "x"), signs(g.rng, 8, 16, 3, 3), pads=1), SHAPE)
    check(model, ["binary"], np.full(SHAPE, 0.3, np.float32))
