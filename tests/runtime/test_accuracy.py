"""`bnncc verify --labels`: accuracy on labelled examples, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

import bnncc
from bnncc.cli import main as cli
from bnncc.errors import InputError, UsageError
from bnncc.runtime.accuracy import accuracy, read_examples
from bnncc.runtime.manifest import TensorInfo
from tests.cli.test_cli import fails
from tests.devices import DIGITS
from tests.tiny import expected, tiny

MODEL = DIGITS / "digits.onnx"
IMAGES = DIGITS / "test_images.npz"


@pytest.fixture(scope="module")
def batch_of_7(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the digits for batches that 450 images are no multiple of."""
    path = tmp_path_factory.mktemp("digits") / "digits.bnncc"
    shapes = {"images": (7, 1, 8, 8)}
    bnncc.compile(MODEL, input_shapes=shapes, threads=1, measure=False).save(path)
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def reference_count() -> int:
    with np.load(IMAGES) as data:
        model = ReferenceEvaluator(onnx.load(MODEL))
        (logits,) = model.run(None, {"images": data["images"]})
        return int((np.argmax(logits, axis=1) == data["labels"]).sum())


def test_verb(batch_of_7: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    correct = reference_count()
    assert 0 < correct < 450
    with np.load(IMAGES) as data:
        np.save("images.npy", data["images"])
        np.save("labels.npy", data["labels"].reshape(-1, 1))
    verb = ["verify", str(MODEL), str(batch_of_7), "--input", "images.npy"]
    least = correct / 450
    assert cli.main([*verb, "--labels", "labels.npy", "--min-accuracy", repr(least)]) == 0
    out, _ = capsys.readouterr()
    assert out.endswith(
        f"\nPASS\naccuracy  {least:.2%} ({correct} of 450 examples), minimum {least:.2%}: PASS\n"
    )
    over = repr(100 * (correct + 1) / 450) + "%"
    command = [*verb, "--labels", str(IMAGES), "--min-accuracy", over, "--json"]
    assert cli.main(command) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["verdict"] == "pass"
    assert not result["passed"]
    assert not result["right"]
    assert result["accuracy"] == {
        "examples": 450,
        "correct": correct,
        "accuracy": least,
        "minimum": pytest.approx((correct + 1) / 450),
        "passed": False,
    }


def test_from_python(batch_of_7: Path) -> None:
    with np.load(IMAGES) as data:
        inputs, labels = {"images": data["images"][:9]}, data["labels"][:9]
    assert bnncc.verify(MODEL, batch_of_7, inputs, labels=labels)["accuracy"]["examples"] == 9
    with pytest.raises(UsageError, match="labels need inputs"):
        bnncc.verify(MODEL, batch_of_7, labels=labels)
    with pytest.raises(UsageError, match="need labels"):
        bnncc.verify(MODEL, batch_of_7, min_accuracy=0.5)
    with pytest.raises(InputError, match="labels: dtype is float64, expected integers"):
        bnncc.verify(MODEL, batch_of_7, inputs, labels=labels / 2)
    with pytest.raises(InputError, match="inputs are of type ndarray, expected arrays by name"):
        bnncc.verify(MODEL, batch_of_7, inputs["images"], labels=labels)


@pytest.mark.parametrize("count", [1, 63, 64, 65])
def test_dynamic_batches_and_a_named_output(count: int) -> None:
    rng = np.random.default_rng(count)
    x, y = (rng.standard_normal((count, 8)).astype(np.float32) for _ in range(2))
    labels = rng.integers(0, 8, count)
    found = accuracy(tiny(), {"x/in:0": x, "y": y}, labels, scores="sum", minimum=0.0)
    assert found["correct"] == (expected(x, y)["sum"].argmax(axis=1) == labels).sum()
    assert found["passed"]


def test_nan_is_never_right() -> None:
    x = np.full((2, 8), np.nan, np.float32)
    found = accuracy(tiny(), {"x/in:0": x, "y": x}, np.array([0, 0]), scores="sum")
    assert found["correct"] == 0


class Fixed:
    """A network that answers with given arrays."""

    def __init__(self, made: np.ndarray) -> None:
        self.inputs = (TensorInfo("x", ("n", 1), "float32"),)
        self.outputs = (TensorInfo("y", ("n",), "float32"),)
        self.made = made

    def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"y": self.made}


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (np.zeros((2, 3, 1, 2)), "has shape [2, 3, 1, 2], expected a score per example and class"),
        (np.zeros(3), "has shape [3], expected a score per example and class"),
        (np.zeros(()), "has shape [], expected a score per example and class"),
        (np.zeros((2, 1)), "has one score per example, expected one for each class"),
        (np.zeros((2, 2)), "label 2 is not one of the 2 classes"),
    ],
)
def test_outputs_without_scores(made: np.ndarray, said: str) -> None:
    inputs: dict[str, Any] = {"x": np.zeros((2, 1), np.float32)}
    with pytest.raises(InputError) as caught:
        accuracy(Fixed(made), inputs, np.array([0, 2]))  # type: ignore[arg-type]
    assert said in str(caught.value)


