"""Readers of packed weights, one for each order."""

from __future__ import annotations

from tvm.tirx.script import builder as T

from bnncc.topi_binary import few_bit_data, layout, tiles, weight_codes
from bnncc.topi_binary.definitions.blocks import Buffer, Expr, int64
from bnncc.topi_binary.layout import LANES, NIBBLE_LANES, QUAD
from bnncc.topi_binary.spec import BinaryConv2d, Conv2d, FewBitConv2d


def binary_word(spec: BinaryConv2d, weight: Buffer, o: Expr, kh: Expr, kw: Expr, c: Expr) -> Expr:
    """Return word `c` of a tap of output channel `o`; see `layout.pack_conv_weight` and `tiles`."""
    words = layout.words(spec.channels_per_group)
    number = (kh * spec.kernel[1] + kw) * words + c
    run = spec.window_size * words
    if spec.weight_order == "words":
        return weight[lane_major(spec.out_channels, run, o, number)]
    if spec.weight_order == "nibbles":
        lane, block = o % NIBBLE_LANES, o // NIBBLE_LANES * run
        column = lane % LANES * 2 + lane // LANES
        made: Expr = T.uint32(0)
        for byte in range(4):
            where = ((block + number) * 4 + byte) * NIBBLE_LANES + column
            one = T.shift_right(weight[where // 4], T.Cast("uint32", where % 4 * 8))
            made = made | T.shift_left(T.bitwise_and(one, T.uint32(255)), T.uint32(8 * byte))
        return made
    if spec.weight_order == "fours":
        steps, lane = layout.blocks(words, 2), o % LANES
        block = (o // LANES * spec.kernel[0] + kh) * spec.kernel[1] + kw
        four = (block * steps * 2 + c) * 8
        made = T.uint32(0)
        for number in range(8):
            pair = weight[(four + number) * 2 + lane // 8]
            one = T.shift_right(pair, T.Cast("uint32", lane % 8 * 4))
            made = made | T.shift_left(T.bitwise_and(one, T.uint32(15)), T.uint32(4 * number))
        return made
    if spec.weight_order in ("vectors", "halves"):
        return weight[_quads(spec, words, o, kh, kw, c)]
    return weight[_tiled(spec, o, number)]


def lane_major(out_channels: int, run: int, o: Expr, number: Expr) -> Expr:
    """Return the index of element `number` of the `run` elements of channel `o`.

    Weights are in blocks of `LANES` channels; the last block has only the existing lanes.
    """
    rest = out_channels % LANES
    width: Expr = int64(LANES)
    if rest:
        width = T.if_then_else(o // LANES == out_channels // LANES, int64(rest), width)
    return o // LANES * (LANES * run) + number * width + o % LANES


def coded(spec: Conv2d, codes: Buffer, numbers: Buffer, number: Expr, o: Expr) -> Expr:
    """Return weight `number` of channel `o` from its code, see `weight_codes.Codes.packed`."""
    bits, lane, block = spec.code_bits, o % LANES, o // LANES
    per_word = layout.WORD_BITS // bits
    word = codes[(block * weight_codes.words(spec) + number // per_word) * LANES + lane]
    low = T.Cast("uint32", number % per_word * bits)
    part = block * (spec.taps // spec.code_block) + number // spec.code_block
    count = weight_codes.numbers_of(spec)
    first, *_, last = (numbers[(part * count + k) * LANES + lane] for k in (0, count - 1))
    if bits == 1:
        test = T.bitwise_and(word, T.shift_left(T.uint32(1), low)) != T.uint32(0)
        return T.Select(test, last, first)
    high = T.Cast("int32", T.shift_left(word, T.uint32(layout.WORD_BITS - bits) - low))
    code = T.Cast("float32", T.shift_right(high, T.int32(layout.WORD_BITS - bits)))
    return (code - first if spec.code_zeros else code) * last


def packed_vector(spec: FewBitConv2d, o: Expr, c: Expr) -> Expr:
    """Return the vector of packed weights that holds words `c` of channel vector `o`.

    See `few_bit_data.pack_weight`.
    """
    together, words = few_bit_data.TOGETHER, few_bit_data.group_words(spec)
    count, run = layout.blocks(spec.out_channels), o // together
    left, width = -count % together, int64(together)
    if left:  # TVM cannot derive a region from a conditional index
        width = width - T.Cast("int64", run >= count // together) * left
    return run * (together * words) + c * width + o % together


def _quads(spec: BinaryConv2d, words: int, o: Expr, kh: Expr, kw: Expr, c: Expr) -> Expr:
    height, width = spec.kernel
    unit = 4 if spec.weight_order == "vectors" else 2
    count = -(-width * words // 4) if unit == 4 else width
    place = kw * words + c if unit == 4 else kw * 2 + c
    row = (o // QUAD * height + kh) * count + place // unit
    return (row * QUAD + o % QUAD) * unit + place % unit


def _tiled(spec: BinaryConv2d, o: Expr, number: Expr) -> Expr:
    cut = tiles.of(spec)
    if cut.kind == "strips":
        return (o // cut.width * cut.filled + number) * cut.width + o % cut.width
    channel, word = o % cut.width, number % 16
    # Column of the tensor core tile: the inverse of `tiles.channel_of_column`.
    thread, rest = channel % 16 // 4, channel % 4
    column = (channel // 16 * 2 + rest // 2) * 8 + thread * 2 + rest % 2
    step = o // cut.width * cut.steps + number // 16
    if cut.kind == "fragments":
        lane = column % 8 * 4 + word // 4
        return ((step * (cut.width // 8) + column // 8) * 32 + lane) * 4 + word % 4
    return ((step * 4 + word % 4) * cut.width + column) * 4 + word // 4
