"""QONNX's operators compute what the executor of the package `qonnx` computes."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import bnncc
from bnncc.agreement import verify
from bnncc.errors import InputError, UsageError
from bnncc.frontend.onnx import load
from bnncc.ir.datatypes import datatype
from bnncc.ir.evaluate import evaluate
from bnncc.ir.quantizers import QUANT, ROUNDING
from bnncc.options import Uint8Input
from bnncc.transform.simplify import simplify
from tests.qonnx_models import CHANNELS_LAST, DOMAINS, Builder, Executor, annotate

pytestmark = pytest.mark.sampled(4)

pytest.importorskip("qonnx")
RNG = np.random.default_rng(0)
HALVES = np.arange(-40, 41, dtype=np.float32) / 4
"""Multiples of 1/4: every kind of tie."""


def same(model: onnx.ModelProto, x: np.ndarray, *, compiled: bool = True) -> None:
    """Check that evaluation, and the compiled network, give what the executor gives."""
    wanted = Executor(model)({"x": x})
    found = evaluate(load(model), {"x": x})
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value)
    if compiled:
        made = bnncc.compile(model).run({"x": x})
        for name, value in wanted.items():
            np.testing.assert_array_equal(made[name], value)


@pytest.mark.parametrize("mode", [*ROUNDING, "half_up"])
@pytest.mark.parametrize(("signed", "narrow"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_quant_of_constants(mode: str, signed: int, narrow: int) -> None:
    make = Builder()
    x = np.concatenate([HALVES, RNG.standard_normal(100).astype(np.float32) * 5])
    total = "x"
    for bits in (1, 2, 3, 4, 8, 2.5):
        for scale, zero in ((1.0, 0.0), (0.3, 0.0), (0.25, 3.0), (RNG.random(len(x)) + 0.1, -1.0)):
            options = {"zero": zero, "signed": signed, "narrow": narrow, "mode": mode}
            total = make.add("Add", total, make.quant(x, scale, bits, **options))
    same(make.model(x.shape, total, 1), np.zeros_like(x), compiled=False)


@pytest.mark.parametrize("mode", ROUNDING)
@pytest.mark.parametrize(("bits", "signed", "zero"), [(1, 1, 0), (1, 0, 0), (3, 1, 0), (4, 0, 5)])
def test_quant_of_data(mode: str, bits: int, signed: int, zero: int) -> None:
    make = Builder()
    scale = np.float32([0.5, 0.25, 1.0]).reshape(3, 1)
    out = make.quant("x", scale, bits, zero=zero, signed=signed, mode=mode)
    same(make.model((1, 3, 81), out, 3), np.tile(HALVES / 2, (1, 3, 1)))


def test_the_float_before_a_half_is_rounded_down() -> None:
    """Half a unit added to it would be a whole number."""
    make = Builder()
    out = make.quant("x", np.float32(1), 4, signed=1, mode="HALF_UP")
    x = np.nextafter(np.float32([[0.5, 1.5, 2.5, -0.5, -1.5, 3.5]]), np.float32(0))
    made = bnncc.compile(make.model((1, 6), out, 2)).run({"x": x})[out]
    assert made.tolist() == [[0, 1, 2, 0, -1, 3]]


@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("imported", [True, False])
def test_binary_layer(domain: str, imported: bool) -> None:
    make = Builder(domain)
    data = make.custom("BipolarQuant", "x", 0.7)
    weight = make.custom("BipolarQuant", RNG.standard_normal((40, 9)), np.float32([0.25]))
    out = make.add("MatMul", data, weight)
    model = make.model((2, 40), out, 2, imported=imported)
    x = RNG.standard_normal((2, 40)).astype(np.float32)
    x[0, :5] = 0
    artifact = bnncc.compile(model)
    assert [layer["kind"] for layer in artifact.manifest["report"]["layers"]] == ["binary"]
    wanted = Executor(model)({"x": x})[out]
    np.testing.assert_allclose(artifact.run({"x": x})[out], wanted, 0, 1e-6)


def test_bipolar_quant_with_a_scale_per_channel() -> None:
    make = Builder()
    scale = RNG.random((1, 5, 1, 1)) + 0.5
    out = make.custom("BipolarQuant", "x", scale)
    same(make.model((1, 5, 3, 3), out, 4), RNG.standard_normal((1, 5, 3, 3)).astype(np.float32))


@pytest.mark.parametrize("mode", ROUNDING)
@pytest.mark.parametrize("version", [1, 2])
def test_trunc(mode: str, version: int) -> None:
    make = Builder()
    more = (2.0, 4.0) if version == 2 else (4.0,)
    options = {"signed": 1, "narrow": 1} if version == 2 else {}
    out = make.custom("Trunc", "x", 0.25, 3.0, 6.0, *more, rounding_mode=mode, **options)
    model = make.model((1, 161), out, 2, version=version)
    same(model, np.arange(-80, 81, dtype=np.float32).reshape(1, -1) / 8)


@pytest.mark.parametrize("steps", [1, 3, 15])
@pytest.mark.parametrize(
    ("shape", "layout", "axis"),
    [((2, 5), "NC", 1), ((2, 5), "", 1), ((1, 4, 5), "", 2), ((1, 5, 4), "NCW", 1),
     ((1, 5, 3, 4), "NCHW", 1), ((1, 3, 4, 5), "NHWC", 3), ((1, 5, 3, 4), "", 1)],
)  # fmt: skip
@pytest.mark.parametrize("rows", [1, 5])
def test_multi_threshold(
    steps: int, shape: tuple[int, ...], layout: str, axis: int, rows: int
) -> None:
    make = Builder()
    table = np.sort(RNG.integers(-8, 8, (rows, steps)), axis=1)
    attrs = {"out_dtype": "INT4", "out_scale": 2.0, "out_bias": -1.0}
    out = make.custom("MultiThreshold", "x", table, data_layout=layout, **attrs)
    x = RNG.integers(-10, 10, shape).astype(np.float32)
    same(make.model(shape, out, len(shape)), x, compiled=rows == 5)


@pytest.mark.parametrize("steps", [1, 3])
def test_thresholds_of_channels_stay_theirs_when_weights_on_the_left_are_turned(steps: int) -> None:
    make = Builder()
    table = np.sort(RNG.standard_normal((6, steps)), axis=1)
    levels = make.custom("MultiThreshold", "x", table, out_dtype="UINT2")
    out = make.add("MatMul", RNG.integers(-2, 2, (7, 9)), levels)
    model = make.model((9, 6), out, 2)
    same(model, RNG.standard_normal((9, 6)).astype(np.float32))
    assert kinds(model) == ["few_bit"]


def test_xnor_popcount_matmul_of_bits_is_binary() -> None:
    make = Builder()
    attrs = {"out_dtype": "BINARY"}
    bits = make.custom("MultiThreshold", "x", RNG.standard_normal((50, 1)), **attrs)
    out = make.custom("XnorPopcountMatMul", bits, RNG.integers(0, 2, (50, 7)))
    model = make.model((3, 50), out, 2)
    x = RNG.standard_normal((3, 50)).astype(np.float32)
    same(model, x)
    layers = bnncc.compile(model).manifest["report"]["layers"]
    assert [(layer["kind"], layer["name"]) for layer in layers] == [
        ("binary", "XnorPopcountMatMul_1")
    ]


def test_xnor_popcount_matmul_of_other_numbers() -> None:
    make = Builder()
    out = make.custom("XnorPopcountMatMul", "x", RNG.choice([-1, 1], (50, 7)))
    same(make.model((3, 50), out, 2), RNG.choice([-1, 1], (3, 50)).astype(np.float32))


@pytest.mark.parametrize("name", ["BIPOLAR", "BINARY", "TERNARY", "UINT8", "INT2", "FIXED<4,2>"])
def test_annotated_input(name: str) -> None:
    make = Builder()
    weight = make.quant(RNG.standard_normal((20, 6)), 1.0, 1)
    out = make.add("MatMul", "x", weight)
    model = make.model((3, 20), out, 2, annotation=name)
    kind = datatype(name)
    assert kind is not None
    x = kind.random(RNG, (3, 20))
    same(model, x)
    artifact = bnncc.compile(model)
    assert artifact.inputs[0].datatype == name
    assert verify(model, artifact)["right"]
    x[1, 2] = 0.3
    with pytest.raises(InputError, match=r"`x` holds 0.3.* at \[1, 2\] .*declares it " + name[:4]):
        artifact.run({"x": x})
    if name in ("BIPOLAR", "BINARY"):
        assert artifact.manifest["report"]["layers"][0]["kind"] == "binary"


def test_annotations_of_other_tensors_are_not_believed() -> None:
    make = Builder()
    x = RNG.standard_normal((3, 20)).astype(np.float32)
    weight = make.constant(RNG.standard_normal((20, 6)))
    out = make.add("MatMul", "x", weight)
    model = make.model((3, 20), out, 2)
    wanted = evaluate(load(model), {"x": x})
    annotate(model.graph, weight, "BIPOLAR")
    annotate(model.graph, out, "UINT4")
    for contradiction in ("BIPOLAR", "UINT8", "FLOAT32"):
        annotate(model.graph, "x", contradiction)
    found = evaluate(load(model), {"x": x})
    np.testing.assert_array_equal(found[out], wanted[out])


def test_bytes_of_an_annotated_input() -> None:
    make = Builder()
    weight = make.quant(RNG.standard_normal((4, 3, 3, 3)), 1.0, 1)
    out = make.add("Conv", "x", weight, kernel_shape=[3, 3])
    model = make.model((1, 3, 5, 5), out, 4, annotation="UINT8")
    artifact = bnncc.compile(model, input_uint8=[Uint8Input("x", (0.0,), (1.0,))])
    x = RNG.integers(0, 256, (1, 3, 5, 5)).astype(np.uint8)
    wanted = evaluate(load(model), {"x": x.astype(np.float32)})
    np.testing.assert_allclose(artifact.run({"x": x})[out], wanted[out])
    with pytest.raises(UsageError, match="not of the type the model declares, UINT8: 0 to 255"):
        bnncc.compile(model, input_uint8=[Uint8Input("x", (0.5,), (1.0,))])


def kinds(model: onnx.ModelProto) -> list[str]:
    return [layer["kind"] for layer in bnncc.compile(model).manifest["report"]["layers"]]


@pytest.mark.parametrize("op", ["MatMul", "XnorPopcountMatMul"])
def test_lowered_convolution(op: str) -> None:
    """A convolution as FINN lowers it: columns of a channels-last image, and a matrix."""
    make = Builder()
    low, scale = (0, 1.0) if op == "XnorPopcountMatMul" else (-1, 2.0)
    attrs = {"out_dtype": "BIPOLAR", "out_scale": scale, "out_bias": float(low)}
    signs = make.custom("MultiThreshold", "x", np.zeros((1, 1)), data_layout="NHWC", **attrs)
    columns = make.custom(
        "Im2Col", signs, kernel_size=[3, 2], stride=[2, 1], pad_amount=[1, 0, 1, 0],
        input_shape="(1, 7, 6, 5)", pad_value=low, dilations=[1, 2],
    )  # fmt: skip
    domain = make.domain if op != "MatMul" else ""
    dot = make.add(op, columns, RNG.choice([low, 1], (30, 8)), domain=domain)
    table = np.sort(RNG.integers(-6, 6, (8, 1)), axis=1)
    out = make.custom("MultiThreshold", dot, table, data_layout="NHWC", **attrs)
    model = make.model((1, 7, 6, 5), out, 4)
    annotate(model.graph, signs, "BIPOLAR" if low else "BINARY")
    same(model, RNG.standard_normal((1, 7, 6, 5)).astype(np.float32))
    assert kinds(model) == ["binary"]


def test_columns_that_something_else_reads() -> None:
    make = Builder()
    attrs = {"kernel_size": [2, 2], "stride": [1, 2], "input_shape": "(1, 4, 5, 3)"}
    out = make.custom("Im2Col", "x", **attrs)
    model = make.model((1, 4, 5, 3), out, 4, annotation="INT8")
    same(model, RNG.integers(-9, 9, (1, 4, 5, 3)).astype(np.float32))


_WEIGHT = RNG.integers(-2, 3, (6, 3, 3, 3))
_SQUARE = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [1, 1]}


@pytest.mark.parametrize(
    ("op", "inputs", "attrs"),
    [
        ("Conv", [_WEIGHT], {**_SQUARE, "dilations": [1, 1], "group": 1}),
        ("Conv", [_WEIGHT[:, :1]], {**_SQUARE, "dilations": [1, 1], "group": 3}),
        ("MaxPoolNHWC", [], _SQUARE),
        ("MaxPool", [], _SQUARE),
        ("BatchNormalization", [[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 2, 1]], {"epsilon": 1e-5}),
    ],
)
def test_channels_last_operators(op: str, inputs: list, attrs: dict) -> None:
    make = Builder()
    domain = make.domain if op == "MaxPoolNHWC" else CHANNELS_LAST
    if op == "Conv":
        inputs = [inputs[0].transpose(0, 2, 3, 1)]  # the package's filters lie as its images do
    model = make.model((1, 6, 8, 3), make.add(op, "x", *inputs, domain=domain, **attrs), 4)
    for entry in model.opset_import:
        if entry.domain == CHANNELS_LAST:
            entry.version = 13  # that of ONNX's own operators, as the package writes it
    x = {"x": RNG.integers(-9, 9, (1, 6, 8, 3)).astype(np.float32)}
    (found,), (wanted,) = (f(x).values() for f in (bnncc.compile(model).run, Executor(model)))
    np.testing.assert_allclose(found, wanted, 1e-5, 1e-4)


def test_best_classes_of_a_binary_layer() -> None:
    make = Builder()
    scores = make.add("MatMul", make.custom("BipolarQuant", "x", 1.0), RNG.choice([-1, 1], (40, 9)))
    best = make.add("TopK", scores, make.constant([3], np.int64), axis=-1)
    make.nodes[-1].output.append("place")
    model = make.model((1, 40), best, 2)
    model.graph.output.append(helper.make_tensor_value_info("place", TensorProto.INT64, [1, 3]))
    same(model, RNG.standard_normal((1, 40)).astype(np.float32))


def test_quantizers_between_convolutions_of_lines() -> None:
    make = Builder()
    attrs = {"kernel_shape": [3], "pads": [1, 1], "strides": [1], "dilations": [1], "group": 1}
    y = make.quant("x", RNG.random((1, 3, 1)) + 0.5, 4)
    for _ in range(2):
        y = make.add("Conv", y, RNG.integers(-1, 2, (3, 3, 3)), **attrs)
        y = make.custom("MultiThreshold", y, np.sort(RNG.random((3, 3)) * 9), data_layout="NCW")
        y = make.quant(y, RNG.random((3, 1)) + 0.5, 2, signed=0)
    model = make.model((1, 3, 20), make.add("MaxPool", y, kernel_shape=[2], strides=[2]), 3)
    same(model, RNG.integers(-9, 10, (1, 3, 20)).astype(np.float32))
    graph = load(model)
    simplify(graph)
    assert [n.op for n in graph.nodes].count("Squeeze") <= 1
    assert all(len(graph.types[n.inputs[0]].shape) == 4 for n in graph.nodes if n.op == QUANT)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_quant_avg_pool(layout: str) -> None:
    make = Builder()
    attrs = {"kernel": 3, "stride": 2, "ibits": 4, "obits": 5, "signed": 0}
    out = make.custom("QuantAvgPool2d", "x", data_layout=layout, **attrs)
    shape = (1, 3, 8, 9) if layout == "NCHW" else (1, 8, 9, 3)
    model = make.model(shape, out, 4)
    x = {"x": RNG.integers(0, 16, shape).astype(np.float32)}
    image = x["x"] if layout == "NCHW" else x["x"].transpose(0, 3, 1, 2)
    wanted = np.zeros((1, 3, 3, 4))
    for i, j in np.ndindex(3, 4):
        total = image[:, :, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3].sum((2, 3))
        wanted[:, :, i, j] = total.astype(int) >> 3  # 135 has 8 bits, of which 5 stay
    wanted = wanted if layout == "NCHW" else wanted.transpose(0, 2, 3, 1)
    np.testing.assert_array_equal(evaluate(load(model), x)[out], wanted)
    np.testing.assert_array_equal(bnncc.compile(model).run(x)[out], wanted)
