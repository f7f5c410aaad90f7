"""The virtual machine of one thread, which runs and times a network."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import numpy as np

from bnncc.errors import ArtifactError, BnnccError, InputError, message_lines
from bnncc.files import scratch_folder
from bnncc.ir.datatypes import datatype
from bnncc.ir.demands import MARK, NO_LIMITS
from bnncc.ir.dims import evaluated, symbols_of
from bnncc.runtime import container, threads
from bnncc.runtime.manifest import TensorInfo

ALIGNMENT = 64
"""Bytes; what TVM's generated code may assume of its tensors. Inputs elsewhere are copied."""

_CPU = 1  # DLPack's kDLCPU
_WARM_UP = 10
_KERNEL_REPEATS = 60
_KERNEL_SECONDS = 100e-6  # of one repeat: short beside what a busy machine interrupts
_KERNEL_SECONDS_IN_ALL = 2.0  # of a slow kernel


def stored_as(dtype: np.dtype, wanted: str) -> bool:
    """Whether `dtype` is how NumPy's files write `wanted`: bfloat16 as two bytes of no type."""
    kind = np.dtype(wanted)
    return bool(dtype.kind == kind.kind == "V" and dtype.itemsize == kind.itemsize)


_NO_NUMBERS = {"U": "text", "S": "text", "O": "objects", "M": "dates", "m": "times"}


def check_tensor(
    info: TensorInfo,
    shape: tuple[int, ...],
    dtype: np.dtype,
    symbols: dict[str, tuple[int, str]],
    *,
    what: str = "input",
    source: str = "",
) -> None:
    """Check shape and dtype against `info`; `symbols` collects what symbolic dimensions stand for.

    Raises
    ------
    InputError
        If they do not fit.
    """
    if stored_as(dtype, info.dtype):
        dtype = np.dtype(info.dtype)
    if shape == info.shape and dtype == info.dtype:
        return
    where = f"{source}{what} `{info.name}`"
    if dtype.kind not in "biufcV":
        raise InputError(f"{where} holds {_NO_NUMBERS[dtype.kind]}, expected {info.dtype}")
    if dtype != info.dtype:
        order = "" if dtype.isnative else " in the byte order of other machines"
        raise InputError(
            f"{where} has dtype {dtype.name}{order}, expected {info.dtype}",
            hint=f"convert it: array.astype('{info.dtype}')",
        )
    wanted = ", ".join(map(str, info.shape))
    fits = len(shape) == len(info.shape) and all(
        got == dim if isinstance(dim, int) else got > 0 or dim in info.may_be_empty
        for got, dim in zip(shape, info.shape, strict=True)
    )
    if not fits:
        empty = [
            dim for got, dim in zip(shape, info.shape, strict=False)
            if not got and isinstance(dim, str) and dim not in info.may_be_empty
        ]  # fmt: skip
        least = f" with `{empty[0]}` at least 1" if empty else ""
        found = ", ".join(map(str, shape))
        raise InputError(f"{where} has shape [{found}], expected [{wanted}]{least}")
    for got, dim in zip(shape, info.shape, strict=True):
        if isinstance(dim, str) and not dim.isidentifier():
            if symbols_of(dim) <= symbols.keys():
                size = evaluated(dim, lambda s: symbols[s][0])
                if size != got:
                    raise InputError(f"{where}: dimension `{dim}` is {got}, expected {size}")
        elif isinstance(dim, str):
            before, first = symbols.setdefault(dim, (got, info.name))
            if before != got:
                raise InputError(f"{where}: dimension `{dim}` is {got}, but {before} in `{first}`")
            most = dict(info.bounds).get(dim, got)
            if got > most:
                raise InputError(
                    f"{where}: dimension `{dim}` is {got}, the network was compiled for at most "
                    f"{most}",
                    hint=f"compile it with --max-dim {dim}={got}",
                )


