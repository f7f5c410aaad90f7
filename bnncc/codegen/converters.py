"""Relax converters of operators that TVM's ONNX importer lacks, entirely or in some forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tvm
from tvm import relax, te, tirx, topi

from bnncc.codegen import products, row_functions
from bnncc.errors import UnsupportedOp
from bnncc.ir.graph import Graph, Node
from bnncc.ir.halves import NARROW
from bnncc.ir.moves import inverse
from bnncc.ir.resize import Taps, taps
from bnncc.ir.rows import ROTARY, ROW_NORM, ROW_SOFTMAX, SWISH
from bnncc.topi_binary.definitions.terms import swish
from bnncc.topi_binary.layout import LANES

DENSE_TAPS = 16
"""With more taps, an axis is resized by a matrix product."""

Args = list[Any]
Converter = Callable[[relax.BlockBuilder, Node, Args, Graph], "relax.Expr | None"]


def convert(bb: relax.BlockBuilder, node: Node, args: Args, graph: Graph) -> relax.Expr | None:
    """Return the Relax expression of a node, or None to use TVM's importer.

    Parameters
    ----------
    bb : relax.BlockBuilder
        Receives intermediate expressions.
    node : Node
        A node of the physical graph.
    args : list of relax.Expr or None
        Its inputs.
    graph : Graph
        Types and constants.

    Raises
    ------
    UnsupportedOp
        If an input that must be constant is computed.
    """
    rule = _TABLE.get(node.op)
    return None if rule is None else rule(bb, node, args, graph)


def _fixed(node: Node, graph: Graph, first: int) -> list[np.ndarray | None]:
    """Return the inputs from `first` on, which must be constants; None for absent ones."""
    values: list[np.ndarray | None] = []
    for k, name in enumerate(node.inputs[first:], first):
        if name and name not in graph.constants:
            raise UnsupportedOp(
                f"{graph.source}: {node.where}: its input {k} is computed, expected a constant"
            )
        values.append(graph.constants[name] if name else None)
    return values


def _resize(bb: relax.BlockBuilder, node: Node, args: Args, graph: Graph) -> relax.Expr:
    kind, out = graph.types[node.inputs[0]], graph.types[node.outputs[0]]
    where = f"{graph.source}: {node.where}"
    changed = [
        k for k, (a, b) in enumerate(zip(kind.shape, out.shape, strict=True)) if isinstance(a, int)
    ]
    given = _fixed(node, graph, 1)
    # a symbolic axis is not resized; any size stands for it
    shape = [d if isinstance(d, int) else 1 for d in kind.shape]
    tables = taps(node.attrs, [None, *given], shape, where)
    if any(t.axis not in changed for t in tables):
        raise UnsupportedOp(f"{where}: resizes an axis whose size is not known")
    x, dtype = args[0], kind.dtype
    plain = all(t.plain for t in tables)
    work = dtype if plain or dtype in ("float32", "float64") else "float32"
    if work != dtype:
        x = relax.op.astype(x, work)
    for table in tables:
        x = bb.emit(_resized(x, table, len(shape), work))
    mask = np.zeros((1,) * len(shape), bool)
    for table in tables:
        mask = mask | table.outside.reshape(
            [-1 if k == table.axis else 1 for k in range(len(shape))]
        )
    if mask.any():
        value = relax.const(np.asarray(node.attrs.get("extrapolation_value", 0.0), work), work)
        x = bb.emit(relax.op.where(relax.const(mask, "bool"), value, x))
    return x if work == dtype else relax.op.astype(x, dtype)


def _resized(x: relax.Expr, table: Taps, rank: int, dtype: str) -> relax.Expr:
    """Return `x` with one axis resized."""
    count, size = table.index.shape[1], int(x.ty.shape.values[table.axis])
    if count > DENSE_TAPS:
        matrix = np.zeros((size, len(table.index)))
        rows = np.arange(len(table.index))
        for k in range(count):
            np.add.at(matrix, (table.index[:, k], rows), table.weight[:, k])
        order = [k for k in range(rank) if k != table.axis] + [table.axis]
        turned = relax.op.permute_dims(x, order)
        product = relax.op.matmul(turned, relax.const(matrix.astype(dtype), dtype))
        return relax.op.permute_dims(product, inverse(order))
    column = [-1 if k == table.axis else 1 for k in range(rank)]
    total = None
    for k in range(count):
        part = relax.op.take(x, relax.const(table.index[:, k], "int64"), axis=table.axis)
        if not table.plain:
            weight = table.weight[:, k].reshape(column).astype(dtype)
            part = relax.op.multiply(part, relax.const(weight, dtype))
        total = part if total is None else relax.op.add(total, part)
    return total


def _pad(bb: relax.BlockBuilder, node: Node, args: Args, graph: Graph) -> relax.Expr | None:
    mode = node.attrs.get("mode", "constant")
    if mode == "constant":
        return None
    pads, _, axes, *_ = [*_fixed(node, graph, 1), None, None, None]
    assert pads is not None
    kind, x = graph.types[node.inputs[0]], args[0]
    rank = len(kind.shape)
    half = pads.size // 2
    for k in range(half):
        axis = int(axes[k]) % rank if axes is not None else k
        low, high = int(pads[k]), int(pads[k + half])
        if not low and not high:
            continue
        size = kind.shape[axis]
        if not isinstance(size, int):
            raise UnsupportedOp(
                f"{graph.source}: {node.where}: pads an axis whose size is not known"
            )
        index = np.arange(size)[max(0, -low) : size - max(0, -high)]
        index = np.pad(index, (max(0, low), max(0, high)), mode=mode)
        x = bb.emit(relax.op.take(x, relax.const(index, "int64"), axis=axis))
    return x


def _bit_cast(bb: relax.BlockBuilder, node: Node, args: Args, graph: Graph) -> relax.Expr:
    dtype = graph.types[node.outputs[0]].dtype
    if "bool" in (dtype, graph.types[node.inputs[0]].dtype):
        return relax.op.astype(args[0], dtype)

    def compute(x: te.Tensor) -> te.Tensor:
        return te.compute(x.shape, lambda *at: tirx.reinterpret(dtype, x(*at)), name="bits")

    return bb.emit_te(compute, args[0])


_DROPPED = {"bfloat16": 16, "float16": 13}
"""Number of float32 mantissa bits that a half-precision type lacks."""
_FLOAT16_LEAST, _FLOAT16_INFINITE, _INFINITY = 0x38800000, 0x477FF000, 0x7F800000
"""Bits of float32 constants: 2**-14, below which float16 numbers are 2**-24 apart; 65520, from
which they are infinite; and infinity."""


def _to_half(bb: relax.BlockBuilder, node: Node, args: Args, graph: Graph) -> relax.Expr:
    """Round to half precision, ties to even, by integer arithmetic: not all CPUs have the types."""
    kind = str(node.attrs["to"])
    dropped = _DROPPED[kind]

    def number(value: int) -> Any:
        return tirx.const(value, "uint32")

    def bits(value: Any) -> Any:
        return tirx.reinterpret("uint32", value)

    def rounded(x: Any) -> Any:
        size = bits(x) & number(0x7FFFFFFF)
        odd = (size >> number(dropped)) & number(1)
        kept = (size + number((1 << dropped - 1) - 1) + odd) & number(-(1 << dropped) & 0xFFFFFFFF)
        if kind == "float16":
            # Near 0.5, float32 numbers are 2**-24 apart, so the number of steps above 0.5 is the
            # result. Integer arithmetic, because `x + c - c` of floats would become `x`.
            beside = bits(tirx.reinterpret("float32", size) + tirx.const(0.5, "float32"))
            steps = (beside - number(0x3F000000)).astype("float32")
            small = bits(steps * tirx.const(2.0**-24, "float32"))
            kept = tirx.Select(size < number(_FLOAT16_LEAST), small, kept)
            kept = tirx.Select(size >= number(_FLOAT16_INFINITE), number(_INFINITY), kept)
        kept = tirx.Select(size > number(_INFINITY), size, kept)  # NaN stays NaN
        return tirx.reinterpret("float32", kept | (bits(x) & number(0x80000000)))

    def compute(x: te.Tensor) -> te.Tensor:
        return te.compute(x.shape, lambda *at: rounded(x(*at)), name="rounded")

    return bb.emit_te(compute, args[0])


def _tile(bb: relax.BlockBuilder, node: Node, args: Args, graph: Graph) -> relax.Expr:
    """Repeat elements using tables of positions."""
    # TVM would compute positions modulo the size, and its LLVM drops the modulo of a power of two
    # in AVX-512 gathers.
    times = _fixed(node, graph, 1)[0]
    assert times is not None
    x = args[0]
    for axis, (count, size) in enumerate(
        zip(times.reshape(-1).tolist(), graph.types[node.inputs[0]].shape, strict=True)
    ):
        if count == 1:
            continue
        if not isinstance(size, int):
            raise UnsupportedOp(
                f"{graph.source}: {node.where}: repeats an axis whose size is not known"
            )
        index = np.tile(np.arange(size), count)
        x = bb.emit(relax.op.take(x, relax.const(index, "int64"), axis=axis))
    return x


def _clip(bb: relax.BlockBuilder, node: Node, args: Args, graph: Graph) -> relax.Expr | None:
    """Clip floats to constants. TVM's importer asks whether these are NaN, by two kernels each."""
    if not graph.types[node.inputs[0]].dtype.startswith("float"):
        return None
    given = {k: graph.constants.get(name) for k, name in enumerate(node.inputs) if k and name}
    if any(bound is None or np.isnan(bound).any() for bound in given.values()):
        return None
    made = args[0]
    for k in given:
        made = bb.emit_te(topi.maximum if k == 1 else topi.minimum, made, args[k])
    return made


