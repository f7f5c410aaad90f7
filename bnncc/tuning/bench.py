"""Check and time one kernel's library: here, on a device, or in an emulated processor."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bnncc.errors import TuningError
from bnncc.runtime.runner import random_inputs
from bnncc.runtime.session import ALIGNMENT, aligned_empty
from bnncc.targets import host
from bnncc.topi_binary.build import aliases
from bnncc.topi_binary.spec import Spec
from bnncc.tuning.cases import Case, empty_outputs

CALL_SECONDS = 2e-4
"""Seconds of one repeat, which is several calls of a short kernel."""

KEPT = 5
"""Number of the shortest repeats to record: longer ones were disturbed."""

LEAST = 3
"""Repeats of a kernel that takes longer than the time for all of them."""

MOST_RUNS = 500
"""Of a network in a turn."""

PAGE = 4096
"""Range in bytes of the offset of a tensor, which changes from turn to turn."""


class WrongResult(Exception):
    """A kernel computes something else than its oracle."""


def checked(
    spec: Spec, case: Case, place: Callable[[np.ndarray], Any], call: Callable[[list[Any]], Any]
) -> list[Any]:
    """Run a kernel once, and compare its results.

    Parameters
    ----------
    case : Case
        Its inputs and outputs.
    place : callable
        Copies an array to where the kernel runs.
    call : callable
        Runs it on such arrays.

    Raises
    ------
    WrongResult
        If the results are wrong.
    """
    inputs, over = [place(array) for array in case.inputs], aliases(spec)
    fresh = [place(array) for array in empty_outputs(spec)]
    args = [*inputs, *(out for out, alias in zip(fresh, over, strict=True) if alias < 0)]
    call(args)
    made = [fresh[i] if alias < 0 else inputs[alias] for i, alias in enumerate(over)]
    if wrong := case.difference([m if isinstance(m, np.ndarray) else m.numpy() for m in made]):
        raise WrongResult(wrong)
    return args


def in_turns(
    artifacts: Sequence[Any], threads: int, seconds: float, turns: int
) -> list[list[list[float]]]:
    """Time networks in interleaved runs, forwards and backwards, with new tensors in each turn.

    Parameters
    ----------
    artifacts : sequence of Artifact
        Networks with the same inputs; or their proxies on a device.
    threads : int
        That kernels use.
    seconds : float
        Approximate time of a network in a turn; it runs at least once.
    turns : int
        How many.

    Returns
    -------
    list of list of list of float
        Microseconds of each run, by artifact and turn.
    """
    inputs = random_inputs(artifacts[0].inputs)
    times: list[list[list[float]]] = [[] for _ in artifacts]
    for turn in range(turns):
        for number in range(len(artifacts))[:: 1 if turn % 2 == 0 else -1]:
            session = artifacts[number].session(threads=threads)
            tensors = session.tensors(inputs)
            first = session.time_network(tensors, 2).min() * 1e-6
            runs = int(max(1, min(MOST_RUNS, seconds / first)))
            times[number].append(session.time_network(tensors, runs).tolist())
    return times


class _Clock:
    """Times libraries where TVM's runtime is."""

    cpu: Any
    _offsets: random.Random | None = None

    def load(self, library: Path) -> Any:
        """Return a library's module."""
        raise NotImplementedError

    def tensor(self, array: np.ndarray) -> Any:
        """Return a copy of an array as a tensor."""
        raise NotImplementedError

    def run(
        self, library: Path, spec: Spec, case: Case, seconds: float, place: int = 0
    ) -> list[float]:
        """Check one kernel, then time it.

        Parameters
        ----------
        library : Path
            With the kernel as ``main``.
        case : Case
            Its inputs and outputs.
        seconds : float
            Approximate time for timing.
        place : int
            Of the tensors in memory, where this can be chosen: kernels that share a place have
            theirs alike.

        Returns
        -------
        list of float
            The shortest times of a call, in seconds.

        Raises
        ------
        WrongResult
            If the results are wrong.
        """
        module, self._offsets = self.load(library), random.Random(place) if place else None
        args = checked(spec, case, self.tensor, lambda args: module["main"](*args))
        first = module.time_evaluator("main", self.cpu, number=1, repeat=2)(*args).min
        number = max(1, round(CALL_SECONDS / max(first, 1e-9)))
        repeat = int(min(500, max(LEAST, seconds / (number * max(first, 1e-9)))))
        times = module.time_evaluator("main", self.cpu, number=number, repeat=repeat)(*args).results
        return sorted(float(t) for t in times)[:KEPT]


