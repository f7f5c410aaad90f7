"""Times of a GPU on record: those of an H200 choose the kernels of a network compiled for one."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import bnncc
from bnncc import driver, schedules
from bnncc.bundle import importing, results
from bnncc.bundle.candidates import digest
from bnncc.bundle.device.runner import FORMAT
from bnncc.cli import main as cli
from bnncc.options import CompileOptions
from bnncc.records import database as records
from bnncc.records.workload import Workload
from bnncc.targets import catalog
from bnncc.topi_binary.spec import BinaryConv2d, Step, from_json
from bnncc.tuning import cases
from tests.cuda_emulator import COMPILER
from tests.cuda_tools import compiles, disassembled, on_emulated_gpu, reads_code
from tests.devices import DIGITS
from tests.records.test_weight_order import binary_layers, write

HOPPER = catalog.resolve("cuda-sm90a")
MEASURED = json.loads((Path(__file__).parents[1] / "data/h200_layers.json").read_text())
"""Microseconds of the fastest kernel with each order of weights, for one layer at two batches."""


def layer(measured: Mapping[str, Any]) -> BinaryConv2d:
    side, channels = measured["side"], measured["channels"]
    return BinaryConv2d(
        measured["n"], side, side, channels, channels, (3, 3), pads=(1, 1, 1, 1), pad_value=0,
        steps=(Step("threshold"),),
    )  # fmt: skip


def lines() -> Iterator[dict[str, Any]]:
    """Yield what `run.py` would have written, each order with the point its rule chooses."""
    yield {
        "format": FORMAT, "bundle": "0" * 64, "target": "cuda-sm90a", "family": "cuda-sm90a",
        "bnncc": bnncc.__version__, "tvm": importlib.metadata.version("apache-tvm"),
    }  # fmt: skip
    yield {"session": "2026-11-22T09:10:00+00:00", "device": MEASURED["device"], "torch": "2.11.0"}
    for number, measured in enumerate(MEASURED["layers"]):
        spec = layer(measured)
        check = digest(spec, cases.kept(spec, cases.small(spec)))
        for key, (order, us) in enumerate(measured["us"].items()):
            kernel = replace(spec, weight_order=order)
            yield {
                "part": f"kernel-{number}", "kernel": f"conv {number}", "check": check, "macs": 1,
                "spec": Workload.of(kernel).spec, "threads": 1, "label": order, "default": key == 0,
                "point": dict(schedules.space_of(kernel, HOPPER).default), "key": str(key),
                "right": True, "us": us, "times_us": [us], "launches": 20, "graph": True,
            }  # fmt: skip
        yield {"done": f"kernel-{number}"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the records."""
    place = tmp_path_factory.mktemp("h200")
    path = place / "results.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines()))
    made = importing.take(results.read(path), place / "logs", target=HOPPER, command="import")
    assert not made.warnings
    assert len(made.kernels) == len(MEASURED["layers"])
    return place / "logs"


def model() -> onnx.ModelProto:
    """Return a network whose first layer is the measured one of batch 1: 7x7x512."""
    sign = "c{0} = GreaterOrEqual({1}, zero) s{0} = Where(c{0}, one, minus)"
    text = f"""<ir_version: 9, opset_import: ["" : 18]>
    net (float[1,512,7,7] x) => (float[1,512,7,7] y) {{
      one = Constant<value_float=1.0>() minus = Constant<value_float=-1.0>()
      zero = Constant<value_float=0.0>()
      {sign.format(0, "x")} a = Conv<pads=[1,1,1,1]>(s0, w)
      {sign.format(1, "a")} y = Conv<pads=[1,1,1,1]>(s1, w)
    }}"""
    made = onnx.parser.parse_model(text)
    weight = np.where(np.random.default_rng(0).random((512, 512, 3, 3)) < 0.5, -1, 1)
    made.graph.initializer.append(onnx.numpy_helper.from_array(weight.astype("float32"), "w"))
    return made


@pytest.mark.parametrize("measured", MEASURED["layers"], ids=lambda m: f"{m['side']} x{m['n']}")
def test_the_fastest_order_is_taken(measured: dict[str, Any], folder: Path) -> None:
    known = records.load(HOPPER, [folder], own=False)
    fastest = min(measured["us"], key=measured["us"].__getitem__)
    assert schedules.with_weight_order(layer(measured), HOPPER, known).weight_order == fastest


