"""Time compiling networks with this checkout and with another commit, in turns.

    python benchmarks/compile_beside.py [COMMIT] [--target T ...] [--only WORD] [--json FILE]

COMMIT may be the folder of a checkout, too. WORD selects any networks that have it in their names,
such as transformers. Seconds are those of the processor, on one thread, the least of several turns.
Ratios are times relative to the other checkout: below 1 is faster.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import onnx

sys.path.insert(0, str(Path(__file__).resolve().parent))
import machine
from beside import Checkout, asking, checked_out, mean
from tables import markdown, where

BASE = "9d1c11c"
"""Where the work began that has kernels scheduled from their definitions."""

TARGETS = ("x86-64-v2", "x86-64-v3", "x86-64-v4", "x86-64-v4-vpopcntdq", "arm64")
NETWORKS = ("birealnet18", "quicknet", "vgg_small", "alexnet")
TURNS = 3


def _table(content: dict[str, Any]) -> str:
    names = list(dict.fromkeys(row["network"] for row in content["networks"]))
    rows = []
    for target in dict.fromkeys(row["target"] for row in content["networks"]):
        found = {r["network"]: r for r in content["networks"] if r["target"] == target}
        cells = (f"{r['seconds']:.2f} s, {r['ratio']:.2f}" for r in found.values())
        rows.append([target, *cells, f"{mean([r['ratio'] for r in found.values()]):.2f}"])
    head = ["target", *(f"{name}, `{content['beside']}` = 1" for name in names), "mean"]
    return markdown(head, rows) + "\n\n" + where(content)


TABLES = {"compile-beside": (_table, ("compile_beside",))}


def main() -> None:
    """Compare two checkouts."""
    from networks import NETWORKS as MADE
    from transformer_networks import NETWORKS as TRANSFORMERS

    args = asking(__doc__.splitlines()[0], BASE, TARGETS).parse_args()
    rows: list[dict[str, Any]] = []
    made = {**MADE, **TRANSFORMERS}
    names = [name for name in made if args.only in name] if args.only else NETWORKS
    with checked_out(args.other) as before, tempfile.TemporaryDirectory() as folder:
        sides = Checkout(machine.ROOT), Checkout(before)
        for name in names:
            path = Path(folder) / "network.onnx"
            onnx.save(made[name]("where") if name in MADE else made[name](), path)
            for target in args.target or TARGETS:
                times: list[list[float]] = [[], []]
                for turn in range(TURNS + (not rows)):  # the first ones load TVM
                    for side in (0, 1) if turn % 2 else (1, 0):
                        times[side].append(sides[side].compile(path, target)["seconds"])
                mine, other = (min(some) for some in times)
                rows.append(
                    {"network": name, "target": target, "seconds": mine, "ratio": mine / other}
                )
                print(f"{name:12} {target:20} {mine:7.2f} s, {mine / other:.3f}", flush=True)
        commit = sides[1].commit
    if args.json:
        machine.save(args.json, beside=commit, networks=rows)
    print(json.dumps({"mean": mean([row["ratio"] for row in rows])}))


if __name__ == "__main__":
    main()
