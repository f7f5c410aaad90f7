"""Construction of a spec's function: name, attributes and parameters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from bnncc.topi_binary.build import SPEC_ATTR, Type, aliases, input_types, output_types
from bnncc.topi_binary.spec import Spec, to_json

Buffer = Any
Expr = Any


def declare(spec: Spec) -> tuple[Expr, list[Buffer]]:
    """Declare name, attributes and parameters of `spec` in the open function.

    Parameters
    ----------
    spec : Spec
        Determines the parameters: inputs, then the outputs that are not stored over an input.

    Returns
    -------
    n : Expr or int
        The batch size.
    buffers : list of Buffer
        The parameters.
    """
    batch = spec.n
    # A batch can be a product (``9*N``), which is not a valid name in C.
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


def spec_of(func: tirx.PrimFunc) -> str:
    """Return the spec of one of our kernels as JSON; "" for another function."""
    return str(func.attrs[SPEC_ATTR]) if func.attrs is not None and SPEC_ATTR in func.attrs else ""


class Operator:
    """A context in which the function of a spec is written.

    Parameters
    ----------
    spec : Spec
        Spec of the kernel.

    Attributes
    ----------
    n : Expr of int64
        The batch size.
    inputs, outputs : list of Buffer
        Of the kernel, in the order of `build.input_types` and `build.output_types`. An output that
        is stored over an input is one parameter, but two buffers.

    Examples
    --------
    A kernel that copies its input::

        with Operator(spec) as operator:
            with T.serial(operator.n) as i:
                T.buffer_store(operator.outputs[0], operator.inputs[0][i, 0], [i, 0])
        return operator.func
    """

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._builder = IRBuilder()
        self._frame = T.prim_func(s_tir=True)

    def __enter__(self) -> Operator:
        """Open the function and declare its parameters."""
        self._builder.__enter__()
        self._frame.__enter__()
        n, buffers = declare(self._spec)
        self.n = _int64(n)
        count = len(input_types(self._spec))
        self.inputs, fresh = buffers[:count], iter(buffers[count:])
        over = aliases(self._spec)
        self.outputs = [next(fresh) if i < 0 else aliased(self.inputs[i]) for i in over]
        return self

    def __exit__(self, *error: Any) -> None:
        """Close the function."""
        self._frame.__exit__(*error)
        self._builder.__exit__(*error)

    @property
    def func(self) -> tirx.PrimFunc:
        """The finished function."""
        return self._builder.get()

    def reshape(self, spec: Spec) -> None:
        """View the parameters as those of `spec`, which describes the same memory."""

        def view(buffers: list[Buffer], types: Sequence[Type]) -> list[Buffer]:
            return [
                aliased(b, [self.n if isinstance(d, str) else _int64(d) for d in shape], dtype)
                for b, (shape, dtype) in zip(buffers, types, strict=True)
            ]

        if isinstance(spec.n, int):
            self.n = _int64(spec.n)
        self.inputs = view(self.inputs, input_types(spec))
        self.outputs = view(self.outputs, output_types(spec))


def aliased(
    buffer: Buffer, shape: Sequence[Expr] | None = None, dtype: str | None = None
) -> Buffer:
    """Declare a second buffer for the same memory: one is read, the other is written."""
    shape = buffer.shape if shape is None else shape
    return T.decl_buffer(list(shape), dtype or buffer.dtype, data=buffer.data)


def _int64(value: Expr | int) -> Expr:
    return tirx.IntImm("int64", value) if isinstance(value, int) else value
