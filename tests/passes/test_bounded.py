"""Quantizers without a Clip: found if nothing can exceed the largest number, and only then."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from bnncc.driver import compile_model
from bnncc.options import CompileOptions
from tests.bitnet import data
from tests.collection.builder import Net
from tests.physical_networks import evaluated, passed

F = np.float32
Array = np.ndarray
SHAPE = (2, 5, 12)
WHOLE = np.random.default_rng(0).integers(-1, 2, (12, 7)).astype(F)


def top(net: Net, x: str, axes: list[int] | None = None, keep: int = 1) -> str:
    given = [] if axes is None else [net.ints(axes)]
    return net.op("ReduceMax", net.op("Abs", x), *given, keepdims=keep)


def plus(net: Net, x: str, number: float = 1e-6) -> str:
    return net.op("Add", x, net.const(number))


def low(net: Net, x: str) -> str:
    return net.op("ReduceMin", x, net.ints([-1]), keepdims=1)


def high(net: Net, x: str) -> str:
    return net.op("ReduceMax", x, net.ints([-1]), keepdims=1)


def divided(net: Net, x: str, by: str, number: float = 127) -> str:
    return net.op("Mul", net.op("Div", x, by), net.const(number))


def spanned(net: Net, x: str) -> str:
    """Write the asymmetric quantizer of BinaryBERT, whose extremes lost the axis of a row."""
    ends = [net.op(op, x, net.ints([-1]), keepdims=0) for op in ("ReduceMax", "ReduceMin")]
    span = net.op("Unsqueeze", net.op("Sub", *ends), net.ints([-1]))
    least = net.op("Unsqueeze", ends[1], net.ints([-1]))
    return divided(net, net.op("Sub", x, least), plus(net, span, 1e-8), 255)


def _top(x: Array) -> Array:
    return np.abs(x).max(-1, keepdims=True)


def _span(x: Array) -> Array:
    least = x.min(-1, keepdims=True)
    return (x - least) / ((x.max(-1, keepdims=True) - least) + F(1e-8)) * F(255)


Row = Callable[[Net, str], str]
FOUND: dict[str, tuple[Row, Callable[[Array], Array]]] = {
    "of a row": (
        lambda n, x: divided(n, x, plus(n, top(n, x, [-1]))),
        lambda x: x / (_top(x) + F(1e-6)) * F(127),
    ),
    "of the tensor": (
        lambda n, x: divided(n, x, plus(n, top(n, x, keep=0))),
        lambda x: x / (np.abs(x).max() + F(1e-6)) * F(127),
    ),
    "of a channel": (
        lambda n, x: divided(n, x, plus(n, top(n, x, [0, 1]))),
        lambda x: x / (np.abs(x).max((0, 1)) + F(1e-6)) * F(127),
    ),
    "times an inverse": (
        lambda n, x: n.op("Mul", x, n.op("Div", n.const(127.0), plus(n, top(n, x, [-1])))),
        lambda x: x * (F(127) / (_top(x) + F(1e-6))),
    ),
    "divided by a step": (
        lambda n, x: n.op("Div", x, n.op("Div", plus(n, top(n, x, [-1])), n.const(127.0))),
        lambda x: x / ((_top(x) + F(1e-6)) / F(127)),
    ),
    "scaled before": (
        lambda n, x: n.op(
            "Div", n.op("Mul", x, n.const(127.0)), n.op("Max", top(n, x, [-1]), n.const(1e-5))
        ),
        lambda x: x * F(127) / np.maximum(_top(x), F(1e-5)),
    ),
    "of both extremes": (
        lambda n, x: divided(n, x, plus(n, n.op("Max", high(n, x), n.op("Neg", low(n, x))))),
        lambda x: x / (_top(x) + F(1e-6)) * F(127),
    ),
    "of a span": (
        lambda n, x: divided(
            n, n.op("Sub", x, low(n, x)), plus(n, n.op("Sub", high(n, x), low(n, x)), 1e-8), 255
        ),
        _span,
    ),
    "of a span without its axis": (spanned, _span),
}
REAL: dict[str, Row] = {
    "another tensor's": lambda n, x: divided(n, x, plus(n, top(n, n.op("Relu", x), [-1]))),
    "the largest, not of magnitudes": lambda n, x: divided(n, x, plus(n, high(n, x))),
    "a limited one": lambda n, x: divided(n, x, n.clip(top(n, x, [-1]), 1e-5, 3.0)),
    "a smaller one": lambda n, x: divided(n, x, plus(n, top(n, x, [-1]), -1e-3)),
    "a wrong span": lambda n, x: divided(
        n, n.op("Sub", x, low(n, x)), plus(n, n.op("Sub", high(n, x), high(n, x))), 255
    ),
    "less than that": lambda n, x: divided(n, x, n.op("Sub", top(n, x, [-1]), n.const(0.1))),
    "too many levels": lambda n, x: divided(n, x, plus(n, top(n, x, [-1])), 32767.0),
}


def network(row: Row, round_op: str = "Round", shape: tuple[int | str, ...] = SHAPE) -> Net:
    net = Net(18, seed=1)
    x = net.input("x", shape)
    net.output(net.op("MatMul", net.op(round_op, row(net, x)), net.const(WHOLE)))
    return net


def rows(seed: int) -> Array:
    return data(np.random.default_rng(seed), SHAPE)


@pytest.mark.parametrize("round_op", ["Round", "Floor", "Ceil"])
@pytest.mark.parametrize("name", FOUND)
def test_levels_are_found_and_exact(name: str, round_op: str) -> None:
    """Data have rows of zeros, of one number, with outliers and ties; sums are integers."""
    write, scaled = FOUND[name]
    x, rounded = rows(3), {"Round": np.rint, "Floor": np.floor, "Ceil": np.ceil}[round_op]
    before, physical, layers = passed(network(write, round_op).model(), "x86-64-v3")
    if round_op == "Round":  # a span of 255.0001 has 257 integers above its floor
        assert [layer.kind for layer in layers] == ["few_bit"]
    made = evaluated(physical, before, {"x": x})[before.outputs[0]]
    assert np.array_equal(made, rounded(scaled(x)).astype(np.float64) @ WHOLE)


@pytest.mark.parametrize("name", REAL)
def test_what_may_be_larger_stays_float(name: str) -> None:
    before, physical, (layer,) = passed(network(REAL[name]).model(), "x86-64-v3")
    assert layer.kind == "float"
    x = np.random.default_rng(5).standard_normal(SHAPE).astype(F)
    model = evaluated(before, before, {"x": x})[before.outputs[0]]
    made = evaluated(physical, before, {"x": x})[before.outputs[0]]
    np.testing.assert_allclose(made, model, rtol=1e-5, atol=1e-2)


def test_the_largest_numbers_of_rows_are_none_of_columns() -> None:
    """Without their axis, those of a square matrix broadcast along the other one."""

    def row(net: Net, x: str) -> str:
        return divided(net, x, plus(net, top(net, x, [-1], keep=0)))

    before, physical, (layer,) = passed(network(row, shape=(12, 12)).model(), "x86-64-v3")
    assert layer.kind == "float"
    x = np.random.default_rng(5).standard_normal((12, 12)).astype(F) * np.arange(1, 13, dtype=F)
    made = evaluated(physical, before, {"x": x})[before.outputs[0]]
    scaled = x / (np.abs(x).max(-1) + F(1e-6)) * F(127)
    assert np.abs(np.rint(scaled)).max() > 128
    np.testing.assert_allclose(made, np.rint(scaled).astype(np.float64) @ WHOLE, rtol=1e-6)


@pytest.mark.parametrize("shape", [SHAPE, ("N", 5, 12)], ids=["fixed", "symbolic"])
def test_rows_of_zeros_without_an_epsilon_stay_nan(shape: tuple[int | str, ...]) -> None:
    """TernaryBERT's quantizer divides by the largest number itself."""

    def row(net: Net, x: str) -> str:
        return divided(net, x, top(net, x, [-1]))

    artifact = compile_model(network(row, shape=shape).model(), CompileOptions(threads=1))
    assert [layer["kind"] for layer in artifact.report["layers"]] == ["few_bit"]
    x = np.random.default_rng(5).standard_normal(SHAPE).astype(F)
    x[0, 1], x[1, 4] = 0, 1e-30
    (made,) = artifact.run({"x": x}).values()
    with np.errstate(invalid="ignore"):
        wanted = np.rint(x / _top(x) * F(127)).astype(np.float64) @ WHOLE
    np.testing.assert_array_equal(made, wanted)
    assert np.isnan(made).all(axis=-1).tolist() == [[False, True, False, False, False], [False] * 5]
