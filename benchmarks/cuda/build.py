"""Builds what `bnncc tune --bundle` builds, with more in it: all that docs/benchmarks.md shows.

    python benchmarks/cuda/build.py FOLDER [--target cuda-sm90a] [--python 3.12 ...] [--quick]
                                    [--cases]

There, `python FOLDER/run.py` checks and times all of it: the kernels of every engine for the layers
of ResNet-18, networks, rates of instructions, and cuDNN, cuBLASLt and PyTorch beside them. At the
end `report.py` prints the tables, and writes them as JSON beside the results. Building needs no
GPU. With a CPU's target it makes the same bundle for a CPU, without peers and rates.

With `--cases` it holds instead the odd kernels and the networks that tests run on a GPU
(tests/cuda_cases.py), with inputs and what is right; `failures.py` says at the end which are wrong.

Layers are packed in and packed out, at batch 1, 8 and 256, each by several kernels: the best one
per layer is a choice to be made from what is measured. Weights of networks are in them, so the
large ones are made to compress: filters recur, and floats have few digits. Kernels take the same
time for any.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import tvm
from layers_of import Layers
from onnx import numpy_helper
from rates import rate_kernels

import bnncc
from bnncc import driver, schedules
from bnncc.bundle import build, candidates
from bnncc.bundle.candidates import Trial
from bnncc.bundle.runtime import PYTHONS
from bnncc.codegen import gpu, link, nvrtc, pipeline
from bnncc.console import Console
from bnncc.files import npz_bytes
from bnncc.options import CompileOptions
from bnncc.records.workload import Workload
from bnncc.schedules.cuda import binary
from bnncc.targets import catalog
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary.spec import BinaryConv2d, Step
from bnncc.trace import Trace
from bnncc.tuning.task import Task
from bnncc.verification.evaluator import evaluate_physical

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STAGES = ((56, 64), (28, 128), (14, 256), (7, 512))
BATCHES = (1, 8, 256)


def layer(side: int, channels: int, batch: int) -> BinaryConv2d:
    return BinaryConv2d(
        batch, side, side, channels, channels, (3, 3), pads=(1, 1, 1, 1), pad_value=0,
        steps=(Step("threshold"),),
    )  # fmt: skip


def trials(spec: BinaryConv2d, target: TargetSpec) -> list[Trial]:
    """Return the points of each engine's kernel for a layer."""
    chosen = schedules.with_weight_order(spec, target)
    engines = {"cpu": chosen.weight_order}
    if target.gpus:
        names = ("simt", "mma", "wgmma") if target.engine == "wgmma" else ("simt", target.engine)
        engines = {name: binary.weight_order(spec, name) for name in names}
    found = []
    for order in dict.fromkeys(engines.values()):  # `wgmma` leaves some layers to `mma`
        kernel = replace(spec, weight_order=order)
        task = Task(Workload.of(kernel), 1, schedules.space_of(kernel, target))
        points = task.all if target.gpus else task.all[:1]
        found += [
            Trial(task, p, order == chosen.weight_order and p == dict(task.space.default))
            for p in points
        ]
    return found


def names(trial: Trial) -> tuple[str, str]:
    """Return what a layer and a kernel for it are called in tables."""
    spec = trial.task.workload.kernel
    kind = spec.weight_order.partition("-")[0]
    engine = {"strips": "simt", "fragments": "mma", "cores": "wgmma"}.get(kind, "cpu")
    values = "x".join(map(str, trial.point.values())) if engine != "cpu" else ""
    return f"conv_{spec.height}_{spec.channels}_{spec.n}", "-".join(filter(None, [engine, values]))


