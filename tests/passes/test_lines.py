"""One-dimensional networks: convolutions and poolings over sequences, in all their spellings."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest

import bnncc
from bnncc.frontend.onnx import load
from bnncc.transform.simplify import simplify
from tests.collection import oracle
from tests.collection.builder import Net

pytestmark = pytest.mark.sampled(2)


def conv(
    net: Net, x: str, units: int, k: int, *, group: int = 1, real: bool = False, **attrs
) -> str:
    """Convolve lines of ``net.channels[x]`` channels with signs (or real weights)."""
    shape = (units, net.channels[x] // group, k)
    weight = net.normal(shape, 0.3) if real else net.signs(shape) * np.float32(0.5)
    out = net.op("Conv", x, net.const(weight), group=group, **attrs)
    net.channels[out] = units
    return out


def plain(net: Net) -> None:
    x = net.input("x", [1, 5, 37])
    y = net.bn(conv(net, x, 33, 5, real=True, pads=[2, 2]))
    y = conv(net, net.sign(y), 40, 3, pads=[1, 1])
    y = net.bn(net.op("MaxPool", y, kernel_shape=[2], strides=[2]))
    y = conv(net, net.sign(y), 64, 4, pads=[0, 2], dilations=[2], strides=[2])
    y = net.op("AveragePool", net.op("Relu", y), kernel_shape=[2], strides=[1])
    net.output(net.head(conv(net, net.sign(net.bn(y)), 16, 1)))


def residual(net: Net) -> None:
    x = net.input("x", ["N", 32, 20])
    y = net.op("PRelu", x, net.const(net.normal((32, 1), 0.3)))
    z = net.bn(conv(net, net.sign(y), 32, 3, pads=[1, 1]))
    y = net.op("Add", y, net.op("Add", z, net.const(net.normal((1, 32, 1)))))
    y = net.op("Mul", y, net.op("Sigmoid", net.op("GlobalAveragePool", y)))
    z = conv(net, net.pad(net.sign(y), [0, 0, 2, 0, 0, 1], 1.0), 24, 3, group=2)
    net.channels[z] = 24
    a, b = net.split(z, [8, 16])
    y = net.op("Concat", b, a, axis=-2)
    net.output(net.slice(net.reduce_mean(y, [-1], 0), [1], [20], [1]), y)


def flattened(net: Net) -> None:
    x = net.input("x", [2, 7, 9])
    y = net.bn(conv(net, net.sign(x, "sign"), 12, 3))
    flat = net.op("Flatten", net.sign(y))
    net.output(net.op("MatMul", flat, net.const(net.signs((12 * 7, 10)))))


def channels_last(net: Net) -> None:
    """Write what a TensorFlow exporter does: images of height 1 around each convolution."""
    x = net.input("x", [1, 19, 8])
    net.channels[x] = 8
    for units in (36, 16):
        rows = net.op("Unsqueeze", net.sign(x), net.ints([1]))
        turned = net.op("Transpose", rows, perm=[0, 3, 1, 2])
        weight = net.signs((units, net.channels[x], 1, 3))
        y = net.op("Conv", turned, net.const(weight), pads=[0, 1, 0, 1])
        y = net.op("Transpose", y, perm=[0, 2, 3, 1])
        x = net.op("Squeeze", y, net.ints([1]))
        x = net.op("Mul", x, net.const(net.normal(units)))
        x = net.op("Add", x, net.const(net.normal(units) + 0.01))
        net.channels[x] = units
    net.output(net.op("Relu", x))


def between_transposes(net: Net) -> None:
    """Use lines of which channels come last, outside the convolutions."""
    x = net.input("x", [1, 11, 32])
    net.channels[x] = 32
    y = net.op("Transpose", net.sign(x), perm=[0, 2, 1])
    y = conv(net, y, 48, 3, pads=[1, 1])
    y = net.op("Transpose", y, perm=[0, 2, 1])
    y = net.op("Add", y, net.const(net.normal((48,))))
    y = net.op("Transpose", net.sign(y), perm=[0, 2, 1])
    net.output(net.op("Transpose", conv(net, y, 10, 3), perm=[0, 2, 1]))


CASES = {
    plain: (3, 2),
    residual: (2, 0),
    flattened: (2, 0),
    channels_last: (2, 0),
    between_transposes: (2, 0),
}


def built(case: Callable[[Net], None]) -> onnx.ModelProto:
    net = Net(opset=18, seed=case.__name__)
    case(net)
    return net.model()


@pytest.mark.parametrize("case", CASES, ids=lambda f: f.__name__)
def test_lines_are_binary_and_right(case: Callable[[Net], None]) -> None:
    model = built(case)
    artifact = bnncc.compile(model)
    layers = artifact.report["layers"]
    binary, real = CASES[case]
    kinds = [layer["kind"] for layer in layers]
    assert (kinds.count("binary"), kinds.count("float")) == (binary, real)
    shapes = {n.name: n.op_type for n in model.graph.node if n.op_type == "Conv"}
    if case is not channels_last:
        assert all(len(x["output_shape"]) == 3 for x in layers if x["name"] in shapes)
    rng = np.random.default_rng(0)
    for values in (rng.standard_normal, lambda shape: rng.integers(-1, 2, shape)):
        shape = [3 if d == "N" else d for d in artifact.inputs[0].shape]
        feeds = {"x": values(shape).astype(np.float32)}
        verdict = oracle.compare(model, feeds, artifact.run(feeds))
        assert verdict.right or verdict.kind == "tie", verdict.text


@pytest.mark.parametrize("case", CASES, ids=lambda f: f.__name__)
def test_no_view_is_left_between_layers(case: Callable[[Net], None]) -> None:
    graph = load(built(case))
    simplify(graph)
    ops = [node.op for node in graph.nodes]
    first = next(i for i, op in enumerate(ops) if op == "Conv")
    last = max(i for i, op in enumerate(ops) if op == "Conv")
    moves = {"Reshape", "Squeeze", "Unsqueeze", "Transpose"}
    assert not moves & set(ops[first:last])
