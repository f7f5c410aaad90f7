"""Binary convolutions, dense layers and products of two activations, by XOR or AND and popcount."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tvm.tirx.script import builder as T

from bnncc.topi_binary import borders, layout, sliced_data
from bnncc.topi_binary.definitions import byte_products, byte_sums, carry_save, folded, nibbles
from bnncc.topi_binary.definitions.binary_operands import Operands, Sums, ones, operands, vectors
from bnncc.topi_binary.definitions.blocks import (
    Buffer,
    Expr,
    accumulate,
    accumulate_lanes,
    bit_of,
    buffer,
    compute_lanes,
    int64,
)
from bnncc.topi_binary.definitions.byte_sums import ByteSums
from bnncc.topi_binary.definitions.epilogue import Below, Pixels, Start, epilogue, stored
from bnncc.topi_binary.definitions.nibbles import NibbleSums
from bnncc.topi_binary.definitions.place import Place
from bnncc.topi_binary.definitions.taps import (
    border_class,
    flattened,
    in_class,
    leaves_image,
    taps_outside,
    tests_inside,
)
from bnncc.topi_binary.layout import LANES, QUAD
from bnncc.topi_binary.signature import Operator
from bnncc.topi_binary.spec import BinaryConv2d
from bnncc.topi_binary.step import Step

WORDS = "words"
"""Form of `binary_conv2d` that counts several words of a pixel together, followed by their number.

