"""What operating systems do differently: locks on files, own processes, private files, caches."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

WINDOWS = sys.platform == "win32"

DETACHED: dict[str, Any] = (
    {"creationflags": getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)}
    if WINDOWS
    else {"start_new_session": True}
)
"""Options of `subprocess.Popen` for a process that Ctrl-C does not reach."""

_DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG
_BEYOND = 1 << 30  # a byte that no file locked here has: Windows lets nobody read what is locked
_POLL_SECONDS = 0.05


def lock(handle: int, *, wait: bool = True) -> None:
    """Lock an open file until it is closed, against other processes that lock it.

    Parameters
    ----------
    handle : int
        The file's number.
    wait : bool
        Whether to wait for whoever holds it.

    Raises
    ------
    BlockingIOError
        If another holds it, and `wait` is false.
    """
    if sys.platform == "win32":
        while not _locked_on_windows(handle):
            if not wait:
                raise BlockingIOError(errno.EAGAIN, "locked by another process")
            time.sleep(_POLL_SECONDS)
    else:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


def _locked_on_windows(handle: int) -> bool:
    msvcrt: Any = __import__("msvcrt")
    place = os.lseek(handle, 0, os.SEEK_CUR)
    os.lseek(handle, _BEYOND, os.SEEK_SET)
    try:
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
    except OSError:
        return False
    finally:
        os.lseek(handle, place, os.SEEK_SET)
    return True


def is_ours(path: Path) -> bool:
    """Whether `path` belongs to the user; on Windows, whatever is in the user's own folders."""
    return not hasattr(os, "getuid") or path.stat().st_uid == os.getuid()


def replace_folder(folder: Path, place: Path) -> None:
    """Rename a folder to `place`, which is an empty folder or does not exist."""
    if WINDOWS and place.exists():  # where renaming replaces nothing
        place.rmdir()
    folder.replace(place)


def private_file(name: str) -> IO[bytes]:
    """Return a file that no other process finds: in memory where possible, for a disk may be full.

    Parameters
    ----------
    name : str
        What it is for; shown by debuggers.
    """
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create(name), "w+b")
    return tempfile.TemporaryFile()


def die_with_parent() -> None:
    """Have this process killed when the one that started it ends, where the system does that."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def cache_folder() -> Path | None:
    """Return bnncc's folder in the user's cache, which need not exist; None if there is no home.

    References
    ----------
    .. [1] XDG Base Directory Specification: a relative ``XDG_CACHE_HOME`` is to be ignored.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = base if os.path.isabs(base) else os.path.expanduser("~/.cache")
    return Path(folder, "bnncc") if os.path.isabs(folder) else None
