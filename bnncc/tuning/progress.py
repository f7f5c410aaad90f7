"""What a user sees while kernels are tuned: a bar on a terminal, else a line for each batch."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from bnncc.console import Console
from bnncc.tuning.search import Task

WIDTH = 24
"""Characters of the bar."""


class Progress:
    """Shows trials done, the kernel at hand with its best so far, and the time left.

    Parameters
    ----------
    console : Console
        Where to.
    total : int
        Trials that are wanted.
    until : float or None
        `time.monotonic` when it ends in any case.
    unit : str
        ``s`` if seconds are measured, else what is counted.
    """

    def __init__(self, console: Console, total: int, until: float | None, unit: str) -> None:
        self.console, self.total, self.until, self.unit = console, total, until, unit
        self.started = time.monotonic()
        self.bar = sys.stderr.isatty() and console.verbosity >= 0
        self.first: int | None = None

    def show(self, done: int, task: Task) -> None:
        """Say how far it is after a batch for `task`."""
        if self.first is None:
            self.first = done
        text = f"{done}/{self.total} {task.workload.name}: {self.best(task)}, {self._left(done)}"
        if self.bar:
            filled = WIDTH * done // max(1, self.total)
            bar = f"[{'#' * filled}{'.' * (WIDTH - filled)}] {text}"
            print(f"\r\x1b[K{bar[:118]}", end="", file=sys.stderr, flush=True)
        else:
            self.console.result(text)

    def end(self, tasks: Sequence[Task]) -> None:
        """Leave the best of every kernel on the screen."""
        if self.bar:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        for task in tasks:
            self.console.result(f"{task.workload.name}: {self.best(task)}, {task.trials} trials")

    def best(self, task: Task) -> str:
        """Return the best so far of `task`, beside the default."""
        if task.best is None:
            return "nothing measured"
        text = self.amount(task.best[1])
        if task.default is not None and task.default > task.best[1]:
            text += f" ({100 * (1 - task.best[1] / task.default):.1f} % less than the default)"
        return text

    def amount(self, value: float) -> str:
        """Return what was measured with its unit."""
        return f"{value * 1e6:.2f} us" if self.unit == "s" else f"{value * 1e6:,.0f} {self.unit}"

    def _left(self, done: int) -> str:
        now, made = time.monotonic(), done - (self.first or 0)
        if made <= 0:
            return "time left unknown"
        seconds = (now - self.started) / made * max(0, self.total - done)
        if self.until is not None:
            seconds = min(seconds, max(0.0, self.until - now))
        return f"{int(seconds) // 60}:{int(seconds) % 60:02d} left"