As in carry-save counting, exact zeros in the data are ignored.
"""


def counts_words(spec: BinaryConv2d) -> bool:
    """Return whether the form `WORDS` fits: all lanes read the same data, and weights are rows."""
    return spec.weight_order == "words" and spec.shared and not spec.weight_zeros


def binary_conv2d(operator: Operator, spec: BinaryConv2d, form: str = "") -> None:
    """Write ``acc = start + sum(popcounts)``, see `BinaryConv2d`, followed by the epilogue.

    ``start`` is the contribution of the taps outside the image; the sum runs over the taps inside.
    The form selects how bits are counted: word by word (default), several words of a pixel at once
    (`WORDS`), several taps per word (`folded.FORM`), three taps at once (`carry_save.FORM`), in
    vectors of bytes (`byte_sums.FORM`), by table lookup (`nibbles.FORM`) or as dot products of
    bytes (`byte_products.FORM`).
    """
    if (flat := flattened(spec, byte_products.columns_of(form))) is not spec:
        operator.reshape(spec := flat)
    limited = sliced_data.limited(spec)
    counted = replace(spec, mode="xor", pad_value=spec.pad_value or -1) if limited else spec
    met, params = operands(operator, counted)
    bytewise = form.startswith(byte_sums.FORM)
    if form.startswith(nibbles.FORM):
        acc = [_of_nibbles(met, operator.n, form)]
    elif form.startswith(byte_products.FORM):
        acc = _of_products(met, operator.n, form)
    elif bytewise:
        acc = _of_bytes(met, operator.n, form)
    else:
        given = params.pop(0) if spec.per_image and spec.mode == "and" else None
        acc = _of_words(met, operator.n, given, form)
    extents = (operator.n, *spec.output_hw, spec.out_channels)
    epilogue(
        operator, spec.steps, params, Pixels(extents, spec.rank), acc=acc,
        below=_below(spec) if limited else None, padded=not bytewise,
        short=form.startswith(nibbles.FORM) and 2 * spec.taps < 2**15,
    )  # fmt: skip


def _of_words(met: Operands, n: Expr, given: Buffer | None, form: str) -> list[Start]:
    """Write the accumulator as a sum of popcounts of words."""
    columns = form.startswith(folded.FORM)
    start = _outside(met, given, counted=columns)
    if form == carry_save.FORM:
        return _written(met.spec, n, _whole(met, n, carry_save.summed(met, n, start)))
    counted = folded.operands(met, n) if columns else met
    together = int(form.removeprefix(folded.FORM if columns else WORDS) or 1)
    sums = _summed("sum", counted, n, start, Operands.count, together)
    if met.zero is None and met.weight_zero is None and not met.spec.doubled:
        return [stored(sums)]
    whole = _whole(met, n, lambda n, h, w, o, lane: sums[n, h, w, o * LANES + lane])
    return _written(met.spec, n, whole)


def _of_bytes(met: Operands, n: Expr, form: str) -> list[Start]:
    """Write the accumulator as popcounts of vectors of bytes."""
    return _written(met.spec, n, _of_planes(met, n, form, ByteSums(met, n, form)), QUAD)


def _of_nibbles(met: Operands, n: Expr, form: str) -> Start:
    """Write the accumulator as a sum of table lookups; return a function that reads it."""
    whole = _of_planes(met, n, form, NibbleSums(met, n, form))
    return lambda at, lane: whole(at.n, at.h, at.w, at.block, lane)


def _of_planes(met: Operands, n: Expr, form: str, sums: Sums) -> Callable[..., Expr]:
    """Return the accumulator; exact zeros in the data are handled by sums over two planes."""
    met, planes = replace(met, spec=sums.spec, zero=None), 1 + form.endswith(byte_sums.ZEROS)
    start, counted = _outside(met, None, sums), sums.summed()
    times = (1 + met.spec.doubled) // planes
    return _whole(met, n, lambda *i: counted(*i) + start(*i) * planes, times)


def _of_products(met: Operands, n: Expr, form: str) -> list[Start]:
    """Write the accumulator as dot products of bytes; return functions that read it."""
    scale, offset = met.spec.dot_from_acc()

    def whole(sums: byte_products.Sums, at: Place, lane: Expr) -> Expr:
        rest = offset - sums.dot(at.n, at.h, at.w, at.block, lane)
        return T.shift_right(rest, T.int32(1)) if scale == -2 else rest

    sums = byte_products.summed(byte_products.of_bits(met), n, form)
    return [partial(whole, one) for one in sums]


def _summed(
    name: str, met: Operands, n: Expr, start: Callable[..., Expr], term: Callable[..., Expr],
    together: int = 1,
) -> Buffer:  # fmt: skip
    """Write sums over the taps inside the image, one vector of channels at a time."""
    image = (n, *met.spec.output_hw)
    sums = buffer(name, (*image, layout.blocks(met.spec.out_channels) * LANES), "int32")
    taps, inside = (*met.spec.kernel, met.words), partial(tests_inside, met.spec)
    for end, first, count, part in vectors(met):
        of_part = _of_rows(part, first, count) if together > 1 else partial(term, part)
        accumulate_lanes(
            f"{name}{end}", sums, (*image, count), taps, start, of_part, inside, first, together
        )
    return sums


def _of_rows(met: Operands, first: int, count: int) -> Callable[..., Expr]:
    """Return a function for the popcount of the XOR that reads the weights as rows of lanes."""
    rows = met.rows(first, count)

    def term(*i: Expr) -> Expr:
        n, _, _, o, *rest = i
        image = n if met.spec.per_image else int64(0)
        return ones(T.bitwise_xor(met.word(met.data, *i), rows[tuple([image, o - first, *rest])]))

    return term


def _outside(
    met: Operands, given: Buffer | None, sums: Sums | None = None, counted: bool = False
) -> Callable[..., Expr]:
    """Return the initial value of the sums: the contribution of the taps outside the image.

    In mode ``and``, ``popcount(d) - 2 * popcount(d & w) == popcount(d ^ w) - popcount(w)``. So the
    popcount of all weights is subtracted from the initial value, and pixels outside are words of
    zeros. With zero padding, a tap outside counts half of the channels; if their number is odd, the
    contribution is added at the end instead, see `_whole`. If sums include the columns outside the
    image (as words of zeros), according to `counted` or `sums`, what they counted is subtracted.
    """
    spec, depth = met.spec, met.depth
    if given is not None:
        return lambda n, h, w, o, lane: given[n, o * LANES + lane]
    half = spec.mode == "xor" and (spec.pad_value == 0 or not leaves_image(spec))
    half_depth = 0 if depth % 2 else depth // 2
    counted = counted or (sums is not None and sums.count_columns_outside)
    if half and not counted:
        return lambda n, h, w, *_: taps_outside(spec, h, w) * half_depth
    bits_of = _weight_bits(met) if sums is None else sums.weight_bits()
    firsts = [borders.classes(spec, axis) for axis in (0, 1)]
    classes = (*map(len, firsts), layout.blocks(spec.out_channels), LANES)
    starts = buffer("starts", classes, "int32")

    def tap(total: Expr, row: Expr, column: Expr, o: Expr, lane: Expr, *at: Expr) -> Expr:
        bits = bits_of[tuple([*at, o * LANES + lane])]
        outside = T.int32(half_depth) if half else depth - bits if spec.pad_value > 0 else bits
        rows, columns = (in_class(spec, axis, (row, column)[axis], at[axis]) for axis in (0, 1))
        beside = outside - bits if counted else outside
        added = T.if_then_else(rows, T.if_then_else(columns, T.int32(0), beside), outside)
        return total + (added - bits if spec.mode == "and" else added)

    accumulate("starts", starts, classes, spec.kernel, T.int32(0), tap)
    inner = [borders.inner_class(spec, axis) for axis in (0, 1)]

    def start(n: Expr, h: Expr, w: Expr, o: Expr, lane: Expr) -> Expr:
        kinds = border_class(firsts[0], h), border_class(firsts[1], w)
        value = starts[tuple([*kinds, o, lane])]
        if spec.mode == "and" or None in inner or (sums is None and not counted):
            return value
        return T.Select(T.And(kinds[0] == inner[0], kinds[1] == inner[1]), T.int32(0), value)

    return start


def _weight_bits(met: Operands) -> Buffer:
    """Write the popcount of each tap's weights, by kernel row, kernel column and channel."""
    spec, zero = met.spec, int64(0)
    made = buffer("ones", (*spec.kernel, layout.blocks(spec.out_channels) * LANES), "int32")
    for end, first, count, part in vectors(met):
        accumulate(
            f"ones{end}", made, (*spec.kernel, count, LANES), (met.words,), T.int32(0),
            lambda total, kh, kw, o, lane, c, part=part, first=first: total
            + ones(part.weigh(part.weight, zero, zero, zero, o + first, kh, kw, c, lane)),
            lambda kh, kw, o, lane, first=first: (kh, kw, (o + first) * LANES + lane),
        )  # fmt: skip
    return made


