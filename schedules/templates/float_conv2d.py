"""Float convolution with fused max-pooling: register tile of output columns x channel vectors.

The lanes of a vector are `LANES` output channels. Each data element is read from the tensor, NHWC
or NCHW, and broadcast; in depthwise layers, lanes load a vector of data instead. A tile of columns
x vectors of accumulators stays in registers during the reduction, and is then passed to the ring
buffer of rows (`line_buffer`). Taps outside the image are skipped: rows by the bounds of the loop,
columns by generating separate code for the tiles at the border. The blocks are those of
`channel_tiles`. It is a template because of the ring buffer, and is tested against
`definitions.conv2d`. `schedules.float_conv2d` schedules convolutions without pooling, and grouped
ones that are not depthwise. `quantized_conv2d` is the same kernel with other operands and products.
"""

from __future__ import annotations

from functools import partial

from tvm.tirx.script import builder as T

from bnncc.schedules.intrin import TensorPair, Window
from bnncc.schedules.intrin_portable import MULTIPLY_ADD, MULTIPLY_ADD_LANES
from bnncc.schedules.templates.channel_tiles import (
    Group,
    Pixel,
    Product,
    Range,
    groups,
    named,
)
from bnncc.schedules.templates.kernel import Expr
from bnncc.schedules.templates.line_buffer import Rows, Strip
from bnncc.schedules.templates.window import segments
from bnncc.topi_binary.definitions.taps import pixel as pixel_of
from bnncc.topi_binary.layout import LANES
from bnncc.topi_binary.signature import Operator
from bnncc.topi_binary.spec import Conv2d


class Kernel:
    """A float convolution with pooling and epilogue.

    ``out[n, y, x, o] = epilogue(sum data[n, y * s - p + i * d, ...] * weight[o, i, j, c])``.

    Parameters
    ----------
    spec : Conv2d
        Spec of the kernel.
    columns, vectors : int
        Output columns, and vectors of output channels, per tile.
    chunks : int
        Pieces per image.
    parallel : bool
        Whether images and their pieces are divided among threads.

    Attributes
    ----------
    func : PrimFunc
        The kernel, not yet scheduled.
    ranges : Names
        The ranges into which the output is divided.
    rows : Rows
        Its pooling must still be scheduled.
    depth : int
        Channels per group.
    """

    def __init__(
        self, spec: Conv2d, columns: int, vectors: int, chunks: int, parallel: bool
    ) -> None:
        with Operator(spec) as kernel:
            self.spec, (self.data, self.weight, *_) = spec.unpooled, kernel.inputs
            self.rows = Rows(kernel, spec, chunks=chunks, parallel=parallel)
            self.depth = spec.channels_per_group
            self.rows.declare(vectors)
            channels = groups(spec.out_channels, vectors, spec.depthwise)
            self.ranges = named(channels, segments(self._image(), columns, self.rows.unit))
            with T.sblock("root"):
                T.reads()
                T.writes()
                with self.rows.strips(self._begin) as strip:
                    self._fill(strip)
                    self.rows.each(strip, self.ranges, self._range)
        self.func = kernel.func

    def _image(self) -> Conv2d:
        """Allocate the buffers between data and products; return the spec that determines tiles."""
        return self.spec

    def _begin(self) -> None:
        """Write the code before the first strip of an image."""

    def _fill(self, strip: Strip) -> None:
        """Write the code before the products of a strip."""

    def pair(self, group: Group) -> TensorPair:
        """Return the instruction for the products of a group of channel tiles."""
        return MULTIPLY_ADD_LANES[group.lanes[-1]] if self.spec.depthwise else MULTIPLY_ADD

    def _range(self, part: Range) -> None:
        self.rows.take(part, part.sums(self.spec, self.depth, partial(self._product, part)))

    def _product(self, part: Range, pixel: Pixel, kh: Expr, kw: Expr, channel: Expr) -> Product:
        """Return the product of a data element (or vector) and a vector of weights."""
        spec, lanes = self.spec, part.group.lanes
        y = pixel.h * spec.strides[0] - spec.pads[0] + kh * spec.dilations[0]
        x = pixel.w * spec.strides[1] - spec.pads[1] + kw * spec.dilations[1]
        # A partial vector is stored densely; its other lanes read what follows.
        tap = (kh * spec.kernel[1] + kw) * self.depth + channel
        size = spec.window_size * self.depth
        step: Expr = lanes[0]
        if lanes[-1] < lanes[0]:  # arithmetic, since TVM cannot bound a region by a condition
            last = (pixel.block - part.group.first) // (len(lanes) - 1)
            step = lanes[0] - last * (lanes[0] - lanes[-1])
        weight = Window(self.weight, pixel.block * (LANES * size) + tap * step)
        first = pixel.block * LANES if spec.depthwise else channel
        datum = Window(self.data, *pixel_of(spec, pixel.n, y, x, first))
        return Product(self.pair(part.group), (datum, weight))
