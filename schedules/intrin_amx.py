"""Tensor intrinsics of x86's AMX: instructions on tiles.

There are eight tiles of up to sixteen rows of 64 bytes. Instructions name tiles by number, and a
thread must configure its tiles before it uses them. The content of a tile has no address, so `Tile`
pairs are tested together: a matrix product needs all of them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.schedules.intrin import Operand, Pair
from bnncc.topi_binary.definitions.terms import bfloat16

Buffer = Any
Expr = Any

TILE_BYTES = 64
"""Bytes per row of a tile."""
TILE_ROWS = 16
"""Maximum number of rows per tile."""

DOTS = {
    ("int8", "int8"): "tdpbssd",
    ("int8", "uint8"): "tdpbsud",
    ("uint8", "int8"): "tdpbusd",
    ("uint8", "uint8"): "tdpbuud",
    ("uint16", "uint16"): "tdpbf16ps",
}
"""By types of data and weight: four products of bytes are added to each int32 of a tile, or two
products of bfloat16 to each float32."""

BFLOAT16 = "uint16"
"""Type in which bfloat16 is stored."""


SUMS, DATA, WEIGHT = 5, 5, 6
"""Number of tiles for sums, which are the first ones; the tile of data, and the first of two of
weights."""

LOCAL = "local"
"""Storage scope of tensors that are tiles."""


def configure(memory: Buffer, shapes: Sequence[tuple[int, int]]) -> None:
    """Configure the shapes of the tiles for the calling thread; their contents are lost.

    Parameters
    ----------
    memory : Buffer of uint64, shape (8,)
        Scratch memory for the configuration.
    shapes : sequence of (int, int)
        Rows of each of the eight tiles, and bytes per row; zeros for unused ones.
    """
    rows, widths = zip(*shapes, strict=True)
    packed = struct.pack("<2B14x8H16x8B8x", 1, 0, *widths, *rows)
    for i, word in enumerate(struct.unpack("<8Q", packed)):
        T.buffer_store(memory, T.uint64(word), [i])
    _call("ldtilecfg", T.address_of(memory[0]))


def release() -> None:
    """Release the tiles: switching a thread that holds tiles costs the system more."""
    _call("tilerelease")


def zero(tile: Expr) -> None:
    """Set a tile to zero."""
    _call("tilezero", T.Cast("uint8", tile))


def load(tile: Expr, first: Expr, stride: Expr, *, streamed: bool = False) -> None:
    """Load the rows of a tile from memory.

    Parameters
    ----------
    tile : Expr
        Number of the tile.
    first : Expr
        Buffer element at which the first row starts.
    stride : Expr of int64
        Bytes from one row to the next.
    streamed : bool
        Hint that the rows are not soon needed again, so that others stay in the L1 cache.
    """
    _call(
        "tileloaddt164" if streamed else "tileloadd64",
        T.Cast("uint8", tile),
        T.address_of(first),
        stride,
    )


def store(tile: Expr, first: Expr, stride: Expr) -> None:
    """Store the rows of a tile to memory; parameters as in `load`."""
    _call("tilestored64", T.Cast("uint8", tile), T.address_of(first), stride)


def dot(total: Expr, data: int, weight: Expr, *, types: tuple[str, str]) -> None:
    """Add the product of two tiles to a third; `types` is a key of `DOTS`."""
    _call(DOTS[types], *(T.Cast("uint8", tile) for tile in (total, data, weight)))


@dataclass(frozen=True)
class Tile(Pair):
    """An instruction on tiles that replaces a loop over elements of tensors in scope `LOCAL`.

    Such a tensor stands for tiles. Sums, of `rows` rows each, are stored one after the other, and
    the offset of one in its tensor gives the number of its tile. So are weights, from the tile
    `WEIGHT` on. Data is in the tile `DATA`.
    """

    operation: str
    """``zero`` (sums), ``load`` (data), ``load_weight``, ``dot`` or ``store`` (sums)."""
    rows: int
    """Rows of data and sums, at most `TILE_ROWS`."""
    types: tuple[str, str]
    """Types of data and weight, a key of `DOTS`."""
    words: int = TILE_ROWS
    """32-bit words per row of data, and rows of weights, at most `TILE_ROWS`."""
    window: tuple[int, int] = (1, 1)
    """Pixels of data per row, which are consecutive in memory, and from one row to the next."""
    streamed: bool = False
    """Whether loaded rows are not soon needed again."""

    @property
    def feature(self) -> str:
        """Feature of a `TargetSpec` that it requires."""
        return "amx_bf16" if self.types[0] == BFLOAT16 else "amx_int8"

    @property
    def together(self) -> int:
        """Products of data and weights that are added to one sum at once."""
        return 2 if self.types[0] == BFLOAT16 else 4

    @property
    def total(self) -> str:
        """Type of a sum."""
        return "float32" if self.types[0] == BFLOAT16 else "int32"

    @property
    def fresh(self) -> bool:  # type: ignore[override]
        """Whether the output tensor is overwritten without being read."""
        return self.operation != "dot"

    @property
    def name(self) -> str:  # type: ignore[override]
        """Instruction set, operation, shape and types."""
        shape = f"{self.rows}x{self.words * 4}_{'_'.join(self.types)}"
        overlapping = "_of_{}_by_{}".format(*self.window) if self.window != (1, 1) else ""
        return f"amx_{self.operation}_{shape}{overlapping}{'_streamed' * self.streamed}"

    @property
    def tensors(self) -> list[Operand]:
        """Operands; rows in memory may be strided, and weights hold `together` rows of a column."""
        columns, (pixels, step) = TILE_BYTES // 4, self.window
        row = self.words * self.together
        shapes = (self.rows, row), (self.words, columns * self.together), (self.rows, columns)
        kinds = [*zip(shapes, (*self.types, self.total), strict=True)]
        data, weight, total = (Operand(shape, dtype, scope=LOCAL) for shape, dtype in kinds)
        _, four_rows, sums = (Operand(shape, dtype, strided=True) for shape, dtype in kinds)
        read = (self.rows - 1) * step + pixels, row // pixels
        rows = Operand(read, self.types[0], strided=True)
        return {
            "zero": [total],
            "load": [rows, data],
            "load_weight": [four_rows, weight],
            "dot": [data, weight, total],
            "store": [total, sums],
        }[self.operation]

    def write(self, half: str, buffers: list[Buffer]) -> None:
        """Write the body of one half."""
        if half == "impl":
            self._instruction(*buffers)
            return
        first, last = buffers[0], buffers[-1]
        (rows, columns), every = last.shape, self.together
        pixels, step = self.window
        extents = (rows, columns, *[first.shape[1]] * (self.operation == "dot"))
        with T.grid(*extents) as loops, T.sblock("tile"):
            i, j, *k = T.axis.remap("SSR"[: len(loops)], loops)
            overlapping = self.operation == "load" and pixels > 1
            each = self.words * every // pixels
            where = (i * step + j // each, j % each) if overlapping else (i, j)
            value = tirx.const(0, self.total) if self.operation == "zero" else first[where]
            if k:
                one, other = first[i, k[0]], buffers[1][k[0] // every, j * every + k[0] % every]
                value = last[i, j] + number_of(one) * number_of(other)
            T.buffer_store(last, value, [i, j])

    def _instruction(self, *buffers: Buffer) -> None:
        if self.operation == "zero":
            zero(_number(buffers[0]))
        elif self.operation == "dot":
            dot(_number(buffers[2]), DATA, WEIGHT + _number(buffers[1]), types=self.types)
        elif self.operation == "store":
            total, memory = buffers
            store(_number(total), memory[0, 0], _stride(memory) * T.int64(4))
        else:
            memory, made = buffers
            number, step = DATA, self.window[1]
            if self.operation == "load_weight":
                number, step = WEIGHT + _number(made), 1
            stride = _stride(memory) * T.int64(4 // self.together * step)
            load(number, memory[0, 0], stride, streamed=self.streamed)


def _number(total: Buffer) -> Expr:
    """Return the number of a tile among those that a tensor stands for."""
    rows, columns = total.shape
    return total.elem_offset // (rows * columns)


def number_of(stored: Expr) -> Expr:
    """Return the number that an element of a tile stores."""
    if stored.ty.dtype == BFLOAT16:
        return bfloat16(T.Cast("uint32", stored))
    return T.Cast("int32", stored)


def _stride(memory: Buffer) -> Expr:
    return T.Cast("int64", memory.strides[0])


def _call(instruction: str, *operands: Expr) -> None:
    T.evaluate(T.call_llvm_intrin("void", f"llvm.x86.{instruction}", *operands))
