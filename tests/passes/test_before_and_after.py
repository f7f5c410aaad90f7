"""Each pass of the pipeline on a small model: the graph before and after it, and what comes out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest

from bnncc.frontend.onnx import load
from bnncc.ir.evaluate import evaluate
from bnncc.ir.graph import Graph, Node
from bnncc.options import CompileOptions
from bnncc.targets.catalog import resolve
from bnncc.transform.physical import KERNEL
from bnncc.transform.pipeline import PASSES, Compilation
from bnncc.verification.evaluator import evaluate_physical

TARGET = "x86-64-v3"
HEAD = '<ir_version: 9, opset_import: ["" : 17, "qonnx.custom_op.general" : 1]> g '
QUANT = 'qonnx.custom_op.general.Quant<signed=1,narrow=0,rounding_mode="ROUND">'
IMAGE, WIDE = "(float[1,3,4,4] x) => (y)", "(float[1,32,6,6] x) => (y)"


def decided(data: str, out: str) -> str:
    """Return the text of a sign that is +1 at 0."""
    return f"{out}_g = GreaterOrEqual({data},zero) {out} = Where({out}_g,one,minus)"


def signs(*shape: int) -> np.ndarray:
    return np.where(np.random.default_rng(len(shape)).random(shape) < 0.5, -1, 1).astype("f4")


@dataclass(frozen=True)
class Case:
    """A model, and what one pass makes of it; constants that its text names are added."""

    text: str
    before: str
    after: str
    weights: dict[str, np.ndarray]


CONSTANTS: dict[str, Any] = {
    "zero": np.float32(0), "half": np.float32(0.5), "one": np.float32(1),
    "minus": np.float32(-1), "three": np.float32(3), "mean": np.float32(99.5),
    "steps": np.array([0.5, 0.25, 1], np.float32).reshape(1, 3, 1, 1),
    "few": np.float32(3), "many": np.float32(12), "table": np.array([0, 2, 3], np.float32),
    "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1]),
}  # fmt: skip

SMALL = {"w": signs(8, 3, 3, 3)}
CASES = {
    "simplify": Case(f"{IMAGE} {{a = Identity(x) b = Neg(a) c = Neg(b) y = Relu(c)}}",
        "Identity Neg Neg Relu", "Relu", {}),
    "integer products": Case(
        "(float[2,32] x) => (y) {r = Round(x) c = Clip(r,minus,one) b = Cast<to=3>(c)"
        " i = Cast<to=6>(b) k = Cast<to=6>(w) p = MatMul(i,k) y = Cast<to=1>(p)}",
        "Round Clip Cast Cast MatMul Cast", "Round Clip MatMul Cast Cast", {"w": signs(32, 8)}),
    "ramps": Case(
        f"{IMAGE} {{a = Abs(x) b = Sub(x,one) c = Abs(b) d = Sub(a,c) e = Add(d,one)"
        "h = Mul(e,half) q = Mul(h,three) r = Round(q) y = Conv(r,w)}",
        "Abs Sub Abs Sub Add Mul Mul Round Conv", "Mul Clip Round Conv", SMALL),
    "signs": Case(f"{IMAGE} {{{decided('x', 's')} y = Conv(s,w)}}",
        "GreaterOrEqual Where Conv", "bnncc.Sign Conv", SMALL),
    "channel scales": Case(f"{IMAGE} {{a = {QUANT}(x,steps,zero,few) y = Conv<group=3>(a,w)}}",
        "bnncc.Quant Conv", "Div bnncc.Quant Mul Conv", {"w": signs(3, 1, 3, 3)}),
    "bounds": Case(
        "(float[2,32] x) => (y) {a = Abs(x) m = ReduceMax<axes=[-1]>(a) d = Div(x,m) r = Round(d)"
        " y = MatMul(r,w)}", "Abs ReduceMax Div Round MatMul",
        "Abs ReduceMax Div Round Clip Div Mul MatMul", {"w": signs(32, 8)}),
    "quantizers": Case(
        f"{IMAGE} {{c = Clip(x,zero,one) m = Mul(c,three) r = Round(m) d = Div(r,three)"
        " y = Conv(d,w)}", "Clip Mul Round Div Conv", "bnncc.Levels Conv", SMALL),
    "few values": Case(
        f"{IMAGE} {{i = ArgMax<axis=1>(x) t = Gather<axis=0>(table,i) y = Conv(t,w)}}",
        "ArgMax Gather Conv", "ArgMax Gather bnncc.Levels Conv", {"w": signs(8, 1, 3, 3)}),
    "transposed": Case(
        f"{IMAGE} {{{decided('x', 's')} t = ConvTranspose<strides=[1,2]>(s,w) y = Relu(t)}}",
        "bnncc.Sign ConvTranspose Relu", "bnncc.Sign Conv Conv Relu Relu bnncc.Interleave",
        {"w": signs(3, 8, 1, 2)}),
    "stacked weights": Case(
        f"(float[2,5,32] x) => (y) {{{decided('x', 's')} y = MatMul(s,w)}}", "bnncc.Sign MatMul",
        "bnncc.Sign Slice MatMul Slice MatMul Concat", {"w": signs(2, 32, 8)}),
    "left weights": Case(f"(float[32,6] x) => (y) {{{decided('x', 's')} y = MatMul(w,s)}}",
        "bnncc.Sign MatMul", "Transpose bnncc.Sign MatMul Transpose", {"w": signs(8, 32)}),
    "row scales": Case(
        "(float[2,32] x, float[2,1] s) => (y) {r = Round(x) c = Clip(r,minus,one) d = Div(c,s)"
        " y = MatMul(d,w)}", "bnncc.Levels Div MatMul", "bnncc.Levels MatMul Div",
        {"w": signs(32, 8)}),
    "whole sums": Case(
        "(float[2,32] x) => (y) {r = Round(x) c = Clip(r,minus,one) p = MatMul(c,w)"
        " i = Cast<to=6>(p) f = Cast<to=1>(i) y = Relu(f)}", "bnncc.Levels MatMul Cast Cast Relu",
        "bnncc.Levels MatMul Relu", {"w": signs(32, 8)}),
    "normalizations": Case(
        f"(float[2,5,32] x) => (y) {{{decided('x', 's')} a = MatMul(s,w)"
        " m = ReduceMean<axes=[-1]>(a) d = Sub(a,m) q = Mul(d,d) v = ReduceMean<axes=[-1]>(q)"
        " e = Add(v,half) r = Sqrt(e) y = Div(d,r)}",
        "bnncc.Sign MatMul ReduceMean Sub Mul ReduceMean Add Sqrt Div",
        "bnncc.Sign MatMul bnncc.RowNorm", {"w": signs(32, 8)}),
    "rows": Case(
        f"(float[2,5,32] x) => (y) {{{decided('x', 's')} a = MatMul(s,w) g = Sigmoid(a)"
        " y = Mul(a,g)}", "bnncc.Sign MatMul Sigmoid Mul",
        "Reshape bnncc.Sign MatMul Sigmoid Mul Reshape", {"w": signs(32, 8)}),
    "moves": Case(
        f"(float[2,3,4,4] x) => (y) {{f = Flatten(x) {decided('f', 's')} y = MatMul(s,w)}}",
        "Flatten bnncc.Sign MatMul", "bnncc.Sign Flatten MatMul", {"w": signs(48, 8)}),
    "products": Case(
        f"(float[2,5,32] x) => (y) {{{decided('x', 's')} t = Transpose<perm=[0,2,1]>(s)"
        " y = MatMul(s,t)}", "bnncc.Sign Reshape Reshape Transpose MatMul",
        "Reshape bnncc.Sign Reshape bnncc.Sign bnncc.BinaryProduct Reshape", {}),
    "pads": Case(f"{IMAGE} {{p = Pad(x,pads,one) {decided('p', 's')} y = Conv(s,w)}}",
        "Pad bnncc.Sign Conv", "bnncc.Sign Pad Conv", SMALL),
    "bytes": Case(
        f"(uint8[1,3,4,4] x) => (y) {{c = Cast<to=1>(x) b = Sub(c,mean) {decided('b', 's')}"
        " y = Conv(s,w)}", "Cast Sub bnncc.Sign Conv", "bnncc.ImageBits Conv", SMALL),
    "offsets": Case(f"{WIDE} {{{decided('x', 's')} y = Conv(s,w)}}",
        "bnncc.Sign Conv", "bnncc.Sign Conv Conv Mul Add",
        {"w": np.where(signs(8, 32, 3, 3) > 0, np.float32(0.70710677), np.float32(-0.31415927))}),
    "binarize": Case(f"{WIDE} {{{decided('x', 's')} y = Conv(s,w)}}",
        "bnncc.Sign Conv", "bnncc.Sign bnncc.BinaryConv", {"w": signs(8, 32, 3, 3)}),
    "pools": Case(
        f"{WIDE} {{{decided('x', 's')} c = Conv(s,w) m = MaxPool<kernel_shape=[2,2]>(c)"
        f" {decided('m', 't')} y = Conv(t,v)}}",
        "bnncc.Sign bnncc.BinaryConv MaxPool bnncc.Sign bnncc.BinaryConv",
        "bnncc.Sign bnncc.BinaryConv bnncc.Sign bnncc.BitPool bnncc.BinaryConv",
        {"w": signs(32, 32, 3, 3), "v": signs(8, 32, 1, 1)}),
    "siblings": Case(
        f"{WIDE} {{{decided('x', 's')} a = Conv(s,w) b = Conv(s,v) y = Concat<axis=1>(a,b)}}",
        "bnncc.Sign bnncc.BinaryConv bnncc.BinaryConv Concat", "bnncc.Sign bnncc.BinaryConv",
        {"w": signs(16, 32, 1, 1), "v": -signs(16, 32, 1, 1)}),
    "plain": Case(f"{IMAGE} {{y = {QUANT}(x,half,zero,many)}}", "bnncc.Quant",
        "Div Clip Round Mul", {}),
    "softmax": Case(
        f"{IMAGE} {{a = Softmax<axis=-1>(x) b = Sigmoid(a) y = Mul(a,b)}}",
        "Softmax Sigmoid Mul", "bnncc.RowSoftmax bnncc.Swish", {}),
    "fuse": Case(
        f"(float[2,32] x, float[2,8] z) => (y) {{{decided('x', 's')} a = MatMul(s,w) b = Relu(a)"
        " g = Sigmoid(b) c = Mul(b,g) y = Mul(z,c)}",
        "bnncc.Sign bnncc.BinaryConv Relu bnncc.Swish Mul",
        "Elementwise[bits] BinaryConv2d[affine,relu,store] Elementwise[swish,mul,store]",
        {"w": signs(32, 8)}),
    "in place": Case(
        f"{WIDE} {{p = Relu(x) {decided('x', 's')} c = Conv<pads=[1,1,1,1]>(s,w) a = Add(c,p)"
        f" {decided('a', 't')} d = Conv<pads=[1,1,1,1]>(t,v) y = Add(d,a)}}",
        "Elementwise[relu,store] Elementwise[bits] BinaryConv2d[affine,add,bits,store]"
        " BinaryConv2d[affine,add,store]",
        "Elementwise[relu,store] Elementwise[bits] BinaryConv2d[affine,add,bits,store over]"
        " BinaryConv2d[affine,add,store]",
        {"w": signs(32, 32, 3, 3), "v": -signs(32, 32, 3, 3)}),
}  # fmt: skip


def model(case: Case) -> onnx.ModelProto:
    made = onnx.parser.parse_model(HEAD + case.text)
    for name, value in {**CONSTANTS, **case.weights}.items():
        if any(name in node.input for node in made.graph.node):
            made.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), name))
    return made


def shown(node: Node) -> str:
    if node.op != KERNEL:
        return node.op
    spec = node.attrs["spec"]
    steps = (f"{s.op}{' over' if s.in_place else ''}" for s in spec.steps)
    return f"{type(spec).__name__}[{','.join(steps)}]"


def values(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> np.ndarray:
    """Return what the model computes: by ONNX Runtime, unless it does not know the operators."""
    if any(node.domain for node in model.graph.node):
        return evaluate(load(model), feeds)["y"]
    return ort.InferenceSession(model.SerializeToString()).run(None, feeds)[0]


@pytest.mark.parametrize("name", [step.name for step in PASSES])
def test_before_and_after(name: str) -> None:
    case = CASES[name]
    proto = model(case)
    graph, made = load(proto), Compilation(CompileOptions(target=TARGET), resolve(TARGET))
    rng = np.random.default_rng(7)
    feeds = {
        i: rng.integers(0, 256, kind.shape, dtype=np.uint8)
        if (kind := graph.types[i]).dtype == "uint8"
        else rng.standard_normal(kind.shape).astype(np.float32)
        for i in graph.inputs
    }
    for step in PASSES:
        before = [shown(node) for node in graph.nodes]
        other = step.run(graph, made)
        graph = other if isinstance(other, Graph) else graph
        if step.name == name:
            assert " ".join(before) == case.before
            assert " ".join(map(shown, graph.nodes)) == case.after
    got = evaluate_physical(graph, feeds)[graph.outputs[0]]
    np.testing.assert_allclose(got, values(proto, feeds), rtol=1e-5, atol=1e-5)
