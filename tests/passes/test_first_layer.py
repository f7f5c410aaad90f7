"""``--first-layer``: what becomes of the convolutions that read an input, and what they compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import bnncc
from bnncc import agreement as verify
from bnncc import report
from bnncc.frontend.onnx import load
from bnncc.ir.evaluate import evaluate
from bnncc.ir.quantizers import QUANTIZED_CONV
from bnncc.options import Uint8Input
from bnncc.topi_binary.quantization import to_bfloat16
from bnncc.transform.first_layer import relax_first_layer
from bnncc.transform.image import take_uint8
from tests.kernel_harness import FLOATS_HERE

pytestmark = pytest.mark.sampled(6)

RNG = np.random.default_rng(0)
W = (RNG.standard_normal((20, 3, 5, 5)) * RNG.uniform(0.1, 9, (20, 1, 1, 1))).astype(np.float32)
WEIGHTS = {
    "w": W,
    "bias": RNG.standard_normal(20).astype(np.float32),
    "v": np.where(RNG.integers(0, 2, (5, 20, 3, 3)), 1, -1).astype(np.float32),
    "mean": np.array([123.0, 116.5, 0.0], np.float32).reshape(1, 3, 1, 1),
    "std": np.array([58.0, 57.0, 1.0], np.float32).reshape(1, 3, 1, 1),
    "pads": np.array([0, 0, 2, 1, 0, 0, 0, 2], np.int64),
    **{k: RNG.uniform(0.5, 2, 20).astype(np.float32) for k in ("gamma", "beta", "mu", "var")},
}
CONV = "Conv<strides=[2,2], pads=[2,2,2,2]>(x, w, bias)"
NET = (
    f"a = {CONV} n = BatchNormalization(a, gamma, beta, mu, var) "
    "p = MaxPool<kernel_shape=[2,2], strides=[2,2]>(n) b = Sign(p) y = Conv(b, v)"
)


def model(
    body: str, given: str = "float[1,3,21,18] x", weights: dict | None = None
) -> onnx.ModelProto:
    text = (
        f'<ir_version: 9, opset_import: ["" : 18]> net ({given}) => (float[a,b,c,d] y) {{{body}}}'
    )
    proto = onnx.parser.parse_model(text)
    for name, value in {**WEIGHTS, **(weights or {})}.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return proto


def convolved(x: np.ndarray, w: np.ndarray, stride: int, pads: tuple, fill: Any) -> np.ndarray:
    top, left, bottom, right = pads
    n, c, h, width = x.shape
    wide = np.broadcast_to(np.float64(fill), (n, c, h + top + bottom, width + left + right)).copy()
    wide[:, :, top : top + h, left : left + width] = x
    view = np.lib.stride_tricks.sliding_window_view(wide, w.shape[2:], (2, 3))
    return np.einsum("nchwij,ocij->nohw", view[:, :, ::stride, ::stride], w.astype(np.float64))


def rounded_weight(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scale = np.abs(w.astype(np.float64)).max(axis=(1, 2, 3), keepdims=True) / 127
    return np.rint(w / scale), scale[:, 0, 0, 0].reshape(1, -1, 1, 1)


def relaxed(proto: onnx.ModelProto, operands: str, images: tuple[Uint8Input, ...] = ()) -> Any:
    graph = load(proto)
    take_uint8(graph, images)
    return graph, relax_first_layer(graph, operands)


@pytest.mark.parametrize("operands", ["bfloat16", "int8"])
def test_what_is_computed_of_floats(operands: str) -> None:
    graph, result = relaxed(model(f"y = {CONV}"), operands)
    assert result.layers == ["y"]
    x = RNG.standard_normal((1, 3, 21, 18)).astype(np.float32)
    if operands == "bfloat16":
        want = convolved(to_bfloat16(x), to_bfloat16(W), 2, (2,) * 4, 0)
    else:
        top = np.abs(x).max()
        data = np.rint(x * (np.float32(127) / top))
        weight, scale = rounded_weight(W)
        want = convolved(data, weight, 2, (2,) * 4, 0) * np.float64(top / np.float32(127)) * scale
    want = want + WEIGHTS["bias"].reshape(1, -1, 1, 1)
    np.testing.assert_allclose(evaluate(graph, {"x": x})["y"], want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("operands", ["bfloat16", "int8"])
@pytest.mark.parametrize(
    ("given", "body"),
    [
        ("uint8[1,3,21,18] x", "f = Cast<to=1>(x)"),
        (
            "uint8[1,21,18,3] x",
            "t = Transpose<perm=[0,3,1,2]>(x) f = Cast<to=1>(t)",
        ),
    ],
)
def test_what_is_computed_of_bytes(operands: str, given: str, body: str) -> None:
    body += " m = Sub(f, mean) s = Div(m, std) p = Pad(s, pads) "
    body += "y = Conv<pads=[0,1,1,0]>(p, w)"
    graph, result = relaxed(model(body, given), operands)
    assert result.layers == ["y"]
    node = next(n for n in graph if n.op == QUANTIZED_CONV)
    assert node.attrs["zero_points"] == (123, 116, 0)
    assert node.attrs["pads"] == [2, 2, 1, 2]
    assert graph.types[node.inputs[0]].dtype == "uint8"
    pixels = RNG.integers(0, 256, graph.types["x"].shape).astype(np.uint8)
    image = pixels if pixels.shape[1] == 3 else pixels.transpose(0, 3, 1, 2)
    mean, std = WEIGHTS["mean"].astype(np.float64), WEIGHTS["std"].astype(np.float64)
    weight, scale = rounded_weight(W / std)
    if operands == "bfloat16":
        weight, scale = to_bfloat16((W / std).astype(np.float32)).astype(np.float64), 1.0
    # Outside the image lies the nearest byte to the mean.
    zeros = np.array([123, 116, 0]).reshape(1, 3, 1, 1) - mean
    want = convolved(image - mean, weight, 1, (2, 2, 1, 2), zeros) * scale
    got = evaluate(graph, {"x": pixels})["y"]
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-5)
    exact = evaluate(load(model(body, given)), {"x": pixels})["y"]
    assert 0 < np.abs(got - exact).max() < 0.03 * np.abs(exact).max()


@pytest.mark.parametrize(
    ("body", "given", "weights", "said"),
    [
        ("y = Conv<group=3>(x, g)", "float[1,3,9,9] x", {"g": W[:3, :1]}, "has groups"),
        ("y = Conv<dilations=[2,1]>(x, w)", "float[1,3,15,9] x", {}, "dilated"),
        ("y = Conv(x, g)", "float[1,17,9,9] x", {"g": np.ones((1, 17, 1, 1), "f")}, "more than 16"),
        ("y = Conv(x, g)", "float[1,3,60,60] x", {"g": np.ones((1, 3, 30, 30), "f")}, "too large"),
        ("z = Div(x, std) y = Conv(z, w)", "float[1,3,9,9] x", {}, "computed (`z`)"),
        (
            "f = Cast<to=1>(x) z = Add(f, std) y = Conv<pads=[1,1,1,1]>(z, w)",
            "uint8[1,3,9,9] x", {}, "no byte represents the 0",
        ),
    ],
)  # fmt: skip
def test_why_a_layer_stays(body: str, given: str, weights: dict, said: str) -> None:
    graph, result = relaxed(model(body, given, weights), "int8")
    assert not result.layers
    assert said in next(iter(result.kept.values()))
    assert all(node.op != QUANTIZED_CONV for node in graph)


def test_other_layers_are_left_alone() -> None:
    body = "a = Conv(x, w) s = Sign(x) b = Conv(s, w) c = Add(a, b) y = Conv(c, v)"
    graph, result = relaxed(model(body), "int8")
    assert result.layers == ["a"]
    assert not result.kept
    assert [n.op for n in graph].count("Conv") == 2
    plain, nothing = relaxed(model(body), "float32")
    assert (nothing.layers, nothing.kept) == ([], {})
    assert [n.op for n in plain].count("Conv") == 3


@pytest.mark.parametrize("target", [*FLOATS_HERE, "native"])
@pytest.mark.parametrize("operands", ["bfloat16", "int8"])
@pytest.mark.parametrize(
    ("body", "given"),
    [
        (NET, "float[N,3,21,18] x"),
        (f"a = {CONV} b = Sign(a) y = Conv(b, v)", "float[1,3,21,18] x"),
        (f"a = {CONV} one = Constant<value_float=1.0>() minus = Neg(one) zero = Sub(one, one) "
         "i = Identity(a) g = GreaterOrEqual(i, zero) b = Where(g, one, minus) y = Conv(b, v)",
         "float[1,3,21,18] x"),
        (f"a = Conv(x, w) c = {CONV} r = Relu(a) b = Sign(c) z = Conv(b, v) "
         "k = Conv(r, v) t = GlobalAveragePool(k) y = Add(z, t)", "float[1,3,21,18] x"),
    ],
)  # fmt: skip
def test_artifacts_compute_it(body: str, given: str, operands: str, target: str) -> None:
    """Signs make other bits of other rounding, but their data are the same within float32's."""
    proto = model(body, given)
    artifact = bnncc.compile(proto, target=target, first_layer=operands)  # which compares, too
    x = RNG.standard_normal((2 if "N" in given else 1, 3, 21, 18)).astype(np.float32)
    graph, _ = relaxed(proto, operands)
    np.testing.assert_allclose(
        artifact.run({"x": x})["y"], evaluate(graph, {"x": x})["y"], rtol=1e-4, atol=1e-3
    )
    zeros = np.zeros_like(x)
    np.testing.assert_allclose(
        artifact.run({"x": zeros})["y"], evaluate(graph, {"x": zeros})["y"], rtol=1e-4, atol=1e-3
    )


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("operands", ["bfloat16", "int8"])
def test_verify_compares_with_the_relaxed_network(operands: str, layout: str) -> None:
    image = Uint8Input("x", (123.0, 116.3, 103.0), (0.017,), layout)
    for images in ((), (image,)):
        artifact = bnncc.compile(model(NET), first_layer=operands, input_uint8=images)
        result = verify.verify(model(NET), artifact)
        assert result["right"], verify.text(result)
        assert [d["name"] for d in result["deviation"]] == ["y"]
        assert "deviation  y" in verify.text(result)
        layer = artifact.report["layers"][0]
        assert f"--first-layer {operands}" in layer["reason"]
        assert ("its bytes" in layer["reason"]) == bool(images)
        assert layer["bits"] == ([16, 16] if operands == "bfloat16" else [8, 8])
        assert layer["reason"] in report.text(artifact.report)
        assert artifact.manifest["semantics"]["first_layer"] == operands


