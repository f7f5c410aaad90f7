"""What is wrong with an operator of QONNX is said in one line that names the node."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest

from bnncc.errors import ModelError
from bnncc.frontend.onnx import load
from tests.qonnx_models import Builder

X = (2, 6)
_WHERE = "qonnx: {} `{}_0`: "


def _quant(**options: object) -> Callable[[Builder], str]:
    given = {"scale": 0.5, "zero": 0.0, "bits": 4.0, **options}
    attrs = {k: given.pop(k) for k in ("rounding_mode",) if k in given}
    inputs = ("x", given["scale"], given["zero"], given["bits"])
    return lambda make: make.custom("Quant", *inputs, signed=1, narrow=0, **attrs)


CASES: dict[str, tuple[Callable[[Builder], str], str]] = {
    "no bits": (_quant(bits=0.0), "its bit width is [0.0], expected one number from 1 to 64"),
    "bits per channel": (_quant(bits=np.ones(6) * 2), "its bit width is [2.0, 2.0, 2.0, 2.0], "),
    "infinite scale": (_quant(scale=np.inf), "its scale holds numbers that are not finite"),
    "no scale": (_quant(scale=[1, 1, 0, 1, 1, 1]), "its scale is 0"),
    "scale that does not fit": (_quant(scale=np.ones(5)), "shapes [2, 6], [5], [] do not fit"),
    "larger scale": (_quant(scale=np.ones((3, 1, 1))), "its scale [3, 1, 1] or zero point [] is"),
    "rounding": (_quant(rounding_mode="SIDEWAYS"), "`rounding_mode` is 'SIDEWAYS', expected one"),
    "computed scale": (_quant(scale="x"), "its scale `x` is computed at run time, expected a"),
    "signedness": (
        lambda make: make.custom("Quant", "x", 1.0, 0.0, 4.0, narrow=0),
        "required attribute `signed` is missing",
    ),
    "attribute's type": (
        lambda make: make.custom("Quant", "x", 1.0, 0.0, 4.0, signed=1.0, narrow=0),
        "attribute `signed` is FLOAT, expected INT",
    ),
    "number of inputs": (lambda make: make.custom("Quant", "x", 1.0, signed=1, narrow=0),
                         "has 2 inputs, expected 4"),
    "channels": (
        lambda make: make.custom("MultiThreshold", "x", np.zeros((5, 3))),
        "thresholds of shape [5, 3] for 6 channels; expected [6, steps] or [1, steps]",
    ),
    "layout": (
        lambda make: make.custom("MultiThreshold", "x", np.zeros((6, 3)), data_layout="NHWC"),
        "data of 2 axes in layout 'NHWC'",
    ),
    "taps": (
        lambda make: make.custom("Im2Col", "x", kernel_size=[3, 3], stride=[1, 1]),
        "input of shape [2, 6], expected known sizes NHWC",
    ),
    "signs of scales": (lambda make: make.custom("Trunc", "x", 1.0, 0.0, 8.0, -2.0, 4.0),
                        "its scales have different signs"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_message(name: str) -> None:
    write, wanted = CASES[name]
    make = Builder()
    model = make.model(X, write(make), 2)
    op = model.graph.node[0].op_type
    with pytest.raises(ModelError) as found:
        load(model)
    assert str(found.value).startswith(_WHERE.format(op, op) + wanted)


def test_operators_that_are_not_read() -> None:
    make = Builder()
    model = make.model(X, make.custom("FloatQuant", "x", 1.0, 4.0, 3.0, 7.0, 1.0), 2)
    with pytest.raises(ModelError, match=r"supported: qonnx\.custom_op\.general::FloatQuant `"):
        load(model)


def test_versions_to_come() -> None:
    make = Builder()
    model = make.model(X, make.custom("BipolarQuant", "x", 1.0), 2, version=3)
    wanted = r"version 3 of qonnx\.custom_op\.general, expected 1 to 2"
    with pytest.raises(ModelError, match=wanted):
        load(model)


def test_data_of_other_types() -> None:
    make = Builder()
    model = make.model(X, make.custom("BipolarQuant", "x", 1.0), 2)
    model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.INT8
    with pytest.raises(ModelError, match="its data is int8, expected float32"):
        load(model)
