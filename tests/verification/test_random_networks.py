"""Networks put together at random: what no hand-written case thought of, against the oracle."""

from __future__ import annotations

import os

import numpy as np
import onnx
import pytest

import bnncc
from tests.collection import oracle
from tests.collection.builder import SIGNS, Net

pytestmark = pytest.mark.sampled(4)

COUNT = 300 if os.environ.get("BNNCC_TEST_ALL") else 16
CHANNELS = (1, 3, 8, 16, 31, 32, 33, 48, 64, 70)


class Maker:
    """Grows a network node by node; all tensors are images."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.net = Net(seed=seed)
        size = int(self.rng.integers(5, 12)), int(self.rng.integers(5, 12))
        channels = int(self.rng.choice(CHANNELS))
        batch = "N" if self.rng.random() < 0.3 else 1
        self.net.input("x", [batch, channels, *size])
        self.net.channels["x"] = channels
        self.images = {"x": size}
        self.spare = ["x"]

    def pick(self, *items: object) -> object:
        return items[int(self.rng.integers(len(items)))]

    def keep(
        self, name: str, like: str, channels: int | None = None, size: tuple | None = None
    ) -> str:
        self.net.channels[name] = self.net.channels[like] if channels is None else channels
        self.images[name] = self.images[like] if size is None else size
        self.spare.append(name)
        return name

    def tensor(self) -> str:
        return str(self.pick(*self.spare[-3:]))

    def sign(self, x: str) -> str:
        spellings = ["sign", "where_ge", "where_gt", "where_lt"]
        return self.keep(SIGNS[str(self.pick(*spellings))](self.net, x), x)

    def conv(self, x: str, *, binary: bool) -> str:
        channels, (h, w) = self.net.channels[x], self.images[x]
        kernel = int(self.pick(1, 3, 3, min(5, h, w)))
        groups = int(self.pick(1, 1, 1, *[g for g in (2, channels) if channels % g == 0]))
        units = (
            groups * int(self.pick(1, 2, 5, 16, 17))
            if groups > 1
            else int(self.rng.choice(CHANNELS))
        )
        stride, dilation = int(self.pick(1, 1, 2)), int(self.pick(1, 1, 2))
        span = dilation * (kernel - 1) + 1
        pads = [int(v) for v in self.rng.integers(0, span // 2 + 1, 4)]
        high, wide = h + pads[0] + pads[2], w + pads[1] + pads[3]
        if high < span or wide < span:
            return x
        weight = self.net.signs((units, channels // groups, kernel, kernel))
        if binary:
            scales = self.rng.choice([1.0, 1.0, -1.0, 0.5, 0.0, 0.37, -2.5], units)
            weight *= (scales if self.rng.random() < 0.5 else np.ones(units)).reshape(-1, 1, 1, 1)
        else:
            weight = self.net.normal(weight.shape, (channels * kernel * kernel) ** -0.5)
        data = x
        if binary and self.rng.random() < 0.3:
            value = float(self.pick(-1.0, 1.0))
            data = self.net.pad_hw(x, pads, value)
            self.net.channels[data] = channels
            pads = [0, 0, 0, 0]
        bias = self.net.normal(units) if self.rng.random() < 0.3 else None
        made = self.net.conv(
            data, weight.astype(np.float32), bias, pad=pads, strides=[stride] * 2,
            dilations=[dilation] * 2, group=groups,
        )  # fmt: skip
        size = (high - span) // stride + 1, (wide - span) // stride + 1
        return self.keep(made, x, units, size)

    def glue(self, x: str) -> str:
        kind = str(self.pick("bn", "relu", "prelu", "shift", "neg", "clip"))
        channels = self.net.channels[x]
        if kind == "bn":
            gamma = str(self.pick("mixed", "positive", "zeros"))
            return self.keep(self.net.bn(x, gamma=gamma), x)
        if kind == "relu":
            return self.keep(self.net.op("Relu", x), x)
        if kind == "neg":
            return self.keep(self.net.op("Neg", x), x)
        if kind == "clip":
            return self.keep(self.net.clip(x, -1.5, 2.0), x)
        shape = (channels, 1, 1)
        constant = self.net.const(self.net.normal(shape, 0.5))
        return self.keep(self.net.op("PRelu" if kind == "prelu" else "Add", x, constant), x)

    def pool(self, x: str) -> str:
        h, w = self.images[x]
        if min(h, w) < 3:
            return x
        kernel, stride = int(self.pick(2, 3)), int(self.pick(1, 2))
        pad = int(self.pick(0, kernel // 2))
        kind = str(self.pick("MaxPool", "MaxPool", "AveragePool"))
        made = self.net.op(kind, x, kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[pad] * 4)
        size = (h + 2 * pad - kernel) // stride + 1, (w + 2 * pad - kernel) // stride + 1
        return self.keep(made, x, None, size)

    def join(self, x: str) -> str:
        fitting = [t for t in self.spare if self.images[t] == self.images[x]]
        other = str(self.pick(*fitting))
        if self.net.channels[other] == self.net.channels[x] and self.rng.random() < 0.7:
            return self.keep(self.net.op(str(self.pick("Add", "Add", "Sub", "Mul")), x, other), x)
        total = self.net.channels[x] + self.net.channels[other]
        return self.keep(self.net.concat(x, other), x, total) if total <= 140 else x

    def cut(self, x: str) -> str:
        channels = self.net.channels[x]
        if channels < 4:
            return x
        first = int(self.rng.integers(1, channels - 1))
        parts = self.net.split(x, [first, channels - first])
        self.keep(parts[0], x, first)
        return self.keep(parts[1], x, channels - first)

    def build(self) -> onnx.ModelProto:
        for _ in range(int(self.rng.integers(5, 14))):
            x = self.tensor()
            step = str(
                self.pick(
                    "binary",
                    "binary",
                    "binary",
                    "float",
                    "glue",
                    "glue",
                    "pool",
                    "join",
                    "cut",
                    "sign",
                )
            )
            if step == "binary":
                self.conv(self.sign(x), binary=True)
            elif step == "float":
                self.conv(x, binary=False)
            else:
                {
                    "glue": self.glue,
                    "pool": self.pool,
                    "join": self.join,
                    "cut": self.cut,
                    "sign": self.sign,
                }[step](x)
        outputs = {self.spare[-1], str(self.pick(*self.spare[1:] or self.spare))} - {"x"}
        if not outputs:
            outputs = {self.glue("x")}
        self.net.output(*sorted(outputs))
        return self.net.model()


@pytest.mark.parametrize("seed", range(COUNT))
def test_network(seed: int) -> None:
    model = Maker(seed).build()
    artifact = bnncc.compile(model)
    batches = (1, 2) if isinstance(artifact.inputs[0].shape[0], str) else (1,)
    for batch in batches:
        rng = np.random.default_rng(seed)
        shape = (batch, *artifact.inputs[0].shape[1:])
        for values in (rng.standard_normal(shape), rng.integers(-1, 2, shape)):  # with exact zeros
            feeds = {"x": values.astype(np.float32)}
            verdict = oracle.compare(model, feeds, artifact.run(feeds))
            assert verdict.right or verdict.kind == "tie", f"{verdict.kind}: {verdict.text}"
