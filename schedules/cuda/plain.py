"""GPU kernels of everything but binary convolution: float layers, pooling, moves of bits.

A thread computes adjacent channels of one pixel, or one word of them.
"""

from __future__ import annotations

import numpy as np

from bnncc.errors import TargetError
from bnncc.schedules.cuda import epilogue, few_bit, float_tiles, text
from bnncc.topi_binary import layout
from bnncc.topi_binary.bits_table import needs_table, terms
from bnncc.topi_binary.spec import (
    GREY,
    NEIGHBOURS,
    BitwiseMaxPool,
    ConcatBits,
    Conv2d,
    Elementwise,
    FewBitConv2d,
    ImageBits,
    PadBits,
    Pool2d,
    SliceBits,
    Spec,
)
from bnncc.topi_binary.step import output_kinds

THREADS = 128
"""Threads per block."""

MANY = text.PROCESSORS * 512
"""Number of threads that occupies a large GPU."""

_FLOATS, _BITS = ("common", "floats"), ("common", "bits")


def conv2d(name: str, spec: Conv2d, cut: float_tiles.Cut | None = None) -> text.Kernel:
    """Generate a float convolution without pooling, in tiles if it fits them."""
    if float_tiles.fits(spec):
        return float_tiles.kernel(name, spec, cut)
    per_group = spec.out_channels // spec.groups
    whole: dict[str, text.Constant] = {
        "DEPTH": spec.channels_per_group, "GROUP_OUT": per_group,
        "ONE_GROUP": spec.groups == 1 or per_group % layout.LANES == 0,
        "PIXELS_FIRST": True,  # the threads of a warp read the same filters
    }  # fmt: skip
    if spec.rank == 2:
        return _with_epilogue(
            name, spec, whole, layout.LANES, "bnncc::dense<{layer}>(in0, in1, images, {finish});",
            threads_each=32,
        )  # fmt: skip
    anchor = f"bnncc::Convolution<{{layer}}, {text.C_TYPES[spec.dtype]}>{{{{in0, in1}}}}"
    return _with_epilogue(name, spec, whole, layout.LANES, _each_place(anchor))


def few_bit_conv2d(name: str, spec: FewBitConv2d) -> text.Kernel:
    """Generate a convolution of levels."""
    if spec.depthwise:
        raise TargetError("there is no GPU kernel for depthwise layers of a few bits")
    if few_bit.tiled(spec):
        return _few_bit_tiles(name, spec)
    return _with_epilogue(
        name, spec, few_bit.constants(spec), layout.LANES,
        _each_place(few_bit.anchor(spec), "int"), members=few_bit.border_class(spec),
    )  # fmt: skip


def _few_bit_tiles(name: str, spec: FewBitConv2d) -> text.Kernel:
    """Generate a few-bit kernel that uses tensor cores."""
    height, width = spec.output_hw
    constants = {**text.window(spec), "CHANNELS": spec.out_channels, **few_bit.constants(spec)}
    call = f"bnncc::few_bits_by_mma({few_bit.anchor(spec)}, images, {{finish}});"
    headers = (*_FLOATS, "products", "binary_conv", "few_bit", "few_bit_mma")
    source = epilogue.source(name, spec, headers, constants, call, few_bit.border_class(spec))
    return text.Kernel(
        name, source, THREADS, height * width,
        few_bit.PIXELS * THREADS // 32, layout.blocks(spec.out_channels, few_bit.TILE),
    )  # fmt: skip


def pool2d(name: str, spec: Pool2d) -> text.Kernel:
    """Generate a float pooling."""
    parts = _parts(spec)
    constants: dict[str, text.Constant] = {
        "MAXIMUM": spec.kind == "max", "INSIDE_ONLY": spec.kind == "avg",
        "CEIL": spec.ceil_extra != (0, 0), "PIXELS_FIRST": spec.data_layout == "NCHW",
        "PARTS": parts,
    }  # fmt: skip
    body = "bnncc::pool<{layer}, {lanes}>(in0, images, {finish});"
    return _with_epilogue(name, spec, constants, _lanes(spec), body, threads_each=parts)


