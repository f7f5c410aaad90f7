"""Run the kernels of schedules/cuda on the CPU: their text, compiled with `cuda_emulator.h`."""

from __future__ import annotations

import ctypes
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from bnncc.schedules.cuda.text import Kernel

_HEADER = Path(__file__).with_name("cuda_emulator.h")
COMPILER = shutil.which("g++") if platform.machine() == "x86_64" else None
FLAGS = (
    "-std=c++17", "-O1", "-w", "-fno-strict-aliasing", "-ffp-contract=off", "-mpopcnt", "-mfma",
    "-mf16c", "-shared", "-fPIC",
)  # fmt: skip
_ACCUMULATORS = "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
_INSTRUCTIONS = {
    f"mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.xor.popc {_ACCUMULATORS}": (
        "emulator::mma_bits<false>"
    ),
    f"mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc {_ACCUMULATORS}": (
        "emulator::mma_bits<true>"
    ),
    f"mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {_ACCUMULATORS}": "emulator::mma_bytes",
    "mma.sync.aligned.m8n8k128.row.col.s32.b1.b1.s32.xor.popc {%0, %1}, {%2}, {%3}, {%0, %1};": (
        "emulator::mma_small"
    ),
    f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {_ACCUMULATORS}": (
        "emulator::mma_halves<emulator::upper>"
    ),
    f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {_ACCUMULATORS}": (
        "emulator::mma_halves<emulator::float16>"
    ),
    "cvt.rn.bf16x2.f32 %0, %1, %2;": "emulator::pair_bfloats",
    "cvt.rn.f16x2.f32 %0, %1, %2;": "emulator::pair_float16",
    "cvt.rn.f16.f32 %0, %1;": "emulator::to_float16",
    "cvt.f32.f16 %0, %1;": "emulator::from_float16",
    "{.reg .pred p, q; setp.ne.s32 p, %1, 0; barrier.cta.red.or.pred q, %2, 128, p; "
    "selp.s32 %0, 1, 0, q;}": "emulator::team_any",
    "fence.proxy.async.shared::cta;": "emulator::nothing",
    "wgmma.fence.sync.aligned;": "emulator::nothing",
    "wgmma.commit_group.sync.aligned;": "emulator::nothing",
    "wgmma.wait_group.sync.aligned 0;": "emulator::wgmma_wait",
}
"""What asm statements may say, and what does it here."""

_WGMMA = re.compile(
    r"\{\.reg \.pred add; setp\.eq\.u32 add, 1, 1; wgmma\.mma_async\.sync\.aligned"
    r"\.m64n(\d+)k256\.s32\.b1\.b1\.and\.popc \{(.*)\}, \{(.*)\}, %(\d+), add;\}"
)
_ASM = re.compile(r"\basm(?: volatile)?\s*\(")
_LITERAL = re.compile(r'"([^"]*)"')


def translated(source: str) -> str:
    """Return CUDA C++ with each asm statement as a call of the emulator."""
    out, done = [], 0
    for match in _ASM.finditer(source):
        if match.start() < done:
            continue
        parts, end = _statement(source, match.end())
        out += [source[done : match.start()], _call(parts)]
        done = end
    return "".join([*out, source[done:]])


def _statement(source: str, start: int) -> tuple[list[str], int]:
    """Return the parts of an asm statement between its colons, and where it ends."""
    parts, depth, quoted, begin = [], 1, False, start
    for i in range(start, len(source)):
        char = source[i]
        if char == '"':
            quoted = not quoted
        elif not quoted and char in "([{":
            depth += 1
        elif not quoted and char in ")]}":
            depth -= 1
            if depth == 0:
                return [*parts, source[begin:i]], i + 1
        elif not quoted and char == ":" and depth == 1:
            parts.append(source[begin:i])
            begin = i + 1
    raise AssertionError("an asm statement does not end")


