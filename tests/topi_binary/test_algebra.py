"""What the steps of an epilogue compute, over an algebra of NumPy's, against the oracle."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bnncc.schedules.cuda.terms import TEXT
from bnncc.topi_binary import algebra
from bnncc.topi_binary.reference.epilogue import apply_steps, level_outputs
from bnncc.topi_binary.reference.packing import bits_to_words
from bnncc.topi_binary.step import FETCHED, INPUTS_OF_STEP, Step

RNG = np.random.default_rng(0)
SHAPE = (2, 3, 4, 32)
COMPARE = {
    "<=": operator.le, ">=": operator.ge, ">": operator.gt, "<": operator.lt, "==": operator.eq,
}  # fmt: skip


def fused(value: Any, scale: Any, bias: Any) -> Any:
    """Return ``value * scale + bias``, rounded once."""
    wide = value.astype(np.longdouble) * np.longdouble(scale) + np.longdouble(bias)
    return wide.astype(np.float32)


def place(value: Any) -> Any:
    """Return how many floats `value` is above 0."""
    bits = value.view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(2**31) - bits, bits)


NUMBERS = algebra.Algebra(
    zero=np.float32(0),
    number=np.float32,
    count=np.float32,
    shared=lambda value: value,
    fma=fused,
    add=operator.add,
    sub=operator.sub,
    mul=operator.mul,
    div=operator.truediv,
    max=np.maximum,
    min=np.minimum,
    swish=lambda value: (value / (1 + np.exp(-value.astype(np.float64)))).astype(np.float32),
    compare=lambda left, how, right: COMPARE[how](left, right),
    both=np.logical_and,
    not_negative=lambda value: value >= 0,
    select=np.where,
    real=lambda value: value.astype(np.float32),
    whole=lambda value: np.trunc(value).astype(np.int64),
    place=place,
    apart=lambda one, other: place(one) - place(other),
)
"""float32 arrays, rounded after each operation."""


def drawn(*shape: int) -> np.ndarray:
    """Return floats, some of which are exact zeros of both signs."""
    values = RNG.standard_normal(shape).astype(np.float32)
    return np.where(RNG.random(shape) < 0.2, np.copysign(np.float32(0), values), values)


@pytest.mark.parametrize("op", algebra.STEPS)
def test_a_step_changes_a_value_as_the_oracle_says(op: str) -> None:
    step, value = Step(op, lo=-0.25, hi=0.5), drawn(*SHAPE)
    signed = np.float32(3) if op == "div" else np.float32(0)
    shapes = {"gate": (2, 32)}
    shape = shapes.get(op, SHAPE if op in FETCHED else (32,))
    params = [drawn(*shape) + signed for _ in range(INPUTS_OF_STEP[op])]
    (wanted,) = apply_steps((step, Step("store")), value, iter(params))
    read = [param[:, None, None, :] if op == "gate" else param for param in params]
    made = algebra.changed(NUMBERS, step, value, read)
    np.testing.assert_array_equal(made, wanted)


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("step", [Step("bits"), Step("bits", compare="gt"), Step("threshold")])
def test_a_plane_holds_what_the_oracle_says(step: Step, zero: bool) -> None:
    step, value = replace(step, zero=zero), drawn(*SHAPE)
    acc = RNG.integers(-3, 4, SHAPE)
    limits = [RNG.integers(-3, 4, 32) for _ in range((1 + zero) * (step.op == "threshold"))]
    wanted = apply_steps((step,), value, iter(limits), acc)
    seen = acc if step.op == "threshold" else value
    made = algebra.conditions(NUMBERS, step, seen, limits)
    assert len(made) == len(wanted) == 1 + zero
    for one, other in zip(made, wanted, strict=True):
        np.testing.assert_array_equal(bits_to_words(one), other)


def test_levels_are_those_of_the_oracle() -> None:
    step = Step("levels", count=5, way="acc-scale", forms=("value", "floats"), lo=-1.0, hi=0.3)
    acc, scale, bias = RNG.integers(-9, 10, SHAPE), drawn(32), drawn(32)
    value, level = level_outputs(step, drawn(*SHAPE), acc, iter([scale, bias]))
    found = algebra.nearest(NUMBERS, step, NUMBERS.real(acc), scale, bias)
    np.testing.assert_array_equal(found, level)
    np.testing.assert_array_equal(algebra.stands_for(NUMBERS, step, found), value)


def test_rounding_to_levels_is_that_of_the_oracle() -> None:
    """Ties to even, numbers next to ties, and what is beyond the bounds, infinities included."""
    step = Step("levels", count=255, way="round", forms=("floats",))
    ties = np.arange(-140, 140, dtype=np.float32) + np.float32(0.5)
    far = np.float32([-np.inf, -3e38, -0.0, 0.0, 1e-45, 3e38, np.inf, 1])
    each = [ties, np.nextafter(ties, far[0]), np.nextafter(ties, far[-2]), np.rint(ties)]
    value, ends = np.concatenate([*each, far]).reshape(1, 1, -1, 8), np.float32([-128, 127])
    (level,) = level_outputs(step, value, None, iter([ends]))
    made = algebra.rounded(NUMBERS, value, *ends)
    wide = level.reshape(1, 1, -1, 16)[..., :8]
    np.testing.assert_array_equal(made, wide)
    assert made.min() == 0
    assert made.max() == 255


@pytest.mark.parametrize("compare", ["ge", "place"])
def test_values_compare_as_floats_do(compare: str) -> None:
    step = Step("levels", way="value", compare=compare)
    left, right = drawn(64), np.append(drawn(62), np.float32([1e-45, -1e-45]))
    for how, wanted in COMPARE.items():
        made = algebra.compared(NUMBERS, step, left[:, None], how, right)
        np.testing.assert_array_equal(made, wanted(left[:, None], right))


def test_every_step_is_somewhere() -> None:
    assert set(algebra.STEPS) | {"store", "bits", "threshold", "levels"} == set(INPUTS_OF_STEP)


def test_text_rounds_each_operation() -> None:
    text = algebra.changed(TEXT, Step("clip", lo=0.0, hi=1.0), "v", [])
    assert text == "fminf(fmaxf(v, __int_as_float(0x00000000)), __int_as_float(0x3f800000))"
    text = algebra.changed(TEXT, Step("prelu"), "v", ["p"])
    assert text == "v >= 0.0f ? v : __fmul_rn(v, p)"
