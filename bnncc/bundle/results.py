"""Read and check the results file of a bundle."""

from __future__ import annotations

import importlib.metadata
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bnncc._version import __version__
from bnncc.bundle.device.runner import FORMAT, HEAD
from bnncc.errors import TuningError, UsageError, unreadable


@dataclass
class Results:
    """A file of results."""

    path: Path
    """Where it is."""
    target: str
    family: str
    """`target`, `family`: what was run, by name; and whose records serve it."""
    tvm: str
    """Version of the runtime there."""
    sessions: list[dict[str, Any]] = field(default_factory=list)
    """When it ran, on which device, with which versions."""
    kernels: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Results of each candidate, by part."""
    networks: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """Results of a network and its kernels, by key, by the digest of its library."""
    warnings: list[str] = field(default_factory=list)
    """What was ignored."""

    @property
    def device(self) -> str:
        """Product name of the device."""
        return " and ".join(dict.fromkeys(s["device"] for s in self.sessions)) or "unknown"


def read(path: Path) -> Results:
    """Read a file of results.

    Parameters
    ----------
    path : Path
        Written by ``run.py`` of a bundle. A last line that was cut off is dropped with a warning.

    Raises
    ------
    UsageError
        If it cannot be read, or is not a results file.
    TuningError
        If it was made with another version of bnncc or TVM.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(unreadable(path, error)) from error
    *whole, rest = content.split(b"\n")
    lines = []
    for number, text in enumerate(whole, 1):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if not isinstance(line, dict):
            where = path if number == 1 else f"{path}:{number}"
            raise UsageError(f"{where}: is not a line of a bundle's results", hint=_HINT)
        lines.append(line)
    if not lines or not all(isinstance(lines[0].get(key), str) for key in HEAD):
        raise UsageError(f"{path}: contains no results of a bundle", hint=_HINT)
    _check_versions(path, lines[0])
    found = Results(path, lines[0]["target"], lines[0]["family"], lines[0]["tvm"])
    if rest:
        found.warnings.append(f"{path}:{len(lines) + 1}: the last line is incomplete, and ignored")
    for number, line in enumerate(lines[1:], 2):
        try:
            _take(found, line)
        except ValueError as error:
            raise UsageError(
                f"{path}:{number}: field `{error}` is missing or wrong", hint=_HINT
            ) from error
    return found


_HINT = "give the file `results.jsonl` that `run.py` of a bundle wrote"


def _check_versions(path: Path, head: dict[str, Any]) -> None:
    ours = importlib.metadata.version("apache-tvm")
    again = "build the bundle again with --bundle, and run it"
    if head.get("format") != FORMAT:
        raise TuningError(f"{path}: has format {head.get('format')}, expected {FORMAT}", hint=again)
    for name, made, here in (("bnncc", head["bnncc"], __version__), ("TVM", head["tvm"], ours)):
        if made != here:
            raise TuningError(f"{path}: was made with {name} {made}, this is {here}", hint=again)


def _take(found: Results, line: dict[str, Any]) -> None:
    """Add a line; raise `ValueError` if something in it is missing or wrong."""
    if "session" in line:
        _typed(line, device=str)
        found.sessions.append(line)
    elif "network" in line:
        _typed(line, library=str, key=str, right=bool)
        found.networks.setdefault(line["library"], {})[line["key"]] = _timed(line)
    elif "spec" in line:
        _typed(line, part=str, kernel=str, check=str, spec=str, threads=int, point=dict, right=bool)
        if not all(type(value) is int for value in line["point"].values()):
            raise ValueError("point")
        found.kernels.setdefault(line["part"], []).append(_timed(line))


def _timed(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line, which must have times if its outputs were correct."""
    if line["right"]:
        _typed(line, us=float, times_us=list)
        for value in (line["us"], *line["times_us"]):
            if type(value) is not float or not 0 < value < 1e12:
                raise ValueError("times_us")
        if not line["times_us"]:
            raise ValueError("times_us")
    return line


def _typed(line: dict[str, Any], **kinds: type) -> None:
    for key, kind in kinds.items():
        if type(line.get(key)) is not kind:
            raise ValueError(key)
