"""Selection of the layers that use AMX tiles, on targets that have them.

Only Intel's server processors since Sapphire Rapids have AMX. A prototype was timed there. Binary
3x3 layers are faster on tiles from 16 pixels on; binary 1x1 layers only for 16 to 32 pixels with
results in bits. For levels, only peak rates are known: tiles multiply seven times as many bytes as
vectors do. In bfloat16, tiles reach 0.97 products per picosecond, compared with about 0.15 for
`vdpbf16ps` and 0.08 in float32, so layers from 16 pixels on use them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import few_bit_data, layout, quantization
from bnncc.topi_binary.definitions.byte_products import Layer
from bnncc.topi_binary.definitions.taps import flattened
from bnncc.topi_binary.layout import DEPTH, LANES, WORD_BITS
from bnncc.topi_binary.spec import BinaryConv2d, Conv2d, FewBitConv2d

ORDER = "fours"
"""Order of the binary weights that tiles read."""

WINDOWED = 9
"""Taps per kernel from which the bytes of a pixel are reused often enough."""

MIN_PIXELS, MAX_POINTWISE, POINTWISE_BYTES = 16, 32, 32 * 1024
"""Pixels per image from which tiles are faster. Binary layers with fewer than `WINDOWED` taps use
them for up to `MAX_POINTWISE` pixels, if the bytes of these stay in the L1 cache."""

MAX_TERMS = 512
"""Maximum number of channels for which sums of three-term products are as exact as documented."""

MIN_FILLED = 0.75
"""Minimum fraction of a tile's depth that the channels of binary layers fill; for levels, half."""


def supports(spec: Layer, target: TargetSpec) -> bool:
    """Return whether a layer can be computed on tiles."""
    return _SUPPORTED[type(spec)](spec, target)


def _floats(spec: Conv2d, target: TargetSpec) -> bool:
    plain = spec.method == "direct" and spec.pool is None
    if spec.operands == "bfloat16x3":
        plain &= spec.kernel == (1, 1) and not any(spec.pads) and spec.groups == 1
        plain &= spec.channels <= MAX_TERMS
    return plain and "amx_bf16" in target.features and quantization.apart(spec)


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
    pixels, depth = flat.output_hw[0] * flat.output_hw[1], spec.channels_per_group
    room = layout.blocks(depth, DEPTH) * DEPTH
    if pixels < MIN_PIXELS:
        return False
    if not isinstance(spec, BinaryConv2d):  # floats fill tiles; levels are bytes already
        floats = spec.method == "direct"
        few = cast("FewBitConv2d", spec)
        return floats or few_bit_data.group_words(few) * few_bit_data.per_word(few) * 2 >= room
    if layout.words(depth) * WORD_BITS < MIN_FILLED * room:
        return False
    if spec.window_size >= WINDOWED:
        return True
    bits = all(step.op == "threshold" for step in spec.steps)
    return bits and pixels * spec.channels <= POINTWISE_BYTES and pixels <= MAX_POINTWISE
