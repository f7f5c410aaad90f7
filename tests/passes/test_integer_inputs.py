"""Layers that read an input of 8 bits: found as few-bit layers, and equal to ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper, parser

import bnncc
from bnncc.options import CompileOptions
from tests.physical_networks import passed

pytestmark = pytest.mark.sampled(3)

ROWS, IMAGE = [6, 64], [2, 64, 7, 6]
CONSTANTS: dict[str, Any] = {
    "scale": np.float32(0.125), "zero": np.uint8(77), "below": np.int8(-5), "none": np.int8(0),
    "wide": np.float32(4), "sizes": np.array([2, 384]),
}  # fmt: skip
SPELLINGS = {
    "MatMulInteger": ("uint8", ROWS, "y = MatMulInteger(x, w)"),
    "MatMulInteger, signed": ("int8", ROWS, "y = MatMulInteger(x, w)"),
    "MatMulInteger, zero point": ("uint8", ROWS, "y = MatMulInteger(x, w, zero)"),
    "Cast": ("int8", ROWS, "f = Cast<to=1>(x) g = Cast<to=1>(w) y = MatMul(f, g)"),
    "Cast to double": (
        "uint8", ROWS, "f = Cast<to=11>(x) g = Cast<to=11>(w) y = MatMul(f, g)"
    ),
    "DequantizeLinear": (
        "int8", ROWS,
        "f = DequantizeLinear(x, scale, below) g = DequantizeLinear(w, scale) y = MatMul(f, g)",
    ),
    "moved": (
        "uint8", [32, 2, 12],
        "t = Transpose<perm=[1, 2, 0]>(x) r = Reshape(t, sizes) y = MatMulInteger(r, w)",
    ),
    "ConvInteger": (
        "uint8", IMAGE, "y = ConvInteger<pads=[1, 1, 1, 1]>(x, w, zero)"
    ),
    "QLinearConv": (
        "uint8", IMAGE,
        "y = QLinearConv<pads=[1, 0, 1, 0]>(x, scale, zero, w, scale, none, wide, zero)",
    ),
}  # fmt: skip


def network(kind: str, shape: list[int], text: str, w: np.ndarray) -> onnx.ModelProto:
    head = f'<ir_version: 10, opset_import: ["": 21]> g ({kind}{shape} x) => (y)'
    model = parser.parse_model(f"{head} {{{text}}}")
    for name, value in {**CONSTANTS, "w": w}.items():
        if any(name in node.input for node in model.graph.node):
            model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    return model


def data(kind: str, shape: list[int]) -> np.ndarray:
    """Return all 256 values, if there is room, in any order."""
    size = int(np.prod(shape))
    values = np.random.default_rng(3).permutation(np.arange(size) % 256)
    return values.astype(np.uint8).view(kind).reshape(shape)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_bytes_are_levels(spelling: str) -> None:
    kind, shape, text = SPELLINGS[spelling]
    rng = np.random.default_rng(1)
    size = (20, shape[1], 3, 3) if len(shape) == 4 else (384 if "Reshape" in text else 64, 20)
    model = network(kind, shape, text, rng.integers(-1, 2, size).astype(np.int8))
    made = bnncc.compile(model, target="native")
    (layer,) = made.report["layers"]
    assert (layer["kind"], layer["bits"]) == ("few_bit", [8, 2])
    x = data(kind, shape)
    (wanted,) = ort.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    found = made.run({"x": x})["y"]
    assert found.dtype == wanted.dtype
    tolerance = 1e-6 if spelling == "DequantizeLinear" else 0
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("binary", [False, True])
def test_pixels_of_images_fill_no_words(binary: bool) -> None:
    weight = np.random.default_rng(1).integers(-1, 2, (16, 3, 3, 3)).astype(np.float32)
    if binary:
        weight = np.where(weight < 0, np.float32(-1), np.float32(1))
    text = "f = Cast<to=1>(x) y = Conv(f, w)"
    model = network("uint8", [1, 3, 9, 9], text, weight)
    _, _, (layer,) = passed(model, CompileOptions(target="x86-64-v3").target)
    assert layer.kind == "float"
    assert layer.reason.startswith("its input `f` (from Cast `Cast_f`) has pixels of 3 bytes")
    assert "--first-layer" in layer.remedy
