"""Compiled networks: save, load, describe and run them."""

from __future__ import annotations

import html
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bnncc import report
from bnncc.errors import ArtifactError, InputError, VerificationError, deprecated
from bnncc.files import read_npz, require_path, write_atomic
from bnncc.options import require_int
from bnncc.runtime import container, cuda, manifest
from bnncc.runtime.manifest import TensorInfo
from bnncc.runtime.selfcheck import Stored, unpack
from bnncc.runtime.session import GpuSession, Session, check_tensor, load_library, stored_as


class Device(Protocol):
    """Another machine that runs a network: `bnncc.remote.network.Device`."""

    address: str
    info: dict[str, Any]

    @property
    def processor(self) -> str:
        """The model of its processor, or ``unknown``."""

    def check(self, content: dict[str, Any], path: str) -> None:
        """Refuse an artifact, by its manifest, that the device cannot run."""

    def load(self, library: bytes) -> Any:
        """Upload and load ``lib.so``; return its module on the device."""

    def session(
        self, module: Any, inputs: tuple[TensorInfo, ...], *, check_finite: bool
    ) -> Session:
        """Return a virtual machine on the device."""


class Artifact:
    """A compiled network.

    Made by `bnncc.compile` or `Artifact.load`. Safe to run from several threads: each gets its own
    virtual machine. Copied or pickled, for another process, it is loaded again where it runs.

    Attributes
    ----------
    inputs, outputs : tuple of TensorInfo
        Name, shape (a str is a symbolic dimension) and dtype.
    manifest : dict
        See docs/artifact.md.
    device : Device or None
        Where it runs; None is this machine.
    """

    def __init__(self, content: dict[str, Any], members: dict[str, bytes]) -> None:
        self.manifest = content
        self.inputs, self.outputs = (
            tuple(TensorInfo.of(t) for t in content[key]) for key in ("inputs", "outputs")
        )
        self.device: Device | None = None
        self._members = members
        self._source = str(content["model"])
        self._lock = threading.Lock()
        self._module: Any = None
        self._local = threading.local()

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        check_host: bool = True,
        selfcheck: bool = False,
        for_this_machine: bool | None = None,
    ) -> Artifact:
        """Read an artifact file.

        Parameters
        ----------
        path : path
            Written by `save` or ``bnncc compile``.
        check_host : bool
            Reject a file that this machine cannot run. With False it can be inspected, or run on a
            device.
        selfcheck : bool
            Run the network on the inputs stored in it, and reject it if outputs are wrong.
        for_this_machine : bool, optional
            Deprecated name of `check_host`.

        Notes
        -----
        A missing, damaged or incompatible file is an `ArtifactError`, lacking CPU features are a
        `TargetError`, a self-check that fails is a `VerificationError`. Loading a file is trusting
        it: it holds code (docs/artifact.md).
        """
        if for_this_machine is not None:
            deprecated("for_this_machine", "check_host")
            check_host = for_this_machine
        content, members = container.read_file(path)
        manifest.check(content, str(path))
        if content["report"]["format"] != report.FORMAT:
            current = report.with_new_keys(content["report"])
            content = container.sealed({**content, "report": current}, members)
        if check_host:
            manifest.check_machine(content, str(path), manifest.this_machine())
        artifact = cls(content, members)
        artifact._source = str(path)
        if selfcheck:
            artifact.require_selfcheck()
        return artifact

    @classmethod
    def of(cls, artifact: Artifact | str | Path) -> Artifact:
        """Return an artifact, or the one that a file holds."""
        return artifact if isinstance(artifact, Artifact) else cls.load(artifact)

    def save(self, path: str | Path) -> int:
        """Write the artifact to `path` atomically, and return its size in bytes."""
        require_path(path=path)
        return write_atomic(path, container.file_chunks(self.manifest, self._members))

    @property
    def report(self) -> dict[str, Any]:
        """The report of the compilation (docs/report.md)."""
        size = container.file_size(self.manifest)
        return dict(report.with_old_keys(report.with_file_size(self.manifest["report"], size)))

    @property
    def library(self) -> bytes:
        """``lib.so``."""
        return self._members[container.LIBRARY]

    def __repr__(self) -> str:
        return (
            f"<Artifact {self.manifest['model']} for {self.manifest['target']['name']}: "
            f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}>"
        )

    def _repr_html_(self) -> str:
        """Return a table for notebooks."""
        summary = self.manifest["report"]["summary"]
        layers = ", ".join(f"{summary[k]} {k.replace('_', '-')}" for k in report.KINDS)
        rows = {
            "target": self.manifest["target"]["name"],
            "inputs": ", ".join(map(str, self.inputs)),
            "outputs": ", ".join(map(str, self.outputs)),
            "layers": layers,
            "kernels": f"{summary['kernels']}, {summary['tuned']} tuned",
            "size": f"{container.file_size(self.manifest):,} bytes",
        }
        cells = "".join(
            f"<tr><th style='text-align:left'>{key}</th>"
            f"<td style='text-align:left'>{html.escape(value)}</td></tr>"
            for key, value in rows.items()
        )
        model = html.escape(str(self.manifest["model"]))
        return f"<table><caption>bnncc artifact of {model}</caption>{cells}</table>"

    def run(
        self, inputs: Mapping[str, Any], *, out: Mapping[str, np.ndarray] | None = None
    ) -> dict[str, np.ndarray]:
        """Run the network once.

        Parameters
        ----------
        inputs : mapping of str to array
            By input name: NumPy arrays, or anything with ``__dlpack__`` in CPU memory. Writeable
            contiguous arrays that start at a multiple of 64 bytes are read in place, others copied.
        out : mapping of str to ndarray, optional
            By output name, one for each: writeable contiguous arrays of its dtype and shape, which
            the results are written to. Arrays that start at a multiple of 64 bytes, as those do
            that `run` returns, are written by the network itself, others by a copy.

        Returns
        -------
        dict of str to ndarray
            By output name; the arrays are the caller's, or those of `out`.

        Notes
        -----
        Names, shapes or dtypes other than those of `inputs` are an `InputError`, and so is a value
        that is not finite if the network was compiled with `check_finite`, and an array in `out`
        that does not fit.
        """
        check_names(inputs, self.inputs, "input")
        session = self.session()
        tensors = session.tensors(inputs)
        session.use_threads()
        if out is not None:
            check_names(out, self.outputs, "output")
            places = {info.name: out[info.name] for info in self.outputs}
            session.run_into(tensors, self.outputs, list(places.values()))
            return places
        outputs = session.arrays(session.run(tensors))
        return {t.name: a for t, a in zip(self.outputs, outputs, strict=True)}

    def selfchecks(self) -> list[Stored]:
        """Return the stored checks: inputs, and the stored part of the expected outputs.

        Raises
        ------
        ArtifactError
            If they do not fit the manifest.
        """
        return unpack(self._members[container.SELFCHECK], self.inputs, self.outputs)

    def selfcheck_arrays(
        self, number: int = 0
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Return inputs and expected outputs of a check whose outputs are stored completely.

        `bnncc.agreement.whole_check` computes them of any check, from the model.

        Raises
        ------
        ArtifactError
            If outputs are too large to be stored whole, or do not fit the manifest.
        """
        check = self.selfchecks()[number]
        if any(e.where is not None for e in check.expected):
            raise ArtifactError("selfcheck.npz holds only some values of the outputs")
        return check.inputs, {e.name: e.values for e in check.expected}

    def selfcheck(self) -> list[dict[str, Any]]:
        """Run the network on the checks stored in it, on this machine or on `device`.

        Returns
        -------
        list of dict
            For each check and output: ``check`` (what inputs it has), ``name``, ``passed``,
            ``max_abs_error``, and ``compared``: how many of its elements are stored.
        """
        results = []
        for check in self.selfchecks():
            made = self.run(check.inputs)
            for expected in check.expected:
                results.append({"check": check.style, **expected.compare(made[expected.name])})
        return list(report.with_old_keys(results))

    def require_selfcheck(self) -> None:
        """Run the self-check, and raise an error if it fails.

        Raises
        ------
        VerificationError
            If an output is wrong.
        """
        bad = [result for result in self.selfcheck() if not result["passed"]]
        if bad:
            where = "" if self.device is None else f" on {self.device.address}"
            raise VerificationError(
                f"{self._source}: the self-check fails{where}: `{bad[0]['name']}` has a max abs "
                f"error of {bad[0]['max_abs_error']:.3g} on {bad[0]['check'] or 'its'} inputs "
                f"({len(bad)} outputs fail)",
                hint="`bnncc verify MODEL ARTIFACT` names the kernel, or says that a value lies "
                "within rounding of a step",
            )

    def read_inputs(
        self, path: str | Path, inputs: tuple[TensorInfo, ...] | None = None
    ) -> dict[str, np.ndarray]:
        """Read this network's inputs from an npz file; what does not fit is an `InputError`.

        Other arrays are ignored: test sets have labels beside the images. A network with one input
        also reads an npy file. `inputs` replaces the description of the inputs.
        """
        inputs = self.inputs if inputs is None else inputs
        known = {t.name: t for t in inputs}
        symbols: dict[str, tuple[int, str]] = {}

        def check(name: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
            native = dtype.newbyteorder("=")  # what runs converts it
            check_tensor(known[name], shape, native, symbols, source=f"{path}: ")

        arrays = read_npz(path, names=known, check=check)
        check_names(arrays, inputs, "input", source=f"{path}: ")
        return {name: _typed(array, known[name]) for name, array in arrays.items()}

    def session(self, *, threads: int | None = None) -> Session:
        """Return the virtual machine of the calling thread, created on first use.

        Parameters
        ----------
        threads : int, optional
            Maximum number of threads from now on when the calling thread runs this network;
            unchanged if not given, and at first what `bnncc.runtime.threads.prepare` allows.
        """
        session: Session | None = getattr(self._local, "session", None)
        if session is None:
            check_finite = self.manifest["semantics"]["check_finite"]
            with self._lock:
                if self._module is None:
                    self._module = self._load(self._members[container.LIBRARY])
                if self.device is None and self._gpus:
                    session = GpuSession(self._module, self.inputs, check_finite=check_finite)
                elif self.device is None:
                    session = Session(
                        self._module, self.inputs, check_finite=check_finite,
                        in_place=self.manifest["semantics"].get("in_place"),
                    )  # fmt: skip
                else:
                    session = self.device.session(
                        self._module, self.inputs, check_finite=check_finite
                    )
            self._local.session = session
        if threads is not None:
            require_int(threads=threads)
            session.limit_threads(threads)
        return session

    def threads_of(self, available: int) -> int:
        """Return how many of the available threads kernels use: one, if compiled for one."""
        return 1 if self.manifest["options"]["threads"] == 1 else available

    def on(self, device: Device | None) -> Artifact:
        """Do what `on_device` does, under its deprecated name."""
        deprecated("Artifact.on", "Artifact.on_device")
        return self.on_device(device)

    def on_device(self, device: Device | None) -> Artifact:
        """Return the same network, which runs on `device`.

        Parameters
        ----------
        device : Device, optional
            From `bnncc.remote.connect`; None is this machine.

        Notes
        -----
        An artifact that the device cannot run is refused before anything is sent: a `TargetError`
        for its processor, an `ArtifactError` for its TVM.
        """
        if device is not None:
            device.check(self.manifest, self._source)
        twin = _artifact(self.manifest, self._members, self._source)
        twin.device = device
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        # What loading made belongs to this process; a copy loads the library when it first runs.
        if self.device is not None:
            raise TypeError(f"an artifact on a device ({self.device.address}) cannot be copied")
        return _artifact, (self.manifest, self._members, self._source)

    @property
    def _gpus(self) -> tuple[str, ...]:
        return tuple(self.manifest["target"]["spec"].get("gpus", ()))

    def _load(self, library: bytes) -> Any:
        if self._gpus and self.device is None:
            cuda.load_runtime()
        return load_library(library) if self.device is None else self.device.load(library)


def _artifact(content: dict[str, Any], members: dict[str, bytes], source: str) -> Artifact:
    made = Artifact(content, members)
    made._source = source
    return made


def _typed(array: np.ndarray, info: TensorInfo) -> np.ndarray:
    """Return an array read from a file in the type of its tensor."""
    return array.view(info.dtype) if stored_as(array.dtype, info.dtype) else array


def check_names(
    given: Mapping[str, Any], infos: tuple[TensorInfo, ...], what: str, *, source: str = ""
) -> None:
    """Refuse arrays that are not exactly those of `infos`, by name.

    Raises
    ------
    InputError
        If one is missing, unknown, or there is no mapping.
    """
    if not isinstance(given, Mapping):
        raise InputError(
            f"{source}{what}s are of type {type(given).__name__}, expected arrays by name",
            hint=f"{what}s are: {', '.join(map(str, infos)) or 'none'}",
        )
    wanted = [t.name for t in infos]
    if given.keys() == set(wanted):
        return
    hint = f"{what}s are: {', '.join(map(str, infos)) or 'none'}"
    if unknown := [name for name in given if name not in wanted]:
        raise InputError(f"{source}the network has no {what} `{unknown[0]}`", hint=hint)
    if missing := [name for name in wanted if name not in given]:
        raise InputError(f"{source}{what} `{missing[0]}` is missing", hint=hint)
