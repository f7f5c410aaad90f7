"""What a network consists of, as plain data, for PyTorch on a machine without the ONNX file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from peer_graph import Signed, Translator


class Layers(Translator):
    """Writes each operation down with its sizes; of weights there are only shapes.

    Attributes
    ----------
    steps : list of dict
        ``op``, ``args`` (0 is the input, n the result of the n-th step) and its own numbers.
    """

    def __init__(self, model) -> None:
        self.steps: list[dict[str, Any]] = []
        super().__init__(model)

    def _step(self, op: str, *args: int, **sizes: Any) -> int:
        self.steps.append({"op": op, "args": args, **sizes})
        return len(self.steps)

    def input(self, shape):
        return 0

    def binary_conv(self, x: Signed, weight, strides):
        signed = self._step("sign", x.value)
        if x.pad_value:
            signed = self._step("pad", signed, pads=x.pads, value=x.pad_value)
        return self.conv(signed, weight, None, strides, (0,) * 4 if x.pad_value else x.pads, 1)

    def conv(self, x, weight, bias, strides, pads, groups):
        if pads[:2] != pads[2:]:
            x, pads = self._step("pad", x, pads=pads, value=0.0), (0,) * 4
        return self._step(
            "conv", x, weight=weight.shape, strides=strides, pads=pads[:2], groups=groups
        )

    def affine(self, x, scale, shift):
        row = scale if scale is not None else shift
        return self._step("affine" if scale is not None else "shift", x, channels=row.size)

    def relu(self, x):
        return self._step("relu", x)

    def prelu(self, x, slope):
        return self._step("prelu", x, channels=slope.size)

    def clip(self, x, low, high):
        return self._step("clip", x, low=low, high=high)

    def add(self, x, y):
        return self._step("add", x, y)

    def pool(self, kind, x, kernel, strides, pads):
        if pads[:2] != pads[2:]:
            x = self._step("pad", x, pads=pads, value=float("-inf"))
            pads = (0,) * 4
        return self._step(kind, x, kernel=kernel, strides=strides, pads=pads[:2])

    def global_average(self, x):
        return self._step("global_average", x)

    def flatten(self, x):
        return self._step("flatten", x)

    def dense(self, x, weight, bias):
        return self._step("dense", x, weight=weight.shape)
