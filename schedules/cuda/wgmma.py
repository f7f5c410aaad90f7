"""Text and limits specific to `wgmma`, whose instruction names every result register."""

from __future__ import annotations

from bnncc.schedules.cuda.text import PROCESSORS
from bnncc.topi_binary import layout
from bnncc.topi_binary.tiles import Tiles

PIXELS = 64
"""Pixels per warp group."""

TEAM_THREADS = 128
"""Threads per warp group."""

ONES = 16
"""Columns of ones after a tile; their products are the popcounts of the data."""

SHARED_BYTES = 227 * 1024
"""Maximum shared memory per block; on a multiprocessor, each block takes 1 KB more."""

_BLOCK_BYTES = 1024


def product(width: int) -> str:
    """Return the function that starts a product of 64 x 256 and 256 x `width` bits.

    Its include guard contains the width, since a module may have kernels of several widths.
    """
    count = width // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    a = ", ".join(f"%{count + i}" for i in range(4))
    operands = ", ".join(f'"+r"(c[{i // 4}][{i % 4}])' for i in range(count))
    return f"""#ifndef BNNCC_WGMMA_{width}
#define BNNCC_WGMMA_{width}
namespace bnncc {{
template <>
__device__ __forceinline__ void multiply_async<{width // 8}>(
    int (&c)[{width // 8}][4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
    unsigned long long b) {{
  asm volatile(
      "{{.reg .pred add; setp.eq.u32 add, 1, 1; "
      "wgmma.mma_async.sync.aligned.m64n{width}k256.s32.b1.b1.and.popc "
      "{{{registers}}}, {{{a}}}, %{count + 4}, add;}}"
      : {operands}
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}}
}}  // namespace bnncc
#endif"""


def shared_bytes(how: Tiles) -> int:
    """Return the bytes of all filters of a tile, and of its columns of ones."""
    return how.filled * 4 * (how.width + ONES)


def blocks(how: Tiles, teams: int, fetching: bool) -> int:
    """Return the number of blocks per channel tile that fills every multiprocessor.

    They all run at once; one more would have to wait for the others to end.

    Parameters
    ----------
    how : Tiles
        The tiles of the layer.
    teams : int
        Warp groups per block.
    fetching : bool
        Whether the epilogue holds tensors in registers.

    Returns
    -------
    int
    """
    return max(1, PROCESSORS * _resident(how, teams, fetching) // how.count)


def _resident(how: Tiles, teams: int, fetching: bool) -> int:
    """Return the number of blocks per multiprocessor."""
    room = (SHARED_BYTES + _BLOCK_BYTES) // (shared_bytes(how) + _BLOCK_BYTES)
    groups = min(4, _WARP_GROUPS[how.width]) if fetching else _WARP_GROUPS[how.width]
    return max(1, min(room, groups // teams))


def turns(how: Tiles, pixels: int, teams: int, fetching: bool) -> int:
    """Return how often a multiprocessor processes a warp group's pixels: a layer's cost."""
    each = layout.blocks(layout.blocks(pixels, PIXELS * teams), blocks(how, teams, fetching))
    return each * teams * _resident(how, teams, fetching)


_WARP_GROUPS = {128: 4, 64: 6, 32: 8}
"""By width of a tile: warp groups per multiprocessor for which registers suffice."""

SHARED_STEPS = 6
"""Up to this many steps, as many warp groups as can share filters are fastest (H200)."""
