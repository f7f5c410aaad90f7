"""Verification finds what is wrong, and only that: tried on artifacts wrong on purpose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from bnncc import agreement as verify
from bnncc.driver import compile_model
from bnncc.errors import InputError, VerificationError
from bnncc.frontend.onnx import load
from bnncc.ir.evaluate import evaluate
from bnncc.ir.magnitude import magnitudes
from bnncc.ir.ties import TIE
from bnncc.options import CompileOptions, Uint8Input
from bnncc.verification import recorded, reference
from tests.tiny import BASELINE

Arrays = dict[str, np.ndarray]


def model(
    nodes: list[onnx.NodeProto], shape: list[int], outputs: list[str], **constants: Any
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(o, onnx.TensorProto.FLOAT, None) for o in outputs],
        [numpy_helper.from_array(np.asarray(v, np.float32), k) for k, v in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


def network() -> onnx.ModelProto:
    """Return a small binary network in both spellings of sign."""
    rng = np.random.default_rng(0)
    node = helper.make_node
    nodes = [
        node("Conv", ["x", "w0"], ["c0"], name="stem", pads=[1, 1, 1, 1]),
        node("BatchNormalization", ["c0", "s", "b", "m", "v"], ["n0"]),
        node("Sign", ["n0"], ["b0"]),
        node("Conv", ["b0", "w1"], ["c1"], name="first"),
        node("BatchNormalization", ["c1", "s", "b", "m", "v"], ["n1"]),
        node("Add", ["n1", "offset"], ["a1"]),
        node("GreaterOrEqual", ["a1", "zero"], ["g1"]),
        node("Where", ["g1", "one", "minus"], ["b1"]),
        node("Conv", ["b1", "w2"], ["c2"], name="second"),
        node("GlobalAveragePool", ["c2"], ["p"]),
        node("Flatten", ["p"], ["f"]),
        node("Gemm", ["f", "w3"], ["y"], name="head"),
    ]
    return model(
        nodes,
        [1, 3, 8, 8],
        ["y"],
        w0=rng.standard_normal((16, 3, 3, 3)),
        w1=np.sign(rng.standard_normal((16, 16, 3, 3))),
        w2=np.sign(rng.standard_normal((16, 16, 3, 3))),
        w3=rng.standard_normal((16, 5)),
        s=rng.standard_normal(16),
        b=rng.standard_normal(16),
        m=rng.standard_normal(16),
        v=rng.uniform(0.5, 2, 16),
        offset=0.1,
        zero=0.0,
        one=1.0,
        minus=-1.0,
    )


Change = Callable[[str, np.ndarray], np.ndarray]


def unchanged(name: str, value: np.ndarray) -> np.ndarray:
    return value


def changed(proto: onnx.ModelProto, feeds: Mapping[str, np.ndarray], change: Change) -> Arrays:
    """Return a model's outputs where `change` puts other tensors in the place of its own."""
    graph, values = load(proto), dict(feeds)
    for node in graph.nodes:
        names = [o for o in node.outputs if o]
        got = evaluate(graph, values, keep=names)
        values.update({n: change(n, got[n]) for n in names})
    return {n: values.get(n, graph.constants.get(n)) for n in graph.outputs}


