"""Inner loops of binary 3x3 convolutions on Arm: instructions and modelled cycles per 128-bit word.

    python benchmarks/arm_inner_loops.py [--json FILE] [--mca llvm-mca-19]

From the assembly that is emitted, with the static models of LLVM's machine code analyser (all loads
hit the first cache). Short sums have no loop of their own, but are the body of the loop over output
channels (or over parts of the sum). That body also adds the lanes of the accumulators and stores
the sums: figures are given without and with these instructions.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess

from arm_kernels import assembly, blocks, counts, is_loop, spec_of
from tables import markdown

# Channels and size of the image: the residual blocks of an ImageNet network.
LAYERS = ((64, 56), (128, 28), (256, 14), (512, 7))
CASES = (
    ("arm64", ("cortex-a53", "cortex-a72", "cortex-a76", "neoverse-n1")),
    ("arm64-a76", ("cortex-a72", "cortex-a76", "neoverse-n1")),
    ("arm64-a53", ("cortex-a53",)),
)
TURNS = 100
_SUMS = ("addp", "uaddlp", "uadalp")
# Besides `_SUMS`, what stores the sums; nothing is spilled.
_ENDS = ("str q", "stp q", "and v", "ushr v", "movi v", "bic v")


def cycles(program: str, piece: list[str], cpu: str) -> float:
    """Return the modelled cycles of one turn of a loop of `piece`."""
    body = [line for line in piece if not line.startswith(("b.", "b ", "cb", "tb"))]
    text = "\n".join([".L0:", *body, "cbnz x0, .L0", ""])
    done = subprocess.run(
        [program, "-mtriple=aarch64", f"-mcpu={cpu}", f"-iterations={TURNS}"],
        input=text, capture_output=True, text=True, check=True,
    )  # fmt: skip
    total = next(x for x in done.stdout.splitlines() if x.startswith("Total Cycles"))
    return int(total.split()[-1]) / TURNS


def hottest(text: str) -> list[str]:
    """Return the loop that sums words, of the tiles that most of a row is made of."""
    loops = [
        piece
        for label, piece in blocks(text)
        # Where the bits of weights are counted, each count is widened.
        if is_loop(label, piece)
        and counts(piece) > 2 * sum(line.startswith(_SUMS) for line in piece)
    ]
    loops = [p for p in loops if any(line.startswith(_SUMS) for line in p)] or loops
    sizes = [counts(piece) for piece in loops]
    return loops[sizes.index(max(set(sizes), key=sizes.count))]


def _table(content: dict) -> str:
    rows = []
    for row in content["rows"]:
        modelled = ", ".join(f"{cpu} {v:.2f}" for cpu, v in row.get("cycles", {}).items())
        rows.append(
            (row["target"], row["channels"], f"{row['per_word']:.2f}",
             f"{row['per_word_with_sums']:.2f}", modelled)
        )  # fmt: skip
    return markdown(
        ("target", "channels", "instructions per word", "with sums", "cycles per word, modelled"),
        rows,
    )


TABLES = {"arm-inner-loops": (_table, ("arm_inner_loops",))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--mca", default="llvm-mca-19", help="LLVM's machine code analyser")
    args = parser.parse_args()
    rows = []
    for target, cpus in CASES:
        for channels, size in LAYERS:
            layer = (channels, size, channels, 3, 1, 1)
            piece = hottest(assembly(spec_of(layer, target), target))
            words = counts(piece)
            body = [line for line in piece if not line.startswith((*_SUMS, *_ENDS))]
            row = {
                "target": target,
                "channels": channels,
                "per_word": len(body) / words,
                "per_word_with_sums": len(piece) / words,
            }
            if shutil.which(args.mca):
                row["cycles"] = {cpu: cycles(args.mca, body, cpu) / words for cpu in cpus}
                row["cycles_with_sums"] = {
                    cpu: cycles(args.mca, piece, cpu) / words for cpu in cpus
                }
            rows.append(row)
            modelled = "  ".join(f"{c} {v:.2f}" for c, v in row.get("cycles", {}).items())
            print(
                f"{target:10} {channels:4}  {row['per_word']:.3f} "
                f"({row['per_word_with_sums']:.3f} with sums)  {modelled}"
            )
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"rows": rows}, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
