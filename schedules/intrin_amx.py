"""Tile instructions of x86 (AMX), and the pairs of loop and instruction that products are made of.

There are eight tiles of up to sixteen rows of 64 bytes. A tile instruction names its tiles by
number, and a thread has to configure its own ones before it uses any. What a tile holds is in no
memory, so `Tile` pairs are tested together: a product of matrices needs all of them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.schedules.intrin import Operand, Pair
from bnncc.topi_binary.definitions.terms import bfloat16

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
    ("uint16", "uint16"): "tdpbf16ps",
}
"""By types of data and weight: four products of bytes, added to each int32 of a tile; or, of the
bits of bfloat16, two products, added to each float32."""

BFLOAT16 = "uint16"
"""What the bits of bfloat16 are stored as."""


SUMS, DATA, WEIGHT = 6, 6, 7
"""How many tiles hold sums, the first ones; and the numbers of those for data and weights."""

LOCAL = "local"
"""Where tensors that are tiles lie."""


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


def zero(tile: Expr) -> None:
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


def dot(total: Expr, data: int, weight: int, *, types: tuple[str, str]) -> None:
    """Add the product of two tiles to a third; `types` are a key of `DOTS`."""
    _call(DOTS[types], T.uint8(total), T.uint8(data), T.uint8(weight))


@dataclass(frozen=True)
class Tile(Pair):
    """An instruction on tiles, in the place of a loop over elements of tensors that are `LOCAL`.

    Such a tensor is in no memory. Sums, of `rows` rows each, lie one behind the other: how far into
    the tensor one begins says which tile it is. Data and weights are in `DATA` and `WEIGHT`.
    """

    operation: str
    """``zero`` (sums), ``load`` (data), ``load_weight``, ``dot`` or ``store`` (sums)."""
    rows: int
    """Of data and sums, at most `TILE_ROWS`."""
    types: tuple[str, str]
    """Of data and weight: a key of `DOTS`."""

    @property
    def feature(self) -> str:
        """The feature of a `TargetSpec` that it needs."""
        return "amx_bf16" if self.types[0] == BFLOAT16 else "amx_int8"

    @property
    def together(self) -> int:
        """Numbers of data and weight that are multiplied and added to one sum."""
        return 2 if self.types[0] == BFLOAT16 else 4

    @property
    def total(self) -> str:
        """The type of a sum."""
        return "float32" if self.types[0] == BFLOAT16 else "int32"

    @property
    def fresh(self) -> bool:  # type: ignore[override]
        """Whether the tensor that changes is not read."""
        return self.operation != "dot"

    @property
    def name(self) -> str:  # type: ignore[override]
        """Instruction set, operation, shape and types."""
        return f"amx_{self.operation}_{self.rows}x{TILE_BYTES}_{'_'.join(self.types)}"

    @property
    def tensors(self) -> list[Operand]:
        """Tensors in memory have rows that lie apart; of weights, some of a column are together."""
        columns = TILE_BYTES // 4
        shapes = [(rows, columns * self.together) for rows in (self.rows, TILE_ROWS)]
        kinds = [*zip((*shapes, (self.rows, columns)), (*self.types, self.total), strict=True)]
        data, weight, total = (Operand(shape, dtype, scope=LOCAL) for shape, dtype in kinds)
        rows, four_rows, sums = (Operand(shape, dtype, strided=True) for shape, dtype in kinds)
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
        extents = (rows, columns, *[first.shape[1]] * (self.operation == "dot"))
        with T.grid(*extents) as loops, T.sblock("tile"):
            i, j, *k = T.axis.remap("SSR"[: len(loops)], loops)
            value = tirx.const(0, self.total) if self.operation == "zero" else first[i, j]
            if k:
                one, other = first[i, k[0]], buffers[1][k[0] // every, j * every + k[0] % every]
                value = last[i, j] + number_of(one) * number_of(other)
            T.buffer_store(last, value, [i, j])

    def _instruction(self, *buffers: Buffer) -> None:
        total = buffers[0 if self.operation == "store" else -1]
        number = T.Cast("uint8", total.elem_offset // (self.rows * (TILE_BYTES // 4)))
        if self.operation == "zero":
            zero(number)
        elif self.operation == "dot":
            dot(number, DATA, WEIGHT, types=self.types)
        elif self.operation == "store":
            store(number, buffers[1][0, 0], _stride(buffers[1]) * T.int64(4))
        else:
            tile = DATA if self.operation == "load" else WEIGHT
            load(tile, buffers[0][0, 0], _stride(buffers[0]) * T.int64(4 // self.together))


def number_of(stored: Expr) -> Expr:
    """Return what is multiplied, of an element of a tile."""
    if stored.ty.dtype == BFLOAT16:
        return bfloat16(T.Cast("uint32", stored))
    return T.Cast("int32", stored)


def _stride(memory: Buffer) -> Expr:
    return T.Cast("int64", memory.strides[0])


def _call(instruction: str, *operands: Expr) -> None:
    T.evaluate(T.call_llvm_intrin("void", f"llvm.x86.{instruction}", *operands))
