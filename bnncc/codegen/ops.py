"""The Relax operators of bnncc: ``relax.bnncc.binary_conv2d`` and its siblings.

Each call is one fused kernel: operands are the kernel's inputs in order, and the attribute ``spec``
(JSON of `topi_binary.spec`) says what it computes, epilogue included. All operators share one type
inference and one legalization, to ``call_tir`` on the PrimFunc of the spec; they differ in name
only, so that printed IR reads well. ``R.bnncc.binary_conv2d(...)`` prints and parses.
"""

from __future__ import annotations

import types
from typing import Any

import tvm
import tvm.ir._ffi_api as ir_ffi
import tvm.relax.script.parser as relax_parser
from tvm import relax
from tvm.ir import Op, register_op_attr

from bnncc.topi_binary.build import aliases, input_types, output_types, prim_func
from bnncc.topi_binary.spec import (
    BinaryConv2d,
    BitwiseMaxPool,
    ConcatBits,
    Conv2d,
    Elementwise,
    FewBitConv2d,
    ImageBits,
    PadBits,
    Pool2d,
    SliceBits,
    Spec,
    WeightsOfRows,
    from_json,
    to_json,
)

_OPAQUE = 8
_NEVER_MIXED = 2

OPERATORS = (
    "binary_conv2d", "binary_dense", "few_bit_conv2d", "few_bit_dense", "conv2d", "dense",
    "pool2d", "bitpack", "elementwise", "bitwise_maxpool", "image_bits", "concat_bits",
    "slice_bits", "pad_bits", "weights_of_rows",
)  # fmt: skip
"""Operator names, without the ``relax.bnncc.`` in front."""


def operator_name(spec: Spec) -> str:
    """Return which operator computes `spec`."""
    if isinstance(spec, BinaryConv2d):
        return "binary_dense" if spec.rank == 2 else "binary_conv2d"
    if isinstance(spec, FewBitConv2d):
        return "few_bit_dense" if spec.rank == 2 else "few_bit_conv2d"
    if isinstance(spec, Conv2d):
        return "dense" if spec.rank == 2 else "conv2d"
    if isinstance(spec, Elementwise):
        return "bitpack" if all(s.op != "store" for s in spec.steps) else "elementwise"
    names = {
        Pool2d: "pool2d", BitwiseMaxPool: "bitwise_maxpool", ConcatBits: "concat_bits",
        SliceBits: "slice_bits", PadBits: "pad_bits", ImageBits: "image_bits",
        WeightsOfRows: "weights_of_rows",
    }  # fmt: skip
    return names[type(spec)]


def call(spec: Spec, args: list[relax.Expr]) -> relax.Call:
    """Return a call of the operator for `spec`.

    Parameters
    ----------
    spec : Spec
        What to compute.
    args : list of relax.Expr
        Kernel inputs in order, as `topi_binary.build.input_types` lists them.

    Returns
    -------
    relax.Call
        Of a tensor, or a tuple of tensors if the kernel has several outputs.
    """
    register()
    return _call(operator_name(spec), args, to_json(spec))


def _call(name: str, args: list[relax.Expr], spec: str) -> relax.Call:
    attrs = tvm.ir.make_node("ir.DictAttrs", spec=spec)
    return relax.Call(Op.get(f"relax.bnncc.{name}"), args, attrs=attrs)


def register() -> None:
    """Register the operators, once per process."""
    if f"relax.bnncc.{OPERATORS[0]}" in Op.list_op_names():
        return
    for name in OPERATORS:
        full = f"relax.bnncc.{name}"
        ir_ffi.RegisterOp(full, f"bnncc's fused {name}")
        register_op_attr(full, "FInferType", _infer)
        register_op_attr(full, "FPurity", True)
        register_op_attr(full, "FLegalize", _legalize)
        register_op_attr(full, "TMixedPrecisionPolicy", _NEVER_MIXED)
    relax_parser.bnncc = types.SimpleNamespace(**{name: _parsed(name) for name in OPERATORS})


def _parsed(name: str) -> Any:
    def parse(*args: relax.Expr, spec: str) -> relax.Call:
        return _call(name, list(args), spec)

    return parse


def _infer(call: relax.Call, bb: relax.BlockBuilder) -> relax.Type:
    spec = from_json(str(call.attrs["spec"]))
    wanted = input_types(spec)
    if len(wanted) != len(call.args):
        raise TypeError(f"{call.op.name}: {len(wanted)} operands expected, got {len(call.args)}")
    symbols: dict[str, Any] = {}
    for arg, (shape, dtype) in zip(call.args, wanted, strict=True):
        kind = arg.ty
        if not isinstance(kind, relax.TensorType) or str(kind.dtype) != dtype:
            raise TypeError(f"{call.op.name}: {dtype} tensor expected, got {kind}")
        for have, want in zip(kind.shape.values, shape, strict=True):
            if isinstance(want, str):
                symbols.setdefault(want, have)
            elif int(have) != want:
                raise TypeError(f"{call.op.name}: shape {shape} expected, got {kind.shape}")
    made = [
        relax.TensorType([symbols[d] if isinstance(d, str) else d for d in shape], dtype)
        for shape, dtype in output_types(spec)
    ]
    return made[0] if len(made) == 1 else relax.TupleType(made)


def _legalize(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    spec = from_json(str(call.attrs["spec"]))
    name = str(call.op.name).removeprefix("relax.bnncc.")
    func = prim_func(spec).with_attr("op_pattern", _OPAQUE)
    kernel = bb.add_func(func, name)
    out = call.ty
    fields = list(out.fields) if isinstance(out, relax.TupleType) else out
    over = aliases(spec)
    if max(over) < 0:
        return relax.call_tir(kernel, relax.Tuple(call.args), out_ty=fields)
    return relax.op.call_tir_inplace(kernel, relax.Tuple(call.args), over, out_ty=fields)
