"""Read TensorFlow Lite files, including those of Larq Compute Engine, as ONNX models.

    model.tflite -> tables, checked -> tensors and operators -> ONNX nodes

The result is an ordinary ONNX model of the same network, so passes, reports and `bnncc verify` do
not depend on its origin. `bnncc.frontend.tflite_ops` and `bnncc.frontend.lce` translate operators.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import onnx

from bnncc.errors import BnnccError
from bnncc.files import read_bytes
from bnncc.frontend import lce, tflite_ops
from bnncc.frontend.checks import refuse_unknown
from bnncc.frontend.tflite_file import CUSTOM, IDENTIFIER, Network, Operator, Tensor, parse
from bnncc.frontend.tflite_writer import Writer, quantized

_INT8_HINT = (
    "convert without int8: binary layers stay as small and exact, and the others run in float32"
)


def is_tflite(path: str | os.PathLike[str]) -> bool:
    """Return whether a file is TensorFlow Lite, by its content or, if it is too short, its name."""
    try:
        with open(path, "rb") as file:
            head = file.read(8)
    except (OSError, ValueError):
        return False
    return head[4:8] == IDENTIFIER or Path(path).suffix == ".tflite"


def read(path: str | os.PathLike[str]) -> onnx.ModelProto:
    """Read a TensorFlow Lite file as an ONNX model.

    Returns
    -------
    onnx.ModelProto
        Tensors have the file's names and layout. Packed bits become floats +1 and -1, and quantized
        integers become floats too, except for inputs and outputs.

    Raises
    ------
    ModelError
        If the file is damaged or not supported; may be `UnsupportedOp` or `ShapeError`.
    """
    file = Path(path)
    data = read_bytes(file, "a TensorFlow Lite file")
    try:
        return translate(parse(data), file.name)
    except BnnccError as error:
        raise error.within(file) from error.__cause__


def translate(network: Network, name: str) -> onnx.ModelProto:
    """Return the ONNX model of a network.

    Parameters
    ----------
    network : Network
        From `tflite_file.parse`.
    name : str
        Name of the model.

    Raises
    ------
    ModelError
        If an operator is unknown, or one of its variants is not supported.
    """
    _check_operators(network)
    writer = Writer(network)
    lce.find_packed(network, writer)
    _at_edge(writer, "input", network.inputs, lce.unpack_input, writer.cast_input)
    for operator in network.operators:
        op = _name(operator)
        writer.begin(operator, op)
        if operator.op:
            made = lce.OPERATORS[op](writer)
        else:
            _check_types(writer, op)
            made = tflite_ops.OPERATORS[operator.code][1](writer)
        for tensor, result in zip(
            operator.outputs, [made] if isinstance(made, str) else made, strict=False
        ):
            writer.bind(tensor, result)
    _at_edge(writer, "output", network.outputs, lce.pack_output, writer.cast_output)
    return writer.model(name)


def _at_edge(
    writer: Writer, what: str, tensors: Iterable[Tensor],
    of_bits: Callable[[Writer, Tensor], None], of_integers: Callable[[Tensor], None],
) -> None:  # fmt: skip
    """Convert inputs or outputs that are not floats."""
    for tensor in tensors:
        writer.where = f"{what} `{tensor.name}`"
        if tensor in writer.channels:
            of_bits(writer, tensor)
        elif quantized(tensor):
            of_integers(tensor)


def _name(operator: Operator) -> str:
    if operator.code == CUSTOM:
        return operator.op
    known = tflite_ops.OPERATORS.get(operator.code)
    return known[0] if known else tflite_ops.NAMES.get(operator.code, f"operator {operator.code}")


def _check_operators(network: Network) -> None:
    """Raise an error that lists all unknown operators on one line."""
    unknown = [
        f"{_name(o)} `{o.outputs[0].name}`"
        for o in network.operators
        if (o.op not in lce.OPERATORS if o.op else o.code not in tflite_ops.OPERATORS)
    ]
    if not unknown:
        return
    refuse_unknown(unknown, hint="replace it in the Keras model, or cut the network before it")


def _check_types(writer: Writer, op: str) -> None:
    """Reject bits where numbers are required, and arithmetic on quantized integers."""
    operator = writer.operator
    for tensor in operator.inputs:
        if tensor is not None and tensor in writer.channels:
            raise writer.fail(f"reads `{tensor.name}`, which Larq Compute Engine packed into bits")
    values = [t for t in (*operator.inputs, *operator.outputs) if t is not None and quantized(t)]
    if not values or op in ("QUANTIZE", "DEQUANTIZE"):
        return
    if op not in tflite_ops.EXACT:
        raise writer.fail(f"computes in {values[0].dtype}, which is not supported", _INT8_HINT)
    first = values[0].quantization
    if any(not t.quantization.same(first) for t in values if t.quantization is not None):
        raise writer.fail(f"changes the scale of {values[0].dtype} numbers", _INT8_HINT)
    if any(np.size(t.quantization.scale) > 1 for t in values if t.quantization is not None):
        raise writer.fail("moves numbers with several scales", _INT8_HINT)
