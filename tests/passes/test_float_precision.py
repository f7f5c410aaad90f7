"""``--float-precision``: which layers are rounded, and what they compute."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest

import bnncc
from bnncc import agreement as verify
from bnncc import report
from bnncc.errors import UsageError
from bnncc.frontend.onnx import load
from bnncc.ir.evaluate import evaluate
from bnncc.ir.halves import NARROW
from bnncc.options import CompileOptions
from bnncc.targets.catalog import resolve
from bnncc.topi_binary.spec import Conv2d
from bnncc.transform.float_precision import round_layers
from bnncc.transform.physical import KERNEL
from bnncc.transform.pipeline import Compilation, to_physical
from bnncc.transform.relaxations import rounded_layers
from tests.kernel_harness import HERE

pytestmark = pytest.mark.sampled(3)

RNG = np.random.default_rng(0)
OPTIONS = CompileOptions(target="native", float_precision="bfloat16")
WEIGHTS = {
    "w": RNG.standard_normal((24, 3, 3, 3)) / 5,
    "signs": np.where(RNG.integers(0, 2, (24, 24, 3, 3)), 0.3, -0.3),
    "point": RNG.standard_normal((24, 24, 1, 1)) / 5,
    "wide": RNG.standard_normal((24, 24, 3, 3)) / 15,
    "own": RNG.standard_normal((24, 1, 3, 3)) / 3,
    "fc": RNG.standard_normal((10, 24)) / 5,
    "bias": RNG.standard_normal(10),
}
NET = (
    "a = Conv<strides=[2,2], pads=[1,1,1,1]>(x, w) s = Sign(a) "
    "c = Conv<pads=[1,1,1,1]>(s, signs) r = Relu(c) d = Conv(r, point) "
    "e = Conv<pads=[1,1,1,1]>(d, wide) f = Add(d, e) k = Conv<group=24, pads=[1,1,1,1]>(f, own) "
    "q = GlobalAveragePool(k) l = Flatten(q) y = Gemm<transB=1>(l, fc, bias)"
)


def model(body: str = NET, given: str = "float[N,3,18,21] x", out: str = "a,b") -> onnx.ModelProto:
    header = '<ir_version: 9, opset_import: ["" : 18]>'
    proto = onnx.parser.parse_model(f"{header} net ({given}) => (float[{out}] y) {{{body}}}")
    for name, value in WEIGHTS.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value.astype("f"), name))
    return proto


def rounded(x: Any) -> np.ndarray:
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def test_which_layers_are_rounded() -> None:
    found = rounded_layers(load(model()), OPTIONS, resolve("native"))
    assert found.layers == ["a", "d", "e", "y"]
    assert list(found.kept.values()) == ["it has groups"]
    nothing = rounded_layers(load(model()), CompileOptions(target="native"), resolve("native"))
    assert (nothing.layers, nothing.kept) == ([], {})


@pytest.mark.parametrize(
    ("body", "given", "said"),
    [
        ("v = Mul(x, x) y = Conv(x, v)", "float[3,3,9,9] x", "computed at run time"),
        ("y = ConvTranspose(x, g)", "float[1,24,9,9] x", "no kernels for ConvTranspose"),
        ("y = MatMul(x, f)", "float[2,3,24] x", "do not have 2 dimensions"),
    ],
)
def test_why_a_layer_stays(body: str, given: str, said: str) -> None:
    proto = model(body, given, "a,b,c" if "MatMul" in body else "a,b,c,d")
    for name, value in (("g", WEIGHTS["wide"]), ("f", WEIGHTS["fc"].T)):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value.astype("f"), name))
    found = rounded_layers(load(proto), OPTIONS, resolve("native"))
    assert found.layers == []
    assert said in "".join(found.kept.values())


def test_before_and_after() -> None:
    graph = load(model("p = Relu(x) y = Conv(p, w)", out="a,b,c,d"))
    round_layers(graph, ["y"])
    assert [n.op for n in graph.nodes] == ["Relu", NARROW, "Conv"]
    narrow, conv = graph.nodes[1:]
    assert (narrow.inputs, conv.inputs[0]) == (["p"], narrow.outputs[0])
    np.testing.assert_array_equal(graph.constants[conv.inputs[1]], rounded(WEIGHTS["w"]))
    x = RNG.standard_normal((2, 3, 18, 21)).astype("f")
    want = evaluate(load(model("p = Relu(x) y = Conv(p, w)", out="a,b,c,d")), {"x": rounded(x)})[
        "y"
    ]
    got = evaluate(graph, {"x": x})["y"]
    assert 0 < np.abs(got - want).max() < 0.02 * np.abs(want).max()  # the weights alone


def test_roundings_stand_in_front_of_moves_and_are_shared() -> None:
    body = (
        "pads = Constant<value_ints=[0,0,1,1,0,0,1,1]>() p = Pad(x, pads) a = Conv(p, w) "
        "b = Conv<pads=[1,1,1,1]>(x, w) y = Add(a, b)"
    )
    graph = load(model(body, out="a,b,c,d"))
    round_layers(graph, ["a", "b"])
    producers = graph.producers()
    narrows = [n for n in graph.nodes if n.op == NARROW]
    pad = next(n for n in graph.nodes if n.op == "Pad")
    assert {n.inputs[0] for n in narrows} == {"x"}
    assert producers[pad.inputs[0]].op == NARROW


def test_kernels_multiply_bfloat16() -> None:
    graph, target = load(model()), resolve("native")
    found = rounded_layers(graph, OPTIONS, target)
    round_layers(graph, found.layers)
    physical = to_physical(graph, Compilation(OPTIONS, target, relaxed={"float_precision": found}))
    specs = [n.attrs["spec"] for n in physical.nodes if n.op == KERNEL]
    operands = [s.operands for s in specs if isinstance(s, Conv2d)]
    assert operands == ["bfloat16", "bfloat16", "bfloat16", "float32", "bfloat16"]
    assert all(node.op != NARROW for node in physical.nodes)


@pytest.mark.parametrize(
    ("given", "body"),
    [
        ("2,24,3,3,3", "r = Relu(x) q = GlobalAveragePool(r) l = Flatten(q)"),
        ("2,3,24", "r = Relu(x) s = Constant<value_ints=[-1,24]>() l = Reshape(r, s)"),
        ("2,24,3", "r = Relu(x) q = GlobalAveragePool(r) l = Flatten(q)"),
    ],
)
def test_dense_layers_of_reshaped_tensors(given: str, body: str) -> None:
    """What lies between is stored without the rounding, and not compared with the rounded."""
    proto = model(f"{body} y = Gemm<transB=1>(l, fc, bias)", f"float[{given}] x", "n,10")
    artifact = bnncc.compile(proto, target="x86-64-v2", float_precision="bfloat16")
    assert artifact.report["layers"][0]["bits"] == [16, 16]


@pytest.mark.parametrize("target", [*HERE[-1:], "x86-64-v2", "native"])
def test_artifacts_compute_it(target: str) -> None:
    """Against NumPy: every layer of the network with operands that ml_dtypes rounds."""
    if target not in (*HERE, "native"):
        pytest.skip("this machine cannot run the target")
    body = "d = Relu(x) e = Conv<pads=[1,1,1,1]>(d, wide) q = GlobalAveragePool(e) "
    proto = model(body + "l = Flatten(q) y = Gemm<transB=1>(l, fc, bias)", "float[N,24,7,5] x")
    artifact = bnncc.compile(proto, target=target, float_precision="bfloat16")
    x = RNG.standard_normal((3, 24, 7, 5)).astype("f")
    data = np.pad(rounded(np.maximum(x, 0)), ((0, 0), (0, 0), (1, 1), (1, 1)))
    view = np.lib.stride_tricks.sliding_window_view(data, (3, 3), (2, 3))
    weight = rounded(WEIGHTS["wide"]).astype(np.float64)
    mean = np.einsum("nchwij,ocij->nohw", view, weight).mean((2, 3))
    # The mean may fall on either side of a tie: by as much as one bfloat16 of each datum.
    fc = rounded(WEIGHTS["fc"]).astype(np.float64)
    want = rounded(mean) @ fc.T + WEIGHTS["bias"]
    near = (np.abs(mean) * 2.0**-8) @ np.abs(fc.T) * 0.1 + 1e-5
    assert (np.abs(artifact.run({"x": x})["y"] - want) <= near).all()


@pytest.mark.slow
def test_verify_compares_with_the_rounded_network() -> None:
    proto = model()
    artifact = bnncc.compile(proto, float_precision="bfloat16")
    result = verify.verify(proto, artifact)
    assert result["right"], verify.text(result)
    assert [d["name"] for d in result["deviation"]] == ["y"]
    assert 1e-4 < result["deviation"][0]["relative"] < 0.1
    layers = {layer["name"]: layer for layer in artifact.report["layers"]}
    marked = [n for n, layer in layers.items() if "--float-precision" in layer["reason"]]
    assert [layers[n]["bits"] for n in marked] == [[16, 16]] * 4
    assert "its operands are rounded" in report.text(artifact.report)
    assert any("`Conv_k` stays in float32: it has groups" in w for w in artifact.report["warnings"])
    plain = bnncc.compile(proto)
    plain.manifest["semantics"] = {**plain.manifest["semantics"], "float_precision": "bfloat16"}
    assert not verify.verify(proto, plain)["right"]


def test_other_options_go_with_it() -> None:
    proto = model()
    artifact = bnncc.compile(proto, float_precision="bfloat16", first_layer="int8")
    result = verify.verify(proto, artifact)
    assert result["right"], verify.text(result)
    bits = [layer["bits"] for layer in artifact.report["layers"]]
    assert bits == [[8, 8], [1, 1], [16, 16], [16, 16], [32, 32], [16, 16]]


@pytest.mark.links("x86-64-v2")
def test_what_is_said_where_nothing_is_gained() -> None:
    artifact = bnncc.compile(model(), target="x86-64-v2", float_precision="bfloat16")
    assert any("x86-64-v2 lacks avx512_bf16" in w for w in artifact.report["warnings"])
    binary = model("s = Sign(x) t = Relu(s) y = Conv(s, bits)", "float[1,24,9,9] x", "a,b,c,d")
    bits = onnx.numpy_helper.from_array(WEIGHTS["signs"].astype("f"), "bits")
    binary.graph.initializer.append(bits)
    said = bnncc.compile(binary, float_precision="bfloat16").report["warnings"]
    assert "--float-precision bfloat16: no float layer is left" in said
    with pytest.raises(UsageError, match="needs a CPU target"):
        bnncc.compile(model(), target="cuda", float_precision="bfloat16")


@pytest.mark.links("x86-64-v2")
def test_products_of_three_terms_are_said() -> None:
    wide = model("d = Conv(x, point) e = Conv<pads=[1,1,1,1]>(d, wide) y = Relu(e)",
                 "float[1,24,9,7] x", "a,b,c,d")  # fmt: skip
    for target, marked in (("x86-64-v4-amx", [True, False]), ("x86-64-v3", [False, False])):
        made = bnncc.compile(wide, target=target, float_products="bf16x3").report
        said = ["--float-products bf16x3" in layer["reason"] for layer in made["layers"]]
        assert said == marked
        changes = any("nothing changes: x86-64-v3 lacks" in w for w in made["warnings"])
        assert changes == (target == "x86-64-v3")
    small = bnncc.compile(
        model("y = Conv(x, point)", "float[1,24,3,3] x", "a,b,c,d"),
        target="x86-64-v4-amx", float_products="bf16x3",
    )  # fmt: skip
    assert any("has 16 rows or pixels" in w for w in small.report["warnings"])
    whole = {**WEIGHTS, "point": np.rint(WEIGHTS["point"] * 5)}
    proto = model("r = Relu(x) y = Conv(r, point)", "float[1,24,9,7] x", "a,b,c,d")
    proto.graph.initializer[list(WEIGHTS).index("point")].CopyFrom(
        onnx.numpy_helper.from_array(whole["point"].astype("f"), "point")
    )
    exact = bnncc.compile(proto, target="x86-64-v4-amx", float_products="bf16x3")
    assert "--float-products" not in exact.report["layers"][0]["reason"]
