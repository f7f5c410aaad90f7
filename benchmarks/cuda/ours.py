"""Checks and times one part of a bundle; `run.py` starts it for each, in a process of its own.

    python ours.py PART    # an engine (simt, mma, wgmma; cpu), networks, or rates

Correctness first: what is wrong is not timed. Times are medians of CUDA graphs of several launches
(on a CPU, of calls). Prints one line of JSON for each result.

Data and weights are not in the bundle. They are drawn here as they were where it was built, and
packed by the same file of bnncc; a digest of what is right was made there.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from data import bits_of, thresholds_of, words_of

from bnncc.topi_binary import tiles
from bnncc.topi_binary.spec import from_json

HERE = Path(__file__).parent
LAUNCHES, REPEATS = 20, 15
POOLED, CPU, CUDA = 2, 1, 2
CUDART = "libcudart.so.13"


def load_runtime(device: str) -> Any:
    """Load TVM's runtime; return its Python binding."""
    import tvm_ffi

    folder = Path(tvm_ffi.__file__).parent
    ctypes.CDLL(str(next(folder.rglob("libtvm_ffi.so"))), ctypes.RTLD_GLOBAL)
    library = HERE / "lib"
    _load(str(library / "libtvm_runtime.so"))
    if device == "cuda":
        import torch

        torch.zeros(1, device="cuda")  # opens the driver, and CUDA's runtime library
        places = [Path(p, f"nvidia/cu13/lib/{CUDART}") for p in sys.path]
        _load(*[str(p) for p in places if p.exists()], CUDART)
        _load(str(library / "libtvm_runtime_cuda.so"))
    return tvm_ffi


def _load(*names: str) -> None:
    errors = []
    for name in names:
        try:
            ctypes.CDLL(name, ctypes.RTLD_GLOBAL)
            return
        except OSError as error:
            errors.append(str(error))
    raise SystemExit("error: " + "; ".join(errors))


