"""When `neon_conv2d` computes a layer, in which order of weights, and how it is cut."""

from __future__ import annotations

from bnncc.schedules.templates.neon_conv2d import MAX_PRODUCTS, MAX_STEPS
from bnncc.topi_binary import layout
from bnncc.topi_binary.layout import QUAD
from bnncc.topi_binary.spec import BinaryConv2d

MIN_FILLED = 0.75
"""Fraction of a vector that data must fill: with less, counting words is as fast."""

def order(spec: BinaryConv2d) -> str:
    """Return the order of weights in which this kernel reads them, or "" if it does not pay."""
    per_group = spec.channels // spec.groups
    words = layout.words(per_group)
    if spec.out_channels // spec.groups % QUAD and spec.groups > 1:
        return ""
    if spec.taps * (1 + spec.ternary) > MAX_PRODUCTS:
        return ""
    pixels = spec.n if spec.rank == 2 else 2
    if words == 2 and spec.kernel[1] <= MAX_STEPS and (isinstance(pixels, int) and pixels > 1):
        return "halves"
    run = words * (spec.kernel[1] if spec.dilations[1] == 1 else 1)
    if run / (-(-run // 4) * 4) < MIN_FILLED or (spec.dilations[1] > 1 and words % 4):
        return ""
    return "vectors" if spec.dilations[1] == 1 or spec.kernel[1] <= MAX_STEPS else ""
