"""Linear layers of binary and ternary transformers, one thread, beside int8 and compressed weights.

    taskset -c 1 python benchmarks/transformers.py [--peers PYTHON] [--shapes KxN ...] [--json FILE]

Rows of uint8 levels meet ternary weights, which we keep in 2 bits; float32 accumulators come out.
The shapes are those of BitNet-2B4T and of a 0.6B embedding encoder. Peers get the same numbers: as
integers (MatMulInteger of ONNX Runtime, int8 of OpenVINO), or as floats beside weights compressed
to 8, 4 or 2 bits, whose activations they round on their own. Outputs are compared first. Ceilings
are those of the run: the int8 instruction on registers, and reading as many bytes as the weights
have, again and again or, *cold*, so many of them that no cache holds them.
"""

from __future__ import annotations

import argparse
import json
import math
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
from ceilings import Quiet, of_bytes
from onnx import TensorProto, helper, numpy_helper
from peers import Contestant, add_arguments, interleave, open_peers, timed
from tables import markdown, times, where
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from bnncc import schedules
from bnncc.codegen.pipeline import tvm_target
from bnncc.targets import catalog
from bnncc.topi_binary import few_bit_data
from bnncc.topi_binary.build import output_types
from bnncc.topi_binary.definitions import define
from bnncc.topi_binary.spec import FewBitConv2d
from bnncc.topi_binary.step import Step

SHAPES = [
    (2048, 2048),
    (2560, 2560), (2560, 640), (2560, 6912), (6912, 2560),
    (1024, 2048), (1024, 1024), (1024, 3072), (3072, 1024),
]  # fmt: skip
"""Channels and units: the goal's, those of BitNet-2B4T, and those of the encoder."""

ROWS = (1, 16, 128, 512)
BITS = 2
COLD_BYTES = 2**27
"""Of weights that are read one after another where none should be in a cache."""

BLOCK = 128
"""Weights that share a scale, where peers want such."""

CLOSE = 0.02
"""Relative to the largest output: how far peers may be off that round activations."""

GOAL_SHAPE = (2048, 2048)


class Problem:
    """One layer: uint8 levels and ternary weights."""

    def __init__(self, channels: int, units: int, rows: int) -> None:
        rng = np.random.default_rng(1)
        self.channels, self.units, self.rows = channels, units, rows
        self.levels = rng.integers(0, 256, (rows, channels)).astype(np.uint8)
        self.weight = rng.integers(-1, 2, (units, channels)).astype(np.int8)
        whole = self.levels.astype(np.float32) @ self.weight.T.astype(np.float32)
        self.wanted = np.rint(whole)  # below 2**24: exact

    @property
    def macs(self) -> int:
        return self.channels * self.units * self.rows

    def model(self, kind: str) -> onnx.ModelProto:
        """Return the layer for a peer: a key of `MODELS`."""
        source, nodes, constants, sink = MODELS[kind](self)
        shapes = ([self.rows, self.channels], [self.rows, self.units])
        ends = [
            helper.make_tensor_value_info(name, type_, shape)
            for name, type_, shape in zip("xy", (source, sink), shapes, strict=True)
        ]
        graph = helper.make_graph(nodes, "linear", ends[:1], ends[1:], constants)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)


Parts = tuple[int, list[Any], list[Any], int]


def _integer(problem: Problem) -> Parts:
    weight = numpy_helper.from_array(np.ascontiguousarray(problem.weight.T), "w")
    nodes = [helper.make_node("MatMulInteger", ["x", "w"], ["y"])]
    return TensorProto.UINT8, nodes, [weight], TensorProto.INT32


def _static(problem: Problem) -> Parts:
    constants = [
        numpy_helper.from_array(np.ascontiguousarray(problem.weight.T), "w"),
        numpy_helper.from_array(np.float32(1), "one"),
        numpy_helper.from_array(np.uint8(0), "zero"),
        numpy_helper.from_array(np.ones(problem.units, np.float32), "ones"),
    ]
    nodes = [
        helper.make_node("DequantizeLinear", ["x", "one", "zero"], ["d"]),
        helper.make_node("DequantizeLinear", ["w", "ones"], ["v"], axis=1),
        helper.make_node("MatMul", ["d", "v"], ["y"]),
    ]
    return TensorProto.UINT8, nodes, constants, TensorProto.FLOAT