class Place:
    """Where arrays lie, how they get there, and how calls are timed."""

    def __init__(self, device: str, ffi: Any) -> None:
        self.device, self.ffi = device, ffi
        self.graph = False  # whether the last times are of a graph

    def tensor(self, array: np.ndarray) -> Any:
        if self.device == "cpu":
            aligned = np.empty(array.nbytes + 64, np.uint8)
            start = -aligned.ctypes.data % 64
            copy = aligned[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
            copy[...] = array
            return self.ffi.from_dlpack(copy)
        import torch

        carrier = array.view(np.int32) if array.dtype == np.uint32 else array
        moved = torch.from_numpy(np.ascontiguousarray(carrier)).cuda()
        return moved.view(torch.uint32) if array.dtype == np.uint32 else moved

    def array(self, tensor: Any) -> np.ndarray:
        if self.device == "cpu":
            return np.array(np.from_dlpack(tensor))
        import torch

        if not isinstance(tensor, torch.Tensor):
            tensor = torch.from_dlpack(tensor)
        if tensor.dtype == torch.uint32:
            return tensor.view(torch.int32).cpu().numpy().view(np.uint32)
        return tensor.cpu().numpy()

    def wait(self) -> None:
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()

    def microseconds(self, call: Callable[[], Any], launches: int = LAUNCHES) -> float:
        """Return the median time of one call."""
        if self.device == "cpu":
            call()
            times = []
            for _ in range(REPEATS):
                start = time.perf_counter_ns()
                call()
                times.append((time.perf_counter_ns() - start) / 1e3)
            return statistics.median(times)
        import torch

        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with self.ffi.use_torch_stream(torch.cuda.stream(stream)):
            for _ in range(3):
                call()
        torch.cuda.synchronize()
        try:
            with self.ffi.use_torch_stream(torch.cuda.graph(graph, stream=stream)):
                for _ in range(launches):
                    call()
            replay, self.graph = graph.replay, True
        except RuntimeError:  # what cannot be captured is launched one by one
            torch.cuda.synchronize()
            replay, self.graph = lambda: [call() for _ in range(launches)], False
        times = []
        for _ in range(REPEATS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / launches)
        return statistics.median(times)


def run_layer(entry: dict[str, Any], place: Place, engine: str) -> Iterator[dict[str, Any]]:
    """Check and time the kernels of an engine."""
    name, spec = entry["name"], from_json(entry["spec"])
    module = place.ffi.load_module(str(HERE / f"modules/{name}.so"))
    shape = (spec.n, spec.height, spec.width, spec.channels)
    data = place.tensor(words_of(bits_of(f"{name}.data", shape)))
    bits = bits_of(f"{name}.weight", (spec.out_channels, *spec.kernel, spec.channels))
    thresholds = place.tensor(thresholds_of(name, spec))
    for kernel in entry["kernels"]:
        if kernel["name"].split("-")[0] != engine:
            continue
        function = module[kernel["symbol"]]
        weight = tiles.pack(dataclasses.replace(spec, weight_order=kernel["order"]), bits)
        weight = place.tensor(weight)
        out = place.tensor(np.full((*shape[:3], -(-spec.out_channels // 32)), 0x5A, np.uint32))
        function(data, weight, thresholds, out)
        place.wait()
        made = np.ascontiguousarray(place.array(out)[entry["checked"]])
        right = hashlib.sha256(made).hexdigest() == entry["digest"]
        result = {"layer": name, "kernel": kernel["name"], "right": right}
        if right:
            us = place.microseconds(lambda f=function, w=weight, o=out: f(data, w, thresholds, o))
            rate = round(entry["macs"] / us / 1e6, 2)
            result |= {"us": round(us, 3), "graph": place.graph, "tmacs": rate}
        yield result


def run_network(entry: dict[str, Any], place: Place) -> dict[str, Any]:
    name = entry["name"]
    known = np.load(HERE / f"networks/{entry['check']}.npz")
    machine = place.ffi.load_module(str(HERE / f"networks/{name}.so"))["vm_load_executable"]()
    kind = CUDA if place.device == "cuda" else CPU
    machine["vm_initialization"](kind, 0, POOLED, CPU, 0, POOLED)
    main = machine["main"]
    images = [known[f"input_{i}"] for i in range(entry["inputs"])]
    inputs = [place.tensor(np.repeat(image, entry["batch"], axis=0)) for image in images]
    made = main(*inputs)
    outputs = [made] if entry["outputs"] == 1 else list(made)
    place.wait()
    right = True
    for i, output in enumerate(outputs):
        wanted = known[f"output_{i}"]
        close = np.abs(place.array(output) - wanted) <= 1e-4 * max(1e-30, np.abs(wanted).max())
        right &= bool(close.all())
    result = {"network": name, "right": right}
    if right:
        result["us"] = round(place.microseconds(lambda: main(*inputs), launches=1), 2)
        result["graph"] = place.graph
    return result


def run_rates(entry: dict[str, Any], place: Place) -> dict[str, Any]:
    """Time a mix of instructions."""
    module = place.ffi.load_module(str(HERE / "modules/rates.so"))
    seed = place.tensor(words_of(bits_of("seed", (entry["words"], 32)))[:, 0].copy())
    out = place.tensor(np.zeros(entry["out"], np.int32))
    function = module[entry["symbol"]]
    us = place.microseconds(lambda: function(seed, out), launches=1)
    return {"mix": entry["name"], "us": us, "tmacs": round(entry["macs"] / us / 1e6, 1)}


def results(part: str, index: dict[str, Any], place: Place) -> Iterator[dict[str, Any]]:
    """Yield the results of a part; one bad kernel does not cost the others."""
    jobs: dict[str, Callable[[], Any]] = {}
    if part == "networks":
        jobs = {e["name"]: lambda e=e: [run_network(e, place)] for e in index["networks"]}
    elif part == "rates":
        jobs = {e["name"]: lambda e=e: [run_rates(e, place)] for e in index["rates"]}
    else:
        jobs = {e["name"]: lambda e=e: run_layer(e, place, part) for e in index["layers"]}
    for name, job in jobs.items():
        try:
            yield from job()
        except Exception as error:
            yield {"failed": name, "error": f"{type(error).__name__}: {error}"[:300]}


def main() -> int:
    index = json.loads((HERE / "index.json").read_text())
    place = Place(index["device"], load_runtime(index["device"]))
    fine = True
    for result in results(sys.argv[1], index, place):
        print(json.dumps(result), flush=True)
        fine &= bool(result.get("right", "failed" not in result))
    return int(not fine)


if __name__ == "__main__":
    sys.exit(main())
