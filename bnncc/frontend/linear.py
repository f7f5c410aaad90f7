"""Read QuantizeLinear and DequantizeLinear as arithmetic on floats that hold integers.

    QuantizeLinear(x, s, z)              ->  q = Clip(Round(x / s) + z)
    Clip(q, low, high), MaxPool(q), ...  ->  the same on the floats
    DequantizeLinear(q, s, z)            ->  (q - z) * s

No integer tensor is left unless something else reads it, so types without arithmetic (INT4, UINT2)
are no matter, and what follows sees rounding, bounds and scale of every exporter in one spelling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, MutableMapping

import numpy as np
from onnx import TensorProto, helper

from bnncc.errors import ModelError, ShapeError, UnsupportedOp
from bnncc.frontend.narrow import CARRIERS, rounded
from bnncc.ir.datatypes import NARROW_FLOATS
from bnncc.ir.graph import Graph, Node, TensorType
from bnncc.ir.pieces import Expression, Pieces

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

_QUANTIZED = {*INTEGERS, *CARRIERS, "int32"}
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
    if node.op == "Cast" and (_narrow(node.inputs[0], graph) or _cast_type(node) in CARRIERS):
        return _cast_narrow(node, graph, twins)
    if node.op == "QuantizeLinear" and _fixed(node, graph):
        return _quantize(node, graph, twins)
    if node.op == "DequantizeLinear" and _fixed(node, graph):
        return _dequantize(node, graph, twins)
    if node.op == "DequantizeLinear" and graph.types[node.inputs[0]].dtype in _QUANTIZED:
        return _computed(dequantized, node, graph, twins)
    if node.op == "QuantizeLinear" and _target(node, graph) in _QUANTIZED:
        return _computed(quantized, node, graph, twins)
    if node.op in _ALIKE and node.inputs[0] in twins:
        return _alike(node, graph, twins)
    for name in node.inputs:
        if name and name not in graph.constants and _narrow(name, graph):
            raise UnsupportedOp(
                f"{node.op} `{node.name}`: reads {graph.types[name].dtype}, which only a few "
                "operators do"
            )
    return None


def _narrow(name: str, graph: Graph) -> bool:
    return graph.types[name].dtype in CARRIERS


def _cast_type(node: Node) -> str:
    """Return the type that a Cast gives, nothing if ONNX has no such type."""
    code = int(node.attrs["to"])
    known = code in TensorProto.DataType.values() and code != TensorProto.UNDEFINED
    return str(np.dtype(helper.tensor_dtype_to_np_dtype(code)).name) if known else ""


def _target(node: Node, graph: Graph) -> str:
    """Return the type that a QuantizeLinear rounds to."""
    if len(node.inputs) > 2 and node.inputs[2]:
        return graph.types[node.inputs[2]].dtype
    code = int(node.attrs.get("output_dtype", 0))
    return str(np.dtype(helper.tensor_dtype_to_np_dtype(code)).name) if code else "uint8"


def _twin(write: Expression, name: str, twins: Twins) -> str:
    """Return float32 of the same numbers as a tensor of a narrow type."""
    if name in twins:
        return twins[name]
    if write.graph.types[name].dtype not in CARRIERS:
        return write.cast(name, "float32")
    value = write.graph.constants.get(name)
    if value is None:
        raise UnsupportedOp(f"{write.where}: reads a {write.graph.types[name].dtype} it cannot")
    return write.constant(value.astype(np.float32), "float32")


def _cast_narrow(node: Node, graph: Graph, twins: Twins) -> Iterator[Node]:
    write, x, out = Expression(node, graph), node.inputs[0], node.outputs[0]
    source, dtype = graph.types[x].dtype, _cast_type(node)
    if source in CARRIERS:
        x, source = _twin(write, x, twins), "float32"
    if dtype in CARRIERS:
        saturate, mode = bool(node.attrs.get("saturate", 1)), node.attrs.get("round_mode", "up")
        made = rounded(write, x, source, dtype, saturate, mode)
        yield from write.nodes
        _own(graph, twins, out, made, dtype)
    else:
        write.give(write.cast(x, dtype), 0)
        yield from write.nodes


def _own(graph: Graph, twins: Twins, name: str, single: str, dtype: str) -> None:
    """Let `name` be a tensor of a narrow type that exists only as its twin."""
    twins[name] = single
    graph.types[name] = TensorType(graph.types[single].shape, dtype)


def _computed(
    rule: Callable[[Expression, Callable[[str], str]], str],
    node: Node,
    graph: Graph,
    twins: Twins,
) -> Iterator[Node]:
    """Yield QuantizeLinear or DequantizeLinear with scales that are computed."""
    write = Expression(node, graph)
    made = rule(write, lambda name: _twin(write, name, twins))
    out = node.outputs[0]
    if node.op == "QuantizeLinear":
        yield from write.nodes
        yield from _cast(Pieces(node, graph), made, out, _target(node, graph), twins)
    else:
        write.give(made, 0)
        yield from write.nodes


def _beside(write: Expression, name: str, number: str) -> str:
    """Return scale or zero point `number`, of the shape of input `name`, to broadcast with data."""
    node, shape = write.node, write.graph.types[name].shape
    data = write.graph.types[node.inputs[0]].shape
    axis, block = int(node.attrs.get("axis", 1)), int(node.attrs.get("block_size", 0))
    if len(shape) <= 1 and math.prod(d if isinstance(d, int) else 2 for d in shape) == 1:
        return write("Reshape", number, write.constant(np.zeros(0), "int64")) if shape else number
    if block and len(shape) == len(data) and all(isinstance(d, int) for d in (*shape, *data)):
        axis %= len(data)
        count, size = int(shape[axis]), int(data[axis])
        if count != -(-size // block):
            raise ShapeError(
                f"{write.where}: a scale of shape {list(shape)} for data of shape {list(data)} in "
                f"blocks of {block}"
            )
        sizes = [int(d) for d in shape]
        spread = [*sizes[: axis + 1], min(block, size), *sizes[axis + 1 :]]
        number = write("Expand", write.unsqueeze(number, axis + 1), write.ints(*spread))
        sizes[axis] = count * min(block, size)
        number = write.reshape(number, *sizes)
        return write("Slice", number, write.ints(0), write.ints(size), write.ints(axis))
    if block or len(shape) != 1 or not -len(data) <= axis < len(data):
        raise UnsupportedOp(f"{write.where}: a computed scale of shape {list(shape)}")
    column = [1] * len(data)
    column[axis] = -1
    return write.reshape(number, *column)


def dequantized(write: Expression, twin: Callable[[str], str]) -> str:
    """Write DequantizeLinear of a narrow type and return the result."""
    node, graph = write.node, write.graph
    x, scale = twin(node.inputs[0]), node.inputs[1]
    dtype = graph.types[scale].dtype
    if zero := write.input(2):
        x = write("Sub", x, _beside(write, zero, twin(zero)))
    if dtype != "float32":
        x = write.cast(x, dtype)
    made = write("Mul", x, _beside(write, scale, scale))
    code = int(node.attrs.get("output_dtype", 0))
    wanted = np.dtype(helper.tensor_dtype_to_np_dtype(code)).name if code else dtype
    return made if wanted == dtype else write.cast(made, wanted)


def quantized(write: Expression, twin: Callable[[str], str]) -> str:
    """Write QuantizeLinear to a narrow type and return the numbers as float32."""
    node, graph = write.node, write.graph
    x, scale, kind = node.inputs[0], node.inputs[1], graph.types[node.inputs[0]]
    dtype = _target(node, graph)
    if kind.dtype == "int32":
        x, kind = write.cast(x, "float32"), TensorType(kind.shape, "float32")
    elif graph.types[scale].dtype != kind.dtype:
        x, kind = write.cast(x, graph.types[scale].dtype), graph.types[scale]
    number = write("Div", x, _beside(write, scale, scale))
    if dtype == "int32":
        raise UnsupportedOp(f"{write.where}: rounds to int32, at most 16 bits are wanted")
    if dtype not in INTEGERS:
        saturate = bool(node.attrs.get("saturate", 1))
        return rounded(write, number, kind.dtype, dtype, saturate)
    whole = write("Round", number)
    if kind.dtype != "float32":
        whole = write.cast(whole, "float32")
    if zero := write.input(2):
        whole = write("Add", whole, _beside(write, zero, twin(zero)))
    return write("Clip", whole, *(write.constant(v, "float32") for v in INTEGERS[dtype]))


def _fixed(node: Node, graph: Graph) -> bool:
    """Whether scale and zero point are constants, and the real side is float32."""
    if not all(i in graph.constants for i in node.inputs[1:] if i):
        return False
    if node.op == "QuantizeLinear":
        if _target(node, graph) in NARROW_FLOATS:
            return False
        return graph.types[node.inputs[0]].dtype in ("float32", "int32")
    wanted = int(node.attrs.get("output_dtype", 0)) in (0, TensorProto.FLOAT)
    if graph.types[node.inputs[0]].dtype in NARROW_FLOATS:
        return False
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
    dtype = _target(node, graph)
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
    if not number and kind.dtype in CARRIERS:
        number = make.constant(graph.constants[x].astype(np.float32))
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
    if dtype in CARRIERS:
        _own(make.graph, twins, out, single, dtype)
        return
    twins[out] = single
    code = int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))
    yield make("Cast", [single], out, {"to": code})
