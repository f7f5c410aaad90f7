"""Read QuantizeLinear and DequantizeLinear as arithmetic on integer-valued floats.

    QuantizeLinear(x, s, z)              ->  q = Clip(Round(x / s) + z)
    Clip(q, low, high), MaxPool(q), ...  ->  the same on the floats
    DequantizeLinear(q, s, z)            ->  (q - z) * s
    Cast(Clip(Round(x), 0, 255))         ->  Clip(Round(x), 0, 255)          where floats read it

Integer tensors remain only where other operators read them. So types without arithmetic (INT4,
UINT2) are no problem, and passes see rounding, bounds and scale of every exporter in one form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, MutableMapping

import numpy as np
from onnx import TensorProto, helper

from bnncc.errors import ModelError, ShapeError, UnsupportedOp
from bnncc.frontend.narrow import CARRIERS, rounded
from bnncc.ir.dims import is_static
from bnncc.ir.graph import Graph, Node, TensorType
from bnncc.ir.infer import NARROW_FLOATS
from bnncc.ir.nodechecks import checked_axis
from bnncc.ir.pieces import Expression

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
"""Integer types that float32 represents exactly, with their bounds."""

_QUANTIZED = {*INTEGERS, *CARRIERS, "int32"}
_ALIKE = {
    *("Clip", "Concat", "DepthToSpace", "Flatten", "Gather", "Identity", "MaxPool", "Pad"),
    *("ReduceMax", "Relu", "Reshape", "Slice", "SpaceToDepth", "Split", "Squeeze", "Transpose"),
    "Unsqueeze",
}
"""Operators that treat floats and integers alike."""

_NEAR, _DEPTH = 16, 4
"""How many of the last nodes are searched for what makes a tensor, and how many lie in between."""

Twins = MutableMapping[str, str]
"""By integer tensor: the float32 tensor with the same numbers."""


def as_floats(node: Node, graph: Graph, twins: Twins) -> Iterator[Node] | None:
    """Return nodes that compute `node` in float, or None to keep it.

    Parameters
    ----------
    node : Node
        In the form of the newest opset.
    graph : Graph
        Types and constants of the preceding nodes; each returned node must be added to it before
        the next one is requested.
    twins : mapping of str to str
        Extended.

    Raises
    ------
    ShapeError
        If scale or zero point do not match the data.
    ModelError
        If types are inconsistent.
    UnsupportedOp
        If numbers are rounded to anything but integers of at most 16 bits.
    """
    if node.op == "Cast" and (_narrow(node.inputs[0], graph) or _cast_type(node) in CARRIERS):
        return _cast_narrow(node, graph, twins)
    if node.op == "Cast" and _cast_type(node) == "float32" and node.inputs[0] in twins:
        return iter([Node("Identity", [twins[node.inputs[0]]], node.outputs, {}, node.name)])
    if node.op == "Cast" and _cast_type(node) in INTEGERS and _is_held(node, graph):
        twins[node.outputs[0]] = node.inputs[0]
    if node.op in ("DequantizeLinear", "QuantizeLinear"):
        to = node.op == "QuantizeLinear"
        narrow = _target(node, graph) if to else graph.types[node.inputs[0]].dtype
        if narrow in _QUANTIZED or _fixed(node, graph, narrow):
            return _written(quantized if to else dequantized, node, graph, twins)
    if node.op in _ALIKE and node.inputs[0] in twins:
        return _alike(node, graph, twins)
    for name in node.inputs:
        if name and name not in graph.constants and _narrow(name, graph):
            raise UnsupportedOp(
                f"{node.where}: reads {graph.types[name].dtype}, which only a few operators do"
            )
    return None


def _narrow(name: str, graph: Graph) -> bool:
    return graph.types[name].dtype in CARRIERS


def _cast_type(node: Node) -> str:
    """Return the result type of a Cast, or "" if ONNX has no such type."""
    code = int(node.attrs["to"])
    known = code in TensorProto.DataType.values() and code != TensorProto.UNDEFINED
    return str(np.dtype(helper.tensor_dtype_to_np_dtype(code)).name) if known else ""


def _is_held(node: Node, graph: Graph) -> bool:
    """Whether the operand of a Cast is float32, limited to integers that its type holds."""
    clip, (low, high) = _maker(node.inputs[0], graph), INTEGERS[_cast_type(node)]
    if clip is None or clip.op != "Clip" or graph.types[node.inputs[0]].dtype != "float32":
        return False
    bounds = [graph.constants.get(clip.input(k)) for k in (1, 2)]
    least, most = (None if b is None or b.size != 1 else float(b.reshape(())) for b in bounds)
    if least is None or most is None or not low <= least <= most <= high:
        return False
    return _is_whole(node.inputs[0], graph, _DEPTH)


def _is_whole(name: str, graph: Graph, depth: int) -> bool:
    """Whether a float tensor is known to hold integers."""
    if (value := graph.constants.get(name)) is not None:
        return bool((np.rint(value) == value).all())
    made = _maker(name, graph)
    if made is None or depth == 0:
        return False
    if made.op in ("Round", "Floor", "Ceil"):
        return True
    if made.op == "Cast":
        return graph.types[made.inputs[0]].dtype in INTEGERS
    if made.op not in ("Add", "Sub", "Clip", "Identity", "Relu"):
        return False
    return all(_is_whole(x, graph, depth - 1) for x in made.inputs if x)


def _maker(name: str, graph: Graph) -> Node | None:
    """Return the node that makes a tensor, if it is one of the last."""
    return next((n for n in reversed(graph.nodes[-_NEAR:]) if name in n.outputs), None)


def _target(node: Node, graph: Graph) -> str:
    """Return the type that a QuantizeLinear rounds to."""
    if node.input(2):
        return graph.types[node.inputs[2]].dtype
    code = int(node.attrs.get("output_dtype", 0))
    return str(np.dtype(helper.tensor_dtype_to_np_dtype(code)).name) if code else "uint8"


def _twin(write: Expression, name: str, twins: Twins) -> str:
    """Return a float32 tensor with the numbers of a tensor of narrow type."""
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
    """Declare `name` as a tensor of narrow type that exists only as its float32 twin."""
    twins[name] = single
    graph.types[name] = TensorType(graph.types[single].shape, dtype)


def _written(
    rule: Callable[[Expression, Callable[[str], str]], str],
    node: Node,
    graph: Graph,
    twins: Twins,
) -> Iterator[Node]:
    """Yield QuantizeLinear or DequantizeLinear."""
    write = Expression(node, graph)
    made = rule(write, lambda name: _twin(write, name, twins))
    if node.op == "QuantizeLinear":
        yield from write.nodes
        yield from _cast(graph, node, made, node.outputs[0], _target(node, graph), twins)
    else:
        yield from write.result(made)


def _beside(write: Expression, index: int, twin: Callable[[str], str]) -> str:
    """Return scale or zero point in a shape that broadcasts with the data, or "" if it is 0."""
    node, name = write.node, write.input(index)
    shape, data = write.graph.types[name].shape, write.type().shape
    if name in write.graph.constants:
        value = _parameter(write, index)
        return write.constant(value, value.dtype.name) if value.any() else ""
    number = twin(name) if index == 2 else name
    axis, block = int(node.attrs.get("axis", 1)), int(node.attrs.get("block_size", 0))
    if len(shape) <= 1 and math.prod(d if isinstance(d, int) else 2 for d in shape) == 1:
        return write.scalar(number) if shape else number
    if block and len(shape) == len(data) and is_static((*shape, *data)):
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
    """Write DequantizeLinear of a narrow type; return the result."""
    node = write.node
    if (found := write.type().dtype) not in _QUANTIZED:
        raise UnsupportedOp(f"{write.where}: its data is {found}, expected small integers")
    x, dtype = twin(node.inputs[0]), write.type(1).dtype
    if write.input(2) and (zero := _beside(write, 2, twin)):
        x = write("Sub", x, zero)
    if dtype != "float32":
        x = write.cast(x, dtype)
    made = write("Mul", x, _beside(write, 1, twin))
    code = int(node.attrs.get("output_dtype", 0))
    wanted = np.dtype(helper.tensor_dtype_to_np_dtype(code)).name if code else dtype
    return made if wanted == dtype else write.cast(made, wanted)


def quantized(write: Expression, twin: Callable[[str], str]) -> str:
    """Write QuantizeLinear to a narrow type; return the numbers as float32."""
    node, graph = write.node, write.graph
    x, real, dtype = node.inputs[0], write.type().dtype, _target(node, graph)
    if dtype not in (*INTEGERS, *CARRIERS):
        raise UnsupportedOp(
            f"{write.where}: rounds to {dtype}, expected integers of at most 16 bits"
        )
    wanted = "float32" if real == "int32" else write.type(1).dtype
    if wanted != real:
        x = write.cast(x, wanted)
    number = write("Div", x, _beside(write, 1, twin))
    if dtype not in INTEGERS:
        return rounded(write, number, wanted, dtype, bool(node.attrs.get("saturate", 1)))
    whole = write("Round", number)
    if wanted != "float32":
        whole = write.cast(whole, "float32")
    if write.input(2) and (zero := _beside(write, 2, twin)):
        whole = write("Add", whole, zero)
    return write("Clip", whole, *map(write.constant, INTEGERS[dtype]))


def _fixed(node: Node, graph: Graph, narrow: str) -> bool:
    """Whether scale and zero point are constants, and the real side is float32."""
    if narrow in NARROW_FLOATS or graph.computed(node.inputs[1:]):
        return False
    if node.op == "QuantizeLinear":
        return graph.types[node.inputs[0]].dtype in ("float32", "int32")
    wanted = int(node.attrs.get("output_dtype", 0)) in (0, TensorProto.FLOAT)
    return wanted and graph.types[node.inputs[1]].dtype == "float32"


def _parameter(write: Expression, index: int) -> np.ndarray:
    """Return a constant scale or zero point in a shape that broadcasts with the data."""
    node, shape = write.node, write.type().shape
    value = write.graph.constants[write.input(index)]
    if index == 2:
        value = value.astype(np.float32)
    elif not np.isfinite(value.astype(np.float32)).all() or not value.all():
        raise ModelError(f"{write.where}: its scale is not finite, or 0")
    axis, block = int(node.attrs.get("axis", 1)), int(node.attrs.get("block_size", 0))
    if value.size == 1:
        return value.reshape(())
    axis = checked_axis(axis, len(shape), write.where)
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
            f"{write.where}: a scale or zero point of shape {list(value.shape)} for data of shape "
            f"{list(shape)} and axis {axis}"
        )
    return value


def _alike(node: Node, graph: Graph, twins: Twins) -> Iterator[Node]:
    write = Expression(node, graph)
    dtype, inputs = write.type().dtype, list(node.inputs)
    numbers = {"Clip": range(3), "Concat": range(len(inputs)), "Pad": (0, 2)}
    for k in numbers.get(node.op, (0,)):
        if k < len(inputs) and inputs[k]:
            inputs[k] = twins.get(inputs[k]) or write.cast(inputs[k], "float32")
    yield from write.nodes
    outs = [graph.fresh(f"{name}.float") if name else "" for name in node.outputs]
    yield Node(node.op, inputs, outs, node.attrs, node.name)
    for single, name in zip(outs, node.outputs, strict=True):
        if name:
            yield from _cast(graph, node, single, name, dtype, twins)


def _cast(
    graph: Graph, node: Node, single: str, out: str, dtype: str, twins: Twins
) -> Iterator[Node]:
    if dtype in CARRIERS:
        _own(graph, twins, out, single, dtype)
        return
    twins[out] = single
    code = int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))
    yield Node("Cast", [single], [out], {"to": code}, node.name)
