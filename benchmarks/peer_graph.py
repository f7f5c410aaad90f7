"""Walks an ONNX file for the peers that cannot read it themselves.

A peer subclasses `Translator` with one method per operation. Signs, in either spelling, and the
constant paddings after them are resolved here, so that a peer only says what its own binary
convolution is called.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper


@dataclass
class Signed:
    """The sign of a value, not computed yet, and the padding that its convolution adds."""

    value: Any
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    pad_value: float = 0.0


class Translator:
    """Translates the operators that the benchmarks' networks use.

    `pads` are top, left, bottom, right. Weights are float32, (outputs, inputs / groups, height,
    width). Vectors come as rows of one number per channel.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        graph = model.graph
        self._consts = {i.name: numpy_helper.to_array(i) for i in graph.initializer}
        self.shape = [d.dim_value for d in graph.input[0].type.tensor_type.shape.dim]
        self._values: dict[str, Any] = {graph.input[0].name: self.input(self.shape)}
        for node in graph.node:
            attrs = {x.name: onnx.helper.get_attribute_value(x) for x in node.attribute}
            args = [self._consts.get(name, self._values.get(name)) for name in node.input]
            self._values[node.output[0]] = getattr(self, "_" + node.op_type)(*args, **attrs)
        self.output = self._values[graph.output[0].name]

    # What a peer has to say. ------------------------------------------------------------------
    def input(self, shape: list[int]) -> Any:
        raise NotImplementedError

    def binary_conv(self, x: Signed, weight: np.ndarray, strides: list[int]) -> Any:
        raise NotImplementedError

    def conv(
        self, x: Any, weight: np.ndarray, bias: Any, strides: list[int], pads: Any, groups: int
    ) -> Any:
        raise NotImplementedError

    def affine(self, x: Any, scale: np.ndarray | None, shift: np.ndarray | None) -> Any:
        raise NotImplementedError

    def relu(self, x: Any) -> Any:
        raise NotImplementedError

    def prelu(self, x: Any, slope: np.ndarray) -> Any:
        raise NotImplementedError

    def clip(self, x: Any, low: float, high: float) -> Any:
        raise NotImplementedError

    def add(self, x: Any, y: Any) -> Any:
        raise NotImplementedError

    def concat(self, values: list[Any]) -> Any:
        raise NotImplementedError

    def pool(self, kind: str, x: Any, kernel: list[int], strides: list[int], pads: Any) -> Any:
        raise NotImplementedError

    def global_average(self, x: Any) -> Any:
        raise NotImplementedError

    def flatten(self, x: Any) -> Any:
        raise NotImplementedError

    def dense(self, x: Any, weight: np.ndarray, bias: Any) -> Any:
        raise NotImplementedError

    # Operators. -------------------------------------------------------------------------------
    def _Sign(self, x):
        return Signed(x)

    _GreaterOrEqual = _Greater = lambda self, x, zero: Signed(x)

    def _Where(self, condition, one, minus):
        return condition

    def _Pad(self, x, pads, value=0.0, *rest, **attrs):
        if not isinstance(x, Signed):
            raise SystemExit("padding of a value that is no sign is not translated")
        return Signed(x.value, tuple(pads[[2, 3, 6, 7]].tolist()), float(value))

    def _Conv(self, x, weight, bias=None, *, strides=(1, 1), pads=(0, 0, 0, 0), group=1, **attrs):
        if not isinstance(x, Signed):
            return self.conv(x, weight, bias, list(strides), tuple(pads), group)
        if any(pads):
            x = Signed(x.value, tuple(pads), 0.0)
        out = self.binary_conv(x, weight, list(strides))
        return out if bias is None else self.affine(out, None, bias)

    def _BatchNormalization(self, x, gamma, beta, mean, var, *, epsilon=1e-5, **attrs):
        gamma, beta, mean, var = (v.astype(np.float64) for v in (gamma, beta, mean, var))
        scale = gamma / np.sqrt(var + epsilon)
        return self.affine(x, scale, beta - mean * scale)

    def _Relu(self, x):
        return self.relu(x)

    def _PRelu(self, x, slope):
        return self.prelu(x, slope.reshape(-1))

    def _Clip(self, x, low, high):
        return self.clip(x, float(low), float(high))

    def _Add(self, x, y):
        if isinstance(y, np.ndarray):
            return self.affine(x, None, y.reshape(-1))
        return self.add(x, y)

    def _Mul(self, x, y):
        return self.affine(x, y.reshape(-1), None)

    def _Concat(self, *values, axis):
        if axis != 1:
            raise SystemExit("only channels are concatenated")
        return self.concat(list(values))

    def _MaxPool(self, x, *, kernel_shape, strides, pads=(0, 0, 0, 0), **attrs):
        return self.pool("max", x, kernel_shape, strides, tuple(pads))

    def _AveragePool(self, x, *, kernel_shape, strides, pads=(0, 0, 0, 0), **attrs):
        return self.pool("average", x, kernel_shape, strides, tuple(pads))

    def _GlobalAveragePool(self, x):
        return self.global_average(x)

    def _Flatten(self, x, **attrs):
        return self.flatten(x)

    def _Gemm(self, x, weight, bias=None, *, transB=0, **attrs):
        return self.dense(x, weight if transB else weight.T, bias)
