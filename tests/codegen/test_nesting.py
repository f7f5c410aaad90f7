"""Long chains of operators as portable C: compilers limit how deep expressions nest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx.parser
import onnx.reference
import pytest

from bnncc.driver import compile_c
from bnncc.options import CompileOptions
from tests import c_programs

CLANG = c_programs.MACHINES["clang"]
STRICTEST = replace(CLANG, compiler=(*CLANG.compiler, "-fbracket-depth=63"))
"""With no more levels of brackets than C99 guarantees."""

CHAINS = {
    "unary": (["Tanh(X)", "Abs(X)"] * 120, [], (1, 8)),
    # Each reads its operand more than once.
    "repeated": (["PRelu(X, w)", "Sub(w, X)", "Clip(X, low, high)"] * 20, [], (1, 8)),
    # What is outside the image may not be read.
    "padded": (["Tanh(X)", "Neg(X)"] * 30, ["Pad(X, pads)", "Cos(X)"], (1, 2, 5, 8)),
    "logical": (["Cast<to = 9>(X)"], ["Not(X)", "And(a, X)", "Or(X, b)"] * 30, (1, 8)),
}


@pytest.mark.skipif(bool(CLANG.missing), reason=f"needs {CLANG.missing}")
@pytest.mark.parametrize("kind", CHAINS)
def test_a_chain(kind: str) -> None:
    first, then, shape = CHAINS[kind]
    steps, value = [], "x"
    for number, text in enumerate([*first, *then]):
        steps.append(f"v{number} = {text.replace('X', value)}")
        value = f"v{number}"
    weights = ", ".join(str(0.5 + 0.1 * k) for k in range(8))
    dims, made = ", ".join(map(str, shape)), "bool" if kind == "logical" else "float"
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> '
        f"chain (float[{dims}] x, bool[8] a, bool[8] b) => ({made}[{'N, ' * (len(shape) - 1)}M] "
        f"{value}) <float[8] w = {{{weights}}}, float low = {{-0.5}}, float high = {{0.75}}, "
        f"int64[8] pads = {{0, 0, 2, 1, 0, 0, 1, 2}}> {{ {' '.join(steps)} }}"
    )
    rng = np.random.default_rng(0)
    feeds = {
        "x": rng.integers(-1, 2, shape).astype(np.float32) * rng.random(shape, np.float32),
        **{name: rng.integers(0, 2, 8).astype(bool) for name in "ab"},
    }
    (right,) = onnx.reference.ReferenceEvaluator(model).run(None, feeds)
    network = compile_c(model, CompileOptions(target="c99"))
    (got,) = c_programs.outputs(STRICTEST, network, feeds, {value: right}).values()
    np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-5)
