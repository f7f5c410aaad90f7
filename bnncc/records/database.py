"""Tuning records: MetaSchedule's JSON databases in a folder for each target, and an index.

``FOLDER/TARGET/database_workload.json`` and ``database_tuning_record.json`` are MetaSchedule's own
(`tvm.s_tir.meta_schedule.database.JSONDatabase` reads them): one line for each kernel, and one for
each measurement. ``index.json``, also line by line, says where and when they were made and how many
trials each kernel has had. Lines are appended with one system call each and never changed, so a
process that is killed leaves at most a torn last line, which readers ignore and the next writer
removes.

Reading needs no TVM.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bnncc import osutil
from bnncc.errors import TuningError, UsageError, unreadable
from bnncc.records.workload import Workload, point_of_trace, stored_apart, workload_of_text
from bnncc.schedules.space import Point, text
from bnncc.targets import host
from bnncc.targets.catalog import NATIVE
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary.spec import BinaryConv2d

WORKLOADS = "database_workload.json"
RECORDS = "database_tuning_record.json"
INDEX = "index.json"

KEPT = "kept"
"""Of a workload's line in the index: the point that won its race with the default, as sorted text;
none at all if another order of the layer's weights won it."""


@dataclass(frozen=True)
class Record:
    """One measurement."""

    workload: Workload
    """Of what."""
    point: Mapping[str, int]
    """Of which point of its space."""
    seconds: float
    """Mean of the times on record."""
    line: int
    """Where, counted from 0."""
    cpu: str = ""
    """On what, as `bnncc.targets.host.identity` begins; empty where nothing says it."""


@dataclass
class Log:
    """The records in one folder, of one target."""

    folder: Path
    """Where."""
    workloads: list[Workload | None] = field(default_factory=list)
    """By line; None where the line is not one that this version understands."""
    records: list[Record] = field(default_factory=list)
    """In the order of their lines, of workloads that are understood."""
    index: list[dict[str, Any]] = field(default_factory=list)
    """Sessions, and what was said of workloads."""
    damaged: list[str] = field(default_factory=list)
    """What could not be read, one line each."""
    cpu: str = ""
    """On what all sessions measured, if they did on the same: records may say it themselves."""

    def of(self, fits: Callable[[str], bool]) -> Log:
        """Return what was measured on CPUs that `fits` says yes to; they may be unknown, ``""``."""
        records = [record for record in self.records if fits(record.cpu)]
        index = [entry for entry in self.index if fits(entry.get("cpu", self.cpu))]
        return Log(self.folder, self.workloads, records, index, self.damaged, self.cpu)

    def by_cpu(self) -> list[Log]:
        """Return what was measured on each CPU, apart."""
        return [self.of(cpu.__eq__) for cpu in dict.fromkeys(r.cpu for r in self.records)]

    def best(self) -> dict[Workload, Record]:
        """Return the record of each workload that counts.

        That is what a race has left (`KEPT`), or else the fastest; of a point measured again, the
        last counts.
        """
        latest = self.latest()
        kept = {w: n[KEPT] for w, n in self.notes().items() if KEPT in n}
        best: dict[Workload, Record] = {}
        for (workload, point), record in latest.items():
            won = kept.get(workload, point)
            if won != point and (not won or (workload, won) in latest):
                continue
            held = best.get(workload)
            if held is None or record.seconds < held.seconds:
                best[workload] = record
        return best

    def latest(self) -> dict[tuple[Workload, str], Record]:
        """Return the last record of each point, by its workload and its sorted text."""
        return {(r.workload, text(dict(sorted(r.point.items())))): r for r in self.records}

    def notes(self) -> dict[Workload, dict[str, Any]]:
        """Return what the index says last of each workload."""
        found: dict[Workload, dict[str, Any]] = {}
        for entry in self.index:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                found[Workload.of(entry["kernel"], int(entry["threads"]))] = entry
        return found


def lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Read a file of JSON lines; what follows the last end of line is torn, and ignored.

    Parameters
    ----------
    path : Path
        The file; it need not exist.

    Yields
    ------
    tuple of (int, value)
        Number of the line, from 0, and what it says; None where that is no JSON.

    Raises
    ------
    UsageError
        If it cannot be read.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(unreadable(path, error)) from error
    *whole, _ = content.split(b"\n")
    for number, line in enumerate(whole):
        try:
            yield number, json.loads(line)
        except ValueError:
            yield number, None


def read(folder: Path) -> Log:
    """Read the records of one target.

    Parameters
    ----------
    folder : Path
        Of the target; it need not exist.

    Raises
    ------
    UsageError
        If a file is there but cannot be read.
    """
    log = Log(folder)
    log.index = [entry for _, entry in lines(folder / INDEX) if isinstance(entry, dict)]
    sessions = {str(entry.get("cpu", "")) for entry in log.index if "session" in entry}
    log.cpu = sessions.pop() if len(sessions) == 1 else ""
    for number, line in lines(folder / WORKLOADS):
        known = None
        try:
            known = workload_of_text(str(line[1]))
        except (ValueError, TypeError, LookupError):
            log.damaged.append(f"{folder / WORKLOADS}:{number + 1}: {_wrong(line, 'a kernel')}")
        log.workloads.append(known)
    for number, line in lines(folder / RECORDS):
        try:
            which, (trace, seconds, described, _) = line
            point = point_of_trace(trace)
            mean = sum(map(float, seconds)) / len(seconds)
            which, cpu = int(which), str(described.get("model") or log.cpu)
        except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError):
            log.damaged.append(f"{folder / RECORDS}:{number + 1}: {_wrong(line, 'a measurement')}")
            continue
        if not 0 <= which < len(log.workloads):
            log.damaged.append(
                f"{folder / RECORDS}:{number + 1}: {WORKLOADS} has no line {which + 1}, its kernel"
            )
            continue
        workload = log.workloads[which]
        if workload is not None:
            log.records.append(Record(workload, point, mean, number, cpu))
    return log


def _wrong(line: Any, wanted: str) -> str:
    """Return what is wrong with a line; what Python says of it is about bnncc, not about files."""
    return "not JSON" if line is None else f"not {wanted} that bnncc wrote"


def shipped() -> Path:
    """Return the folder of the records that come with bnncc."""
    return Path(str(importlib.resources.files("bnncc.tune_logs")))


def _is_here(cpu: str) -> bool:
    return bool(cpu) and f"{host.identity()}-".startswith(f"{cpu}-")


def that_count(log: Log, target: TargetSpec) -> tuple[Log, Log]:
    """Return what counts of a log, and what is worth a trial at most.

    For ``native``, what was measured on another CPU than this machine's (its maker, family and
    model; a log that says less is of all CPUs that it is true of) is worth a trial. For a target
    with a name all counts, so that everybody gets the same code.
    """
    if target.name != NATIVE or target.gpus:
        return log, Log(log.folder)
    return log.of(_is_here), log.of(lambda cpu: not _is_here(cpu))


