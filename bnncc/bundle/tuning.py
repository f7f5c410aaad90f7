"""Write a bundle that tunes the kernels of some models on a machine without bnncc and TVM."""

from __future__ import annotations

import re
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bnncc import driver
from bnncc.bundle.build import Contents, Network, check, write
from bnncc.bundle.candidates import build, layers_of, limited
from bnncc.console import Console
from bnncc.errors import TuningError
from bnncc.files import model_stem
from bnncc.options import CompileOptions
from bnncc.runtime.threads import usable_cpus
from bnncc.targets.spec import TargetSpec

MOST_BYTES = 60_000_000
"""Size of an archive above which there is a warning: a common limit for one upload."""


def bundle(
    models: Sequence[Path],
    options: CompileOptions,
    target: TargetSpec,
    *,
    folder: Path,
    trials: int,
    pattern: re.Pattern[str] | None = None,
    jobs: int | None = None,
    pythons: Sequence[str] = (),
    preload: tuple[str, ...] = (),
    console: Console | None = None,
) -> dict[str, Any]:
    """Write a bundle with the kernels of models, and the models themselves.

    Parameters
    ----------
    models : sequence of Path
        Networks.
    options : CompileOptions
        Options of each. Records apply to the networks, not to the candidates.
    folder : Path
        Folder to write; the archive is written beside it.
    trials : int
        Maximum number of candidates.
    pattern : re.Pattern, optional
        Only kernels whose description it matches.
    jobs : int, optional
        Number of parallel builds.
    pythons : sequence of str
        Versions of Python on the other machine.
    preload : tuple of str
        Modules that the building processes import first.

    Raises
    ------
    TuningError
        If there is nothing to try.
    """
    console, started = console or Console(), time.monotonic()
    check(folder, target)
    counts: Counter[str] = Counter()
    for model in models:
        counts.update(dict(driver.kernels(model, replace(options, records=(), tuned=False))))
    layers = layers_of(list(counts.items()), target, options.threads or 1)
    if pattern is not None:
        layers = [trials for trials in layers if pattern.search(trials[0].task.workload.name)]
    chosen = limited(layers, trials)
    if not chosen:
        said = "with choices" if pattern is None else f"that matches {pattern.pattern}"
        raise TuningError(f"{', '.join(map(str, models))}: no kernel {said}")
    networks = []
    for model in models:
        console.progress(f"compiling {model}")
        networks.append(Network.of(driver.compile_model(model, options), model_stem(model)))
    with tempfile.TemporaryDirectory(prefix="bnncc-bundle-") as place:
        kernels = build(
            chosen, target, Path(place), jobs=jobs or usable_cpus(), console=console,
            preload=preload,
        )  # fmt: skip
        if not kernels:
            raise TuningError("none of the candidates can be built")
        contents = Contents(kernels, networks)
        archive = write(folder, target, contents, pythons)
    size = archive.stat().st_size
    if size > MOST_BYTES:
        console.warning(f"{archive}: {size:,} bytes; --trials and --kernels can make it smaller")
    return {
        "format": 1,
        "target": target.name,
        "folder": str(folder),
        "archive": str(archive),
        "bytes": size,
        "seconds": round(time.monotonic() - started, 1),
        "networks": [network.name for network in networks],
        "kernels": [
            {"kernel": kernel.name, "candidates": len(kernel.candidates)} for kernel in kernels
        ],
        "left_out": sum(map(len, layers)) - sum(map(len, chosen)),
    }


def text(result: Mapping[str, Any]) -> str:
    """Return the last line of output: what was written, and what to do with it."""
    candidates = sum(kernel["candidates"] for kernel in result["kernels"])
    left_out = f" ({result['left_out']} omitted: --trials)" if result["left_out"] else ""
    return (
        f"{result['archive']}: {result['bytes']:,} bytes, {candidates} candidates for "
        f"{len(result['kernels'])} kernels{left_out}, {result['seconds']:.1f} s; "
        f"on the other machine, run "
        f"`python {Path(result['folder']).name}/run.py`, and import the results with "
        "`bnncc tune --import`"
    )
