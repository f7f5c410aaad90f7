"""Larq Compute Engine's operators [1]_ as ONNX nodes.

A packed tensor holds 32 channels per word, lowest bit first; bit 1 means -1. In the ONNX model it
becomes a float tensor of +1 and -1, which passes recognise as bits:

    LceQuantize      y = Where(x < 0, -1, +1)
    LceBconv2d       dot = Conv(x, w); y = act(dot) * multiplier + bias, or dot < K - 2 * threshold
    LceBMaxPool2d    y = MaxPool(x)
    LceDequantize    y = x

References
----------
.. [1] Bannink et al., "Larq Compute Engine: Design, Benchmark, and Deploy State-of-the-Art
   Binarized Neural Networks", MLSys 2021.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from bnncc.errors import ModelError, ShapeError
from bnncc.frontend.flatbuffer import flex_map
from bnncc.frontend.tflite_file import Network, Quantization, Tensor
from bnncc.frontend.tflite_writer import WORD_BITS, Rule, Writer, activation_range, words

Array = np.ndarray[Any, Any]

_SAME, _VALID = 0, 1
_BCONV = (
    "channels_in", "dilation_height_factor", "dilation_width_factor", "fused_activation_function",
    "pad_values", "padding", "stride_height", "stride_width",
)  # fmt: skip
_BPOOL = ("filter_height", "filter_width", "padding", "stride_height", "stride_width")


def find_packed(network: Network, writer: Writer) -> None:
    """Find the packed tensors and their numbers of channels: `channels` of the writer.

    Raises
    ------
    ModelError
        If an operator's tensors have the wrong type.
    ShapeError
        If the number of channels is unknown, or does not match the words.
    """
    inputs = set(network.inputs)
    for operator in network.operators:
        if operator.op not in OPERATORS:
            continue
        writer.begin(operator, operator.op)
        count = {"LceBconv2d": 5}.get(operator.op, 1)
        if len(operator.inputs) != count or len(operator.outputs) != 1:
            raise ModelError(
                f"{writer.where}: has {len(operator.inputs)} inputs and {len(operator.outputs)} "
                f"outputs, expected {count} and 1"
            )
        given, made = operator.inputs[0], operator.outputs[0]
        if given is None or not given.shape or not made.shape:
            raise ModelError(f"{writer.where}: its input or output has no channels")
        if operator.op == "LceQuantize":
            if not isinstance(given.shape[-1], int):
                raise ShapeError(f"{writer.where}: the number of its channels is not known")
            _packed(writer, made, given.shape[-1])
            continue
        if given in inputs and given not in writer.channels:
            _packed(writer, given, _held(given, writer))
        if given not in writer.channels:
            raise ModelError(f"{writer.where}: its input `{given.name}` is not packed")
        if operator.op == "LceBMaxPool2d":
            _packed(writer, made, writer.channels[given])
        elif operator.op == "LceBconv2d" and made.dtype == "int32":
            weight = operator.inputs[1]
            shape = () if weight is None else weight.shape
            _packed(writer, made, int(shape[0]) if shape and isinstance(shape[0], int) else 0)


def _held(given: Tensor, writer: Writer) -> int:
    """Return the number of channels of a packed network input, derived from its readers."""
    operator = writer.operator
    if operator.op == "LceBconv2d":
        return _options(writer, _BCONV)["channels_in"]
    last = (operator.outputs[0] if operator.op == "LceDequantize" else given).shape[-1]
    if not isinstance(last, int):
        raise ShapeError(f"{writer.where}: the number of its channels is not known")
    return last if operator.op == "LceDequantize" else last * WORD_BITS


def _packed(writer: Writer, tensor: Tensor, channels: int) -> None:
    if tensor.dtype != "int32":
        raise ModelError(f"{writer.where}: `{tensor.name}` is {tensor.dtype}, expected int32")
    if channels <= 0 or tensor.shape[-1:] != (words(channels),):
        raise ShapeError(
            f"{writer.where}: `{tensor.name}` has shape {list(tensor.shape)}, "
            f"expected {words(channels)} words for {channels} channels"
        )
    if writer.channels.setdefault(tensor, channels) != channels:
        raise ShapeError(
            f"{writer.where}: `{tensor.name}` holds {writer.channels[tensor]} channels"
        )


def _options(writer: Writer, names: tuple[str, ...]) -> dict[str, int]:
    try:
        found = flex_map(writer.operator.custom)
    except ModelError as error:
        raise ModelError(f"{writer.where}: {error}") from error
    missing = [n for n in names if n not in found]
    if missing:
        raise ModelError(f"{writer.where}: option `{missing[0]}` is missing")
    unknown = sorted(set(found) - set(names))
    if unknown:
        raise ModelError(f"{writer.where}: unknown option `{unknown[0][:40]}`")
    options = {n: int(found[n]) for n in names}
    for name, value in options.items():
        least = 0 if name in ("fused_activation_function", "pad_values", "padding") else 1
        most = {"padding": 1, "pad_values": 1, "fused_activation_function": 3}.get(name, 1 << 20)
        if not least <= value <= most:
            raise ModelError(f"{writer.where}: `{name}` is {value}, expected {least} to {most}")
    return options


# ------------------------------------------------------------------------------------- operators


def _signs(writer: Writer, negative: str) -> str:
    return str(writer.node("Where", negative, writer.constant(-1.0), writer.constant(1.0)))


def _quantize(writer: Writer) -> str:
    x = writer.operator.inputs[0]
    assert x is not None
    if x.dtype == "bool":
        negative = writer.node("Not", writer.read(x))
    elif x.dtype in ("float32", "int8"):
        zero = float(_zero_point(x)) if x.dtype == "int8" else 0.0
        data = writer.read(x)
        if x.dtype == "int8" and x.quantization is None:
            data = writer.node("Cast", data, to=1)
        negative = writer.node("Less", data, writer.constant(zero))
    else:
        raise writer.fail(f"reads {x.dtype}, expected float32, int8 or bool")
    return _signs(writer, negative)


def _zero_point(tensor: Tensor) -> int:
    return 0 if tensor.quantization is None else int(tensor.quantization.zero_point[0])


def _dequantize(writer: Writer) -> str:
    x, y = writer.operator.inputs[0], writer.operator.outputs[0]
    assert x is not None
    if y.shape[-1] != writer.channels[x]:
        raise ShapeError(
            f"{writer.where}: has {y.shape[-1]} channels, `{x.name}` holds {writer.channels[x]}"
        )
    data = writer.read(x)
    if y.dtype == "float32":
        return data
    negative = writer.node("Less", data, writer.constant(0.0))
    if y.dtype == "bool":
        return writer.node("Not", negative)
    if y.dtype != "int8" or y.quantization is None:
        raise writer.fail(f"makes {y.dtype}, expected float32, bool or int8 with a scale")
    step = _round_away(1.0 / float(y.quantization.scale[0]))
    zero = _zero_point(y)
    low, high = max(-128, zero - step), min(127, zero + step)
    return writer.node("Where", negative, writer.constant(float(low)), writer.constant(float(high)))


def _round_away(value: float) -> int:
    return math.floor(min(abs(value), 1e6) + 0.5) * (1 if value >= 0 else -1)


def _max_pool(writer: Writer) -> str:
    x = writer.operator.inputs[0]
    assert x is not None
    writer.image(x)
    options = _options(writer, _BPOOL)
    pooled = writer.node(
        "MaxPool",
        writer.first(writer.read(x)),
        kernel_shape=[options["filter_height"], options["filter_width"]],
        strides=[options["stride_height"], options["stride_width"]],
        auto_pad="SAME_UPPER" if options["padding"] == _SAME else "VALID",
    )
    return writer.last(pooled)


def _bconv(writer: Writer) -> str:
    x, y = writer.operator.inputs[0], writer.operator.outputs[0]
    assert x is not None
    options = _options(writer, _BCONV)
    channels = writer.channels[x]
    if channels != options["channels_in"]:
        raise ShapeError(
            f"{writer.where}: `channels_in` is {options['channels_in']}, `{x.name}` holds "
            f"{channels}"
        )
    weight, groups = _weight(writer, writer.operator.inputs[1], channels)
    same, ones = options["padding"] == _SAME, options["pad_values"] == 1
    data = writer.first(writer.read(x))
    kernel = list(weight.shape[2:])
    strides = [options["stride_height"], options["stride_width"]]
    dilations = [options["dilation_height_factor"], options["dilation_width_factor"]]
    if same and ones:
        data = _padded_by_one(writer, data, kernel, strides, dilations)
    dot = writer.node(
        "Conv", data, writer.constant(weight), kernel_shape=kernel, strides=strides,
        dilations=dilations, group=groups, auto_pad="SAME_UPPER" if same and not ones else "VALID",
    )  # fmt: skip
    taps = int(np.prod(weight.shape[1:]))
    code = options["fused_activation_function"]
    dot = writer.last(dot)
    if y.dtype == "int32":
        return _thresholded(writer, writer.operator.inputs[4], dot, weight.shape[0], taps)
    if y.dtype not in ("float32", "int8") or (y.dtype == "int8" and y.quantization is None):
        raise writer.fail(f"makes {y.dtype}, expected float32, int32 or int8 with a scale")
    if y.quantization is not None and y.quantization.scale.size != 1:
        raise writer.fail(f"makes numbers with {y.quantization.scale.size} scales, expected 1")
    quantization = y.quantization if y.dtype == "int8" else None
    return _transformed(writer, dot, weight.shape[0], taps, code, quantization)


def _weight(writer: Writer, tensor: Tensor | None, channels: int) -> tuple[Array, int]:
    """Return the filters as +1 and -1, (out, in, height, width), and the number of groups."""
    packed = writer.numbers(tensor, "filter")
    if packed.dtype != np.int32 or packed.ndim != 4 or 0 in packed.shape:
        raise ModelError(
            f"{writer.where}: its filter is {packed.dtype} {list(packed.shape)}, "
            "expected int32 of four axes"
        )
    groups, rest = divmod(words(channels), packed.shape[3])
    if rest or not groups or channels % groups or packed.shape[0] % groups:
        raise ShapeError(
            f"{writer.where}: a filter of {list(packed.shape)} does not fit {channels} channels"
        )
    depth = channels // groups
    if groups > 1 and depth % WORD_BITS:
        raise ShapeError(f"{writer.where}: groups of {depth} channels, expected multiples of 32")
    bits = np.unpackbits(np.ascontiguousarray(packed).view(np.uint8), axis=-1, bitorder="little")
    if bits[..., depth:].any():
        raise ModelError(f"{writer.where}: its filter has bits set beyond its {depth} channels")
    signs = 1.0 - 2.0 * bits[..., :depth].astype(np.float32)
    return np.ascontiguousarray(signs.transpose(0, 3, 1, 2), np.float32), groups


def _padded_by_one(
    writer: Writer, image: str, kernel: list[int], strides: list[int], dilations: list[int]
) -> str:
    """Pad by +1 as TensorFlow's SAME does (larger half at the end); sizes follow at load time."""
    size = writer.node("Shape", image, start=2, end=4)
    step = writer.constant(strides)
    more = [(k - 1) * d + 1 - s for k, d, s in zip(kernel, dilations, strides, strict=True)]
    out = writer.node(
        "Div", writer.node("Add", size, writer.constant([s - 1 for s in strides])), step
    )
    needed = writer.node("Add", writer.node("Mul", out, step), writer.constant(more))
    total = writer.node("Max", writer.node("Sub", needed, size), writer.constant([0, 0]))
    before = writer.node("Div", total, writer.constant([2, 2]))
    none = writer.constant([0, 0])
    pads = writer.node("Concat", none, before, none, writer.node("Sub", total, before), axis=0)
    return str(writer.node("Pad", image, pads, writer.constant(1.0)))