def _extreme(bb: relax.BlockBuilder, node: Node, args: Args, graph: Graph) -> relax.Expr | None:
    """Reduce floats starting from infinity; TVM starts from the largest finite number."""
    kind = graph.types[node.inputs[0]]
    if kind.dtype not in ("float16", "float32", "float64") or not kind.shape:
        return None
    given = _fixed(node, graph, 1)
    rank = len(kind.shape)
    axes = range(rank) if not given or given[0] is None else given[0].reshape(-1).tolist()
    reduced = sorted({int(a) % rank for a in axes})
    keep = bool(node.attrs.get("keepdims", 1))
    largest = node.op == "ReduceMax"

    # TVM does not fuse anything with two sums, so absolute values are taken here.
    made: Any = bb.lookup_binding(args[0]) if isinstance(args[0], relax.Var) else None
    sizes = isinstance(made, relax.Call) and made.op == tvm.ir.Op.get("relax.abs")
    data = made.args[0] if made is not None and sizes else args[0]

    def compute(x: te.Tensor) -> te.Tensor:
        value = (lambda *at: tirx.abs(x(*at))) if sizes else x
        reducer = te.comm_reducer(
            lambda a, b: tirx.max(a, b) if largest else tirx.min(a, b),
            lambda t: tirx.const(-np.inf if largest else np.inf, t),
        )
        last = kind.shape[-1]
        if reduced == [rank - 1] and isinstance(last, int) and last % LANES == 0 and last > LANES:
            # Vectors of adjacent elements: TVM cannot split a reduction that starts from infinity.
            k = te.reduce_axis((0, last // LANES), "k")
            parts = (*x.shape[:-1], LANES)
            each = value
            value = te.compute(
                parts,
                lambda *at: reducer(each(*at[:-1], k * LANES + at[-1]), axis=[k]),
                name="part",
            )
        extents = (value if isinstance(value, te.Tensor) else x).shape
        over = {a: te.reduce_axis((0, extents[a]), f"k{a}") for a in reduced}
        shape = [1 if a in over else d for a, d in enumerate(x.shape) if keep or a not in over]

        def body(*at: Any) -> Any:
            rest = iter(at)
            index = []
            for a in range(rank):
                if a in over:
                    index.append(over[a])
                    if keep:
                        next(rest)
                else:
                    index.append(next(rest))
            return reducer(value(*index), axis=list(over.values()))

        return te.compute(shape, body, name="extreme")

    return bb.emit_te(compute, data)


_MOST_POWER = 256
"""Larger exponents are left to TVM: that many products would round too often."""


def _power(bb: relax.BlockBuilder, node: Node, args: Args, graph: Graph) -> relax.Expr | None:
    """Raise floats to a constant power of at least 3 by products; TVM's pow prints a warning."""
    value, dtype = graph.constants.get(node.inputs[1]), graph.types[node.inputs[0]].dtype
    whole = graph.types[node.inputs[0]] == graph.types[node.outputs[0]]
    if value is None or value.size != 1 or not dtype.startswith("float") or not whole:
        return None
    exponent = float(value.reshape(()))
    if not 3 <= exponent <= _MOST_POWER:
        return None

    def raised(power: float) -> relax.Expr:
        if power == 1:
            return args[0]
        if power < 3 and power != 2:
            return relax.op.power(args[0], relax.const(np.asarray(power, dtype), dtype))
        half = power // 2 if power == int(power) else power / 2
        root = bb.emit(raised(half))
        square = relax.op.multiply(root, root)
        return relax.op.multiply(square, args[0]) if half * 2 != power else square

    return raised(exponent)


_SERIES = 9
"""Terms of the series of sinh below 1 that float64 needs."""


def _hyperbolic(bb: relax.BlockBuilder, node: Node, args: Args, graph: Graph) -> relax.Expr:
    """Compute sinh and cosh, which TVM does not vectorize, from exp; sinh near 0 by a series.

    With h = exp(|x| / 2), cosh is h * h / 2 + 1 / (2 * h * h), which overflows only if the result
    does.
    """
    x, dtype = args[0], graph.types[node.outputs[0]].dtype

    def number(value: float) -> relax.Expr:
        return relax.const(np.asarray(value, dtype), dtype)

    size = relax.op.abs(x)
    root = relax.op.exp(relax.op.multiply(size, number(0.5)))
    half = relax.op.multiply(root, number(0.5))
    rising = relax.op.multiply(half, root)
    falling = relax.op.divide(relax.op.divide(number(0.5), root), root)
    if node.op == "Cosh":
        return relax.op.add(rising, falling)
    # Beyond 1 the series is not used, but must not overflow.
    square = relax.op.minimum(relax.op.multiply(x, x), number(1.0))
    series = number(1.0)
    for k in range(_SERIES, 0, -1):
        part = relax.op.multiply(
            relax.op.multiply(square, number(1 / (2 * k * (2 * k + 1)))), series
        )
        series = relax.op.add(part, number(1.0))
    far = relax.op.multiply(relax.op.sign(x), relax.op.subtract(rising, falling))
    near = relax.op.multiply(x, series)
    return relax.op.where(relax.op.less(size, number(1.0)), near, far)


_TABLE: Mapping[str, Converter] = {
    "BitCast": _bit_cast,
    "Clip": _clip,
    "Cosh": _hyperbolic,
    "MatMul": products.matmul,
    "Pad": _pad,
    "Pow": _power,
    "ReduceMax": _extreme,
    "ReduceMin": _extreme,
    "Resize": _resize,
    "Sinh": _hyperbolic,
    "Softplus": row_functions.elementwise(row_functions.softplus),
    "Tile": _tile,
    "Transpose": products.transpose,
    NARROW: _to_half,
    ROTARY: row_functions.rotary,
    ROW_NORM: row_functions.normalization,
    ROW_SOFTMAX: row_functions.softmax,
    SWISH: row_functions.elementwise(swish),
}
