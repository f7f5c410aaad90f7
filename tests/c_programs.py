"""Whole networks without a runtime: compiled as a user would, run here, in emulators or in Node."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import boards
from bnncc.codegen import c_folder, link, wasm_text
from bnncc.codegen.c_network import CNetwork
from bnncc.codegen.c_text import C_TYPES
from bnncc.targets.catalog import resolve
from tests.portable_c import SANITIZED, STRICT

Array = np.ndarray[Any, Any]

_MAIN = """\
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "NETWORK.h"

/* Just as many bytes as are wanted, of any content, so that a sanitizer finds a byte beyond. */
static void *memory(size_t bytes) {
  void *place = malloc(bytes ? bytes : 1);
  if (!place) exit(4);
  return memset(place, 0x5A, bytes);
}

static void *content(const char *path, size_t bytes) {
  void *place = memory(bytes);
  FILE *file = fopen(path, "rb");
  if (!file || fread(place, 1, bytes, file) != bytes) exit(3);
  fclose(file);
  return place;
}

static void save(const char *path, void *place, size_t bytes) {
  FILE *file = fopen(path, "wb");
  if (!file || fwrite(place, 1, bytes, file) != bytes || fclose(file)) exit(5);
  free(place);
}

int main(void) {
"""

_MODULE = """\
import { readFileSync, writeFileSync } from "node:fs";
import { inputs, load, outputs } from "./NETWORK.mjs";
const given = {}, taken = INPUTS, made = OUTPUTS;
const network = await load();
for (const [name, tensor] of Object.entries(inputs)) {
  const bytes = Uint8Array.from(readFileSync(`in${taken.indexOf(tensor.tensor)}`));
  given[name] = new ({ ARRAYS })[tensor.type](bytes.buffer);
}
network.run(given);
const results = network.run(given);
for (const [name, tensor] of Object.entries(outputs)) {
  const bytes = new Uint8Array(results[name].buffer);
  made.forEach((tensorName, i) => tensorName === tensor.tensor && writeFileSync(`out${i}`, bytes));
}
"""


@dataclass(frozen=True)
class Machine:
    """What compiles a network's folder and runs it."""

    target: str
    """Of bnncc."""
    compiler: tuple[str, ...] = ()
    """Command for C files and objects; for Node, none."""
    emulator: tuple[str, ...] = ()
    """What runs the program; nothing if it runs here."""
    caller: tuple[str, ...] = ()
    """Command for the program that calls the network, if that is another language."""
    board: boards.Board | None = None
    """Of a machine without an operating system, which `compiler` has flags for."""

    @property
    def missing(self) -> str:
        """What this machine needs and is not here; empty if all is."""
        tools = [*(self.compiler[:1] if not self.board else ()), *self.emulator[:1]]
        tools += [*self.caller[:1], *([boards.COMPILER, boards.EMULATOR] if self.board else [])]
        lacking = [tool for tool in dict.fromkeys(tools) if not shutil.which(tool)]
        if not self.compiler and not link.available("wasm32"):
            lacking.append("wasm-ld or ziglang")
        if not lacking and "zvbb" in self.target:
            command = [*self.emulator, "/bin/true"]
            said = subprocess.run(command, capture_output=True, text=True, timeout=60).stderr
            lacking += ["QEMU with Zvbb"] if "zvbb" in said else []
        return " and ".join(lacking)


def _emulated(target: str, *flags: str) -> Machine:
    command, emulator = c_folder.compiler(resolve(target))
    return Machine(target, (*command.split(), *STRICT, *flags), tuple(emulator.split()))


_RISCV32 = (
    "riscv64-unknown-elf-gcc", "-march=rv32imc", "-mabi=ilp32", "--specs=picolibc.specs",
    "--oslib=semihost", "--crt0=semihost", "-Wl,--defsym=__flash=0x80000000",
    "-Wl,--defsym=__flash_size=0x1000000", "-Wl,--defsym=__ram=0x81000000",
    "-Wl,--defsym=__ram_size=0x1000000",
)  # fmt: skip

MACHINES = {
    "gcc": Machine("c99", ("gcc", *STRICT, *SANITIZED)),
    "clang": Machine("c99", ("clang", *STRICT, "-O2")),
    "g++": Machine(
        "c99", ("gcc", *STRICT, "-O3"),
        caller=("g++", "-std=c++11", "-Wall", "-Wextra", "-Wconversion", "-Werror"),
    ),
    "c99-cortex-m4": Machine("c99", (*STRICT, "-Os"), board=boards.BOARDS["cortex-m4"]),
    "armv7": _emulated("armv7"),
    **{name: _emulated(name) for name in ("riscv64gcv", "riscv64gcv-zvbb")},
    "riscv32imc": Machine(
        "riscv32imc", (*_RISCV32, *STRICT, "-Os"),
        ("qemu-system-riscv32", "-M", "virt", "-cpu", "rv32,a=false,f=false,d=false", "-nographic",
         "-semihosting", "-bios", "none", "-kernel"),
    ),
    **{name: Machine(name, (*STRICT, "-Os"), board=board) for name, board in boards.BOARDS.items()},
    **{name: Machine(name, emulator=("node",)) for name in ("wasm32", "wasm32-simd128")},
}  # fmt: skip
"""By the name of the target, if it is one for that machine."""


def outputs(
    machine: Machine, network: CNetwork, feeds: Mapping[str, Array], like: Mapping[str, Array]
) -> dict[str, Array]:
    """Compile and run a network, twice on the same memory, and return its outputs.

    Parameters
    ----------
    machine : Machine
        Where to run it.
    network : CNetwork
        For the machine's target: of the format ``wasm`` for Node, else ``c``.
    feeds, like : mapping of str to ndarray
        Inputs, and arrays of the outputs' types and shapes, by the model's names in its order.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, data in network.files.items():
            path = folder / file
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
        for number, array in enumerate(feeds.values()):
            (folder / f"in{number}").write_bytes(np.ascontiguousarray(array).tobytes())
        command = _built(machine, folder, feeds, like)
        _call(command, folder)
        raw = [(folder / f"out{number}").read_bytes() for number in range(len(like))]
    return {
        name: np.frombuffer(data, value.dtype).reshape(value.shape)
        for data, (name, value) in zip(raw, like.items(), strict=True)
    }


def _call(command: Sequence[str], folder: Path) -> None:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL
    )
    skip_if_emulator_failed(done.stderr)
    said = (done.stdout + done.stderr)[:3000]
    assert done.returncode == 0, f"{' '.join(command)}: {done.returncode}: {said}"


def skip_if_emulator_failed(said: str) -> None:
    """Skip a test whose emulator failed, not the program.

    QEMU 7.2 stops at RISC-V's `vfcvt.rtz.x.f.v` (floats to integers) if it is the first
    instruction of a block that rounds; QEMU 10 does not.
    """
    if "Assertion" in said:
        pytest.skip(f"this version of QEMU fails: {said.strip()}")


def _built(
    machine: Machine, folder: Path, feeds: Mapping[str, Array], like: Mapping[str, Array]
) -> Sequence[str]:
    """Write and compile a program that calls the network; return the command that runs it."""
    if not machine.compiler:
        (module,) = folder.glob("*.wasm")
        texts = {
            "NETWORK": module.stem, "INPUTS": json.dumps(list(feeds)),
            "OUTPUTS": json.dumps(list(like)),
            "ARRAYS": ", ".join(f"{kind}: {array}" for kind, array in wasm_text.ARRAYS.items()),
        }  # fmt: skip
        text = _MODULE
        for word, replacement in texts.items():
            text = text.replace(word, replacement)
        (folder / "run.mjs").write_text(text)
        return [*machine.emulator, "run.mjs"]
    (check,) = folder.glob("*_check.c")
    prefix = check.name.removesuffix("_check.c")
    main = f"main.{'cc' if machine.caller else 'c'}"
    (folder / main).write_text(program(prefix, feeds, like))
    sources = [f"{prefix}.c", *(path.name for path in folder.glob(f"{prefix}_kernels.[co]"))]
    if machine.board:
        return boards.build(machine.board, folder, [main, *sources], *machine.compiler)
    _call([*machine.compiler, "-c", check.name], folder)
    if machine.caller:
        _call([*machine.compiler, "-c", *(s for s in sources if s.endswith(".c"))], folder)
        sources = [f"{Path(source).stem}.o" for source in sources]
        _call([*machine.caller, main, *sources, "-lm", "-o", "program"], folder)
    else:
        _call([*machine.compiler, main, *sources, "-lm", "-o", "program"], folder)
    return [*machine.emulator, "./program"]


def program(prefix: str, feeds: Mapping[str, Array], like: Mapping[str, Array]) -> str:
    """Return a program in C and C++ that runs a network on files, and writes others."""
    arrays = [
        *((f"in{k}", f'content("in{k}", {v.nbytes})', v) for k, v in enumerate(feeds.values())),
        *((f"out{k}", f"memory({v.nbytes})", v) for k, v in enumerate(like.values())),
    ]
    lines = [f"void *arena = memory({prefix.upper()}_ARENA_BYTES);"]
    for name, made, value in arrays:
        kind = C_TYPES[str(value.dtype)]
        lines.append(f"{kind} *{name} = ({kind} *){made};")
    called = f"{prefix}_run({', '.join(['arena', *(name for name, *_ in arrays)])})"
    lines.append(f"if ({called} || {called}) return 2;")
    for name, _, value in arrays:
        lines.append(
            f'save("{name}", {name}, {value.nbytes});' if name[0] == "o" else f"free({name});"
        )
    lines += ["free(arena);", "return 0;"]
    return _MAIN.replace("NETWORK", prefix) + "".join(f"  {line}\n" for line in lines) + "}\n"
