"""Tables of what `run.py` measured, in Markdown, as docs/benchmarks.md wants them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

Results = Sequence[dict[str, Any]]


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
