"""Builds a bundle that runs on a machine with a GPU and PyTorch, but without bnncc and TVM.

    python benchmarks/cuda/build.py FOLDER [--target cuda-sm90a] [--python 3.12 ...] [--quick]

The bundle holds compiled kernels (`modules/`), networks (`networks/`), TVM's runtime (`lib/`,
`tvm_ffi/`), the scripts that run there, and the few files of bnncc that pack weights.
`FOLDER.tar.xz` is what to send. There, `python FOLDER/run.py` checks and times all of it, and
cuDNN, cuBLASLt and PyTorch beside it. Building needs no GPU. With a CPU's target it makes the same
bundle for a CPU, which proves the runner where there is none.

Layers are those of ResNet-18, packed in and packed out, at batch 1, 8 and 256, each by several
kernels: the best one per layer is a choice to be made from what is measured. Their weights are
drawn and packed over there. Weights of networks are in them, so the large ones are made to
compress: filters recur, and floats have few digits. Kernels take the same time for any.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import tvm
from data import bits_of, thresholds_of
from layers_of import Layers
from onnx import numpy_helper
from rates import rate_kernels
from runtime import add_runtime

import bnncc
from bnncc import driver, schedules
from bnncc.codegen import gpu, link, nvrtc, pipeline
from bnncc.options import CompileOptions
from bnncc.schedules import cuda
from bnncc.schedules.cuda import binary, shell
from bnncc.targets import catalog
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import reference, tiles
from bnncc.topi_binary.build import prim_func
from bnncc.topi_binary.spec import BinaryConv2d, Step, to_json
from bnncc.verification.recorded import whole_check

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STAGES = ((56, 64), (28, 128), (14, 256), (7, 512))
BATCHES = (1, 8, 256)
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
CUTS = tuple(binary.Cut(rows, splits) for rows, splits in ((1, 1), (1, 2), (1, 4), (2, 1)))


def layer(side: int, channels: int, batch: int) -> BinaryConv2d:
    return BinaryConv2d(
        batch, side, side, channels, channels, (3, 3), pads=(1, 1, 1, 1), pad_value=0,
        steps=(Step("threshold"),),
    )  # fmt: skip


def variants(
    spec: BinaryConv2d, target: TargetSpec
) -> Iterator[tuple[str, BinaryConv2d, binary.Cut | None]]:
    """Yield name, spec with an order of weights, and cut of each kernel for a layer."""
    if target.kind != "cuda":
        yield "cpu", schedules.with_weight_order(spec, target), None
        return
    engines = ("simt", "mma") if target.engine != "wgmma" else ("simt", "mma", "wgmma")
    for engine in engines:
        chosen = dataclasses.replace(spec, weight_order=binary.weight_order(spec, engine))
        default = binary.default_cut(chosen, target.engine if engine == "mma" else engine)
        cuts = [default] if engine != "mma" else sorted({default, *CUTS}, key=str)
        for cut in cuts:
            rows = f"-{cut.rows}x{cut.splits}" if engine == "mma" else ""
            yield f"{engine}{rows}", chosen, cut


def library(functions: dict[str, Any], target: TargetSpec, path: Path) -> None:
    """Compile functions into one shared library."""
    named = {name: f.with_attr("global_symbol", name) for name, f in functions.items()}
    module = tvm.IRModule(named)
    if target.kind == "cuda":
        with gpu.compiling(target):
            made = tvm.compile(module, target=pipeline.tvm_target(target))
    else:
        made = tvm.compile(module, target=pipeline.tvm_target(target))
    path.write_bytes(link.build_library(made, target))


def build_layer(spec: BinaryConv2d, target: TargetSpec, folder: Path) -> dict[str, Any]:
    """Build all kernels of a layer; return what `ours.py` must know."""
    name = f"conv_{spec.height}_{spec.channels}_{spec.n}"
    functions, kernels = {}, []
    for variant, chosen, cut in variants(spec, target):
        symbol = f"{name}_{variant.replace('-', '_')}"
        if target.kind == "cuda":
            functions[symbol] = shell.prim_func(chosen, cuda.kernel(chosen, cut))
        else:
            functions[symbol] = schedules.schedule(prim_func(chosen), target)
        kernels.append({"name": variant, "symbol": symbol, "order": chosen.weight_order})
    library(functions, target, folder / f"{name}.so")
    macs = int(spec.n) * spec.height * spec.width * spec.out_channels * spec.taps
    return {
        "name": name,
        "spec": to_json(spec),
        "macs": macs,
        "kernels": kernels,
        **right(spec, name),
    }


def right(spec: BinaryConv2d, name: str) -> dict[str, Any]:
    """Return a digest of what the oracle says of three images of a layer, and which they are."""
    n = int(spec.n)
    checked = sorted({0, n // 2, n - 1})
    few = dataclasses.replace(spec, n=len(checked), weight_order="words")
    bits = bits_of(f"{name}.weight", (spec.out_channels, *spec.kernel, spec.channels))
    data = bits_of(f"{name}.data", (n, spec.height, spec.width, spec.channels))[checked]
    inputs = [reference.bits_to_words(data), tiles.pack(few, bits), thresholds_of(name, spec)]
    (wanted,) = reference.binary_conv2d(few, inputs)
    return {"checked": checked, "digest": hashlib.sha256(np.ascontiguousarray(wanted)).hexdigest()}


def build_network(
    name: str, make: Callable[[int], Any], target: TargetSpec, folder: Path, batches: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Build a network for some batches, the first of them 1: all are checked with its image."""
    artifact = bnncc.compile(make(1), target=target)
    check = whole_check(make(1), artifact)
    arrays = {f"input_{i}": check.inputs[t.name] for i, t in enumerate(artifact.inputs)}
    arrays |= {f"output_{i}": check.outputs[t.name] for i, t in enumerate(artifact.outputs)}
    np.savez_compressed(folder / f"{name}.npz", **arrays)
    for batch in batches:
        file = folder / f"{name}_{batch}.so"
        if batch == 1:
            file.write_bytes(artifact._members["lib.so"])
        else:  # without the evaluation in NumPy that a self-check takes
            scheduled = driver._scheduled(make(batch), CompileOptions(target=target), target)
            executable, _ = pipeline.build(scheduled.module, target)
            file.write_bytes(link.build_library(executable, target))
        counts = {"inputs": len(artifact.inputs), "outputs": len(artifact.outputs)}
        yield {"name": f"{name}_{batch}", "check": name, "batch": batch, **counts}


