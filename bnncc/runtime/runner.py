"""Time artifacts, on this machine or a device: the network, and each kernel alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bnncc import report
from bnncc.errors import UsageError
from bnncc.ir.datatypes import datatype
from bnncc.ir.demands import NO_LIMITS, Limits
from bnncc.ir.dims import evaluated, symbols_of
from bnncc.options import require_int
from bnncc.runtime import kernel_arguments
from bnncc.runtime.artifact import Artifact
from bnncc.runtime.manifest import TensorInfo
from bnncc.runtime.session import Session, aligned_empty
from bnncc.runtime.threads import prepare
from bnncc.targets import host

FORMAT = 1
PERCENTILES = (10, 50, 90, 99)


def random_inputs(
    inputs: Sequence[TensorInfo], *, seed: int = 0, sizes: Mapping[str, int] | None = None
) -> dict[str, np.ndarray]:
    """Make inputs: normally distributed floats, whole bytes, and what the model declares.

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
        shape = tuple(evaluated(d, lambda s: (sizes or {}).get(s, 1)) for d in info.shape)
        arrays[info.name] = kernel_arguments.filled(rng, aligned_empty(shape, info.dtype))
        if info.limits is not NO_LIMITS:
            _allow(info.limits, arrays[info.name])
        if kind := datatype(info.datatype):
            arrays[info.name][...] = kind.random(rng, shape)
    return arrays


def _allow(limits: Limits, array: np.ndarray) -> None:
    """Bring whole numbers into the limits of an input."""
    if limits.low is not None and limits.high is not None:
        np.mod(array, limits.high - limits.low + 1, out=array)
        array += np.asarray(limits.low, array.dtype) if array.dtype.kind == "i" else 0
    if limits.nonzero:
        array[array == 0] = 1


