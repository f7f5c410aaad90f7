"""Tensor intrinsics for any machine: LLVM selects the instructions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.schedules.intrin import Intrinsic, Operand, TensorPair, lanes
from bnncc.topi_binary.definitions import nibbles
from bnncc.topi_binary.definitions.terms import bfloat16, to_bfloat16
from bnncc.topi_binary.layout import LANES, NIBBLE_LANES

Expr = Any

F32 = f"float32x{LANES}"
I32 = f"int32x{LANES}"
U32 = f"uint32x{LANES}"


def _total(terms: list[Expr]) -> Expr:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


fused_multiply_add = Intrinsic(
    f"fused_multiply_add_{LANES}_f32",
    "",
    (F32, F32, F32),
    F32,
    lambda lane, a, b, c: a(lane) * b(lane) + c(lane),
    # Rounded once if the machine has FMA, otherwise twice; never a library call.
    lambda a, b, c: T.call_llvm_pure_intrin(F32, "llvm.fmuladd", a, b, c),
    bounds={i: (-512, 512) for i in range(3)},
)


def multiply_add(a: Expr, b: Expr, c: Expr) -> Expr:
    """Return ``a * b + c`` for any number of lanes, rounded as by `fused_multiply_add`."""
    return T.call_llvm_pure_intrin(str(a.ty), "llvm.fmuladd", a, b, c)


def _rounded(value: Expr) -> Expr:
    one, low, high = (
        T.Broadcast(tirx.IntImm("uint32", number), LANES) for number in (1, 0x7FFF, 0xFFFF0000)
    )
    bits = T.bind(T.reinterpret(f"uint32x{LANES}", value))
    odd = T.bitwise_and(T.shift_right(bits, T.Broadcast(T.uint32(16), LANES)), one)
    return T.reinterpret(F32, T.bitwise_and(bits + low + odd, high))


rounded_to_bfloat16 = Intrinsic(
    f"round_to_bfloat16_{LANES}_f32",
    "",
    (F32,),
    F32,
    lambda lane, data: bfloat16(to_bfloat16(data(lane))),
    _rounded,
)
"""Round to the nearest bfloat16, ties to even; results as float32."""

round_to_even = Intrinsic(
    f"round_to_even_{LANES}_f32",
    "",
    (F32,),
    F32,
    lambda lane, x: T.nearbyint(x(lane)),
    lambda x: T.call_llvm_pure_intrin(F32, "llvm.nearbyint", x),
)


def _bit(lane: Expr, condition: Expr) -> Expr:
    return T.shift_left(T.Cast("uint64", condition), T.Cast("uint64", lane))


def _mask(count: int) -> Intrinsic:
    return Intrinsic(
        f"mask_{count}",
        "",
        (f"boolx{count}",),
        f"uint{count}",
        lambda lane, x: T.Cast(f"uint{count}", _total([_bit(i, x(i)) for i in range(count)])),
        lambda x: T.reinterpret(f"uint{count}", T.Cast(f"uint1x{count}", x)),
    )


MASKS = {count: _mask(count) for count in (8, 16, 32, 64)}


def mask(condition: Expr, count: int = LANES) -> Expr:
    """Return a vector of booleans as the bits of an integer, lane 0 lowest."""
    return MASKS[count](condition)


def _ones(kind: str) -> Intrinsic:
    bits = int(kind.partition("x")[0].removeprefix("uint"))

    def desc(lane: Expr, x: Any) -> Expr:
        def bit(number: int) -> Expr:
            moved = T.shift_right(T.Cast("uint32", x(lane)), tirx.IntImm("uint32", number))
            return T.bitwise_and(moved, tirx.IntImm("uint32", 1))

        return T.Cast(f"uint{bits}", _total([bit(number) for number in range(bits)]))

    return Intrinsic(f"popcount_{lanes(kind)}_u{bits}", "", (kind,), kind, desc, T.popcount)


POPCOUNTS = {kind: _ones(kind) for kind in ("uint8x16", "uint8x64", "uint32x4", "uint32x16")}


def popcount(value: Expr) -> Expr:
    """Return the popcount of each lane, or of a scalar."""
    return T.popcount(value)


# The sign of the difference is already a bit, while the result of a comparison would have to be
# converted. Written in LLVM IR, because LLVM turns TVM's subtraction (no signed overflow) back
# into a comparison.
less = Intrinsic(
    f"less_{LANES}_i32",
    "",
    (I32, I32),
    f"uint32x{LANES}",
    lambda lane, a, b: T.Cast("uint32", a(lane) < b(lane)),
    partial(T.call_pure_extern, f"uint32x{LANES}", "bnncc_less"),
    source="""
