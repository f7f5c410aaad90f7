"""Networks as Brevitas exports them, both ways and with both of torch's exporters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import bnncc
from bnncc.frontend.onnx import load
from bnncc.ir.evaluate import evaluate

pytestmark = pytest.mark.sampled(2)

FOLDER = Path(__file__).parents[1] / "data" / "brevitas"
FILES = sorted(FOLDER.glob("*.onnx"))
QUICK = {"cnv_1w1a.legacy", "mlp_2w2a.qcdq-legacy", "radio_4w3a", "separable_4w4a", "shifted"}
FLOAT = {"separable_4w4a": 1}
"""Layers that stay in float: the first of a network whose input is not quantized."""


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_file_is_read_as_the_qonnx_executor_does(path: Path) -> None:
    known, graph = np.load(path.with_suffix(".npz")), load(path)
    for x, wanted in zip(known["x"], known["y"], strict=True):
        (found,) = evaluate(graph, {graph.inputs[0]: x}).values()
        np.testing.assert_allclose(found, wanted, 0, 1e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("few_bit", ["auto", pytest.param("bitplanes", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=[] if p.stem in QUICK else pytest.mark.slow) for p in FILES],
    ids=lambda p: p.stem,
)
def test_file_is_compiled_to_few_bits(path: Path, few_bit: str) -> None:
    known = np.load(path.with_suffix(".npz"))
    artifact = bnncc.compile(path, few_bit=few_bit)
    kinds = [layer["kind"] for layer in artifact.manifest["report"]["layers"]]
    floats = FLOAT.get(path.name.split(".")[0], 0)
    assert kinds[:floats] == ["float"] * floats
    assert "float" not in kinds[floats:]
    if "1w1a" in path.name:
        assert kinds[1:] == ["binary"] * 2
    for x, wanted in zip(known["x"], known["y"], strict=True):
        (found,) = artifact.run({artifact.inputs[0].name: x}).values()
        np.testing.assert_allclose(found, wanted, 0, 1e-6 * np.abs(wanted).max())
