"""Tensor intrinsics of x86: SSE, AVX2 and AVX-512."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.schedules.intrin import Intrinsic, Operand, Pair, TensorPair, imported, lanes
from bnncc.schedules.intrin_levels import (
    WEIGHTS_OF_CODES,
    Dot,
    code_pairs,
    dot_add,
    dot_bytes,
    in_pieces,
    one_by_one,
)
from bnncc.schedules.intrin_portable import popcount
from bnncc.topi_binary import quantization
from bnncc.topi_binary.definitions import nibbles
from bnncc.topi_binary.definitions.blocks import bit, int64
from bnncc.topi_binary.definitions.byte_products import half_of_pixel
from bnncc.topi_binary.definitions.terms import dot_of_pair, signed, to_bfloat16
from bnncc.topi_binary.few_bit_data import CODES
from bnncc.topi_binary.layout import LANES
from bnncc.topi_binary.spec import Conv2d

Buffer = Any
Expr = Any

F32 = f"float32x{LANES}"
I32 = f"int32x{LANES}"
U32 = f"uint32x{LANES}"


def lookup(size: int, feature: str, instruction: str) -> Intrinsic:
    """Return the instruction that looks up entries of 16-byte tables."""
    kind = f"uint8x{size}"
    return Intrinsic(
        f"{feature}_lookup_{size}_u8",
        feature,
        (kind, kind),
        kind,
        # In the table in the lane's own group of sixteen bytes.
        lambda lane, table, entry: table(lane // 16 * 16 + T.Cast("int32", entry(lane))),
        lambda table, entry: T.call_llvm_pure_intrin(kind, instruction, table, entry),
        bounds={1: (0, 15)},
    )


LOOKUP = {
    16: lookup(16, "ssse3", "llvm.x86.ssse3.pshuf.b.128"),
    32: lookup(32, "avx2", "llvm.x86.avx2.pshuf.b"),
    64: lookup(64, "avx512bw", "llvm.x86.avx512.pshuf.b.512"),
}
"""By vector size in bytes: look up entries of 16-byte tables."""


def lookup_add(instruction: Intrinsic) -> TensorPair:
    """Return the pair that adds the table entries selected by bytes of weights."""
    size = lanes(instruction.result)
    width = nibbles.row_bytes(size)
    every, table = T.Ramp(0, 1, size), T.Ramp(0, 1, width)

    def desc(lane: Expr, entry: Expr, weight: Any, row: Any, total: Any) -> Any:
        # A one-hot sum: ``tensorize`` cannot match a loop that reads ``row[weight]``.
        meant = weight[lane] == T.Cast("uint8", entry)
        picked = T.if_then_else(meant, row[nibbles.in_row(lane, entry, size)], T.uint8(0))
        return [(lane, total[lane] + picked)]

    def impl(weight: Any, row: Any, total: Any) -> Any:
        rows = [row[table]] * (size // width)
        every_lane = rows[0] if size == width else tirx.Shuffle(rows, [*range(size)])
        return [(every, total[every] + instruction(every_lane, weight[every]))]

    return TensorPair(
        instruction.name.replace("lookup", "lookup_add"),
        instruction.feature,
        (
            Operand((size,), "uint8", bounds=(0, 15)),
            Operand((width,), "uint8"),
            Operand((size,), "uint8"),
        ),
        size,
        desc,
        impl,
        terms=16,
    )


LOOKUP_ADD = {size: lookup_add(one) for size, one in LOOKUP.items()}
"""By vector size in bytes: add the table entries selected by bytes of weights."""

SUM, MAJORITY, LESS, CHOOSE, CARRY = 0x96, 0xE8, 0x8E, 0xCA, 0xD4
"""Truth tables of three bits, of which the first operand is the most significant bit of the index:
XOR; majority; ``a < b``, or c if a equals b; b if a is set, else c; and the majority of x, y and z
if the third operand is ``x ^ y ^ z``."""

_TABLES = {"sum": SUM, "majority": MAJORITY, "less": LESS, "choose": CHOOSE, "carry": CARRY}


def _ternary(name: str, table: int, count: int) -> Intrinsic:
    kind, whole = f"uint32x{count}", f"int32x{count}"

    def desc(lane: Expr, *operands: Any) -> Expr:
        made: Expr = None
        for row in range(8):
            if not table >> row & 1:
                continue
            bits = [
                x(lane) if row >> (2 - i) & 1 else T.bitwise_not(x(lane))
                for i, x in enumerate(operands)
            ]
            one = bits[0] & bits[1] & bits[2]
            made = one if made is None else made | one
        return made

    def impl(*operands: Expr) -> Expr:
        values = [T.Cast(whole, x) for x in operands]
        instruction = f"llvm.x86.avx512.pternlog.d.{32 * count}"
        made = T.call_llvm_pure_intrin(whole, instruction, *values, T.int32(table))
        return T.Cast(kind, made)

    feature = "avx512f" if count == 16 else "avx512vl"
    return Intrinsic(f"{feature}_{name}_{count}_u32", feature, (kind,) * 3, kind, desc, impl)


TERNARY = {
    (table, count): _ternary(name, table, count)
    for name, table in _TABLES.items()
    for count in (4, 8, 16)
}
"""By truth table and lanes: any function of three bits, AVX-512's ``vpternlogd``."""


