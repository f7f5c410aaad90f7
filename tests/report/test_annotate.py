"""`explain --annotate`: the model is the same but for metadata in its nodes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from bnncc.cli.main import main
from tests.tiny import tiny


def model(ir_version: int, named: bool) -> onnx.ModelProto:
    """Return sign, a binary layer and a float one, with metadata of its own."""
    rng = np.random.default_rng(0)
    weights = {
        "signs": rng.choice([-1.0, 1.0], (8, 4, 3, 3)).astype(np.float32),
        "floats": rng.standard_normal((5, 8, 1, 1)).astype(np.float32),
    }
    nodes = [
        helper.make_node("Sign", ["x"], ["s"], name="sign" if named else ""),
        helper.make_node(
            "Conv", ["s", "signs"], ["b"], name="first" if named else "", pads=[1] * 4
        ),
        helper.make_node("Conv", ["b", "floats"], ["y"], name="second" if named else ""),
    ]
    nodes[1].metadata_props.add(key="author", value="somebody")
    nodes[1].metadata_props.add(key="bnncc.kind", value="of an earlier run")
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4, 6, 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 5, 6, 6])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )  # fmt: skip
    opset = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opset, ir_version=ir_version)


def outputs(path: Path) -> np.ndarray:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    x = np.random.default_rng(1).standard_normal((1, 4, 6, 6), dtype=np.float32)
    result: np.ndarray = session.run(None, {"x": x})[0]
    return result


@pytest.mark.parametrize(("ir_version", "named"), [(8, True), (10, False)])
def test_same_model_with_verdicts(
    tmp_path: Path, ir_version: int, named: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    path, made = tmp_path / "model.onnx", tmp_path / "seen.onnx"
    onnx.save(model(ir_version, named), path)
    assert main(["explain", str(path), "--annotate", str(made)]) == 0
    assert capsys.readouterr() == ("", f"{made}: {made.stat().st_size:,} bytes\n")
    found = onnx.load(made)
    onnx.checker.check_model(found, full_check=True)
    sign, first, second = ({p.key: p.value for p in n.metadata_props} for n in found.graph.node)
    assert sign["bnncc.kind"] == "other"
    assert (first["bnncc.kind"], first["bnncc.bits"], first["author"]) == (
        "binary",
        "1x1",
        "somebody",
    )
    assert first["bnncc.multiply_adds"] == str(8 * 4 * 9 * 36)
    assert second["bnncc.kind"] == "float"
    assert second["bnncc.reason"]
    assert second["bnncc.remedy"]
    before = model(ir_version, named)
    for one in (before, found):
        for node in one.graph.node:
            del node.metadata_props[:]
    assert found == before
    np.testing.assert_array_equal(outputs(made), outputs(path))


def test_weights_in_files_of_their_own(tmp_path: Path) -> None:
    home, away = tmp_path / "home", tmp_path / "away"
    home.mkdir()
    away.mkdir()
    path = home / "model.onnx"
    onnx.save(
        model(8, True), path, save_as_external_data=True, location="weights", size_threshold=0
    )
    for made in (home / "seen.onnx", away / "seen.onnx"):
        assert main(["explain", str(path), "--annotate", str(made)]) == 0
        np.testing.assert_array_equal(outputs(made), outputs(path))
    assert (home / "seen.onnx").stat().st_size < (away / "seen.onnx").stat().st_size
    assert [file.name for file in away.iterdir()] == ["seen.onnx"]


def test_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    artifact, path = tmp_path / "a.bnncc", tmp_path / "model.onnx"
    tiny().save(artifact)
    assert main(["explain", str(artifact), "--annotate", str(path)]) == 2
    assert "is an artifact, and --annotate needs the model" in capsys.readouterr().err
    assert not path.exists()
    onnx.save(model(8, True), path)
    before = path.read_bytes()
    assert main(["explain", str(path), "--annotate", str(path)]) == 2
    assert "would be overwritten" in capsys.readouterr().err
    page = str(tmp_path / "out")
    assert main(["explain", str(path), "--annotate", page, "--html", page]) == 2
    assert "out: cannot be both page and model" in capsys.readouterr().err
    assert path.read_bytes() == before
