"""Operators that move elements, rewritten as gathers, scatters and slices."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
from onnx import helper

from bnncc.errors import ModelError, ShapeError, UnsupportedOp
from bnncc.ir.dims import is_static
from bnncc.ir.nodechecks import checked_axis
from bnncc.ir.numeric import pooled_sizes, window, window_spans
from bnncc.ir.pieces import Expression

MAX_TAPS = 1024
"""Maximum size of a window that is processed element by element."""


def _axis(write: Expression, key: str, default: int, rank: int) -> int:
    return checked_axis(int(write.node.attrs.get(key, default)), rank, write.where, key)


def _reverse_sequence(write: Expression) -> None:
    x, lengths = write.node.inputs
    rank = len(write.type().shape)
    time, batch = _axis(write, "time_axis", 0, rank), _axis(write, "batch_axis", 1, rank)
    steps = write.type().shape[time]
    if not isinstance(steps, int) or time == batch or rank < 2:
        raise ShapeError(f"{write.where}: expected a known number of steps beside a batch")
    form = [1] * rank
    form[batch] = -1
    length = write("Reshape", write.cast(lengths, "int64"), write.ints(*form))
    length = write("Min", length, write.constant(steps, "int64"))  # clip invalid lengths
    form = [1] * rank
    form[time] = steps
    position = write.constant(np.arange(steps).reshape(form), "int64")
    mirrored = write("Sub", write("Sub", length, write.constant(1, "int64")), position)
    source = write("Where", write("Less", position, length), mirrored, position)
    source = write("Expand", source, write("Shape", x))
    write.give(write("GatherElements", x, source, axis=time), 0)


def _tensor_scatter(write: Expression) -> None:
    past, update = write.node.inputs[:2]
    cache, new = write.shape(0), write.shape(1)
    rank = len(cache)
    axis = _axis(write, "axis", -2, rank)
    mode = write.node.attrs.get("mode", "linear")
    if mode not in ("linear", "circular"):
        raise ModelError(f"{write.where}: `mode` is {mode!r}, expected linear or circular")
    if axis == 0:
        raise ShapeError(f"{write.where}: `axis` is the batch")
    form = [1] * rank
    form[axis] = new[axis]
    index = write.constant(np.arange(new[axis]).reshape(form), "int64")
    start = write.input(2)
    if start:
        first = write("Reshape", write.cast(start, "int64"), write.ints(-1, *[1] * (rank - 1)))
        index = write("Add", first, index)
    if mode == "circular":
        index = write("Mod", index, write.constant(cache[axis], "int64"))
    index = write("Expand", index, write.ints(*new))
    write.give(write("ScatterElements", past, index, update, axis=axis), 0)


def _max_pool(write: Expression) -> None:
    """Write MaxPool with its second output: the index of the largest tap, and its position."""
    node = write.node
    if not any(node.outputs[1:]):
        return
    attrs, shape, dtype = node.attrs, write.shape(), write.type().dtype
    if "storage_order" not in attrs:
        raise ModelError(f"{write.where}: `storage_order` is missing")
    rank = len(shape) - 2
    kernel = [int(k) for k in attrs["kernel_shape"]]
    if math.prod(kernel) > MAX_TAPS:
        raise UnsupportedOp(
            f"{write.where}: positions of a window of {math.prod(kernel)}, "
            f"expected at most {MAX_TAPS}"
        )
    pooled = write.as_is("MaxPool", node.inputs[0], **_plain(attrs))
    strides, dilations, pads = window(attrs, shape[2:], kernel)
    spans = window_spans(kernel, dilations)
    outs = pooled_sizes(shape[2:], spans, strides, pads, bool(attrs.get("ceil_mode")))
    order = [1] * rank  # strides along each axis
    sizes = shape[2:]
    if attrs["storage_order"]:
        for k in range(1, rank):
            order[k] = order[k - 1] * sizes[k - 1]
    else:
        for k in reversed(range(rank - 1)):
            order[k] = order[k + 1] * sizes[k + 1]
    write.room(math.prod(kernel), *outs)
    write.room(*shape[:2], *outs)
    plain = [math.prod(sizes[k + 1 :]) for k in range(rank)]
    taps = list(product(*(range(k) for k in kernel)))
    grids = np.ix_(*(np.arange(n) for n in outs))
    index = np.zeros((len(taps), *outs), np.int64)
    inside = np.ones((len(taps), *outs), bool)
    for t, tap in enumerate(taps):
        for k, grid in enumerate(grids):
            at = grid * strides[k] + tap[k] * dilations[k] - pads[k]
            inside[t] &= (at >= 0) & (at < sizes[k])
            index[t] += np.clip(at, 0, sizes[k] - 1) * plain[k]
    first = sum(g * s * o - p * o for g, s, p, o in zip(grids, strides, pads, order, strict=False))
    offset = [sum(t * d * o for t, d, o in zip(tap, dilations, order, strict=True)) for tap in taps]
    flat = write.reshape(node.inputs[0], shape[0], shape[1], math.prod(sizes))
    values = write("Gather", flat, write.constant(index, "int64"), axis=2)
    if not inside.all():
        low = write.constant(_least(dtype), dtype)
        values = write("Where", write.constant(inside, "bool"), values, low)
    largest = write("ArgMax", values, axis=2, keepdims=0)
    images = np.arange(shape[0] * shape[1]).reshape(shape[0], shape[1], *[1] * rank)
    start = np.broadcast_to(first, outs) + images * math.prod(sizes)
    place = write("Gather", write.constant(offset, "int64"), largest, axis=0)
    write.give(pooled, 0)
    write.give(write("Add", place, write.constant(start, "int64")), 1)


def _plain(attrs: dict[str, object]) -> dict[str, object]:
    return {k: v for k, v in attrs.items() if k != "storage_order"}


def _least(dtype: str) -> float:
    kind = np.dtype(dtype)
    return float(np.iinfo(kind).min) if kind.kind in "iu" else -np.inf


def _max_unpool(write: Expression) -> None:
    values, places = write.node.inputs[:2]
    attrs, shape, dtype = write.node.attrs, write.shape(), write.type().dtype
    rank = len(shape) - 2
    kernel = [int(k) for k in attrs["kernel_shape"]]
    strides, _, pads = window(attrs, shape[2:], kernel)
    full = [
        *shape[:2],
        *(
            (n - 1) * s - pads[k] - pads[k + rank] + kernel[k]
            for k, (n, s) in enumerate(zip(shape[2:], strides, strict=True))
        ),
    ]
    wanted = write.fixed(2)
    out = full if wanted is None else [int(d) for d in wanted]
    if len(out) != len(full) or any(a < b for a, b in zip(out, full, strict=True)):
        raise ShapeError(f"{write.where}: `output_shape` is {out}, expected at least {full}")
    write.room(*full)
    empty = write.constant(np.zeros(math.prod(full)), dtype)
    index, flat = write.reshape(places, -1), write.reshape(values, -1)
    made = write.reshape(write("ScatterElements", empty, index, flat, axis=0), *full)
    if out != full:
        ends = [a - b for a, b in zip(out, full, strict=True)]
        zero = write.constant(0, dtype)
        made = write("Pad", made, write.ints(*[0] * len(full), *ends), zero, mode="constant")
    write.give(made, 0)


def _col2im(write: Expression) -> None:
    """Write Col2Im as the sum of the images of all taps, each padded to its position."""
    image, block = write.fixed(1), write.fixed(2)
    if image is None or block is None:
        raise ModelError(f"{write.where}: the shapes of image and block are missing")
    attrs, shape, dtype = write.node.attrs, write.shape(), write.type().dtype
    size, kernel = [int(v) for v in image], [int(v) for v in block]
    rank, taps = len(size), math.prod(kernel)
    strides, dilations, pads = window(attrs, size, kernel)
    if len(shape) != 3 or taps <= 0 or shape[1] % taps or taps > MAX_TAPS:
        raise ShapeError(f"{write.where}: an input of shape {shape} and blocks of {kernel}")
    full = [n + pads[k] + pads[k + rank] for k, n in enumerate(size)]
    outs = [
        (n - (k - 1) * d - 1) // s + 1
        for n, k, d, s in zip(full, kernel, dilations, strides, strict=True)
    ]
    if math.prod(outs) != shape[2] or min(outs) <= 0:
        raise ShapeError(f"{write.where}: {shape[2]} blocks, expected {math.prod(outs)}")
    write.room(*full)
    channels = shape[1] // taps
    x = write.reshape(write.node.inputs[0], shape[0], channels, taps, shape[2])
    empty = write.constant(np.zeros((1, 1, 1)), dtype)
    # each pixel of the image gathers, for each tap, the block that covers it, if any
    blocks = np.arange(math.prod(outs)).reshape(outs)
    total = ""
    for k, tap in enumerate(product(*(range(n) for n in kernel))):
        source = np.full(full, -1)
        place = tuple(
            slice(t * d, t * d + (o - 1) * s + 1, s)
            for t, d, o, s in zip(tap, dilations, outs, strides, strict=True)
        )
        source[place] = blocks
        cut = tuple(slice(pads[i], pads[i] + n) for i, n in enumerate(size))
        source = source[cut].reshape(-1)
        if (source < 0).all():
            continue
        part = write(
            "Gather", write.at(x, k, 2), write.constant(np.maximum(source, 0), "int64"), axis=2
        )
        if (source < 0).any():
            part = write("Where", write.constant(source >= 0, "bool"), part, empty)
        total = write("Add", total, part) if total else part
    write.give(write.reshape(total, shape[0], channels, *size), 0)


def _cumulative_product(write: Expression) -> None:
    value = write.fixed(1)
    shape, dtype, attrs = write.shape(), write.type().dtype, write.node.attrs
    axis = 0 if value is None else int(value.reshape(-1)[0])
    axis = checked_axis(axis, len(shape), write.where)
    count = shape[axis]
    if count > MAX_TAPS:
        raise UnsupportedOp(f"{write.where}: {count} factors, expected at most {MAX_TAPS}")
    order = range(count)[:: -1 if attrs.get("reverse") else 1]
    parts: dict[int, str] = {}
    shape[axis] = 1
    total = write.constant(np.ones(shape), dtype)
    for k in order:
        part = write("Gather", write.node.inputs[0], write.ints(k), axis=axis)
        following = write("Mul", total, part)
        parts[k] = total if attrs.get("exclusive") else following
        total = following
    write.give(write("Concat", *(parts[k] for k in range(count)), axis=axis), 0)


def _roi_align(write: Expression) -> None:
    """Write the scale of regions as a product: TVM's importer subtracts half a pixel before it."""
    attrs, (x, regions, images) = write.node.attrs, write.node.inputs
    if attrs.get("mode", "avg") != "avg":
        raise UnsupportedOp(f"{write.where}: `mode` = 'max' with regions that are computed")
    scale = float(attrs.get("spatial_scale", 1.0))
    if scale == 1:
        return
    scaled = write("Mul", regions, write.constant(scale, write.type(1).dtype))
    write.give(write.as_is("RoiAlign", x, scaled, images, **{**attrs, "spatial_scale": 1.0}), 0)


