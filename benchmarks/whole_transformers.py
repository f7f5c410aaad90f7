"""Transformers of 28 layers, one thread: decoding a token with a cache, and encoding 128 tokens.

    taskset -c 1 python benchmarks/whole_transformers.py [NAME ...] [--peers PYTHON] [--json FILE]
        [--layers N] [--repeat N]

The shapes are those of a 0.6B embedding encoder (`transformer_networks.SMALL_06B`), with ternary
weights and int8 activations scaled per token. *decode* computes one token with a cache of 512, in
place and copied; its bounds are reading all weights once, and all weights and the cache, at the
rate of reading as many bytes in the same run. *decode16* is the same with a cache of float16.
*encoder* reads 128 tokens; its bound is what the linear layers take at the rate of the int8
instruction. ONNX Runtime and OpenVINO compute the same network with int8 weights, of which each
layer quantizes its data (`DynamicQuantizeLinear` and `MatMulInteger`); PyTorch in bfloat16 if the
CPU multiplies it, else in float32.

Our outputs are compared with those of ONNX Runtime on the same file, those of the peers with ours.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TVM_NUM_THREADS", "1")

import machine
import numpy as np
import onnx
import onnxruntime
import tvm_ffi
from ceilings import Quiet, of_bytes
from onnx import TensorProto, helper
from peers import Timed, add_arguments, interleave, open_peers
from tables import markdown, times, where
from transformer_networks import SMALL_06B, Shape, Transformer, bitnet
from transformers import Reading

import bnncc
from bnncc.runtime.runner import random_inputs
from bnncc.targets import catalog

PAST, ROOM, TOKENS = 512, 1024, 128
ALIKE = 0.99
"""Least correlation with a peer, which rounds activations to other integers."""

BURST = 0.1
"""Seconds per turn: what one token reads is in the last-level cache for the next, if it fits."""

CLOSE = 0.05
"""Of the largest output: a quantizer that rounds the other way changes all that follows."""

SHAPES = {
    "decode": replace(SMALL_06B, tokens=1, past="past"),
    "decode16": replace(SMALL_06B, tokens=1, past="past", cache=TensorProto.FLOAT16),
    "encoder": replace(SMALL_06B, tokens=TOKENS),
}


class Int8(Transformer):
    """The same network as int8 runtimes are given it."""

    def ternary_linear(self, x: str, depth: int, units: int) -> str:
        """Quantize the whole tensor, multiply integers, and undo the scales."""
        data, scale, zero = parts = [f"{x}_{part}_{self.count}" for part in ("q", "scale", "zero")]
        self.nodes.append(helper.make_node("DynamicQuantizeLinear", [x], parts, name=data))
        weight = self.const(self.rng.integers(-1, 2, (depth, units)).astype(np.int8))
        total = self.op("MatMulInteger", data, weight, zero)
        whole = self.op("Mul", scale, self.number((1.5 * depth) ** -0.5))
        return self.op("Mul", self.op("Cast", total, to=TensorProto.FLOAT), whole)


def network(name: str, shape: Shape, kind: type[Transformer] = Transformer) -> onnx.ModelProto:
    """Return a network of `SHAPES`."""
    return bitnet(shape, decoder=name.startswith("decode"), gate="silu", kind=kind)


class OnnxRuntime(Timed):
    """ONNX Runtime on a file, with inputs and outputs bound."""

    def __init__(self, path: Path, feeds: dict[str, np.ndarray]) -> None:
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = settings.inter_op_num_threads = 1
        session = onnxruntime.InferenceSession(
            str(path), settings, providers=["CPUExecutionProvider"]
        )
        self._binding = session.io_binding()
        for name, array in feeds.items():
            self._binding.bind_cpu_input(name, array)
        for output in session.get_outputs():
            self._binding.bind_output(output.name, "cpu")
        super().__init__(lambda: session.run_with_iobinding(self._binding))

    def out(self) -> np.ndarray:
        """Run once and return the first output."""
        self.run(1)
        made: np.ndarray = self._binding.get_outputs()[0].numpy()
        return made


def _off(made: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(made - wanted).max() / np.abs(wanted).max())


def _in_place(artifact: bnncc.Artifact, feeds: dict[str, np.ndarray]) -> tuple[Timed, np.ndarray]:
    """Return a call that appends to caches, and where its first output is."""
    session, pairs = artifact.session(), artifact.manifest["semantics"]["in_place"]
    held, out = dict(feeds), {}
    for past, present in pairs.items():
        n, heads, length, size = feeds[past].shape
        room = bnncc.aligned_empty((n, heads, ROOM, size), feeds[past].dtype.name)
        room[:, :, :length] = feeds[past]
        held[past], out[present] = room[:, :, :length], room[:, :, : length + 1]
    first = artifact.outputs[0]
    out[first.name] = bnncc.aligned_empty(feeds["x"].shape, first.dtype)
    places = [tvm_ffi.from_dlpack(out[info.name]) for info in artifact.outputs]
    tensors = session.tensors(held)
    return Timed(lambda: session.main_in_place(*tensors, *places)), out[first.name]


def _glue(artifact: bnncc.Artifact) -> float:
    """Return the part of the time of kernels, each timed alone, outside linears and attention."""
    kernels = bnncc.bench(artifact, repeat=3)["kernels"]
    main = [k["op"].startswith(("few_bit", "matmul", "fused_matmul", "softmax")) for k in kernels]
    spent = [k["min_us"] for k in kernels]
    return 1 - sum(t for t, inside in zip(spent, main, strict=True) if inside) / sum(spent)


def measured(name: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Compile, compare and time one network."""
    shape = replace(SHAPES[name], layers=args.layers)
    paths = {kind.__name__: folder / f"{name}.{kind.__name__}.onnx" for kind in (Transformer, Int8)}
    for kind in (Transformer, Int8):
        onnx.save(network(name, shape, kind), paths[kind.__name__])
    proto = onnx.load(paths["Transformer"])
    names = [[i.name for i in side] for side in (proto.graph.input, proto.graph.output)]
    pasts = [i for i in names[0] if i.startswith("past_")]
    options: dict[str, Any] = {"in_place": dict(zip(pasts, names[1][1:], strict=True))}
    options["max_dims"] = {"past": ROOM} if pasts else {}
    del proto
    artifact = bnncc.compile(paths["Transformer"], threads=1, **options)
    feeds = random_inputs(artifact.inputs, sizes={"past": PAST})
    if "position_ids" in feeds:
        feeds["position_ids"][...] = PAST
    session = artifact.session(threads=1)
    tensors = session.tensors(feeds)
    ours = {"copied" if pasts else "run": Timed(lambda: session.main(*tensors))}
    wanted = OnnxRuntime(paths["Transformer"], feeds).out()
    got = artifact.run(feeds)[artifact.outputs[0].name]
    off = _off(got, wanted)
    if pasts:
        ours["in place"], place = _in_place(artifact, feeds)
        ours["in place"].run(1)
        if (place != got).any():
            raise SystemExit(f"{name}: another result in place")
    if not off <= CLOSE:
        raise SystemExit(f"{name}: off by {off:.3g}")
    target = catalog.resolve("native")
    weights, cache = artifact.report["bytes"]["binary"], sum(feeds[past].nbytes for past in pasts)
    reading, ceiling = Reading(weights + cache, target), of_bytes(target)
    quick = {"avx512_bf16", "amx_bf16"} & {*target.features}
    float_type = "bfloat16" if quick else "float32"
    kinds = () if pasts else ("openvino-f32", f"torch-encoder-{float_type}")
    with open_peers(kinds, paths["Int8"], 1, args.peers) as found:
        peers: dict[str, Any] = {peer.kind.partition("-")[0]: peer for peer in found}
        made = {peer: one.out(feeds["x"]) for peer, one in peers.items()}
        peers["onnxruntime"] = OnnxRuntime(paths["Int8"], feeds)
        made["onnxruntime"] = peers["onnxruntime"].out()
        alike = {k: float(np.corrcoef(v.ravel(), got.ravel())[0, 1]) for k, v in made.items()}
        if min(alike.values()) < ALIKE:
            raise SystemExit(f"{name}: a peer computes something else: {alike}")
        between = (reading.measure, ceiling.measure)
        interleave([*ours.values(), *peers.values()], args.repeat, BURST, between, Quiet().wait)
        versions = {peer.kind: peer.version for peer in found}
        row = {
            "network": name, "layers": args.layers, "tokens": shape.tokens, "off": off,
            "ms": {kind: 1e3 * one.best for kind, one in ours.items()},
            "median_ms": {kind: 1e3 * one.median for kind, one in ours.items()},
            "peer_ms": {peer: 1e3 * one.best for peer, one in peers.items()},
            "peer_median_ms": {peer: 1e3 * one.median for peer, one in peers.items()},
            "peer_versions": {**versions, "onnxruntime": onnxruntime.__version__},
            "precision": {"onnxruntime": "int8", "openvino": "int8", "torch": float_type},
            "alike": alike, "gbytes": reading.best / 1e9, "gmacs": ceiling.best / 1e9,
            "weight_bytes": weights, "cache_bytes": cache,
            "linear_macs": artifact.report["summary"]["few_bit_macs"], "glue": _glue(artifact),
        }  # fmt: skip
    print(json.dumps(row), flush=True)
    return row


