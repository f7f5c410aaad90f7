"""Type inference of node outputs, and the checks that depend on types.

Elementwise and reshaping operators are inferred here, to support symbols and give clear messages;
all others by onnx's own inference, one node at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from bnncc.errors import ModelError, ShapeError, UnsupportedOp
from bnncc.ir.evaluate import OPSET, make_attribute
from bnncc.ir.graph import MAX_RANK, Dim, Graph, Node, TensorType, elements
from bnncc.ir.halves import NARROW, ROUND
from bnncc.ir.quantizers import MULTI_THRESHOLD, QUANT
from bnncc.ir.shaperules import RULES, Partial, broadcast, dynamic

UNARY = {
    *("Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Ceil", "Celu", "Clip", "Cos"),
    *("Cosh", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish", "Identity"),
    *("LeakyRelu", "Log", "Mish", "Neg", "Not", "Reciprocal", "Relu", "Round", "Selu", "Shrink"),
    *("Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Tan", "Tanh"),
    *("ThresholdedRelu", "BitwiseNot"),
}
"""Elementwise operators of one tensor that preserve its dtype (Clip's bounds are scalars)."""
BROADCAST = {
    *("Add", "And", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Div", "Max", "Mean"),
    *("Min", "Mod", "Mul", "Or", "PRelu", "Pow", "Sub", "Sum", "Xor"),
}
"""Elementwise operators of several tensors that preserve the dtype."""
COMPARE = {"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"}
ELEMENTWISE = UNARY | BROADCAST | COMPARE | {"Where", "Cast", "IsNaN", "IsInf"}
QUANTIZERS = {QUANT, MULTI_THRESHOLD}
"""Internal operators that frontends create."""
_LOGIC = {"And", "Or", "Xor", "Not"}


def infer(
    node: Node, graph: Graph, partial: Mapping[str, Partial] | None = None
) -> list[TensorType]:
    """Return the types of a node's outputs.

    Parameters
    ----------
    node : Node
        In canonical form; `graph` has the types of its inputs.
    graph : Graph
        Types and constants.
    partial : mapping of str to tuple, optional
        Known elements of integer vectors that are not constant.

    Raises
    ------
    ShapeError
        If shapes are inconsistent, unbounded or too large.
    ModelError
        If dtypes are inconsistent.
    """
    where = node.where
    types = [graph.types[i] if i else None for i in node.inputs]
    if node.op in ELEMENTWISE:
        outs = [_elementwise(node, types, where)]
    elif node.op in RULES:
        outs = [RULES[node.op](node, graph, partial or {}, where)]
    elif node.op in QUANTIZERS:
        first = graph.types[node.inputs[0]]
        shapes = [graph.types[i].shape for i in node.inputs[: 3 if node.op == QUANT else 1]]
        outs = [TensorType(broadcast(shapes, where), first.dtype)]
    elif node.op in (ROUND, NARROW):  # may be moved to a tensor of another shape
        assert types[0] is not None
        outs = [types[0]]
    elif node.op.startswith("bnncc."):  # created and typed by a pass
        outs = [graph.types[name] for name in node.outputs]
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
        raise ModelError(f"{where}: operands have types {found}; expected the same type")
    if (node.op in _LOGIC or node.op == "Where") and first.dtype != "bool":
        raise ModelError(f"{where}: its first operand is {first.dtype}, expected bool")
    if node.op in _REAL and not first.dtype.startswith(("float", "bfloat")):
        raise ModelError(f"{where}: its operand is {first.dtype}, expected a float type")
    if node.op in _NUMBER and same[0].dtype == "bool":
        raise ModelError(f"{where}: its operand is bool, expected a number")
    if node.op == "Clip":
        for bound in types[1:]:
            if bound is not None and math.prod(d for d in bound.shape if isinstance(d, int)) != 1:
                raise ShapeError(f"{where}: a bound has shape {list(bound.shape)}, expected []")
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
_NARROW = [
    getattr(TensorProto, name)
    for name in (
        *("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ", "FLOAT4E2M1"),
        "FLOAT8E8M0",
    )
    if hasattr(TensorProto, name)
]
NARROW_FLOATS = {np.dtype(helper.tensor_dtype_to_np_dtype(code)).name: code for code in _NARROW}
"""Float types of up to 8 bits, with ONNX's numbers."""
_CASTS = {
    k: np.dtype(helper.tensor_dtype_to_np_dtype(k)).name
    for k in (
        *(TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16),
        *(TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64),
        *(TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64),
        *(TensorProto.BOOL, TensorProto.INT4, TensorProto.UINT4),
        *(getattr(TensorProto, k) for k in ("INT2", "UINT2") if hasattr(TensorProto, k)),
        *NARROW_FLOATS.values(),
    )
}
_CODES = {name: code for code, name in _CASTS.items()}


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
    except Exception as error:  # onnx raises several types, including plain RuntimeError
        reason = str(error).split("]", 1)[-1].strip() or type(error).__name__
        raise ShapeError(f"{where}: {reason}") from error
    result: list[TensorType] = []
    for name in node.outputs:
        kind = found.get(name)
        if not name:
            result.append(TensorType((), "float32"))
        elif kind is not None and kind.WhichOneof("value") in ("sequence_type", "optional_type"):
            what = str(kind.WhichOneof("value")).removesuffix("_type")
            raise UnsupportedOp(f"{where}: output `{name}` is of type {what}, expected a tensor")
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