def verified(
    monkeypatch: pytest.MonkeyPatch,
    proto: onnx.ModelProto,
    change: Change = unchanged,
    inputs: Arrays | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Verify an artifact that computes what `change` makes of it."""
    artifact = compile_model(
        proto, CompileOptions(target=BASELINE, threads=1, confirm=False, **options)
    )
    if change is not unchanged:
        monkeypatch.setattr(artifact, "run", lambda arrays: changed(proto, arrays, change))
        monkeypatch.setattr(
            verify, "evaluated", lambda proto, feeds, first: changed(proto, feeds, change)
        )
    result = verify.verify(proto, artifact, inputs)
    last = verify.text(result).splitlines()[-1]
    assert last.startswith({"pass": "PASS", "fail": "FAIL"}.get(result["verdict"][:4], "UNDECIDED"))
    return result


def test_right(monkeypatch: pytest.MonkeyPatch) -> None:
    result = verified(monkeypatch, network())
    assert result["passed"]
    assert result["verdict"] == "pass"
    assert result["reference"].startswith("onnxruntime")
    assert [x["name"] for x in result["layers"]] == ["n0", "b0", "a1", "b1", "f", "y"]
    assert {"stem", "first", "second", "head"} <= {x["layer"] for x in result["layers"]}
    assert result["outputs"][0]["relative"] < 1e-5


def test_a_wrong_bit_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def flip(name: str, value: np.ndarray) -> np.ndarray:
        if name == "b1":
            value = value.copy()
            value.flat[7] *= -1
        return value

    result = verified(monkeypatch, network(), flip)
    assert result["verdict"] == "fail"
    assert "FAIL" in verify.text(result)
    assert [layer["name"] for layer in result["layers"] if not layer["passed"]] == ["b1"]


def test_a_wrong_layer_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def scale(name: str, value: np.ndarray) -> np.ndarray:
        return value * np.float32(1.001) if name == "c2" else value

    result = verified(monkeypatch, network(), scale)
    assert result["verdict"] == "fail"
    assert [x["layer"] for x in result["layers"] if not x["passed"]] == ["second"]


def tied(integers: bool = False) -> onnx.ModelProto:
    """Return a network whose first sign sees 0.1 + 0.2 - 0.3, or 1 + 2 - 3."""
    node = helper.make_node
    weight = np.array([1, 2, -3], np.float32) * (1 if integers else np.float32(0.1))
    nodes = [
        node("Conv", ["x", "w"], ["c"], name="one"),
        node("Sign" if integers else "GreaterOrEqual", ["c", "zero"][: 2 - integers], ["g"]),
        *([] if integers else [node("Where", ["g", "plus", "minus"], ["s"])]),
        node("Conv", ["g" if integers else "s", "k"], ["y"], name="two"),
    ]
    constants = {"zero": 0.0, "plus": 1.0, "minus": -1.0}
    if integers:
        constants = {}
    return model(
        nodes,
        [1, 3, 1, 1],
        ["y"],
        w=weight.reshape(1, 3, 1, 1),
        k=np.ones((2, 1, 1, 1)),
        **constants,
    )


def test_a_tie_may_fall_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    x = {"x": np.ones((1, 3, 1, 1), np.float32)}
    verdicts = set()
    for sign in (1, -1):

        def decide(name: str, value: np.ndarray, sign: int = sign) -> np.ndarray:
            return np.full_like(value, sign) if name == "s" else value

        result = verified(monkeypatch, tied(), decide, x)
        assert result["passed"], verify.text(result)
        (tie,) = result["ties"]
        assert (tie["tensor"], tie["count"], tie["index"]) == ("c", 1, [0, 0, 0, 0])
        assert abs(tie["value"]) <= tie["bound"] < 1e-5
        assert "\ntie  c: 1 value, such as " in verify.text(result)
        assert "\na tie is a value within rounding error of a threshold: " in verify.text(result)
        verdicts.add(result["verdict"])
    assert verdicts == {"pass", "pass except for ties"}


def test_a_value_further_from_zero_is_no_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    x = {"x": np.array([1, 1, 1.001], np.float32).reshape(1, 3, 1, 1)}

    def wrong(name: str, value: np.ndarray) -> np.ndarray:
        return -value if name == "s" else value

    result = verified(monkeypatch, tied(), wrong, x)
    assert result["verdict"] == "fail"
    assert not result["ties"]


def test_an_exact_zero_is_no_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    x = {"x": np.ones((1, 3, 1, 1), np.float32)}
    assert verified(monkeypatch, tied(integers=True), inputs=x)["verdict"] == "pass"

    def squeezed(name: str, value: np.ndarray) -> np.ndarray:
        return np.ones_like(value) if name == "g" else value

    result = verified(monkeypatch, tied(integers=True), squeezed, x)
    assert result["verdict"] == "fail"
    result = verified(monkeypatch, tied(integers=True), squeezed, x, sign_zero="+1")
    assert result["passed"], verify.text(result)


def test_without_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference.importlib.util, "find_spec", lambda name: None)
    result = verified(monkeypatch, network())
    assert result["passed"]
    assert result["reference"].startswith("onnx.reference")


def test_other_model() -> None:
    artifact = compile_model(network(), CompileOptions(threads=1, confirm=False))
    with pytest.raises(VerificationError, match="different names"):
        verify.verify(model([helper.make_node("Relu", ["x"], ["z"])], [1], ["z"]), artifact)


def test_uint8_images_are_seen_as_the_network_sees_them() -> None:
    spec = Uint8Input("x", (1.0, 2.0, 3.0), (0.5,), "nhwc")
    image = np.arange(12, dtype=np.uint8).reshape(1, 2, 2, 3)
    seen = verify._pixels(spec, image)
    assert seen.shape == (1, 3, 2, 2)
    assert seen[0, 2, 1, 0] == (8 - 3) * 0.5


def test_magnitudes() -> None:
    node = helper.make_node
    proto = model(
        [
            node("MatMul", ["x", "w"], ["exact"]),
            node("Mul", ["exact", "tenth"], ["scaled"]),
            node("Add", ["scaled", "third"], ["sum"]),
            node("Relu", ["sum"], ["kept"]),
            node("MatMul", ["x", "v"], ["rounded"]),
        ],
        [1, 3],
        ["exact", "scaled", "sum", "kept", "rounded"],
        w=[[1.0], [-1.0], [1.0]],
        v=[[0.1], [0.2], [-0.3]],
        tenth=0.1,
        third=1 / 3,
    )
    x = np.array([[1, -1, 1]], np.float32)
    got = {k: float(v[1].squeeze()) for k, v in magnitudes(load(proto), {"x": x}).items()}
    wanted = {"exact": 0, "scaled": 0.3, "sum": 0.3 + 0.3 + 1 / 3, "rounded": 0.6}
    wanted["kept"] = wanted["sum"]
    assert got == pytest.approx(wanted, rel=1e-5)


def test_bound_covers_any_order_of_summation() -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((300, 4)).astype(np.float32)
    proto = model([helper.make_node("MatMul", ["x", "w"], ["y"])], [1, 300], ["y"], w=weight)
    graph = load(proto)
    for _ in range(20):
        x = rng.standard_normal((1, 300)).astype(np.float32)
        value, size = magnitudes(graph, {"x": x})["y"]
        order = rng.permutation(300)
        other = np.zeros(4, np.float32)
        for k in order:
            other += x[0, k] * weight[k]
        assert (np.abs(other - value[0]) <= TIE * size[0]).all()


def test_taps() -> None:
    assert reference.tap_points(network()) == ["n0", "b0", "a1", "b1", "f"]
    # a model without nodes that depend on the input has none
    assert reference.tap_points(SimpleNamespace(graph=onnx.GraphProto())) == []


def decided_behind_an_output(shift: float) -> onnx.ModelProto:
    """Return a network whose second sign looks at an output, `shift` off many values of it."""
    rng, node = np.random.default_rng(3), helper.make_node
    weight = np.sign(rng.standard_normal((8, 16, 1, 1))) * np.float32(0.1)
    nodes = [
        node("Where", ["g", "one", "minus"], ["s"]),
        node("Conv", ["s", "w"], ["y"], name="first"),
        node("GreaterOrEqual", ["y", "limit"], ["h"]),
        node("Where", ["h", "one", "minus"], ["t"]),
        node("Conv", ["t", "k"], ["z"], name="second"),
    ]
    return model(
        [node("GreaterOrEqual", ["x", "zero"], ["g"]), *nodes], [1, 16, 8, 8], ["y", "z"],
        w=weight, k=np.sign(rng.standard_normal((4, 8, 3, 3))), one=1.0, minus=-1.0, zero=0.0,
        limit=np.float32(0.2) + np.float32(shift),
    )  # fmt: skip


def test_a_sign_behind_an_output_has_its_ties() -> None:
    """A float runtime's sums of 0.1 fall to either side of 0.2, which is no error."""
    proto = decided_behind_an_output(0)
    artifact = compile_model(proto, CompileOptions(threads=1))
    result = verify.verify(proto, artifact)
    assert result["verdict"] in ("pass", "pass except for ties"), verify.text(result)
    assert {x["name"] for x in result["layers"]} >= {"y", "z"}
    assert any(tie["tensor"] == "y" for tie in result["ties"])
    far = decided_behind_an_output(0.05)
    result = verify.verify(far, compile_model(far, CompileOptions(threads=1)))
    assert result["verdict"] == "pass"
    assert not result["ties"]


def test_every_kernel_is_run_alone() -> None:
    proto = network()
    artifact = compile_model(proto, CompileOptions(threads=1))
    result = verify.verify(proto, artifact)
    assert [k["name"] for k in result["kernels"]] == [k["name"] for k in artifact.report["kernels"]]
    assert all(k["passed"] and not k["wrong"] for k in result["kernels"])
    inputs = {"x": np.random.default_rng(1).standard_normal((1, 3, 8, 8)).astype(np.float32)}
    assert verify.verify(proto, artifact, inputs)["passed"]


def test_options_are_those_of_the_artifact() -> None:
    """Other options make other kernels: the manifest must say which."""
    proto = network()
    for options in (
        {"few_bit": "bitplanes", "tuned": False},
        {"float_conv": "direct", "threads": 2},
    ):
        artifact = compile_model(proto, CompileOptions(**{"threads": 1, "seed": 7, **options}))
        again = recorded.options_of(artifact)
        for name, value in {**options, "seed": 7}.items():
            assert getattr(again, name) == value
        result = verify.verify(proto, artifact)
        assert result["passed"], verify.text(result)
        assert result["kernels"]


def test_an_artifact_of_another_model() -> None:
    proto = network()
    artifact = compile_model(proto, CompileOptions(threads=1))
    other = network()
    other.graph.node[1].attribute.append(helper.make_attribute("epsilon", 0.5))
    result = verify.verify(other, artifact)
    assert result["verdict"] == "fail"
    weights = network()
    stored = next(t for t in weights.graph.initializer if t.name == "w2")
    stored.CopyFrom(numpy_helper.from_array(-numpy_helper.to_array(stored), "w2"))
    result = verify.verify(weights, artifact)
    assert result["verdict"] == "fail"
    assert "lib.so lacks" in result["note"]


def test_a_symbolic_batch() -> None:
    proto = network()
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "N"
    artifact = compile_model(proto, CompileOptions(threads=1))
    x = np.random.default_rng(0).standard_normal((3, 3, 8, 8)).astype(np.float32)
    result = verify.verify(proto, artifact, {"x": x})
    assert result["passed"], verify.text(result)
    assert len(result["kernels"]) == len(artifact.report["kernels"])


def test_outputs_that_no_node_computes() -> None:
    """Outputs may be weights, constants, and inputs as they are."""
    w = np.sign(np.random.default_rng(0).standard_normal((4, 8, 3, 3))).astype(np.float32)
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 13]> g (float[1, 8, 5, 5] x) => '
        "(float[1, 4, 3, 3] y, float[4, 8, 3, 3] w, float[2] c, float[1, 8, 5, 5] x) "
        "{ s = Sign(x) y = Conv(s, w) c = Constant <value_floats = [1.5, -2.0]> () }"
    )
    model.graph.initializer.append(numpy_helper.from_array(w, "w"))
    artifact = compile_model(model, CompileOptions(threads=1))
    result = verify.verify(model, artifact)
    assert result["verdict"] == "pass"
    assert [o["name"] for o in result["outputs"]] == ["y", "w", "c", "x"]


