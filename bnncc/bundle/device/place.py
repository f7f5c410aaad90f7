"""Use TVM's runtime without TVM: hold and copy arrays, and time calls."""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

CUDART = "libcudart.so.13"

MICROSECONDS = 200.0
"""Minimum time of a graph of launches: starting one costs a few."""

MOST_LAUNCHES = 100
_ALIGNMENT = 64
_POOLED, _CPU, _CUDA = 2, 1, 2  # TVM's own numbers

Call = Callable[[], Any]


class Unfit(Exception):
    """A machine lacks what a bundle needs."""


class Place:
    """A device with TVM's runtime.

    Parameters
    ----------
    device : {"cpu", "cuda"}
        Which.
    root : Path
        The bundle, with ``lib/`` and ``tvm_ffi/``.
    features : sequence of str
        CPU features that the code needs, by their names in Linux.

    Raises
    ------
    Unfit
        If the machine lacks any of them.
    """

    def __init__(self, device: str, root: Path, features: Sequence[str] = ()) -> None:
        if lacking := sorted({*features} - _features() if features else ()):
            raise Unfit(f"needs CPU features this machine lacks: {', '.join(lacking)}")
        self.device = device
        self.ffi = _load_runtime(device, root / "lib")

    @property
    def name(self) -> str:
        """Product name of the device."""
        if self.device == "cuda":
            import torch

            return str(torch.cuda.get_device_name())
        return _first_cpu().get("model name", "unknown")

    @property
    def versions(self) -> dict[str, str]:
        """Versions on which times may depend."""
        found = {"python": sys.version.split()[0], "numpy": np.__version__}
        if self.device == "cuda":
            import torch

            return {**found, "torch": torch.__version__, "cuda": str(torch.version.cuda)}
        facts, x86 = _first_cpu(), ("vendor_id", "cpu family", "model")
        arm = ("CPU implementer", "CPU architecture", "CPU variant", "CPU part")
        # Maker, family and model, as in `bnncc.targets.host.core_model`.
        cpu = "-".join(facts[key] for key in (*x86, *arm) if key in facts)
        return {**found, **({"cpu": cpu} if cpu else {})}

    def library(self, path: Path) -> Any:
        """Load a shared library of TVM's."""
        return self.ffi.load_module(str(path))

    def network(self, module: Any) -> Any:
        """Return the main function of a network's library."""
        if self.device == "cuda":
            self._unfold_graphs()
        machine = module["vm_load_executable"]()
        kind = _CUDA if self.device == "cuda" else _CPU
        machine["vm_initialization"](kind, 0, _POOLED, _CPU, 0, _POOLED)
        return machine["main"]

    def _unfold_graphs(self) -> None:
        """Make TVM's runtime launch kernels that it would put in CUDA graphs.

        A graph cannot be launched while another is captured, so a whole network can be one graph.
        """
        invoke = self.ffi.get_global_func("vm.builtin.invoke_closure")

        def launch(machine: Any, function: Any, args: Any, *_: Any) -> Any:
            return invoke(machine, function, *args)

        name = "vm.builtin.cuda_graph.run_or_capture"
        self.ffi.register_global_func(name, launch, override=True)

    def tensor(self, array: np.ndarray) -> Any:
        """Return a copy of an array as a tensor on the device."""
        if self.device == "cpu":
            room = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
            start = -room.ctypes.data % _ALIGNMENT
            copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
            copy[...] = array
            return self.ffi.from_dlpack(copy)
        import torch

        carrier = array.view(np.int32) if array.dtype == np.uint32 else array
        moved = torch.from_numpy(np.asarray(carrier, order="C")).cuda()
        return moved.view(torch.uint32) if array.dtype == np.uint32 else moved

    def filled(self, tensor: Any, array: np.ndarray) -> Any:
        """Return `tensor` with the values of an array; on a CPU, another tensor."""
        if self.device == "cpu":
            return self.tensor(array)
        import torch

        carrier = array.view(np.int32) if array.dtype == np.uint32 else array
        kept = tensor.view(torch.int32) if tensor.dtype == torch.uint32 else tensor
        kept.copy_(torch.from_numpy(np.asarray(carrier, order="C")))
        return tensor

    def array(self, tensor: Any) -> np.ndarray:
        """Return a tensor as an array."""
        if self.device == "cpu":
            return np.array(np.from_dlpack(tensor))
        import torch

        if not isinstance(tensor, torch.Tensor):
            tensor = torch.from_dlpack(tensor)
        if tensor.dtype == torch.uint32:
            return tensor.view(torch.int32).cpu().numpy().view(np.uint32)
        return tensor.cpu().numpy()

    def wait(self) -> None:
        """Wait until the device has finished; raise its errors."""
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()

    def timer(self, call: Call, launches: int | None = None) -> Timer:
        """Return a timer of several launches of `call`, on a GPU as a graph if possible.

        Parameters
        ----------
        call : callable
            The call to time, already called once.
        launches : int, optional
            By default as many as take `MICROSECONDS`.
        """
        if self.device == "cpu":
            return _Clock(call, launches)
        return _Graph(call, launches, self.ffi)


