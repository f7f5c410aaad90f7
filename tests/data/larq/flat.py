"""Writes TensorFlow Lite files by hand, for options that no converter would put together."""

from __future__ import annotations

import flatbuffers
import numpy as np
from flatbuffers import flexbuffers
from tensorflow.lite.python import schema_py_generated as schema

TYPES = {
    "float32": 0, "float16": 1, "int32": 2, "uint8": 3, "int64": 4, "bool": 6, "int8": 9,
}  # fmt: skip
BCONV = {
    "channels_in": 32, "dilation_height_factor": 1, "dilation_width_factor": 1,
    "fused_activation_function": 0, "pad_values": 0, "padding": 1, "stride_height": 1,
    "stride_width": 1,
}  # fmt: skip


def flex(options: dict[str, int]) -> bytes:
    """Return a map of numbers as a FlexBuffer."""
    builder = flexbuffers.Builder()
    with builder.Map():
        for key, value in options.items():
            builder.Key(key)
            builder.Int(value)
    return bytes(builder.Finish())


def packed(values: np.ndarray) -> np.ndarray:
    """Pack the last axis into words, bit 1 where negative."""
    missing = -values.shape[-1] % 32
    negative = np.pad(values < 0, [(0, 0)] * (values.ndim - 1) + [(0, missing)])
    return np.packbits(negative, axis=-1, bitorder="little").view(np.int32)


class Flat:
    """A network of one subgraph."""

    def __init__(self) -> None:
        self.model = schema.ModelT()
        self.model.version = 3
        self.model.description = "hand-made"
        self.model.buffers = [schema.BufferT()]
        self.model.operatorCodes = []
        self.graph = schema.SubGraphT()
        self.graph.tensors, self.graph.operators = [], []
        self.model.subgraphs = [self.graph]

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: str = "float32",
        data: np.ndarray | None = None,
        scale: float | None = None,
        zero: int = 0,
    ) -> int:
        tensor = schema.TensorT()
        tensor.name, tensor.shape, tensor.type = name, list(shape), TYPES[dtype]
        tensor.buffer = 0
        if data is not None:
            buffer = schema.BufferT()
            buffer.data = np.frombuffer(np.ascontiguousarray(data, dtype).tobytes(), np.uint8)
            tensor.buffer = len(self.model.buffers)
            self.model.buffers.append(buffer)
        if scale is not None:
            tensor.quantization = schema.QuantizationParametersT()
            tensor.quantization.scale = [scale]
            tensor.quantization.zeroPoint = [zero]
        self.graph.tensors.append(tensor)
        return len(self.graph.tensors) - 1

    def constant(self, name: str, data: np.ndarray) -> int:
        return self.tensor(name, data.shape, data.dtype.name, data)

    def op(self, kind: str | int, inputs: list[int], outputs: list[int], options=None) -> None:
        """Append an operator: a custom one by name, a builtin one by code with (type, table)."""
        code = schema.OperatorCodeT()
        code.version = 1
        code.builtinCode = 32 if isinstance(kind, str) else kind
        code.deprecatedBuiltinCode = min(code.builtinCode, 127)
        code.customCode = kind if isinstance(kind, str) else None
        made = schema.OperatorT()
        made.opcodeIndex = len(self.model.operatorCodes)
        self.model.operatorCodes.append(code)
        made.inputs, made.outputs = inputs, outputs
        if isinstance(options, dict):
            made.customOptions = np.frombuffer(flex(options), np.uint8)
        elif options is not None:
            made.builtinOptionsType, made.builtinOptions = options
        self.graph.operators.append(made)

    def bconv(
        self,
        x: int,
        y: int,
        weight: np.ndarray,
        options: dict[str, int],
        *,
        multiplier: np.ndarray | None = None,
        bias: np.ndarray | None = None,
        threshold: np.ndarray | None = None,
    ) -> None:
        """Append LceBconv2d; `weight` holds +1 and -1, (out, height, width, in)."""
        operands = [x, self.constant("filter", packed(weight))]
        for name, value in (("mul", multiplier), ("bias", bias), ("threshold", threshold)):
            operands.append(-1 if value is None else self.constant(name, value))
        self.op("LceBconv2d", operands, [y], {**BCONV, **options})

    def finish(self, inputs: list[int], outputs: list[int]) -> bytes:
        self.graph.inputs, self.graph.outputs = inputs, outputs
        return pack(self.model)


def pack(model: schema.ModelT) -> bytes:
    """Return the bytes of a file."""
    builder = flatbuffers.Builder(4096)
    builder.Finish(model.Pack(builder), file_identifier=b"TFL3")
    return bytes(builder.Output())


def edited(content: bytes, change) -> bytes:
    """Return a file after `change` has been at its ModelT."""
    model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(content, 0))
    change(model)
    return pack(model)
