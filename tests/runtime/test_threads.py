"""How many threads kernels use, and that their number changes no bit of any result."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from tvm import te

import bnncc
from bnncc import schedules
from bnncc.errors import UsageError
from bnncc.options import CompileOptions
from bnncc.runtime.threads import usable_cpus
from bnncc.schedules import multithreading
from bnncc.targets import catalog
from bnncc.topi_binary.spec import BinaryConv2d, Conv2d, Elementwise, Step
from tests.collection import handmade

pytestmark = pytest.mark.sampled(4)

ROOT = Path(__file__).resolve().parents[2]
COUNTS = (1, 2, 3, 5)


def run_alone(program: str, **variables: str) -> str:
    """Run `program` in a process whose TVM has not started."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TVM_")}
    environment |= {"PYTHONPATH": str(ROOT), "TVM_USE_RUNTIME_LIB": "1", **variables}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True, timeout=60
    ).stdout


@pytest.mark.parametrize(
    ("variable", "asked", "wanted"),
    [
        ("", None, usable_cpus()),
        ("1", None, 1),
        ("999", None, usable_cpus()),
        ("1", 2, min(2, usable_cpus())),
        ("", 1, 1),
        ("", 999, usable_cpus()),
    ],
)
def test_pool(variable: str, asked: int | None, wanted: int) -> None:
    program = f"""
        from bnncc.runtime import threads
        assert threads.prepare({asked}) == {wanted}
        import tvm
        assert tvm.get_global_func("runtime.NumThreads")() == {wanted}
        assert threads.prepare() == threads.prepare(1) == {wanted}
        assert threads.use(1) == tvm.get_global_func("runtime.NumThreads")() == 1
        assert threads.use(None) == tvm.get_global_func("runtime.NumThreads")() == {wanted}
    """
    run_alone(program, **({"TVM_NUM_THREADS": variable} if variable else {}))


def test_pool_stays_within_the_affinity_mask() -> None:
    program = """
        import os
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        from bnncc.runtime import threads
        assert threads.prepare(7) == 1
        import tvm
        assert tvm.get_global_func("runtime.NumThreads")() == 1
    """
    run_alone(program)


@pytest.mark.skipif(usable_cpus() == 1, reason="needs two processors")
def test_pool_cannot_grow() -> None:
    program = """
        from bnncc.runtime import threads
        from bnncc.errors import UsageError
        threads.prepare(1)
        try:
            threads.prepare(2)
        except UsageError as error:
            print(error)
    """
    assert run_alone(program) == "TVM already runs with 1 threads, not 2\n"


@pytest.mark.skipif(usable_cpus() == 1, reason="needs two processors")
def test_a_forked_process_does_not_wait_for_workers_it_lacks(tmp_path: Path) -> None:
    images = onnx.helper.make_tensor_value_info("x", 1, [1, 32, 28, 28])
    made = onnx.helper.make_tensor_value_info("y", 1, [1, 64, 28, 28])
    weight = onnx.numpy_helper.from_array(np.ones((64, 32, 3, 3), np.float32), "w")
    node = onnx.helper.make_node("Conv", ["x", "w"], ["y"], pads=[1] * 4)
    graph = onnx.helper.make_graph([node], "g", [images], [made], [weight])
    bnncc.compile(onnx.helper.make_model(graph), threads=2).save(tmp_path / "a.bnncc")
    program = f"""
        import os, threading
        import numpy as np
        import bnncc
        artifact = bnncc.Artifact.load({str(tmp_path / "a.bnncc")!r})
        x = np.ones((1, 32, 28, 28), np.float32)
        wanted = artifact.run({{"x": x}})["y"]

        def run():
            assert (artifact.run({{"x": x}})["y"] == wanted).all()
            print(artifact.session().use_threads(), flush=True)

        run()
        if not (child := os.fork()):
            run()
            other = threading.Thread(target=run)
            other.start()
            other.join()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        run()
    """
    counts = [int(line) for line in run_alone(program, TVM_NUM_THREADS="2").split()]
    assert counts == [2, 1, 2, 2]


