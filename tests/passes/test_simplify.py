"""Simplification: what goes in, what is expected, and that values stay."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from bnncc.frontend.onnx import load
from bnncc.ir.evaluate import evaluate
from bnncc.ir.graph import Graph
from bnncc.ir.infer import infer
from bnncc.transform.simplify import simplify
from tests.collection import handmade, oracle

RNG = np.random.default_rng(3)
CONSTANTS = {
    "zero": np.float32(0),
    "one": np.float32(1),
    "two": np.float32(2),
    "minus": np.float32(-1),
    "ones": np.ones((1, 4, 1, 1), np.float32),
    "k": np.arange(4, dtype=np.float32).reshape(4, 1, 1),
    "last": np.arange(4, dtype=np.float32),
    "w": RNG.standard_normal((4, 4, 3, 3)).astype(np.float32),
    "dense": RNG.standard_normal((3, 36)).astype(np.float32),
    "rows": RNG.standard_normal((36, 3)).astype(np.float32),
    "bias": np.arange(3, dtype=np.float32),
    "flat": np.array([-1, 36], np.int64),
    "four": np.array([0, 4, 3, 3], np.int64),
    "pads": np.array([0, 1, 1, 0, 0, 1, 1, 0], np.int64),
    "none": np.zeros(8, np.int64),
}
CONSTANTS |= {"same": CONSTANTS["w"].copy(), "other": CONSTANTS["w"].copy()}
CONSTANTS["other"].reshape(-1)[-1] += 1


def build(text: str, shape: tuple[object, ...] = ("N", 4, 5, 5), opset: int = 17) -> Graph:
    """Make a graph of lines ``y = Op(a, b, key=value)``; the last tensor is the output."""
    nodes, used, name = [], set(), ""
    for line in filter(None, map(str.strip, text.splitlines())):
        outs, call = line.split(" = ", 1)
        op, args = call.rstrip(")").split("(", 1)
        inputs, attrs = [], {}
        for arg in filter(None, args.split("; ")):
            if "=" in arg:
                key, value = arg.split("=", 1)
                attrs[key] = eval(value)
            else:
                inputs.append(arg)
        used.update(inputs)
        name = outs.split(", ")[0]
        nodes.append(helper.make_node(op, inputs, outs.split(", "), **attrs))
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", 1, shape)],
        [onnx.ValueInfoProto(name=name)],
        [numpy_helper.from_array(np.asarray(v), k) for k, v in CONSTANTS.items() if k in used],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    return load(model)


CASES = {
    "identity": ("a = Identity(x)\ny = Relu(a)", "Relu"),
    "output keeps its name": ("a = Relu(x)\ny = Identity(a)", "Relu"),
    "dropout": ("a = Dropout(x)\ny = Relu(a)", "Relu"),
    "double neg": ("a = Neg(x)\nb = Neg(a)\ny = Relu(b)", "Relu"),
    "times one": ("a = Mul(x; ones)\nb = Div(a; one)\ny = Relu(b)", "Relu"),
    "plus zero": ("a = Add(zero; x)\nb = Sub(a; zero)\ny = Relu(b)", "Relu"),
    "no pad": ("a = Pad(x; none)\ny = Relu(a)", "Relu"),
    "same cast": ("a = Cast(x; to=1)\ny = Relu(a)", "Relu"),
    "bool cast": ("a = Greater(x; zero)\nb = Cast(a; to=7)\ny = Cast(b; to=1)", "Greater Cast"),
    "not less": ("a = Less(x; zero)\nb = Not(a)\ny = Where(b; one; minus)", "GreaterOrEqual Where"),
    "not inside where": (
        "a = Equal(x; zero)\nb = Not(a)\ny = Where(b; one; minus)",
        "Equal Where",
    ),
    "constant to the right": ("a = Less(zero; x)\ny = Where(a; one; minus)", "Greater Where"),
    "concat of one": ("a = Concat(x; axis=1)\ny = Relu(a)", "Relu"),
    "equal nodes": ("a = Relu(x)\nb = Relu(x)\ny = Mul(a; b)", "Relu Mul"),
    "commuted nodes": ("a = Mul(x; k)\nb = Mul(k; x)\ny = Sub(a; b)", "Mul Sub"),
    "min of max": ("a = Max(x; minus)\nb = Min(one; a)\ny = Neg(b)", "Clip Neg"),
    "reshapes": ("a = Flatten(x)\nb = Reshape(a; four)\ny = Relu(b)", "Relu"),
    "transposes": (
        "a = Transpose(x; perm=[0,2,3,1])\nb = Transpose(a; perm=[0,3,1,2])\ny = Relu(b)",
        "Relu",
    ),
    "residue": ("s = Sign(x)\nc = Clip(x; minus; one)\nd = Sub(s; c)\ny = Add(d; c)", "Sign"),
    "residue, other order": (
        "s = Sign(x)\nc = Tanh(x)\nn = Neg(c)\nd = Add(n; s)\ny = Add(c; d)",
        "Sign",
    ),
    "residue of copies": (
        "s = Sign(x)\nc = Tanh(x)\nd = Tanh(x)\ne = Sub(s; c)\ny = Add(e; d)",
        "Sign",
    ),
    "no residue": ("s = Sign(x)\nc = Tanh(x)\nd = Sub(s; c)\ny = Sub(d; c)", "Sign Tanh Sub Sub"),
    "rounding by a constant stays": ("a = Add(x; two)\ny = Sub(a; two)", "Add Sub"),
    "channels last": (
        """a = Conv(x; w; pads=[1,1,1,1])
        b = Transpose(a; perm=[0,2,3,1])
        c = Add(b; last)
        d = Pad(c; pads; minus)
        e = Sign(d)
        f = Transpose(e; perm=[0,3,1,2])
        y = Conv(f; w)""",
        "Conv Add Pad Sign Conv",
    ),
    "channels last residual": (
        """a = Conv(x; w; pads=[1,1,1,1])
        b = Transpose(a; perm=[0,2,3,1])
        s = Sign(b)
        f = Transpose(s; perm=[0,3,1,2])
        g = Conv(f; w; pads=[1,1,1,1])
        h = Transpose(g; perm=[0,2,3,1])
        r = Add(h; b)
        q = Concat(r; s; axis=3)
        t = ReduceMean(q; axes=[1,2]; keepdims=0)
        y = Relu(t)""",
        "Conv Sign Conv Add Concat ReduceMean Relu",
    ),
    "pulled to the input": (
        """s = Sign(x)
        f = Transpose(s; perm=[0,3,1,2])
        y = Conv(f; w)""",
        "Transpose Sign Conv",
    ),
    "flatten": (
        """a = Conv(x; w)
        b = Transpose(a; perm=[0,2,3,1])
        c = Reshape(b; flat)
        d = Sign(c)
        e = MatMul(d; rows)
        y = Add(e; bias)""",
        "Conv Reshape Sign Gemm",
    ),
    "expanded late": (
        """a = Abs(x)
        m = ReduceMax(a; axes=[1]; keepdims=1)
        s = Shape(x)
        e = Expand(m; s)
        b = Add(e; one)
        r = Div(two; b)
        y = Mul(r; x)""",
        "Abs ReduceMax Add Div Mul",
    ),
    "expanded twice": (
        """m = ReduceMax(x; axes=[1]; keepdims=1)
        n = ReduceMin(x; axes=[1]; keepdims=1)
        s = Shape(x)
        e = Expand(m; s)
        f = Expand(n; s)
        d = Sub(e; f)
        y = Div(x; d)""",
        "ReduceMax ReduceMin Sub Div",
    ),
    "expanded for a smaller operand": (
        """m = ReduceMax(x; axes=[2,3]; keepdims=1)
        s = Shape(x)
        e = Expand(m; s)
        a = Add(e; k)
        y = Relu(a)""",
        "ReduceMax Expand Add Relu",
    ),
    "gemm": (
        "a = Conv(x; w)\nb = Flatten(a)\ny = Gemm(b; dense; bias; transB=1; beta=2.0)",
        "Conv Flatten Gemm",
    ),
}
SHAPES = {
    "reshapes": ("N", 4, 3, 3),
    "pulled to the input": ("N", 5, 5, 4),
    "expanded for a smaller operand": (2, 4, 5, 5),
}


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    text, expected = CASES[name]
    shape = SHAPES.get(name, ("N", 4, 5, 5))
    before, after = build(text, shape), build(text, shape)
    simplify(after)
    assert [n.op for n in after.nodes] == expected.split()
    assert after.outputs == before.outputs
    _check(before, after)


def _check(before: Graph, after: Graph) -> None:
    for node in after.nodes:
        kinds = infer(node, after)
        for name, kind in zip(node.outputs, kinds, strict=True):
            assert not name or after.types[name] == kind
    feeds = {
        n: RNG.standard_normal(
            [d if isinstance(d, int) else 2 for d in before.types[n].shape]
        ).astype(before.types[n].dtype)
        for n in before.inputs
    }
    wanted, found = evaluate(before, feeds), evaluate(after, feeds)
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5)


def test_gemm_form() -> None:
    graph = build("b = Flatten(x)\ny = Gemm(b; dense; bias; transB=1; beta=2.0)", ("N", 4, 3, 3))
    simplify(graph)
    gemm = graph.nodes[-1]
    assert graph.constants[gemm.inputs[1]].shape == (36, 3)
    assert graph.constants[gemm.inputs[2]].tolist() == [0, 2, 4]
    assert (gemm.attrs["alpha"], gemm.attrs["beta"], gemm.attrs["transB"]) == (1, 1, 0)
    assert gemm.covers == ("Gemm_y",)


def test_merged_convolutions_are_both_covered() -> None:
    graph = build("a = Conv(x; w)\nb = Conv(x; w)\ny = Add(a; b)")
    simplify(graph)
    assert [n.op for n in graph.nodes] == ["Conv", "Add"]
    assert graph.nodes[0].covers == ("Conv_a", "Conv_b")


def test_equal_constants_are_one() -> None:
    graph = build("a = Conv(x; w)\nb = Conv(x; same)\nc = Conv(x; other)\ny = Sum(a; b; c)")
    simplify(graph)
    weights = [node.inputs[1] for node in graph.nodes if node.op == "Conv"]
    assert sorted(weights) == ["other", "w"]


@pytest.mark.parametrize("case", [c for c in handmade.cases() if c.quick], ids=lambda c: c.name)
def test_collection_keeps_its_values(case: handmade.Case) -> None:
    graph = load(case.model)
    simplify(graph)
    feeds = oracle.tie_free_feeds(case.model)
    verdict = oracle.compare(case.model, feeds, evaluate(graph, feeds))
    assert verdict.right, verdict.text
