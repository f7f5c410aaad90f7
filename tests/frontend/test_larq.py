"""Files of Larq Compute Engine and TensorFlow Lite against Larq Compute Engine's own results."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import bnncc
from bnncc.agreement import verify
from bnncc.cli.main import main
from bnncc.errors import UsageError
from bnncc.frontend.formats import as_onnx
from bnncc.frontend.onnx import load
from bnncc.ir.evaluate import evaluate
from bnncc.options import Uint8Input
from bnncc.recognise.binarize import binarize
from bnncc.recognise.signs import recognise_signs
from bnncc.transform.commute import commute_pads
from bnncc.transform.rows import flatten_rows
from bnncc.transform.simplify import simplify

FOLDER = Path(__file__).parents[1] / "data" / "larq"
OUTPUTS = np.load(FOLDER / "outputs.npz")
NAMES = sorted(p.stem for p in FOLDER.glob("*.tflite"))
COMPILED = ("one_bits", "groups_int8", "words_given", "options", "mnist", "glue", "keras")
"""What is also compiled in quick test runs; the others only evaluate their graph there."""

MODELS = sorted(Path(os.environ.get("BNNCC_MODELS") or os.devnull).glob("*.tflite"))


def arrays(name: str, what: str) -> list[np.ndarray]:
    """Return the inputs ("in") or outputs ("out") of a file, in order."""
    found = []
    while f"{name}/{what}{len(found)}" in OUTPUTS:
        found.append(OUTPUTS[f"{name}/{what}{len(found)}"])
    return found


def compare(made: dict[str, np.ndarray], order: list[str], name: str) -> None:
    """Integers, and so bits, are equal; floats but for rounding."""
    wanted = arrays(name, "out")
    assert len(wanted) == len(order)
    for output, right in zip(order, wanted, strict=True):
        mine = made[output]
        assert (mine.dtype, mine.shape) == (right.dtype, right.shape), output
        if right.dtype.kind == "f":
            top = float(np.abs(right).max())
            assert np.abs(mine - right).max() <= 1e-4 * top, output
        else:
            np.testing.assert_array_equal(mine, right, err_msg=output)


@pytest.mark.parametrize("name", NAMES)
def test_graph(name: str) -> None:
    graph = load(as_onnx(FOLDER / f"{name}.tflite"))
    feeds = dict(zip(graph.inputs, arrays(name, "in"), strict=True))
    compare(evaluate(graph, feeds), graph.outputs, name)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name", [n if n in COMPILED else pytest.param(n, marks=pytest.mark.slow) for n in NAMES]
)
def test_compiled(name: str) -> None:
    artifact = bnncc.compile(FOLDER / f"{name}.tflite")
    names = [t.name for t in artifact.inputs]
    made = artifact.run(dict(zip(names, arrays(name, "in"), strict=True)))
    compare(made, [t.name for t in artifact.outputs], name)


def test_keras_through_onnx() -> None:
    artifact = bnncc.compile(FOLDER / "keras.onnx")
    kinds = [layer["kind"] for layer in artifact.report["layers"]]
    assert (kinds.count("binary"), kinds.count("float")) == (4, 1)
    made = artifact.run({artifact.inputs[0].name: arrays("keras", "in")[0]})
    compare(made, [artifact.outputs[0].name], "keras")


def test_open_batch() -> None:
    artifact = bnncc.compile(FOLDER / "mnist.tflite")
    (given,), (made,) = artifact.inputs, artifact.outputs
    assert isinstance(given.shape[0], str)
    image = arrays("mnist", "in")[0]
    images = np.concatenate([image, -image, image * 0.5])
    together = artifact.run({given.name: images})[made.name]
    one = [artifact.run({given.name: images[k : k + 1]})[made.name] for k in range(3)]
    np.testing.assert_allclose(together, np.concatenate(one), rtol=1e-5, atol=1e-6)
    right = arrays("mnist", "out")[0]
    np.testing.assert_allclose(together[:1], right, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "binary", "floats"), [("options", 7, 2), ("mnist", 4, 1), ("glue", 2, 4)]
)
def test_layers_found(name: str, binary: int, floats: int) -> None:
    graph = load(as_onnx(FOLDER / f"{name}.tflite"))
    simplify(graph)
    recognise_signs(graph)
    flatten_rows(graph)
    commute_pads(graph)
    kinds = [layer.kind for layer in binarize(graph)]
    assert (kinds.count("binary"), kinds.count("float")) == (binary, floats)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, made = str(FOLDER / "one_relu6.tflite"), str(tmp_path / "made.bnncc")
    assert main(["compile", model, "-o", made]) == 0
    assert main(["verify", model, made]) == 0
    assert "PASS" in capsys.readouterr().out
    assert main(["explain", model]) == 0
    assert "binary" in capsys.readouterr().out


def test_image_of_bytes() -> None:
    path = FOLDER / "keras.tflite"
    plain = bnncc.compile(path)
    name = plain.inputs[0].name
    pixels = np.random.default_rng(0).integers(0, 256, plain.inputs[0].shape).astype(np.uint8)
    mean, scale = np.array([120, 110, 100], np.float32), np.array([0.5, 0.25, 1], np.float32)
    spec = Uint8Input(name, tuple(mean.tolist()), tuple(scale.tolist()))
    artifact = bnncc.compile(path, input_uint8=[spec])
    assert artifact.inputs[0].shape == plain.inputs[0].shape
    (made,) = artifact.run({name: pixels}).values()
    (wanted,) = plain.run({name: (pixels - mean) * scale}).values()
    np.testing.assert_allclose(made, wanted, rtol=1e-5)
    assert verify(path, artifact, {name: pixels})["right"]
    with pytest.raises(UsageError, match=r"channels last"):
        bnncc.compile(path, input_uint8=[Uint8Input(name, (0.0,), (1.0,), "nhwc")])


@pytest.mark.skipif(not MODELS, reason="BNNCC_MODELS names no folder with .tflite files")
@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.name)
def test_trained(path: Path) -> None:
    artifact = bnncc.compile(path)
    assert artifact.report["summary"]["binary"]
    assert verify(path, artifact)["right"]