def test_orders_that_measure_slower_are_not_on_record(folder: Path) -> None:
    log = records.read(folder / "cuda-sm90a")
    found = {(r.workload.kernel.weight_order, round(r.seconds * 1e6, 3)) for r in log.records}
    assert not [order for order, _ in found if order == "strips"]
    (session,) = (entry for entry in log.index if "session" in entry)
    assert session["device"] == "NVIDIA H200"
    assert session["target"] == "cuda-sm90a"
    assert session["measured"] == "clock"


def test_records_that_come_along_serve_the_gpu_by_any_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "shipped", lambda: folder)
    spec = layer(MEASURED["layers"][0])
    for target in (HOPPER, replace(HOPPER, name="native", base="cuda-sm90a")):
        found = schedules.with_weight_order(spec, target, records.load(target))
        assert found.weight_order == "fragments-32"
    portable = catalog.resolve("cuda-sm90")
    assert not records.load(portable).find(Workload.of(spec).spec, 1)


@compiles
@reads_code
def test_a_network_is_compiled_with_what_was_measured(folder: Path, tmp_path: Path) -> None:
    path, made = tmp_path / "net.onnx", tmp_path / "net.bnncc"
    onnx.save(model(), path)
    options = CompileOptions(target="cuda-sm90a", records=(folder,))
    specs = [from_json(spec) for spec, _ in driver.kernels(path, options)]
    orders = [spec.weight_order for spec in specs if isinstance(spec, BinaryConv2d)]
    assert orders[0] == "fragments-32"
    command = ["compile", str(path), "--target", "cuda-sm90a", "-o", str(made)]
    assert cli.main([*command, "--tuning-dir", str(folder)]) == 0
    artifact = bnncc.Artifact.load(made, check_host=False)
    tuned = [kernel["name"] for kernel in artifact.report["kernels"] if kernel["tuned"]]
    assert len(tuned) == 1
    code = artifact.library
    start = code.index(b"\x7fELF", 1)
    said = disassembled(code[start:], tmp_path, "-sass")
    kernels = dict((part.split()[0], part) for part in said.split("Function : ")[1:])
    assert "BMMA" in kernels[f"{tuned[0]}_kernel"]
    assert "BGMMA" not in kernels[f"{tuned[0]}_kernel"]


ON_A_GPU = """
import pathlib, sys
import numpy, tvm, tvm_ffi
import bnncc
from bnncc.bundle.device import worker
from bnncc.bundle.device.place import Place
from bnncc.runtime import kernel_arguments

shape = (2, 1, 8, 8)
made = bnncc.compile(MODEL, target="cuda-sm80", input_shapes={"images": shape}, tuning_dir=[LOGS])
orders = [kernel["name"] for kernel in made.report["kernels"] if kernel["tuned"]]
assert len(orders) == ORDERS, orders
library = pathlib.Path(FOLDER, "lib.so")
library.write_bytes(made.library)
given, wanted = made.selfcheck_arrays()
for _ in range(2):
    made.run(given)
print("UNFOLDED", file=sys.stderr, flush=True)
place = object.__new__(Place)  # as it would be with PyTorch
place.device, place.ffi = "cuda", tvm_ffi
main = place.network(tvm_ffi.load_module(str(library)))
for _ in range(2):
    out = main(tvm.runtime.tensor(given["images"], tvm.cuda(0)))
    assert numpy.allclose(out.numpy(), wanted["logits"], rtol=1e-4, atol=1e-4)
module = tvm_ffi.load_module(str(library))
for kernel in made.report["kernels"]:
    arrays = kernel_arguments.arguments(kernel, 0, {}, numpy.empty)
    worker._function(module, kernel["name"])(*(tvm.runtime.tensor(a, tvm.cuda(0)) for a in arrays))
"""


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="needs g++ on x86-64")
def test_a_network_of_recorded_orders_runs_without_graphs_of_its_own(tmp_path: Path) -> None:
    """Run it on an emulated GPU, where the result of every kernel is compared with the model's."""
    layers = [spec for spec in batched("cuda-sm80") if spec.weight_order != "strips"]
    logs = write(
        tmp_path / "logs", "cuda-sm80", {replace(s, weight_order="strips"): 1e-6 for s in layers}
    )
    script = ON_A_GPU.replace("MODEL", repr(str(DIGITS / "digits.onnx")))
    script = script.replace("LOGS", repr(str(logs))).replace("FOLDER", repr(str(tmp_path)))
    done = on_emulated_gpu(script.replace("ORDERS", str(len(layers))), tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    before, after = done.stderr.split("UNFOLDED")
    assert "graph of " in before
    assert "graph of " not in after


def batched(target: str) -> list[BinaryConv2d]:
    return [replace(spec, n=2) for spec in binary_layers(None, target)]