class Session:
    """A virtual machine, for one thread.

    Attributes
    ----------
    module : tvm.runtime.Module
        The library.
    cpu : tvm.runtime.Device
        Where its tensors are.
    times_kernels : bool
        Whether `time_kernel` can be had.
    threads : int or None
        The most that kernels use; None for the whole pool. `Artifact.run` sees to it, those who
        call `main` do with `use_threads`.
    main : function
        Takes the input tensors in order; returns a tensor or a tuple of tensors.
    main_into : function or None
        Takes tensors for the outputs, too. Where there is one, nothing else holds what `main`
        returns.
    main_in_place : function or None
        As `main_into`, where the inputs of `in_place` are the front of their outputs.
    """

    def __init__(
        self,
        module: Any,
        inputs: tuple[TensorInfo, ...],
        *,
        check_finite: bool,
        cpu: Any = None,
        in_place: Mapping[str, str] | None = None,
    ) -> None:
        import tvm
        from tvm.runtime.vm import VirtualMachine

        self.module = module
        self.cpu = tvm.cpu() if cpu is None else cpu
        self.vm = VirtualMachine(module, self.cpu)
        self.main = self.vm["main"]
        self.main_into = self._variant("main_into")
        self.main_in_place = self._variant("main_in_place") if in_place else None
        self._in_place = dict(in_place or {})
        self.times_kernels = True
        self.threads: int | None = None
        self._inputs = inputs
        self._check_finite = check_finite
        self._scratch: dict[str, tuple[np.ndarray, Any]] = {}

    def _variant(self, name: str) -> Any:
        try:
            return self.vm[name]
        except AttributeError:
            return None

    def use_threads(self) -> int:
        """Have the calling thread's kernels use `threads`, and return how many those are."""
        return threads.use(self.threads)

    def limit_threads(self, count: int) -> None:
        """Set `threads` to `count` and use them, unless that is refused."""
        before, self.threads = self.threads, count
        try:
            self.use_threads()
        except BnnccError:
            self.threads = before
            raise

    def tensors(self, arrays: Mapping[str, Any]) -> list[Any]:
        """Return `arrays` as checked TVM tensors in the order `main` takes them."""
        symbols: dict[str, tuple[int, str]] = {}
        return [self._tensor(info, arrays[info.name], symbols) for info in self._inputs]

    def _tensor(self, info: TensorInfo, value: Any, symbols: dict[str, tuple[int, str]]) -> Any:
        if isinstance(value, np.ma.MaskedArray):
            raise InputError(
                f"input `{info.name}` is a masked array, and a network knows no mask",
                hint="array.filled(value), or array.data",
            )
        if isinstance(value, np.ndarray):
            array, owner = value, value
        else:
            array, owner = _view(info, value), value
        check_tensor(info, array.shape, array.dtype.newbyteorder("="), symbols)
        if self._check_finite and array.dtype.kind == "f":
            _require_finite(info, array)
        if info.datatype:
            _require_declared(info, array)
        if info.limits is not NO_LIMITS:
            why = f"expected {info.limits}: an index or a divisor in the model"
            _refuse_any(info, array, info.limits.broken(array), why)
        return self._placed(info, owner, array)

    def _placed(self, info: TensorInfo, owner: Any, array: np.ndarray) -> Any:
        """Return `array`, which is all of `owner`, as a tensor; in place if its memory serves."""
        import tvm
        import tvm_ffi

        if not array.size:  # NumPy's strides of it are not those that kernels expect
            return tvm.runtime.empty(array.shape, info.dtype)
        if array.dtype.kind == "V":  # NumPy exchanges no bfloat16
            return tvm.runtime.tensor(np.asarray(array, order="C"))
        whole = array.flags.c_contiguous or (info.name in self._in_place and _has_rows(array))
        if whole and array.dtype.isnative:
            aligned = array.ctypes.data % ALIGNMENT == 0
            if aligned and (owner is not array or array.flags.writeable):
                return tvm_ffi.from_dlpack(owner)
        scratch = self._scratch.get(info.name)
        if scratch is None or scratch[0].shape != array.shape:
            buffer = aligned_empty(array.shape, info.dtype)
            scratch = self._scratch[info.name] = (buffer, tvm_ffi.from_dlpack(buffer))
        np.copyto(scratch[0], array)
        return scratch[1]

    def run(self, tensors: list[Any], function: Any = None) -> Any:
        """Call `main`.

        Parameters
        ----------
        tensors : list
            From `tensors`.
        function : function, optional
            `main_into`, if `tensors` are its.

        Returns
        -------
        tvm.runtime.Tensor or sequence of it
            As `main` does.

        Raises
        ------
        InputError
            If an index or a divisor computed from the inputs is none.
        ArtifactError
            If the library takes other tensors than the manifest says.
        """
        try:
            return (function or self.main)(*tensors)
        except (RuntimeError, ValueError, TypeError) as error:
            if (found := check_failed(error)) is not None:
                raise found from error
            said = message_lines(error)
            raise ArtifactError(
                f"lib.so cannot run the inputs that the manifest describes: {said[-1][:200]}",
                hint="compile it again",
            ) from error

    def arrays(self, result: Any) -> list[np.ndarray]:
        """Return what `main` returned as arrays of the caller's own; its memory if none else's."""
        arrays = []
        for tensor in self.flatten(result):
            bfloat16 = str(tensor.dtype) == "bfloat16"
            array = tensor.numpy() if bfloat16 else np.from_dlpack(tensor)
            alone = bfloat16 or (self.main_into is not None and array.flags.writeable)
            arrays.append(array if alone else np.array(array))
        return arrays

    def run_into(
        self, tensors: list[Any], infos: Sequence[TensorInfo], outputs: Sequence[np.ndarray]
    ) -> None:
        """Call `main_into` on aligned arrays, or `main` and copy.

        Parameters
        ----------
        tensors : list
            From `tensors`.
        infos : sequence of TensorInfo
            The outputs.
        outputs : sequence of ndarray
            Where to write them.

        Raises
        ------
        InputError
            If an array does not fit.
        """
        import tvm_ffi

        symbols = {
            dim: (int(size), info.name)
            for info, tensor in zip(self._inputs, tensors, strict=True)
            for dim, size in zip(info.shape, tensor.shape, strict=True)
            if isinstance(dim, str)
        }
        dims = {d for info in infos for d in info.shape}
        known = all(symbols_of(d) <= symbols.keys() for d in dims)
        for info, array in zip(infos, outputs, strict=True):
            _check_place(info, array, symbols, strides=info.name in self._in_place.values())
        aligned = all(a.ctypes.data % ALIGNMENT == 0 and a.dtype.kind != "V" for a in outputs)
        if self.main_into is not None and aligned and known:
            places = [tvm_ffi.from_dlpack(array) for array in outputs]
            everything = [*tensors, *places]
            if self._continued(tensors, infos, places):
                self.run(everything, self.main_in_place)
                return
            if _apart(everything):
                self.run(everything, self.main_into)
                return
        _refuse_shared(infos, outputs)
        made = self.arrays(self.run(tensors))
        for info, place, array in zip(infos, outputs, made, strict=True):
            check_tensor(
                replace(info, shape=array.shape), place.shape, place.dtype, {}, what="output"
            )
            np.copyto(place, array)

    def _continued(
        self, tensors: list[Any], infos: Sequence[TensorInfo], places: list[Any]
    ) -> bool:
        """Whether each input of `in_place` is the front of its output, and all else is apart."""
        if self.main_in_place is None:
            return False
        given = {info.name: t for info, t in zip(self._inputs, tensors, strict=True)}
        made = {info.name: t for info, t in zip(infos, places, strict=True)}
        for past, present in self._in_place.items():
            one, other = given.pop(past), made[present]
            strides = zip(one.shape, one.strides, other.strides, strict=True)
            same = all(size == 1 or a == b for size, a, b in strides)
            if not same or one.data_ptr() != other.data_ptr():
                return False
        return _apart([*given.values(), *places])

    @staticmethod
    def flatten(result: Any) -> list[Any]:
        """Return what `main` returned as a list of tensors."""
        import tvm

        return [result] if isinstance(result, tvm.runtime.Tensor) else list(result)

    def time_network(self, tensors: list[Any], repeat: int) -> np.ndarray:
        """Time `main`.

        Parameters
        ----------
        tensors : list
            From `tensors`.
        repeat : int
            Timed runs, after some that are not.

        Returns
        -------
        ndarray of float64, shape (repeat,)
            Microseconds of each run.
        """
        for _ in range(min(_WARM_UP, repeat)):
            self.main(*tensors)
        times = np.empty(repeat)
        for i in range(repeat):
            start = time.perf_counter_ns()
            self.main(*tensors)
            times[i] = time.perf_counter_ns() - start
        return times / 1e3

    def time_kernel(self, name: str, arguments: Sequence[np.ndarray | int]) -> np.ndarray:
        """Time one kernel alone.

        Parameters
        ----------
        name : str
            As in the report.
        arguments : sequence of ndarray and int
            Inputs, symbolic sizes and outputs.

        Returns
        -------
        ndarray of float64
            Microseconds of a call, as the mean of several, in each of some repeats.
        """
        library = self._library_of(name)
        args = [a if isinstance(a, int) else self._on_device(a) for a in arguments]
        first = library.time_evaluator(name, self.cpu, number=1, repeat=3)(*args).min
        if first < _KERNEL_SECONDS:
            first = library.time_evaluator(name, self.cpu, number=10, repeat=3)(*args).min
        number = max(1, round(_KERNEL_SECONDS / max(first, 1e-9)))
        repeat = int(min(_KERNEL_REPEATS, max(3, _KERNEL_SECONDS_IN_ALL / (number * first + 1e-9))))
        timer = library.time_evaluator(name, self.cpu, number=number, repeat=repeat)
        return np.array(timer(*args).results) * 1e6

    def run_kernel(
        self, name: str, arguments: Sequence[np.ndarray | int]
    ) -> list[np.ndarray | int]:
        """Run one kernel alone.

        Parameters
        ----------
        name : str
            As in the report.
        arguments : sequence of ndarray and int
            Inputs, symbolic sizes and outputs; they stay as they are.

        Returns
        -------
        list of ndarray and int
            The arguments afterwards.
        """
        import tvm

        given = [
            a if isinstance(a, int) else tvm.runtime.tensor(np.asarray(a, order="C"), self.cpu)
            for a in arguments
        ]
        self._library_of(name).get_function(name)(*given)
        return [a if isinstance(a, int) else a.numpy() for a in given]

    def _library_of(self, kernel: str) -> Any:
        found = next((m for m in self.module.imports if m.implements_function(kernel)), None)
        if found is None:
            raise BnnccError(f"lib.so contains no kernel `{kernel}`", hint="compile it again")
        return found

    def _on_device(self, array: np.ndarray) -> Any:
        """Return an aligned, contiguous array as a tensor where the network runs."""
        import tvm_ffi

        return tvm_ffi.from_dlpack(array)


