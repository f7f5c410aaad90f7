"""What goes to the terminal beside data: errors, hints, warnings and progress, all on stderr."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TextIO

from bnncc.errors import BnnccError

_COLOURS = {"error": "31", "warning": "33", "hint": "36"}


@dataclass(frozen=True)
class Console:
    """Writes messages.

    Attributes
    ----------
    verbosity : int
        Below 0: errors only; 0: warnings and results; above 0: progress too.
    """

    verbosity: int = 0

    def error(self, error: BnnccError) -> None:
        """Write an error, and its hint after a blank line."""
        self._labelled("error", str(error))
        if error.hint:
            self.line("")
            self._labelled("hint", error.hint)

    def warning(self, text: str) -> None:
        """Write a warning, unless quiet."""
        if self.verbosity >= 0:
            self._labelled("warning", text)

    def result(self, text: str) -> None:
        """Write what was made, unless quiet."""
        if self.verbosity >= 0:
            self.line(text)

    def progress(self, text: str) -> None:
        """Write what is going on, if asked to say more."""
        if self.verbosity > 0:
            self.line(text)

    def line(self, text: str) -> None:
        """Write a line in any case."""
        print(text, file=sys.stderr, flush=True)

    def _labelled(self, label: str, text: str) -> None:
        name = label
        if _coloured(sys.stderr):
            name = f"\x1b[1;{_COLOURS[label]}m{label}\x1b[0m"
        self.line(f"{name}: {text}")


def _coloured(stream: TextIO) -> bool:
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