def test_class_numbers_as_outputs() -> None:
    inputs: dict[str, Any] = {"x": np.zeros((2, 1), np.float32)}
    for shape in ((2,), (2, 1), (2, 1, 1, 1)):
        made = np.array([5, 2]).reshape(shape)
        found = accuracy(Fixed(made), inputs, np.array([0, 2]))  # type: ignore[arg-type]
        assert found["correct"] == 1


def test_what_is_refused(
    batch_of_7: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny().save("tiny.bnncc")
    np.save("short.npy", np.zeros(3, np.int64))
    np.save("float.npy", np.zeros(450))
    np.save("one_hot.npy", np.zeros((450, 10), np.int64))
    np.save("eleven.npy", np.full(450, 10))
    np.save("none.npy", np.zeros(0, np.int64))
    np.savez("other.npz", y=np.zeros(450, np.int64))
    Path("text").write_text("0\n1\n")
    verb = ["verify", MODEL, batch_of_7]
    given = [*verb, "--input", IMAGES, "--labels"]
    assert "3 labels for 450 examples" in fails(capsys, 1, *given, "short.npy")
    assert "0 labels for 450 examples" in fails(capsys, 1, *given, "none.npy")
    said = fails(capsys, 1, *given, "float.npy")
    assert "float.npy: `labels`: dtype is float64, expected integers" in said
    assert "shape is [450, 10], expected one class number" in fails(
        capsys, 1, *given, "one_hot.npy"
    )
    assert "label 10 is not one of the 10 classes" in fails(capsys, 1, *given, "eleven.npy")
    assert "other.npz: has no array `labels`" in fails(capsys, 1, *given, "other.npz")
    assert "text: " in fails(capsys, 1, *given, "text")
    assert "missing: cannot be read" in fails(capsys, 2, *given, "missing")
    assert "--labels needs the labelled examples" in fails(capsys, 2, *verb, "--labels", IMAGES)
    said = fails(capsys, 2, *verb, "--min-accuracy", "0.5")
    assert "--min-accuracy and --scores need --labels" in said
    said = fails(capsys, 2, *given, IMAGES, "--scores", "prob")
    assert "has no output `prob`, expected the one with the scores: logits" in said
    for wrong in ("1.5", "101%", "-1", "nan", "much"):
        said = fails(capsys, 2, *given, IMAGES, f"--min-accuracy={wrong}")
        assert f"`{wrong}` is not a number from 0 to 1 or a percentage" in said


def test_several_outputs_need_a_name(folder: Path) -> None:
    zeros = np.zeros((2, 8), np.float32)
    inputs = {"x/in:0": zeros, "y": zeros}
    with pytest.raises(UsageError, match=r"has several outputs, expected .*: product, sum"):
        accuracy(tiny(), inputs, np.array([0, 1]))
    np.savez("examples.npz", labels=[0, 1], **inputs)
    read, labels = read_examples(tiny(), "examples.npz", "examples.npz")
    assert read.keys() == inputs.keys()
    assert labels.tolist() == [0, 1]
