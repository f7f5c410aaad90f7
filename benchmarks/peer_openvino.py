"""OpenVINO's fast binary path for an ONNX network.

OpenVINO does not recognise ONNX ``Sign`` + ``Conv``: left as it is, such a layer runs in float. So
that the comparison is fair, every sign and binary convolution is rewritten by hand to what the CPU
plugin keeps as bits: ``FakeQuantize`` with two levels {0, 1}, and ``BinaryConvolution``.
"""

from __future__ import annotations

import numpy as np
import openvino as ov
import openvino.opset8 as op
from peer_graph import Signed, Translator

_KEEP: list[np.ndarray] = []  # a constant made from a tensor borrows its memory


def _constant(value: np.ndarray) -> object:
    return op.constant(np.asarray(value, np.float32))


def _row(value: np.ndarray) -> object:
    return _constant(np.reshape(value, (1, -1, 1, 1)))


class OpenVino(Translator):
    """Translates to OpenVINO's opset 8."""

    def input(self, shape):
        self.parameter = op.parameter(shape, np.float32)
        return self.parameter

    def binary_conv(self, x: Signed, weight, strides):
        zero, one = (_constant(np.full((1, 1, 1, 1), v)) for v in (0, 1))
        bits = op.fake_quantize(x.value, zero, zero, zero, one, 2)
        packed = np.packbits((weight.reshape(-1) > 0).astype(np.uint8), bitorder="little")
        _KEEP.append(packed)
        tensor = ov.Tensor(packed, ov.Shape(list(weight.shape)), ov.Type.u1)
        return op.binary_convolution(
            bits, ov.op.Constant(tensor), strides, list(x.pads[:2]), list(x.pads[2:]), [1, 1],
            "xnor-popcount", x.pad_value,
        )  # fmt: skip

    def conv(self, x, weight, bias, strides, pads, groups):
        kind = op.convolution if groups == 1 else op.group_convolution
        if groups > 1:
            weight = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
        made = kind(x, _constant(weight), strides, list(pads[:2]), list(pads[2:]), [1, 1])
        return made if bias is None else op.add(made, _row(bias))

    def affine(self, x, scale, shift):
        if scale is not None:
            x = op.multiply(x, _row(scale))
        return x if shift is None else op.add(x, _row(shift))

    def relu(self, x):
        return op.relu(x)

    def prelu(self, x, slope):
        return op.prelu(x, _constant(slope))

    def clip(self, x, low, high):
        return op.clamp(x, low, high)

    def add(self, x, y):
        return op.add(x, y)

    def concat(self, values):
        return op.concat(values, 1)

    def pool(self, kind, x, kernel, strides, pads):
        begin, end = list(pads[:2]), list(pads[2:])
        if kind == "max":
            return op.max_pool(x, strides, [1, 1], begin, end, kernel).output(0)
        return op.avg_pool(x, strides, begin, end, kernel, True)

    def global_average(self, x):
        return op.reduce_mean(x, np.array([2, 3]), True)

    def flatten(self, x):
        return op.reshape(x, np.array([0, -1]), True)

    def dense(self, x, weight, bias):
        product = op.matmul(x, _constant(weight), False, True)
        return product if bias is None else op.add(product, _constant(bias))


def build(model) -> ov.Model:
    """Return the network with every sign and binary convolution in the plugin's own form."""
    made = OpenVino(model)
    return ov.Model([made.output], [made.parameter], "peer")
