"""Linear layers of BitNet and its kin, in the spellings of ONNX, with an oracle of their own.

A layer quantizes each row of its data by a scale that depends on the row, and multiplies integers
of 8 bits by weights of 1 to 2 bits. Each spelling writes the nodes and computes, with NumPy, the
integers of the product and the floats behind it, in the order that a compiler may keep.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx

from tests.collection.builder import Net

Array = np.ndarray
F = np.float32


@dataclass(frozen=True)
class Rows:
    """Rows of integers and how they become floats again: ``(q - zero)`` times or divided by."""

    q: Array
    scale: Array
    zero: Array | int = 0
    divide: bool = False

    def real(self, sums: Array) -> Array:
        """Return integer sums as the floats they stand for."""
        return sums.astype(F) / self.scale if self.divide else sums.astype(F) * self.scale


@dataclass(frozen=True)
class Spelling:
    """Nodes of a quantized product, and what they compute."""

    write: Callable[[Net, str, Weight, str], str]
    """Takes the network, its data, weights, and how the product is written."""
    rows: Callable[[Array], Rows]


@dataclass(frozen=True)
class Weight:
    """Integer weights [units, channels] and their scale, and how the file stores them."""

    whole: Array
    scale: Array
    store: str

    def integers(self, net: Net) -> str:
        """Write the integers as floats [channels, units]."""
        turned = np.ascontiguousarray(self.whole.T)
        if self.store == "packed":  # four to a byte, along the units
            units = -(-len(self.whole) // 4)
            padded = np.zeros((4 * units, self.whole.shape[1]), np.uint8)
            padded[: len(self.whole)] = self.whole + 2
            parts = padded.reshape(4, units, -1)
            byte = sum(parts[k].astype(np.uint8) << (2 * k) for k in range(4)).astype(np.uint8)
            name, three = net.const(byte, np.uint8), net.const(3, np.uint8)
            shifted = [
                net.op(
                    "BitwiseAnd",
                    net.op("BitShift", name, net.const(2 * k, np.uint8), direction="RIGHT"),
                    three,
                )
                for k in range(4)
            ]
            all_units = net.op("Concat", *shifted, axis=0)
            used = net.op(
                "Slice", all_units, net.ints([0]), net.ints([len(self.whole)]), net.ints([0])
            )
            number = net.op("Sub", net.cast(used), net.const(2.0))
            return net.op("Transpose", number, perm=[1, 0])
        if self.store == "int8":
            return net.cast(net.const(turned, np.int8))
        return net.const(turned.astype(F))

    def floats(self, net: Net) -> str:
        """Write the weights as floats [channels, units], times their scale."""
        scale = self.scale.astype(F)
        if self.store == "absmean":  # quantized by the graph from what was trained
            noise = np.random.default_rng(0).uniform(-0.4, 0.4, self.whole.shape)
            trained = np.where(self.whole == 0, noise, self.whole + noise * 0.9).astype(F)
            name = net.const(trained * F(0.05))
            unit = net.const(F(0.05))
            number = net.clip(net.op("Round", net.op("Div", name, unit)), -1, 1)
            number = net.op("Mul", number, net.const(scale.reshape(-1, 1)))
            return net.op("Transpose", number, perm=[1, 0])
        if self.store == "dequantize":
            whole = net.const(np.ascontiguousarray(self.whole.T), np.int8)
            return net.op("DequantizeLinear", whole, net.const(scale), axis=1)
        return net.op("Mul", self.integers(net), net.const(scale))


def _absmax(net: Net, x: str) -> str:
    return net.op("ReduceMax", net.op("Abs", x), net.ints([-1]), keepdims=1)


def _top(x: Array) -> Array:
    return np.abs(x).max(axis=-1, keepdims=True)


def _limited(net: Net, x: str, low: float) -> str:
    return net.op("Max", x, net.const(low))


def _product(net: Net, q: str, weight: str, how: str) -> str:
    return net.op(how, q, weight)


def _scaled(net: Net, x: str) -> tuple[str, str]:
    """Write levels and the number they were multiplied by."""
    scale = net.op("Div", net.const(127.0), _limited(net, _absmax(net, x), 1e-5))
    return net.clip(net.op("Round", net.op("Mul", x, scale)), -128, 127), scale


def _divided(net: Net, x: str) -> tuple[str, str]:
    """Write levels and the number they were divided by."""
    scale = _limited(net, net.op("Div", _absmax(net, x), net.const(127.0)), 1e-7)
    return net.clip(net.op("Round", net.op("Div", x, scale)), -127, 127), scale


def _after(net: Net, x: str, w: Weight, how: str) -> str:
    q, scale = _scaled(net, x)
    y = net.op("Div", _product(net, q, w.integers(net), how), scale)
    return net.op("Mul", y, net.const(w.scale))


def _together(net: Net, x: str, w: Weight, how: str) -> str:
    q, scale = _scaled(net, x)
    both = net.op("Mul", scale, net.const(1 / w.scale))
    return net.op("Div", _product(net, q, w.integers(net), how), both)


def _before(net: Net, x: str, w: Weight, how: str) -> str:
    q, scale = _scaled(net, x)
    return _product(net, net.op("Div", q, scale), w.floats(net), how)


def _times(net: Net, x: str, w: Weight, how: str) -> str:
    q, scale = _divided(net, x)
    return _product(net, net.op("Mul", q, scale), w.floats(net), how)


def _integer(net: Net, x: str, w: Weight, how: str) -> str:
    q, scale = _divided(net, x)
    whole = net.const(np.ascontiguousarray(w.whole.T), np.int8)
    sums = net.op("MatMulInteger", net.op("Cast", q, to=onnx.TensorProto.INT8), whole)
    return net.op("Mul", net.op("Mul", net.cast(sums), scale), net.const(w.scale))


def _dynamic(net: Net, x: str, w: Weight, how: str) -> str:
    q, scale, zero = net.op("DynamicQuantizeLinear", x, n=3)
    whole = net.const(np.ascontiguousarray(w.whole.T), np.int8)
    sums = net.cast(net.op("MatMulInteger", q, whole, zero))
    return net.op("Mul", sums, net.op("Mul", scale, net.const(w.scale)))


def _dequantized(net: Net, x: str, w: Weight, how: str) -> str:
    q, scale, zero = net.op("DynamicQuantizeLinear", x, n=3)
    return _product(net, net.op("DequantizeLinear", q, scale, zero), w.floats(net), how)


def _qdq(net: Net, x: str, w: Weight, how: str) -> str:
    top = net.op("ReduceMax", net.op("Abs", x), keepdims=0)
    scale = _limited(net, net.op("Div", top, net.const(127.0)), 1e-7)
    zero = net.const(0, np.int8)
    q = net.op("QuantizeLinear", x, scale, zero)
    return _product(net, net.op("DequantizeLinear", q, scale, zero), w.floats(net), how)


def _zero_point(net: Net, x: str, w: Weight, how: str) -> str:
    """Write a zero point of each row, as PyTorch's per-token quantizers have it."""
    low = net.op("Min", net.op("ReduceMin", x, net.ints([-1]), keepdims=1), net.const(0.0))
    high = net.op("Max", net.op("ReduceMax", x, net.ints([-1]), keepdims=1), net.const(0.0))
    scale = _limited(net, net.op("Div", net.op("Sub", high, low), net.const(255.0)), 1e-5)
    zero = net.op("Sub", net.const(-128.0), net.op("Round", net.op("Div", low, scale)))
    zero = net.clip(zero, -128, 127)
    q = net.clip(net.op("Add", net.op("Round", net.op("Div", x, scale)), zero), -128, 127)
    real = net.op("Mul", net.op("Sub", q, zero), scale)
    return _product(net, real, w.floats(net), how)


