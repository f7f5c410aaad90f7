"""BitStream (2019): the layers of its Table 2 (Fig. 4 and 6), networks (Fig. 5).

    python benchmarks/bitstream.py [layers] [networks] [--json FILE]

Workload: eight binary convolutions at batch 1 in their setting inside a network, packed in and
packed out: convolution, BatchNorm and sign as threshold, 2x2 max-pool; then VGG-16, AlexNet and
ResNet-18 at 224x224 and the VGG of CIFAR-10, first and last layer float, float NCHW in and out.

Time: the convolution's kernel beside the float32 convolution of ONNX Runtime and OpenVINO (the
same layer, float NCHW in and out) and beside im2col + sgemm (NumPy's OpenBLAS), the float baseline
of the paper. On a Cortex-A72 the paper reports at least 30 times Caffe's float on five of the
layers, more than 10 on all but the sixth, and about 10 on whole networks.

Memory of the same layers (Fig. 6): `memory.py`, which takes `block` and the formulas from here.
"""

from __future__ import annotations

from math import prod
from typing import Any

from contest import markdown_of, measure, parser, show, write  # first: sets threads
from layers import NINE
from networks import Builder, alexnet
from paper_networks import resnet18, vgg16, vgg_cifar
from peers import Timed

import numpy as np  # isort: skip

LAYERS = NINE[:8]
"""Table 2: channels, side, outputs, kernel, stride."""

PAPER_LAYER = ("> 10",) * 5 + ("< 10",) + ("> 10",) * 2
PAPER_NETWORK = "10"
"""Fig. 4 and 5: float over BitStream, Cortex-A72. Which five layers pass 30 is not in its text."""

NETS = {
    "VGG-16": vgg16,
    "AlexNet": alexnet,
    "ResNet-18": resnet18,
    "VGG-CIFAR": vgg_cifar,
}
FLOATS = ("onnxruntime-f32", "openvino-f32")
FLOAT_BYTES = 4


def traditional_bytes(channels: int, side: int, kernel: int) -> float:
    """Return Eq. 16."""
    return channels * side**2 * (2.25 * FLOAT_BYTES + (FLOAT_BYTES + 1 / 8) * kernel**2)


def bitstream_bytes(channels: int, side: int, kernel: int) -> float:
    """Return Eq. 17."""
    return channels * side**2 * (kernel**2 / 8 + 9 / 32 + FLOAT_BYTES)


def block(shape: tuple[int, ...]):
    """Return a layer between two others that are there only to be in a network."""
    channels, side, out, kernel, stride = shape
    b = Builder(f"{channels},{side}->{out}", channels, side)
    x = b.norm(b.binary_conv(b.input, out, kernel, stride), channels * kernel**2)
    x = b.max_pool(x, 2, 2, same=False)
    return b.model(b.binary_conv(x, 32, 1)[0])


def float_layer(shape: tuple[int, ...]):
    """Return the convolution alone."""
    channels, side, out, kernel, stride = shape
    b = Builder("float", channels, side)
    return b.model(b.conv(b.input, out, kernel, stride)[0])


def im2col_sgemm(shape: tuple[int, ...]) -> Timed:
    """Return im2col and a product of matrices, in float32."""
    channels, side, out, kernel, stride = shape
    rng = np.random.default_rng(0)
    pad = kernel // 2
    image = np.pad(
        rng.standard_normal((channels, side, side), dtype=np.float32), ((0, 0), *[(pad, pad)] * 2)
    )
    windows = np.lib.stride_tricks.sliding_window_view(image, (kernel, kernel), (1, 2))
    windows = windows[:, ::stride, ::stride].transpose(0, 3, 4, 1, 2)
    columns = np.empty(windows.shape, np.float32)
    weight = rng.standard_normal((out, channels * kernel**2), dtype=np.float32)
    result = np.empty((out, prod(windows.shape[3:])), np.float32)

    def run() -> None:
        np.copyto(columns, windows)
        np.dot(weight, columns.reshape(weight.shape[1], -1), out=result)

    return Timed(run)


