"""Evaluate graph nodes with NumPy: the reference semantics.

Conv, Gemm, MatMul, BatchNormalization, means and average pools accumulate in float64 and round
once. If both operands of a product are integer multiples of a scale, the accumulator is an exact
integer. Everything else is float32 as ONNX defines it. Operators that are not implemented here are
evaluated by `onnx.reference` on a model of one node.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

from bnncc.errors import InputError, UnsupportedOp
from bnncc.ir.demands import require
from bnncc.ir.graph import Graph, Node, TensorType
from bnncc.ir.operators import FUNCTIONS

Array = np.ndarray[Any, Any]
Inputs = Sequence[Array | None]

OPSET = onnx.defs.onnx_opset_version()
"""Opset version of the default domain that graph nodes follow."""


def evaluate_node(
    node: Node, inputs: Inputs, types: Mapping[str, TensorType] | None = None
) -> list[Array]:
    """Evaluate one node.

    Parameters
    ----------
    node : Node
        In the canonical form that `bnncc.frontend.onnx.load` produces.
    inputs : sequence of ndarray or None
        One per input of the node; None for absent inputs. Elementwise operators broadcast, so a
        leading axis of trial values may be added.
    types : mapping of str to TensorType, optional
        Types of the node's outputs, used if onnx.reference returns wider ones.

    Returns
    -------
    list of ndarray
        One per output of the node.

    Raises
    ------
    UnsupportedOp
        If neither this module nor `onnx.reference` implements the operator.
    InputError
        If an index is out of range, or an integer is divided by 0.
    """
    require(node, inputs)
    function = FUNCTIONS.get(node.op)
    with np.errstate(all="ignore"):
        if function is None:
            return _reference(node, inputs, types or {})
        results = function(node.attrs, list(inputs), len(node.outputs))
    return [np.asarray(r) for r in results]


def evaluate(
    graph: Graph, feeds: Mapping[str, Array], keep: Iterable[str] = (),
    change: Callable[[str, Array], Array] | None = None,
) -> dict[str, Array]:  # fmt: skip
    """Evaluate a graph.

    Parameters
    ----------
    graph : Graph
        Nodes in topological order.
    feeds : mapping of str to ndarray
        One array per graph input; arrays for other tensors override their producers.
    keep : iterable of str, optional
        Tensors to return besides the outputs; others are freed after their last reader.
    change : callable, optional
        Gets the name and value of each tensor that a node makes; returns what later nodes read.

    Returns
    -------
    dict of str to ndarray
        The graph's outputs and the tensors of `keep`.

    Raises
    ------
    InputError
        If a graph input is not fed.
    """
    for name in graph.inputs:
        if name not in feeds:
            raise InputError(f"input `{name}` is missing")
    wanted = {*graph.outputs, *keep}
    left: dict[str, int] = {}
    for node in graph.nodes:
        for name in node.inputs:
            left[name] = left.get(name, 0) + 1
    values: dict[str, Array] = {k: np.asarray(v) for k, v in feeds.items()}
    held = ChainMap(values, graph.constants)
    for node in graph.nodes:
        if not all(o in feeds for o in node.outputs if o):
            ins = [held[i] if i else None for i in node.inputs]
            outs = evaluate_node(node, ins, graph.types)
            for name, value in zip(node.outputs, outs, strict=False):
                if name and name not in feeds:
                    values[name] = value if change is None else change(name, value)
        for name in node.inputs:
            left[name] -= 1
            if not left[name] and name not in wanted:
                values.pop(name, None)
        for name in node.outputs:
            if name not in wanted and not left.get(name):
                values.pop(name, None)
    return {k: held[k] for k in wanted}


def _reference(node: Node, inputs: Inputs, types: Mapping[str, TensorType]) -> list[Array]:
    """Run one node of the default domain through onnx.reference."""
    from onnx.reference import ReferenceEvaluator

    if "::" in node.op or node.op.startswith("bnncc."):
        raise UnsupportedOp(f"{node.where}: cannot be evaluated")
    names = [f"i{k}" if v is not None else "" for k, v in enumerate(inputs)]
    outs = [f"o{k}" if name else "" for k, name in enumerate(node.outputs)]
    proto = helper.make_node(node.op, names, outs)
    proto.attribute.extend(make_attribute(k, v) for k, v in node.attrs.items())
    given = {n: np.asarray(v) for n, v in zip(names, inputs, strict=True) if n}
    model = helper.make_model(
        helper.make_graph(
            [proto],
            "node",
            [
                helper.make_tensor_value_info(
                    n, helper.np_dtype_to_tensor_dtype(v.dtype), list(v.shape)
                )
                for n, v in given.items()
            ],
            [onnx.ValueInfoProto(name=o) for o in outs if o],
        ),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=10,
    )
    try:
        results = iter(ReferenceEvaluator(model).run(None, given))
    except Exception as error:
        raise UnsupportedOp(
            f"{node.where}: cannot be evaluated ({error or type(error).__name__})"
        ) from error
    made = [np.asarray(next(results)) if o else np.zeros(0) for o in outs]
    if any(v.dtype == np.float64 for v in given.values()):
        return made
    if all(not o or o in types for o in node.outputs):
        return [
            v.astype(types[o].dtype) if o and v.dtype.kind == "f" else v
            for o, v in zip(node.outputs, made, strict=True)
        ]
    first = next((v.dtype for v in given.values()), np.dtype(np.float32))
    narrow = first if first.kind == "f" else np.dtype(np.float32)  # some widen their results
    return [v.astype(narrow) if v.dtype == np.float64 else v for v in made]


def make_attribute(name: str, value: Any) -> onnx.AttributeProto:
    """Convert a graph node's attribute to an ONNX attribute."""
    if isinstance(value, np.ndarray):
        return helper.make_attribute(name, onnx.numpy_helper.from_array(value))
    if isinstance(value, (list, tuple)) and not value:
        return helper.make_attribute(name, [], attr_type=onnx.AttributeProto.INTS)
    return helper.make_attribute(name, value)
