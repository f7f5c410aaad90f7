"""Read QuantizeLinear and DequantizeLinear as arithmetic on floats that hold integers.

    QuantizeLinear(x, s, z)              ->  q = Clip(Round(x / s) + z)
    Clip(q, low, high), MaxPool(q), ...  ->  the same on the floats
    DequantizeLinear(q, s, z)            ->  (q - z) * s

No integer tensor is left unless something else reads it, so types without arithmetic (INT4, UINT2)
are no matter, and what follows sees rounding, bounds and scale of every exporter in one spelling.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping

import numpy as np
from onnx import TensorProto, helper

from bnncc.errors import ModelError, ShapeError, UnsupportedOp
from bnncc.frontend.pieces import Pieces
from bnncc.ir.graph import Graph, Node, TensorType

INTEGERS = {
    "int2": (-2, 1),
    "uint2": (0, 3),
    "int4": (-8, 7),
    "uint4": (0, 15),
    "int8": (-128, 127),
    "uint8": (0, 255),
    "int16": (-(2**15), 2**15 - 1),
    "uint16": (0, 2**16 - 1),
}
"""The integers that float32 can stand for, with their bounds."""

_ALIKE = {
    *("Clip", "Concat", "Flatten", "Gather", "Identity", "MaxPool", "Relu", "Reshape", "Slice"),
    *("Split", "Squeeze", "Transpose", "Unsqueeze"),
}
"""Operators that do the same to floats as to integers."""

Twins = MutableMapping[str, str]
"""By integer tensor, a float32 tensor of the same numbers."""


def as_floats(node: Node, graph: Graph, twins: Twins) -> Iterator[Node] | None:
    """Return what computes `node` with floats, or None if it is to stay as it is.

    Parameters
    ----------
    node : Node
        In the newest opset's form.
    graph : Graph
        Types and constants of what comes before; each node is to be added to it before the next is
        asked for.
    twins : mapping of str to str
        Added to.

    Returns
    -------
    iterator of Node, or None

    Raises
    ------
    ShapeError
        If scale or zero point do not fit the data.
    ModelError
        If types do not fit.
    UnsupportedOp
        If numbers are rounded to something else than integers of at most 16 bits.
    """
    if node.op == "QuantizeLinear" and _fixed(node, graph):
        return _quantize(node, graph, twins)
    if node.op == "DequantizeLinear" and _fixed(node, graph):
        return _dequantize(node, graph, twins)
    if node.op in _ALIKE and node.inputs[0] in twins:
        return _alike(node, graph, twins)
    return None


def _fixed(node: Node, graph: Graph) -> bool:
    """Whether scale and zero point are constants, and the real side is float32."""
    if not all(i in graph.constants for i in node.inputs[1:] if i):
        return False
    if node.op == "QuantizeLinear":
        return graph.types[node.inputs[0]].dtype in ("float32", "int32")
    wanted = int(node.attrs.get("output_dtype", 0)) in (0, TensorProto.FLOAT)
    return wanted and graph.types[node.inputs[1]].dtype == "float32"


def _parameter(node: Node, graph: Graph, index: int, kind: TensorType) -> np.ndarray | None:
    """Return scale or zero point so that it broadcasts against the data."""
    name = node.inputs[index] if index < len(node.inputs) else ""
    if not name:
        return None
    value = graph.constants[name].astype(np.float32)
    where, shape = f"{node.op} `{node.name}`", kind.shape
    axis, block = int(node.attrs.get("axis", 1)), int(node.attrs.get("block_size", 0))
    if value.size == 1:
        return value.reshape(())
    if not -len(shape) <= axis < len(shape):
        raise ShapeError(f"{where}: `axis` is {axis}, the input has {len(shape)} axes")
    size = shape[axis]
    if block > 0 and value.ndim == len(shape) and isinstance(size, int):
        fits = value.shape[axis] == -(-size // block)
        if fits:
            value = np.repeat(value, min(block, size), axis).take(range(size), axis)
            fits = all(a in (1, b) for a, b in zip(value.shape, shape, strict=True))
    else:
        fits = value.ndim == 1 and value.size == shape[axis] and not block
        column = [1] * len(shape)
        column[axis] = -1
        value = value.reshape(column) if fits else value
    if not fits:
        raise ShapeError(
            f"{where}: a scale or zero point of shape {list(value.shape)} for data of shape "
            f"{list(shape)} and axis {axis}"
        )
    return value


def _scale(node: Node, graph: Graph, kind: TensorType) -> np.ndarray:
    value = _parameter(node, graph, 1, kind)
    if value is None or not np.isfinite(value).all() or not value.all():
        raise ModelError(f"{node.op} `{node.name}`: its scale is not finite, or 0")
    return value


def _quantize(node: Node, graph: Graph, twins: Twins) -> Iterator[Node]:
    make, where = Pieces(node, graph), f"{node.op} `{node.name}`"
    kind = graph.types[node.inputs[0]]
    dtype = "uint8"
    if len(node.inputs) > 2 and node.inputs[2]:
        dtype = graph.types[node.inputs[2]].dtype
    elif code := int(node.attrs.get("output_dtype", 0)):
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(code)).name
    if dtype not in INTEGERS:
        raise UnsupportedOp(f"{where}: rounds to {dtype}, integers of at most 16 bits are wanted")
    scale, zero = _scale(node, graph, kind), _parameter(node, graph, 2, kind)
    x = node.inputs[0]
    if kind.dtype == "int32":
        x = make.tensor("float")
        yield make("Cast", node.inputs[:1], x, {"to": TensorProto.FLOAT})
    names = (make.tensor(k) for k in ("scaled", "whole", "moved", "limited"))
    scaled, whole, moved, limited = names
    yield make("Div", [x, make.constant(scale)], scaled)
    yield make("Round", [scaled], whole)
    if zero is not None and zero.any():
        yield make("Add", [whole, make.constant(zero)], moved)
        whole = moved
    yield make("Clip", [whole, *map(make.constant, INTEGERS[dtype])], limited)
    yield from _cast(make, limited, node.outputs[0], dtype, twins)


def _dequantize(node: Node, graph: Graph, twins: Twins) -> Iterator[Node]:
    make, where = Pieces(node, graph), f"{node.op} `{node.name}`"
    x = node.inputs[0]
    kind = graph.types[x]
    if kind.dtype not in (*INTEGERS, "int32"):
        raise UnsupportedOp(f"{where}: its data is {kind.dtype}, small integers are wanted")
    scale, zero = _scale(node, graph, kind), _parameter(node, graph, 2, kind)
    number = twins.get(x, "")
    if not number:
        number = make.tensor("float")
        yield make("Cast", [x], number, {"to": TensorProto.FLOAT})
    if zero is not None and zero.any():
        moved = make.tensor("moved")
        yield make("Sub", [number, make.constant(zero)], moved)
        number = moved
    yield make("Mul", [number, make.constant(scale)], node.outputs[0])


def _alike(node: Node, graph: Graph, twins: Twins) -> Iterator[Node]:
    make = Pieces(node, graph)
    dtype = graph.types[node.inputs[0]].dtype
    inputs = list(node.inputs)
    data = range(len(inputs)) if node.op in ("Clip", "Concat") else range(1)
    for k in data:
        if inputs[k] in twins:
            inputs[k] = twins[inputs[k]]
        elif inputs[k]:
            single = make.tensor("float")
            yield make("Cast", [inputs[k]], single, {"to": TensorProto.FLOAT})
            inputs[k] = single
    outs = [make.tensor("float") if name else "" for name in node.outputs]
    yield Node(node.op, inputs, outs, node.attrs, node.name)
    for single, name in zip(outs, node.outputs, strict=True):
        if name:
            yield from _cast(make, single, name, dtype, twins)


def _cast(make: Pieces, single: str, out: str, dtype: str, twins: Twins) -> Iterator[Node]:
    twins[out] = single
    code = int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))
    yield make("Cast", [single], out, {"to": code})