def test_refused() -> None:
    with pytest.raises(UsageError, match="threads is 0, outside 1"):
        CompileOptions(threads=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "bi_real_sign",  # a zero plane, a residual in place
        "khan_bincnn",
        pytest.param("reactnet_a_block", marks=pytest.mark.slow),
        pytest.param("lce_quicknet", marks=pytest.mark.slow),
        pytest.param("binary_densenet", marks=pytest.mark.slow),
        pytest.param("dorefa_1w2a", marks=pytest.mark.slow),
        pytest.param("meliusnet", marks=pytest.mark.slow),
        pytest.param("mobilenet_like", marks=pytest.mark.slow),
        pytest.param("squeezed_channels_shuffle", marks=pytest.mark.slow),
        pytest.param("birealnet_fully_binary_shortcut", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("target", ["native", "x86-64-v3"])
def test_same_bits(name: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels compiled for 1, 2, 3 and 5 threads, run by as many, make the same bytes."""
    if catalog.missing_features(catalog.resolve(target)):
        pytest.skip(f"this machine cannot run {target}")
    monkeypatch.setattr(multithreading, "MIN_US", 0.0)  # the collection's kernels are all short
    case = next(c for c in handmade.cases() if c.name == name)
    for count in COUNTS:
        bnncc.compile(case.model, target=target, threads=count).save(tmp_path / f"{count}.bnncc")
    np.savez(tmp_path / "in.npz", **case.feeds[0])
    program = f"""
        import os
        import numpy as np, tvm
        from bnncc import Artifact
        inputs = dict(np.load("{tmp_path}/in.npz"))
        made = []
        for cut in {COUNTS}:
            artifact = Artifact.load(f"{tmp_path}/{{cut}}.bnncc")
            session = artifact.session()
            tensors = session.tensors(inputs)
            os.environ["TVM_NUM_THREADS"] = "5"  # more than there may be processors
            for workers in {COUNTS}:
                tvm.get_global_func("runtime.config_threadpool")(1, workers)
                assert tvm.get_global_func("runtime.NumThreads")() == workers
                made.append([o.numpy().tobytes() for o in session.flatten(session.main(*tensors))])
        assert all(outputs == made[0] for outputs in made)
    """
    run_alone(program)


def test_one_region_per_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Borders, middle and ragged channels of a convolution wake the threads once."""
    import tvm
    import tvm_ffi

    from bnncc import schedules
    from bnncc.topi_binary.definitions import define

    monkeypatch.setattr(multithreading, "MIN_US", 0.0)
    steps = (Step("affine"), Step("store"), Step("bits"))
    for spec in (
        BinaryConv2d(1, 20, 20, 64, 72, (3, 3), pads=(1, 1, 1, 1), steps=steps),
        Conv2d(1, 20, 20, 8, 72, (3, 3), pads=(1, 1, 1, 1), steps=steps),
        Elementwise(2, 20, 21, 72, "NCHW", steps=(Step("store"), Step("bits"))),
    ):
        func = schedules.schedule(define(spec), catalog.resolve("x86-64-v4-vpopcntdq"), 2)
        starts = []
        kinds = []

        def attribute(node: tvm.tirx.AttrStmt, starts: list = starts) -> None:
            starts.extend([1] * (node.attr_key == "pragma_parallel_launch_point"))

        def loop(node: tvm.tirx.For, kinds: list = kinds) -> None:
            kinds.append(node.kind)

        tvm_ffi.structural_walk(func.body, (tvm.tirx.AttrStmt, attribute), order="post")
        tvm_ffi.structural_walk(func.body, (tvm.tirx.For, loop), order="post")
        assert kinds.count(tvm.tirx.ForKind.PARALLEL) > 1
        assert len(starts) == 1


def test_grain() -> None:
    target = catalog.resolve("x86-64-v4-vpopcntdq")
    layer = BinaryConv2d(1, 56, 56, 64, 64, (3, 3), pads=(1, 1, 1, 1), steps=(Step("threshold"),))
    small = BinaryConv2d(1, 7, 7, 64, 64, (3, 3), pads=(1, 1, 1, 1), steps=(Step("threshold"),))
    # 56 * 56 * 64 * 576 products at 1.2e6 a microsecond
    assert multithreading.microseconds(layer, target) == pytest.approx(56 * 56 * 64 * 576 / 1.2e6)
    assert multithreading.shared(layer, target, 2)
    assert not multithreading.shared(layer, target, 1)
    assert not multithreading.shared(small, target, 16)
    # moves 100 * 100 * 64 * (4 + 1/8) bytes at 1e4 a microsecond
    pack = Elementwise(1, 100, 100, 64, steps=(Step("bits"),))
    assert multithreading.microseconds(pack, target) == pytest.approx(100 * 100 * (256 + 8) / 1e4)
    gate = Elementwise(64, 1, 1, 300, steps=(Step("swish"), Step("store")), rank=2)
    # and 64 * 300 sigmoids at 1200 a microsecond
    wanted = 64 * 300 * (8 / 1e4 + 1 / 1200)
    assert multithreading.microseconds(gate, target) == pytest.approx(wanted)


@pytest.mark.parametrize(("name", "rate"), [("x86-64-v4", 6e4), ("x86-64-v3", 3e4)])
def test_products_of_two_tensors_are_estimated_as_products(name: str, rate: float) -> None:
    left, right = te.placeholder((40, 50), name="left"), te.placeholder((50, 60), name="right")
    k = te.reduce_axis((0, 50))
    made = te.compute((40, 60), lambda i, j: te.sum(left[i, k] * right[k, j], axis=k))
    func = te.create_prim_func([left, right, made])
    found = multithreading.estimated(func, None, catalog.resolve(name))
    assert found == pytest.approx(40 * 50 * 60 / rate)


def test_floats_on_tiles_are_estimated_by_what_tiles_multiply() -> None:
    target = catalog.resolve("x86-64-v4-amx")
    spec = Conv2d(1, 224, 224, 3, 64, (7, 7), (2, 2), pads=(3, 3, 3, 3), operands="bfloat16")
    first = schedules.with_packed_operands(spec, target)
    # 7 rows of 32 elements, of which 21 count, at half the rate of bytes
    assert multithreading.floats(first, target) == pytest.approx(0.9e6 * 7 * 21 / (7 * 32))
    wide = replace(first, channels=64, kernel=(1, 1), pads=(0,) * 4, strides=(1, 1))
    assert multithreading.floats(wide, target) == 0.9e6
    plain = replace(first, operands="float32", packed=1, apart=False)
    assert multithreading.floats(plain, target) < multithreading.floats(first, target) / 8


@pytest.mark.parametrize(
    ("pieces", "threads", "even"),
    [(56, 2, True), (7, 2, False), (14, 2, True), (14, 4, False), (224, 16, True), (1, 2, False)],
)
def test_balanced(pieces: int, threads: int, even: bool) -> None:
    assert multithreading.balanced(pieces, threads) == even