def _parts(spec: Pool2d) -> int:
    """Return the number of threads per window: several if windows are few and large."""
    height, width = spec.output_hw
    threads = spec.images * height * width * layout.blocks(spec.output_channels, _lanes(spec))
    taps, parts = spec.window_size, 1
    while 2 * parts <= min(8, taps // 4) and threads * parts < MANY:
        parts *= 2
    return parts


def elementwise(name: str, spec: Elementwise) -> text.Kernel:
    """Generate an epilogue without an anchor."""
    planar = any(step.layout == "NCHW" for step in spec.steps) or spec.data_layout == "NCHW"
    constants: dict[str, text.Constant] = {"PIXELS_FIRST": planar and spec.rank == 4}
    if spec.planes:
        planes = ", ".join(f"in{i}" for i in range(spec.planes))
        constants |= {"DATA_PLANES": spec.planes}
        anchor = f"bnncc::Levels<{{layer}}>{{{{{{{{{planes}}}}}}}}}"
        return _with_epilogue(name, spec, constants, 8, _each_place(anchor))
    if spec.from_bits:
        constants |= {"TERNARY": spec.ternary, "LOW": 0.0 if spec.mode == "and" else -1.0}
        zero = "in1" if spec.ternary else "nullptr"
        anchor = f"bnncc::Bits<{{layer}}>{{{{in0, {zero}}}}}"
        return _with_epilogue(name, spec, constants, 8, _each_place(anchor))
    anchor = f"bnncc::Tensor<{{layer}}, {text.C_TYPES[spec.dtype]}>{{{{in0}}}}"
    return _with_epilogue(name, spec, constants, _lanes(spec), _each_place(anchor))


def _lanes(spec: Pool2d | Elementwise) -> int:
    """Return the channels per thread: one load, or as many bits as are stored at once."""
    return 8 if _packs(spec) else 4


def _packs(spec: Conv2d | FewBitConv2d | Pool2d | Elementwise) -> bool:
    """Whether an output of `spec` is a plane of bits."""
    kinds = {kind for step in spec.steps for kind in output_kinds(step)}
    return bool(kinds & {"bits", "planes"})


def _each_place(anchor: str, number: str = "float") -> str:
    return f"bnncc::each_place<{{layer}}, {{lanes}}, {number}>(images, {anchor}, {{finish}});"


def _with_epilogue(
    name: str,
    spec: Conv2d | FewBitConv2d | Pool2d | Elementwise,
    constants: dict[str, text.Constant],
    lanes: int,
    body: str,
    threads_each: int = 1,
    members: str = "",
) -> text.Kernel:
    """Generate a kernel with an epilogue; `body` has placeholders for names and lanes."""
    height, width = spec.output_hw
    channels = spec.output_channels
    filled = layout.words(channels) * layout.WORD_BITS if _packs(spec) else channels
    blocks = -(-filled // lanes)
    constants = {**text.window(spec), "CHANNELS": channels, **constants, "BLOCKS": blocks}
    units = height * width * blocks * threads_each
    headers = (*_FLOATS, "few_bit") if spec.exact else _FLOATS
    call = body.replace("{lanes}", str(lanes))
    source = epilogue.source(name, spec, headers, constants, call, members)
    return text.Kernel(name, source, THREADS, units, THREADS)


def bitwise_maxpool(name: str, spec: BitwiseMaxPool) -> text.Kernel:
    """Write max pooling of bits."""
    if spec.planes > 1:
        planes = [", ".join(f"{side}{i}" for i in range(spec.planes)) for side in ("in", "out")]
        body = f"bnncc::PooledLevels<{name}_layer>{{{{{planes[0]}}}, {{{planes[1]}}}}}(images);"
        return _of_threads(name, spec, body, PLANES=spec.planes)
    flip = "in1" if spec.flip else "nullptr"
    return _of_words(
        name, spec, f"bnncc::Pooled<{name}_layer>{{in0, {flip}}}", MINIMUM=spec.minimum
    )


def image_bits(name: str, spec: ImageBits) -> text.Kernel:
    """Write the bits of an image of bytes."""
    layer = f"{name}_layer"
    grey = f"bnncc::grey_at<{layer}>(in0, at.image, at.y"
    if spec.kind == "threshold":
        tests = []
        for c, limit in enumerate(spec.thresholds):
            byte = f"bnncc::byte_at<{layer}>(in0, at.image, at.y, at.x, {c})"
            flipped = bool(spec.flip) and bool(spec.flip[c])
            tests.append(f"(unsigned)({byte} {'<' if flipped else '>='} {limit}) << {c}")
    elif spec.kind == "grey":
        tests = [f"({grey}, at.x) >= {spec.thresholds[0]} ? {2**spec.out_channels - 1}u : 0u)"]
    else:
        tests = [
            f"(unsigned)({grey} + {y}, at.x + {x}) > {grey}, at.x)) << {number}"
            for number, (y, x) in enumerate(NEIGHBOURS)
        ]
    colours = dict(zip(("RED", "GREEN", "BLUE"), GREY, strict=True))
    return _of_words(name, spec, _lambda([f"  return {' | '.join(tests)};"]), **colours)


def pad_bits(name: str, spec: PadBits) -> text.Kernel:
    """Write padding of bits."""
    anchor = f"bnncc::Padded<{name}_layer>{{in0}}"
    return _of_words(name, spec, anchor, CHANNELS=spec.channels, BIT=bool(spec.bit))


def concat_bits(name: str, spec: ConcatBits) -> text.Kernel:
    """Write concatenation of bits."""
    starts = np.cumsum([0, *spec.channels])
    lines = []
    for number, (start, channels) in enumerate(zip(starts[:-1], spec.channels, strict=True)):
        words = layout.words(channels)
        row = f"in{number} + (size_t)at.pixel * {words}"
        lines.append(f"  bits |= bnncc::bits_at<{words}>({row}, at.first - {start});")
    return _of_words(name, spec, _lambda(["  unsigned bits = 0;", *lines, "  return bits;"]))


def slice_bits(name: str, spec: SliceBits) -> text.Kernel:
    """Write a selection of bits."""
    words = layout.words(spec.channels)
    if needs_table(spec):
        return _of_words(name, spec, f"bnncc::Gathered<{name}_layer>{{in0, in1}}", IN_WORDS=words)
    cases = []
    for number, shifts in enumerate(terms(spec.index)):
        made = [_shifted(f"(row[{t.word}] & {t.mask}u)", t.shift) for t in shifts]
        cases.append(f"    case {number}: return {' | '.join(made) or '0'};")
    row = f"  const unsigned* const row = in0 + (size_t)at.pixel * {words};"
    switch = ["  switch (at.first / 32) {", *cases, "  }", "  return 0u;"]
    return _of_words(name, spec, _lambda([row, *switch]))


def _shifted(value: str, shift: int) -> str:
    return f"{value} << {shift}" if shift >= 0 else f"{value} >> {-shift}"


def _lambda(lines: list[str]) -> str:
    body = "\n".join(lines)
    return f"[=](const bnncc::Place& at) -> unsigned {{\n{body}\n}}"


def _of_words(name: str, spec: Spec, make: str, **constants: text.Constant) -> text.Kernel:
    """Write a kernel in which `make` returns each word of the result."""
    body = f"bnncc::each_word<{name}_layer>(images, out0, {make});"
    return _of_threads(name, spec, body, **constants)


def _of_threads(name: str, spec: Spec, body: str, **constants: text.Constant) -> text.Kernel:
    """Write a kernel with a thread for each word of the result."""
    height, width = spec.output_hw
    words = layout.words(spec.output_channels)
    constants = {**text.window(spec), **constants, "OUT_WORDS": words}
    parts = [text.layer(f"{name}_layer", constants), text.function(name, spec, body)]
    units = height * width * words
    return text.Kernel(name, text.source(_BITS, parts), THREADS, units, THREADS)