def _unlimited(net: Net, x: str, w: Weight, how: str) -> str:
    """Write what BinaryBERT and LLM-QAT have: no Clip, since nothing exceeds the largest number."""
    scale = net.op("Div", net.const(127.0), net.op("Add", _absmax(net, x), net.const(1e-6)))
    q = net.op("Round", net.op("Mul", x, scale))
    return _product(net, net.op("Div", q, scale), w.floats(net), how)


def _expanded(net: Net, x: str, w: Weight, how: str) -> str:
    """Write a scale that is repeated for each element before it is computed with."""
    top = net.op("Expand", _absmax(net, x), net.op("Shape", x))
    scale = net.op("Mul", net.op("Reciprocal", _limited(net, top, 1e-5)), net.const(127.0))
    q = net.clip(net.op("Round", net.op("Mul", x, scale)), -128, 127)
    return _product(net, net.op("Div", q, scale), w.floats(net), how)


def _flattened(net: Net, x: str, w: Weight, how: str) -> str:
    """Write GPT-2's product, which is one of matrices: rows are flattened after the quantizer."""
    q, scale = _scaled(net, x)
    real = net.op("Reshape", net.op("Div", q, scale), net.ints([-1, w.whole.shape[1]]))
    y = _product(net, real, w.floats(net), how)
    outer = net.op("Slice", net.op("Shape", x), net.ints([0]), net.ints([-1]))
    return net.op("Reshape", y, net.op("Concat", outer, net.ints([len(w.whole)]), axis=0))


