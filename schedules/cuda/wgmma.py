"""What `wgmma` needs written out: its instruction, which names every register of the result."""

from __future__ import annotations

from bnncc.topi_binary.tiles import Tiles

_PIXELS = 64
_STEP_BYTES = 32  # of one row: 256 bits


def product(width: int) -> str:
    """Return the function that starts a product of 64 x 256 and 256 x `width` bits.

    The guard is the width's own: kernels of several widths can be in one module.
    """
    count = width // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+r"(c[{i // 4}][{i % 4}])' for i in range(count))
    return f"""#ifndef BNNCC_WGMMA_{width}
#define BNNCC_WGMMA_{width}
namespace bnncc {{
template <>
__device__ __forceinline__ void multiply_async<{width // 8}>(
    int (&c)[{width // 8}][4], unsigned long long a, unsigned long long b) {{
  asm volatile(
      "{{.reg .pred add; setp.eq.u32 add, 1, 1; "
      "wgmma.mma_async.sync.aligned.m64n{width}k256.s32.b1.b1.and.popc "
      "{{{registers}}}, %{count}, %{count + 1}, add;}}"
      : {operands}
      : "l"(a), "l"(b));
}}
}}  // namespace bnncc
#endif"""


def shared_bytes(how: Tiles, chunk: int) -> int:
    """Return the bytes of operands that are in shared memory at a time, and of the counts."""
    return min(how.steps, chunk) * _STEP_BYTES * (_PIXELS + how.width) + 2 * _PIXELS * 4