define linkonce_odr hidden <16 x i32> @bnncc_less(<16 x i32> %a, <16 x i32> %b) alwaysinline {
  %d = sub <16 x i32> %a, %b
  %s = lshr <16 x i32> %d, splat (i32 31)
  ret <16 x i32> %s
}
""",
    bounds={0: (-(2**30), 2**30), 1: (-(2**30), 2**30)},
)


def _count(bits: Expr) -> Expr:
    return T.Cast("int32", T.popcount(bits))


def _counting(name: str, combined: Callable[[Expr, Expr], Expr], sign: int = 1) -> TensorPair:
    def impl(data: Any, weight: Any, total: Any) -> list[tuple[Expr, Expr]]:
        every = T.Ramp(0, 1, LANES)
        bits = combined(T.Broadcast(data[0], LANES), weight[every])
        count = T.Cast(I32, popcount(bits))
        return [(every, total[every] + count if sign > 0 else total[every] - count)]

    def desc(lane: Expr, data: Any, weight: Any, total: Any) -> list[tuple[Expr, Expr]]:
        count = _count(combined(data[0], weight[lane]))
        return [(lane, total[lane] + count if sign > 0 else total[lane] - count)]

    return TensorPair(
        f"{name}_1x{LANES}_u32",
        "",
        (Operand((1,), "uint32"), Operand((LANES,), "uint32"), Operand((LANES,), "int32")),
        LANES,
        desc,
        impl,
    )


XOR_POPCOUNT = _counting("xor_popcount_add", T.bitwise_xor)
"""XOR one data word with the weight words of `LANES` output channels, and add the popcounts.

Two instructions with AVX-512 VPOPCNTDQ; elsewhere LLVM counts in bytes."""


def _counting_words(count: int) -> TensorPair:
    every = T.Ramp(0, 1, LANES)

    def halved(sums: Expr, bits: int, mask: int) -> Expr:
        """Add adjacent fields of `bits` bits."""
        by, low = (T.Broadcast(tirx.IntImm("uint32", one), LANES) for one in (bits, mask))
        return T.bitwise_and(sums, low) + T.bitwise_and(T.shift_right(sums, by), low)

    def impl(data: Any, weight: Any, total: Any) -> list[tuple[Expr, Expr]]:
        counts = []
        for word in range(count):
            bits = T.bitwise_xor(T.Broadcast(data[word], LANES), weight[word, every])
            counts.append(popcount(T.reinterpret(f"uint8x{4 * LANES}", bits)))
        sums = T.bind(T.reinterpret(U32, _total(counts)))
        pairs = T.bind(halved(sums, 8, 0xFF00FF))
        return [(every, total[every] + T.Cast(I32, halved(pairs, 16, 0xFFFF)))]

    return TensorPair(
        f"xor_popcount_add_{count}x{LANES}_u32",
        "",
        (
            Operand((count,), "uint32"),
            Operand((count, LANES), "uint32", strided=True),
            Operand((LANES,), "int32"),
        ),
        LANES,
        lambda lane, word, data, weight, total: [
            (lane, total[lane] + _count(T.bitwise_xor(data[word], weight[word, lane])))
        ],
        impl,
        terms=count,
    )


MOST_WORDS = 16
"""Maximum number of words whose popcounts are added as bytes; their sums fit up to 31."""

XOR_POPCOUNT_WORDS = {count: _counting_words(count) for count in range(2, MOST_WORDS + 1)}
"""By number of words: XOR consecutive data words with weight words, and add the popcounts.