def _call(parts: list[str]) -> str:
    said = "".join(_LITERAL.findall(parts[0]))
    outputs, inputs = ([text for _, text in _operands(part)] for part in [*parts[1:3], "", ""][:2])
    if match := _WGMMA.fullmatch(said):
        count = int(match[1]) // 2
        assert match[2] == ", ".join(f"%{i}" for i in range(count))
        assert match[3] == ", ".join(f"%{count + i}" for i in range(4))
        assert int(match[4]) == count + 4
        assert outputs == [f"c[{i // 4}][{i % 4}]" for i in range(count)]
        return f"emulator::wgmma<{count // 4}>(c, {', '.join(inputs)})"
    assert said in _INSTRUCTIONS, said
    made = [f"&({text})" for text in outputs] + [f"({text})" for text in inputs]
    return f"{_INSTRUCTIONS[said]}({', '.join(made)})"


def _operands(part: str) -> Iterator[tuple[str, str]]:
    """Yield constraint and expression of each operand."""
    at = 0
    while match := re.compile(r'\s*,?\s*"([^"]*)"\s*\(').match(part, at):
        depth, end = 1, match.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(part[end], 0)
            end += 1
        yield match[1], part[match.end() : end - 1]
        at = end


class Emulated:
    """Kernels compiled for an architecture, on the CPU.

    Parameters
    ----------
    kernels : sequence of Kernel
        Of different names.
    arch : int
        Value of ``__CUDA_ARCH__``.
    """

    def __init__(self, kernels: Sequence[Kernel], arch: int) -> None:
        assert COMPILER is not None
        text = [f"#define __CUDA_ARCH__ {arch}", f'#include "{_HEADER}"']
        # Device code once, as in a module that TVM makes; guards drop what comes again.
        text += [translated(k.source) for k in {k.name: k for k in kernels}.values()]
        text += [_entry(k) for k in {k.name: k for k in kernels}.values()]
        with tempfile.TemporaryDirectory() as folder:
            code, library = Path(folder, "k.cc"), Path(folder, "k.so")
            code.write_text("\n".join(text))
            done = subprocess.run(
                [COMPILER, *FLAGS, str(code), "-o", str(library)], capture_output=True, text=True
            )
            assert done.returncode == 0, done.stderr[:3000]
            self._library = ctypes.CDLL(str(library))

    def run(self, kernel: Kernel, arrays: Sequence[np.ndarray], images: int, seed: int = 0) -> None:
        """Run `kernel` on inputs and outputs in order; outputs are changed in place."""
        function = getattr(self._library, f"run_{kernel.name}")
        function.restype = ctypes.c_char_p
        pointers = (ctypes.c_void_p * len(arrays))(*[a.ctypes.data for a in arrays])
        sizes = (ctypes.c_size_t * len(arrays))(*[a.nbytes for a in arrays])
        blocks = kernel.blocks(images)
        said = function(pointers, sizes, len(arrays), images, blocks, ctypes.c_uint64(seed))
        assert not said, said.decode()


def _entry(kernel: Kernel) -> str:
    """Return a C function that launches a kernel."""
    takes = re.search(rf"void {kernel.name}\(([^)]*)\)", kernel.source)
    assert takes
    kinds = [part.rsplit(" ", 1)[0] for part in takes[1].split(", ")][:-2]
    passed = ", ".join(f"({kind})pointers[{i}]" for i, kind in enumerate(kinds))
    return f"""
extern "C" const char* run_{kernel.name}(void** pointers, const size_t* sizes, int count,
                                         int images, unsigned blocks, uint64_t seed) {{
  emulator::tensors.clear();
  for (int i = 0; i < count; ++i)
    emulator::tensors.push_back({{(char*)pointers[i], (char*)pointers[i] + sizes[i]}});
  return emulator::launch({{blocks, {kernel.tiles}, 1}}, {{{kernel.threads}, 1, 1}},
                          {kernel.shared}, seed, [=] {{
    {kernel.name}({passed}, images, emulator::block.shared.data());
  }});
}}"""
