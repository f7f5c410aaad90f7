"""The Relax operators: typed attributes that print and parse, inference, legalization."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tvm
from tvm import relax, tirx

from bnncc.codegen import ops
from bnncc.records.workload import Workload
from bnncc.topi_binary.build import SPEC_ATTR, input_types, output_types
from bnncc.topi_binary.spec import KINDS, OPERATORS, BinaryConv2d, Elementwise, Spec, Step, to_json
from tests import definition_cases

CASES = [*definition_cases.SPECS, *definition_cases.LONG]
ODD = Elementwise(
    "9*N", 2, 3, 5, steps=(Step("clip", lo=-0.0, hi=float("inf")), Step("store", layout="NCHW"))
)


def operands(spec: Spec) -> list[relax.Var]:
    """Return parameters for the kernel of `spec`, and one that says what N is."""
    symbol = tirx.Var("N", "int64")

    def extent(dim: int | str) -> Any:
        return dim if isinstance(dim, int) else 9 * symbol if dim == "9*N" else symbol

    kinds = [*input_types(spec), (("N",), "float32")]
    return [
        relax.Var(f"in{i}", relax.TensorType([extent(d) for d in shape], dtype))
        for i, (shape, dtype) in enumerate(kinds)
    ]


def module(spec: Spec) -> tvm.IRModule:
    """Return a function that calls the operator of `spec`."""
    builder, params = relax.BlockBuilder(), operands(spec)
    with builder.function("main", params):
        with builder.dataflow():
            made = builder.emit_output(builder.emit(ops.call(spec, params[:-1])))
        builder.emit_func_output(made)
    return builder.get()


def called(mod: tvm.IRModule) -> relax.Call:
    """Return the call in a module."""
    return mod["main"].body.blocks[0].bindings[0].value


@pytest.mark.parametrize("spec", [*CASES, ODD], ids=lambda spec: Workload.of(spec).name)
def test_what_prints_parses(spec: Spec) -> None:
    if isinstance(spec.n, str):
        spec = replace(spec, n="N" if spec is not ODD else spec.n)
    made = module(spec)
    text = made.script()
    assert f"R.bnncc.{spec.operator}(" in text
    assert "metadata" not in text
    parsed = tvm.script.from_source(text)
    tvm.ir.assert_structural_equal(parsed, made)
    saved = tvm.ir.load_json(tvm.ir.save_json(made))
    for read in (parsed, saved):
        assert to_json(ops.spec_of(called(read))) == to_json(spec)
    made = relax.transform.LegalizeOps()(parsed)
    kernels = [f for f in made.functions.values() if isinstance(f, tirx.PrimFunc)]
    assert [str(f.attrs[SPEC_ATTR]) for f in kernels] == [to_json(spec)]
    out = parsed["main"].ret_ty
    kinds = list(out.fields) if isinstance(out, relax.TupleType) else [out]
    assert [str(k.dtype) for k in kinds] == [dtype for _, dtype in output_types(spec)]


def test_every_kind_has_operators_of_its_own() -> None:
    assert len(set(OPERATORS)) == len(OPERATORS)
    assert {spec.operator for spec in CASES} == set(OPERATORS)
    assert {type(spec) for spec in CASES} == set(KINDS)


DENSE = BinaryConv2d(4, 1, 1, 100, 21, (1, 1), rank=2, steps=(Step("threshold"),))


def refused(call: str, *kinds: str) -> str:
    """Return what is said of a call with operands of some types."""
    takes = ", ".join(f"x{i}: R.Tensor({kind})" for i, kind in enumerate(kinds))
    source = (
        f"@I.ir_module\nclass M:\n  @R.function\n  def main({takes}):\n"
        f"    with R.dataflow():\n      y = {call}\n      R.output(y)\n    return y\n"
    )
    with pytest.raises(Exception, match=r"\S") as error:
        tvm.script.from_source(source)
    return str(error.value)


DATA, WEIGHT, LIMITS = '(4, 4), "uint32"', '(100,), "uint32"', '(32,), "int32"'
THRESHOLD = 'steps=[{"op": "threshold"}]'
SHAPE = f"channels=100, out_channels=21, kernel=[1, 1], {THRESHOLD}, rank=2"


def test_the_text_of_a_call_needs_no_defaults() -> None:
    ops.register()
    text = module(DENSE).script()
    short = f"R.bnncc.binary_dense(in0, in1, in2, {SHAPE})"
    start = text.index("R.bnncc.")
    shorter = text[:start] + short + text[text.index("\n", start) :]
    assert to_json(ops.spec_of(called(tvm.script.from_source(shorter)))) == to_json(DENSE)


@pytest.mark.parametrize(
    ("call", "kinds", "said"),
    [
        (f"binary_dense(x0, x1, {SHAPE})", (DATA, WEIGHT), "3 operands expected, got 2"),
        (f"binary_dense(x0, x1, x2, {SHAPE})", (DATA, WEIGHT, DATA), "int32 tensor expected"),
        (f"binary_dense(x0, x1, x2, {SHAPE})", (DATA, '(9,), "uint32"', LIMITS), "shape (100,)"),
        (f"binary_dense(x0, x1, x2, {SHAPE})", (DATA, '(2, 50), "uint32"', LIMITS), "shape (100,)"),
        (f"binary_conv2d(x0, x1, x2, {SHAPE})", (DATA, WEIGHT, LIMITS), "those of binary_dense"),
        (f"binary_dense({SHAPE})", (), "a tensor expected as the first operand"),
        (f"binary_dense(x0, x1, x2, {SHAPE})", ('(4,), "uint32"', WEIGHT, LIMITS), "2 to 4 dim"),
        ('binary_dense(x0, channels="7", out_channels=1, kernel=[1, 1])', (DATA,), "expected int"),
        ("binary_dense(x0, channels=7, kernel=[1, 1])", (DATA,), "missing required argument"),
        (f"binary_dense(x0, {SHAPE}, colour=1)", (DATA,), "unexpected keyword argument"),
        (
            "binary_dense(x0, channels=1, out_channels=1, kernel=[1, 1], rank=2, "
            'steps=[{"op": "relu", "colour": 1}])',
            (DATA,),
            "unexpected keyword argument 'colour'",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call: str, kinds: tuple[str, ...], said: str) -> None:
    ops.register()
    assert said in refused(f"R.bnncc.{call}", *kinds)
