"""Transposed convolutions: cut into ordinary ones, exact in all their attributes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

import bnncc
from bnncc.recognise.transposed import phases
from tests.collection.builder import Net

FORMS: list[dict[str, Any]] = [
    {"kernel": (4, 4), "strides": [2, 2], "pads": [1, 1, 1, 1]},
    {"kernel": (3, 3), "strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 1]},
    {"kernel": (3, 2), "strides": [1, 2], "pads": [1, 0, 0, 0]},
    {"kernel": (5, 3), "strides": [2, 3], "pads": [3, 1, 2, 0], "output_padding": [1, 2]},
    {"kernel": (3, 3), "strides": [2, 2], "dilations": [3, 3], "pads": [2, 1, 0, 3]},
    {"kernel": (3, 4), "strides": [3, 2], "dilations": [2, 1], "group": 3},
    {"kernel": (2, 2), "strides": [2, 2], "pads": [1, 1, 1, 1], "group": 3},
    {"kernel": (3, 3), "pads": [1, 1, 1, 1]},
]


@pytest.mark.parametrize("pad", [0, 1, 2, 5])
@pytest.mark.parametrize(("kernel", "stride", "dilation"), [
    (4, 2, 1), (3, 2, 1), (5, 3, 2), (3, 2, 2), (7, 4, 3), (3, 1, 2), (6, 4, 2)])  # fmt: skip
def test_phases_add_up(kernel: int, stride: int, dilation: int, pad: int) -> None:
    """Compare with the sum that defines it, for all sizes that leave something."""
    rng = np.random.default_rng(kernel)
    weight = rng.integers(-3, 4, kernel)
    for size in (1, 4, 9):
        data = rng.integers(-3, 4, size)
        full = np.zeros(stride * (size - 1) + dilation * (kernel - 1) + 1 + stride, int)
        for i in range(size):
            for t in range(kernel):
                full[i * stride + t * dilation] += data[i] * weight[t]
        wanted = full[pad : pad + max(1, len(full) - 2 * pad - stride)]
        for number, phase in enumerate(
            phases(size, len(wanted), kernel=kernel, stride=stride, dilation=dilation, pad=pad)
        ):
            values = np.pad(data, phase.pads)
            for j in range(number, len(wanted), stride):
                first = phase.start + j // stride
                terms = [values[first + m * phase.dilation] * weight[t]
                         for m, t in enumerate(phase.taps)]  # fmt: skip
                assert sum(terms) == wanted[j]


def network(form: dict[str, Any], *, binary: bool, how: str, batch: int | str = 1) -> Net:
    net = Net(opset=17, seed=str(form))
    attrs = {k: v for k, v in form.items() if k != "kernel"}
    x = net.input("x", [batch, 21, 5, 6])
    weight = net.signs((21, 4, *form["kernel"])) * np.float32(0.5)
    if not binary:
        weight = net.normal(weight.shape)
    units = 4 * form.get("group", 1)
    y = net.op("ConvTranspose", net.sign(x, how), net.const(weight), **attrs)
    y = net.op("BatchNormalization", y, *[net.const(a) for a in net.bn_arrays(units, 3.0)])
    z = net.sign(y, how)
    net.channels[z] = units
    net.output(net.bconv(z, 9, 3), y)
    return net


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_binary_ones_equal_onnxruntime(form: dict[str, Any]) -> None:
    number = FORMS.index(form)
    how, batch = ("where_ge", "sign")[number % 2], ("N", 2)[number // 2 % 2]
    model = network(form, binary=True, how=how, batch=batch).model()
    artifact = bnncc.compile(model)
    layers = artifact.report["layers"]
    assert [(x["op"], x["kind"]) for x in layers] == [
        ("ConvTranspose", "binary"), ("Conv", "binary")]  # fmt: skip
    x = np.random.default_rng(3).integers(-1, 2, (2, 21, 5, 6)).astype(np.float32)
    wanted = ort.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    got = artifact.run({"x": x})
    np.testing.assert_allclose(got[artifact.outputs[1].name], wanted[1], rtol=1e-5, atol=1e-5)
    if how == "where_ge":
        np.testing.assert_array_equal(got[artifact.outputs[0].name], wanted[0])


def test_real_ones_equal_onnxruntime() -> None:
    model = network(FORMS[1], binary=False, how="where_ge").model()
    artifact = bnncc.compile(model)
    assert [x["kind"] for x in artifact.report["layers"]] == ["float", "binary"]
    x = np.random.default_rng(3).standard_normal((1, 21, 5, 6)).astype(np.float32)
    wanted = ort.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    got = artifact.run({"x": x})[artifact.outputs[1].name]
    np.testing.assert_allclose(got, wanted[1], rtol=1e-4, atol=1e-4)


def test_lines_too() -> None:
    net = Net(opset=17)
    x = net.sign(net.input("x", [2, 33, 10]))
    weight = net.const(net.signs((33, 17, 4)))
    net.output(net.op("ConvTranspose", x, weight, strides=[2], pads=[1, 1]))
    model = net.model()
    artifact = bnncc.compile(model)
    (layer,) = artifact.report["layers"]
    assert (layer["kind"], layer["output_shape"]) == ("binary", [2, 17, 20])
    data = np.random.default_rng(3).standard_normal((2, 33, 10)).astype(np.float32)
    wanted = ort.InferenceSession(model.SerializeToString()).run(None, {"x": data})[0]
    np.testing.assert_array_equal(artifact.run({"x": data})[artifact.outputs[0].name], wanted)


def test_explain_says_why_one_is_not_cut() -> None:
    net = Net(opset=17)
    x = net.sign(net.input("x", [1, 8, 5, 5]))
    net.output(net.op("ConvTranspose", x, net.const(net.signs((8, 4, 1, 1))), strides=[2, 2]))
    (layer,) = bnncc.compile(net.model()).report["layers"]
    assert layer["kind"] == "float"
    assert "read no data" in layer["reason"]
