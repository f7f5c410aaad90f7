"""What users do with artifacts: save, load, run from threads, hand over DLPack, read what broke."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import bnncc
from bnncc.codegen import link
from bnncc.errors import BnnccError, InputError, TargetError, UsageError
from bnncc.files import write_atomic
from bnncc.runtime.artifact import Artifact
from bnncc.runtime.session import ALIGNMENT, aligned_empty
from bnncc.targets.catalog import resolve
from tests import tiny as stub
from tests.tiny import BASELINE, expected, tiny


@pytest.fixture(scope="module")
def artifact() -> Artifact:
    return tiny()


@pytest.fixture(scope="module")
def compiled() -> Artifact:
    """Return the same network from the compiler."""
    inputs, outputs = (
        [onnx.helper.make_tensor_value_info(name, 1, ["n", 8]) for name in names]
        for names in (("x/in:0", "y"), ("product", "sum"))
    )
    nodes = [
        onnx.helper.make_node("MatMul", ["x/in:0", "w"], ["product"]),
        onnx.helper.make_node("Add", ["product", "y"], ["sum"]),
    ]
    weight = onnx.numpy_helper.from_array(stub.WEIGHT, "w")
    return bnncc.compile(_model(nodes, inputs, outputs, [weight]))


def _scaled() -> onnx.ModelProto:
    x, y = (onnx.helper.make_tensor_value_info(name, 1, [1, 4]) for name in "xy")
    three = onnx.numpy_helper.from_array(np.full(1, 3, np.float32), "three")
    return _model([onnx.helper.make_node("Mul", ["x", "three"], ["y"])], [x], [y], [three])


def _model(nodes: Any, inputs: Any, outputs: Any, weights: Any) -> onnx.ModelProto:
    graph = onnx.helper.make_graph(nodes, "g", inputs, outputs, weights)
    opsets = [onnx.helper.make_opsetid("", 17)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8)


@pytest.fixture
def path(artifact: Artifact, tmp_path: Path) -> Path:
    artifact.save(tmp_path / "tiny.bnncc")
    return tmp_path / "tiny.bnncc"


def arrays(batch: int = 3, seed: int = 0) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    x = rng.integers(-9, 9, (batch, 8)).astype(np.float32)
    y = rng.integers(-9, 9, (batch, 8)).astype(np.float32)
    return {"x/in:0": x, "y": y}, expected(x, y)


def check(artifact: Artifact, batch: int = 3, seed: int = 0) -> None:
    given, wanted = arrays(batch, seed)
    got = artifact.run(given)
    assert list(got) == list(wanted)
    for name, value in wanted.items():
        np.testing.assert_array_equal(got[name], value)


# ------------------------------------------------------------------------- saving and loading


def test_round_trip(path: Path, artifact: Artifact) -> None:
    loaded = Artifact.load(path)
    check(loaded)
    check(loaded, batch=1)
    assert loaded.manifest == artifact.manifest
    assert [(t.name, t.shape, t.dtype) for t in loaded.inputs] == [
        ("x/in:0", ("n", 8), "float32"),
        ("y", ("n", 8), "float32"),
    ]
    assert [t.name for t in loaded.outputs] == ["product", "sum"]
    assert loaded.report == artifact.report


def test_same_bytes_every_time(path: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.bnncc"
    stub.library()
    tiny().save(again)
    assert again.read_bytes() == path.read_bytes()
    assert str(tmp_path).encode() not in path.read_bytes()


@pytest.mark.parametrize("how", ["cc", "ziglang"])
def test_every_linker_makes_a_library_that_runs(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "ziglang":
        pytest.importorskip("ziglang")
        monkeypatch.setattr(link.shutil, "which", lambda name: None)
    elif not link.shutil.which("cc"):
        pytest.skip("no cc")
    first, second = stub.library(), stub.library()
    assert first == second
    assert os.getcwd().encode() not in first
    check(tiny())
    monkeypatch.undo()
    stub.library()


def test_no_linker_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(link.shutil, "which", lambda name: None)
    monkeypatch.setattr(link.importlib.util, "find_spec", lambda name: None)
    triple = resolve(BASELINE).triple
    with pytest.raises(TargetError, match=f"no linker for {triple} found: tried cc") as info:
        link.link(tmp_path, ["a.o"], "lib.so", triple=triple)
    assert "pip install ziglang" in str(info.value.hint)


def test_failing_linkers_say_why(tmp_path: Path) -> None:
    (tmp_path / "a.o").write_bytes(b"no object")
    with pytest.raises(TargetError, match="linking for"):
        link.link(tmp_path, ["a.o"], "lib.so", triple="")


def test_sizes_sum_to_the_file(path: Path) -> None:
    sizes = dict(Artifact.load(path).report["bytes"])
    total = sizes.pop("total")
    assert total == path.stat().st_size == sum(sizes.values())
    assert set(sizes) == {"code", "binary", "float", "selfcheck", "manifest"}


def test_plain_tvm_runs_what_tar_unpacks(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "unpacked"
    folder.mkdir()
    subprocess.run(["tar", "xf", str(path), "-C", str(folder)], check=True)
    assert sorted(p.name for p in folder.iterdir()) == ["lib.so", "manifest.json", "selfcheck.npz"]
    program = """
