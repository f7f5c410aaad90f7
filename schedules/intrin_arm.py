"""Intrinsics of NEON, on 64-bit and 32-bit Arm."""

from __future__ import annotations

from typing import Any

from tvm.tirx.script import builder as T

from bnncc.schedules.intrin import Intrinsic

Expr = Any

FEATURES = {"aarch64": "asimd", "arm": "neon"}
"""The feature of a `TargetSpec` that means NEON."""

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
        f"{'neon' if arch == 'aarch64' else 'neon32'}_widening_add_pairs_{count}_u{bits}",
        FEATURES[arch],
        (f"uint{bits}x{count}",),
        result,
        lambda lane, x: T.Cast(f"uint{wide}", x(2 * lane)) + T.Cast(f"uint{wide}", x(2 * lane + 1)),
        lambda x: T.call_llvm_pure_intrin(result, _WIDEN[arch, bits], x),
    )


WIDENING_ADD_PAIRS = {(arch, bits): _widening(arch, bits) for arch, bits in _WIDEN}
"""By architecture and bits of a lane: neighbours, added in lanes twice as wide."""


def _adding(arch: str, bits: int) -> Intrinsic:
    count = 128 // bits
    kind = f"uint{bits}x{count}"

    def desc(lane: Expr, low: Any, high: Any) -> Expr:
        half = count // 2
        first = 2 * (lane % half)
        return T.if_then_else(
            lane < half, low(first) + low(first + 1), high(first) + high(first + 1)
        )

    def aarch64(low: Expr, high: Expr) -> Expr:
        return T.call_llvm_pure_intrin(kind, _ADD_PAIRS[bits], low, high)

    def arm(low: Expr, high: Expr) -> Expr:
        low, high = T.Bind(low), T.Bind(high)
        even, odd = (
            T.Shuffle([low, high], [T.int32(i) for i in range(first, 2 * count, 2)])
            for first in (0, 1)
        )
        return even + odd

    name = "neon" if arch == "aarch64" else "neon32"
    impl = aarch64 if arch == "aarch64" else arm
    return Intrinsic(
        f"{name}_add_pairs_{count}_u{bits}", FEATURES[arch], (kind, kind), kind, desc, impl
    )


ADD_PAIRS = {(arch, bits): _adding(arch, bits) for arch in FEATURES for bits in (8, 16, 32)}
"""By architecture and bits of a lane: neighbours of the first vector make the lower half of the
result, those of the second the upper."""


def _dot(lane: Expr, total: Any, a: Any, b: Any) -> Expr:
    made = total(lane)
    for i in range(4):
        made = made + T.Cast("uint32", a(4 * lane + i)) * T.Cast("uint32", b(4 * lane + i))
    return made


dot = Intrinsic(
    "neon_dot_4x4_u8",
    "asimddp",
    ("uint32x4", "uint8x16", "uint8x16"),
    "uint32x4",
    _dot,
    lambda total, a, b: T.call_llvm_pure_intrin(
        "uint32x4", "llvm.aarch64.neon.udot.v4i32.v16i8", total, a, b
    ),
)
"""Armv8.2's dot product: four products of bytes added to each lane."""