class Timer:
    """Times a call.

    Attributes
    ----------
    graph : bool
        Whether the calls are a CUDA graph.
    launches : int
        Calls at a time.
    """

    graph = False
    launches = 1

    def microseconds(self) -> float:
        """Return the time of one call, as a mean of `launches`."""
        raise NotImplementedError


class _Clock(Timer):
    def __init__(self, call: Call, launches: int | None) -> None:
        self._call = call
        self.launches = launches or _enough(self.microseconds())

    def microseconds(self) -> float:
        start = time.perf_counter_ns()
        for _ in range(self.launches):
            self._call()
        return (time.perf_counter_ns() - start) / 1e3 / self.launches


class _Graph(Timer):
    def __init__(self, call: Call, launches: int | None, ffi: Any) -> None:
        import torch

        self._call, self._ffi = call, ffi
        self._stream = torch.cuda.Stream()
        with ffi.use_torch_stream(torch.cuda.stream(self._stream)):
            for _ in range(3):
                call()
        torch.cuda.synchronize()
        if launches is None:
            self._replay = self._captured()
            launches = _enough(self.microseconds())
        self.launches = launches
        self._replay = self._captured()

    def _captured(self) -> Call:
        import torch

        def one_by_one() -> None:
            for _ in range(self.launches):
                self._call()

        graph = torch.cuda.CUDAGraph()
        try:
            with self._ffi.use_torch_stream(torch.cuda.graph(graph, stream=self._stream)):
                one_by_one()
        except RuntimeError:  # what cannot be captured is launched
            torch.cuda.synchronize()
            self.graph = False
            return one_by_one
        self.graph = True
        replay: Call = graph.replay
        return replay

    def microseconds(self) -> float:
        import torch

        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self._replay()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / self.launches


def _enough(microseconds: float) -> int:
    return max(1, min(MOST_LAUNCHES, round(MICROSECONDS / max(microseconds, 1e-3))))


def in_turns(timers: Sequence[Timer], turns: int) -> list[list[float]]:
    """Return `turns` times of each timer, from interleaved runs, forwards and backwards.

    Parameters
    ----------
    timers : sequence of Timer
        Timers of the calls to compare.
    turns : int
        Number of times.

    Returns
    -------
    list of list of float
        Microseconds.
    """
    times: list[list[float]] = [[] for _ in timers]
    for turn in range(turns):
        order = range(len(timers))
        for number in order if turn % 2 == 0 else reversed(order):
            times[number].append(round(timers[number].microseconds(), 4))
    return times


def median(times: Sequence[float]) -> float:
    """Return the median of times, to a tenth of a nanosecond."""
    return round(statistics.median(times), 4)


def _first_cpu() -> dict[str, str]:
    """Return Linux's description of the first processor."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    pairs = [(key.strip(), value.strip()) for key, _, value in (x.partition(":") for x in lines)]
    return dict(reversed(pairs))


def _features() -> set[str]:
    """Return the features that programs may use; tiles (AMX) must be requested."""
    facts = _first_cpu()
    found = {*facts.get("flags", "").split(), *facts.get("Features", "").split()}
    request = 158, 0x1023, 18  # arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA
    if "amx_tile" in found and ctypes.CDLL(None).syscall(*request) != 0:
        found = {feature for feature in found if not feature.startswith("amx_")}
    return found


def _load_runtime(device: str, folder: Path) -> Any:
    """Load TVM's runtime; return its Python binding."""
    try:
        import tvm_ffi
    except ImportError as error:
        python = sys.version.split()[0]
        raise Unfit(f"TVM's binding does not load in Python {python}: {error}") from error
    binding = Path(str(tvm_ffi.__file__)).parent
    _open(str(next(binding.rglob("libtvm_ffi.so"))))
    _open(str(folder / "libtvm_runtime.so"))
    if device == "cuda":
        try:
            import torch
        except ImportError as error:
            raise Unfit(f"needs PyTorch for CUDA 13: {error}") from error
        if not torch.cuda.is_available():
            raise Unfit("PyTorch finds no GPU")
        torch.zeros(1, device="cuda")  # opens the driver, and CUDA's runtime library
        places = [Path(p, f"nvidia/cu13/lib/{CUDART}") for p in sys.path]
        _open(*[str(p) for p in places if p.exists()], CUDART)
        _open(str(folder / "libtvm_runtime_cuda.so"))
    return tvm_ffi


def _open(*names: str) -> None:
    """Load the first library that can be loaded."""
    errors = []
    for name in names:
        try:
            ctypes.CDLL(name, ctypes.RTLD_GLOBAL)
            return
        except OSError as error:
            errors.append(str(error))
    raise Unfit("; ".join(errors))
