"""`kernels[].nodes`: the nodes of the model that each kernel computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import bnncc
from bnncc import report
from bnncc.cli.main import main


def model(
    nodes: list[onnx.NodeProto], outputs: list[str], **constants: np.ndarray
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 8, 6, 6])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )  # fmt: skip
    return onnx.shape_inference.infer_shapes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    )


@pytest.fixture(scope="module")
def network() -> onnx.ModelProto:
    """Return a sign, a binary layer with normalization and pooling behind it, and a float head."""
    make, rng = helper.make_node, np.random.default_rng(0)
    normal = {key: rng.uniform(0.5, 1, 8).astype(np.float32) for key in ("g", "b", "m", "v")}
    return model(
        [
            make("Sign", ["x"], ["s"]),
            make("Conv", ["s", "w"], ["c"], name="conv", pads=[1] * 4),
            make("BatchNormalization", ["c", *normal], ["n"], name="norm"),
            make("Relu", ["n"], ["r"], name="relu"),
            make("MaxPool", ["r"], ["p"], name="pool", kernel_shape=[2, 2], strides=[2, 2]),
            make("Sigmoid", ["p"], ["q"], name="sigmoid"),
            make("Flatten", ["q"], ["f"], name="flatten"),
            make("Gemm", ["f", "u"], ["y"], name="head"),
        ],
        ["y"],
        w=rng.choice([-1.0, 1.0], (8, 8, 3, 3)).astype(np.float32),
        u=rng.standard_normal((72, 3)).astype(np.float32),
        **normal,
    )


def test_fused_operators_of_tvm() -> None:
    """Two equal groups share a kernel, and each call has its own nodes."""
    make = helper.make_node
    proto = model(
        [
            make("Erf", ["x"], ["e"], name="erf"),
            make("Softmax", ["e"], ["s"], name="softmax", axis=1),
            make("ReduceMax", ["s"], ["m"], name="most", keepdims=1),
            make("Div", ["s", "m"], ["d"], name="first/div"),
            make("Concat", ["d", "s"], ["c"], name="first/concat", axis=2),
            make("CumSum", ["c", "axis"], ["q"]),
            make("Slice", ["q", "start", "end", "axes"], ["h"], name="half"),
            make("Softmax", ["h"], ["t"], name="again", axis=1),
            make("Div", ["t", "m"], ["f"], name="second/div"),
            make("Concat", ["f", "t"], ["y"], name="second/concat", axis=2),
        ],
        ["y", "q"],
        axis=np.array(1), start=np.array([0]), end=np.array([6]), axes=np.array([2]),
    )  # fmt: skip
    kernels = bnncc.compile(proto).report["kernels"]
    found = {tuple(kernel["nodes"]): kernel["name"] for kernel in kernels}
    assert sorted(found) == sorted(
        [("erf",), ("softmax",), ("most",), ("first/div", "first/concat"), ("CumSum_q",),
         ("half",), ("again",), ("second/div", "second/concat")]
    )  # fmt: skip
    assert found["first/div", "first/concat"] == found["second/div", "second/concat"]


def test_each_node_is_in_a_kernel(network: onnx.ModelProto) -> None:
    artifact = bnncc.compile(network)
    found = {kernel["nodes"][0]: kernel["nodes"] for kernel in artifact.report["kernels"]}
    assert list(found) == ["Sign_s", "conv", "pool", "sigmoid", "head"]
    assert found["conv"] == ["conv", "norm", "relu"]
    assert found["head"][0] == "head"
    assert {name for names in found.values() for name in names} >= {"pool", "sigmoid"}
    text = report.text(artifact.report)
    rows = [line.split()[0] for line in text.split("\n\n")[0].splitlines()[2:]]
    assert rows == list(found)
    assert max(map(len, text.splitlines())) <= 80


def test_annotations_name_kernels(network: onnx.ModelProto, tmp_path: Path) -> None:
    onnx.save(network, tmp_path / "model.onnx")
    given, made = str(tmp_path / "model.onnx"), tmp_path / "seen.onnx"
    assert main(["explain", given, "--annotate", str(made), "-q"]) == 0
    said = {
        node.op_type: {p.key: p.value for p in node.metadata_props}
        for node in onnx.load(made).graph.node
    }
    assert said["Relu"]["bnncc.kernel"] == said["Conv"]["bnncc.kernel"]
    assert said["Sigmoid"].keys() == {"bnncc.kind", "bnncc.kernel"}
    assert "sigmoid" in said["Sigmoid"]["bnncc.kernel"]


def test_old_artifacts_have_no_nodes(network: onnx.ModelProto) -> None:
    old = bnncc.compile(network).report
    kernels = [{k: v for k, v in kernel.items() if k != "nodes"} for kernel in old["kernels"]]
    text = report.text({**old, "kernels": kernels})
    assert "sigmoid" in text.split("\n\n")[0]
    assert "+" not in text
