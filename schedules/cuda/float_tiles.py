"""Float convolutions and dense layers as matrix products, in tiles of 64 output channels."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from bnncc.errors import TargetError
from bnncc.schedules.cuda import epilogue, text
from bnncc.schedules.cuda.text import PROCESSORS
from bnncc.schedules.space import Space
from bnncc.schedules.space import space as chosen_from
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import layout
from bnncc.topi_binary.spec import Conv2d

THREADS = 128
"""Threads per block."""

CHANNELS = 64
"""Output channels per tile."""

ROW_NUMBERS = 36
"""Maximum length of a chunk that is a row of the filter."""

TAP_NUMBERS = 16
"""Length of a chunk that is part of a tap."""

HALF_PIXELS = 128
"""Pixels per block, for float16 or bfloat16 operands."""

SHARED_BYTES = 48 * 1024
"""Shared memory per block that every GPU supports."""

_IMAGE_COLUMNS = 8  # maximum, of a filter over an image in planes
_IMAGE_STEPS = 12  # of 16 filter elements, which fit in registers
_IMAGE_TILES = 2 * PROCESSORS  # number of blocks from which tiles may be larger
_IMAGE_BLOCKS = 2 * PROCESSORS  # limited by registers
_IMAGE_BYTES = 48 * 1024  # of shared memory
_HALF_NUMBERS = 32  # per chunk
_HALF_UNROLLED = 8  # chunks up to which addresses are compile-time constants
_HALF_PITCH = 20  # words per pixel in shared memory
_HALF_BLOCKS = 3 * PROCESSORS  # limited by registers
_HALF_BYTES = 64 * 1024  # of shared memory
_BLOCKS = 2 * PROCESSORS
"""Number of blocks that occupies a large GPU."""


@dataclass(frozen=True)
class Cut:
    """Partition of the work.

    Attributes
    ----------
    rows : int
        Pixels per thread.
    splits : int
        Groups of threads that divide the elements of a pixel among them.
    """

    rows: int
    splits: int

    @property
    def pixels(self) -> int:
        """Pixels per block."""
        return self.rows * THREADS // self.splits // 8

    def words(self, chunk: int) -> int:
        """Return the words of shared memory: double-buffered chunks of both operands, and sums."""
        buffers = 2 * self.splits * chunk * (self.pixels + 4 + CHANNELS)
        return max(buffers, (self.splits - 1) * self.pixels * CHANNELS)


EFFORT = {
    Cut(8, 1): 1.0, Cut(4, 1): 1.12, Cut(4, 2): 1.3,
    Cut(2, 2): 1.9, Cut(4, 4): 1.6, Cut(2, 4): 2.2,
}  # fmt: skip
"""By partition, from many pixels per block to few: time of a block relative to the first (H200)."""

_ALONE = 1.3
"""Relative time of a block that is alone on its multiprocessor."""


def fits(spec: Conv2d) -> bool:
    """Whether this kernel supports `spec`, and has enough work.

    Dense layers with few rows are faster with one warp per sixteen units.
    """
    many = spec.rank == 4 or (isinstance(spec.n, int) and spec.n >= 32)
    return spec.operands != "float32" or (
        spec.groups == 1 and spec.out_channels > CHANNELS // 4 and many
    )


def many(spec: Conv2d) -> bool:
    """Whether there are enough blocks for tensor cores to be faster than ordinary units."""
    height, width = spec.output_hw
    pixels = layout.blocks(spec.images * height * width, HALF_PIXELS)
    return fits(spec) and pixels * layout.blocks(spec.out_channels, CHANNELS) >= _BLOCKS


def space(spec: Conv2d, target: TargetSpec) -> Space:
    """Return the search space of the kernel of `spec`: the fields of its `Cut`."""
    if spec.operands != "float32" or not fits(spec):
        return Space()
    known = [asdict(cut) for cut in cuts(spec)]
    choices = {name: {point[name] for point in known} for name in known[0]}
    return chosen_from(choices, asdict(default_cut(spec)), lambda point: dict(point) in known)


def cuts(spec: Conv2d) -> list[Cut]:
    """Return the partitions that fit in shared memory, from many pixels per block to few."""
    _, chunk, _ = _chunks(spec)
    return [cut for cut in EFFORT if 4 * cut.words(chunk) <= SHARED_BYTES]


def _chunks(spec: Conv2d) -> tuple[bool, int, int]:
    """Return whether chunks are rows of the filter, the length of a chunk, and their number."""
    depth = spec.channels_per_group
    if spec.kernel[1] * depth <= ROW_NUMBERS:
        return True, spec.kernel[1] * depth, spec.kernel[0]
    chunk = min(depth, TAP_NUMBERS)
    return False, chunk, spec.window_size * layout.blocks(depth, chunk)


def default_cut(spec: Conv2d) -> Cut:
    """Return the partition with the least estimated time; a symbolic batch counts as 1."""
    height, width = spec.output_hw
    pixels = spec.images * height * width
    tiles = layout.blocks(spec.out_channels, CHANNELS)

    def time(cut: Cut) -> float:
        blocks = layout.blocks(layout.blocks(pixels, cut.pixels) * tiles, PROCESSORS)
        return blocks * cut.pixels * EFFORT[cut] * (_ALONE if blocks == 1 else 1.0)

    return min(cuts(spec), key=time)


def kernel(name: str, spec: Conv2d, cut: Cut | None = None) -> text.Kernel:
    """Generate the kernel of `spec`.

    Parameters
    ----------
    name : str
        Name of its function.
    spec : Conv2d
        A spec that `fits`.
    cut : Cut, optional
        Partition of the work; default: `default_cut`.

    Returns
    -------
    Kernel

    Raises
    ------
    TargetError
        If its operands are neither float32 nor pairs of float16 or bfloat16, or its data are bytes.
    """
    depth = spec.channels_per_group
    constants = {
        **text.window(spec), "CHANNELS": spec.out_channels, "DEPTH": depth,
        "RUN": spec.window_size * depth,
    }  # fmt: skip
    if spec.operands != "float32":
        return _halves(name, spec, constants)
    cut = cut or default_cut(spec)
    by_rows, chunk, count = _chunks(spec)
    constants |= {
        "BY_ROWS": by_rows, "CHUNK": chunk, "CHUNKS": count,
        "ROWS": cut.rows, "SPLITS": cut.splits,
    }  # fmt: skip
    return _made(name, spec, constants, "conv_by_tiles", cut.pixels, cut.words(chunk))


@dataclass(frozen=True)
class _ImageTile:
    """The part of an image in planes that a block computes, see ``device/image_conv.cuh``.

    Attributes
    ----------
    rows, columns : int
        Of the output, per block.
    pairs : int
        Words per filter row.
    pitch : int
        Words per image row in shared memory.
    words : int
        Words of shared memory.
    count : int
        Tiles per image.
    """

    rows: int
    columns: int
    pairs: int
    pitch: int
    words: int
    count: int


def _image_tile(spec: Conv2d) -> _ImageTile | None:
    """Return the largest tiles of which there are enough; None if this kernel does not apply."""
    (kernel_y, kernel_x), (stride_y, stride_x) = spec.kernel, spec.strides
    if spec.data_layout != "NCHW" or spec.rank != 4 or spec.dilations != (1, 1):
        return None
    if stride_x % 2 or kernel_x > _IMAGE_COLUMNS:
        return None
    height, width = spec.output_hw
    across = layout.blocks(width, 128)
    columns = layout.blocks(layout.blocks(width, across), 16) * 16
    pairs = 1 << (layout.blocks(kernel_x, 2) - 1).bit_length()
    pitch = (columns - 1) * stride_x // 2 + pairs
    pitch += pitch % 2
    if layout.blocks(spec.channels * kernel_y * pairs, 8) > _IMAGE_STEPS:
        return None
    for rows in (8, 4, 2, 1):
        words = spec.channels * ((rows - 1) * stride_y + kernel_y) * pitch
        count = across * layout.blocks(height, rows)
        enough = spec.images * count >= _IMAGE_TILES or rows == 1
        if enough and 4 * words <= _IMAGE_BYTES:
            return _ImageTile(rows, columns, pairs, pitch, words, count)
    return None


def _halves(name: str, spec: Conv2d, constants: dict[str, text.Constant]) -> text.Kernel:
    if spec.operands == "int8" or spec.packed != 2 or spec.zero_points:
        what = " for images of bytes" if spec.zero_points else ""
        raise TargetError(
            f"--first-layer {spec.operands} is not available on this GPU{what}",
            hint="float16 and bfloat16 are, from sm_80 on and for images of floats",
        )
    assert not spec.apart, "taps are read side by side"
    constants |= {
        "FILLED_CHANNELS": layout.blocks(spec.out_channels) * layout.LANES,
        "FLOAT16": spec.operands == "float16",
    }
    if tile := _image_tile(spec):
        constants |= {
            "TILE_ROWS": tile.rows, "TILE_COLUMNS": tile.columns, "PAIRS": tile.pairs,
            "PITCH": tile.pitch,
        }  # fmt: skip
        made = _made(
            name, spec, constants, "conv_of_image", 1, tile.words, "half_conv", "image_conv"
        )
        return replace(made, units=tile.count, most=max(1, _IMAGE_BLOCKS // made.tiles))
    chunks = layout.blocks(int(constants["RUN"]), _HALF_NUMBERS)
    direct = spec.dtype == spec.operands and spec.data_layout == "NHWC" and spec.channels % 8 == 0
    numbers = 0 if direct else 2 * HALF_PIXELS * _HALF_PITCH
    filters = chunks * _HALF_NUMBERS // 2 * CHANNELS
    resident = 4 * (numbers + filters) <= _HALF_BYTES
    constants |= {
        "UNROLL": chunks if chunks <= _HALF_UNROLLED else 1,
        "RESIDENT": resident,
    }
    words = numbers + filters * resident
    made = _made(
        name,
        spec,
        constants,
        "conv_of_halves" if direct else "conv_by_halves",
        HALF_PIXELS,
        words,
        "half_conv",
    )
    return replace(made, most=_HALF_BLOCKS // made.tiles) if resident else made


def _made(
    name: str,
    spec: Conv2d,
    constants: dict[str, text.Constant],
    function: str,
    pixels: int,
    shared_words: int,
    *headers: str,
) -> text.Kernel:
    call = f"bnncc::{function}<{{layer}}>(in0, in1, images, (int*)shared, {{finish}});"
    height, width = spec.output_hw
    files = ("common", "floats", "float_tiles", *headers)
    source = epilogue.source(name, spec, files, constants, call)
    return text.Kernel(
        name, source, THREADS, height * width, pixels,
        layout.blocks(spec.out_channels, CHANNELS), 4 * shared_words,
    )  # fmt: skip
