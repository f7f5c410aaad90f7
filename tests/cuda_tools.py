"""What tests of machine code for GPUs share: NVIDIA's tools, and scripts on an emulated GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bnncc.codegen import nvrtc
from bnncc.runtime.cuda import wheel_folders

_ROOT = Path(__file__).resolve().parents[1]
TOOLS = next((f for f in wheel_folders("bin") if (f / "cuobjdump").exists()), None)
compiles = pytest.mark.skipif(
    not nvrtc.available(), reason="needs NVRTC: pip install 'bnncc[cuda-test]'"
)
reads_code = pytest.mark.skipif(
    not nvrtc.available() or TOOLS is None,
    reason="needs NVRTC, cuobjdump and nvdisasm: pip install 'bnncc[cuda-test]'",
)
MAIN = ("cuda-sm75", "cuda-sm80", "cuda-sm90a", "cuda-sm100")
"""A target of each kind of tensor core."""


def disassembled(code: bytes, folder: Path, option: str) -> str:
    """Return what cuobjdump prints of a cubin with an option."""
    path = folder / "code.cubin"
    path.write_bytes(code)
    env = {**os.environ, "PATH": f"{TOOLS}{os.pathsep}{os.environ['PATH']}"}
    command = [str(TOOLS / "cuobjdump"), option, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    return done.stdout


def on_emulated_gpu(script: str, folder: Path, gpu: str = "80") -> subprocess.CompletedProcess[str]:
    """Run a script in a process with an emulated GPU of a compute capability."""
    path = folder / "script.py"
    path.write_text(script)
    env = {**os.environ, "BNNCC_FAKE_GPU": gpu, "BNNCC_FAKE_GPU_LOG": "1"}
    return subprocess.run(
        [sys.executable, "-m", "tests.cuda_gpu", str(path)], capture_output=True, text=True,
        cwd=_ROOT, env=env, check=False,
    )  # fmt: skip