@pytest.mark.filterwarnings("error")
def test_infinities_are_right_without_a_warning() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 13]> g (float[4, 4] x) => (float[4, 4] y) '
        "{ y = Add(x, mask) }"
    )
    mask = np.triu(np.full((4, 4), -np.inf, np.float32), 1)
    model.graph.initializer.append(numpy_helper.from_array(mask, "mask"))
    result = verify.verify(model, compile_model(model, CompileOptions(threads=1)))
    assert result["verdict"] == "pass", verify.text(result)
    assert np.isinf(mask).sum() == 6


def test_a_part_that_is_cut_at_one_of_the_outputs_of_a_node() -> None:
    proto = model(
        [
            helper.make_node("Mul", ["x", "third"], ["a"]),
            helper.make_node("Split", ["a"], ["b", "c"], axis=1, num_outputs=2),
            helper.make_node("Sign", ["b"], ["d"]),
            helper.make_node("Add", ["d", "c"], ["y"]),
        ],
        [1, 4], ["y"], third=1 / 3,
    )  # fmt: skip
    proto.opset_import[0].version = 18
    result = verify.verify(proto, compile_model(proto, CompileOptions(threads=1)))
    assert result["verdict"] == "pass", verify.text(result)
    assert [x["name"] for x in result["layers"]] == ["b", "y"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_sums_that_cancel_are_off_by_their_rounding(scale: float) -> None:
    """The mean of what was normalized is 0 but for rounding: no part of it is a measure."""
    rng = np.random.default_rng(1)
    proto = model(
        [
            helper.make_node("Sign", ["x"], ["s"]),
            helper.make_node("Conv", ["s", "w"], ["c"]),
            helper.make_node("InstanceNormalization", ["c", "g", "b"], ["n"]),
            helper.make_node("GlobalAveragePool", ["n"], ["y"]),
        ],
        [1, 16, 9, 9], ["y"],
        w=np.sign(rng.standard_normal((8, 16, 3, 3))) * scale, g=np.ones(8), b=np.zeros(8),
    )  # fmt: skip
    artifact = compile_model(proto, CompileOptions(threads=1))
    result = verify.verify(proto, artifact)
    assert result["passed"], verify.text(result)
    x = np.asarray(rng.standard_normal((1, 16, 9, 9)), np.float32)
    made = artifact.run({"x": x})["y"]
    assert np.abs(made).max() < 1e-5
    moved = {"x": x}
    artifact.run = lambda arrays: {"y": made + np.float32(1e-4)}  # type: ignore[method-assign]
    assert verify.verify(proto, artifact, moved)["verdict"] == "fail"


@pytest.mark.parametrize(("operator", "kind"), [("ArgMax", "int64"), ("Cast", "int32")])
def test_a_decision_that_ends_a_part_has_ties_in_it(operator: str, kind: str) -> None:
    """A float runtime's sums of 0.1 differ where ours are equal, which is no error of either."""
    rng = np.random.default_rng(0)
    attributes = {"axis": 1} if operator == "ArgMax" else {"to": onnx.TensorProto.INT32}
    proto = model(
        [
            helper.make_node("Greater", ["x", "zero"], ["g"]),
            helper.make_node("Where", ["g", "one", "minus"], ["s"]),
            helper.make_node("MatMul", ["s", "w"], ["m"]),
            helper.make_node("Mul", ["m", "ten"], ["t"]),
            helper.make_node(operator, ["t"], ["y"], **attributes),
        ],
        [64, 21], ["y"], zero=0.0, one=1.0, minus=-1.0, ten=10.0,
        w=np.sign(rng.standard_normal((21, 10))) * 0.1,
    )  # fmt: skip
    code = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    proto.graph.output[0].type.tensor_type.elem_type = code
    result = verify.verify(proto, compile_model(proto, CompileOptions(threads=1)))
    assert result["verdict"] == "pass except for ties", verify.text(result)


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "int32"])
def test_inputs_without_dimensions(kind: str) -> None:
    dtype = getattr(onnx.TensorProto, kind.upper() if kind != "float32" else "FLOAT")
    inputs = [
        helper.make_tensor_value_info(name, dtype, shape)
        for name, shape in (("x", [1, 3]), ("s", []))
    ]
    outputs = [helper.make_tensor_value_info("y", dtype, [1, 3])]
    graph = helper.make_graph([helper.make_node("Mul", ["x", "s"], ["y"])], "g", inputs, outputs)
    scaled = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    assert verify.verify(scaled, compile_model(scaled, CompileOptions()))["verdict"] == "pass"


