"""BMXNet's layers as ONNX nodes: signs, k-bit quantizers, packed weights, results from 0 to n.

    QConvolution(x, w)    ->  s = sign(x); p = Pad(s, +1); d = Conv(p, sign(w)); y = (d + n) / 2

with n products per sum, sign(0) = +1, and the bias added afterwards. A layer with more bits
quantizes data and weights as in DoReFa-Net, but with C's ``roundf``, which rounds halves away from
0; its result remains the plain sum.

References
----------
.. [1] Yang et al., "BMXNet: An Open-Source Binary Neural Network Implementation Based on MXNet",
   ACM Multimedia 2017, section 2.2.
.. [2] Zhou et al., "DoReFa-Net", arXiv 1606.06160, section 2.4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from bnncc.errors import ModelError, ShapeError, UnsupportedOp
from bnncc.frontend.mxnet_build import Array, Builder
from bnncc.frontend.mxnet_symbol import SymbolNode

FULL = 32
"""Bit width of tensors that are not quantized."""

QONNX = "qonnx.custom_op.general"
"""Domain of the only operator that rounds halves away from 0; ONNX has none."""

_ROUND = {"scale": 1.0, "zero": 0.0}
"""Attributes with which it only rounds."""


def sign(b: Builder, x: str, out: str) -> str:
    """Add ``out = +1 where x >= 0, else -1``."""
    zero = b.constant(0.0, f"{out}.zero")
    values = b.constant(1.0, f"{out}.one"), b.constant(-1.0, f"{out}.minus_one")
    positive = b.add("GreaterOrEqual", [x, zero], f"{out}.positive")
    return b.add("Where", [positive, *values], out)


def round_away(b: Builder, x: str, out: str) -> str:
    """Add ``out = floor(x + 1/2)`` without rounding the sum: C's ``roundf`` for x >= 0."""
    floor = b.add("Floor", [x], f"{out}.floor")
    rest = b.add("Sub", [x, floor], f"{out}.rest")
    half = b.constant(0.5, f"{out}.half")
    above = b.add("GreaterOrEqual", [rest, half], f"{out}.above")
    one = b.add("Cast", [above], f"{out}.one", to=1)
    return b.add("Add", [floor, one], out)


def quantize(b: Builder, x: str, bits: int, out: str) -> str:
    """Add the quantizer of activations: a sign, or multiples of ``1 / (2**bits - 1)`` in [0, 1]."""
    if bits == FULL:
        return b.add("Identity", [x], out)
    if bits == 1:
        return sign(b, x, out)
    ends = b.constant(0.0, f"{out}.low"), b.constant(1.0, f"{out}.high")
    clipped = b.add("Clip", [x, *ends], f"{out}.clipped")
    steps = b.constant(_steps(bits), f"{out}.steps")
    scaled = b.add("Mul", [clipped, steps], f"{out}.scaled")
    whole = [b.constant(value, f"{out}.{k}") for k, value in _ROUND.items()]
    width = b.constant(bits, f"{out}.bits")
    rounded = b.add(
        "Quant", [scaled, *whole, width], f"{out}.rounded", domain=QONNX, signed=0, narrow=0,
        rounding_mode="HALF_UP",
    )  # fmt: skip
    return b.add("Div", [rounded, steps], out)


def quantized_weight(weight: Array, bits: int, where: str) -> Array:
    """Return weights of `bits` bits, in float32 as BMXNet computes them.

    Parameters
    ----------
    weight : ndarray of float
        As trained.
    bits : int
        1 gives signs; `FULL` gives the weights themselves.
    where : str
        The layer, for messages.

    Returns
    -------
    ndarray of float32
        For other `bits`, multiples of ``2 / (2**bits - 1)`` in [-1, 1].

    Raises
    ------
    ModelError
        If all weights are 0, which cannot be scaled.
    """
    weight = weight.astype(np.float32)
    if bits == FULL:
        return weight
    if bits == 1:
        return np.where(weight >= 0, np.float32(1), np.float32(-1))
    squashed = np.tanh(weight)
    top = np.abs(squashed).max(initial=np.float32(0))
    if not top > 0:
        raise ModelError(f"{where}: all its weights are 0, which {bits} bits cannot express")
    scaled = (squashed / (np.float32(2) * top) + np.float32(0.5)) * _steps(bits)
    floor = np.floor(scaled)
    rounded = floor + (scaled - floor >= np.float32(0.5))
    return np.asarray(np.float32(2) * (rounded / _steps(bits)) - np.float32(1), np.float32)


