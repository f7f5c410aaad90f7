"""Which reader a model file is for; whatever it is, what comes out is ONNX."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import onnx

from bnncc.errors import UsageError
from bnncc.frontend import mxnet, tflite
from bnncc.frontend.dabnn import assume_dabnn
from bnncc.graph import Dim
from bnncc.options import CompileOptions

Model: TypeAlias = str | os.PathLike[str] | onnx.ModelProto


def opened(model: Model, options: CompileOptions) -> tuple[Model, dict[str, str]]:
    """Return a model as ONNX says it, with all that was asked for.

    Parameters
    ----------
    model : path or onnx.ModelProto
        Of any format.
    options : CompileOptions
        Where its parts are, and what it implies.

    Returns
    -------
    model : path or onnx.ModelProto
        ONNX.
    assumed : dict of str to str
        By layer, what the file does not say of it.
    """
    model = as_onnx(model, params=options.params, input_shapes=options.input_shapes)
    if options.assume == "nothing":
        return model, {}
    return assume_dabnn(model, options.input_shapes)


def as_onnx(
    model: Model,
    *,
    params: str | os.PathLike[str] | None = None,
    input_shapes: Mapping[str, Sequence[Dim]] | None = None,
) -> Model:
    """Return a model as `bnncc.frontend.onnx.load` takes it.

    Parameters
    ----------
    model : path or onnx.ModelProto
        Of any format: ONNX, TensorFlow Lite, or MXNet's ``-symbol.json``.
    params : path, optional
        Where MXNet's parameters are, if not beside the network.
    input_shapes : mapping of str to sequence of int or str, optional
        Shapes of inputs, which some formats lack.

    Returns
    -------
    path or onnx.ModelProto
        ONNX, as it was given or converted.

    Raises
    ------
    UsageError
        If parameters are given with a format that has none.
    """
    if isinstance(model, onnx.ModelProto) or not mxnet.is_symbol(Path(model)):
        if params is not None:
            raise UsageError("--params goes with MXNet's networks (NAME-symbol.json)")
        if isinstance(model, onnx.ModelProto) or not tflite.is_tflite(model):
            return model
        return tflite.read(model)
    return mxnet.read_mxnet(model, params, input_shapes)
