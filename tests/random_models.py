"""Random binary and few-bit networks, from a seed: what nobody thought of, feature by feature.

A network is a few layers. Each quantizes a tensor (to bits, three values, levels, or not at all),
moves it about, multiplies it by weights of some kind, and has an epilogue. Constants are dyadic in
half of the networks, so that sums are exact and values lie exactly at thresholds and half-way
between integers; features that were used are remembered, so that a run can say what it covered.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto

from tests.random_quantizers import Quantizers, Tensor

CHANNELS = (1, 3, 8, 16, 31, 32, 33, 48, 64, 70)
MAX_CHANNELS = 140


@dataclass
class Maker(Quantizers):
    """Makes one network; `build` returns it, `pairs` says what is in it."""

    # ---- moves ------------------------------------------------------------------------------

    def moved(self, x: Tensor) -> Tensor:
        """Move or pool a tensor, or not; its kind stays."""
        way = self.choose("still", "still", "split", "shuffle", "max-pooled", "concat", "renamed")
        out = self._moved(x, way)
        self.features.add("still" if out is x else way)
        return out

    def _moved(self, x: Tensor, way: str) -> Tensor:
        if way == "max-pooled" and min(x.size) >= 3:
            return self.pooled(x, "MaxPool")
        if way == "split" and x.channels > 2:
            first = int(self.rng.integers(1, x.channels))
            parts = self.net.split(x.name, [first, x.channels - first])
            number = int(self.rng.integers(2))
            size = (first, x.channels - first)[number]
            return Tensor(parts[number], size, x.size, x.kind, x.values)
        ways = [g for g in (2, 4, 3) if x.channels % g == 0 and x.channels > g]
        if way == "shuffle" and ways:
            groups = int(self.pick(*ways))  # type: ignore[call-overload]
            cut = self.net.ints([0, groups, x.channels // groups, *x.size])
            turned = self.net.op(
                "Transpose", self.net.op("Reshape", x.name, cut), perm=[0, 2, 1, 3, 4]
            )
            name = self.net.op("Reshape", turned, self.net.ints([0, x.channels, *x.size]))
            return Tensor(name, x.channels, x.size, x.kind, x.values)
        if way == "concat":
            alike = [
                t for t in (x, *self.quantized)
                if t.size == x.size and t.kind == x.kind and t.channels + x.channels <= MAX_CHANNELS
            ]  # fmt: skip
            if alike:
                other = alike[int(self.rng.integers(len(alike)))]
                for one in (x, other):
                    self.net.channels[one.name] = one.channels
                values = x.values if other.values == x.values else ()
                name = self.net.concat(x.name, other.name)
                return Tensor(name, x.channels + other.channels, x.size, x.kind, values)
        if way == "renamed" and x.kind in ("bits", "three"):
            name = self.net.op("Neg", x.name)
            return Tensor(name, x.channels, x.size, x.kind, tuple(-v for v in x.values))
        return x

    def pooled(self, x: Tensor, kind: str) -> Tensor:
        kernel, stride = int(self.pick(2, 3)), int(self.pick(1, 2))  # type: ignore[call-overload]
        pad = int(self.pick(0, 1))  # type: ignore[call-overload]
        name = self.net.op(
            kind, x.name, kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[pad] * 4
        )
        size = [(n + 2 * pad - kernel) // stride + 1 for n in x.size]
        return Tensor(name, x.channels, (size[0], size[1]), x.kind, x.values)

    def padded(self, x: Tensor, kernel: int, reach: int) -> tuple[Tensor, list[int]]:
        """Return what a convolution reads, and its own pads."""
        pads = [int(p) for p in self.rng.integers(0, max(1, reach) + 1, 4)]
        if self.beyond and self.chance(0.2):
            self.features.add("pads beyond windows")
            return x, [int(p) for p in self.rng.integers(0, reach + 4, 4)]
        way = self.choose("unpadded", "zero pads", "zero pads", "value pads", "odd pads")
        if way == "unpadded" or kernel == 1:
            self.features.add("unpadded")
            return x, [0] * 4
        if way == "value pads" and not x.values:
            way = "odd pads"
        self.features.add(way)
        if way == "zero pads":
            return x, [reach // 2] * 4
        if way == "odd pads":
            return x, pads
        value = float(self.pick(*x.values))  # type: ignore[arg-type]
        size = (x.size[0] + pads[0] + pads[2], x.size[1] + pads[1] + pads[3])
        name = self.net.pad_hw(x.name, pads, value)
        return Tensor(name, x.channels, size, x.kind, x.values), [0] * 4

    # ---- products ---------------------------------------------------------------------------

    def product(self, x: Tensor) -> Tensor:
        kernel = int(self.pick(1, 2, 3, 3))  # type: ignore[call-overload]
        stride, dilation = int(self.pick(1, 1, 1, 2)), int(self.pick(1, 1, 1, 2))  # type: ignore[call-overload]
        x, pads = self.padded(x, kernel, dilation * (kernel - 1))
        span = dilation * (kernel - 1) + 1
        high, wide = x.size[0] + pads[0] + pads[2], x.size[1] + pads[1] + pads[3]
        if high < span or wide < span:
            kernel = dilation = span = 1
        way = self.choose("one group", "one group", "groups", "depthwise")
        groups, ways = 1, [g for g in (2, 3, 4) if x.channels % g == 0]
        if way == "groups" and ways:
            groups = int(self.pick(*ways))  # type: ignore[call-overload]
        elif way == "depthwise":
            groups = x.channels
        self.features.add(way if groups > 1 else "one group")
        units = int(self.rng.choice(CHANNELS))
        if self.chance(0.4):  # as many as there are elsewhere: what is added must fit
            units = int(self.pick(*(t.channels for t in self.tensors)))  # type: ignore[call-overload]
        if groups > 1:
            units = groups * int(self.pick(1, 1, 2, 16 if groups < 8 else 1))  # type: ignore[call-overload]
        weight = self.weights((units, x.channels // groups, kernel, kernel))
        bias = self.vector(units, -2, 2) if self.chance(0.3) else None
        name = self.net.conv(
            x.name, weight, bias, pad=pads, strides=[stride] * 2, dilations=[dilation] * 2,
            group=groups,
        )  # fmt: skip
        size = (high - span) // stride + 1, (wide - span) // stride + 1
        return Tensor(name, units, size)

    def weights(self, shape: tuple[int, ...]) -> np.ndarray:
        kind = self.choose("signs", "signs", "ternary", "few bits", "real")
        self.features.add(f"weights {kind}")
        scale = self.rng.choice([1.0, 0.5, -0.25] if self.dyadic else [0.37, 1.3, -0.2], shape[0])
        scale[self.rng.random(shape[0]) < 0.05] = 0.0
        column = scale.reshape(-1, 1, 1, 1)
        if kind == "real":
            fan = float(np.prod(shape[1:])) ** -0.5
            weight = self.rng.standard_normal(shape) * fan
            weight = np.round(weight * 8) / 8 if self.dyadic else weight
        elif kind == "signs":
            weight = np.where(self.rng.random(shape) < 0.5, -1, 1) * column
        else:
            top = 1 if kind == "ternary" else int(self.pick(2, 3, 7))  # type: ignore[call-overload]
            weight = self.rng.integers(-top, top + 1, shape) * column
        return weight.astype(np.float32)

    # ---- epilogues --------------------------------------------------------------------------

    def glue(self, x: Tensor) -> Tensor:
        """Append one elementwise operator, or a combination with another tensor."""
        way = self.choose(
            "bn", "affine", "relu", "prelu", "clip", "residual", "residual", "gate", "neg", "pool"
        )
        out = self._glued(x, way)
        if out is not x and way not in ("residual", "pool"):
            self.features.add(way)
        return out

    def _glued(self, x: Tensor, way: str) -> Tensor:
        net, channels = self.net, x.channels
        if way == "bn":
            gamma = self.vector(channels, -1.5, 1.5)
            gamma[gamma == 0] = 0.5 if self.chance(0.7) else 0.0
            var = np.full(channels, 1.0 if self.dyadic else 2.3, np.float32)
            arrays = [gamma, self.vector(channels, -1, 1), self.vector(channels, -2, 2), var]
            epsilon = 0.0 if self.dyadic else 1e-5
            names = [self.constant(a) for a in arrays]
            return self.put(x, "BatchNormalization", x.name, *names, epsilon=epsilon)
        if way == "affine":
            constants = [self.number(-1, 1) or 0.5, self.number(-2, 2)]
            if self.chance(0.5):
                scaled = net.op("Mul", x.name, self.constant(constants[0]))
                return self.put(x, "Add", scaled, self.constant(constants[1]))
            shifted = net.op("Sub", x.name, self.constant(constants[1]))
            return self.put(x, "Mul", shifted, self.constant(constants[0]))
        if way == "relu":
            return self.put(x, "Relu", x.name)
        if way == "prelu":
            slope = self.column(self.vector(channels, -0.5 if self.chance(0.3) else 0, 1))
            return self.put(x, "PRelu", x.name, slope)
        if way == "clip":
            return Tensor(net.clip(x.name, -self.number(0, 3), self.number(0, 3)), channels, x.size)
        if way == "residual":
            return self.joined(x)
        if way == "gate" and self.chance(0.5):
            mean = net.reduce_mean(x.name, [2, 3])
            return self.put(x, "Mul", x.name, net.op("Sigmoid", mean))
        if way == "neg":
            return self.put(x, "Neg", x.name)
        if way == "pool" and min(x.size) >= 3:
            kind = self.choose("MaxPool", "AveragePool")
            self.features.add(kind)
            return self.pooled(Tensor(x.name, channels, x.size), kind)
        return x

    def joined(self, x: Tensor) -> Tensor:
        """Combine with another tensor of its size: added, or beside it; parts of either fit."""
        others = [t for t in self.tensors if t.size == x.size and t.name != x.name]
        if not others:
            return x
        alike = [t for t in others if t.channels == x.channels]
        choice = alike if alike and self.chance(0.7) else others
        other = choice[int(self.rng.integers(len(choice)))]
        if self.chance(0.25) and other.channels + x.channels <= MAX_CHANNELS:
            self.features.add("joined channels")
            for one in (x, other):
                self.net.channels[one.name] = one.channels
            channels = x.channels + other.channels
            return Tensor(self.net.concat(x.name, other.name), channels, x.size)
        channels = min(x.channels, other.channels)
        names = [self.first(t, channels) for t in (x, other)][:: 1 if self.chance(0.5) else -1]
        self.features.add("residual")
        made = self.net.op(str(self.pick("Add", "Add", "Sub", "Mul")), *names)
        return Tensor(made, channels, x.size)

    def first(self, x: Tensor, channels: int) -> str:
        """Return the first channels of a tensor."""
        if channels == x.channels:
            return x.name
        return self.net.split(x.name, [channels, x.channels - channels])[0]

    # ---- the whole --------------------------------------------------------------------------

    def build(self) -> onnx.ModelProto:
        """Return the network."""
        size = int(self.rng.integers(3, 8)), int(self.rng.integers(3, 8))
        channels = int(self.rng.choice(CHANNELS))
        batch = self.pick("N", 1, 1)
        self.dynamic = batch == "N"
        self.net.input("x", [batch, channels, *size])  # type: ignore[list-item]
        self.tensors.append(Tensor("x", channels, size))
        ends: list[Tensor] = []
        for _ in range(int(self.rng.integers(3, self.most + 1))):
            source = self.tensors[-1 - int(self.rng.integers(min(3, len(self.tensors))))]
            self.features = set()
            data = self.moved(self.quantize(source))
            if data.values and self.chance(0.3):
                self.tensors.append(data)  # also read as numbers
            made = self.product(data)
            for _ in range(int(self.rng.integers(0, 4))):
                made = self.glue(made)
            made.trail = frozenset(self.features)
            self.tensors.append(made)
            ends.append(made)
        last = getattr(self, str(self.pick("bits", "three", "levels", "float")))(ends[-1])
        names = {last.name}
        names.update(t.name for t in self.tensors[1:] if self.chance(0.15))
        for name in sorted(names):
            self.net.outputs.append(name)
        model = self.net.model(check=False)  # whoever loads it does that
        for info in model.graph.output:
            info.type.tensor_type.elem_type = info.type.tensor_type.elem_type or TensorProto.FLOAT
        return model

    def feeds(self) -> dict[str, np.ndarray]:
        """Return inputs: real ones, or small integers with many zeros; of two images, one each."""
        (info,) = (i for i in self.net.inputs if i.name == "x")
        shape = [d.dim_value or 2 for d in info.type.tensor_type.shape.dim]
        rng = np.random.default_rng(self.seed)
        real = rng.standard_normal(shape) * 2
        if self.dyadic:
            real = np.round(real * 8) / 8
        whole = rng.integers(-2, 3, shape)
        if shape[0] == 2:
            return {"x": np.stack([real[0], whole[1]]).astype(np.float32)}
        return {"x": (real if rng.random() < 0.5 else whole).astype(np.float32)}
