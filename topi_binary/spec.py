"""Specs: the computation of a fused kernel as plain data, an anchor and its epilogue.

Each class is a kind of kernel and a row of the operator registry: it names its definition and
oracle, and defines types and extents, see `kind`. `schedules.registry` has a corresponding row.

One Relax operator call is one *anchor* (a convolution, dense layer or pooling, or just its input)
followed by an *epilogue*: steps that are applied to each vector of accumulators in registers. Both
are frozen dataclasses. They are the attributes of the Relax operator and, as JSON, of the PrimFunc
and of tuning records.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, get_args

from bnncc.topi_binary import layout
from bnncc.topi_binary.kind import Convolution, Kind, OfImage, Type, Windowed
from bnncc.topi_binary.kind import Dim as Dim
from bnncc.topi_binary.kind import output_size as output_size
from bnncc.topi_binary.step import FORMS
from bnncc.topi_binary.step import Step as Step


@dataclass(frozen=True)
class BinaryConv2d(Convolution):
    """Binary convolution: anchor of `binary_conv2d` and (with 1x1 extents) `binary_dense`.

    Kernel inputs: data uint32 ``[n, height, width, groups * words(channels / groups)]`` (each group
    starts at a word), if `ternary` the zero plane of the same shape, weight
    (`layout.pack_conv_weight`, uint32, 1-d), then the steps' inputs in order; then the steps'
    outputs in order.

    The accumulator ``acc``, with K = kh * kw * channels_per_group:

    * ``xor`` mode (data +-1): the sum of ``popcount(d ^ w)`` over the taps inside the image. A tap
      outside adds ``popcount(p ^ w)`` if `pad_value` is +1 or -1 (p is all ones or all zeros), and
      ``channels_per_group / 2`` if `pad_value` is 0. So ``dot = K - 2 * acc`` everywhere. If the
      channels per group are odd, `pad_value` is 0 and there are pads, `doubled` is set and ``acc``
      is twice that (``dot = K - acc``). With `ternary`, each exact zero also counts 1/2: then
      `doubled` is set too and ``acc = 2 * popcount((d ^ w) & ~z) + popcount(z) + ...``.
    * ``and`` mode (data in {0, 1}, weight +-1): ``popcount(d) - 2 * popcount(d & w)``, summed over
      the taps inside, so that ``dot = -acc``; if `pad_value` is 1, a tap outside adds
      ``channels_per_group - 2 * popcount(w)``.

    A product of two activations is a 1x1 convolution without padding and groups, in which each
    image has weights of its own (`per_image`), made by `WeightsOfRows`: uint32 ``[n, blocks * words
    * LANES]``, then if `weight_zeros` their zero plane of the same shape, then in mode ``and`` the
    initial values, int32 ``[n, blocks * LANES]``. A zero weight counts like a zero datum; in mode
    ``and``, ``popcount(d & z)`` is added.
    """

    operators = "binary_conv2d", "binary_dense"
    definition = "binary_conv2d:binary_conv2d"
    oracle = "binary:binary_conv2d"
    exact = True

    pad_value: int = 0
    groups: int = 1
    mode: str = "xor"
    ternary: bool = False
    steps: tuple[Step, ...] = ()
    rank: int = 4
    """2 for dense layers: data are ``[n, words]``, height = width = 1, outputs are ``[n, C]``."""
    weight_order: str = "words"
    """Order of the packed weights, see `layout.pack_conv_weight`; it determines the kernel."""
    per_image: bool = False
    weight_zeros: bool = False

    @property
    def doubled(self) -> bool:
        """Whether ``acc`` is in units of 1/2 (``dot = K - acc`` instead of ``K - 2 * acc``)."""
        odd = self.channels_per_group % 2 == 1
        odd_border = odd and any(self.pads) and self.pad_value == 0
        return self.mode == "xor" and (self.ternary or self.weight_zeros or odd_border)

    def dot_from_acc(self) -> tuple[int, int]:
        """Return ``(a, b)`` with ``dot = a * acc + b``."""
        if self.mode == "and":
            return -1, 0
        return (-1, self.taps) if self.doubled else (-2, self.taps)

    @property
    def data_types(self) -> list[Type]:
        """Packed bits; each group starts at a word unless weights are in bit slices."""
        words = self.groups * layout.words(self.channels_per_group)
        if self.weight_order == layout.SLICED:
            words = layout.words(self.channels)
        return [self.image(words, "uint32")] * (1 + self.ternary)


LEVEL_FORM = {
    "xor": "planes", "and": "planes", "bytes": "bytes", "pairs": "pairs", "floats": "floats",
    "packed": "bytes",
}  # fmt: skip
"""Form of the data, in `step.FORMS`, for each method of `FewBitConv2d`."""


@dataclass(frozen=True)
class FewBitConv2d(Convolution):
    """Convolution of small integers: ``acc = sum(k * q)`` for data levels k and weights q.

    Levels are in [0, 2**data_bits). `method` determines how levels and weights are stored, see
    `few_bit_data`. Kernel inputs: the data (`data_bits` planes, or one tensor of numbers), the
    weights (1-d), if `starts` int32 initial values (1-d), then the steps' inputs.

    The sum is over the taps inside the image. With `starts`, the initial value of the output
    channel and of the pixel's border class is added; with `doubled`, the sum counts twice.
    """

    operators = "few_bit_conv2d", "few_bit_dense"
    definition = "few_bit_conv2d:few_bit_conv2d"
    oracle = "few_bit:few_bit_conv2d"
    exact = True

    groups: int = 1
    """If more than one, groups fill whole words of data and whole vectors of outputs; or each
    channel is a group of its own, with float levels."""
    data_bits: int = 1
    weight_bits: int = 1
    """Number of weight planes, or bits in which all weights fit; products may be added in 16
    bits. For ``packed``, bits per code: 1 (signs), 2 or 4."""
    method: str = "and"
    """One of `few_bit_data.METHODS`."""
    starts: bool = False
    doubled: bool = False
    steps: tuple[Step, ...] = ()
    rank: int = 4

    @property
    def depthwise(self) -> bool:
        """Whether each channel is a group of its own."""
        return 1 < self.groups == self.channels == self.out_channels

    @property
    def form(self) -> str:
        """Form in which data are stored, one of `step.FORMS`."""
        return LEVEL_FORM[self.method]

    @property
    def data_types(self) -> list[Type]:
        """Planes of levels, or one tensor of numbers."""
        one = self.image(layout.level_words(self.channels, self.form), FORMS[self.form])
        return [one] * (self.data_bits if self.form == "planes" else 1)


@dataclass(frozen=True)
class RowPool:
    """Max-pooling fused into a convolution, whose rows pass through a small ring buffer.

    `before` are steps applied to the convolution's results before pooling, without tensors or
    outputs; the steps of the convolution are applied after pooling.
    """

    kernel: tuple[int, int]
    strides: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    ceil_extra: tuple[int, int] = (0, 0)
    before: tuple[Step, ...] = ()


@dataclass(frozen=True)
class Conv2d(Convolution):
    """Float convolution, and (with 1x1 extents and `rank` 2) dense layer.

    Kernel inputs: data of `dtype` in `data_layout` (or ``[n, channels]``), weights
    (`layout.pack_float_weight` or, for filtered methods, `filtering.pack_weight`; f32, 1-d), then
    the inputs of `pool.before`, then the steps'. Padding is with zeros.
    """

    operators = "conv2d", "dense"
    definition = "conv2d:conv2d"
    oracle = "floats:conv2d"

    groups: int = 1
    data_layout: str = "NHWC"
    steps: tuple[Step, ...] = ()
    rank: int = 4
    method: str = "direct"
    """One of `filtering.METHODS`."""

    pool: RowPool | None = None
    operands: str = "float32"
    """One of `quantization.FORMATS`. Anything but float32 requires the direct method, and weights
    from `quantization.pack_weight`. An int8 result is in units of a filter's scale."""
    zero_points: tuple[int, ...] = ()
    """For uint8 data (and `operands` not float32): the byte that stands for 0, per channel."""
    packed: int = 1
    """Operands per 32-bit word, up to `quantization.PACKED`."""
    dtype: str = "float32"
    """Type of the data; ``float16`` on GPUs only."""
    apart: bool = False
    """Whether each bfloat16 pixel starts at a word, instead of each window only."""
    code_bits: int = 0
    """Bits per weight if weights are codes, see `weight_codes`; 0 if they are floats. Codes require
    the direct method, one group and no pooling, and are followed by their numbers, f32, 1-d."""
    code_block: int = 0
    """Consecutive weights of an output channel whose codes have the same numbers; divides K."""
    code_zeros: bool = False
    """Whether codes of several bits have a zero point."""

    @property
    def depthwise(self) -> bool:
        """Whether each channel is a group of its own, with one output channel."""
        alone = 1 < self.groups == self.channels == self.out_channels
        return alone and self.data_layout == "NHWC"

    @property
    def collected(self) -> bool:
        """Whether lanes read data that are neither contiguous nor all the same."""
        return not self.shared and self.out_channels > self.groups

    @property
    def unpooled(self) -> Conv2d:
        """The convolution alone, without pooling and steps."""
        return dataclasses.replace(self, pool=None, steps=())

    @property
    def pooling(self) -> Pool2d:
        """The fused pooling as a `Pool2d`, with the steps after it."""
        assert self.pool is not None
        return Pool2d(
            self.n, *self.window_hw, self.out_channels, "max", self.pool.kernel, self.pool.strides,
            pads=self.pool.pads, ceil_extra=self.pool.ceil_extra, steps=self.steps,
        )  # fmt: skip

    @property
    def output_hw(self) -> tuple[int, int]:
        """Height and width of its outputs."""
        return self.window_hw if self.pool is None else self.pooling.window_hw

    @property
    def all_steps(self) -> tuple[Step, ...]:
        """`steps`, and those before the pooling."""
        return (*(self.pool.before if self.pool is not None else ()), *self.steps)

    @property
    def data_types(self) -> list[Type]:
        """Floats, or bytes of an image."""
        return [self.image(self.channels, "uint8" if self.zero_points else self.dtype)]


