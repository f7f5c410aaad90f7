"""Short measurements during compilation for this machine, to select the fastest kernels.

Only variants whose results are identical, bit for bit, are compared. Results are kept in the user's
cache folder, one file per CPU, for later compilations.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tvm

from bnncc import schedules
from bnncc._version import __version__
from bnncc.codegen import memory
from bnncc.codegen.pipeline import compiled
from bnncc.errors import BnnccError
from bnncc.files import write_atomic
from bnncc.osutil import cache_folder
from bnncc.records.database import Records
from bnncc.records.race import Gain
from bnncc.records.workload import Workload
from bnncc.runtime.session import aligned_empty
from bnncc.schedules.multithreading import microseconds
from bnncc.schedules.space import Point, UnfitPoint
from bnncc.targets import host
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary.build import aliases, input_types, output_types
from bnncc.topi_binary.definitions import define
from bnncc.topi_binary.spec import BinaryConv2d, Spec

SECONDS = 1.0
"""Seconds that measurements of a compilation may take; none starts after them."""

ORDER_SECONDS = 5.0
"""The same for those of weight orders, which are compiled for it one by one."""

TURNS = 8
"""Turns per comparison, each with tensors of its own."""

CALL_SECONDS = 3e-4
"""Duration of one repeat in seconds: several calls if a kernel is short. Of three repeats per turn,
the shortest counts."""

UNDISTURBED = 0.75
"""Most that counting may take of the time on tiles to be chosen: on an Emerald Rapids, layers take
1.0 to 1.3 times as long on tiles as with counting while a hyperthread is busy, else 0.5 to 0.9."""

MOST_KEPT = 10_000
"""Maximum number of results in the cache; older ones are dropped."""


class Cache:
    """Results of measurements on this CPU; empty if the file is damaged or unavailable."""

    def __init__(self) -> None:
        folder = cache_folder()
        self._path = None if folder is None else folder / f"{host.core_model()}.json"
        self._known = self._read()
        self._new: dict[str, Any] = {}

    def _read(self) -> dict[str, Any]:
        if self._path is None:
            return {}
        with contextlib.suppress(OSError, ValueError, RecursionError):
            content = json.loads(self._path.read_bytes())
            return content if isinstance(content, dict) else {}
        return {}

    def get(self, key: str) -> Any:
        """Return a result; raises KeyError if there is none."""
        return self._new[key] if key in self._new else self._known[key]

    def put(self, key: str, value: Any) -> None:
        """Add a result."""
        self._new[key] = value

    def save(self) -> None:
        """Merge new results into the file, which may have changed; ignore failures."""
        if not self._new or self._path is None:
            return
        content = list((self._read() | self._new).items())[-MOST_KEPT:]
        with contextlib.suppress(OSError, BnnccError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self._path, [json.dumps(dict(content)).encode()])


class Stopwatch:
    """Times kernels on one thread of this machine, within a time budget.

    Parameters
    ----------
    target : TargetSpec
        This machine.
    seconds : float, optional
        The budget; default `SECONDS`.
    """

    def __init__(self, target: TargetSpec, seconds: float | None = None) -> None:
        self.target, self.cache = target, Cache()
        self._left = SECONDS if seconds is None else seconds

    def __enter__(self) -> Stopwatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.cache.save()

    def key(self, spec: str, points: Sequence[Point]) -> str:
        """Return the key of a result: kernel, points, and all that affects their code."""
        target = [self.target.mcpu, self.target.mattr, self.target.l1_bytes, self.target.l2_bytes]
        text = json.dumps([__version__, target, spec, [sorted(p.items()) for p in points]])
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    def times(self, spec: Spec, points: Sequence[Point]) -> list[list[float]] | None:
        """Return the times of a kernel in seconds, by point and turn; None if unavailable."""
        return self.times_of([(spec, point) for point in points])

    def times_of(self, kernels: Sequence[tuple[Spec, Point | None]]) -> list[list[float]] | None:
        """Return the times of kernels in seconds, by kernel and turn; None if unavailable."""
        if self._left <= 0:
            return None
        started = time.monotonic()
        try:
            return self._timed(kernels)
        except Exception:  # a broken kernel has no time here; the self-check reports it
            return None
        finally:
            self._left -= time.monotonic() - started

    def _timed(self, kernels: Sequence[tuple[Spec, Point | None]]) -> list[list[float]]:
        names = {f"kernel_{number}": spec for number, (spec, _) in enumerate(kernels)}
        functions = {
            name: schedules.schedule(define(spec), self.target, 1, point)
            for name, (spec, point) in zip(names, kernels, strict=True)
        }
        functions = {name: f.with_attr("global_symbol", name) for name, f in functions.items()}
        with memory.lowering():
            built = compiled(
                self.target,
                lambda machine: tvm.compile(
                    tvm.IRModule(functions), target=machine, tir_pipeline=memory.PIPELINE
                ),
            ).jit()
        cpu = tvm.cpu()
        times: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(TURNS):
            arguments = {spec: _arguments(spec) for spec in names.values()}
            for name in [*names][:: 1 if turn % 2 == 0 else -1]:
                args = arguments[names[name]]
                built[name](*args)
                once = built.time_evaluator(name, cpu, number=1)(*args).min
                number = max(1, round(CALL_SECONDS / max(once, 1e-9)))
                found = built.time_evaluator(name, cpu, number=number, repeat=3)(*args)
                times[name].append(found.min)
        return list(times.values())


def _arguments(spec: Spec) -> list[Any]:
    """Return arguments for a kernel: random floats, and zeros, which are valid for all others."""
    random = np.random.default_rng(0)
    outputs = zip(output_types(spec), aliases(spec), strict=True)
    made = []
    for shape, dtype in [*input_types(spec), *(kind for kind, alias in outputs if alias < 0)]:
        array = aligned_empty(tuple(d if isinstance(d, int) else 1 for d in shape), dtype)
        array[...] = random.standard_normal(array.shape) if array.dtype.kind == "f" else 0
        made.append(tvm.runtime.from_dlpack(array))
    return made


def choose(records: Records, kernels: Mapping[str, int], watch: Stopwatch) -> None:
    """Compare the rules' defaults with records of other CPUs; make `records` use the fastest.

    Parameters
    ----------
    kernels : mapping of str to int
        By JSON of a spec: how often the network runs the kernel.
    """
    wanted: list[tuple[float, str, Spec, list[Point]]] = []
    for text, count in kernels.items():
        workload = Workload.of(text)
        points = [] if records.find(text, 1) else _points(records, workload, watch.target)
        if points[1:]:
            weight = count * microseconds(workload.kernel, watch.target)
            wanted.append((-weight, workload.spec, workload.kernel, points))
    for _, text, spec, points in sorted(wanted, key=lambda one: one[:2]):
        won = _winner(watch, text, spec, points)
        if won:
            records.take(text, points[won])


def _points(records: Records, workload: Workload, target: TargetSpec) -> list[Point]:
    """Return the default of a kernel and the best points of other CPUs, without duplicates."""
    space = schedules.space_of(workload.kernel, target)
    points = [dict(space.default)]
    for point in records.candidates(workload.spec, 1):
        with contextlib.suppress(UnfitPoint):
            points.append(space.complete(point))
    return [point for number, point in enumerate(points) if point not in points[:number]]


def _winner(watch: Stopwatch, text: str, spec: Spec, points: Sequence[Point]) -> int:
    """Return the index of the point that is fastest beyond noise; otherwise 0, the default."""
    return _won(watch, watch.key(text, points), len(points), lambda: watch.times(spec, points))


def _won(
    watch: Stopwatch,
    key: str,
    count: int,
    timed: Callable[[], list[list[float]] | None],
    most: float = 1.0,
) -> int:
    """Return the index of the fastest way; 0 if none takes less than `most` times as long as it."""
    with contextlib.suppress(KeyError):
        known = watch.cache.get(key)
        if type(known) is int and 0 <= known < count:
            return known
    times = timed()
    if times is None:
        return 0
    gains = [Gain.of(times[0], candidate) for candidate in times]
    ratios = [gain.ratio if gain.faster and gain.ratio < most else 1.0 for gain in gains]
    won = min(range(count), key=lambda n: ratios[n])
    watch.cache.put(key, won)
    return won


def weight_order(watch: Stopwatch, spec: BinaryConv2d, orders: Sequence[str]) -> str:
    """Return the weight order whose kernel is fastest beyond noise; otherwise the first one.

    Others must be faster by more than tiles are slowed down by another hyperthread of the core:
    that may last for seconds, and the choice for years.
    """
    specs = [replace(spec, weight_order=order) for order in orders]
    key = watch.key(Workload.of(specs[0]).spec, [{order: 1} for order in orders])
    kernels = [(one, None) for one in specs]
    return orders[_won(watch, key, len(specs), lambda: watch.times_of(kernels), UNDISTURBED)]


def seconds(kernels: Mapping[str, int], watch: Stopwatch) -> float | None:
    """Return the total time of kernels with their defaults; None if one could not be timed."""
    total = 0.0
    for text, count in kernels.items():
        workload = Workload.of(text)
        key = watch.key(workload.spec, [])
        known = None
        with contextlib.suppress(KeyError):
            known = watch.cache.get(key)
        if not isinstance(known, float) or not 0 < known < 1e3:
            default = dict(schedules.space_of(workload.kernel, watch.target).default)
            times = watch.times(workload.kernel, [default])
            if times is None:
                return None
            known = min(times[0])
            watch.cache.put(key, known)
        total += count * known
    return total
