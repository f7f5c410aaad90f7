"""Run artifacts on this machine and time them: the network, and each kernel alone."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bnncc import report
from bnncc.artifact import Artifact, aligned_empty
from bnncc.errors import BnnccError, UsageError
from bnncc.manifest import TensorInfo
from bnncc.targets import host
from bnncc.threads import prepare

FORMAT = 1
PERCENTILES = (10, 50, 90, 99)

_WARM_UP = 10
_KERNEL_REPEATS = 60
_KERNEL_SECONDS = 100e-6  # of one repeat: short beside what a busy machine interrupts


def random_inputs(
    inputs: Sequence[TensorInfo], *, seed: int = 0, sizes: Mapping[str, int] | None = None
) -> dict[str, np.ndarray]:
    """Make inputs: normally distributed floats, and integers from the whole range of bytes.

    Parameters
    ----------
    inputs : sequence of TensorInfo
        What to make.
    seed : int
        Same seed, same arrays.
    sizes : mapping of str to int, optional
        Of symbolic dimensions; 1 where not given.

    Returns
    -------
    dict of str to ndarray
        Aligned so that they are read in place.
    """
    rng = np.random.default_rng(seed)
    arrays = {}
    for info in inputs:
        shape = tuple(d if isinstance(d, int) else (sizes or {}).get(d, 1) for d in info.shape)
        arrays[info.name] = _random(rng, shape, info.dtype)
    return arrays


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    array = aligned_empty(shape, dtype)
    kind = array.dtype.kind
    if kind == "f":
        array[...] = rng.standard_normal(shape, dtype=np.float32)
    elif kind == "b":
        array[...] = rng.integers(0, 2, shape)
    elif dtype == "uint32":  # packed bits
        array[...] = rng.integers(0, 2**32, shape, dtype=np.uint32)
    else:
        low = 0 if kind == "u" else -128
        array[...] = rng.integers(low, low + (128 if dtype == "int8" else 256), shape)
    return array


def bench(
    artifact: Artifact, *, threads: int | None = None, repeat: int = 200, seed: int = 0
) -> dict[str, Any]:
    """Time a network and its kernels.

    Parameters
    ----------
    artifact : Artifact
        What to run.
    threads : int, optional
        The most that kernels use; by default as for `bnncc.threads.prepare`.
    repeat : int
        Timed runs of the network, after some that are not.
    seed : int
        Of the random inputs.

    Returns
    -------
    dict
        See docs/report.md: ``network`` and ``kernels``, times in microseconds.

    Raises
    ------
    UsageError
        If `repeat` is not positive.
    """
    if repeat < 1:
        raise UsageError(f"repeat is {repeat}, wanted 1 or more")
    prepare(threads)
    session = artifact.session(threads=threads)
    used = session.use_threads()
    tensors = session.tensors(random_inputs(artifact.inputs, seed=seed))
    main = session.main
    for _ in range(min(_WARM_UP, repeat)):
        main(*tensors)
    times = np.empty(repeat)
    for i in range(repeat):
        start = time.perf_counter_ns()
        main(*tensors)
        times[i] = time.perf_counter_ns() - start
    times /= 1e3
    compiled = artifact.manifest["report"]
    macs = sum(compiled["summary"][f"{kind}_macs"] for kind in report.KINDS)
    network = {"min_us": _us(times.min()), "median_us": _us(np.median(times))}
    network.update({f"p{p}_us": _us(np.percentile(times, p)) for p in PERCENTILES})
    network.update({"macs": macs, "macs_per_second": _rate(macs, float(np.median(times)))})
    return {
        "format": FORMAT,
        "model": artifact.manifest["model"],
        "target": artifact.manifest["target"]["name"],
        "cpu": host.processor(),
        "threads": used,
        "repeat": repeat,
        "network": network,
        "kernels": [_time_kernel(session.module, kernel, seed) for kernel in compiled["kernels"]],
    }


def _time_kernel(module: Any, kernel: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Time one kernel alone, on tensors of its own shaped as the plan's."""
    import tvm
    import tvm_ffi

    rng = np.random.default_rng(seed)
    args = []
    for position, arg in enumerate(kernel["args"]):
        shape = tuple(d if isinstance(d, int) else 1 for d in arg["shape"])
        array = _random(rng, shape, arg["dtype"])
        if position in kernel["zeros"]:
            array[...] = 0
        args.append(tvm_ffi.from_dlpack(array))
    library = next((m for m in module.imports if m.implements_function(kernel["name"])), None)
    if library is None:
        raise BnnccError(f"lib.so holds no kernel `{kernel['name']}`", hint="compile it again")
    first = library.time_evaluator(kernel["name"], tvm.cpu(), number=10, repeat=3)
    number = max(1, round(_KERNEL_SECONDS / max(first(*args).min, 1e-9)))
    timer = library.time_evaluator(kernel["name"], tvm.cpu(), number=number, repeat=_KERNEL_REPEATS)
    times = np.array(timer(*args).results) * 1e6
    median = float(np.median(times))
    return {
        "name": kernel["name"],
        "op": kernel["op"],
        "layers": kernel["layers"],
        "min_us": _us(times.min()),
        "median_us": _us(median),
        "macs": kernel["macs"],
        "macs_per_second": _rate(kernel["macs"], median),
    }


def bench_text(result: Mapping[str, Any]) -> str:
    """Render what `bench` returned for a terminal."""
    rows = [("kernel", "min us", "median us", "Mmac", "Gmac/s", "layers")]
    for kernel in result["kernels"]:
        macs = kernel["macs"]
        rows.append(
            (
                kernel["name"],
                f"{kernel['min_us']:.2f}",
                f"{kernel['median_us']:.2f}",
                f"{macs / 1e6:.2f}" if macs else "",
                f"{kernel['macs_per_second'] / 1e9:.1f}" if macs else "",
                ", ".join(kernel["layers"]),
            )
        )
    total = sum(kernel["median_us"] for kernel in result["kernels"])
    network = result["network"]
    lines = report.table(rows, right=range(1, 5)) if result["kernels"] else []
    lines += [
        "",
        f"network  min {network['min_us']:.2f} us, median {network['median_us']:.2f} us, "
        + ", ".join(f"p{p} {network[f'p{p}_us']:.2f}" for p in PERCENTILES)
        + f" ({result['repeat']} runs, {result['threads']} threads)",
        f"kernels  {total:.2f} us in all, each timed alone; "
        f"{network['macs_per_second'] / 1e9:.1f} Gmac/s of the network's median",
    ]
    return "\n".join(lines).lstrip("\n")


def _us(value: float) -> float:
    return round(float(value), 3)


def _rate(macs: int, microseconds: float) -> float:
    return round(macs / (microseconds * 1e-6), 1) if microseconds else 0.0