@dataclass(frozen=True)
class Pool2d(Windowed):
    """Float pooling.

    `kind` is ``max``, ``avg`` (divided by the number of taps inside) or ``avg_full`` (by kh * kw).

    Kernel inputs: data of `dtype` in `data_layout`, then the steps'. ``max`` ignores padding.
    Global pooling has a window as large as the image.
    """

    operators = ("pool2d",)
    definition = "pooling:pool2d"
    oracle = "floats:pool2d"
    epilogue = True

    kind: str
    kernel: tuple[int, int]
    strides: tuple[int, int] = (1, 1)
    dilations: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    ceil_extra: tuple[int, int] = (0, 0)
    """Rows and columns that ceil_mode adds at the bottom and right; no average counts them."""
    data_layout: str = "NHWC"
    steps: tuple[Step, ...] = ()
    squeeze: bool = False
    """Whether the 1x1 result is stored as ``[n, channels]``."""
    dtype: str = "float32"
    """Type of the data; ``float16`` on GPUs only."""

    rank: int = 4

    @property
    def output_rank(self) -> int:
        """4, or 2 where outputs are ``[n, channels]``."""
        return 2 if self.squeeze else self.rank

    @property
    def data_types(self) -> list[Type]:
        """Floats."""
        return [self.image(self.channels, self.dtype)]


