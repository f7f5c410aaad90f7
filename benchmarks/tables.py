"""Runs the benchmarks and writes their figures into the documentation.

    python benchmarks/tables.py [--run] [NAME ...]

Without ``--run``, rewrites every table of `README.md` and `docs/` from the JSON files in
`benchmarks/results/`. With it, runs the scripts of `RUNS` (or those named) first, each pinned to
one core unless it wants more: what `make bench` does. Results lie in a folder named after the core
that they were measured on, those of several machines side by side; a table shows each.

A script declares what it fills: ``TABLES = {marker: (function, (result, ...))}``. The function
takes the contents of ``results/CORE/RESULT.json`` in that order and returns Markdown, which
replaces what stands between the lines ``<!-- table: MARKER -->`` and ``<!-- end of table -->``. A
table whose results are not there is left alone. Its ``PLOTS`` become pictures in `docs/plots/`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
DRAWN = ROOT / "docs/plots"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
MARKED = re.compile(r"(<!-- table: ([\w.-]+) -->\n).*?(<!-- end of table -->)", re.S)


@dataclass(frozen=True)
class Run:
    """One run of a script.

    Attributes
    ----------
    result : str
        Stem of the JSON file it writes.
    script : str
        Stem of the script; it takes ``--json FILE``.
    options : tuple of str
        Further command-line options.
    cores : int
        How many cores it wants.
    anywhere : bool
        Its figures do not depend on the processor at hand.
    """

    result: str
    script: str
    options: tuple[str, ...] = ()
    cores: int = 1
    anywhere: bool = False

    def path(self) -> Path:
        """Return the file to write on this machine."""
        from machine import core

        folder = RESULTS if self.anywhere else RESULTS / core()
        return folder / f"{self.result}.json"


RUNS = (
    Run("layers", "layers"),
    *(
        Run(f"layers.{target}", "layers", ("--set", "nine", "--target", target))
        for target in ("x86-64-v4", "x86-64-v3", "x86-64-v2")
    ),
    Run("float_layers", "float_layers"),
    Run("filtered_layers", "filtered_layers"),
    Run("first_layer", "first_layer"),
    Run("bfloat16_layers", "bfloat16_layers"),
    Run("float_functions", "float_functions"),
    Run("grouped_layers", "grouped_layers"),
    Run("input_transforms", "input_transforms"),
    Run("one_layer", "one_layer"),
    Run("one_layer.x86-64-v4-amx", "one_layer", ("--target", "x86-64-v4-amx")),
    Run("tile_layers", "tile_layers"),
    Run("few_bit", "few_bit"),
    Run("transformers", "transformers"),
    Run("weight_codes", "weight_codes"),
    Run("int8_activations", "int8_activations"),
    Run("whole_transformers", "whole_transformers"),
    Run("symbolic_sizes", "symbolic_sizes"),
    Run("networks", "whole_networks"),
    Run(
        "networks.x86-64-v3", "whole_networks", ("birealnet18", "quicknet", "--target", "x86-64-v3")
    ),
    Run(
        "networks.x86-64-v4-amx",
        "whole_networks",
        (
            "birealnet18",
            "quicknet",
            "vgg_small",
            "--target",
            "x86-64-v4-amx",
            "--bfloat16",
            "--against",
            "openvino",
            "int8",
            "openvino-default",
        ),
    ),
    Run("threads", "threads", cores=2),
    Run("memory", "memory"),
    Run("tuned_kernels", "tuned_kernels"),
    Run("tune_check", "tune_check", ("build/tune_check", "--beside", "4be7ed9"), cores=2),
    Run("held_out", "held_out"),
    Run("compile_time", "compile_time"),
    Run("checks", "checks"),
    Run("beside", "beside"),
    Run("compile_beside", "compile_beside"),
    Run("c_code", "c_code"),
    Run("c_instructions", "c_instructions", anywhere=True),
    Run("level_instructions", "level_instructions", anywhere=True),
    Run("c_code.cortex-m4", "c_code", ("--on", "cortex-m4"), anywhere=True),
    Run("web", "web"),
    Run("arm_instructions", "arm_instructions", anywhere=True),
    Run("arm_inner_loops", "arm_inner_loops", anywhere=True),
    *(Run(paper, paper) for paper in ("bmxnet", "dabnn", "bitstream", "xu_pedersoli", "khan")),
    Run("cuda", "gpu", anywhere=True),
)
"""Every benchmark, in the order they run. A new script is added here and nowhere else."""


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table; the first column names the row."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def times(ratio: float | None) -> str:
    """Return a ratio as text, or that there is none."""
    if ratio is None:
        return "not measured"
    return f"{ratio:.2f} x" if ratio < 10 else f"{ratio:.0f} x"


def both(best: float, median: float | None, digits: int = 1) -> str:
    """Return a time, with the median of all calls in brackets if it was measured."""
    return f"{best:.{digits}f}" + (f" ({median:.{digits}f})" if median is not None else "")


def where(content: dict) -> str:
    """Return the sentence that says what machine a result file comes from."""
    facts = [content["cpu"]]
    if "identity" in content:
        facts += [content["identity"], f"{content['mhz'] / 1000:.1f} GHz"]
        facts += [f"commit {content['commit']}"]
    facts += [content["date"]] if "date" in content else []
    return f"`{content.get('file', 'this run')}`: {', '.join(facts)}."


def fill(text: str, tables: dict[str, str]) -> str:
    """Return a page with its tables replaced.

    Raises
    ------
    SystemExit
        If a marker has no table of that name in any script.
    """

    def replaced(found: re.Match[str]) -> str:
        name = found[2]
        if name not in tables:
            raise SystemExit(f"no script has a table {name}")
        return f"{found[1]}{tables[name]}\n{found[3]}" if tables[name] else found[0]

    return MARKED.sub(replaced, text)


def declared() -> dict[str, str]:
    """Return every table by its marker; empty where results are missing."""
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    made: dict[str, str] = {}
    for script in dict.fromkeys(run.script for run in RUNS):
        for marker, (function, results) in getattr(
            importlib.import_module(script), "TABLES", {}
        ).items():
            made[marker] = shown(function, results)
    return made


def shown(function: Callable[..., str], results: Iterable[str]) -> str:
    """Return a table, once for each machine that has its results."""
    folders = (RESULTS, *sorted(RESULTS.glob("*/"), reverse=True))
    made = {folder.name: _table(folder, function, results) for folder in folders}
    made = {name: text for name, text in made.items() if text}
    if len(made) == 1:
        return next(iter(made.values()))
    return "\n\n".join(f"On `{name}`:\n\n{text}" for name, text in made.items())


def _table(folder: Path, function: Callable[..., str], results: Iterable[str]) -> str:
    """Return a table from the results in `folder`; empty if one of them is missing."""
    paths = [folder / f"{result}.json" for result in results]
    if not all(path.exists() for path in paths):
        return ""
    contents = [{**json.loads(path.read_text()), "file": path.relative_to(ROOT)} for path in paths]
    return function(*contents)


def plots() -> dict[Path, str]:
    """Return every plot by its file: ``PLOTS = {NAME: (function, RESULT)}`` of a script."""
    made = {}
    for script in dict.fromkeys(run.script for run in RUNS):
        declared_there = getattr(importlib.import_module(script), "PLOTS", {})
        for name, (function, result) in declared_there.items():
            for path in RESULTS.glob(f"**/{result}.json"):
                machine = "" if path.parent == RESULTS else f".{path.parent.name}"
                made[DRAWN / f"{name}{machine}.svg"] = function(json.loads(path.read_text()))
    return made


def run(one: Run) -> bool:
    """Run a benchmark and say whether it succeeded."""
    print(f"== {one.result}", file=sys.stderr, flush=True)
    script = ROOT / "benchmarks" / f"{one.script}.py"
    cores = sorted(os.sched_getaffinity(0))[-one.cores :]

    def pin() -> None:
        os.sched_setaffinity(0, cores)

    command = [sys.executable, str(script), *one.options]
    command += ["--json", str(one.path())]
    environment = {**os.environ, "TVM_NUM_THREADS": str(one.cores)}
    return subprocess.run(command, env=environment, preexec_fn=pin).returncode == 0


def main() -> None:
    """Run what is asked for, then rewrite the pages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="results (default: all)")
    parser.add_argument("--run", action="store_true", help="run the benchmarks first")
    args = parser.parse_args()
    known = [one.result for one in RUNS]
    if unknown := set(args.names) - set(known):
        parser.error(f"no result {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    failed = [
        one.result
        for one in RUNS
        if args.run and one.result in (args.names or known) and not run(one)
    ]
    tables = declared()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (new := fill(text, tables)) != text:
            page.write_text(new, encoding="utf-8")
            print(page.relative_to(ROOT))
    for path, drawn in plots().items():
        if not path.exists() or path.read_text(encoding="utf-8") != drawn:
            path.write_text(drawn, encoding="utf-8")
            print(path.relative_to(ROOT))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
