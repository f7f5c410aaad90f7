"""What stands between the calls of kernels: shapes, reshapes and tuples, before and after."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import transform
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from bnncc.codegen.fewer_calls import reshaped_once, without_repeats
from bnncc.driver import compile_model
from bnncc.options import CompileOptions
from tests.spellings import Network


def test_a_reshape_of_a_reshape() -> None:
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 3, 4), "float32")) -> R.Tensor(ndim=1, dtype="float32"):
            n = T.int64()
            with R.dataflow():
                a = R.reshape(x, (6, 4))
                b = R.reshape(a, (24,))
                c = R.reshape(b, (4, 6))
                d = R.add(a, a)
                e = R.reshape(d, (24,))
                f = R.match_cast(e, R.Tensor((n,), "float32"))
                R.output(c, f)
            return f

    @I.ir_module
    class After:
        @R.function
        def main(x: R.Tensor((2, 3, 4), "float32")) -> R.Tensor(ndim=1, dtype="float32"):
            n = T.int64()
            with R.dataflow():
                a = R.reshape(x, (6, 4))
                b = R.reshape(x, (24,))  # noqa: F841
                c = R.reshape(x, (4, 6))
                d = R.add(a, a)
                e = R.reshape(d, (24,))
                f = R.match_cast(e, R.Tensor((n,), "float32"))
                R.output(c, f)
            return f

    tvm.ir.assert_structural_equal(transform.Normalize()(reshaped_once(Before, None)), After)


def lowered() -> relax.Function:
    """Return a function that allocates tensors of equal and of other shapes, for the VM."""

    @I.ir_module
    class Network:
        @R.function
        def main(x: R.Tensor(("n", 4), "float32")) -> R.Tensor(("n", 4), "float32"):
            n = T.int64()
            R.func_attr({"relax.force_pure": True})
            a = R.builtin.alloc_tensor(R.shape([n, 4]), R.dtype("float32"), R.prim_value(0))
            b = R.builtin.alloc_tensor(R.shape([n, 4]), R.dtype("float32"), R.prim_value(0))
            c = R.builtin.alloc_tensor(R.shape([n, 8]), R.dtype("float32"), R.prim_value(0))
            d = R.builtin.alloc_tensor(R.shape([4, n]), R.dtype("float32"), R.prim_value(0))
            unread = (a, b)  # noqa: F841
            read = (c, d)
            _ = R.call_packed("tests.fill", x, a, b, c, read, ty_args=[R.Tuple()])
            return b

    passes = [
        transform.LowerAllocTensor(),
        transform.LowerRuntimeBuiltin(),
        transform.ComputePrimValue(),
        transform.VMShapeLower(),
    ]
    return tvm.transform.Sequential(passes)(Network)["main"]


def bound(func: relax.Function) -> list[tuple[Any, Any]]:
    return [(b.var, b.value) for block in func.body.blocks for b in block.bindings]


def shapes(func: relax.Function) -> list[list[Any]]:
    """Return the arguments of each shape that is made."""
    return [
        [str(arg) for arg in value.args[1:]]
        for _, value in bound(func)
        if isinstance(value, relax.Call) and "make_shape" in str(value.op)
    ]


def test_shapes_are_made_once_and_unread_tuples_never() -> None:
    before = lowered()
    after = without_repeats(tvm.IRModule({"main": before}), None)["main"]
    made = shapes(before)
    assert len(shapes(after)) == len({tuple(args) for args in made}) < len(made)
    assert {tuple(args) for args in shapes(after)} == {tuple(args) for args in made}
    tuples = [value for _, value in bound(after) if isinstance(value, relax.Tuple)]
    assert len(tuples) == 1
    # Every tensor has the shape that it had.
    assert kinds(after) == kinds(before)


def kinds(func: relax.Function) -> list[list[str]]:
    """Return the arguments of the shape of each tensor that is allocated, in order."""
    values = dict(bound(func))
    return [
        [str(arg) for arg in values[value.args[2]].args[1:]]
        for value in values.values()
        if getattr(getattr(value, "op", None), "name", "") == "relax.vm.alloc_tensor"
    ]


@pytest.mark.parametrize("batch", [1, 3])
def test_a_network_of_many_reshapes(batch: int) -> None:
    """What reads a reshape's source instead is what it was, also as an output."""
    g = Network()
    x = g("Mul", "x", 2.0)
    a = g("Reshape", x, np.array([0, 6, 4], np.int64))
    b = g("Reshape", a, np.array([0, 24], np.int64))
    c = g("Reshape", b, np.array([0, 4, 6], np.int64))
    made = compile_model(
        g.model(g("Transpose", c, perm=[0, 2, 1]), ["N", 2, 3, 4]), CompileOptions()
    )
    given = np.random.default_rng(0).normal(size=(batch, 2, 3, 4)).astype(np.float32)
    (y,) = made.run({"x": given}).values()
    np.testing.assert_array_equal(y, (2 * given).reshape(batch, 4, 6).transpose(0, 2, 1))
