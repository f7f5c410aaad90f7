"""Portable C for VGG-small: bnncc's beside that of emx-onnx-cgen and onnx2c, by the same compiler.

    python benchmarks/c_code.py [--on here|cortex-m4] [--emx FILE] [--onnx2c FILE] [--json FILE]

All get the same ONNX file and the same input; outputs are compared before anything is measured.
`here`, each program is compiled by ``gcc -O3 -march=native`` and runs on one core; the least time
of all repeats counts, and the programs take turns. bnncc's default is ``--optimize-for memory``;
``speed`` is measured too. On a Cortex-M4, the board mps2-an386 in QEMU, executed instructions are
counted, by a timer of the board: with ``-icount shift=0`` an instruction takes 1 ns of the board's
time. VGG-small has half the channels there: the others' weights,
14 MB, have to fit the board's 16 MB.

Bytes of memory are what is taken besides weights, inputs and outputs: our arena; of emx-onnx-cgen,
what it has at once from ``malloc``; of onnx2c, its variables. None counts the stack.
`emx-onnx-cgen` is on PyPI. onnx2c is in no package registry: give its program with ``--onnx2c``,
without which it is not compared.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from machine import save
from networks import vgg_small
from tables import markdown, where

from bnncc.driver import compile_c
from bnncc.options import CompileOptions, OptimizeFor

ROUNDS = 5
"""How often the programs take turns."""

_MAIN = """
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
static float x[3 * 32 * 32], y[10];
#if defined __ARM_ARCH_7EM__ /* a timer of 25 MHz: 40 instructions */
static double now(void) { return (double)(0xFFFFFFFFu - *(volatile uint32_t *)0x40000004) * 40; }
static void begin(void) {
  *(volatile uint32_t *)0x40000008 = *(volatile uint32_t *)0x40000004 = 0xFFFFFFFFu;
  *(volatile uint32_t *)0x40000000 = 1;
}
#else
static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}
static void begin(void) {}
#endif
int main(int argc, char **argv) {
  double best = 1e30;
  FILE *file = fopen("x.bin", "rb");
  int repeat = argc > 1 ? atoi(argv[1]) : 1;
  if (!file || fread(x, sizeof x, 1, file) != 1) return 2;
  PREPARE
  begin();
  for (int i = 0; i < repeat; ++i) {
    double start = now(), end;
    RUN
    end = now();
    best = end - start < best ? end - start : best;
  }
  printf("%.6f %lu", best, MEMORY);
  for (int i = 0; i < 10; ++i) printf(" %.9g", (double)y[i]);
  return 0;
}
"""

_COUNTING = """
#include <stdlib.h>
static size_t held, most;
size_t peak(void) { return most; }
void *counted_malloc(size_t bytes) {
  size_t *place = malloc(bytes + 64);
  held += *place = bytes;
  most = held > most ? held : most;
  return (char *)place + 64;
}
void counted_free(void *place) {
  if (!place) return;
  size_t *whole = (void *)((char *)place - 64);
  held -= *whole;
  free(whole);
}
"""

_START = """
#include <stdint.h>
void _start(void);
static void reset(void) {
  *(volatile uint32_t *)0xE000ED88 |= 0xFu << 20; /* the unit for floats */
  _start();
}
__attribute__((section(".vectors"), used)) static void (*const vectors[2])(void) = {
  (void (*)(void))0x20400000, reset};
"""
# Weights, constant or read from a file, are in the board's largest memory.
_BOARD = """
ENTRY(_start)
MEMORY {
  CODE : ORIGIN = 0, LENGTH = 4M  RAM : ORIGIN = 0x20000000, LENGTH = 4M
  LARGE : ORIGIN = 0x21000000, LENGTH = 16M
}
SECTIONS {
  .text : { KEEP(*(.vectors)) *(.text*) *(.init) *(.fini) } > CODE
  .ARM.exidx : { __exidx_start = .; *(.ARM.exidx*) __exidx_end = .; } > CODE
  .rodata : { *(.rodata*) } > LARGE
  .data : { *(.data*) *(.init_array*) *(.fini_array*) } > LARGE
  .weights (NOLOAD) : { *emx.o(.bss*) } > LARGE
  .bss : { __bss_start__ = .; *(.bss*) *(COMMON) __bss_end__ = .; } > RAM
  end = .; __end__ = .; __stack = 0x20400000;
}
"""


@dataclass(frozen=True)
class Processor:
    """Where programs run."""

    compiler: tuple[str, ...]
    """With its flags."""
    run: tuple[str, ...]
    """What a program's name follows."""
    extra: tuple[tuple[str, str], ...] = ()
    """Files that every program needs."""
    width: int = 128
    """Channels of the first layer."""
    unit: str = "ms"
    """What is measured."""
    rounds: int = ROUNDS