def _whole(
    met: Operands, n: Expr, summed: Callable[..., Expr], times: int = 0
) -> Callable[..., Expr]:
    """Return the accumulator: the sums, scaled by `times` and corrected for exact zeros.

    `times` defaults to 2 if the accumulator is `doubled` and to 1 otherwise.
    """
    spec = met.spec
    seen = met.zero is not None or met.weight_zero is not None
    odd = met.depth * (met.depth % 2) * (spec.mode == "xor" and spec.pad_value == 0)
    zeros = _summed("zeros", met, n, lambda *_: T.int32(0), Operands.zeros) if seen else None

    def whole(n: Expr, h: Expr, w: Expr, o: Expr, lane: Expr) -> Expr:
        total = summed(n, h, w, o, lane) * (times or 1 + spec.doubled)
        total = total + taps_outside(spec, h, w) * odd if odd else total
        return total if zeros is None else total + zeros[n, h, w, o * LANES + lane]

    return whole


def _written(
    spec: BinaryConv2d, n: Expr, whole: Callable[..., Expr], multiple: int = 0
) -> list[Start]:
    """Write the accumulator to a tensor.

    With `multiple`, the last channels that do not fill a vector get a block and a tensor of their
    own, padded to a multiple of `multiple` lanes. Without it, they are padded to a whole vector.
    """
    image, some = (n, *spec.output_hw), multiple or LANES
    channels = layout.blocks(spec.out_channels, some) * some
    full = (spec.out_channels if multiple else channels) // LANES
    rest, made = channels - full * LANES, []
    for end, first, count, lanes in (("", 0, full, LANES), ("_last", full, int(rest > 0), rest)):
        if count:
            acc = buffer(f"acc{end}", (*image, channels), "int32")
            compute_lanes(f"acc{end}", acc, (*image, count), whole, first, lanes)
            made.append(stored(acc))
    return made


def _below(spec: BinaryConv2d) -> Below:
    """Return a writer of threshold tests for limits that are stored as bit slices."""
    high, wide = sliced_data.classes(spec)

    def tests(step: Step, taken: Sequence[Buffer], at: Place, count: Buffer) -> list[Any]:
        kind = border_class(high, at.h) * len(wide) + border_class(wide, at.w)

        def less(limits: Buffer, lane: Expr) -> Expr:
            limit: Expr = T.int32(0)
            for plane in range(sliced_data.planes(spec)):
                one = T.Cast("int32", bit_of(limits, (kind, int64(plane)), at.channel(lane)))
                limit = limit + T.shift_left(one, T.int32(plane))
            return count[lane] < limit

        def neither(lane: Expr) -> Expr:
            return T.And(less(taken[0], lane), T.Not(less(taken[1], lane)))

        return [lambda lane: less(taken[0], lane), neither][: 1 + step.zero]

    return tests
