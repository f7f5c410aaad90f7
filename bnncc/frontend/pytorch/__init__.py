"""PyTorch: exported programs, in memory or as ``.pt2`` files, become ONNX models.

`archive` reads the file without unpickling and without torch, `program` its graph, and `convert`
walks it; `elementwise`, `shapes` and `layers` say what each ATen operator is in ONNX, `views` how
tensors share elements. `capture` turns a module or an exported program in memory into such a file's
bytes, so that there is one way in.
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
    """Tell by name and content whether a file is PyTorch's: a zip archive, or a pickle."""
    try:
        with open(path, "rb") as file:
            head = file.read(4)
    except (OSError, ValueError):
        return False  # whoever reads it says why
    return head == ZIP_MAGIC or (path.suffix in _PICKLES and head[:1] == b"\x80")


def read(path: Path) -> onnx.ModelProto:
    """Read a ``.pt2`` file; nothing in it is unpickled or run.

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

    A program with operators that have no rule here is read once more, in torch's own decomposition.

    Raises
    ------
    ModelError
        If it cannot be read.
    UnsupportedOp
        If it has operators that have no rule in that decomposition either.
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
            raise error from None  # which names the operator that the user wrote


def _named(content: bytes, where: str, name: str) -> onnx.ModelProto:
    try:
        model = to_onnx(content)
    except BnnccError as error:
        raise type(error)(f"{where}: {error}", hint=error.hint) from error
    model.graph.name = name
    return model
