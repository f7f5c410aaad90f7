"""Turn parsed arguments into options, and check them."""

from __future__ import annotations

import json
import os
import stat
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from bnncc.errors import BnnccError, UsageError, unreadable
from bnncc.input_transforms import as_transform, transform_file
from bnncc.options import CHOICES, CompileOptions

T = TypeVar("T")


def options_of(args: Namespace) -> CompileOptions:
    """Return the options of a compilation."""
    return CompileOptions(
        target=args.target,
        params=args.params,
        input_shapes=by_name("input-shape", args.input_shape),
        max_dims=by_name("max-dim", args.max_dim),
        in_place=by_name("in-place", args.in_place),
        **{name: getattr(args, name) for name in CHOICES},
        check_finite=args.check_finite,
        input_uint8=tuple(args.input_uint8),
        input_transform=as_transform(args.input_transform),
        threads=args.threads,
        optimize_for=args.optimize_for,
        records=tuple(args.records),
        tuned=not args.untuned,
        measure=not args.no_measure,
    )


def by_name(option: str, given: Sequence[tuple[str, T]]) -> dict[str, T]:
    """Return the values of a repeatable option by the name that each is for.

    Raises
    ------
    UsageError
        If a name has two.
    """
    made: dict[str, T] = {}
    for name, value in given:
        if name in made:
            raise UsageError(f"--{option} is given twice for `{name}`")
        made[name] = value
    return made


def device_of(args: Namespace) -> dict[str, Any] | None:
    """Return the arguments of `bnncc.remote.connect`, or None for this machine."""
    if args.rpc is None and args.tracker is None:
        for option in ("key", "timeout"):
            if getattr(args, option) is not None:
                raise UsageError(f"--{option} needs --rpc or --tracker")
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
    """Refuse options that cannot be combined with ``--bundle`` and ``--import``."""
    away = args.bundle is not None or args.results is not None
    if args.bundle is not None and args.results is not None:
        raise UsageError("--bundle and --import cannot be combined")
    if away and (args.rpc is not None or args.tracker is not None):
        raise UsageError("--bundle and --import cannot be combined with --rpc or --tracker")
    if args.python and args.bundle is None:
        raise UsageError("--python needs --bundle")


def check_inputs(args: Namespace) -> None:
    """Refuse a command if a file that it names cannot be read."""
    for name in _INPUTS:
        given = getattr(args, name, None) or []
        for path in given if isinstance(given, list) else [given]:
            _check_readable(path)
    if str(getattr(args, "target", None)).endswith(".json"):
        _check_readable(Path(args.target))


def _check_readable(path: Path) -> None:
    try:
        if not stat.S_ISREG(path.stat().st_mode) and not path.is_dir():
            raise UsageError(f"{path}: is not a regular file")
        with open(path, "rb"):
            pass
    except OSError as error:
        raise UsageError(unreadable(path, error)) from error


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises
    ------
    UsageError
        If it cannot be read, or is something else.
    """
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: is not JSON: {error}") from error


def check_outputs(args: Namespace, **outputs: Path | None) -> None:
    """Refuse outputs that cannot be written, before any work is done.

    Parameters
    ----------
    args : Namespace
        The arguments, which name the files to read.
    **outputs : Path or None
        Files to write, by what they contain.

    Raises
    ------
    UsageError
        If one cannot be written, or would replace another, or a file that is read.
    """
    from bnncc.files import STDOUT, output_name, replaced_by

    taken: dict[str, str] = {}
    for what, path in outputs.items():
        if path is None:
            continue
        try:
            place = replaced_by(path)
        except BnnccError as error:
            raise UsageError(str(error)) from error
        name = str(place or (STDOUT if path == STDOUT else ""))
        if name in taken:
            raise UsageError(f"{output_name(path)}: cannot be both {taken[name]} and {what}")
        if name:
            taken[name] = what
        if place is None or not place.exists():
            continue
        for kind, read in _inputs(args, place):
            if _same(read, place):
                raise UsageError(
                    f"{path}: is the {kind}, and would be overwritten",
                    hint="give another file to write",
                )


_INPUTS = {
    "model": "model",
    "models": "model",
    "file": "file to explain",
    "artifact": "artifact",
    "params": "parameter file",
    "input": "input",
    "labels": "file of labels",
    "results": "results file",
    "bench": "file of times",
}
"""What arguments that name files to read are called in messages."""


def _inputs(args: Namespace, place: Path) -> Iterator[tuple[str, Path]]:
    """Yield what a command reads, as far as `place`, an existing file, may be it."""
    for name, kind in _INPUTS.items():
        given = getattr(args, name, None) or []
        for path in given if isinstance(given, list) else [given]:
            yield kind, path
            if kind == "model" and _near(path, place):
                from bnncc.frontend.formats import companions

                yield from ((f"model's {part}", beside) for part, beside in companions(path))
    if str(getattr(args, "target", None)).endswith(".json"):
        yield "target file", Path(args.target)
    if file := transform_file(getattr(args, "input_transform", None) or ""):
        yield "file of thresholds", Path(file)
    for folder in getattr(args, "records", ()):
        yield from (("tuning record", path) for path in Path(folder).glob("*/*"))


def _near(path: Path, place: Path) -> bool:
    """Tell whether `place` may be a part of the model at `path`: linked to, or in its folder."""
    return place.stat().st_nlink > 1 or place.is_relative_to(os.path.realpath(path.parent))


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def as_json(data: Any) -> str:
    """Return `data` as indented JSON."""
    return json.dumps(data, indent=2, sort_keys=False) + "\n"
