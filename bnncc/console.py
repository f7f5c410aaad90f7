"""Errors, hints, warnings and progress, all on stderr; data on stdout."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TextIO

from bnncc import osutil
from bnncc.errors import BnnccError

_COLOURS = {"error": "31", "warning": "33", "hint": "36"}


@dataclass(frozen=True)
class Console:
    """Writes messages."""

    verbosity: int = 0
    """Below 0: errors only; 0: warnings and results; above 0: progress too."""

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
        """Write the result of a command, unless quiet."""
        if self.verbosity >= 0:
            self.line(text)

    def progress(self, text: str) -> None:
        """Write progress, if verbose."""
        if self.verbosity > 0:
            self.line(text)

    def line(self, text: str) -> None:
        """Write a line to standard error, if it is open."""
        if sys.stderr is not None:
            with contextlib.suppress(OSError):
                print(text, file=sys.stderr, flush=True)

    @property
    def live(self) -> bool:
        """Whether standard error is a terminal on which `status` works, and not quiet."""
        return self.verbosity >= 0 and _capable(sys.stderr)

    @staticmethod
    def status(text: str) -> None:
        """Rewrite the last line of the terminal with as much of a text as fits."""
        with contextlib.suppress(OSError):
            print(f"\r\x1b[K{text[: _columns() - 1]}", end="", file=sys.stderr, flush=True)

    def data(self, text: str) -> None:
        """Write data to standard output.

        Raises
        ------
        BrokenPipeError
            If its reader has closed it.
        BnnccError
            If it cannot be written for another reason.
        """
        if sys.stdout is None:
            raise BnnccError("standard output: cannot be written: it is closed")
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            reason = error.strerror or str(error)
            raise BnnccError(f"standard output: cannot be written: {reason}") from error

    def _labelled(self, label: str, text: str) -> None:
        name = label
        if _coloured(sys.stderr):
            name = f"\x1b[1;{_COLOURS[label]}m{label}\x1b[0m"
        self.line(f"{name}: {text}")


class Bar:
    """Shows phases: as a bar on a terminal, as lines where verbose, not at all otherwise.

    Parameters
    ----------
    console : Console
        Says how much to show.
    shares : mapping of str to int
        The phases to expect, and their shares of the time in percent.
    """

    def __init__(self, console: Console, shares: Mapping[str, int]) -> None:
        self._shown = console.live and console.verbosity == 0
        self._console, self._shares = console, shares
        self._percent = 0

    def begin(self, name: str) -> None:
        """Show the start of a phase."""
        if self._shown:
            names = list(self._shares)
            if name in names:
                before = sum(self._shares[n] for n in names[: names.index(name)])
                self._percent = max(self._percent, before)
            full = _BAR * self._percent // 100
            text = f"[{'#' * full}{'.' * (_BAR - full)}] {name}"
            self._console.status(text)

    def end(self, name: str, seconds: float) -> None:
        """Show the end of a phase."""
        if self._shown:
            self._console.status("")
        elif seconds >= _WORTH_SAYING:
            self._console.progress(f"{name}: {seconds:.2f} s")


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


_BAR = 20
"""Characters of a full bar."""
_WORTH_SAYING = 0.01
"""Seconds; shorter phases are not listed."""


def _coloured(stream: TextIO | None) -> bool:
    return "NO_COLOR" not in os.environ and _capable(stream)


def _capable(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal that obeys escape sequences: Windows' old console does not."""
    plain = os.environ.get("TERM") == "dumb" or (osutil.WINDOWS and "WT_SESSION" not in os.environ)
    return stream is not None and stream.isatty() and not plain


@contextlib.contextmanager
def library_output_hidden() -> Iterator[Callable[[], str]]:
    """Hide what TVM and LLVM write to the terminal, but not what Python writes.

    Only for a process of our own: file descriptor 2 leads to a file meanwhile.

    Yields
    ------
    function
        Returns the end of what was written.
    """
    try:
        saved = os.dup(2)
    except OSError:  # closed
        yield lambda: ""
        return
    before = sys.stderr
    with (
        osutil.private_file("stderr") as sink,
        os.fdopen(saved, "w", buffering=1, errors="backslashreplace") as terminal,
    ):
        if before is not None:
            before.flush()
        os.dup2(sink.fileno(), 2)
        sys.stderr = terminal
        faulthandler.enable(terminal)

        def written() -> str:
            end = os.lseek(sink.fileno(), 0, os.SEEK_END)
            os.lseek(sink.fileno(), max(0, end - 8000), os.SEEK_SET)
            return os.read(sink.fileno(), 8000).decode(errors="replace")

        try:
            yield written
        finally:
            faulthandler.disable()
            sys.stderr = before
            os.dup2(terminal.fileno(), 2)
