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
_MPS2 = (
    "CODE (rx) : ORIGIN = 0, LENGTH = 4M  CONST (r) : ORIGIN = {:#x}, LENGTH = 16M "
    "RAM (rwx) : ORIGIN = 0x20000000, LENGTH = 4M"
)
BOARDS = {
    "cortex-m0plus": Board(
        "mps2-an385", ("-mcpu=cortex-m0plus", "-mthumb", "-mfloat-abi=soft"),
        _MPS2.format(0x21000000),
    ),
    "cortex-m4": Board(
        "mps2-an386", ("-mcpu=cortex-m4", *_HARD, "-mfpu=fpv4-sp-d16"), _MPS2.format(0x21000000)
    ),
    "cortex-m7": Board("mps2-an500", ("-mcpu=cortex-m7", *_HARD), _MPS2.format(0x60000000)),
    "cortex-m33": Board(
        "mps2-an505", ("-mcpu=cortex-m33", *_HARD),
        "CODE (rx) : ORIGIN = 0x10000000, LENGTH = 4M  CONST (r) : ORIGIN = 0x80000000, "
        "LENGTH = 16M  RAM (rwx) : ORIGIN = 0x38000000, LENGTH = 2M",
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
#include <stdlib.h>
extern char __stack[];
int main(void);
void initialise_monitor_handles(void);
void _init(void) {}
void _fini(void) {}
/* Not as the C library starts: it asks QEMU for stack and heap, and gets those of other memory. */
void reset(void) {
#ifdef __ARM_FP
  *(volatile uint32_t *)0xE000ED88 |= 0xFu << 20; /* the unit for floats */
  __asm__ volatile("dsb\\n isb");
#endif
  initialise_monitor_handles();
  exit(main());
}
__attribute__((section(".vectors"), used)) static void *const vectors[2] = {
  __stack, (void *)(uintptr_t)reset};
"""

_SCRIPT = """
ENTRY(reset)
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
    linked = ("--specs=rdimon.specs", "-nostartfiles", "-Wl,--no-warn-execstack", "-T", "memory.ld")
    files = (*sources, "start.c", "-lm", "-o", "program.elf")
    command = [COMPILER, *board.options, *flags, *linked, *files]
    subprocess.run(command, cwd=folder, check=True, timeout=300)
    return [EMULATOR, "-M", board.name, "-nographic", "-semihosting", "-kernel", "program.elf"]
