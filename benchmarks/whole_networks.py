"""Whole networks, one thread, batch 1, float in and out: against every peer, and the ceilings.

    taskset -c 1 python benchmarks/whole_networks.py [NAME ...] [--json FILE] [--repeat N]
        [--target T] [--against GROUP ...] [--bfloat16]

Each network is compiled untuned, in both spellings of the sign, and checked against the NumPy
evaluation of its graph; `filtered-2d` is a third column, with ``--float-conv filtered-2d``. The
bound is what its multiply-accumulates take at the ceilings measured in the same run (binary: xor +
popcount + add; float: fused multiply-add), every product done directly.

OpenVINO's binary path and Larq Compute Engine run the same network, float32 and int8 peers the
ordinary network of the same shape, with ReLU for every sign (`networks.py`). Outputs are compared
before anything is timed; then all take turns (`peers.py`, `make peers`).

With ``--target x86-64-v2`` or ``x86-64-v3``, OpenVINO is limited to the same instruction set
(``ONEDNN_MAX_CPU_ISA``) and is the only peer: others have no such limit.

``--bfloat16`` adds ``--float-precision bfloat16``, compared with OpenVINO's binary path in its
default precision, which is bfloat16 on processors with AMX, and with int8.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TVM_NUM_THREADS", "1")

import numpy as np
import onnx

sys.path.insert(0, str(Path(__file__).resolve().parent))
import machine
from ceilings import Ceiling, Quiet, ceiling_of, of_floats
from networks import NETWORKS
from peers import Ours, Peer, add_arguments, interleave, open_peers
from plots import bars
from tables import both, markdown, times, where

import bnncc
from bnncc.frontend.onnx import load
from bnncc.ir.evaluate import evaluate
from bnncc.targets import catalog

GROUPS = {
    "openvino": ("openvino-binary",),
    "lce": ("lce-indirect", "lce-reference", "lce"),
    "float32": ("openvino-f32", "onnxruntime-f32", "torch", "torch-compile", "tflite"),
    "int8": ("openvino-int8", "onnxruntime-int8"),
    "openvino-default": ("openvino-binary-default",),
}
"""Peers by what they are compared as; the fastest of a group counts."""

LIMITS = {"x86-64-v2": "SSE41", "x86-64-v3": "AVX2"}
"""What oneDNN calls the instruction set of a target."""

TOLERANCE = 1e-4  # of the largest output
IMAGES = 8
# Float glue that rounds in other places flips a few signs; int8 rounds everything.
# The same network in bfloat16 turns so many signs that outputs of random weights have little in
# common; in float32, it has been compared as "openvino".
CORRELATION = {"openvino": 0.99, "lce": 0.9, "int8": 0.9, "openvino-default": -1}
ROUNDED = "openvino-default", "int8"
"""Groups that the network with ``--float-precision bfloat16`` is compared with."""


def _expect(path: Path, image: np.ndarray) -> np.ndarray:
    graph = load(path)
    return evaluate(graph, {graph.inputs[0]: image})[graph.outputs[0]]


def _difference(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(got.reshape(wanted.shape) - wanted).max() / np.abs(wanted).max())


def _image(
    name: str, path: Path, shape: list[int], artifacts: dict[str, bnncc.Artifact]
) -> tuple[np.ndarray, np.ndarray]:
    """Return an image on which ours compute what NumPy does, and the result.

    The last bit of a float layer can turn a sign over, and a deep network with random weights makes
    much of it: about half of all images do so in ReActNet-A. A wrong kernel fails on every image.
    """
    for seed in range(IMAGES):
        image = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
        wanted = _expect(path, image)
        got = {v: next(iter(a.run({"x": image}).values())) for v, a in artifacts.items()}
        same = all(_difference(got[v], wanted) <= TOLERANCE for v in ("where", "sign"))
        if same and _alike(got["filtered-2d"], wanted, 0.9):
            return image, wanted
    raise RuntimeError(f"{name}: wrong on each of {IMAGES} images")


def _alike(got: np.ndarray, wanted: np.ndarray, least: float) -> bool:
    return bool(np.corrcoef(got.ravel(), wanted.ravel())[0, 1] >= least)


def _check(peer: Peer, group: str, image: np.ndarray, wanted: np.ndarray) -> float:
    """Compare a peer's output; raise if it computes something else."""
    got = peer.out(image)
    difference = _difference(got, wanted)
    if group in CORRELATION:
        same = _alike(got, wanted, CORRELATION[group])
    else:
        same = difference <= TOLERANCE
    if not same:
        raise RuntimeError(f"{peer.kind} computes something else: {difference:.2g} apart")
    return difference


