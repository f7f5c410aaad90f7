"""PyTorch: exported programs, in memory or as ``.pt2`` files, become ONNX models.

`archive` reads the file without unpickling and without torch, `program` its graph, and `convert`
walks the graph; `elementwise`, `shapes`, `layers` and others convert the ATen operators, and
`views` tracks which tensors share elements. `capture` saves a module or exported program in memory
to the bytes of such a file, so there is a single code path.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx

from bnncc.errors import BnnccError, ModelError, UnsupportedOp
from bnncc.files import read_bytes
from bnncc.frontend.pytorch import capture
from bnncc.frontend.pytorch.archive import EXPORT, ZIP_MAGIC
from bnncc.frontend.pytorch.capture import is_torch
from bnncc.frontend.pytorch.convert import is_known, to_onnx

__all__ = ["is_pt2", "is_torch", "read", "read_module"]

_PICKLES = (".pt", ".pth", ".pkl", ".pickle", ".bin")


def is_pt2(path: Path) -> bool:
    """Return whether a file is a zip archive or a pickle of PyTorch, by name and content."""
    try:
        with open(path, "rb") as file:
            head = file.read(4)
    except (OSError, ValueError):
        return False  # the reader reports the error
    return head == ZIP_MAGIC or (path.suffix in _PICKLES and head[:1] == b"\x80")


def read(path: Path) -> onnx.ModelProto:
    """Read a ``.pt2`` file without unpickling or running anything in it.

    Raises
    ------
    ModelError
        If it is damaged, not supported, or a pickle.
    """
    content = read_bytes(path, "a .pt2 file")
    if not content.startswith(ZIP_MAGIC):
        raise ModelError(
            f"{path}: a pickle, which can run code when it is read, so it is not read",
            hint=f"save the model as an exported program {EXPORT}",
        )
    return _named(content, str(path), path.name)


def read_module(
    model: Any, example_inputs: Any = None, dynamic_shapes: Any = None
) -> onnx.ModelProto:
    """Return the ONNX model of a module or exported program; see `capture.exported`.

    A program with unsupported operators is read again after torch's own decomposition.

    Raises
    ------
    ModelError
        If it cannot be read.
    UnsupportedOp
        If there are unsupported operators after that, too.
    """
    name = type(model).__name__
    try:
        program = capture.exported(model, example_inputs, dynamic_shapes)
    except ModelError as error:
        raise ModelError(f"{name}: {error}", hint=error.hint) from error
    try:
        return _named(capture.saved(program), name, name)
    except UnsupportedOp as error:
        try:
            program = capture.decomposed(program, is_known)
            return _named(capture.saved(program), name, name)
        except ModelError:
            raise error from None  # names the operator that the user wrote


def _named(content: bytes, where: str, name: str) -> onnx.ModelProto:
    try:
        model = to_onnx(content)
    except BnnccError as error:
        raise error.within(where) from error
    model.graph.name = name
    return model
