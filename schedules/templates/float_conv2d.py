"""Float convolution whose rows are pooled: a register tile of output columns times channel vectors.

The lanes of a vector are `LANES` output channels. Each datum is read as it lies in the tensor, NHWC
or NCHW, and broadcast against them; of a depthwise layer, lanes load data as a vector instead. A
tile of columns x vectors of accumulators stays in registers while the reduction runs outside it,
and the ring of rows (`line_buffer`) takes the accumulators from there. Taps outside the image are
skipped: rows by the bounds of the loop, columns by leaving them out of the code of the tiles at the
border. The blocks are those of `channel_tiles`. The ring is why this is a template; the definition
is `definitions.conv2d`, which tests compare. Without pooling, and with other groups, there is none,
and `schedules.float_conv2d` schedules that. `quantized_conv2d` is the same kernel with other words
of data and other products.
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
        """Declare what is between data and products; return what cuts the output into tiles."""
        return self.spec

    def _begin(self) -> None:
        """Write what comes before the first strip of an image."""

    def _fill(self, strip: Strip) -> None:
        """Write what comes before the products of a strip."""

    def pair(self, group: Group) -> TensorPair:
        """Return what computes a product in a tile of channels."""
        return MULTIPLY_ADD_LANES[group.lanes[-1]] if self.spec.depthwise else MULTIPLY_ADD

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
        weight = Window(self.weight, pixel.block * (LANES * size) + tap * step)
        first = pixel.block * LANES if spec.depthwise else channel
        datum = Window(self.data, *pixel_of(spec, pixel.n, y, x, first))
        return Product(self.pair(part.group), (datum, weight))
