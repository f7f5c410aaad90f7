"""Few-bit convolutions, levels in and out, against int8 of ONNX Runtime and OpenVINO.

    taskset -c 1 python benchmarks/few_bit.py [--peers PYTHON] [--repeat N] [--json FILE]

The nine layers of `layers.py`, W-bit weights and A-bit data: levels of A bits go in, convolution
and quantization to the next A-bit levels run, levels come out, packed as our kernels keep them.
The peers get the same numbers as uint8 and give uint8, their int8 convolution with requantization
from a QDQ model: ONNX Runtime channels last, OpenVINO channels first, which each does faster.
Results are compared first, then all take turns on one core. For the other pairs of bits, our own
ways are timed on one of the layers, and the best is named.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TVM_NUM_THREADS", "1")

import numpy as np
import onnx
import tvm

sys.path.insert(0, str(Path(__file__).resolve().parent))
import machine
from layers import NINE
from peers import Contestant, add_arguments, interleave, open_peers
from tables import markdown, times, where

from bnncc import schedules
from bnncc.codegen.pipeline import tvm_target
from bnncc.frontend.onnx import load
from bnncc.recognise.binarize import binarize
from bnncc.recognise.quantizers import recognise_quantizers
from bnncc.recognise.signs import recognise_signs
from bnncc.targets import catalog
from bnncc.topi_binary.build import output_types
from bnncc.topi_binary.definitions import define
from bnncc.topi_binary.reference import read_levels
from bnncc.topi_binary.spec import FewBitConv2d
from bnncc.transform.fuse import fuse
from bnncc.transform.physical import KERNEL
from bnncc.transform.simplify import simplify

GOALS = {(1, 2): 2.5, (2, 2): 1.3, (1, 4): 1.3}
"""Weight bits and data bits, and how many times as fast as the peers planes should be."""

PAIRS = [(w, a) for w in (1, 2, 3, 4) for a in (1, 2, 3, 4, 8)]
SAMPLES = [(256, 14, 256, 3, 1)]
WAYS = ("planes", "bytes", "pairs", "floats")
NAMES = {"planes": "planes", "bytes": "int8", "pairs": "int16", "floats": "float32"}


class Problem:
    """One layer with W-bit weights and A-bit data."""

    def __init__(self, shape: Sequence[int], weight_bits: int, data_bits: int) -> None:
        self.channels, self.side, self.out, self.kernel, self.stride = shape
        self.bits = weight_bits, data_bits
        self.top = 2**data_bits - 1
        rng = np.random.default_rng(1)
        taps = (self.out, self.channels, self.kernel, self.kernel)
        half = 2 ** (weight_bits - 1)
        whole = (
            rng.integers(-half, half, taps) if weight_bits > 1 else 2 * rng.integers(0, 2, taps) - 1
        )
        self.weight = whole.astype(np.int8)
        self.levels = rng.integers(0, self.top + 1, (1, self.side, self.side, self.channels))
        depth = self.channels * self.kernel**2
        spread = math.sqrt(depth * (self.weight.astype(float) ** 2).mean() / 3) * self.top
        self.scale = np.float32(spread / max(1, self.top) * 1.618)

    @property
    def macs(self) -> int:
        side = -(-self.side // self.stride)
        return side * side * self.out * self.channels * self.kernel**2

    def _model(
        self, body: str, kind: str, constants: dict[str, Any], last: bool
    ) -> onnx.ModelProto:
        side = -(-self.side // self.stride)
        pad = self.kernel // 2
        conv = f"Conv<pads=[{pad},{pad},{pad},{pad}], strides=[{self.stride},{self.stride}]>"
        inner = f"{self.side},{self.side},{self.channels}"
        outer = f"{side},{side},{self.out}"
        if not last:
            inner, outer = f"{self.channels},{self.side},{self.side}", f"{self.out},{side},{side}"
        model = onnx.parser.parse_model(
            f'<ir_version: 9, opset_import: ["" : 19]> net ({kind}[1,{inner}] x) => '
            f"({kind}[1,{outer}] y) {{ {body.replace('CONV', conv)} }}"
        )
        for name, value in constants.items():
            model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), name))
        return model

    def peer_model(self, last: bool) -> onnx.ModelProto:
        """Return the layer as QDQ, uint8 in and out, channels last or first."""
        body = """
        d = DequantizeLinear(SOURCE, one, zero) w = DequantizeLinear<axis=0>(weight, ones, zeros)
        c = CONV(d, w) RESULT = QuantizeLinear(c, scale, zero)
        """
        body = body.replace("SOURCE", "t" if last else "x").replace("RESULT", "q" if last else "y")
        if last:
            body = f"t = Transpose<perm=[0,3,1,2]>(x) {body} y = Transpose<perm=[0,2,3,1]>(q)"
        size = np.float32(0.25)
        return self._model(
            body, "uint8",
            {
                "one": size, "zero": np.uint8(0), "weight": self.weight,
                "ones": np.full(self.out, size), "zeros": np.zeros(self.out, np.int8),
                "scale": self.scale * size * size,
            },
            last,
        )  # fmt: skip

    def our_model(self) -> onnx.ModelProto:
        """Return the layer between two quantizers, float in and out."""
        body = """
        r = Round(x) l = Clip(r, zero, top) c = CONV(l, weight)
        d = Div(c, scale) e = Clip(d, zero, top) y = Round(e)
        """
        return self._model(
            body, "float",
            {
                "zero": np.float32(0), "top": np.float32(self.top), "scale": self.scale,
                "weight": self.weight.astype(np.float32),
            },
            False,
        )  # fmt: skip


class Kernel:
    """Our kernel of a problem, one way to compute it."""

    def __init__(self, problem: Problem, way: str, target: Any) -> None:
        graph = load(problem.our_model())
        simplify(graph)
        recognise_signs(graph)
        recognise_quantizers(graph)

        def chosen(candidates: Sequence[FewBitConv2d]) -> tuple[FewBitConv2d, str]:
            return next(c for c in candidates if c.form == way), ""

        binarize(graph, chosen)
        physical = fuse(graph, target=target)
        node = next(
            n for n in physical.nodes
            if n.op == KERNEL and isinstance(n.attrs["spec"], FewBitConv2d)
        )  # fmt: skip
        spec = node.attrs["spec"]
        # The network ends here: as if the next layer read levels in the same form.
        steps = tuple(_in_form(step, way) for step in spec.steps)
        self.spec = spec = FewBitConv2d(**{**spec.__dict__, "steps": steps})
        count = spec.data_tensors
        data = _packed(problem.levels, problem.bits[1], way)
        assert len(data) == count
        arrays = [*data, *(physical.constants[i] for i in node.inputs[count:])]
        outs = [np.zeros(shape, dtype) for shape, dtype in output_types(spec)]
        func = schedules.schedule(define(spec), target)
        library = tvm.compile(tvm.IRModule({"main": func}), target=tvm_target(target)).jit()
        self._args = [tvm.runtime.tensor(np.ascontiguousarray(a)) for a in (*arrays, *outs)]
        library["main"](*self._args)
        made = [a.numpy() for a in self._args[len(arrays) :]]
        self.levels = read_levels(made, problem.out, way)
        self.best = float("inf")
        number = max(1, int(2e-3 / (problem.macs / 5e11)))
        self._timer = library.time_evaluator("main", tvm.cpu(), number=number, repeat=1)

    def run(self, times: int) -> float:
        """Run for a while and keep the least time."""
        best = min(min(self._timer(*self._args).results) for _ in range(max(1, min(times, 3))))
        self.best = min(self.best, best)
        return best


def _in_form(step: Any, way: str) -> Any:
    if step.op != "levels":
        return step
    return type(step)(**{**step.__dict__, "forms": (way,)})


def _packed(levels: np.ndarray, bits: int, way: str) -> list[np.ndarray]:
    from bnncc.topi_binary import layout

    if way == "planes":
        return [layout.pack_bits((levels >> j & 1).astype(bool)) for j in range(bits)]
    kind = {"bytes": "<u1", "pairs": "<u2", "floats": "<f4"}[way]
    size = layout.blocks(levels.shape[-1]) * layout.LANES
    wide = np.zeros((*levels.shape[:-1], size), kind)
    wide[..., : levels.shape[-1]] = levels
    return [wide.view("<f4" if way == "floats" else "<u4")]


def contest(args: argparse.Namespace, target: Any) -> list[dict]:
    """Time planes and int8 of ours against the peers, for the pairs of `GOALS`."""
    rows = []
    for pair in GOALS:
        for shape in NINE:
            problem = Problem(shape, *pair)
            ours = {way: Kernel(problem, way, target) for way in ("planes", "bytes")}
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "m.onnx"
                first = path.with_name("first.onnx")
                onnx.save(problem.peer_model(last=True), path)
                onnx.save(problem.peer_model(last=False), first)
                with (
                    open_peers(["onnxruntime-levels"], path, python=args.peers) as ort,
                    open_peers(["openvino-levels"], first, python=args.peers) as openvino,
                ):
                    peers = [*ort, *openvino]
                    given = problem.levels.astype(np.float32)
                    differ = {}
                    for peer in peers:
                        if peer in openvino:
                            theirs = peer.out(given.transpose(0, 3, 1, 2)).transpose(0, 2, 3, 1)
                        else:
                            theirs = peer.out(given)
                        theirs = np.minimum(theirs, problem.top)
                        differ[peer.kind] = int((theirs != ours["planes"].levels).sum())
                    if (ours["planes"].levels != ours["bytes"].levels).any():
                        raise SystemExit(f"{pair} {shape}: planes and bytes differ")
                    turns: list[Contestant] = [*ours.values(), *peers]
                    interleave(turns, args.repeat, burst=0.004)
                    row = {
                        "weight_bits": pair[0], "data_bits": pair[1], "layer": shape,
                        "us": {way: 1e6 * kernel.best for way, kernel in ours.items()},
                        "peer_us": {peer.kind: 1e6 * peer.best for peer in peers},
                        "peer_versions": {peer.kind: peer.version for peer in peers},
                        "differing": differ, "outputs": int(ours["planes"].levels.size),
                    }  # fmt: skip
                    rows.append(row)
                    best = min(row["peer_us"].values(), default=float("nan"))
                    print(pair, shape, {k: round(v, 1) for k, v in row["us"].items()},
                          {k: round(v, 1) for k, v in row["peer_us"].items()}, differ,
                          f"{best / row['us']['planes']:.2f} x", flush=True)  # fmt: skip
    return rows


def survey(args: argparse.Namespace, target: Any) -> list[dict]:
    """Time all ways of every pair of bits on `SAMPLES`; the geometric mean counts."""
    rows = []
    for weight_bits, data_bits in PAIRS:
        if weight_bits not in args.weights:
            continue
        made: dict[str, list[float]] = {}
        for shape in SAMPLES:
            problem = Problem(shape, weight_bits, data_bits)
            if (weight_bits, data_bits) == (1, 1):
                continue  # a binary layer
            ours = {way: Kernel(problem, way, target) for way in ("planes", "bytes")}
            interleave(list(ours.values()), max(3, args.repeat // 4), burst=0.004)
            for way, kernel in ours.items():
                made.setdefault(way, []).append(problem.macs / kernel.best / 1e12)
        rate = {way: math.prod(v) ** (1 / len(v)) for way, v in made.items()}
        rows.append({"weight_bits": weight_bits, "data_bits": data_bits, "tmacs": rate})
        print(weight_bits, data_bits, {k: round(v, 3) for k, v in rate.items()}, flush=True)
    return rows


def _contest_table(content: dict) -> str:
    rows = []
    for row in content["contest"]:
        peer = min(row["peer_us"], key=row["peer_us"].get)
        rows.append(
            [f"W{row['weight_bits']}A{row['data_bits']}", ", ".join(map(str, row["layer"])),
             f"{row['us']['planes']:.1f}", f"{row['us']['bytes']:.1f}",
             f"{row['peer_us'][peer]:.1f} ({peer.split('-')[0]})",
             times(row["peer_us"][peer] / row["us"]["planes"])]
        )  # fmt: skip
    head = ["bits", "channels, side, outputs, kernel, stride", "planes, us", "our int8, us",
            "best peer, us", "planes"]  # fmt: skip
    return f"{markdown(head, rows)}\n\n{where(content)}"


def _survey_table(content: dict) -> str:
    rows = []
    for weight_bits in (1, 2, 3, 4):
        row = [f"W{weight_bits}"]
        for data_bits in (1, 2, 3, 4, 8):
            (entry,) = (
                r for r in content["survey"]
                if (r["weight_bits"], r["data_bits"]) == (weight_bits, data_bits)
            )  # fmt: skip
            rate = entry["tmacs"]
            best = max(rate, key=rate.get, default="")
            row.append(f"{NAMES[best]} {rate[best]:.2f}" if best else "binary")
        rows.append(row)
    head = ["", *(f"A{bits}" for bits in (1, 2, 3, 4, 8))]
    return f"{markdown(head, rows)}\n\n{where(content)}"


TABLES = {
    "few-bit": (_contest_table, ("few_bit",)),
    "few-bit-pairs": (_survey_table, ("few_bit",)),
}


def main() -> None:
    """Run the contest and the survey."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--repeat", type=int, default=24)
    parser.add_argument("--only", choices=("contest", "survey"))
    parser.add_argument("--weights", type=int, nargs="*", default=[1, 2, 3, 4],
                        help="weight bits of the survey")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    target = catalog.resolve("native")
    content: dict[str, Any] = {}
    if args.json and args.json.exists():
        content = json.loads(args.json.read_text())
    for name, function in (("contest", contest), ("survey", survey)):
        if args.only in (None, name):
            kept = [r for r in content.get(name, []) if r["weight_bits"] not in args.weights]
            content[name] = (kept if name == "survey" else []) + function(args, target)
    if args.json:
        machine.save(args.json, **{**content, "target": target.name})


if __name__ == "__main__":
    main()
