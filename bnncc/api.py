"""The verbs `explain` and `tune` of the command line as functions."""

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
from bnncc.runtime.artifact import Artifact

if TYPE_CHECKING:
    from bnncc.frontend.formats import Model


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
        What to minimize; instructions are those of an emulated Arm processor.
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
