"""Inner loops of binary 3x3 convolutions on Arm: instructions and modelled cycles per 128-bit word.

    python benchmarks/arm_inner_loops.py [--json FILE] [--mca llvm-mca-19]

The loop is the one that counts most words when the layer runs, in an emulated processor; its
instructions are all that is between its label and its jump. Short sums have no loop of their own:
the loop is then that over output channels, whose body also clears the accumulators, adds up their
lanes and stores the sums, once for all words of an output. So there are two figures. "With sums" is
every instruction of the loop. Without, instructions of those kinds are left out (`_SUMS`, `_ENDS`,
by name) wherever they stand; loads, XOR, count, addition, addresses, counters and jumps remain:
what other projects' inner loops consist of. Cycles are those of LLVM's machine code analyser, a
static model in which all loads hit the first cache, for the instructions of the first figure, and
in the JSON file for both.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

from arm_kernels import arguments, assembly, blocks, counts, is_loop, scheduled, spec_of
from tables import markdown

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bnncc.codegen.emulator import Library, compiled
from bnncc.targets import catalog
from bnncc.topi_binary.spec import BinaryConv2d

# Channels and size of the image: the residual blocks of an ImageNet network.
LAYERS = ((64, 56), (128, 28), (256, 14), (512, 7))
CASES = (
    ("arm64", ("cortex-a53", "cortex-a72", "cortex-a76", "neoverse-n1")),
    ("arm64-a76", ("cortex-a72", "cortex-a76", "neoverse-n1")),
    ("arm64-a53", ("cortex-a53",)),
)
TURNS = 100
_CNT = 0x4E205800  # cnt v.16b, v.16b
_SUMS = ("addp", "uaddlp", "uadalp")
# Besides `_SUMS`, what clears accumulators, splits and stores the sums. Spills would be among them.
_ENDS = ("str q", "stp q", "and v", "ushr v", "movi v", "bic v")


def cycles(program: str, piece: list[str], cpu: str) -> float:
    """Return the modelled cycles of one turn of a loop of `piece`."""
    body = [line for line in piece if not line.startswith(("b.", "b ", "cb", "tb"))]
    text = "\n".join([".L0:", *body, "cbnz x0, .L0", ""])
    totals = []
    for turns in (TURNS, 2 * TURNS):  # the difference leaves out how the pipeline fills
        done = subprocess.run(
            [program, "-mtriple=aarch64", f"-mcpu={cpu}", f"-iterations={turns}"],
            input=text, capture_output=True, text=True, check=True,
        )  # fmt: skip
        total = next(x for x in done.stdout.splitlines() if x.startswith("Total Cycles"))
        totals.append(int(total.split()[-1]))
    return (totals[1] - totals[0]) / TURNS


def hottest(spec: BinaryConv2d, target: str) -> tuple[list[str], float]:
    """Return the innermost loop that counts most words of a layer, and its share of all words."""
    func = scheduled(spec, target).with_attr("global_symbol", "kernel")
    library = Library(compiled({"kernel": func}, catalog.resolve(target)))
    library.call("kernel", arguments(spec), count=True)
    times: Counter[int] = Counter()  # executions of each instruction
    code: dict[int, int] = {}
    for (start, size), turns in library.blocks.items():
        for number, word in enumerate(library.code(start, size)):
            times[start + 4 * number] += turns
            code[start + 4 * number] = word
    words = [place for place, word in code.items() if word & 0xFFFFFC00 == _CNT]
    found: dict[tuple[int, int], int] = {}  # words, by length and words of a turn
    for end, word in code.items():
        start = end + _jump(word)
        if start < end and not any(
            start <= p + _jump(code.get(p, 0)) < p for p in range(start, end, 4)
        ):
            inside = [p for p in words if start <= p <= end]
            shape = ((end - start) // 4 + 1, len(inside))
            found[shape] = found.get(shape, 0) + sum(times[p] for p in inside)
    shape = max(found, key=lambda key: found[key])
    pieces = [p for label, p in blocks(assembly(spec, target)) if is_loop(label, p)]
    piece = next(p for p in pieces if (len(p), counts(p)) == shape)
    return piece, found[shape] / sum(times[p] for p in words)


def _jump(word: int) -> int:
    """Return how far a conditional jump goes, 0 if the instruction is none."""
    if word & 0xFF000010 == 0x54000000 or word & 0x7E000000 == 0x34000000:  # b.cond, cbz, cbnz
        number, bits = word >> 5 & 0x7FFFF, 19
    elif word & 0x7E000000 == 0x36000000:  # tbz, tbnz
        number, bits = word >> 5 & 0x3FFF, 14
    else:
        return 0
    return 4 * (number - (number >> bits - 1 << bits))


def _table(content: dict) -> str:
    rows = []
    for row in content["rows"]:
        modelled = ", ".join(f"{cpu} {v:.2f}" for cpu, v in row.get("cycles", {}).items())
        rows.append(
            (row["target"], row["channels"], f"{row['share_of_words']:.0%}",
             f"{row['per_word']:.2f}", f"{row['per_word_with_sums']:.2f}", modelled)
        )  # fmt: skip
    return markdown(
        (
            "target",
            "channels",
            "of all words",
            "instructions per word",
            "with sums",
            "cycles per word, modelled",
        ),
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
            piece, share = hottest(spec_of(layer, target), target)
            words = counts(piece)
            body = [line for line in piece if not line.startswith((*_SUMS, *_ENDS))]
            row = {
                "target": target,
                "channels": channels,
                "share_of_words": share,
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
