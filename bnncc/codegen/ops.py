"""The Relax operators of bnncc: ``relax.bnncc.binary_conv2d`` and others.

Each call is one fused kernel: operands are the kernel's inputs in order, and attributes are the
fields of its spec, including the epilogue, see `attributes`. Type inference takes the image's
extents from the first operand, checks the others, and returns the outputs; legalization emits
``call_tir`` of the spec's PrimFunc. The printed form can be parsed:

    R.bnncc.binary_dense(x, weight, threshold, channels=64, out_channels=10, ...)
"""

from __future__ import annotations

import types
from typing import Any

import tvm.ir._ffi_api as ir_ffi
import tvm.relax.script.parser as relax_parser
from tvm import relax, tirx
from tvm.ir import Op, register_op_attr

from bnncc.codegen import attributes
from bnncc.topi_binary.build import aliases, input_types, output_types
from bnncc.topi_binary.definitions import define
from bnncc.topi_binary.spec import KINDS, OPERATORS, Spec

OPAQUE = 8
"""TVM's pattern of operators that it never fuses."""
_NEVER_MIXED = 2

_KIND_OF: dict[str, Any] = {name: kind for kind in KINDS for name in kind.operators}


def call(spec: Spec, args: list[relax.Expr]) -> relax.Call:
    """Return a call of the operator for `spec`.

    Parameters
    ----------
    spec : Spec
        Spec of the kernel.
    args : list of relax.Expr
        Kernel inputs in order, as `topi_binary.build.input_types` lists them.

    Returns
    -------
    relax.Call
        A tensor, or a tuple of tensors if the kernel has several outputs.
    """
    register()
    op = Op.get(f"relax.bnncc.{spec.operator}")
    return relax.Call(op, args, attrs=attributes.of_spec(spec))


def register() -> None:
    """Register the operators, once per process."""
    if f"relax.bnncc.{OPERATORS[0]}" in Op.list_op_names():
        return
    for name in OPERATORS:
        attributes.of_kind(_KIND_OF[name])  # needed to load saved modules
        full = f"relax.bnncc.{name}"
        ir_ffi.RegisterOp(full, f"bnncc's fused {name}")
        register_op_attr(full, "FInferType", _infer)
        register_op_attr(full, "FPurity", True)
        register_op_attr(full, "FLegalize", _legalize)
        register_op_attr(full, "TMixedPrecisionPolicy", _NEVER_MIXED)
    parsers = {name: _parser(name) for name in OPERATORS}
    relax_parser.bnncc = types.SimpleNamespace(**parsers)


def _parser(name: str) -> Any:
    """Return the parser's ``R.bnncc.<name>``."""

    def parse(*args: relax.Expr, **attrs: Any) -> relax.Call:
        made = attributes.of_kind(_KIND_OF[name])(**attrs)
        return relax.Call(Op.get(f"relax.bnncc.{name}"), list(args), attrs=made)

    return parse


def spec_of(call: relax.Call) -> Spec:
    """Return the spec of a call of one of our operators.

    Raises
    ------
    TypeError
        If its attributes do not match its first operand or the operator.
    """
    name = str(call.op.name)
    if not call.args or not isinstance(call.args[0].ty, relax.TensorType):
        raise TypeError(f"{name}: a tensor expected as the first operand")
    try:
        spec = attributes.to_spec(_KIND_OF[_short(name)], call.attrs, call.args[0].ty)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from error
    if spec.operator != _short(name):
        raise TypeError(f"{name}: the attributes are those of {spec.operator}")
    return spec


def _short(name: str) -> str:
    return name.removeprefix("relax.bnncc.")


def _infer(call: relax.Call, bb: relax.BlockBuilder) -> relax.Type:
    spec = spec_of(call)
    wanted = input_types(spec)
    if len(wanted) != len(call.args):
        raise TypeError(f"{call.op.name}: {len(wanted)} operands expected, got {len(call.args)}")
    symbols: dict[str, Any] = {}
    for arg, (shape, dtype) in zip(call.args, wanted, strict=True):
        kind = arg.ty
        if not isinstance(kind, relax.TensorType) or str(kind.dtype) != dtype:
            raise TypeError(f"{call.op.name}: {dtype} tensor expected, got {kind}")
        if kind.shape is None or len(kind.shape.values) != len(shape):
            raise TypeError(f"{call.op.name}: shape {shape} expected, got {kind}")
        for have, want in zip(kind.shape.values, shape, strict=True):
            if isinstance(want, str):
                symbols.setdefault(want, have)
            elif not isinstance(have, tirx.IntImm) or int(have) != want:
                raise TypeError(f"{call.op.name}: shape {shape} expected, got {kind.shape}")
    made = [
        relax.TensorType([symbols[d] if isinstance(d, str) else d for d in shape], dtype)
        for shape, dtype in output_types(spec)
    ]
    return made[0] if len(made) == 1 else relax.TupleType(made)


def _legalize(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    spec = spec_of(call)
    func = define(spec).with_attr("op_pattern", OPAQUE)
    kernel = bb.add_func(func, _short(str(call.op.name)))
    out = call.ty
    fields = list(out.fields) if isinstance(out, relax.TupleType) else out
    over = aliases(spec)
    if max(over) < 0:
        return relax.call_tir(kernel, relax.Tuple(call.args), out_ty=fields)
    return relax.op.call_tir_inplace(kernel, relax.Tuple(call.args), over, out_ty=fields)
