"""Compile files one after the other in this process; print one JSON line for each.

    python -m tests.collection.hostile_child OUT_FOLDER FILE...

Memory is bounded (RLIMIT_DATA), and each file has SECONDS before it is reported as hanging. If the
process dies, the caller knows from the missing line which file did it.
"""

from __future__ import annotations

import contextlib
import io
import json
import resource
import signal
import sys
import time
import traceback
from pathlib import Path

SECONDS = 60
BYTES = 6 << 30


class _Hangs(BaseException):
    """Raised by the alarm."""


def _alarm(*_: object) -> None:
    raise _Hangs


def compile_one(main, path: Path, folder: Path) -> dict:
    """Run `bnncc compile PATH -o FOLDER/out.bnncc` and describe what happened."""
    out, err = io.StringIO(), io.StringIO()
    start = time.monotonic()
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = main(["compile", str(path), "-o", str(folder / f"{path.stem}.bnncc")])
            except SystemExit as stop:
                code = stop.code
        code = 0 if code is None else code
    except _Hangs:
        code = "hangs: " + "".join(traceback.format_exc(limit=-6))
    except BaseException:
        code = "raises: " + traceback.format_exc(limit=-6)
    finally:
        signal.alarm(0)
    made = sorted(
        p.name for p in folder.iterdir() if p.name.startswith(path.stem) or p.name.startswith(".")
    )
    return {
        "file": path.name,
        "code": code,
        "stdout": out.getvalue(),
        "stderr": err.getvalue(),
        "made": made,
        "seconds": round(time.monotonic() - start, 2),
    }


def run() -> None:
    """Compile the files named on the command line."""
    folder, *paths = map(Path, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    signal.signal(signal.SIGALRM, _alarm)
    from bnncc.cli.main import main

    for path in paths:
        print(json.dumps(compile_one(main, path, folder)), flush=True)


if __name__ == "__main__":
    run()
