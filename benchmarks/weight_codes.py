"""Linear layers of real-valued data and weights of 1, 2 and 4 bits, one thread, beside floats.

    taskset -c 1 python benchmarks/weight_codes.py [--peers PYTHON] [--json FILE]

Weights are signs, ternary, or of 4 bits with a scale for each block of 32. All are multiplied as
floats: by us with codes (`topi_binary/weight_codes.py`) and with float weights, by peers with float
weights or with their own codes of 4 and 2 bits. Outputs are compared first. *Cold* is the time of
layers whose weights no cache holds, as in a large network.
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
import tvm
from ceilings import Quiet
from onnx import TensorProto, helper, numpy_helper
from peers import Contestant, add_arguments, interleave, open_peers, timed
from tables import markdown, times, where

from bnncc import schedules
from bnncc.codegen import memory
from bnncc.codegen.pipeline import tvm_target
from bnncc.targets import catalog
from bnncc.topi_binary import layout
from bnncc.topi_binary.build import output_types
from bnncc.topi_binary.definitions import define
from bnncc.topi_binary.spec import Conv2d
from bnncc.topi_binary.step import Step
from bnncc.topi_binary.weight_codes import Codes

SHAPES = [(2048, 2048), (2560, 6912)]
ROWS = (1, 4, 16, 128)
KINDS = {"signs": (1, 0), "ternary": (2, 0), "4 bits": (4, 32)}
"""Bits of a code, and weights of a block (0: all of an output)."""

COLD_BYTES = 2**27
CLOSE = 1e-5
"""Relative to the largest output."""

PEERS = {
    "ONNX Runtime float32": ("onnxruntime-f32", 32),
    "OpenVINO float32": ("openvino-f32", 32),
    "ONNX Runtime 4 bits": ("onnxruntime-f32", 4),
    "ONNX Runtime 2 bits": ("onnxruntime-f32", 2),
}
"""By name: kind of `peer_worker.py`, and bits of a weight."""


class Problem:
    """One layer: normally distributed data, and weights of a kind."""

    def __init__(self, channels: int, units: int, rows: int, kind: str) -> None:
        rng = np.random.default_rng(1)
        self.bits, block = KINDS[kind]
        self.channels, self.units, self.rows = channels, units, rows
        self.block = block or channels
        self.data = rng.standard_normal((rows, channels)).astype(np.float32)
        shape = (units, channels // self.block)
        most = 3 if kind == "ternary" else 1 << self.bits
        self.least = 0 if self.bits == 1 else -(most // 2)
        self.codes = rng.integers(self.least, self.least + most, (units, channels)).astype("i2")
        self.scale = rng.uniform(0.5, 1.5, shape).astype(np.float32)
        numbers = self.scale[..., None] * np.float32([1] if self.least else [-1, 1])
        held = Codes(self.codes, numbers, self.bits)
        self.packed, self.weight = held.packed(), held.values
        self.wanted = self.data.astype(np.float64) @ self.weight.T

    def model(self, bits: int) -> onnx.ModelProto | None:
        """Return the layer for a peer, with weights of `bits`; None if it cannot be written."""
        if bits == 32:
            weight = np.ascontiguousarray(self.weight.T)
            nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
            constants = [numpy_helper.from_array(weight, "w")]
        elif bits < self.bits or not self.least:
            return None
        else:
            nodes, constants = self._n_bits(bits)
        ends = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, [self.rows, size])
            for name, size in zip("xy", (self.channels, self.units), strict=True)
        ]
        graph = helper.make_graph(nodes, "linear", ends[:1], ends[1:], constants)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)

    def _n_bits(self, bits: int) -> tuple[list[Any], list[Any]]:
        codes = (self.codes + (1 << (bits - 1))).astype(np.uint8)
        block = min(self.block, 128)
        count, blocks = 8 // bits, self.channels // block
        moved = codes.reshape(self.units, -1, count) << (bits * np.arange(count, dtype=np.uint8))
        stored = np.bitwise_or.reduce(moved, axis=2).reshape(self.units, blocks, -1)
        scale = np.repeat(self.scale, blocks // self.scale.shape[1], axis=1).reshape(-1)
        node = helper.make_node(
            "MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", K=self.channels,
            N=self.units, bits=bits, block_size=block, accuracy_level=1,
        )  # fmt: skip
        return [node], [numpy_helper.from_array(stored, "w"), numpy_helper.from_array(scale, "s")]


class Kernel:
    """Our kernel of a layer, with codes or with floats."""

    def __init__(self, problem: Problem, target: Any, coded: bool) -> None:
        spec = Conv2d(
            problem.rows, 1, 1, problem.channels, problem.units, (1, 1), steps=(Step("store"),),
            rank=2, code_bits=problem.bits * coded, code_block=problem.block * coded,
        )  # fmt: skip
        rows = problem.weight[:, None, None]
        weights = problem.packed if coded else (layout.pack_float_weight(rows),)
        self.bytes = sum(array.nbytes for array in weights)
        func = schedules.schedule(define(spec), target)
        with memory.lowering():
            library = tvm.compile(
                tvm.IRModule({"main": func}), target=tvm_target(target),
                tir_pipeline=memory.PIPELINE,
            ).jit()  # fmt: skip
        self._out = tvm.runtime.tensor(np.zeros(*output_types(spec)[0]))
        self._main = library["main"]
        self._copies = [
            [tvm.runtime.tensor(array) for array in (problem.data, *weights)] + [self._out]
            for _ in range(-(-COLD_BYTES // self.bytes))
        ]
        self._main(*self._copies[0])
        _compare("bnncc", self._out.numpy(), problem)
        self.best = self.cold = float("inf")
        self._timer = library.time_evaluator("main", tvm.cpu(), number=1, repeat=1)

    def run(self, times: int) -> float:
        """Run for a while and keep the least time."""
        args = self._copies[0]
        best = min(min(self._timer(*args).results) for _ in range(max(1, times)))
        self.best = min(self.best, best)
        return best

    def run_cold(self) -> None:
        """Go through copies of the weights once."""
        everything = timed(lambda: [self._main(*args) for args in self._copies], 1)
        self.cold = min(self.cold, everything[0] / len(self._copies))


def _compare(name: str, made: np.ndarray, problem: Problem) -> None:
    off = float(np.abs(made - problem.wanted).max() / np.abs(problem.wanted).max())
    if not off <= CLOSE:
        raise SystemExit(f"{name} {problem.channels}x{problem.units}: off by {off:.3g}")


def measured(
    shape: tuple[int, int], rows: int, kind: str, args: argparse.Namespace, target: Any
) -> dict[str, Any]:
    """Time one layer."""
    problem = Problem(*shape, rows, kind)
    ours = {name: Kernel(problem, target, name == "codes") for name in ("codes", "floats")}
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, Any] = {}
        for name, (peer_kind, bits) in PEERS.items():
            model = problem.model(bits)
            if model is None:
                continue
            onnx.save(model, path := Path(folder) / f"{bits}.onnx")
            opened = open_peers([peer_kind], path, python=args.peers)
            for peer in opened.__enter__():
                found[name] = opened, peer
                _compare(name, peer.out(problem.data), problem)
        turns: list[Contestant] = [*ours.values(), *(peer for _, peer in found.values())]
        interleave(turns, args.repeat, 0.006, (), Quiet().wait)
        for _ in range(5):
            for kernel in ours.values():
                kernel.run_cold()
        row = {
            "channels": shape[0], "units": shape[1], "rows": rows, "weights": kind,
            "bytes": {name: kernel.bytes for name, kernel in ours.items()},
            "us": {name: 1e6 * kernel.best for name, kernel in ours.items()},
            "cold_us": {name: 1e6 * kernel.cold for name, kernel in ours.items()},
            "peer_us": {name: 1e6 * peer.best for name, (_, peer) in found.items()},
            "peer_versions": {name: peer.version for name, (_, peer) in found.items()},
        }  # fmt: skip
        for opened, _ in found.values():
            opened.__exit__(None, None, None)
    print(json.dumps({k: row[k] for k in row if k != "peer_versions"}), flush=True)
    return row


def _table(content: dict[str, Any]) -> str:
    rows = []
    for row in content["layers"]:
        us, cold, peers = row["us"]["codes"], row["cold_us"], row["peer_us"]

        def beside(low: int, high: int, us: float = us, peers: dict = peers) -> str:
            inside = [t for n, t in peers.items() if low <= PEERS[n][1] <= high]
            return times(min(inside) / us if inside else None)

        rows.append(
            [f"{row['channels']} x {row['units']}", row["weights"], row["rows"],
             f"{row['bytes']['codes'] / row['bytes']['floats']:.3f}", f"{us:.1f}",
             times(row["us"]["floats"] / us), times(cold["floats"] / cold["codes"]),
             beside(32, 32), beside(1, 4)]
        )  # fmt: skip
    head = ["layer", "weights", "rows", "bytes / float", "us", "bnncc float32", "the same, cold",
            "best float32", "best of 2 or 4 bits"]  # fmt: skip
    return f"{markdown(head, rows)}\n\n{where(content)}"


TABLES: dict[str, tuple[Callable[[dict], str], Sequence[str]]] = {
    "weight-codes": (_table, ("weight_codes",)),
}


def main() -> None:
    """Time all layers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--repeat", type=int, default=16)
    parser.add_argument("--target", default="native")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    target = catalog.resolve(args.target)
    layers = []
    for shape in SHAPES:
        for kind in KINDS:
            for rows in ROWS:
                layers.append(measured(shape, rows, kind, args, target))
                if args.json:
                    machine.save(args.json, layers=layers, target=target.name)


if __name__ == "__main__":
    main()
