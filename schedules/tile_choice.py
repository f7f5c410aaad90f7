"""Selection of the layers that use AMX tiles, on targets that have them.

Only Intel's server processors since Sapphire Rapids have AMX. Binary layers were timed on one of
them, both on tiles and with VPOPCNTDQ (``benchmarks/tile_layers.py``): a step on tiles takes as
long for one pixel as for thirty, and results in float32 take time that tiles cannot shorten.
Layers in bfloat16 were timed in float32, too (``benchmarks/bfloat16_layers.py``). For levels, only
peak rates are known: tiles multiply seven times as many bytes as vectors do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import few_bit_data, layout, quantization
from bnncc.topi_binary.build import aliases
from bnncc.topi_binary.definitions.byte_products import Layer, folds
from bnncc.topi_binary.definitions.taps import flattened
from bnncc.topi_binary.layout import DEPTH, LANES, WORD_BITS
from bnncc.topi_binary.spec import BinaryConv2d, Conv2d, FewBitConv2d
from bnncc.topi_binary.step import TENSORS, output_kinds, writers

ORDER = "fours"
"""Order of the binary weights that tiles read."""

WINDOWED = 9
"""Taps per kernel from which the bytes of a pixel are reused often enough."""

MIN_PIXELS = 16
"""Pixels per image from which levels and floats use tiles."""

WINDOWED_PIXELS = 40
"""Pixels per image from which binary layers with `WINDOWED` taps or more use tiles."""

POINTWISE_PIXELS, POINTWISE_CHANNELS = (32, 64), 512
"""Pixels per image (from, to) and least channels with which other binary layers do, if their
results are bits."""

FLOAT_PRODUCTS, FLOAT_SHARE = 100, 0.5
"""Least products per byte of float32 that the epilogue of a binary layer reads or writes, and
maximum fraction of the L2 cache for these bytes. Results in NCHW count twice."""

FLOAT_GAIN = 6.0
"""How many times as many products of bfloat16 tiles compute as vectors do, if both are filled."""

MAX_POOLED = 9
"""Maximum number of sums per window of a fused pooling; each result reads them all."""

MAX_TERMS = 512
"""Maximum number of channels for which sums of three-term products are as exact as documented."""

MIN_FILLED = 0.75
"""Minimum fraction of a tile's depth that the channels of binary layers fill; for levels, half."""


def supports(spec: Layer, target: TargetSpec) -> bool:
    """Return whether a layer can be computed on tiles."""
    return _SUPPORTED[type(spec)](spec, target)


def _floats(spec: Conv2d, target: TargetSpec) -> bool:
    pooled = 1 if spec.pool is None else math.prod(spec.pool.kernel)
    plain = spec.method == "direct" and spec.packed == 2 and pooled <= MAX_POOLED
    if spec.operands == "bfloat16x3":
        plain &= spec.kernel == (1, 1) and not any(spec.pads) and spec.groups == 1
        plain &= spec.channels <= MAX_TERMS
    return plain and "amx_bf16" in target.features and spec.apart


def _bytes(spec: BinaryConv2d | FewBitConv2d, target: TargetSpec) -> bool:
    whole = spec.groups == 1 or spec.out_channels // spec.groups % LANES == 0
    return whole and "amx_int8" in target.features


def _binary(spec: BinaryConv2d, target: TargetSpec) -> bool:
    return _bytes(spec, target) and not spec.per_image


def _levels(spec: FewBitConv2d, target: TargetSpec) -> bool:
    whole = spec.method == "packed" and spec.channels % DEPTH == 0
    return _bytes(spec, target) and (whole or spec.method == "bytes") and not spec.depthwise


_SUPPORTED: dict[type, Callable[..., bool]] = {
    BinaryConv2d: _binary, Conv2d: _floats, FewBitConv2d: _levels
}  # fmt: skip


def pays(spec: Layer, target: TargetSpec) -> bool:
    """Return whether a layer should be computed on tiles."""
    if not supports(spec, target):
        return False
    flat = flattened(spec)
    pixels = flat.output_hw[0] * flat.output_hw[1]
    if isinstance(spec, BinaryConv2d):
        return _bits_fill(spec) and _binary_pays(spec, pixels, target)
    return pixels >= MIN_PIXELS and _FILLED[type(spec)](spec)


def _bits_fill(spec: BinaryConv2d) -> bool:
    return layout.words(spec.channels_per_group) * WORD_BITS >= MIN_FILLED * _room(spec)


def _levels_fill(spec: FewBitConv2d) -> bool:
    return few_bit_data.group_words(spec) * few_bit_data.per_word(spec) * 2 >= _room(spec)


def _floats_fill(spec: Conv2d) -> bool:
    words = quantization.words(replace(spec, apart=False))
    return float_words(spec) <= FLOAT_GAIN * words


def float_words(spec: Conv2d) -> int:
    """Return the words of data per output that tiles multiply, with those that are only filled."""
    words = spec.kernel[0] * LANES
    if folds(spec):
        return words
    return words * spec.kernel[1] * layout.blocks(quantization.words_of_pixel(spec))


def slow_pairs(spec: Conv2d, target: TargetSpec) -> bool:
    """Return whether vectors multiply pairs of bfloat16 more slowly than twice as many float32.

    On processors with tiles, `vdpbf16ps` does: a first layer of 32 x 32 pixels takes 84 us with it
    and 43 us without. Only where each weight is used once do pairs save time, that of loading them.
    """
    pixels = math.prod(flattened(spec).output_hw)
    bfloat16 = spec.operands == "bfloat16" and "amx_bf16" in target.features
    return bfloat16 and pixels >= MIN_PIXELS


def _room(spec: Layer) -> int:
    """Return the bytes per pixel and group that tiles hold."""
    return layout.blocks(spec.channels_per_group, DEPTH) * DEPTH


_FILLED: dict[type, Callable[..., bool]] = {Conv2d: _floats_fill, FewBitConv2d: _levels_fill}


def _binary_pays(spec: BinaryConv2d, pixels: int, target: TargetSpec) -> bool:
    if spec.window_size < WINDOWED:
        least, most = POINTWISE_PIXELS
        bits = all(step.op == "threshold" for step in spec.steps)
        return bits and least <= pixels <= most and spec.channels >= POINTWISE_CHANNELS
    over = aliases(spec) if spec.steps else []
    made = [kind for step in spec.steps for kind in output_kinds(step)]
    floats = sum(step.op in TENSORS for step in spec.steps)
    stored = zip(writers(spec.steps), made, over, strict=True)
    floats += sum(
        1 + (step.layout == "NCHW") for step, kind, old in stored if kind == "store" and old < 0
    )
    size = 4 * floats * pixels * spec.out_channels
    products = pixels * spec.out_channels * spec.taps
    few = size <= FLOAT_SHARE * target.l2_bytes and products >= FLOAT_PRODUCTS * size
    return few and pixels >= WINDOWED_PIXELS
