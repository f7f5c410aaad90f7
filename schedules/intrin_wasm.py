"""Tensor intrinsics of WebAssembly's SIMD128."""

from __future__ import annotations

from functools import partial

from tvm.tirx.script import builder as T

from bnncc.schedules import intrin_x86
from bnncc.schedules.intrin import Intrinsic
from bnncc.schedules.intrin_levels import dot_add
from bnncc.schedules.intrin_portable import F32, I32
from bnncc.schedules.intrin_portable import MASKS as PLAIN_MASKS
from bnncc.topi_binary.layout import LANES

FEATURE = "simd128"
"""Feature of a `TargetSpec` that stands for SIMD128."""

LOOKUP_ADD = {16: intrin_x86.lookup_add(intrin_x86.lookup(16, FEATURE, "llvm.wasm.swizzle"))}
"""By vector size in bytes, as on x86: ``i8x16.swizzle``."""

_DOT = intrin_x86.dot_pairs(128, FEATURE, "llvm.wasm.dot")

DOT_ADD = ((128, dot_add("int16", _DOT, FEATURE, source=_DOT.source)),)
"""As in `intrin_x86`: ``i32x4.dot_i16x8_s``."""


def _floats() -> str:
    """Return LLVM IR that converts `LANES` integers to floats, four at a time.

    LLVM extracts lanes one by one if the integers were extended from 16 bits. To hide that from
    it, each half of them is replaced by its average with itself.
    """
    whole = f"<{LANES} x i32>"
    lines = [
        "declare <8 x i16> @llvm.wasm.avgr.unsigned.v8i16(<8 x i16>, <8 x i16>)",
        f"define linkonce_odr hidden <{LANES} x float> @bnncc_floats({whole} %x) alwaysinline {{",
    ]
    made = []
    for first in range(0, LANES, 4):
        lanes = ", ".join(f"i32 {first + i}" for i in range(4))
        lines += [
            f"  %a{first} = shufflevector {whole} %x, {whole} poison, <4 x i32> <{lanes}>",
            f"  %b{first} = bitcast <4 x i32> %a{first} to <8 x i16>",
            f"  %c{first} = call <8 x i16> @llvm.wasm.avgr.unsigned.v8i16(<8 x i16> %b{first}, "
            f"<8 x i16> %b{first})",
            f"  %d{first} = bitcast <8 x i16> %c{first} to <4 x i32>",
            f"  %f{first} = sitofp <4 x i32> %d{first} to <4 x float>",
        ]
        made.append(f"%f{first}")
    count = 4
    while len(made) > 1:
        joined, every = [], ", ".join(f"i32 {i}" for i in range(2 * count))
        for one, other in zip(made[::2], made[1::2], strict=True):
            lines.append(
                f"  {one}_{count} = shufflevector <{count} x float> {one}, <{count} x float> "
                f"{other}, <{2 * count} x i32> <{every}>"
            )
            joined.append(f"{one}_{count}")
        made, count = joined, 2 * count
    return "\n".join([*lines, f"  ret <{LANES} x float> {made[0]}", "}", ""])


FLOATS = Intrinsic(
    f"{FEATURE}_floats_{LANES}_s32",
    FEATURE,
    (I32,),
    F32,
    lambda lane, x: T.Cast("float32", x(lane)),
    partial(T.call_pure_extern, F32, "bnncc_floats"),
    source=_floats(),
)
"""Convert integers to floats."""


def _mask(count: int) -> Intrinsic:
    """Return the instruction that packs `count` conditions into an integer, sixteen at a time."""
    kind, name = f"i{count}", f"bnncc_mask_{count}"
    lines = [
        "declare i32 @llvm.wasm.bitmask.v16i8(<16 x i8>)",
        f"define linkonce_odr hidden {kind} @{name}(<{count} x i1> %x) alwaysinline {{",
        f"  %s = sext <{count} x i1> %x to <{count} x i8>",
    ]
    total = "0"
    for first in range(0, count, 16):
        lanes = ", ".join(f"i32 {first + i}" for i in range(16))
        lines += [
            f"  %a{first} = shufflevector <{count} x i8> %s, <{count} x i8> poison, "
            f"<16 x i32> <{lanes}>",
            f"  %b{first} = call i32 @llvm.wasm.bitmask.v16i8(<16 x i8> %a{first})",
            f"  %c{first} = {_fitting(count)} i32 %b{first} to {kind}",
            f"  %d{first} = shl {kind} %c{first}, {first}",
            f"  %t{first} = or {kind} {total}, %d{first}",
        ]
        total = f"%t{first}"
    plain = PLAIN_MASKS[count]
    return Intrinsic(
        f"{FEATURE}_mask_{count}",
        FEATURE,
        plain.operands,
        plain.result,
        plain.desc,
        lambda x: T.call_pure_extern(plain.result, name, T.Cast(f"uint1x{count}", x)),
        source="\n".join([*lines, f"  ret {kind} {total}", "}", ""]),
    )


def _fitting(bits: int) -> str:
    return {16: "trunc", 32: "bitcast", 64: "zext"}[bits]


MASKS = {count: _mask(count) for count in (16, 32, 64)}
"""By lanes: conditions as bits, ``i8x16.bitmask``."""
