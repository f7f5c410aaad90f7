"""Programs for Arm boards without an operating system that QEMU emulates; semihosting prints."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

COMPILER, EMULATOR = "arm-none-eabi-gcc", "qemu-system-arm"


@dataclass(frozen=True)
class Board:
    """A machine of `EMULATOR`."""

    name: str
    options: tuple[str, ...]
    """Of the compiler."""
    memory: str
    """Where code, constants and variables lie, as `ld` has it."""


_HARD = ("-mthumb", "-mfloat-abi=hard")
BOARDS = {
    "cortex-m4": Board(
        "mps2-an386", ("-mcpu=cortex-m4", *_HARD, "-mfpu=fpv4-sp-d16"),
        "CODE (rx) : ORIGIN = 0, LENGTH = 4M  CONST (r) : ORIGIN = 0x21000000, LENGTH = 16M "
        "RAM (rwx) : ORIGIN = 0x20000000, LENGTH = 4M",
    ),
    "cortex-m55": Board(
        "mps3-an547", ("-mcpu=cortex-m55", *_HARD),
        "CODE (rx) : ORIGIN = 0, LENGTH = 512K  CONST (r) : ORIGIN = 0x60000000, LENGTH = 64M "
        "RAM (rwx) : ORIGIN = 0x20000000, LENGTH = 512K",
    ),
}  # fmt: skip
"""Boards by target."""

_START = """
#include <stdint.h>
void _start(void);
extern char __stack[];
static void reset(void) {
  *(volatile uint32_t *)0xE000ED88 |= 0xFu << 20; /* the unit for floats */
  _start();
}
__attribute__((section(".vectors"), used)) static void *const vectors[2] = {
  __stack, (void *)(uintptr_t)reset};
"""

_SCRIPT = """
ENTRY(_start)
MEMORY {{ {memory} }}
SECTIONS {{
  .text : {{ KEEP(*(.vectors)) *(.text*) *(.init) *(.fini) }} > CODE
  .ARM.exidx : {{ __exidx_start = .; *(.ARM.exidx*) __exidx_end = .; }} > CODE
  .rodata : {{ *(.rodata*) }} > CONST
  .data : {{ *(.data*) *(.init_array*) *(.fini_array*) }} > RAM
  .bss : {{ __bss_start__ = .; *(.bss*) *(COMMON) __bss_end__ = .; }} > RAM
  end = .; __end__ = .; __stack = ORIGIN(RAM) + LENGTH(RAM);
}}
"""


def build(board: Board, folder: Path, sources: Sequence[str], *flags: str) -> list[str]:
    """Compile C files and objects of a folder, and return the command that runs the program."""
    (folder / "start.c").write_text(_START)
    (folder / "memory.ld").write_text(_SCRIPT.format(memory=board.memory))
    command = [COMPILER, *board.options, *flags, "--specs=rdimon.specs", "-T", "memory.ld"]
    subprocess.run(
        [*command, *sources, "start.c", "-lm", "-o", "program.elf"], cwd=folder, check=True,
        timeout=300,
    )  # fmt: skip
    return [EMULATOR, "-M", board.name, "-nographic", "-semihosting", "-kernel", "program.elf"]
