"""What a kernel that looks up nibbles reads: the table, data as offsets, weights nibble by nibble.

A *nibble* is four channels. Row t of the table holds ``popcount(t ^ i)`` for i = 0 .. 15, repeated
to a whole vector. Nibbles of data become offsets of rows, one byte each; weights, stored as two
nibbles to a byte (`layout.pack_conv_weight`, order ``nibbles``), become one nibble to a byte. All
are made once in a call, and small beside the work that reads them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from bnncc.schedules.intrin_portable import popcount
from bnncc.schedules.templates.taps import Kernel
from bnncc.topi_binary import layout
from bnncc.topi_binary.layout import NIBBLE_LANES

Buffer = Any
Expr = Any

NIBBLES = layout.WORD_BITS // 4
"""Nibbles in a word."""

ROW_UNIT = 16
"""A data nibble t is stored as ``16 * t``, which an address scaled by 4 makes the row's place."""

ROW = 64
"""Bytes from one row of the table to the next: rows lie in one cache line each, and the table is so
large that TVM does not put it on the stack, where it would not be aligned."""

_CONVERTED = 32
"""Bytes of data converted at a time."""


def whole(buffer: Buffer) -> Expr:
    """Return the region of all of `buffer`."""
    return buffer[tuple(slice(0, extent) for extent in buffer.shape)]


def padded(kernel: Kernel) -> Kernel:
    """Return `kernel` as it is on data with the border that `offsets` adds.

    Padding with +1 or -1 (or 0 in mode ``and``) is in the copied data, so no tap leaves the image.
    Padding with zeros, which one bit does not hold, stays: those taps are skipped.
    """
    spec = kernel.spec
    if kernel.pads_zeros or spec.rank == 2:
        return kernel
    top, left, bottom, right = spec.pads
    height, width = spec.height + top + bottom, spec.width + left + right
    return dataclasses.replace(
        kernel, spec=dataclasses.replace(spec, height=height, width=width, pads=(0, 0, 0, 0))
    )


def table(size: int) -> Buffer:
    """Fill the table, `size` bytes of each row (block ``table``)."""
    made = T.sblock_alloc_buffer((17 * ROW,), "uint8")
    IRBuilder.name("table", made)
    kind = f"uint8x{size}"
    with T.sblock("table"):
        T.reads()
        T.writes(whole(made))
        with T.serial(0, 16) as t:
            index = T.Cast(kind, T.Ramp(0, 1, size) & T.Broadcast(T.int32(15), size))
            differ = T.Broadcast(T.Cast("uint8", t), size) ^ index
            T.buffer_store(made, T.Cast(kind, popcount(differ)), [T.Ramp(t * ROW, 1, size)])
    return made


def offsets(kernel: Kernel, masked: bool) -> Buffer:
    """Copy the data as offsets of rows (block ``offsets``).

    Parameters
    ----------
    kernel : Kernel
        The function being written.
    masked : bool
        Whether to make two planes, with exact zeros as 1 and as 0.

    Returns
    -------
    Buffer of uint8, shape (planes, n, height, width * nibbles)
        With the border of `padded`. Rows of a dense layer are columns.
    """
    spec = kernel.spec
    depth = spec.groups * kernel.group_words * 4
    rows, columns = spec.height, spec.width
    if kernel.rows_are_columns:
        rows, columns = 1, kernel.width
    outer = padded(kernel).spec
    bordered = (outer.height, outer.width) != (spec.height, spec.width)
    top, left = (spec.pads[0], spec.pads[1]) if bordered else (0, 0)
    high = rows + outer.height - spec.height
    wide = columns + outer.width - spec.width
    made = T.sblock_alloc_buffer((1 + masked, kernel.n, high, wide * 2 * depth), "uint8")
    IRBuilder.name("offsets", made)
    pairs = T.decl_buffer((1 + masked, kernel.n, high, wide * depth), "uint16", data=made.data)
    size = columns * depth
    sources = [kernel.data, *([kernel.zero] if masked else [])]
    planes = [T.decl_buffer((kernel.n, rows, size), "uint8", data=s.data) for s in sources]

    def convert(n: Expr, h: Expr, first: Expr, lanes: int) -> None:
        bits = [plane[n, h, T.Ramp(first, 1, lanes)] for plane in planes]
        values = [bits[0] | bits[1], bits[0] & ~bits[1]] if masked else bits
        four, eight, mask = (T.Broadcast(T.uint16(k), lanes) for k in (4, 8, 0xF0F0))
        for number, value in enumerate(values):
            wider = T.Cast(f"uint16x{lanes}", value)
            both = ((wider << four) | (wider << eight)) & mask
            place = T.Ramp(first + left * depth, 1, lanes)
            T.buffer_store(pairs, both, [number, n, h + top, place])

    with T.sblock("offsets"):
        T.reads(*(whole(source) for source in sources))
        T.writes(whole(made))
        if bordered:
            _fill(made, kernel)
        with T.grid(kernel.n, rows) as (n, h):
            count, rest = divmod(size, _CONVERTED)
            if count:
                with T.serial(0, count) as x:
                    convert(n, h, x * _CONVERTED, _CONVERTED)
            if rest:
                with T.serial(0, rest // 4) as x:
                    convert(n, h, x * 4 + count * _CONVERTED, 4)
    return made


def _fill(made: Buffer, kernel: Kernel) -> None:
    """Fill everything with a pixel outside the image; what is inside overwrites it."""
    depth = kernel.group_words * NIBBLES
    extents = (*made.shape[:3], made.shape[3] // depth, depth)
    with T.grid(*extents) as (plane, n, h, w, nibble):
        word = kernel.pad_word(nibble // NIBBLES)
        shift = T.Cast("uint32", nibble % NIBBLES * 4)
        value = T.Cast("uint8", (word >> shift) & T.uint32(15))
        T.buffer_store(made, value * T.uint8(ROW_UNIT), [plane, n, h, w * depth + nibble])


def split(kernel: Kernel, made: Buffer, slot: Expr, first: Expr, lanes: int) -> None:
    """Copy the weights of some output channels, one nibble to a byte (block ``split``).

    Parameters
    ----------
    kernel : Kernel
        The function being written.
    made : Buffer of uint8, shape (slots, nibbles of one channel, lanes)
        The copy.
    slot : Expr
        Where in the copy.
    first : Expr
        The first lane, in the order in which they are stored.
    lanes : int
        How many.
    """
    rows = kernel.spec.kernel[0] * kernel.spec.kernel[1] * kernel.group_words * 4
    blocks = layout.blocks(kernel.spec.out_channels, NIBBLE_LANES)
    packed = T.decl_buffer((blocks, rows, NIBBLE_LANES), "uint8", data=kernel.weight.data)
    size = min(lanes, NIBBLE_LANES)
    low, high = (T.Broadcast(T.uint8(k), size) for k in (15, 4))
    with T.sblock("split"):
        T.reads(whole(kernel.weight))
        T.writes(whole(made))
        with T.serial(0, rows) as row:
            for start in range(0, lanes, size):
                lane = first + start
                place = T.Ramp(lane % NIBBLE_LANES, 1, size)
                # Lanes beyond the last block are read by nobody.
                block = T.min(lane // NIBBLE_LANES, blocks - 1)
                pair = packed[block, row, place]
                there = T.Ramp(start, 1, size)
                T.buffer_store(made, pair & low, [slot, 2 * row, there])
                T.buffer_store(made, pair >> high, [slot, 2 * row + 1, there])
