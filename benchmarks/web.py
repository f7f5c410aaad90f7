"""Time networks in WebAssembly, in Node, beside ONNX Runtime Web: outputs first, then in turns.

ONNX Runtime Web runs the same binary network, and the ordinary network of its shape in float32 and
in int8; all on one thread, with SIMD. It is taken from a folder of npm's:

    npm install --prefix peers onnxruntime-web
    python benchmarks/web.py quicknet --modules peers/node_modules --json web.json

Node compiles WebAssembly in threads of its own, which have to get their share of the core: with the
real-time policy FIFO they wait, and the network runs in slow code that the first of its compilers
made, ONNX Runtime Web more so than bnncc.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

import machine
import numpy as np
import onnx
import peer_worker
from networks import NETWORKS
from tables import markdown, where

import bnncc
from bnncc.driver import compile_c
from bnncc.options import CompileOptions

HERE = Path(__file__).resolve().parent
TARGETS = ("wasm32-simd128", "wasm32")
CORRELATION = 0.9
"""Of int8 with float32, at least."""


def measure(name: str, folder: Path, modules: Path, repeat: int) -> dict[str, object]:
    """Compile, check and time one network."""
    paths = {kind: folder / f"{name}.{kind}.onnx" for kind in ("where", "float")}
    for spelling, path in paths.items():
        onnx.save(NETWORKS[name](spelling), path)
    theirs = {
        "binary": paths["where"],
        "float32": paths["float"],
        "int8": peer_worker.quantized(paths["float"]),
    }
    info = onnx.load(paths["where"]).graph.input[0]
    shape = [d.dim_value for d in info.type.tensor_type.shape.dim]
    image = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    image.tofile(folder / "image.bin")
    (wanted,) = bnncc.compile(paths["where"], threads=1).run({info.name: image}).values()
    ours, sizes = {}, {}
    for target in TARGETS:
        network = compile_c(paths["where"], CompileOptions(target=target), form="wasm")
        network.save(folder / target)
        (module,) = (n for n in network.files if n.endswith(".mjs") and n != "check.mjs")
        ours[target] = str(folder / target / module)
        sizes[target] = network.report["bytes"]
    settings = {
        "ours": ours, "theirs": {k: str(p) for k, p in theirs.items()},
        "image": str(folder / "image.bin"),
        "shape": shape, "repeat": repeat, "folder": str(folder), "modules": str(modules.resolve()),
    }  # fmt: skip
    (folder / "settings.json").write_text(json.dumps(settings))
    done = subprocess.run(
        ["node", HERE / "web.mjs", folder / "settings.json"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    made = {k: np.fromfile(folder / f"{k}.out", np.float32) for k in found["seconds"]}
    differences = {k: _difference(made[k], wanted) for k in (*TARGETS, "binary")}
    if max(differences[k] for k in TARGETS) > 1e-4:
        raise SystemExit(f"{name}: outputs differ: {differences}")
    alike = float(np.corrcoef(made["int8"], made["float32"])[0, 1])
    if alike < CORRELATION:
        raise SystemExit(f"{name}: int8 is not float32: {alike}")
    rows = {
        k: {"best_ms": 1000 * min(s), "median_ms": 1000 * statistics.median(s)}
        for k, s in found.pop("seconds").items()
    }
    best = min(rows[k]["best_ms"] for k in theirs)
    return {
        "name": name, **found, "rounds": repeat, "networks": rows, "bytes": sizes,
        "differences": differences, "int8_correlation": alike,
        "faster_than_best": best / rows[TARGETS[0]]["best_ms"],
    }  # fmt: skip


def _difference(got: np.ndarray, wanted: np.ndarray) -> float:
    """Return the largest difference, where numbers above 1 count relatively."""
    wanted = wanted.reshape(-1)
    return float(np.max(np.abs(got - wanted) / (1 + np.abs(wanted)), initial=0))


_NAMES = {
    "wasm32-simd128": "bnncc, `wasm32-simd128`",
    "wasm32": "bnncc, `wasm32`",
    "binary": "ONNX Runtime Web, the same network",
    "float32": "ONNX Runtime Web, the ordinary one",
    "int8": "ONNX Runtime Web, the ordinary one in int8",
}


def _table(content: dict) -> str:
    rows = [
        (row["name"], _NAMES[kind], f"{took['best_ms']:.1f} ({took['median_ms']:.1f})")
        for row in content["networks"]
        for kind, took in row["networks"].items()
    ]
    return f"{markdown(('network', 'by', 'ms'), rows)}\n\n{where(content)}"


TABLES = {"web": (_table, ("web",))}


def main() -> None:
    """Run the networks asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=["quicknet"])
    modules = HERE.parent / "node_modules"
    parser.add_argument("--modules", type=Path, default=modules, help="npm's node_modules")
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    rows = []
    for name in args.names:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(name, Path(folder), args.modules, args.repeat))
        row = rows[-1]
        line = ", ".join(f"{k} {v['best_ms']:.1f} ms" for k, v in row["networks"].items())
        print(f"{name}: {line}; {row['faster_than_best']:.1f} x", flush=True)
    if args.json:
        machine.save(args.json, networks=rows)


if __name__ == "__main__":
    main()
