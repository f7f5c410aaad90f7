"""Add TVM's runtime to a bundle: its libraries, and what of its Python binding loads modules."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from importlib.metadata import distribution
from pathlib import Path

from bnncc.errors import BnnccError
from bnncc.targets import host

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
"""Default versions of Python of a bundle."""

_BINDING = distribution("apache-tvm-ffi")
_TAKEN = ("tvm_ffi", f"apache_tvm_ffi-{_BINDING.version}.dist-info")
"""Folders of the binding; by the second it finds its library."""

_NOT_NEEDED = {"3rdparty", "include", "src", "cython", "share", "testing", "stub", "__pycache__"}
"""Folders that only authors of extensions need."""


def add_runtime(folder: Path, pythons: Sequence[str], *, gpu: bool) -> None:
    """Copy libraries and binding into a bundle.

    Parameters
    ----------
    folder : Path
        The bundle.
    pythons : sequence of str
        Versions of Python, as ``3.12``. Wheels of other versions than the one in use are fetched by
        pip; if none is given, it is for that one.
    gpu : bool
        Whether the CUDA runtime is needed.

    Raises
    ------
    BnnccError
        If pip cannot fetch a wheel, or this is not Linux.
    """
    import tvm

    if host.system() != "linux":
        raise BnnccError("bundles are built on Linux only")
    (folder / "lib").mkdir(exist_ok=True)
    for library in ("libtvm_runtime.so", *(["libtvm_runtime_cuda.so"] if gpu else [])):
        shutil.copy(Path(str(tvm.__file__)).parent / "lib" / library, folder / "lib" / library)
    here = ".".join(platform.python_version_tuple()[:2])
    if not pythons or here in pythons:
        for name in _BINDING.files or ():
            _add(folder, Path(name), Path(str(name.locate())))
    with tempfile.TemporaryDirectory() as place:
        for python in pythons:
            if python == here:
                continue
            files = Path(place, f"{python}-files")
            with zipfile.ZipFile(_fetch(python, Path(place, python))) as wheel:
                wheel.extractall(files)
            for path in files.rglob("*"):
                _add(folder, path.relative_to(files), path)


def _fetch(python: str, place: Path) -> Path:
    """Download the wheel for a version of Python on this architecture."""
    arch = host.normal_arch(platform.machine())
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
        "--python-version", python, "--implementation", "cp",
        "--platform", f"manylinux_2_28_{arch}", "--platform", f"manylinux_2_24_{arch}",
        "--dest", str(place), f"apache-tvm-ffi=={_BINDING.version}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    wheels = sorted(place.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [""]
        raise BnnccError(
            f"pip cannot fetch apache-tvm-ffi {_BINDING.version} for Python {python}: {lines[-1]}",
            hint=f"--python {'.'.join(platform.python_version_tuple()[:2])} needs no network",
        )
    return wheels[0]


def _add(folder: Path, name: Path, path: Path) -> None:
    """Copy a file of the binding if it is needed."""
    if path.is_file() and name.parts[0] in _TAKEN and not _NOT_NEEDED & set(name.parts):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder / name)
