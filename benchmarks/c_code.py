"""Portable C for VGG-small: bnncc's beside that of emx-onnx-cgen, by the same compiler and flags.

    python benchmarks/c_code.py [--emx FILE] [--repeat N] [--json FILE]

Both get the same ONNX file and the same input; outputs are compared before anything is timed. Each
program is compiled by ``gcc -O3 -march=native`` and runs on one core; the least time of all repeats
counts, and the programs take turns. Bytes of memory are what is taken besides weights, inputs and
outputs: our arena; of the other, what it has at once from ``malloc``. Neither counts the stack.
`emx-onnx-cgen` is on PyPI; give its program with ``--emx`` if it is not on the path.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from machine import save
from networks import vgg_small
from tables import markdown, where

from bnncc.driver import compile_c
from bnncc.options import CompileOptions

FLAGS = ("-std=gnu11", "-O3", "-march=native")
ROUNDS = 5
"""How often the programs take turns."""

_MAIN = """
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
static float x[3 * 32 * 32], y[10];
static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}
int main(int argc, char **argv) {
  double best = 1e30;
  FILE *file = fopen("x.bin", "rb");
  if (argc < 2 || !file || fread(x, sizeof x, 1, file) != 1) return 2;
  PREPARE
  for (int i = 0; i < atoi(argv[1]); ++i) {
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


def ours(folder: Path, model: onnx.ModelProto) -> tuple[list[str], dict[str, int]]:
    """Write our program; return its sources, and bytes."""
    network = compile_c(model, CompileOptions(target="c99"))
    for name, content in network.files.items():
        (folder / name).write_bytes(content)
    (prefix,) = (name[:-10] for name in network.files if name.endswith("_kernels.c"))
    upper = prefix.upper()
    text = _MAIN.replace("PREPARE", "").replace("RUN", f"if ({prefix}_run(arena, x, y)) return 3;")
    text = text.replace("MEMORY", f"(unsigned long){upper}_ARENA_BYTES")
    arena = f"static uint64_t arena[({upper}_ARENA_BYTES + 7) / 8];\n"
    (folder / "ours.c").write_text(f'#include "{prefix}.h"\n{arena}{text}')
    sizes = network.report["bytes"]
    weights = sizes["binary"] + sizes["float"]
    return ["ours.c", f"{prefix}.c", f"{prefix}_kernels.c"], {"weight_bytes": weights}


def theirs(folder: Path, model: Path, emx: str) -> tuple[list[str], dict[str, int]]:
    """Write the other's program; return its sources, and bytes."""
    subprocess.run(
        [emx, "compile", "--model-base-dir", str(folder), "--model-name", "emx", model.name,
         "emx.c"],
        cwd=folder, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    source = (folder / "emx.c").read_text()
    declared = (
        "_Bool emx_load(const char *);\nsize_t peak(void);\nvoid emx(const void *, void *);\n"
    )
    text = _MAIN.replace("PREPARE", 'if (!emx_load("emx.bin")) return 3;')
    text = text.replace("RUN", "emx(x, y);").replace("MEMORY", "(unsigned long)peak()")
    (folder / "theirs.c").write_text(f"#include <stddef.h>\n{declared}\n{text}")
    (folder / "count.c").write_text(_COUNTING)
    renamed = "#include <stdlib.h>\n#define malloc counted_malloc\n#define free counted_free\n"
    heads = "void *counted_malloc(size_t);\nvoid counted_free(void *);\n"
    (folder / "counted.c").write_text(renamed.replace("#define", f"{heads}#define", 1) + source)
    arrays = onnx.load(model).graph.initializer
    weights = sum(onnx.numpy_helper.to_array(array).nbytes for array in arrays)
    return ["theirs.c", "emx.c", "count.c"], {"weight_bytes": weights}


def measured(folder: Path, program: str, repeat: int) -> tuple[float, int, np.ndarray]:
    """Run a program: milliseconds, bytes of memory, and what it computes."""
    done = subprocess.run(
        [f"./{program}", str(repeat)], cwd=folder, check=True, capture_output=True, text=True
    )
    time, memory, *values = done.stdout.split()
    return float(time), int(memory), np.array(values, np.float64)


def _table(content: dict[str, Any]) -> str:
    ours, other, ratio = (
        *(content["programs"][name] for name in ("ours", "emx")), content["emx_over_ours"]
    )  # fmt: skip
    rows = [
        ("time, ms", f"{ours['ms']:.2f}", f"{other['ms']:,.0f}", f"{ratio['ms']:.0f} x"),
        *(
            (text, f"{ours[key]:,}", f"{other[key]:,}", f"{ratio[key]:.1f} x")
            for text, key in (("memory, bytes", "memory_bytes"), ("weights, bytes", "weight_bytes"))
        ),
    ]
    table = markdown(("VGG-small", "bnncc", "emx-onnx-cgen", "ratio"), rows)
    return f"{table}\n\n{where(content)}"


TABLES = {"c-code": (_table, ("c_code",))}


def main() -> None:
    """Compile both, compare, time in turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--emx", default="emx-onnx-cgen")
    parser.add_argument("--repeat", type=int, default=3, help="runs in each turn")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = vgg_small()
        onnx.save(model, folder / "vgg_small.onnx")
        rng = np.random.default_rng(0)
        rng.standard_normal((3, 32, 32), np.float32).tofile(folder / "x.bin")
        made = {
            "ours": ours(folder, model),
            "emx": theirs(folder, folder / "vgg_small.onnx", args.emx),
        }
        rows: dict[str, dict[str, float]] = {}
        for program, (sources, sizes) in made.items():
            command = ["gcc", *FLAGS, *sources, "-lm", "-o", program]
            subprocess.run(command, cwd=folder, check=True)
            rows[program] = {**sizes, "ms": float("inf")}
        # Calls of another malloc are optimised less: that program is only for its memory.
        command = ["gcc", *FLAGS, "theirs.c", "counted.c", "count.c", "-lm", "-o", "counted"]
        subprocess.run(command, cwd=folder, check=True)
        _, rows["emx"]["memory_bytes"], right = measured(folder, "counted", 1)
        np.testing.assert_allclose(measured(folder, "ours", 1)[2], right, rtol=1e-4, atol=1e-4)
        for _ in range(ROUNDS):
            for program, row in rows.items():
                time, memory, _ = measured(folder, program, args.repeat)
                row["ms"] = min(row["ms"], time)
                row.setdefault("memory_bytes", memory)
    ratios = {key: rows["emx"][key] / rows["ours"][key] for key in rows["ours"]}
    version = subprocess.run(["gcc", "--version"], capture_output=True, text=True, check=True)
    result = {
        "network": "VGG-small", "gcc": version.stdout.splitlines()[0], "gcc_flags": " ".join(FLAGS),
        "programs": rows, "emx_over_ours": ratios,
    }  # fmt: skip
    for program, row in rows.items():
        print(program, row, file=sys.stderr)
    print({key: round(value, 1) for key, value in ratios.items()}, file=sys.stderr)
    if args.json:
        save(args.json, **result)


if __name__ == "__main__":
    main()
