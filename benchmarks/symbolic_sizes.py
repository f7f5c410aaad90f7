"""Networks with a symbolic number of rows, compared with the same networks of a fixed number.

    taskset -c 1 python benchmarks/symbolic_sizes.py [NAME ...] [--repeat N] [--json FILE]

*encoder* is one layer of an encoder in the shapes of `transformer_networks.SMALL_06B`, its number
of tokens symbolic (it computes the angles of its rotary embedding, which are constants where the
number is fixed); the other networks are one dense layer of 1,024 inputs and units, its batch
symbolic. Each size is compiled as a network of its own too. Outputs of the two are compared, then
the whole networks take turns.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("TVM_NUM_THREADS", "1")

import machine
import numpy as np
import onnx
from networks import Builder
from onnx import TensorProto, helper
from peers import Timed, interleave
from tables import both, markdown, times, where
from transformer_networks import SMALL_06B, bitnet

import bnncc
from bnncc.runtime.runner import random_inputs

ROWS = (1, 8, 100, 128)
SIDE = 1024
CLOSE = 1e-3
"""Largest difference relative to the largest output: sums of floats may differ in their order, and
a quantizer may then round the other way."""


def _dense(kind: str, rows: int | str) -> onnx.ModelProto:
    """Return one dense layer: float, of signs, or ternary with levels of 8 bits."""
    net = Builder(kind, SIDE, 1)
    weight = net.rng.standard_normal((SIDE, SIDE)).astype(np.float32)
    data = "x"
    if kind == "binary":
        data, weight = net.op("Sign", "x"), np.where(weight < 0, np.float32(-1), np.float32(1))
    if kind == "ternary":
        scaled = net.op("Round", net.op("Mul", "x", net.const(np.float32(32))))
        data = net.op("Clip", scaled, net.const(np.float32(-128)), net.const(np.float32(127)))
        weight = np.sign(weight) * (np.abs(weight) > 0.5)
    y = net.op("MatMul", data, net.const(weight.astype(np.float32)))
    ends = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [rows, SIDE])] for name in ("x", y)
    ]
    graph = helper.make_graph(net.nodes, kind, *ends, net.inits)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _encoder(kind: str, rows: int | str) -> onnx.ModelProto:
    shape = replace(SMALL_06B, layers=1, tokens=rows)
    return bitnet(shape, decoder=False, gate="silu")


NETWORKS: dict[str, Callable[[str, int | str], onnx.ModelProto]] = {
    "encoder": _encoder, "ternary": _dense, "float": _dense, "binary": _dense,
}  # fmt: skip


class _Run(Timed):
    """A compiled network on fixed inputs."""

    def __init__(self, artifact: bnncc.Artifact, given: dict[str, np.ndarray]) -> None:
        feeds = {info.name: given[info.name] for info in artifact.inputs}
        session = artifact.session(threads=1)
        tensors = session.tensors(feeds)
        super().__init__(lambda: session.main(*tensors))
        self.out = artifact.run(feeds)[artifact.outputs[0].name]


def measured(name: str, repeat: int) -> list[dict[str, object]]:
    """Compile, compare and time one network at every size."""
    make, found = NETWORKS[name], []
    symbolic = bnncc.compile(make(name, "rows"), threads=1, max_dims={"rows": max(ROWS)})
    for rows in ROWS:
        feeds = random_inputs(symbolic.inputs, sizes={"rows": rows})
        if "position_ids" in feeds:  # constants where the number of tokens is fixed
            feeds["position_ids"][...] = np.arange(rows)
        fixed = _Run(bnncc.compile(make(name, rows), threads=1), feeds)
        ours = _Run(symbolic, feeds)
        off = float(np.abs(ours.out - fixed.out).max() / np.abs(fixed.out).max())
        if not off <= CLOSE:
            raise SystemExit(f"{name}, {rows} rows: off by {off:.3g}")
        interleave([fixed, ours], repeat)
        row = {
            "network": name, "rows": rows, "off": off,
            "fixed_us": 1e6 * fixed.best, "fixed_median_us": 1e6 * fixed.median,
            "symbolic_us": 1e6 * ours.best, "symbolic_median_us": 1e6 * ours.median,
        }  # fmt: skip
        print(json.dumps(row), flush=True)
        found.append(row)
    return found


def _table(content: dict) -> str:
    head = ["network", "rows", "fixed, us", "symbolic, us", "slowdown"]
    cells = [
        [row["network"], row["rows"],
         *(both(row[f"{kind}_us"], row[f"{kind}_median_us"]) for kind in ("fixed", "symbolic")),
         times(row["symbolic_us"] / row["fixed_us"])]
        for row in content["rows"]
    ]  # fmt: skip
    return f"{markdown(head, cells)}\n\n{where(content)}"


TABLES: dict[str, tuple[Callable[[dict], str], Sequence[str]]] = {
    "symbolic-sizes": (_table, ("symbolic_sizes",)),
}


def main() -> None:
    """Measure the networks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NETWORKS))
    parser.add_argument("--repeat", type=int, default=40)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    made = [row for name in args.names or NETWORKS for row in measured(name, args.repeat)]
    if args.json:
        machine.save(args.json, rows=made, target="native")


if __name__ == "__main__":
    main()
