"""The state of a kernel being tuned: what was tried, how fast it was, what remains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bnncc.records.database import KEPT, Record
from bnncc.records.race import Gain
from bnncc.records.workload import Workload
from bnncc.schedules.space import Point, Space, text


def key_of(point: Mapping[str, int]) -> str:
    """Return a point as text, whatever the order of its choices."""
    return text(dict(sorted(point.items())))


@dataclass(eq=False)
class Task:
    """The search for one kernel."""

    workload: Workload
    """The kernel."""
    weight: int
    """How often the network runs it."""
    space: Space
    """What can be chosen."""
    times: dict[str, float] = field(default_factory=dict)
    """Seconds of the points measured, by `key_of`."""
    points: dict[str, Point] = field(default_factory=dict)
    """Those points."""
    kernels: dict[str, str] = field(default_factory=dict)
    """The first point that made a kernel, by the kernel's hash."""
    failed: dict[str, str] = field(default_factory=dict)
    """Points that failed, and how."""
    elsewhere: list[Point] = field(default_factory=list)
    """The best points on other CPUs, to be tried."""
    trials: int = 0
    """Points built and measured, those that failed included."""
    kept: str | None = None
    """The fastest point of the last comparison, by `key_of`; empty if of another weight order."""
    raced: int = 0
    """Trials before that comparison."""
    gain: Gain | None = None
    """Its time relative to the default, if they were compared in this run."""

    def __post_init__(self) -> None:
        self.all = list(self.space.points())
        self.left = {key_of(point): point for point in self.all}

    @property
    def default(self) -> float | None:
        """Seconds of the rule's default, if it was measured."""
        return self.times.get(key_of(self.space.default))

    @property
    def best(self) -> tuple[Point, float] | None:
        """The winner of the last race, or the fastest point since then, and its seconds."""
        if not self.times:
            return None
        key = min(self.times, key=self.times.__getitem__)
        if self.raced == self.trials and self.kept in self.times:
            key = self.kept  # of all that was measured, only the race compares like with like
        return self.points[key], self.times[key]

    def note(self, point: Point, seconds: float) -> None:
        """Add a measurement."""
        key = key_of(point)
        self.times[key], self.points[key] = seconds, point
        self.left.pop(key, None)

    def fail(self, point: Point, why: str) -> None:
        """Add a failure: the point is not tried again."""
        self.failed[key_of(point)] = why
        self.left.pop(key_of(point), None)

    def resume(self, records: Sequence[Record], note: Mapping[str, Any] | None) -> None:
        """Add the results of an earlier run."""
        for record in records:
            if record.workload == self.workload and key_of(record.point) in self.left | self.times:
                self.note(record.point, record.seconds)
        self.trials = len(self.times)
        if note is not None:
            for key, why in dict(note.get("failed", {})).items():
                self.failed[str(key)] = str(why)
                self.left.pop(str(key), None)
            self.trials = max(self.trials, int(note.get("trials", 0)))
            self.kept, self.raced = note.get(KEPT), int(note.get("raced", 0))
