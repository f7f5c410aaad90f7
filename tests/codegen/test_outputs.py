"""How ``main`` of a large network allocates its outputs and has the variant write them."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from tvm import relax
from tvm.relax import transform
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import bnncc
from bnncc.codegen import outputs
from bnncc.codegen.outputs import through_outputs, with_outputs
from bnncc.runtime.session import aligned_empty
from tests.devices import DIGITS

MODEL = DIGITS / "digits.onnx"


@I.ir_module
class Planned:
    """Two kernels in a row, and a result of each, for any number of rows."""

    @T.prim_func(private=True)
    def double(x: T.handle, y: T.handle):
        n = T.int64()
        a = T.match_buffer(x, (n, 4))
        b = T.match_buffer(y, (n, 4))
        for i, j in T.grid(n, 4):
            b[i, j] = a[i, j] * T.float32(2)

    @R.function
    def main(x: R.Tensor(("n", 4), "float32")) -> R.Tuple(
        R.Tensor(("n", 4), "float32"), R.Tensor(("n", 4), "float32")
    ):
        n = T.int64()
        R.func_attr({"relax.force_pure": True})
        cls = Planned
        a = R.builtin.alloc_tensor(R.shape([n, 4]), R.dtype("float32"), R.prim_value(0))
        b = R.builtin.alloc_tensor(R.shape([n, 4]), R.dtype("float32"), R.prim_value(0))
        cls.double(x, a)
        cls.double(a, b)
        return (a, b)


def called(func: relax.Function) -> list[str]:
    """Return the names of what a function calls, in order."""
    values = [binding.value for block in func.body.blocks for binding in block.bindings]
    calls = [value for value in values if isinstance(value, relax.Call)]
    return [getattr(call.op, "name_hint", getattr(call.op, "name", "")) for call in calls]


def test_main_calls_the_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "CALLS", 2)
    planned = with_outputs(transform.Normalize()(Planned), None)
    made = transform.Normalize()(through_outputs(planned, None))
    allocate = "relax.builtin.alloc_tensor"
    assert called(planned["main"]) == [allocate, allocate, "double", "double"]
    assert called(made["main"]) == [allocate, allocate, outputs.INTO]
    assert called(made[outputs.INTO]) == called(planned[outputs.INTO]) == ["double", "double"]
    relax.analysis.well_formed(made, check_ty=False)  # raises an error if not


def test_small_networks_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "CALLS", 3)
    planned = with_outputs(Planned, None)
    assert through_outputs(planned, None).same_as(planned)


def test_nor_networks_without_the_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "CALLS", 1)
    assert through_outputs(Planned, None).same_as(Planned)


def test_networks_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = bnncc.compile(MODEL)
    monkeypatch.setattr(outputs, "CALLS", 1)
    artifact = bnncc.compile(MODEL)
    assert len(artifact.library) < len(plain.library)
    images = np.load(DIGITS / "test_images.npz")["images"][:9].astype(np.float32)
    name = onnx.load(MODEL).graph.input[0].name
    (want,) = onnxruntime.InferenceSession(MODEL).run(None, {name: images})
    kept = [artifact.run({name: images[:count]}) for count in (9, 4, 9)]
    room = {key: aligned_empty(array.shape, "float32") for key, array in kept[0].items()}
    kept.append(artifact.run({name: images}, out=room))
    for result in kept:
        (array,) = result.values()
        np.testing.assert_allclose(array, want[: len(array)], rtol=1e-5, atol=1e-5)
    assert not np.shares_memory(*kept[0].values(), *kept[2].values())