def layer_row(shape: tuple[int, ...], paper: str, args) -> dict[str, Any]:
    """Measure one layer."""
    channels, side, out, kernel, stride = shape
    name = f"{channels},{side} -> {out},{kernel}x{kernel}" + (f",s{stride}" if stride > 1 else "")
    result = measure(
        f"bitstream {channels}-{side}-{out}", block(shape), args, twin=float_layer(shape),
        floats=FLOATS, others={"im2col": im2col_sgemm(shape)},
    )  # fmt: skip
    ours = result.kernel_of(0)
    row: dict[str, Any] = {"workload": name, "kernel_us": 1e6 * ours}
    row["im2col_us"] = 1e6 * result.seconds["im2col"]
    row["im2col_ratio"] = result.seconds["im2col"] / ours
    for kind in FLOATS:
        if kind in result.seconds:
            row[f"{kind}_us"] = 1e6 * result.seconds[kind]
    if (fastest := result.fastest(*FLOATS)) is not None:
        row["ratio"] = fastest / ours
    row["paper_ratio"] = paper
    return row


def network_row(name: str, args) -> dict[str, Any]:
    """Measure one network."""
    make = NETS[name]
    result = measure(
        f"bitstream {name}", make("where"), args, twin=make("float"), floats=FLOATS, kernels=False
    )
    report = result.artifact.report
    row: dict[str, Any] = {"workload": name, "ours_ms": 1e3 * result.seconds["ours"]}
    for kind in FLOATS:
        if kind in result.seconds:
            row[f"{kind}_ms"] = 1e3 * result.seconds[kind]
    if (fastest := result.fastest(*FLOATS)) is not None:
        row["ratio"] = fastest / result.seconds["ours"]
    row["paper_ratio"] = PAPER_NETWORK
    parameters = sum(prod(layer["weight_shape"]) for layer in report["layers"])
    row |= {
        "activation_bytes": report["memory"]["arena_bytes"],
        "parameter_bytes": report["bytes"]["binary"] + report["bytes"]["float"],
        "float_parameter_bytes": FLOAT_BYTES * parameters,
    }
    return row


def main() -> None:
    """Measure the layers and the networks."""
    args = parser(__doc__, ("layers", "networks")).parse_args()
    results: dict[str, Any] = {"paper": "BitStream (2019), Fig. 4-6"}
    if "layers" in args.parts:
        rows = [layer_row(*pair, args) for pair in zip(LAYERS, PAPER_LAYER, strict=True)]
        results["layers"] = rows
        show(rows, LAYER_COLUMNS)
    if "networks" in args.parts:
        results["networks"] = [network_row(name, args) for name in NETS]
        show(results["networks"], NETWORK_COLUMNS)
    write(args, results)


LAYER_COLUMNS = {
    "workload": "layer",
    "kernel_us": "ours, packed, us",
    **{f"{kind}_us": f"`{kind}`, us" for kind in FLOATS},
    "im2col_us": "im2col + sgemm, us",
    "ratio": "fastest float / ours",
    "im2col_ratio": "im2col + sgemm / ours",
    "paper_ratio": "paper",
}
NETWORK_COLUMNS = {
    "workload": "network",
    "ours_ms": "ours, ms",
    **{f"{kind}_ms": f"`{kind}`, ms" for kind in FLOATS},
    "ratio": "fastest float / ours",
    "paper_ratio": "paper",
    "activation_bytes": "activations, bytes",
    "parameter_bytes": "parameters, bytes",
    "float_parameter_bytes": "float32 parameters",
}

TABLES = {
    "bitstream": (lambda content: markdown_of(content, "layers", LAYER_COLUMNS), ("bitstream",)),
    "bitstream-networks": (
        lambda content: markdown_of(content, "networks", NETWORK_COLUMNS),
        ("bitstream",),
    ),
}


if __name__ == "__main__":
    main()