def test_inputs_that_are_not_finite_are_no_verdict() -> None:
    nodes = [helper.make_node("Sign", ["x"], ["s"]), helper.make_node("MatMul", ["s", "w"], ["y"])]
    net = model(nodes, [2, 4], ["y"], w=np.ones((4, 3)))
    x = np.ones((2, 4), np.float32)
    x[0, 0] = np.nan
    with pytest.raises(InputError, match="input `x` contains NaN or infinity"):
        verify.verify(net, compile_model(net, CompileOptions()), {"x": x})


@pytest.mark.filterwarnings("error::RuntimeWarning", "ignore:outputs overflow")
def test_sums_that_overflow_are_not_compared() -> None:
    """Their infinities depend on the order; numbers beside them are compared."""
    rng = np.random.default_rng(0)
    node = helper.make_node
    nodes = [node("MatMul", ["x", "w"], ["m"]), node("Relu", ["m"], ["r"]),
             node("MatMul", ["r", "v"], ["y"])]  # fmt: skip
    weights = {
        "w": rng.standard_normal((64, 64)) * 3e37, "v": rng.standard_normal((64, 10)),
    }  # fmt: skip
    net, artifacts = model(nodes, [4, 64], ["y"], **weights), []
    for factor in (1, 2):
        other = {
            "w": weights["w"],
            "v": np.append(weights["v"][:, :9], weights["v"][:, 9:] * factor, 1),
        }
        artifacts.append(
            compile_model(model(nodes, [4, 64], ["y"], **other), CompileOptions(threads=1))
        )
    small = np.full((4, 64), 1e-2, np.float32)
    small[1] = rng.standard_normal(64)
    for rows, overflows in ((small, True), (np.full((4, 64), 1e-2, np.float32), False)):
        right, wrong = (verify.verify(net, artifact, {"x": rows}) for artifact in artifacts)
        assert right["verdict"] == "pass", verify.text(right)
        assert ("sums overflow" in right["note"]) == overflows
        assert any(layer["overflows"] for layer in right["layers"]) == overflows
        assert wrong["verdict"] == "fail"