def _turned(net: Net, x: str, w: Weight, how: str) -> str:
    """Write a quantizer of channels in front of tokens, as behind a convolution or a GroupNorm."""
    rank = len(net.inputs[0].type.tensor_type.shape.dim)
    perm = [*range(rank - 2), rank - 1, rank - 2]
    turned = net.op("Transpose", x, perm=perm)
    top = net.op("ReduceMax", net.op("Abs", turned), net.ints([-2]), keepdims=1)
    scale = net.op("Div", net.const(127.0), _limited(net, top, 1e-5))
    q = net.clip(net.op("Round", net.op("Mul", turned, scale)), -128, 127)
    real = net.op("Transpose", net.op("Div", q, scale), perm=perm)
    return _product(net, real, w.floats(net), how)


def _left(net: Net, x: str, w: Weight, how: str) -> str:
    """Write the product with the weights first, and tokens behind channels."""
    q, scale = _scaled(net, x)
    rank = len(net.inputs[0].type.tensor_type.shape.dim)
    perm = [*range(rank - 2), rank - 1, rank - 2]
    real = net.op("Transpose", net.op("Div", q, scale), perm=perm)
    y = _product(net, net.op("Transpose", w.floats(net), perm=[1, 0]), real, how)
    return net.op("Transpose", y, perm=perm)


def _rows_scaled(x: Array) -> Rows:
    scale = F(127) / np.maximum(_top(x), F(1e-5))
    return Rows(np.clip(np.rint(x * scale), -128, 127), scale, divide=True)


def _rows_unlimited(x: Array) -> Rows:
    scale = F(127) / (_top(x) + F(1e-6))
    return Rows(np.rint(x * scale), scale, divide=True)


def _rows_inverse(x: Array) -> Rows:
    scale = (F(1) / np.maximum(_top(x), F(1e-5))) * F(127)
    return Rows(np.clip(np.rint(x * scale), -128, 127), scale, divide=True)


def _rows_divided(x: Array) -> Rows:
    scale = np.maximum(_top(x) / F(127), F(1e-7))
    return Rows(np.clip(np.rint(x / scale), -127, 127), scale)


def _rows_dynamic(x: Array) -> Rows:
    low, high = min(x.min(), F(0)), max(x.max(), F(0))
    scale = F(high - low) / F(255)
    if not scale:
        return Rows(np.zeros_like(x), scale)
    zero = np.rint(np.clip(F(0) - low / scale, 0, 255))
    return Rows(np.clip(np.rint(x / scale) + zero, 0, 255), scale, zero)


