"""Random networks compiled and run: the kernels of each family of code, from right inputs.

    python -m tests.random_code words --shards 0:30 --tally tests/random_code_tally.json

The networks are those of `random_models`, of fewer layers and with wider padding. All kernels of
one are compiled together, and take the places of their oracles in the evaluation that every
compilation does: so what machine code makes is compared with the model's own values, kernel by
kernel, by the same rule.
"""

from __future__ import annotations

import argparse
import functools
import gc
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bnncc import schedules
from bnncc.driver import compile_c
from bnncc.frontend.onnx import load
from bnncc.ir.evaluate import evaluate
from bnncc.ir.graph import Graph
from bnncc.ir.ties import tied
from bnncc.options import CompileOptions
from bnncc.runtime.compare import differs
from bnncc.schedules import cuda
from bnncc.schedules.cuda import binary
from bnncc.targets.catalog import resolve
from bnncc.topi_binary import tiles
from bnncc.topi_binary.definitions import define
from bnncc.topi_binary.spec import BinaryConv2d, Spec
from bnncc.transform.physical import KERNEL
from bnncc.verification.confirm_passes import compare_passes
from tests import c_programs
from tests.cuda_emulator import Emulated
from tests.kernel_harness import build, with_outputs
from tests.physical_networks import passed
from tests.random_models import Maker
from tests.random_passes import Outcome, digest, run_shards, summary

Array = np.ndarray[Any, Any]

FAMILIES = {
    "words": "x86-64-v4-vpopcntdq",
    "lookup-avx2": "x86-64-v3",
    "lookup-sse": "x86-64-v2",
    "neon": "arm64",
    "neon-32": "armv7",
    "c": "armv7",
    "dotprod": "arm64-dotprod",
    "avx512": "x86-64-v4",
    "gpu": "cuda-sm80",
    "gpu-75": "cuda-sm75",
}
"""Families of code, with the target that stands for each."""

MAIN = ("words", "lookup-avx2", "lookup-sse", "neon", "c", "gpu")
"""Those of which most networks are compiled."""

EMULATED = ("neon", "neon-32", "dotprod")
"""Those that run in an emulated processor."""

LAYERS = 5
SHARD = 10

_ARCH = {"cuda-sm75": 750, "cuda-sm80": 800}


def specs_of(physical: Graph) -> list[Spec]:
    """Return the different kernels of a physical graph."""
    return list(dict.fromkeys(n.attrs["spec"] for n in physical.nodes if n.op == KERNEL))


def processor(specs: Sequence[Spec], target: str) -> Callable[[Spec, Sequence[Array]], list[Array]]:
    """Compile kernels for a processor, this one or an emulated one."""
    import tvm

    chosen = resolve(target)
    names = {spec: f"kernel_{number}" for number, spec in enumerate(specs)}
    made = {n: schedules.schedule(define(s), chosen, 1) for s, n in names.items()}
    library = build(made, chosen)

    def compute(spec: Spec, inputs: Sequence[Array]) -> list[Array]:
        def call(arrays: list[Array], _: int) -> None:
            tensors = [tvm.runtime.tensor(a) for a in arrays]
            library[names[spec]](*tensors)
            for array, tensor in zip(arrays, tensors, strict=True):
                array[...] = tensor.numpy()

        return with_outputs(spec, inputs, call)

    return compute


def emulated_gpu(
    specs: Sequence[Spec], target: str
) -> Callable[[Spec, Sequence[Array]], list[Array]]:
    """Compile the text of kernels for GPUs for this machine."""
    engine = resolve(target).engine

    def text(spec: Spec) -> Any:
        if isinstance(spec, BinaryConv2d) and spec.weight_order in tiles.ORDERS:
            return cuda.kernel(spec, binary.default_cut(spec, engine))
        return cuda.kernel(spec)

    kernels = {spec: text(spec) for spec in specs}
    library = Emulated(list(kernels.values()), _ARCH[target])

    def compute(spec: Spec, inputs: Sequence[Array]) -> list[Array]:
        return with_outputs(
            spec, inputs, lambda arrays, batch: library.run(kernels[spec], arrays, batch, seed=1)
        )

    return compute


def outcome(family: str, seed: int) -> Outcome:
    """Compile the network of a seed for a family and compare what its kernels make."""
    target = FAMILIES[family]
    if family == "c":
        return whole_network(seed)
    maker = Maker(seed, LAYERS, beyond=True)
    before, physical, layers = passed(maker.build(), target)
    make = emulated_gpu if target in _ARCH else processor
    compute = make(specs_of(physical), target)
    wrong = compare_passes(physical, before, maker.feeds(), compute=compute)
    kinds = tuple(layer.kind for layer in layers)
    return Outcome(f"code: {wrong[0]}" if wrong else "right", kinds, frozenset(maker.pairs))


def whole_network(seed: int) -> Outcome:
    """Compile a network to C, run it in an emulator, and compare its outputs.

    What depends on a tie (`bnncc.ir.ties`) is not compared: so it is the first network from the
    seed on of which most outputs depend on none.
    """
    for attempt in range(1000):
        maker = Maker(seed + 10_000_000 * attempt, 3, beyond=True)
        model, feeds = maker.build(), maker.feeds()
        feeds = {name: value[:1] if maker.dynamic else value for name, value in feeds.items()}
        graph = load(model)
        ties = tied(graph, feeds)
        if np.mean([mask.mean() for mask in ties.values()]) < 0.5:
            break
    else:
        raise AssertionError("all networks meet ties")
    network = compile_c(model, CompileOptions(target="armv7"))
    made = evaluate(graph, feeds)
    right = {name: made[name] for name in graph.outputs}
    read = c_programs.outputs(c_programs.MACHINES["armv7"], network, feeds, right)
    verdict = "right"
    for output, want in right.items():
        wrong = differs(read[output], want)
        if (wrong & ~ties[output]).any():
            verdict = f"C: `{output}`: {int((wrong & ~ties[output]).sum())} of {want.size}"
            break
        verdict = "tie" if wrong.any() else verdict
    kinds = tuple(layer["kind"] for layer in network.report["layers"])
    return Outcome(verdict, kinds, frozenset(maker.pairs))


def first_seed(family: str) -> int:
    """Return the first seed of a family: each has others."""
    return 3_000_000 + 100_000 * list(FAMILIES).index(family)


def generator() -> str:
    """Return a digest of what the first seeds make."""
    return digest(Maker(seed, LAYERS, beyond=True) for seed in range(20))


def shards(family: str, first: int, end: int) -> dict[str, range]:
    """Return shards of a family."""
    places = ((n, first_seed(family) + n * SHARD) for n in range(first, end))
    return {f"{family} {n}": range(start, start + SHARD) for n, start in places}


def main() -> None:
    """Run shards from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--shards", default="0:1", help="first:end")
    parser.add_argument("--tally", type=Path, required=True)
    options = parser.parse_args()
    first, end = (int(part) for part in options.shards.split(":"))
    warnings.simplefilter("ignore")
    gc.freeze()
    todo = shards(options.family, first, end)
    run = functools.partial(outcome, options.family)
    print(summary(run_shards(todo, options.tally, run, generator())))


if __name__ == "__main__":
    main()
