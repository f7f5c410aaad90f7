"""The calls of a large network are those of several short functions."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import tvm
from tvm import tirx
from tvm.script import tirx as T

import bnncc
from bnncc.codegen import memory, short_functions
from tests.devices import DIGITS

MODEL = DIGITS / "digits.onnx"


def long(count: int) -> tvm.IRModule:
    """Return a module with a function of Relax that makes so many calls, and one that is not."""
    params = [tirx.Var(name, "handle") for name in ("context", "r", "c", "f")]
    calls = [tirx.Evaluate(tirx.call_packed("made", number)) for number in range(count)]
    func = tirx.PrimFunc(params, tirx.SeqStmt(calls)).with_attr("global_symbol", "__vmtir__main")
    return tvm.IRModule({"__vmtir__main": func, "kernel": func})


def test_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_functions, "STATEMENTS", 3)
    same = short_functions.in_short_functions(long(3), None)
    assert {var.name_hint for var in same.get_global_vars()} == {"__vmtir__main", "kernel"}
    made = short_functions.in_short_functions(long(7), None)
    names = [f"__vmtir__main_{k}" for k in range(3)]
    assert {v.name_hint for v in made.get_global_vars()} == {"__vmtir__main", "kernel", *names}
    assert len(made["kernel"].body.seq) == 7  # only those of Relax consist of nothing but calls
    called = [call.value.args[0].value for call in made["__vmtir__main"].body.seq]
    assert called == names
    parts = [made[name] for name in names]
    numbers = [int(one.value.args[1]) for part in parts for one in _statements(part)]
    assert numbers == list(range(7))
    assert [part.attrs["global_symbol"] for part in parts] == names


def _statements(func: tirx.PrimFunc) -> list[Any]:
    body = func.body
    return list(body.seq) if isinstance(body, tirx.SeqStmt) else [body]


def test_functions_with_branches_stay() -> None:
    @T.prim_func(s_tir=True)
    def branches(r: T.handle) -> None:
        if T.isnullptr(r):
            T.evaluate(0)
        T.evaluate(1)

    module = tvm.IRModule({"__vmtir__main": branches})
    assert len(short_functions.in_short_functions(module, None).functions) == 1


def test_calls_are_made_in_order_until_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_functions, "STATEMENTS", 3)
    seen: list[int] = []

    def made(number: int) -> None:
        if number == 7:
            raise ValueError("seven")
        seen.append(number)

    tvm.register_global_func("made", made, override=True)
    for count, fails in ((7, False), (12, True)):
        module = tvm.IRModule({"__vmtir__main": long(count)["__vmtir__main"]})
        main = tvm.compile(module, "llvm", tir_pipeline=memory.PIPELINE)["__vmtir__main"]
        seen.clear()
        with pytest.raises(ValueError, match="seven") if fails else nullcontext():
            main(None, None, None, None)
        assert seen == list(range(7))


def test_networks_compute_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(short_functions, "STATEMENTS", 5)
    bnncc.compile(MODEL).save(tmp_path / "digits.bnncc")
    artifact = bnncc.Artifact.load(tmp_path / "digits.bnncc")
    assert b"__vmtir__main_1" in artifact.library
    images = np.load(DIGITS / "test_images.npz")["images"][:9].astype(np.float32)
    feeds = {artifact.inputs[0].name: images}
    (want,) = onnxruntime.InferenceSession(MODEL).run(None, feeds)
    (made,) = artifact.run(feeds).values()
    np.testing.assert_allclose(made, want, rtol=1e-5, atol=1e-5)
