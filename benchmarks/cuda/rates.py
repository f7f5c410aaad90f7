"""Kernels of nothing but one mix of instructions, on registers: what each engine can reach."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as script
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from bnncc.schedules.cuda import text, wgmma
from bnncc.targets.spec import TargetSpec

BLOCKS, THREADS, TURNS = 132 * 4, 128, 4096
WORDS = 65536

_MMA = """
  unsigned a[4], b[2];
  for (int i = 0; i < 4; ++i) a[i] = seed[thread * 4 + i];
  for (int i = 0; i < 2; ++i) b[i] = seed[thread * 2 + i];
  int c[8][4] = {{}};
  for (int turn = 0; turn < {turns}; ++turn)
#pragma unroll
    for (int i = 0; i < 8; ++i) {{ {product} }}
  for (int i = 0; i < 32; ++i) sum += c[i / 4][i % 4];"""
_INSTRUCTION = """asm volatile("mma.sync.aligned.{name} "
      "{{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, {{%0, %1, %2, %3}};"
      : "+r"(c[i][0]), "+r"(c[i][1]), "+r"(c[i][2]), "+r"(c[i][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));"""
_WGMMA = """
  uint4* const operands = (uint4*)shared;
  for (int i = thread; i < 2 * {width}; i += 128) operands[i] = ((const uint4*)seed)[i];
  unsigned a[4];
  for (int i = 0; i < 4; ++i) a[i] = seed[thread * 4 + i];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  int c[{width} / 8][4] = {{}};
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  for (int turn = 0; turn < {turns}; ++turn) {{
#pragma unroll
    for (int i = 0; i < 8; ++i)
      bnncc::multiply_async<{width} / 8>(c, a[0], a[1], a[2], a[3],
                                         bnncc::matrix(operands, {width} * 16));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  }}
  for (int i = 0; i < {width} / 2; ++i) sum += c[i / 4][i % 4];"""
_THREADS = """
  unsigned a[7][4], b[7][4];
  int c[4][4] = {{}};
  for (int k = 0; k < 7; ++k)
    for (int i = 0; i < 4; ++i)
      a[k][i] = seed[thread + 7 * i + k], b[k][i] = seed[thread * 3 + i + 5 * k];
  for (int turn = 0; turn < {turns}; ++turn) {{
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {{
        unsigned x[7];
#pragma unroll
        for (int k = 0; k < 7; ++k) x[k] = a[k][i] ^ b[k][j];
        {count}
      }}
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i][0] += c[0][i], a[i + 3][2] += turn, b[i][1] ^= c[1][i];
  }}
  for (int i = 0; i < 16; ++i) sum += c[i / 4][i % 4];"""
_PLAIN = "for (int k = 0; k < 7; ++k) c[i][j] += __popc(x[k]);"
_SAVED = """
        const unsigned s0 = x[0] ^ x[1] ^ x[2], s1 = x[3] ^ x[4] ^ s0, s2 = x[5] ^ x[6] ^ s1;
        const unsigned c0 = (x[0] & x[1]) | (x[2] & (x[0] | x[1]));
        const unsigned c1 = (x[3] & x[4]) | (s0 & (x[3] | x[4]));
        const unsigned c2 = (x[5] & x[6]) | (s1 & (x[5] | x[6]));
        c[i][j] += __popc(s2) + 2 * __popc(c0 ^ c1 ^ c2) +
                   4 * __popc((c0 & c1) | (c2 & (c0 | c1)));"""


def _mixes(target: TargetSpec) -> dict[str, tuple[str, int]]:
    """Return body and products of a thread's turn of each mix."""

    def mma(name: str, depth: int) -> tuple[str, int]:
        product = _INSTRUCTION.format(name=name)
        return _MMA.format(turns=TURNS, product=product), 8 * 16 * 8 * depth // 32

    mixes = {
        "mma int8": mma("m16n8k32.row.col.s32.s8.s8.s32", 32),
        "popc": (_THREADS.format(turns=TURNS, count=_PLAIN), 16 * 7 * 32),
        "popc, carries saved": (_THREADS.format(turns=TURNS, count=_SAVED), 16 * 7 * 32),
    }
    if target.engine != "int8" and target.gpus != ("sm_75",):
        operation = "and" if target.gpus[0] >= "sm_90" else "xor"
        for kind in {operation, "and"}:
            name = f"m16n8k256.row.col.s32.b1.b1.s32.{kind}.popc"
            mixes[f"mma bits, {kind}"] = mma(name, 256)
    if target.engine == "wgmma":
        for width in (64, 128):
            body = _WGMMA.format(turns=TURNS, width=width)
            mixes[f"wgmma bits, {width} columns"] = (body, 8 * 64 * width * 256 // 128)
    return mixes


def rate_kernels(target: TargetSpec) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a function for each mix, and its name, symbol and products in a call."""
    functions, index = {}, []
    for number, (name, (body, products)) in enumerate(_mixes(target).items()):
        symbol = f"rate_{number}"
        functions[symbol] = _launched(symbol, body, target)
        total = products * TURNS * THREADS * BLOCKS
        index.append(
            {"name": name, "symbol": symbol, "macs": total, "words": WORDS, "out": BLOCKS * THREADS}
        )
    return functions, index


def _launched(symbol: str, body: str, target: TargetSpec) -> Any:
    headers, parts = ["common", "products"], []
    if "matrix(" in body:
        width = 64 if "<64 " in body else 128
        headers, parts = [*headers, "binary_conv", "wgmma_conv"], [wgmma.product(width)]
    function = (
        f"__device__ __forceinline__ void bnncc_{symbol}(const unsigned* seed, int* out, "
        f"void* shared) {{\n  const int thread = threadIdx.x;\n  int sum = 0;{body}\n"
        f"  out[blockIdx.x * {THREADS} + thread] = sum;\n}}\n"
    )
    source = text.source(headers, [*parts, function])
    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            T.func_name("main")
            T.func_attr({"tirx.noalias": True})
            seed = T.arg("seed", T.buffer([WORDS], "uint32"))
            out = T.arg("out", T.buffer([BLOCKS * THREADS], "int32"))
            with (
                T.thread_binding(BLOCKS, thread="blockIdx.x"),
                T.thread_binding(THREADS, thread="threadIdx.x"),
            ):
                room = T.sblock_alloc_buffer((2048,), "int32", scope="shared.dyn")
                pointers = (seed.access_ptr("r"), out.access_ptr("w"), room.access_ptr("rw"))
                T.evaluate(script.cuda.func_call(f"bnncc_{symbol}", *pointers, source_code=source))
        return builder.get()
