"""``--bundle`` and ``--import`` of the verbs that have them."""

from __future__ import annotations

import re
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnncc.cli.asked import as_json, options_of, pythons_of
from bnncc.console import Console
from bnncc.errors import UsageError

if TYPE_CHECKING:
    from bnncc.targets.spec import TargetSpec


def write_tune(
    args: Namespace, target: TargetSpec, pattern: re.Pattern[str] | None, console: Console
) -> int:
    """Write a bundle that tries kernels whose description matches `pattern` on another machine.

    Raises
    ------
    UsageError
        If options cannot be combined.
    """
    if args.measure != "time":
        raise UsageError("--measure instructions cannot be combined with --bundle")
    pythons = pythons_of(args)
    options = replace(options_of(args), threads=args.threads or 1)
    from bnncc.bundle import tuning

    result = tuning.bundle(
        args.models,
        options,
        target,
        folder=args.bundle,
        trials=args.trials,
        pattern=pattern,
        jobs=args.jobs,
        pythons=pythons,
        console=console,
    )
    if args.json:
        console.data(as_json(result))
    console.result(tuning.text(result))
    return 0


def import_tuned(args: Namespace, folder: Path, command: str, console: Console) -> int:
    """Add the results of a bundle to the records in `folder`, with `command` in its index.

    Returns
    -------
    int
        Exit code: 1 if nothing was fit to be recorded.

    Raises
    ------
    UsageError
        If options cannot be combined.
    """
    if args.models:
        raise UsageError("--import takes no MODEL: the results name their kernels")
    from bnncc.bundle import importing, results
    from bnncc.targets.catalog import resolve

    target = None if args.target == "native" else resolve(args.target)
    made = importing.take(results.read(args.results), folder, target=target, command=command)
    for line in made.warnings:
        console.warning(line)
    if args.json:
        console.data(as_json(importing.summary(made)))
    for line in importing.text(made):
        console.result(line)
    return 0 if made.records else 1


def write_bench(args: Namespace, console: Console) -> int:
    """Write a bundle that times an artifact."""
    start = time.perf_counter()
    pythons = pythons_of(args)
    from bnncc.bundle import build
    from bnncc.bundle.benching import target_of
    from bnncc.runtime.artifact import Artifact

    artifact = Artifact.load(args.artifact, check_host=False)
    target = target_of(artifact)
    build.check(args.bundle, target)
    network = build.Network.of(artifact, args.artifact.stem)
    contents = build.Contents(networks=[network])
    packed = build.write(args.bundle, target, contents, pythons)
    size = packed.stat().st_size
    if args.json:
        said = {"format": 1, "folder": str(args.bundle), "archive": str(packed), "bytes": size}
        console.data(as_json(said))
    console.result(
        f"{packed}: {size:,} bytes, {len(network.kernels)} kernels, "
        f"{time.perf_counter() - start:.1f} s; "
        f"on the other machine, run `python {args.bundle.name}/run.py`, and "
        "show the results with `bnncc bench ARTIFACT --import`"
    )
    return 0


def imported_bench(args: Namespace, console: Console) -> dict[str, Any]:
    """Return the times of an artifact that are in a bundle's results.

    Returns
    -------
    dict
        As from `bnncc.runtime.runner.bench`.
    """
    from bnncc.bundle import benching
    from bnncc.runtime.artifact import Artifact

    artifact = Artifact.load(args.artifact, check_host=False)
    result, warnings = benching.bench(artifact, args.results)
    for line in warnings:
        console.warning(line)
    return result
