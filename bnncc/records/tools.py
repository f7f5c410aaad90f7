"""Describe, prune and merge folders of records."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from bnncc import schedules
from bnncc.errors import BnnccError
from bnncc.files import write_atomic
from bnncc.records.database import INDEX, KEPT, RECORDS, WORKLOADS, Record, Writer, lines, read
from bnncc.records.workload import Workload
from bnncc.schedules.space import UnfitPoint, text
from bnncc.targets.catalog import resolve

MIN_GAIN = 0.015
"""What a record must gain over the default to be kept: less is noise."""

MIN_GAIN_STAND_IN = 0.04
"""The same of instructions: not noise, but the rules know pipelines, and instructions do not."""


def described(folder: Path) -> dict[str, Any]:
    """Return the records in the folder of a target.

    Returns
    -------
    dict
        ``kernels``, with the best of each; ``sessions`` that made them; ``stale``, one line for
        each record that does not apply.
    """
    log = read(folder)
    stale = list(log.damaged)
    kernels = []
    for one in log.by_cpu():
        notes = one.notes()
        for workload, record in one.best().items():
            default = _default(folder, workload)
            if reason := _unfit(folder, record):
                stale.append(f"{folder / RECORDS}:{record.line + 1}: {reason}")
                continue
            own = [r for r in one.records if r.workload == workload]
            at_default = [r.seconds for r in own if dict(r.point) == default]
            kernels.append(
                {
                    "kernel": workload.name,
                    "spec": workload.spec,
                    "threads": workload.threads,
                    "cpu": record.cpu,
                    "trials": int(notes.get(workload, {}).get("trials", len(own))),
                    "records": len(own),
                    "best": record.seconds * 1e6,
                    "default": at_default[-1] * 1e6 if at_default else None,
                    "unit": "instructions" if _counts(folder) else "us",
                    "point": text(record.point),
                }
            )
    sessions = [entry for entry in log.index if "session" in entry]
    return {"kernels": kernels, "sessions": sessions, "stale": stale}


def _target(folder: Path) -> str:
    return folder.name.split(".")[0]


def _counts(folder: Path) -> bool:
    """Return whether the records of a folder count instructions instead of time."""
    return folder.name.endswith(".instructions")


def _default(folder: Path, workload: Workload) -> dict[str, int] | None:
    try:
        space = schedules.space_of(workload.kernel, resolve(_target(folder)), workload.threads)
    except BnnccError:  # a target of the user's own
        return None
    return dict(space.default)


def _unfit(folder: Path, record: Record) -> str:
    """Return why a record does not apply; empty if it does, or the target is not known."""
    try:
        target = resolve(_target(folder))
        schedules.space_of(record.workload.kernel, target, record.workload.threads).complete(
            record.point
        )
    except UnfitPoint as error:
        return str(error)
    except BnnccError:
        return ""
    return ""


def prune(folder: Path, keep: int) -> int:
    """Keep each CPU's best records of each kernel, and its default's; of the index what is last.

    Records that are hardly faster than the default are not kept beside it.

    Parameters
    ----------
    folder : Path
        Of the target.
    keep : int
        How many of each, beside the default's.

    Returns
    -------
    int
        How many were removed, those that do not apply included.

    Raises
    ------
    TuningError
        If another process writes there.
    """
    gain = MIN_GAIN_STAND_IN if _counts(folder) else MIN_GAIN
    with Writer(folder) as writer:
        said = [entry for entry in writer.log.index if "session" in entry]
        kept: set[int] = set()
        for one in writer.log.by_cpu():
            notes, latest, counts = one.notes(), one.latest(), one.best()
            said += notes.values()
            for workload in {workload for workload, _ in latest}:
                own = [r for (w, _), r in latest.items() if w == workload and not _unfit(folder, r)]
                own.sort(key=lambda r: r.seconds)
                default = [r for r in own if dict(r.point) == _default(folder, workload)]
                most = min((r.seconds * (1 - gain) for r in default), default=math.inf)
                better = [r for r in own if r.seconds <= most] if default else own
                raced = KEPT in notes.get(workload, {})
                if raced:  # what lost is not kept, however fast it once was
                    better = [r for r in better if r == counts.get(workload)]
                kept |= {r.line for r in [*better[:keep], *default]}
        whole = (folder / RECORDS).read_bytes().split(b"\n")[:-1]
        left = [line for number, line in enumerate(whole) if number in kept]
        write_atomic(folder / RECORDS, [line + b"\n" for line in left])
        write_atomic(folder / INDEX, [json.dumps(n).encode() + b"\n" for n in said])
    return len(whole) - len(left)


def merge(source: Path, folder: Path) -> int:
    """Add the records of a folder to another one.

    Parameters
    ----------
    source, folder : Path
        Of the same target.

    Returns
    -------
    int
        Number of records added; duplicates are not.

    Raises
    ------
    TuningError
        If another process writes there.
    """
    log = read(source)
    names = dict(lines(source / WORKLOADS))
    content = dict(lines(source / RECORDS))
    numbers = {w: i for i, w in enumerate(log.workloads) if w is not None}
    added = 0
    with Writer(folder) as writer:
        there = {json.dumps(line[1]) for _, line in lines(folder / RECORDS) if line}
        for record in log.records:
            line = content[record.line][1]
            if json.dumps(line) in there:
                continue
            number = writer.workload(record.workload, names[numbers[record.workload]])
            writer.record(number, line)
            added += 1
        known = {json.dumps(entry, sort_keys=True) for entry in writer.log.index}
        for entry in log.index:
            if json.dumps(entry, sort_keys=True) not in known:
                writer.note(entry)
    return added