Where there is no instruction for popcounts of words, LLVM counts in bytes. Those are added first
here, and widened to 32 bits once for all words."""

AND_POPCOUNT = {
    1: _counting("and_popcount_add", T.bitwise_and),
    -1: _counting("and_popcount_subtract", T.bitwise_and, -1),
}
"""By sign: the same with AND instead of XOR; popcounts are added or subtracted."""


def _split_add(size: int) -> TensorPair:
    every, four = T.Ramp(0, 1, size), T.Broadcast(T.uint8(4), size)
    second = T.Ramp(size, 1, size)
    return TensorPair(
        f"split_add_{size}_u8",
        "",
        (Operand((size,), "uint8"), Operand((2 * size,), "uint8")),
        size,
        lambda lane, both, total: [
            (lane, total[lane] + both[lane]),
            (lane + size, total[lane + size] + T.shift_right(both[lane], T.uint8(4))),
        ],
        lambda both, total: [
            (every, total[every] + both[every]),
            (second, total[second] + T.shift_right(both[every], four)),
        ],
    )


SPLIT_ADD = {size: _split_add(size) for size in (16, 32, 64)}
"""By vector size in bytes: add bytes to sums modulo 256, and their high halves to other sums."""


def _widening_add(size: int) -> TensorPair:
    half, unit = size // 2, max(size, NIBBLE_LANES)

    def impl(narrow: Any, total: Any) -> Any:
        made, four = [], T.Broadcast(T.uint8(4), size)
        for vector in range(unit // size):
            both, second = (narrow[T.Ramp((2 * vector + k) * size, 1, size)] for k in range(2))
            for row, value in enumerate((both - T.shift_left(second, four), second)):
                pair = T.reinterpret(f"uint16x{half}", value)
                for start, one in ((0, pair), (unit // 2, pair >> T.Broadcast(T.uint16(8), half))):
                    where = T.Ramp(row * unit + start + vector * half, 1, half)
                    made.append((where, total[where] + one))
        return made

    return TensorPair(
        f"widening_add_{unit // size}x{size}_u8",
        "",
        (Operand((2 * unit,), "uint8"), Operand((2 * unit,), "uint16")),
        unit // 2,
        lambda lane, narrow, total: [
            (at, total[at] + value)
            for at, value in nibbles.widened(lambda k: narrow[k], lane, size)
        ],
        impl,
    )


WIDENING_ADD = {size: _widening_add(size) for size in (16, 32, 64)}
"""By vector size in bytes: add the sums of `SPLIT_ADD` in 16 bits, at least `NIBBLE_LANES` of them:
those of the low halves, then those of the high halves. Pairs of bytes are added as ``even + 256 *
odd``, and the odd bytes to sums of their own."""


def _nibble(data: Any, number: Expr) -> Expr:
    return T.shift_right(data[number // 2], T.Cast("uint8", number % 2 * 4)) & T.uint8(15)


def _spread(count: int) -> TensorPair:
    def impl(data: Any, rows: Any) -> Any:
        wide = T.Cast(f"uint16x{count}", data[T.Ramp(0, 1, count)])
        four, low = (T.Broadcast(T.uint16(k), count) for k in (4, 0x0F0F))
        both = (wide | (wide << four)) & low
        return [(T.Ramp(0, 1, 2 * count), T.reinterpret(f"uint8x{2 * count}", both))]

    return TensorPair(
        f"spread_nibbles_{count}_u8",
        "",
        (Operand((count,), "uint8"), Operand((2 * count,), "uint8")),
        2 * count,
        lambda lane, data, rows: [(lane, _nibble(data, lane))],
        impl,
        fresh=True,
    )


SPREAD_NIBBLES = {count: _spread(count) for count in (4, 8, 16, 32)}
"""By number of bytes: their nibbles, low ones first, become bytes."""


def _multiply_add(shared: bool, count: int) -> TensorPair:
    def impl(data: Any, weight: Any, total: Any) -> list[tuple[Expr, Expr]]:
        every = T.Ramp(0, 1, count) if count > 1 else 0
        datum = T.Broadcast(data[0], count) if shared else data[every]
        kind = f"float32x{count}" if count > 1 else "float32"
        operands = datum, weight[every], total[every]
        return [(every, T.call_llvm_pure_intrin(kind, "llvm.fmuladd", *operands))]

    def operand(size: int) -> Operand:
        return Operand((size,), "float32", bounds=(-512, 512))

    return TensorPair(
        f"multiply_add_{'1x' if shared else ''}{count}_f32",
        "",
        (operand(1 if shared else count), operand(count), operand(count)),
        count,
        lambda lane, data, weight, total: [
            (lane, total[lane] + data[0 if shared else lane] * weight[lane])
        ],
        impl,
    )


MULTIPLY_ADD = _multiply_add(True, LANES)
"""Multiply one data element by the weights of `LANES` output channels and add (FMA if any)."""

MULTIPLY_ADD_LANES = {count: _multiply_add(False, count) for count in range(1, LANES + 1)}
"""By lanes: the same with a data element and a weight per lane."""


MAX = TensorPair(
    "max_16_f32",
    "",
    (Operand((LANES,), "float32", bounds=(-512, 512)),) * 2,
    LANES,
    lambda lane, data, held: [(lane, T.max(held[lane], data[lane]))],
    lambda data, held: [
        (T.Ramp(0, 1, LANES), T.max(*(x[T.Ramp(0, 1, LANES)] for x in (held, data))))
    ],
)
"""Take the maximum of an accumulator and data, lane by lane."""


class _Packing(TensorPair):
    """Packs conditions into the bits of an integer; the loop over lanes is a sum."""

    def write(self, half: str, buffers: list[Any]) -> None:
        """Write the body of one half."""
        lanes, bits = buffers
        if half == "impl":
            every = lanes[T.Ramp(0, 1, self.lanes)]
            found = mask(every != T.Broadcast(T.uint32(0), self.lanes), self.lanes)
            T.buffer_store(bits, bits[0] | found, [0])
            return
        with T.serial(self.lanes) as loop, T.sblock("update"):
            lane = T.axis.reduce(self.lanes, loop)
            one = T.shift_left(T.Cast(bits.dtype, lanes[lane]), T.Cast(bits.dtype, lane))
            T.buffer_store(bits, T.bitwise_or(bits[0], one), [0])


PACK = _Packing(
    f"pack_{LANES}_b",
    "",
    (Operand((LANES,), "uint32", bounds=(0, 1)), Operand((1,), f"uint{LANES}", bounds=(0, 0))),
    LANES,
    lambda *_: [],
    lambda *_: [],
)
"""Pack `LANES` conditions into half a word."""


QUAD = 4
"""32-bit lanes that a vector has on every target; `_Transposing` moves them as a unit."""


class _Transposing(TensorPair):
    """Transposes rows of lanes to rows of columns.

    Groups of `QUAD` lanes are loaded directly to the position of their columns, which leaves two of
    the four rounds of shuffles that loading whole rows would need.
    """

    def write(self, half: str, buffers: list[Any]) -> None:
        """Write the body of one half."""
        rows, made = buffers
        columns, count = self.terms, self.lanes
        if half == "desc":
            with T.grid(count, columns) as loops, T.sblock("update"):
                lane, column = T.axis.remap("SS", list(loops))
                T.buffer_store(made, rows[column, lane], [lane, column])
            return
        whole = count - count % QUAD
        for first in range(0, whole, QUAD):
            pieces = [
                [rows[j, T.Ramp(first, 1, QUAD)] for j in range(i, columns, QUAD)]
                for i in range(QUAD)
            ]
            quads = [T.Bind(_shuffled(piece, range(columns))) for piece in pieces]
            for lane, row in enumerate(_transposed_quads(quads, columns)):
                T.buffer_store(made, row, [first + lane, T.Ramp(0, 1, columns)])
        for lane in range(whole, count):
            for column in range(columns):
                T.buffer_store(made, rows[column, lane], [lane, column])


def _transposed_quads(rows: list[Expr], count: int) -> list[Expr]:
    """Transpose the `QUAD` x `QUAD` tiles that lie side by side in `QUAD` rows of `count` lanes."""

    def joined(one: Expr, other: Expr, places: tuple[int, ...]) -> Expr:
        """Select positions of each tile from two rows; those of the second start at `QUAD`."""
        lanes = [
            first + place % QUAD + place // QUAD * count
            for first in range(0, count, QUAD) for place in places
        ]  # fmt: skip
        return T.Bind(_shuffled([one, other], lanes))

    a, b, c, d = rows
    low, high = (0, 4, 1, 5), (2, 6, 3, 7)
    pairs = [joined(one, other, side) for side in (low, high) for one, other in ((a, b), (c, d))]
    return [
        joined(pairs[side], pairs[side + 1], half)
        for side in (0, 2) for half in ((0, 1, 4, 5), (2, 3, 6, 7))
    ]  # fmt: skip


def picked(vectors: list[Expr], lanes: Iterable[int]) -> Expr:
    """Return a vector of the `lanes` of `vectors`, or one of them."""
    return tirx.Shuffle(vectors, [tirx.IntImm("int32", lane) for lane in lanes])


def _shuffled(vectors: list[Expr], lanes: Iterable[int]) -> Expr:
    return vectors[0] if len(vectors) == 1 else picked(vectors, lanes)


def _transpose(columns: int, count: int) -> TensorPair:
    kinds = (columns, count), (count, columns)
    return _Transposing(
        f"transpose_{columns}x{count}_f32",
        "",
        tuple(Operand(shape, "float32", strided=True) for shape in kinds),
        count,
        lambda *_: [],
        lambda *_: [],
        terms=columns,
        fresh=True,
    )


TRANSPOSE = {
    (columns, count): _transpose(columns, count)
    for columns in (QUAD, 2 * QUAD)
    for count in range(QUAD, LANES + 1)
}
"""By number of columns and of lanes: rows of lanes become rows of columns."""


def _load_first(count: int, masked: bool) -> TensorPair:
    every, here = T.Ramp(0, 1, LANES), T.Ramp(T.int32(0), T.int32(1), LANES)

    def desc(lane: Expr, source: Any, made: Any) -> list[tuple[Expr, Expr]]:
        return [(lane, T.if_then_else(lane < count, source[lane], T.float32(0)))]

    def mask_of(source: Any, made: Any) -> list[tuple[Expr, Expr]]:
        where, zeros = T.address_of(source[0]), T.Broadcast(T.float32(0), LANES)
        some = here < T.Broadcast(T.int32(count), LANES)
        name = f"llvm.masked.load.v{LANES}f32.p0"
        return [(every, T.call_llvm_intrin(F32, name, where, some, zeros))]

    def parts(source: Any, made: Any) -> list[tuple[Expr, Expr]]:
        found, first = [(every, T.Broadcast(T.float32(0), LANES))], 0
        for size in (8, 4, 2, 1):
            if count & size:
                lanes = T.Ramp(first, 1, size) if size > 1 else T.int32(first)
                found.append((lanes, source[lanes]))
                first += size
        return found

    operand = Operand((LANES,), "float32", bounds=(-512, 512))
    return TensorPair(
        f"{'avx_' if masked else ''}load_{count}_of_{LANES}_f32",
        "avx" if masked else "",
        (operand, operand),
        LANES,
        desc,
        mask_of if masked else parts,
        fresh=True,
    )


LOAD_FIRST = {
    (count, masked): _load_first(count, masked)
    for count in range(1, LANES)
    for masked in (False, True)
}
"""By number of existing lanes out of `LANES`, and whether by a mask: load those, and zeros for the
rest. Memory beyond them is not accessed."""
