"""Accuracy of a classifier on labelled examples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bnncc.errors import InputError, UsageError
from bnncc.files import read_npz
from bnncc.runtime.artifact import Artifact, check_names

LABELS = "labels"
"""Name of the labels among other arrays of a file."""
_BATCH = 64
"""Examples per run if the batch is dynamic."""


def read_examples(
    artifact: Artifact, inputs: str | Path, labels: str | Path
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Read labelled examples from files.

    Parameters
    ----------
    artifact : Artifact
        The network.
    inputs : path
        ``.npz`` with the inputs of all examples, or ``.npy`` if there is one input.
    labels : path
        ``.npy`` with a class number per example, or ``.npz`` with the array ``labels``.

    Returns
    -------
    inputs : dict of str to ndarray
        Any number of examples along the first axis.
    labels : ndarray
        One-dimensional.

    Raises
    ------
    InputError
        If a file does not hold class numbers.
    UsageError
        If the network has an input without a batch axis.
    """

    def check(name: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
        _check_labels(f"{labels}: `{name}`", shape, dtype)

    _batch(artifact)
    many = tuple(replace(t, shape=("examples", *t.shape[1:])) for t in artifact.inputs)
    arrays = artifact.read_inputs(inputs, many)
    found = read_npz(labels, names=(LABELS,), check=check)
    if LABELS not in found:
        raise InputError(
            f"{labels}: has no array `{LABELS}`",
            hint=f"write it with numpy.savez(path, {LABELS}=array), or numpy.save(path, array)",
        )
    return arrays, found[LABELS].reshape(-1)


def accuracy(
    artifact: Artifact,
    inputs: Mapping[str, np.ndarray],
    labels: np.ndarray,
    *,
    scores: str | None = None,
    minimum: float | None = None,
) -> dict[str, Any]:
    """Count how many examples a network classifies correctly.

    Parameters
    ----------
    artifact : Artifact
        The network, with any batch size.
    inputs : mapping of str to ndarray
        Any number of examples along the first axis.
    labels : ndarray of int
        The class number of each example.
    scores : str, optional
        Output with a score per class, or with the class number; by default the only output.
    minimum : float, optional
        Least accuracy that passes, from 0 to 1.

    Returns
    -------
    dict
        ``examples``, ``correct``, ``accuracy``, ``minimum`` and ``passed``.

    Raises
    ------
    InputError
        If labels and examples do not match.
    """
    check_names(inputs, artifact.inputs, "input")
    _check_labels("labels", labels.shape, labels.dtype)
    labels = labels.reshape(-1)
    count = len(next(iter(inputs.values())))
    if len(labels) != count or not count:
        raise InputError(
            f"{len(labels)} labels for {count} examples, expected one per example, and at least one"
        )
    output = _output(artifact, scores)
    size = _batch(artifact) or min(_BATCH, count)
    correct = 0
    for start in range(0, count, size):
        made = artifact.run(_part(inputs, start, size))[output]
        wanted = labels[start : start + size]
        correct += int((_classes(made, output, size, wanted)[: len(wanted)] == wanted).sum())
    rate = correct / count
    passed = minimum is None or rate >= minimum
    return {
        "examples": count, "correct": correct, "accuracy": rate, "minimum": minimum,
        "passed": passed,
    }  # fmt: skip


def _check_labels(where: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
    if dtype.kind not in "iu":
        raise InputError(f"{where}: dtype is {dtype.name}, expected integers, the class numbers")
    if not shape or math.prod(shape[1:]) != 1:
        raise InputError(f"{where}: shape is {list(shape)}, expected one class number per example")


def first_batch(artifact: Artifact, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return examples for one run of a network: its batch size, or one if that is dynamic."""
    return _part(inputs, 0, _batch(artifact) or 1)


def _part(inputs: Mapping[str, np.ndarray], start: int, size: int) -> dict[str, np.ndarray]:
    """Return `size` examples; behind the last comes the first again."""
    return {
        name: array[np.arange(start, start + size) % max(len(array), 1)]
        for name, array in inputs.items()
    }


def _batch(artifact: Artifact) -> int | None:
    """Return the number of examples that the network takes at a time, None for any."""
    sizes = set()
    for info in artifact.inputs:
        if not info.shape:
            raise UsageError(f"labels need a batch, and input `{info.name}` is a scalar")
        if isinstance(info.shape[0], int):
            sizes.add(info.shape[0])
    if len(sizes) > 1:
        raise UsageError(f"inputs have batches of {' and '.join(map(str, sorted(sizes)))}")
    return sizes.pop() if sizes else None


def _output(artifact: Artifact, scores: str | None) -> str:
    names = [info.name for info in artifact.outputs]
    if scores is None and len(names) == 1:
        return names[0]
    if scores in names:
        return scores
    found = "several outputs" if scores is None else f"no output `{scores}`"
    raise UsageError(
        f"the network has {found}, expected the one with the scores: {', '.join(names)}",
        hint="give it with --scores NAME",
    )


def _classes(made: np.ndarray, output: str, size: int, wanted: np.ndarray) -> np.ndarray:
    """Return the class of each example, -1 where a score is NaN."""
    if not made.ndim or len(made) != size or made.size != size * max(made.shape[1:], default=1):
        raise InputError(
            f"output `{output}` has shape {list(made.shape)}, "
            "expected a score per example and class"
        )
    made = made.reshape(size, -1)
    classes = made.shape[1]
    if classes == 1 and made.dtype.kind in "iu":  # the network decides itself
        return made[:, 0]
    if classes == 1:
        raise InputError(
            f"output `{output}` has one score per example, expected one for each class"
        )
    if outside := [int(label) for label in wanted if not 0 <= label < classes]:
        raise InputError(f"label {outside[0]} is not one of the {classes} classes of `{output}`")
    return np.where(np.isnan(made).any(axis=1), -1, made.argmax(axis=1))
