"""Programs for Cortex-M boards that QEMU emulates, with semihosting for their output."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

COMPILER, EMULATOR = "arm-none-eabi-gcc", "qemu-system-arm"
M4 = ("-mcpu=cortex-m4", "-mthumb", "-mfloat-abi=hard", "-mfpu=fpv4-sp-d16")
needs_cortex_m = pytest.mark.skipif(
    not (shutil.which(COMPILER) and shutil.which(EMULATOR)),
    reason=f"needs {COMPILER} and {EMULATOR} "
    "(packages gcc-arm-none-eabi, libnewlib-arm-none-eabi, qemu-system-arm)",
)

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

_MEMORY = """
ENTRY(_start)
MEMORY { CODE (rx) : ORIGIN = 0, LENGTH = 4M  RAM (rwx) : ORIGIN = 0x20000000, LENGTH = 4M }
SECTIONS {
  .text : { KEEP(*(.vectors)) *(.text*) *(.init) *(.fini) *(.rodata*) } > CODE
  .ARM.exidx : { __exidx_start = .; *(.ARM.exidx*) __exidx_end = .; } > CODE
  .data : { *(.data*) *(.init_array*) *(.fini_array*) } > RAM
  .bss : { __bss_start__ = .; *(.bss*) *(COMMON) __bss_end__ = .; } > RAM
  end = .; __end__ = .; __stack = 0x20400000;
}
"""


def run(folder: Path, sources: Sequence[str], *flags: str) -> tuple[int, str]:
    """Compile C files of a folder, and run them on the board mps2-an386; return what it prints."""
    (folder / "start.c").write_text(_START)
    (folder / "memory.ld").write_text(_MEMORY)
    command = [COMPILER, *M4, *flags, "--specs=rdimon.specs", "-T", "memory.ld"]
    subprocess.run(
        [*command, *sources, "start.c", "-lm", "-o", "program.elf"], cwd=folder, check=True,
        timeout=300,
    )  # fmt: skip
    machine = ["-M", "mps2-an386", "-nographic", "-semihosting", "-kernel", "program.elf"]
    done = subprocess.run(
        [EMULATOR, *machine], cwd=folder, capture_output=True, text=True, timeout=300,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr
