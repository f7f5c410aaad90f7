"""Damaged and unsupported TensorFlow Lite files end in one clear line."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from bnncc.errors import BnnccError, ModelError, UnsupportedOp
from bnncc.frontend.flatbuffer import flex_map
from bnncc.frontend.formats import as_onnx
from bnncc.frontend.onnx import load

FOLDER = Path(__file__).parents[1] / "data" / "larq"
FILES = {p.stem: p.read_bytes() for p in FOLDER.glob("*.tflite")}


def root_at(data: bytes, offset: int) -> bytes:
    return struct.pack("<I", offset) + data[4:]


def swapped(name: str, old: bytes, new: bytes) -> bytes:
    assert FILES[name].count(old) >= 1
    return FILES[name].replace(old, new)


def vector_of(data: bytes, slot: int, count: int) -> bytes:
    """Write a length into a vector of the model's root table."""
    root = struct.unpack_from("<I", data)[0]
    fields = root - struct.unpack_from("<i", data, root)[0]
    at = root + struct.unpack_from("<H", data, fields + 4 + 2 * slot)[0]
    at += struct.unpack_from("<I", data, at)[0]
    return data[:at] + struct.pack("<I", count) + data[at + 4 :]


ONE = FILES["one_float"]
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "no_identifier": (ONE[:4] + b"XXXX" + ONE[8:], "not a TensorFlow Lite file"),
    "html": (b"<!DOCTYPE html>" * 10, "not a TensorFlow Lite file"),
    "head_only": (ONE[:8], "damaged or truncated"),
    "half": (ONE[: len(ONE) // 2], "damaged or truncated"),
    "root_outside": (root_at(ONE, 0x7FFFFFFF), "damaged or truncated"),
    "root_negative": (root_at(ONE, 0xFFFFFFFF), "damaged or truncated"),
    "root_on_itself": (root_at(ONE, 0), "damaged or truncated"),
    "no_subgraphs": (vector_of(ONE, 2, 0), "0 subgraphs"),
    "many_subgraphs": (vector_of(ONE, 2, 0xFFFFFFFF), "damaged or truncated"),
    "many_buffers": (vector_of(ONE, 4, 0x3FFFFFFF), "damaged or truncated"),
    "no_buffers": (vector_of(ONE, 4, 1), "buffer"),
    "no_codes": (vector_of(ONE, 1, 0), "operator code 0 of 0"),
    "unknown_operator": (swapped("one_float", b"LceBconv2d", b"LceBconv9d"), "LceBconv9d `result`"),
    "unknown_option": (swapped("one_float", b"pad_values", b"pad_valuez"), "option `pad_values`"),
    "no_option": (swapped("pool_same", b"stride_width", b"stride_wid\0h"), "stride_wid"),
    "tail_bits": (
        FILES["one_channel"].replace(b"\x01\0\0\0\0\0\0\0\x01", b"\x01\0\0\x80\0\0\0\0\x01", 1),
        "bits set beyond its 1 channels",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_refused(name: str, tmp_path: Path) -> None:
    content, said = HOSTILE[name]
    path = tmp_path / f"{name}.tflite"
    path.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        load(as_onnx(path))
    message = str(caught.value)
    assert said in message
    assert path.name in message
    assert "\n" not in message
    assert len(message) < 500


@pytest.mark.parametrize("name", ["one_float", "pool_same", "mnist"])
def test_truncated_anywhere(name: str, tmp_path: Path) -> None:
    data = FILES[name]
    path = tmp_path / "cut.tflite"
    for size in range(0, len(data), max(1, len(data) // 40)):
        path.write_bytes(data[:size])
        with pytest.raises(BnnccError):
            load(as_onnx(path))


@pytest.mark.parametrize(
    ("name", "said", "hint"),
    [
        ("int8_add", "ADD `sum`: computes in int8", "convert without int8"),
        ("reverse", "1 node has an operator that is not supported: REVERSE_V2 `sum`", "replace it"),
    ],
)
def test_not_supported(name: str, said: str, hint: str) -> None:
    with pytest.raises(UnsupportedOp) as caught:
        as_onnx(FOLDER / "refused" / f"{name}.tflite")
    assert said in str(caught.value)
    assert hint in str(caught.value.hint)


@pytest.mark.parametrize(
    "data",
    [b"", b"\0", b"\x01\x04\x01", b"\xff\x27\x01", b"\0" * 40, b"\x24\x01", b"\x05\x24\x01" * 3],
)
def test_options_that_are_no_map(data: bytes) -> None:
    with pytest.raises(ModelError, match=r"options|damaged"):
        flex_map(data)
