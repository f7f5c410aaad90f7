"""The bundle of GPU benchmarks: its runner, proven on a CPU, without TVM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.test_packaging import ROOT

FOLDER = ROOT / "benchmarks/cuda"
MEGABYTES = 4
"""What the archive of one layer and one network may take: TVM's runtime is half of it."""


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small bundle for this CPU, packed."""
    folder = tmp_path_factory.mktemp("cuda") / "bundle"
    build = [sys.executable, "benchmarks/cuda/build.py", str(folder), "--target", "native"]
    subprocess.run([*build, "--quick"], check=True, cwd=ROOT, capture_output=True)
    return folder.with_name("bundle.tar.xz")


@pytest.fixture
def bundle(archive: Path, tmp_path: Path) -> Path:
    """Return what was unpacked from the archive."""
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    return tmp_path / "bundle"


def run(bundle: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], list[Any]]:
    """Run a bundle where TVM cannot be imported; return its results too."""
    absent = bundle.parent / "absent/tvm"
    absent.mkdir(parents=True)
    (absent / "__init__.py").write_text("raise ImportError('not here')")
    done = subprocess.run(
        [sys.executable, str(bundle / "run.py"), *options], capture_output=True, text=True,
        check=False, env={**os.environ, "PYTHONPATH": str(absent.parent)},
    )  # fmt: skip
    return done, json.loads((bundle / "results.json").read_text())["results"]


def test_runner_checks_and_times_without_tvm(bundle: Path) -> None:
    done, results = run(bundle)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [r["right"] for r in results] == [True, True]
    assert all(r["us"] > 0 for r in results)
    assert "| digits_1 |" in done.stdout


def test_runner_refuses_wrong_results(bundle: Path) -> None:
    data = bundle / "data.py"
    data.write_text(data.read_text().replace("30, 0xBF", "30, 0xAF"))
    done, (result,) = run(bundle, "--only", "cpu")
    assert done.returncode == 1
    assert result["right"] is False
    assert "us" not in result


def test_runner_survives_a_part_that_crashes(bundle: Path) -> None:
    script = bundle / "ours.py"
    crash = "import os, sys\nif sys.argv[1] == 'cpu': os.abort()\n"
    script.write_text(script.read_text().replace("import ctypes\n", f"{crash}import ctypes\n", 1))
    done, results = run(bundle)
    assert done.returncode == 1
    assert results[0]["failed"] == "cpu"
    assert results[1]["right"] is True


def test_archive_is_small_and_has_no_weights_of_layers(archive: Path) -> None:
    assert archive.stat().st_size < MEGABYTES * 1e6
    with tarfile.open(archive) as packed:
        names = packed.getnames()
    assert not [name for name in names if name.endswith(".npz") and "/modules/" in name]
    assert not [name for name in names if "libtvm_compiler" in name]


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
