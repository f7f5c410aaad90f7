"""Functions of rows, in every spelling, become one node, and one kernel computes it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest

import bnncc
from bnncc.frontend.onnx import load
from bnncc.ir.rows import ROTARY, ROW_NORM, ROW_SOFTMAX, SWISH
from bnncc.transform.normalizations import join_normalizations, join_softmax
from bnncc.transform.rotary import join_rotations
from bnncc.transform.simplify import simplify
from tests.collection.builder import Net

EPSILON = 1e-3
WIDTH = 48
ROW = np.linspace(0.5, 2, WIDTH, dtype=np.float32)

MASK = np.where(np.arange(WIDTH) % 3 == 1, -3e38, 0).astype(np.float32)

ANGLES = np.linspace(0, 6, WIDTH, dtype=np.float32)[None, :]
HALF = (WIDTH // 2, 2**31)


def root(net: Net, x: str, square: str) -> str:
    twice = net.op("Pow", x, net.const(2.0)) if square == "Pow" else net.op("Mul", x, x)
    return net.op("Sqrt", net.op("Add", net.reduce_mean(twice, [-1], 1), net.const(EPSILON)))


def centred(net: Net, x: str) -> str:
    return net.op("Sub", x, net.reduce_mean(x, [-1], 1))


def layer_norm(net: Net, x: str) -> str:
    d = centred(net, x)
    y = net.op("Mul", net.op("Div", d, root(net, d, "Pow")), net.const(ROW))
    return net.op("Add", y, net.const(ROW[::-1].copy()))


def scaled(net: Net, y: str) -> str:
    return net.op("Mul", net.const(ROW[None, :]), y)


def rotary(net: Net, x: str, split: bool = False, order: int = 1) -> str:
    if split:
        first, second = net.op("Split", x, axis=-1, n=2, num_outputs=2)
    else:
        first, second = (net.slice(x, [a], [b], [-1]) for a, b in ((0, WIDTH // 2), HALF))
    turned = net.op("Concat", *[net.op("Neg", second), first][::order], axis=-1)
    straight = net.op("Mul", x, net.const(np.cos(ANGLES)))
    return net.op("Add", net.op("Mul", net.const(np.sin(ANGLES)), turned), straight)


SPELLINGS: dict[str, tuple[Callable[[Net, str], str], str]] = {
    "divided": (lambda n, x: scaled(n, n.op("Div", x, root(n, x, "Mul"))), ROW_NORM),
    "no scale": (lambda n, x: n.op("Div", x, root(n, x, "Pow")), ROW_NORM),
    "reciprocal": (
        lambda n, x: scaled(n, n.op("Mul", x, n.op("Reciprocal", root(n, x, "Pow")))), ROW_NORM,
    ),
    "one over": (
        lambda n, x: scaled(n, n.op("Mul", n.op("Div", n.const(1.0), root(n, x, "Pow")), x)),
        ROW_NORM,
    ),
    "operator": (
        lambda n, x: n.op("RMSNormalization", x, n.const(ROW), axis=-1, epsilon=EPSILON), ROW_NORM,
    ),
    "centred": (layer_norm, ROW_NORM),
    "layer": (
        lambda n, x: n.op("LayerNormalization", x, n.const(ROW), n.const(ROW), epsilon=EPSILON),
        ROW_NORM,
    ),
    "layer without bias": (
        lambda n, x: n.op("LayerNormalization", x, n.const(ROW), axis=2), ROW_NORM,
    ),
    "softmax": (lambda n, x: n.op("Softmax", x, axis=-1), ROW_SOFTMAX),
    "masked": (
        lambda n, x: n.op("Softmax", n.op("Add", n.const(MASK), n.op("Mul", x, n.const(0.5)))),
        ROW_SOFTMAX,
    ),
    "divided scores": (
        lambda n, x: n.op("Softmax", n.op("Div", x, n.const(2.0)), axis=2), ROW_SOFTMAX,
    ),
    "rotary": (rotary, ROTARY),
    "rotary, split": (lambda n, x: rotary(n, x, True), ROTARY),
    "swish": (lambda n, x: n.op("Mul", n.op("Sigmoid", x), x), SWISH),
}  # fmt: skip

OTHERS: dict[str, Callable[[Net, str], str]] = {
    "another axis": lambda n, x: n.op("Softmax", x, axis=1),
    "a mean of other values": lambda n, x: n.op("Div", x, root(n, n.op("Abs", x), "Mul")),
    "a mean along another axis": lambda n, x: n.op(
        "Div", x, n.op("Sqrt", n.op("Add", n.reduce_mean(n.op("Mul", x, x), [1], 1), n.const(1.0)))
    ),
    "a cube": lambda n, x: n.op(
        "Div", x, n.op("Sqrt", n.reduce_mean(n.op("Pow", x, n.const(3.0)), [-1], 1))
    ),
    "halves the other way round": lambda n, x: rotary(n, x, order=-1),
    "the sigmoid of something else": lambda n, x: n.op("Mul", n.op("Sigmoid", n.op("Neg", x)), x),
}


def model(
    *parts: Callable[[Net, str], str], shape: tuple[int | str, ...] = (2, 5, WIDTH)
) -> onnx.ModelProto:
    net = Net(23)
    x = net.input("x", shape)
    net.output(*(part(net, x) for part in parts))
    return net.model()


def joined(proto: onnx.ModelProto) -> list[str]:
    graph = load(proto)
    simplify(graph)
    join_normalizations(graph)
    join_softmax(graph)
    join_rotations(graph)
    return [node.op for node in graph.nodes]


@pytest.mark.parametrize("name", SPELLINGS)
def test_one_node_is_left(name: str) -> None:
    part, op = SPELLINGS[name]
    assert joined(model(part)) == [op]


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay(name: str) -> None:
    assert not {ROTARY, ROW_NORM, ROW_SOFTMAX, SWISH} & set(joined(model(OTHERS[name])))


def test_a_mask_that_adds_an_axis_stays() -> None:
    mask = MASK.reshape(1, 1, 1, WIDTH)
    found = joined(model(lambda n, x: n.op("Softmax", n.op("Add", x, n.const(mask)), axis=-1)))
    assert found == ["Add", ROW_SOFTMAX]


def test_a_scale_stays_if_its_operand_is_read_elsewhere() -> None:
    def both(net: Net, x: str) -> str:
        y = net.op("Div", x, root(net, x, "Mul"))
        return net.op("Concat", y, scaled(net, y), axis=1)

    assert joined(model(both)) == [ROW_NORM, "Mul", "Concat"]


def op_of(name: str) -> str:
    return SPELLINGS[name][1]


def exact(name: str, x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    if op_of(name) == ROW_SOFTMAX:
        x = x if name == "softmax" else x / 2 + MASK * (name == "masked")
        power = np.exp(x - x.max(-1, keepdims=True))
        return power / power.sum(-1, keepdims=True)
    if op_of(name) == ROTARY:
        turned = np.concatenate([-x[..., WIDTH // 2 :], x[..., : WIDTH // 2]], -1)
        return x * np.cos(ANGLES) + turned * np.sin(ANGLES)
    if name == "swish":
        return x / (1 + np.exp(-x))
    epsilon = 1e-5 if name == "layer without bias" else EPSILON
    x = x - x.mean(-1, keepdims=True) if name.startswith(("layer", "centred")) else x
    made = x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon)
    made = made if name == "no scale" else made * ROW
    return made + {"centred": ROW[::-1], "layer": ROW}.get(name, 0)


@pytest.mark.parametrize("shape", [(2, 5, WIDTH), ("N", 3, WIDTH)], ids=["fixed", "symbolic"])
def test_kernels_compute_what_the_formula_says(shape: tuple[int | str, ...]) -> None:
    proto = model(*(part for part, _ in SPELLINGS.values()), shape=shape)
    artifact = bnncc.compile(proto, target="native")
    rng = np.random.default_rng(0)
    x = rng.normal(0, 3, [3 if d == "N" else d for d in shape]).astype(np.float32)
    x[0, 0], x[0, 1], x[0, 2] = 0, 7, 1e-4  # rows without any variance, and of small numbers
    made = list(artifact.run({"x": x}).values())
    for name, found in zip(SPELLINGS, made, strict=True):
        np.testing.assert_allclose(found, exact(name, x), rtol=3e-6, atol=3e-6, err_msg=name)


def test_a_swish_of_large_negative_numbers_keeps_its_digits() -> None:
    x = np.linspace(-110, -10, 2 * 5 * WIDTH, dtype=np.float32).reshape(2, 5, WIDTH)
    found = next(iter(bnncc.compile(model(SPELLINGS["swish"][0])).run({"x": x}).values()))
    unit = np.spacing(np.abs(found)).astype(np.float64)
    assert (np.abs(found - exact("swish", x)) <= 2 * unit).all()


@pytest.mark.parametrize("scale", [0.35, -0.35])
@pytest.mark.parametrize("size", [1e6, 1e12, 1e30])
def test_a_softmax_of_large_scaled_scores_is_a_number(scale: float, size: float) -> None:
    """A product and a difference in one instruction are not 0 at the largest score."""
    proto = model(lambda n, x: n.op("Softmax", n.op("Mul", x, n.const(scale)), axis=-1))
    x = np.random.default_rng(0).standard_normal((2, 5, WIDTH)).astype(np.float32) * np.float32(
        size
    )
    found = next(iter(bnncc.compile(proto).run({"x": x}).values()))
    scores = x * np.float32(scale)
    power = np.exp((scores - scores.max(-1, keepdims=True)).astype(np.float64))
    np.testing.assert_allclose(found, power / power.sum(-1, keepdims=True), atol=1e-6)
