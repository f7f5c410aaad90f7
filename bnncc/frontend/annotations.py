"""Use the data types that QONNX's and FINN's annotations (``finn_datatype``) declare for inputs.

Only inputs: what other tensors hold is known from what computes them, and an annotation that said
otherwise would be wrong. An input is rounded to its type, which changes no value of it; so every
pass knows what it can hold, and an array of other values cannot do harm.
"""

from __future__ import annotations

import onnx

from bnncc.ir.datatypes import Datatype, datatype
from bnncc.ir.graph import Graph, Node
from bnncc.ir.pieces import Expression
from bnncc.ir.quantizers import QUANT

KEY = "finn_datatype"


def declared(proto: onnx.GraphProto, graph: Graph) -> dict[str, Datatype]:
    """Return the narrow types of float inputs; none where annotations contradict each other."""
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
    """Return nodes that round an input to its type.

    Parameters
    ----------
    name, out : str
        The input, and what is to be read in its place.
    kind : Datatype
        What it holds.
    graph : Graph
        Gets constants.
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
