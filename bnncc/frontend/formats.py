"""Selection of the reader for a model file; all formats are converted to ONNX."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import onnx

from bnncc.errors import UsageError
from bnncc.frontend import checks, mxnet, pytorch, safetensors, tflite
from bnncc.frontend.external import locations
from bnncc.frontend.onnx import read_model
from bnncc.ir.graph import Dim

Model: TypeAlias = str | os.PathLike[str] | onnx.ModelProto
"""A model of any supported format; may also be a torch.export.ExportedProgram."""


def captured(model: Any, example_inputs: Any, dynamic_shapes: Any) -> Model:
    """Convert a PyTorch module to ONNX; return other models unchanged.

    Parameters
    ----------
    model : Model or torch.nn.Module
        The network.
    example_inputs, dynamic_shapes
        Arguments of ``torch.export.export`` for a module, or None.

    Raises
    ------
    UsageError
        If there are example inputs for a model that is not a module.
    """
    if pytorch.is_torch(model):
        return pytorch.read_module(model, example_inputs, dynamic_shapes)
    if example_inputs is not None or dynamic_shapes is not None:
        raise UsageError("example_inputs and dynamic_shapes are only for a torch.nn.Module")
    if not isinstance(model, str | os.PathLike | onnx.ModelProto):
        raise UsageError(
            f"model is of type {type(model).__name__}, expected a path, an onnx.ModelProto or a "
            "torch.nn.Module"
        )
    checked: Model = model
    return checked


def as_onnx(
    model: Model,
    *,
    params: str | os.PathLike[str] | None = None,
    input_shapes: Mapping[str, Sequence[Dim]] | None = None,
) -> Model:
    """Convert a model to the form that `bnncc.frontend.onnx.load` takes.

    Parameters
    ----------
    model : path, onnx.ModelProto or torch.export.ExportedProgram
        Of any format: ONNX, PyTorch's ``.pt2``, TensorFlow Lite, or MXNet's ``-symbol.json``.
    params : path, optional
        MXNet's parameters, if they are not next to the network; or a ``.safetensors`` file, or the
        index of several, whose tensors replace the model's by name.
    input_shapes : mapping of str to sequence of int or str, optional
        Shapes of inputs, which some formats lack.

    Returns
    -------
    path or onnx.ModelProto
        ONNX, as given or converted.

    Raises
    ------
    UsageError
        If `params` is given for another format.
    """
    path = None
    if not isinstance(model, onnx.ModelProto) and not pytorch.is_torch(model):
        path = Path(model)
    if path is not None and mxnet.is_symbol(path):
        return mxnet.read_mxnet(path, params, input_shapes)
    if params is not None and not Path(params).name.endswith(safetensors.SUFFIXES):
        raise UsageError(
            "--params takes a .safetensors file, or is for MXNet networks (NAME-symbol.json)"
        )
    found: Model = model
    if pytorch.is_torch(model):
        found = pytorch.read_module(model)
    for belongs, read in _READERS:
        if path is not None and belongs(path):
            found = read(path)
            break
    if params is None:
        return found
    if not isinstance(found, onnx.ModelProto):
        checks.read(Path(found))  # reports what is wrong with it
    return safetensors.with_weights(read_model(found), Path(params))


def companions(path: Path) -> list[tuple[str, Path]]:
    """Return the other files from which a model is read, with descriptions.

    Raises
    ------
    UsageError
        If it is an MXNet network whose parameter file is ambiguous.
    """
    if mxnet.is_symbol(path):
        return [("parameter file", mxnet.beside(path))]
    return [("external data", path.parent / name) for name in locations(path)]


_READERS = ((pytorch.is_pt2, pytorch.read), (tflite.is_tflite, tflite.read))
"""Readers, each with a test of a file's content."""