@dataclass(frozen=True)
class Elementwise(OfImage):
    """An epilogue without an anchor: bit packing, elementwise operators, layout changes.

    Kernel inputs: data of `dtype` in `data_layout` (or ``[n, channels]`` if `rank` is 2), or
    `from_bits`: uint32 packed bits, ``v`` starts as +1/-1 per bit (0 where the zero plane is set,
    given as a second input if `ternary`); with mode ``and`` as 1/0.
    """

    operators = "elementwise", "bitpack"
    definition = "elementwise:elementwise"
    oracle = "floats:elementwise"
    epilogue = True

    data_layout: str = "NHWC"
    steps: tuple[Step, ...] = ()
    rank: int = 4
    from_bits: bool = False
    ternary: bool = False
    mode: str = "xor"
    dtype: str = "float32"
    """Type of the data: ``float32``, ``uint8`` (images), or ``float16`` (GPUs only)."""
    planes: int = 0
    """If not 0: the inputs are this many planes of levels, and ``v`` starts as the level."""

    @property
    def packed(self) -> bool:
        """Whether the data are packed bits."""
        return self.from_bits or self.planes > 0

    @property
    def operator(self) -> str:
        """The name of the Relax operator."""
        return self.operators[all(step.op != "store" for step in self.steps)]

    @property
    def data_types(self) -> list[Type]:
        """Planes, or a tensor of numbers."""
        last, dtype = self.channels, self.dtype
        if self.packed:
            last, dtype = layout.words(self.channels), "uint32"
        return [self.image(last, dtype)] * (self.planes or 1 + self.ternary)


