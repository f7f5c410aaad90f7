"""NVIDIA's libraries, and TVM's runtime for CUDA, which needs them."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

from bnncc.errors import TargetError
from bnncc.targets import gpus, host

MAJOR = 13
"""Version of CUDA whose runtime library TVM's wheel is linked to."""

DRIVER, CUDART = "libcuda.so.1", f"libcudart.so.{MAJOR}"
_TVM, _CREATE = "libtvm_runtime_cuda.so", "ffi.Module.create.cuda"
_HINT = {
    DRIVER: "install NVIDIA's driver",
    CUDART: "pip install 'bnncc[cuda]'",
}


def load_runtime(stand_in: Callable[[str, Path], None] | None = None) -> None:
    """Load TVM's runtime for CUDA, once per process.

    Parameters
    ----------
    stand_in : callable, optional
        Given the name of a missing library (the driver, or CUDA's runtime library) and the path of
        TVM's runtime, loads another in its place: enough to compile, not to run.

    Raises
    ------
    TargetError
        If something is missing.
    """
    import tvm

    if tvm.get_global_func(_CREATE, allow_missing=True) is not None:
        return
    if host.system() != "linux":
        raise TargetError("code for GPUs is compiled and run on Linux only")
    gpus.here()  # remembered: stand-ins know no GPU, whatever the reason
    runtime = Path(tvm.__file__).parent / "lib" / _TVM
    for name in (DRIVER, CUDART):
        if open_library(name, ctypes.RTLD_GLOBAL) is not None:
            continue
        if stand_in is None:
            raise TargetError(
                f"running on a GPU needs {name}, which is not installed", hint=_HINT[name]
            )
        stand_in(name, runtime)
    try:
        ctypes.CDLL(str(runtime), ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise TargetError(f"TVM's runtime for CUDA cannot be loaded: {error}") from error


def wheel_folders(kind: str) -> Iterator[Path]:
    """Yield the folders called `kind` (``lib``, ``bin``) of NVIDIA's wheels."""
    found = importlib.util.find_spec("nvidia")
    for place in found.submodule_search_locations or () if found else ():
        folder = Path(place, f"cu{MAJOR}", kind)
        if folder.is_dir():
            yield folder


def open_library(name: str, mode: int = ctypes.DEFAULT_MODE) -> ctypes.CDLL | None:
    """Load a shared library of CUDA, from where the system finds it or from NVIDIA's wheels."""
    for path in (name, *(str(folder / name) for folder in wheel_folders("lib"))):
        try:
            return ctypes.CDLL(path, mode)
        except OSError:
            continue
    return None
