"""One binary layer as a whole ONNX model, float NCHW in and out, against OpenVINO's binary path.

    taskset -c 1 python benchmarks/one_layer.py [--peers PYTHON] [--repeat N] [--json FILE]
        [--target T]

The nine layers of `layers.py`: sign, +1 padding, binary convolution. Everything counts: packing,
the convolution, and writing floats in NCHW. Outputs are compared before anything is timed, then
both run in turn on one pinned core.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("TVM_NUM_THREADS", "1")

import numpy as np
import onnx

sys.path.insert(0, str(Path(__file__).resolve().parent))
import machine
from ceilings import Quiet
from layers import NINE
from networks import Builder
from peers import NotMeasured, Ours, Peer, add_arguments, interleave
from tables import both, markdown, times, where

import bnncc


def layer(channels: int, side: int, out: int, kernel: int, stride: int) -> onnx.ModelProto:
    """Return sign, pad and convolution."""
    builder = Builder(f"{channels},{side}->{out}", channels, side)
    made = builder.binary_conv(builder.input, out, kernel, stride, pad_value=1.0)
    return builder.model(made[0])


def _table(content: dict) -> str:
    rows = [
        [", ".join(map(str, row["layer"])), both(row["us"], row.get("median_us")),
         both(row["peer_us"], row.get("peer_median_us")), times(row["ratio"])]
        for row in content["layers"]
    ]  # fmt: skip
    head = ["channels, side, outputs, kernel, stride", "bnncc, us", "OpenVINO, us", "ratio"]
    return (
        f"{markdown(head, rows)}\n\nGeometric mean {content['geometric_mean']:.2f}. "
        f"{where(content)}"
    )


TABLES = {
    "one-layer": (_table, ("one_layer",)),
    "one-layer-amx": (_table, ("one_layer.x86-64-v4-amx",)),
}


def main() -> None:
    """Run the nine layers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--repeat", type=int, default=60)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--target", default="native")
    args = parser.parse_args()
    rows, quiet = [], Quiet()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.onnx"
        for shape in NINE:
            onnx.save(layer(*shape), path)
            artifact = bnncc.compile(path, target=args.target)
            channels, side = shape[:2]
            image = np.random.default_rng(0).standard_normal((1, channels, side, side))
            image = image.astype(np.float32)
            try:
                peer = Peer("openvino-binary", path, python=args.peers)
            except NotMeasured as reason:
                print(f"not measured: {reason}", file=sys.stderr)
                return
            theirs = peer.out(image)
            ours = next(iter(artifact.run({"x": image}).values()))
            np.testing.assert_array_equal(ours, theirs.reshape(ours.shape))
            mine = Ours(artifact, image)
            interleave([mine, peer], args.repeat, before=quiet.wait)
            ratio = peer.best / mine.best
            rows.append(
                {"layer": shape, "us": 1e6 * mine.best, "median_us": 1e6 * mine.median,
                 "peer_us": 1e6 * peer.best, "peer_median_us": 1e6 * peer.median, "ratio": ratio}
            )  # fmt: skip
            print(f"{shape!s:22} {1e6 * mine.best:8.1f} us, {peer.name} {1e6 * peer.best:8.1f} us, "
                  f"{ratio:.2f} x", flush=True)  # fmt: skip
            peer.close()
    mean = math.exp(sum(math.log(r["ratio"]) for r in rows) / len(rows))
    print(f"geometric mean {mean:.2f} x")
    if args.json:
        machine.save(args.json, geometric_mean=mean, layers=rows)


if __name__ == "__main__":
    main()
