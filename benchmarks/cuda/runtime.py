"""TVM's runtime for a bundle: its libraries, and of its Python binding what loads modules."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path

import tvm

_BINDING = distribution("apache-tvm-ffi")
_TAKEN = ("tvm_ffi", f"apache_tvm_ffi-{_BINDING.version}.dist-info")
"""Folders of the binding; by the second it finds its library."""

_NOT_NEEDED = {"3rdparty", "include", "src", "cython", "share", "testing", "stub", "__pycache__"}
"""Folders for those who write extensions."""


def add_runtime(folder: Path, pythons: Iterable[str], *, gpu: bool) -> None:
    """Copy libraries and binding into a bundle.

    Parameters
    ----------
    folder : Path
        The bundle.
    pythons : iterable of str
        Versions of Python, as ``3.12``, whose wheels are fetched; if none, what is installed.
    gpu : bool
        Whether CUDA's part is needed.
    """
    (folder / "lib").mkdir(exist_ok=True)
    for name in ("libtvm_runtime.so", *(["libtvm_runtime_cuda.so"] if gpu else [])):
        shutil.copy(Path(tvm.__file__).parent / "lib" / name, folder / "lib" / name)
    chosen = list(pythons)
    if not chosen:
        for name in _BINDING.files or ():
            _add(folder, Path(name), Path(str(name.locate())))
    with tempfile.TemporaryDirectory() as place:
        for python in chosen:
            files = Path(place, f"{python}-files")
            zipfile.ZipFile(_fetch(python, Path(place, python))).extractall(files)
            for path in files.rglob("*"):
                _add(folder, path.relative_to(files), path)


def _fetch(python: str, place: Path) -> Path:
    """Download the wheel for a version of Python."""
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
        "--python-version", python, "--implementation", "cp",
        "--platform", "manylinux_2_28_x86_64", "--platform", "manylinux_2_24_x86_64",
        "--dest", str(place), f"apache-tvm-ffi=={_BINDING.version}",
    ]  # fmt: skip
    subprocess.run(command, check=True)
    return next(place.glob("*.whl"))


def _add(folder: Path, name: Path, path: Path) -> None:
    """Copy a file of the binding if it is needed."""
    if path.is_file() and name.parts[0] in _TAKEN and not _NOT_NEEDED & set(name.parts):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder / name)
