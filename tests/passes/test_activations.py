"""``--activations int8``: which layers are quantized, and what they compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import bnncc
from bnncc import agreement as verify
from bnncc import report
from bnncc.cli.main import main
from bnncc.errors import UsageError
from bnncc.frontend.onnx import load
from bnncc.ir.evaluate import evaluate
from bnncc.options import CompileOptions
from bnncc.runtime import container
from bnncc.targets.catalog import resolve
from bnncc.transform.activations import quantize_rows
from bnncc.transform.relaxations import quantized_layers
from tests.kernel_harness import HERE

pytestmark = pytest.mark.sampled(3)

RNG = np.random.default_rng(7)
OPTIONS = CompileOptions(target="native", activations="int8")
K, N = 40, 24


def levels(least: int, most: int, shape: tuple[int, ...] = (K, N)) -> np.ndarray:
    scale = RNG.uniform(0.01, 0.02, shape[-1]).astype("f")
    return RNG.integers(least, most + 1, shape).astype("f") * scale


WEIGHTS: dict[str, np.ndarray] = {
    "signs": np.where(RNG.integers(0, 2, (K, N)), 0.3, -0.3),
    "ternary": levels(-1, 1),
    "int4": levels(-8, 7),
    "int8": levels(-127, 127),
    "real": RNG.standard_normal((K, N)),
    "rows": levels(-8, 7).T,
    "back": levels(-8, 7, (N, K)),
    "bias": RNG.standard_normal(N),
    "image": levels(-1, 1, (3, 3, 4, N)).transpose(3, 2, 0, 1),
}
KINDS = ("signs", "ternary", "int4", "int8")


def model(body: str, given: str = f"float[T,{K}] x", out: str = "a,b") -> onnx.ModelProto:
    header = '<ir_version: 9, opset_import: ["" : 18]>'
    proto = onnx.parser.parse_model(f"{header} net ({given}) => (float[{out}] y) {{{body}}}")
    for name, value in WEIGHTS.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value.astype("f"), name))
    return proto


def rows(*shape: int) -> np.ndarray:
    """Return data whose quotients are not near a tie, with rows of zeros and constant rows."""
    whole = RNG.integers(-126, 127, (*shape, K)) + RNG.uniform(-0.4, 0.4, (*shape, K))
    flat = whole.reshape(-1, K)
    flat[:, 5] = 127 * RNG.choice([-1, 1], len(flat))  # the greatest magnitude
    flat *= RNG.uniform(1e-3, 1e3, (len(flat), 1))
    if len(flat) > 2:
        flat[1], flat[2] = 0, -3
    return flat.reshape(*shape, K).astype("f")


def quantized(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the integers and scales of rows."""
    scale = np.float32(127) / np.maximum(np.abs(x).max(-1, keepdims=True), np.float32(1e-30))
    return np.rint(x * scale), scale


