"""Write the times of `bench` as a trace for Perfetto and Chrome's tracing page.

The format is Chrome's Trace Event Format: an object whose ``traceEvents`` are complete events
(``ph`` is ``X``, ``ts`` and ``dur`` in microseconds) and metadata events (``ph`` is ``M``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bnncc.report.rows import computed

_NETWORK, _KERNELS = 0, 1
"""`_NETWORK`, `_KERNELS`: threads of the trace, each a track."""


def trace(bench: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trace with an event for each kernel, one after the other, beside the network.

    Parameters
    ----------
    bench : mapping
        From `bnncc.runtime.runner.bench`: medians, each kernel timed alone.
    """
    named = (("process_name", _NETWORK, f"{bench['model']} for {bench['target']}"),
             ("thread_name", _NETWORK, "network"),
             ("thread_name", _KERNELS, "kernels, each timed alone"))  # fmt: skip
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": name, "pid": 0, "tid": track, "args": {"name": said}}
        for name, track, said in named
    ]
    events.append(_event(bench["model"], "network", _NETWORK, 0.0, bench["network"]))
    start = 0.0
    for kernel in bench["kernels"]:
        name = computed(kernel) or kernel["name"]
        events.append(_event(name, kernel["op"], _KERNELS, start, kernel))
        start = round(start + kernel["median_us"], 3)
    about = {key: str(bench[key]) for key in ("model", "target", "cpu", "threads", "repeat")}
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": about}


def _event(
    name: str, category: str, track: int, start: float, timed: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X", "name": name, "cat": category, "pid": 0, "tid": track, "ts": start,
        "dur": timed["median_us"], "args": {k: v for k, v in timed.items() if k != "layers"},
    }  # fmt: skip
