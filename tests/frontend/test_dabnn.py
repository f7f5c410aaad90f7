"""``--assume dabnn``: signs that daBNN's models imply, written out where the user asks for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import bnncc
from bnncc.agreement import verify
from bnncc.cli import main as cli
from bnncc.errors import UsageError
from bnncc.recognise.dabnn import assume_dabnn

Array = np.ndarray[Any, Any]
_RNG = np.random.default_rng(0)
WEIGHTS = {
    "w0": _RNG.standard_normal((12, 3, 3, 3)).astype(np.float32),
    "w1": np.where(_RNG.integers(0, 2, (12, 12, 3, 3)), 1, -1).astype(np.float32),
    "w2": np.where(_RNG.integers(0, 2, (12, 12, 3, 3)), 1, -1).astype(np.float32),
    "w3": np.float32([0.5, -2] * 6).reshape(12, 1, 1, 1),
    "scale": _RNG.standard_normal(12).astype(np.float32),
    "shift": _RNG.standard_normal(12).astype(np.float32),
    "mean": _RNG.standard_normal(12).astype(np.float32),
    "var": _RNG.uniform(0.5, 2, 12).astype(np.float32),
}


def _model(opset: int = 13, second: dict[str, Any] | None = None) -> onnx.ModelProto:
    """Return a block of Bi-Real-Net as daBNN's recipe exports it: no sign anywhere."""
    weights = dict(WEIGHTS)
    around = [0, 0, 1, 1, 0, 0, 1, 1]
    if opset < 11:
        pad = helper.make_node("Pad", ["a"], ["p"], pads=around, value=-1.0)
    else:
        weights.update(pads=np.array(around), fill=np.float32(-1))
        pad = helper.make_node("Pad", ["a", "pads", "fill"], ["p"])
    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["a"], "stem", pads=[1, 1, 1, 1]),
        pad,
        helper.make_node("Conv", ["p", "w1"], ["c"], "first"),
        helper.make_node("BatchNormalization", ["c", "scale", "shift", "mean", "var"], ["d"]),
        helper.make_node("Add", ["d", "a"], ["e"]),
        helper.make_node("Conv", ["e", "w2"], ["f"], **(second or {"pads": [1, 0, 1, 0]})),
        helper.make_node("Conv", ["f", "w3"], ["y"], "taps", group=12),
    ]
    graph = helper.make_graph(
        nodes, "block",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(v, k) for k, v in weights.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def _conv(x: Array, w: Array) -> Array:
    windows = np.lib.stride_tricks.sliding_window_view(x, w.shape[2:], axis=(2, 3))
    return np.einsum("nchwkl,ockl->nohw", windows, w.astype(np.float64), optimize=True)


def _padded(x: Array, rows: int, columns: int, value: float) -> Array:
    around = ((0, 0), (0, 0), (rows, rows), (columns, columns))
    return np.pad(x, around, constant_values=value)


def _dabnn(x: Array, columns: int = 0) -> Array:
    """Return what daBNN computes: bits are x > 0, and the outside of an image is -1."""
    v = {k: w.reshape(-1, 1, 1) for k, w in WEIGHTS.items() if w.ndim == 1}
    a = _conv(_padded(x, 1, 1, 0), WEIGHTS["w0"])
    c = _conv(_padded(np.where(a > 0, 1.0, -1.0), 1, 1, -1), WEIGHTS["w1"])
    e = (c - v["mean"]) / np.sqrt(v["var"] + 1e-5) * v["scale"] + v["shift"] + a
    f = _conv(_padded(np.where(e > 0, 1.0, -1.0), 1, columns, -1), WEIGHTS["w2"])
    return f * WEIGHTS["w3"].reshape(-1, 1, 1)


@pytest.mark.parametrize("opset", [10, 13])
@pytest.mark.parametrize("second", [None, {"auto_pad": "SAME_UPPER"}])
def test_implied_signs_are_taken_when_asked_for(opset: int, second: dict[str, Any] | None) -> None:
    model = _model(opset, second)
    x = np.random.default_rng(1).standard_normal((1, 3, 8, 8)).astype(np.float32)
    artifact = bnncc.compile(model, assume="dabnn")
    wanted = _dabnn(x, columns=0 if second is None else 1)
    np.testing.assert_allclose(artifact.run({"x": x})["y"], wanted, rtol=1e-4, atol=1e-4)
    kinds = {x["name"]: x["kind"] for x in artifact.report["layers"]}
    assert kinds == {"stem": "float", "first": "binary", "Conv_f": "binary", "taps": "float"}
    assert verify(model, artifact)["right"]
    assert "2 of its convolutions" in artifact.report["warnings"][0]


def test_nothing_is_assumed_unasked() -> None:
    artifact = bnncc.compile(_model())
    assert {x["kind"] for x in artifact.report["layers"]} == {"float"}
    assert {x["assumed"] for x in artifact.report["layers"]} == {""}


def test_signs_that_are_there_give_way_to_dabnns() -> None:
    """A sign in the graph is 0 at 0, and its zero padding 0; daBNN has -1 for both."""
    model = _model()
    model.graph.node.insert(5, helper.make_node("Sign", ["e"], ["s"]))
    model.graph.node[6].input[0] = "s"
    x = np.random.default_rng(1).standard_normal((1, 3, 8, 8)).astype(np.float32)
    made = bnncc.compile(model, assume="dabnn").run({"x": x})["y"]
    np.testing.assert_allclose(made, _dabnn(x), rtol=1e-4, atol=1e-4)


def test_assuming_twice_changes_nothing() -> None:
    once, said = assume_dabnn(_model())
    twice, again = assume_dabnn(once)
    assert said.keys() == again.keys()
    assert twice.graph == once.graph


def test_explain_says_what_was_assumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "block.onnx"
    onnx.save(_model(), path)
    assert cli.main(["explain", str(path), "--assume", "dabnn"]) == 0
    text = capsys.readouterr().out
    assert "binary: first\n  takes the sign of its data (--assume dabnn)\n" in text
    assert "binary: Conv_f\n  takes the sign of its data, padding by -1 (--assume dabnn)\n" in text


def test_a_model_without_binary_weights_is_refused() -> None:
    model = _model()
    del model.graph.node[1:]
    model.graph.output[0].name = "a"
    with pytest.raises(UsageError, match="has no convolution with binary weights"):
        bnncc.compile(model, assume="dabnn")
