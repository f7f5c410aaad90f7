"""Tune every distinct kernel of the benchmark networks: what `tune_logs/` holds.

    python benchmarks/tune_networks.py [GROUP ...] [--target T] [--each N] [--records DIR]
        [--measure instructions] [--list] [--batch N ...] [--bundle FOLDER]

Groups are networks of `networks.py` (``birealnet18``, ...), ``nine`` (the layers of `layers.py`),
``bitstream`` and ``dabnn`` (the layers and networks of their tables). Kernels are tuned one after
the other, those of the first groups first; what has had its trials is skipped, so the same
command goes on after an interruption. Prune before shipping: ``bnncc records prune DIR``.

With ``--bundle`` kernels are not tuned but written into a bundle (docs/tuning.md), up to ``--each``
candidates of each: for GPUs, whose results ``bnncc tune --import`` puts into the records.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

os.environ.setdefault("TVM_NUM_THREADS", "1")

import onnx

sys.path.insert(0, str(Path(__file__).resolve().parent))
from networks import NETWORKS

from bnncc import driver
from bnncc.bundle import build, candidates
from bnncc.bundle.runtime import PYTHONS
from bnncc.console import Console
from bnncc.errors import BnnccError
from bnncc.options import CompileOptions
from bnncc.records.database import folder_of, read
from bnncc.schedules import with_weight_order
from bnncc.targets import host
from bnncc.targets.catalog import resolve
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary.spec import to_json
from bnncc.tuning.pool import Setup
from bnncc.tuning.trials import Plan
from bnncc.tuning.tuner import Tuner, tasks_of

GROUPS = ("nine", "birealnet18", "quicknet", "vgg_small", "reactnet18", "bitstream", "dabnn")
"""All by default, in this order."""


def models(group: str, batch: int) -> Iterator[onnx.ModelProto]:
    """Yield the models of a group; layers are of one image."""
    if group in NETWORKS:
        yield NETWORKS[group]("where", batch)
        return
    if batch > 1:
        return
    if group == "bitstream":
        import bitstream

        for shape in bitstream.LAYERS:
            yield bitstream.block(shape)
        for make in bitstream.NETS.values():
            yield make("where")
        return
    import dabnn

    for name in dabnn.LAYERS:
        yield dabnn.layer(name, "where")


def kernels(group: str, options: CompileOptions, target: TargetSpec, batch: int) -> list[str]:
    """Return the specs of a group's kernels, as JSON."""
    if group == "nine":
        from layers import layers

        specs = [replace(layer.spec, n=batch) for layer in layers("nine")]
        return [to_json(with_weight_order(spec, target)) for spec in specs]
    found: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for model in models(group, batch):
            path = Path(folder) / "model.onnx"
            onnx.save(model, path)
            found += [spec for spec, _ in driver.kernels(path, options)]
    return found


def bundle(specs: list[str], target: TargetSpec, args: argparse.Namespace) -> None:
    """Write a bundle with up to ``--each`` candidates for each kernel."""
    build.check(args.bundle, target)
    layers = candidates.layers_of([(spec, 1) for spec in specs], target)
    chosen = [trials[: args.each] for trials in layers]
    with tempfile.TemporaryDirectory() as place:
        made = candidates.build(chosen, target, Path(place), jobs=args.jobs, console=Console(1))
        packed = build.write(args.bundle, target, build.Contents(made), args.python)
    print(f"{packed}: {len(made)} kernels, {packed.stat().st_size / 1e6:.1f} MB")


def main() -> None:
    """Tune the groups asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("groups", nargs="*", default=list(GROUPS), metavar="GROUP")
    parser.add_argument("--target", default="native")
    parser.add_argument("--each", type=int, default=64, help="trials of each kernel")
    parser.add_argument("--records", type=Path, default=Path("tune_logs"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--time-limit", type=float, default=None, metavar="SECONDS")
    parser.add_argument("--lock", type=Path, default=None, help="hold it while measuring")
    parser.add_argument("--prefix", default="", help="command to start what measures with")
    parser.add_argument("--measure", choices=("clock", "instructions"), default="clock")
    parser.add_argument(
        "--float-type", nargs="+", default=["float32"], help="of tensors on a GPU [float32]"
    )
    parser.add_argument("--list", action="store_true", help="only list the networks")
    parser.add_argument("--batch", type=int, nargs="+", default=[1], help="images at a time [1]")
    parser.add_argument("--bundle", type=Path, default=None, help="write one instead of tuning")
    parser.add_argument("--python", nargs="+", default=list(PYTHONS), help="versions there")
    args = parser.parse_args()
    target = resolve(args.target)
    specs: dict[str, str] = {}
    for group, kind, batch in product(args.groups, args.float_type, args.batch):
        options = CompileOptions(
            target=target, threads=1, tuned=False, confirm=False, float_type=kind
        )
        for spec in kernels(group, options, target, batch):
            specs.setdefault(spec, group)
        print(f"{group}: {len(specs)} kernels so far", flush=True)
    if args.bundle is not None:
        bundle(list(specs), target, args)
        return
    tasks = tasks_of([(spec, 1) for spec in specs], target, 1)
    if args.list:
        notes = read(args.records / folder_of(target, args.measure)).notes()
        for task in tasks:
            done = notes.get(task.workload, {}).get("trials", 0)
            print(f"{done}/{min(args.each, len(task.all))} {task.workload.name}")
        return
    plan = Plan(
        each=args.each,
        time_limit=args.time_limit,
        jobs=args.jobs,
        lock=args.lock,
        command=" ".join(["benchmarks/tune_networks.py", *args.groups]),
        device=host.processor(),
    )
    setup = Setup(target, prefix=tuple(args.prefix.split()), method=args.measure)
    try:
        result = Tuner(tasks, setup, args.records, plan, Console()).run()
    except BnnccError as error:
        raise SystemExit(f"error: {error}") from error
    print(f"{result.trials} trials in {result.seconds:.0f} s, measuring {result.measuring:.0f} s")


if __name__ == "__main__":
    main()
