"""Compile CUDA C++ to machine code with NVRTC, which needs neither a GPU nor a driver.

The library is from the ``nvidia-cuda-nvrtc`` wheel or an installed CUDA toolkit, and so are the
headers (``nvidia-cuda-runtime``). The few C++ library headers that TVM's text includes are in
neither wheel, and are provided here.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Sequence
from pathlib import Path

from bnncc.errors import TargetError
from bnncc.runtime.cuda import MAJOR, open_library, wheel_folders

_OPTIONS = ("--std=c++17", "--fmad=false", "--ptxas-options=-v")
_LESS = "--ptxas-options=--register-usage-level=0"
_TRIES: tuple[tuple[tuple[str, ...], int], ...] = (((_LESS,), 0), ((_LESS,), 2), ((), 2))
"""Additional options, and the minimum number of blocks per multiprocessor (0: as in the text)."""

_BOUNDS = re.compile(r"__launch_bounds__\((\d+)\)")
_STACK = re.compile(r"(\d+) bytes stack frame")
_TOOLKIT = Path("/usr/local/cuda/include")
_HEADERS = {
    "cuda/std/cstdint": """#pragma once
namespace cuda { namespace std {
typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long long int64_t;
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
} }
""",
    "cuda/std/type_traits": """#pragma once
namespace cuda { namespace std {
template <typename T, typename U> struct is_same { static constexpr bool value = false; };
template <typename T> struct is_same<T, T> { static constexpr bool value = true; };
template <typename T, typename U> constexpr bool is_same_v = is_same<T, U>::value;
template <typename T> struct is_floating_point {
  static constexpr bool value = is_same_v<T, float> || is_same_v<T, double>; };
template <typename T> struct is_integral { static constexpr bool value = false; };
#define BNNCC_INTEGRAL(T) template <> struct is_integral<T> { static constexpr bool value = true; };
BNNCC_INTEGRAL(bool) BNNCC_INTEGRAL(char) BNNCC_INTEGRAL(signed char) BNNCC_INTEGRAL(unsigned char)
BNNCC_INTEGRAL(short) BNNCC_INTEGRAL(unsigned short) BNNCC_INTEGRAL(int) BNNCC_INTEGRAL(unsigned)
BNNCC_INTEGRAL(long) BNNCC_INTEGRAL(unsigned long) BNNCC_INTEGRAL(long long)
BNNCC_INTEGRAL(unsigned long long)
template <typename T> struct is_signed { static constexpr bool value = T(-1) < T(0); };
template <typename T> struct is_unsigned { static constexpr bool value = !(T(-1) < T(0)); };
template <bool B, typename T = void> struct enable_if {};
template <typename T> struct enable_if<true, T> { typedef T type; };
template <bool B, typename T, typename U> struct conditional { typedef T type; };
template <typename T, typename U> struct conditional<false, T, U> { typedef U type; };
} }
""",
}  # fmt: skip


@functools.cache
def _nvrtc() -> ctypes.CDLL | None:
    # It looks for its second library by name, and finds it if it is already loaded.
    for folder in wheel_folders("lib"):
        for other in folder.glob("libnvrtc-builtins.so.*"):
            open_library(other.name)
    return open_library(f"libnvrtc.so.{MAJOR}")


def available() -> bool:
    """Whether NVRTC is installed."""
    return _nvrtc() is not None


def library() -> ctypes.CDLL:
    """Return NVRTC.

    Raises
    ------
    TargetError
        If it is not installed.
    """
    found = _nvrtc()
    if found is None:
        raise TargetError(
            f"code for GPUs needs NVRTC {MAJOR}, which is not installed",
            hint="pip install 'bnncc[cuda]'",
        )
    return found


def cubin(source: str, arch: str) -> bytes:
    """Compile `source`.

    Parameters
    ----------
    source : str
        CUDA C++ that includes only CUDA headers, if any.
    arch : str
        For example ``sm_90a``.

    Returns
    -------
    bytes
        An ELF file for GPUs of this architecture.

    Raises
    ------
    TargetError
        If NVRTC or a CUDA header is missing, or NVRTC does not know the architecture.
    RuntimeError
        If compilation fails; the message contains the shortened log.

    Notes
    -----
    The assembler optimizes for many threads, and sometimes spills although registers are left.
    In that case the text is compiled again for fewer threads.
    """
    best, least = b"", -1
    for options, blocks in _TRIES:
        text = _BOUNDS.sub(rf"__launch_bounds__(\1, {blocks})", source) if blocks else source
        try:
            made, stack = _compiled(text, arch, options)
        except RuntimeError:
            if least < 0:
                raise
            continue  # with blocks of this size, there are too few registers
        if least < 0 or stack < least:
            best, least = made, stack
        if not least:
            break
    return best


def _compiled(source: str, arch: str, more: Sequence[str]) -> tuple[bytes, int]:
    """Return machine code, and the stack size of its kernels in bytes."""
    nvrtc = library()
    program = ctypes.c_void_p()
    count = len(_HEADERS)
    texts, names = (
        (ctypes.c_char_p * count)(*[text.encode() for text in side])
        for side in (_HEADERS.values(), _HEADERS)
    )
    _check(
        nvrtc,
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"kernels.cu", count, texts, names
        ),
    )
    try:
        places = [f"--include-path={place}" for place in (*wheel_folders("include"), _TOOLKIT)]
        options = [f"--gpu-architecture={arch}", *_OPTIONS, *places, *more]
        given = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        failed = nvrtc.nvrtcCompileProgram(program, len(options), given)
        log = _fetch(nvrtc, program, "ProgramLog").decode(errors="replace").strip("\0\n")
        if failed and "gpu-architecture" in log:
            raise TargetError(f"NVRTC {MAJOR} has no code for {arch}: {log.splitlines()[-1]}")
        if failed and (missing := re.search(r'(?:could ?|can)not open source file "([^"]+)"', log)):
            raise TargetError(
                f"code for GPUs needs {missing[1]} of CUDA {MAJOR}, which is not installed",
                hint="pip install 'bnncc[cuda]'",
            )
        if failed:
            raise RuntimeError(f"NVRTC refuses a kernel for {arch}: {log[:2000]}")
        return _fetch(nvrtc, program, "CUBIN"), sum(map(int, _STACK.findall(log)))
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _fetch(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    data = ctypes.create_string_buffer(size.value)
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, data))
    return data.raw


def _check(nvrtc: ctypes.CDLL, code: int) -> None:
    if code:
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(f"NVRTC: {nvrtc.nvrtcGetErrorString(code).decode()}")
