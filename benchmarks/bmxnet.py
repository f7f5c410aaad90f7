"""BMXNet (Yang et al., 2017): the sweeps of its Fig. 1 to 3 and the sizes of its Tables 1 and 2.

    python benchmarks/bmxnet.py [fig1] [fig2] [fig3] [sizes] [--json FILE]

Workload: a convolution of batch 200 with 8x8 outputs, as a product of matrices filters x 12800 x
(kernel^2 * channels): over input channels at 64 filters of 5x5 (Fig. 1), over filters at 256
channels of 5x5 (Fig. 2), over the kernel at 256 channels and 64 filters (Fig. 3).

Two comparisons, as in the paper. The packed product, bits in and float32 out, beside sgemm (NumPy's
OpenBLAS) of the same extents: the paper's "xnor_64_omp", about 50 times Cblas. And everything from
float input on: the convolution as an ONNX model, packing included, beside the float32 convolution
of ONNX Runtime and OpenVINO and OpenVINO's binary path: the paper's "binarize input and
xnor_64_omp", about 13 times Cblas (which is given the columns ready made).

Sizes: the constants of the artifact, packed weights and all that stays float, beside the float32
parameters of the file; networks with random weights, float convolutions direct (those that are
filtered, the default where it is faster, hold up to twice as many weights).
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

from contest import (  # first: sets threads
    THREADS,
    markdown_of,
    measure,
    parser,
    race,
    show,
    write,
)

from ceilings import Ceiling, ceiling_of  # isort: skip
from networks import Builder
from paper_networks import lenet, resnet18
from peers import Timed

import numpy as np  # isort: skip

import tvm  # isort: skip

import bnncc
from bnncc.codegen.pipeline import tvm_target
from bnncc.schedules import schedule, with_weight_order
from bnncc.targets import catalog
from bnncc.topi_binary import layout
from bnncc.topi_binary.definitions import define
from bnncc.topi_binary.spec import BinaryConv2d, Step

BATCH, SIDE = 200, 8

FIGURES = {
    "fig1": [(channels, 64, 5) for channels in (64, 128, 256, 512)],
    "fig2": [(256, filters, 5) for filters in (16, 32, 64, 128, 256, 512)],
    "fig3": [(256, 64, kernel) for kernel in range(1, 11)],
}
"""Input channels, filters, kernel."""

PAPER = {"fig1": ("50", "13"), "fig2": ("", ""), "fig3": ("", "")}
"""Cblas over the packed product, and over binarizing and the product; only Fig. 1 is worded."""

FLOATS = ("onnxruntime-f32", "openvino-f32")

SIZES: dict[str, tuple[Any, dict[str, Any], str, str]] = {
    "LeNet, MNIST": (lenet, {}, "4.6 MB", "206 kB"),
    "ResNet-18, CIFAR-10": (resnet18, {"classes": 10, "side": 32}, "44.7 MB", "1.5 MB"),
    **{
        f"ResNet-18, ImageNet, float: {label}": (resnet18, {"float_stages": stages}, "47 MB", size)
        for label, stages, size in (
            ("none", (), "3.6 MB"),
            ("1st", (1,), "4.1 MB"),
            ("2nd", (2,), "5.6 MB"),
            ("3rd", (3,), "11.3 MB"),
            ("4th", (4,), "36 MB"),
            ("1st, 2nd", (1, 2), "6.2 MB"),
        )
    },
}
"""Builder, its options, and what the paper gives in float and binarized."""


def convolution(channels: int, filters: int, kernel: int, sign: str):
    """Return the convolution as a model; in float without the sign."""
    side = SIDE + kernel - 1
    b = Builder(f"{channels}-{filters}-{kernel}", channels, side, sign, batch=BATCH)
    if sign == "float":
        return b.model(b.conv(b.input, filters, kernel, pads=0)[0])
    return b.model(b.binary_conv(b.input, filters, kernel, pads=0)[0])


class Product:
    """The packed product of matrices as a contestant, and the same in float32 as another.

    Parameters
    ----------
    depth, filters : int
        Extents; the rows are those of all images.
    """

    def __init__(self, depth: int, filters: int) -> None:
        rng = np.random.default_rng(0)
        rows = BATCH * SIDE**2
        steps = (Step("affine"), Step("store"))
        spec = BinaryConv2d(rows, 1, 1, depth, filters, (1, 1), rank=2, steps=steps)
        target = catalog.resolve("native")
        spec = with_weight_order(spec, target)
        kernel = schedule(define(spec), target, THREADS)
        library = tvm.compile(tvm.IRModule({"main": kernel}), target=tvm_target(target)).jit()
        words = rng.integers(0, 2**32, (rows, depth // 32), dtype=np.uint32)
        signs = rng.random((filters, depth)) < 0.5
        weight = layout.pack_conv_weight(signs.reshape(filters, 1, 1, depth), spec.weight_order)
        scale, shift = spec.dot_from_acc()
        affine = [layout.pad_lanes(np.full(filters, v, np.float32)) for v in (scale, shift)]
        self._out = tvm.runtime.tensor(np.zeros((rows, filters), np.float32))
        self._args = [*map(tvm.runtime.tensor, (words, weight, *affine)), self._out]
        self._timer = partial(library.time_evaluator, "main", tvm.cpu(), repeat=6)
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
        data = 2 * bits.astype(np.float32) - 1
        columns = np.where(signs, np.float32(1), np.float32(-1))
        result = np.empty((filters, rows), np.float32)
        self.sgemm = Timed(lambda: np.dot(columns, data.T, out=result))
        self.macs = rows * depth * filters
        self.ceiling = Ceiling(ceiling_of(target))
        self.best = float("inf")
        self.run(1)
        self.sgemm.run(1)
        if not np.array_equal(self._out.numpy().T, result):
            raise SystemExit(f"{filters} x {rows} x {depth}: differs from sgemm")

    def run(self, times: int) -> float:
        """Run that often, keep the least time in `best`, return the least of these."""
        seconds = min(self._timer(number=max(1, times // 2))(*self._args).results)
        self.best = min(self.best, seconds)
        self.ceiling.measure()
        return seconds


def sweep(figure: str, args) -> list[dict[str, Any]]:
    """Measure one figure."""
    rows = []
    for channels, filters, kernel in FIGURES[figure]:
        shape = channels, filters, kernel
        depth = kernel**2 * channels
        result = measure(
            "bmxnet {}-{}-{}".format(*shape), convolution(*shape, "where"), args,
            same=("openvino-binary",), twin=convolution(*shape, "float"), floats=FLOATS,
        )  # fmt: skip
        # The columns in float take up to 1.3 GB, so they are made after the models are gone.
        packed = Product(depth, filters)
        single = packed.sgemm
        race([packed, single], args)
        ours = result.seconds["ours"]
        row: dict[str, Any] = {
            "workload": f"{channels} channels, {filters} filters, {kernel}x{kernel}",
            "packed_ms": 1e3 * packed.best,
            "packed_of_ceiling": packed.macs / packed.best / packed.ceiling.best,
            "sgemm_ms": 1e3 * single.best,
            "packed_ratio": single.best / packed.best,
            "paper_packed_ratio": PAPER[figure][0],
            "ours_ms": 1e3 * ours,
        }
        row["sgemm_ratio"] = single.best / ours
        row["paper_sgemm_ratio"] = PAPER[figure][1]
        for kind in ("openvino-binary", *FLOATS):
            if kind in result.seconds:
                row[f"{kind}_ms"] = 1e3 * result.seconds[kind]
        if (fastest := result.fastest(*FLOATS)) is not None:
            row["float_ratio"] = fastest / ours
        if (theirs := result.fastest("openvino-binary")) is not None:
            row["openvino_ratio"] = theirs / ours
        rows.append(row)
    return rows


def sizes() -> list[dict[str, Any]]:
    """Compile the networks and read the sizes from the reports."""
    rows = []
    for name, (make, options, paper_float, paper_binary) in SIZES.items():
        model = make(**options)
        parameters = 4 * sum(prod(initializer.dims) for initializer in model.graph.initializer)
        row: dict[str, Any] = {"network": name, "float_bytes": parameters}
        # Filtered convolutions hold transformed weights, up to twice as many.
        for kind, prefix in (("direct", ""), ("filtered", "filtered_")):
            parts = bnncc.compile(model, float_conv=kind).report["bytes"]
            row[f"{prefix}bytes"] = parts["binary"] + parts["float"]
            row[f"{prefix}file_bytes"] = parts["total"]
        row["ratio"] = parameters / row["bytes"]
        row |= {"paper_float": paper_float, "paper": paper_binary}
        rows.append(row)
    return rows


def main() -> None:
    """Measure the parts asked for."""
    args = parser(__doc__, (*FIGURES, "sizes")).parse_args()
    results: dict[str, Any] = {"paper": "BMXNet (2017), Fig. 1-3, Tables 1-2"}
    for part in args.parts:
        results[part] = sizes() if part == "sizes" else sweep(part, args)
        show(results[part], SIZE_COLUMNS if part == "sizes" else COLUMNS)
    write(args, results)


COLUMNS = {
    "workload": "convolution",
    "packed_ms": "packed, ms",
    "packed_of_ceiling": "of ceiling",
    "sgemm_ms": "sgemm, ms",
    "packed_ratio": "ratio",
    "paper_packed_ratio": "paper",
    "ours_ms": "from float, ms",
    "sgemm_ratio": "sgemm / ours",
    "paper_sgemm_ratio": "paper ",
    **{f"{kind}_ms": f"`{kind}`, ms" for kind in ("openvino-binary", *FLOATS)},
    "float_ratio": "fastest float / ours",
    "openvino_ratio": "`openvino-binary` / ours",
}
SIZE_COLUMNS = {
    "network": "network",
    "float_bytes": "float32",
    "bytes": "ours",
    "ratio": "ratio",
    "filtered_bytes": "ours, filtered",
    "filtered_file_bytes": "whole file, filtered",
    "paper_float": "paper, float",
    "paper": "paper, binary",
}

TABLES = {
    **{
        f"bmxnet-{part}": (
            lambda content, part=part: markdown_of(content, part, COLUMNS),
            ("bmxnet",),
        )
        for part in FIGURES
    },
    "bmxnet-sizes": (lambda content: markdown_of(content, "sizes", SIZE_COLUMNS), ("bmxnet",)),
}


if __name__ == "__main__":
    main()
