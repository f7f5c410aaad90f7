"""The text of a CUDA kernel: shared device code, the constants of a layer, and a function.

The algorithms are in ``device/*.cuh``: CUDA C++ whose templates take a layer, a struct of
constants. Only that struct, the epilogue, and the function that combines them are generated.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bnncc.topi_binary.build import aliases, input_types, output_types
from bnncc.topi_binary.kind import Windowed
from bnncc.topi_binary.spec import Spec

_DEVICE = Path(__file__).parent / "device"
C_TYPES = {
    "float32": "float", "float16": "half", "int32": "int", "uint32": "unsigned",
    "uint8": "unsigned char",
}  # fmt: skip
"""CUDA types of tensors. ``half`` is CUDA's; kernels use it only for its size."""

Constant = int | bool | float

PROCESSORS = 132
"""Multiprocessors of an H100 or H200 (SXM), for which work is partitioned."""

HERE = "at.first + Order::offset(i)"
"""In an epilogue: start of the parameters of four channels, one address for all parameters."""


@dataclass(frozen=True)
class Kernel:
    """A kernel that can be launched.

    Attributes
    ----------
    name : str
        Name of its device function, unique to the kernel.
    source : str
        The function and everything it uses; it takes inputs, outputs, the batch and shared memory.
    threads : int
        Threads per block.
    units, per_block : int
        The first dimension of the grid has ``ceil(batch * units / per_block)`` blocks.
    tiles : int
        Blocks in the second dimension of the grid.
    shared : int
        Shared memory in bytes.
    most : int
        If not 0: maximum number of blocks in the first dimension, which then loop over units.
    """

    name: str
    source: str
    threads: int
    units: int
    per_block: int
    tiles: int = 1
    shared: int = 0
    most: int = 0

    def blocks(self, images: int) -> int:
        """Return the number of blocks in the first dimension of the grid, for `images` images."""
        needed = -(-images * self.units // self.per_block)
        return min(needed, self.most) if self.most else needed


def source(headers: Sequence[str], parts: Sequence[str]) -> str:
    """Return the text of a kernel: headers of ``device/``, then `parts`."""
    return "\n".join([*(_header(name) for name in headers), *parts])


@functools.cache
def _header(name: str) -> str:
    return (_DEVICE / f"{name}.cuh").read_text(encoding="utf-8")


def layer(name: str, constants: Mapping[str, Constant], members: str = "") -> str:
    """Return the struct of a layer's constants.

    Examples
    --------
    >>> print(layer("conv_layer", {"WIDTH": 3, "DOUBLED": True}))
    struct conv_layer {
      static constexpr int WIDTH = 3;
      static constexpr bool DOUBLED = true;
    };
    """
    lines = [f"  static constexpr {_typed(key, value)};" for key, value in constants.items()]
    return "\n".join([f"struct {name} {{", *lines, *([members] if members else []), "};"])


def _typed(name: str, value: Constant) -> str:
    if isinstance(value, bool):
        return f"bool {name} = {str(value).lower()}"
    return f"float {name} = {value}f" if isinstance(value, float) else f"int {name} = {value}"


def window(spec: Spec) -> dict[str, Constant]:
    """Return the constants of an image and of its sliding window."""
    height, width = spec.output_hw
    constants: dict[str, Constant] = {
        "HEIGHT": spec.height, "WIDTH": spec.width, "OUT_HEIGHT": height, "OUT_WIDTH": width,
        "PLANAR": spec.data_layout == "NCHW",
    }  # fmt: skip
    if isinstance(spec.channels, int):
        constants["IN_CHANNELS"] = spec.channels
    if isinstance(spec, Windowed):
        constants |= {
            "KERNEL_Y": spec.kernel[0], "KERNEL_X": spec.kernel[1],
            "STRIDE_Y": spec.strides[0], "STRIDE_X": spec.strides[1],
            "DILATION_Y": spec.dilations[0], "DILATION_X": spec.dilations[1],
        }  # fmt: skip
    pads = getattr(spec, "pads", (0, 0, 0, 0))
    names = ("PAD_TOP", "PAD_LEFT", "PAD_BOTTOM", "PAD_RIGHT")
    return {**constants, **dict(zip(names, pads, strict=True))}


def border_class(rows: Sequence[int], columns: Sequence[int]) -> str:
    """Return the member of a layer that maps pixels to border classes.

    Parameters
    ----------
    rows, columns : sequence of int
        First output row and column of each class.

    Returns
    -------
    str
    """

    def number(axis: str, firsts: Sequence[int]) -> str:
        return " + ".join([f"({axis} >= {first})" for first in firsts[1:]]) or "0"

    return (
        "  static __device__ __forceinline__ int border_class(int y, int x) {\n"
        f"    return ({number('y', rows)}) * {len(columns)} + {number('x', columns)};\n"
        "  }"
    )


def each(statement: str) -> list[str]:
    """Return a loop over four channels, with the variable ``k``."""
    return ["#pragma unroll", f"  for (int k = 0; k < 4; ++k) {statement}"]


def number(value: float) -> str:
    """Return an expression for a float32, exactly.

    Examples
    --------
    >>> number(1.0)
    '__int_as_float(0x3f800000)'
    """
    return f"__int_as_float(0x{int(np.float32(value).view(np.uint32)):08x})"


def parameters(spec: Spec) -> list[tuple[str, str]]:
    """Return type and name of each pointer parameter: inputs, then outputs not stored in place."""
    inputs = [(f"const {C_TYPES[t]}*", f"in{i}") for i, (_, t) in enumerate(input_types(spec))]
    outputs = [
        (f"{C_TYPES[t]}*", f"out{i}")
        for i, (_, t) in enumerate(output_types(spec))
        if aliases(spec)[i] < 0
    ]
    return [*inputs, *outputs]


def function(name: str, spec: Spec, body: str) -> str:
    """Return the function that TVM's kernel calls."""
    takes = [" ".join(pair) for pair in parameters(spec)]
    return (
        f"__device__ __forceinline__ void {name}({', '.join(takes)}, int images, void* shared) {{\n"
        f"  {body}\n}}\n"
    )