def _rows_qdq(x: Array) -> Rows:
    scale = np.maximum(np.abs(x).max() / F(127), F(1e-7))
    return Rows(np.clip(np.rint(x / scale), -128, 127), scale)


def _rows_zero_point(x: Array) -> Rows:
    low = np.minimum(x.min(axis=-1, keepdims=True), F(0))
    high = np.maximum(x.max(axis=-1, keepdims=True), F(0))
    scale = np.maximum((high - low) / F(255), F(1e-5))
    zero = np.clip(F(-128) - np.rint(low / scale), -128, 127)
    return Rows(np.clip(np.rint(x / scale) + zero, -128, 127), scale, zero)


SPELLINGS = {
    "scales after the product": Spelling(_after, _rows_scaled),
    "both scales at once": Spelling(_together, _rows_scaled),
    "divided before": Spelling(_before, _rows_scaled),
    "multiplied before": Spelling(_times, _rows_divided),
    "MatMulInteger": Spelling(_integer, _rows_divided),
    "DynamicQuantizeLinear": Spelling(_dynamic, _rows_dynamic),
    "DynamicQuantizeLinear, dequantized": Spelling(_dequantized, _rows_dynamic),
    "QuantizeLinear by a computed scale": Spelling(_qdq, _rows_qdq),
    "a zero point of each row": Spelling(_zero_point, _rows_zero_point),
    "not limited": Spelling(_unlimited, _rows_unlimited),
    "an expanded scale": Spelling(_expanded, _rows_inverse),
    "rows flattened after the quantizer": Spelling(_flattened, _rows_scaled),
    "channels in front of tokens": Spelling(_turned, _rows_scaled),
    "weights on the left": Spelling(_left, _rows_scaled),
}

STORES = ("float", "int8", "packed", "absmean", "dequantize")
"""How files store weights; ``absmean`` is ternary."""


def weight(rng: np.random.Generator, units: int, channels: int, store: str, bits: str) -> Weight:
    """Return random weights: of ``1``, ``1.58`` or ``2`` bits, with one scale or one each."""
    shape = (units, channels)
    if bits == "1":
        whole = 2 * rng.integers(0, 2, shape) - 1
    elif bits == "1.58":
        whole = rng.integers(-1, 2, shape)
    else:
        whole = rng.integers(-2, 2, shape)
    scale = rng.uniform(0.01, 0.2, units if rng.random() < 0.3 else 1)
    return Weight(whole, scale.astype(F), store)


def data(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Return rows of all kinds: of zeros, constant, saturating, with ties at half, tiny, one-sided.

    A row whose largest element is 127 has a scale of 1, and elements half-way between integers.
    """
    x = rng.standard_normal(shape).astype(F)
    rows = x.reshape(-1, shape[-1])
    for row in rows:
        kind = rng.integers(0, 8)
        if kind == 0:
            row[:] = 0
        elif kind == 1:
            row[:] = rng.choice([-3.0, 0.25, 1.0, 7e-6])
        elif kind == 2:
            row[rng.integers(len(row))] = rng.choice([-1e30, 1e4, 1e33])
        elif kind == 3:
            row[:] = rng.integers(-127, 127, len(row)) + F(0.5)
            row[rng.integers(len(row))] = rng.choice([-127, 127])
        elif kind == 4:
            row *= F(1e-7)
        elif kind == 5:
            row[:] = np.abs(row)
    return x


def wanted(x: Array, spelling: Spelling, w: Weight, bias: Array | None) -> Array:
    """Return what a layer gives, by its integers."""
    rows = spelling.rows(x)
    sums = (rows.q - rows.zero).astype(np.int64) @ w.whole.T.astype(np.int64)
    y = rows.real(sums).astype(np.float64) * w.scale.astype(F)
    return y if bias is None else y + bias
