"""Weights of .safetensors files in place of a model's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from bnncc.cli import main as cli
from bnncc.errors import ModelError
from bnncc.frontend.safetensors import INDEX, stored, unpacked, with_weights
from tests.collection import oracle
from tests.collection.builder import Net

NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "uint8": "U8", "int64": "I64"}
RNG = np.random.default_rng(5)
TERNARY = RNG.integers(-1, 2, (10, 12)).astype(np.int8)
HEAD = RNG.standard_normal((10, 3)).astype(ml_dtypes.bfloat16)
SCALE = np.array([0.37], np.float32)


def packed(weights: np.ndarray) -> np.ndarray:
    """Pack row by row, element by element."""
    rows = -(-len(weights) // 4)
    made = np.full((rows, *weights.shape[1:]), 0b01010101, np.uint8)  # zeros
    for r, row in enumerate(weights):
        part, at = divmod(r, rows)
        made[at] = (made[at] & ~np.uint8(3 << 2 * part)) | (row + 1).astype(np.uint8) << 2 * part
    return made


def write(path: Path, tensors: Mapping[str, np.ndarray]) -> Path:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, value in tensors.items():
        end = len(data) + value.nbytes
        header[name] = {
            "dtype": NAMES[value.dtype.name], "shape": list(value.shape),
            "data_offsets": [len(data), end],
        }  # fmt: skip
        data += value.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def network(scaled: bool = True) -> onnx.ModelProto:
    """Two layers, with other weights than the file's."""
    net = Net(seed=1)
    x = net.input("x", [2, 12])
    weight = net.const(np.zeros((10, 12)), name="model.layers.0.proj.weight")
    y = net.op("Gemm", net.sign(x), weight, transB=1)
    if scaled:
        y = net.op("Mul", y, net.const(np.ones(1), name="model.layers.0.proj.weight_scale"))
    net.output(net.op("MatMul", y, net.const(np.ones((10, 3)), name="model.head.weight")))
    return net.model()


FILE = {
    "layers.0.proj.weight": packed(TERNARY),
    "layers.0.proj.weight_scale": SCALE,
    "model.head.weight": HEAD,
    "unused.weight": np.zeros(3, np.float32),
}


def test_rows_are_unpacked() -> None:
    for rows in (1, 3, 4, 10, 12):
        weights = RNG.integers(-1, 2, (rows, 5)).astype(np.int8)
        np.testing.assert_array_equal(unpacked(packed(weights), rows), weights)


def check(path: Path) -> None:
    made = with_weights(network(), path)
    values = {t.name: numpy_helper.to_array(t) for t in made.graph.initializer}
    np.testing.assert_array_equal(values["model.layers.0.proj.weight"], TERNARY)
    np.testing.assert_array_equal(values["model.head.weight"], HEAD.astype(np.float32))
    x = RNG.standard_normal((2, 12)).astype(np.float32)
    want = (np.where(x >= 0, 1, -1) @ TERNARY.T * SCALE) @ HEAD.astype(np.float32)
    (output,) = (o.name for o in made.graph.output)
    got = oracle.evaluate(made, {"x": x}).values[output].data
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_weights_are_replaced_by_name(tmp_path: Path) -> None:
    check(write(tmp_path / "model.safetensors", FILE))


def test_an_index_names_several_files(tmp_path: Path) -> None:
    parts = {}
    for k, (name, value) in enumerate(FILE.items()):
        parts[name] = write(tmp_path / f"part{k}.safetensors", {name: value}).name
    index = tmp_path / f"model{INDEX}"
    index.write_text(json.dumps({"weight_map": parts}))
    check(index)
    index.write_text("[]")
    with pytest.raises(ModelError, match="is not an index"):
        stored(index)


def test_compile_takes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(network(), tmp_path / "model.onnx")
    weights = write(tmp_path / "model.safetensors", FILE)
    model, out = str(tmp_path / "model.onnx"), str(tmp_path / "model.bnncc")
    assert cli.main(["compile", model, "--params", str(weights), "-o", out]) == 0
    assert cli.main(["verify", model, out, "--params", str(weights)]) == 0
    assert cli.main(["verify", model, out]) == 1  # other weights
    capsys.readouterr()


def without(name: str) -> dict[str, np.ndarray]:
    return {k: v for k, v in FILE.items() if k != name}


@pytest.mark.parametrize(
    ("tensors", "scaled", "said"),
    [
        (without("model.head.weight"), True, "holds no tensor for weight `model.head.weight`"),
        (without("layers.0.proj.weight_scale"), True, "does not read its scale"),
        (FILE, False, "does not read its scale"),
        ({**FILE, "model.head.weight": HEAD[1:]}, True, r"bfloat16\[9, 3\], expected"),
        ({**FILE, "model.head.weight": HEAD.view(np.uint16).astype(np.int64)}, True, "is int64"),
        ({"other.weight": HEAD}, True, "holds no tensor"),
    ],
)
def test_what_does_not_fit_is_said(
    tensors: dict[str, np.ndarray], scaled: bool, said: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "model.safetensors", tensors)
    with pytest.raises(ModelError, match=said):
        with_weights(network(scaled), path)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    good = write(tmp_path / "good.safetensors", FILE).read_bytes()
    size = 8 + int.from_bytes(good[:8], "little")
    bad = tmp_path / "bad.safetensors"
    header = good[8:size]
    for content in (
        b"", good[:7], good[:50], good[: size + 3], b"\xff" * 8 + good[8:],
        good[:8] + b"[" * len(header) + good[size:],
        good[:8] + header.replace(b"BF16", b"BF99") + good[size:],
        good[:8] + header.replace(b"[10, 3]", b"[10, 4]") + good[size:],
        good[:8] + header.replace(b"[10, 3]", b"[10,-3]") + good[size:],
        good[:8] + header.replace(b'"dtype"', b'"dtipe"') + good[size:],
    ):  # fmt: skip
        bad.write_bytes(content)
        with pytest.raises(ModelError, match=r"bad\.safetensors"):
            stored(bad)
    with pytest.raises(ModelError, match="cannot be read"):
        stored(tmp_path / "none.safetensors")
