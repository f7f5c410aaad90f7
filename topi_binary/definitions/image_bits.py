"""Bits of a uint8 image, see `ImageBits`."""

from __future__ import annotations

from tvm.tirx.script import builder as T

from bnncc.topi_binary.definitions.blocks import Expr, differ, int64, pack
from bnncc.topi_binary.definitions.taps import clamped, inside, pixel
from bnncc.topi_binary.signature import Operator
from bnncc.topi_binary.spec import GREY, NEIGHBOURS, ImageBits


def image_bits(operator: Operator, spec: ImageBits) -> None:
    """Compare bytes, or their grey value, with thresholds or with the grey value of neighbours."""
    data = operator.inputs[0]

    def byte(n: Expr, h: Expr, w: Expr, c: Expr) -> Expr:
        return T.Cast("int32", data[tuple(pixel(spec, n, h, w, c))])

    def grey(n: Expr, h: Expr, w: Expr) -> Expr:
        total: Expr = T.int32(0)
        for channel, part in enumerate(GREY):
            total = total + byte(n, h, w, int64(channel)) * part
        return total

    def chosen(values: tuple[int, ...], c: Expr) -> Expr:
        value: Expr = T.int32(values[-1])
        for number, one in enumerate(values[:-1]):
            value = T.if_then_else(c == number, T.int32(one), value)
        return value

    def condition(n: Expr, h: Expr, w: Expr, c: Expr) -> Expr:
        if spec.kind == "threshold":
            reached = byte(n, h, w, c) >= chosen(spec.thresholds, c)
            return differ(reached, chosen(spec.flip, c) == 1) if spec.flip else reached
        if spec.kind == "grey":
            return grey(n, h, w) >= T.int32(spec.thresholds[0])
        larger: Expr = T.bool(False)
        for number, (down, right) in enumerate(NEIGHBOURS):
            there = h + down, w + right
            other = T.if_then_else(
                inside(spec, *there), grey(n, *clamped(spec, *there)), T.int32(0)
            )
            larger = T.Or(larger, T.And(c == number, other > grey(n, h, w)))
        return larger

    channels = {"lbp": len(NEIGHBOURS)}.get(spec.kind, spec.out_channels)
    extents = (operator.n, spec.height, spec.width)
    pack("bits", operator.outputs[0], extents, channels, condition)
