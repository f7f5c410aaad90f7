"""The verbs of the command line as functions: `verify`, `bench`, `explain`, `tune`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bnncc.errors import UsageError, onnx_needed
from bnncc.files import kind_of
from bnncc.options import CompileOptions
from bnncc.runtime import runner
from bnncc.runtime.artifact import Artifact

if TYPE_CHECKING:
    from bnncc.frontend.formats import Model

Compiled = Artifact | str | Path
"""An artifact, or its file."""


@onnx_needed()
def verify(
    model: Model,
    artifact: Compiled,
    inputs: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    params: str | Path | None = None,
    labels: Any = None,
    scores: str | None = None,
    min_accuracy: float | None = None,
) -> dict[str, Any]:
    """Check an artifact against the model it was compiled from, layer by layer.

    Parameters
    ----------
    model : path, onnx.ModelProto or torch.export.ExportedProgram
        The model.
    artifact : Artifact or path
        The compiled model.
    inputs : mapping of str to ndarray, optional
        Inputs of the artifact; random by default.
    seed : int
        Seed of the random inputs.
    params : path, optional
        Parameters of an MXNet network, if not in the default file.
    labels : array of int, optional
        A class number for each example in `inputs`, to measure accuracy.
    scores : str, optional
        Output with a score per class; by default the only output.
    min_accuracy : float, optional
        Least accuracy that passes, from 0 to 1.

    Returns
    -------
    dict
        See docs/report.md; ``passed`` is true if outputs agree and accuracy is sufficient.
    """
    import numpy as np

    from bnncc import agreement

    return agreement.verify(
        model, _loaded(artifact), inputs, seed=seed, params=params,
        labels=None if labels is None else np.asarray(labels), scores=scores,
        min_accuracy=min_accuracy,
    )  # fmt: skip


def bench(
    artifact: Compiled,
    *,
    threads: int | None = None,
    repeat: int = 200,
    seed: int = 0,
    batch: int | None = None,
) -> dict[str, Any]:
    """Time a network and each of its kernels.

    Parameters
    ----------
    artifact : Artifact or path
        The network, which runs on this machine or on its device.
    threads : int, optional
        Maximum number of threads; by default the number of CPUs available.
    repeat : int
        Number of timed runs.
    seed : int
        Seed of the random inputs.
    batch : int, optional
        Size of a dynamic batch; 1 by default.

    Returns
    -------
    dict
        See docs/report.md; times are in microseconds.
    """
    return runner.bench(_loaded(artifact), threads=threads, repeat=repeat, seed=seed, batch=batch)


@onnx_needed()
def explain(model: Model | Artifact, **options: Any) -> dict[str, Any]:
    """Return how each layer of a model is computed, and why some stay in float.

    Parameters
    ----------
    model : model, Artifact or path of either
        What to explain; a model is compiled first.
    **options
        Options of `bnncc.compile`.

    Returns
    -------
    dict
        See docs/report.md.

    Raises
    ------
    UsageError
        If options are given with an artifact.
    """
    if isinstance(model, str | os.PathLike) and kind_of(Path(model)) == "a bnncc artifact":
        model = Artifact.load(Path(model), check_host=False)
    if isinstance(model, Artifact):
        if options:
            raise UsageError("options are for models: an artifact is compiled already")
        return model.report
    from bnncc.driver import compile

    return compile(model, **options).report


@onnx_needed()
def tune(
    model: str | os.PathLike[str],
    *,
    tuning_dir: str | Path = "tune_logs",
    trials: int = 512,
    time_limit: float | None = None,
    kernels: str | None = None,
    measure: Literal["time", "instructions"] = "time",
    jobs: int | None = None,
    lock_file: str | Path | None = None,
    device: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Search for the fastest schedule of each kernel, and store it in a folder of records.

    Parameters
    ----------
    model : path
        The model.
    tuning_dir : path
        Folder of records to read and extend; pass it to `bnncc.compile` afterwards.
    trials : int
        Total number of kernels to try, including those of earlier runs.
    time_limit : float, optional
        Start no trial after this many seconds.
    kernels : str, optional
        Regular expression: tune only kernels whose description matches.
    measure : {"time", "instructions"}
        What to minimise; instructions are those of an emulated Arm processor.
    jobs : int, optional
        Number of kernels to build in parallel; by default the number of CPUs available.
    lock_file : path, optional
        File to lock while measuring.
    device : mapping, optional
        Arguments of `bnncc.remote.connect`, to measure on that device.
    **options
        Options of `bnncc.compile`.

    Returns
    -------
    dict
        Kernels with their default and best times, and the network before and after.

    Raises
    ------
    UsageError
        If an argument is wrong.
    """
    if measure not in ("time", "instructions"):
        raise UsageError(f"measure is `{measure}`, not one of time, instructions")
    try:
        pattern = None if kernels is None else re.compile(kernels)
    except re.error as error:
        raise UsageError(f"kernels: `{kernels}` is not a regular expression: {error}") from error
    try:
        asked = CompileOptions(**options)
    except TypeError as error:  # a name that it does not know
        raise UsageError(str(error).replace("CompileOptions.__init__()", "tune")) from error
    from bnncc.targets.catalog import resolve
    from bnncc.targets.spec import TargetSpec
    from bnncc.tuning import network

    target = asked.target if isinstance(asked.target, TargetSpec) else resolve(str(asked.target))
    return network.tune(
        Path(model),
        replace(asked, threads=asked.threads or 1, tuned=False, confirm=False),
        target,
        folder=Path(tuning_dir),
        pattern=pattern,
        device=None if device is None else dict(device),
        method="clock" if measure == "time" else measure,
        trials=trials,
        time_limit=time_limit,
        jobs=jobs,
        lock=None if lock_file is None else Path(lock_file),
        command="bnncc.tune",
    )


def _loaded(artifact: Compiled) -> Artifact:
    return artifact if isinstance(artifact, Artifact) else Artifact.load(artifact)
