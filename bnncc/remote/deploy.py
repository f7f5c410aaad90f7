"""Upload a network to a device, check its outputs, and time it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from bnncc.report import plural, with_old_keys
from bnncc.runtime.artifact import Artifact
from bnncc.runtime.runner import spread

FORMAT = 2

_SECONDS = 2.0  # of timing, if not told otherwise
_MOST_REPEATS = 200


def deploy(
    artifact: Artifact, *, threads: int | None = None, repeat: int | None = None
) -> dict[str, Any]:
    """Upload, check and time a network.

    Parameters
    ----------
    artifact : Artifact
        On a device, from `Artifact.on_device`; or here.
    threads : int, optional
        The most that kernels use.
    repeat : int, optional
        Timed runs; by default as many as take about two seconds.

    Returns
    -------
    dict
        See docs/report.md; ``passed`` tells whether it computes the outputs it was packed with.
    """
    start = time.perf_counter()
    session = artifact.session(threads=threads)
    loading = time.perf_counter() - start
    outputs = artifact.selfcheck()
    right = all(output["passed"] for output in outputs)
    tensors = session.tensors(artifact.selfchecks()[0].inputs)
    start = time.perf_counter()
    session.arrays(session.run(tensors))
    once = max(time.perf_counter() - start, 1e-6)
    result: dict[str, Any] = {
        "format": FORMAT,
        "model": artifact.manifest["model"],
        "target": artifact.manifest["target"]["name"],
        "device": {}
        if artifact.device is None
        else {"address": artifact.device.address, **artifact.device.info},
        "library_bytes": artifact.manifest["members"]["lib.so"]["bytes"],
        "loading_seconds": round(loading, 3),
        "passed": right,
        "outputs": outputs,
    }
    if right:
        count = repeat or int(min(_MOST_REPEATS, max(3, _SECONDS / once)))
        result["threads"] = artifact.threads_of(session.use_threads())
        result["repeat"] = count
        result["network"] = spread(session.time_network(tensors, count))
    return dict(with_old_keys(result))


def text(result: Mapping[str, Any]) -> str:
    """Render what `deploy` returned for a terminal."""
    device = result["device"]
    what = ", ".join(str(device[key]) for key in ("machine", "cpu") if key in device)
    lines = [
        f"device   {device.get('address', 'this machine')}" + (f" ({what})" if what else ""),
        f"network  {result['library_bytes']:,} bytes, uploaded and loaded in "
        f"{result['loading_seconds']:.2f} s",
    ]
    for output in result["outputs"]:
        said = "PASS" if output["passed"] else "FAIL"
        said += f", max abs error {output['max_abs_error']:.3g}"
        if output["passed"] and not output["compared"]:
            said = "not compared, since roundings decide all of its values"
        lines.append(
            f"output   {output['name']}: {said}"
            + (f", {output['check']} inputs" if output["check"] else "")
        )
    if "network" in result:
        network = result["network"]
        lines.append(
            f"time     min {network['min_us']:.2f} us, median {network['median_us']:.2f} us "
            f"({plural(result['repeat'], 'run')}, {plural(result['threads'], 'thread')})"
        )
    return "\n".join(lines)
