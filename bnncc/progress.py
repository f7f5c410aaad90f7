"""Phases of long commands: logged under ``bnncc``, and reported to a listener.

>>> import logging
>>> logging.getLogger("bnncc").setLevel(logging.INFO)  # to see phases and their times from Python
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Protocol

LOGGER = logging.getLogger("bnncc")

START = "start TVM"
"""The phase in which TVM is loaded: a second or more in each process, whatever the model."""

_COMPILE = {
    START: 20, "load": 2, "signs": 3, "fuse": 3, "confirm passes": 4, "relax": 3, "legalize": 3,
    "schedule": 8, "build": 33, "link": 19, "self-check": 2,
}  # fmt: skip
SHARES = {
    "": _COMPILE,
    "verify": {START: 20, "reference": 15, "layers": 25, "load": 4, "fuse": 4, "confirm passes": 4,
               "relax": 4, "legalize": 4, "kernels": 20},
    "run": {"load": 50, "run": 50},
    "bench": {"load": 100},
    "device-kit": {"TVM runtime": 50, "server": 50},
}  # fmt: skip
"""By verb, the phases that take time, in order, and their usual shares of it in percent."""


class Listener(Protocol):
    """Is notified of phases, which do not overlap."""

    def begin(self, name: str) -> None:
        """Note the start of a phase."""

    def end(self, name: str, seconds: float) -> None:
        """Note the end of a phase, and its time."""


_LISTENER: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Notify `listener` of the phases within the context."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Mark the context as a phase, and log its time."""
    listener = _LISTENER.get()
    if listener is not None:
        listener.begin(name)
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds = time.perf_counter() - start
        LOGGER.info("%s: %.3f s", name, seconds)
        if listener is not None:
            listener.end(name, seconds)
