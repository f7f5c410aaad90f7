"""Functions that TVM legalized: the generic schedule never fails and computes the same."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from tvm import relax, te, tirx
from tvm.relax import op, transform

from bnncc.schedules import generic
from bnncc.targets import catalog
from tests.kernel_harness import EMULATED, FLOAT_TARGETS, HERE, IN_NODE, build

pytestmark = pytest.mark.sampled(4)

CASES: dict[str, tuple[list[tuple[int, ...]], Callable[..., relax.Expr]]] = {
    "add_relu": ([(1, 33, 17, 20)] * 2, lambda a, b: op.nn.relu(op.add(a, b))),
    "broadcast": ([(1, 64, 9, 9), (64, 1, 1)], lambda a, b: op.tanh(op.multiply(a, b))),
    "softmax": ([(8, 1000)], op.nn.softmax),
    "softmax_rest": ([(8, 197)], op.nn.softmax),
    "softmax_few": ([(9, 10)], op.nn.softmax),
    "matmul": ([(64, 128), (128, 96)], op.matmul),
    "matmul_odd": ([(2, 13, 33), (2, 33, 17)], op.matmul),
    "matmul_rest": ([(4, 97, 64), (4, 64, 213)], op.matmul),
    "matmul_rows": ([(3, 18, 197), (3, 197, 128)], op.matmul),
    "matmul_five": ([(2, 5, 33), (2, 33, 80)], op.matmul),
    "matmul_relu": ([(2, 20, 33), (2, 33, 50)], lambda a, b: op.nn.relu(op.matmul(a, b))),
    "matmul_chain": (
        [(20, 33), (33, 50), (50,), (20, 1)],
        lambda a, b, c, d: op.tanh(op.multiply(op.add(op.matmul(a, b), c), d)),
    ),
    "max_chain": ([(8, 20, 33)], lambda a: op.divide(a, op.nn.relu(op.max(a, [0])))),
    "matmul_few": ([(6, 12), (12, 3)], op.matmul),
    "matmul_transposed": ([(9, 64), (50, 64)], lambda a, b: op.matmul(a, op.permute_dims(b))),
    "mean": ([(2, 64, 7, 7)], lambda a: op.mean(a, [2, 3])),
    "sum_all": ([(5, 640)], op.sum),
    "sum_all_rest": ([(5, 643)], op.sum),
    "max_rest": ([(2, 50, 67)], lambda a: op.max(a, [2])),
    "sum_two_axes": ([(3, 5, 39)], lambda a: op.sum(a, [1, 2])),
    "max_first": ([(50, 64)], lambda a: op.max(a, [0])),
    "argmax": ([(4, 100)], lambda a: op.argmax(a, 1)),
    "argmax_rest": ([(4, 103)], lambda a: op.argmax(a, 1)),
    "conv1d": ([(1, 16, 50), (32, 16, 3)], lambda a, b: op.nn.conv1d(a, b, padding=1)),
    "conv2d": ([(1, 16, 20, 20), (32, 16, 3, 3)], lambda a, b: op.nn.conv2d(a, b, padding=1)),
    "conv2d_s2": ([(1, 3, 21, 21), (7, 3, 3, 3)], lambda a, b: op.nn.conv2d(a, b, strides=2)),
    "conv2d_transpose": (
        [(1, 16, 10, 10), (16, 8, 4, 4)],
        lambda a, b: op.nn.conv2d_transpose(a, b, strides=2, padding=1),
    ),
    "layer_norm": ([(6, 256), (256,), (256,)], lambda a, b, c: op.nn.layer_norm(a, b, c, axes=-1)),
    "layer_norm_rest": (
        [(6, 77), (77,), (77,)],
        lambda a, b, c: op.nn.layer_norm(a, b, c, axes=-1),
    ),
    "pad": ([(1, 3, 20, 20)], lambda a: op.nn.pad(a, [0, 0, 0, 0, 1, 1, 1, 1])),
    "transpose": ([(1, 64, 28, 28)], lambda a: op.permute_dims(a, [0, 2, 3, 1])),
    "transpose_heads": ([(1, 24, 3, 20)], lambda a: op.permute_dims(a, [0, 2, 3, 1])),
    "transpose_strips": ([(12, 9)], lambda a: op.nn.relu(op.permute_dims(a))),
    "transpose_tiles": ([(3, 24, 48)], lambda a: op.permute_dims(a, [0, 2, 1])),
    "transpose_short": ([(3, 48, 64)], lambda a: op.permute_dims(a, [0, 2, 1])),
    "transpose_long": ([(2, 208, 32)], lambda a: op.permute_dims(a, [0, 2, 1])),
    "transpose_odd": ([(7, 9)], lambda a: op.permute_dims(a)),
    "join_heads": (
        [(1, 3, 8, 32)],
        lambda a: op.reshape(op.permute_dims(a, [0, 2, 1, 3]), (1, 8, 96)),
    ),
    "join_odd": (
        [(1, 4, 5, 6)],
        lambda a: op.reshape(op.permute_dims(a, [0, 2, 1, 3]), (1, 5, 24)),
    ),
    "flat_pieces": (
        [(1, 6, 21, 5)],
        lambda a: op.nn.relu(op.reshape(op.permute_dims(a, [0, 2, 1, 3]), (1, 630))),
    ),
    "vector_rest": ([(133,)] * 2, lambda a, b: op.tanh(op.add(a, b))),
    "concat": ([(1, 64, 8, 8), (1, 31, 8, 8)], lambda a, b: op.concat([a, b], 1)),
    "resize": ([(1, 8, 14, 14)], lambda a: op.image.resize2d(a, (28, 28), layout="NCHW")),
    "cumsum": ([(4, 20)], lambda a: op.cumsum(a, 1)),
    "max_pool": ([(1, 16, 20, 20)], lambda a: op.nn.max_pool2d(a, (3, 3), (2, 2), (1, 1))),
    "big_add": ([(1, 64, 136, 136)] * 2, op.add),
}


def _legalized(name: str) -> tvm.IRModule:
    shapes, build = CASES[name]
    builder = relax.BlockBuilder()
    inputs = [relax.Var(f"x{i}", relax.TensorType(s, "float32")) for i, s in enumerate(shapes)]
    with builder.function("main", inputs):
        with builder.dataflow():
            out = builder.emit_output(builder.normalize(build(*inputs)))
        builder.emit_func_output(out)
    passes = [
        transform.LegalizeOps(),
        transform.AnnotateTIROpPattern(),
        transform.FoldConstant(),
        transform.FuseOps(),
        transform.FuseTIR(),
    ]
    return tvm.transform.Sequential(passes)(builder.get())


def _run(module: tvm.IRModule, inputs: list[np.ndarray], target: tvm.target.Target) -> np.ndarray:
    machine = relax.VirtualMachine(relax.build(module, target), tvm.cpu())
    return machine["main"](*[tvm.runtime.tensor(x) for x in inputs]).numpy()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_same_results(name: str, threads: int) -> None:
    spec = catalog.resolve(HERE[-1])
    target = tvm.target.Target({"kind": "llvm", "mcpu": spec.mcpu, "mattr": list(spec.mattr)})
    module = _legalized(name)
    rng = np.random.default_rng(0)
    inputs = [rng.integers(-4, 5, shape).astype(np.float32) for shape in CASES[name][0]]
    want = _run(module, inputs, target)
    scheduled = tvm.IRModule(dict(module.functions_items()))
    for var, func in module.functions_items():
        if isinstance(func, tirx.PrimFunc):
            scheduled[var] = generic.schedule(func, spec, threads)
    np.testing.assert_allclose(_run(scheduled, inputs, target), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("target", [*HERE, *EMULATED, *IN_NODE])
def test_products_of_few_rows_are_summed_by_vectors(target: str) -> None:
    """Queries of one token times keys: four heads, of which two share keys, and 5 keys of 96."""
    spec = catalog.resolve(target)
    query, keys = te.placeholder((4, 1, 96), name="query"), te.placeholder((2, 5, 96), name="keys")
    k = te.reduce_axis((0, 96), "k")
    scores = te.compute(
        (4, 1, 5),
        lambda head, row, key: te.sum(query[head, row, k] * keys[head // 2, key, k], axis=k),
        name="scores",
    )
    func = generic.schedule(te.create_prim_func([query, keys, scores]), spec)
    assert ("scores_rf_1" in str(func)) == (spec.vector_bits >= 128)
    library = build({"main": func}, spec)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in ((4, 1, 96), (2, 5, 96))]
    out = tvm.runtime.tensor(np.full((4, 1, 5), np.nan, np.float32))
    library["main"](*map(tvm.runtime.tensor, arrays), out)
    left, right = (array.astype(np.float64) for array in arrays)
    right = np.repeat(right, 2, 0).transpose(0, 2, 1)
    room = 8 * np.finfo(np.float32).eps * (np.abs(left) @ np.abs(right))
    assert (np.abs(out.numpy() - left @ right) <= room).all()


@pytest.mark.parametrize("shared", [1, 2, 3, 4, 8, 9])
@pytest.mark.parametrize("target", HERE)
def test_values_of_shared_heads(target: str, shared: int) -> None:
    """Weights of one token times values: heads that have values in common, which run together."""
    spec, heads = catalog.resolve(target), 2 * shared
    weight = te.placeholder((heads, 1, 7), name="weight")
    data = te.placeholder((2, 7, 64), name="data")
    k = te.reduce_axis((0, 7), "k")
    found = te.compute(
        (heads, 1, 64),
        lambda head, row, at: te.sum(weight[head, row, k] * data[head // shared, k, at], axis=k),
        name="found",
    )
    func = generic.schedule(te.create_prim_func([weight, data, found]), spec, threads=2)
    library = build({"main": func}, spec)
    rng = np.random.default_rng(0)
    arrays = [rng.integers(-9, 9, s).astype(np.float32) for s in ((heads, 1, 7), (2, 7, 64))]
    out = tvm.runtime.tensor(np.full((heads, 1, 64), np.nan, np.float32))
    library["main"](*map(tvm.runtime.tensor, arrays), out)
    assert (out.numpy() == arrays[0] @ np.repeat(arrays[1], shared, 0)).all()


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("columns", [3, 20, 37, 67])
@pytest.mark.parametrize("target", [*FLOAT_TARGETS, *IN_NODE])
def test_products_of_any_number_of_columns(target: str, columns: int, inside: bool) -> None:
    """Also with heads inside rows, along which the tile of accumulators goes nevertheless."""
    spec = catalog.resolve(target)
    shapes = ((2, 7, 11), (2, 11, columns))
    left, right = (te.placeholder([*map(_int64, s)], name=f"x{len(s)}") for s in shapes)
    k = te.reduce_axis((_int64(0), _int64(11)), "k")

    def total(one: tirx.Var, other: tirx.Var, i: tirx.Var) -> tirx.Expr:
        head, row = (other, one) if inside else (one, other)
        return te.sum(left[head, row, k] * right[head, k, i], axis=k)

    outer = (7, 2) if inside else (2, 7)
    product = te.compute([_int64(n) for n in (*outer, columns)], total, name="product")
    func = generic.schedule(te.create_prim_func([left, right, product]), spec)
    rows = f"for {'one' if inside else 'other'}_1 in T.unroll(T.int64(6))"
    assert rows in str(func) or spec.vector_bits < 128 or columns < 16
    rng = np.random.default_rng(columns)
    arrays = [rng.integers(-9, 10, shape).astype(np.float32) for shape in shapes]  # sums are exact
    out = tvm.runtime.tensor(np.full((*outer, columns), np.nan, np.float32))
    build({"main": func}, spec)["main"](*map(tvm.runtime.tensor, arrays), out)
    found = out.numpy().transpose(1, 0, 2) if inside else out.numpy()
    np.testing.assert_array_equal(found, arrays[0] @ arrays[1])


def _int64(value: int) -> tirx.IntImm:
    return tirx.IntImm("int64", value)


@pytest.mark.parametrize("target", [*FLOAT_TARGETS, *IN_NODE])
def test_rows_of_any_length(target: str) -> None:
    """A function of rows of symbolic length, or of a fixed one: by vectors and a rest."""
    spec, length = catalog.resolve(target), tirx.Var("length", "int64")
    fixed = (5, 22, 67)
    rows = {f"rows_{n}": _shares(n) for n in fixed}
    if target not in ("wasm32", "wasm32-simd128"):  # all sizes are static there
        rows["rows"] = _shares(length)
    library = build({name: generic.schedule(func, spec) for name, func in rows.items()}, spec)
    rng = np.random.default_rng(0)
    for size in (1, 3, 4, 5, 7, 15, 16, 22, 33, 67):
        x = np.float32(rng.integers(1, 9, (3, size)) * rng.choice([-1, 1], (3, size)))
        total = np.abs(x).sum(1, dtype=np.float32, keepdims=True)  # exact
        want = (x + x.max(1, keepdims=True)) / total
        for name in rows.keys() & {"rows", f"rows_{size}"}:
            out = tvm.runtime.tensor(np.full_like(want, np.nan))
            library[name](tvm.runtime.tensor(x), out)
            np.testing.assert_array_equal(out.numpy(), want)


def _shares(length: tirx.Expr | int) -> tirx.PrimFunc:
    x = te.placeholder((3, length), name="x")
    k, j = (te.reduce_axis((0, length), name) for name in "kj")
    top = te.compute((3,), lambda row: te.max(x[row, k], axis=k), name="top")
    total = te.compute((3,), lambda row: te.sum(tirx.abs(x[row, j]), axis=j), name="total")
    out = te.compute((3, length), lambda row, i: (x[row, i] + top[row]) / total[row], name="out")
    return te.create_prim_func([x, out])


def test_functions_without_blocks_come_back() -> None:
    func = tirx.PrimFunc([], tirx.Evaluate(tirx.IntImm("int32", 0)))
    assert generic.schedule(func, catalog.resolve(HERE[-1])).same_as(func)
