"""First layers with float32, bfloat16 and int8 operands: times and deviations.

    taskset -c 1 python benchmarks/first_layer.py [--json FILE] [--repeat N] [--target T]

What `--first-layer` may do to the stems of Bi-Real-18, QuickNet and VGG-small, each with what its
kernel does behind it. For each layer all forms run in turn, one thread, batch 1; the best of all
repeats counts. float32 is the default way, filtered where that is chosen; `bytes` is int8 of an
image taken as bytes. Deviations from float64 are root mean squares, in units of the standard
deviation of the results, for normal data and weights.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import tvm

sys.path.insert(0, str(Path(__file__).resolve().parent))
import machine
from filtered_layers import POOL
from float_layers import BITS, STORE, Layer, _conv
from tables import markdown, where

from bnncc.codegen import memory
from bnncc.schedules import schedule, uses_tiles, with_packed_operands
from bnncc.targets import catalog, host
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import filtering, layout, quantization, reference
from bnncc.topi_binary.build import input_types, output_types
from bnncc.topi_binary.definitions import define
from bnncc.topi_binary.spec import Conv2d, Step

LAYERS: dict[str, Conv2d] = {
    "Bi-Real-18: 7x7 s2 3->64 at 224, max-pool": replace(
        _conv(3, 224, 64, 7, 2, data_layout="NCHW"),
        pool=POOL, steps=(Step("affine"), *STORE, *BITS),
    ),
    "QuickNet: 3x3 s2 3->16 at 224": replace(
        _conv(3, 224, 16, 3, 2, data_layout="NCHW"), steps=(Step("affine"), Step("relu"), *STORE)
    ),
    "VGG-small: 3x3 3->128 at 32": replace(
        _conv(3, 32, 128, 3, data_layout="NCHW"), steps=(Step("affine"), *BITS)
    ),
}  # fmt: skip


def forms(spec: Conv2d, target: TargetSpec) -> dict[str, Conv2d]:
    """Return the ways to compute `spec`."""
    method = filtering.choose(spec, "filtered", *spec.unpooled.output_hw)
    out = {"float32": replace(spec, method=method)}
    for name in ("bfloat16", "int8"):
        out[name] = with_packed_operands(replace(spec, operands=name), target)
    rounded, size = out["bfloat16"], spec.unpooled.output_hw
    if not uses_tiles(rounded, target):
        out["bfloat16"] = replace(rounded, method=filtering.choose(rounded, "filtered", *size))
    out["bytes"] = replace(out["int8"], zero_points=(124, 116, 104))
    return out


def deviation(spec: Conv2d, target: TargetSpec) -> float:
    """Return how far a form of a layer is from float64, on a small image of floats."""
    spec = replace(spec, height=32, width=32, pool=None, steps=STORE, zero_points=())
    rng = np.random.default_rng(0)
    data = rng.standard_normal(input_types(spec)[0][0]).astype(np.float32)
    weight = rng.standard_normal((spec.out_channels, *spec.kernel, spec.channels), np.float32)
    plain = replace(spec, operands="float32", method="direct", packed=1)
    exact = reference.conv2d(plain, [data, layout.pack_float_weight(weight)])[0]
    scale = np.ones(spec.out_channels)
    if spec.operands == "int8":
        weight, scale = quantization.quantize_weight(weight)
    elif spec.operands == "bfloat16":
        weight = quantization.to_bfloat16(weight)
    packed = filtering.pack_weight if spec.method != "direct" else quantization.pack_weight
    if spec.operands == "float32" and spec.method == "direct":
        mine = layout.pack_float_weight(weight)
    else:
        mine = packed(weight, spec)
    options = {"kind": target.kind, "mcpu": target.mcpu, "mattr": list(target.mattr)}
    module = tvm.IRModule({"main": schedule(define(spec), target)})
    with memory.lowering():
        library = tvm.compile(module, target=tvm.target.Target(options))
    got = tvm.runtime.empty(output_types(spec)[0][0])
    library["main"](tvm.runtime.tensor(data), tvm.runtime.tensor(mine), got)
    error = got.numpy() * scale - exact
    return float(np.sqrt((error**2).mean()) / exact.std())


def table(content: dict) -> str:
    """Return the figures as Markdown."""
    forms = ("float32", "bfloat16", "int8", "bytes")
    rows = []
    for layer in content["layers"]:
        us = layer["us"]
        cells = [f"{us[f]:.1f} ({us['float32'] / us[f]:.2f} x)" for f in forms[1:]]
        off = ", ".join(f"{layer['deviation'][f]:.1e}" for f in forms[:3])
        rows.append([layer["name"], f"{us['float32']:.1f} ({layer['float32']})", *cells, off])
    head = ["layer", *forms, "deviations of the first three"]
    return markdown(head, rows) + "\n\n" + where(content)


TABLES = {"first-layer": (table, ("first_layer",))}


def main() -> None:
    """Measure the layers asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--target", default="native")
    parser.add_argument("--only", default="", help="layers whose name contains this")
    options = parser.parse_args()
    target = catalog.resolve(options.target)
    rows = []
    print(f"{host.processor()}, target {target.name}")
    for name, spec in LAYERS.items():
        if options.only not in name:
            continue
        ways = forms(spec, target)
        layers = {form: Layer(name, way, target) for form, way in ways.items()}
        for _ in range(options.repeat):
            for layer in layers.values():
                layer.measure()
        row = {"name": name, "float32": ways["float32"].method, "packed": {}, "us": {}}
        for form, layer in layers.items():
            row["us"][form] = layer.best * 1e6
            row["packed"][form] = ways[form].packed
        found = {f: deviation(w, target) for f, w in ways.items() if f != "bytes"}
        rows.append(row | {"deviation": found})
        print(f"{name} (float32 {row['float32']})")
        for form, us in row["us"].items():
            gain = row["us"]["float32"] / us
            off = f"{found[form]:9.1e}" if form in found else ""
            print(f"  {form:9} {us:8.1f} us {gain:6.2f}x {off}", flush=True)
    if options.json:
        machine.save(options.json, target=target.name, layers=rows)


if __name__ == "__main__":
    main()
