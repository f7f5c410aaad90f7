"""Pooling of floats and of bits.

Lanes are channels (or words). A tile of neighbouring windows and vectors is held in registers while
the taps inside the image are visited; rows outside are left out by the bounds of the loop, columns
outside by not writing them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.schedules.templates.epilogue import emit, views
from bnncc.schedules.templates.kernel import (
    Expr,
    Register,
    bind,
    const,
    f32,
    flat,
    gather,
    load,
    loop,
    loops,
    ramp,
    splat,
    store,
    u32,
)
from bnncc.schedules.templates.place import Place
from bnncc.schedules.templates.window import Segment, row_taps, segments, taps_inside
from bnncc.topi_binary import layout
from bnncc.topi_binary.layout import LANES
from bnncc.topi_binary.signature import Operator
from bnncc.topi_binary.spec import BitwiseMaxPool, Pool2d

UNROLLED_TAPS = 8
"""Operator rows with more taps than this are loops."""


@dataclass(frozen=True)
class Tile:
    """How a pooling is cut.

    Attributes
    ----------
    columns : int, default 1
        Windows in a register tile.
    vectors : int, default 1
        Vectors of channels in a register tile.
    parallel : bool, default False
        Whether rows are divided among threads.
    """

    columns: int = 1
    vectors: int = 1
    parallel: bool = False


def pool2d(spec: Pool2d, tile: Tile | None = None) -> tirx.PrimFunc:
    """Define a float pooling with its epilogue.

    Parameters
    ----------
    spec : Pool2d
        What it computes.
    tile : Tile, optional
        How it is cut; one vector at a time if not given.

    Returns
    -------
    tirx.PrimFunc
        ``out[n, y, x, c] = epilogue(max or mean of the window)``.
    """
    tile = tile or Tile()
    full, tail = divmod(spec.channels, LANES)
    whole, rest = divmod(full, tile.vectors)
    groups = [(whole, 0, (LANES,) * tile.vectors)] if whole else []
    if rest or tail:
        lanes = (LANES,) * rest + (tail,) * bool(tail)
        groups.append((1, whole * tile.vectors, lanes))
    with Operator(spec) as kernel:
        outputs = views(spec.steps, kernel.outputs, spec.channels)
        pool = Windows(spec, kernel.inputs[0], kernel.inputs[1:], outputs)
        with loops([kernel.n, spec.output_hw[0]], parallel=tile.parallel) as (n, row):
            low, taps = row_taps(spec, row)
            for segment in segments(spec, tile.columns):
                with loop(segment.tiles) as number:
                    start = bind(number * segment.width + segment.start)
                    for count, first, lanes in groups:
                        with loop(count) as group:
                            block = bind(group * len(lanes) + first)
                            pool.tile(n, row, (low, taps), segment, start, block, lanes)
    return kernel.func


@dataclass(frozen=True)
class Windows:
    """Writes tiles of windows of one pooling.

    Attributes
    ----------
    spec : Pool2d
        What it computes.
    data, params, outputs : Buffer and lists of Buffer
        Of the kernel, outputs passed through `epilogue.views`.
    ring : int, default 0
        If not 0, `data` holds row y of the one image at ``y % ring``, a power of two.
    shift : int, default 0
        And column x at ``x + shift``.
    """

    spec: Pool2d
    data: Any
    params: list[Any]
    outputs: list[Any]
    ring: int = 0
    shift: int = 0

    def tile(
        self, n: Expr, row: Expr, rows: tuple[Expr, Expr], segment: Segment, start: Expr,
        block: Expr, lanes: tuple[int, ...],
    ) -> None:  # fmt: skip
        """Write the windows of `segment` from column `start`, vectors of channels from `block`."""
        spec = self.spec
        low, taps = rows
        cells = [(c, v) for c in range(segment.width) for v in range(len(lanes))]
        held = {cell: Register() for cell in cells}
        for register in held.values():
            register.set(f32(float("-inf") if spec.kind == "max" else 0.0))
        with loop(taps) as turn:
            y = bind(row * spec.strides[0] - spec.pads[0] + (turn + low) * spec.dilations[0])
            for column in range(segment.width):
                inside = segment.taps[column]
                unrolled = len(inside) <= UNROLLED_TAPS
                with loop(1 if unrolled else len(inside)) as number:
                    for tap in inside if unrolled else [bind(number + inside.start)]:
                        x = (start + column) * spec.strides[1] + tap * spec.dilations[1]
                        x = bind(x - spec.pads[1])
                        for vector, valid in enumerate(lanes):
                            new = self._datum(n, y, x, block + vector, valid)
                            old = held[column, vector].value
                            both = T.max(old, new) if spec.kind == "max" else old + new
                            held[column, vector].set(both)
        for column, vector in cells:
            value = held[column, vector].value
            if spec.kind != "max":
                value = value / self._divisor(row, taps, segment, start, column)
            at = Place(
                n, row, bind(start + column), bind(block + vector),
                spec.channels, lanes[vector], spec.output_rank,
            )  # fmt: skip
            emit(spec.steps, value, self.params, self.outputs, at)

    def _divisor(self, row: Expr, taps: Expr, segment: Segment, start: Expr, column: int) -> Expr:
        spec = self.spec
        if spec.kind == "avg":
            return splat(T.Cast("float32", taps * len(segment.taps[column])))
        if spec.ceil_extra == (0, 0):
            return f32(spec.kernel[0] * spec.kernel[1])
        counts = []
        for axis, place in enumerate((row, start + column)):
            end = (spec.height, spec.width)[axis] + spec.pads[axis + 2]
            room = end + spec.pads[axis] - place * spec.strides[axis]
            step = spec.dilations[axis]
            counts.append(T.min((room + step - 1) // step, const(spec.kernel[axis])))
        return splat(T.Cast("float32", counts[0] * counts[1]))

    def _datum(self, n: Expr, y: Expr, x: Expr, block: Expr, valid: int) -> Expr:
        first = block * LANES
        if self.ring:
            slot = T.bitwise_and(y, const(self.ring - 1))
            return load(self.data, [slot, x + self.shift, first])
        if self.spec.rank == 2:
            return load(self.data, [n, first], valid)
        if self.spec.data_layout == "NHWC":
            return load(self.data, [n, y, x, first], valid)
        channels = ramp(first)
        if valid < LANES:
            channels = T.min(channels, splat(tirx.IntImm("int64", self.spec.channels - 1)))
        return gather(flat(self.data), self.data.shape, [n, channels, y, x], axis=1)


def bitwise_maxpool(spec: BitwiseMaxPool, tile: Tile | None = None) -> tirx.PrimFunc:
    """Define max (or min) pooling of packed bits.

    Parameters
    ----------
    spec : BitwiseMaxPool
        What it computes.
    tile : Tile, optional
        How it is cut; `vectors` is not used.

    Returns
    -------
    tirx.PrimFunc
        ``out[n, y, x, w] = (OR or AND of the window) ^ flip[w]``.
    """
    tile = tile or Tile()
    height, _ = spec.output_hw
    words = layout.words(spec.channels)
    empty_rows = not all(taps_inside(spec, 0, row) for row in range(height))
    with Operator(spec) as kernel:
        data = kernel.inputs[: spec.planes]
        with loops([kernel.n, height], parallel=tile.parallel) as (n, row):
            low, taps = row_taps(spec, row)
            for segment in segments(spec, tile.columns):
                with loop(segment.tiles) as number:
                    start = bind(number * segment.width + segment.start)
                    for first, count, lanes in word_vectors(words):
                        with loop(count) as turn:
                            word = bind(turn * lanes + first)
                            held = _join_window(
                                spec, data, (n, row, word), (low, taps), segment, start, lanes
                            )
                            for column, values in enumerate(held):
                                for value, out in zip(values, kernel.outputs, strict=True):
                                    if spec.minimum and empty_rows:
                                        some = splat(taps > 0, lanes) if lanes > 1 else taps > 0
                                        value = T.Select(some, value, _fill(0, lanes))
                                    if spec.flip:
                                        value = value ^ load_words(kernel.inputs[1], [word], lanes)
                                    store_words(out, [n, row, start + column, word], value, lanes)
    return kernel.func


def _join_window(
    spec: BitwiseMaxPool, data: list[Any], at: tuple[Expr, Expr, Expr], rows: tuple[Expr, Expr],
    segment: Segment, start: Expr, lanes: int,
) -> list[list[Expr]]:  # fmt: skip
    """Write the windows of a tile; return their words by column and plane."""
    n, row, word = at
    low, taps = rows
    held = [[Register("uint32", lanes) for _ in data] for _ in segment.taps]
    for registers, inside in zip(held, segment.taps, strict=True):
        for register in registers:
            register.set(_fill(0xFFFFFFFF if spec.minimum and inside else 0, lanes))
    with loop(taps) as turn:
        y = bind(row * spec.strides[0] - spec.pads[0] + (turn + low) * spec.dilations[0])
        for column, (registers, inside) in enumerate(zip(held, segment.taps, strict=True)):
            for tap in inside:
                x = (start + column) * spec.strides[1] + (tap * spec.dilations[1] - spec.pads[1])
                new = [load_words(plane, [n, y, x, word], lanes) for plane in data]
                if len(data) > 1:
                    _keep_larger(registers, new, lanes)
                    continue
                old = registers[0].value
                registers[0].set(old & new[0] if spec.minimum else old | new[0])
    return [[register.value for register in registers] for registers in held]


def _keep_larger(held: list[Register], new: list[Expr], lanes: int) -> None:
    """Replace levels, given by their bits, by larger ones, compared from the highest bit down."""
    larger, same = _fill(0, lanes), _fill(0xFFFFFFFF, lanes)
    pairs = [(register, T.Bind(value)) for register, value in zip(held, new, strict=True)]
    for register, value in reversed(pairs):
        differ = T.Bind(register.value ^ value)
        larger = T.Bind(larger | (same & differ & value))
        same = T.Bind(same & ~differ)
    for register, value in pairs:
        register.set(register.value ^ ((register.value ^ value) & larger))


def word_vectors(words: int) -> list[tuple[int, int, int]]:
    """Cut `words` into ranges of vectors: (first word, vectors, lanes of each)."""
    out, first = [], 0
    for lanes in (16, 8, 4, 2, 1):
        count = (words - first) // lanes
        if count:
            out.append((first, count, lanes))
            first += count * lanes
    return out


def _fill(value: int, lanes: int) -> Expr:
    return u32(value, lanes) if lanes > 1 else tirx.IntImm("uint32", value)


def load_words(buffer: Any, where: list[Any], lanes: int) -> Expr:
    """Load `lanes` words; a scalar if that is 1."""
    return load(buffer, where, lanes, lanes) if lanes > 1 else buffer[tuple(where)]


def store_words(buffer: Any, where: list[Any], value: Expr, lanes: int) -> None:
    """Store `lanes` words; a scalar if that is 1."""
    if lanes > 1:
        store(buffer, where, value, lanes, lanes)
    else:
        T.buffer_store(buffer, value, where)
