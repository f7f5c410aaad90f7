"""Checks and times a bundle that `build.py` made: everything, with one command.

    python run.py [--json FILE] [--only PART ...]

Needs NumPy, on a GPU also PyTorch, and neither bnncc nor TVM: libraries are with it. Each part (an
engine's layers, `networks`, `rates`, `peers`) runs in a process of its own, as an illegal access
ends a process' use of the GPU. Results are written to FILE, and printed as tables.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import report

HERE = Path(__file__).parent
SECONDS = 1200
"""A part that takes longer hangs."""


def parts(index: dict[str, Any]) -> list[str]:
    """Return the names of all parts of a bundle."""
    engines = {k["name"].split("-")[0]: None for e in index["layers"] for k in e["kernels"]}
    more = ["rates", "peers"] if index["device"] == "cuda" else []
    return [*engines, "networks", *more]


def run(part: str) -> list[dict[str, Any]]:
    """Run a part; return its results, with one more if it ended badly."""
    script = ["peers.py"] if part == "peers" else ["ours.py", part]
    command = [sys.executable, str(HERE / script[0]), *script[1:]]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, timeout=SECONDS, check=False
        )
        said, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as late:
        said, code = (late.stdout or b"").decode(), "time out"
    lines = [line for line in said.splitlines() if line.startswith("{")]
    results = [json.loads(line) for line in lines]
    # 1 is what a part returns after it has said which result is wrong.
    if code not in (0, 1) or (code == 1 and all(r.get("right", "us" in r) for r in results)):
        results.append({"failed": part, "error": f"ended with {code}"})
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=HERE / "results.json", help="results")
    parser.add_argument("--only", nargs="+", default=None, help="parts to run")
    args = parser.parse_args()
    index = json.loads((HERE / "index.json").read_text())
    results: list[dict[str, Any]] = []
    for part in args.only or parts(index):
        for result in run(part):
            results.append(result)
            print(json.dumps(result), flush=True)
        args.json.write_text(json.dumps({"target": index["target"], "results": results}, indent=1))
    print(report.tables(results))
    wrong = [r for r in results if not r.get("right", True) or "failed" in r]
    if wrong:
        print(f"{len(wrong)} results are wrong or failed", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
