"""Check single nodes against the schemas of their operators."""

from __future__ import annotations

import onnx
from onnx import AttributeProto

from bnncc.errors import ModelError, UnsupportedOp

MIN_OPSET = 7
"""Oldest opset that is read whole; of older ones, operators that have not changed since."""
MAX_OPSET = onnx.defs.onnx_opset_version()


def check_age(node: onnx.NodeProto, name: str, schema: onnx.defs.OpSchema, version: int) -> None:
    """Refuse the form of an operator that opset 7 changed.

    Parameters
    ----------
    name : str
        For messages.
    schema : onnx.defs.OpSchema
        Of its operator in the opset `version`.
    version : int
        What the file imports.

    Raises
    ------
    UnsupportedOp
        If it has another form since.
    """
    if version >= MIN_OPSET:
        return
    newer = onnx.defs.get_schema(node.op_type, MIN_OPSET, "")
    if newer.since_version != schema.since_version:
        raise UnsupportedOp(
            f"{node.op_type} `{name}`: its form of opset {version} is not supported, that of opset "
            f"{MIN_OPSET} to {MAX_OPSET} is wanted",
            hint="onnx.version_converter brings a model to a newer opset",
        )


def check_schema(node: onnx.NodeProto, name: str, schema: onnx.defs.OpSchema) -> None:
    """Check inputs, outputs and attributes of a node.

    Raises
    ------
    ModelError
        If something is missing, too much, or of another type.
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
            f"{where}: has {count} inputs, {schema.min_input} to {schema.max_input} are wanted"
        )
    single = onnx.defs.OpSchema.FormalParameterOption.Single
    for k, formal in enumerate(schema.inputs):
        if formal.option == single and k < count and not node.input[k]:
            raise ModelError(f"{where}: required input {k} (`{formal.name}`) is missing")
    if not schema.min_output <= len(node.output) <= schema.max_output:
        raise ModelError(
            f"{where}: has {len(node.output)} outputs, {schema.min_output} to "
            f"{schema.max_output} are wanted"
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
                f"{AttributeProto.AttributeType.Name(attribute.type)}, {known.type.name} is wanted"
            )
    for key, known in schema.attributes.items():
        if known.required and key not in given:
            raise ModelError(f"{where}: required attribute `{key}` is missing")
