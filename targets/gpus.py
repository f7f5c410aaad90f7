"""NVIDIA's GPUs: what each architecture multiplies bits with, and which code each one runs."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable

from bnncc.targets.spec import TargetSpec

_HOST = ("x86-64", "x86_64-unknown-linux-gnu")
_HOSTS = {"sm_87": ("generic", "aarch64-unknown-linux-gnu")}
"""Processor and triple of the machines that GPUs are in, where it is not `_HOST`: Jetson Orin."""
_ENGINES = {
    "sm_75": "mma",
    "sm_80": "mma",
    "sm_86": "mma",
    "sm_87": "mma",
    "sm_89": "mma",
    "sm_90": "mma",
    "sm_90a": "wgmma",
    "sm_100": "int8",
    "sm_120": "int8",
}
_SHARED_BYTES = {"sm_90a": 227 * 1024}
_PORTABLE = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")

_CAPABILITY = (75, 76)
"""Attributes of a device in CUDA's driver: major and minor version of what it can do."""


def _target(name: str, gpus: tuple[str, ...], engine: str) -> TargetSpec:
    mcpu, triple = _HOSTS.get(gpus[0], _HOST)
    return TargetSpec(name, "cuda", mcpu, triple=triple, gpus=gpus, engine=engine)


TARGETS = (
    _target("cuda", _PORTABLE, "int8"),
    *(_target(f"cuda-{a.replace('_', '')}", (a,), engine) for a, engine in _ENGINES.items()),
)
"""All of them: one with code for every architecture, and one for each."""

ARCHITECTURES = tuple(_ENGINES)
"""What `TargetSpec.gpus` may have."""


def shared_bytes(gpus: Iterable[str]) -> int:
    """Return the shared memory that a block may have on all of `gpus`."""
    return min(_SHARED_BYTES.get(gpu, 48 * 1024) for gpu in gpus)


def runs(gpu: str, codes: Iterable[str]) -> bool:
    """Whether a GPU of architecture `gpu` runs any of `codes`.

    Examples
    --------
    >>> runs("sm_86", ["sm_80"]), runs("sm_90", ["sm_90a"]), runs("sm_90", ["sm_89"])
    (True, True, False)
    """
    major, minor = divmod(int(gpu.removeprefix("sm_")), 10)
    for code in codes:
        version = code.removeprefix("sm_")
        code_major, code_minor = divmod(int(version.rstrip("a")), 10)
        later = not version.endswith("a") and code_minor < minor
        if code_major == major and (later or code_minor == minor):
            return True
    return False


def missing(codes: Iterable[str]) -> str:
    """Return why this machine cannot run code for the GPUs `codes`; empty if it can."""
    codes = tuple(codes)
    found = here()
    if not found.startswith("sm_"):
        return found
    return "" if runs(found, codes) else f"the GPU here is {found}"


@functools.cache
def here() -> str:
    """Return the architecture of this machine's first GPU, or why there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no NVIDIA driver (libcuda.so.1)"
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "the NVIDIA driver finds no GPU"
    device, numbers = ctypes.c_int(), (ctypes.c_int(), ctypes.c_int())
    failed = driver.cuDeviceGet(ctypes.byref(device), 0)
    for number, attribute in zip(numbers, _CAPABILITY, strict=True):
        failed = failed or driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
    return f"sm_{numbers[0].value}{numbers[1].value}" if not failed else "the GPU does not answer"