import sys
sys.modules["bnncc"] = None  # importing it would fail
import numpy as np, tvm
from tvm.runtime.vm import VirtualMachine
check = np.load("selfcheck.npz")
vm = VirtualMachine(tvm.runtime.load_module("./lib.so"), tvm.cpu())
outputs = vm["main"](*(tvm.runtime.tensor(check[f"input_{i}"]) for i in range(2)))
for i, output in enumerate(outputs):
    np.testing.assert_allclose(output.numpy(), check[f"output_{i}"], rtol=1e-4)
"""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**environment, "TVM_USE_RUNTIME_LIB": "1"},
        check=True,
    )


def test_selfcheck_arrays(path: Path) -> None:
    loaded = Artifact.load(path)
    given, wanted = loaded.selfcheck_arrays()
    got = loaded.run(given)
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-4)


def test_retarred_artifact_still_loads(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "u"
    folder.mkdir()
    subprocess.run(["tar", "xf", str(path), "-C", str(folder)], check=True)
    again = tmp_path / "again.bnncc"
    subprocess.run(
        ["tar", "cf", str(again), "-C", str(folder), "lib.so", "selfcheck.npz", "manifest.json"],
        check=True,
    )
    check(Artifact.load(again))


def test_save_leaves_nothing_half_written(artifact: Artifact, tmp_path: Path) -> None:
    target = tmp_path / "a.bnncc"
    target.write_bytes(b"old")

    def chunks() -> Any:
        yield b"new"
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError):
        write_atomic(target, chunks())
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]
    with pytest.raises(BnnccError, match="does not exist"):
        artifact.save(tmp_path / "missing" / "a.bnncc")


# --------------------------------------------------------------------------------------- running


def test_wrong_inputs_are_named(artifact: Artifact) -> None:
    good, _ = arrays()
    x, y = good["x/in:0"], good["y"]
    for change, message in [
        ({"z": x}, "the network has no input `z`"),
        ({"y": y.astype(np.float64)}, "input `y` has dtype float64, expected float32"),
        ({"y": y[:2]}, "input `y`: dimension `n` is 2, but 3 in `x/in:0`"),
        ({"y": y[:, :7]}, r"input `y` has shape \[3, 7\], expected \[n, 8\]"),
        ({"y": y[0]}, r"input `y` has shape \[8\], expected \[n, 8\]"),
        ({"x/in:0": x[:0], "y": y[:0]}, r"has shape \[0, 8\], .* with `.*` at least 1"),
        ({"y": np.ma.masked_equal(y, 0)}, "input `y` is a masked array"),
        ({"y": [[1.0] * 8]}, "input `y` is a list, expected an array"),
        ({"y": np.array([["a"] * 8] * 3)}, "input `y` holds text, expected float32"),
    ]:
        with pytest.raises(InputError, match=message):
            artifact.run({**good, **change})
    with pytest.raises(InputError, match="input `y` is missing") as info:
        artifact.run({"x/in:0": x})
    assert "y float32[n, 8]" in str(info.value.hint)
    check(artifact)  # and it still works


def test_copies_run_alike(artifact: Artifact) -> None:
    """A library that is loaded belongs to its process; a copy loads it again."""
    check(artifact)
    for twin in (pickle.loads(pickle.dumps(artifact)), copy.deepcopy(artifact)):
        assert twin.manifest == artifact.manifest
        check(twin)


def test_a_number_is_no_file_to_write(artifact: Artifact) -> None:
    with pytest.raises(UsageError, match="path is of type int, expected a path"):
        artifact.save(1)  # type: ignore[arg-type]


def test_threads_that_are_refused_change_nothing(artifact: Artifact) -> None:
    before = artifact.session().threads
    for wrong, message in ((10**6, "outside 1 .. 1024"), (0, "outside 1"), ("2", "type str")):
        with pytest.raises(UsageError, match=message):
            artifact.session(threads=wrong)  # type: ignore[arg-type]
        assert artifact.session().threads == before
    check(artifact)


def test_layouts_that_need_a_copy(artifact: Artifact) -> None:
    given, wanted = arrays()
    x = given["x/in:0"]
    shifted = np.empty(x.size + 1, np.float32)[1:].reshape(x.shape)
    shifted[:] = x
    frozen = x.copy()
    frozen.flags.writeable = False
    for variant in (
        np.asfortranarray(x),
        np.repeat(x, 2, 1)[:, ::2],
        x.astype(">f4"),
        shifted,
        frozen,
    ):
        got = artifact.run({**given, "x/in:0": variant})
        np.testing.assert_array_equal(got["sum"], wanted["sum"])


def test_dlpack_is_read_in_place(artifact: Artifact) -> None:
    import tvm

    given, wanted = arrays()
    aligned = aligned_empty((3, 8), "float32")
    aligned[:] = given["x/in:0"]
    assert aligned.ctypes.data % ALIGNMENT == 0
    tensor = tvm.runtime.tensor(given["y"])
    seen = artifact.session().tensors({"x/in:0": aligned, "y": tensor})
    assert np.shares_memory(np.from_dlpack(seen[0]), aligned)
    assert np.shares_memory(np.from_dlpack(seen[1]), np.from_dlpack(tensor))
    got = artifact.run({"x/in:0": aligned, "y": tensor})
    np.testing.assert_array_equal(got["sum"], wanted["sum"])


def test_results_stay(artifact: Artifact) -> None:
    given, wanted = arrays(seed=1)
    first = artifact.run(given)
    check(artifact, seed=2)
    np.testing.assert_array_equal(first["sum"], wanted["sum"])
    first["sum"][:] = 0  # the caller's to change
    check(artifact, seed=1)


def test_results_outlive_the_network() -> None:
    made = bnncc.compile(_scaled())
    given, wanted = {"x": np.ones((1, 4), np.float32)}, {"y": np.full((1, 4), 3, np.float32)}
    kept = [made.run(given)["y"] for _ in range(3)]
    assert made.session().main_into is not None
    del made
    assert not np.shares_memory(kept[0], kept[1])
    for array in kept:
        assert array.flags.writeable
        np.testing.assert_array_equal(array, wanted["y"])


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("which", ["artifact", "compiled"])
def test_results_go_where_the_caller_says(
    which: str, shift: int, request: pytest.FixtureRequest
) -> None:
    artifact = request.getfixturevalue(which)
    assert (artifact.session().main_into is None) == (which == "artifact")
    for batch in (3, 3, 5):
        given, wanted = arrays(batch)
        room = {
            name: aligned_empty((array.size + shift,), str(array.dtype))[shift:].reshape(
                array.shape
            )
            for name, array in wanted.items()
        }
        got = artifact.run(given, out=room)
        for name, array in wanted.items():
            assert got[name] is room[name]
            np.testing.assert_array_equal(room[name], array)


def test_results_may_go_where_inputs_are(compiled: Artifact) -> None:
    given, wanted = arrays()
    x, y = (aligned_empty((3, 8), "float32") for _ in range(2))
    x[:], y[:] = given["x/in:0"], given["y"]
    compiled.run({"x/in:0": x, "y": y}, out={"product": x, "sum": y})
    np.testing.assert_array_equal(x, wanted["product"])
    np.testing.assert_array_equal(y, wanted["sum"])


def test_places_for_results_that_do_not_fit(compiled: Artifact) -> None:
    given, wanted = arrays()
    right = {name: np.empty_like(array) for name, array in wanted.items()}
    total = right["sum"]
    frozen = total.copy()
    frozen.flags.writeable = False
    for wrong, message in (
        ({"sum": total}, "output `product` is missing"),
        ({**right, "more": total}, "the network has no output `more`"),
        ({**right, "sum": total.tolist()}, "output `sum` is a list, expected a NumPy array"),
        ({**right, "sum": total.astype("f8")}, "output `sum` has dtype float64, expected float32"),
        ({**right, "sum": total[:, :-1]}, "output `sum` has shape"),
        ({**right, "sum": np.asfortranarray(total)}, "`sum` is not contiguous and writeable"),
        ({**right, "sum": frozen}, "`sum` is not contiguous and writeable"),
        ({**right, "sum": total.astype(">f4")}, "dtype float32 in the byte order of other machi"),
        ({**right, "product": total}, "for outputs `product` and `sum` share memory"),
        ({**right, "sum": total[:2]}, "output `sum`: dimension `n` is 2, but 3 in `y`"),
    ):
        with pytest.raises(InputError, match=message):
            compiled.run(given, out=wrong)


def test_outputs_that_are_something_else_are_copied() -> None:
    """An input, a constant, the same tensor twice: none is the caller's to change."""
    kinds = {"x": [1, 4], "same": [1, 4], "twice": [1, 4], "again": [1, 4], "fixed": [2]}
    x, *outputs = (onnx.helper.make_tensor_value_info(name, 1, s) for name, s in kinds.items())
    pairs = (("x", "same"), ("made", "twice"), ("made", "again"), ("one", "fixed"))
    nodes = [onnx.helper.make_node("Relu", ["x"], ["made"])]
    nodes += [onnx.helper.make_node("Identity", [a], [b]) for a, b in pairs]
    one = onnx.numpy_helper.from_array(np.ones(2, np.float32), "one")
    made = bnncc.compile(_model(nodes, [x], outputs, [one]))
    x = aligned_empty((1, 4), "float32")
    x[:] = 1
    first = made.run({"x": x})
    for array in first.values():
        array[:] = 5
    assert (x == 1).all()
    for array in made.run({"x": x}).values():
        np.testing.assert_array_equal(array, np.ones(array.shape))


def test_many_threads(artifact: Artifact) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for batch in (1, 3, 2, 7) * 20:
                check(artifact, batch, seed)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_check_finite(tmp_path: Path) -> None:
    tiny(check_finite=True).save(tmp_path / "a.bnncc")
    strict = Artifact.load(tmp_path / "a.bnncc")
    given, _ = arrays()
    given["y"][1, 2] = np.inf
    with pytest.raises(InputError, match=r"input `y` holds inf at \[1, 2\]"):
        strict.run(given)
    given["y"][1, 2] = 3e38
    given["y"][1, 3] = 3e38  # their float32 sum would overflow
    strict.run(given)
