"""Time compiling networks with the shipped tuning records, and without any.

    python benchmarks/compile_time.py [NETWORK ...] [--target T] [--turns N] [--json FILE]

The two are compiled in turn in one process, after one of each that is not counted. The default is
the digits network and those of `networks.py` that have records.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median

import onnx

sys.path.insert(0, str(Path(__file__).resolve().parent))
import machine
from networks import NETWORKS
from tables import markdown, where

from bnncc.driver import compile_model
from bnncc.options import CompileOptions
from bnncc.targets.catalog import resolve

DIGITS = Path(__file__).resolve().parents[1] / "examples" / "digits" / "digits.onnx"


def _table(content: dict) -> str:
    rows = [
        [
            row["network"],
            row["tuned"],
            f"{row['without_s']:.2f}",
            f"{row['with_s']:.2f}",
            f"{row['pairs']:.3f}",
        ]
        for row in content["networks"]
    ]
    head = ["network", "kernels on record", "without, s", "with, s", "median ratio"]
    return markdown(head, rows) + "\n\n" + where(content)


TABLES = {"compile-time": (_table, ("compile_time",))}


def main() -> None:
    """Print the least times of each network, their ratio and that of pairs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ["digits", "birealnet18", "quicknet", "vgg_small", "reactnet18"]
    parser.add_argument("networks", nargs="*", default=names, metavar="NETWORK")
    parser.add_argument("--target", default="native")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    target = resolve(args.target)
    found = []
    for name in args.networks:
        model = onnx.load(DIGITS) if name == "digits" else NETWORKS[name]("where")
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(args.turns + 1):
            for tuned in (turn % 2 == 0, turn % 2 == 1):
                options = CompileOptions(target=target, threads=1, tuned=tuned, confirm=False)
                start = time.perf_counter()
                artifact = compile_model(model, options)
                if turn:
                    seconds[tuned].append(time.perf_counter() - start)
                if tuned:
                    kernels = artifact.report["summary"]["tuned"]
        least, plain = min(seconds[True]), min(seconds[False])
        pairs = median(a / b for a, b in zip(seconds[True], seconds[False], strict=True))
        print(
            f"{name:12} with {least:6.2f} s ({kernels} tuned), without {plain:6.2f} s, "
            f"ratio {least / plain:.3f}, median of pairs {pairs:.3f}",
            flush=True,
        )
        found.append(
            {"network": name, "tuned": kernels, "with_s": least, "without_s": plain, "pairs": pairs}
        )
    if args.json:
        machine.save(args.json, target=target.name, networks=found)


if __name__ == "__main__":
    main()