def measure(name: str, folder: Path, args: argparse.Namespace) -> dict[str, object]:
    """Compile, check and time one network."""
    paths = {s: folder / f"{name}.{s}.onnx" for s in ("where", "sign", "float")}
    for spelling, path in paths.items():
        onnx.save(NETWORKS[name](spelling), path)
    info = onnx.load(paths["where"]).graph.input[0].type.tensor_type.shape
    shape = [d.dim_value for d in info.dim]
    variants = {
        "where": (paths["where"], "filtered"),
        "sign": (paths["sign"], "filtered"),
        "filtered-2d": (paths["where"], "filtered-2d"),
    }
    if args.bfloat16:
        variants["bfloat16"] = paths["where"], "filtered"
    artifacts, compile_seconds = {}, {}
    for variant, (path, float_conv) in variants.items():
        started = time.perf_counter()
        artifacts[variant] = bnncc.compile(
            path, target=args.target, float_conv=float_conv, untuned=True,
            float_precision="bfloat16" if variant == "bfloat16" else "float32",
        )  # fmt: skip
        compile_seconds[variant] = time.perf_counter() - started
    image, expected = _image(name, paths["where"], shape, artifacts)
    wanted = {"where": expected, "float": _expect(paths["float"], image)}
    ours = {variant: Ours(artifact, image) for variant, artifact in artifacts.items()}
    summary = artifacts["where"].report["summary"]
    macs = {kind: summary[f"{kind}_macs"] for kind in ("binary", "float")}
    mix = ceiling_of(catalog.resolve(args.target))
    ceilings = {"binary": Ceiling(mix), "float": of_floats()}
    peers = {
        group: [k for k in kinds if args.target not in LIMITS or k.startswith("openvino")]
        for group, kinds in GROUPS.items()
        if group in args.against and (args.bfloat16 or group != "openvino-default")
    }
    same = [k for group in ("openvino", "lce", "openvino-default") for k in peers.get(group, [])]
    ordinary = [kind for group in ("float32", "int8") for kind in peers.get(group, [])]
    with (
        open_peers(same, paths["where"], 1, args.peers, args.lce) as binary,
        open_peers(ordinary, paths["float"], 1, args.peers, args.lce) as floats,
    ):
        found = {peer.kind: peer for peer in (*binary, *floats)}
        differences = {
            kind: _check(found[kind], group, image, wanted["where" if kind in same else "float"])
            for group, kinds in GROUPS.items()
            for kind in kinds
            if kind in found
        }
        between, quiet = [ceiling.measure for ceiling in ceilings.values()], Quiet()
        interleave([*ours.values(), *found.values()], 3, between=between)
        # Ratios are to the fastest of a group: those far behind need no more turns.
        leaders = {g: min((found[k].best for k in ks if k in found), default=0.0)
                   for g, ks in GROUPS.items()}  # fmt: skip
        contestants = [
            found[kind]
            for group, kinds in GROUPS.items()
            for kind in kinds
            if kind in found and found[kind].best < 1.5 * leaders[group]
        ]
        interleave([*ours.values(), *contestants], args.repeat, between=between, before=quiet.wait)
    rates = {kind: ceiling.best for kind, ceiling in ceilings.items()}
    bound = sum(macs[kind] / rates[kind] for kind in macs)
    best = ours["where"].best
    ratios = {}
    for group, kinds in GROUPS.items():
        times = [found[kind].best for kind in kinds if kind in found]
        ratios[group] = min(times) / best if times else None
        if times and args.bfloat16 and group in ROUNDED:
            ratios[f"{group}, bfloat16"] = min(times) / ours["bfloat16"].best
    return {
        "network": name,
        "macs": macs,
        "ceilings_mac_per_s": rates,
        "bound_ms": 1e3 * bound,
        "ms": {variant: 1e3 * one.best for variant, one in ours.items()},
        "median_ms": 1e3 * ours["where"].median,
        "of_bound": best / bound,
        "compile_s": compile_seconds,
        "peers": {
            kind: {"version": f"{p.name} {p.version}", "ms": 1e3 * p.best,
                   "median_ms": 1e3 * p.median, "difference": differences[kind]}
            for kind, p in found.items()
        },
        "ratios": ratios,
    }  # fmt: skip


def _line(row: dict) -> str:
    ratios = ", ".join(f"{g} {r:.2f} x" if r else f"{g} -" for g, r in row["ratios"].items())
    ms = row["ms"]
    return (
        f"{row['network']:14} {ms['where']:7.3f} ms = {row['of_bound']:.2f} x bound; "
        f"Sign {ms['sign']:.3f}, filtered-2d {ms['filtered-2d']:.3f} ms; peers: {ratios}"
    )


TITLES = {
    "birealnet18": "Bi-Real-Net-18",
    "quicknet": "QuickNet",
    "vgg_small": "VGG-small",
    "alexnet": "binary AlexNet",
    "reactnet18": "ReActNet-18",
    "reactnet_a": "ReActNet-A",
    "cifar": "CIFAR network of Hubara",
    "vehicle": "vehicle network of Khan",
}