class Records:
    """The best points known for one target, and what turned out not to apply.

    Parameters
    ----------
    target : TargetSpec, optional
        Whose they are.

    Attributes
    ----------
    stale : list of str
        One line for each ignored record, and why.
    undecided : callable or None
        Chooses the weight order of layers without a record.
    """

    def __init__(self, target: TargetSpec | None = None) -> None:
        self._target = target
        self._elsewhere: dict[Workload, list[Point]] = {}
        self._taken: dict[Workload, Point] = {}
        self._best: dict[Workload, tuple[Record, Path]] = {}
        self._layers: dict[str, dict[str, Record]] | None = None
        self._added: list[list[tuple[Workload, Record]]] = []
        self._apart: dict[Workload, tuple[Record, Path]] = {}
        self.stale: list[str] = []
        self.undecided: Callable[[BinaryConv2d, Sequence[str]], str] | None = None

    def add(self, folder: Path) -> None:
        """Add what is in `folder`, which takes the place of what was there for the same kernels."""
        log = read(folder)
        self.stale += log.damaged
        own, others = (log, Log(folder)) if self._target is None else that_count(log, self._target)
        for workload, record in others.best().items():
            self._elsewhere.setdefault(_apart(workload), []).append(record.point)
        # The fastest of those that are taken for one another comes last, and so counts.
        best = sorted(own.best().items(), key=lambda item: -item[1].seconds)
        for workload, record in best:
            self._best[workload] = self._apart[_apart(workload)] = record, folder
        self._added.append(best)
        self._layers = None

    def __len__(self) -> int:
        return len(self._best)

    def find(self, spec: str, threads: int) -> tuple[Point, str] | None:
        """Return the best point for a kernel, and where it is from.

        Parameters
        ----------
        spec : str
            JSON of the kernel's spec.
        threads : int
            How many threads may share it. What was found for one thread is for several too, with
            the rule's own way to share.

        Returns
        -------
        tuple of (mapping, str) or None
            None if there is no record.
        """
        for count in dict.fromkeys((threads, 1)):
            workload = Workload.of(spec, count)
            found = self._best.get(workload)
            if found is None:  # where a result is stored makes no difference to the schedule
                found = self._apart.get(_apart(workload))
            if found is not None:
                record, folder = found
                return record.point, f"{folder / RECORDS}:{record.line + 1}"
        taken = self._taken.get(_apart(Workload.of(spec)))
        return None if taken is None else (taken, "a measurement of this compilation")

    def candidates(self, spec: str, threads: int) -> list[Point]:
        """Return what was best for a kernel on other CPUs, where that counts for less than here."""
        counts = dict.fromkeys((threads, 1))
        found = [self._elsewhere.get(_apart(Workload.of(spec, count)), []) for count in counts]
        return [point for points in found for point in points]

    def take(self, spec: str, point: Point) -> None:
        """Use a point for a kernel: it was measured to be the best here, just now or before."""
        self._taken[_apart(Workload.of(spec))] = point

    def weight_order(self, spec: BinaryConv2d, orders: Sequence[str]) -> str | None:
        """Return the order of weights of the fastest kernel on record for a layer.

        Parameters
        ----------
        spec : BinaryConv2d
            The layer, with all its steps; its own order does not matter.
        orders : sequence of str
            That can be chosen.

        Returns
        -------
        str or None
            None if there is no record of the layer, or only of other orders; on CPUs also if there
            is none of the first order, the rule's own, because a record of another one alone does
            not say which is faster. Folders are not mixed: the last that knows the layer counts.
        """
        if self._layers is None:
            self._layers = {}
            for best in self._added:
                self._layers |= _by_layer(best)
        known = self._layers.get(Workload.of(spec).layer, {})
        found = [order for order in orders if order in known]
        if self._target is not None and not self._target.gpus and orders[0] not in known:
            found = []
        if not found and self.undecided is not None:
            return self.undecided(spec, orders)
        return min(found, key=lambda order: known[order].seconds, default=None)


def _apart(workload: Workload) -> Workload:
    """Return the workload whose results are stored over no input."""
    return Workload(stored_apart(workload.spec), workload.threads)


def _by_layer(best: Sequence[tuple[Workload, Record]]) -> dict[str, dict[str, Record]]:
    """Return the records of each binary layer by the order of its weights."""
    layers: dict[str, dict[str, Record]] = {}
    for workload, record in best:
        if isinstance(kernel := workload.kernel, BinaryConv2d):
            layers.setdefault(workload.layer, {})[kernel.weight_order] = record
    return layers


