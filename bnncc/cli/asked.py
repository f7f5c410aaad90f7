"""What a command line asks, checked; and the form in which it is answered."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from argparse import Namespace
from pathlib import Path
from typing import Any

from bnncc.errors import UsageError
from bnncc.options import CHOICES, CompileOptions


def options_of(args: Namespace) -> CompileOptions:
    """Return what the command line asks of a compilation."""
    names = [name for name, _ in args.input_shape]
    if len(set(names)) != len(names):
        raise UsageError("--input-shape names an input twice")
    return CompileOptions(
        target=args.target,
        params=args.params,
        input_shapes=dict(args.input_shape),
        **{name: getattr(args, name) for name in CHOICES},
        check_finite=args.check_finite,
        input_uint8=tuple(args.input_uint8),
        input_transform=args.input_transform,
        threads=args.threads,
        records=tuple(args.records),
        tuned=not args.untuned,
    )


def device_of(args: Namespace) -> dict[str, Any] | None:
    """Return the arguments of `bnncc.remote.connect`, or None for this machine."""
    if args.rpc is None and args.tracker is None:
        for option in ("key", "timeout"):
            if getattr(args, option) is not None:
                raise UsageError(f"--{option} goes with --rpc or --tracker")
        return None
    found = {"rpc": args.rpc, "tracker": args.tracker, "key": args.key}
    return {**found, **({} if args.timeout is None else {"timeout": args.timeout})}


def pythons_of(args: Namespace) -> tuple[str, ...]:
    """Return the versions of Python that a bundle is for."""
    from bnncc.bundle.runtime import PYTHONS

    for version in args.python:
        if version not in PYTHONS:
            raise UsageError(f"--python is `{version}`, not one of {', '.join(PYTHONS)}")
    return tuple(dict.fromkeys(args.python)) or PYTHONS


def check_bundle(args: Namespace) -> None:
    """Refuse options that do not go with ``--bundle`` and ``--import``, nor these together."""
    away = args.bundle is not None or args.results is not None
    if args.bundle is not None and args.results is not None:
        raise UsageError("--bundle writes what is to be run, --import reads what came of it")
    if away and (args.rpc is not None or args.tracker is not None):
        raise UsageError("--rpc and --tracker reach devices that need no bundle")
    if args.python and args.bundle is None:
        raise UsageError("--python goes with --bundle")


def check_readable(path: Path) -> None:
    """Refuse a model, an artifact or data that cannot be read."""
    try:
        if not stat.S_ISREG(path.stat().st_mode) and not path.is_dir():
            raise UsageError(f"{path}: is not a regular file")
        with open(path, "rb"):
            pass
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from error


def read_json(path: Path) -> Any:
    """Return what a file of JSON holds.

    Raises
    ------
    UsageError
        If it cannot be read, or is something else.
    """
    check_readable(path)
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: is not JSON: {error}") from error


def check_output(path: Path, **others: Path | None) -> None:
    """Refuse a file to write before the work is done, not after.

    Parameters
    ----------
    path : Path
        To be written.
    **others : Path or None
        Files that it must not be, by what they are.

    Raises
    ------
    UsageError
        If it cannot be written, or is one of the others.
    """
    folder = path.parent
    try:
        if path.is_dir():
            raise UsageError(f"{path}: is a folder, not a file to write")
        if path.exists() and not path.is_file():
            raise UsageError(f"{path}: is not a regular file")
        if not folder.is_dir():
            raise UsageError(f"{path}: folder {folder} does not exist")
        if not os.access(folder, os.W_OK):
            raise UsageError(f"{path}: folder {folder} cannot be written to")
        with contextlib.suppress(FileNotFoundError):
            os.lstat(path)  # whose name may be too long
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from error
    for what, other in others.items():
        if other is not None and os.path.realpath(other) == os.path.realpath(path):
            raise UsageError(
                f"{path}: is the {what}, and would be overwritten",
                hint="give another file to write",
            )


def as_json(data: Any) -> str:
    """Return `data` as text that is easy to read."""
    return json.dumps(data, indent=2, sort_keys=False) + "\n"
