"""Definitions of the kernels: unscheduled TensorIR that computes one element at a time.

A definition follows the docstring of its spec: loops over the output, a reduction, and for each
step of the epilogue a named block over the lanes of a vector of channels (`layout.LANES`). It does
not depend on targets, tiles or registers. It can be run as it is, slowly; `schedules` transforms it
for a target.
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
    """Return the definition of `spec`, which legalization emits and schedule rules transform.

    Parameters
    ----------
    spec : Spec
        Any of the spec classes.
    form : str, default ""
        Another form of the same computation, if the kind has several, e.g. `carry_save.FORM`.

    Returns
    -------
    tirx.PrimFunc
        Inputs in the order of `build.input_types`, then outputs in the order of
        `build.output_types`, except outputs that are stored in place of an input (`build.aliases`).
    """
    from bnncc.topi_binary.signature import Operator

    module, name = spec.definition.split(":")
    with Operator(spec) as operator:
        getattr(importlib.import_module(f"{__name__}.{module}"), name)(
            operator, spec, *[form][: bool(form)]
        )
    return operator.func
