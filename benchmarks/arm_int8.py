"""An int8 convolution with Armv8.2's dot product: what binary ones are compared with.

Direct, on padded NHWC data; a register tile of 4 columns x 16 output channels holds 16 vectors of
32-bit sums through the whole reduction. Each instruction sums four products in each of four lanes
(one output channel each). Ends in a scale, an offset and int8 again.
"""

from __future__ import annotations

from typing import Any

from arm_kernels import Layer
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

COLUMNS, VECTORS = 4, 4
_DOT = "llvm.aarch64.neon.sdot.v4i32.v16i8"


def shapes(layer: Layer) -> list[tuple[tuple[int, ...], str]]:
    """Return shapes and dtypes of data (padded), weights, scales, offsets and result."""
    channels, size, out, kernel, stride, pad = layer
    side, deep = (size + 2 * pad - kernel) // stride + 1, -(-channels // 16) * 16
    wide = (-(-side // COLUMNS) * COLUMNS - 1) * stride + kernel
    rows = (side - 1) * stride + kernel
    weight = (out // 16 * kernel * kernel * deep * 16,)
    return [
        ((rows * wide * deep,), "int8"), (weight, "int8"), ((out,), "float32"),
        ((out,), "float32"), ((side * side * out + 4 * COLUMNS * out,), "int8"),
    ]  # fmt: skip


def conv2d(layer: Layer) -> Any:
    """Return the kernel; channels are a multiple of 16."""
    channels, size, out, kernel, stride, pad = layer
    side = (size + 2 * pad - kernel) // stride + 1
    wide = (-(-side // COLUMNS) * COLUMNS - 1) * stride + kernel
    groups = channels // 16
    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            T.func_name("main")
            T.func_attr({"tirx.noalias": True})
            data, weight, scale, offset, result = (
                T.arg(name, T.buffer(shape, dtype))
                for name, (shape, dtype) in zip("dwsor", shapes(layer), strict=True)
            )
            with T.sblock("root"):
                T.reads()
                T.writes()
                with T.grid(out // 16, side, -(-side // COLUMNS)) as (o, h, w), T.sblock("tile"):
                    T.reads(data[0 : data.shape[0]], weight[0 : weight.shape[0]])
                    T.writes(result[0 : result.shape[0]])
                    sums = T.sblock_alloc_buffer((COLUMNS * VECTORS * 4,), "int32")

                    def at(column: int, vector: int) -> Any:
                        return T.Ramp((column * VECTORS + vector) * 4, 1, 4)

                    for i in range(COLUMNS):
                        for v in range(VECTORS):
                            T.buffer_store(sums, T.Broadcast(T.int32(0), 4), [at(i, v)])
                    with T.grid(kernel, kernel, groups) as (kh, kw, c):
                        first = (h * stride + kh) * wide + w * (COLUMNS * stride) + kw
                        words = [
                            T.Bind(T.reinterpret("int32x4", data[
                                T.Ramp((first + i * stride) * channels + c * 16, 1, 16)
                            ]))
                            for i in range(COLUMNS)
                        ]  # fmt: skip
                        row = ((o * kernel + kh) * kernel + kw) * groups + c
                        for part in range(4):
                            spread = [
                                T.reinterpret(
                                    "int8x16",
                                    T.Broadcast(T.Shuffle([word], [T.int32(part)]), 4),
                                )
                                for word in words
                            ]
                            for v in range(VECTORS):
                                place = (row * 4 + part) * 64 + v * 16
                                weights = T.Bind(weight[T.Ramp(place, 1, 16)])
                                for i in range(COLUMNS):
                                    here = at(i, v)
                                    made = T.call_llvm_pure_intrin(
                                        "int32x4", _DOT, sums[here], weights, spread[i]
                                    )
                                    T.buffer_store(sums, made, [here])
                    for i in range(COLUMNS):
                        lanes = T.Ramp(o * 16, 1, 16)
                        value = T.Cast("float32x16", sums[T.Ramp(i * 16, 1, 16)])
                        value = T.call_llvm_pure_intrin(
                            "float32x16", "llvm.fmuladd", value, scale[lanes], offset[lanes]
                        )
                        value = T.min(
                            T.max(value, T.Broadcast(T.float32(-128), 16)),
                            T.Broadcast(T.float32(127), 16),
                        )
                        place = (h * side + w * COLUMNS + i) * out + o * 16
                        T.buffer_store(result, T.Cast("int8x16", value), [T.Ramp(place, 1, 16)])
        return builder.get()
