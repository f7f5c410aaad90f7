"""TensorFlow Lite's data movement operators, as ONNX nodes."""

from __future__ import annotations

from functools import partial

import numpy as np

from bnncc.errors import ModelError, ShapeError
from bnncc.frontend.tflite_file import Tensor
from bnncc.frontend.tflite_writer import (
    LAST,
    Results,
    Rule,
    Writer,
    quantized,
)

_END = np.iinfo(np.int64).max


def _blocks(op: str, writer: Writer) -> str:
    (x,) = writer.operands(1)
    writer.image(x)
    size = int(writer.option(0, "int32"))
    made = writer.node(op, writer.first(writer.read(x)), blocksize=size)
    return writer.node("Transpose", made, perm=LAST)


def _int64(writer: Writer, tensor: Tensor, what: str) -> str:
    """Return integers in the type that ONNX requires for sizes; they may be computed."""
    if tensor.data is not None:
        return writer.constant(writer.ints(tensor, what))
    return str(writer.node("Cast", writer.read(tensor), to=7))


def _reshape(writer: Writer) -> str:
    x, shape = writer.operands(1, 2)
    if shape is not None:
        target = _int64(writer, shape, "shape")
    else:
        target = writer.constant([int(d) for d in writer.options().numbers(0, "int32")])
    return writer.node("Reshape", writer.read(x), target)


def _squeeze(writer: Writer) -> str:
    axes = (
        []
        if writer.operator.options is None
        else writer.operator.options.numbers(0, "int32").tolist()
    )
    more = [writer.constant([int(a) for a in axes])] if axes else []
    return writer.node("Squeeze", writer.only(), *more)


def _expand_dims(writer: Writer) -> str:
    x, axis = writer.operands(2)
    axes = writer.constant(writer.ints(axis, "axis"))
    return writer.node("Unsqueeze", writer.read(x), axes)


def _transpose(writer: Writer) -> str:
    x, perm = writer.operands(2)
    order = writer.ints(perm, "permutation")
    return writer.node("Transpose", writer.read(x), perm=order)


def _pad(writer: Writer, *, mode: str = "constant") -> str:
    x, pads, value = writer.operands(2, 3)
    both = writer.ints(pads, "padding")
    if mode == "reflect" and writer.option(0, "int8"):
        raise writer.fail("symmetric padding is not supported", "use mode REFLECT")
    if mode == "constant" and value is None and quantized(x) and x.quantization is not None:
        value_name = writer.constant(float(x.quantization.zero_point[0]))
    else:
        value_name = "" if value is None else writer.read(value)
    inputs = [writer.read(x), writer.constant(both[::2] + both[1::2]), value_name]
    return writer.node("Pad", *(inputs if value_name else inputs[:2]), mode=mode)


def _concat(writer: Writer) -> str:
    names = [writer.read(t) for t in writer.operator.inputs]
    if not names:
        raise ModelError(f"{writer.where}: has no inputs")
    made = writer.node("Concat", *names, axis=int(writer.option(0, "int32")))
    return writer.activated(made, writer.option(1, "int8"))


def _split(writer: Writer) -> Results:
    axis, x = writer.operands(2)
    return _cut(writer, x, axis, None)


def _split_v(writer: Writer) -> Results:
    x, sizes, axis = writer.operands(3)
    return _cut(writer, x, axis, writer.ints(sizes, "sizes"))


