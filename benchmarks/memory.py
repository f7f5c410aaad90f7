"""Activation memory: measured at run time, beside the static plan and BitStream's formulas.

    python benchmarks/memory.py [layers] [networks] [--json FILE]

Layers: the eight of BitStream's Table 2 in their setting inside a network, packed in and packed out
(convolution, threshold, 2x2 max-pool). Each kernel runs for the first time, so that all it takes
from the heap is taken then, on tensors that are allocated here and counted as they are; the heap
is watched by `allocations.c`, preloaded into this process. High water is the most of input, output
and heap over the kernels. ``of Eq. 17`` is its share of what BitStream needs by its own formula.

Networks: the heap that the first run takes, outputs included, beside what the plan says (arena and
scratch). The plan is exact; the heap is rounded up to pages, tensor by tensor.

It needs a C compiler and glibc.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import subprocess
import sys
import tempfile
from math import prod
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import tvm_ffi
from bitstream import LAYERS, bitstream_bytes, block, traditional_bytes
from contest import markdown_of, parser, show, write
from networks import NETWORKS

from bnncc.driver import compile_model
from bnncc.options import CompileOptions
from bnncc.runtime.artifact import Artifact
from bnncc.runtime.runner import random_inputs
from bnncc.runtime.session import aligned_empty

COUNTER = "BNNCC_ALLOCATIONS"
"""Environment variable with the path of the preloaded library."""


def preloaded() -> ctypes.CDLL:
    """Return the counter of this process, which starts again with it preloaded if it is not."""
    if COUNTER not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            library = str(Path(folder) / "allocations.so")
            source = str(Path(__file__).with_name("allocations.c"))
            subprocess.run(["cc", "-O2", "-fPIC", "-shared", "-o", library, source], check=True)
            env = {**os.environ, COUNTER: library, "LD_PRELOAD": library}
            sys.exit(subprocess.run([sys.executable, *sys.argv], env=env, check=False).returncode)
    return ctypes.CDLL(os.environ[COUNTER])


def heap_of(counter: ctypes.CDLL, call: Any, *args: Any) -> int:
    """Return the most bytes of heap that ``call(*args)`` takes at once."""
    counter.allocations_most.restype = ctypes.c_long
    counter.allocations_mark()
    call(*args)
    return int(counter.allocations_most())


def compiled(model: Any) -> Artifact:
    """Return an artifact that has not run yet: the runtime keeps memory from run to run."""
    return compile_model(model, CompileOptions(confirm=False))


def layer_row(counter: ctypes.CDLL, shape: tuple[int, ...]) -> dict[str, Any]:
    """Measure one layer."""
    channels, side, out, kernel, stride = shape
    artifact = compiled(block(shape))
    report = artifact.report
    names = [k["name"] for k in report["kernels"]]
    first, last = (names.index(report["layers"][i]["kernel"]) for i in (0, 1))
    module = artifact.session().module
    most = scratch = planned = 0
    for entry in report["kernels"][first:last]:
        arrays = []
        for arg in entry["args"]:
            arrays.append(aligned_empty(tuple(arg["shape"]), arg["dtype"]))
            arrays[-1][...] = 0
        library = next(m for m in module.imports if m.implements_function(entry["name"]))
        function = library[entry["name"]]
        heap = heap_of(counter, function, *map(tvm_ffi.from_dlpack, arrays))
        most = max(most, arrays[0].nbytes + arrays[-1].nbytes + heap)
        scratch = max(scratch, heap)
        ends = entry["input_bytes"] + entry["output_bytes"]
        planned = max(planned, ends + entry["workspace_bytes"])
    eq17 = bitstream_bytes(channels, side, kernel)
    name = f"{channels},{side} -> {out},{kernel}x{kernel}" + (f",s{stride}" if stride > 1 else "")
    return {
        "workload": name,
        "measured_bytes": most,
        "heap_bytes": scratch,
        "planned_bytes": planned,
        "eq16_bytes": traditional_bytes(channels, side, kernel),
        "eq17_bytes": eq17,
        "of_eq17": most / eq17,
    }


def network_row(counter: ctypes.CDLL, name: str) -> dict[str, Any]:
    """Measure one network."""
    artifact = compiled(NETWORKS[name]("where"))
    session = artifact.session()
    tensors = session.tensors(random_inputs(artifact.inputs))
    heap = heap_of(counter, session.main, *tensors)
    memory = artifact.report["memory"]
    outputs = sum(
        prod(d if isinstance(d, int) else 1 for d in t.shape) * np.dtype(t.dtype).itemsize
        for t in artifact.outputs
    )
    return {
        "workload": name,
        "measured_bytes": heap,
        "arena_bytes": memory["arena_bytes"],
        "workspace_bytes": memory["workspace_bytes"],
        "output_bytes": outputs,
        "high_water_bytes": memory["high_water_bytes"],
    }


def alone(row: Any, counter: ctypes.CDLL, case: Any) -> dict[str, Any]:
    """Return ``row(counter, case)`` of a new process, in which the runtime has kept no memory."""
    here, there = multiprocessing.Pipe(duplex=False)

    def work() -> None:
        there.send(row(counter, case))

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    there.close()
    result: dict[str, Any] = here.recv()
    process.join()
    return result


def main() -> None:
    """Measure the layers and the networks."""
    counter = preloaded()
    args = parser(__doc__, ("layers", "networks")).parse_args()
    results: dict[str, Any] = {}
    if "layers" in args.parts:
        results["layers"] = [alone(layer_row, counter, shape) for shape in LAYERS]
        show(results["layers"], LAYER_COLUMNS)
    if "networks" in args.parts:
        results["networks"] = [alone(network_row, counter, name) for name in NETWORKS]
        show(results["networks"], NETWORK_COLUMNS)
    write(args, results)


LAYER_COLUMNS = {
    "workload": "layer",
    "measured_bytes": "measured, bytes",
    "planned_bytes": "plan, bytes",
    "eq16_bytes": "Eq. 16",
    "eq17_bytes": "Eq. 17",
    "of_eq17": "measured / Eq. 17",
}
NETWORK_COLUMNS = {
    "workload": "network",
    "measured_bytes": "measured, bytes",
    "arena_bytes": "arena",
    "workspace_bytes": "scratch",
    "high_water_bytes": "high water of the plan",
}

TABLES = {
    "memory-layers": (lambda content: markdown_of(content, "layers", LAYER_COLUMNS), ("memory",)),
    "memory-networks": (
        lambda content: markdown_of(content, "networks", NETWORK_COLUMNS),
        ("memory",),
    ),
}


if __name__ == "__main__":
    main()
