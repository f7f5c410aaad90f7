"""Products of quantized tensors: QLinearConv, QLinearMatMul, ConvInteger, MatMulInteger.

    QLinearConv(x, w)   ->  a = Conv(x - zx, w - zw) + B           integers
                            Clip(Round(a * (sx * sw / sy)) + zy)

Float32 represents every integer below 2^24, so float and few-bit kernels compute `a` exactly as
long as no sum of products can exceed that. Otherwise the weights are split into slices of fewer
bits, and the sums of the slices are added in int32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from bnncc.errors import ModelError, ShapeError, UnsupportedOp
from bnncc.frontend.linear import INTEGERS
from bnncc.ir.dims import is_static
from bnncc.ir.graph import Dim
from bnncc.ir.pieces import Expression

Shape = Sequence[Dim]
EXACT = 1 << 24
"""Bound of the integers that are exact in float32."""


class _Operand:
    """An integer tensor minus its zero point, as floats, with a bound of the magnitude.

    Parameters
    ----------
    write : Expression
        Writes the nodes.
    data, zero : int
        Indices of the inputs with data and zero point.
    column : callable
        Reshapes a zero point of a given shape to broadcast with the data.
    """

    def __init__(
        self, write: Expression, data: int, zero: int, column: Callable[[str, Shape], str]
    ) -> None:
        graph, inputs = write.graph, write.node.inputs
        self.name, self.write = inputs[data], write
        kind = graph.types[self.name]
        if kind.dtype not in ("int8", "uint8"):
            raise UnsupportedOp(f"{write.where}: its data is {kind.dtype}, expected int8 or uint8")
        low, high = INTEGERS[kind.dtype]
        offset = inputs[zero] if zero < len(inputs) else ""
        fixed = graph.constants.get(offset)
        if offset and graph.types[offset].dtype != kind.dtype:
            raise ModelError(
                f"{write.where}: a zero point of {graph.types[offset].dtype} for {kind.dtype}"
            )
        self.float = write.cast(self.name, "float32")
        if offset and (fixed is None or fixed.any()):
            self.float = write(
                "Sub", self.float, column(write.cast(offset, "float32"), graph.types[offset].shape)
            )
        zeros = (low, high) if offset and fixed is None else (0, 0)
        if fixed is not None and fixed.size:
            zeros = int(fixed.min()), int(fixed.max())
        self.top = max(abs(low - zeros[1]), abs(high - zeros[0]))
        value = graph.constants.get(self.name)
        one = np.zeros(1, np.int64) if not offset else fixed
        if value is not None and one is not None and one.size == 1:
            self.top = int(np.abs(value.astype(np.int64) - int(one.reshape(-1)[0])).max(initial=0))


def _exact(
    write: Expression,
    first: _Operand,
    second: _Operand,
    terms: int,
    multiply: Callable[[str, str], str],
    bias: str,
) -> tuple[str, str]:
    """Return the product plus `bias` (int32), computed exactly, and its dtype."""
    graph = write.graph
    added = 0
    if bias:
        value = graph.constants.get(bias)
        added = EXACT if value is None else int(np.abs(value.astype(np.int64)).max(initial=0))
    if first.top * second.top * terms + added < EXACT:
        total = multiply(first.float, second.float)
        if bias:
            total = write("Add", total, write.cast(bias, "float32"))
        return total, "float32"
    shift = max(0, int(math.log2(max(1, (EXACT - 1) // max(1, first.top * terms)))))
    if shift < 1:
        raise UnsupportedOp(
            f"{write.where}: adds {terms} products of 8 bits, more than can be exact"
        )
    total, rest, scale = "", second.float, 1
    step = write.constant(1 << shift, "float32")
    for k in range(-(-(second.top + 1).bit_length() // shift)):
        last = (second.top >> (shift * (k + 1))) == 0
        part = rest
        if not last:  # low bits of the magnitude, with the sign
            whole = write("Div", rest, step)
            upper = write("Mul", write("Sign", whole), write("Floor", write("Abs", whole)))
            part = write("Sub", rest, write("Mul", upper, step))
            rest = upper
        piece = write.cast(multiply(first.float, part), "int32")
        if scale > 1:
            piece = write("Mul", piece, write.constant(scale, "int32"))
        total = write("Add", total, piece) if total else piece
        scale <<= shift
        if last:
            break
    if bias:
        total = write("Add", total, bias)
    return total, "int32"


def _requantized(
    write: Expression, total: str, dtype: str, scales: tuple[str, str, str], zero: str
) -> None:
    """Requantize the sums `total`; `scales` broadcast with them."""
    graph = write.graph
    if dtype != "float32":
        total = write.cast(total, "float32")
    first, second, out = scales
    factor = write("Div", write("Mul", first, second), out)
    whole = write("Round", write("Mul", total, factor))
    kind = graph.types[zero].dtype
    if kind not in ("int8", "uint8"):
        raise UnsupportedOp(f"{write.where}: rounds to {kind}, expected int8 or uint8")
    moved = write("Add", whole, write.cast(zero, "float32"))
    bounds = (write.constant(v, "float32") for v in INTEGERS[kind])
    write.give(write.cast(write("Clip", moved, *bounds), kind), 0)


def _scale(write: Expression, k: int) -> str:
    """Return input `k`, a scale, as float32."""
    name = write.node.inputs[k]
    return name if write.type(k).dtype == "float32" else write.cast(name, "float32")


def _single(write: Expression, number: str, shape: Shape, what: str) -> str:
    """Return a scale or zero point with one element as a scalar."""
    if math.prod(d if isinstance(d, int) else 2 for d in shape) != 1:
        raise ShapeError(f"{write.where}: {what} has shape {list(shape)}, expected one number")
    return number if not shape else write.scalar(number)


def _column(write: Expression, number: str, shape: Shape, form: list[int], what: str) -> str:
    """Return a scalar, or one number per output channel, that broadcasts in `form`."""
    if tuple(shape) in ((), (1,)):
        return _single(write, number, shape, what)
    count = math.prod(form)
    if math.prod(d if isinstance(d, int) else 0 for d in shape) != count:
        raise ShapeError(f"{write.where}: {what} has shape {list(shape)}, expected [] or [{count}]")
    return write("Reshape", number, write.constant(form, "int64"))


def _convolution(
    write: Expression, data: tuple[int, int], weight: tuple[int, int], bias: str
) -> tuple[str, str, int]:
    """Return the exact sums of a convolution, their dtype, and the number of output channels."""
    graph, node = write.graph, write.node
    x, w = (graph.types[node.inputs[k]].shape for k in (data[0], weight[0]))
    if len(x) < 3 or len(w) != len(x) or not is_static(w):
        raise ShapeError(f"{write.where}: input {list(x)} and weight {list(w)} do not fit together")
    units, rank = int(w[0]), len(x) - 2
    across = [units, *[1] * (rank + 1)]
    first = _Operand(write, *data, lambda z, shape: _single(write, z, shape, "x_zero_point"))
    second = _Operand(
        write, *weight, lambda z, shape: _column(write, z, shape, across, "w_zero_point")
    )
    column = ""
    if bias:
        column = write("Reshape", bias, write.constant([1, units, *[1] * rank], "int64"))
    total, dtype = _exact(
        write, first, second, math.prod(int(d) for d in w[1:]),
        lambda a, b: write("Conv", a, b, covers=(node.name,), **node.attrs), column,
    )  # fmt: skip
    return total, dtype, units


def _conv_integer(write: Expression) -> None:
    total, dtype, _ = _convolution(write, (0, 2), (1, 3), "")
    write.give(total if dtype == "int32" else write.cast(total, "int32"), 0)


def _qlinear_conv(write: Expression) -> None:
    graph, inputs = write.graph, write.node.inputs
    bias = inputs[8] if len(inputs) > 8 else ""
    total, dtype, units = _convolution(write, (0, 2), (3, 5), bias)
    rank = len(graph.types[inputs[0]].shape)
    across = [1, units, *[1] * (rank - 2)]
    shapes = [write.type(k).shape for k in (1, 4, 6)]
    scales = (
        _single(write, _scale(write, 1), shapes[0], "x_scale"),
        _column(write, _scale(write, 4), shapes[1], across, "w_scale"),
        _single(write, _scale(write, 6), shapes[2], "y_scale"),
    )
    _requantized(write, total, dtype, scales, inputs[7])


def _matrices(
    write: Expression, first: tuple[int, int], second: tuple[int, int]
) -> tuple[str, str]:
    graph, node = write.graph, write.node
    a, b = (graph.types[node.inputs[k]].shape for k in (first[0], second[0]))
    if not a or not b or not isinstance(a[-1], int):
        raise ShapeError(f"{write.where}: operands have shapes {list(a)} and {list(b)}")
    left = _Operand(write, *first, lambda z, shape: _upright(write, z, shape))
    right = _Operand(write, *second, lambda z, shape: z)
    return _exact(
        write, left, right, int(a[-1]),
        lambda x, y: write("MatMul", x, y, covers=(node.name,)), "",
    )  # fmt: skip


def _upright(write: Expression, number: str, shape: Shape) -> str:
    """Return a scale or zero point of the first operand; one per row becomes a column."""
    several = len(shape) == 1 and tuple(shape) != (1,)
    return write("Unsqueeze", number, write.ints(1)) if several else number


def _matmul_integer(write: Expression) -> None:
    total, dtype = _matrices(write, (0, 2), (1, 3))
    write.give(total if dtype == "int32" else write.cast(total, "int32"), 0)


def _qlinear_matmul(write: Expression) -> None:
    inputs = write.node.inputs
    total, dtype = _matrices(write, (0, 2), (3, 5))
    first = _upright(write, _scale(write, 1), write.type(1).shape)
    scales = first, _scale(write, 4), _scale(write, 6)
    _requantized(write, total, dtype, scales, inputs[7])


EXPANSIONS = {
    "ConvInteger": _conv_integer,
    "MatMulInteger": _matmul_integer,
    "QLinearConv": _qlinear_conv,
    "QLinearMatMul": _qlinear_matmul,
}
"""Rewrite rules, by operator."""