class CopyingSession(Session):
    """A virtual machine in other memory; inputs and outputs are copied."""

    def _variant(self, name: str) -> None:
        return None

    def arrays(self, result: Any) -> list[np.ndarray]:
        """Return what `main` returned as arrays."""
        return [tensor.numpy() for tensor in self.flatten(result)]

    def _placed(self, info: TensorInfo, owner: Any, array: np.ndarray) -> Any:
        return self._on_device(np.asarray(array, array.dtype.newbyteorder("="), order="C"))

    def _on_device(self, array: np.ndarray) -> Any:
        import tvm

        return tvm.runtime.tensor(array, self.cpu)


class GpuSession(CopyingSession):
    """Runs a network on this machine's first GPU."""

    def __init__(self, module: Any, inputs: tuple[TensorInfo, ...], *, check_finite: bool) -> None:
        import tvm

        super().__init__(module, inputs, check_finite=check_finite, cpu=tvm.cuda(0))

    def time_network(self, tensors: list[Any], repeat: int) -> np.ndarray:
        """Time `main` by the GPU's own clock, in microseconds."""
        timer = self.vm.time_evaluator("main", self.cpu, number=1, repeat=repeat)
        self.main(*tensors)
        return np.array(timer(*tensors).results) * 1e6


def aligned_empty(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return an uninitialized array that starts at a multiple of 64 bytes.

    Networks read and write such arrays in place; others are copied.
    """
    count = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    raw = np.empty(count + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + count].view(dtype).reshape(shape)


def _has_rows(array: np.ndarray) -> bool:
    """Whether the last axis of an array is contiguous, and the others go upwards."""
    size = array.itemsize
    return (
        array.ndim > 0
        and array.strides[-1] == size
        and all(stride > 0 and stride % size == 0 for stride in array.strides)
    )


def _check_place(
    info: TensorInfo, array: Any, symbols: dict[str, tuple[int, str]], *, strides: bool = False
) -> None:
    """Refuse an array that an output cannot be written to."""
    if not isinstance(array, np.ndarray):
        raise InputError(
            f"output `{info.name}` is a {type(array).__name__}, expected a NumPy array"
        )
    check_tensor(info, array.shape, array.dtype, symbols, what="output")
    whole = array.flags.c_contiguous or (strides and _has_rows(array))
    if not (whole and array.flags.writeable):
        raise InputError(f"the array for output `{info.name}` is not contiguous and writeable")


def _refuse_shared(infos: Sequence[TensorInfo], arrays: Sequence[np.ndarray]) -> None:
    """Refuse arrays for outputs of which a later one would overwrite an earlier one."""
    places = list(zip(infos, arrays, strict=True))
    for (one, array), (other, place) in combinations(places, 2):
        if np.may_share_memory(array, place) and np.shares_memory(array, place):
            raise InputError(
                f"the arrays for outputs `{one.name}` and `{other.name}` share memory",
                hint="give each output an array of its own",
            )


def _apart(tensors: Sequence[Any]) -> bool:
    """Whether no two tensors share memory, nor lie between each other's elements."""
    sizes = [
        (1 + sum((n - 1) * s for n, s in zip(t.shape, t.strides, strict=True))) * t.dtype.itemsize
        for t in tensors
    ]
    starts = [t.data_ptr() for t in tensors]
    spans = sorted((start, start + size) for start, size in zip(starts, sizes, strict=True))
    return all(before[1] <= after[0] for before, after in pairwise(spans))


def _view(info: TensorInfo, value: Any) -> np.ndarray:
    """Return a DLPack tensor as an array over the same memory."""
    if not hasattr(value, "__dlpack__"):
        raise InputError(
            f"input `{info.name}` is a {type(value).__name__}, expected an array",
            hint=f"numpy.asarray(value, '{info.dtype}')",
        )
    if hasattr(value, "__dlpack_device__") and value.__dlpack_device__()[0] != _CPU:
        raise InputError(f"input `{info.name}` is not in CPU memory")
    try:
        return np.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"input `{info.name}` cannot be read through DLPack: {error}") from error