def _ratios(content: dict) -> str:
    """Return the table of the README: ours, and the fastest peer of each group over it."""
    groups = ("openvino", "int8", "float32", "lce")
    head = ["network", "bnncc, ms", "OpenVINO, binary", "best int8", "best float32", "Larq"]
    rows = [
        [TITLES[row["network"]], both(row["ms"]["where"], row.get("median_ms"), 2),
         *(times(row["ratios"][group]) for group in groups)]
        for row in content["networks"]
    ]  # fmt: skip
    return markdown(head, rows) + "\n\n" + where(content)


def _plot(content: dict) -> str:
    """Return the same as bars."""
    groups = {"openvino": "OpenVINO, binary", "int8": "best int8", "float32": "best float32",
              "lce": "Larq"}  # fmt: skip
    measured = [g for g in groups if any(row["ratios"][g] for row in content["networks"])]
    return bars(
        f"Slowdown relative to bnncc, one thread, {content['cpu']}",
        [groups[group] for group in measured],
        [
            (TITLES[row["network"]], [row["ratios"][group] for group in measured])
            for row in content["networks"]
        ],
    )


def _details(content: dict) -> str:
    """Return what the README has no room for."""
    head = [
        "network",
        "binary, float Mmac",
        "bnncc, ms",
        "of bound",
        "`Sign`, ms",
        "`filtered-2d`, ms",
    ]
    head += ["OpenVINO over `filtered-2d`"]
    rows = []
    for row in content["networks"]:
        ms, macs = row["ms"], row["macs"]
        two = row["ratios"]["openvino"]
        rows.append(
            [TITLES[row["network"]], f"{macs['binary'] / 1e6:.0f}, {macs['float'] / 1e6:.0f}",
             f"{ms['where']:.3f}", f"{row['of_bound']:.2f} x", f"{ms['sign']:.3f}",
             f"{ms['filtered-2d']:.3f}",
             times(two and two * ms["where"] / ms["filtered-2d"])]
        )  # fmt: skip
    return markdown(head, rows)


def _limited(content: dict) -> str:
    """Return ours for AVX2 beside OpenVINO limited to it."""
    head = ["network", "bnncc, ms", "OpenVINO, binary", "OpenVINO, int8"]
    rows = [
        [TITLES[row["network"]], both(row["ms"]["where"], row["median_ms"], 2),
         *(times(row["ratios"][group]) for group in ("openvino", "int8"))]
        for row in content["networks"]
    ]  # fmt: skip
    return markdown(head, rows) + "\n\n" + where(content)


def _on_tiles(content: dict) -> str:
    """Return ours on AMX, in float32 and in bfloat16, beside OpenVINO."""
    head = ["network", "float32, ms", "OpenVINO, binary, float32", "OpenVINO, int8",
            "bfloat16, ms", "OpenVINO, binary, default", "OpenVINO, int8"]  # fmt: skip
    rows = []
    for row in content["networks"]:
        ms, ratios = row["ms"], row["ratios"]
        rows.append(
            [TITLES[row["network"]], f"{ms['where']:.2f}", times(ratios["openvino"]),
             times(ratios["int8"]), f"{ms['bfloat16']:.2f}",
             times(ratios["openvino-default, bfloat16"]), times(ratios["int8, bfloat16"])]
        )  # fmt: skip
    return markdown(head, rows) + "\n\n" + where(content)


def _every_peer(content: dict) -> str:
    """Return every peer's milliseconds."""
    kinds = [kind for group in GROUPS.values() for kind in group]
    rows = [
        [TITLES[row["network"]],
         *(f"{row['peers'][k]['ms']:.2f}" if k in row["peers"] else "-" for k in kinds)]
        for row in content["networks"]
    ]  # fmt: skip
    versions = sorted({p["version"] for row in content["networks"] for p in row["peers"].values()})
    return markdown(["network", *(f"`{kind}`" for kind in kinds)], rows) + (
        f"\n\nMilliseconds; {', '.join(versions)}."
    )


PLOTS = {"networks": (_plot, "networks")}

TABLES = {
    "networks": (_ratios, ("networks",)),
    "networks-details": (_details, ("networks",)),
    "networks-peers": (_every_peer, ("networks",)),
    "networks-avx2": (_limited, ("networks.x86-64-v3",)),
    "networks-amx": (_on_tiles, ("networks.x86-64-v4-amx",)),
}


def main() -> None:
    """Run the networks asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(NETWORKS))
    parser.add_argument("--repeat", type=int, default=60)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--folder", type=Path, help="keep the networks and what peers make of them")
    add_arguments(parser)
    parser.add_argument("--target", default="native")
    parser.add_argument("--against", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--bfloat16", action="store_true", help="floats in bfloat16, too")
    args = parser.parse_args()
    if args.target in LIMITS:
        os.environ["ONEDNN_MAX_CPU_ISA"] = LIMITS[args.target]
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(exist_ok=True)
        for name in args.names:
            rows.append(measure(name, folder, args))
            print(_line(rows[-1]), flush=True)
    if args.json:
        machine.save(args.json, networks=rows)


if __name__ == "__main__":
    main()