def compressible(model: onnx.ModelProto) -> onnx.ModelProto:
    """Repeat every 32nd filter of large weights, and round floats to multiples of 1/64."""
    for stored in model.graph.initializer:
        values = numpy_helper.to_array(stored)
        if values.ndim < 2 or values.size < 4096:
            continue
        values = values[np.arange(len(values)) % 32]
        rounded = (np.round(values * 64) / 64).astype(values.dtype)
        stored.CopyFrom(numpy_helper.from_array(rounded, stored.name))
    return model


def networks(quick: bool) -> Iterator[tuple[str, Callable[[int], Any], Sequence[int]]]:
    """Yield name, maker for a batch, and batches of each network."""
    yield "digits", lambda _: ROOT / "examples/digits/digits.onnx", (1,)
    if quick:
        return
    from networks import birealnet18, cifar, vehicle

    for name, make in (
        ("birealnet18", birealnet18), ("xu_pedersoli_cifar", cifar), ("khan_vehicle", vehicle),
    ):  # fmt: skip
        yield name, lambda n, make=make: compressible(make(batch=n)), (1, 256)


def described(quick: bool) -> dict[str, Any]:
    """Return what PyTorch must know of the networks it is timed with."""
    found = {}
    for name, make, sizes in networks(quick):
        if len(sizes) > 1:
            made = Layers(make(1))
            found[name] = {"shape": made.shape[1:], "steps": made.steps}
    return found


def add_scripts(folder: Path) -> None:
    """Copy the scripts, and the files of bnncc that pack weights: they need NumPy alone."""
    for name in ("run.py", "ours.py", "peers.py", "report.py", "data.py"):
        (folder / name).write_bytes((HERE / name).read_bytes())
    packing = folder / "bnncc/topi_binary"
    packing.mkdir(parents=True, exist_ok=True)
    for name in ("bnncc", "bnncc/topi_binary"):
        (folder / name / "__init__.py").touch()
    for name in ("tiles", "sliced_data", "layout", "borders", "spec", "step"):
        (packing / f"{name}.py").write_bytes((ROOT / f"topi_binary/{name}.py").read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", default="cuda-sm90a", help="of the bundle [cuda-sm90a]")
    parser.add_argument(
        "--python", nargs="+", default=PYTHONS, help=f"versions over there [{' '.join(PYTHONS)}]"
    )
    parser.add_argument("--quick", action="store_true", help="one layer, one network, this Python")
    args = parser.parse_args()
    target = catalog.resolve(args.target)
    if target.gpus and not nvrtc.available():
        parser.error("needs NVRTC: pip install 'bnncc[cuda]'")
    for name in ("modules", "networks"):
        (args.folder / name).mkdir(parents=True, exist_ok=True)
    stages, batches = (STAGES[-1:], (1,)) if args.quick else (STAGES, BATCHES)
    index: dict[str, Any] = {"device": "cuda" if target.gpus else "cpu", "target": target.name}
    index["layers"] = [
        build_layer(layer(*stage, batch), target, args.folder / "modules")
        for stage in stages
        for batch in batches
    ]
    index["rates"] = []
    if target.gpus and not args.quick:
        functions, index["rates"] = rate_kernels(target)
        library(functions, target, args.folder / "modules/rates.so")
    index["networks"] = [
        entry
        for name, make, sizes in networks(args.quick)
        for entry in build_network(name, make, target, args.folder / "networks", sizes)
    ]
    index["peers"] = described(args.quick) if target.gpus else {}
    add_runtime(args.folder, [] if args.quick else args.python, gpu=bool(target.gpus))
    add_scripts(args.folder)
    (args.folder / "index.json").write_text(json.dumps(index))
    packed = args.folder.with_name(f"{args.folder.name}.tar.xz")
    with tarfile.open(packed, "w:xz", preset=9) as archive:
        archive.add(args.folder, args.folder.name)
    print(f"{packed}: {len(index['layers'])} layers, {packed.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
