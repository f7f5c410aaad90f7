"""How each kind of kernel runs: the registry of `topi_binary.spec`, as schedules add to it."""

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
    """Where the functions for a kind of kernel are, each as ``file:name``."""

    template: str = ""
    """Writes the kernel anew: takes spec, target, number of threads and a point of the space, and
    returns a function. Where there is one, the definition is not what runs yet, or not always."""
    space: str = "space:no_choice"
    """Takes the first three, and returns what can be chosen."""
    apply: str = ""
    """The rule. Takes the definition and what a template takes, and returns the definition,
    scheduled; or None, if the kernel is one for the template."""
    nchw: str = ""
    """Takes spec and target, and returns whether the rule writes results in NCHW as fast as others,
    see `nchw`; for kinds that ever do."""
    rate: str = ""
    """Takes spec and target, and returns how many products vectors of 512 bits make in a
    microsecond; for kinds that have products."""
    gpu: str = ""
    """Takes the name of a function for GPUs, the spec and perhaps a cut, and returns a kernel.
    Empty if there is none."""
    gpu_space: str = "space:no_choice"
    """Takes spec and target, and returns what can be chosen there."""
    gpu_cut: str = ""
    """Makes a cut of a point of that space."""


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
"""Of a kind that has none: its definition, scheduled as what TVM legalized is."""


def row(spec: Spec | type[Spec]) -> Row:
    """Return the row of a kind."""
    return _ROWS.get(spec if isinstance(spec, type) else type(spec), _DEFAULT)


def function(name: str) -> Callable[..., Any]:
    """Return a function that a row names; its file is imported only now."""
    module, _, attribute = name.partition(":")
    found: Callable[..., Any] = getattr(
        importlib.import_module(f"bnncc.schedules.{module}"), attribute
    )
    return found
