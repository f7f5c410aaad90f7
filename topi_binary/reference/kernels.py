"""NumPy oracle of any kernel, with a single entry point."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bnncc.topi_binary.spec import KINDS, Spec

Array = np.ndarray[Any, Any]


def _named(name: str) -> Callable[[Any, Sequence[Array]], list[Array]]:
    module, function = name.split(":")
    found: Any = importlib.import_module(f"bnncc.topi_binary.reference.{module}")
    made: Callable[[Any, Sequence[Array]], list[Array]] = getattr(found, function)
    return made


ORACLES = {kind: _named(kind.oracle) for kind in KINDS}
"""Oracle of each spec class."""


def evaluate_kernel(spec: Spec, inputs: Sequence[Array]) -> list[Array]:
    """Compute what the kernel of `spec` computes.

    Parameters
    ----------
    spec : Spec
        Any of the spec classes; a symbolic batch is taken from the data.
    inputs : sequence of ndarray
        The kernel's inputs in order, weights packed as the kernel reads them.

    Returns
    -------
    list of ndarray
        Its outputs in order, contiguous.
    """
    return [np.ascontiguousarray(array) for array in ORACLES[type(spec)](spec, inputs)]
