"""The tables of GPUs: what a bundle of `benchmarks/cuda/build.py` measured elsewhere.

    python benchmarks/gpu.py --json FILE [--bundle RESULTS.json] [--tuned RESULTS.jsonl ...]
                             [--cases RESULTS.jsonl ...]

Takes the results that the bundle's `report.py` wrote on a machine with a GPU, those of bundles of
`tune_networks.py`, and those of `build.py --cases`, of which the last counts. Without any it leaves
FILE as it is, for there is nothing to measure here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from plots import bars

BATCHES = (1, 256)
NETWORKS = {
    "birealnet18": "Bi-Real-Net-18",
    "birealnet18_bfloat16": "the same, `--first-layer bfloat16`",
    "birealnet18_float16": "the same, `--first-layer float16 --float-type float16`",
    "reactnet18": "ReActNet-18",
    "reactnet18_float16": "the same, `--first-layer float16 --float-type float16`",
    "quicknet": "QuickNet",
    "quicknet_float16": "the same, `--first-layer float16 --float-type float16`",
    "vgg_small": "VGG-small",
    "xu_pedersoli_cifar": "CIFAR network of Hubara",
    "khan_vehicle": "vehicle network of Khan",
}
_HOW = (
    "benchmarks/cuda/build.py: medians of CUDA graphs, of several launches of a layer, one of a "
    "network (3 of PyTorch's)"
)
_ENGINES = {"strips": "`popc`", "fragments": "`mma`", "cores": "`wgmma`"}


def _markdown(*lines: tuple[object, ...]) -> str:
    head, *rows = lines
    return "\n".join(
        f"| {' | '.join(map(str, row))} |" for row in (head, ["---"] * len(head), *rows)
    )


def _peers(content: dict[str, Any], start: str, *kinds: str) -> list[float]:
    """Return the times of the peers of a layer or network, the fastest of each kind."""
    times = {r["peer"]: r["us"] for r in content["results"] if "peer" in r and "us" in r}
    return [
        min(us for name, us in times.items() if name.startswith(f"{start} ") and kind in name)
        for kind in kinds
    ]


def rates(content: dict[str, Any]) -> str:
    """Return what each mix of instructions reaches."""
    found = [r for r in content["results"] if "mix" in r]
    rows = [(r["mix"], f"{r['tmacs']:,.0f}") for r in found]
    return _markdown(("instructions", "Tmac/s"), *rows)


def layers(content: dict[str, Any]) -> str:
    """Return the binary layers by the default kernel."""
    rows = []
    timed = [r for r in content["results"] if "layer" in r and "us" in r]
    for name in dict.fromkeys(r["layer"] for r in timed):
        (r,) = (r for r in timed if r["layer"] == name and r["default"])
        _, side, channels, batch = name.split("_")
        kind, _, width = r["order"].partition("-")
        half, whole, eighth = _peers(content, r["layer"], "cudnn float16", "int8", "fp8")
        small = min(whole, eighth)
        rows.append((
            f"{channels} channels, {side}x{side}, batch {batch}",
            f"{_ENGINES.get(kind, kind)} {width}",
            f"{r['us']:.1f}", f"{r['tmacs']:,.0f}", f"{half:.1f}", f"{half / r['us']:.2f}",
            f"{small:.1f}", f"{small / r['us']:.2f}",
        ))  # fmt: skip
    head = (
        "layer", "kernel, columns", "us", "Tmac/s", "cuDNN fp16, us", "/ ours",
        "int8 or fp8 product, us", "/ ours",
    )  # fmt: skip
    return _markdown(head, *rows)


def _networks(content: dict[str, Any]) -> Iterator[tuple[str, int, float, float, float]]:
    """Yield name, batch, and the times of ours, eager and compiled, of each network."""
    ours = {r["network"]: r["us"] for r in content["results"] if "network" in r}
    for name in NETWORKS:
        for batch in BATCHES:
            peer = f"{name.removesuffix('_bfloat16').removesuffix('_float16')}_{batch}"
            eager, compiled = _peers(content, peer, "torch eager", "torch compiled")
            yield name, batch, ours[f"{name}_{batch}"], eager, compiled


def networks(content: dict[str, Any]) -> str:
    """Return the networks beside PyTorch."""
    rows = [
        (f"{NETWORKS[name]}, batch {batch}", f"{us:,.0f}", f"{eager:,.0f}", f"{eager / us:.2f}",
         f"{compiled:,.0f}", f"{compiled / us:.2f}")
        for name, batch, us, eager, compiled in _networks(content)
    ]  # fmt: skip
    head = ("network", "ours, us", "PyTorch fp16, eager, us", "/ ours", "compiled, us", "/ ours")
    return _markdown(head, *rows)


def summary(content: dict[str, Any]) -> str:
    """Return a row for each network, for the README."""
    cells: dict[str, list[str]] = {}
    for name, _, us, _, compiled in _networks(content):
        cells.setdefault(name, []).extend([f"{us:,.0f}", f"{compiled / us:.2f} x"])
    head = ("network", *(c for b in BATCHES for c in (f"batch {b}, us", "PyTorch / ours")))
    return _markdown(head, *((NETWORKS[name], *found) for name, found in cells.items()))


def plot(content: dict[str, Any]) -> str:
    """Return the same as bars."""
    ratios: dict[str, list[float | None]] = {}
    for name, _, us, _, compiled in _networks(content):
        ratios.setdefault(name, []).append(compiled / us)
    rows = [
        (NETWORKS[name].replace("`", "").replace("--first-layer float16 --float-type ", ""), found)
        for name, found in ratios.items()
    ]
    title = f"Slowdown of PyTorch in fp16 (torch.compile) relative to bnncc, {content['gpu']}"
    return bars(title, [f"batch {batch}" for batch in BATCHES], rows)


def tuned(content: dict[str, Any]) -> str:
    """Return how long the best kernel for a layer takes, of what the rule's default takes."""
    groups: dict[tuple[str, int], list[float]] = {}
    for row in content["tuned"]:
        groups.setdefault((row["spec"], row["batch"]), []).append(row["us"] / row["default_us"])
    rows = (
        (kind, batch, len(found), f"{geometric_mean(found):.3f}", f"{min(found):.3f}")
        for (kind, batch), found in sorted(groups.items())
    )
    return _markdown(("kernels", "batch", "number", "best / default", "least"), *rows)