def load(target: TargetSpec, folders: Sequence[Path] = (), *, own: bool = True) -> Records:
    """Return what is known for `target`.

    Parameters
    ----------
    folders : sequence of Path
        Of the user, with a folder for each target; later ones come first.
    own : bool
        Whether to begin with the logs that come with bnncc.

    Raises
    ------
    UsageError
        If one of `folders` does not exist.
    """
    records = Records(target)
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"{folder}: no such folder of records")
    for folder in [*([shipped()] if own else []), *folders]:
        for method in ("instructions", "clock"):
            records.add(folder / folder_of(target, method))
    return records


def folder_of(target: TargetSpec, method: str = "clock") -> str:
    """Return the name of the folder for what was measured so: times and counts do not mix."""
    return target.family + ("" if method == "clock" else f".{method}")


class Writer:
    """Appends to the records of one target; one process at a time.

    Parameters
    ----------
    folder : Path
        Of the target; created if it does not exist. A torn last line, left by a process that was
        killed, is removed.

    Attributes
    ----------
    log : Log
        What was there at first.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, int] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name in (INDEX, WORKLOADS, RECORDS):
                flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)
                self._files[name] = os.open(folder / name, flags, 0o666)
                if name == INDEX:
                    osutil.lock(self._files[name], wait=False)
                _mend(self._files[name])
        except BlockingIOError as error:
            self.close()
            raise TuningError(
                f"{folder}: another process writes records there",
                hint="wait for it, or give another folder with --tuning-dir",
            ) from error
        except OSError as error:
            self.close()
            raise TuningError(
                f"{folder}: cannot be written to: {error.strerror or error}"
            ) from error
        self.log = read(folder)
        self._numbers = {w: i for i, w in enumerate(self.log.workloads) if w is not None}
        self._count = len(self.log.workloads)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let others write."""
        for handle in self._files.values():
            os.close(handle)
        self._files.clear()

    def workload(self, workload: Workload, line: Sequence[Any]) -> int:
        """Return the number of `workload`, whose line is added if it is new."""
        if workload not in self._numbers:
            self._append(WORKLOADS, line)
            self._numbers[workload] = self._count
            self._count += 1
        return self._numbers[workload]

    def record(self, number: int, line: Sequence[Any]) -> None:
        """Add a measurement of workload `number`: trace, seconds, target and arguments."""
        self._append(RECORDS, [number, line])

    def note(self, entry: Mapping[str, Any]) -> None:
        """Add a line to the index."""
        self._append(INDEX, dict(entry))

    def _append(self, name: str, value: Any) -> None:
        data = json.dumps(value, separators=(",", ":")).encode() + b"\n"
        try:
            written = os.write(self._files[name], data)
            if written < len(data):
                raise OSError(0, "the disk is full")
        except OSError as error:
            with contextlib.suppress(OSError):
                _mend(self._files[name])
            raise TuningError(
                f"{self.folder / name}: cannot be written: {error.strerror or error}"
            ) from error


def _mend(handle: int) -> None:
    """Cut a file after its last end of line."""
    size = os.fstat(handle).st_size
    end = size
    while end:
        start = max(0, end - 65536)
        os.lseek(handle, start, os.SEEK_SET)  # Windows has no pread
        place = os.read(handle, end - start).rfind(b"\n")
        if place >= 0:
            end = start + place + 1
            break
        end = start
    if end < size:
        os.ftruncate(handle, end)


def numbers(values: Iterable[Any]) -> list[Any]:
    """Return TVM's arrays and numbers as Python's, for JSON.

    Examples
    --------
    >>> numbers([("a", 1.5), {"b": None}])
    [['a', 1.5], {'b': None}]
    """
    return [_plain(value) for value in values]


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, bool, int, float)):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, Mapping) or hasattr(value, "items"):
        return {str(key): _plain(item) for key, item in value.items()}
    if hasattr(value, "value"):  # IntImm, FloatImm
        return value.value
    return [_plain(item) for item in value]
