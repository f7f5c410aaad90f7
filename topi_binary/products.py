"""One product of a few-bit kernel: a broadcast word of data with a vector of weight words."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.topi_binary.emit import Expr, fmuladd, splat
from bnncc.topi_binary.layout import LANES

I32 = f"int32x{LANES}"

VNNI = "vnni"
"""A machine with AVX-512 VNNI: four products in each lane at once."""


def _pairs(bits: int) -> str:
    """Return a function that multiplies pairs of int16, by x86's vectors of `bits` bits."""
    lanes = bits // 32
    name = {128: "sse2.pmadd.wd", 256: "avx2.pmadd.wd", 512: "avx512.pmaddw.d.512"}[bits]
    whole, half, part = f"<{LANES} x i32>", f"<{2 * lanes} x i16>", f"<{lanes} x i32>"
    lines = [f"declare {part} @llvm.x86.{name}({half}, {half})"]
    lines.append(
        f"define linkonce_odr hidden {whole} @bnncc_pairs_{bits}({whole} %sum, {whole} %data, "
        f"{whole} %weight) alwaysinline nounwind {{"
    )
    made = []
    for piece in range(LANES // lanes):
        picked = ", ".join(f"i32 {piece * lanes + i}" for i in range(lanes))
        for operand in ("data", "weight"):
            lines.append(
                f"  %{operand}{piece} = shufflevector {whole} %{operand}, {whole} poison, "
                f"<{lanes} x i32> <{picked}>"
            )
            lines.append(f"  %{operand}h{piece} = bitcast {part} %{operand}{piece} to {half}")
        lines.append(
            f"  %p{piece} = call {part} @llvm.x86.{name}({half} %datah{piece}, "
            f"{half} %weighth{piece})"
        )
        made.append((f"%p{piece}", lanes))
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
    return "\n".join(lines)


PAIRS = {f"x86-{bits}": _pairs(bits) for bits in (128, 256, 512)}
"""Code for machines whose vectors multiply pairs of int16, by the machine."""


def imported(method: str, machine: str) -> str:
    """Return LLVM code that `add` needs, if any."""
    return PAIRS.get(machine, "") if method == "pairs" else ""


def add(method: str, machine: str, total: Expr, data: Expr, weight: Expr, sign: int) -> Expr:
    """Return `total` plus (or, with `sign` -1, minus) the product of two vectors of words.

    Parameters
    ----------
    method : str
        One of `few_bit_data.METHODS`.
    machine : str
        `VNNI`, one of `PAIRS`, or anything else for code that runs everywhere.
    total, data, weight : Expr
        Vectors of `LANES` lanes.
    sign : int
        1 or -1; -1 only for planes.
    """
    if method in ("xor", "and"):
        bits = data ^ weight if method == "xor" else T.bitwise_and(data, weight)
        count = T.Cast(I32, T.popcount(bits))
        return total + count if sign > 0 else total - count
    if method == "floats":
        return fmuladd(data, weight, total)
    if method == "bytes" and machine == VNNI:
        bytes_of = [T.reinterpret(f"int8x{4 * LANES}", word) for word in (data, weight)]
        name = "llvm.x86.avx512.vpdpbusd.512"
        return T.call_llvm_pure_intrin(I32, name, total, *bytes_of)
    if method == "pairs" and machine in PAIRS:
        name = f"bnncc_pairs_{machine.removeprefix('x86-')}"
        return T.call_pure_extern(I32, name, total, data, weight)
    return _numbers(total, data, weight, 8 if method == "bytes" else 16)


def _numbers(total: Expr, data: Expr, weight: Expr, bits: int) -> Expr:
    """Multiply the numbers of a word one after another."""
    whole, mask = T.Cast(I32, weight), tirx.IntImm("uint32", 2**bits - 1)
    for first in range(0, 32, bits):
        level = T.Cast(I32, T.bitwise_and(T.shift_right(data, _u32(first)), splat(mask)))
        left = whole if first + bits == 32 else T.shift_left(whole, _i32(32 - bits - first))
        total = total + level * T.shift_right(left, _i32(32 - bits))
    return total


def _u32(value: int) -> Any:
    return splat(tirx.IntImm("uint32", value))


def _i32(value: int) -> Any:
    return splat(tirx.IntImm("int32", value))
