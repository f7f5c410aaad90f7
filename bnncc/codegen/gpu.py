"""Build GPU code into a library, and load it, with TVM's CUDA runtime.

TVM's wheel has that runtime, linked to the driver and to CUDA's runtime library. A machine that
only compiles has neither. Libraries with the same names are then generated as stand-ins, so that
TVM embeds machine code; otherwise it would silently embed the source.
"""

from __future__ import annotations

import ctypes
import platform
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bnncc.codegen import fatbin, link, nvrtc
from bnncc.files import scratch_folder
from bnncc.runtime import cuda
from bnncc.targets.host import normal_arch
from bnncc.targets.spec import TargetSpec

_COMPILE = "tvm_callback_cuda_compile"
_CUDA_SYMBOL = re.compile(rb"\0(cu(?:da)?[A-Z]\w+)(?=\0)")
_NO_DEVICE = 100  # CUDA's own error code
_COMPILING = threading.Lock()  # TVM has a single compile callback for all targets


def _stand_in(name: str, runtime: Path) -> None:
    """Generate and load a library whose functions, those `runtime` imports, find no device."""
    import tvm

    wanted = sorted({s.decode() for s in _CUDA_SYMBOL.findall(runtime.read_bytes())})
    symbols = [s for s in wanted if s.startswith("cuda") == (name == cuda.CUDART)]
    code = "\n".join(f"define i32 @{s}() {{ ret i32 {_NO_DEVICE} }}" for s in symbols)
    version = f"{cuda.CUDART} {{ global: *; }};" if name == cuda.CUDART else "{ global: *; };"
    with scratch_folder("cuda") as folder:
        text = Path(folder, "stand_in.ll")
        machine = normal_arch(platform.machine())
        text.write_text(f'target triple = "{machine}-unknown-linux-gnu"\n{code}\n')
        load = tvm.get_global_func("ffi.Module.load_from_file.ll")
        load(str(text), "ll").write_to_file(str(text.with_suffix(".o")))
        Path(folder, "versions").write_text(version)
        options = (f"-soname={name}", "--version-script=versions")
        link.link(Path(folder), ["stand_in.o"], name, triple="", options=options)
        ctypes.CDLL(str(Path(folder, name)), ctypes.RTLD_GLOBAL)


@contextmanager
def compiling(target: TargetSpec) -> Iterator[None]:
    """Make TVM compile kernels for all architectures of `target` with NVRTC, inside the context.

    Raises
    ------
    TargetError
        If NVRTC is not installed.
    """
    nvrtc.library()
    with _COMPILING:
        cuda.load_runtime(_stand_in)
        with _callback(target):
            yield


@contextmanager
def _callback(target: TargetSpec) -> Iterator[None]:
    import tvm

    before = tvm.get_global_func(_COMPILE, allow_missing=True)

    def compile_all(source: str, *_: Any) -> bytes:
        images = {gpu: nvrtc.cubin(source, gpu) for gpu in target.gpus}
        return next(iter(images.values())) if len(images) == 1 else fatbin.pack(images)

    tvm.register_global_func(_COMPILE, compile_all, override=True)
    try:
        yield
    finally:
        if before is not None:
            tvm.register_global_func(_COMPILE, before, override=True)