def _vector(writer: Writer, tensor: Tensor | None, what: str, dtype: str, count: int) -> Array:
    value = writer.numbers(tensor, what)
    if value.dtype.name != dtype or value.shape != (count,):
        raise ModelError(
            f"{writer.where}: its {what} is {value.dtype} {list(value.shape)}, "
            f"expected {dtype} [{count}]"
        )
    return value


def _thresholded(writer: Writer, tensor: Tensor | None, dot: str, count: int, taps: int) -> str:
    """Return signs: negative where popcount(x ^ w) = (K - dot) / 2 exceeds the threshold."""
    threshold = _vector(writer, tensor, "output_threshold", "int32", count)
    least = taps - 2 * np.clip(threshold.astype(np.int64), -1, taps)
    negative = writer.node("Less", dot, writer.constant(least.astype(np.float32)))
    return _signs(writer, negative)


def _transformed(
    writer: Writer,
    dot: str,
    count: int,
    taps: int,
    code: int,
    quantization: Quantization | None,
) -> str:
    """Return numbers, computed in Larq Compute Engine's order of operations.

    It clamps ``2 * popcount = K - dot``, and includes K and the int8 scale in multiplier and bias.
    A later sign may depend on their rounding.
    """
    multiplier = _vector(writer, writer.operator.inputs[2], "multiplier", "float32", count)
    bias = _vector(writer, writer.operator.inputs[3], "bias", "float32", count)
    plain = not bias.any() and (multiplier == 1).all()
    if plain and not code and quantization is None:
        return dot
    low, high = (min(max(limit, -float(taps)), float(taps)) for limit in activation_range(code))
    value = writer.node("Sub", writer.constant(float(taps)), dot)
    if code:
        low, high = taps - high, taps - low
        value = writer.node("Clip", value, writer.constant(low), writer.constant(high))
    scale = 1.0 if quantization is None else float(quantization.scale[0])
    zero = 0 if quantization is None else int(quantization.zero_point[0])
    wide = multiplier.astype(np.float64)
    factor = (-wide / scale).astype(np.float32)
    offset = ((bias.astype(np.float64) + taps * wide) / scale + zero).astype(np.float32)
    value = writer.node("Mul", value, writer.constant(factor))
    value = writer.node("Add", value, writer.constant(offset))
    return str(value) if quantization is None else writer.rounded(value, "int8")


