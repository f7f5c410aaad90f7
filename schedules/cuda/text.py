"""The text of a CUDA kernel: device code shared by all, the constants of one layer, a function.

What runs is in ``device/*.cuh``, ordinary CUDA C++ whose templates take a layer: a struct of
constants. Written here are only that struct, the epilogue, and the function that puts both
together.
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
"""Types of tensors. ``half`` is CUDA's own, of which kernels know only its size."""

Constant = int | bool | float

PROCESSORS = 132
"""Of an H100 or H200 (SXM), for which work is cut. On others the last round is less full."""

HERE = "at.first + Order::offset(i)"
"""In an epilogue: where the parameters of four channels begin. One address serves all of them."""


@dataclass(frozen=True)
class Kernel:
    """One kernel, ready to be launched.

    Attributes
    ----------
    name : str
        Of its device function, different for different kernels.
    source : str
        The function and all it needs; it takes inputs, outputs, the batch and shared memory.
    threads : int
        Threads of a block.
    units, per_block : int
        There are ``ceil(batch * units / per_block)`` blocks in the first dimension of the grid,
    tiles : int
        and so many in the second.
    shared : int
        Bytes of shared memory.
    most : int
        If not 0: blocks in the first dimension at most; each goes on to further units.
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
        """Return the blocks in the first dimension of the grid, for so many images."""
        needed = -(-images * self.units // self.per_block)
        return min(needed, self.most) if self.most else needed


def source(headers: Sequence[str], parts: Sequence[str]) -> str:
    """Return a kernel's text: files of ``device/``, then `parts`."""
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
    """Return the constants of an image and of a window that slides over it."""
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
    """Return the member of a layer that numbers the border classes of pixels.

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
    """Return a loop over four channels, ``k``."""
    return ["#pragma unroll", f"  for (int k = 0; k < 4; ++k) {statement}"]


def number(value: float) -> str:
    """Return a float32 as an expression, exactly.

    Examples
    --------
    >>> number(1.0)
    '__int_as_float(0x3f800000)'
    """
    return f"__int_as_float(0x{int(np.float32(value).view(np.uint32)):08x})"


def parameters(spec: Spec) -> list[tuple[str, str]]:
    """Return type and name of each pointer a kernel takes: inputs, then outputs of its own."""
    inputs = [(f"const {C_TYPES[t]}*", f"in{i}") for i, (_, t) in enumerate(input_types(spec))]
    outputs = [
        (f"{C_TYPES[t]}*", f"out{i}")
        for i, (_, t) in enumerate(output_types(spec))
        if aliases(spec)[i] < 0
    ]
    return [*inputs, *outputs]


def function(name: str, spec: Spec, body: str) -> str:
    """Return the function that TVM's kernel consists of."""
    takes = [" ".join(pair) for pair in parameters(spec)]
    return (
        f"__device__ __forceinline__ void {name}({', '.join(takes)}, int images, void* shared) {{\n"
        f"  {body}\n}}\n"
    )
