"""Defer Ctrl-C while TVM or XGBoost call back into Python, which makes another error of it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Interrupts:
    """Raises `KeyboardInterrupt` at Ctrl-C, in a `shield` only at its end.

    A context manager; outside Python's main thread it does nothing.
    """

    def __init__(self) -> None:
        self._shields = 0
        self._pending = False
        self._before: object = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._taken)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)  # type: ignore[arg-type]

    def _taken(self, number: int, frame: FrameType | None) -> None:
        if self._shields:
            self._pending = True
        else:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def shield(self) -> Iterator[None]:
        """Defer Ctrl-C until the end of the block.

        Raises
        ------
        KeyboardInterrupt
            At the end, after Ctrl-C.
        """
        self._shields += 1
        try:
            yield
        finally:
            self._shields -= 1
        if self._pending and not self._shields:
            self._pending = False
            raise KeyboardInterrupt