PROCESSORS = {
    "here": Processor(("gcc", "-std=gnu11", "-O3", "-march=native"), ()),
    "cortex-m4": Processor(
        (
            *("arm-none-eabi-gcc", "-std=gnu11", "-O3", "-mcpu=cortex-m4", "-mthumb"),
            *("-mfloat-abi=hard", "-mfpu=fpv4-sp-d16", "--specs=rdimon.specs"),
        ),
        (
            *("qemu-system-arm", "-M", "mps2-an386", "-icount", "shift=0", "-nographic"),
            *("-semihosting", "-kernel"),
        ),
        extra=(("start.c", _START), ("board.ld", _BOARD)),
        width=64,
        unit="instructions",
        rounds=1,
    ),
}


@dataclass(frozen=True)
class Program:
    """The C of one generator."""

    sources: tuple[str, ...]
    weight_bytes: int
    memory: Callable[[], int] | None = None
    """What tells the bytes of memory, if the program does not."""


def _main(folder: Path, name: str, declared: str, **parts: str) -> str:
    """Write a program's main file; return its name."""
    text = _MAIN
    for key in ("PREPARE", "RUN", "MEMORY"):
        text = text.replace(key, parts.get(key.lower(), ""))
    (folder / f"{name}_main.c").write_text(f"#include <stddef.h>\n{declared}\n{text}")
    return f"{name}_main.c"


def ours(folder: Path, model: Path, optimize_for: OptimizeFor = "auto") -> Program:
    """Write our program."""
    proto, program = onnx.load(model), "ours" if optimize_for == "auto" else optimize_for
    proto.graph.name = f"{program}_network"
    network = compile_c(proto, CompileOptions(target="c99", optimize_for=optimize_for))
    for name, content in network.files.items():
        (folder / name).write_bytes(content)
    (prefix,) = (name[:-10] for name in network.files if name.endswith("_kernels.c"))
    size = f"{prefix.upper()}_ARENA_BYTES"
    main = _main(
        folder, program,
        f'#include "{prefix}.h"\nstatic uint64_t arena[({size} + 7) / 8];',
        run=f"if ({prefix}_run(arena, x, y)) return 3;", memory=f"(unsigned long){size}",
    )  # fmt: skip
    sizes = network.report["bytes"]
    return Program((main, f"{prefix}.c", f"{prefix}_kernels.c"), sizes["binary"] + sizes["float"])


