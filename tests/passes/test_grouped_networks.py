"""Layers in groups in whole networks: bits in slices, few bits with groups together, scales."""

from __future__ import annotations

import numpy as np
import pytest

from bnncc.driver import compile_model
from bnncc.frontend.onnx import load
from bnncc.ir.evaluate import evaluate
from bnncc.options import CompileOptions
from tests.passes.test_few_bit_networks import model_of, run

RNG = np.random.default_rng(5)
SIGNS = "g{0} = GreaterOrEqual({0}, zero) s{0} = Where(g{0}, one, minus)\n"
CONSTANTS = {"zero": np.float32(0), "one": np.float32(1), "minus": np.float32(-1)}


def signs(*shape: int) -> np.ndarray:
    """Return weights of which float32 sums are exact."""
    return (RNG.integers(0, 2, shape) * 2 - 1).astype(np.float32) * np.float32(0.25)


def test_groups_are_read_where_they_lie() -> None:
    body = SIGNS.format("x") + "a = Conv<pads=[1,1,1,1], group=40>(sx, w1) b = Add(a, shift)\n"
    body += SIGNS.format("b") + "c = Conv<pads=[1,1,1,1], group=5>(sb, w2) d = Sub(c, shift)\n"
    body += SIGNS.format("d") + "e = Conv<group=40, strides=[2,2]>(sd, w3) f = Add(e, more)\n"
    body += SIGNS.format("f") + "y = Conv<group=10>(sf, w4)"
    constants = {
        **CONSTANTS,
        "shift": RNG.integers(-4, 5, (1, 40, 1, 1)).astype(np.float32) / 4,
        "more": RNG.integers(-4, 5, (1, 80, 1, 1)).astype(np.float32) / 4,
        "w1": signs(40, 1, 3, 3), "w2": signs(40, 8, 3, 3), "w3": signs(80, 1, 3, 3),
        "w4": signs(10, 8, 2, 2),
    }  # fmt: skip
    model = model_of(body, "1,40,9,11", {"y": "1,10,3,4", "c": "1,40,9,11"}, constants)
    x = RNG.standard_normal((1, 40, 9, 11)).astype(np.float32)
    got = run(model, x)
    want = evaluate(load(model), {"x": x})
    for name in ("y", "c"):
        np.testing.assert_array_equal(got[name], want[name])
    reasons = [layer["reason"] for layer in got["report"]["layers"]]
    assert reasons[:3] == ["depthwise, in bit slices", "groups of 8, in bit slices", reasons[0]]
    assert "of their words" in reasons[3]
    moves = [k for k in got["report"]["kernels"] if k["op"] == "slice_bits"]
    assert len(moves) == 2  # channels are repeated for the third, and spread for the last layer


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("groups", "out"), [(12, 48), (3, 24), (4, 128)])
def test_groups_of_few_bits_are_taken_together(groups: int, out: int) -> None:
    channels = 48 if groups == 12 else 8 * groups
    weight = RNG.integers(-3, 4, (out, channels // groups, 3, 3)).astype(np.float32)
    body = f"r = Round(x) l = Clip(r, zero, top) y = Conv<pads=[1,1,1,1], group={groups}>(l, w)"
    constants = {"zero": np.float32(0), "top": np.float32(15), "w": weight}
    model = model_of(body, f"1,{channels},6,7", {"y": f"1,{out},6,7"}, constants)
    x = RNG.uniform(-2, 20, (1, channels, 6, 7)).astype(np.float32)
    want = evaluate(load(model), {"x": x})["y"]
    for few_bit in ("auto", "bitplanes"):
        got = run(model, x, few_bit=few_bit)
        np.testing.assert_array_equal(got["y"], want)
        (layer,) = got["report"]["layers"]
        assert layer["kind"] == "few_bit"
        assert "groups at a time" in layer["reason"] or out // groups >= 16


def test_groups_that_fill_nothing_stay_float_and_say_so() -> None:
    body = "r = Round(x) l = Clip(r, zero, top) y = Conv<group=35>(l, w)"
    constants = {
        "zero": np.float32(0), "top": np.float32(15),
        "w": RNG.integers(-3, 4, (105, 3, 1, 1)).astype(np.float32),
    }  # fmt: skip
    model = model_of(body, "1,105,2,2", {"y": "1,105,2,2"}, constants)
    (layer,) = compile_model(model, CompileOptions(threads=1)).report["layers"]
    assert layer["kind"] == "float"
    assert "groups" in layer["reason"]


@pytest.mark.parametrize("depthwise", [True, False])
def test_scales_of_channels_go_into_depthwise_layers(depthwise: bool) -> None:
    depth = 1 if depthwise else 20
    body = f"""
    a = Div(x, s) r = Round(a) l = Clip(r, zero, top) m = Mul(l, s)
    y = Conv<pads=[1,1,1,1], group={20 // depth}>(m, w)
    """
    constants = {
        "zero": np.float32(0), "top": np.float32(15),
        "s": 0.5 ** RNG.integers(1, 5, (1, 20, 1, 1)).astype(np.float32),
        "w": RNG.integers(-7, 8, (20, depth, 3, 3)).astype(np.float32) * np.float32(0.125),
    }  # fmt: skip
    model = model_of(body, "1,20,5,6", {"y": "1,20,5,6"}, constants)
    x = RNG.uniform(-1, 4, (1, 20, 5, 6)).astype(np.float32)
    got = run(model, x)
    np.testing.assert_array_equal(got["y"], evaluate(load(model), {"x": x})["y"])
    (layer,) = got["report"]["layers"]
    assert layer["kind"] == ("few_bit" if depthwise else "float")
    if not depthwise:
        assert "separate scale for each channel" in layer["reason"]