def _steps(bits: int) -> np.float32:
    return np.float32(2) ** np.float32(bits) - np.float32(1)


def unpacked(weight: Array, filters: int, by_word: bool, where: str) -> Array:
    """Unpack the signs from packed weights.

    Parameters
    ----------
    weight : ndarray of float32 or float64
        Its bytes are words of 32 or 64 bits, least significant bit first; bit 1 means +1.
    filters : int
        Output channels.
    by_word : bool
        Whether words of all filters are interleaved, as in fully connected layers, or each filter
        is contiguous.
    where : str
        The layer, for messages.

    Returns
    -------
    ndarray of float32, shape (filters, K)
        +1 and -1.

    Raises
    ------
    ModelError
        If the type of the stored numbers is not that of words.
    ShapeError
        If the words cannot be divided among the filters.
    """
    if weight.dtype.kind != "f" or weight.dtype.itemsize not in (4, 8):
        raise ModelError(
            f"{where}: packed weights of type {weight.dtype}, expected float32 or float64 (their "
            "bytes are the words)"
        )
    if not weight.size or weight.size % filters:
        raise ShapeError(
            f"{where}: {weight.size} packed words do not divide among {filters} filters"
        )
    raw = np.ascontiguousarray(weight).reshape(-1).view(np.uint8)
    order = (-1, filters, weight.itemsize) if by_word else (filters, -1, weight.itemsize)
    rows = raw.reshape(order)
    rows = rows.transpose(1, 0, 2) if by_word else rows
    bits = np.unpackbits(rows.reshape(filters, -1), axis=1, bitorder="little")
    return np.where(bits, np.float32(1), np.float32(-1))


def activation(b: Builder, node: SymbolNode, inputs: Sequence[str]) -> list[str]:
    """Add a QActivation; one that only affects gradients is omitted."""
    bits = _bits(node, "act_bit")
    if node.attrs.flag("backward_only", False):
        bits = FULL
    return [quantize(b, inputs[0], bits, f"{node.name}_output")]


def convolution(b: Builder, node: SymbolNode, inputs: Sequence[str]) -> list[str]:
    """Add a QConvolution."""
    a, where = node.attrs, node.where
    kernel = a.integers("kernel")
    rank = len(kernel)
    window: dict[str, Any] = {
        "kernel_shape": kernel,
        "strides": a.integers("stride", (1,) * rank),
        "dilations": a.integers("dilate", (1,) * rank),
    }
    pad = a.integers("pad", (0,) * rank)
    groups, filters = a.integer("num_group", 1, 1), a.integer("num_filter", least=1)
    a.text("layout", "None", ("None", "NCHW", "NCW"))
    scaling = a.text("scaling_mode", "none", ("none", "forward", "backward", "None"))
    weight, act_bits, weight_bits = _quantized(b, node, inputs, filters, by_word=False)
    if weight.ndim == 2:  # packed
        if groups > 1:
            raise UnsupportedOp(f"{where}: packed weights in {groups} groups")
        taps = math.prod(kernel)
        if min(kernel) < 1 or weight.shape[1] % taps:
            raise ShapeError(
                f"{where}: {weight.shape[1]} packed weights per filter do not divide among the "
                f"{taps} taps of kernel {kernel}"
            )
        weight = weight.reshape(filters, -1, *kernel)
        if scaling == "forward":
            raise UnsupportedOp(
                f"{where}: `scaling_mode` is forward, but packed weights have lost their mean"
            )
    data = quantize(b, inputs[0], act_bits, f"{node.name}.data")
    if act_bits > 1:
        window["pads"] = (*pad, *pad)
    elif any(pad):  # zeros are padded before the sign
        fill = b.constant(1.0, f"{node.name}.pad_value")
        sizes = b.constant([0, 0, *pad, 0, 0, *pad], f"{node.name}.pads", np.int64)
        data = b.add("Pad", [data, sizes, fill], f"{node.name}.padded", mode="constant")
    stored = b.constant(weight, f"{node.name}.weight")
    tip = b.add("Conv", [data, stored], f"{node.name}.dot", name=node.name, group=groups, **window)
    one_bit = act_bits == weight_bits == 1
    tip = _finished(b, node, tip, weight[0].size if one_bit else 0, inputs)
    if one_bit and scaling == "forward":
        mean = np.abs(b.param(inputs[1], where).astype(np.float64)).mean()
        tip = b.add("Mul", [tip, b.constant(mean, f"{node.name}.mean")], f"{node.name}.scaled")
    return [b.add("Identity", [tip], f"{node.name}_output")]


