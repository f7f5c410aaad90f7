"""Magnitudes bound what rounding does to each function, and are not much larger."""

from __future__ import annotations

from collections.abc import Callable
from math import erf
from typing import Any

import numpy as np
import pytest

from bnncc.frontend.onnx import load
from bnncc.ir.evaluate import evaluate_node
from bnncc.ir.graph import Node
from bnncc.ir.magnitude import NORMAL, magnitude
from bnncc.ir.ties import TIE, tied
from tests.collection.builder import Net

Array = np.ndarray[Any, Any]

FUNCTIONS: dict[str, tuple[Callable[[Array], Array], bool]] = {
    "Exp": (np.exp, True),
    "Log": (np.log, False),
    "Sqrt": (np.sqrt, False),
    "Reciprocal": (lambda x: 1 / x, True),
    "Sigmoid": (lambda x: 1 / (1 + np.exp(-x)), True),
    "Tanh": (np.tanh, True),
    "Erf": (np.vectorize(erf), True),
    "Softplus": (lambda x: np.log1p(np.exp(-np.abs(x))) + np.maximum(x, 0), True),
    "Sin": (np.sin, True),
    "Cos": (np.cos, True),
}
"""In float64, and whether they take negative numbers."""


def values(negative: bool) -> Array:
    rng = np.random.default_rng(5)
    sizes = np.ldexp(1.0, rng.integers(-20, 6, 4000))
    made = rng.uniform(-1 if negative else 0.1, 1, 4000) * sizes
    return made.astype(np.float32)


def largest_change(function: Callable[[Array], Array], x: Array, room: Array) -> Array:
    """Return how far a function moves when its data move by at most `room`."""
    there = function(x.astype(np.float64))
    moved = [function(x + share * room) for share in (-1.0, -0.5, 0.5, 1.0)]
    return np.max([np.abs(m - there) for m in moved], axis=0)


@pytest.mark.parametrize("operator", FUNCTIONS)
@pytest.mark.parametrize("shaken", [0.0, 30.0, 3e4])
def test_functions(operator: str, shaken: float) -> None:
    function, negative = FUNCTIONS[operator]
    x = values(negative)
    errs = shaken * np.abs(x).astype(np.float64)
    node = Node(operator, ["x"], ["y"], {}, "n")
    (out,) = evaluate_node(node, [x])
    room = TIE * magnitude(node, [x], [errs], out, 0)
    change = largest_change(function, x, TIE * errs)
    exact = function(x.astype(np.float64))
    assert (change + np.abs(out - exact) <= room * (1 + 1e-6)).all()
    slope = {"Sin": 2, "Cos": 2, "Sigmoid": 0.25}.get(operator, 1.2) * TIE * errs
    own = TIE * np.maximum(np.abs(exact), 1)
    assert (room <= np.maximum(3 * change, slope) + 3 * own).all()


@pytest.mark.parametrize("exponent", [2.0, 3.0, 0.5, -0.5])
def test_powers(exponent: float) -> None:
    x = values(negative=exponent in (2.0, 3.0))
    errs = 50 * np.abs(x).astype(np.float64)
    node = Node("Pow", ["x", "p"], ["y"], {}, "n")
    (out,) = evaluate_node(node, [x, np.float32(exponent)])
    room = TIE * magnitude(node, [x, np.float32(exponent)], [errs, np.zeros(())], out, 0)
    change = largest_change(lambda v: v**exponent, x, TIE * errs)
    assert (change <= room).all()
    assert (room <= 2 * change + 2 * TIE * np.abs(out)).all()


def test_softmax() -> None:
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((6, 40)) * np.float32([[0.1], [1], [5], [20], [50], [100]])).astype(
        "f"
    )
    errs = 200 * np.abs(x).astype(np.float64)
    node = Node("Softmax", ["x"], ["y"], {"axis": -1}, "n")

    def function(v: Array) -> Array:
        power = np.exp(v - v.max(-1, keepdims=True))
        return power / power.sum(-1, keepdims=True)

    (out,) = evaluate_node(node, [x])
    room = TIE * magnitude(node, [x], [errs], out, 0)
    for _ in range(20):
        moved = function(x + TIE * errs * rng.choice([-1, 1], x.shape))
        assert (np.abs(moved - function(x.astype(np.float64))) <= room + NORMAL).all()
    assert room.max() < 2 * 2 * TIE * errs.max()  # and not that of the whole tensor's sums


def test_products_of_two_rounded_operands() -> None:
    rng = np.random.default_rng(4)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((9, 33), (33, 5)))
    errs = [60 * np.abs(a).astype(np.float64), 80 * np.abs(b).astype(np.float64)]
    node = Node("MatMul", ["a", "b"], ["c"], {}, "n")
    (out,) = evaluate_node(node, [a, b])
    room = TIE * magnitude(node, [a, b], errs, out, 0)
    wide = [v.astype(np.float64) for v in (a, b)]
    most = np.abs(wide[0]) @ np.abs(wide[1])
    for _ in range(20):
        moved = [
            v + TIE * e * rng.choice([-1, 1], v.shape) for v, e in zip(wide, errs, strict=True)
        ]
        assert (np.abs(moved[0] @ moved[1] - wide[0] @ wide[1]) <= room).all()
    assert (room <= 1.01 * TIE * (60 + 80 + 1) * most).all()


def test_what_is_exactly_zero_stays_so() -> None:
    node = Node("Mul", ["a", "b"], ["c"], {}, "n")
    a, b = np.zeros(3, np.float32), np.ones(3, np.float32)
    with np.errstate(all="raise"):
        size = magnitude(node, [a, b], [np.zeros(()), np.full(3, np.inf)], a * b, 0)
    assert not np.isnan(size).any()
    assert (size == 0).all()


def test_few_values_of_a_quantized_norm_are_ties() -> None:
    """RMSNorm, and 8 bits with a scale for each token, as in front of each layer of BitNet."""
    net = Net(opset=18, seed=0)
    x = net.input("x", [32, 256])
    y = net.op("MatMul", x, net.const(net.normal((256, 256))))
    two, eps, top = (net.const(np.float32(v)) for v in (2, 1e-6, 127))
    mean = net.op("ReduceMean", net.op("Pow", y, two), net.ints([-1]), keepdims=1)
    y = net.op("Mul", y, net.op("Reciprocal", net.op("Sqrt", net.op("Add", mean, eps))))
    scale = net.op("Div", top, net.op("ReduceMax", net.op("Abs", y), net.ints([-1]), keepdims=1))
    net.output(net.op("Round", net.op("Mul", y, scale)))
    graph = load(net.model())
    feeds = {"x": np.random.default_rng(0).standard_normal((32, 256)).astype(np.float32)}
    (mask,) = tied(graph, feeds).values()
    assert mask.mean() < 0.01
