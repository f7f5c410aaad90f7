"""Check and time parts of a bundle, in a separate process, because kernels may crash it.

It prints JSON lines: ``{"part": NAME}`` and ``{"begin": KEY}`` before anything that may fail,
so that the reader knows what it was; a line for each result; and ``{"done": NAME}``. It exits with
`LATE` if the time limit is reached.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bnncc.bundle.device.place import Place, Unfit, in_turns, median
from bnncc.runtime import kernel_arguments
from bnncc.topi_binary.build import aliases
from bnncc.topi_binary.spec import from_json
from bnncc.tuning import cases

LATE, UNFIT, BROKEN = 3, 4, 5
"""Exit codes: the time limit is reached; this machine lacks something; the device is unusable."""

TURNS, FINAL_TURNS = 11, 25
"""Of all candidates of a kernel; then of the best and the default once more."""

FINALISTS = 3
SECONDS = 10.0
"""Approximate time of the turns of one kernel."""

LEAST_TURNS = 3
TOLERANCE = 1e-4
"""Default tolerance of outputs of a network, relative to the largest value."""

Say = Callable[..., None]


class Late(Exception):
    """The time limit is reached."""


class Worker:
    """Runs one part.

    Parameters
    ----------
    root : Path
        The bundle.
    place : Place
        Where it runs.
    part : dict
        Entry of the bundle's index.
    skip : set of str
        Keys of items that are done.
    until : float
        `time.monotonic()` after which nothing starts.
    say : callable
        Prints the fields of a line.
    """

    def __init__(
        self, root: Path, place: Place, part: dict[str, Any], skip: set[str], until: float, say: Say
    ) -> None:
        self.root, self.place, self.part, self.skip = root, place, part, skip
        self.until, self._say = until, say

    def run(self) -> None:
        """Run everything in the part."""
        if "candidates" in self.part:
            self._kernel()
        else:
            self._network()

    def _begin(self, key: str) -> bool:
        """Announce an item; return whether to run it. Raises `Late` after the time limit."""
        if key in self.skip:
            return False
        if time.monotonic() > self.until:
            raise Late
        self._say(begin=key)
        return True

    # ---- kernels ----------------------------------------------------------------------------

    def _kernel(self) -> None:
        """Check all candidates for a kernel; time the correct ones in interleaved runs."""
        with np.load(self.root / self.part["case"]) as arrays:
            kept = dict(arrays)
        candidates = self.part["candidates"]
        inputs, made = _Shared(self.place), _Shared(self.place)
        case_of: dict[str, cases.Case] = {}
        calls: dict[int, Callable[[], Any]] = {}
        for number, candidate in enumerate(candidates):
            if not self._begin(str(number)):
                continue
            spec = from_json(candidate["spec"])
            order = spec.weight_order
            if order not in case_of:
                case_of[order] = cases.restored(spec, kept)
            case = case_of[order]
            over = aliases(spec)
            given = [
                inputs.fresh(f"{i}{order if i == spec.data_tensors else ''}", a, i in over)
                for i, a in enumerate(case.inputs)
            ]
            empty = cases.empty_outputs(replace(spec, n=len(case.inputs[0])))
            outputs = [
                made.fresh(str(i), array, True) if alias < 0 else given[alias]
                for i, (array, alias) in enumerate(zip(empty, over, strict=True))
            ]
            own = [out for out, alias in zip(outputs, over, strict=True) if alias < 0]
            function = self.place.library(self.root / candidate["library"])["main"]
            call = _bound(function, [*given, *own])
            call()
            self.place.wait()
            got = [self.place.array(out) for out in outputs]
            wrong = case.difference(got, self.part["tolerance"])
            if wrong:
                self._say(key=str(number), right=False, error=wrong)
            else:
                calls[number] = call
        self._time(calls)

    def _time(self, calls: dict[int, Callable[[], Any]]) -> None:
        timers, first = {}, {}
        for number, call in calls.items():
            self._begin(str(number))
            timers[number] = self.place.timer(call)
            first[number] = timers[number].microseconds()
        times = self._turns(timers, first, TURNS)
        default = [n for n in timers if self.part["candidates"][n]["default"]]
        best = sorted(timers, key=lambda n: median(times[n]))[:FINALISTS]
        finalists = {n: timers[n] for n in dict.fromkeys([*best, *default])}
        if len(finalists) > 1:
            times |= self._turns(finalists, first, FINAL_TURNS)
        for number, timer in timers.items():
            self._say(
                key=str(number), right=True, us=median(times[number]), times_us=times[number],
                launches=timer.launches, graph=timer.graph,
            )  # fmt: skip

    def _turns(
        self, timers: dict[int, Any], first: dict[int, float], most: int
    ) -> dict[int, list[float]]:
        """Return times of each timer: `most`, or fewer if they are slow."""
        if not timers:
            return {}
        one = sum(first[n] * timer.launches for n, timer in timers.items()) / 1e6
        turns = int(max(LEAST_TURNS, min(most, SECONDS / max(one, 1e-9))))
        if time.monotonic() + one * turns > self.until:
            raise Late
        return dict(zip(timers, in_turns(list(timers.values()), turns), strict=True))

    # ---- networks ---------------------------------------------------------------------------

    def _network(self) -> None:
        """Check and time a network, then each of its kernels alone."""
        module = self.place.library(self.root / self.part["library"])
        if self._begin("main"):
            self._whole(module)
        for kernel in self.part["kernels"]:
            if not self._begin(kernel["name"]):
                continue
            args = kernel_arguments.arguments(kernel, 0, {}, np.empty)
            args = [a if isinstance(a, int) else self.place.tensor(a) for a in args]
            call = _bound(_function(module, kernel["name"]), args)
            call()
            self._timed(kernel["name"], call, None)

    def _whole(self, module: Any) -> None:
        with np.load(self.root / self.part["check"]) as arrays:
            known = dict(arrays)
        main, batch = self.place.network(module), self.part["batch"]
        images = [known[f"input_{i}"] for i in range(self.part["inputs"])]
        call = _bound(main, [self.place.tensor(_repeated(i, batch)) for i in images])
        made = call()
        outputs = [made] if self.part["outputs"] == 1 else list(made)
        self.place.wait()
        for i, output in enumerate(outputs):
            right, mine = known[f"output_{i}"], self.place.array(output)
            where = known.get(f"where_{i}")
            if where is None:
                wanted = _repeated(right, batch)
            else:  # of each image
                mine = mine.reshape(batch, -1)[:, where]
                wanted = np.broadcast_to(right, mine.shape)
            if wrong := _difference(mine, wanted, self.part["relative"]):
                self._say(key="main", right=False, error=f"output {i}: {wrong}")
                return
        self._timed("main", call, 1)

    def _timed(self, key: str, call: Callable[[], Any], launches: int | None) -> None:
        self.place.wait()
        timer = self.place.timer(call, launches)
        times = self._turns({0: timer}, {0: timer.microseconds()}, FINAL_TURNS)[0]
        self._say(
            key=key, right=True, us=median(times), times_us=times, launches=timer.launches,
            graph=timer.graph,
        )  # fmt: skip


class _Shared:
    """Tensors that candidates share; outputs are filled again for each."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._tensors: dict[str, Any] = {}

    def fresh(self, key: str, array: np.ndarray, written: bool) -> Any:
        if key not in self._tensors:
            self._tensors[key] = self._place.tensor(array)
        elif written:
            self._tensors[key] = self._place.filled(self._tensors[key], array)
        return self._tensors[key]


