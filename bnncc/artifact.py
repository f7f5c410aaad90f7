"""Compiled networks: saved, loaded, described and run."""

from __future__ import annotations

import io
import os
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bnncc import container, manifest, report, threads
from bnncc.errors import ArtifactError, InputError
from bnncc.files import read_npz, write_atomic
from bnncc.manifest import TensorInfo

ALIGNMENT = 64
"""Bytes; what TVM's generated code may assume of its tensors. Inputs elsewhere are copied."""

_CPU = 1  # DLPack's kDLCPU


class Artifact:
    """A compiled network.

    Made by `bnncc.compile` or `Artifact.load`. Safe to run from several threads: each gets its own
    virtual machine.

    Attributes
    ----------
    inputs, outputs : tuple of TensorInfo
        Name, shape (a str is a symbolic dimension) and dtype.
    manifest : dict
        See docs/artifact.md.
    """

    def __init__(self, content: dict[str, Any], members: dict[str, bytes]) -> None:
        self.manifest = content
        self.inputs, self.outputs = (
            tuple(TensorInfo(t["name"], tuple(t["shape"]), t["dtype"]) for t in content[key])
            for key in ("inputs", "outputs")
        )
        self._members = members
        self._lock = threading.Lock()
        self._module: Any = None
        self._local = threading.local()

    @classmethod
    def load(cls, path: str | Path, *, for_this_machine: bool = True) -> Artifact:
        """Read an artifact file.

        Parameters
        ----------
        path : path
            Written by `save` or ``bnncc compile``.
        for_this_machine : bool
            Refuse a file this machine cannot run; False is for looking into it only.

        Returns
        -------
        Artifact

        Notes
        -----
        A missing, damaged or incompatible file is an `ArtifactError`, lacking CPU features are a
        `TargetError`.
        """
        content, members = container.read_file(path)
        manifest.check(content, str(path))
        if for_this_machine:
            manifest.check_versions(content, str(path))
            manifest.check_machine(content, str(path))
        return cls(content, members)

    def save(self, path: str | Path) -> int:
        """Write the artifact to `path`, whole or not at all, and return its size in bytes."""
        return write_atomic(path, container.file_chunks(self.manifest, self._members))

    @property
    def report(self) -> dict[str, Any]:
        """What was compiled how (docs/report.md)."""
        return report.with_file_size(self.manifest["report"], container.file_size(self.manifest))

    def __repr__(self) -> str:
        return (
            f"<Artifact {self.manifest['model']} for {self.manifest['target']['name']}: "
            f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}>"
        )

    def run(self, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Run the network once.

        Parameters
        ----------
        inputs : mapping of str to array
            By input name: NumPy arrays, or anything with ``__dlpack__`` in CPU memory. Writeable
            contiguous arrays that start at a multiple of 64 bytes are read in place, others copied.

        Returns
        -------
        dict of str to ndarray
            By output name; the arrays are the caller's.

        Notes
        -----
        Names, shapes or dtypes other than those of `inputs` are an `InputError`, and so is a value
        that is not finite if the network was compiled with `check_finite`.
        """
        self._check_names(inputs)
        session = self.session()
        tensors = session.tensors(inputs)
        session.use_threads()
        outputs = session.flatten(session.main(*tensors))
        return {
            t.name: np.array(np.from_dlpack(a)) for t, a in zip(self.outputs, outputs, strict=True)
        }

    def selfcheck_arrays(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Return the inputs and the right outputs the artifact carries to check itself with.

        Raises
        ------
        ArtifactError
            If they do not fit the manifest.
        """
        known = {f"input_{i}": t for i, t in enumerate(self.inputs)}
        known.update({f"output_{i}": t for i, t in enumerate(self.outputs)})

        def check(name: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
            check_tensor(known[name], shape, dtype, {}, what="array")

        data = self._members[container.SELFCHECK]
        try:
            arrays = read_npz(
                io.BytesIO(data), names=known, check=check, source=container.SELFCHECK
            )
        except InputError as error:
            raise ArtifactError(str(error), hint="compile it again") from error
        if missing := sorted(set(known) - set(arrays)):
            raise ArtifactError(f"selfcheck.npz lacks `{missing[0]}`", hint="compile it again")
        return (
            {t.name: arrays[f"input_{i}"] for i, t in enumerate(self.inputs)},
            {t.name: arrays[f"output_{i}"] for i, t in enumerate(self.outputs)},
        )

    def read_inputs(self, path: str | Path) -> dict[str, np.ndarray]:
        """Read this network's inputs from an npz file; what does not fit is an `InputError`.

        Arrays of other names are passed over: test sets have labels beside the images.
        """
        known = {t.name: t for t in self.inputs}
        symbols: dict[str, tuple[int, str]] = {}

        def check(name: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
            check_tensor(known[name], shape, dtype, symbols, source=f"{path}: ")

        arrays = read_npz(path, names=known, check=check)
        self._check_names(arrays, source=f"{path}: ")
        return arrays

    def session(self, *, threads: int | None = None) -> Session:
        """Return this thread's virtual machine, made on first use.

        Parameters
        ----------
        threads : int, optional
            The most that kernels use from now on when the calling thread runs this network; as
            before if not given, and at first all that `bnncc.threads.prepare` allows.

        Returns
        -------
        Session
        """
        session: Session | None = getattr(self._local, "session", None)
        if session is None:
            with self._lock:
                if self._module is None:
                    self._module = _load_library(self._members[container.LIBRARY])
                session = Session(
                    self._module,
                    self.inputs,
                    check_finite=self.manifest["semantics"]["check_finite"],
                )
            self._local.session = session
        if threads is not None:
            session.threads = threads
            session.use_threads()
        return session

    def _check_names(self, given: Mapping[str, Any], *, source: str = "") -> None:
        wanted = [t.name for t in self.inputs]
        if given.keys() == set(wanted):
            return
        hint = f"inputs are: {', '.join(map(str, self.inputs)) or 'none'}"
        if unknown := [name for name in given if name not in wanted]:
            raise InputError(f"{source}the network has no input `{unknown[0]}`", hint=hint)
        if missing := [name for name in wanted if name not in given]:
            raise InputError(f"{source}input `{missing[0]}` is missing", hint=hint)


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
    if shape == info.shape and dtype == info.dtype:
        return
    where = f"{source}{what} `{info.name}`"
    if dtype != info.dtype:
        raise InputError(
            f"{where} has dtype {dtype.name}, wanted {info.dtype}",
            hint=f"convert it: array.astype('{info.dtype}')",
        )
    wanted = ", ".join(map(str, info.shape))
    fits = len(shape) == len(info.shape) and all(
        got == dim if isinstance(dim, int) else got > 0
        for got, dim in zip(shape, info.shape, strict=True)
    )
    if not fits:
        raise InputError(f"{where} has shape [{', '.join(map(str, shape))}], wanted [{wanted}]")
    for got, dim in zip(shape, info.shape, strict=True):
        if isinstance(dim, str):
            before, first = symbols.setdefault(dim, (got, info.name))
            if before != got:
                raise InputError(f"{where}: dimension `{dim}` is {got}, but {before} in `{first}`")


class Session:
    """One virtual machine with what belongs to one thread.

    Attributes
    ----------
    module : tvm.runtime.Module
        The library.
    main : function
        Takes the input tensors in order; returns a tensor or a tuple of tensors.
    threads : int or None
        The most that kernels use; None for the whole pool. `Artifact.run` sees to it, those who
        call `main` do with `use_threads`.
    """

    def __init__(self, module: Any, inputs: tuple[TensorInfo, ...], *, check_finite: bool) -> None:
        import tvm
        from tvm.runtime.vm import VirtualMachine

        self.module = module
        self.vm = VirtualMachine(module, tvm.cpu())
        self.main = self.vm["main"]
        self._inputs = inputs
        self.threads: int | None = None
        self._check_finite = check_finite
        self._scratch: dict[str, tuple[np.ndarray, Any]] = {}

    def use_threads(self) -> int:
        """Have the calling thread's kernels use `threads`, and return how many those are."""
        return threads.use(self.threads)

    def tensors(self, arrays: Mapping[str, Any]) -> list[Any]:
        """Return `arrays` as checked TVM tensors in the order `main` takes them."""
        symbols: dict[str, tuple[int, str]] = {}
        return [self._tensor(info, arrays[info.name], symbols) for info in self._inputs]

    def _tensor(self, info: TensorInfo, value: Any, symbols: dict[str, tuple[int, str]]) -> Any:
        import tvm_ffi

        if isinstance(value, np.ndarray):
            array, owner = value, value
        else:
            array, owner = _view(info, value), value
        check_tensor(info, array.shape, array.dtype.newbyteorder("="), symbols)
        if self._check_finite and array.dtype.kind == "f":
            _require_finite(info, array)
        if array.flags.c_contiguous and array.dtype.isnative:
            aligned = array.ctypes.data % ALIGNMENT == 0
            if aligned and (owner is not array or array.flags.writeable):
                return tvm_ffi.from_dlpack(owner)
        scratch = self._scratch.get(info.name)
        if scratch is None or scratch[0].shape != array.shape:
            buffer = aligned_empty(array.shape, info.dtype)
            scratch = self._scratch[info.name] = (buffer, tvm_ffi.from_dlpack(buffer))
        np.copyto(scratch[0], array)
        return scratch[1]

    @staticmethod
    def flatten(result: Any) -> list[Any]:
        """Return what `main` returned as a list of tensors."""
        import tvm

        return [result] if isinstance(result, tvm.runtime.Tensor) else list(result)


def aligned_empty(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return an uninitialised array that starts at a multiple of `ALIGNMENT` bytes."""
    count = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    raw = np.empty(count + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + count].view(dtype).reshape(shape)


def _view(info: TensorInfo, value: Any) -> np.ndarray:
    """Return a DLPack tensor as an array over the same memory."""
    if not hasattr(value, "__dlpack__"):
        raise InputError(
            f"input `{info.name}` is a {type(value).__name__}, wanted an array",
            hint=f"numpy.asarray(value, '{info.dtype}')",
        )
    if hasattr(value, "__dlpack_device__") and value.__dlpack_device__()[0] != _CPU:
        raise InputError(f"input `{info.name}` is not in CPU memory")
    try:
        return np.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"input `{info.name}` cannot be read through DLPack: {error}") from error


def _require_finite(info: TensorInfo, array: np.ndarray) -> None:
    with np.errstate(all="ignore"):
        total = array.sum(dtype=np.float64)
    if np.isfinite(total):  # the sum of finite float32 values cannot overflow a float64
        return
    bad = np.argwhere(~np.isfinite(array))
    if len(bad):
        index = tuple(int(i) for i in bad[0])
        raise InputError(
            f"input `{info.name}` holds {array[index]} at {list(index)} ({len(bad)} such values), "
            "and the network was compiled with --check-finite"
        )


def _load_library(data: bytes) -> Any:
    """Load a shared library through a private file that is gone when this returns."""
    import tvm

    threads.prepare()
    with tempfile.TemporaryDirectory(prefix="bnncc-") as folder:
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