def _dot_of_pairs(lane: Expr, total: Any, data: Any, weight: Any) -> Expr:
    products = (signed(data(lane), 16, i) * signed(weight(lane), 16, i) for i in range(2))
    return sum(products, total(lane))


def _bytes(total: Expr, data: Expr, weight: Expr) -> Expr:
    operands = [T.reinterpret(f"int8x{4 * LANES}", word) for word in (data, weight)]
    return T.call_llvm_pure_intrin(I32, "llvm.x86.avx512.vpdpbusd.512", total, *operands)


def dot_pairs(bits: int, feature: str, instruction: str) -> Intrinsic:
    """Return the instruction for int16 pairs in `bits`-bit vectors, extended to `LANES` lanes."""
    count = bits // 32
    whole, half, part = f"<{LANES} x i32>", f"<{2 * count} x i16>", f"<{count} x i32>"
    lines = [f"declare {part} @{instruction}({half}, {half})"]
    lines.append(
        f"define linkonce_odr hidden {whole} @bnncc_pairs_{bits}({whole} %sum, {whole} %data, "
        f"{whole} %weight) alwaysinline nounwind {{"
    )
    made = []
    for piece in range(LANES // count):
        picked = ", ".join(f"i32 {piece * count + i}" for i in range(count))
        for operand in ("data", "weight"):
            lines.append(
                f"  %{operand}{piece} = shufflevector {whole} %{operand}, {whole} poison, "
                f"<{count} x i32> <{picked}>"
            )
            lines.append(f"  %{operand}h{piece} = bitcast {part} %{operand}{piece} to {half}")
        lines.append(
            f"  %p{piece} = call {part} @{instruction}({half} %datah{piece}, "
            f"{half} %weighth{piece})"
        )
        made.append((f"%p{piece}", count))
    level = 0
    while len(made) > 1:
        joined = []
        for number in range(0, len(made), 2):
            (one, size), (two, _) = made[number : number + 2]
            picked = ", ".join(f"i32 {i}" for i in range(2 * size))
            kind = f"<{size} x i32>"
            result = f"%j{level}_{number}"
            lines.append(
                f"  {result} = shufflevector {kind} {one}, {kind} {two}, "
                f"<{2 * size} x i32> <{picked}>"
            )
            joined.append((result, 2 * size))
        made, level = joined, level + 1
    lines += [f"  %r = add {whole} %sum, {made[0][0]}", f"  ret {whole} %r", "}"]
    return Intrinsic(
        f"{feature}_dot_2x{LANES}_s16",
        feature,
        (I32, U32, U32),
        I32,
        _dot_of_pairs,
        partial(T.call_pure_extern, I32, f"bnncc_pairs_{bits}"),
        source="\n".join(lines),
        # The sum of two products of -32768 by itself overflows.
        bounds={0: (-(2**20), 2**20), 1: (0, 2**31 - 2**16)},
    )


DOT_PAIRS = {
    128: dot_pairs(128, "ssse3", "llvm.x86.sse2.pmadd.wd"),
    256: dot_pairs(256, "avx2", "llvm.x86.avx2.pmadd.wd"),
    512: dot_pairs(512, "avx512bw", "llvm.x86.avx512.pmaddw.d.512"),
}
"""By vector size in bits: two products of int16 are added to each lane."""

VNNI = dot_add("uint8", _bytes, "avx512_vnni")
"""Like the multiply-add of floats, one instruction for a vector of products."""


def _bytes_256(total: Expr, data: Expr, weight: Expr) -> Expr:
    operands = [T.reinterpret("int8x32", word) for word in (data, weight)]
    return T.call_llvm_pure_intrin("int32x8", "llvm.x86.avx512.vpdpbusd.256", total, *operands)


def _vnni_256(total: Expr, levels: Sequence[Expr], codes: Sequence[Expr]) -> Expr:
    return in_pieces(8, one_by_one(_bytes_256), total, levels, codes)


_CODES: tuple[tuple[int, str, Dot], ...] = (
    (256, "avx_vnni", _vnni_256),
    (512, "avx512_vnni", one_by_one(_bytes)),
)
"""Vector size in bits and feature of each way to multiply codes and add them in 32 bits."""

DOT_ADD_CODES = [(bits, code_pairs(dot, feature)) for bits, feature, dot in _CODES]
"""Vector size in bits, and by bits per code the pair that adds their products."""


_SHORT = (
    (128, "ssse3", "llvm.x86.ssse3.pmadd.ub.sw.128", "llvm.x86.sse2.pmadd.wd"),
    (256, "avx2", "llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd"),
    (512, "avx512bw", "llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512"),
)
"""Vector size in bits, feature, and the instructions for bytes and for pairs of their sums."""


def _short_bytes(bits: int, short: str, long: str) -> Dot:
    """Return products of bytes by ``pmaddubsw``, whose sums of two fit if data have 7 bits."""
    count = bits // 32

    def dot(total: Expr, data: Expr, weight: Expr) -> Expr:
        operands = [T.reinterpret(f"int8x{4 * count}", word) for word in (data, weight)]
        pairs = T.call_llvm_pure_intrin(f"int16x{2 * count}", short, *operands)
        ones = T.Broadcast(T.int16(1), 2 * count)
        return total + T.call_llvm_pure_intrin(f"int32x{count}", long, pairs, ones)

    return partial(in_pieces, count, one_by_one(dot))


SHORT_BITS = 15
"""Bits of a level and of a weight up to which the sum of two products fits in 16 bits."""

SHORT_BYTES = [
    dot_bytes(_short_bytes(bits, *instructions), feature, SHORT_BITS - 8)
    for bits, feature, *instructions in _SHORT
]
"""Sums in 16 bits first: for weights of 8 bits, levels have 7 bits or fewer; for others, 8."""

DOT_ADD = (
    *((bits, dot_add("int16", dot, dot.feature, source=dot.source))
      for bits, dot in DOT_PAIRS.items()),
    *((bits, pair) for (bits, *_), pair in zip(_SHORT, SHORT_BYTES, strict=True)),
    (256, dot_bytes(_vnni_256, "avx_vnni")),
    (512, VNNI),
)  # fmt: skip
"""Vector size in bits, and the pair that multiplies one data word by weight words; of those for the
same numbers, the last one is the fastest."""


def _short_add(bits: int, feature: str, instruction: str) -> TensorPair:
    """Return products of four levels with codes by ``pmaddubsw``, added in 16 bits."""
    count = bits // 32

    def impl(levels: Any, codes: Any, total: Any) -> Any:
        word, made = T.reinterpret("uint32", levels[T.Ramp(0, 1, 4)]), []
        for first in range(0, LANES, count):
            operands = T.Broadcast(word, count), codes[T.Ramp(4 * first, 1, 4 * count)]
            packed = [T.reinterpret(f"int8x{bits // 8}", one) for one in operands]
            product = T.call_llvm_pure_intrin(f"int16x{2 * count}", instruction, *packed)
            where = T.Ramp(2 * first, 1, 2 * count)
            sums = T.call_pure_extern(
                f"int16x{2 * count}", f"bnncc_in_order_{bits}", total[where] + product
            )
            made.append((where, sums))
        return made

    # An empty instruction keeps the order of additions: LLVM would add products first, which takes
    # twice as many registers.
    kind, register = f"<{2 * count} x i16>", "v" if bits == 512 else "x"
    source = f"""
define linkonce_odr hidden {kind} @bnncc_in_order_{bits}({kind} %sum) alwaysinline nounwind {{
  %r = call {kind} asm sideeffect "", "={register},0"({kind} %sum)
  ret {kind} %r
}}
"""

    return TensorPair(
        f"{feature}_short_add_codes_4x{LANES}_u8",
        feature,
        (
            Operand((4,), "uint8"),
            Operand((4 * LANES,), "uint8", bounds=(0, 15)),
            Operand((2 * LANES,), "int16", bounds=(0, 2**14)),
        ),
        2 * LANES,
        lambda lane, levels, codes, total: [
            (lane, dot_of_pair(total[lane], lambda i: levels[i], lambda i: codes[i], lane))
        ],
        impl,
        source=source,
    )


def _long_add(bits: int, feature: str, instruction: str) -> TensorPair:
    """Return additions of pairs of 16-bit sums to 32-bit sums, by ``pmaddwd``."""
    count = bits // 32

    def impl(short: Any, total: Any) -> Any:
        made, ones = [], T.Broadcast(T.int16(1), 2 * count)
        for first in range(0, LANES, count):
            where, pairs = T.Ramp(first, 1, count), short[T.Ramp(2 * first, 1, 2 * count)]
            added = T.call_llvm_pure_intrin(f"int32x{count}", instruction, pairs, ones)
            made.append((where, total[where] + added))
        return made

    def both(lane: Expr, short: Any) -> Expr:
        return T.Cast("int32", short[lane * 2]) + T.Cast("int32", short[lane * 2 + 1])

    return TensorPair(
        f"{feature}_long_add_2x{LANES}_s16",
        feature,
        (Operand((2 * LANES,), "int16"), Operand((LANES,), "int32")),
        LANES,
        lambda lane, short, total: [(lane, total[lane] + both(lane, short))],
        impl,
    )


SHORT_ADD = {
    bits: (_short_add(bits, feature, short), _long_add(bits, feature, long))
    for bits, feature, short, long in _SHORT
}
"""By vector size in bits: products of levels and codes are added in 16 bits, and those sums in
pairs in 32 bits."""


DOT_ADD_BFLOAT16 = dot_add(
    "bfloat16",
    partial(T.call_pure_extern, F32, "bnncc_dot_bfloat16"),
    "avx512_bf16",
    # An LLVM function, because TVM rewrites vectors of bfloat16 before LLVM sees them.
    source=f"""
declare <{LANES} x float> @llvm.x86.avx512bf16.dpbf16ps.512(
    <{LANES} x float>, <{2 * LANES} x bfloat>, <{2 * LANES} x bfloat>)
define linkonce_odr hidden <{LANES} x float> @bnncc_dot_bfloat16(
    <{LANES} x float> %sum, <{LANES} x i32> %data, <{LANES} x i32> %weight) alwaysinline nounwind {{
  %d = bitcast <{LANES} x i32> %data to <{2 * LANES} x bfloat>
  %w = bitcast <{LANES} x i32> %weight to <{2 * LANES} x bfloat>
  %r = call <{LANES} x float> @llvm.x86.avx512bf16.dpbf16ps.512(
      <{LANES} x float> %sum, <{2 * LANES} x bfloat> %d, <{2 * LANES} x bfloat> %w)
  ret <{LANES} x float> %r
}}
""",
)
"""As `DOT_ADD` does, but with two bfloat16 numbers per word."""


_TO_BFLOAT16 = f"""
declare <{LANES} x bfloat> @llvm.x86.avx512bf16.cvtneps2bf16.512(<{LANES} x float>)
define linkonce_odr hidden <{LANES} x i16> @bnncc_to_bfloat16(<{LANES} x float> %data)
    alwaysinline nounwind {{
  %h = call <{LANES} x bfloat> @llvm.x86.avx512bf16.cvtneps2bf16.512(<{LANES} x float> %data)
  %r = bitcast <{LANES} x bfloat> %h to <{LANES} x i16>
  ret <{LANES} x i16> %r
}}
"""

TO_BFLOAT16 = Intrinsic(
    f"avx512_bf16_round_{LANES}_f32",
    "avx512_bf16",
    (F32,),
    f"uint16x{LANES}",
    lambda lane, data: T.Cast("uint16", to_bfloat16(data(lane), flush=True)),
    partial(T.call_pure_extern, f"uint16x{LANES}", "bnncc_to_bfloat16"),
    source=_TO_BFLOAT16,
)
"""Convert float32 to bfloat16."""

ROUND_BFLOAT16 = TensorPair(
    f"avx512_bf16_round_store_{LANES}_f32",
    "avx512_bf16",
    (Operand((LANES,), "float32"), Operand((LANES,), "uint16")),
    LANES,
    lambda lane, data, made: [(lane, T.Cast("uint16", to_bfloat16(data[lane], flush=True)))],
    lambda data, made: [(T.Ramp(0, 1, LANES), TO_BFLOAT16(data[T.Ramp(0, 1, LANES)]))],
    fresh=True,
    source=_TO_BFLOAT16,
)
"""`TO_BFLOAT16` as a tensor pair."""


@dataclass(frozen=True)
class Interleave(Pair):
    """Round `LANES` pixels of few channels to bfloat16, with channels last and padded to words.

    A mask, which is 0 for rows that are outside the image, is applied to all elements.
    """

    spec: Conv2d
    """A convolution whose data it rounds."""

    feature = "avx512_bf16"

    @property
    def name(self) -> str:  # type: ignore[override]
        """Instruction set, number of channels, layout, and what stands for zero."""
        spec = self.spec
        zeros = "_".join(map(str, ("", *spec.zero_points)))
        return f"avx512_bf16_interleave_{spec.channels}_{spec.data_layout}{zeros}"

    @property
    def tensors(self) -> list[Operand]:
        """Data, the mask, and rounded pixels."""
        spec, (dtype,) = self.spec, {kind for _, kind in self.spec.data_types}
        planar = spec.data_layout == "NCHW"
        shape = (spec.channels, 1, LANES) if planar else (LANES, spec.channels)
        rounded = LANES, quantization.words_of_pixel(spec) * 2
        data = Operand(shape, dtype, strided=planar)
        return [data, Operand((1,), "uint16"), Operand(rounded, "uint16")]

    def write(self, half: str, buffers: list[Any]) -> None:
        """Write the body of one half."""
        data, mask, made = buffers
        spec, lanes = self.spec, made.shape[1]
        if half == "desc":
            with T.grid(int64(LANES), int64(int(lanes))) as loops, T.sblock("pixels"):
                x, lane = T.axis.remap("SS", loops)
                read = partial(self._element, data, x)
                element = half_of_pixel(spec, read, lane)
                T.buffer_store(made, T.bitwise_and(element, mask[0]), [x, lane])
            return
        # Not by a loop of the rule, because the pipeline of tiles takes loops apart.
        with imported(_TO_BFLOAT16):
            self._instructions(data, mask, made)

    def _element(self, data: Any, x: Any, channel: Any) -> Any:
        return data[(channel, 0, x) if self.spec.data_layout == "NCHW" else (x, channel)]

    def _instructions(self, data: Any, mask: Any, made: Any) -> None:
        count = int(made.shape[1])
        vectors = [self._rounded(data, j) for j in range(self.spec.channels)]
        vectors.append(T.Broadcast(T.uint16(0), LANES))
        for first in range(0, LANES * count, 2 * LANES):
            places = [divmod(first + i, count) for i in range(2 * LANES)]
            shuffled = tirx.Shuffle(vectors, [T.int32(self._place(*place)) for place in places])
            kept = T.bitwise_and(shuffled, T.Broadcast(mask[0], 2 * LANES))
            T.buffer_store(made, kept, [0, T.Ramp(first, 1, 2 * LANES)])

    def _place(self, x: int, lane: int) -> int:
        """Return where a channel of a pixel is in all loaded vectors; any zero is the last one."""
        channels = self.spec.channels
        if lane >= channels:
            return channels * LANES
        return lane * LANES + x if self.spec.data_layout == "NCHW" else x * channels + lane

    def _rounded(self, data: Any, number: int) -> Any:
        """Return a loaded vector as bfloat16."""
        spec, every = self.spec, T.Ramp(0, 1, LANES)
        planar = spec.data_layout == "NCHW"
        where = (number, 0, every) if planar else (0, T.Ramp(number * LANES, 1, LANES))
        vector = data[where]
        if spec.zero_points:
            of = [number if planar else (number * LANES + i) % spec.channels for i in range(LANES)]
            zeros = [T.int32(spec.zero_points[channel]) for channel in of]
            zero = tirx.Shuffle(zeros, [T.int32(i) for i in range(LANES)])
            vector = T.Cast(F32, T.Cast(I32, vector) - zero)
        return TO_BFLOAT16(vector)


def _carry_save(reach: int) -> TensorPair:
    """Count three taps of a kernel row, `reach` columns apart, at once.

    Carries count twice and are stored after the sums.
    """
    every, carries = T.Ramp(0, 1, LANES), T.Ramp(LANES, 1, LANES)

    def desc(lane: Expr, xors: Any, weight: Any, data: Any, total: Any) -> Any:
        x, y, z = (data[i * reach, 0] ^ weight[i, 0, lane] for i in range(3))
        ones = xors[0] ^ (weight[0, 0, lane] ^ weight[1, 0, lane] ^ weight[2, 0, lane])
        majority = (x & y) | ((x | y) & z)
        return [
            (lane, total[lane] + T.Cast("int32", T.popcount(ones))),
            (lane + LANES, total[lane + LANES] + T.Cast("int32", T.popcount(majority))),
        ]

    def impl(xors: Any, weight: Any, data: Any, total: Any) -> Any:
        rows = [weight[i, 0, every] for i in range(3)]
        # Bound to a name: otherwise LLVM may compute it again for the carry, and spill.
        ones = T.bind(T.Broadcast(xors[0], LANES) ^ (rows[0] ^ rows[1] ^ rows[2]))
        x, y = (T.Broadcast(data[i * reach, 0], LANES) ^ rows[i] for i in range(2))
        carry = TERNARY[CARRY, LANES](x, y, ones)
        return [
            (every, total[every] + T.Cast(I32, popcount(ones))),
            (carries, total[carries] + T.Cast(I32, popcount(carry))),
        ]

    return TensorPair(
        f"avx512vpopcntdq_carry_save_3x{LANES}_u32_{reach}",
        "avx512_vpopcntdq",
        (
            Operand((1,), "uint32"),
            Operand((3, 1, LANES), "uint32", strided=True),
            Operand((2 * reach + 1, 1), "uint32", strided=True),
            Operand((2 * LANES,), "int32"),
        ),
        LANES,
        desc,
        impl,
    )


CARRY_SAVE = {reach: _carry_save(reach) for reach in (1, 2, 3, 4)}
"""By distance in columns between taps: three data words, preceded by their XOR, and three rows of
weight words. ``popcount(x) + popcount(y) + popcount(z)`` is ``popcount(x ^ y ^ z)``, the sums, plus
twice ``popcount(majority(x, y, z))``, the carries."""

SIGNS = TensorPair(
    "avx512bw_signs_64_i8",
    "avx512bw",
    (Operand((1,), "uint64"), Operand((64,), "int8")),
    64,
    lambda lane, word, made: [(lane, T.Select(bit(word[0], lane), T.int8(1), T.int8(-1)))],
    lambda word, made: [(T.Ramp(0, 1, 64), _signs(T.reinterpret("uint1x64", word[0])))],
    fresh=True,
)
"""Expand bits to bytes, +1 and -1."""


def _signs(bits: Expr) -> Expr:
    one, other = (T.Broadcast(T.int8(value), 64) for value in (1, -1))
    return T.Select(T.Cast("boolx64", bits), one, other)


def _spread(lanes: int, signed: bool) -> TensorPair:
    def chosen(word: Expr, value: int, other: Expr) -> Expr:
        bits = T.Cast(f"boolx{lanes}", T.reinterpret(f"uint1x{lanes}", word[0]))
        return T.Select(bits, T.Broadcast(T.int8(value), lanes), other)

    def desc(lane: Expr, *buffers: Buffer) -> list[tuple[Expr, Expr]]:
        one, *kept, _ = buffers
        other = T.Select(bit(kept[0][0], lane), T.int8(-1), T.int8(0)) if kept else T.int8(0)
        return [(lane, T.Select(bit(one[0], lane), T.int8(1), other))]

    def impl(*buffers: Buffer) -> list[tuple[Expr, Expr]]:
        one, *kept, _ = buffers
        zeros = T.Broadcast(T.int8(0), lanes)
        other = chosen(kept[0], -1, zeros) if kept else zeros
        return [(T.Ramp(0, 1, lanes), chosen(one, 1, other))]

    words = (Operand((1,), f"uint{lanes}"),) * (1 + signed)
    name = f"avx512bw_{'signs_or_zeros' if signed else 'zeros_or_ones'}_{lanes}_i8"
    return TensorPair(
        name, "avx512bw", (*words, Operand((lanes,), "int8")), lanes, desc, impl, fresh=True
    )  # fmt: skip


SPREAD = {(lanes, signed): _spread(lanes, signed) for lanes in (32, 64) for signed in (False, True)}
"""By lanes, and whether there are signs: expand bits to bytes, +1 and 0, or +1 and -1; those that a
second word does not keep become 0."""


def _weights_of_codes(width: int) -> TensorPair:
    """Return the pair that decodes packed weights, a vector of them per instruction.

    ``vgf2p8affineqb`` multiplies each byte by a matrix of bits and inverts some bits of the
    product. Each bit of a weight is a bit of its code, inverted or not, or is always the same.
    """
    portable, size = WEIGHTS_OF_CODES[width], 4 * LANES
    kind = f"int8x{size}"
    step, first = CODES[width]

    def matrix(place: int) -> int:
        """Return the matrix: byte 7 - i holds the bits of a code byte that bit i depends on."""
        made = 0
        for source in range(width):
            changed = first ^ ((step << source) + first)
            for i in range(8):
                made |= (changed >> i & 1) << (8 * (7 - i) + width * place + source)
        return made - (made >> 63 << 64)

    def row(codes: Expr, place: int) -> Expr:
        bits = T.reinterpret(kind, T.Broadcast(T.int64(matrix(place)), size // 8))
        return T.call_llvm_pure_intrin(
            kind, "llvm.x86.vgf2p8affineqb.512", codes, bits, T.int8(first)
        )

    def impl(word: Any, made: Any) -> list[tuple[Expr, Expr]]:
        codes = T.bind(T.reinterpret(kind, word[T.Ramp(0, 1, LANES)]))
        return [((place, T.Ramp(0, 1, size)), row(codes, place)) for place in range(8 // width)]

    return replace(portable, name=f"gfni_{portable.name}", feature="gfni", impl=impl)


WEIGHTS_OF_CODES_GFNI = {width: _weights_of_codes(width) for width in CODES}
"""By bits per code: `WEIGHTS_OF_CODES` with one instruction per row."""