def product(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    whole, scale = quantized(x)
    return whole.astype(np.float64) @ weight.astype("f").astype(np.float64) / scale


@pytest.mark.parametrize(
    ("body", "found", "said"),
    [
        *((f"y = MatMul(x, {kind})", ["y"], "") for kind in KINDS),
        ("y = Gemm<transB=1, alpha=0.5>(x, rows, bias)", ["y"], ""),
        ("a = MatMul(x, ternary) y = Add(a, bias)", ["a"], ""),
        ("y = MatMul(x, real)", [], "not integers of at most 8 bits"),
        ("v = Transpose(x) w = MatMul(v, x) y = MatMul(x, w)", [], "computed at run time"),
        ("v = Transpose(x) y = Gemm<transA=1>(v, ternary)", [], "not float32 rows"),
        ("s = Sign(x) y = MatMul(s, signs)", [], ""),  # is binary without it
    ],
)
def test_which_layers_are_quantized(body: str, found: list[str], said: str) -> None:
    relaxed = quantized_layers(load(model(body)), OPTIONS, resolve("native"))
    assert relaxed.layers == found
    assert said in "".join(relaxed.kept.values())
    assert bool(said) == bool(relaxed.kept)


def test_nothing_is_quantized_by_default() -> None:
    graph, target = load(model("y = MatMul(x, ternary)")), resolve("native")
    assert quantized_layers(graph, CompileOptions(target="native"), target).layers == []


def test_before_and_after() -> None:
    """Layers of the same data share its quantizer; a bias is added after the scale."""
    body = (
        "r = Relu(x) a = MatMul(r, ternary) b = Gemm<transB=1, alpha=0.5, beta=3.0>(r, rows, bias) "
        "y = Add(a, b)"
    )
    graph = load(model(body))
    quantize_rows(graph, ["a", "b"])
    assert [n.op for n in graph.nodes] == [
        "Relu", "Abs", "ReduceMax", "Max", "Div", "Mul", "Round", "Clip", "MatMul", "Div",
        "Gemm", "Div", "Add", "Add",
    ]  # fmt: skip
    x = rows(6)
    made = evaluate(graph, {"x": x})["y"]
    data = np.maximum(x, 0)
    wanted = product(data, WEIGHTS["ternary"]) + 3 * WEIGHTS["bias"]
    wanted = wanted + 0.5 * product(data, WEIGHTS["rows"].T)
    np.testing.assert_allclose(made, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", [*HERE[-1:], "x86-64-v2", "native"])
def test_artifacts_compute_it(target: str, kind: str) -> None:
    """Against NumPy, in float64, from integers that it rounds itself."""
    if target not in (*HERE, "native"):
        pytest.skip("this machine cannot run the target")
    proto = model(f"a = MatMul(x, {kind}) y = Add(a, bias)")
    artifact = bnncc.compile(proto, target=target, activations="int8")
    (layer,) = artifact.report["layers"]
    weight_bits = {"signs": 1, "ternary": 2, "int4": 4, "int8": 8}[kind]
    assert (layer["kind"], layer["bits"]) == ("few_bit", [8, weight_bits])
    for count in (1, 3, 17):
        x = rows(count)
        wanted = product(x, WEIGHTS[kind]) + WEIGHTS["bias"]
        sizes = np.abs(wanted).max(-1, keepdims=True)
        made = artifact.run({"x": x})["y"]
        assert (np.abs(made - wanted) <= 1e-5 * sizes).all()
        if count > 1:
            np.testing.assert_array_equal(made[1], WEIGHTS["bias"].astype("f"))


def test_tokens_of_a_batch() -> None:
    """Each token has its own scale, whatever the batch."""
    proto = model("y = MatMul(x, ternary)", f"float[B,T,{K}] x", "a,b,c")
    artifact = bnncc.compile(proto, target="x86-64-v2", activations="int8")
    x = rows(2, 5)
    wanted = product(x, WEIGHTS["ternary"])
    sizes = np.abs(wanted).max(-1, keepdims=True)
    assert (np.abs(artifact.run({"x": x})["y"] - wanted) <= 1e-5 * sizes).all()


def test_verify_compares_with_the_quantized_network() -> None:
    body = "a = MatMul(x, ternary) r = Relu(a) b = MatMul(r, back) "
    proto = model(f"{body} c = MatMul(b, real) y = Add(c, bias)")
    artifact = bnncc.compile(proto, target="x86-64-v2", activations="int8")
    result = verify.verify(proto, artifact)
    assert result["right"], verify.text(result)
    assert 1e-4 < result["deviation"][0]["relative"] < 0.2
    quantized = [x for x in artifact.report["layers"] if "--activations int8" in x["reason"]]
    assert [layer["name"] for layer in quantized] == ["MatMul_a", "MatMul_b"]
    assert "quantized by rows (--activations int8)" in report.text(artifact.report)
    assert any("`MatMul_c` stays in float32: " in w for w in artifact.report["warnings"])
    plain = bnncc.compile(proto, target="x86-64-v2")
    plain.manifest["semantics"] = {**plain.manifest["semantics"], "activations": "int8"}
    assert not verify.verify(proto, plain)["right"]


def test_other_options_go_with_it() -> None:
    """What is not quantized is rounded, if that is asked for."""
    proto = model("a = MatMul(x, ternary) t = Transpose(real) y = MatMul(a, t)")
    artifact = bnncc.compile(
        proto, target="x86-64-v2", activations="int8", float_precision="bfloat16"
    )
    assert [x["bits"] for x in artifact.report["layers"]] == [[8, 2], [16, 16]]
    result = verify.verify(proto, artifact)
    assert result["right"], verify.text(result)


def test_what_is_said_where_nothing_changes() -> None:
    twice = model("a = MatMul(x, real) t = Transpose(real) y = MatMul(a, t)")
    said = bnncc.compile(twice, target="x86-64-v2", activations="int8").report["warnings"]
    assert any("`MatMul_a` and 1 more stay in float32: weights" in line for line in said)
    proto = model("s = Sign(x) y = MatMul(s, signs)")
    said = bnncc.compile(proto, target="x86-64-v2", activations="int8").report["warnings"]
    assert "--activations int8: no float dense layer is left" in said
    with pytest.raises(UsageError, match="needs a CPU target"):
        bnncc.compile(proto, target="cuda", activations="int8")
    unknown: Any = "int4"
    with pytest.raises(UsageError, match="activations is `int4`, not one of float32, int8"):
        bnncc.compile(proto, activations=unknown)


def test_reports_name_the_option() -> None:
    for kind in ("signs", "int4"):
        for body in (f"y = MatMul(x, {kind})", f"r = Tanh(x) y = MatMul(r, {kind})"):
            proto = model(body)
            (layer,) = bnncc.compile(proto, target="x86-64-v2").report["layers"]
            assert layer["remedy"].count("--activations int8 quantizes the data at run time") == 1
    image = model("r = Tanh(x) y = Conv(r, image)", "float[1,4,5,5] x", "a,b,c,d")
    (layer,) = bnncc.compile(image, target="x86-64-v2").report["layers"]
    assert "--activations" not in layer["remedy"]  # it is for dense layers


def test_artifacts_of_before_the_option(tmp_path: Path) -> None:
    """An artifact that does not record the option is read as if it had its default."""
    proto = model("y = MatMul(x, ternary)")
    bnncc.compile(proto, target="x86-64-v2").save(path := tmp_path / "old.bnncc")
    content, members = container.read_file(path)
    del content["semantics"]["activations"]
    path.write_bytes(b"".join(container.file_chunks(container.sealed(content, members), members)))
    assert verify.verify(proto, bnncc.Artifact.load(path))["right"]


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(model("y = MatMul(x, ternary)"), path := tmp_path / "net.onnx")
    args = ["compile", str(path), "-o", str(tmp_path / "net.bnncc"), "--target", "x86-64-v2"]
    assert main([*args, "--activations", "int8"]) == 0
    capsys.readouterr()
    assert main(["verify", str(path), str(tmp_path / "net.bnncc")]) == 0
    assert main(["explain", str(tmp_path / "net.bnncc")]) == 0
    assert "quantized by rows (--activations int8)" in " ".join(capsys.readouterr().out.split())
