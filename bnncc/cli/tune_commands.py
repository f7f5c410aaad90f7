"""The verbs `tune` and `records`."""

from __future__ import annotations

import os
import re
import shutil
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

from bnncc.cli import bundle_commands
from bnncc.cli.asked import (
    as_json,
    check_bundle,
    check_outputs,
    device_of,
    options_of,
)  # fmt: skip
from bnncc.console import Console
from bnncc.errors import TuningError, UsageError
from bnncc.progress import START, phase
from bnncc.report import plural

FOLDER = Path("tune_logs")
"""Where records go if no folder is given."""


def tune(args: Namespace, console: Console) -> int:
    """Tune the kernels of a model, here, on a device, or through a bundle.

    Returns
    -------
    int
        Exit code: 130 if the user stopped it, which loses nothing.

    Raises
    ------
    UsageError
        If options cannot be combined.
    """
    from bnncc.targets.catalog import resolve

    check_bundle(args)
    if args.results is not None:
        return bundle_commands.import_tuned(args, _folder(args), _command(), console)
    if not args.models:
        raise UsageError("tune needs a MODEL, or --import RESULTS")
    if args.lock_file is not None:
        check_outputs(args, lock=args.lock_file)
    target = resolve(args.target)
    pattern = _pattern(args.kernels)
    if args.bundle is not None:
        return bundle_commands.write_tune(args, target, pattern, console)
    if len(args.models) > 1:
        raise UsageError("tune takes one MODEL; with --bundle it takes several")
    folder = _folder(args)
    args.records = []
    options = replace(options_of(args), threads=args.threads or 1, tuned=False, confirm=False)
    with phase(START):
        from bnncc.tuning import network

    result = network.tune(
        args.models[0],
        options,
        target,
        folder=folder,
        pattern=pattern,
        device=_device(args),
        method="clock" if args.measure == "time" else args.measure,
        trials=args.trials,
        time_limit=args.time_limit,
        jobs=args.jobs,
        lock=args.lock_file,
        command=_command(),
        console=console,
    )
    if args.json:
        console.data(as_json(result))
    console.result(network.text(result, folder))
    return 130 if result["interrupted"] else 0


def _folder(args: Namespace) -> Path:
    """Return where records are read and written."""
    if args.untuned:
        raise UsageError("--untuned cannot be combined with `tune`, which reads and writes records")
    if len(args.records) > 1:
        raise UsageError("tune takes at most one --tuning-dir, which it reads and writes")
    folder: Path = args.records[0] if args.records else FOLDER
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder}: is a file, not a folder of records")
    return folder


def _command() -> str:
    """Return what was asked; of files elsewhere only their names: records are passed on."""
    words = map(os.fspath, sys.argv[1:])
    return " ".join(["bnncc", *(Path(w).name if Path(w).is_absolute() else w for w in words)])


def _pattern(text: str | None) -> re.Pattern[str] | None:
    try:
        return None if text is None else re.compile(text)
    except re.error as error:
        raise UsageError(f"--kernels: `{text}` is not a regular expression: {error}") from error


def _device(args: Namespace) -> dict[str, Any] | None:
    """Return the device to measure on, checked before kernels are built for it."""
    device = device_of(args)
    if device is not None:
        if args.measure != "time":
            raise UsageError("--measure instructions cannot be combined with a device")
        from bnncc import remote

        remote.check_where(**device)
    return device


def records(args: Namespace, console: Console) -> int:
    """List, prune or merge records.

    Raises
    ------
    TuningError
        If there are no records where some are expected.
    UsageError
        If a folder does not exist.
    """
    from bnncc.records import database as logs
    from bnncc.records.tools import described, merge, prune

    folder = args.folder or logs.shipped()
    read = args.sources if args.action == "merge" else [folder]
    names = {source: _names(source, args) for source in read}
    if not any(names.values()):
        what = "records" if args.target is None else f"records for {args.target}"
        raise TuningError(
            f"{', '.join(map(str, read))}: contains no {what}", hint="`bnncc tune` writes them"
        )
    changed: dict[str, int] = {}
    if args.action == "prune":
        changed = {name: prune(folder / name, args.keep) for name in names[folder]}
    elif args.action == "merge":
        for source in args.sources:
            for name in names[source]:
                changed[name] = changed.get(name, 0) + merge(source / name, folder / name)
    else:
        listed = {name: described(folder / name) for name in names[folder]}
        for lines in listed.values():
            for line in lines["stale"]:
                console.warning(line)
        console.data(as_json(listed) if args.json else _table(listed))
        return 0
    if args.json:
        console.data(as_json(changed))
    word = "removed" if args.action == "prune" else "added"
    for name, count in changed.items():
        console.result(f"{folder / name}: {plural(count, 'record')} {word}")
    return 0


def _names(folder: Path, args: Namespace) -> list[str]:
    """Return the targets that `folder` has records of."""
    from bnncc.records import database as logs
    from bnncc.targets.catalog import resolve

    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder of records")
    found = sorted(path.parent.name for path in folder.glob(f"*/{logs.RECORDS}"))
    if args.target is None:
        return found
    wanted = resolve(args.target).family
    return [name for name in found if name.split(".")[0] == wanted]


def _table(listed: dict[str, Any]) -> str:
    from bnncc.report import fitted

    rows = [("target", "cpu", "kernel", "trials", "best", "default", "unit", "point")]
    for name, content in listed.items():
        for entry in content["kernels"]:
            digits = 2 if entry["unit"] == "us" else 0
            rows.append(
                (
                    name,
                    entry["cpu"],
                    entry["kernel"],
                    str(entry["trials"]),
                    *(
                        "" if x is None else f"{x:.{digits}f}"
                        for x in (entry["best"], entry["default"])
                    ),
                    entry["unit"],
                    entry["point"],
                )
            )
    # A script gets whole rows.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    lines = fitted(rows, width, right=(3, 4, 5), wraps=(0, 1, 2, 7), drops=(7, 1, 5), heads=1)
    return "\n".join(lines) + "\n"
