"""Programs for the Cortex-M4 board that QEMU emulates."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.boards import BOARDS, COMPILER, EMULATOR, Board, build

M4 = BOARDS["cortex-m4"]
needs_cortex_m = pytest.mark.skipif(
    not (shutil.which(COMPILER) and shutil.which(EMULATOR)),
    reason=f"needs {COMPILER} and {EMULATOR} "
    "(packages gcc-arm-none-eabi, libnewlib-arm-none-eabi, qemu-system-arm)",
)


def run(folder: Path, sources: Sequence[str], *flags: str, board: Board = M4) -> tuple[int, str]:
    """Compile C files of a folder, and run them; return the status and what they print."""
    command = build(board, folder, sources, *flags)
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL
    )
    return done.returncode, done.stdout + done.stderr
