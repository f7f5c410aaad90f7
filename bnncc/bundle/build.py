"""Write a bundle: kernels and networks, expected outputs, TVM's runtime, and a runner.

    FOLDER/run.py        runs everything that index.json lists
    FOLDER/kernels/      each candidate as a library, and the expected outputs of each kernel
    FOLDER/networks/     libraries, inputs and expected outputs
    FOLDER/lib/, tvm_ffi/            TVM's runtime and its binding
    FOLDER/bnncc/        the runner, and the files of bnncc that draw inputs and pack weights

``FOLDER.tar.xz`` is the file to copy to the machine.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

import bnncc
from bnncc import topi_binary
from bnncc._version import __version__
from bnncc.bundle.device.runner import FORMAT
from bnncc.bundle.runtime import add_runtime
from bnncc.errors import BnnccError, TargetError, UsageError
from bnncc.files import npz_bytes, replacing
from bnncc.targets.host import normal_arch
from bnncc.targets.spec import TargetSpec
from bnncc.tuning.cases import TOLERANCE

if TYPE_CHECKING:
    from bnncc.runtime.artifact import Artifact

_RUN = '''\
"""Checks and times this bundle: `python run.py --help`."""

import sys
from pathlib import Path

from bnncc.bundle.device.runner import main

sys.exit(main(Path(__file__).resolve().parent))
'''
PRESET: Literal[1, 9] = 9
"""Level of xz compression; packing may take seconds."""

_TAKEN = ("errors.py", "bundle/device/*.py", "ir/dims.py", "runtime/kernel_arguments.py",
          "tuning/cases.py", "tuning/draws.py", "tuning/level_cases.py")  # fmt: skip


@dataclass(frozen=True)
class Candidate:
    """One of several kernels for the same spec."""

    spec: str
    """JSON of the kernel's spec."""
    point: Mapping[str, int]
    """Its point in the design space."""
    library: Path
    """Library, with the kernel as ``main``."""
    label: str
    """Label that distinguishes it from the others."""
    default: bool = False
    """Whether it is the rules' default."""
    threads: int = 1
    """Threads that share it."""


@dataclass(frozen=True)
class Kernel:
    """Kernels that compute the same, to be checked and timed in interleaved runs."""

    name: str
    """For people."""
    candidates: Sequence[Candidate]
    """Candidates."""
    case: Mapping[str, np.ndarray]
    """From `bnncc.tuning.cases.kept`, or a whole case."""
    digest: str
    """Digest of the expected outputs."""
    macs: int = 0
    """Products in a call."""
    tolerance: float = TOLERANCE
    """Tolerance of floats, relative to the largest value."""


@dataclass(frozen=True)
class Network:
    """A network to check and time, as a whole and kernel by kernel."""

    name: str
    """For people."""
    library: bytes
    """``lib.so`` of its artifact."""
    check: bytes
    """Arrays ``input_0`` and so on, ``output_0`` and so on, of one image, as ``.npz``; where there
    is ``where_0``, the output has those values at these places."""
    kernels: Sequence[Mapping[str, Any]]
    """Of its report."""
    inputs: int
    outputs: int
    """`inputs`, `outputs`: numbers of them."""
    batch: int = 1
    """Number of repetitions of the inputs and outputs of `check`."""
    relative: float = TOLERANCE
    """Tolerance of outputs, relative to the largest value."""

    @classmethod
    def of(cls, artifact: Artifact, name: str, number: int = 0) -> Network:
        """Return the network of an artifact.

        Parameters
        ----------
        artifact : Artifact
            Compiled.
        name : str
            For people.
        number : int
            Number of the self-check to run.

        Returns
        -------
        Network

        """
        check = artifact.selfchecks()[number]
        arrays = {f"input_{i}": check.inputs[t.name] for i, t in enumerate(artifact.inputs)}
        for i, known in enumerate(check.expected):
            arrays[f"output_{i}"] = known.values
            if known.where is not None:
                arrays[f"where_{i}"] = known.where
        return cls(
            name, artifact.library, npz_bytes(arrays), artifact.manifest["report"]["kernels"],
            len(artifact.inputs), len(artifact.outputs),
            relative=max(TOLERANCE, *(known.relative for known in check.expected)),
        )  # fmt: skip


@dataclass(frozen=True)
class Contents:
    """Contents of a bundle."""

    kernels: Sequence[Kernel] = ()
    """Kernels to compare."""
    networks: Sequence[Network] = ()
    """Networks to time."""
    scripts: Mapping[str, Path] = field(default_factory=dict)
    """Programs to run as separate parts, by part; they print JSON lines."""
    files: Sequence[Path] = ()
    """Files that these programs need."""
    report: Path | None = None
    """Program that gets the results at the end."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Entries of the index for those programs."""