def _refuse_any(info: TensorInfo, array: np.ndarray, wrong: np.ndarray, why: str) -> None:
    """Refuse an array if any of its values is `wrong`; the message names the first."""
    bad = np.argwhere(wrong)
    if len(bad):
        index = tuple(int(i) for i in bad[0])
        raise InputError(
            f"input `{info.name}` holds {array[index]} at {list(index)} ({len(bad)} such values), "
            f"{why}"
        )


def _require_finite(info: TensorInfo, array: np.ndarray) -> None:
    with np.errstate(all="ignore"):
        total = array.sum(dtype=np.float64)
    if np.isfinite(total):  # the sum of finite float32 values cannot overflow a float64
        return
    why = "and the network was compiled with --check-finite"
    _refuse_any(info, array, ~np.isfinite(array), why)


def check_failed(error: Exception) -> InputError | None:
    """Return what a check in generated code found, if that is what `error` is about."""
    _, mark, what = str(error).strip().partition(MARK)
    return InputError(what.splitlines()[0]) if mark else None


def _require_declared(info: TensorInfo, array: np.ndarray) -> None:
    kind = datatype(info.datatype)
    if kind is not None and not kind.holds_all(array):
        _refuse_any(info, array, ~kind.holds(array), f"and the model declares it {kind}")


def load_library(data: bytes) -> Any:
    """Load a shared library through a private file that is gone when this returns."""
    import tvm

    threads.prepare()
    with scratch_folder("load") as folder:
        path = os.path.join(folder, container.LIBRARY)
        with open(path, "wb") as file:
            file.write(data)
        try:
            return tvm.runtime.load_module(path)
        except (OSError, RuntimeError) as error:
            raise ArtifactError(
                f"lib.so cannot be loaded: {str(error).splitlines()[-1]}",
                hint="if the folder for temporary files forbids execution, set TMPDIR to another",
            ) from error
