"""Few-bit convolution: sums of products of levels with small integers."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.topi_binary import few_bit_data
from bnncc.topi_binary.definitions.blocks import Expr, accumulate, buffer, compute
from bnncc.topi_binary.definitions.epilogue import Pixels, epilogue
from bnncc.topi_binary.definitions.taps import border_class, clamped, inside, pixel, place
from bnncc.topi_binary.layout import LANES, blocks
from bnncc.topi_binary.signature import Operator
from bnncc.topi_binary.spec import FewBitConv2d


def few_bit_conv2d(operator: Operator, spec: FewBitConv2d) -> None:
    """Write ``acc = start + sum(k * q)``, see `FewBitConv2d`, and the epilogue."""
    count = spec.data_tensors
    data, (weight, *params) = operator.inputs[:count], operator.inputs[count:]
    start = params.pop(0) if spec.starts else None
    words, planes = few_bit_data.group_words(spec), few_bit_data.weight_planes(spec)
    per_out = spec.out_channels // spec.groups
    extents = (operator.n, *spec.output_hw, spec.out_channels)
    firsts = [[first for first, _ in few_bit_data.classes(spec, axis)] for axis in (0, 1)]
    lanes = blocks(spec.out_channels) * LANES

    def step(acc: Expr, *i: Expr) -> Expr:
        n, h, w, o, kh, kw, c = i
        there = place(spec, h, w, kh, kw)
        index = tuple(pixel(spec, n, *clamped(spec, *there), o // per_out * words + c))
        total: Expr = T.int32(0)
        for plane in range(planes):
            row = (o // LANES * planes + plane) * spec.kernel[0] * spec.kernel[1]
            word = weight[((row + kh * spec.kernel[1] + kw) * words + c) * LANES + o % LANES]
            total = total + _product(spec, [d[index] for d in data], word, plane)
        total = total * (1 + spec.doubled)
        return acc + T.if_then_else(inside(spec, *there), total, T.int32(0))

    acc = buffer("acc", extents, "int32")
    accumulate("acc", acc, extents, (*spec.kernel, words), T.int32(0), step)
    if start is not None:
        acc, summed = buffer("started", extents, "int32"), acc

        def started(n: Any, h: Any, w: Any, o: Any) -> Expr:
            kind = border_class(firsts[0], h) * len(firsts[1]) + border_class(firsts[1], w)
            return summed[n, h, w, o] + start[kind * lanes + o]

        compute("started", acc, extents, started)
    epilogue(operator, spec.steps, params, Pixels(extents, spec.rank), acc=acc)


def _product(spec: FewBitConv2d, data: list[Expr], weight: Expr, plane: int) -> Expr:
    """Return what one word of data and one of a plane of weights count, see `few_bit_data`."""
    if spec.method == "floats":
        return T.Cast("int32", data[0]) * T.Cast("int32", weight)
    total: Expr = T.int32(0)
    if spec.method in ("xor", "and"):
        last = spec.method == "and" and plane == spec.weight_bits - 1
        for number, word in enumerate(data):
            met = word ^ weight if spec.method == "xor" else T.bitwise_and(word, weight)
            counted = T.Cast("int32", T.popcount(met)) * 2 ** (plane + number)
            total = total - counted if last or spec.method == "xor" else total + counted
        return total
    bits = 32 // few_bit_data.PER_WORD[spec.method]
    whole = T.Cast("int32", weight)
    for place_ in range(32 // bits):
        moved = T.shift_right(data[0], T.uint32(place_ * bits))
        level = T.bitwise_and(moved, tirx.IntImm("uint32", 2**bits - 1))
        left = T.shift_left(whole, T.int32(32 - bits - place_ * bits))
        total = total + T.Cast("int32", level) * T.shift_right(left, T.int32(32 - bits))
    return total
