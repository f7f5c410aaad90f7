"""Register-only ceilings of one core: what no kernel of the same instruction mix can pass.

Each ceiling is one loop of inline assembly on registers, without dependencies beyond its
accumulators and, unless its name says so, without loads, timed as best of many short runs between
the runs of what is compared with it.
"""

from __future__ import annotations

import time

import numpy as np
import tvm
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from bnncc.targets import catalog, host
from bnncc.targets.spec import TargetSpec

ITERATIONS = 20_000
ACCUMULATORS = 12
TILE_MEMORY = 8192
"""Bytes of stack that products of loaded tiles may use."""
TILE_DATA = 0x3F813F023F8140FF
"""What tiles contain, as bytes or bfloat16: zeros are multiplied faster, at a higher clock."""


def _assembly(body: list[str], wide: bool, tiles: bool) -> str:
    registers = [f"zmm{r}" for r in range(32)] if wide else [f"ymm{r}" for r in range(16)]
    clear = "vpxord" if wide else "vpxor"
    lines = [
        *(f"{clear} %{r}, %{r}, %{r}" for r in registers),
        *(_configured() if tiles else []),
        "vzeroupper",
        "1:",
        *body,
        "dec $0",
        "jnz 1b",
        *(["tilerelease", "mov %r8, %rsp"] if tiles else []),
    ]
    text = "\\0A".join(lines)
    clobbers = ",".join(f"~{{{r}}}" for r in (*registers, "rcx", "r8"))
    return f"""
define i32 @ceiling_loop(i32 %n) noinline {{
  %r = call i32 asm sideeffect "{text}", "=r,0,{clobbers},~{{cc}}"(i32 %n)
  ret i32 %r
}}
"""


def _xor_popcount_add() -> list[str]:
    body = []
    for i in range(ACCUMULATORS):
        x = 17 + i
        body += [
            f"vpxord %zmm{12 + i % 4}, %zmm16, %zmm{x}",
            f"vpopcntd %zmm{x}, %zmm{x}",
            f"vpaddd %zmm{x}, %zmm{i}, %zmm{i}",
        ]
    return body


def _fma(kind: str) -> list[str]:
    """Return products of registers; with 16 of them, accumulators leave room for three others."""
    return [f"vfmadd231ps %{kind}15, %{kind}{12 + i % 3}, %{kind}{i}" for i in range(ACCUMULATORS)]


def _dot_bytes() -> list[str]:
    return [f"vpdpbusd %zmm16, %zmm{12 + i % 4}, %zmm{i}" for i in range(ACCUMULATORS)]


def _pairs_of_bytes() -> list[str]:
    """Return products of bytes whose sums of pairs are added in 16 bits, as AVX2 has no VNNI."""
    body = []
    for i in range(6):
        body.append(f"vpmaddubsw %ymm15, %ymm{12 + i % 3}, %ymm{6 + i}")
        body.append(f"vpaddw %ymm{6 + i}, %ymm{i}, %ymm{i}")
    return body


def _tile_products(instruction: str) -> list[str]:
    """Return products of two data tiles and two weight tiles."""
    return [f"{instruction} %tmm{6 + i % 2}, %tmm{4 + i // 2}, %tmm{i}" for i in range(4)]


def _loaded_products(data: int, weights: int) -> list[str]:
    """Return products of so many data tiles and weight tiles, each loaded from the L1 cache."""

    def load(tile: int, number: int) -> str:
        return f"tileloadd {1024 * number}(%rsp, %rcx), %tmm{tile}"

    body = [load(6 + j, j) for j in range(weights)]
    for i in range(data):
        body.append(load(5, weights + i))
        body += [f"tdpbssd %tmm{6 + j}, %tmm5, %tmm{i * weights + j}" for j in range(weights)]
    return body


