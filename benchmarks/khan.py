"""Khan et al. (2018), "Binarized Convolutional Neural Networks for Efficient Inference on GPUs".

    python benchmarks/khan.py [--json FILE]

Workload: its vehicle classifier at batch 1 on an image of 3x96x96: convolution 5x5 to 32, max-pool,
convolution 5x5 to 32, max-pool, dense 100, 100 and 4; all binary, sign(0) = -1. Table 1 is the
whole network, with a float image (first convolution float, binary weights) and with a binarized one
(one threshold per channel, as nodes of the graph). Table 2 is kernel by kernel; the paper counts
its im2col apart, this kernel has none, so its im2col and convolution are one row here.

The paper measures a GeForce GTX 1080 beside cuDNN, kernels only; here is the CPU, beside the float
network, and single float layers, in ONNX Runtime and OpenVINO. GPU: not measured.
"""

from __future__ import annotations

from typing import Any

from contest import markdown_of, measure, parser, show, write  # first: sets threads
from networks import Builder, vehicle

FLOATS = ("onnxruntime-f32", "openvino-f32")
GPU = "not measured"

NETWORKS = {
    "float image": (False, 401.83 / 102.39),
    "binarized image": (True, 401.83 / 55.63),
}
"""Whether the image is binarized; cuDNN over the paper's, Table 1."""

KERNELS = {
    "convolution 1": ("conv", 3, 96, (21.63 + 37.54) / (3.17 + 8.61)),
    "max-pool 1": ("pool", 32, 96, 5.22 / 8.26),
    "convolution 2": ("conv", 32, 48, (65.41 + 69.28) / (5.50 + 8.10)),
    "max-pool 2": ("pool", 32, 48, 5.38 / 2.66),
    "dense": ("dense", 32, 24, 200.03 / 6.28),
}
"""Kind, channels, side; cuDNN over the paper's, Table 2 (binarized image)."""


def single(kind: str, channels: int, side: int):
    """Return one float layer as a model."""
    b = Builder(kind, channels, side)
    if kind == "pool":
        return b.model(b.max_pool(b.input, 2, 2)[0])
    if kind == "conv":
        return b.model(b.conv(b.input, 32, 5)[0])
    rows, weight = b.op("Flatten", b.input[0]), b.const(b.floats(100, channels * side**2))
    return b.model(b.op("Gemm", rows, weight, transB=1))


def alone(kind: str, channels: int, side: int):
    """Return the binary layer in its setting: a sign before it, threshold and sign after it."""
    b = Builder(kind, channels, side, zero=-1)
    if kind == "pool":
        made = b.max_pool(b.sign(b.input), 2, 2)
        return b.model(b.conv(made, 32, 1, binary=True)[0])
    out, kernel = (32, 5) if kind == "conv" else (100, side)
    pads = None if kind == "conv" else 0
    made = b.norm(b.binary_conv(b.input, out, kernel, pads=pads), channels * kernel**2)
    return b.model(b.binary_conv(made, 32, 1)[0])


def main() -> None:
    """Measure the network and its kernels."""
    args = parser(__doc__).parse_args()
    networks: list[dict[str, Any]] = []
    for name, (binary, paper) in NETWORKS.items():
        result = measure(
            f"khan {name}", vehicle("where", binary_input=binary), args,
            twin=vehicle("float", binary_input=binary), floats=FLOATS, kernels=False,
        )  # fmt: skip
        networks.append(_row(name, result, result.seconds["ours"], paper))
    kernels = []
    for name, (kind, channels, side, paper) in KERNELS.items():
        result = measure(
            f"khan {name}", alone(kind, channels, side), args, twin=single(kind, channels, side),
            floats=FLOATS,
        )  # fmt: skip
        ours = [k["name"] for k in result.artifact.report["kernels"]][1]
        kernels.append(_row(name, result, result.kernels[ours], paper) | {"kernel": ours})
    content = {"paper": "Khan et al. (2018), Tables 1-2", "gpu": GPU}
    write(args, {**content, "networks": networks, "kernels": kernels})
    show(networks, COLUMNS)
    show(kernels, COLUMNS)
    print(f"GPU: {GPU}")


def _row(name: str, result, ours: float, paper: float) -> dict[str, Any]:
    row: dict[str, Any] = {"workload": name, "ours_us": 1e6 * ours}
    for kind in FLOATS:
        if kind in result.seconds:
            row[f"{kind}_us"] = 1e6 * result.seconds[kind]
    if (fastest := result.fastest(*FLOATS)) is not None:
        row["ratio"] = fastest / ours
    row["paper_ratio"] = f"{paper:.2f}"
    return row


COLUMNS = {
    "workload": "on the CPU",
    "ours_us": "ours, us",
    **{f"{kind}_us": f"`{kind}`, us" for kind in FLOATS},
    "ratio": "fastest float / ours",
    "paper_ratio": "paper (GPU, cuDNN)",
}

TABLES = {
    "khan": (lambda content: markdown_of(content, "networks", COLUMNS), ("khan",)),
    "khan-kernels": (lambda content: markdown_of(content, "kernels", COLUMNS), ("khan",)),
}


if __name__ == "__main__":
    main()
