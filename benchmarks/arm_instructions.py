"""Instructions of whole binary convolutions on Arm, beside int8 convolutions of the same shape.

    python benchmarks/arm_instructions.py [--json FILE] [--target arm64 ...]

The layers of BitStream, packed in and packed out: convolution, thresholds and packing, and the copy
with a border, are all counted, in an emulated processor (unicorn). A *word* is 128
multiply-accumulates, those with the padding included; XOR, count and addition of a word are three
instructions, so the ratio to three per word is what everything else costs. It can be less than the
inner loop's because taps outside the image are skipped.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
from arm_int8 import conv2d, shapes
from arm_kernels import BITSTREAM, arguments, name_of, scheduled, spec_of, words_of
from tables import markdown

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bnncc.codegen.emulator import Library, compiled
from bnncc.targets import catalog


def instructions(func: Any, arrays: list[np.ndarray], target: str) -> int:
    """Run a kernel and return how many instructions it took."""
    named = {"kernel": func.with_attr("global_symbol", "kernel")}
    library = Library(compiled(named, catalog.resolve(target)))
    library.call("kernel", arrays, count=True)
    return library.instructions


def _table(content: dict) -> str:
    targets = list(content["ratio_to_3_per_word"])
    rows = [
        (row["layer"], *(f"{row[t] / row['words'] / 3:.2f}" for t in targets),
         f"{row['int8'] / row[targets[0]]:.2f}")
        for row in content["rows"]
    ]  # fmt: skip
    means = [f"{value:.2f}" for value in content["ratio_to_3_per_word"].values()]
    rows.append(("geometric mean", *means, f"{content['int8']:.2f}"))
    return markdown(("layer", *targets, f"int8 / {targets[0]}"), rows)


TABLES = {"arm-instructions": (_table, ("arm_instructions",))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument(
        "--target", nargs="+", default=["arm64", "arm64-a53", "arm64-a76", "arm64-dotprod"]
    )
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for layer in BITSTREAM:
        row: dict[str, Any] = {"layer": name_of(layer), "words": words_of(layer)}
        for target in args.target:
            spec = spec_of(layer, target)
            row[target] = instructions(scheduled(spec, target), arguments(spec), target)
        arrays = [np.ones(shape, dtype) for shape, dtype in shapes(layer)]
        row["int8"] = instructions(conv2d(layer), arrays, "arm64-dotprod")
        rows.append(row)
        ratios = "  ".join(f"{t} {row[t] / row['words'] / 3:.3f}" for t in args.target)
        less = row["int8"] / row[args.target[0]]
        print(f"{row['layer']:24} {ratios}  int8 {row['int8']} ({less:.2f} x {args.target[0]})")
    means = {
        target: math.exp(sum(math.log(r[target] / r["words"] / 3) for r in rows) / len(rows))
        for target in args.target
    }
    int8 = math.exp(sum(math.log(r["int8"] / r[args.target[0]]) for r in rows) / len(rows))
    print("geometric mean", "  ".join(f"{t} {v:.3f}" for t, v in means.items()), f"{int8:.2f}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"rows": rows, "ratio_to_3_per_word": means, "int8": int8}, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
