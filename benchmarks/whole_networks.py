"""Whole networks, one thread, batch 1: against the machine's ceilings, and against OpenVINO.

    taskset -c 1 python benchmarks/whole_networks.py [NAME ...] [--openvino PYTHON] [--json FILE]

Each network is compiled untuned, in both spellings of the sign, and checked against the NumPy
evaluation of its graph. The bound is what its multiply-accumulates take at the ceilings measured in
the same run (binary: xor + popcount + add; float: fused multiply-add), every product done directly.
ONNX Runtime runs the same file (in float: it knows no bits) in turn with ours. ``--openvino`` names
a Python that has OpenVINO; its binary path then takes its turns too, in a process of its own,
outputs compared first (see `peer_openvino.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TVM_NUM_THREADS", "1")

import numpy as np
import onnx
import onnxruntime

sys.path.insert(0, str(Path(__file__).resolve().parent))
from ceilings import Ceiling
from networks import NETWORKS

import bnncc
from bnncc.evaluate import evaluate
from bnncc.frontend.onnx import load
from bnncc.targets import host

BURST = 5


class Peer:
    """OpenVINO in its own process."""

    def __init__(self, python: str, path: Path) -> None:
        script = Path(__file__).with_name("peer_openvino.py")
        self._process = subprocess.Popen(
            [python, str(script), str(path), "1"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        self.name = self._process.stdout.readline().strip()

    def ask(self, request: str) -> str:
        """Send one request and return the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(request, file=self._process.stdin, flush=True)
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measure(name: str, folder: Path, repeats: int, python: str | None) -> dict[str, object]:
    """Compile, check and time one network."""
    sessions, tensors, seconds = {}, {}, {}
    macs: dict[str, int] = {}
    for spelling in ("where", "sign"):
        path = folder / f"{name}.{spelling}.onnx"
        onnx.save(NETWORKS[name](spelling), path)
        started = time.perf_counter()
        artifact = bnncc.compile(path)
        seconds[spelling] = time.perf_counter() - started
        summary = artifact.report["summary"]
        macs = {"binary": summary["binary_macs"], "float": summary["float_macs"]}
        shape = tuple(artifact.inputs[0].shape)
        image = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        graph = load(path)
        wanted = evaluate(graph, {"x": image})[graph.outputs[0]]
        got = next(iter(artifact.run({"x": image}).values()))
        assert np.abs(got - wanted).max() <= 1e-4 * np.abs(wanted).max(), (name, spelling)
        sessions[spelling] = artifact.session()
        tensors[spelling] = sessions[spelling].tensors({"x": image})
    peer = Peer(python, folder / f"{name}.where.onnx") if python else None
    difference = None
    if peer is not None:
        np.save(folder / "x.npy", image)
        peer.ask(f"out {folder / 'x.npy'}")
        theirs = np.load(folder / "x.npy").reshape(wanted.shape)
        difference = float(np.abs(theirs - wanted).max() / np.abs(wanted).max())
    ceilings = {"binary": Ceiling("xor+vpopcnt+add"), "float": Ceiling("f32 fma")}
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = 1
    runtime = onnxruntime.InferenceSession(str(folder / f"{name}.where.onnx"), settings)
    best = dict.fromkeys([*sessions, "peer", "onnxruntime"], float("inf"))
    for _ in range(repeats):
        for spelling, session in sessions.items():
            for _ in range(BURST):
                start = time.perf_counter()
                session.main(*tensors[spelling])
                best[spelling] = min(best[spelling], time.perf_counter() - start)
        start = time.perf_counter()
        runtime.run(None, {"x": image})
        best["onnxruntime"] = min(best["onnxruntime"], time.perf_counter() - start)
        if peer is not None:
            best["peer"] = min(best["peer"], float(peer.ask(f"run {BURST}")))
        for ceiling in ceilings.values():
            ceiling.measure()
    rates = {kind: ceiling.best for kind, ceiling in ceilings.items()}
    result: dict[str, object] = {
        "network": name,
        "macs": macs,
        "ceilings_mac_per_s": rates,
        "bound_ms": 1e3 * sum(macs[k] / rates[k] for k in macs),
        "where_ms": 1e3 * best["where"],
        "sign_ms": 1e3 * best["sign"],
        "onnxruntime_float32_ms": 1e3 * best["onnxruntime"],
        "onnxruntime": onnxruntime.__version__,
        "compile_s": seconds,
    }
    result["of_bound"] = result["where_ms"] / result["bound_ms"]  # type: ignore[operator]
    result["sign_over_where"] = best["sign"] / best["where"]
    if peer is not None:
        result.update(
            peer=peer.name, peer_ms=1e3 * best["peer"], peer_over_ours=best["peer"] / best["where"],
            peer_difference=difference,
        )  # fmt: skip
        peer.close()
    return result


def main() -> None:
    """Run the networks asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(NETWORKS))
    parser.add_argument("--openvino", metavar="PYTHON")
    parser.add_argument("--repeat", type=int, default=60)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.names:
            row = measure(name, Path(folder), args.repeat, args.openvino)
            rows.append(row)
            line = (
                f"{name:12} {row['where_ms']:7.3f} ms, {row['of_bound']:.2f} x bound "
                f"({row['bound_ms']:.3f} ms); Sign {row['sign_over_where']:.3f} x; "
                f"onnxruntime float32 {row['onnxruntime_float32_ms']:.2f} ms"
            )
            if "peer" in row:
                line += (
                    f"; {row['peer']} {row['peer_ms']:.3f} ms = {row['peer_over_ours']:.2f} x ours"
                )
            print(line, flush=True)
    if args.json:
        content = {"cpu": host.processor(), "bnncc": bnncc.__version__, "networks": rows}
        args.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
