"""Xu & Pedersoli (2019), "A Computing Kernel for Network Binarization on PyTorch": its Table 2.

    python benchmarks/xu_pedersoli.py [--json FILE]

Workload: the CIFAR-10 network of Hubara et al. (3x3 convolutions 128-128-256-256-512-512 with three
max-pools, dense 1024-1024-10, BatchNorm and hardtanh after each, all weights and all activations
but the image binary), random images of 3x32x32 in batches of 100. The paper times the whole test
set of 10,000 images, which is that 100 times.

PyTorch runs the same network, signs included, in float32: eager, with channels last, and through
``torch.compile``. Outputs are compared first. On a Xeon E5-2620 v4 the paper reports 301 s for
PyTorch against 243 s for its kernel, 1.24 times; 1093 s for its control group, the same kernel
without bits (4.5 times). Its GPU half is not measured here.
"""

from __future__ import annotations

from contest import markdown_of, measure, parser, show, write  # first: sets threads
from networks import cifar

BATCH, IMAGES = 100, 10_000
TORCH = ("torch", "torch-channels-last", "torch-compile")
FLOATS = ("onnxruntime-f32", "openvino-f32")
PAPER = {"torch": "1.24"}
GPU = "not measured"


def main() -> None:
    """Measure the network."""
    args = parser(__doc__).parse_args()
    result = measure(
        "xu", cifar("where", BATCH), args, same=(*TORCH, "openvino-binary"),
        twin=cifar("float", BATCH), floats=FLOATS, kernels=False,
    )  # fmt: skip
    ours = result.seconds["ours"]
    rows = []
    for kind in ("ours", *TORCH, "openvino-binary", *FLOATS):
        if kind not in result.seconds:
            continue
        seconds = result.seconds[kind]
        rows.append(
            {
                "workload": kind,
                "batch_ms": 1e3 * seconds,
                "test_set_s": seconds * IMAGES / BATCH,
                "ratio": seconds / ours,
                "paper_ratio": PAPER.get(kind, ""),
            }
        )
    write(args, {"paper": "Xu & Pedersoli (2019), Table 2", "gpu": GPU, "rows": rows})
    show(rows, COLUMNS)
    print(f"GPU: {GPU}")


COLUMNS = {
    "workload": "on the CPU",
    "batch_ms": "batch of 100, ms",
    "test_set_s": "10,000 images, s",
    "ratio": "/ ours",
    "paper_ratio": "paper",
}

TABLES = {"xu": (lambda content: markdown_of(content, "rows", COLUMNS), ("xu_pedersoli",))}


if __name__ == "__main__":
    main()