GREY = (299, 587, 114)
"""Weights of red, green and blue in the grey value of a pixel, times 1000."""

NEIGHBOURS = ((-1, -1), (0, 1), (1, -1))
"""Row and column offsets of the neighbours that a grey value is compared with: 0, 3 and 6 of the
eight, clockwise from the top left."""


@dataclass(frozen=True)
class ImageBits(OfImage):
    """Bits computed from a uint8 image, channel by channel.

    Kernel input: data uint8 in `data_layout`. Output uint32 ``[n, height, width, 1]``. `kind` is

    * ``threshold``: bit c is 1 where ``x[c] >= thresholds[c]`` (the other way where ``flip[c]``);
    * ``grey``: all `out_channels` bits are 1 where the sum of the channels times `GREY` is at least
      ``thresholds[0]``;
    * ``lbp``: bits 0, 1, 2 are 1 if that sum is larger at the neighbour to the top left, to the
      right, or to the bottom left than at the pixel; the sum is 0 outside the image.
    """

    operators = ("image_bits",)
    definition = "image_bits:image_bits"
    oracle = "floats:image_bits"

    kind: str
    thresholds: tuple[int, ...] = ()
    flip: tuple[int, ...] = ()
    """For ``threshold``: 0 or 1 for each channel; empty means all 0."""
    data_layout: str = "NCHW"
    out_channels: int = 3

    @property
    def output_channels(self) -> int:
        """Channels of its output."""
        return self.out_channels

    @property
    def data_types(self) -> list[Type]:
        """Bytes."""
        return [self.image(self.channels, "uint8")]


@dataclass(frozen=True)
class BitwiseMaxPool(Windowed):
    """Max pooling of one plane of bits: OR of the words inside the image (AND if `minimum`).

    Kernel inputs: data uint32 ``[n, height, width, words]``; with `flip` a uint32 ``[words]`` mask
    that is XORed with the result. Output uint32. A window entirely outside the image gives 0.

    With several `planes`, there are that many inputs and outputs: the bits of levels from the
    lowest up; the result is the highest level.
    """

    operators = ("bitwise_maxpool",)
    definition = "pooling:bitwise_max_pool"
    oracle = "floats:bitwise_maxpool"

    kernel: tuple[int, int]
    strides: tuple[int, int] = (1, 1)
    dilations: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    ceil_extra: tuple[int, int] = (0, 0)
    minimum: bool = False
    flip: bool = False
    planes: int = 1
    """If more than one, `minimum` and `flip` must not be set."""

    @property
    def data_types(self) -> list[Type]:
        """Planes of bits."""
        return super().data_types * self.planes

    @property
    def plane_types(self) -> list[Type]:
        """The same number of planes of bits."""
        return super().plane_types * self.planes


@dataclass(frozen=True)
class ConcatBits(Kind):
    """Concatenate planes along the channels.

    Kernel inputs: one uint32 ``[n, height, width, words(c)]`` (or 2-d) for each of `channels`.
    """

    operators = ("concat_bits",)
    definition = "bit_moves:concat_bits"
    oracle = "floats:concat_bits"

    n: Dim
    height: int
    width: int
    channels: tuple[int, ...]
    rank: int = 4

    @property
    def data_types(self) -> list[Type]:
        """One plane for each of `channels`."""
        return [self.image(layout.words(channels), "uint32") for channels in self.channels]


@dataclass(frozen=True)
class SliceBits(OfImage):
    """Select channels of a plane, in any order, possibly repeated.

    Used for slices, splits, shuffles, and the word-aligned groups that a grouped convolution reads.
    `index` holds input channels; -1 gives bit 0. Output words = ceil(len(index) / 32). If
    `bits_table.needs_table` (an irregular selection of many bits), the second input of the kernel
    is `bits_table.slice_table`.
    """

    operators = ("slice_bits",)
    definition = "bit_moves:slice_bits"
    oracle = "floats:slice_bits"

    index: tuple[int, ...]
    rank: int = 4

    @property
    def output_channels(self) -> int:
        """Channels of its output."""
        return len(self.index)


@dataclass(frozen=True)
class PadBits(OfImage):
    """Pad a plane at the border with `bit`: output ``[n, h + t + b, w + l + r, words]``."""

    operators = ("pad_bits",)
    definition = "bit_moves:pad_bits"
    oracle = "floats:pad_bits"

    pads: tuple[int, int, int, int]
    bit: int

    @property
    def output_hw(self) -> tuple[int, int]:
        """Height and width of its output."""
        top, left, bottom, right = self.pads
        return self.height + top + bottom, self.width + left + right


