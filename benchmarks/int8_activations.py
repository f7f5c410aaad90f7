"""Networks of one linear layer with weights of few bits, one thread: data as floats, and as int8.

    taskset -c 1 python benchmarks/int8_activations.py [--peers PYTHON] [--json FILE]

Weights are signs, ternary, or of 4 or 8 bits with a scale per output. bnncc runs the model as it
is, and with `--activations int8`; ONNX Runtime runs `MatMulNBits` with `accuracy_level` 4, which
quantizes its data to int8 by blocks. Results are compared first, those of int8 loosely. Times are
of whole runs, and include the quantizer.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TVM_NUM_THREADS", "1")

import machine
import numpy as np
import onnx
from ceilings import Quiet
from onnx import TensorProto, helper, numpy_helper
from peers import Ours, add_arguments, interleave, open_peers
from tables import markdown, times, where

import bnncc

SHAPES = [(2048, 2048), (2560, 6912)]
ROWS = (1, 16, 128)
KINDS = {"signs": (-1, 1), "ternary": (-1, 1), "4 bits": (-8, 7), "8 bits": (-127, 127)}
"""Least and greatest integer."""

PEER_BITS = {"ternary": 2, "4 bits": 4, "8 bits": 8}
BLOCK = 128
CLOSE = {"float32": 1e-5, "int8": 0.02}
"""Relative to the largest output."""


class Problem:
    """One layer: normally distributed data, and weights of a kind."""

    def __init__(self, channels: int, units: int, rows: int, kind: str) -> None:
        rng = np.random.default_rng(1)
        least, most = KINDS[kind]
        self.channels, self.units, self.rows = channels, units, rows
        self.data = rng.standard_normal((rows, channels)).astype(np.float32)
        codes = rng.integers(least, most + 1, (units, channels))
        self.codes = np.where(codes < 0, -1, 1) if kind == "signs" else codes
        self.scale = rng.uniform(0.5, 1.5, (units, 1)).astype(np.float32)
        self.weight = self.codes.astype(np.float32) * self.scale
        self.wanted = self.data.astype(np.float64) @ self.weight.T

    def model(self) -> onnx.ModelProto:
        """Return the layer with float weights."""
        node = helper.make_node("MatMul", ["x", "w"], ["y"])
        return self._net([node], [("w", np.ascontiguousarray(self.weight.T))])

    def n_bits(self, bits: int) -> onnx.ModelProto:
        """Return the layer for ONNX Runtime."""
        codes = (self.codes + (1 << (bits - 1))).astype(np.uint8)
        count, blocks = 8 // bits, self.channels // BLOCK
        moved = codes.reshape(self.units, -1, count) << (bits * np.arange(count, dtype=np.uint8))
        stored = np.bitwise_or.reduce(moved, axis=2).reshape(self.units, blocks, -1)
        node = helper.make_node(
            "MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", K=self.channels,
            N=self.units, bits=bits, block_size=BLOCK, accuracy_level=4,
        )  # fmt: skip
        return self._net([node], [("w", stored), ("s", np.repeat(self.scale, blocks))])

    def _net(self, nodes: list[Any], arrays: list[tuple[str, np.ndarray]]) -> onnx.ModelProto:
        ends = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, [self.rows, size])
            for name, size in zip("xy", (self.channels, self.units), strict=True)
        ]
        constants = [numpy_helper.from_array(value, name) for name, value in arrays]
        graph = helper.make_graph(nodes, "linear", ends[:1], ends[1:], constants)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)

    def compare(self, name: str, made: np.ndarray, close: float) -> float:
        """Return how far a result is from float64's."""
        off = float(np.abs(made - self.wanted).max() / np.abs(self.wanted).max())
        if not off <= close:
            raise SystemExit(f"{name} {self.channels}x{self.units}: off by {off:.3g}")
        return off


def measured(
    shape: tuple[int, int], rows: int, kind: str, args: argparse.Namespace
) -> dict[str, Any]:
    """Time one layer."""
    problem = Problem(*shape, rows, kind)
    ours, off = {}, {}
    for activations, close in CLOSE.items():
        artifact = bnncc.compile(
            problem.model(), target=args.target, activations=activations, threads=1, measure=False
        )
        made = artifact.run({"x": problem.data})["y"]
        off[activations] = problem.compare(activations, made, close)
        ours[activations] = Ours(artifact, problem.data)
    peer_off = peer_us = None
    with tempfile.TemporaryDirectory() as folder:
        onnx.save(problem.n_bits(PEER_BITS.get(kind, 2)), path := Path(folder) / "layer.onnx")
        kinds = ["onnxruntime-f32"] if kind in PEER_BITS else []
        with open_peers(kinds, path, python=args.peers) as peers:
            for peer in peers:
                peer_off = problem.compare(peer.name, peer.out(problem.data), CLOSE["int8"])
            interleave([*ours.values(), *peers], args.repeat, 0.006, (), Quiet().wait)
            versions = [peer.version for peer in peers]
            peer_us = 1e6 * peers[0].best if peers else None
    row = {
        "channels": shape[0], "units": shape[1], "rows": rows, "weights": kind,
        "us": {name: 1e6 * one.best for name, one in ours.items()},
        "median_us": {name: 1e6 * one.median for name, one in ours.items()}, "off": off,
        "peer_us": peer_us, "peer_off": peer_off, "peer_versions": versions,
    }  # fmt: skip
    print(json.dumps(row), flush=True)
    return row


def _table(content: dict[str, Any]) -> str:
    rows = []
    for row in content["layers"]:
        us, peer = row["us"], row["peer_us"]
        rows.append(
            [f"{row['channels']} x {row['units']}", row["weights"], row["rows"],
             f"{us['float32']:.1f}", f"{us['int8']:.1f}", times(us["float32"] / us["int8"]),
             times(peer and peer / us["int8"]), f"{row['off']['int8']:.4f}",
             "" if row["peer_off"] is None else f"{row['peer_off']:.4f}"]
        )  # fmt: skip
    head = ["layer", "weights", "rows", "float32, us", "int8, us", "float32 / int8",
            "ONNX Runtime / int8", "off", "ONNX Runtime off"]  # fmt: skip
    return f"{markdown(head, rows)}\n\n{where(content)}"


TABLES: dict[str, tuple[Callable[[dict], str], Sequence[str]]] = {
    "int8-activations": (_table, ("int8_activations",)),
}


def main() -> None:
    """Time all layers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--repeat", type=int, default=16)
    parser.add_argument("--target", default="native")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    layers = []
    for shape in SHAPES:
        for kind in KINDS:
            for rows in ROWS:
                layers.append(measured(shape, rows, kind, args))
                if args.json:
                    machine.save(args.json, layers=layers, target=args.target)


if __name__ == "__main__":
    main()
