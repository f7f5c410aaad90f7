"""Tile instructions of x86 (AMX), and the product of matrices that they make.

There are eight tiles of up to sixteen rows of 64 bytes. A tile instruction names its tiles by
number, and a thread has to configure its own ones before it uses any. `TileProduct` is the pair of
all of them: one instruction alone leaves nothing in memory that a loop could be compared with.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from tvm.tirx.script import builder as T

from bnncc.schedules.intrin import Operand, Pair

Buffer = Any
Expr = Any

TILE_BYTES = 64
"""In a row of a tile."""
TILE_ROWS = 16
"""In a tile, at most."""

DOTS = {
    ("int8", "int8"): "tdpbssd",
    ("int8", "uint8"): "tdpbsud",
    ("uint8", "int8"): "tdpbusd",
    ("uint8", "uint8"): "tdpbuud",
}
"""By types of data and weight: four products of bytes, added to each int32 of a tile."""


def configure(memory: Buffer, rows: tuple[int, ...]) -> None:
    """Give the tiles their shapes, in the thread that executes this; their content is lost.

    Parameters
    ----------
    memory : Buffer of uint64, shape (8,)
        Is written.
    rows : tuple of int
        Of each of the eight tiles, 0 for those not used. All rows have `TILE_BYTES`.
    """
    widths = [TILE_BYTES if count else 0 for count in rows]
    shapes = struct.pack("<2B14x8H16x8B8x", 1, 0, *widths, *rows)
    for i, word in enumerate(struct.unpack("<8Q", shapes)):
        T.buffer_store(memory, T.uint64(word), [i])
    _call("ldtilecfg", T.address_of(memory[0]))


def release() -> None:
    """Give the tiles back: a thread that has some costs the system more to switch."""
    _call("tilerelease")


def zero(tile: int) -> None:
    """Fill a tile with zeros."""
    _call("tilezero", T.uint8(tile))


def load(tile: int, first: Expr, stride: Expr) -> None:
    """Fill a tile with rows from memory.

    Parameters
    ----------
    tile : int
        Its number.
    first : Expr
        The element of a buffer with which the first row begins.
    stride : Expr of int64
        Bytes from one row to the next.
    """
    _call("tileloadd64", T.uint8(tile), T.address_of(first), stride)


def store(tile: int, first: Expr, stride: Expr) -> None:
    """Write the rows of a tile to memory; parameters as of `load`."""
    _call("tilestored64", T.uint8(tile), T.address_of(first), stride)


def dot(total: int, data: int, weight: int, *, types: tuple[str, str]) -> None:
    """Add the product of two tiles to a third; `types` are a key of `DOTS`."""
    _call(DOTS[types], T.uint8(total), T.uint8(data), T.uint8(weight))


@dataclass(frozen=True)
class TileProduct(Pair):
    """Rows of data by sixteen columns of weights, through all of their depth."""

    types: tuple[str, str]
    """Of data and weight: a key of `DOTS`."""
    rows: int
    """Of data, at most `TILE_ROWS`."""
    steps: int
    """Tiles that the depth takes."""

    feature = "amx_int8"

    @property
    def name(self) -> str:
        """Instruction set, operation, shape and types."""
        shape = f"{self.rows}x16x{self.steps * TILE_BYTES}"
        return f"amx_{DOTS[self.types]}_{shape}"

    @property
    def tensors(self) -> list[Operand]:
        """Data; weights in the order in which tiles take them, four of a column together; sums."""
        data, weight = self.types
        return [
            Operand((self.rows, self.steps * TILE_BYTES), data, strided=True),
            Operand((self.steps, TILE_ROWS, TILE_BYTES), weight),
            Operand((self.rows, 16), "int32", strided=True),
        ]

    def write(self, half: str, buffers: list[Buffer]) -> None:
        """Write the body of one half."""
        if half == "desc":
            self._loops(*buffers)
        else:
            self._tiles(*buffers)

    def _loops(self, data: Buffer, weight: Buffer, total: Buffer) -> None:
        with T.grid(self.rows, 16) as (row, column):
            T.buffer_store(total, T.int32(0), [row, column])
            with T.serial(self.steps * TILE_BYTES) as k:
                place = k % TILE_BYTES
                one = weight[k // TILE_BYTES, place // 4, column * 4 + place % 4]
                product = T.Cast("int32", data[row, k]) * T.Cast("int32", one)
                T.buffer_store(total, total[row, column] + product, [row, column])

    def _tiles(self, data: Buffer, weight: Buffer, total: Buffer) -> None:
        shapes = (self.rows, self.rows, TILE_ROWS, *[0] * 5)
        configure(T.sblock_alloc_buffer((8,), "uint64"), shapes)
        zero(0)
        with T.serial(self.steps) as step:
            load(1, data[0, step * TILE_BYTES], T.Cast("int64", data.strides[0]))
            load(2, weight[step, 0, 0], T.int64(TILE_BYTES))
            dot(0, 1, 2, types=self.types)
        store(0, total[0, 0], T.Cast("int64", total.strides[0]) * T.int64(4))
        release()


def _call(instruction: str, *operands: Expr) -> None:
    T.evaluate(T.call_llvm_intrin("void", f"llvm.x86.{instruction}", *operands))
