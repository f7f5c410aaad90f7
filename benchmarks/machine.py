"""What a file of results says of the machine that it was measured on."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def core() -> str:
    """Return LLVM's name of this machine's core, as in ``znver5``: the folder of its results."""
    from tvm.target import codegen

    return codegen.llvm_get_system_cpu()


def head(**content: Any) -> dict[str, Any]:
    """Return `content` behind what all results say of the machine, the compiler and the call."""
    import tvm  # late: what imports this file may measure memory, or another commit's bnncc

    import bnncc
    from bnncc.targets import host

    facts = {
        "cpu": host.processor(),
        "core": core(),
        "identity": host.identity(),
        "mhz": host.clock(),
        "features": " ".join(sorted(host.features())),
        "date": str(datetime.date.today()),
        "commit": commit(),
        "bnncc": bnncc.__version__,
        "tvm": tvm.__version__,
        "flags": " ".join(arg for arg in sys.argv[1:] if "/" not in arg),
        "cores": len(os.sched_getaffinity(0)),
    }
    return {**facts, **content, **facts}


def save(path: Path, **content: Any) -> None:
    """Write `content` to a file of results, behind its `head`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(head(**content), indent=1) + "\n", encoding="utf-8")


def commit() -> str:
    """Return the commit of the working tree; ``-dirty`` behind it where files are changed.

    Where the tree has been copied without its history, ``BNNCC_COMMIT`` says it.
    """
    if "BNNCC_COMMIT" in os.environ:
        return os.environ["BNNCC_COMMIT"]
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"
