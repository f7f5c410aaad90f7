"""Tensor intrinsics of NEON, on 64-bit and 32-bit Arm, and of the DSP extension of Cortex-M."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from tvm.tirx.script import builder as T

from bnncc.schedules.intrin import Intrinsic, Operand, TensorPair
from bnncc.schedules.intrin_levels import Dot, code_pairs, dot_bytes, in_pieces, one_by_one
from bnncc.schedules.intrin_portable import popcount
from bnncc.topi_binary.layout import QUAD

Expr = Any

BYTES = 16
"""Bytes per vector."""

FEATURES = {"aarch64": "asimd", "arm": "neon"}
"""Feature of a `TargetSpec` that stands for NEON."""

_PREFIX = {"aarch64": "neon", "arm": "neon32"}

_WIDEN = {
    ("aarch64", 8): "llvm.aarch64.neon.uaddlp.v8i16.v16i8",
    ("aarch64", 16): "llvm.aarch64.neon.uaddlp.v4i32.v8i16",
    ("arm", 8): "llvm.arm.neon.vpaddlu.v8i16.v16i8",
    ("arm", 16): "llvm.arm.neon.vpaddlu.v4i32.v8i16",
}
_ADD_PAIRS = {
    8: "llvm.aarch64.neon.addp.v16i8",
    16: "llvm.aarch64.neon.addp.v8i16",
    32: "llvm.aarch64.neon.addp.v4i32",
}


def _widening(arch: str, bits: int) -> Intrinsic:
    count, wide = 128 // bits, 2 * bits
    result = f"uint{wide}x{count // 2}"
    return Intrinsic(
        f"{_PREFIX[arch]}_widening_add_pairs_{count}_u{bits}",
        FEATURES[arch],
        (f"uint{bits}x{count}",),
        result,
        lambda lane, x: T.Cast(f"uint{wide}", x(2 * lane)) + T.Cast(f"uint{wide}", x(2 * lane + 1)),
        lambda x: T.call_llvm_pure_intrin(result, _WIDEN[arch, bits], x),
    )


WIDENING_ADD_PAIRS = {(arch, bits): _widening(arch, bits) for arch, bits in _WIDEN}
"""By architecture and bits per lane: add adjacent lanes, into lanes twice as wide."""


def _add_pairs(arch: str, bits: int, low: Expr, high: Expr) -> Expr:
    """Add adjacent lanes: those of `low` give the lower half of the result, of `high` the upper."""
    count = 128 // bits
    if arch == "aarch64":
        return T.call_llvm_pure_intrin(f"uint{bits}x{count}", _ADD_PAIRS[bits], low, high)
    both = [T.Bind(low), T.Bind(high)]
    even, odd = (T.Shuffle(both, [T.int32(i) for i in range(k, 2 * count, 2)]) for k in (0, 1))
    return even + odd


def _dot(total: Expr, a: Expr, b: Expr) -> Expr:
    """Add four products of bytes to each lane (Armv8.2 dot product)."""
    return T.call_llvm_pure_intrin("uint32x4", "llvm.aarch64.neon.udot.v4i32.v16i8", total, a, b)


def _vector(number: int, lanes: int) -> Expr:
    return T.Ramp(number * lanes, 1, lanes)


def mask(first: int, last: int) -> Expr:
    """Return a vector of bytes with all bits set in bytes [first, last) and clear elsewhere."""
    number = T.Ramp(T.int32(0), T.int32(1), BYTES)
    low, high = (T.Broadcast(T.int32(k), BYTES) for k in (first, last))
    ones, zeros = (T.Broadcast(T.uint8(k), BYTES) for k in (255, 0))
    return T.Select(T.And(number >= low, number < high), ones, zeros)


def _xor_popcount(kept: int, dot_product: bool) -> TensorPair:
    width = 4 if dot_product else BYTES  # lanes per vector of sums

    def differing(lane: Expr, data: Any, weight: Any) -> Expr:
        byte = data[lane % BYTES]
        if kept < BYTES:
            byte = T.Select(lane % BYTES < kept, byte, T.uint8(0))
        return T.popcount(byte ^ weight[lane])

    def desc(lane: Expr, data: Any, weight: Any, total: Any) -> Any:
        if not dot_product:
            return [(lane, total[lane] + differing(lane, data, weight))]
        four = [T.Cast("uint32", differing(lane * 4 + i, data, weight)) for i in range(4)]
        return [(lane, total[lane] + (four[0] + four[1] + four[2] + four[3]))]

    def impl(data: Any, weight: Any, total: Any) -> Any:
        # Interleaved, so that no instruction waits for the one before it.
        weights = [T.Bind(weight[_vector(i, BYTES)]) for i in range(QUAD)]
        vector = data[_vector(0, BYTES)]
        vector = T.Bind(vector if kept == BYTES else vector & mask(0, kept))
        differ = [T.Bind(vector ^ one) for one in weights]
        counts = [T.Bind(popcount(bits)) for bits in differ]
        ones = T.Broadcast(T.uint8(1), BYTES)
        sums = [(where, total[where]) for where in (_vector(i, width) for i in range(QUAD))]
        return [
            (where, _dot(old, count, ones) if dot_product else old + count)
            for (where, old), count in zip(sums, counts, strict=True)
        ]

    return TensorPair(
        f"neon_xor_popcount_{'dot' if dot_product else 'add'}_{QUAD}x{kept}_u8",
        "asimddp" if dot_product else "",
        (
            Operand((BYTES,), "uint8"),
            Operand((QUAD * BYTES,), "uint8"),
            Operand((QUAD * width,), "uint32" if dot_product else "uint8"),
        ),
        QUAD * width,
        desc,
        impl,
    )


XOR_POPCOUNT = {
    (kept, dot_product): _xor_popcount(kept, dot_product)
    for kept in (4, 8, 12, BYTES)
    for dot_product in (False, True)
}
"""XOR a data vector, whole or its first bytes only, with the weights of four channels. Popcounts
are added to sums per byte or, with the dot product, to sums over four bytes."""


def _widening_add(arch: str) -> TensorPair:
    def desc(lane: Expr, narrow: Any, total: Any) -> Any:
        low, high = (T.Cast("uint16", narrow[lane * 2 + side]) for side in range(2))
        return [(lane, total[lane] + (low + high))]

    def impl(narrow: Any, total: Any) -> Any:
        pairs = [WIDENING_ADD_PAIRS[arch, 8](narrow[_vector(i, BYTES)]) for i in range(QUAD)]
        places = [_vector(i, 8) for i in range(QUAD)]
        return [(place, total[place] + pair) for place, pair in zip(places, pairs, strict=True)]

    return TensorPair(
        f"{_PREFIX[arch]}_widening_add_{QUAD}x{BYTES}_u8",
        FEATURES[arch],
        (Operand((QUAD * BYTES,), "uint8"), Operand((QUAD * 8,), "uint16")),
        QUAD * 8,
        desc,
        impl,
    )


WIDENING_ADD = {arch: _widening_add(arch) for arch in FEATURES}
"""By architecture: pairs of bytes of four vectors are added to 16-bit sums."""


def _together(arch: str, vectors: Sequence[Expr], bits: int, narrow: int) -> Expr:
    """Add the lanes of each of four vectors, to two 16-bit lanes or one 32-bit lane per vector.

    `narrow` is the number of pairwise additions that are done in 8 bits before widening.
    """
    while len(vectors) > 1:
        if bits == 8 and not narrow:
            vectors, bits = [WIDENING_ADD_PAIRS[arch, 8](value) for value in vectors], 16
        narrow -= 1
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [_add_pairs(arch, bits, *pair) for pair in pairs]
    return WIDENING_ADD_PAIRS[arch, 8](vectors[0]) if bits == 8 else vectors[0]


def _total(arch: str, bits: int, narrow: int, halves: bool, scope: str = "local") -> TensorPair:
    per = 128 // bits  # lanes per channel
    most = {8: 255 >> narrow, 16: 2**16 // 8 - 1, 32: 2**20}[bits]

    def desc(lane: Expr, sums: Any, total: Any) -> Any:
        first, count = lane * per, per
        if halves:
            first, count = lane % QUAD * per + lane // QUAD * (per // 2), per // 2
        return [(lane, sum((T.Cast("int32", sums[first + i]) for i in range(count)), T.int32(0)))]

    def impl(sums: Any, total: Any) -> Any:
        vectors = [sums[_vector(i, per)] for i in range(QUAD)]
        if bits == 32 and halves:
            pairs = [T.Bind(_add_pairs(arch, 32, *vectors[i : i + 2])) for i in (0, 2)]
            sides = [T.Shuffle(pairs, [T.int32(i) for i in range(side, 8, 2)]) for side in (0, 1)]
        elif bits == 32:
            sides = [_together(arch, vectors, bits, 0)]
        elif halves:
            both = T.Bind(T.reinterpret("uint32x4", _together(arch, vectors, bits, narrow)))
            low, high = (T.Broadcast(T.uint32(k), 4) for k in (0xFFFF, 16))
            sides = [both & low, both >> high]
        else:
            sides = [WIDENING_ADD_PAIRS[arch, 16](_together(arch, vectors, bits, narrow))]
        return [(_vector(i, QUAD), T.reinterpret("int32x4", v)) for i, v in enumerate(sides)]

    lanes = QUAD * (1 + halves)
    name = f"{QUAD}x{per}_u{bits}" + (f"_{narrow}" if bits == 8 else "")
    name += "_memory" * (scope == "global")
    return TensorPair(
        f"{_PREFIX[arch]}_{'halves' if halves else 'total'}_{name}",
        FEATURES[arch],
        # Separate from the sums: LLVM does not keep an array in registers if an index is unknown.
        (
            Operand((QUAD * per,), f"uint{bits}", bounds=(0, most)),
            Operand((lanes,), "int32", scope=scope),
        ),
        lanes,
        desc,
        impl,
        fresh=True,
    )


TOTAL = {
    (arch, bits, narrow, halves): _total(arch, bits, narrow, halves)
    for arch in FEATURES
    for bits, narrow in ((8, 0), (8, 1), (8, 2), (16, 0), (32, 0))
    for halves in (False, True)
    if arch == "aarch64" or bits < 32
}
"""By architecture, bits per lane, number of additions in 8 bits, and whether the halves of a vector
belong to different columns: add the lanes of four vectors; lower halves come first."""

TOTAL_IN_MEMORY = {
    (arch, bits): _total(arch, bits, 0, False, "global") for arch in FEATURES for bits in (8, 16)
}
"""By architecture and bits per lane: the same, stored to a tensor in memory."""


def _dot_codes(total: Expr, levels: Sequence[Expr], codes: Sequence[Expr]) -> Expr:
    """Multiply levels and codes with the dot product of Armv8.2."""
    made = T.reinterpret("uint32x4", total)
    for pair in zip(levels, codes, strict=True):
        made = _dot(made, *(T.reinterpret("uint8x16", word) for word in pair))
    return T.reinterpret("int32x4", made)


def _multiplied(arch: str, total: Expr, levels: Sequence[Expr], codes: Sequence[Expr]) -> Expr:
    """Multiply levels and codes to 16-bit products; eight products of a channel fit in 16 bits."""
    sides: list[Expr] = []
    for first in (0, 8):
        lanes = [T.int32(first + i) for i in range(8)]
        made: Expr = None
        for pair in zip(levels, codes, strict=True):
            one, other = (
                T.Cast("uint16x8", T.Shuffle([T.reinterpret("uint8x16", word)], lanes))
                for word in pair
            )
            made = one * other if made is None else made + one * other
        sides.append(T.Bind(made))
    added = WIDENING_ADD_PAIRS[arch, 16](_add_pairs(arch, 16, *sides))
    return total + T.reinterpret("int32x4", added)


def _signed_dot(total: Expr, data: Expr, weight: Expr) -> Expr:
    operands = [T.reinterpret("int8x16", word) for word in (data, weight)]
    name = "llvm.aarch64.neon.sdot.v4i32.v16i8"
    return T.call_llvm_pure_intrin("int32x4", name, total, *operands)


def _unsigned_by_signed(total: Expr, data: Expr, weight: Expr) -> Expr:
    """Multiply levels less 128, which are signed bytes, and subtract -128 times the weights.

    The second dot product is the same for all columns of a tile.
    """
    low = T.Broadcast(T.uint32(0x80808080), 4)
    none = T.Broadcast(T.int32(0), 4)
    made = _signed_dot(total, T.bitwise_xor(data, low), weight)
    return made - T.Bind(_signed_dot(none, low, weight))


_SIGNED_WIDEN = {
    "aarch64": "llvm.aarch64.neon.saddlp.v4i32.v8i16",
    "arm": "llvm.arm.neon.vpaddls.v4i32.v8i16",
}


def _widening_dot(arch: str, total: Expr, data: Expr, weight: Expr) -> Expr:
    """Multiply to 16 bits, in which two products of a signed byte and 7 bits fit, and add pairs."""
    sides: list[Expr] = []
    for first in (0, 8):
        lanes = [T.int32(first + i) for i in range(8)]
        one, other = (
            T.Cast("int16x8", T.Shuffle([T.reinterpret("int8x16", word)], lanes))
            for word in (data, weight)
        )
        sides.append(T.reinterpret("uint16x8", one * other))
    pairs = T.reinterpret("int16x8", _add_pairs(arch, 16, *sides))
    return total + T.call_llvm_pure_intrin("int32x4", _SIGNED_WIDEN[arch], pairs)


def _dsp(total: Expr, data: Expr, weight: Expr, kind: str = "s") -> Expr:
    """Multiply bytes two at a time, after their extension to halves of a word.

    `kind` is the one of the weights: ``s`` if they are signed, ``u`` if not.
    """

    def halves(word: Expr, kind: str) -> list[Expr]:
        moved = T.call_llvm_pure_intrin("uint32", "llvm.fshr.i32", word, word, T.uint32(8))
        name = f"llvm.arm.{kind}xtb16"
        return [T.call_llvm_pure_intrin("int32", name, one) for one in (word, moved)]

    for pair in zip(halves(data, "u"), halves(weight, kind), strict=True):
        total = T.call_llvm_pure_intrin("int32", "llvm.arm.smlad", *pair, total)
    return total


_CODES: list[tuple[int, str, str, Dot]] = [
    *((4, FEATURES[arch], _PREFIX[arch], partial(_multiplied, arch)) for arch in FEATURES),
    (4, "asimddp", "neon_dot", _dot_codes),
    (1, "dsp", "dsp", one_by_one(partial(_dsp, kind="u"))),
]

DOT_ADD_CODES = [
    (32 * lanes, code_pairs(partial(in_pieces, lanes, dot), feature, prefix))
    for lanes, feature, prefix, dot in _CODES
]
"""As in `intrin_x86`."""


DOT_ADD = (
    *((128, dot_bytes(partial(in_pieces, 4, one_by_one(partial(_widening_dot, arch))), feature, 7))
      for arch, feature in FEATURES.items()),
    (128, dot_bytes(partial(in_pieces, 4, one_by_one(_unsigned_by_signed)), "asimddp")),
    (128, dot_bytes(partial(in_pieces, 4, one_by_one(_signed_dot)), "asimddp", 7)),
    (32, dot_bytes(partial(in_pieces, 1, one_by_one(_dsp)), "dsp")),
)  # fmt: skip
"""As in `intrin_x86`."""
