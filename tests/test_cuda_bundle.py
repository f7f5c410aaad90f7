"""The bundle of GPU benchmarks: its runner, proven on a CPU, without TVM."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_packaging import ROOT


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small bundle for this CPU."""
    folder = tmp_path_factory.mktemp("cuda") / "bundle"
    build = [sys.executable, "benchmarks/cuda/build.py", str(folder), "--target", "native"]
    subprocess.run([*build, "--quick"], check=True, cwd=ROOT, capture_output=True)
    return folder


def test_runner_checks_and_times_without_tvm(bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    # What would import TVM fails here.
    start = "import runpy, sys; sys.modules['tvm'] = None; sys.argv[0] = 'run.py'; "
    start += "sys.path.insert(0, '.'); runpy.run_path('run.py', run_name='__main__')"
    command = [sys.executable, "-c", start, "--json", str(path)]
    done = subprocess.run(command, cwd=bundle, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(path.read_text())["results"]
    assert [r["right"] for r in results] == [True, True]
    assert all(r["us"] > 0 for r in results)


def test_runner_refuses_wrong_results(bundle: Path) -> None:
    data = bundle / "data.py"
    before = data.read_text()
    data.write_text(before.replace("30, 0xBF", "30, 0xAF"))
    command = [sys.executable, "run.py", "--only", "cpu"]
    done = subprocess.run(command, cwd=bundle, capture_output=True, text=True, check=False)
    data.write_text(before)
    assert done.returncode == 1
    assert json.loads(done.stdout.splitlines()[0])["right"] is False
