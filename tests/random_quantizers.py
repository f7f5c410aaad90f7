"""Random decisions: what is compared or rounded, and what that makes of it; see `random_models`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np

from tests.collection.builder import Net


@dataclass(eq=False)
class Tensor:
    """An image on the way; `kind` says what it holds: a data kind of `Maker.quantize`."""

    name: str
    channels: int
    size: tuple[int, int]
    kind: str = "float"
    values: tuple[float, ...] = ()
    trail: frozenset[str] = frozenset()
    """Features of the layer that made it."""


@dataclass
class Quantizers:
    """Chooses what there is, and appends quantizers to a network.

    Attributes
    ----------
    features : set of str
        Of the layer that is being made.
    pairs : set of pairs of str
        Features that are together in a layer: its data, weights, padding, groups and epilogue, and
        the decision that its result is read by, with what that makes.
    """

    seed: int
    most: int = 12
    """Layers; there are 3 at least."""
    beyond: bool = False
    """Whether padding may be wider than a window, so that some of them lie in nothing else."""
    features: set[str] = field(default_factory=set)
    pairs: set[tuple[str, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.net = Net(seed=self.seed)
        self.dyadic = self.chance(0.5)
        self.exact = self.dyadic  # all data, too
        self.tensors: list[Tensor] = []
        self.quantized: list[Tensor] = []

    # ---- choosing ---------------------------------------------------------------------------

    def chance(self, part: float) -> bool:
        return bool(self.rng.random() < part)

    def pick(self, *items: object) -> object:
        return items[int(self.rng.integers(len(items)))]

    def choose(self, *words: str) -> str:
        return str(self.pick(*words))

    def number(self, low: float, high: float) -> float:
        """Return a constant: a multiple of 1/4, or any."""
        value = self.rng.uniform(low, high)
        return float(np.round(value * 4) / 4 if self.dyadic else np.float32(value))

    def vector(self, channels: int, low: float, high: float) -> np.ndarray:
        return np.array([self.number(low, high) for _ in range(channels)], np.float32)

    def put(self, x: Tensor, kind: str, *inputs: str, **attrs: object) -> Tensor:
        """Append an operator that keeps shape; the result is of unknown kind."""
        return Tensor(self.net.op(kind, *inputs, **attrs), x.channels, x.size)

    def constant(self, value: object) -> str:
        return self.net.const(value)

    def column(self, values: np.ndarray) -> str:
        return self.net.const(values.reshape(-1, 1, 1))

    # ---- data kinds -------------------------------------------------------------------------

    def quantize(self, x: Tensor) -> Tensor:
        kind = str(self.pick("bits", "three", "levels", "float"))
        out = getattr(self, kind)(x)
        self.features |= {f"data {kind}"}
        self.exact = self.exact and all(v * 1024 == round(v * 1024) for v in out.values)
        self.net.channels[out.name] = out.channels
        self.quantized.append(out)
        return out

    def decided(self, x: Tensor, at: str, to: str) -> None:
        """Remember which decision reads a tensor, and what it makes."""
        words = {*x.trail, at, to}
        self.pairs.update(itertools.combinations(sorted(words), 2))

    def decision(self, x: Tensor, to: str) -> str:
        at = str(self.pick("at >=", "at >", "at half"))
        self.decided(x, at, to)
        return at

    def compared(self, at: str, x: str, limit: str) -> str:
        return self.net.op("GreaterOrEqual" if at == "at >=" else "Greater", x, limit)

    def float(self, x: Tensor) -> Tensor:
        """Leave it a number, or make another one by a decision."""
        if self.chance(0.4):
            self.decided(x, "at nothing", "to float")
            return x
        at = self.decision(x, "to float")
        if at == "at half":
            if self.chance(0.5):
                return self.put(x, "Round", x.name)
            four = self.constant(4.0)
            return self.put(x, "Div", self.net.op("Round", self.net.op("Mul", x.name, four)), four)
        flag = self.compared(at, x.name, self.constant(self.number(-1, 1)))
        other = self.net.op("Mul", x.name, self.constant(self.number(-1, 1)))
        return self.put(x, "Where", flag, x.name, other)

    def bits(self, x: Tensor) -> Tensor:
        at = self.decision(x, "to bits")
        if at == "at half":
            name = self.net.op("Round", self.net.clip(x.name, 0, 1))
            return Tensor(name, x.channels, x.size, "bits", (0.0, 1.0))
        limit = self.constant(0.0)
        if self.chance(0.3):
            limit = self.column(self.vector(x.channels, -1, 1))
        low, high = self.pick((-1, 1), (-1, 1), (0, 1), (1, -1), (-0.5, 0.5), (0, 0.3), (-0.3, 0.5))  # type: ignore[misc]
        flag = self.compared(at, x.name, limit)
        if (low, high) == (0, 1) and self.chance(0.5):
            name = self.net.cast(flag)
        else:
            name = self.net.where(flag, np.float32(high), np.float32(low))
        return Tensor(name, x.channels, x.size, "bits", (low, high))

    def three(self, x: Tensor) -> Tensor:
        self.decided(x, "at sign", "to three")
        name = self.net.op("Sign", x.name)
        unit = 1.0
        if self.chance(0.3):
            unit = self.pick(0.5, 0.3, -1.0)  # type: ignore[assignment]
            name = self.net.op("Mul", name, self.constant(unit))
        return Tensor(name, x.channels, x.size, "three", (-unit, 0.0, unit))

    def levels(self, x: Tensor) -> Tensor:
        at = self.decision(x, "to levels")
        top = int(self.pick(2, 3, 3, 7, 15))  # type: ignore[call-overload]
        form = str(self.pick("unit", "symmetric", "bipolar", "floor", "qdq"))
        if at != "at half":
            form = str(self.pick("ternary", "steps"))
        net, unit = self.net, float(self.pick(0.5, 0.25, 0.3, 1.0))  # type: ignore[arg-type]
        if form == "unit":
            scaled = net.op("Mul", net.clip(x.name, 0, 1), self.constant(float(top)))
            name = net.op("Div", net.op("Round", scaled), self.constant(float(top)))
            values = np.arange(top + 1) / np.float32(top)
        elif form == "bipolar":
            scaled = net.op("Mul", net.clip(x.name, -1, 1), self.constant(top / 2))
            shifted = net.op("Add", scaled, self.constant(top / 2))
            whole = net.op("Mul", net.op("Round", shifted), self.constant(2 / top))
            name = net.op("Sub", whole, self.constant(1.0))
            values = np.arange(top + 1) * np.float32(2 / top) - 1
        elif form == "qdq":
            zero = int(self.rng.integers(0, top + 1))
            point = net.const(zero, np.uint8)
            whole = net.op("QuantizeLinear", x.name, self.constant(unit), point)
            limited = net.op("Clip", whole, net.const(0, np.uint8), net.const(top, np.uint8))
            name = net.op("DequantizeLinear", limited, self.constant(unit), point)
            values = (np.arange(top + 1) - zero) * np.float32(unit)
        elif form == "ternary":
            up = net.cast(self.compared(at, x.name, self.constant(unit)))
            down = net.cast(self.compared(at, self.constant(-unit), x.name))
            name = net.op("Sub", up, down)
            values = np.array([-1.0, 0.0, 1.0])
        elif form == "steps":
            flags = [self.compared(at, x.name, self.constant(unit * k)) for k in range(3)]
            name = net.op("Sum", *(net.where(flag, np.float32(unit), 0) for flag in flags))
            values = np.arange(4) * np.float32(unit)
        else:
            low = -(top // 2) if form == "symmetric" else 0
            scaled = net.op("Div", x.name, self.constant(unit))
            limited = net.clip(scaled, low, low + top)
            half = net.op("Add", limited, self.constant(0.5))
            whole = net.op("Floor", half) if form == "floor" else net.op("Round", limited)
            name = net.op("Mul", whole, self.constant(unit))
            values = np.arange(low, low + top + 1) * np.float32(unit)
        return Tensor(name, x.channels, x.size, "levels", tuple(values.tolist()))
