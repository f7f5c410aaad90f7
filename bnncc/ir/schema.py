"""Information from ONNX's schemas about attributes and inputs."""

from __future__ import annotations

from functools import cache
from typing import Any

import onnx
from onnx import helper

from bnncc.errors import ModelError
from bnncc.ir.evaluate import OPSET
from bnncc.ir.graph import Graph, Node

_OLD_DEFAULTS = {("BatchNormalization", "spatial"): 1}
"""Defaults of attributes that newer opsets lack."""


def is_default(op: str, key: str, value: Any) -> bool:
    """Whether an attribute has its default value.

    Parameters
    ----------
    op : str
        Operator of the default domain.
    key : str
        The attribute.
    value : object
        Value of the attribute.
    """
    if not onnx.defs.has(op):
        return False
    known = onnx.defs.get_schema(op, OPSET, "").attributes.get(key)
    if known is None or not known.default_value.type:
        old = _OLD_DEFAULTS.get((op, key))
        return old is not None and bool(value == old)
    found = helper.get_attribute_value(known.default_value)
    return bool(value == (found.decode() if isinstance(found, bytes) else found))


def check_whole(node: Node, graph: Graph) -> None:
    """Check the dtypes of inputs that must be integers or bools: indices and conditions.

    Parameters
    ----------
    node : Node
        In the form of the newest opset.
    graph : Graph
        Holds the types of its inputs.

    Raises
    ------
    ModelError
        If an input has another dtype.
    """
    for name, (wanted, formal) in zip(node.inputs, _whole(node.op), strict=False):
        found = graph.types[name].dtype if wanted and name in graph.types else ""
        if found and not (found == "bool" if wanted == "bool" else "int" in found):
            raise ModelError(f"{node.where}: `{formal}` has type {found}, expected {wanted}")


@cache
def _whole(op: str) -> tuple[tuple[str, str], ...]:
    """Return, for each input, the required kind of dtype and its name in the schema."""
    if not onnx.defs.has(op):
        return ()
    kinds = []
    for formal in onnx.defs.get_schema(op, OPSET, "").inputs:
        types = {kind.removeprefix("tensor(").rstrip(")") for kind in formal.types}
        one = "bool" if types == {"bool"} else "int64" if all("int" in t for t in types) else ""
        kinds.append((one, formal.name))
    return tuple(kinds)
