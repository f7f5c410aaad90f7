"""Use the data types that QONNX's and FINN's annotations (``finn_datatype``) declare for inputs.

Only inputs: the values of other tensors follow from what computes them. An input is rounded to its
declared type, which changes none of the type's values. So passes know the possible values, and
invalid arrays do no harm.
"""

from __future__ import annotations

import onnx

from bnncc.ir.datatypes import Datatype, datatype
from bnncc.ir.graph import Graph, Node
from bnncc.ir.pieces import Expression
from bnncc.ir.quantizers import QUANT

KEY = "finn_datatype"


def declared(proto: onnx.GraphProto, graph: Graph) -> dict[str, Datatype]:
    """Return the narrow types of float inputs; contradictory annotations are ignored."""
    said: dict[str, set[str]] = {}
    for annotation in proto.quantization_annotation:
        for pair in annotation.quant_parameter_tensor_names:
            if pair.key == KEY:
                said.setdefault(annotation.tensor_name, set()).add(pair.value)
    found = {
        name: datatype(next(iter(said[name])))
        for name in graph.inputs
        if len(said.get(name, ())) == 1 and graph.types[name].dtype == "float32"
    }
    return {name: kind for name, kind in found.items() if kind is not None}


def rounded_input(name: str, out: str, kind: Datatype, graph: Graph) -> list[Node]:
    """Return nodes that round an input to its declared type.

    Parameters
    ----------
    name, out : str
        The input, and the rounded tensor.
    kind : Datatype
        The declared type.
    graph : Graph
        Receives constants.
    """
    write = Expression(Node("Input", [name], [out], {}, name), graph)
    if kind.count == 2:
        low, cut, high = (write.constant(kind.low + kind.step * k) for k in (0, 0.5, 1))
        return write.result(write("Where", write("GreaterOrEqual", name, cut), high, low))
    bits = (kind.count - 1).bit_length()
    parameters = [write.constant(v) for v in (kind.step, 0, bits)]
    signed, narrow = int(kind.low < 0), int(kind.count % 2)
    attrs = {"signed": signed, "narrow": narrow, "rounding_mode": "ROUND"}
    return write.result(write(QUANT, name, *parameters, **attrs))
