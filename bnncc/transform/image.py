"""Take image inputs as uint8: ``x = (pixel - mean) * scale`` becomes part of the network."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bnncc.errors import UsageError
from bnncc.input_transforms import InputTransform
from bnncc.ir.graph import Graph, Node, TensorType
from bnncc.ir.image_bits import IMAGE_BITS
from bnncc.options import Uint8Input

MOST_CHANNELS = 4
"""An image with more than this many elements on axis 1, and at most this many on the last axis, is
taken to be channels-last, as in TensorFlow."""


def channel_axis(shape: Sequence[int | str]) -> int:
    """Return the axis of an image that holds its channels.

    Examples
    --------
    >>> channel_axis((1, 3, 224, 224)), channel_axis(("N", 224, 224, 3))
    (1, 3)
    """

    def few(size: int | str) -> bool:
        return isinstance(size, int) and size <= MOST_CHANNELS

    return 3 if len(shape) == 4 and few(shape[3]) and not few(shape[1]) else 1


def take_uint8(graph: Graph, inputs: Sequence[Uint8Input]) -> None:
    """Replace float image inputs by uint8 ones.

    Parameters
    ----------
    graph : Graph
        Rewritten in place.
    inputs : sequence of Uint8Input
        The inputs, with mean, scale and layout.

    Raises
    ------
    UsageError
        If an input does not exist or is not a float image, or the channels do not match.
    """
    for item in inputs:
        kind = graph.types.get(item.name)
        if item.name not in graph.inputs or kind is None:
            raise UsageError(
                f"--input-uint8: `{item.name}` is not an input",
                hint=f"inputs: {', '.join(graph.inputs)}",
            )
        if kind.dtype != "float32" or len(kind.shape) != 4:
            raise UsageError(
                f"--input-uint8: input `{item.name}` is {kind.dtype}{list(kind.shape)}, "
                "not a float32 image"
            )
        axis = channel_axis(kind.shape)
        if axis == 3 and item.layout == "nhwc":
            raise UsageError(
                f"--input-uint8: `{item.name}` has shape {list(kind.shape)}, channels last",
                hint="omit :nhwc: it is the model's own order",
            )
        channels = kind.shape[axis]
        for what, values in (("mean", item.mean), ("scale", item.scale)):
            if len(values) not in (1, channels):
                raise UsageError(
                    f"--input-uint8: {len(values)} values of {what} for the {channels} channels "
                    f"of `{item.name}`"
                )
        _check_declared(graph, item)
        n, c, h, w = kind.shape
        image = graph.fresh(f"{item.name}.float")
        for node in graph.nodes:
            node.inputs = [image if i == item.name else i for i in node.inputs]
        graph.outputs = [image if o == item.name else o for o in graph.outputs]
        given: tuple[int | str, ...] = (n, h, w, c) if item.layout == "nhwc" else (n, c, h, w)
        graph.types[item.name] = TensorType(given, "uint8")
        prefix: list[Node] = []
        tip = item.name
        if item.layout == "nhwc":
            tip = _append(
                graph,
                prefix,
                "Transpose",
                [tip],
                TensorType((n, c, h, w), "uint8"),
                {"perm": [0, 3, 1, 2]},
            )
        tip = _append(graph, prefix, "Cast", [tip], kind, {"to": 1})
        column = [-1 if k == axis else 1 for k in range(4)]
        mean = graph.constant(np.asarray(item.mean, np.float32).reshape(column), "mean")
        tip = _append(graph, prefix, "Sub", [tip, mean], kind, {})
        scale = graph.constant(np.asarray(item.scale, np.float32).reshape(column), "scale")
        prefix.append(Node("Mul", [tip, scale], [image], {}, f"{item.name}.scale"))
        graph.types[image] = kind
        graph.nodes = prefix + graph.nodes


def _check_declared(graph: Graph, item: Uint8Input) -> None:
    """Reject a mean and scale that contradict the value type the model declares."""
    declared = graph.datatypes.pop(item.name, None)
    if declared is None:
        return
    pixels = np.arange(256, dtype=np.float32).reshape(-1, 1)
    mean, scale = (np.array(v, np.float32) for v in (item.mean, item.scale))
    values = (pixels - mean) * scale
    if not declared.holds(values).all():
        raise UsageError(
            f"--input-uint8: the mean and scale of `{item.name}` make numbers of bytes that are "
            f"not of the type the model declares, {declared}"
        )


def _append(
    graph: Graph,
    nodes: list[Node],
    op: str,
    inputs: list[str],
    kind: TensorType,
    attrs: dict[str, object],
) -> str:
    out = graph.fresh(f"{inputs[0]}.{op.lower()}")
    graph.types[out] = kind
    nodes.append(Node(op, inputs, [out], attrs, out))
    return out


def transform_input(graph: Graph, transform: InputTransform | None) -> None:
    """Replace an image input by a uint8 image, followed by the transform.

    Parameters
    ----------
    graph : Graph
        Rewritten in place.
    transform : InputTransform or None
        None changes nothing.

    Raises
    ------
    UsageError
        If there is no such input, or the transform does not apply to it.
    """
    if transform is None:
        return
    option = f"--input-transform {transform.kind}"
    images = [
        i for i in graph.inputs
        if graph.types[i].dtype == "float32" and len(graph.types[i].shape) == 4
    ]  # fmt: skip
    name = transform.name or (images[0] if len(images) == 1 else "")
    if name not in images:
        found = f"`{name}` is not a float32 image" if name else f"{len(images)} inputs are images"
        raise UsageError(
            f"{option}: {found}",
            hint=f"name one in front of it, NAME={transform.kind}...: {', '.join(graph.inputs)}",
        )
    kind = graph.types[name]
    n, channels, height, width = kind.shape
    wanted = (1, 3) if transform.kind == "gray-threshold" else (3,)
    if channels not in wanted or not isinstance(height, int) or not isinstance(width, int):
        counts = " or ".join(map(str, wanted))
        raise UsageError(
            f"{option}: input `{name}` has shape {list(kind.shape)}, "
            f"expected {counts} channels of known sizes"
        )
    bits = graph.fresh(f"{name}.bits")
    for node in graph.nodes:
        node.inputs = [bits if i == name else i for i in node.inputs]
    graph.outputs = [bits if o == name else o for o in graph.outputs]
    given = (n, height, width, 3) if transform.layout == "nhwc" else (n, 3, height, width)
    graph.types[name], graph.types[bits] = TensorType(given, "uint8"), kind
    attrs = transform.attributes(int(channels))
    graph.nodes.insert(0, Node(IMAGE_BITS, [name], [bits], attrs, f"{name}.{transform.kind}"))
