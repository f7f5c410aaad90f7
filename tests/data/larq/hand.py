"""Networks of a few operators written by hand: every option of Larq Compute Engine's operators."""

from __future__ import annotations

from functools import partial

import numpy as np
from flat import Flat, packed

SAME_ZERO, SAME_ONE, VALID = (0, 0), (0, 1), (1, 0)
NONE, RELU, RELU1, RELU6 = range(4)


def signs(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.choice([-1.0, 1.0], shape).astype(np.float32)


def out_size(size: int, kernel: int, stride: int, dilation: int, same: bool) -> int:
    span = (kernel - 1) * dilation + 1
    return -(-size // stride) if same else (size - span) // stride + 1


def bconv(
    padding=VALID,
    activation=NONE,
    out="int32",
    channels=40,
    units=35,
    kernel=(3, 3),
    strides=(1, 1),
    dilations=(1, 1),
    groups=1,
    size=(7, 6),
    seed=0,
    reference=False,
    plain=False,
) -> tuple[bytes, bool]:
    """Quantize an image, convolve it, and give bits, floats or int8."""
    rng = np.random.default_rng(seed)
    flat = Flat()
    x = flat.tensor("image", (1, *size, channels))
    words = -(-channels // 32)
    b = flat.tensor("bits", (1, *size, words), "int32")
    flat.op("LceQuantize", [x], [b])
    weight = signs(rng, (units, *kernel, channels // groups))
    taps = weight[0].size
    shape = [
        out_size(s, k, t, d, padding[0] == 0)
        for s, k, t, d in zip(size, kernel, strides, dilations, strict=True)
    ]
    last = -(-units // 32) if out == "int32" else units
    more = {"scale": 0.043, "zero": -7} if out == "int8" else {}
    y = flat.tensor("result", (1, *shape, last), out, **more)
    options = {
        "channels_in": channels, "padding": padding[0], "pad_values": padding[1],
        "fused_activation_function": activation, "stride_height": strides[0],
        "stride_width": strides[1], "dilation_height_factor": dilations[0],
        "dilation_width_factor": dilations[1],
    }  # fmt: skip
    if out == "int32":
        threshold = rng.integers(taps // 2 - 9, taps // 2 + 9, units, dtype=np.int32)
        threshold[:5] = [np.iinfo(np.int32).min, np.iinfo(np.int32).max, -1, taps, taps - 1]
        flat.bconv(b, y, weight, options, threshold=threshold)
    else:
        scale = rng.standard_normal(units).astype(np.float32) / 16
        scale[0] = 0
        bias = rng.standard_normal(units).astype(np.float32)
        if plain:
            scale, bias = np.ones_like(scale), np.zeros_like(bias)
        flat.bconv(b, y, weight, options, multiplier=scale, bias=bias)
    return flat.finish([x], [y]), reference


def quantized(dtype: str, zero: int = 0, scale: float = 0.1) -> tuple[bytes, bool]:
    """Pack numbers of another type."""
    flat = Flat()
    more = {"scale": scale, "zero": zero} if dtype == "int8" else {}
    x = flat.tensor("numbers", (2, 3, 45), dtype, **more)
    y = flat.tensor("bits", (2, 3, 2), "int32")
    flat.op("LceQuantize", [x], [y])
    return flat.finish([x], [y]), False


def dequantized(dtype: str, channels: int = 45, zero: int = 0, scale: float = 0.3):
    """Unpack words that are given."""
    flat = Flat()
    more = {"scale": scale, "zero": zero} if dtype == "int8" else {}
    x = flat.tensor("words", (2, 3, -(-channels // 32)), "int32")
    y = flat.tensor("numbers", (2, 3, channels), dtype, **more)
    flat.op("LceDequantize", [x], [y])
    return flat.finish([x], [y]), False


def pooled(padding: int, window=(2, 2), strides=(2, 2), size=(7, 5), channels=33):
    """Pool bits."""
    flat = Flat()
    x = flat.tensor("image", (1, *size, channels))
    b = flat.tensor("bits", (1, *size, 2), "int32")
    flat.op("LceQuantize", [x], [b])
    shape = [
        out_size(s, k, t, 1, padding == 0) for s, k, t in zip(size, window, strides, strict=True)
    ]
    y = flat.tensor("pooled", (1, *shape, 2), "int32")
    options = {
        "padding": padding, "stride_height": strides[0], "stride_width": strides[1],
        "filter_height": window[0], "filter_width": window[1],
    }  # fmt: skip
    flat.op("LceBMaxPool2d", [b], [y], options)
    return flat.finish([x], [y]), False


def int8_between() -> tuple[bytes, bool]:
    """int8 in, an int8 convolution result that is packed again, int8 and float out."""
    rng = np.random.default_rng(3)
    flat = Flat()
    x = flat.tensor("image", (1, 5, 5, 40), "int8", scale=0.05, zero=4)
    a = flat.tensor("bits", (1, 5, 5, 2), "int32")
    flat.op("LceQuantize", [x], [a])
    options = {"channels_in": 40, "padding": 0, "pad_values": 1}
    y = flat.tensor("middle", (1, 5, 5, 48), "int8", scale=0.07, zero=-11)
    weight = signs(rng, (48, 3, 3, 40))
    flat.bconv(
        a, y, weight, options, multiplier=rng.standard_normal(48).astype(np.float32) / 8,
        bias=rng.standard_normal(48).astype(np.float32),
    )  # fmt: skip
    b = flat.tensor("bits2", (1, 5, 5, 2), "int32")
    flat.op("LceQuantize", [y], [b])
    z = flat.tensor("signs", (1, 5, 5, 48), "int8", scale=0.5, zero=120)
    flat.op("LceDequantize", [b], [z])
    f = flat.tensor("floats", (1, 5, 5, 48))
    flat.op(6, [y], [f])  # DEQUANTIZE
    q = flat.tensor("again", (1, 5, 5, 48), "int8", scale=0.31, zero=3)
    flat.op(114, [f], [q])  # QUANTIZE
    return flat.finish([x], [y, b, z, f, q]), False


def words_given() -> tuple[bytes, bool]:
    """Packed words in, convolved to packed words that are read twice and are an output too."""
    rng = np.random.default_rng(4)
    flat = Flat()
    x = flat.tensor("words", (1, 6, 6, 2), "int32", None)
    a = flat.tensor("first", (1, 6, 6, 1), "int32")
    weight = signs(rng, (20, 3, 3, 64))
    options = {"channels_in": 64, "padding": 0, "pad_values": 1}
    flat.bconv(x, a, weight, options, threshold=np.full(20, 288, np.int32))
    b = flat.tensor("second", (1, 4, 4, 32))
    more = {"channels_in": 20, "padding": 1}
    one, none = np.ones(32, np.float32), np.zeros(32, np.float32)
    flat.bconv(a, b, signs(rng, (32, 3, 3, 20)), more, multiplier=one, bias=none)
    d = flat.tensor("unpacked", (1, 6, 6, 20))
    flat.op("LceDequantize", [a], [d])
    return flat.finish([x], [a, b, d]), False


assert packed(np.array([1.0, -1.0, 1.0])) == 2

CASES = {
    "valid_bits": bconv,
    "one_bits": partial(bconv, SAME_ONE, seed=1),
    "valid_float": partial(bconv, out="float32", seed=3),
    "one_float": partial(bconv, SAME_ONE, out="float32", seed=4),
    "zero_float": partial(bconv, SAME_ZERO, out="float32", seed=5),
    "zero_plain": partial(bconv, SAME_ZERO, out="float32", plain=True, channels=33, seed=6),
    "one_relu": partial(bconv, SAME_ONE, RELU, "float32", seed=7),
    "valid_relu1": partial(bconv, VALID, RELU1, "float32", seed=8),
    "one_relu6": partial(bconv, SAME_ONE, RELU6, "float32", channels=33, seed=9),
    "zero_relu_reference": partial(
        bconv, SAME_ZERO, RELU, "float32", seed=10, reference=True
    ),
    "valid_int8": partial(bconv, out="int8", seed=11),
    "one_int8_relu6": partial(bconv, SAME_ONE, RELU6, "int8", seed=12),
    "zero_int8_reference": partial(bconv, SAME_ZERO, out="int8", seed=13, reference=True),
    "one_strides": partial(bconv, SAME_ONE, strides=(2, 3), seed=14, size=(8, 7)),
    "zero_strides": partial(
        bconv, SAME_ZERO, out="float32", strides=(2, 2), seed=15, size=(8, 7)
    ),
    "valid_strides": partial(bconv, strides=(3, 2), seed=16, size=(9, 8)),
    "one_dilated": partial(bconv, SAME_ONE, dilations=(2, 1), seed=17, size=(8, 7)),
    "zero_dilated": partial(
        bconv, SAME_ZERO, out="float32", dilations=(2, 2), seed=18, size=(7, 8)
    ),
    "valid_dilated": partial(bconv, dilations=(1, 2), seed=19, size=(6, 8)),
    "groups_bits": partial(
        bconv, SAME_ONE, channels=64, units=34, groups=2, seed=20, reference=True
    ),
    "groups_float": partial(
        bconv, SAME_ZERO, RELU6, "float32", channels=96, units=36, groups=3, seed=21,
        reference=True,
    ),
    "groups_int8": partial(
        bconv, VALID, RELU, "int8", channels=128, units=32, groups=2, strides=(2, 1), seed=22,
        reference=True,
    ),
    "one_channel": partial(bconv, SAME_ONE, channels=1, units=32, seed=23),
    "pointwise": partial(bconv, channels=32, units=64, kernel=(1, 1), seed=24),
    "wide_kernel": partial(bconv, SAME_ONE, channels=8, units=33, kernel=(2, 5), seed=25),
    "even_kernel": partial(
        bconv, SAME_ZERO, out="float32", channels=8, kernel=(4, 2), strides=(2, 1), seed=26
    ),
    "pool_valid": partial(pooled, 1),
    "pool_same": partial(pooled, 0),
    "pool_wide": partial(pooled, 0, (3, 2), (1, 2)),
    "quantize_bool": partial(quantized, "bool"),
    "quantize_int8": partial(quantized, "int8", 5),
    "quantize_int8_lowest": partial(quantized, "int8", -128),
    "quantize_int8_above": partial(quantized, "int8", 128),
    "dequantize_float": partial(dequantized, "float32"),
    "dequantize_bool": partial(dequantized, "bool"),
    "dequantize_int8": partial(dequantized, "int8", zero=125),
    "int8_between": int8_between,
    "words_given": words_given,
}  # fmt: skip


def refused(code: int, count: int, dtype: str) -> bytes:
    """Return a file with one builtin operator, on numbers of one type."""
    flat = Flat()
    more = {"scale": 0.1} if dtype == "int8" else {}
    given = [flat.tensor(f"x{k}", (1, 4), dtype, **more) for k in range(count)]
    y = flat.tensor("sum", (1, 4), dtype, **more)
    flat.op(code, given, [y])
    return flat.finish(given, [y])


REFUSED = {"int8_add": (0, 2, "int8"), "reverse": (105, 2, "float32")}
