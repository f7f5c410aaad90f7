"""Reject damaged, hostile and unsupported ONNX files before memory is allocated for them.

onnx.checker accepts much that is broken (zero groups, 2**40-sized inputs, string tensors) and
refuses some real files (no opset import of a custom domain), so the checks are made here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import AttributeProto, TensorProto, helper

from bnncc.errors import ModelError, UnsupportedOp
from bnncc.files import kind_of, read_bytes
from bnncc.frontend import custom
from bnncc.ir.graph import Graph, Node, elements

MAX_CONSTANT_BYTES = 8 << 30
MAX_NODES = 200_000

DEFAULT_DOMAINS = ("", "ai.onnx")
CONTROL_FLOW = {"If", "Loop", "Scan"}
DTYPES = {
    getattr(TensorProto, name)
    for name in (
        *("FLOAT", "DOUBLE", "FLOAT16", "BFLOAT16", "BOOL"),
        *("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"),
        *("INT4", "UINT4", "INT2", "UINT2", "FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2"),
        *("FLOAT8E5M2FNUZ", "FLOAT4E2M1", "FLOAT8E8M0"),
    )
    if hasattr(TensorProto, name)  # 2-bit types are new in onnx 1.20
}
_PER_BYTE = {
    getattr(TensorProto, name): per_byte
    for name, per_byte in (
        *(("INT4", 2), ("UINT4", 2), ("FLOAT4E2M1", 2), ("INT2", 4), ("UINT2", 4)),
    )
    if hasattr(TensorProto, name)
}
"""Elements per byte of packed types."""
_LIST_LENGTH = 250
_DATA_FIELDS = (
    *("float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data"),
)
RANDOM = {
    *("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform"),
    "RandomUniformLike",
}
INFINITE_OK = {
    *("Clip", "Concat", "ConstantOfShape", "Equal", "Expand", "Greater", "GreaterOrEqual", "Less"),
    *("LessOrEqual", "Max", "Min", "Pad", "Where"),
}
"""Operators that may read an infinite constant."""
MASKS = {"Add"}
"""Operators that may read a constant containing -inf, as masks before a softmax do."""
CARRY = {
    *(
        "Abs",
        "Add",
        "Concat",
        "Div",
        "Expand",
        "Flatten",
        "Gather",
        "Identity",
        "Mul",
        "Neg",
        "Pad",
    ),
    *("Reshape", "Slice", "Split", "Squeeze", "Sub", "Transpose", "Unsqueeze", "Where"),
}
"""Operators that propagate NaN and infinities as IEEE arithmetic does."""
ASK_FINITE = {"IsInf", "IsNaN"}
"""Operators whose results are always finite."""


def read(path: str | os.PathLike[str]) -> onnx.ModelProto:
    """Read an ONNX file, without its external data.

    Returns
    -------
    onnx.ModelProto
        As stored; nothing but the protobuf syntax has been checked.

    Raises
    ------
    ModelError
        If there is no such file, or if it is not an ONNX model.
    """
    file = Path(path)
    data = read_bytes(file, "an ONNX file")
    kind = kind_of(data)
    if kind == "a bnncc artifact":
        raise ModelError(
            f"{file}: this is a bnncc artifact, which is compiled already",
            hint="give the model that it was compiled from",
        )
    if kind and kind != "an ONNX model":
        raise ModelError(f"{file}: this is {kind}, not an ONNX model")
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except (DecodeError, RecursionError) as error:
        raise ModelError(f"{file}: not an ONNX model, or a truncated one") from error
    return model


def opsets(model: onnx.ModelProto) -> dict[str, int]:
    """Return the opset of each domain; the default domain's is checked.

    Raises
    ------
    ModelError
        If the model has no graph, or its versions are not supported.
    """
    if not model.HasField("graph") or not (model.graph.node or model.graph.output):
        raise ModelError("not an ONNX model: the file has no graph")
    if model.ir_version > onnx.IR_VERSION:
        raise ModelError(
            f"IR version {model.ir_version} is newer than the newest known, {onnx.IR_VERSION}"
        )
    if model.ir_version < 3:
        raise ModelError(f"IR version {model.ir_version}: expected 3 or newer")
    versions: dict[str, int] = {}
    for entry in model.opset_import:
        domain = "" if entry.domain in DEFAULT_DOMAINS else entry.domain
        if versions.get(domain, entry.version) != entry.version:
            raise ModelError(f"opset_import lists domain `{domain or 'ai.onnx'}` twice")
        versions[domain] = entry.version
    if "" not in versions:
        raise ModelError("opset_import lacks the default domain `ai.onnx`")
    if not 1 <= versions[""] <= MAX_OPSET:
        raise ModelError(f"opset {versions['']} of ai.onnx: expected 1 to {MAX_OPSET}")
    return versions


def op_name(node: onnx.NodeProto) -> str:
    """Return ``Op`` or ``domain::Op``."""
    if node.domain in DEFAULT_DOMAINS:
        return str(node.op_type)
    return f"{node.domain}::{node.op_type}"


def check_names(graph: onnx.GraphProto, nodes: Sequence[Node]) -> None:
    """Check that every tensor is defined once, and that all tensors that are read are defined.

    Raises
    ------
    ModelError
        Names the node or tensor.
    """
    if not graph.input:
        raise ModelError("the graph has no inputs")
    if not graph.output:
        raise ModelError("the graph has no outputs")
    defined: dict[str, str] = {}
    for value in graph.input:
        if not value.name:
            raise ModelError("a graph input has no name")
        if value.name in defined:
            raise ModelError(f"graph input `{value.name}` is listed twice")
        defined[value.name] = "a graph input"
    seen: set[str] = set()
    for tensor in graph.initializer:
        if not tensor.name:
            raise ModelError("an initializer has no name")
        if tensor.name in seen:
            raise ModelError(f"initializer `{tensor.name}` is listed twice")
        seen.add(tensor.name)
        defined[tensor.name] = "an initializer"
    for node in nodes:
        for name in node.outputs:
            if name and name in defined:
                raise ModelError(
                    f"{node.where}: output `{name}` is already {defined[name]}; "
                    "each tensor is to be assigned once"
                )
            if name:
                defined[name] = f"an output of `{node.name}`"
    for node in nodes:
        for name in node.inputs:
            if name and name not in defined:
                raise ModelError(f"{node.where}: input `{name}` is defined nowhere")
    listed: set[str] = set()
    for value in graph.output:
        if value.name not in defined:
            raise ModelError(f"graph output `{value.name}` is computed by no node")
        if value.name in listed:
            raise ModelError(f"graph output `{value.name}` is listed twice")
        listed.add(value.name)


def refuse_unknown(places: Sequence[str], hint: str | None = None) -> NoReturn:
    """Raise an error that lists nodes with unsupported operators, as many as fit on a line.

    Raises
    ------
    UnsupportedOp
        Always.
    """
    shown = places[0][:_LIST_LENGTH]  # names of operators can be arbitrarily long
    for k, text in enumerate(places[1:], 1):
        if len(shown) + len(text) > _LIST_LENGTH:
            shown += f" and {len(places) - k} more"
            break
        shown += f", {text}"
    have = "nodes have" if len(places) > 1 else "node has"
    raise UnsupportedOp(
        f"{len(places)} {have} an operator that is not supported: {shown}", hint=hint
    )


def check_tensor(tensor: onnx.TensorProto, where: str) -> None:
    """Check dtype, shape and the size of inline data of a stored tensor.

    Raises
    ------
    ModelError
        If data and shape are inconsistent, or the dtype is not supported.
    """
    if tensor.data_type not in DTYPES:
        names = {v: k for k, v in TensorProto.DataType.items()}
        kind = names.get(tensor.data_type, str(tensor.data_type)).lower()
        raise ModelError(f"{where}: tensors of type {kind} are not supported")
    count = elements(tensor.dims, where)
    if tensor.HasField("segment"):
        raise ModelError(f"{where}: segmented tensors are not supported")
    if tensor.data_location == TensorProto.EXTERNAL:
        return
    size = stored_bytes(tensor.data_type, count)
    field = helper.tensor_dtype_to_field(tensor.data_type)
    filled = [f for f in _DATA_FIELDS if len(getattr(tensor, f))]
    if len(filled) + tensor.HasField("raw_data") > 1:
        raise ModelError(f"{where}: holds data in several fields, expected one")
    if tensor.HasField("raw_data"):
        if len(tensor.raw_data) != size:
            raise ModelError(
                f"{where}: holds {len(tensor.raw_data)} bytes, shape {list(tensor.dims)} needs "
                f"{size}"
            )
        return
    held = len(getattr(tensor, field))
    wanted = size if tensor.data_type in _PER_BYTE else count
    if held != wanted:
        raise ModelError(f"{where}: holds {held} values, shape {list(tensor.dims)} needs {wanted}")


def stored_bytes(data_type: int, count: int) -> int:
    """Return the bytes of `count` elements in raw_data or an external file."""
    if data_type in _PER_BYTE:
        return -(-count // _PER_BYTE[data_type])
    return count * int(helper.tensor_dtype_to_np_dtype(data_type).itemsize)


def check_operators(nodes: Sequence[tuple[onnx.NodeProto, str, Mapping[str, int]]]) -> None:
    """Check each node against the schema of its operator.

    Parameters
    ----------
    nodes : sequence of (NodeProto, str, mapping)
        Node, name for messages, and the opsets that it was written for.

    Raises
    ------
    UnsupportedOp
        Lists every node whose operator is unknown or rejected.
    ModelError
        If inputs or attributes do not fit the schema.
    """
    unknown: list[str] = []
    for node, name, versions in nodes:
        graphs = (AttributeProto.GRAPH, AttributeProto.GRAPHS)
        if op_name(node) not in CONTROL_FLOW and any(a.type in graphs for a in node.attribute):
            unknown.append(f"{op_name(node)} `{name}` (control flow)")
        elif node.op_type in RANDOM and node.domain in DEFAULT_DOMAINS:
            unknown.append(f"{node.op_type} `{name}` (random)")
        elif custom.known(op_name(node)):
            custom.check(node, name, versions.get(node.domain, 1))
        elif node.domain not in DEFAULT_DOMAINS or not onnx.defs.has(node.op_type):
            unknown.append(f"{op_name(node)} `{name}`")
        else:
            try:
                schema = onnx.defs.get_schema(node.op_type, versions.get("", 1), "")
            except onnx.defs.SchemaError:
                since = min(
                    s.since_version
                    for s in onnx.defs.get_all_schemas_with_history()
                    if s.name == node.op_type and s.domain == ""
                )
                unknown.append(
                    f"{node.op_type} `{name}` (is of opset {since}, the file imports "
                    f"{versions.get('', 1)})"
                )
            else:
                check_age(node, name, schema, versions.get("", 1))
                check_schema(node, name, schema)
    if unknown:
        refuse_unknown(unknown)


def check_finite(graph: Graph, *, infinities: bool) -> None:
    """Reject constants that contain NaN or infinity, except where arithmetic propagates them.

    Attributes must be finite, too.

    They could produce NaN for finite inputs, which bits, levels and integer sums cannot represent.

    Parameters
    ----------
    graph : Graph
        Its constants are read.
    infinities : bool
        Whether to check for infinities too, also in results computed from constants; before
        folding, they may still disappear.

    Raises
    ------
    ModelError
        Names the node that reads the constant, or a value computed from it.
    """
    state: dict[str, str] = {}
    reached: dict[str, str] = {}
    for node in graph.nodes:
        for key, number in node.attrs.items():
            odd = isinstance(number, float) and not math.isfinite(number)
            if odd and node.op not in INFINITE_OK:
                raise ModelError(f"{node.where}: `{key}` is {number}, expected a finite number")
        holds = ""
        for name in node.inputs:
            value = graph.constants.get(name) if name else None
            if value is None or value.dtype.kind not in "fV":
                holds = holds or reached.get(name, "")
                continue
            if name not in state:
                state[name] = _not_finite(value.astype(np.float32))
            found = state[name]
            fine = INFINITE_OK | MASKS if found == "-infinity" else INFINITE_OK
            if found == "NaN" or (found and infinities and node.op not in fine):
                holds = f"constant `{name}` holds {found}"
        if not holds or node.op in ASK_FINITE:
            continue
        twice = sum(name in reached for name in node.inputs) > 1  # infinities might cancel
        if node.op not in CARRY or (twice and node.op in ("Add", "Sub")):
            raise ModelError(f"{node.where}: {holds}, expected finite numbers")
        if infinities:
            first = holds if "reaches" in holds else f"{holds}, which reaches it"
            reached.update(dict.fromkeys(node.outputs, first))


def _not_finite(value: np.ndarray) -> str:
    """Return the kind of non-finite value that an array contains, or ""."""
    if np.isfinite(value).all():
        return ""
    if np.isnan(value).any():
        return "NaN"
    return "infinity" if (value == np.inf).any() else "-infinity"


MIN_OPSET = 7
"""Oldest opset that is fully supported; of older ones, operators that have not changed since."""
MAX_OPSET = onnx.defs.onnx_opset_version()


def check_age(node: onnx.NodeProto, name: str, schema: onnx.defs.OpSchema, version: int) -> None:
    """Reject operators in a form that opset 7 changed.

    Parameters
    ----------
    schema : onnx.defs.OpSchema
        Schema of the operator in opset `version`.
    version : int
        Opset that the file imports.

    Raises
    ------
    UnsupportedOp
        If the form has changed since.
    """
    if version >= MIN_OPSET:
        return
    newer = onnx.defs.get_schema(node.op_type, MIN_OPSET, "")
    if newer.since_version != schema.since_version:
        raise UnsupportedOp(
            f"{node.op_type} `{name}`: its form of opset {version} is not supported, "
            f"expected that of opset {MIN_OPSET} to {MAX_OPSET}",
            hint="onnx.version_converter brings a model to a newer opset",
        )


def check_schema(node: onnx.NodeProto, name: str, schema: onnx.defs.OpSchema) -> None:
    """Check inputs, outputs and attributes of a node.

    Raises
    ------
    ModelError
        If something is missing, superfluous, or of another type.
    UnsupportedOp
        If the operator is deprecated.
    """
    where = f"{node.op_type} `{name}`"
    if schema.deprecated and node.op_type != "Upsample":
        raise UnsupportedOp(f"{where}: the operator is deprecated in opset {schema.since_version}")
    count = len(node.input)
    while count and not node.input[count - 1]:
        count -= 1
    if not schema.min_input <= count <= schema.max_input:
        raise ModelError(
            f"{where}: has {count} inputs, expected {schema.min_input} to {schema.max_input}"
        )
    single = onnx.defs.OpSchema.FormalParameterOption.Single
    for k, formal in enumerate(schema.inputs):
        if formal.option == single and k < count and not node.input[k]:
            raise ModelError(f"{where}: required input {k} (`{formal.name}`) is missing")
    if not schema.min_output <= len(node.output) <= schema.max_output:
        raise ModelError(
            f"{where}: has {len(node.output)} outputs, expected {schema.min_output} to "
            f"{schema.max_output}"
        )
    given = {a.name for a in node.attribute}
    if len(given) != len(node.attribute):
        raise ModelError(f"{where}: an attribute is given twice")
    for attribute in node.attribute:
        known = schema.attributes.get(attribute.name)
        if known is None:
            if attribute.name.startswith("_") or attribute.name in ("doc_string",):
                continue
            raise ModelError(f"{where}: unknown attribute `{attribute.name}`")
        if int(known.type.value) != attribute.type:
            raise ModelError(
                f"{where}: attribute `{attribute.name}` is "
                f"{AttributeProto.AttributeType.Name(attribute.type)}, expected {known.type.name}"
            )
    for key, known in schema.attributes.items():
        if known.required and key not in given:
            raise ModelError(f"{where}: required attribute `{key}` is missing")
