"""Read QONNX: the quantizers that Brevitas, QONNX and FINN add to ONNX, in their three domains.

    BipolarQuant(x, s)          ->  Where(x >= 0, s, -s)
    Quant(x, s, z, bits)        ->  bnncc.Quant; weights fold
    Trunc(x, s, z, in, out)     ->  Div, Round, Mul, Floor, Mul
    MultiThreshold(x, T)        ->  bnncc.MultiThreshold; Where(x >= T, ...) if it has one step
    QuantAvgPool2d(x)           ->  AveragePool, Mul, Round, Mul, Floor
    XnorPopcountMatMul(a, b)    ->  (MatMul(2a - 1, 2b - 1) + K) / 2

Each computes the result of the executor in the package `qonnx`, in float32 and in its order of
operations. Annotated data types of inputs (``finn_datatype``) are handled in
`bnncc.frontend.annotations`, channels-last operators in `bnncc.frontend.channels_last`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bnncc.errors import ModelError, ShapeError, UnsupportedOp
from bnncc.frontend.channels_last import FIRST, LAST, bipolar, matches
from bnncc.ir.graph import Node
from bnncc.ir.moves import inverse
from bnncc.ir.pieces import Expression, Reader
from bnncc.ir.quantizers import MULTI_THRESHOLD, PLAIN, QUANT, ROUNDING, integer_range
from bnncc.ir.shaperules import broadcast

Array = np.ndarray[Any, Any]

MAX_BITS = 64

_LAYOUTS = {2: "NC", 3: "NWC", 4: "NCHW"}
"""Layout that MultiThreshold assumes, by rank, if its ``data_layout`` is empty."""


def _parameter(write: Expression, index: int, what: str) -> Array:
    """Return a constant input as float32."""
    value = write.graph.constants.get(write.input(index))
    if value is None:
        raise UnsupportedOp(
            f"{write.where}: its {what} `{write.input(index)}` is computed at run time, "
            "expected a constant",
            hint="export the model in evaluation mode",
        )
    if value.dtype.kind not in "fiub" or not value.size:
        raise ModelError(f"{write.where}: its {what} is {value.dtype.name}{list(value.shape)}")
    single = value.astype(np.float32)
    if not np.isfinite(single).all():
        raise ModelError(f"{write.where}: its {what} holds numbers that are not finite")
    return single


def _scale(write: Expression, index: int = 1, what: str = "scale") -> Array:
    value = _parameter(write, index, what)
    if not value.all():
        raise ModelError(f"{write.where}: its {what} is 0")
    return value


def _bits(write: Expression, index: int, what: str = "bit width") -> np.float32:
    value = _parameter(write, index, what)
    if value.size != 1 or not 1 <= value.reshape(()) <= MAX_BITS:
        found = value.reshape(-1)[:4].tolist()
        raise ModelError(
            f"{write.where}: its {what} is {found}, expected one number from 1 to {MAX_BITS}"
        )
    return np.float32(value.reshape(()))


def _mode(node: Node, default: str) -> str:
    mode = str(node.attrs.get("rounding_mode", default)).upper()
    mode = {"ROUND_TO_ZERO": "DOWN"}.get(mode, mode)  # written by older versions of Brevitas
    if mode not in ROUNDING:
        raise UnsupportedOp(
            f"{node.where}: `rounding_mode` is {mode[:40]!r}, expected one of {', '.join(ROUNDING)}"
        )
    return mode


def _data(write: Expression) -> str:
    """Return the data, which must be float32."""
    if (found := write.type().dtype) != "float32":
        raise ModelError(f"{write.where}: its data is {found}, expected float32")
    return write.node.inputs[0]


def _bipolar_quant(write: Expression) -> str:
    x, name = _data(write), write.node.inputs[1]
    scale = write.graph.constants.get(name)
    size = np.float32(1)
    fixed = scale is not None and scale.size == 1 and scale.ndim <= len(write.type().shape)
    if fixed and scale is not None:
        size = np.float32(scale.reshape(()))
    positive = write("GreaterOrEqual", x, write.constant(0))
    signs = write("Where", positive, write.constant(size), write.constant(-size))
    return signs if fixed else write("Mul", signs, name)


def _quant(write: Expression) -> str:
    x, a = _data(write), write.node.attrs
    scale, zero = _scale(write), _parameter(write, 2, "zero point")
    bits, shape = _bits(write, 3), write.type().shape
    whole = broadcast([shape, scale.shape, zero.shape], write.where)
    if whole != shape and x not in write.graph.constants:
        raise ShapeError(
            f"{write.where}: its scale {list(scale.shape)} or zero point {list(zero.shape)} is "
            f"larger than its data {list(shape)}"
        )
    if bits == 1 and a["signed"] and (scale > 0).all() and not zero.any():
        return _bipolar_quant(write)
    mode, parameters = _mode(write.node, "ROUND"), map(write.constant, (scale, zero, bits))
    kept = {key: int(a[key]) for key in ("signed", "narrow")}
    return write(QUANT, x, *parameters, **kept, rounding_mode=mode)


def _trunc(write: Expression) -> str:
    x, node = _data(write), write.node
    scale, zero = _scale(write), _parameter(write, 2, "zero point")
    before, mode = _bits(write, 3, "input bit width"), _mode(node, "FLOOR")
    limits: tuple[float, float] | None = None
    if len(node.inputs) == 5:
        step = np.asarray(2.0 ** np.float64(before - _bits(write, 4, "output bit width")))
        out_scale, out_zero = scale, zero
    else:
        out_scale = _scale(write, 4, "output scale")
        ratio = out_scale / scale
        if (ratio <= 0).any():
            raise ModelError(f"{write.where}: its scales have different signs")
        step = 2.0 ** np.round(np.log2(ratio))
        out_zero = zero / step.astype(np.float32)
        signed, narrow = (bool(node.attrs.get(k, d)) for k, d in (("signed", 1), ("narrow", 0)))
        bits = float(_bits(write, 5, "output bit width"))
        limits = integer_range(bits, signed=signed, narrow=narrow)
    level = write("Div", x, write.constant(scale))
    if zero.any():
        level = write("Add", level, write.constant(zero))
    shifted = write("Div", write("Round", level), write.constant(step))
    if limits is not None:
        shifted = write("Clip", shifted, *map(write.constant, limits))
    if mode in PLAIN:
        whole = write(PLAIN[mode], shifted)
    else:
        parameters = map(write.constant, (1, 0, MAX_BITS))
        whole = write(QUANT, shifted, *parameters, signed=1, narrow=0, rounding_mode=mode)
    if out_zero.any():
        whole = write("Sub", whole, write.constant(out_zero))
    return write("Mul", whole, write.constant(out_scale))


def _channel_axis(node: Node, rank: int) -> int:
    layout = str(node.attrs.get("data_layout", "")) or _LAYOUTS.get(rank, "")
    axis = layout.find("C") if "C" in layout else 1
    if not 1 <= axis < rank or (layout and layout != "NONE" and len(layout) != rank):
        raise ShapeError(
            f"{node.where}: data of {rank} axes in layout {layout[:20] or 'unknown'!r}"
        )
    return axis


def _upper(values: Array) -> Array:
    """Round each value up to float32: the value that a float32 is compared with."""
    single = values.astype(np.float32)
    low = single.astype(np.float64) < values.astype(np.float64)
    return np.where(low, np.nextafter(single, np.float32(np.inf)), single)


def _multi_threshold(write: Expression) -> str:
    x, node = _data(write), write.node
    shape = write.type().shape
    _parameter(write, 1, "table of thresholds")
    thresholds = write.graph.constants[node.inputs[1]]
    axis = _channel_axis(node, len(shape))
    channels = shape[axis]
    if thresholds.ndim != 2 or thresholds.shape[0] not in (1, channels):
        raise ShapeError(
            f"{write.where}: thresholds of shape {list(thresholds.shape)} for {channels} "
            f"channels; expected [{channels}, steps] or [1, steps]"
        )
    table = _upper(thresholds)
    scale, bias = (
        np.float32(node.attrs.get(k, d)) for k, d in (("out_scale", 1.0), ("out_bias", 0.0))
    )
    if not (np.isfinite(scale) and np.isfinite(bias)):
        raise ModelError(f"{write.where}: `out_scale` or `out_bias` is not finite")
    if table.shape[1] == 1:  # a sign
        column = table.reshape(-1, *(1,) * (len(shape) - 1 - axis))
        reached = write("GreaterOrEqual", x, write.constant(column))
        return write("Where", reached, write.constant(scale + bias), write.constant(bias))
    attrs = {"out_scale": float(scale), "out_bias": float(bias)}
    if axis == 1:
        return write(MULTI_THRESHOLD, x, write.constant(table), **attrs)
    order = [0, axis, *(k for k in range(1, len(shape)) if k != axis)]
    first = write("Transpose", x, perm=order)
    counted = write(MULTI_THRESHOLD, first, write.constant(table), **attrs)
    return write("Transpose", counted, perm=inverse(order))


def _xnor_popcount_matmul(write: Expression) -> str:
    _data(write)
    depth = write.type().shape[-1:]
    if not depth or not isinstance(depth[0], int):
        raise ShapeError(f"{write.where}: the length of its rows is not known")
    signs = [bipolar(write, name) for name in write.node.inputs]
    return matches(write, write("MatMul", *signs, covers=(write.node.name,)), depth[0])


def _quant_avg_pool(write: Expression) -> str:
    x, a, where = _data(write), write.node.attrs, write.where
    size, stride, before, after = (int(a[k]) for k in ("kernel", "stride", "ibits", "obits"))
    layout, rank = str(a.get("data_layout", "NCHW")), len(write.type().shape)
    if not (1 <= before <= 32 and 1 <= after <= 32) or size < 1 or stride < 1:
        raise ModelError(f"{where}: kernel {size}, stride {stride}, {before} bits to {after}")
    if rank != 4 or layout not in ("NCHW", "NHWC"):
        raise ShapeError(f"{where}: data of {rank} axes in layout {layout[:20]!r}")
    bits = ((2**before - 1) * size * size).bit_length()
    if layout == "NHWC":
        x = write("Transpose", x, perm=FIRST)
    mean = write("AveragePool", x, kernel_shape=[size, size], strides=[stride, stride])
    whole = write("Round", write("Mul", mean, write.constant(size * size)))
    part = write("Floor", write("Mul", whole, write.constant(2.0 ** -max(0, bits - after))))
    return write("Transpose", part, perm=LAST) if layout == "NHWC" else part


OPERATORS: dict[str, Reader] = {
    "BipolarQuant": _bipolar_quant,
    "IntQuant": _quant,
    "MultiThreshold": _multi_threshold,
    "Quant": _quant,
    "QuantAvgPool2d": _quant_avg_pool,
    "Trunc": _trunc,
    "XnorPopcountMatMul": _xnor_popcount_matmul,
}
"""Readers, by operator."""
