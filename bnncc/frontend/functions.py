"""Function operators, which ONNX defines by simpler operators.

An operator with neither a kernel nor an evaluator is replaced by its definition in ONNX's schema,
for the types of its inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import FunctionProto, TypeProto, helper

from bnncc.errors import UnsupportedOp
from bnncc.frontend.inline import Located, body_of
from bnncc.ir.evaluate import OPSET, make_attribute
from bnncc.ir.graph import Graph, Node
from bnncc.ir.operators import FUNCTIONS

KEPT = {"Gelu", "Selu", "Shrink", "ThresholdedRelu"}
"""Function operators that are lowered as they are, although onnx.reference evaluates them."""

SINGLE = {"MeanVarianceNormalization"}
"""Function operators whose definition has only float32 constants."""


def has_body(node: Node) -> bool:
    """Whether a node is replaced by the definition of its operator."""
    known = node.op in FUNCTIONS or node.op in KEPT
    if (known and not any(node.outputs[1:])) or not onnx.defs.has(node.op):
        return False
    schema = onnx.defs.get_schema(node.op, OPSET, "")
    return bool(schema.has_function or schema.has_context_dependent_function)


def body(node: Node, graph: Graph, prefix: str) -> Sequence[Located]:
    """Return the definition of a node's operator.

    Parameters
    ----------
    node : Node
        In the newest form, with an operator that `has_body`.
    graph : Graph
        Types of its inputs.
    prefix : str
        Prefix of names inside.

    Returns
    -------
    sequence of (NodeProto, mapping)
        Nodes with the opsets that they are written for.

    Raises
    ------
    UnsupportedOp
        If ONNX has no definition for these types or attributes.
    """
    schema = onnx.defs.get_schema(node.op, OPSET, "")
    call = helper.make_node(node.op, node.inputs, node.outputs, node.name)
    call.attribute.extend(make_attribute(k, v) for k, v in node.attrs.items())
    given = set(node.attrs)
    for key, known in schema.attributes.items():
        if key not in given and known.default_value.type:
            call.attribute.append(known.default_value)
    function = _definition(schema, call, node, graph)
    return body_of(call, function, {"": OPSET}, prefix)


def _definition(
    schema: onnx.defs.OpSchema, call: onnx.NodeProto, node: Node, graph: Graph
) -> FunctionProto:
    if not schema.has_context_dependent_function:
        plain: FunctionProto = schema.function_body
        dtype = graph.types[node.inputs[0]].dtype
        return _single(plain, dtype) if node.op in SINGLE and dtype != "float32" else plain
    version = max(v for v in schema.context_dependent_function_opset_versions if v <= OPSET)
    types = [_type(name, graph).SerializeToString() for name in node.inputs]
    try:
        data = schema.get_context_dependent_function_with_opset_version(
            version, call.SerializeToString(), types
        )
    except Exception as error:  # a C++ exception of any type
        raise UnsupportedOp(
            f"{node.where}: ONNX has no definition for these inputs and attributes "
            f"({str(error).splitlines()[0][:120] if str(error) else type(error).__name__})"
        ) from error
    function = FunctionProto()
    function.ParseFromString(data)
    if not function.node:
        raise UnsupportedOp(f"{node.where}: ONNX has no definition for these inputs and attributes")
    return function


def _single(function: FunctionProto, dtype: str) -> FunctionProto:
    """Adapt a definition with float32 constants to data of another type.

    The operands of a sum must have one type. For float64, constants are converted; narrower types
    are computed in float32 like the constants, because an epsilon of 1e-9 is 0 in float16.
    """
    made = FunctionProto()
    made.CopyFrom(function)
    if dtype == "float64":
        for attribute in (a for node in made.node for a in node.attribute if a.name == "value"):
            value = onnx.numpy_helper.to_array(attribute.t).astype(np.float64)
            attribute.t.CopyFrom(onnx.numpy_helper.from_array(value))
        return made
    for node in made.node:
        for names in (node.input, node.output):
            names[:] = [f"{n}.single" if n in (*made.input, *made.output) else n for n in names]
    (data,), (out,) = made.input, made.output
    first = helper.make_node("Cast", [data], [f"{data}.single"], to=onnx.TensorProto.FLOAT)
    last = helper.make_node("CastLike", [f"{out}.single", data], [out])
    nodes = [first, *made.node, last]
    del made.node[:]
    made.node.extend(nodes)
    return made


def _type(name: str, graph: Graph) -> TypeProto:
    if not name:
        return TypeProto()
    kind = graph.types[name]
    code = helper.np_dtype_to_tensor_dtype(np.dtype(kind.dtype))
    return helper.make_tensor_type_proto(code, list(kind.shape))
