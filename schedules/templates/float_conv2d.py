"""Float convolution whose rows are pooled: a register tile of output columns times channel vectors.

The lanes of a vector are `LANES` output channels. Each datum is read as it lies in the tensor, NHWC
or NCHW, and broadcast against them; where every channel is a group of its own, lanes load data as a
vector instead. A tile of columns x vectors of accumulators stays in registers while the reduction
runs outside it, and the ring of rows (`line_buffer`) takes the accumulators from there. Taps
outside the image are skipped: rows by the bounds of the loop, columns by leaving them out of the
code of the tiles at the border. The blocks are those of `channel_tiles`. Without pooling there is
no ring, and `schedules.float_conv2d` schedules the definition.
"""

from __future__ import annotations

from functools import partial

from tvm.tirx.script import builder as T

from bnncc.schedules.intrin import TensorPair
from bnncc.schedules.intrin_portable import MULTIPLY_ADD, MULTIPLY_ADD_LANES, fused_multiply_add
from bnncc.schedules.templates.channel_tiles import (
    At,
    Group,
    Pixel,
    Product,
    Range,
    groups,
    named,
)
from bnncc.schedules.templates.kernel import (
    Expr,
    const,
    flat,
    gather,
    ramp,
    splat,
)
from bnncc.schedules.templates.line_buffer import Rows
from bnncc.schedules.templates.window import segments
from bnncc.topi_binary.layout import LANES
from bnncc.topi_binary.signature import Operator
from bnncc.topi_binary.spec import Conv2d


class Kernel:
    """A float convolution with pooling and epilogue.

    ``out[n, y, x, o] = epilogue(sum data[n, y * s - p + i * d, ...] * weight[o, i, j, c])``.

    Parameters
    ----------
    spec : Conv2d
        What it computes.
    columns, vectors : int
        Output columns, and vectors of output channels, of a tile.
    chunks : int
        Pieces of each image.
    parallel : bool
        Whether images and their pieces are divided among threads.

    Attributes
    ----------
    func : PrimFunc
        Not scheduled.
    ranges : Names
        What the output is cut into.
    rows : Rows
        Whose pooling is to be scheduled.
    depth : int
        Channels that one product's sum goes over.
    """

    def __init__(
        self, spec: Conv2d, columns: int, vectors: int, chunks: int, parallel: bool
    ) -> None:
        with Operator(spec) as kernel:
            self.spec, (self.data, self.weight, *_) = spec.unpooled, kernel.inputs
            self.rows = Rows(kernel, spec, chunks=chunks, parallel=parallel)
            self.depth = spec.channels // spec.groups
            self.per_group = spec.out_channels // spec.groups
            alone = self.depth == self.per_group == 1 and spec.data_layout == "NHWC"
            self.depthwise = not spec.shared and alone
            while spec.shared and spec.groups > 1 and self.per_group // LANES % vectors:
                vectors -= 1
            self.rows.declare(vectors)
            channels = groups(spec.out_channels, vectors, self.depthwise)
            self.ranges = named(channels, segments(self.spec, columns, self.rows.unit))
            with T.sblock("root"):
                T.reads()
                T.writes()
                self.memory = flat(self.data)
                with self.rows.strips() as strip:
                    self.rows.each(strip, self.ranges, self._range)
        self.func = kernel.func

    def pair(self, group: Group) -> TensorPair | None:
        """Return what computes a product in a tile of channels."""
        if self.spec.shared:
            return MULTIPLY_ADD
        return MULTIPLY_ADD_LANES[group.lanes[-1]] if self.depthwise else None

    def _range(self, part: Range) -> None:
        self.rows.take(part, part.sums(self.spec, self.depth, partial(self._product, part)))

    def _product(self, part: Range, pixel: Pixel, kh: Expr, kw: Expr, channel: Expr) -> Product:
        """Return the product of a datum, or of a vector of them, with a vector of weights."""
        spec, lanes = self.spec, part.group.lanes
        y = pixel.h * spec.strides[0] - spec.pads[0] + kh * spec.dilations[0]
        x = pixel.w * spec.strides[1] - spec.pads[1] + kw * spec.dilations[1]
        # A block of fewer lanes is stored dense; the lanes beyond read what follows it.
        tap = (kh * spec.kernel[1] + kw) * self.depth + channel
        size = spec.kernel[0] * spec.kernel[1] * self.depth
        step: Expr = lanes[0]
        if lanes[-1] < lanes[0]:  # no condition: TVM cannot tell the extent of a region by it
            last = (pixel.block - part.group.first) // (len(lanes) - 1)
            step = lanes[0] - last * (lanes[0] - lanes[-1])
        first = pixel.block * (LANES * size) + tap * step
        weight = At(self.weight, [first])
        if spec.shared:
            group = 0 if spec.groups == 1 else pixel.block * LANES // self.per_group
            datum = At(self.data, self._at(pixel.n, y, x, group * self.depth + channel))
            return Product(MULTIPLY_ADD, (datum, weight))
        if self.depthwise:
            data = At(self.data, self._at(pixel.n, y, x, pixel.block * LANES))
            return Product(MULTIPLY_ADD_LANES[lanes[-1]], (data, weight))
        return Product(
            None,
            (),
            lambda total: total.store(
                fused_multiply_add(
                    self._gathered(pixel, (y, x), channel, lanes), weight.load(), total.load()
                )
            ),
        )

    def _gathered(
        self, pixel: Pixel, at: tuple[Expr, Expr], channel: Expr, lanes: tuple[int, ...]
    ) -> Expr:
        """Return data of which each lane has its own."""
        spec = self.spec
        channels = ramp(T.Cast("int64", pixel.block) * LANES)
        if lanes[-1] < LANES:
            channels = T.min(channels, splat(const(spec.out_channels - 1)))
        if self.per_group > 1:
            channels = T.floordiv(channels, splat(const(self.per_group)))
        where = channels * splat(const(self.depth)) + splat(T.Cast("int64", channel))
        place = self._at(pixel.n, *at, where)
        axis = 1 if spec.data_layout == "NCHW" else 3
        return gather(self.memory, self.data.shape, place, axis)

    def _at(self, n: Expr, y: Expr, x: Expr, channel: Expr) -> list[Expr]:
        if self.spec.data_layout == "NCHW":
            return [n, channel, y, x]
        return [n, y, x, channel]