@dataclass(frozen=True)
class WeightsOfRows(Kind):
    """Interleave rows of bits to weights of a `BinaryConv2d.per_image` convolution.

    Kernel input: uint32 ``[n, rows, words(channels)]``. Outputs: uint32 ``[n, blocks * words *
    LANES]``, where word ``c`` of row ``16 * o + lane`` is at ``(o * words + c) * LANES + lane`` and
    rows beyond the last are 0; then, if `count`, int32 ``[n, blocks * LANES]``: minus the popcount
    of each row.
    """

    operators = ("weights_of_rows",)
    definition = "bit_moves:weights_of_rows"
    oracle = "binary:weights_of_rows"

    n: Dim
    rows: int
    channels: int
    count: bool = False

    @property
    def height(self) -> int:  # type: ignore[override]
        """Number of rows, as height of an image."""
        return self.rows

    @property
    def width(self) -> int:  # type: ignore[override]
        """1."""
        return 1

    @property
    def data_types(self) -> list[Type]:
        """Rows of bits."""
        return [((self.n, self.rows, layout.words(self.channels)), "uint32")]

    @property
    def plane_types(self) -> list[Type]:
        """Weights, and initial values of sums."""
        lanes = layout.blocks(self.rows) * layout.LANES
        weight: Type = ((self.n, lanes * layout.words(self.channels)), "uint32")
        return [weight, ((self.n, lanes), "int32")] if self.count else [weight]


Spec = (
    BinaryConv2d
    | FewBitConv2d
    | Conv2d
    | Pool2d
    | Elementwise
    | ImageBits
    | BitwiseMaxPool
    | ConcatBits
    | SliceBits
    | PadBits
    | WeightsOfRows
)

KINDS: tuple[type[Spec], ...] = get_args(Spec)
"""The registry of all kinds of kernels."""

OPERATORS = tuple(name for kind in KINDS for name in kind.operators)
"""Names of their Relax operators, without the prefix ``relax.bnncc.``."""

_KINDS = {kind.__name__: kind for kind in KINDS}


def ceil_extra(out: int, size: int, kernel: int, stride: int, dilation: int, pads: int) -> int:
    """Return how far the last of `out` windows extends beyond the end, as with ONNX's ceil_mode.

    Examples
    --------
    >>> ceil_extra(3, 6, 3, 2, 1, 0), output_size(6, 3, 2, 1, 0, extra=1)
    (1, 3)
    """
    return max(0, (out - 1) * stride + dilation * (kernel - 1) + 1 - size - pads)


def taps_inside(spec: Any, axis: int, position: int) -> range:
    """Return the taps along `axis` (0 rows, 1 columns) of the window at `position`."""
    first = position * spec.strides[axis] - spec.pads[axis]
    step, extent = spec.dilations[axis], (spec.height, spec.width)[axis]
    low = max(0, -(first // step))
    return range(low, max(low, min(spec.kernel[axis], -((first - extent) // step))))


def zero_planes(spec: Spec | None) -> tuple[int, ...]:
    """Return which inputs of the kernel of `spec` are zero planes, which are usually all 0."""
    if spec is None:
        return ()
    return (1,) * spec.ternary + (2 + spec.ternary,) * spec.weight_zeros


def to_json(spec: Spec) -> str:
    """Serialize `spec`, with sorted keys."""
    # `dataclasses.asdict` makes deep copies, which would take half the time of reading records.
    return json.dumps({"spec": type(spec).__name__, **vars(spec)}, default=vars, sort_keys=True)


def from_json(text: str) -> Spec:
    """Invert `to_json`."""
    raw: dict[str, Any] = json.loads(text)
    cls = _KINDS[raw.pop("spec")]
    if raw.get("pool") is not None:
        raw["pool"] = RowPool(**_fields(raw["pool"]))
    spec: Spec = cls(**_fields(raw))
    return spec


def _fields(raw: dict[str, Any]) -> dict[str, Any]:
    steps = {k: tuple(Step(**_fields(s)) for s in raw[k]) for k in ("steps", "before") if k in raw}
    return {k: tuple(v) if isinstance(v, list) else v for k, v in (raw | steps).items()}