class Here(_Clock):
    """Runs libraries in this process, on one CPU if kernels use one thread.

    Parameters
    ----------
    threads : int
        That kernels use.
    """

    def __init__(self, threads: int) -> None:
        from bnncc.runtime.threads import prepare

        if threads == 1 and sys.platform == "linux":
            os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        prepare(threads)
        host.features()  # asks for tiles, which Linux grants to each process
        import tvm

        self.cpu = tvm.cpu()

    def load(self, library: Path) -> Any:
        """Return a library's module."""
        import tvm

        return tvm.runtime.load_module(str(library))

    def tensor(self, array: np.ndarray) -> Any:
        """Return a copy of an array as a tensor."""
        import tvm
        import tvm_ffi

        if self._offsets is None or array.dtype.kind == "V":  # NumPy exchanges no bfloat16
            return tvm.runtime.tensor(array)
        room = aligned_empty((array.nbytes + PAGE,), "uint8")
        offset = self._offsets.randrange(0, PAGE, ALIGNMENT)
        made = room[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)
        np.copyto(made, array)
        return tvm_ffi.from_dlpack(made)


class OnGpu(Here):
    """Runs libraries on this machine's GPU, by its own clock."""

    def __init__(self) -> None:
        super().__init__(1)
        import tvm

        from bnncc.runtime.cuda import load_runtime

        load_runtime()
        self.cpu = tvm.cuda(0)

    def tensor(self, array: np.ndarray) -> Any:
        """Return an array as a tensor on the GPU."""
        import tvm

        return tvm.runtime.tensor(array, self.cpu)


class OnDevice(_Clock):
    """Runs libraries on a device, through TVM's RPC.

    Parameters
    ----------
    address : dict
        Arguments of `bnncc.remote.connect`.
    threads : int
        That kernels use.
    """

    def __init__(self, address: dict[str, Any], threads: int) -> None:
        from bnncc.remote.network import connect

        self.device = connect(**address)
        if self.device.info:
            self.device.set_threads(threads)
        self.cpu = self.device.cpu

    def run(
        self, library: Path, spec: Spec, case: Case, seconds: float, place: int = 0
    ) -> list[float]:
        """Check one kernel on the device, then time it by the device's clock."""
        with self.device.speaking("measuring"):
            return super().run(library, spec, case, seconds)

    def load(self, library: Path) -> Any:
        """Send a library to the device, and return its module."""
        return self.device.load(library.read_bytes())

    def tensor(self, array: np.ndarray) -> Any:
        """Return an array as a tensor on the device."""
        import tvm

        with self.device.speaking("sending inputs"):
            return tvm.runtime.tensor(array, self.device.cpu)


UNIT = 1e-6
"""Value of one instruction in MetaSchedule's field for seconds."""


class Instructions:
    """Runs libraries in the emulator unicorn, if there is no Arm hardware.

    The cost of a kernel is the number of instructions that it executes, which is not time: a real
    processor overlaps some and waits for others. These records are in a separate folder,
    ``TARGET.instructions``, and are used only for kernels without measured times.
    """

    def __init__(self) -> None:
        try:
            from bnncc.codegen.emulator import Library
        except ImportError as error:
            raise TuningError(
                f"counting instructions needs an emulator: {error}",
                hint="pip install unicorn pyelftools",
            ) from error
        self._library = Library

    def run(
        self, library: Path, spec: Spec, case: Case, seconds: float, place: int = 0
    ) -> list[float]:
        """Check one kernel; return its instructions times `UNIT`, for which one run is enough."""
        emulated = self._library(library.read_bytes())
        checked(
            spec, case, np.ascontiguousarray, lambda args: emulated.call("main", args, count=True)
        )
        return [emulated.instructions * UNIT]
