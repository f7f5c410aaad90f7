"""Start kernels of quantized and few-bit layers: their specs, data and weights."""

from __future__ import annotations

import numpy as np

from bnncc.ir.graph import Graph, Node
from bnncc.recognise.few_bit import starts_of
from bnncc.schedules import with_packed_operands
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import few_bit_data, quantization
from bnncc.topi_binary.build import input_types
from bnncc.topi_binary.spec import Conv2d, Elementwise
from bnncc.transform.kernel_group import Group
from bnncc.transform.physical import Physical


def start_few_bit(node: Node, graph: Graph, physical: Physical) -> Group:
    """Return the group of a `bnncc.FewBitConv`."""
    a, data = node.attrs, node.inputs[0]
    spec = a["spec"]
    held = physical.level_form(data, spec.form)
    inputs = [
        physical.reshape(name, tuple(shape))
        for name, (shape, _) in zip(held, input_types(spec), strict=False)
    ]
    weight = few_bit_data.pack_weight(a["weight"], spec)
    inputs.append(physical.constant(weight, f"{node.name}.weight"))
    if spec.starts:
        inputs.append(physical.constant(starts_of(node), f"{node.name}.starts"))
    out_rank = len(graph.types[node.outputs[0]].shape)
    return Group(
        spec, inputs, np.asarray(a["scale"]), np.asarray(a["bias"]), node.outputs[0],
        node.name, node.covers, None, out_rank, top=a["top"], dot=a["dot"],
    )  # fmt: skip


def start_quantized(
    node: Node, graph: Graph, physical: Physical, target: TargetSpec | None
) -> Group:
    """Return the group of a `bnncc.QuantizedConv`."""
    a, data = node.attrs, node.inputs[0]
    weight = graph.constants[node.inputs[1]]
    n, channels, height, width, _ = physical.image(data)
    layout = physical.layout_of(data)
    spec = Conv2d(
        n, height, width, channels, weight.shape[0], weight.shape[2:], tuple(a["strides"]),
        pads=tuple(a["pads"]), data_layout=layout, operands=a["operands"],
        zero_points=tuple(a["zero_points"]),
    )  # fmt: skip
    spec = with_packed_operands(spec, target)
    packed = physical.constant(
        quantization.pack_weight(weight.transpose(0, 2, 3, 1), spec), f"{node.name}.weight"
    )
    inputs = [physical.float(data, layout), packed]
    return Group(spec, inputs, a["scale"], a["bias"], node.outputs[0], node.name, node.covers)


def start_image(node: Node, physical: Physical) -> Group:
    """Return the group of a kernel that reads an image of bytes."""
    data = node.inputs[0]
    n, channels, height, width, rank = physical.image(data)
    layout = physical.layout_of(data)
    spec = Elementwise(n, height, width, channels, layout, (), rank, dtype="uint8")
    inputs = [physical.float(data, layout)]
    ones, zeros = np.ones(channels), np.zeros(channels)
    return Group(spec, inputs, ones, zeros, node.outputs[0], node.name, rank=rank)
