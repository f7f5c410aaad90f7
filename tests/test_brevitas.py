"""Networks as Brevitas exports them, both ways and with both of torch's exporters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import bnncc
from bnncc.evaluate import evaluate
from bnncc.frontend.onnx import load

FOLDER = Path(__file__).parent / "data" / "brevitas"
FILES = sorted(FOLDER.glob("*.onnx"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_file_agrees_with_the_qonnx_executor(path: Path) -> None:
    known = np.load(path.with_suffix(".npz"))
    graph = load(path)
    artifact = bnncc.compile(path)
    for x, wanted in zip(known["x"], known["y"], strict=True):
        feeds = {graph.inputs[0]: x}
        for found in (evaluate(graph, feeds), artifact.run(feeds)):
            top = float(np.abs(wanted).max())
            np.testing.assert_allclose(found[graph.outputs[0]], wanted, 0, 1e-6 * top)


def test_layers_of_one_bit_are_binary() -> None:
    for name in ("cnv_1w1a", "cnv_1w1a.legacy", "cnv_1w1a_padded"):
        layers = bnncc.compile(FOLDER / f"{name}.onnx").manifest["report"]["layers"]
        assert [layer["kind"] for layer in layers[1:]] == ["binary"] * 2
