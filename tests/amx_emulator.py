"""Run AMX's tile instructions on processors without them, in a signal handler."""

from __future__ import annotations

import ctypes
import functools
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from bnncc.targets import catalog, host

SOURCE = Path(__file__).with_suffix(".c")


@functools.cache
def load() -> ctypes.CDLL | None:
    """Perform tile instructions from here on in this process, or skip the test.

    The library's ``amx_emulator_performed()`` tells how many there were. There is none where the
    processor has tiles itself.
    """
    if platform.system() != "Linux" or host.normal_arch(platform.machine()) != "x86_64":
        pytest.skip("the AMX emulator is for Linux on x86-64")
    if {"amx_tile", "amx_int8"} <= host.features():
        return None
    if "amx_tile" in Path("/proc/cpuinfo").read_text().split():
        pytest.skip("this system keeps tiles from its programs")
    others = {f for f in catalog.CATALOG["x86-64-v4-amx"].features if not f.startswith("amx")}
    if not others <= host.features():
        pytest.skip("kernels on tiles also need AVX-512")
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "amx_emulator.so"
        command = ["cc", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
        subprocess.run([*command, str(SOURCE), "-o", str(library)], check=True)
        loaded = ctypes.CDLL(str(library))
    loaded.amx_emulator_performed.restype = ctypes.c_long
    return loaded
