"""Convert times of a network that ran from a bundle to the form of `bnncc bench`."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from bnncc.bundle.results import read
from bnncc.errors import TuningError, VerificationError
from bnncc.runtime import runner
from bnncc.runtime.artifact import Artifact
from bnncc.targets.spec import TargetSpec


def target_of(artifact: Artifact) -> TargetSpec:
    """Return the target that an artifact was compiled for."""
    return TargetSpec.of(artifact.manifest["target"]["spec"])


def bench(artifact: Artifact, path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the times of an artifact in a bundle's results.

    Parameters
    ----------
    artifact : Artifact
        The network, with the same code as in the bundle.
    path : Path
        Results file.

    Returns
    -------
    dict
        As from `runner.bench`.
    list of str
        Warnings.

    Raises
    ------
    TuningError
        If the network did not run.
    VerificationError
        If its outputs were wrong.
    """
    results = read(path)
    digest = hashlib.sha256(artifact.library).hexdigest()
    known = results.networks.get(digest)
    if known is None:
        raise TuningError(
            f"{path}: contains no times of this artifact: its code differs from the "
            f"{len(results.networks)} networks that ran",
            hint="`bnncc bench ARTIFACT --bundle FOLDER` makes a bundle of it",
        )
    whole = known.get("main", {"right": False, "error": "did not run"})
    if not whole["right"]:
        said = whole.get("error", "is wrong")
        raise VerificationError(f"{path}: wrong outputs on that machine: {said}")
    warnings = list(results.warnings)
    times = {}
    for kernel in artifact.manifest["report"]["kernels"]:
        line = known.get(kernel["name"])
        if line is not None and line["right"]:
            times[kernel["name"]] = np.array(line["times_us"])
        else:
            said = "did not run" if line is None else line.get("error", "failed")
            warnings.append(f"{path}: kernel {kernel['name']}: {said}")
    made = runner.described(
        artifact, np.array(whole["times_us"]), times, processor=results.device, threads=1
    )
    return made, warnings
