"""Tune one network: its kernels, and the time of the whole network before and after."""

from __future__ import annotations

import importlib.util
import os
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from bnncc import driver
from bnncc.console import Console
from bnncc.errors import DeviceError, TuningError, UsageError
from bnncc.files import scratch_folder
from bnncc.options import CompileOptions
from bnncc.progress import phase
from bnncc.records import race
from bnncc.records.workload import Workload
from bnncc.remote import connection
from bnncc.runtime.artifact import Artifact
from bnncc.runtime.threads import usable_cpus
from bnncc.targets import host
from bnncc.targets.spec import TargetSpec
from bnncc.tuning import bench
from bnncc.tuning.pool import Pool, Setup
from bnncc.tuning.trials import Plan
from bnncc.tuning.tuner import Tuner, summary, tasks_of
from bnncc.verification.confirm import runs_here

TURN_SECONDS = 0.015
"""That the network before or after runs, of each turn in a process."""

PROCESS_TURNS = 20
"""Of a process, whose shortest times make one turn of the race."""

PROCESS_SECONDS = 300.0
"""Seconds after which such a process is stopped."""

DEVICE_TURNS = 5
"""On a device, of one run each."""


def tune(
    model: str | Path,
    options: CompileOptions,
    target: TargetSpec,
    *,
    folder: Path,
    pattern: re.Pattern[str] | None = None,
    device: dict[str, Any] | None = None,
    method: str = "clock",
    trials: int = 512,
    time_limit: float | None = None,
    jobs: int | None = None,
    lock: Path | None = None,
    command: str = "",
    console: Console | None = None,
    preload: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Tune the kernels of a network.

    Parameters
    ----------
    model : path
        ONNX file.
    options : CompileOptions
        Options of the compilation, without records.
    folder : Path
        Folder of records: those in it are used, and new ones added.
    pattern : re.Pattern, optional
        Only kernels whose description it matches.
    device : dict, optional
        Arguments of `bnncc.remote.connect`, to measure there; a tracker's devices all take part.
    method : {"clock", "instructions"}
        What is measured.
    trials : int
        Total, including those of earlier runs.
    time_limit : float, optional
        Seconds after which no trial starts.
    jobs : int, optional
        Kernels built in parallel; by default the number of CPUs available.
    lock : Path, optional
        File to lock while kernels are measured.
    command : str
        Command line, for the index.
    preload : tuple of str
        Modules that worker processes import first.

    Returns
    -------
    dict
        Kernels with default and best, trials, seconds, and the network before and after; under
        ``fixed``, kernels with nothing to choose.

    Raises
    ------
    TuningError
        If nothing can be tuned or measured.
    """
    console, started = console or Console(), time.monotonic()
    threads = options.threads or 1
    _check(target, device, method)
    kernels = driver.kernels(model, options)
    tasks = tasks_of(kernels, target, threads)
    specs = {task.workload.spec for task in tasks}
    fixed = sorted(
        {w.name for w in (Workload.of(spec) for spec, _ in kernels) if w.spec not in specs}
    )
    if pattern is not None:
        tasks = [task for task in tasks if pattern.search(task.workload.name)]
    if not tasks:
        what = (
            "no kernel with choices" if pattern is None else f"no kernel matches {pattern.pattern}"
        )
        raise TuningError(f"{model}: {what}")
    if fixed and pattern is None:
        console.result(f"nothing to choose, so not tuned: {', '.join(fixed)}")
    plan = Plan(
        trials=trials,
        time_limit=time_limit,
        jobs=jobs or usable_cpus(),
        measurers=free_devices(device),
        lock=lock,
        command=command,
        device=_name(device, method),
    )
    setup = Setup(target, device, threads, preload, method)
    tuner = Tuner(tasks, setup, folder, plan, console)
    result = tuner.run()
    content = {
        "format": 1,
        "model": Path(model).name,
        "target": target.name,
        "measured": method,
        "records": str(folder),
        **summary(result),
        "fixed": fixed,
        "network": None,
    }
    if not result.interrupted and method == "clock" and tuner.won:
        won, lost = tuner.verdicts(), tuner.defaults()
        try:
            sides = _compiled(model, options, folder)
        finally:  # whatever ends this process now, only what the network wins with is kept
            tuner.keep(tuner.defaults(again=True))
        with phase("compare networks"):
            made = content["network"] = _raced(sides, setup)
        tuner.keep(won if race.Gain(**made["gain"]).faster else lost)
        content |= summary(result)
    return content | {"seconds": round(time.monotonic() - started, 3)}


def _check(target: TargetSpec, device: dict[str, Any] | None, method: str) -> None:
    if importlib.util.find_spec("xgboost") is None:
        raise TuningError(
            "tuning needs XGBoost, which is not installed",
            hint="pip install 'bnncc[tune]'",
        )
    arm = target.arch.startswith(("aarch64", "arm"))
    if method == "instructions":
        if not arm:
            raise UsageError(f"--measure instructions is for Arm, not for {target.name}")
    elif device is None and not runs_here(target):
        raise TuningError(
            f"this machine cannot run {target.name}",
            hint="tune on a machine with such a GPU: GPUs cannot be used over RPC"
            if target.gpus
            else "measure on a device: --rpc HOST:PORT, or --tracker HOST:PORT --key K"
            + ("; or --measure instructions" if arm else ""),
        )


def _name(device: dict[str, Any] | None, method: str) -> str:
    if method != "clock":
        return "emulated processor"
    if device is None:
        return host.processor()
    return str(device["rpc"] or f"{device['key']} of {device['tracker']}")


def _compiled(model: str | Path, options: CompileOptions, folder: Path) -> list[Artifact]:
    """Compile the network by the rules' defaults, and with the records."""
    options = replace(options, measure=False)
    tuned = replace(options, tuned=True, records=(folder,))
    return [driver.compile_model(model, asked) for asked in (options, tuned)]


def _raced(artifacts: Sequence[Artifact], setup: Setup) -> dict[str, Any]:
    """Time the network with the rules' defaults and with the records, in interleaved runs.

    Here, each turn is a process of its own: where code and weights lie in memory, physical memory
    included, makes more of a difference than the next run in the same place.
    """
    if setup.device is None:
        times = _in_processes(artifacts, setup)
    else:
        from bnncc.remote.network import connect

        with connect(**setup.device) as there:
            sides = [artifact.on_device(there) for artifact in artifacts]
            turns = bench.in_turns(sides, setup.threads, 0.0, DEVICE_TURNS)
        times = [[[min(one)] for one in side] for side in turns]
    least, median = ([float(f(np.concatenate(t))) for t in times] for f in (np.min, np.median))
    return {
        "before_us": least[0], "after_us": least[1],
        "before_median_us": median[0], "after_median_us": median[1],
        "gain": asdict(_gain(times)),
    }  # fmt: skip


def _gain(times: Sequence[Sequence[Sequence[float]]]) -> race.Gain:
    """Return the time of the second side relative to the first, by the shortest of each turn."""
    default, tuned = ([min(turn) for turn in side] for side in times)
    return race.Gain.of(default, tuned)


def _in_processes(artifacts: Sequence[Artifact], setup: Setup) -> list[list[list[float]]]:
    """Return the times of two artifacts in each of several processes, by artifact and process.

    If `race.TURNS` processes do not show which is faster, as many more are run.

    Raises
    ------
    TuningError
        If one crashes.
    """
    with scratch_folder("race") as scratch:
        paths = [os.path.join(scratch, f"{n}.bnncc") for n in range(len(artifacts))]
        for artifact, path in zip(artifacts, paths, strict=True):
            artifact.save(path)
        times: list[list[list[float]]] = [[] for _ in paths]
        for turn in range(2 * race.TURNS):
            if turn == race.TURNS and (_gain(times).faster or _gain(times).slower):
                break
            step = 1 if turn % 2 == 0 else -1
            job = {
                "task": "network", "artifacts": paths[::step],
                "seconds": TURN_SECONDS, "turns": PROCESS_TURNS,
            }  # fmt: skip
            with Pool(setup, 1) as pool:
                (answer,) = pool.run([job], PROCESS_SECONDS)
            if "error" in answer:
                raise TuningError(f"the network cannot be timed: {answer['error']}")
            for side, found in zip(times, answer["times"][::step], strict=True):
                side.append([time for one in found for time in one])
    return times


def text(result: dict[str, Any], folder: Path) -> str:
    """Return the last line of a run: what it did, and the gain of the network."""
    line = (
        f"{folder}: {result['trials']} trials in {result['seconds']:.1f} s, "
        f"{result['measuring_seconds']:.1f} s of them measuring"
    )
    if result["interrupted"]:
        return f"{line}; interrupted; measurements are kept, and the same command continues"
    if result["network"] is not None:
        before, after = result["network"]["before_us"], result["network"]["after_us"]
        gain = race.Gain(**result["network"]["gain"])
        line += f"; network {before:.2f} us before, {after:.2f} us after: {gain.text}"
        if not gain.faster:
            return f"{line}, so the defaults are kept"
        line += ", so the tuned schedules are kept"
    elif any(kernel["gain"] for kernel in result["kernels"]):
        return f"{line}; no tuned schedule was faster in interleaved runs, so the defaults are kept"
    return f"{line}; `bnncc compile --tuning-dir {os.fspath(folder)}` uses the records"


def free_devices(device: dict[str, Any] | None) -> int:
    """Return how many processes can measure at a time.

    `device`: arguments of `bnncc.remote.connect`; None for this machine, where it is one.

    Returns
    -------
    int
        All devices that a tracker knows with the key, busy or not.

    Raises
    ------
    DeviceError
        If the tracker knows none, or does not answer.
    """
    if device is None or device.get("tracker") is None:
        return 1
    address = connection.parse_address(str(device["tracker"]))
    keys = connection.summary(address)
    count = keys.count(str(device["key"]))
    if not count:
        raise DeviceError(
            f"tracker {address} has no device with key `{device['key']}`",
            hint=f"it has: {', '.join(sorted(set(keys))) or 'none'}",
        )
    return count
