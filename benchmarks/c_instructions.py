"""Instructions that networks in C execute on microcontrollers and on RISC-V, counted in QEMU.

    python benchmarks/c_instructions.py [--json FILE]

Digits and VGG-small are compiled to an object with C that calls it, and to portable C99, which
``gcc -O2`` compiles for the same processor. A program first runs the network's own check; a plugin
of QEMU then counts two programs that differ in one more call of the network. Instructions are not
cycles, but on a Cortex-M4, which issues one at a time, they are near. The bytes are those of
``bnncc explain``.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import onnx
from boards import BOARDS, build
from machine import ROOT, commit
from networks import vgg_small
from tables import markdown

from bnncc.driver import compile_c
from bnncc.options import CompileOptions

RISCV = ("riscv64-linux-gnu-gcc", "-static", "-march=rv64gc")
TARGETS = ("cortex-m4", "cortex-m55", "riscv64gcv")
EMULATOR = ("qemu-riscv64", "-cpu", "rv64,v=true,vext_spec=v1.0")

_PLUGIN = """
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
/* What is used of qemu-plugin.h. */
typedef uint64_t id_type;
struct qemu_plugin_tb;
void qemu_plugin_register_vcpu_tb_trans_cb(id_type, void (*)(id_type, struct qemu_plugin_tb *));
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *, int, void *, uint64_t);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);
void qemu_plugin_register_atexit_cb(id_type, void (*)(id_type, void *), void *);
int qemu_plugin_version = 1;
static uint64_t count;
static void translated(id_type id, struct qemu_plugin_tb *block) {
  qemu_plugin_register_vcpu_tb_exec_inline(block, 0, &count, qemu_plugin_tb_n_insns(block));
}
static void finished(id_type id, void *data) {
  fprintf(stderr, "instructions %" PRIu64 "\\n", count);
}
int qemu_plugin_install(id_type id, const void *info, int argc, char **argv) {
  qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
  qemu_plugin_register_atexit_cb(id, finished, NULL);
  return 0;
}
"""


def built(folder: Path, target: str, sources: list[str], *flags: str) -> list[str]:
    """Compile a program for a target, and return the command that runs it."""
    if target in BOARDS:
        return build(BOARDS[target], folder, sources, "-O2", *flags)
    command = [*RISCV, "-O2", *flags, *sources, "-lm", "-o", "program"]
    subprocess.run(command, cwd=folder, check=True)
    return [*EMULATOR, "./program"]


def run(folder: Path, command: list[str], *options: str) -> str:
    """Run a program in QEMU, and return what it and QEMU say."""
    done = subprocess.run(
        [command[0], *options, *command[1:]], cwd=folder, check=True, capture_output=True,
        text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return done.stdout + done.stderr


def counter(folder: Path) -> Path:
    """Compile the plugin of QEMU that counts instructions."""
    (folder / "count.c").write_text(_PLUGIN)
    command = ["gcc", "-shared", "-fPIC", "-O2", "count.c", "-o", "count.so"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "count.so"


def count(folder: Path, target: str, prefix: str, kernels: str, plugin: Path) -> int:
    """Check a network, and return the instructions of one call."""
    sources = [f"{prefix}.c", kernels]
    said = run(folder, built(folder, target, [f"{prefix}_check.c", *sources]))
    if not re.search(r": 0 of \d+ values wrong", said):
        raise SystemExit(f"{prefix} for {target}: {said}")
    # Another check runs the network one time more.
    text = (folder / f"{prefix}_check.c").read_text()
    call = re.search(rf"  failed = {prefix}_run\(.*\);\n", text)[0]
    (folder / "twice.c").write_text(text.replace(call, call + call))
    seen = []
    for program in (f"{prefix}_check.c", "twice.c"):
        said = run(folder, built(folder, target, [program, *sources]), "-plugin", str(plugin))
        seen.append(int(re.search(r"instructions (\d+)", said)[1]))
    return seen[1] - seen[0]


def measured(model: Any, target: str, plugin: Path) -> dict[str, Any]:
    """Return what a network takes on a target."""
    row: dict[str, Any] = {}
    for kind, suffix in ((target, "o"), ("c99", "c")):
        network = compile_c(model, CompileOptions(target=kind))
        (kernels,) = (name for name in network.files if name.endswith(f"_kernels.{suffix}"))
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for file, content in network.files.items():
                (folder / file).write_bytes(content)
            prefix = kernels.removesuffix(f"_kernels.{suffix}")
            row["object" if suffix == "o" else "c99"] = count(
                folder, target, prefix, kernels, plugin
            )
        row.update(network.report.get("device", {}))
    return row


def _table(content: dict[str, Any]) -> str:
    rows = [
        (
            f"`{row['target']}`", row["network"], f"{row['object'] / 1e6:.2f} M",
            f"{row['c99'] / 1e6:.2f} M", f"{row['kernels_bytes']:,}", f"{row['weights_bytes']:,}",
            f"{row['ram_bytes']:,}",
        )
        for row in content["rows"]
    ]  # fmt: skip
    head = (
        "target", "network", "instructions, object", "portable C99", "code, bytes",
        "weights, bytes", "RAM, bytes",
    )  # fmt: skip
    return f"{markdown(head, rows)}\n\n`benchmarks/results/c_instructions.json`: {content['qemu']}."


TABLES = {"c-instructions": (_table, ("c_instructions",))}


def main() -> None:
    """Compile, check and count."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    models = {
        "digits": onnx.load(ROOT / "examples/digits/digits.onnx"), "VGG-small": vgg_small()
    }  # fmt: skip
    rows = []
    with tempfile.TemporaryDirectory() as name:
        plugin = counter(Path(name))
        for target in TARGETS:
            for network, model in models.items():
                rows.append({"target": target, "network": network})
                rows[-1].update(measured(model, target, plugin))
                print(rows[-1], file=sys.stderr)
    version = subprocess.run([EMULATOR[0], "--version"], check=True, capture_output=True, text=True)
    result = {"commit": commit(), "qemu": version.stdout.splitlines()[0], "rows": rows}
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