def _configured() -> list[str]:
    """Return instructions that give all tiles sixteen rows of `TILE_DATA`, and fill some memory."""
    widths = [f"movw $$64, {16 + 2 * tile}(%rsp)" for tile in range(8)]
    rows = [f"movb $$16, {48 + tile}(%rsp)" for tile in range(8)]
    memory = [f"vmovdqu64 %zmm0, {first}(%rsp)" for first in range(0, TILE_MEMORY, 64)]
    return [
        "mov %rsp, %r8", "and $$-64, %rsp", "sub $$256, %rsp",
        "vmovdqu64 %zmm0, (%rsp)", "movb $$1, (%rsp)", *widths, *rows,
        "ldtilecfg (%rsp)", f"sub $${TILE_MEMORY - 256}, %rsp",
        f"movabs $${TILE_DATA}, %rcx", "vpbroadcastq %rcx, %zmm0", *memory, "mov $$64, %ecx",
        *(f"tileloadd (%rsp, %rcx), %tmm{tile}" for tile in range(8)),
    ]  # fmt: skip


def _lookup(kind: str) -> list[str]:
    """Return three lookups for two outputs, as `definitions.nibbles` adds them, four times."""
    body = []
    for i in range(4):
        some, both, second = (f"%{kind}{k + i}" for k in (8, 0, 4))
        body.append(f"vpshufb %{kind}12, %{kind}13, {some}")
        for found in (14, 15):
            body += [
                f"vpshufb %{kind}12, %{kind}13, %{kind}{found}",
                f"vpaddb %{kind}{found}, {some}, {some}",
            ]
        body += [f"vpaddb {some}, {both}, {both}", f"vpsrlw $$4, {some}, {some}"]
        conjunction = "vpandd" if kind == "zmm" else "vpand"
        body += [f"{conjunction} %{kind}12, {some}, {some}", f"vpaddb {some}, {second}, {second}"]
    return body


def _lookup_sse() -> list[str]:
    """Return the same for SSSE3, which overwrites an operand: the table is copied."""
    body = []
    for i in range(4):
        some, both, second = (f"%xmm{k + i}" for k in (8, 0, 4))
        body += [f"movdqa %xmm13, {some}", f"pshufb %xmm12, {some}"]
        for found in (14, 15):
            body += [
                f"movdqa %xmm13, %xmm{found}",
                f"pshufb %xmm12, %xmm{found}",
                f"paddb %xmm{found}, {some}",
            ]
        body += [f"paddb {some}, {both}", f"psrlw $$4, {some}", f"pand %xmm12, {some}"]
        body.append(f"paddb {some}, {second}")
    return body


MIXES = {
    "xor+vpopcnt+add": (_xor_popcount_add, ACCUMULATORS * 512, ("avx512_vpopcntdq",)),
    "lookup 512": (lambda: _lookup("zmm"), 4 * 3 * 512, ("avx512bw",)),
    "lookup 256": (lambda: _lookup("ymm"), 4 * 3 * 256, ("avx2",)),
    "lookup 128": (_lookup_sse, 4 * 3 * 128, ("ssse3",)),
    "f32 fma": (lambda: _fma("zmm"), ACCUMULATORS * 16, ("avx512f",)),
    "f32 fma 256": (lambda: _fma("ymm"), ACCUMULATORS * 8, ("avx2", "fma")),
    "int8 dot": (_dot_bytes, ACCUMULATORS * 64, ("avx512_vnni",)),
    "int8 pairs 256": (_pairs_of_bytes, 6 * 32, ("avx2",)),
    "int8 tiles": (lambda: _tile_products("tdpbssd"), 4 * 16**2 * 64, ("amx_tile", "amx_int8")),
    "bfloat16 tiles": (
        lambda: _tile_products("tdpbf16ps"), 4 * 16**2 * 32, ("amx_tile", "amx_bf16")
    ),
    "int8 tiles, 4 x 1 loaded": (
        lambda: _loaded_products(4, 1), 4 * 16**2 * 64, ("amx_tile", "amx_int8")
    ),
    "int8 tiles, 2 x 2 loaded": (
        lambda: _loaded_products(2, 2), 4 * 16**2 * 64, ("amx_tile", "amx_int8")
    ),
}  # fmt: skip
"""Name: instructions of one iteration, the multiply-adds they stand for, the CPU features needed.

Lookups find four products of two outputs for each byte: with AVX-512BW, AVX2, and SSSE3.
"""


