"""What each kernel computes, as plain TensorIR: one element at a time, nothing scheduled.

A definition follows the docstring of its spec: loops over the output, a reduction, one named block
for each step of the epilogue, over the lanes of a vector of channels (`layout.LANES`). It knows no
target, tile or register. It runs as it is, slowly;
`schedules` says how it is to run.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING

from bnncc.topi_binary.spec import Spec

if TYPE_CHECKING:
    from tvm import tirx


@functools.lru_cache(maxsize=64)  # networks repeat their layers, and tuning a kernel does so more
def define(spec: Spec, form: str = "") -> tirx.PrimFunc:
    """Return the definition of `spec`: what legalization makes, and what rules schedule.

    Parameters
    ----------
    spec : Spec
        Any of the spec classes.
    form : str, default ""
        Another form of the same sums, for those that have one: `carry_save.FORM`.

    Returns
    -------
    tirx.PrimFunc
        Inputs in the order of `build.input_types`, then outputs in the order of
        `build.output_types`, without those that are stored over an input (`build.aliases`).
    """
    from bnncc.topi_binary.signature import Operator

    module, name = spec.definition.split(":")
    with Operator(spec) as operator:
        getattr(importlib.import_module(f"{__name__}.{module}"), name)(
            operator, spec, *[form][: bool(form)]
        )
    return operator.func