def parsed(body: str, ir: int = 9) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: {ir}, opset_import: ["" : 17]> g {body}')


def test_onnx_runtime_is_no_judge_of_what_the_specification_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Up to 1.31 it takes the sign of the low half of an int64; so does what stands for it here."""

    def low_half(_: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"y": np.sign(feeds["x"].astype(np.int32)).astype(np.int64)}

    monkeypatch.setattr(reference, "_onnxruntime", low_half)
    proto = parsed("(int64[4] x) => (int64[4] y) { y = Sign(x) }")
    artifact = compile_model(proto, CompileOptions(threads=1))
    x = np.array([2**31, 2**32 - 5, 3, -3_000_000_000])
    result = verify.verify(proto, artifact, {"x": x})
    assert result["passed"]
    assert "onnxruntime" in result["note"]
    assert "differs from the specification at `y`" in result["note"]
    assert artifact.run({"x": x})["y"].tolist() == [1, 1, 1, -1]


def test_two_runtimes_that_agree_are_not_overruled(monkeypatch: pytest.MonkeyPatch) -> None:
    proto = parsed("(float[2, 4] x) => (float[2, 4] y) { y = Sign(x) }")
    artifact = compile_model(proto, CompileOptions(threads=1))
    run = type(artifact).run
    monkeypatch.setattr(
        type(artifact), "run", lambda a, feeds: {k: -v for k, v in run(a, feeds).items()}
    )
    assert not verify.verify(proto, artifact)["passed"]


def test_onnx_runtime_judges_files_of_newer_versions() -> None:
    proto = parsed("(float[2, 4] x) => (float[2, 4] y) { y = Tanh(x) }", ir=onnx.IR_VERSION)
    result = verify.verify(proto, compile_model(proto, CompileOptions(threads=1)))
    assert result["reference"].startswith("onnxruntime")
    assert result["passed"]
