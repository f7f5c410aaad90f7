"""Flash and RAM that a network compiled to C needs, and what exceeds a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bnncc.report.rows import computed
from bnncc.report.text import WIDTH, table, wrapped


def footprint(report: Mapping[str, Any], width: int = WIDTH) -> list[str]:
    """Return the memory table of a network compiled to C, in `width` columns; else nothing."""
    device = report.get("device")
    if not device:
        return []
    rows = [("", "bytes", "")]
    for kind, parts in _PARTS.items():
        rows.append((_NAMES[kind], f"{device[f'{kind}_bytes']:,}", ""))
        rows += [(f"  {part}", f"{device[f'{part}_bytes']:,}", note) for part, note in parts]
    peak, scratch = report["memory"]["high_water_kernel"], device["scratch_kernel"]
    names = {kernel["name"]: computed(kernel) for kernel in report["kernels"]}

    def named(kernel: str) -> str:
        of = names.get(kernel, "")
        return f"{kernel} ({of})" if of else kernel

    where = [f"peak     most tensors are in use in {named(peak) or 'no kernel'}"]
    if scratch:
        where.append(f"         most scratch memory in {named(scratch)}")
    if device["stack_kernel"]:
        where.append(f"         most stack in {named(device['stack_kernel'])}")
    if soft := device["soft_floats"]:
        where.append(f"floats   at most {sum(soft.values()):,} operations in software, in")
        where += [f"         {named(kernel)}: {number:,}" for kernel, number in soft.items()]
    lines = table(rows, right=[1], width=width, wraps=[2])
    return lines + [part for line in where for part in wrapped(line, width, " " * 9)]


_NAMES = {"flash": "flash", "ram": "RAM"}
_PARTS = {
    "flash": (("kernels", "code and its tables"), ("weights", "constants")),
    "ram": (
        ("tensors", "between kernels, in the arena"),
        ("scratch", "of one kernel, in the arena"),
        ("inputs", "the caller's"),
        ("outputs", "the caller's"),
        ("stack", "of one kernel, and of the call"),
    ),
}


def beyond(report: Mapping[str, Any], **limits: int | None) -> list[str]:
    """Return how a network compiled to C exceeds the limits of a device.

    Parameters
    ----------
    report : mapping
        Of a network of C.
    **limits : int or None
        Bytes of ``flash`` and of ``ram``.

    Returns
    -------
    list of str
        Empty if it fits.
    """
    device = report["device"]
    return [
        f"{device[f'{kind}_bytes']:,} bytes of {_NAMES[kind]} are needed, and --{kind} is {limit:,}"
        for kind, limit in limits.items()
        if limit is not None and device[f"{kind}_bytes"] > limit
    ]
