"""Types of node outputs, and the checks that need types.

Elementwise and reshaping operators are inferred here, so that symbols survive and messages are clear;
onnx's own inference is asked for the rest, one node at a time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from bnncc.errors import ModelError, ShapeError, UnsupportedOp
from bnncc.evaluate import OPSET, make_attribute
from bnncc.frontend.checks import MAX_RANK, elements
from bnncc.graph import Dim, Graph, Node, TensorType
from bnncc.shaping import reshape_to

Partial = tuple["int | str | None", ...]
"""An integer vector of which some elements are symbols or unknown."""

UNARY = {
    *("Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Ceil", "Celu", "Clip", "Cos"),
    *("Cosh", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish", "Identity"),
    *("LeakyRelu", "Log", "Mish", "Neg", "Not", "Reciprocal", "Relu", "Round", "Selu", "Shrink"),
    *("Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Tan", "Tanh"),
    *("ThresholdedRelu", "BitwiseNot"),
}
"""Elementwise operators of one tensor that keep its dtype (Clip's bounds are scalars)."""
BROADCAST = {
    *("Add", "And", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Div", "Max", "Mean"),
    *("Min", "Mod", "Mul", "Or", "PRelu", "Pow", "Sub", "Sum", "Xor"),
}
"""Elementwise operators of several tensors that keep the dtype."""
COMPARE = {"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"}
ELEMENTWISE = UNARY | BROADCAST | COMPARE | {"Where", "Cast", "IsNaN", "IsInf"}
_LOGIC = {"And", "Or", "Xor", "Not"}


def infer(
    node: Node, graph: Graph, partial: Mapping[str, Partial] | None = None
) -> list[TensorType]:
    """Return the types of a node's outputs.

    Parameters
    ----------
    node : Node
        In normalised form; its inputs' types are in `graph`.
    graph : Graph
        Types and constants.
    partial : mapping of str to tuple, optional
        What is known of integer vectors that are not constant.

    Returns
    -------
    list of TensorType
        One per output.

    Raises
    ------
    ShapeError
        If shapes do not fit, are unbounded or too large.
    ModelError
        If dtypes do not fit.
    """
    where = f"{node.op} `{node.name}`"
    types = [graph.types[i] if i else None for i in node.inputs]
    if node.op in ELEMENTWISE:
        outs = [_elementwise(node, types, where)]
    elif node.op in _RULES:
        outs = [_RULES[node.op](node, graph, partial or {}, where)]
    else:
        outs = _ask_onnx(node, graph, where)
    for out in outs:
        if len(out.shape) > MAX_RANK:
            raise ShapeError(f"{where}: output has {len(out.shape)} axes, at most {MAX_RANK}")
        elements(out.shape, f"{where}: output")
    return outs


def infer_into(node: Node, graph: Graph) -> None:
    """Set the types of a node's outputs in `graph`."""
    for name, kind in zip(node.outputs, infer(node, graph), strict=False):
        if name:
            graph.types[name] = kind


def dynamic(graph: Graph, where: str) -> ModelError:
    """Make the error for a shape that a dynamic dimension, or data, leaves open."""
    first = ""
    for name in graph.inputs:
        shape = graph.types[name].shape
        if any(isinstance(d, str) for d in shape):
            first = first or name
        for axis, dim in enumerate(shape):
            if isinstance(dim, str) and axis:
                return ShapeError(
                    f"{where}: its shape depends on dimension {axis} (`{dim}`) of input `{name}`, "
                    f"which is not fixed; pass --input-shape {name}:{_example(shape)}"
                )
    if not first:
        return UnsupportedOp(f"{where}: the shape of its output depends on values at run time")
    return ShapeError(
        f"{where}: its shape cannot be found for a dynamic batch; pass --input-shape "
        f"{first}:{_example(graph.types[first].shape)}"
    )


def _example(shape: Sequence[Dim]) -> str:
    sizes = {0: 1, 1: 3}
    return "x".join(
        str(d if isinstance(d, int) else sizes.get(i, 224)) for i, d in enumerate(shape)
    )


def broadcast(shapes: Sequence[Sequence[Dim]], where: str) -> tuple[Dim, ...]:
    """Return the common shape of several.

    Raises
    ------
    ShapeError
        If they do not.
    """
    rank = max((len(s) for s in shapes), default=0)
    result: list[Dim] = []
    for axis in range(-rank, 0):
        dims = {s[axis] for s in shapes if len(s) >= -axis} - {1}
        if len(dims) > 1:
            listed = ", ".join(str(list(s)) for s in shapes)
            raise ShapeError(f"{where}: shapes {listed} do not fit together")
        result.append(dims.pop() if dims else 1)
    return tuple(result)


def _elementwise(node: Node, types: list[TensorType | None], where: str) -> TensorType:
    present = [t for t in types if t is not None]
    first = present[0]
    if node.op == "Cast":
        if node.attrs["to"] not in _CASTS:
            raise UnsupportedOp(f"{where}: casts to type {node.attrs['to']} are not supported")
        return TensorType(first.shape, _CASTS[node.attrs["to"]])
    if node.op in ("IsNaN", "IsInf"):
        return TensorType(first.shape, "bool")
    same = present[1:] if node.op == "Where" else present
    if node.op not in ("Pow", "BitShift") and len({t.dtype for t in same}) > 1:
        found = ", ".join(t.dtype for t in same)
        raise ModelError(f"{where}: operands have types {found}; the same type is wanted")
    if (node.op in _LOGIC or node.op == "Where") and first.dtype != "bool":
        raise ModelError(f"{where}: its first operand is {first.dtype}, bool is wanted")
    if node.op in _REAL and not first.dtype.startswith(("float", "bfloat")):
        raise ModelError(f"{where}: its operand is {first.dtype}, a float type is wanted")
    if node.op in _NUMBER and same[0].dtype == "bool":
        raise ModelError(f"{where}: its operand is bool, a number is wanted")
    if node.op == "Clip":
        for bound in types[1:]:
            if bound is not None and math.prod(d for d in bound.shape if isinstance(d, int)) != 1:
                raise ShapeError(f"{where}: a bound has shape {list(bound.shape)}, wanted is []")
        return first
    if node.op in UNARY:
        return first
    shape = broadcast([t.shape for t in present], where)
    if node.op == "PRelu" and shape != first.shape:
        raise ShapeError(
            f"{where}: slope of shape {list(present[1].shape)} does not broadcast to "
            f"{list(first.shape)}"
        )
    return TensorType(shape, "bool" if node.op in COMPARE else same[0].dtype)


_REAL = {
    *("Ceil", "Cos", "Elu", "Erf", "Exp", "Floor", "HardSigmoid", "HardSwish", "LeakyRelu", "Log"),
    *("Reciprocal", "Round", "Sigmoid", "Sin", "Softplus", "Softsign", "Sqrt", "Tanh"),
}
_NUMBER = {
    *("Abs", "Add", "Clip", "Div", "Max", "Min", "Mul", "Neg", "PRelu", "Pow", "Relu", "Sign"),
    *("Sub", "Sum", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"),
}
_CASTS = {
    k: np.dtype(helper.tensor_dtype_to_np_dtype(k)).name
    for k in (
        *(TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16),
        *(TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64),
        *(TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64),
        *(TensorProto.BOOL, TensorProto.INT4, TensorProto.UINT4),
    )
}
_CODES = {name: code for code, name in _CASTS.items()}


# ----------------------------------------------------------------------------------------- shapes


def vector(name: str, graph: Graph, partial: Mapping[str, Partial]) -> Partial | None:
    """Return what is known of an integer vector; None if not even its length."""
    if name in graph.constants:
        return tuple(int(v) for v in graph.constants[name].reshape(-1)[:64])
    if name in partial:
        return partial[name]
    shape = graph.types[name].shape
    if len(shape) == 1 and isinstance(shape[0], int) and shape[0] <= 64:
        return (None,) * shape[0]
    return None


def volume(shape: Sequence[Dim]) -> tuple[int, Counter[str]]:
    """Split a number of elements into its known factor and its symbols."""
    known = math.prod(d for d in shape if isinstance(d, int))
    return known, Counter(d for d in shape if isinstance(d, str))


def _reshape(node: Node, graph: Graph, partial: Mapping[str, Partial], where: str) -> TensorType:
    x = graph.types[node.inputs[0]]
    wanted = vector(node.inputs[1], graph, partial)
    if wanted is None:
        raise dynamic(graph, where)
    allow = bool(node.attrs.get("allowzero"))
    if x.static and all(isinstance(d, int) for d in wanted):
        plain = [int(d) for d in wanted if isinstance(d, int)]
        if sum(d == -1 for d in plain) > 1 or any(d < -1 for d in plain):
            raise ShapeError(f"{where}: bad target shape {plain}")
        if not allow and any(d == 0 and i >= len(x.shape) for i, d in enumerate(plain)):
            raise ShapeError(f"{where}: target shape {plain} copies an axis the input lacks")
        full = reshape_to([int(d) for d in x.shape], plain, allow)
        if math.prod(full) != math.prod(int(d) for d in x.shape):
            raise ShapeError(f"{where}: cannot reshape {list(x.shape)} to {plain}")
        return TensorType(tuple(full), x.dtype)
    dims: list[Dim | None] = []
    for i, d in enumerate(wanted):
        if d == 0 and not allow and i < len(x.shape):
            dims.append(x.shape[i])
        else:
            dims.append(None if d == -1 else d)
    known, symbols = volume(x.shape)
    have, used = volume([d for d in dims if d is not None])
    open_axes = [i for i, d in enumerate(dims) if d is None]
    rest = symbols - used
    if used - symbols or not have or known % have:
        if not (used - symbols) and have and not open_axes:
            raise ShapeError(f"{where}: cannot reshape {list(x.shape)} to {list(wanted)}")
        raise dynamic(graph, where)
    factor = known // have
    left = list(rest.elements())
    if len(open_axes) == 1 and len(left) <= 1 and (not left or factor == 1):
        dims[open_axes[0]] = left[0] if left else factor
    elif len(open_axes) > 1 or left or factor != 1:
        if not open_axes and not left:
            raise ShapeError(f"{where}: cannot reshape {list(x.shape)} to {list(wanted)}")
        raise dynamic(graph, where)
    return TensorType(tuple(d for d in dims if d is not None), x.dtype)


def _expand(node: Node, graph: Graph, partial: Mapping[str, Partial], where: str) -> TensorType:
    x = graph.types[node.inputs[0]]
    wanted = vector(node.inputs[1], graph, partial)
    if wanted is None or None in wanted:
        raise dynamic(graph, where)
    dims = [d for d in wanted if d is not None]
    return TensorType(broadcast([x.shape, dims], where), x.dtype)


def _constant_of_shape(
    node: Node, graph: Graph, partial: Mapping[str, Partial], where: str
) -> TensorType:
    wanted = vector(node.inputs[0], graph, partial)
    if wanted is None or None in wanted:
        raise dynamic(graph, where)
    value = node.attrs.get("value", np.zeros(1, np.float32))
    return TensorType(tuple(d for d in wanted if d is not None), value.dtype.name)


def _flatten(node: Node, graph: Graph, partial: Mapping[str, Partial], where: str) -> TensorType:
    x = graph.types[node.inputs[0]]
    axis = node.attrs.get("axis", 1)
    if not 0 <= axis <= len(x.shape):
        raise ShapeError(f"{where}: axis {axis} of a tensor with {len(x.shape)} axes")
    dims: list[Dim] = []
    for part in (x.shape[:axis], x.shape[axis:]):
        known, symbols = volume(part)
        left = list(symbols.elements())
        if len(left) > 1 or (left and known != 1):
            raise dynamic(graph, where)
        dims.append(left[0] if left else known)
    return TensorType(tuple(dims), x.dtype)


def _tile(node: Node, graph: Graph, partial: Mapping[str, Partial], where: str) -> TensorType:
    x = graph.types[node.inputs[0]]
    times = vector(node.inputs[1], graph, partial)
    if times is None or len(times) != len(x.shape):
        raise dynamic(graph, where)
    dims: list[Dim] = []
    for d, t in zip(x.shape, times, strict=True):
        if isinstance(t, int) and (t == 1 or isinstance(d, int)):
            dims.append(d if t == 1 else int(d) * t)
        elif d == 1 and t is not None:
            dims.append(t)
        else:
            raise dynamic(graph, where)
    return TensorType(tuple(dims), x.dtype)


def _range(node: Node, graph: Graph, partial: Mapping[str, Partial], where: str) -> TensorType:
    values = [graph.constants.get(i) for i in node.inputs]
    if any(v is None or v.size != 1 for v in values):
        raise dynamic(graph, where)
    start, limit, step = (float(v.reshape(-1)[0]) for v in values if v is not None)
    if not step or not all(math.isfinite(v) for v in (start, limit, step)):
        raise ShapeError(f"{where}: bad range from {start} to {limit} in steps of {step}")
    count = max(0, math.ceil((limit - start) / step))
    return TensorType((count,), graph.types[node.inputs[0]].dtype)


def _pad(node: Node, graph: Graph, partial: Mapping[str, Partial], where: str) -> TensorType:
    x = graph.types[node.inputs[0]]
    pads = vector(node.inputs[1], graph, partial)
    rank = len(x.shape)
    axes: Any = range(rank)
    if len(node.inputs) > 3 and node.inputs[3]:
        axes = vector(node.inputs[3], graph, partial)
    if pads is None or axes is None or None in pads or None in axes:
        raise dynamic(graph, where)
    if len(pads) != 2 * len(axes) or any(not -rank <= a < rank for a in axes):
        raise ShapeError(f"{where}: {len(pads)} pads for {len(axes)} of {rank} axes")
    dims = list(x.shape)
    for k, axis in enumerate(axes):
        begin, end = pads[k], pads[k + len(axes)]
        if not (begin == 0 and end == 0):
            size = dims[axis]
            if not isinstance(size, int) or isinstance(begin, str) or isinstance(end, str):
                raise dynamic(graph, where)
            dims[axis] = size + int(begin or 0) + int(end or 0)
    return TensorType(tuple(dims), x.dtype)


_RULES = {
    "ConstantOfShape": _constant_of_shape,
    "Expand": _expand,
    "Flatten": _flatten,
    "Pad": _pad,
    "Range": _range,
    "Reshape": _reshape,
    "Tile": _tile,
}


# ------------------------------------------------------------------------------------ onnx's rules


def _ask_onnx(node: Node, graph: Graph, where: str) -> list[TensorType]:
    try:
        schema = onnx.defs.get_schema(node.op, OPSET, "")
    except onnx.defs.SchemaError as error:
        raise UnsupportedOp(f"{where}: the operator is not supported") from error
    proto = helper.make_node(node.op, node.inputs, node.outputs)
    proto.attribute.extend(make_attribute(k, v) for k, v in node.attrs.items())
    kinds: dict[str, onnx.TypeProto] = {}
    data: dict[str, TensorProto] = {}
    for name in node.inputs:
        if not name:
            continue
        kind = graph.types[name]
        kinds[name] = helper.make_tensor_type_proto(_CODES[kind.dtype], list(kind.shape))
        value = graph.constants.get(name)
        if value is not None and value.size <= 1024:
            data[name] = onnx.numpy_helper.from_array(value, name)
    try:
        found = onnx.shape_inference.infer_node_outputs(
            schema, proto, kinds, data, opset_imports=[helper.make_opsetid("", OPSET)]
        )
    except Exception as error:  # onnx raises several kinds, some of them plain RuntimeError
        reason = str(error).split("]", 1)[-1].strip() or type(error).__name__
        raise ShapeError(f"{where}: {reason}") from error
    result = []
    for name in node.outputs:
        kind = found.get(name)
        if not name:
            result.append(TensorType((), "float32"))
        elif kind is None or not kind.HasField("tensor_type"):
            raise ShapeError(f"{where}: the type of output `{name}` cannot be found")
        else:
            result.append(_from_proto(kind.tensor_type, graph, where))
    return result


def _from_proto(kind: Any, graph: Graph, where: str) -> TensorType:
    if kind.elem_type not in _CASTS:
        raise ModelError(f"{where}: tensors of type {kind.elem_type} are not supported")
    if not kind.HasField("shape"):
        raise dynamic(graph, where)
    dims: list[Dim] = []
    for dim in kind.shape.dim:
        which = dim.WhichOneof("value")
        if which is None:
            raise dynamic(graph, where)
        dims.append(dim.dim_value if which == "dim_value" else dim.dim_param)
    return TensorType(tuple(dims), _CASTS[kind.elem_type])
