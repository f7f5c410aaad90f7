"""Pooling of floats and of bits.

Lanes are channels (or words). A tile of neighbouring windows and vectors is held in registers while
the taps inside the image are visited; rows outside are left out by the bounds of the loop, columns
outside by not writing them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.schedules.intrin import TensorPair
from bnncc.schedules.intrin_portable import JOIN
from bnncc.schedules.templates.channel_tiles import (
    At,
    Group,
    Names,
    Pixel,
    Product,
    Range,
    groups,
    named,
    whole,
)
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
from bnncc.topi_binary.signature import Operator, aliased
from bnncc.topi_binary.spec import BitwiseMaxPool, Pool2d


def pool2d(spec: Pool2d, columns: int, vectors: int) -> tuple[tirx.PrimFunc, Windows, Names]:
    """Define a float pooling with its epilogue.

    ``out[n, y, x, c] = epilogue(max or mean of the window)``.

    Parameters
    ----------
    spec : Pool2d
        What it computes.
    columns, vectors : int
        Windows, and vectors of channels, of a tile.

    Returns
    -------
    func : PrimFunc
        With blocks as in `channel_tiles`.
    windows : Windows
        What wrote them.
    names : Names
        What the output is cut into.
    """
    with Operator(spec) as kernel, T.sblock("root"):
        T.reads()
        T.writes()
        outputs = views(spec.steps, kernel.outputs, spec.channels)
        pool = Windows(spec, kernel.inputs[0], kernel.inputs[1:], flat(kernel.inputs[0]))
        names = pool.names(columns, vectors)
        for part in whole(names, kernel.n, spec.output_hw[0]):
            # Of each range its own: TVM takes no result from two blocks in one nest.
            pool.write(part, [aliased(buffer) for buffer in outputs])
    return kernel.func, pool, names


@dataclass(frozen=True)
class Windows:
    """Writes the windows of one pooling.

    Attributes
    ----------
    spec : Pool2d
        What it computes.
    data : Buffer
        Of the kernel.
    params : list of Buffer
        Of the kernel.
    memory : Buffer, optional
        `data` as `flat` returns it; not needed with `ring`.
    ring : int, default 0
        If not 0, `data` holds row y of the one image at ``y % ring``.
    shift : int, default 0
        And column x at ``x + shift``.
    """

    spec: Pool2d
    data: Any
    params: list[Any]
    memory: Any = None
    ring: int = 0
    shift: int = 0

    def names(self, columns: int, vectors: int, kind: str = "") -> Names:
        """Cut the output into tiles; a vector of fewer channels is one of its own."""
        cut = groups(self.spec.channels, vectors, apart=True)
        return named(cut, segments(self.spec, columns), kind)

    def pair(self, group: Group) -> TensorPair | None:
        """Return what joins a tile of channels with data; None where these are far apart."""
        spec = self.spec
        if not self.ring and spec.rank == 4 and spec.data_layout == "NCHW":
            return None
        return JOIN["max" if spec.kind == "max" else "add", LANES if self.ring else group.lanes[-1]]

    def write(self, part: Range, outputs: list[Any]) -> None:
        """Write the blocks of a range; `outputs` have been passed through `epilogue.views`."""
        spec = self.spec
        first = float("-inf") if spec.kind == "max" else 0.0
        acc = part.sums(
            spec, 1, partial(self._product, part), start=lambda pixel, lane: T.float32(first)
        )
        with part.each(acc) as tile:
            pixel = part.pixel(tile)
            taps = row_taps(spec, pixel.h)[1] if spec.kind == "avg" else None
            for column in range(part.segment.width):
                for vector, valid in enumerate(part.group.lanes):
                    value = part.vector(acc, tile, column, vector)
                    x, block = pixel.w + column, pixel.block + vector
                    if spec.kind != "max":
                        value = value / self._divisor(part, pixel.h, taps, x, column)
                    at = Place(pixel.n, pixel.h, x, block, spec.channels, valid, spec.output_rank)
                    emit(spec.steps, value, self.params, outputs, at)

    def _divisor(self, part: Range, row: Expr, taps: Expr, x: Expr, column: int) -> Expr:
        spec = self.spec
        if spec.kind == "avg":
            return splat(T.Cast("float32", taps * len(part.segment.taps[column])))
        if spec.ceil_extra == (0, 0):
            return f32(spec.kernel[0] * spec.kernel[1])
        counts = []
        for axis, place in enumerate((row, x)):
            end = (spec.height, spec.width)[axis] + spec.pads[axis + 2]
            room = end + spec.pads[axis] - place * spec.strides[axis]
            step = spec.dilations[axis]
            counts.append(T.min((room + step - 1) // step, spec.kernel[axis]))
        return splat(T.Cast("float32", counts[0] * counts[1]))

    def _product(self, part: Range, pixel: Pixel, kh: Expr, kw: Expr, _: Expr) -> Product:
        spec, first = self.spec, pixel.block * LANES
        y = pixel.h * spec.strides[0] - spec.pads[0] + kh * spec.dilations[0]
        x = pixel.w * spec.strides[1] - spec.pads[1] + kw * spec.dilations[1]
        pair = self.pair(part.group)
        if pair is not None:
            place = [pixel.n, first] if spec.rank == 2 else [pixel.n, y, x, first]
            if self.ring:
                place = [T.floormod(y, self.ring), x + self.shift, first]
            return Product(pair, (At(self.data, place),))
        return Product(None, (), lambda held: self._joined(held, part, pixel, y, x))

    def _joined(self, held: Expr, part: Range, pixel: Pixel, y: Expr, x: Expr) -> Expr:
        channels = ramp(T.Cast("int64", pixel.block) * LANES)
        if part.group.lanes[-1] < LANES:
            channels = T.min(channels, splat(const(self.spec.channels - 1)))
        new = gather(self.memory, self.data.shape, [pixel.n, channels, y, x], axis=1)
        return T.max(held, new) if self.spec.kind == "max" else held + new


def bitwise_maxpool(spec: BitwiseMaxPool, columns: int, parallel: bool) -> tirx.PrimFunc:
    """Define max (or min) pooling of packed bits.

    Parameters
    ----------
    spec : BitwiseMaxPool
        What it computes.
    columns : int
        Windows of a tile.
    parallel : bool
        Whether rows are divided among threads.

    Returns
    -------
    tirx.PrimFunc
        ``out[n, y, x, w] = (OR or AND of the window) ^ flip[w]``.
    """
    height, _ = spec.output_hw
    words = layout.words(spec.channels)
    empty_rows = not all(taps_inside(spec, 0, row) for row in range(height))
    with Operator(spec) as kernel:
        data = kernel.inputs[: spec.planes]
        with loops([kernel.n, height], parallel=parallel) as (n, row):
            low, taps = row_taps(spec, row)
            for segment in segments(spec, columns):
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
