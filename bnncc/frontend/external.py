"""Read stored tensors, including external data in files next to the model."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from bnncc.errors import ModelError
from bnncc.frontend import checks
from bnncc.ir.graph import elements


def to_array(tensor: onnx.TensorProto, folder: Path | None, where: str) -> np.ndarray[Any, Any]:
    """Return the value of a stored tensor, after checks.

    Parameters
    ----------
    tensor : onnx.TensorProto
        Inline or external.
    folder : Path or None
        The model's folder, which external files must not leave; None if the model is not a file.
    where : str
        Description of the tensor for messages.

    Returns
    -------
    ndarray
        Read-only if it shares memory with the model.

    Raises
    ------
    ModelError
        If the tensor is damaged, or its file is missing, too short or outside the folder.
    """
    checks.check_tensor(tensor, where)
    if tensor.data_location != TensorProto.EXTERNAL:
        return np.asarray(numpy_helper.to_array(tensor))
    if folder is None:
        raise ModelError(f"{where}: has external data, which needs a model file to lie beside")
    raw = _read(tensor, folder, where)
    inline = onnx.TensorProto(data_type=tensor.data_type, dims=tensor.dims, raw_data=raw)
    return np.asarray(numpy_helper.to_array(inline))


def locations(path: Path) -> set[str]:
    """Return the names of the external files that an ONNX file refers to, as written there."""
    # An entry is stored as key (1) "location" and value (2), so the model need not be parsed.
    data = path.read_bytes()
    found = set()
    for match in re.finditer(rb"\x0a\x08location\x12([\x80-\xff]?[\x00-\x7f])", data):
        low, *high = match[1]
        length = (low & 127) | (high[0] << 7 if high else 0)
        name = data[match.end() : match.end() + length].decode(errors="replace")
        found.add(name.replace("\\", "/").replace("\0", ""))
    return found


def _read(tensor: onnx.TensorProto, folder: Path, where: str) -> bytes:
    entries = {e.key: e.value for e in tensor.external_data}
    location = entries.get("location", "")
    try:
        offset = int(entries.get("offset", 0))
        length = int(entries.get("length", -1))
    except ValueError as error:
        raise ModelError(f"{where}: offset and length of external data are not numbers") from error
    path = _inside(location, folder, where)
    needed = checks.stored_bytes(tensor.data_type, elements(tensor.dims, where))
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        raise ModelError(f"{where}: external data file `{location}` is missing") from error
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{where}: external data `{location}` is not a regular file")
    if length < 0:
        length = needed if "length" not in entries else length
    if offset < 0 or length != needed or offset + length > status.st_size:
        raise ModelError(
            f"{where}: needs {needed} bytes of external data, bytes {offset} to {offset + length} "
            f"of the {status.st_size} in `{location}` were given"
        )
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(length)
    if len(data) != length:
        raise ModelError(f"{where}: external data file `{location}` is truncated")
    return data


def _inside(location: str, folder: Path, where: str) -> Path:
    """Return the path of an external file, which must lie in the model's folder."""
    parts = location.replace("\\", "/")
    pure = Path(parts)
    if not location or "\0" in location:
        raise ModelError(f"{where}: external data has no file name")
    if pure.is_absolute() or (len(parts) > 1 and parts[1] == ":"):
        raise ModelError(f"{where}: external data `{location}` is an absolute path")
    if ".." in pure.parts:
        raise ModelError(f"{where}: external data `{location}` lies outside the model's folder")
    path = folder / pure
    root = os.path.realpath(folder)
    real = os.path.realpath(path)
    if os.path.commonpath([root, real]) != root:
        raise ModelError(
            f"{where}: external data `{location}` leads outside the model's folder by a link"
        )
    return path
