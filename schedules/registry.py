"""Registry of schedules: extends the registry of kernel kinds in `topi_binary.spec`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bnncc.topi_binary.spec import (
    BinaryConv2d,
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
    WeightsOfRows,
)


@dataclass(frozen=True)
class Row:
    """Functions for a kind of kernel, each named as ``file:name``."""

    template: str = ""
    """Writes the kernel from its spec: takes spec, target, number of threads and a point of the
    search space. If present, the definition is not scheduled, or not always."""
    space: str = "space:no_choice"
    """Takes spec, target and number of threads; returns the search space."""
    apply: str = ""
    """The rule: takes the definition and the arguments of a template; returns the scheduled
    definition, or None if the template should be used."""
    nchw: str = ""
    """Takes spec and target; returns whether the rule writes NCHW results without loss of speed,
    see `nchw`. Empty for kinds that never do."""
    rate: str = ""
    """Takes spec and target; returns the products per microsecond with 512-bit vectors. Empty for
    kinds without products."""
    gpu: str = ""
    """Takes a function name, the spec and, if `gpu_cut` is set, a partition; returns a GPU kernel.
    Empty if there is none."""
    gpu_space: str = "space:no_choice"
    """Takes spec and target; returns the search space on GPUs."""
    gpu_cut: str = ""
    """Converts a point of that space to a partition."""


_ROWS = {
    BinaryConv2d: Row(
        "binary_words:template", "binary_words:space", "binary_words:apply",
        nchw="binary_words:writes_nchw", rate="multithreading:bits",
        gpu="cuda.binary:kernel", gpu_space="cuda.binary:space", gpu_cut="cuda.binary:Cut",
    ),
    BitwiseMaxPool: Row(
        space="pooling:bitwise_maxpool_space", apply="pooling:bitwise_maxpool",
        gpu="cuda.plain:bitwise_maxpool",
    ),
    ConcatBits: Row(apply="bit_layers:moved", gpu="cuda.plain:concat_bits"),
    Conv2d: Row(
        "float_layers:conv2d", "float_layers:conv2d_space", "float_conv2d:direct",
        nchw="float_conv2d:writes_nchw", rate="multithreading:floats",
        gpu="cuda.plain:conv2d", gpu_space="cuda.float_tiles:space", gpu_cut="cuda.float_tiles:Cut",
    ),
    Elementwise: Row(
        "bit_layers:elementwise_planes", "bit_layers:elementwise_space",
        apply="bit_layers:elementwise", gpu="cuda.plain:elementwise",
    ),
    FewBitConv2d: Row(
        space="few_bit_conv2d:space", apply="few_bit_conv2d:apply",
        nchw="few_bit_conv2d:writes_nchw", rate="multithreading:levels",
        gpu="cuda.plain:few_bit_conv2d",
    ),
    ImageBits: Row("bit_layers:image_bits", gpu="cuda.plain:image_bits"),
    PadBits: Row(apply="bit_layers:moved", gpu="cuda.plain:pad_bits"),
    Pool2d: Row(
        space="pooling:pool2d_space", apply="pooling:pool2d", gpu="cuda.plain:pool2d"
    ),
    SliceBits: Row(apply="bit_layers:slice_bits", gpu="cuda.plain:slice_bits"),
    WeightsOfRows: Row(apply="bit_layers:weights_of_rows"),
}  # fmt: skip

_DEFAULT = Row(apply="generic:as_defined")
"""Row of kinds without an entry: the definition, scheduled like functions that TVM legalized."""


def row(spec: Spec | type[Spec]) -> Row:
    """Return the row of a kind."""
    return _ROWS.get(spec if isinstance(spec, type) else type(spec), _DEFAULT)


def function(name: str) -> Callable[..., Any]:
    """Import and return a function named in a row."""
    module, _, attribute = name.partition(":")
    found: Callable[..., Any] = getattr(
        importlib.import_module(f"bnncc.schedules.{module}"), attribute
    )
    return found