def _decode(row: dict) -> str:
    weights, cache = row["weight_bytes"], row["cache_bytes"]
    bounds = [count / row["gbytes"] / 1e6 for count in (weights, weights + cache)]
    peer = min(row["peer_ms"].values())
    rows = [
        [f"cache {kind}", f"{ms:.2f} ({row['median_ms'][kind]:.2f})",
         *(times(ms / bound) for bound in bounds), times(peer / ms)]
        for kind, ms in sorted(row["ms"].items(), reverse=True)
    ]  # fmt: skip
    kind = "cache of float16" if row["network"] == "decode16" else "decode"
    head = [kind, "ms", f"of reading {weights / 1e6:.0f} MB of weights",
            f"of reading these and {cache / 1e6:.0f} MB of cache", "best int8"]  # fmt: skip
    return markdown(head, rows)


def _encoder(row: dict) -> str:
    ms, bound = row["ms"]["run"], row["linear_macs"] / row["gmacs"] / 1e6
    head = ["encoder", "ms", "linears at the ceiling", "outside linears and attention",
            *(f"{peer} {row['precision'][peer]}" for peer in row["peer_ms"])]  # fmt: skip
    cells = [f"{row['tokens']} tokens", f"{ms:.1f} ({row['median_ms']['run']:.1f})",
             f"{100 * bound / ms:.0f} %", f"{100 * row['glue']:.0f} %",
             *(times(peer / ms) for peer in row["peer_ms"].values())]  # fmt: skip
    return markdown(head, [cells])


def _table(content: dict) -> str:
    parts = {"decode": _decode, "decode16": _decode, "encoder": _encoder}
    made = [parts[row["network"]](row) for row in content["networks"]]
    return "\n\n".join([*made, where(content)])


TABLES: dict[str, tuple[Callable[[dict], str], Sequence[str]]] = {
    "whole-transformers": (_table, ("whole_transformers",)),
}


def main() -> None:
    """Measure the networks; those that are not named stay as the file has them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SHAPES))
    parser.add_argument("--layers", type=int, default=SMALL_06B.layers)
    parser.add_argument("--repeat", type=int, default=12)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    made = {}
    if args.json and args.json.exists():
        made = {row["network"]: row for row in json.loads(args.json.read_text())["networks"]}
    for name in args.names or SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            made[name] = measured(name, args, Path(folder))
        if args.json:
            rows = [made[key] for key in SHAPES if key in made]
            machine.save(args.json, networks=rows, target="native")


if __name__ == "__main__":
    main()
