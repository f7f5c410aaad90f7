"""One network that has TensorFlow Lite's float operators side by side, each an output."""

from __future__ import annotations

import numpy as np
from flat import Flat
from tensorflow.lite.python import schema_py_generated as schema

OP = schema.BuiltinOperator
KIND = schema.BuiltinOptions


def options(name: str, **fields):
    """Return builtin options: their number and their table."""
    table = getattr(schema, f"{name}T")()
    for key, value in fields.items():
        setattr(table, key, value)
    return getattr(KIND, name), table


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def builtins() -> tuple[bytes, bool]:
    """Return a file with what networks of Larq seldom have."""
    flat = Flat()
    shape = (1, 4, 6, 8)
    x = flat.tensor("x", shape)
    y = flat.tensor("y", shape)
    rng = np.random.default_rng(5)
    outputs: list[int] = []

    def made(shape: tuple[int, ...], dtype: str = "float32", show: bool = True) -> int:
        index = flat.tensor(f"t{len(flat.graph.tensors)}", shape, dtype)
        if show:
            outputs.append(index)
        return index

    def const(*values: int) -> int:
        return flat.constant(f"c{len(flat.graph.tensors)}", ints(*values))

    def unary(name: str, given: int, chosen=None, shape=shape, dtype="float32", show=True) -> int:
        out = made(shape, dtype, show)
        flat.op(getattr(OP, name), [given], [out], chosen)
        return out

    def binary(name: str, a: int, b: int, chosen=None, shape=shape, dtype="float32", show=True):
        out = made(shape, dtype, show)
        flat.op(getattr(OP, name), [a, b], [out], chosen)
        return out

    square = unary("SQUARE", x)
    one = flat.constant("one", np.array(1.0, np.float32))
    positive = binary("ADD", square, one, options("AddOptions"))
    for name in ("SQRT", "RSQRT", "LOG"):
        unary(name, positive)
    for name in ("ABS", "NEG", "EXP", "SIN", "COS", "FLOOR", "CEIL", "ROUND", "ELU", "HARD_SWISH"):
        unary(name, x)
    unary("RELU_0_TO_1", x)
    unary("RELU_N1_TO_1", x)
    unary("LOG_SOFTMAX", x, options("LogSoftmaxOptions"))
    unary("SOFTMAX", x, options("SoftmaxOptions", beta=0.5))
    unary("GELU", x, options("GeluOptions", approximate=False))
    unary("L2_NORMALIZATION", positive, options("L2NormOptions"))
    binary("SQUARED_DIFFERENCE", x, y)
    binary("DIV", x, positive, options("DivOptions", fusedActivationFunction=2))
    binary("SUB", x, y, options("SubOptions", fusedActivationFunction=1))
    binary("MUL", x, y, options("MulOptions", fusedActivationFunction=3))
    binary("MAXIMUM", x, y)
    binary("MINIMUM", x, y)
    above = binary("GREATER", x, y, dtype="bool")
    for name in ("LESS", "LESS_EQUAL", "EQUAL", "NOT_EQUAL"):
        binary(name, x, y, dtype="bool", show=name != "EQUAL")
    other = binary("GREATER_EQUAL", x, y, dtype="bool", show=False)
    both = binary("LOGICAL_AND", above, other, dtype="bool", show=False)
    either = binary("LOGICAL_OR", both, other, dtype="bool", show=False)
    none = unary("LOGICAL_NOT", either, dtype="bool", show=False)
    out = made(shape)
    flat.op(OP.SELECT_V2, [none, x, y], [out])
    unary("CAST", above, options("CastOptions", inDataType=6, outDataType=0))

    deep = unary("SPACE_TO_DEPTH", x, options("SpaceToDepthOptions", blockSize=2), (1, 2, 3, 32))
    unary("DEPTH_TO_SPACE", deep, options("DepthToSpaceOptions", blockSize=2))
    parts = [made(s) for s in ((1, 4, 2, 8), (1, 4, 1, 8), (1, 4, 3, 8))]
    flat.op(
        OP.SPLIT_V, [x, const(2, -1, 3), flat.constant("axis", np.array(2, np.int32))], parts,
        options("SplitVOptions", numSplits=3),
    )  # fmt: skip
    rows = [made((1, 6, 8), show=k < 2) for k in range(4)]
    flat.op(OP.UNPACK, [x], rows, options("UnpackOptions", num=4, axis=1))
    out = made((1, 6, 2, 8))
    flat.op(OP.PACK, rows[:2], [out], options("PackOptions", valuesCount=2, axis=2))
    binary("GATHER", x, const(5, 0, 0, 2), options("GatherOptions", axis=2), (1, 4, 4, 8))
    binary("ARG_MAX", x, const(3), options("ArgMaxOptions", outputType=2), (1, 4, 6), "int32")
    binary("TILE", x, const(1, 2, 1, 1), shape=(1, 8, 6, 8))
    binary("EXPAND_DIMS", x, const(1), options("ExpandDimsOptions"), (1, 1, 4, 6, 8))
    binary("REDUCE_PROD", x, const(1), options("ReducerOptions", keepDims=True), (1, 1, 6, 8))
    binary("REDUCE_MIN", x, const(1, 2), options("ReducerOptions", keepDims=False), (1, 8))
    binary("SUM", x, const(3), options("ReducerOptions", keepDims=False), (1, 4, 6))
    mean = binary("MEAN", x, const(1, 2), options("ReducerOptions", keepDims=True), (1, 1, 1, 8))
    unary("SQUEEZE", mean, options("SqueezeOptions", squeezeDims=[1, 2]), (1, 8))
    out = made((1, 2, 3, 8))
    flat.op(OP.SLICE, [x, const(0, 1, 3, 0), const(1, 2, -1, -1)], [out], options("SliceOptions"))
    out = made((4, 3, 8))
    flat.op(
        OP.STRIDED_SLICE, [x, const(0, 0, -1, 0), const(0, 4, -7, 8), const(1, 1, -2, 1)], [out],
        options("StridedSliceOptions", beginMask=2, endMask=4, shrinkAxisMask=1),
    )  # fmt: skip
    matrix = flat.constant("matrix", rng.standard_normal((1, 4, 8, 5)).astype(np.float32))
    binary("BATCH_MATMUL", x, matrix, options("BatchMatMulOptions"), (1, 4, 6, 5))
    weight = flat.constant("weight", rng.standard_normal((7, 8)).astype(np.float32))
    half = flat.constant("half", rng.standard_normal((3, 8)).astype(np.float16))
    unpacked = unary("DEQUANTIZE", half, options("DequantizeOptions"), (3, 8), show=False)
    dense = {"fusedActivationFunction": 1}
    out = made((24, 7))
    flat.op(OP.FULLY_CONNECTED, [x, weight, -1], [out], options("FullyConnectedOptions", **dense))
    out = made((1, 4, 6, 3))
    flat.op(
        OP.FULLY_CONNECTED, [x, unpacked, -1], [out],
        options("FullyConnectedOptions", keepNumDims=True),
    )  # fmt: skip
    filters = flat.constant("filters", rng.standard_normal((8, 3, 2, 2)).astype(np.float32))
    bias = flat.constant("bias", rng.standard_normal(8).astype(np.float32))
    out = made((1, 2, 3, 8))
    flat.op(
        OP.CONV_2D, [x, filters, bias], [out],
        options("Conv2DOptions", padding=0, strideH=2, strideW=2, dilationHFactor=1,
                dilationWFactor=1, fusedActivationFunction=3),
    )  # fmt: skip
    return flat.finish([x, y], outputs), False


CASES = {"builtins": builtins}