def ceiling_of(target: TargetSpec) -> str:
    """Return the key of `MIXES` that binary kernels of `target` are measured by."""
    if target.popcount == "vector":
        return "xor+vpopcnt+add"
    return f"lookup {target.vector_bits}"


def of_floats() -> Ceiling:
    """Return the ceiling of float32 products of this CPU."""
    return Ceiling("f32 fma" if "avx512f" in host.features() else "f32 fma 256")


def of_bytes(target: TargetSpec) -> Ceiling:
    """Return the ceiling of products of bytes: of tiles, or of vectors with VNNI or without."""
    if "amx_int8" in target.features:
        return Ceiling("int8 tiles")
    return Ceiling("int8 dot" if "avx512_vnni" in target.features else "int8 pairs 256")


class Ceiling:
    """One ceiling, measured a little at a time.

    Parameters
    ----------
    name : str
        A key of `MIXES`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        body, self._macs, features = MIXES[name]
        if missing := set(features) - host.features():
            raise SystemExit(f"the ceiling {name} needs a CPU with {', '.join(sorted(missing))}")
        wide = "avx512f" in host.features()
        target = catalog.CATALOG["x86-64-v4-vpopcntdq" if wide else "x86-64-v3"]
        tiles = "amx_tile" in features
        assembly = _assembly(body(), wide, tiles)
        with IRBuilder() as builder:
            with T.prim_func(s_tir=True):
                T.func_name("main")
                out = T.arg("out", T.buffer((1,), "int32"))
                with (
                    T.sblock("root"),
                    T.serial(0, 1, annotations={"pragma_import_llvm": assembly}),
                    T.sblock("run"),
                ):
                    T.reads()
                    T.writes(out[0])
                    value = T.call_extern("int32", "ceiling_loop", T.int32(ITERATIONS))
                    T.buffer_store(out, value, [0])
            func = builder.get()
        between = "-" if tiles else ""
        needed = [f"+{name.replace('_', between)}" for name in features]
        options = {"kind": target.kind, "mcpu": target.mcpu, "mattr": [*target.mattr, *needed]}
        tvm_target = tvm.target.Target(options)
        self._lib = tvm.compile(tvm.IRModule({"main": func}), target=tvm_target).jit()
        self._out = tvm.runtime.tensor(np.zeros(1, np.int32))
        self._timer = self._lib.time_evaluator("main", tvm.cpu(), number=1, repeat=1)
        self.best = 0.0

    def measure(self) -> float:
        """Run once and return the rate, in multiply-adds per second; keep the best."""
        rate: float = self._macs * ITERATIONS / min(self._timer(self._out).results)
        self.best = max(self.best, rate)
        return rate


class Quiet:
    """Tells whether another thread of this core, perhaps of another guest, slows tiles down.

    While one is busy, products of loaded tiles take three times as long. A processor without tiles
    always counts as quiet.
    """

    SHARE, PATIENCE = 0.7, 3.0
    """Least fraction of the best rate so far; seconds to wait for it."""

    def __init__(self) -> None:
        tiles = "amx_tile" in host.features()
        self._probe = Ceiling("int8 tiles, 2 x 2 loaded") if tiles else None
        for _ in range(50):
            self.now()

    def now(self) -> bool:
        """Return whether it is quiet."""
        probe = self._probe
        return probe is None or probe.measure() >= self.SHARE * probe.best

    def wait(self) -> None:
        """Wait until it is quiet, or no longer than `PATIENCE`."""
        end = time.monotonic() + self.PATIENCE
        while not self.now() and time.monotonic() < end:
            time.sleep(0.02)
