"""Tables of what ran from a bundle, in Markdown, as docs/benchmarks.md wants them.

    python report.py RESULTS.jsonl

Prints them, and writes what they show to RESULTS.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Results = Sequence[dict[str, Any]]


def plain(lines: Results) -> list[dict[str, Any]]:
    """Return what the lines of a file of results say of layers, networks, rates and peers."""
    latest = {}
    for line in lines:
        name = line.get("key", line.get("mix", line.get("peer")))
        if name is not None:
            latest[line["part"], name] = line
    found = []
    for line in latest.values():
        kept = {k: line[k] for k in ("right", "us", "graph", "error", "mix", "tmacs") if k in line}
        if "label" in line:
            kept |= {"order": json.loads(line["spec"])["weight_order"], "default": line["default"]}
            if "us" in line:
                kept["tmacs"] = round(line["macs"] / line["us"] / 1e6, 2)
            found.append({"layer": line["kernel"], "kernel": line["label"], **kept})
        elif line.get("key") == "main":
            found.append({"network": line["network"], **kept})
        elif "key" in line:
            found.append({"of": line.get("network", line["part"]), "kernel": line["key"], **kept})
        else:
            found.append({"peer": line["peer"], **kept} if "peer" in line else kept)
    return found


def tables(results: Results) -> str:
    """Return all tables that `results` have numbers for."""
    made = (_rates(results), _layers(results), _networks(results))
    return "\n\n".join("\n".join(lines) for lines in map(list, made) if len(lines) > 2)


def _row(*cells: object) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def _head(*names: str) -> Iterator[str]:
    yield _row(*names)
    yield _row(*["---"] * len(names))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.3g}"


def _ratio(peer: float | None, ours: float) -> str:
    return "" if peer is None else f"{peer / ours:.2f}"


def _peer(results: Results, start: str, *kinds: str) -> float | None:
    """Return the shortest time of the peers of a layer or network of these kinds."""
    times = [
        r["us"]
        for r in results
        if "us" in r and r.get("peer", "").startswith(f"{start} ")
        if any(kind in r["peer"] for kind in kinds)
    ]
    return min(times, default=None)


def _rates(results: Results) -> Iterator[str]:
    yield from _head("instructions", "Tmac/s")
    for result in results:
        if "mix" in result:
            yield _row(result["mix"], _number(result["tmacs"]))


def _layers(results: Results) -> Iterator[str]:
    yield from _head(
        "layer", "kernel", "us", "Tmac/s", "cuDNN fp16, us", "/ ours",
        "int8 or fp8 product, us", "/ ours",
    )  # fmt: skip
    timed = [r for r in results if "layer" in r and "us" in r]
    for name in dict.fromkeys(r["layer"] for r in timed):
        best = min((r for r in timed if r["layer"] == name), key=lambda r: r["us"])
        half, small = (_peer(results, name, *k) for k in (("cudnn float16",), ("int8", "fp8")))
        yield _row(
            name, best["kernel"], _number(best["us"]), _number(best["tmacs"]),
            _number(half), _ratio(half, best["us"]), _number(small), _ratio(small, best["us"]),
        )  # fmt: skip


def _networks(results: Results) -> Iterator[str]:
    yield from _head("network", "us", "PyTorch fp16, us", "/ ours", "ResNet-18 fp16, us", "/ ours")
    for result in results:
        if "network" not in result or "us" not in result:
            continue
        name, us = result["network"], result["us"]
        same = _peer(results, name, "torch")
        resnet = None
        if name.startswith("birealnet18"):
            resnet = _peer(results, name.replace("birealnet18", "resnet18"), "torch")
        yield _row(name, _number(us), _number(same), _ratio(same, us), _number(resnet),
                   _ratio(resnet, us))  # fmt: skip


def main() -> None:
    path = Path(sys.argv[1])
    head, *lines = map(json.loads, path.read_text().splitlines())
    results = plain(lines)
    sessions = [line for line in lines if "session" in line]
    content = {**head, "sessions": sessions, "results": results}
    path.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    print(tables(results))


if __name__ == "__main__":
    main()