def bench(
    artifact: Artifact | str | Path,
    *,
    threads: int | None = None,
    repeat: int = 200,
    seed: int = 0,
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Time a network and each of its kernels.

    Parameters
    ----------
    artifact : Artifact or path
        The network, which runs on this machine or on its device.
    threads : int, optional
        Maximum number of threads; by default the number of CPUs available.
    repeat : int
        Number of timed runs of the network.
    seed : int
        Of the random inputs.
    batch : int, optional
        Size of a dynamic batch; 1 by default.
    dims : mapping of str to int, optional
        Sizes of symbolic dimensions, such as a number of tokens; 1 where not given.

    Returns
    -------
    dict
        See docs/report.md; times are in microseconds.

    Raises
    ------
    UsageError
        If an argument is of a wrong type, `repeat` is not positive, the network has another batch
        or no such dimension, or `dims` gives the batch another size.
    """
    dims = dims or {}
    named = {f"dims[{name!r}]": size for name, size in dims.items()}
    require_int(repeat=repeat, seed=seed, batch=1 if batch is None else batch, **named)
    if repeat < 1:
        raise UsageError(f"repeat is {repeat}, expected 1 or more")
    artifact = Artifact.of(artifact)
    sizes = {} if batch is None else _batch_of(artifact, batch)
    for name, size in _dims_of(artifact, dims).items():
        if sizes.setdefault(name, size) != size:
            raise UsageError(
                f"--batch {batch} and --dim {name}={size}: `{name}` is the batch; give one"
            )
    if artifact.device is None:
        prepare(threads)
    session = artifact.session(threads=threads)
    used = artifact.threads_of(session.use_threads())
    tensors = session.tensors(random_inputs(artifact.inputs, seed=seed, sizes=sizes))
    session.run(tensors)  # which says clearly what does not run
    times = session.time_network(tensors, repeat)
    kernels = artifact.manifest["report"]["kernels"] if session.times_kernels else []
    return described(
        artifact,
        times,
        {kernel["name"]: _time_kernel(session, kernel, seed, sizes) for kernel in kernels},
        processor=host.processor() if artifact.device is None else artifact.device.processor,
        threads=used,
        sizes=sizes,
    )


def _batch_of(artifact: Artifact, batch: int) -> dict[str, int]:
    """Return sizes of symbolic dimensions that make a batch of so many."""
    first = {info.shape[0] for info in artifact.inputs if info.shape}
    fixed = sorted(size for size in first if isinstance(size, int) and size != batch)
    if fixed or not first:
        info = next((i for i in artifact.inputs if i.shape), None)
        name = "" if info is None else info.name
        shape = "" if info is None else "x".join(["N", *map(str, info.shape[1:])])
        raise UsageError(
            f"--batch {batch}: the network was compiled for {fixed[0] if fixed else 'no batch'}",
            hint=f"compile it with --input-shape {name}:{shape} for batches of any size",
        )
    return {size: batch for size in first if isinstance(size, str)}


def _dims_of(artifact: Artifact, dims: Mapping[str, int]) -> Mapping[str, int]:
    """Return `dims`; refuse a name that no symbolic dimension has, and sizes below 1."""
    known = {s: None for info in artifact.inputs for dim in info.shape for s in symbols_of(dim)}
    for name, size in dims.items():
        if name not in known:
            names = ", ".join(known)
            raise UsageError(
                f"--dim {name}={size}: no symbolic dimension is called `{name}`; "
                + (f"the network has {names}" if names else "the network has none"),
                hint="" if names else "compile it with --input-shape to have some",
            )
        if size < 1:
            raise UsageError(f"dims[{name!r}] is {size}, expected 1 or more")
    return dims


def described(
    artifact: Artifact,
    network: np.ndarray,
    kernels: Mapping[str, np.ndarray],
    *,
    processor: str,
    threads: int,
    sizes: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Return times together with facts about the network and its kernels.

    Parameters
    ----------
    network : ndarray
        Microseconds of each of its runs.
    kernels : mapping of str to ndarray
        The same of each kernel that was timed, by name.
    processor : str
        What took so long, by its maker's name.
    threads : int
        That were used at most.
    sizes : mapping of str to int, optional
        Of symbolic dimensions; 1 where not given.

    Returns
    -------
    dict
        See docs/report.md.
    """
    compiled = artifact.manifest["report"]
    firsts = [t.shape[0] for t in artifact.inputs if t.shape]
    first = firsts[0] if firsts else 1
    sizes = sizes or {}
    batch = first if isinstance(first, int) else sizes.get(first, 1)
    macs = batch * sum(compiled["summary"][f"{kind}_macs"] for kind in report.KINDS)
    timed = [
        _described(kernel, kernels[kernel["name"]], first, sizes)
        for kernel in compiled["kernels"]
        if kernel["name"] in kernels
    ]
    if sizes.keys() - {first}:  # not in proportion to these: attention, for example
        macs = sum(kernel["macs"] for kernel in timed)
    whole: dict[str, Any] = spread(network)
    median = float(np.median(network))
    whole.update({"macs": macs, "macs_per_second": _rate(macs, median)})
    whole.update({"batch": batch, "items_per_second": _rate(batch, median)})
    return {
        "format": FORMAT,
        "model": artifact.manifest["model"],
        "target": artifact.manifest["target"]["name"],
        "cpu": processor,
        "threads": threads,
        "repeat": len(network),
        "network": whole,
        "kernels": timed,
    }


def spread(times: np.ndarray) -> dict[str, float]:
    """Return least, median and percentiles of `times`, in microseconds."""
    result = {"min_us": _us(times.min()), "median_us": _us(np.median(times))}
    result.update({f"p{p}_us": _us(np.percentile(times, p)) for p in PERCENTILES})
    return result


def _time_kernel(
    session: Session, kernel: Mapping[str, Any], seed: int, sizes: Mapping[str, int]
) -> np.ndarray:
    """Time one kernel alone, on tensors of its own shaped as the plan's."""
    args = kernel_arguments.arguments(kernel, seed, sizes, aligned_empty)
    return session.time_kernel(kernel["name"], args)


def _described(
    kernel: Mapping[str, Any], times: np.ndarray, first: Any, sizes: Mapping[str, int]
) -> dict[str, Any]:
    median, macs = float(np.median(times)), kernel["macs"]
    images = kernel["args"][0]["shape"][:1] if macs else ()
    for dim in images if not isinstance(first, int) else ():
        one = evaluated(dim, lambda _: 1)
        macs = macs * evaluated(dim, lambda s: sizes.get(s, 1)) // max(1, one)
    macs *= first if isinstance(first, int) else 1
    return {
        "name": kernel["name"],
        "op": kernel["op"],
        "layers": kernel["layers"],
        "nodes": kernel.get("nodes", []),
        "min_us": _us(times.min()),
        "median_us": _us(median),
        "macs": macs,
        "macs_per_second": _rate(macs, median),
    }


def bench_text(result: Mapping[str, Any], width: int = report.WIDTH) -> str:
    """Render what `bench` returned for a terminal of `width` columns."""
    rows = [("kernel", "min us", "median us", "MMAC", "GMAC/s", "layers or nodes")]
    for kernel in result["kernels"]:
        macs = kernel["macs"]
        rows.append(
            (
                kernel["name"],
                f"{kernel['min_us']:.2f}",
                f"{kernel['median_us']:.2f}",
                f"{macs / 1e6:.2f}" if macs else "",
                f"{kernel['macs_per_second'] / 1e9:.1f}" if macs else "",
                report.computed(kernel),
            )
        )
    total = sum(kernel["median_us"] for kernel in result["kernels"])
    network = result["network"]
    lines = []
    if result["kernels"]:
        lines = report.table(rows, right=range(1, 5), width=width, wraps=(0, 5))
    totals = [
        f"network  min {network['min_us']:.2f} us, median {network['median_us']:.2f}, "
        + ", ".join(f"p{p} {network[f'p{p}_us']:.2f}" for p in PERCENTILES if p != 50)
        + f" ({report.plural(result['repeat'], 'run')}, "
        + f"{report.plural(result['threads'], 'thread')})",
        *([f"kernels  {total:.2f} us in total, each timed alone"] if result["kernels"] else []),
        f"rate     {network['items_per_second']:,.0f} items/s, "
        f"{network['macs_per_second'] / 1e9:.1f} GMAC/s (batch {network['batch']}, at the median)",
    ]
    lines += ["", *(part for line in totals for part in report.wrapped(line, width, " " * 9))]
    return "\n".join(lines).lstrip("\n")


def _us(value: float) -> float:
    return round(float(value), 3)


def _rate(macs: int, microseconds: float) -> float:
    return round(macs / (microseconds * 1e-6), 1) if microseconds else 0.0
