"""Reject names that are not valid text, before they are compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import onnx

from bnncc.errors import ModelError


def check_text(model: onnx.ModelProto) -> None:
    """Check that every name in a model is UTF-8.

    Protobuf returns bytes for strings that it cannot decode.

    Raises
    ------
    ModelError
        Names the position of the first invalid one.
    """
    for where, text in _texts(model):
        if not isinstance(text, str):
            shown = text[:40]
            raise ModelError(f"{where} {shown!r} is not UTF-8")


def _texts(model: onnx.ModelProto) -> Iterator[tuple[str, Any]]:
    graph = model.graph
    for entry in model.opset_import:
        yield "a domain in opset_import,", entry.domain
    yield "the graph's name", graph.name
    for value in (*graph.input, *graph.output):
        yield "the tensor name", value.name
        for dim in value.type.tensor_type.shape.dim:
            yield "a symbolic dimension", dim.dim_param
    for tensor in graph.initializer:
        yield "the tensor name", tensor.name
        yield from _locations(tensor)
    yield from _of_nodes(graph.node)
    for function in model.functions:
        for text in (function.domain, function.name, *function.input, *function.output):
            yield "the name in a function,", text
        for name in (*function.attribute, *(a.name for a in function.attribute_proto)):
            yield "the attribute of a function,", name
        for entry in function.opset_import:
            yield "a domain in opset_import,", entry.domain
        yield from _of_nodes(function.node)
    for annotation in graph.quantization_annotation:
        yield "the tensor name", annotation.tensor_name
        for pair in annotation.quant_parameter_tensor_names:
            yield "an annotation's key", pair.key
            yield "an annotation's value", pair.value


def _of_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[tuple[str, Any]]:
    for node in nodes:
        yield "the operator", node.op_type
        where = f"{node.op_type}: the"
        yield f"{where} domain", node.domain
        for text in (node.name, *node.input, *node.output):
            yield f"{where} name", text
        for attribute in node.attribute:
            yield f"{where} attribute's name", attribute.name
            yield f"{where} attribute's name", attribute.ref_attr_name
            if attribute.HasField("t"):
                yield f"{where} name of a tensor", attribute.t.name
                yield from _locations(attribute.t)


def _locations(tensor: onnx.TensorProto) -> Iterator[tuple[str, Any]]:
    for entry in tensor.external_data:
        yield "a key of external data,", entry.key
        yield "a value of external data,", entry.value