def checks(target: TargetSpec, folder: Path, quick: bool) -> build.Contents:
    """Build what tests run on a GPU: kernels with inputs and outputs of their own, and networks."""
    sys.path.insert(0, str(ROOT))
    from tests import cuda_cases, exact_networks
    from tests.transformer_blocks import BLOCKS

    found = cuda_cases.odd(target)
    if quick:
        found = found[:: len(found) // 8]
    trials = [
        Trial(Task(Workload.of(odd.spec), 1, schedules.space_of(odd.spec, target)), odd.point, True)
        for odd in found
    ]
    odds = {id(trial): odd for trial, odd in zip(trials, found, strict=True)}

    def named(trial: Trial) -> tuple[str, str]:
        return odds[id(trial)].name, candidates.label(trial.task, trial.point)

    def kernel(trial: Trial, name: str, built: Sequence[build.Candidate]) -> build.Kernel:
        odd = odds[id(trial)]
        arrays = odd.case().arrays()
        digest = candidates.digest(odd.spec, arrays)
        return build.Kernel(name, built, arrays, digest, odd.spec.macs, odd.tolerance)

    made = candidates.build(
        [[trial] for trial in trials], target, folder, jobs=1, console=Console(1), names=named,
        kernel=kernel,
    )  # fmt: skip
    assert len(made) == len(found), "some kernels were not built"
    count = 1 if quick else cuda_cases.NETWORKS
    whole = [checked(cuda_cases.network(i), f"random-{i}", target, {}) for i in range(count)]
    blocks = [] if quick else list(BLOCKS)
    whole += [checked(BLOCKS[b](), f"block-{b.replace(' ', '-')}", target, {}) for b in blocks]
    known = list(exact_networks.exact())
    for network in known[-1:] if quick else known:
        whole += exact(network, target)
    return build.Contents(made, whole, report=HERE / "failures.py")


def exact(network: Any, target: TargetSpec) -> Iterator[build.Network]:
    """Build one of tests/exact_networks.py for an image, and for three in turns."""
    print(network.name, flush=True)
    artifact = bnncc.compile(network.make(1), target=target, **network.options)
    one = build.Network.of(artifact, network.name)
    for images, times in ((1, 1), (IMAGES, TURNS)):
        feeds, right = network.case(images, target)
        arrays = {f"input_{i}": feeds[t.name] for i, t in enumerate(artifact.inputs)}
        arrays |= {f"output_{i}": right[t.name] for i, t in enumerate(artifact.outputs)}
        named = replace(one, name=f"{network.name}-{images * times}", relative=network.tolerance)
        named = replace(named, check=npz_bytes(arrays, compress=True))
        if images > 1:
            named = larger(named, network.make(images * times), times, target, network.options)
        yield named


IMAGES, TURNS = 3, 85
"""No power of two: neighbours in a tile are other images, and tiles are left over."""


def library(functions: dict[str, Any], target: TargetSpec, path: Path) -> None:
    """Compile functions into one shared library."""
    named = {name: f.with_attr("global_symbol", name) for name, f in functions.items()}
    with gpu.compiling(target):
        made = tvm.compile(tvm.IRModule(named), target=pipeline.tvm_target(target))
    path.write_bytes(link.build_library(made, target))


def checked(model: Any, name: str, target: TargetSpec, options: Mapping[str, Any]) -> build.Network:
    """Build a network with that of its self-checks which depends least on how sums are rounded.

    Signs within rounding of 0 turn, and in a deep network with random weights many follow. How much
    they do is seen where the passes' result is evaluated in NumPy, beside the model.
    """
    artifact = bnncc.compile(model, target=target, **options)
    known = driver.lowered(model, CompileOptions(target=target, **options))
    found = []
    for number in range(min(CHECKS, len(artifact.selfchecks()))):
        feeds, right = known.checks.pair(number)
        made = evaluate_physical(known.physical, feeds)
        pairs = zip(known.physical.outputs, known.outputs, strict=True)
        off = [_apart(made[name], right[output.name]) for name, output in pairs]
        sure = known.checks.surely(known.checks.check(number))
        unsure = sum(int(np.count_nonzero(~mask)) for mask in sure.values())
        found.append((max(off), unsure, number))
    off, _, number = min(found)
    network = build.Network.of(artifact, name, number)
    return replace(network, relative=max(network.relative, ROUNDED if options else 2 * off))


CHECKS = 4
"""How many are looked at."""


def _apart(made: np.ndarray, right: np.ndarray) -> float:
    """Return how far numbers are off, of the largest."""
    top = max(1e-30, float(np.abs(right).max(initial=0)))
    return float(np.abs(made.astype(np.float64) - right).max(initial=0.0)) / top


def build_network(
    name: str,
    make: Callable[[int], Any],
    target: TargetSpec,
    batches: Sequence[int],
    options: Mapping[str, Any],
) -> Iterator[build.Network]:
    """Build a network for some batches, the first of them 1: all are checked with its image."""
    print(name, flush=True)
    one = checked(make(1), f"{name}_1", target, options)
    for batch in batches:
        if batch == 1:
            yield one
            continue
        many = replace(one, name=f"{name}_{batch}")
        yield larger(many, make(batch), batch, target, options)


def larger(
    one: build.Network, model: Any, times: int, target: TargetSpec, options: Mapping[str, Any]
) -> build.Network:
    """Return a network for the images of its check `times` in turn.

    It is built without the evaluation in NumPy that a self-check takes.
    """
    asked = CompileOptions(target=target, confirm=False, **options)
    scheduled = driver._scheduled(model, asked, target, Trace())
    executable, scratch = pipeline.build(scheduled.module, target)
    workspace = {kernel: used.total(scheduled.threads) for kernel, used in scratch.items()}
    kernels = [
        {"name": k.name, "zero_plane_args": k.zero_plane_args,
         "args": [{"shape": arg.shape, "dtype": arg.dtype} for arg in k.args]}
        for k in driver._plan(scheduled, workspace).kernels
    ]  # fmt: skip
    code = link.build_library(executable, target)
    return replace(one, library=code, kernels=kernels, batch=times)


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


OPTIONS: Mapping[str, Mapping[str, str]] = {
    "": {},
    "_bfloat16": {"first_layer": "bfloat16"},
    "_float16": {"first_layer": "float16", "float_type": "float16"},
}
"""What networks are compiled with, by what that adds to their names."""

ROUNDED = 0.1
"""How far outputs of a network may be off, of the largest, where numbers are rounded: signs within
rounding of 0 turn. Its kernels are compared bit for bit elsewhere (`--cases`)."""


def networks(
    quick: bool,
) -> Iterator[tuple[str, Callable[[int], Any], Sequence[int], Mapping[str, str]]]:
    """Yield name, maker for a batch, batches and options of each network."""
    yield "digits", lambda _: ROOT / "examples/digits/digits.onnx", (1,), {}
    if quick:
        return
    from networks import birealnet18, cifar, quicknet, reactnet18, vehicle, vgg_small

    known = {
        "birealnet18": (birealnet18, ("", "_bfloat16", "_float16")),
        "quicknet": (quicknet, ("", "_float16")),
        "reactnet18": (reactnet18, ("", "_float16")),
        "vgg_small": (vgg_small, ("",)),
        "xu_pedersoli_cifar": (cifar, ("",)),
        "khan_vehicle": (vehicle, ("",)),
    }
    for name, (make, endings) in known.items():
        for ending in endings:
            yield (
                name + ending, lambda n, make=make: compressible(make(batch=n)), (1, 256),
                OPTIONS[ending],
            )  # fmt: skip


def described(quick: bool) -> dict[str, Any]:
    """Return what PyTorch must know of the networks it is timed with."""
    found = {}
    for name, make, sizes, options in networks(quick):
        if len(sizes) > 1 and not options:
            made = Layers(make(1))
            found[name] = {"shape": made.shape[1:], "steps": made.steps}
    return found


def benchmarks(target: TargetSpec, folder: Path, quick: bool) -> build.Contents:
    """Return what the tables of docs/benchmarks.md show."""
    stages, batches = (STAGES[-1:], (1,)) if quick else (STAGES, BATCHES)
    layers = [trials(layer(*stage, batch), target) for stage in stages for batch in batches]
    found = [
        network
        for name, make, sizes, options in networks(quick)
        for network in build_network(name, make, target, sizes, options)
    ]
    kernels = candidates.build(layers, target, folder, jobs=1, console=Console(1), names=names)
    more, scripts, files = {}, {}, []
    if target.gpus and not quick:
        functions, more["rates"] = rate_kernels(target)
        files.append(folder / "rates.so")
        library(functions, target, files[0])
        scripts["rates"] = HERE / "mixes.py"
    if target.gpus:
        more["peers"] = described(quick)
        scripts["peers"] = HERE / "peers.py"
    return build.Contents(kernels, found, scripts, files, HERE / "report.py", more)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", default="cuda-sm90a", help="of the bundle [cuda-sm90a]")
    parser.add_argument(
        "--python", nargs="+", default=PYTHONS, help=f"versions over there [{' '.join(PYTHONS)}]"
    )
    parser.add_argument("--quick", action="store_true", help="one layer, one network, this Python")
    parser.add_argument("--cases", action="store_true", help="what tests run on a GPU")
    args = parser.parse_args()
    target = catalog.resolve(args.target)
    if target.gpus and not nvrtc.available():
        parser.error("needs NVRTC: pip install 'bnncc[cuda]'")
    build.check(args.folder, target)
    with tempfile.TemporaryDirectory() as place:
        make = checks if args.cases else benchmarks
        contents = make(target, Path(place), args.quick)
        packed = build.write(args.folder, target, contents, [] if args.quick else args.python)
    print(f"{packed}: {len(contents.kernels)} layers, {packed.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
