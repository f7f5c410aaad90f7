"""Symbolic sizes among the arguments of kernels, before and after they are sorted."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax, te, tirx

from bnncc.codegen.sizes import SortSizes


def kernel(sizes: str) -> tirx.PrimFunc:
    """Return a kernel that drops the first T of P + T values, with sizes in the given order."""
    dims = {name: tirx.Var(name, "int64") for name in "PT"}
    x = te.placeholder((dims["P"] + dims["T"],), "float32", name="x")
    y = te.compute((dims["P"],), lambda i: x[i + dims["T"]], name="y")
    func = te.create_prim_func([x, *(dims[name] for name in sizes), y], "int64")
    return func.without_attr("global_symbol")


def network(calls: Sequence[tuple[str, str]]) -> tvm.IRModule:
    """Return a module that calls kernels: the order of the sizes of each, and its first name."""
    bb = relax.BlockBuilder()
    dims = {name: tirx.Var(name, "int64") for name in "PT"}
    x = relax.Var("x", relax.TensorType([dims["P"] + dims["T"]], "float32"))
    shape = relax.Var("shape", relax.ShapeType(list(dims.values())))
    with bb.function("main", [x, shape]):
        with bb.dataflow():
            made = []
            for sizes, name in calls:
                args = [x, *(dims[size] for size in sizes)]
                out = relax.TensorType([dims["P"]], "float32")
                made.append(bb.emit(relax.call_tir(bb.add_func(kernel(sizes), name), args, out)))
            result = bb.emit_output(relax.Tuple(made))
        bb.emit_func_output(result)
    return bb.get()


def test_sizes_are_sorted_and_equal_kernels_merged() -> None:
    before = network([("TP", "cut"), ("PT", "cut"), ("TP", "log2")])
    assert sorted(v.name_hint for v in before.get_global_vars()) == ["cut", "cut1", "main"]
    after = SortSizes()(before)
    tvm.ir.assert_structural_equal(after, network([("PT", "cut")] * 3))


def test_a_digit_that_belongs_to_the_name_stays() -> None:
    after = SortSizes()(network([("TP", "log2")]))
    tvm.ir.assert_structural_equal(after, network([("PT", "log2")]))


def test_modules_without_sizes_are_left_as_they_are() -> None:
    module = network([])
    assert SortSizes()(module).same_as(module)
