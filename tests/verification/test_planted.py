"""Wrong instructions in machine code: `verify` names the kernel, the self-check notices most.

See `tests/planted_code.py`. Instructions are those of AVX2; objdump finds them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.planted_code import NETWORKS

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.isa("avx2", "fma"),
    pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump (binutils)"),
]


def planted(name: str, count: int) -> list[dict[str, Any]]:
    env = {**os.environ, "TVM_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.planted_code", name, str(count)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == count
    return results


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["binary", "few-bit"])
def test_verify_names_a_wrong_kernel(name: str) -> None:
    results = planted(name, 3)
    assert [r["found"] for r in results] == [[r["kernel"]] for r in results]
    assert sum(r["noticed"] for r in results) >= 2


@pytest.mark.slow
def test_fifty_wrong_instructions() -> None:
    results = [r for name in NETWORKS for r in planted(name, 10)]
    assert [r["found"] for r in results] == [[r["kernel"]] for r in results]
    assert sum(r["noticed"] for r in results) >= 45