def _cut(writer: Writer, x: Tensor, axis: Tensor, sizes: list[int] | None) -> Results:
    (number,) = writer.ints(axis, "axis")[:1] or [0]
    count = len(writer.operator.outputs)
    rank = writer.rank(x)
    if sizes is None or -1 in sizes:
        size = x.shape[number] if -rank <= number < rank else 0
        known = sum(s for s in sizes or [] if s != -1)
        if not isinstance(size, int) or (sizes is None and size % count):
            raise ShapeError(f"{writer.where}: {size} elements are cut into {count} parts")
        rest = size - known
        sizes = (
            [size // count] * count if sizes is None else [rest if s == -1 else s for s in sizes]
        )
    return writer.node("Split", writer.read(x), writer.constant(sizes), outputs=count, axis=number)


def _slice(writer: Writer) -> str:
    x, begin, size = writer.operands(3)
    starts = writer.ints(begin, "begin")
    ends = [
        _END if n == -1 else b + n for b, n in zip(starts, writer.ints(size, "size"), strict=False)
    ]
    if len(ends) != len(starts):
        raise ShapeError(f"{writer.where}: {len(starts)} begins and {len(ends)} sizes")
    bounds = writer.constant(starts), writer.constant(ends)
    return writer.node("Slice", writer.read(x), *bounds)


def _strided_slice(writer: Writer) -> str:
    x, begin, end, strides = writer.operands(4)
    options = writer.options()
    begins, ends, new_axes, shrunk = (int(options.scalar(slot, "int32")) for slot in (0, 1, 3, 4))
    if options.scalar(2, "int32") or new_axes:
        raise writer.fail("an ellipsis or a new axis in a slice is not supported")
    steps = writer.ints(strides, "strides")
    starts, stops = writer.ints(begin, "begin"), writer.ints(end, "end")
    if not len(steps) == len(starts) == len(stops) or 0 in steps:
        raise ShapeError(f"{writer.where}: begin {starts}, end {stops}, strides {steps}")
    if options.scalar(5, "bool", False):
        stops = [a + b for a, b in zip(starts, stops, strict=True)]
    for k, step in enumerate(steps):
        if shrunk >> k & 1:
            steps[k], stops[k] = 1, starts[k] + 1 if starts[k] != -1 else _END
            continue
        if begins >> k & 1:
            starts[k] = 0 if step > 0 else _END
        if ends >> k & 1:
            stops[k] = _END if step > 0 else -_END
    axes = list(range(len(steps)))
    lists = (writer.constant(v) for v in (starts, stops, axes, steps))
    made = writer.node("Slice", writer.read(x), *lists)
    gone = [k for k in axes if shrunk >> k & 1]
    if gone:
        made = writer.node("Squeeze", made, writer.constant(gone))
    return made


def _gather(writer: Writer) -> str:
    x, index = writer.operands(2)
    if writer.option(1, "int32"):
        raise writer.fail("gathering in batches is not supported")
    axis = int(writer.option(0, "int32"))
    return writer.node("Gather", writer.read(x), writer.read(index), axis=axis)


def _pack(writer: Writer) -> str:
    axis = int(writer.option(1, "int32"))
    axes = writer.constant([axis])
    parts = [writer.node("Unsqueeze", writer.read(t), axes) for t in writer.operator.inputs]
    if not parts:
        raise ModelError(f"{writer.where}: has no inputs")
    return writer.node("Concat", *parts, axis=axis)


def _unpack(writer: Writer) -> Results:
    axis, count = int(writer.option(1, "int32")), len(writer.operator.outputs)
    sizes = writer.constant([1] * count)
    parts = writer.node("Split", writer.only(), sizes, outputs=count, axis=axis)
    parts = [parts] if count == 1 else parts
    return [writer.node("Squeeze", part, writer.constant([axis])) for part in parts]


def _sized(op: str, writer: Writer) -> str:
    x, sizes = writer.operands(2)
    return writer.node(op, writer.read(x), _int64(writer, sizes, "sizes"))


def _shape(writer: Writer) -> str:
    return writer.cast(writer.node("Shape", writer.only()), writer.operator.outputs[0].dtype)


MOVES: dict[str, Rule] = {
    "BROADCAST_TO": partial(_sized, "Expand"),
    "CONCATENATION": _concat,
    "DEPTH_TO_SPACE": partial(_blocks, "DepthToSpace"),
    "EXPAND_DIMS": _expand_dims,
    "GATHER": _gather,
    "MIRROR_PAD": partial(_pad, mode="reflect"),
    "PACK": _pack,
    "PAD": _pad,
    "PADV2": _pad,
    "RESHAPE": _reshape,
    "SHAPE": _shape,
    "SLICE": _slice,
    "SPACE_TO_DEPTH": partial(_blocks, "SpaceToDepth"),
    "SPLIT": _split,
    "SPLIT_V": _split_v,
    "SQUEEZE": _squeeze,
    "STRIDED_SLICE": _strided_slice,
    "TILE": partial(_sized, "Tile"),
    "TRANSPOSE": _transpose,
    "UNPACK": _unpack,
}
"""Writers of the operators."""
