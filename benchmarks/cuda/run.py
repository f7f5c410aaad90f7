"""Checks and times a bundle that `build.py` made.

    python run.py [--json FILE] [--only NAME]

Needs NumPy, on a GPU also PyTorch, and neither bnncc nor TVM: libraries and wheel are with it.
Correctness first: what is wrong is not timed. Times are medians of CUDA graphs of several launches
(on a CPU, of calls). Run parts that may fail, `--only wgmma` for one, each in its own process: an
illegal access ends the process' use of the GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from data import bits_of, words_of

HERE = Path(__file__).parent
LAUNCHES, REPEATS = 20, 15
POOLED, CPU, CUDA = 2, 1, 2
CUDART = "libcudart.so.13"


def load_runtime(device: str) -> Any:
    """Load TVM's runtime; return its Python binding."""
    for wheel in HERE.glob("wheels/*.whl"):
        unpacked = HERE / "wheels" / wheel.stem
        if not unpacked.exists():
            zipfile.ZipFile(wheel).extractall(unpacked)
        sys.path.insert(0, str(unpacked))
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


def run_layer(entry: dict[str, Any], place: Place, only: str) -> list[dict[str, Any]]:
    name = entry["name"]
    module = place.ffi.load_module(str(HERE / f"modules/{name}.so"))
    known = np.load(HERE / f"modules/{name}.npz")
    words = words_of(bits_of(f"{name}.data", tuple(entry["shape"])))
    data, thresholds = place.tensor(words), place.tensor(known["thresholds"])
    results = []
    for kernel in entry["kernels"]:
        if only and only not in kernel["name"]:
            continue
        function = module[kernel["symbol"]]
        weight = place.tensor(known[f"weight.{kernel['order']}"])
        out = place.tensor(np.full(words.shape[:3] + known["wanted"].shape[3:], 0x5A, np.uint32))
        function(data, weight, thresholds, out)
        place.wait()
        right = bool((place.array(out)[known["checked"]] == known["wanted"]).all())
        result = {"layer": name, "kernel": kernel["name"], "right": right}
        if right:
            us = place.microseconds(lambda f=function, w=weight, o=out: f(data, w, thresholds, o))
            rate = round(entry["macs"] / us / 1e6, 2)
            result |= {"us": round(us, 3), "graph": place.graph, "tmacs": rate}
        results.append(result)
    return results


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


def run_rates(entries: list[dict[str, Any]], place: Place) -> list[dict[str, Any]]:
    results = []
    for entry in entries:
        module = place.ffi.load_module(str(HERE / "modules/rates.so"))
        seed = place.tensor(words_of(bits_of("seed", (entry["words"], 32)))[:, 0].copy())
        out = place.tensor(np.zeros(entry["out"], np.int32))
        function = module[entry["symbol"]]
        us = place.microseconds(lambda f=function, s=seed, o=out: f(s, o), launches=1)
        results.append(
            {"mix": entry["name"], "us": us, "tmacs": round(entry["macs"] / us / 1e6, 1)}
        )
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=None, help="write results to this file")
    parser.add_argument("--only", default="", help="kernels whose names hold this; no networks")
    args = parser.parse_args()
    index = json.loads((HERE / "index.json").read_text())
    place = Place(index["device"], load_runtime(index["device"]))
    results: list[dict[str, Any]] = []

    def attempt(what: str, call: Callable[[], Any]) -> None:
        try:
            made = call()
        except Exception as error:  # one bad kernel must not cost the others
            made = {"failed": what, "error": f"{type(error).__name__}: {error}"[:300]}
        for result in made if isinstance(made, list) else [made]:
            results.append(result)
            print(json.dumps(result), flush=True)

    for entry in index["layers"]:
        attempt(entry["name"], lambda e=entry: run_layer(e, place, args.only))
    if not args.only:
        for entry in index["networks"]:
            attempt(entry["name"], lambda e=entry: run_network(e, place))
        attempt("rates", lambda: run_rates(index["rates"], place))
    if args.json:
        args.json.write_text(json.dumps({"target": index["target"], "results": results}, indent=1))
    return int(any(not result.get("right", "failed" not in result) for result in results))


if __name__ == "__main__":
    sys.exit(main())