def _compressed(bits: int) -> Callable[[Problem], Parts]:
    def parts(problem: Problem) -> Parts:
        kind = {4: TensorProto.INT4, 8: TensorProto.INT8}[bits]
        shape = (problem.channels, problem.units)
        raw = problem.weight.T.reshape(-1)
        if bits == 4:
            raw = (raw[::2] & 15) | ((raw[1::2] & 15) << 4)
        weight = helper.make_tensor("w", kind, shape, raw.astype(np.int8).tobytes(), raw=True)
        scale = np.ones((problem.channels // BLOCK, problem.units), np.float32)
        nodes = [
            helper.make_node("DequantizeLinear", ["w", "s"], ["v"], axis=0, block_size=BLOCK),
            helper.make_node("MatMul", ["x", "v"], ["y"]),
        ]
        constants = [weight, numpy_helper.from_array(scale, "s")]
        return TensorProto.FLOAT, nodes, constants, TensorProto.FLOAT

    return parts


def _n_bits(bits: int) -> Callable[[Problem], Parts]:
    def parts(problem: Problem) -> Parts:
        codes = (problem.weight + 2 ** (bits - 1)).astype(np.uint8)
        count, blocks = 8 // bits, problem.channels // BLOCK
        moved = codes.reshape(problem.units, -1, count) << (bits * np.arange(count, dtype=np.uint8))
        stored = np.bitwise_or.reduce(moved, axis=2).reshape(problem.units, blocks, -1)
        scale = np.ones(problem.units * blocks, np.float32)
        node = helper.make_node(
            "MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", K=problem.channels,
            N=problem.units, bits=bits, block_size=BLOCK, accuracy_level=4,
        )  # fmt: skip
        constants = [numpy_helper.from_array(stored, "w"), numpy_helper.from_array(scale, "s")]
        return TensorProto.FLOAT, [node], constants, TensorProto.FLOAT

    return parts


def _floats(problem: Problem) -> Parts:
    weight = numpy_helper.from_array(problem.weight.T.astype(np.float32), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    return TensorProto.FLOAT, nodes, [weight], TensorProto.FLOAT


MODELS: dict[str, Callable[[Problem], Parts]] = {
    "integer": _integer, "static": _static, "weights-8": _compressed(8),
    "weights-4": _compressed(4), "bits-4": _n_bits(4), "bits-2": _n_bits(2), "floats": _floats,
}  # fmt: skip

PEERS = {
    "ONNX Runtime int8": ("onnxruntime-levels", "integer", 8),
    "OpenVINO int8": ("openvino-levels", "static", 8),
    "OpenVINO int8 weights": ("openvino-f32", "weights-8", 8),
    "OpenVINO int4 weights": ("openvino-f32", "weights-4", 4),
    "ONNX Runtime 4 bits": ("onnxruntime-f32", "bits-4", 4),
    "ONNX Runtime 2 bits": ("onnxruntime-f32", "bits-2", 2),
    "torch bfloat16": ("torch-bfloat16", "floats", 16),
}
"""By name: kind of `peer_worker.py`, model, and bits of a weight."""


class Kernel:
    """Our kernel of a layer, with weights packed or as bytes."""

    def __init__(self, problem: Problem, method: str, target: Any) -> None:
        spec = FewBitConv2d(
            problem.rows, 1, 1, problem.channels, problem.units, (1, 1), data_bits=8,
            weight_bits=BITS, method=method, steps=(Step("store"),), rank=2,
        )  # fmt: skip
        weight = few_bit_data.pack_weight(problem.weight[:, None, None].astype(np.int64), spec)
        self.bytes = weight.nbytes
        func = schedules.schedule(define(spec), target)
        library = tvm.compile(tvm.IRModule({"main": func}), target=tvm_target(target)).jit()
        out = np.zeros(*output_types(spec)[0])
        self._data, self._weight, self._out = map(
            tvm.runtime.tensor, (problem.levels.view("<u4"), weight, out)
        )
        self._main = library["main"]
        self._main(self._data, self._weight, self._out)
        if (self._out.numpy() != problem.wanted).any():
            raise SystemExit(f"{method} {spec.channels}x{spec.out_channels}: wrong")
        self.best = self.cold = float("inf")
        self._timer = library.time_evaluator("main", tvm.cpu(), number=1, repeat=1)
        self._copies = [tvm.runtime.tensor(weight) for _ in range(-(-COLD_BYTES // weight.nbytes))]

    def run(self, times: int) -> float:
        """Run for a while and keep the least time."""
        args = self._data, self._weight, self._out
        best = min(min(self._timer(*args).results) for _ in range(max(1, times)))
        self.best = min(self.best, best)
        return best

    def run_cold(self) -> None:
        """Go through copies of the weights once."""
        everything = timed(lambda: [self._main(self._data, w, self._out) for w in self._copies], 1)
        self.cold = min(self.cold, everything[0] / len(self._copies))


class Reading:
    """How fast memory is read: `size` bytes again and again, in vectors of 64."""

    VECTORS = 8

    def __init__(self, size: int, target: Any) -> None:
        step = 16 * self.VECTORS
        self.size, count = size // (4 * step) * 4 * step, size // (4 * step)
        with IRBuilder() as builder:
            with T.prim_func(s_tir=True):
                T.func_name("main")
                data = T.arg("data", T.buffer((count * step,), "int32"))
                out = T.arg("out", T.buffer((step,), "int32"))
                with T.sblock("root"):
                    held = T.sblock_alloc_buffer((step,), "int32", scope="local")
                    lanes = [T.Ramp(16 * i, 1, 16) for i in range(self.VECTORS)]
                    for lane in lanes:
                        T.buffer_store(held, T.Broadcast(T.int32(0), 16), [lane])
                    with T.serial(count) as i:
                        for number, lane in enumerate(lanes):
                            read = data[T.Ramp(i * step + 16 * number, 1, 16)]
                            T.buffer_store(held, held[lane] + read, [lane])
                    for lane in lanes:
                        T.buffer_store(out, held[lane], [lane])
            func = builder.get()
        library = tvm.compile(tvm.IRModule({"main": func}), target=tvm_target(target)).jit()
        arrays = np.ones(count * step, np.int32), np.zeros(step, np.int32)
        self._args = [tvm.runtime.tensor(a) for a in arrays]
        self._timer = library.time_evaluator("main", tvm.cpu(), number=1, repeat=3)
        self.best = 0.0

    def measure(self) -> None:
        """Read everything a few times and keep the best rate, in bytes per second."""
        self.best = max(self.best, self.size / min(self._timer(*self._args).results))


def _compare(name: str, made: np.ndarray, problem: Problem) -> float:
    """Return how far a peer is off; stop if it computes something else."""
    off = float(np.abs(made - problem.wanted).max() / np.abs(problem.wanted).max())
    if not off <= CLOSE:
        raise SystemExit(f"{name} {problem.channels}x{problem.units}: off by {off:.3g}")
    return off


def measured(shape: tuple[int, int], rows: int, args: argparse.Namespace, target: Any) -> dict:
    """Time one layer."""
    problem = Problem(*shape, rows)
    ours = {method: Kernel(problem, method, target) for method in ("packed", "bytes")}
    reading = Reading(ours["packed"].bytes, target)
    cold, ceiling = Reading(COLD_BYTES, target), of_bytes(target)
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, Any] = {}
        off = {}
        for name, (kind, model, _) in PEERS.items():
            path = Path(folder) / f"{model}.onnx"
            onnx.save(problem.model(model), path)
            opened = open_peers([kind], path, python=args.peers)
            for peer in opened.__enter__():
                found[name] = opened, peer
                off[name] = _compare(name, peer.out(problem.levels.astype(np.float32)), problem)
        turns: list[Contestant] = [*ours.values(), *(peer for _, peer in found.values())]
        interleave(turns, args.repeat, 0.006, (ceiling.measure, reading.measure), Quiet().wait)
        for _ in range(3 if rows == min(ROWS) else 0):
            cold.measure()
            ours["packed"].run_cold()
        row = {
            "channels": shape[0], "units": shape[1], "rows": rows, "weight_bits": BITS,
            "weight_bytes": ours["packed"].bytes,
            "us": {method: 1e6 * kernel.best for method, kernel in ours.items()},
            "peer_us": {name: 1e6 * peer.best for name, (_, peer) in found.items()},
            "peer_versions": {name: peer.version for name, (_, peer) in found.items()},
            "off": off, "gmacs": ceiling.best / 1e9, "gbytes": reading.best / 1e9,
        }  # fmt: skip
        if math.isfinite(ours["packed"].cold):
            row |= {"cold_us": 1e6 * ours["packed"].cold, "cold_gbytes": cold.best / 1e9}
        for opened, _ in found.values():
            opened.__exit__(None, None, None)
    print(json.dumps({k: row[k] for k in row if k not in ("peer_versions", "off")}), flush=True)
    return row


def _share(row: dict) -> float:
    """Return which part of the lower of both ceilings a layer reaches."""
    macs = row["channels"] * row["units"] * row["rows"]
    least = max(macs / row["gmacs"], row["weight_bytes"] / row["gbytes"]) * 1e-3
    return least / row["us"]["packed"]


def _cold(row: dict) -> str:
    """Return how fast weights are read that no cache holds, of how fast memory is."""
    if "cold_us" not in row:
        return ""
    return f"{row['weight_bytes'] / row['cold_us'] / 1e3:.1f} of {row['cold_gbytes']:.1f}"


def _table(content: dict) -> str:
    rows = []
    for row in content["linears"]:
        took = row["us"]["packed"]
        macs = row["channels"] * row["units"] * row["rows"]

        def beside(low: int, high: int, row: dict = row, took: float = took) -> str:
            inside = [us for n, us in row["peer_us"].items() if low <= PEERS[n][2] <= high]
            return times(min(inside) / took if inside else None)

        rows.append(
            [f"{row['channels']} x {row['units']}", row["rows"], f"{took:.1f}",
             f"{macs / took / 1e3:.0f}", f"{100 * _share(row):.0f} %", _cold(row),
             beside(8, 8), beside(1, 4), beside(16, 16)]
        )  # fmt: skip
    head = ["layer", "rows", "us", "Gmac/s", "of the ceiling", "cold, GB/s", "best int8",
            "best of 2 or 4 bits", "torch bfloat16"]  # fmt: skip
    return f"{markdown(head, rows)}\n\n{where(content)}"


TABLES: dict[str, tuple[Callable[[dict], str], Sequence[str]]] = {
    "transformer-linears": (_table, ("transformers",)),
}


def main() -> None:
    """Time the layers; those that are not named stay as the file has them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--repeat", type=int, default=24)
    parser.add_argument("--shapes", nargs="*", metavar="KxN", help="layers, by default all")
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    chosen = args.shapes or [f"{channels}x{units}" for channels, units in SHAPES]
    target = catalog.resolve("native")
    made: dict[tuple[int, ...], dict] = {}
    if args.json and args.json.exists():
        kept = json.loads(args.json.read_text()).get("linears", [])
        made = {(row["channels"], row["units"], row["rows"]): row for row in kept}
    for shape in SHAPES:
        for rows in args.rows if "x".join(map(str, shape)) in chosen else ():
            made[(*shape, rows)] = measured(shape, rows, args, target)
            order = sorted(made, key=lambda key: (SHAPES.index(key[:2]), key[2]))
            if args.json:
                linears = [made[key] for key in order]
                machine.save(args.json, linears=linears, target=target.name)


if __name__ == "__main__":
    main()
