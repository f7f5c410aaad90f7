"""Join the kernels of a report with their layers and times, for text, page and trace."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bnncc.errors import UsageError
from bnncc.report.facts import KINDS

_CALL = re.compile(r"\.\d+/.*$")
"""What names of nodes inside of an ONNX function add to that of the node that calls it."""

OTHER = "other"
"""The kind of a kernel that computes no layer of the file."""


@dataclass(frozen=True)
class Row:
    """One kernel call, or a layer that is part of none."""

    kernel: Mapping[str, Any]
    """As in the report; empty for a layer without a kernel of its own."""
    layers: tuple[Mapping[str, Any], ...]
    """The layers that it computes, as in the report."""
    us: float | None
    """Microseconds, measured or estimated; None if unknown."""
    share: float | None
    """Share of the time of all kernels."""

    @property
    def name(self) -> str:
        """Name to show: those of its layers, or of its first node."""
        if self.layers:
            return ", ".join(layer["name"] for layer in self.layers)
        return computed(self.kernel) or str(self.kernel["name"])

    @property
    def kind(self) -> str:
        """``binary``, ``few_bit``, ``float`` or ``other``; of several, the last in this order."""
        kinds = {layer["kind"] for layer in self.layers}
        return next((kind for kind in reversed(KINDS) if kind in kinds), OTHER)


def computed(kernel: Mapping[str, Any]) -> str:
    """Return the layers that a kernel computes, else its first node, and how many more."""
    if kernel["layers"]:
        return ", ".join(kernel["layers"])
    first, *others = kernel.get("nodes") or [""]  # which old artifacts lack
    return f"{first} +{len(others)}" if others else str(first)


def by_reason(
    report: Mapping[str, Any],
) -> dict[tuple[str, str, str], list[Mapping[str, Any]]]:
    """Return layers by kind, reason and remedy: not binary, or binary by assumption."""
    found: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for layer in report["layers"]:
        why = layer["reason"] or layer["assumed"]
        if why or layer["kind"] != "binary":
            found.setdefault((layer["kind"], why, layer["remedy"]), []).append(layer)
    return found


def rows(report: Mapping[str, Any], bench: Mapping[str, Any] | None = None) -> list[Row]:
    """Return a row for each kernel in call order, then one for each layer without a kernel.

    Parameters
    ----------
    report : mapping
        From `report.build`.
    bench : mapping, optional
        From ``bnncc bench --json`` of the same network: its medians replace the estimates.
    """
    times = _measured(report, bench) if bench is not None else _estimated(report)
    total = sum(us for us in times if us is not None)
    layers = {layer["name"]: layer for layer in report["layers"]}
    made = []
    for kernel, us in zip(report["kernels"], times, strict=True):
        found = tuple(layers.pop(name) for name in kernel["layers"] if name in layers)
        share = us / total if us is not None and total else None
        made.append(Row(kernel, found, us, share))
    return made + [Row({}, (layer,), None, None) for layer in layers.values()]


def verdicts(
    report: Mapping[str, Any], bench: Mapping[str, Any] | None = None
) -> dict[str, dict[str, str]]:
    """Return the verdict on each layer and node by name, and on all others under ``""``."""
    note = "in no kernel: folded, merged with an equal node, unused or a view"
    made = {"": {"kind": OTHER, "note": note}}
    kernels: dict[str, dict[str, None]] = {}
    for row in rows(report, bench):
        for name in row.kernel.get("nodes", ()):
            for of in (name, _CALL.sub("", name)):
                kernels.setdefault(of, {})[row.kernel["name"]] = None
        for layer in row.layers:
            said = {
                "kind": layer["kind"],
                "bits": "x".join(map(str, layer["bits"])),
                "reason": layer["reason"] or layer["assumed"],
                "remedy": layer["remedy"],
                "kernel": layer["kernel"],
                "kernel_us": "" if row.us is None else f"{row.us:.2f}",
                "multiply_adds": str(layer["macs"]),
            }
            made[layer["name"]] = {key: value for key, value in said.items() if value}
    others = {name: {"kind": OTHER, "kernel": ", ".join(of)} for name, of in kernels.items()}
    return {**others, **made}


def _estimated(report: Mapping[str, Any]) -> list[float | None]:
    return [kernel.get("estimated_us") for kernel in report["kernels"]]


def _measured(report: Mapping[str, Any], bench: Mapping[str, Any]) -> list[float | None]:
    try:
        found = {str(k["name"]): float(k["median_us"]) for k in bench["kernels"]}
        _ = float(bench["network"]["median_us"]), bench["cpu"], +bench["threads"], +bench["repeat"]
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError("the bench figures are not what `bnncc bench --json` prints") from error
    names = [kernel["name"] for kernel in report["kernels"]]
    if set(found) != set(names):
        odd = sorted(set(found) ^ set(names))[0]
        raise UsageError(
            f"the bench figures are of another network: kernel `{odd}` is in only one of them",
            hint="give the figures of an artifact compiled with the same options, or explain the "
            "artifact itself",
        )
    return [found[name] for name in names]
