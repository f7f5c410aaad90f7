"""Decisions in the spellings that strangers use: layers behind them are found, and give the same.

Each is a network of two layers, compiled for this machine and compared with ONNX Runtime, and
evaluated for arm64 by the compiler itself. Inputs meet every threshold exactly.
"""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto

from bnncc.driver import compile_model, lowered
from bnncc.frontend.onnx import load
from bnncc.ir.evaluate import evaluate, evaluate_node
from bnncc.ir.graph import Graph
from bnncc.options import CompileOptions
from bnncc.recognise.few_values import read_again
from bnncc.recognise.quantizers import recognise_quantizers
from bnncc.recognise.ramps import recognise_ramps
from bnncc.recognise.signs import recognise_signs
from bnncc.transform.simplify import simplify
from tests.spellings import (
    CUTS,
    SHAPE,
    SPELLINGS,
    Array,
    Network,
    Spelling,
    above,
    below,
    check,
    found,
    inputs,
    network,
    runtime,
    signs,
    where,
)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", SPELLINGS)
def test_a_spelling_is_found_and_gives_the_same(name: str) -> None:
    spelling, kind = SPELLINGS[name]
    check(network(spelling), [kind] * 2, inputs())


DIVIDED: dict[str, tuple[Spelling, str]] = {
    "x / |x|": (lambda g, x: g("Div", x, g("Abs", x)), "NaN where x is 0"),
    "|x| / x": (lambda g, x: g("Div", g("Abs", x), x), "NaN where x is 0"),
    "x / (|x| + c)": (lambda g, x: g("Div", x, g("Add", g("Abs", x), 1e-6)), "not a sign near 0"),
    "x / sqrt(x * x)": (
        lambda g, x: g("Div", x, g("Sqrt", g("Mul", x, x))), "where x * x is 0 or infinite",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DIVIDED)
def test_what_is_a_sign_but_for_some_numbers_stays_float(name: str) -> None:
    """NaN at 0 is what the model says, and nothing else is, unless it is asked for."""
    spelling, reason = DIVIDED[name]
    g = Network()
    model = g.model(g.layer(spelling(g, "x"), signs(g.rng, 8, 16, 3, 3)), SHAPE)
    x = inputs(zeros=False)
    x[0, 0, 0, 0] = 0
    check(model, ["float"], x)
    (layer,) = found(model)
    assert reason in layer.reason
    assert "Where(x >= 0, 1, -1)" in layer.remedy
    assert ("--sign-zero" in layer.remedy) == ("NaN" in reason)


@pytest.mark.parametrize(("sign_zero", "at_zero"), [("+1", 1.0), ("-1", -1.0)])
@pytest.mark.parametrize("name", ["x / |x|", "|x| / x"])
def test_a_number_divided_by_its_size_is_a_sign_by_option(
    name: str, sign_zero: str, at_zero: float
) -> None:
    g = Network()
    data = DIVIDED[name][0](g, "x")
    model = g.model(g.layer(data, signs(g.rng, 8, 16, 3, 3)), SHAPE)
    options = CompileOptions(threads=1, sign_zero=sign_zero)
    (layer,) = lowered(model, options).layers
    assert layer.kind == "binary"
    x = inputs()
    made = next(iter(compile_model(model, options).run({"x": x}).values()))
    given = np.where(x == 0, np.float32(at_zero), x)
    assert (x == 0).any()
    np.testing.assert_array_equal(made, runtime(model, given))


def test_bool_inputs_are_bits() -> None:
    g = Network()
    x = g("Sub", g("Mul", g.cast("x"), 2.0), 1.0)
    model = g.model(g.layer(x, signs(g.rng, 8, 16, 3, 3), pads=1), SHAPE, TensorProto.BOOL)
    check(model, ["binary"], inputs() > 0)


def test_values_that_are_not_evenly_spaced_stay_float_and_are_right() -> None:
    g = Network()
    x = g("Gather", np.array([-1.0, 0.1, 1.0]), g("Add", *(
        g.cast(g("Greater", "x", cut), TensorProto.INT64) for cut in (-0.5, 0.5)
    )))  # fmt: skip
    model = g.model(g.layer(x, signs(g.rng, 8, 16, 3, 3)), SHAPE)
    check(model, ["float"], inputs())
    (layer,) = found(model)
    assert layer.reason == "its data take 3 values that are not evenly spaced"


def test_a_scale_for_each_channel_of_the_data_is_the_reason_to_stay_float() -> None:
    g = Network()
    x = g("Mul", where(g, "x"), g.rng.uniform(0.5, 1.5, (1, 16, 1, 1)))
    model = g.model(g.layer(x, signs(g.rng, 8, 16, 3, 3)), SHAPE)
    check(model, ["float"], inputs())
    (layer,) = found(model)
    assert "a separate scale for each channel" in layer.reason
    assert "after the layer" in layer.remedy


def test_a_scale_for_each_channel_of_a_depthwise_layer_is_its_own() -> None:
    g = Network()
    x = g("Mul", where(g, "x"), g.rng.uniform(0.5, 1.5, (1, 16, 1, 1)))
    model = g.model(g.layer(x, signs(g.rng, 16, 1, 3, 3), group=16), SHAPE)
    check(model, ["few_bit"], inputs())


def test_near_signs_are_no_signs() -> None:
    """X / (|x| + eps) takes all values near 0, and a window of a step is no step."""
    for spelling in (
        lambda g, x: g("Div", x, g("Add", g("Abs", x), 0.1)),
        lambda g, x: g("Clip", g("Mul", x, 1e6), -1.0, 1.0),
    ):
        g = Network()
        model = g.model(g.layer(spelling(g, "x"), signs(g.rng, 8, 16, 3, 3)), SHAPE)
        check(model, ["float"], inputs())


def test_a_window_of_zeros_and_ones_is_read_again() -> None:
    g = Network()
    inside = g("Mul", above(g, "x", -0.5), below(g, "x", 0.5))
    check(g.model(g.layer(inside, signs(g.rng, 8, 16, 3, 3)), SHAPE), ["binary"], inputs())


def _decision(g: Network, rng: np.random.Generator) -> str:
    """Return a random decision on ``x``, or on a rising or falling function of it, as a float."""
    x = "x"
    for _ in range(rng.integers(3)):
        op = rng.choice(["Mul", "Add", "Neg", "Clip", "Sub", "Div"])
        number = float(rng.choice([0.5, -2.0, 3.0, 0.1, -0.7]))
        x = {
            "Neg": lambda x=x: g("Neg", x),
            "Clip": lambda x=x: g("Clip", x, -0.5, 0.7),
            "Sub": lambda x=x, number=number: g("Sub", number, x),
        }.get(op, lambda x=x, op=op, number=number: g(op, x, number))()
    cut = float(rng.choice(CUTS))
    kind = rng.integers(7)
    if kind == 0:
        return g("Sign", x)
    if kind == 1:
        return g("Round", g("Clip", g("Mul", x, 2.0), -1.0, 2.0))
    names = ["Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal"]
    made = g(names[kind - 2], x, cut)
    if rng.random() < 0.3:
        return g("Where", made, float(rng.choice(CUTS)), 0.25)
    if rng.random() < 0.2:
        return g("Gather", np.array([0.5, -1.0]), g.cast(made, TensorProto.INT64))
    return g.cast(g("Not", made) if rng.random() < 0.3 else made)


def test_three_values_around_any_middle_where_no_kernel_makes_bits() -> None:
    """0, 1/4 and 1/2 of five axes: at 0 it is 1/4."""
    g = Network()
    parts = [g("Mul", g.cast(g(op, "x", 0.0)), 0.25) for op in ("Greater", "GreaterOrEqual")]
    model = g.model(g("Add", g("Add", *parts), "x"), (1, 2, 3, 2, 2))
    made = compile_model(model, CompileOptions(threads=1))
    x = np.arange(-12, 12, dtype=np.float32).reshape(1, 2, 3, 2, 2) // 4
    (got,) = made.run({"x": x}).values()
    np.testing.assert_array_equal(got, x + np.float32([0, 0.25, 0.5])[np.sign(x).astype(int) + 1])


@pytest.mark.parametrize("seed", range(40))
def test_random_decisions_are_what_they_were_at_every_number(seed: int) -> None:
    """Passes alone, at all cuts and the numbers beside them: exactly the same, but for -0."""
    rng = np.random.default_rng(seed)
    g = Network()
    y = _decision(g, rng)
    for _ in range(rng.integers(1, 5)):
        op = str(rng.choice(["Add", "Sub", "Mul", "Max", "Min", "Where"]))
        other = _decision(g, rng)
        if op == "Where":
            y = g("Where", g("Greater", other, 0.5), y, float(rng.choice(CUTS)))
        else:
            y = g(op, y, other)
    out = g("MatMul", y, np.eye(400, dtype=np.float32))
    graph = load(g.model(out, (1, 400)))
    points = np.concatenate([CUTS, CUTS / 2, CUTS / 3, CUTS * 2, (0.7 - CUTS) / 3, [1e-45, 3e38]])
    near = np.float32(points)
    near = np.concatenate([near, np.nextafter(near, np.inf), np.nextafter(near, -np.inf)])
    x = np.concatenate([near, -near, rng.normal(0, 1, 400)])[:400].astype(np.float32)[None]
    want = evaluate(graph, {"x": x})[out]
    simplify(graph)
    recognise_ramps(graph)
    recognise_signs(graph)
    recognise_quantizers(graph)
    read_again(graph)
    np.testing.assert_array_equal(_evaluated(graph, x)[out], want)


def _evaluated(graph: Graph, x: Array) -> dict[str, Array]:
    values = {**graph.constants, "x": x}
    for node in graph.nodes:
        ins = [values[i] if i else None for i in node.inputs]
        if node.op == "bnncc.Sign":
            lo, hi, zero = (node.attrs[k] for k in ("lo", "hi", "zero"))
            at = {"ge": hi, "gt": lo, "mid": (lo + hi) / 2}[zero]
            made = [np.select([ins[0] < 0, ins[0] > 0], [lo, hi], at).astype(np.float32)]
        else:
            made = evaluate_node(node, ins)
        values.update(zip(node.outputs, made, strict=True))
    return values
