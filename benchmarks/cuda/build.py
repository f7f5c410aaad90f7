"""Builds a bundle that runs on a machine with a GPU and PyTorch, but without bnncc and TVM.

    python benchmarks/cuda/build.py FOLDER [--target cuda-sm90a] [--python 3.12] [--quick]

The bundle holds compiled kernels (`modules/`), networks (`networks/`), TVM's runtime libraries
(`lib/`), its Python binding as a wheel (`wheels/`), and the scripts that run there: `run.py`, which
checks and times, and `peers.py`, which times cuDNN, cuBLASLt and PyTorch. Building it needs no GPU.
With a CPU's target it makes the same bundle for a CPU, which proves `run.py` where there is none.

Layers are those of ResNet-18, packed in and packed out, at batch 1, 8 and 256, each by several
kernels: the best one per layer is a choice to be made from what `run.py` measures.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from data import bits_of
from rates import rate_kernels

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
from bnncc.topi_binary.spec import BinaryConv2d, Step

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STAGES = ((56, 64), (28, 128), (14, 256), (7, 512))
BATCHES = (1, 8, 256)
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
    """Build all kernels of a layer; return what `run.py` must know."""
    name = f"conv_{spec.height}_{spec.channels}_{spec.n}"
    shape = (spec.n, spec.height, spec.width, spec.channels)
    bits = bits_of(f"{name}.weight", (spec.out_channels, *spec.kernel, spec.channels))
    thresholds = np.full(spec.out_channels, spec.taps // 2, np.int32)
    thresholds += bits_of(f"{name}.threshold", thresholds.shape).astype(np.int32)
    functions, kernels, weights = {}, [], {}
    for variant, chosen, cut in variants(spec, target):
        symbol = f"{name}_{variant.replace('-', '_')}"
        if target.kind == "cuda":
            functions[symbol] = shell.prim_func(chosen, cuda.kernel(chosen, cut))
        else:
            functions[symbol] = schedules.schedule(prim_func(chosen), target)
        order = chosen.weight_order
        weights[order] = tiles.pack(chosen, bits)
        kernels.append({"name": variant, "symbol": symbol, "order": order})
    library(functions, target, folder / f"{name}.so")
    checked = sorted({0, int(spec.n) // 2, int(spec.n) - 1})
    few = dataclasses.replace(spec, n=len(checked), weight_order="words")
    data = bits_of(f"{name}.data", shape)[checked]
    inputs = [reference.bits_to_words(data), tiles.pack(few, bits), thresholds]
    (wanted,) = reference.binary_conv2d(few, inputs)
    np.savez(
        folder / f"{name}.npz", thresholds=thresholds, wanted=wanted, checked=checked,
        **{f"weight.{order}": packed for order, packed in weights.items()},
    )  # fmt: skip
    macs = int(spec.n) * spec.height * spec.width * spec.out_channels * spec.taps
    return {"name": name, "shape": shape, "macs": macs, "kernels": kernels}


def build_network(
    name: str, make: Callable[[int], Any], target: TargetSpec, folder: Path, batches: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Build a network for some batches, the first of them 1: all are checked with its image."""
    artifact = bnncc.compile(make(1), target=target)
    (folder / f"{name}.npz").write_bytes(artifact._members["selfcheck.npz"])
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


def networks(quick: bool) -> Iterator[tuple[str, Callable[[int], Any], Sequence[int]]]:
    yield "digits", lambda _: ROOT / "examples/digits/digits.onnx", (1,)
    if quick:
        return
    sys.path.insert(0, str(HERE.parent))
    from networks import birealnet18, cifar, vehicle

    yield "birealnet18", lambda n: birealnet18(batch=n), (1, 256)
    yield "xu_pedersoli_cifar", lambda n: cifar(batch=n), (1, 256)
    yield "khan_vehicle", lambda n: vehicle(batch=n), (1, 256)


def runtime(folder: Path, target: TargetSpec, python: str) -> None:
    """Copy TVM's libraries, and the wheel of its binding for a version of Python, if any."""
    source = Path(tvm.__file__).parent / "lib"
    names = ["libtvm_runtime.so", *(["libtvm_runtime_cuda.so"] if target.gpus else [])]
    (folder / "lib").mkdir(exist_ok=True)
    for name in names:
        shutil.copy(source / name, folder / "lib" / name)
    if not python:
        return
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
        "--python-version", python, "--implementation", "cp",
        "--platform", "manylinux_2_28_x86_64", "--platform", "manylinux_2_24_x86_64",
        "--dest", str(folder / "wheels"), f"apache-tvm-ffi=={_ffi_version()}",
    ]  # fmt: skip
    subprocess.run(command, check=True)


def _ffi_version() -> str:
    from importlib.metadata import version

    return version("apache-tvm-ffi")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", default="cuda-sm90a", help="of the bundle [cuda-sm90a]")
    parser.add_argument("--python", default="3.12", help="version on the other machine [3.12]")
    parser.add_argument("--quick", action="store_true", help="one layer, one network, no wheel")
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
    runtime(args.folder, target, "" if args.quick else args.python)
    (args.folder / "index.json").write_text(json.dumps(index, indent=1))
    for name in ("run.py", "data.py", "peers.py"):
        shutil.copy(HERE / name, args.folder / name)
    size = sum(path.stat().st_size for path in args.folder.rglob("*") if path.is_file())
    print(f"{args.folder}: {len(index['layers'])} layers, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
