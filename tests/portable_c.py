"""Kernels as portable C, compiled and run by C compilers."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from bnncc import schedules
from bnncc.codegen import c_helpers, c_kernels
from bnncc.codegen.c_text import C_TYPES
from bnncc.codegen.pipeline import tvm_target
from bnncc.targets.catalog import CATALOG
from bnncc.topi_binary.definitions import define
from bnncc.topi_binary.spec import Spec
from tests import cortex_m
from tests.kernel_harness import with_outputs

C99 = CATALOG["c99"]
STRICT = (
    "-std=c99", "-pedantic", "-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Wcast-align",
    "-Wundef", "-Werror",
)  # fmt: skip
SANITIZED = ("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
needs_gcc = pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")

_MAIN = """
#include <stdio.h>
#include <stdlib.h>

static void *content(FILE *file, size_t bytes) {
  void *place = malloc(bytes ? bytes : 1);
  if (!place || fread(place, 1, bytes, file) != bytes) exit(2);
  return place;
}

int main(void) {
  FILE *in = fopen("in", "rb"), *out = fopen("out", "wb");
  if (!in || !out) return 2;
"""


def here(folder: Path) -> tuple[int, str]:
    """Compile a kernel for this machine, and run it under sanitizers."""
    command = ["gcc", *STRICT, *SANITIZED, "kernel.c", "-lm", "-o", "kernel"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    if done.returncode:
        return done.returncode, done.stderr[:2000]
    env = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(
        ["./kernel"], cwd=folder, capture_output=True, text=True, timeout=300, env=env
    )
    return done.returncode, done.stderr[:3000]


def on_cortex_m4(folder: Path) -> tuple[int, str]:
    """Compile a kernel for a Cortex-M4, and run it in an emulator."""
    return cortex_m.run(folder, ["kernel.c"], *STRICT, "-Os")


Machine = Callable[[Path], tuple[int, str]]
"""Compiles and runs the program of a folder; returns its status and what it says."""


def run(spec: Spec, inputs: Sequence[np.ndarray], machine: Machine = here) -> list[np.ndarray]:
    """Compile a kernel and call it; outputs start as garbage.

    Tensors and scratch memory have just their size, so that sanitizers find a byte beyond.
    """
    functions = {"kernel": schedules.schedule(define(spec), C99)}
    source, scratch, *_ = c_kernels.build(functions, tvm_target(C99))

    def call(arrays: list[np.ndarray], _: int) -> None:
        _called(source, scratch["kernel"], arrays, machine)

    return with_outputs(spec, inputs, call)


def _called(source: bytes, scratch: int, arrays: list[np.ndarray], machine: Machine) -> None:
    names = [f"t{number}" for number in range(len(arrays))]
    lines = [
        f"  {C_TYPES[str(x.dtype)]} *{name} = content(in, {x.nbytes});"
        for name, x in zip(names, arrays, strict=True)
    ]
    lines.append(f"  void *scratch = malloc({max(1, scratch)});")
    lines.append(f"  if (kernel({', '.join(names)}, scratch)) return 3;")
    lines += [
        f"  fwrite({name}, 1, {x.nbytes}, out);" for name, x in zip(names, arrays, strict=True)
    ]
    lines += [f"  free({name});" for name in (*names, "scratch")]
    text = c_helpers.PRELUDE + source.decode() + _MAIN + "\n".join(lines)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "kernel.c").write_text(text + "\n  return fclose(in) | fclose(out);\n}\n")
        (place / "in").write_bytes(b"".join(x.tobytes() for x in arrays))
        code, said = machine(place)
        assert code == 0, said + source.decode()
        content = (place / "out").read_bytes()
    for array in arrays:
        array[...] = np.frombuffer(content, array.dtype, array.size).reshape(array.shape)
        content = content[array.nbytes :]