# --------------------------------------------------------------------- packed inputs and outputs


def pack_output(writer: Writer, tensor: Tensor) -> None:
    """Write a packed output of the network as words."""
    channels = writer.channels[tensor]
    negative = writer.node("Less", writer.name(tensor), writer.constant(0.0))
    bits = writer.node("Cast", negative, to=6)
    rank = len(tensor.shape)
    missing = words(channels) * WORD_BITS - channels
    if missing:
        pads = [0] * 2 * rank
        pads[-1] = missing
        bits = writer.node("Pad", bits, writer.constant(pads), writer.constant(np.int32(0)))
    target = writer.constant([0] * (rank - 1) + [words(channels), WORD_BITS])
    grouped = writer.node("Reshape", bits, target)
    weighted = writer.node("Mul", grouped, writer.constant(_BIT_VALUES))
    packed = writer.node("ReduceSum", weighted, writer.constant([-1]), keepdims=0)
    writer.rename(packed, tensor.name)


def unpack_input(writer: Writer, tensor: Tensor) -> None:
    """Write the signs of a packed input of the network."""
    channel = np.arange(writer.channels[tensor])
    word = writer.node("Gather", tensor.name, writer.constant(channel // WORD_BITS), axis=-1)
    masked = writer.node("BitwiseAnd", word, writer.constant(_BIT_VALUES[channel % WORD_BITS]))
    clear = writer.node("Equal", masked, writer.constant(np.int32(0)))
    # a float again, which passes recognise as a sign
    number = writer.node("Sub", writer.node("Cast", clear, to=1), writer.constant(0.5))
    writer.bind(tensor, _signs(writer, writer.node("Less", number, writer.constant(0.0))))


_BIT_VALUES = np.array([1 << k for k in range(WORD_BITS - 1)] + [-(1 << 31)], np.int32)

OPERATORS: dict[str, Rule] = {
    "LceBMaxPool2d": _max_pool,
    "LceBconv2d": _bconv,
    "LceDequantize": _dequantize,
    "LceQuantize": _quantize,
}
"""Writers of the custom operators."""