def fully_connected(b: Builder, node: SymbolNode, inputs: Sequence[str]) -> list[str]:
    """Add a QFullyConnected."""
    units = node.attrs.integer("num_hidden", least=1)
    weight, act_bits, weight_bits = _quantized(b, node, inputs, units, by_word=True)
    data = quantize(b, inputs[0], act_bits, f"{node.name}.data")
    rows = b.add("Flatten", [data], f"{node.name}.rows", axis=1, rank=2)
    stored = b.constant(weight.reshape(weight.shape[0], -1), f"{node.name}.weight")
    tip = b.add("Gemm", [rows, stored], f"{node.name}.dot", name=node.name, transB=1)
    taps = weight[0].size if act_bits == weight_bits == 1 else 0
    tip = _finished(b, node, tip, taps, inputs)
    return [b.add("Identity", [tip], f"{node.name}_output")]


def _quantized(
    b: Builder, node: SymbolNode, inputs: Sequence[str], filters: int, *, by_word: bool
) -> tuple[Array, int, int]:
    """Return the effective weights of a layer, and the bit widths of data and weights."""
    act_bits, weight_bits = _bits(node, "act_bit"), _bits(node, "weight_bit")
    stored = b.param(inputs[1], node.where)
    if node.attrs.flag("binarized_weights_only", False):
        if (act_bits, weight_bits) != (1, 1):
            raise UnsupportedOp(
                f"{node.where}: packed weights with {act_bits} and {weight_bits} bits, expected 1"
            )
        return unpacked(stored, filters, by_word, node.where), 1, 1
    if stored.ndim < 2 or stored.shape[0] != filters:
        raise ShapeError(
            f"{node.where}: weights of shape {list(stored.shape)} for {filters} outputs; packed "
            "ones have the attribute `binarized_weights_only`"
        )
    return quantized_weight(stored, weight_bits, node.where), act_bits, weight_bits


def _bits(node: SymbolNode, key: str) -> int:
    bits = node.attrs.integer(key, 1, 1)
    if bits > FULL:
        raise ModelError(f"{node.where}: `{key}` is {bits}, expected 1 to {FULL}")
    return bits


def _finished(b: Builder, node: SymbolNode, tip: str, taps: int, inputs: Sequence[str]) -> str:
    """Map sums of `taps` signs to 0 .. taps, and add the bias."""
    name = node.name
    if taps:
        tip = b.add("Add", [tip, b.constant(taps, f"{name}.taps")], f"{name}.shifted")
        tip = b.add("Mul", [tip, b.constant(0.5, f"{name}.half")], f"{name}.count")
    if node.attrs.flag("no_bias", True):
        return tip
    if len(inputs) < 3:
        raise ModelError(f"{node.where}: reads no bias although `no_bias` is False")
    bias = b.param(inputs[2], node.where).reshape(-1, *(1,) * (b.rank(tip) - 2))
    return b.add("Add", [tip, b.constant(bias, f"{name}.bias")], f"{name}.biased")
