"""Pooling of floats.

Lanes are channels. A tile of neighbouring windows and vectors is held in registers while
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
    const,
    f32,
    flat,
    gather,
    ramp,
    splat,
)
from bnncc.schedules.templates.window import row_taps, segments
from bnncc.topi_binary.definitions.place import Place
from bnncc.topi_binary.layout import LANES
from bnncc.topi_binary.signature import Operator
from bnncc.topi_binary.spec import Pool2d


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
        for part, mine in whole(names, kernel.n, spec.output_hw[0], outputs):
            pool.write(part, mine)
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
            return _number(taps * len(part.segment.taps[column]))
        if spec.ceil_extra == (0, 0):
            return f32(spec.kernel[0] * spec.kernel[1])
        counts = []
        for axis, place in enumerate((row, x)):
            end = (spec.height, spec.width)[axis] + spec.pads[axis + 2]
            room = end + spec.pads[axis] - place * spec.strides[axis]
            step = spec.dilations[axis]
            counts.append(T.min((room + step - 1) // step, spec.kernel[axis]))
        return _number(counts[0] * counts[1])

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
        return Product(None, (), lambda held: self._join(held, part, pixel, y, x))

    def _join(self, held: At, part: Range, pixel: Pixel, y: Expr, x: Expr) -> None:
        channels = ramp(T.Cast("int64", pixel.block) * LANES)
        if part.group.lanes[-1] < LANES:
            channels = T.min(channels, splat(const(self.spec.channels - 1)))
        new = gather(
            self.memory,
            self.data.shape,
            [pixel.n, channels, T.Cast("int64", y), T.Cast("int64", x)],
            axis=1,
        )
        old = held.load()
        held.store(T.max(old, new) if self.spec.kind == "max" else old + new)


def _number(count: Expr) -> Expr:
    """Return a count as a float in every lane; 32-bit processors convert no integers of 64."""
    return splat(T.Cast("float32", T.Cast("int32", count)))
