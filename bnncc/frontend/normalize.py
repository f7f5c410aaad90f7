"""Convert nodes of any opset to the newest form, so that passes see a single form.

Attributes that became inputs are made constant inputs, defaults are made explicit, `auto_pad`
becomes `pads`, and operators whose semantics changed are rewritten.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import helper

from bnncc.errors import UnsupportedOp
from bnncc.ir import numeric
from bnncc.ir.dims import is_static
from bnncc.ir.graph import Graph, Node

Rule = Callable[[Node, int, Graph], "list[Node] | None"]

_SAME = ("SAME_UPPER", "SAME_LOWER")


def normalize(node: Node, version: int, graph: Graph) -> list[Node]:
    """Convert a node of opset `version` to the newest form.

    Parameters
    ----------
    node : Node
        May be changed in place.
    version : int
        Opset of the default domain that it was written for.
    graph : Graph
        Has the types and constants of the node's inputs; receives constants.

    Returns
    -------
    list of Node
        Usually one node; several if the operator's semantics changed.

    Raises
    ------
    UnsupportedOp
        If an old form has no equivalent.
    """
    while node.inputs and not node.inputs[-1]:
        node.inputs.pop()
    rule = RULES.get(node.op)
    replaced = rule(node, version, graph) if rule else None
    return [node] if replaced is None else replaced


def _ints(graph: Graph, values: Any, stem: str) -> str:
    return graph.constant(np.asarray(values, np.int64), stem)


def _set_input(node: Node, index: int, name: str) -> None:
    node.inputs.extend([""] * (index + 1 - len(node.inputs)))
    node.inputs[index] = name


def _to_inputs(before: int, *keys: str, **defaults: Any) -> Rule:
    """Convert lists that are attributes before opset `before` to inputs 1 and following."""

    def rule(node: Node, version: int, graph: Graph) -> list[Node] | None:
        for index, key in enumerate(keys if version < before else (), 1):
            value = node.attrs.pop(key, None)
            if value is not None:
                _set_input(node, index, _ints(graph, value, f"{node.name}.{key}"))
        for key, default in defaults.items():
            node.attrs.setdefault(key, default)
        return None

    return rule


def _defaults(**values: Any) -> Rule:
    return _to_inputs(0, **values)


def _clip(node: Node, version: int, graph: Graph) -> None:
    if version >= 11:
        return
    dtype = graph.types[node.inputs[0]].dtype
    for index, key in ((1, "min"), (2, "max")):
        value = node.attrs.pop(key, None)
        if value is not None and abs(value) < 3.4e38:
            scalar = np.asarray(value, dtype)
            _set_input(node, index, graph.constant(scalar, f"{node.name}.{key}"))


def _pad(node: Node, version: int, graph: Graph) -> None:
    node.attrs.setdefault("mode", "constant")
    if version >= 11:
        return
    _set_input(node, 1, _ints(graph, node.attrs.pop("pads"), f"{node.name}.pads"))
    dtype = graph.types[node.inputs[0]].dtype
    value = np.asarray(node.attrs.pop("value", 0.0), dtype)
    _set_input(node, 2, graph.constant(value, f"{node.name}.value"))


def _split(node: Node, version: int, graph: Graph) -> None:
    axis = node.attrs.setdefault("axis", 0)
    if version < 13 and "split" in node.attrs:
        _set_input(node, 1, _ints(graph, node.attrs.pop("split"), f"{node.name}.split"))
    node.attrs.pop("num_outputs", None)
    if len(node.inputs) > 1:
        return
    shape = graph.types[node.inputs[0]].shape
    count = len(node.outputs)
    size = shape[axis] if -len(shape) <= axis < len(shape) else None
    if isinstance(size, int):
        step = -(-size // count)
        sizes = [max(0, min(step, size - step * k)) for k in range(count)]
        _set_input(node, 1, _ints(graph, sizes, f"{node.name}.split"))
    else:
        node.attrs["num_outputs"] = count


def _dropout(node: Node, version: int, graph: Graph) -> list[Node]:
    training = graph.constants.get(node.input(2))
    if len(node.inputs) > 2 and (training is None or bool(training.reshape(-1)[0])):
        raise UnsupportedOp(
            f"Dropout `{node.name}`: is in training mode; export the model after `eval()`"
        )
    nodes = [Node("Identity", node.inputs[:1], node.outputs[:1], {}, node.name)]
    if len(node.outputs) > 1 and node.outputs[1]:
        shape = graph.fresh(f"{node.name}.shape")
        nodes.append(Node("Shape", node.inputs[:1], [shape], {}, shape))
        value = np.ones(1, bool)
        name = f"{node.name}.mask"
        nodes.append(Node("ConstantOfShape", [shape], node.outputs[1:2], {"value": value}, name))
    return nodes


def _batch_norm(node: Node, version: int, graph: Graph) -> None:
    if node.attrs.pop("training_mode", 0) or any(node.outputs[1:]):
        raise UnsupportedOp(
            f"BatchNormalization `{node.name}`: is in training mode; export the model after "
            "`eval()`"
        )
    del node.outputs[1:]
    node.attrs.pop("momentum", None)
    node.attrs.setdefault("epsilon", 1e-5)


def _softmax(node: Node, version: int, graph: Graph) -> list[Node] | None:
    rank = len(graph.types[node.inputs[0]].shape)
    if version >= 13:
        node.attrs.setdefault("axis", -1)
        return None
    axis = node.attrs.setdefault("axis", 1)
    axis = axis + rank if axis < 0 else axis
    if axis == rank - 1:
        node.attrs["axis"] = -1
        return None
    x, y = node.inputs[0], node.outputs[0]
    shape, flat, soft = (graph.fresh(f"{node.name}.{k}") for k in ("shape", "flat", "softmax"))
    return [
        Node("Shape", [x], [shape], {}, shape),
        Node("Flatten", [x], [flat], {"axis": axis}, flat),
        Node(node.op, [flat], [soft], {"axis": -1}, node.name),
        Node("Reshape", [soft, shape], [y], {}, f"{node.name}.reshape"),
    ]


def _upsample(node: Node, version: int, graph: Graph) -> list[Node]:
    if len(node.inputs) == 1:  # before opset 9
        scales = np.asarray(node.attrs.pop("scales"), np.float32)
        node.inputs.append(graph.constant(scales, f"{node.name}.scales"))
    return _old_resize(node)


def _old_resize(node: Node) -> list[Node]:
    attrs = {
        "mode": node.attrs.get("mode", "nearest"),
        "coordinate_transformation_mode": "asymmetric",
        "nearest_mode": "floor",
    }
    return [Node("Resize", [node.inputs[0], "", node.inputs[1]], node.outputs, attrs, node.name)]


def _resize(node: Node, version: int, graph: Graph) -> list[Node] | None:
    if version < 11:
        return _old_resize(node)
    if node.attrs.get("coordinate_transformation_mode") == "tf_half_pixel_for_nn":
        raise UnsupportedOp(
            f"Resize `{node.name}`: coordinate mode tf_half_pixel_for_nn is not supported"
        )
    for index in (1, 2, 3):  # opset 11 has empty constants for absent inputs
        if index < len(node.inputs) and node.inputs[index]:
            value = graph.constants.get(node.inputs[index])
            if value is not None and value.size == 0:
                node.inputs[index] = ""
    while node.inputs and not node.inputs[-1]:
        node.inputs.pop()
    return None


def _window(node: Node, version: int, graph: Graph) -> None:
    """Make kernel, strides, dilations, pads and group of a Conv or pool explicit."""
    shape = graph.types[node.inputs[0]].shape
    attrs = node.attrs
    if node.op == "Conv":
        weight = graph.types[node.inputs[1]].shape
        attrs.setdefault("kernel_shape", list(weight[2:]))
        attrs.setdefault("group", 1)
    else:
        if node.op == "MaxPool" and any(node.outputs[1:]):
            attrs.setdefault("storage_order", 0)
        else:
            attrs.pop("storage_order", None)  # affects only the second output
        attrs.setdefault("ceil_mode", 0)
    if node.op == "AveragePool":
        attrs.setdefault("count_include_pad", 0)
    kernel = attrs["kernel_shape"]
    rank = len(kernel)
    auto = attrs.setdefault("auto_pad", "NOTSET")
    attrs.setdefault("strides", [1] * rank)
    if node.op != "LpPool" or version >= 18:
        attrs.setdefault("dilations", [1] * rank)
    if auto in ("NOTSET", "VALID"):
        if auto == "VALID" or not attrs.get("pads"):
            attrs["pads"] = [0] * 2 * rank
        attrs["auto_pad"] = "NOTSET"
        return
    spatial = shape[2:]
    plain = [d for d in spatial if isinstance(d, int)]
    positive = all(isinstance(s, int) and s > 0 for s in attrs["strides"])
    if len(plain) == len(kernel) == len(attrs["strides"]) and positive and auto in _SAME:
        attrs["pads"] = numeric.window(attrs, plain, kernel)[2]
        attrs["auto_pad"] = "NOTSET"
        if node.op != "Conv":
            attrs["ceil_mode"] = 0


def _conv_transpose(node: Node, version: int, graph: Graph) -> None:
    """Make pads explicit; if the output must be larger than pads allow, pad the output."""
    attrs, weight = node.attrs, graph.types[node.inputs[1]].shape
    spatial = graph.types[node.inputs[0]].shape[2:]
    rank = len(spatial)
    attrs.setdefault("kernel_shape", list(weight[2:]))
    for key, value in (("strides", 1), ("dilations", 1), ("output_padding", 0)):
        attrs[key] = list(attrs.get(key) or [value] * rank)
    attrs.setdefault("group", 1)
    kernel = attrs["kernel_shape"]
    lists = [kernel, *(attrs[k] for k in ("strides", "dilations", "output_padding"))]
    auto = attrs.setdefault("auto_pad", "NOTSET")
    if not is_static((*spatial, *kernel)) or any(len(values) != rank for values in lists):
        return
    full = [
        int(n - 1) * s + d * (k - 1) + 1 + more
        for n, k, s, d, more in zip(spatial, *lists, strict=True)
    ]
    if not attrs.get("output_shape") and auto in ("NOTSET", "VALID"):
        pads = list(attrs.get("pads") or [0] * 2 * rank)
    else:
        pads = numeric.transposed_pads(attrs, spatial, attrs["strides"], full)  # type: ignore[arg-type]
        attrs.pop("output_shape", None)
    for k in range(rank):
        if len(pads) == 2 * rank and pads[k + rank] < 0:
            attrs["output_padding"][k] -= pads[k + rank]
            pads[k + rank] = 0
    attrs["pads"], attrs["auto_pad"] = pads, "NOTSET"


def _transpose(node: Node, version: int, graph: Graph) -> None:
    rank = len(graph.types[node.inputs[0]].shape)
    node.attrs.setdefault("perm", list(range(rank))[::-1])


def _flatten(node: Node, version: int, graph: Graph) -> None:
    rank = len(graph.types[node.inputs[0]].shape)
    axis = node.attrs.setdefault("axis", 1)
    node.attrs["axis"] = axis + rank if axis < 0 else axis


def _roi_align(node: Node, version: int, graph: Graph) -> None:
    if version < 16:
        node.attrs["coordinate_transformation_mode"] = "output_half_pixel"


def _group_norm(node: Node, version: int, graph: Graph) -> None:
    if version >= 21:
        return
    channels = graph.types[node.inputs[0]].shape[1]
    for index in (1, 2):
        value = graph.constants.get(node.inputs[index])
        if value is None or not isinstance(channels, int) or channels % max(1, value.size):
            raise UnsupportedOp(
                f"GroupNormalization `{node.name}`: the form of opset {version} needs constant "
                "scale and bias"
            )
        full = np.repeat(value, channels // value.size)
        node.inputs[index] = graph.constant(full, f"{node.name}.full")


def _grid_sample(node: Node, version: int, graph: Graph) -> None:
    names = {"bilinear": "linear", "bicubic": "cubic"}
    mode = node.attrs.get("mode", "linear")
    node.attrs["mode"] = names.get(mode, mode)


def _cast_like(node: Node, version: int, graph: Graph) -> list[Node]:
    dtype = np.dtype(graph.types[node.inputs[1]].dtype)
    to = int(helper.np_dtype_to_tensor_dtype(dtype))
    return [Node("Cast", node.inputs[:1], node.outputs, {**node.attrs, "to": to}, node.name)]


def _scatter(node: Node, version: int, graph: Graph) -> list[Node]:
    return [Node("ScatterElements", node.inputs, node.outputs, node.attrs, node.name)]


def _top_k(node: Node, version: int, graph: Graph) -> None:
    if version < 10:
        _set_input(node, 1, _ints(graph, [node.attrs.pop("k")], f"{node.name}.k"))


def _dft(node: Node, version: int, graph: Graph) -> None:
    if version < 20:
        axis = np.asarray(node.attrs.pop("axis", 1), np.int64)
        _set_input(node, 2, graph.constant(axis, f"{node.name}.axis"))


RULES: dict[str, Callable[[Node, int, Graph], list[Node] | None]] = {
    "AveragePool": _window,
    "BatchNormalization": _batch_norm,
    "CastLike": _cast_like,
    "Clip": _clip,
    "Conv": _window,
    "ConvTranspose": _conv_transpose,
    "DFT": _dft,
    "Dropout": _dropout,
    "Elu": _defaults(alpha=1.0),
    "Flatten": _flatten,
    "Gather": _defaults(axis=0),
    "Gemm": _defaults(alpha=1.0, beta=1.0, transA=0, transB=0),
    "GridSample": _grid_sample,
    "GroupNormalization": _group_norm,
    "HardSigmoid": _defaults(alpha=0.2, beta=0.5),
    "Hardmax": _softmax,
    "LeakyRelu": _defaults(alpha=0.01),
    "LogSoftmax": _softmax,
    "LpPool": _window,
    "MaxPool": _window,
    "Pad": _pad,
    "Resize": _resize,
    "RoiAlign": _roi_align,
    "Scatter": _scatter,
    "Slice": _to_inputs(10, "starts", "ends", "axes"),
    "Softmax": _softmax,
    "Split": _split,
    "Squeeze": _to_inputs(13, "axes"),
    "TopK": _top_k,
    "Transpose": _transpose,
    "Unsqueeze": _to_inputs(13, "axes"),
    "Upsample": _upsample,
    **dict.fromkeys(
        (
            *("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax"),
            *("ReduceMean", "ReduceMin", "ReduceProd", "ReduceSumSquare"),
        ),
        _to_inputs(18, "axes", keepdims=1),
    ),
    "ReduceSum": _to_inputs(13, "axes", keepdims=1),
}
