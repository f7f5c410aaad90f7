"""What a compilation's checks cost: CPU time, memory, and bytes in the artifact.

    python benchmarks/checks.py [NETWORK ...] [--turns N] [--json FILE]

Every compilation has a process of its own, with one thread, after one of the digits network that
is not counted. *Checks* are the evaluator of the passes and the self-check, with the inputs drawn
for them; their time is that spent inside the functions of `CHECKS`. Memory is what the process
holds at most, beside the same compilation with nothing of `CHECKS` done. The bounds: a fifth of the
compilation without checks or 2 s, whichever is more; 1 GiB; 64 KiB or a twentieth of the artifact.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import machine
import numpy as np
import onnx
from networks import NETWORKS, Builder
from tables import markdown, where
from transformer_networks import SMALL_06B, bitnet

DIGITS = Path(__file__).resolve().parents[1] / "examples" / "digits" / "digits.onnx"
CHECKS = (
    ("bnncc.driver", "confirm_passes"),
    ("bnncc.driver", "_confirmed_twin"),
    ("bnncc.driver", "confirmed"),
    ("bnncc.verification.checks", "SelfCheck.checks"),
    ("bnncc.verification.checks", "SelfCheck.check"),
    ("bnncc.verification.checks", "SelfCheck.inputs"),
    ("bnncc.verification.checks", "SelfCheck.packed"),
)
"""Modules, and names in them, whose time is that of checks."""

ALLOWED = {"share": 0.2, "seconds": 2.0, "bytes": 1 << 30, "stored": 64 << 10, "stored_share": 0.05}


def image(side: int, batch: int = 1) -> onnx.ModelProto:
    """Return four binary layers of 16 channels on a large image."""
    b = Builder("image", 16, side, batch=batch)
    x = b.input
    for _ in range(4):
        x = b.norm(b.binary_conv(x, 16, 3), 16 * 9)
    return b.model(x[0])


MODELS = {
    "digits": lambda: onnx.load(DIGITS),
    "birealnet18": lambda: NETWORKS["birealnet18"]("sign"),
    "quicknet": lambda: NETWORKS["quicknet"]("where"),
    "vgg_small": lambda: NETWORKS["vgg_small"]("where"),
    "16x1024x1024": lambda: image(1024),
    "8x16x512x512": lambda: image(512, 8),
    "encoder8": lambda: bitnet(replace(SMALL_06B, layers=8, tokens=128), gate="silu"),
}


class Clock:
    """CPU time spent in functions, those that they call counted once."""

    def __init__(self) -> None:
        self.seconds, self._depth, self.by = 0.0, 0, {}

    def wrap(self, name: str, function: Any) -> Any:
        """Return `function`, timed."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            start = used()
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    took = used() - start
                    self.seconds += took
                    self.by[name] = self.by.get(name, 0.0) + took

        return timed


def used() -> float:
    """Return the CPU time of this process and its children that ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def watched(clock: Clock) -> None:
    """Let `clock` time all of `CHECKS`."""
    import importlib

    for module, path in CHECKS:
        *owners, name = path.split(".")
        owner = functools.reduce(getattr, owners, importlib.import_module(module))
        old = vars(owner)[name] if owners else getattr(owner, name)
        if isinstance(old, functools.cached_property):
            new = functools.cached_property(clock.wrap(path, old.func))
            new.__set_name__(owner, name)
        else:
            new = clock.wrap(path, old)
        setattr(owner, name, new)


def unchecked() -> None:
    """Let compilations carry zeros for a check, and evaluate nothing."""
    from bnncc.verification import checks

    def nothing(graph: Any, feeds: Any, keep: Any = ()) -> dict[str, np.ndarray]:
        types = {name: graph.types[name] for name in graph.outputs}
        return {
            name: np.zeros([d if isinstance(d, int) else 1 for d in t.shape], t.dtype)
            for name, t in types.items()
        }

    checks.evaluate = nothing


def one(name: str, checked: bool) -> dict[str, Any]:
    """Compile a network in this process; return what it took."""
    from bnncc.driver import compile_model
    from bnncc.options import CompileOptions

    if not checked:
        unchecked()
    compile_model(onnx.load(DIGITS), CompileOptions(threads=1, confirm=checked))
    clock = Clock()
    watched(clock)
    model = MODELS[name]()
    start, wall = used(), time.perf_counter()
    artifact = compile_model(model, CompileOptions(threads=1, confirm=checked))
    total = used() - start
    return {
        "cpu_s": total, "wall_s": time.perf_counter() - wall, "checks_s": clock.seconds,
        "by": clock.by,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "stored": artifact.report["bytes"]["selfcheck"], "artifact": len(artifact.library),
        "warnings": artifact.report["warnings"],
    }  # fmt: skip


def child(name: str, checked: bool) -> dict[str, Any]:
    """Run `one` in a process of its own."""
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "TVM_NUM_THREADS": "1"}
    command = [sys.executable, __file__, name, "--one", "checked" if checked else "unchecked"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _table(content: dict) -> str:
    rows = [
        [
            row["network"], f"{row['without_s']:.2f}", f"{row['checks_s']:.2f}",
            f"{row['allowed_s']:.2f}", f"{row['memory'] / 2**20:.0f}",
            f"{row['stored'] / 2**10:.0f}",
        ]
        for row in content["networks"]
    ]  # fmt: skip
    head = ["network", "compilation, s", "checks, s", "at most, s", "checks, MiB", "stored, KiB"]
    return markdown(head, rows) + "\n\n" + where(content)


TABLES = {"checks": (_table, ("checks",))}


def main() -> None:
    """Measure networks; print and write what their checks cost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="*", default=list(MODELS), metavar="NETWORK")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--one", choices=("checked", "unchecked"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(args.networks[0], args.one == "checked")))
        return
    if unknown := set(args.networks) - set(MODELS):
        parser.error(f"no network {', '.join(unknown)}; there are {', '.join(MODELS)}")
    found = []
    for name in args.networks:
        turns = [(child(name, True), child(name, False)) for _ in range(args.turns)]
        checked = min((a for a, _ in turns), key=lambda r: r["checks_s"])
        without = min(b["cpu_s"] - b["checks_s"] for _, b in turns)
        row = {
            "network": name, "without_s": without, "checks_s": checked["checks_s"],
            "allowed_s": max(ALLOWED["seconds"], ALLOWED["share"] * without),
            "total_s": min(a["cpu_s"] for a, _ in turns),
            "memory": max(0, min(a["peak"] for a, _ in turns) - min(b["peak"] for _, b in turns)),
            "peak": checked["peak"], "stored": checked["stored"], "artifact": checked["artifact"],
            "by": checked["by"], "warnings": checked["warnings"],
        }  # fmt: skip
        limit = max(ALLOWED["stored"], ALLOWED["stored_share"] * row["artifact"])
        row["bounded"] = (
            row["checks_s"] <= row["allowed_s"]
            and row["memory"] <= ALLOWED["bytes"]
            and row["stored"] <= limit
        )
        found.append(row)
        print(
            f"{name:14} without {without:6.2f} s, checks {row['checks_s']:6.2f} s of "
            f"{row['allowed_s']:.2f}, {row['memory'] / 2**20:5.0f} MiB (peak "
            f"{row['peak'] / 2**20:.0f}), {row['stored']} bytes"
            + ("" if row["bounded"] else "  TOO MUCH"),
            flush=True,
        )
        print("   ", {k: round(v, 2) for k, v in row["by"].items()}, row["warnings"], flush=True)
    if args.json:
        machine.save(args.json, target="native", networks=found)


if __name__ == "__main__":
    main()
