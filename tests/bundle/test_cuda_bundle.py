"""The bundle of GPU benchmarks: what it adds to those of `bnncc tune`, proven on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.project.test_packaging import ROOT

FOLDER = ROOT / "benchmarks/cuda"


@pytest.mark.slow
def test_bundle_of_benchmarks_makes_tables(tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    build = [sys.executable, "benchmarks/cuda/build.py", str(folder), "--target", "native"]
    subprocess.run([*build, "--quick"], check=True, cwd=ROOT, capture_output=True)
    absent = tmp_path / "absent/tvm"
    absent.mkdir(parents=True)
    (absent / "__init__.py").write_text("raise ImportError('not here')")
    done = subprocess.run(
        [sys.executable, str(folder / "run.py")], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(absent.parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| digits_1 |" in done.stdout
    assert "| conv_7_512_1 | cpu |" in done.stdout
    content = json.loads((folder / "results.json").read_text())
    assert content["sessions"][0]["device"]
    assert all(result["right"] and result["us"] > 0 for result in content["results"])


@pytest.mark.slow
def test_bundle_of_what_tests_run_says_what_is_wrong(tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    build = [sys.executable, "benchmarks/cuda/build.py", str(folder), "--target", "native"]
    subprocess.run([*build, "--quick", "--cases"], check=True, cwd=ROOT, capture_output=True)
    index = json.loads((folder / "index.json").read_text())
    odd = next(part for part in index["kernels"] if part["name"].startswith("few-bit"))
    arrays = dict(np.load(folder / odd["case"]))
    arrays["output_0"].view(np.uint32).flat[0] ^= 1  # of a float, less than any tolerance
    np.savez(folder / odd["case"], **arrays)
    done = subprocess.run(
        [sys.executable, str(folder / "run.py")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "networks: 3 of 3 right" in done.stdout
    assert f"{odd['name']} " in done.stdout
    results = json.loads((folder / "results.json").read_text())["results"]
    kernels = [result for result in results if "kernel" in result]
    assert len(kernels) == len(index["kernels"]) > 5
    (wrong,) = (result for result in kernels if not result["right"])
    assert wrong["kernel"] == odd["name"]
    assert wrong["error"].startswith("1 of ")


def test_tables_show_what_ran_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import report

    kernel = {"part": "kernel-0", "kernel": "conv_7_512_1", "macs": 12_000_000, "right": True,
              "spec": '{"weight_order": "cores-64"}', "default": True}  # fmt: skip
    whole = {"part": "network-0", "network": "digits_1", "key": "main", "graph": True}
    lines = [
        {"session": "then", "device": "GPU"},
        {**kernel, "key": "0", "label": "wgmma-18", "us": 9.0, "graph": True},
        {**kernel, "key": "0", "label": "wgmma-18", "us": 2.0, "graph": True},
        {**kernel, "key": "1", "label": "mma-1x1", "right": False, "error": "died: SIGABRT"},
        {**whole, "right": True, "us": 20.0},
        {**whole, "key": "conv2d", "right": True, "us": 3.0},
        {"done": "network-0"},
        {"part": "rates", "mix": "popc", "us": 5.0, "tmacs": 321.0},
        {"part": "peers", "gpu": "H200"},
        {"part": "peers", "peer": "conv_7_512_1 cudnn float16", "us": 8.0},
    ]
    found = report.plain(lines)
    assert {"layer": "conv_7_512_1", "kernel": "wgmma-18", "right": True, "us": 2.0,
            "order": "cores-64", "default": True, "graph": True, "tmacs": 6.0} in found  # fmt: skip
    said = report.tables(found)
    assert "| conv_7_512_1 | wgmma-18 | 2 | 6 | 8 | 4.00 |  |  |" in said
    assert "| digits_1 | 20 |" in said
    assert "| popc | 321 |" in said
    assert "conv2d" not in said


def test_tables_compare_with_the_fastest_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import report

    results = [
        {"layer": "conv_7_512_1", "kernel": "mma-1x1", "us": 4.0, "tmacs": 3.0},
        {"layer": "conv_7_512_1", "kernel": "wgmma", "us": 2.0, "tmacs": 6.0},
        {"network": "birealnet18_1", "us": 100.0},
        {"peer": "conv_7_512_1 cudnn float16", "us": 9.0},
        {"peer": "conv_7_512_1 cudnn bfloat16", "us": 1.0},
        {"peer": "conv_7_512_1 cublaslt int8", "us": 6.0},
        {"peer": "conv_7_512_1 cublaslt fp8", "us": 5.0},
        {"peer": "birealnet18_1 torch eager float16", "us": 300.0},
        {"peer": "birealnet18_1 torch compiled float16", "us": 250.0},
        {"peer": "resnet18_1 torch eager float16", "error": "none"},
    ]
    said = report.tables(results)
    assert "| conv_7_512_1 | wgmma | 2 | 6 | 9 | 4.50 | 5 | 2.50 |" in said
    assert "| birealnet18_1 | 100 | 250 | 2.50 |  |  |" in said
    assert "instructions" not in said


@pytest.mark.parametrize("name", ["birealnet18", "cifar", "vehicle"])
def test_pytorch_can_run_what_it_is_timed_with(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(FOLDER))
    import networks
    import peers
    from layers_of import Layers

    made = Layers(networks.NETWORKS[name]())
    steps = json.loads(json.dumps(made.steps))
    out = peers.network(steps)(torch.rand(2, *made.shape[1:]))
    assert tuple(out.flatten(1).shape) == (2, {"birealnet18": 1000, "cifar": 10}.get(name, 4))
