"""Operators: name, attributes and parameters of a kernel whose body a schedule writes."""

from __future__ import annotations

import re
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from bnncc.topi_binary.build import SPEC_ATTR, aliases, input_types, output_types
from bnncc.topi_binary.spec import Spec, to_json

Buffer = Any
Expr = Any


def prim_func(spec: Spec) -> tirx.PrimFunc:
    """Declare the kernel of `spec`: the rule of its kind writes the body.

    Parameters
    ----------
    spec : Spec
        What the kernel computes.

    Returns
    -------
    tirx.PrimFunc
        Without a body. Inputs in the order of `input_types`, outputs in that of `output_types`.
    """
    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            declare(spec)
            T.evaluate(0)
        return builder.get()


def declare(spec: Spec) -> tuple[Expr, list[Buffer]]:
    """Declare name, attributes and parameters of `spec` in the function that is open.

    Parameters
    ----------
    spec : Spec
        Gives the parameters: inputs, then outputs that are not stored over an input.

    Returns
    -------
    n : Expr or int
        The batch.
    buffers : list of Buffer
        The parameters.
    """
    batch = spec.n
    # A batch can be a product (``9*N``), which would be no name in C.
    n = batch if isinstance(batch, int) else tirx.Var(re.sub(r"\W", "_", f"n_{batch}"), "int64")
    T.func_name("main")
    T.func_attr({"tirx.noalias": True, "op_pattern": 8, SPEC_ATTR: to_json(spec)})
    over = aliases(spec)
    kinds = {f"in{i}": kind for i, kind in enumerate(input_types(spec))}
    kinds |= {f"out{i}": kind for i, kind in enumerate(output_types(spec)) if over[i] < 0}
    buffers = []
    for name, (shape, dtype) in kinds.items():
        extents = [n if isinstance(d, str) else d for d in shape]
        buffers.append(T.arg(name, T.buffer(extents, dtype)))
    return n, buffers