def emx(folder: Path, model: Path, tool: str, processor: Processor) -> Program:
    """Write the program of emx-onnx-cgen."""
    subprocess.run(
        [tool, "compile", "--model-base-dir", str(folder), "--model-name", "emx", model.name,
         "emx.c"],
        cwd=folder, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    main = _main(
        folder, "emx",
        "_Bool emx_load(const char *);\nsize_t peak(void);\nvoid emx(const void *, void *);",
        prepare='if (!emx_load("emx.bin")) return 3;', run="emx(x, y);",
        memory="(unsigned long)peak()",
    )  # fmt: skip
    (folder / "count.c").write_text(_COUNTING)
    renamed = "#include <stdlib.h>\n#define malloc counted_malloc\n#define free counted_free\n"
    heads = "void *counted_malloc(size_t);\nvoid counted_free(void *);\n"
    (folder / "counted.c").write_text(
        renamed.replace("#define", f"{heads}#define", 1) + (folder / "emx.c").read_text()
    )

    # Calls of another malloc are optimized less: that program, here, is only for its memory.
    def memory() -> int:
        here = PROCESSORS["here"]
        build(folder, "counted", (main, "counted.c", "count.c"), here)
        return measured(folder, "counted", 1, here)[1]

    return Program((main, "emx.c", "count.c"), _weight_bytes(model), memory)


def onnx2c(folder: Path, model: Path, tool: str, processor: Processor) -> Program:
    """Write the program of onnx2c."""
    with open(folder / "onnx2c.c", "wb") as output:
        subprocess.run([tool, model.name], cwd=folder, check=True, stdout=output)
    main = _main(
        folder, "onnx2c", "void entry(const void *, void *);", run="entry(x, y);", memory="0ul"
    )

    def memory() -> int:
        flags = [flag for flag in processor.compiler if not flag.startswith("--specs")]
        subprocess.run([*flags, "-c", "onnx2c.c", "-o", "size.o"], cwd=folder, check=True)
        tool = processor.compiler[0].replace("gcc", "size")
        done = subprocess.run([tool, "size.o"], cwd=folder, capture_output=True, check=True)
        _, data, bss, *_ = map(int, done.stdout.splitlines()[1].split()[:3])
        return data + bss

    return Program((main, "onnx2c.c"), _weight_bytes(model), memory)


def _weight_bytes(model: Path) -> int:
    arrays = onnx.load(model).graph.initializer
    return sum(onnx.numpy_helper.to_array(array).nbytes for array in arrays)


def build(folder: Path, name: str, sources: tuple[str, ...], processor: Processor) -> None:
    """Compile and link a program."""
    objects = []
    for source in (*sources, *(n for n, _ in processor.extra if n.endswith(".c"))):
        objects.append(f"{Path(source).stem}.o")
        command = [*processor.compiler, "-c", source, "-o", objects[-1]]
        subprocess.run(command, cwd=folder, check=True)
    scripts = [f"-T{n}" for n, _ in processor.extra if n.endswith(".ld")]
    subprocess.run(
        [*processor.compiler, *scripts, *objects, "-lm", "-o", name], cwd=folder, check=True
    )


def measured(
    folder: Path, program: str, repeat: int, processor: Processor
) -> tuple[float, int, np.ndarray]:
    """Run a program: what it takes, bytes of memory, and what it computes."""
    command = [*processor.run, program] if processor.run else [f"./{program}", str(repeat)]
    done = subprocess.run(
        command, cwd=folder, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    took, memory, *values = done.stdout.split()
    return float(took), int(memory), np.array(values, np.float64)


def compare(
    folder: Path, model: Path, tools: dict[str, str], processor: Processor, repeat: int
) -> dict[str, dict[str, float]]:
    """Compile all programs, compare what they compute, and measure them in turns."""
    for name, text in processor.extra:
        (folder / name).write_text(text)
    rng = np.random.default_rng(0)
    rng.standard_normal((3, 32, 32), np.float32).tofile(folder / "x.bin")
    made = {"ours": ours(folder, model), "speed": ours(folder, model, "speed")}
    makers = {"emx": emx, "onnx2c": onnx2c}
    made |= {name: makers[name](folder, model, tool, processor) for name, tool in tools.items()}
    rows: dict[str, dict[str, float]] = {}
    right = None
    for name, program in made.items():
        build(folder, name, program.sources, processor)
        took, memory, values = measured(folder, name, 1, processor)
        right = values if right is None else right
        np.testing.assert_allclose(values, right, rtol=1e-4, atol=1e-4, err_msg=name)
        rows[name] = {
            "weight_bytes": program.weight_bytes, processor.unit: took,
            "memory_bytes": program.memory() if program.memory else memory,
        }  # fmt: skip
    for _ in range(processor.rounds if repeat else 0):
        for name, row in rows.items():
            took, _, _ = measured(folder, name, repeat, processor)
            row[processor.unit] = min(row[processor.unit], took)
    return rows


_NAMES = {"speed": "`--optimize-for speed`", "emx": "emx-onnx-cgen", "onnx2c": "onnx2c"}
_ROWS = {
    "ms": ("time, ms", ",.2f"),
    "instructions": ("instructions, millions", ",.1f"),
    "memory_bytes": ("memory, bytes", ",.0f"),
    "weight_bytes": ("weights, bytes", ",.0f"),
}


def _table(content: dict[str, Any]) -> str:
    programs = content["programs"]
    others = [name for name in _NAMES if name in programs]
    rows = []
    for key, (text, form) in _ROWS.items():
        if key in programs["ours"]:
            values = {name: row[key] for name, row in programs.items()}
            scale = 1e6 if key == "instructions" else 1
            ratios = (values[name] / values["ours"] for name in others)
            rows.append(
                (
                    text, format(values["ours"] / scale, form),
                    *(
                        f"{format(values[name] / scale, form)} ({ratio:.1f} x)"
                        for name, ratio in zip(others, ratios, strict=True)
                    ),
                )
            )  # fmt: skip
    table = markdown((content["network"], "bnncc", *(_NAMES[name] for name in others)), rows)
    counted = f"`{content.get('file', 'this run')}`: {content['gcc']}, {content['date']}."
    return f"{table}\n\n{counted if 'instructions' in programs['ours'] else where(content)}"


TABLES = {"c-code": (_table, ("c_code",)), "c-code-m4": (_table, ("c_code.cortex-m4",))}


def main() -> None:
    """Compare on one processor."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--on", choices=PROCESSORS, default="here")
    parser.add_argument("--emx", default="emx-onnx-cgen")
    parser.add_argument("--onnx2c", help="its program; not compared without")
    parser.add_argument("--repeat", type=int, default=3, help="runs in each turn")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    processor = PROCESSORS[args.on]
    tools = {"emx": args.emx, **({"onnx2c": args.onnx2c} if args.onnx2c else {})}
    with tempfile.TemporaryDirectory() as name:
        model = Path(name, "vgg_small.onnx")
        onnx.save(vgg_small(width=processor.width), model)
        rows = compare(Path(name), model, tools, processor, 0 if processor.run else args.repeat)
    version = subprocess.run(
        [processor.compiler[0], "--version"], capture_output=True, text=True, check=True
    )
    result = {
        "network": f"VGG-small, {processor.width} channels first",
        "gcc": version.stdout.splitlines()[0], "gcc_flags": " ".join(processor.compiler[1:]),
        "programs": rows,
        **{
            f"{other}_over_ours": {key: rows[other][key] / own for key, own in rows["ours"].items()}
            for other in tools
        },
    }  # fmt: skip
    for program, row in rows.items():
        print(program, row, file=sys.stderr)
    if args.json:
        save(args.json, **result)


if __name__ == "__main__":
    main()
