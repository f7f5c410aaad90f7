"""PyTorch for an ONNX network: a module of the same operations, float32 on the CPU."""

from __future__ import annotations

import numpy as np
import torch
from peer_graph import Signed, Translator
from torch.nn import functional as F


class Torch(Translator):
    """Translates to closures over parameters, called in the order of the graph."""

    def __init__(self, model) -> None:
        self.steps: list[tuple[int, object, tuple[int, ...]]] = []
        self.parameters: list[torch.Tensor] = []
        super().__init__(model)

    def _step(self, function, *args: int) -> int:
        self.steps.append((len(self.steps) + 1, function, args))
        return len(self.steps)

    def _tensor(self, value):
        return None if value is None else torch.from_numpy(np.array(value, np.float32))

    def _row(self, value):
        return None if value is None else self._tensor(value).reshape(1, -1, 1, 1)

    def input(self, shape):
        return 0

    def binary_conv(self, x: Signed, weight, strides):
        w, pads, value = self._tensor(weight), x.pads, x.pad_value
        order = (pads[1], pads[3], pads[0], pads[2])

        def run(v):
            s = torch.where(v >= 0, 1.0, -1.0)
            if any(pads):
                s = F.pad(s, order, value=value)
            return F.conv2d(s, w, stride=strides)

        return self._step(run, x.value)

    def conv(self, x, weight, bias, strides, pads, groups):
        w, b = self._tensor(weight), self._tensor(bias)
        if pads[:2] == pads[2:]:
            return self._step(lambda v: F.conv2d(v, w, b, strides, pads[:2], 1, groups), x)
        order = (pads[1], pads[3], pads[0], pads[2])
        return self._step(lambda v: F.conv2d(F.pad(v, order), w, b, strides, 0, 1, groups), x)

    def affine(self, x, scale, shift):
        k, b = self._row(scale), self._row(shift)
        if k is None:
            return self._step(lambda v: v + b, x)
        if b is None:
            return self._step(lambda v: v * k, x)
        # As an evaluated BatchNorm is run: one pass.
        k, b = k.reshape(-1), b.reshape(-1)
        mean, var = torch.zeros_like(k), torch.ones_like(k)
        return self._step(lambda v: F.batch_norm(v, mean, var, k, b, False, 0.0, 0.0), x)

    def relu(self, x):
        return self._step(F.relu, x)

    def prelu(self, x, slope):
        s = self._tensor(slope)
        return self._step(lambda v: F.prelu(v, s), x)

    def clip(self, x, low, high):
        return self._step(lambda v: torch.clamp(v, low, high), x)

    def add(self, x, y):
        return self._step(torch.add, x, y)

    def concat(self, values):
        return self._step(lambda *v: torch.cat(v, 1), *values)

    def pool(self, kind, x, kernel, strides, pads):
        order = (pads[1], pads[3], pads[0], pads[2])
        if kind == "max":
            fill = float("-inf")
            if pads[:2] == pads[2:]:
                return self._step(lambda v: F.max_pool2d(v, kernel, strides, pads[:2]), x)
            return self._step(
                lambda v: F.max_pool2d(F.pad(v, order, value=fill), kernel, strides), x
            )
        if any(pads):
            raise SystemExit("a padded average pool is not translated")
        return self._step(lambda v: F.avg_pool2d(v, kernel, strides), x)

    def global_average(self, x):
        return self._step(lambda v: F.adaptive_avg_pool2d(v, 1), x)

    def flatten(self, x):
        return self._step(lambda v: v.flatten(1), x)

    def dense(self, x, weight, bias):
        w, b = self._tensor(weight), self._tensor(bias)
        return self._step(lambda v: F.linear(v, w, b), x)


class Module(torch.nn.Module):
    """The network; values are dropped after their last use."""

    def __init__(self, model) -> None:
        super().__init__()
        made = Torch(model)
        last = {arg: step for step, _, args in made.steps for arg in args}
        self.steps = [(n, f, a, [x for x in a if last[x] == n]) for n, f, a in made.steps]
        self.result = made.output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = {0: x}
        for step, function, args, dead in self.steps:
            values[step] = function(*(values[a] for a in args))
            for number in set(dead):
                del values[number]
        return values[self.result]
