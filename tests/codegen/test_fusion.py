"""Chains of operators, whose expressions grow with a power of their length if all are fused."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

import bnncc
from bnncc.driver import compile_c
from bnncc.options import CompileOptions
from tests.c_programs import MACHINES, outputs
from tests.tiny import BASELINE

pytestmark = pytest.mark.sampled(2)


def chain(operator: str, length: int) -> onnx.ModelProto:
    """Return a network of operators in a row; `Silu` is written with two."""
    nodes = []
    for number in range(length):
        x, y = f"v{number}", f"v{number + 1}"
        if operator == "Silu":
            nodes += [f"s{number} = Sigmoid({x})", f"{y} = Mul({x}, s{number})"]
        else:
            nodes += [f"{y} = {operator}({x})"]
    return onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 20]> '
        f"g (float[2, 37] v0) => (float[2, 37] v{length}) {{ {'; '.join(nodes)} }}".replace(
            "; ", "\n"
        )
    )


@pytest.mark.parametrize("operator", ["Tanh", "Elu", "Softplus", "Silu"])
def test_long_chains_compile_and_are_right(operator: str) -> None:
    model = chain(operator, 12)
    artifact = bnncc.compile(model, target=BASELINE, threads=1)
    assert len(artifact.report["kernels"]) > 1
    x = np.random.default_rng(0).standard_normal((2, 37)).astype(np.float32)
    (want,) = ReferenceEvaluator(model).run(None, {"v0": x})
    (made,) = artifact.run({"v0": x}).values()
    np.testing.assert_allclose(made, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("operator", ["Silu", "Gelu", "Softplus"])
def test_activations_are_one_kernel(operator: str) -> None:
    artifact = bnncc.compile(chain(operator, 1), target=BASELINE, threads=1)
    assert len(artifact.report["kernels"]) == 1


def leaky_relus(shape: str) -> onnx.ModelProto:
    """Return 40 LeakyRelu in a row, each of which reads its operand three times."""
    text = "\n".join(f"v{i + 1} = LeakyRelu<alpha={0.9 - 0.01 * i}>(v{i})" for i in range(40))
    return onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 16]> '
        f"g (float[{shape}] v0) => (float[{shape}] v40) {{ {text} }}"
    )


@pytest.mark.parametrize("shape", ["2, 37", "1, 24, 3, 3"], ids=["rows", "image"])
@pytest.mark.parametrize("target", [BASELINE, "arm64"])
def test_long_chains_of_steps_of_a_kernel_compile_and_are_right(shape: str, target: str) -> None:
    """Many in a row are one kernel of bnncc."""
    model = leaky_relus(shape)
    artifact = bnncc.compile(model, target=target, threads=1)
    assert len(artifact.report["kernels"]) == 1
    if target != BASELINE:
        return
    x = np.random.default_rng(0).standard_normal([int(d) for d in shape.split(",")])
    (want,) = ReferenceEvaluator(model).run(None, {"v0": x.astype(np.float32)})
    (made,) = artifact.run({"v0": x.astype(np.float32)}).values()
    np.testing.assert_allclose(made, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("machine", ["armv7", "cortex-m4"])
def test_long_chains_of_steps_compile_for_c_and_are_right(machine: str) -> None:
    if missing := MACHINES[machine].missing:
        pytest.skip(f"needs {missing}")
    model = leaky_relus("1, 24, 3, 3")
    x = np.random.default_rng(0).standard_normal((1, 24, 3, 3)).astype(np.float32)
    (want,) = ReferenceEvaluator(model).run(None, {"v0": x})
    network = compile_c(model, CompileOptions(target=machine))
    made = outputs(MACHINES[machine], network, {"v0": x}, {"v40": want})["v40"]
    np.testing.assert_allclose(made, want, rtol=1e-5, atol=1e-7)
