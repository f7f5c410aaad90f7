"""Why a layer is not binary: cases that look alike are told apart, each with its remedy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest

from bnncc.frontend.onnx import load
from bnncc.options import CompileOptions
from bnncc.recognise.binarize import binarize
from bnncc.recognise.quantizers import recognise_quantizers
from bnncc.recognise.signs import recognise_signs
from bnncc.report import Layer
from bnncc.targets.catalog import resolve
from bnncc.transform.pipeline import Compilation, to_physical
from bnncc.transform.simplify import simplify
from tests.collection.builder import Net

SHAPE = (8, 16, 3, 3)
Data = Callable[[Net, str], str]


def signs(net: Net, x: str) -> str:
    cut = net.op("GreaterOrEqual", x, net.const(0.0))
    return net.op("Where", cut, net.const(1.0), net.const(-1.0))


def threes(net: Net, x: str) -> str:
    return net.op("Clip", net.op("Round", x), net.const(-1.0), net.const(1.0))


def scaled(net: Net, x: str) -> str:
    scale = net.rng.uniform(0.5, 2, (1, SHAPE[1], 1, 1))
    return net.op("Mul", signs(net, x), net.const(scale))


DATA: dict[str, Data] = {
    "input": lambda net, x: x,
    "signs": signs,
    "relu": lambda net, x: net.op("Relu", x),
    "normalized": lambda net, x: net.op(
        "Div", net.op("Sub", x, net.const(0.5)), net.const(np.float32([[[0.2]]] * SHAPE[1]))
    ),
    "ones after relu": lambda net, x: net.op("Relu", signs(net, x)),
    "ternary": threes,
    "scaled": scaled,
}


def weights(kind: str, rng: np.random.Generator) -> np.ndarray:
    bits = rng.choice([-1.0, 1.0], SHAPE)
    out = rng.uniform(0.5, 2, (SHAPE[0], 1, 1, 1))
    return {
        "signs": bits,
        "scaled": bits * out,
        "float": rng.standard_normal(SHAPE),
        "by input channel": bits * out * rng.uniform(0.5, 2, (1, SHAPE[1], 1, 1)),
        "by position": bits * out * rng.uniform(0.5, 2, (1, 1, 3, 3)),
        "ternary": bits * rng.integers(0, 2, SHAPE),
    }[kind]


def layer(data: str, weight: str, then: tuple[str, ...] = ("GlobalMaxPool",)) -> Layer:
    net = Net(seed=f"{data} {weight}")
    x = net.input("x", [1, SHAPE[1], 8, 8])
    y = net.op("Conv", DATA[data](net, x), net.const(weights(weight, net.rng)))
    for op in then:
        y = net.op(op, y)
    net.outputs.append(y)
    graph = load(net.model())
    simplify(graph)
    recognise_signs(graph)
    recognise_quantizers(graph)
    (found,) = binarize(graph)
    return found


@pytest.mark.parametrize(
    ("data", "weight", "kind", "reason", "remedy"),
    [
        ("signs", "scaled", "binary", "", ""),
        ("ones after relu", "scaled", "binary", "", ""),
        (
            "signs",
            "float",
            "float",
            "weights are float, while its data have 2 values",
            "export the",
        ),
        ("ternary", "float", "float", "weights are float, while its data have 3", "export the"),
        (
            "signs",
            "by input channel",
            "float",
            "for each input channel",
            "one scale for each output",
        ),
        ("signs", "by position", "float", "for each kernel position", "one scale for each output"),
        ("signs", "ternary", "few_bit", "1-bit data, ternary weights", "zeros of ternary weights"),
        (
            "ternary",
            "signs",
            "few_bit",
            "ternary data, 1-bit weights",
            "zeros of ternary data need",
        ),
        ("ternary", "ternary", "few_bit", "ternary data, ternary w", "ternary data and weights"),
        ("relu", "signs", "float", "real-valued (from Relu", "apply sign() after the Relu"),
        ("input", "signs", "float", "real-valued (a graph input)", "first layer usually"),
        ("scaled", "signs", "float", "a separate scale for each channel", "one scale"),
        (
            "relu",
            "float",
            "float",
            "its data (from Relu) and its weights are float",
            "apply sign()",
        ),
        (
            "input",
            "float",
            "float",
            "its data (a graph input) and its weights",
            "first layer usually",
        ),
    ],
)
def test_cases_are_told_apart(data: str, weight: str, kind: str, reason: str, remedy: str) -> None:
    found = layer(data, weight)
    assert found.kind == kind
    assert reason in found.reason
    assert remedy in found.remedy
    assert bool(found.remedy) == (kind != "binary")


@pytest.mark.parametrize(
    ("then", "last"),
    [((), True), (("Softmax",), True), (("Flatten", "LogSoftmax"), True), (("Relu",), False)],
)
def test_last_layer(then: tuple[str, ...], last: bool) -> None:
    remedy = layer("relu", "float", then).remedy
    assert ("the last layer usually stays float" in remedy) == last


def layers(body: str, **constants: np.ndarray) -> list[Layer]:
    """Return the layers of a network in text after all passes."""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> net {body}')
    for name, values in constants.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(values), name))
    made = Compilation(CompileOptions(), resolve("x86-64-v2"))
    to_physical(load(model), made)
    return made.layers


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ("d = LayerNormalization(x, v)", "its data (from LayerNorm) and"),
        (
            "q = Mul(x, x) m = ReduceMean<axes=[1]>(q) p = Add(m, e) r = Sqrt(p) d = Div(x, r)",
            "its data (from RMSNorm) and",
        ),
        ("s = Sign(x) d = MatMul(s, u)", "its data (from binary layer) and its weights"),
        ("s = Sign(x) t = MatMul(s, u) d = Flatten(t)", "its data (from binary layer) and"),
    ],
)
def test_reasons_name_what_feeds_a_layer(before: str, said: str) -> None:
    rng = np.random.default_rng(2)
    square, bits = rng.standard_normal((64, 64)), rng.choice([-1.0, 1.0], (64, 64))
    body = f"(float[4,64] x) => (z) {{{before} y = MatMul(d, w) z = Relu(y)}}"
    found = layers(body, w=square, u=bits, v=square[0], e=np.ones(1))[-1]
    assert (found.kind, said in found.reason) == ("float", True), found.reason


@pytest.mark.parametrize(
    ("operands", "layer_of"),
    [("2,3,6,6", "y = Conv(s, t)"), ("2,6,6", "y = MatMul(s, t)"), ("6,6", "y = Gemm(s, t)")],
)
def test_computed_weights(operands: str, layer_of: str) -> None:
    shape = f"(float[{operands}] x, float[{operands}] w)"
    (found,) = layers(f"{shape} => (z) {{s = Sign(x) t = Relu(w) {layer_of} z = Abs(y)}}")
    assert ("computed at run time" in found.reason) == ("MatMul" not in layer_of)
    assert "for CPUs" not in found.reason


@pytest.mark.parametrize("weight", ["signs", "float"])
@pytest.mark.parametrize(
    ("shape", "size", "layer_of", "maker", "image"),
    [
        ("2,3,6,6", "4,3,1,1", "y = Conv(x, w)", "a graph input", True),
        (
            "2,6,6,3",
            "4,3,1,1",
            "t = Transpose<perm=[0,3,1,2]>(x) y = Conv(t, w)",
            "a graph input",
            True,
        ),
        ("2,3,6", "4,3,1", "y = Conv(x, w)", "a graph input", False),
        ("2,6,3", "3,4", "y = MatMul(x, w)", "a graph input", False),
        ("2,3", "3,4", "y = MatMul(x, w)", "a graph input", False),
        ("2,6,3", "3,4", "r = Relu(x) y = MatMul(r, w)", "from Relu", False),
        (
            "2,3,6,6",
            "4,3,1,1",
            "h = Cast<to=10>(x) r = Relu(h) v = Cast<to=10>(w) c = Conv(r, v) y = Cast<to=1>(c)",
            "from Relu",
            False,
        ),
    ],
)
def test_reasons_name_operators_and_options_of_the_model(
    shape: str, size: str, layer_of: str, maker: str, image: bool, weight: str
) -> None:
    values = np.random.default_rng(1).standard_normal([int(d) for d in size.split(",")])
    values = np.sign(values) if weight == "signs" else values
    (found,) = layers(f"(float[{shape}] x) => (z) {{{layer_of} z = Abs(y)}}", w=values)
    assert maker in found.reason
    assert ("--first-layer" in found.remedy) == image
    assert ("first layer usually" in found.remedy) == (maker == "a graph input")


def test_first_layer_behind_a_normalization() -> None:
    remedy = layer("normalized", "float").remedy
    assert "the first layer usually stays float" in remedy
    assert "--first-layer" not in remedy  # for convolutions that read an input itself


_QUANTIZED = "m = Abs(x) t = ReduceMax<axes=[-1]>(m) q = Div(x, t) p = Mul(q, e) r = Round(p)"


@pytest.mark.parametrize(
    ("before", "weight", "reason", "remedy"),
    [
        (
            f"{_QUANTIZED} d = Mul(r, v)",
            "signs",
            "255 levels times scales that differ",
            "one scale",
        ),
        (
            f"{_QUANTIZED} d = Mul(r, v)",
            "threes",
            "differ along its sums (Mul `Mul_d`)",
            "one scale",
        ),
        (
            f"{_QUANTIZED} d = Mul(r, t)",
            "float",
            "weights are float, while its data have 255",
            "ex",
        ),
        (
            "r = Round(x) d = Mul(r, e)",
            "signs",
            "rounded (Round `Round_r`), to integers that",
            "limit",
        ),
        (
            "r = Floor(x) d = Clip(r, e)",
            "threes",
            "rounded (Floor `Floor_r`), to integers that",
            "limit",
        ),
        ("d = Mul(x, v)", "signs", "is real-valued", "or quantize it to at most 8 bits"),
    ],
)
def test_levels_that_a_layer_cannot_read(
    before: str, weight: str, reason: str, remedy: str
) -> None:
    rng = np.random.default_rng(2)
    some = {
        "signs": rng.choice([-1.0, 1.0], (64, 64)),
        "threes": rng.integers(-1, 2, (64, 64)),
        "float": rng.standard_normal((64, 64)),
    }
    body = f"(float[4,64] x) => (z) {{{before} y = MatMul(d, w) z = Relu(y)}}"
    (found,) = layers(body, w=some[weight], v=rng.standard_normal(64), e=np.float32(127))
    assert (found.kind, reason in found.reason) == ("float", True), found.reason
    assert remedy in found.remedy


def test_scales_of_groups_of_channels() -> None:
    body = (
        f"(float[4,8,8] x) => (z) {{{_QUANTIZED} s = Mul(r, t) d = Reshape(s, n)"
        " y = MatMul(d, w) z = Relu(y)}"
    )
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> net {body}')
    rng = np.random.default_rng(2)
    held = {
        "w": rng.choice([-1, 1], (64, 5)).astype("f4"),
        "e": np.float32(127),
        "n": np.array([4, 64]),
    }
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.asarray(v), k) for k, v in held.items()
    )
    made = Compilation(CompileOptions(), resolve("x86-64-v2"))
    to_physical(load(model), made)
    assert "255 levels times scales that differ along its sums (Mul" in made.layers[0].reason


def test_weights_that_are_several_matrices() -> None:
    body = "(float[3,4,8] x) => (z) {y = MatMul(x, w) z = Relu(y)}"
    (found,) = layers(body, w=np.ones((3, 8, 5)))
    assert found.reason == "its weights are 3 matrices"
    assert found.remedy == "write a product for each matrix, and concatenate them"