def check(folder: Path, target: TargetSpec) -> None:
    """Raise an error early if a folder cannot be written, or the target is not supported.

    Parameters
    ----------
    folder : Path
        Folder to write; it is created if it does not exist.
    target : TargetSpec
        Target of the bundle.

    Raises
    ------
    UsageError
        If the folder is not empty, or cannot be created.
    TargetError
        If TVM's runtime for the target is not available.
    """
    arch, here = normal_arch(target.arch or platform.machine()), normal_arch(platform.machine())
    if arch != here or not target.has_runtime:
        raise TargetError(
            f"{target.name}: a bundle holds TVM's runtime for {here}, not for {arch}",
            hint="`bnncc device-kit` and --rpc reach such a device",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        used = any(folder.iterdir())
    except OSError as error:
        raise UsageError(f"{folder}: cannot be made: {error.strerror or error}") from error
    if used:
        raise UsageError(f"{folder}: is not an empty folder", hint="give one that does not exist")
    packed = _archive(folder)
    if os.path.lexists(packed):
        raise UsageError(f"{packed}: exists, and the bundle's archive would overwrite it")


def write(
    folder: Path, target: TargetSpec, contents: Contents, pythons: Sequence[str] = ()
) -> Path:
    """Write a bundle, and its archive beside it.

    Parameters
    ----------
    folder : Path
        After `check`.
    target : TargetSpec
        Target of its kernels.
    contents : Contents
        Its contents.
    pythons : sequence of str
        Versions of Python, as ``3.12``, to support; by default the one in use.

    Returns
    -------
    Path
        The archive.

    Raises
    ------
    BnnccError
        If a file cannot be written, or pip cannot fetch TVM's binding.
    """
    try:
        return _write(folder, target, contents, pythons)
    except BaseException as error:
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not isinstance(error, OSError):
            raise
        where = error.filename or folder
        raise BnnccError(f"{where}: cannot be written: {error.strerror or error}") from error


def _archive(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.tar.xz")


def _write(folder: Path, target: TargetSpec, contents: Contents, pythons: Sequence[str]) -> Path:
    index: dict[str, Any] = {
        **contents.more,
        "format": FORMAT,
        "target": target.name,
        "family": target.family,
        "device": "cuda" if target.gpus else "cpu",
        "features": list(target.features),
        "bnncc": __version__,
        "tvm": importlib.metadata.version("apache-tvm"),
        "kernels": [_add_kernel(k, i, folder) for i, k in enumerate(contents.kernels)],
        "networks": [_add_network(n, i, folder) for i, n in enumerate(contents.networks)],
        "scripts": [{"part": p, "file": f.name} for p, f in contents.scripts.items()],
        "report": contents.report.name if contents.report is not None else "",
    }
    index["bundle"] = hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()
    reports = [contents.report] if contents.report is not None else []
    for file in (*contents.scripts.values(), *contents.files, *reports):
        shutil.copy(file, folder / file.name)
    _add_runner(folder)
    add_runtime(folder, pythons, gpu=bool(target.gpus))
    (folder / "index.json").write_text(json.dumps(index), encoding="utf-8")
    packed = _archive(folder)
    with (
        replacing(packed) as out,
        tarfile.open(None, "w:xz", out, preset=PRESET) as archive,
    ):
        archive.add(folder, folder.name)
    return packed


def _add_kernel(kernel: Kernel, number: int, folder: Path) -> dict[str, Any]:
    place = folder / "kernels" / str(number)
    place.mkdir(parents=True)
    case = npz_bytes(kernel.case, compress=True)
    (place / "case.npz").write_bytes(case)
    candidates = []
    for i, one in enumerate(kernel.candidates):
        shutil.copy(one.library, place / f"{i}.so")
        candidates.append(
            {
                "spec": one.spec, "threads": one.threads, "point": dict(one.point),
                "default": one.default, "label": one.label, "library": f"kernels/{number}/{i}.so",
            }
        )  # fmt: skip
    return {
        "part": f"kernel-{number}", "name": kernel.name, "macs": kernel.macs,
        "case": f"kernels/{number}/case.npz", "digest": kernel.digest,
        "tolerance": kernel.tolerance, "candidates": candidates,
    }  # fmt: skip


def _add_network(network: Network, number: int, folder: Path) -> dict[str, Any]:
    (folder / "networks").mkdir(exist_ok=True, parents=True)
    library, check = f"networks/{number}.so", f"networks/{number}.npz"
    (folder / library).write_bytes(network.library)
    (folder / check).write_bytes(network.check)
    kept = ("name", "args", "zero_plane_args", "sizes")
    return {
        "part": f"network-{number}", "name": network.name, "library": library, "check": check,
        "digest": hashlib.sha256(network.library).hexdigest(), "inputs": network.inputs,
        "outputs": network.outputs, "batch": network.batch, "relative": network.relative,
        "kernels": [{k: kernel[k] for k in kept if k in kernel} for kernel in network.kernels],
    }  # fmt: skip


def _add_runner(folder: Path) -> None:
    """Copy the runner, and the files of bnncc that it needs, which need only NumPy."""
    (folder / "run.py").write_text(_RUN, encoding="utf-8")
    ours = Path(str(bnncc.__file__)).parent
    for pattern in _TAKEN:
        for file in ours.glob(pattern):
            _copy(file, folder / "bnncc" / file.relative_to(ours))
    definitions = Path(str(topi_binary.__file__)).parent
    for file in definitions.rglob("*.py"):
        _copy(file, folder / "bnncc" / "topi_binary" / file.relative_to(definitions))
    for package in ("", "bundle", "bundle/device", "ir", "runtime", "topi_binary", "tuning"):
        (folder / "bnncc" / package / "__init__.py").write_bytes(b"")


def _copy(file: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(file, to)
