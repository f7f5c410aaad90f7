"""One binary layer as a whole ONNX model, float NCHW in and out, against OpenVINO's binary path.

    taskset -c 1 python benchmarks/one_layer.py [--peers PYTHON] [--repeat N] [--json FILE]

The nine layers of `layers.py`: sign, +1 padding, binary convolution. Everything counts: packing,
the convolution, and writing floats in NCHW. Outputs are compared before anything is timed, then
both run in turn on one pinned core.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TVM_NUM_THREADS", "1")

import numpy as np
import onnx

sys.path.insert(0, str(Path(__file__).resolve().parent))
from layers import NINE
from networks import Builder
from peers import Peer, add_arguments
from whole_networks import BURST

import bnncc
from bnncc.targets import host


def layer(channels: int, side: int, out: int, kernel: int, stride: int) -> onnx.ModelProto:
    """Return sign, pad and convolution."""
    builder = Builder(f"{channels},{side}->{out}", channels, side)
    made = builder.binary_conv(builder.input, out, kernel, stride, pad_value=1.0)
    return builder.model(made[0])


def main() -> None:
    """Run the nine layers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--repeat", type=int, default=60)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.onnx"
        for shape in NINE:
            onnx.save(layer(*shape), path)
            artifact = bnncc.compile(path)
            channels, side = shape[:2]
            image = np.random.default_rng(0).standard_normal((1, channels, side, side))
            image = image.astype(np.float32)
            peer = Peer("openvino-binary", path, python=args.peers)
            theirs = peer.out(image)
            ours = next(iter(artifact.run({"x": image}).values()))
            np.testing.assert_array_equal(ours, theirs.reshape(ours.shape))
            session = artifact.session()
            tensors = session.tensors({"x": image})
            mine = float("inf")
            for _ in range(args.repeat):
                for _ in range(BURST):
                    start = time.perf_counter()
                    session.main(*tensors)
                    mine = min(mine, time.perf_counter() - start)
                peer.run(BURST)
            ratio = peer.best / mine
            rows.append(
                {"layer": shape, "us": 1e6 * mine, "peer_us": 1e6 * peer.best, "ratio": ratio}
            )
            print(f"{shape!s:22} {1e6 * mine:8.1f} us, {peer.name} {1e6 * peer.best:8.1f} us, "
                  f"{ratio:.2f} x", flush=True)  # fmt: skip
            peer.close()
    mean = math.exp(sum(math.log(r["ratio"]) for r in rows) / len(rows))
    print(f"geometric mean {mean:.2f} x")
    if args.json:
        content = {"cpu": host.processor(), "bnncc": bnncc.__version__, "layers": rows}
        args.json.write_text(json.dumps({**content, "geometric_mean": mean}, indent=1) + "\n")


if __name__ == "__main__":
    main()
