"""The digits network through every verb of the command line: run this before each commit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from bnncc.cli import main as cli
from bnncc.runtime.artifact import Artifact

DIGITS = Path(__file__).resolve().parents[2] / "examples/digits"
MODEL = DIGITS / "digits.onnx"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("digits") / "digits.bnncc"
    # What is measured on this machine may differ between two compilations.
    assert cli.main(["compile", str(MODEL), "--no-measure", "-o", str(path)]) == 0
    return path


def test_compile(
    compiled: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["compile", str(MODEL), "--no-measure", "--report", "report.json"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("digits.native.bnncc: ")
    assert "layers: 3 binary, 0 few-bit, 2 float, no tuning records used, " in line
    assert sorted(p.name for p in tmp_path.iterdir()) == ["digits.native.bnncc", "report.json"]
    again = Path("digits.native.bnncc")
    assert again.read_bytes() == compiled.read_bytes()
    report = json.loads(Path("report.json").read_text())
    assert report == Artifact.load(again).report
    sizes = report["bytes"]
    assert sizes.pop("total") == again.stat().st_size == sum(sizes.values())
    assert cli.main(["compile", str(MODEL), "-q"]) == 0
    assert capsys.readouterr() == ("", "")


def test_run_agrees_with_the_labels(compiled: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.npz"
    images = DIGITS / "test_images.npz"
    arguments = ["run", str(compiled), "--input", str(images), "--output", str(out)]
    assert cli.main(arguments) == 0
    with np.load(out) as got, np.load(images) as given:
        assert (got["logits"].argmax(1) == given["labels"]).mean() >= 0.95


def test_selfcheck(compiled: Path) -> None:
    artifact = Artifact.load(compiled)
    given, wanted = artifact.selfcheck_arrays()
    for name, value in artifact.run(given).items():
        np.testing.assert_allclose(value, wanted[name], rtol=1e-4, atol=1e-4)


def test_explain_model_and_artifact_alike(
    compiled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for path in (MODEL, compiled):
        assert cli.main(["explain", str(path)]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_verify(compiled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", str(MODEL), str(compiled)]) == 0
    assert "PASS" in capsys.readouterr().out
    assert cli.main(["verify", str(MODEL), str(compiled), "--seed", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["passed"]
    assert len(result["layers"]) >= 5


def test_verify_finds_another_network(
    compiled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    proto = onnx.load(MODEL)
    tensor = next(t for t in proto.graph.initializer if len(t.dims) == 4 and t.dims[1] >= 32)
    weight = numpy_helper.to_array(tensor).copy()
    weight[3] *= -1
    tensor.CopyFrom(numpy_helper.from_array(weight, tensor.name))
    onnx.save(proto, tmp_path / "other.onnx")
    assert cli.main(["verify", str(tmp_path / "other.onnx"), str(compiled)]) == 1
    assert "FAIL" in capsys.readouterr().out
