"""Replace the weights of a network by those of a ``.safetensors`` file, without torch.

The file consists of the length of a header (8 bytes, little-endian), a JSON header with the
position of each tensor, and the bytes of the tensors. It contains no code. An index, a file that
ends in ``.safetensors.index.json``, names the file of each tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from bnncc.errors import ModelError

INDEX = ".safetensors.index.json"
SUFFIXES = (".safetensors", INDEX)

_MOST_HEADER = 100_000_000
_DTYPES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64"},
    **{"I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool"},
}
_FLOATS = ("bfloat16", "float16", "float32", "float64")
"""Float types; each can be widened to those after it."""


@dataclass(frozen=True)
class Stored:
    """Position and type of a stored tensor."""

    path: Path
    start: int
    """Position in the file, in bytes."""
    dtype: str
    """NumPy's name, or ``bfloat16``."""
    shape: tuple[int, ...]

    def read(self) -> np.ndarray:
        """Return the tensor; bfloat16 is converted to float32."""
        kind = np.dtype("uint16" if self.dtype == "bfloat16" else self.dtype)
        with open(self.path, "rb") as file:
            file.seek(self.start)
            data = file.read(math.prod(self.shape) * kind.itemsize)
        value = np.frombuffer(data, kind.newbyteorder("<")).reshape(self.shape)
        if self.dtype == "bfloat16":
            return (value.astype(np.uint32) << 16).view(np.float32)
        return value


def stored(path: Path) -> dict[str, Stored]:
    """Return the tensors of a file, or of all files of an index.

    Raises
    ------
    ModelError
        If a file is damaged or not supported.
    """
    if not path.name.endswith(INDEX):
        return _header(path)
    try:
        names = json.loads(path.read_text())["weight_map"]
        files = {path.parent / Path(name).name for name in names.values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path}: is not an index of safetensors files: {error}") from error
    return {name: at for file in sorted(files) for name, at in _header(file).items()}


def _header(path: Path) -> dict[str, Stored]:
    try:
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            whole = path.stat().st_size
            if not 2 <= size <= min(_MOST_HEADER, whole - 8):
                raise ModelError(f"{path}: is not a safetensors file, or is truncated")
            content = json.loads(file.read(size))
        return {
            name: _entry(path, name, entry, 8 + size, whole)
            for name, entry in content.items()
            if name != "__metadata__"
        }
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path}: the header of this safetensors file is damaged") from error


def _entry(path: Path, name: str, entry: Mapping[str, Any], base: int, whole: int) -> Stored:
    if entry["dtype"] not in _DTYPES:
        raise ModelError(f"{path}: `{name}` is of type {entry['dtype']}, which is not supported")
    dtype = _DTYPES[entry["dtype"]]
    item = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
    shape, (start, end) = tuple(map(int, entry["shape"])), map(int, entry["data_offsets"])
    if min(shape, default=0) < 0 or start < 0 or base + end > whole:
        raise ModelError(f"{path}: `{name}` lies outside of the file")
    if end - start != math.prod(shape) * item:
        raise ModelError(
            f"{path}: `{name}` has {end - start} bytes, its shape {list(shape)} of {dtype} needs "
            f"{math.prod(shape) * item}"
        )
    return Stored(path, base + start, dtype, shape)


def with_weights(model: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    """Return a model with the weights of a file, matched by name.

    Names may lack leading parts (``layers.0.weight`` for ``model.layers.0.weight``). Ternary
    weights that Hugging Face's BitNet packs four to a byte are unpacked unless the model's weights
    are packed too.

    Parameters
    ----------
    model : onnx.ModelProto
        With weights of the same shapes and any values; not modified.
    path : Path
        A ``.safetensors`` file, or the index of several.

    Raises
    ------
    ModelError
        If a weight of rank 2 or more is missing, or has another shape or type.
    """
    found = stored(path)
    made = onnx.ModelProto()
    made.CopyFrom(model)
    names = [t.name for t in made.graph.initializer]
    places = {name: key for name in names if (key := _match(name, found, path)) is not None}
    for tensor in made.graph.initializer:
        key = places.get(tensor.name)
        if key is None:
            if len(tensor.dims) > 1 and "." in tensor.name:
                raise ModelError(
                    f"{path}: holds no tensor for weight `{tensor.name}` of the model",
                    hint="export the model from the class that wrote the file",
                )
            continue
        packed = f"{key}_scale" in places.values()
        value = _fitted(found[key], tensor, packed, f"{path}: `{key}`")
        tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
    if not places:
        raise ModelError(
            f"{path}: none of its tensors is called as a weight of the model",
            hint=f"the file has `{next(iter(found), '')}`, the model `{next(iter(names), '')}`",
        )
    return made


def _match(name: str, found: Mapping[str, Stored], path: Path) -> str | None:
    """Return the name of the tensor in a file that is a given weight of a model."""
    if name in found:
        return name
    alike = [k for k in found if name.endswith(f".{k}") or k.endswith(f".{name}")]
    if len(alike) > 1:
        longest = max(map(len, alike))
        alike = [k for k in alike if len(k) == longest]
    if len(alike) > 1:
        raise ModelError(f"{path}: both `{alike[0]}` and `{alike[1]}` may be `{name}`")
    return alike[0] if alike and "." in name else None


def _fitted(at: Stored, tensor: onnx.TensorProto, packed: bool, where: str) -> np.ndarray:
    wanted = tuple(tensor.dims)
    kind = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).name
    unpack = at.dtype == "uint8" and kind in _FLOATS and wanted[1:] == at.shape[1:]
    if unpack and wanted and -(-wanted[0] // 4) == at.shape[0]:
        if not packed:
            raise ModelError(
                f"{where} is packed, and the model does not read its scale",
                hint="export the model from the class with packed weights",
            )
        return unpacked(at.read(), wanted[0]).astype(kind)
    widened = at.dtype in _FLOATS and kind in _FLOATS[_FLOATS.index(at.dtype) :]
    if at.shape != wanted or not (at.dtype == kind or widened):
        raise ModelError(f"{where} is {at.dtype}{list(at.shape)}, expected {kind}{list(wanted)}")
    return at.read().astype(kind)


def unpacked(packed: np.ndarray, rows: int) -> np.ndarray:
    """Unpack ternary weights that are packed four to a byte, two bits each.

    Parameters
    ----------
    packed : ndarray of uint8, shape (ceil(rows / 4), ...)
        Bits ``2 * k`` and up of row r are row ``k * len(packed) + r``, plus 1.
    rows : int
        Rows of the result.

    Returns
    -------
    ndarray of int8
        Weights of -1, 0 and 1.

    Examples
    --------
    >>> unpacked(np.array([[0b10_01_00_10]], np.uint8), 3).ravel().tolist()
    [1, -1, 0]
    """
    parts = [(packed >> shift & 3).astype(np.int8) - 1 for shift in (0, 2, 4, 6)]
    return np.concatenate(parts)[:rows]
