"""Interpret a model as daBNN does, on request: convolutions with binary weights imply signs.

    before: p = Pad(x, -1); y = Conv(p, W)               W = s[o] * {-1, +1}
    after:  p = Pad(x, -1); s = Where(p > 0, 1, -1); y = Conv(s, W)

daBNN's training recipe binarizes activations in place, so the exported graph contains no sign: as
ONNX, it is a float network. daBNN's converter treats each convolution with binary weights as
binary, replaces its data by the signs ``x > 0``, and its zero padding by padding with -1. Since
nothing in the file says so, bnncc does this only if asked (``--assume dabnn``).

References
----------
.. [1] Zhang et al., "daBNN: A Super Fast Inference Framework for Binary Neural Networks on ARM
   devices", ACM Multimedia 2019.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, inliner, numpy_helper

from bnncc.errors import UsageError
from bnncc.frontend.checks import DEFAULT_DOMAINS
from bnncc.frontend.onnx import load, read_model
from bnncc.ir.graph import Dim, Graph, Node
from bnncc.recognise.filters import binary_weight

Array = np.ndarray[Any, Any]

_MADE = re.compile(r".*\.dabnn\.(sign|padded)")


def assume_dabnn(
    model: str | os.PathLike[str] | onnx.ModelProto,
    input_shapes: Mapping[str, Sequence[Dim]] | None = None,
) -> tuple[onnx.ModelProto, dict[str, str]]:
    """Make the signs implied by daBNN's convention explicit.

    Parameters
    ----------
    model : path or onnx.ModelProto
        An ONNX model.
    input_shapes : mapping of str to sequence of int or str, optional
        Shapes that replace those in the file.

    Returns
    -------
    model : onnx.ModelProto
        A copy with signs before the convolutions whose filters are each one magnitude times signs,
        and with padding by -1.
    assumed : dict of str to str
        By name of such a convolution, a description of the change.

    Raises
    ------
    UsageError
        If there is no such convolution.
    """
    graph = load(model, input_shapes=input_shapes)
    proto = onnx.ModelProto()
    proto.CopyFrom(read_model(model))
    if proto.functions:
        proto = inliner.inline_local_functions(proto)
        graph = load(proto, input_shapes=input_shapes)
    proto.graph.name = graph.source
    found = {n.outputs[0]: n for n in graph.nodes if _is_binary(n, graph)}
    version = next((o.version for o in proto.opset_import if o.domain in DEFAULT_DOMAINS), 1)
    nodes: list[onnx.NodeProto] = []
    assumed: dict[str, str] = {}
    for node in proto.graph.node:
        conv = found.get(node.output[0]) if node.output else None
        if conv is not None:
            if not _MADE.fullmatch(node.input[0]):  # inserted signs need no further sign
                nodes += _signs(node, conv, proto.graph, version)
            how = ", padding by -1" if any(conv.attrs["pads"]) else ""
            assumed[conv.name] = f"takes the sign of its data{how} (--assume dabnn)"
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        nodes.append(copy)
    if not assumed:
        raise UsageError(
            f"--assume dabnn: {graph.source} has no convolution with binary weights",
            hint="`bnncc explain` without the option says what its layers are",
        )
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    return proto, assumed


def _is_binary(node: Node, graph: Graph) -> bool:
    """Whether daBNN treats a node as a binary convolution; filters of one weight do not count."""
    weight = graph.constants.get(node.inputs[1]) if node.op == "Conv" else None
    if weight is None or weight.ndim != 4 or weight[0].size < 2:
        return False
    return binary_weight(weight) is not None


def _signs(
    node: onnx.NodeProto, conv: Node, graph: onnx.GraphProto, version: int
) -> list[onnx.NodeProto]:
    """Return nodes that binarize the data of the convolution `node`, and connect them to it."""
    stem, data = f"{node.output[0]}.dabnn", node.input[0]

    def stored(what: str, value: Array) -> str:
        graph.initializer.append(numpy_helper.from_array(value, f"{stem}.{what}"))
        return f"{stem}.{what}"

    zero, one, minus_one = (
        stored(k, np.array(v, np.float32)) for k, v in (("zero", 0), ("one", 1), ("low", -1))
    )
    positive, sign, padded = (f"{stem}.{k}" for k in ("positive", "sign", "padded"))
    made = [
        helper.make_node("Greater", [data, zero], [positive]),
        helper.make_node("Where", [positive, one, minus_one], [sign]),
    ]
    node.input[0] = sign
    pads = [int(p) for p in conv.attrs["pads"]]
    if any(pads):
        sizes = [0, 0, *pads[:2], 0, 0, *pads[2:]]
        if version < 11:
            made.append(helper.make_node("Pad", [sign], [padded], pads=sizes, value=-1.0))
        else:
            inputs = [sign, stored("pads", np.array(sizes, np.int64)), minus_one]
            made.append(helper.make_node("Pad", inputs, [padded]))
        node.input[0] = padded
        kept = [a for a in node.attribute if a.name not in ("pads", "auto_pad")]
        del node.attribute[:]
        node.attribute.extend(kept)
    return made
