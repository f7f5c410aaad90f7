"""A machine with an emulated GPU, in a process of its own: ``python -m tests.cuda_gpu SCRIPT``.

Before the script runs, a driver and a runtime library that are not NVIDIA's (`fake_cuda.cc`) are
loaded under their names, and "machine code" becomes the emulated kernels, compiled for the CPU from
the very text that NVRTC would get. So TVM's own host code, memory plan and graphs run as they are.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

from tests import cuda_emulator

_HERE = Path(__file__).parent
_KERNEL = re.compile(
    r'extern "C" __global__ void (?:__launch_bounds__\(\d+\) )?(\w+)\(([^)]*)\) \{'
)
_DECLARED = re.compile(r'extern "C" __global__ void [^;{]*;')
_STATIC = re.compile(r"__shared__ (alignas\(\d+\))")
_SHARED = re.compile(r"extern __shared__ __align__\(\d+\) (\w+) (\w+)\[\];")


def plug_in(folder: Path) -> None:
    """Load the fake libraries into this process."""
    Path(folder, "versions").write_text("libcudart.so.13 { global: *; };")
    versions = f"-Wl,--version-script={folder}/versions"
    for name, option in (("libcuda.so.1", "-DDRIVER"), ("libcudart.so.13", versions)):
        flags = [f"-Wl,-soname,{name}", option]
        source = str(_HERE / "fake_cuda.cc")
        command = [
            str(cuda_emulator.COMPILER), "-std=c++17", "-O1", "-shared", "-fPIC", *flags, source,
            "-o", str(folder / name), "-ldl",
        ]  # fmt: skip
        subprocess.run(command, check=True)
        ctypes.CDLL(str(folder / name), ctypes.RTLD_GLOBAL)


def emulated(source: str, arch: str, folder: Path) -> bytes:
    """Return "machine code" of `source`: where its emulated kernels are."""
    for header in ("cuda.h", "cuda_fp16.h", "math_constants.h"):
        Path(folder, header).touch()
    text = _DECLARED.sub("", source)
    kernels = _KERNEL.findall(text)
    text = _KERNEL.sub(r"static void \1(\2) {", text)
    text = _SHARED.sub(r"\1* \2 = (\1*)emulator::block.shared.data();", text)
    text = _STATIC.sub(r"\1 static", text)  # blocks run one after another
    text = cuda_emulator.translated(text.replace("__restrict__", ""))
    number = re.sub(r"\D", "", arch)
    parts = [
        f"#define __CUDA_ARCH__ {number}0",
        f'#include "{_HERE / "cuda_emulator.h"}"',
        text,
        *(_launcher(name, parameters) for name, parameters in kernels),
    ]
    made = "\n".join(parts)
    library = folder / f"{hashlib.sha256(made.encode()).hexdigest()}.so"
    library.with_suffix(".cc").write_text(made)
    command = [
        str(cuda_emulator.COMPILER), "-I", str(folder), *cuda_emulator.FLAGS,
        str(library.with_suffix(".cc")), "-o", str(library),
    ]  # fmt: skip
    subprocess.run(command, check=True)
    return b"EMULATED:" + str(library).encode() + b"\0"


def _launcher(name: str, parameters: str) -> str:
    kinds = [re.sub(r"\w+$", "", part).strip() for part in parameters.split(",")]
    passed = ", ".join(f"*({kind}*)arguments[{i}]" for i, kind in enumerate(kinds))
    sizes = ", ".join(f"sizeof({kind})" for kind in kinds)
    return f"""
extern "C" const size_t* sizes_{name}(int* count) {{
  static const size_t sizes[] = {{{sizes}}};
  return *count = {len(kinds)}, sizes;
}}
extern "C" const char* run_{name}(const unsigned* grid, const unsigned* threads,
                                  unsigned shared, void** arguments) {{
  emulator::tensors = {{{{(char*)0, (char*)~0ull}}}};
  return emulator::launch({{grid[0], grid[1], 1}}, {{threads[0], threads[1], 1}}, shared, 1,
                          [=] {{ {name}({passed}); }});
}}"""


def emulate(folder: Path) -> None:
    """Give this process a GPU, and a compiler for it."""
    plug_in(folder)
    from bnncc.codegen import fatbin, nvrtc
    from bnncc.targets import gpus

    def taken(codes: dict[str, bytes]) -> bytes:
        """Return what a driver would choose for this GPU."""
        return next(c for a, c in reversed(codes.items()) if gpus.runs(gpus.here(), [a]))

    nvrtc.library = lambda: None  # NVRTC has no part in it, so it need not be installed
    nvrtc.cubin = lambda source, arch: emulated(source, arch, folder)
    fatbin.pack = taken


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        emulate(Path(place))
        script, *sys.argv = sys.argv[1:]
        sys.argv.insert(0, script)
        runpy.run_path(script, run_name="__main__")
