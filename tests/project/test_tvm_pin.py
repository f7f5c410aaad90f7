"""Notices an apache-tvm-ffi that crashes.

0.1.15 segfaults in `tvm.ir.save_json` and in what uses it: tensorizing and committing tuning
records. Nothing warns, and simple models compile and run, so this asks in a child process.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

TASKS = Path(__file__).parents[1].joinpath("tvm_pin_tasks.py")


@pytest.mark.parametrize("task", ["relax", "primfunc", "tensorize"])
def test_tvm_ffi_does_not_crash(task: str) -> None:
    done = subprocess.run([sys.executable, str(TASKS), task], capture_output=True, text=True)
    version = importlib.metadata.version("apache-tvm-ffi")
    assert done.returncode == 0, (
        f"apache-tvm-ffi {version} fails at `{task}` (exit status {done.returncode}); "
        "pyproject.toml asks for >=0.1.14.post1,<0.1.15, because 0.1.15 segfaults here\n"
        + done.stderr[-2000:]
    )