def _repeated(images: np.ndarray, batch: int) -> np.ndarray:
    """Return all images, repeated as a whole, so that neighbours differ."""
    return np.tile(images, (batch, *[1] * (images.ndim - 1)))


def _bound(function: Callable[..., Any], args: Sequence[Any]) -> Callable[[], Any]:
    return lambda: function(*args)


def _function(module: Any, name: str) -> Any:
    """Return a kernel of a network's library."""
    for part in (module, *module.imports):
        if part.implements_function(name):
            return part[name]
    raise LookupError(f"the library holds no kernel `{name}`")


def _difference(made: np.ndarray, wanted: np.ndarray, relative: float) -> str:
    """Describe the error of an output; empty if it is correct."""
    if made.shape != wanted.shape:
        return f"shape {made.shape} is not {wanted.shape}"
    gap = np.abs(made.astype(np.float64) - wanted.astype(np.float64))
    limit = relative * max(1e-30, float(np.abs(wanted).max(initial=0)))
    wrong = int(np.count_nonzero(~(gap <= limit)))
    return f"{wrong} of {wanted.size} values are wrong" if wrong else ""


def main(root: Path, names: Sequence[str], skip: Sequence[str], until: float) -> int:
    """Run parts of a bundle.

    Parameters
    ----------
    names : sequence of str
        Names of the parts.
    skip : sequence of str
        Items that are done or have failed: ``PART:KEY``.
    until : float
        `time.monotonic()` after which nothing starts.
    """

    def say(**line: Any) -> None:
        print(json.dumps(line), flush=True)

    index = json.loads((root / "index.json").read_text(encoding="utf-8"))
    parts = {part["part"]: part for part in (*index["networks"], *index["kernels"])}
    try:
        place = Place(index["device"], root, index.get("features", ()))
        say(device=place.name, **place.versions)
        for name in names:
            say(part=name)
            known = {key for part, _, key in (one.partition(":") for one in skip) if part == name}
            Worker(root, place, parts[name], known, until, say).run()
            say(done=name)
    except Late:
        return LATE
    except Unfit as error:
        print(error, file=sys.stderr)
        return UNFIT
    except Exception as error:  # on a GPU nothing can be trusted after it
        text = (str(error).strip().splitlines() or [""])[-1]
        print(f"{type(error).__name__}: {text[:300]}", file=sys.stderr)
        return BROKEN
    return 0
