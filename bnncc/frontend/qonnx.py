"""Read QONNX: the quantisers that Brevitas, QONNX and FINN add to ONNX, in their three domains.

    BipolarQuant(x, s)          ->  Where(x >= 0, s, -s)
    Quant(x, s, z, bits)        ->  bnncc.Quant; weights fold
    Trunc(x, s, z, in, out)     ->  Div, Round, Mul, Floor, Mul
    MultiThreshold(x, T)        ->  bnncc.MultiThreshold; Where(x >= T, ...) if it has one step
    QuantAvgPool2d(x)           ->  AveragePool, Mul, Round, Mul, Floor
    XnorPopcountMatMul(a, b)    ->  (MatMul(2a - 1, 2b - 1) + K) / 2

Each computes what the executor of the package `qonnx` computes, in float32 and in its order. Data
types that annotations declare for inputs (``finn_datatype``) are in `bnncc.frontend.annotations`,
operators on channels-last images in `bnncc.frontend.channels_last`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from bnncc.errors import ModelError, ShapeError, UnsupportedOp
from bnncc.ir.graph import Graph, Node
from bnncc.ir.pieces import Pieces, Reader
from bnncc.ir.quantizers import MULTI_THRESHOLD, QUANT, ROUNDING, integer_range
from bnncc.ir.rounding import PLAIN
from bnncc.ir.shaperules import broadcast

Array = np.ndarray[Any, Any]

MAX_BITS = 64

_LAYOUTS = {2: "NC", 3: "NWC", 4: "NCHW"}
"""What MultiThreshold takes data of so many axes for if its ``data_layout`` is empty."""


def _parameter(node: Node, graph: Graph, index: int, what: str) -> Array:
    """Return a constant input as float32."""
    name = node.inputs[index]
    value = graph.constants.get(name)
    where = f"{node.op} `{node.name}`"
    if value is None:
        raise UnsupportedOp(
            f"{where}: its {what} `{name}` is computed at run time, a constant is wanted",
            hint="export the model in evaluation mode",
        )
    if value.dtype.kind not in "fiub" or not value.size:
        raise ModelError(f"{where}: its {what} is {value.dtype.name}{list(value.shape)}")
    single = value.astype(np.float32)
    if not np.isfinite(single).all():
        raise ModelError(f"{where}: its {what} holds numbers that are not finite")
    return single


def _scale(node: Node, graph: Graph, index: int = 1, what: str = "scale") -> Array:
    value = _parameter(node, graph, index, what)
    if not value.all():
        raise ModelError(f"{node.op} `{node.name}`: its {what} is 0")
    return value


def _bits(node: Node, graph: Graph, index: int, what: str = "bit width") -> np.float32:
    value = _parameter(node, graph, index, what)
    if value.size != 1 or not 1 <= value.reshape(()) <= MAX_BITS:
        found = value.reshape(-1)[:4].tolist()
        raise ModelError(
            f"{node.op} `{node.name}`: its {what} is {found}, one number from 1 to {MAX_BITS} is "
            "wanted"
        )
    return np.float32(value.reshape(()))


def _mode(node: Node, default: str) -> str:
    mode = str(node.attrs.get("rounding_mode", default)).upper()
    mode = {"ROUND_TO_ZERO": "DOWN"}.get(mode, mode)  # what older versions of Brevitas write
    if mode not in ROUNDING:
        raise UnsupportedOp(
            f"{node.op} `{node.name}`: `rounding_mode` is {mode[:40]!r}, one of "
            f"{', '.join(ROUNDING)} is wanted"
        )
    return mode


def _require_float32(node: Node, graph: Graph) -> None:
    found = graph.types[node.inputs[0]].dtype
    if found != "float32":
        raise ModelError(f"{node.op} `{node.name}`: its data is {found}, float32 is wanted")


def _bipolar_quant(node: Node, graph: Graph, make: Pieces) -> Iterator[Node]:
    _require_float32(node, graph)
    x, name = node.inputs[:2]
    scale = graph.constants.get(name)
    size = np.float32(1)
    fixed = scale is not None and scale.size == 1 and scale.ndim <= len(graph.types[x].shape)
    if fixed and scale is not None:
        size = np.float32(scale.reshape(()))
    positive = make.tensor("positive")
    yield make("GreaterOrEqual", [x, make.constant(0.0)], positive)
    out = node.outputs[0] if fixed else make.tensor("signs")
    yield make("Where", [positive, make.constant(size), make.constant(-size)], out)
    if not fixed:
        yield make("Mul", [out, name], node.outputs[0])


def _quant(node: Node, graph: Graph, make: Pieces) -> Iterator[Node]:
    _require_float32(node, graph)
    x = node.inputs[0]
    scale, zero = _scale(node, graph), _parameter(node, graph, 2, "zero point")
    bits = _bits(node, graph, 3)
    shape, where = graph.types[x].shape, f"{node.op} `{node.name}`"
    if broadcast([shape, scale.shape, zero.shape], where) != shape and x not in graph.constants:
        raise ShapeError(
            f"{where}: its scale {list(scale.shape)} or zero point {list(zero.shape)} is larger "
            f"than its data {list(shape)}"
        )
    if bits == 1 and node.attrs["signed"] and (scale > 0).all() and not zero.any():
        yield from _bipolar_quant(node, graph, make)
        return
    attrs = {
        "signed": int(node.attrs["signed"]),
        "narrow": int(node.attrs["narrow"]),
        "rounding_mode": _mode(node, "ROUND"),
    }
    yield make(QUANT, [x, *map(make.constant, (scale, zero, bits))], node.outputs[0], attrs)


def _trunc(node: Node, graph: Graph, make: Pieces) -> Iterator[Node]:
    _require_float32(node, graph)
    scale, zero = _scale(node, graph), _parameter(node, graph, 2, "zero point")
    before, mode = _bits(node, graph, 3, "input bit width"), _mode(node, "FLOOR")
    limits: tuple[float, float] | None = None
    if len(node.inputs) == 5:
        step = np.asarray(2.0 ** np.float64(before - _bits(node, graph, 4, "output bit width")))
        out_scale, out_zero = scale, zero
    else:
        out_scale = _scale(node, graph, 4, "output scale")
        ratio = out_scale / scale
        if (ratio <= 0).any():
            raise ModelError(f"{node.op} `{node.name}`: its scales have different signs")
        step = 2.0 ** np.round(np.log2(ratio))
        out_zero = zero / step.astype(np.float32)
        signed, narrow = (bool(node.attrs.get(k, d)) for k, d in (("signed", 1), ("narrow", 0)))
        bits = float(_bits(node, graph, 5, "output bit width"))
        limits = integer_range(bits, signed=signed, narrow=narrow)
    names = [make.tensor(k) for k in ("scaled", "level", "integer", "shifted", "limited", "whole")]
    scaled, level, integer, shifted, limited, whole = names
    yield make("Div", [node.inputs[0], make.constant(scale)], scaled)
    if zero.any():
        yield make("Add", [scaled, make.constant(zero)], level)
        scaled = level
    yield make("Round", [scaled], integer)
    yield make("Div", [integer, make.constant(step)], shifted)
    if limits is not None:
        yield make("Clip", [shifted, *map(make.constant, limits)], limited)
        shifted = limited
    if mode in PLAIN:
        yield make(PLAIN[mode], [shifted], whole)
    else:
        attrs = {"signed": 1, "narrow": 0, "rounding_mode": mode}
        parameters = [make.constant(v) for v in (1, 0, MAX_BITS)]
        yield make(QUANT, [shifted, *parameters], whole, attrs)
    if out_zero.any():
        moved = make.tensor("moved_back")
        yield make("Sub", [whole, make.constant(out_zero)], moved)
        whole = moved
    yield make("Mul", [whole, make.constant(out_scale)], node.outputs[0])


def _channel_axis(node: Node, rank: int) -> int:
    layout = str(node.attrs.get("data_layout", "")) or _LAYOUTS.get(rank, "")
    axis = layout.find("C") if "C" in layout else 1
    if not 1 <= axis < rank or (layout and layout != "NONE" and len(layout) != rank):
        raise ShapeError(
            f"{node.op} `{node.name}`: data of {rank} axes in layout {layout[:20] or 'unknown'!r}"
        )
    return axis


def _upper(values: Array) -> Array:
    """Return, for each value, the least float32 not below it: what a float32 is compared with."""
    single = values.astype(np.float32)
    low = single.astype(np.float64) < values.astype(np.float64)
    return np.where(low, np.nextafter(single, np.float32(np.inf)), single)


def _multi_threshold(node: Node, graph: Graph, make: Pieces) -> Iterator[Node]:
    _require_float32(node, graph)
    x, out = node.inputs[0], node.outputs[0]
    shape = graph.types[x].shape
    _parameter(node, graph, 1, "table of thresholds")
    thresholds = graph.constants[node.inputs[1]]
    axis = _channel_axis(node, len(shape))
    channels = shape[axis]
    if thresholds.ndim != 2 or thresholds.shape[0] not in (1, channels):
        raise ShapeError(
            f"{node.op} `{node.name}`: thresholds of shape {list(thresholds.shape)} for {channels} "
            f"channels; [{channels}, steps] or [1, steps] is wanted"
        )
    table = _upper(thresholds)
    scale, bias = (
        np.float32(node.attrs.get(k, d)) for k, d in (("out_scale", 1.0), ("out_bias", 0.0))
    )
    if not (np.isfinite(scale) and np.isfinite(bias)):
        raise ModelError(f"{node.op} `{node.name}`: `out_scale` or `out_bias` is not finite")
    if table.shape[1] == 1:  # a sign
        column = table.reshape(-1, *(1,) * (len(shape) - 1 - axis))
        reached = make.tensor("reached")
        yield make("GreaterOrEqual", [x, make.constant(column)], reached)
        values = [make.constant(v) for v in (scale + bias, bias)]
        yield make("Where", [reached, *values], out)
        return
    attrs = {"out_scale": float(scale), "out_bias": float(bias)}
    if axis == 1:
        yield make(MULTI_THRESHOLD, [x, make.constant(table)], out, attrs)
        return
    order = [0, axis, *(k for k in range(1, len(shape)) if k != axis)]
    first, counted = make.tensor("first"), make.tensor("counted")
    yield make("Transpose", [x], first, {"perm": order})
    yield make(MULTI_THRESHOLD, [first, make.constant(table)], counted, attrs)
    back = [order.index(k) for k in range(len(order))]
    yield make("Transpose", [counted], out, {"perm": back})


def _xnor_popcount_matmul(node: Node, graph: Graph, make: Pieces) -> Iterator[Node]:
    _require_float32(node, graph)
    depth = graph.types[node.inputs[0]].shape[-1:]
    if not depth or not isinstance(depth[0], int):
        raise ShapeError(f"{node.op} `{node.name}`: the length of its rows is not known")
    bipolar = []
    for name in node.inputs:
        twice, signs = make.tensor("twice"), make.tensor("signs")
        yield make("Mul", [name, make.constant(2.0)], twice)
        yield make("Sub", [twice, make.constant(1.0)], signs)
        bipolar.append(signs)
    dot, total = make.tensor("dot"), make.tensor("total")
    yield make("MatMul", bipolar, dot, covers=(node.name,))
    yield make("Add", [dot, make.constant(float(depth[0]))], total)
    yield make("Mul", [total, make.constant(0.5)], node.outputs[0])


def _quant_avg_pool(node: Node, graph: Graph, make: Pieces) -> Iterator[Node]:
    _require_float32(node, graph)
    size, stride, before, after = (
        int(node.attrs[k]) for k in ("kernel", "stride", "ibits", "obits")
    )
    layout = str(node.attrs.get("data_layout", "NCHW"))
    where, rank = f"{node.op} `{node.name}`", len(graph.types[node.inputs[0]].shape)
    if not (1 <= before <= 32 and 1 <= after <= 32) or size < 1 or stride < 1:
        raise ModelError(f"{where}: kernel {size}, stride {stride}, {before} bits to {after}")
    if rank != 4 or layout not in ("NCHW", "NHWC"):
        raise ShapeError(f"{where}: data of {rank} axes in layout {layout[:20]!r}")
    bits = ((2**before - 1) * size * size).bit_length()
    x, out, last = node.inputs[0], node.outputs[0], layout == "NHWC"
    if last:
        x, out = make.tensor("first"), make.tensor("shifted")
        yield make("Transpose", node.inputs[:1], x, {"perm": [0, 3, 1, 2]})
    names = (make.tensor(k) for k in ("mean", "total", "whole", "part"))
    mean, total, whole, part = names
    attrs = {"kernel_shape": [size, size], "strides": [stride, stride]}
    yield make("AveragePool", [x], mean, attrs)
    yield make("Mul", [mean, make.constant(size * size)], total)
    yield make("Round", [total], whole)
    yield make("Mul", [whole, make.constant(2.0 ** -max(0, bits - after))], part)
    yield make("Floor", [part], out)
    if last:
        yield make("Transpose", [out], node.outputs[0], {"perm": [0, 2, 3, 1]})


OPERATORS: dict[str, Reader] = {
    "BipolarQuant": _bipolar_quant,
    "IntQuant": _quant,
    "MultiThreshold": _multi_threshold,
    "Quant": _quant,
    "QuantAvgPool2d": _quant_avg_pool,
    "Trunc": _trunc,
    "XnorPopcountMatMul": _xnor_popcount_matmul,
}
"""How each operator is read."""