def _searched(path: Path) -> list[dict[str, Any]]:
    """Return the best and the default kernel of each layer, of a bundle that tunes."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    layers: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        if line.get("right") and "label" in line:
            layers.setdefault(line["part"], []).append(line)
    found = []
    for trials in layers.values():
        best = min(trials, key=lambda line: line["us"])
        spec = json.loads(best["spec"])
        (default,) = (line for line in trials if line["default"])
        found.append({
            "layer": best["kernel"], "spec": spec["spec"], "batch": spec["n"],
            "best": best["label"], "us": best["us"],
            "default": default["label"], "default_us": default["us"],
        })  # fmt: skip
    return found


def cases(content: dict[str, Any]) -> str:
    """Return how many of the kernels and networks that tests run on a GPU are right."""
    groups: dict[str, list[int]] = {}
    for kind, counts in content["cases"].items():
        first, _, order = kind.partition(" ")
        engine = _ENGINES.get(order.partition("-")[0], "")
        name = {"binary": "binary", "bounds": "binary, largest sums"}.get(first, "")
        found = groups.setdefault(f"{name}, {engine}" if name else kind, [0, 0])
        found[:] = (a + b for a, b in zip(found, counts, strict=True))
    rows = ((name, right, of) for name, (right, of) in groups.items())
    return _markdown(("compared strictly", "right", "of"), *rows)


_NETWORKS = {"random": "random networks", "block": "blocks of transformers"}
"""Kinds of networks whose sums are rounded, by the beginning of their names."""


def _counted(paths: Sequence[Path]) -> dict[str, tuple[int, int]]:
    """Return how many results of each kind are right, and how many there are."""
    sys.path.insert(0, str(Path(__file__).resolve().parent / "cuda"))
    from failures import checked, kind_of

    last: dict[tuple[str, ...], dict[str, Any]] = {}
    for path in paths:
        for result in checked([json.loads(line) for line in path.read_text().splitlines()]):
            if "network" not in result:
                last["kernel", result["kernel"], str(result.get("label"))] = result
            elif result["key"] == "main":
                last["network", result["network"]] = result
    counts: dict[str, tuple[int, int]] = {}
    for result in last.values():
        kind = kind_of(result)
        if kind == "networks":
            kind = _NETWORKS.get(
                result["network"].partition("-")[0], "networks whose sums are exact"
            )
        right, of = counts.get(kind, (0, 0))
        counts[kind] = right + result["right"], of + 1
    return counts


PLOTS = {"gpu": (plot, "cuda")}

TABLES = {
    "gpu-cases": (cases, ["cuda"]),
    "gpu-tuned": (tuned, ["cuda"]),
    "gpu-rates": (rates, ["cuda"]),
    "gpu-layers": (layers, ["cuda"]),
    "gpu-networks": (networks, ["cuda"]),
    "gpu-summary": (summary, ["cuda"]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="results to write")
    parser.add_argument("--bundle", type=Path, help="what a bundle's report.py wrote")
    parser.add_argument("--tuned", type=Path, nargs="+", default=[], help="what tuning found")
    parser.add_argument("--cases", type=Path, nargs="+", default=[], help="what tests found")
    args = parser.parse_args()
    if args.bundle is None and not args.tuned and not args.cases:
        print(f"{args.json} stays: only a machine with a GPU renews it", file=sys.stderr)
        return
    content = json.loads(args.json.read_text())
    if args.bundle is not None:
        found = json.loads(args.bundle.read_text())
        (*_, last) = found["sessions"]
        content = {
            "gpu": last["device"], "torch": last["torch"], "cuda": last["cuda"],
            "date": last["session"][:10], "target": found["target"], "how": _HOW,
            "sessions": found["sessions"], "results": found["results"],
            "tuned": content.get("tuned", []), "cases": content.get("cases", {}),
        }  # fmt: skip
    if args.tuned:
        content["tuned"] = [row for path in args.tuned for row in _searched(path)]
    if args.cases:
        content["cases"] = _counted(args.cases)
    args.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