def _space_to_depth(write: Expression) -> None:
    """Write the channel order that the operator gained in opset 28."""
    mode = write.node.attrs.get("mode", "DCR")
    if mode == "DCR":
        write.node.attrs.pop("mode", None)
        return
    if mode != "CRD":
        raise ModelError(f"{write.where}: `mode` is {mode!r}, expected DCR or CRD")
    block, shape = int(write.node.attrs["blocksize"]), write.type().shape[1:]
    if len(shape) != 3 or block <= 0 or not is_static(shape):
        raise ShapeError(f"{write.where}: expected an image of known size")
    c, h, w = (int(d) for d in shape)
    cut = write.reshape(write.node.inputs[0], 0, c, h // block, block, w // block, block)
    turned = write("Transpose", cut, perm=[0, 1, 3, 5, 2, 4])
    write.give(write.reshape(turned, 0, c * block * block, h // block, w // block), 0)


def _top_k(write: Expression) -> None:
    if write.type().dtype == "uint64":
        raise UnsupportedOp(f"{write.where}: its data is uint64, which nothing sorts; cast it")


def _pad(write: Expression) -> None:
    """Write Pad with a computed value: pad with zeros, then select the value outside the data."""
    value, pads, axes = write.input(2), write.fixed(1), write.fixed(3)
    if not value or value in write.graph.constants or pads is None:
        return
    shape, dtype = write.shape(), write.type().dtype
    rank, half = len(shape), pads.size // 2
    pairs = [(0, 0)] * rank
    for k, axis in enumerate(range(rank) if axes is None else axes.reshape(-1).tolist()):
        pairs[axis % rank] = (int(pads[k]), int(pads[k + half]))
    full = [low for low, _ in pairs] + [high for _, high in pairs]
    zero = write.constant(0, dtype)
    made = write.as_is("Pad", write.node.inputs[0], write.ints(*full), zero, mode="constant")
    write.room(*(max(0, n + a + b) for n, (a, b) in zip(shape, pairs, strict=True)))
    inside = np.ones(
        [n + min(0, a) + min(0, b) for n, (a, b) in zip(shape, pairs, strict=True)], bool
    )
    inside = np.pad(inside, [(max(0, a), max(0, b)) for a, b in pairs])
    number = write.scalar(value)
    write.give(write("Where", write.constant(inside, "bool"), made, number), 0)


def _one_hot(write: Expression) -> None:
    index, values = write.node.inputs[0], write.node.inputs[2]
    kind, depth = write.type(), write.fixed(1)
    size = 0 if depth is None else int(depth.reshape(-1)[0])
    if size <= 0:
        raise ShapeError(f"{write.where}: `depth` is {size}, expected 1 or more")
    rank = len(kind.shape) + 1
    axis = _axis(write, "axis", -1, rank)
    whole = write.cast(index, "int64")
    zero, count = write.constant(0, "int64"), write.constant(size, "int64")
    behind = write("Less", whole, zero)
    whole = write("Where", behind, write("Add", whole, count), whole)
    write.room(size)
    form = [1] * rank
    form[axis] = size
    every = write.constant(np.arange(size).reshape(form), "int64")
    hit = write("Equal", write.unsqueeze(whole, axis), every)
    write.give(write("Where", hit, write.at(values, 1, 0), write.at(values, 0, 0)), 0)


def _eye_like(write: Expression) -> None:
    shape, attrs = write.shape(), write.node.attrs
    if len(shape) != 2:
        raise ShapeError(f"{write.where}: an input of shape {shape}, expected two axes")
    write.room(*shape)
    code = attrs.get("dtype")
    dtype = write.type().dtype
    if code is not None:
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(int(code))).name
    write.give(write.constant(np.eye(shape[0], shape[1], k=int(attrs.get("k", 0))), dtype), 0)


EXPANSIONS = {
    "Col2Im": _col2im,
    "CumProd": _cumulative_product,
    "EyeLike": _eye_like,
    "MaxPool": _max_pool,
    "MaxUnpool": _max_unpool,
    "OneHot": _one_hot,
    "Pad": _pad,
    "ReverseSequence": _reverse_sequence,
    "RoiAlign": _roi_align,
    "SpaceToDepth": _space_to_depth,
    "TensorScatter": _tensor_scatter,
    "TopK": _top_k,
}
"""Rewrite rules, by operator."""
