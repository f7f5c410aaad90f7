"""daBNN (Zhang et al., ACM MM 2019): the convolutions of its Fig. 5, and Bi-Real-Net-18.

    python benchmarks/dabnn.py [--json FILE]

Workload: binary convolutions at batch 1, as many outputs as inputs, zero padding: 3x3 at 64
channels 56x56, 128 at 28x28, 256 at 14x14 with stride 1 and 2, 512 at 7x7, and 5x5 at 256 channels
14x14; then the whole Bi-Real-Net-18 at 224x224. Each convolution is an ONNX model of one layer,
float NCHW in and out, so that packing counts; its kernel is timed alone too (packed in, float out,
as daBNN's own). In float, a layer is the convolution alone, and the network has ReLU in place of
each sign.

The paper measures a phone (Google Pixel 1, one thread): 8 to 10 times TensorFlow Lite's float32 on
single convolutions, about 3 times on Bi-Real-Net-18. Ratios are compared, never its times.
"""

from __future__ import annotations

from contest import markdown_of, measure, parser, show, write
from networks import NETWORKS, Builder

LAYERS = {
    "3x3 64 at 56x56": (64, 56, 3, 1),
    "3x3 128 at 28x28": (128, 28, 3, 1),
    "3x3 256 at 14x14": (256, 14, 3, 1),
    "3x3 256 at 14x14 stride 2": (256, 14, 3, 2),
    "3x3 512 at 7x7": (512, 7, 3, 1),
    "5x5 256 at 14x14": (256, 14, 5, 1),
}
"""Channels, side, kernel, stride."""

PAPER = {"layer": "8-10", "network": "3"}
"""Float32 of TensorFlow Lite over daBNN, Fig. 5."""


FLOATS = ("onnxruntime-f32", "openvino-f32", "tflite")


def layer(name: str, sign: str):
    """Return one layer as a model; in float the convolution alone."""
    channels, side, kernel, stride = LAYERS[name]
    builder = Builder(name, channels, side, sign)
    if sign == "float":
        return builder.model(builder.conv(builder.input, channels, kernel, stride)[0])
    return builder.model(builder.binary_conv(builder.input, channels, kernel, stride)[0])


def main() -> None:
    """Measure the layers and the network."""
    args = parser(__doc__).parse_args()
    rows = []
    for name in [*LAYERS, "birealnet18"]:
        make = NETWORKS.get(name) or (lambda sign, name=name: layer(name, sign))
        result = measure(f"dabnn {name}", make("where"), args, twin=make("float"), floats=FLOATS)
        ours = result.seconds["ours"]
        row = {"workload": name, "ours_us": 1e6 * ours}
        if name in LAYERS:
            row["kernel_us"] = 1e6 * result.kernel_of(0)
        for kind in FLOATS:
            if kind in result.seconds:
                row[f"{kind}_us"] = 1e6 * result.seconds[kind]
        fastest = result.fastest(*FLOATS)
        if fastest is not None:
            row["ratio"] = fastest / ours
            if name in LAYERS:
                row["kernel_ratio"] = fastest / result.kernel_of(0)
        row["paper_ratio"] = PAPER["layer" if name in LAYERS else "network"]
        rows.append(row)
    write(args, {"paper": "daBNN (2019), Fig. 5", "rows": rows})
    show(rows, COLUMNS)


COLUMNS = {
    "workload": "convolution or network",
    "ours_us": "float in and out, us",
    "kernel_us": "kernel alone, us",
    **{f"{kind}_us": f"`{kind}`, us" for kind in FLOATS},
    "ratio": "fastest float / ours",
    "kernel_ratio": "/ kernel",
    "paper_ratio": "paper",
}

TABLES = {"dabnn": (lambda content: markdown_of(content, "rows", COLUMNS), ("dabnn",))}


if __name__ == "__main__":
    main()