def test_verify_tells_roundings_apart() -> None:
    artifact = bnncc.compile(model(f"y = {CONV}"), first_layer="int8")
    assert verify.verify(model(f"y = {CONV}"), artifact)["right"]
    plain = bnncc.compile(model(f"y = {CONV}"))
    assert verify.verify(model(f"y = {CONV}"), plain)["deviation"] == []
    for claimed, made in ((artifact, "float32"), (artifact, "bfloat16"), (plain, "int8")):
        semantics = {**claimed.manifest["semantics"], "first_layer": made}
        claimed.manifest["semantics"] = semantics
        assert not verify.verify(model(f"y = {CONV}"), claimed)["right"]


@pytest.mark.links("x86-64-v2")
def test_warnings() -> None:
    def said(body: str, target: str, operands: str) -> list[str]:
        artifact = bnncc.compile(model(body), target=target, first_layer=operands)
        return list(artifact.report["warnings"])

    slow = said(NET, "x86-64-v2", "int8")
    assert len(slow) == 1
    assert "x86-64-v2 lacks avx512_vnni" in slow[0]
    assert "lacks avx512_bf16" in said(NET, "x86-64-v2", "bfloat16")[0]
    assert said(NET, "x86-64-v2", "float32") == []
    nothing = said("b = Sign(x) y = Conv(b, w)", "x86-64-v2", "int8")
    assert "--first-layer int8: no float convolution reads an input of the network" in nothing
    kept = said("d = Div(x, std) y = Conv(d, w)", "x86-64-v2", "int8")
    assert "stays in float32: its data are computed" in kept[-1]
