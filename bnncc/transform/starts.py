"""Start the kernels of few-bit, quantized, image and product layers: spec, data and weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from bnncc.ir.graph import Dim, Graph, Node
from bnncc.recognise.few_bit import starts_of
from bnncc.schedules import with_packed_operands, with_weight_order
from bnncc.topi_binary import few_bit_data, filtering, quantization, sliced_data
from bnncc.topi_binary.build import input_types
from bnncc.topi_binary.layout import WORD_BITS, pack_float_weight, words
from bnncc.topi_binary.spec import BinaryConv2d, Conv2d, Elementwise, WeightsOfRows
from bnncc.transform.kernel_group import Group
from bnncc.transform.physical import Physical, Planes


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
    node: Node, graph: Graph, physical: Physical, method: Callable[[Conv2d], Conv2d]
) -> Group:
    """Return the group of a `bnncc.QuantizedConv`; `method` selects how products are computed."""
    a, data = node.attrs, node.inputs[0]
    weight = graph.constants[node.inputs[1]]
    n, channels, height, width, _ = physical.image(data)
    layout = physical.layout_of(data)
    spec = Conv2d(
        n, height, width, channels, weight.shape[0], weight.shape[2:], tuple(a["strides"]),
        pads=tuple(a["pads"]), data_layout=layout, operands=a["operands"],
        zero_points=tuple(a["zero_points"]),
    )  # fmt: skip
    spec = with_packed_operands(spec, physical.target)
    spec = method(spec) if spec.operands == "bfloat16" else spec
    packed = physical.constant(
        packed_weight(weight.transpose(0, 2, 3, 1), spec), f"{node.name}.weight"
    )
    inputs = [physical.float(data, layout), packed]
    return Group(spec, inputs, a["scale"], a["bias"], node.outputs[0], node.name, node.covers)


def packed_weight(rows: np.ndarray, spec: Conv2d) -> np.ndarray:
    """Pack weights ``[units, kernel_h, kernel_w, channels]`` in the order a float kernel reads."""
    if spec.method != "direct":
        return filtering.pack_weight(rows, spec)
    if spec.operands != "float32":
        return quantization.pack_weight(rows, spec)
    return pack_float_weight(rows)


def start_image(node: Node, physical: Physical) -> Group:
    """Return the group of a kernel that reads a uint8 image."""
    data = node.inputs[0]
    n, channels, height, width, rank = physical.image(data)
    layout = physical.layout_of(data)
    spec = Elementwise(n, height, width, channels, layout, (), rank, dtype="uint8")
    inputs = [physical.float(data, layout)]
    ones, zeros = np.ones(channels), np.zeros(channels)
    return Group(spec, inputs, ones, zeros, node.outputs[0], node.name, rank=rank)


def start_product(node: Node, physical: Physical) -> Group:
    """Return the group of a `products.BINARY_PRODUCT`; its second operand is converted to weights.

    The conversion is appended to `physical`, the graph under construction.

    Returns
    -------
    Group
        A convolution with one image per matrix.
    """
    a = node.attrs
    left, right = (physical.bits(i) for i in node.inputs)
    batch, rows, columns = a["batch"], int(a["rows"]), int(a["columns"])
    depth = int(physical.source.types[node.inputs[0]].shape[1])
    spec = BinaryConv2d(
        batch, 1, rows, depth, columns, (1, 1), mode=a["mode"], ternary=left.zero is not None,
        per_image=True, weight_zeros=right.zero is not None,
    )  # fmt: skip
    data = [left.sign, left.zero] if left.zero else [left.sign]
    inputs = [physical.reshape(p, (batch, 1, rows, words(depth))) for p in data]
    inputs += _weights(physical, right, WeightsOfRows(batch, columns, depth, a["mode"] == "and"))
    scale, bias = np.full(columns, a["scale"]), np.zeros(columns)
    return Group(spec, inputs, scale, bias, node.outputs[0], node.name, node.covers, rank=2)


def _weights(physical: Physical, planes: Planes, spec: WeightsOfRows) -> list[str]:
    """Convert rows to weights; return the sign plane, the zero plane and the initial values."""
    shape: tuple[Dim, ...] = (spec.n, spec.rows, words(spec.channels))
    signs = [physical.graph.fresh(f"{planes.sign}.{k}") for k in ("weight", "start")]
    signs = signs[: 1 + spec.count]
    physical.kernel(spec, [physical.reshape(planes.sign, shape)], signs, planes.sign)
    if planes.zero is None:
        return signs
    zero = physical.graph.fresh(f"{planes.zero}.weight")
    plain = WeightsOfRows(spec.n, spec.rows, spec.channels)
    physical.kernel(plain, [physical.reshape(planes.zero, shape)], [zero], planes.zero)
    return [signs[0], zero, *signs[1:]]


def grouped_operands(
    spec: BinaryConv2d, planes: list[str], name: str, physical: Physical
) -> tuple[BinaryConv2d, list[str]]:
    """Prepare data for the kernel of a grouped binary layer.

    Small groups are computed in bit slices, on the planes as they are (`topi_binary.sliced_data`);
    if a group has more output than input channels, its channels are repeated. Otherwise each group
    is moved to words of its own.

    Parameters
    ----------
    spec : BinaryConv2d
        The layer, with any number of groups.
    planes : list of str
        Its data: the sign plane and, if any, the zero plane.
    name : str
        The logical tensor of these planes.

    Returns
    -------
    BinaryConv2d
        With the number of channels as read. The weight order tells whether bit slices are used;
        any other order is decided when weights are packed.
    list of str
        Planes to read.
    """
    target = physical.target
    depth, made = spec.channels_per_group, spec.out_channels // spec.groups
    if spec.groups > 1 and target is not None and made % depth == 0:
        groups = spec.out_channels // depth
        repeated = replace(spec, channels=spec.out_channels, groups=groups)
        chosen = with_weight_order(repeated, target)
        if chosen.weight_order == sliced_data.ORDER:
            index = [g * depth + j % depth for g in range(spec.groups) for j in range(made)]
            return chosen, [physical.pick(plane, name, tuple(index)) for plane in planes]
    if spec.groups > 1 and depth % WORD_BITS:
        held = words(depth) * WORD_BITS
        index = [
            g * depth + i if i < depth else -1 for g in range(spec.groups) for i in range(held)
        ]
        planes = [physical.pick(plane, name, tuple(index)) for plane in planes]
    return with_weight_order(spec, target) if target is not None else spec, planes
