"""Linear layers of BitNet: found in all spellings, and equal to an oracle by their integers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from bnncc.agreement import verify
from bnncc.driver import compile_model
from bnncc.frontend.formats import as_onnx
from bnncc.ir.halves import COARSE, KINDS, spacing
from bnncc.options import CompileOptions
from bnncc.transform.physical import KERNEL
from bnncc.verification.confirm_passes import compare_passes
from tests import pytorch_files
from tests.bitnet import SPELLINGS, STORES, Weight, data, wanted, weight
from tests.collection.builder import Net
from tests.physical_networks import evaluated, passed

Array = np.ndarray
TARGETS = ("x86-64-v3", "x86-64-v4-vpopcntdq", "arm64", "arm64-dotprod", "c99")


def case(seed: int) -> tuple[onnx.ModelProto, Array, Array, Array]:
    """Return a random layer, its data, what it gives, and how large its bias is."""
    rng = np.random.default_rng(seed)
    name = list(SPELLINGS)[seed % len(SPELLINGS)]
    spelling, store = SPELLINGS[name], STORES[seed // len(SPELLINGS) % len(STORES)]
    bits = "1.58" if store == "absmean" else str(rng.choice(["1", "1.58", "2"]))
    channels, units = int(rng.choice([1, 7, 32, 33, 100, 257])), int(rng.choice([1, 5, 16, 33]))
    shape = [(1,), (6,), (1, 5), (2, 3), (2, 2, 3)][rng.integers(5)] + (channels,)
    open_batch = bool(rng.random() < 0.3)
    w = weight(rng, units, channels, store, bits)
    x = data(rng, shape)
    net = Net(18, seed=seed)
    net.input("x", ["N", *shape[1:]] if open_batch else list(shape))
    y = spelling.write(net, "x", w, "MatMul")
    bias = None
    if rng.random() < 0.4:
        bias = rng.standard_normal(units).astype(np.float32)
        y = net.op("Add", y, net.const(bias))
    net.output(y)
    return (
        net.model(),
        x,
        wanted(x, spelling, w, bias),
        np.float32(abs(bias).max() if bias is not None else 0),
    )


def test_multiply_adds_are_those_of_all_tokens() -> None:
    net = Net(18, seed=3)
    rng = np.random.default_rng(3)
    net.input("x", ["N", 5, 64])
    w = weight(rng, 33, 64, STORES[0], "1.58")
    net.output(next(iter(SPELLINGS.values())).write(net, "x", w, "MatMul"))
    ((_, _, (layer,)),) = [passed(net.model(), TARGETS[0])]
    assert (layer.kind, layer.macs, layer.output_shape) == ("few_bit", 5 * 64 * 33, ("N", 5, 33))


@pytest.mark.parametrize("seed", range(25 * len(SPELLINGS)))
def test_a_layer_is_found_and_its_integers_are_exact(seed: int) -> None:
    """An integer that is off by one would show: floats behind it are right to a few eps."""
    model, x, y, size = case(seed)
    before, physical, layers = passed(model, TARGETS[seed % len(TARGETS)])
    assert [layer.kind for layer in layers] == ["few_bit"]
    made = evaluated(physical, before, {"x": x})[before.outputs[0]]
    assert made.shape == y.shape
    assert (np.abs(made - y) <= 4e-7 * (np.abs(y) + size)).all()
    assert not compare_passes(physical, before, {"x": x})


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("name", ["scales after the product", "divided before", "MatMulInteger"])
def test_a_vector_is_one_row(name: str, left: bool) -> None:
    """Or one column, if weights are the left operand, as those of `torch.mv`."""
    net, rng = Net(18, seed=name), np.random.default_rng(5)
    net.input("x", [100])
    w, spelling = weight(rng, 33, 100, "float", "1.58"), SPELLINGS[name]
    net.output(spelling.write(net, "x", w, "MatMul"))
    if left:
        (product,) = (n for n in net.nodes if n.op_type.startswith("MatMul"))
        rows, matrix = product.input
        turned = net.op("Transpose", matrix, perm=[1, 0])
        product.input[:] = [turned, rows]
        net.nodes.insert(net.nodes.index(product), net.nodes.pop())
    x = data(rng, (1, 100))[0]
    artifact = compile_model(net.model(), CompileOptions(threads=1))
    (layer,) = artifact.report["layers"]
    assert (layer["kind"], layer["macs"]) == ("few_bit", 100 * 33)
    (made,) = artifact.run({"x": x}).values()
    y = wanted(x, spelling, w, None)
    assert (np.abs(made - y) <= 4e-7 * np.abs(y)).all()


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("kind", list(KINDS))
def test_quotients_rounded_to_half_precision_are_the_integers(kind: str, wide: bool) -> None:
    """As in BitNet's own checkpoints, whose quantizers compute in float32 (`wide`).

    In half precision, the scale is not rounded when the network runs (docs/semantics.md), so some
    integers are the next ones.
    """
    net, rng, dtype = Net(18, seed=kind), np.random.default_rng(8), KINDS[kind]
    half = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    net.input("x", [6, 100])
    given = net.op("Cast", "x", to=half)
    held = np.dtype(np.float32 if wide else dtype)
    value = net.cast(given) if wide else given
    scale = net.op("Max", _largest(net, value), net.const(0.01, held))
    scale = net.op("Div", net.const(127, held), scale)
    q = net.op("Round", net.op("Mul", value, scale))
    q = net.op("Clip", q, net.const(-128, held), net.const(127, held))
    real = net.op("Cast", net.op("Div", q, scale), to=half)
    w = weight(rng, 33, 100, "float", "1.58")
    net.output(net.cast(net.op("MatMul", real, net.const(w.whole.T, dtype))))
    artifact = compile_model(net.model(), CompileOptions(threads=1))
    assert [layer["kind"] for layer in artifact.report["layers"]] == ["few_bit"]
    x = rng.standard_normal((6, 100)).astype(np.float32)
    (made,) = artifact.run({"x": x}).values()
    value = x.astype(dtype).astype(held)
    top = np.maximum(np.abs(value).max(axis=-1, keepdims=True), held.type(0.01))
    scale = held.type(127) / top
    sums = np.clip(np.rint(value * scale), -128, 127).astype(np.int64) @ w.whole.T
    y = sums / scale.astype(np.float64)
    limit = spacing(kind) * np.abs(y) if wide else COARSE[kind] * np.abs(y).max()
    assert (np.abs(made - y) <= limit).all()
    assert verify(net.model(), artifact)["passed"]


def _largest(net: Net, x: str) -> str:
    return net.op("ReduceMax", net.op("Abs", x), net.ints([-1]), keepdims=1)


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_cast_to_half_precision_and_back_rounds_quotients(kind: str) -> None:
    """Nothing is computed in the type then, so the rounding is what the model asks for."""
    net = Net(18, seed=kind)
    net.input("x", [6, 100])
    scale = net.op("Div", net.const(127.0), _largest(net, "x"))
    real = net.op("Div", net.clip(net.op("Round", net.op("Mul", "x", scale)), -128, 127), scale)
    narrow = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(KINDS[kind]))
    real = net.cast(net.op("Cast", real, to=narrow))
    net.output(net.op("MatMul", real, net.const(np.eye(100))))
    before, physical, (layer,) = passed(net.model())
    assert layer.kind == "float"
    feeds = {"x": net.rng.standard_normal((6, 100)).astype(np.float32)}
    (made,), (wanted,) = (evaluated(g, before, feeds).values() for g in (physical, before))
    assert (made == wanted).all()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", [0, 2, 5, 8, 9, 11, 12])
def test_compiled_layers_are_right_for_this_machine(seed: int) -> None:
    model, x, y, size = case(seed)
    artifact = compile_model(model, CompileOptions(threads=1))
    (made,) = artifact.run({"x": x}).values()
    assert (np.abs(made - y) <= 4e-7 * (np.abs(y) + size)).all()
    assert verify(model, artifact)["passed"]


def test_the_report_says_what_was_moved_and_that_sums_are_exact() -> None:
    rng = np.random.default_rng(0)
    w = weight(rng, 4, 8, "float", "1")
    said = {}
    for name in ("scales after the product", "divided before", "DynamicQuantizeLinear"):
        net = Net(18)
        net.input("x", [2, 8])
        net.output(SPELLINGS[name].write(net, "x", w, "MatMul"))
        said[name] = passed(net.model())[2][0].reason
    assert "rows" not in said["scales after the product"]
    assert said["divided before"].endswith(
        "; scales of rows are applied to its sums, integers of at most 1,024"
    )
    assert said["DynamicQuantizeLinear"].endswith(
        "; zero points of rows are applied to its sums, integers of at most 2,040"
    )


@pytest.mark.parametrize("channels", [131_072, 131_073])
def test_the_report_says_where_float32_may_round_sums(channels: int) -> None:
    """Sums of 128 times so many ones are 2^24 and more."""
    net = Net(18)
    net.input("x", [1, channels])
    scale = net.op("ReduceMax", net.op("Abs", "x"), net.ints([-1]), keepdims=1)
    q = net.clip(net.op("Round", net.op("Mul", "x", scale)), -127, 127)
    half = net.op("Div", q, scale)
    net.output(net.op("MatMul", half, net.const(np.ones((channels, 1)))))
    (layer,) = passed(net.model())[2]
    exact = 127 * channels < 2**24
    assert ("may exceed 2^24" in layer.reason) == (not exact)


def test_what_differs_along_a_row_stays_where_it_is() -> None:
    """A scale of each channel has no place behind a sum over channels."""
    net = Net(18)
    net.input("x", [2, 4])
    net.input("s", [4])
    q = net.clip(net.op("Round", "x"), -8, 7)
    net.output(net.op("MatMul", net.op("Mul", q, "s"), net.const(np.eye(4))))
    before, physical, (layer,) = passed(net.model())
    assert layer.kind == "float"
    feeds = {"x": np.full((2, 4), 2.5, np.float32), "s": np.arange(4, dtype=np.float32)}
    made = evaluated(physical, before, feeds)[before.outputs[0]]
    assert made.tolist() == [[0, 2, 4, 6]] * 2


@pytest.mark.parametrize("channels", [132_104, 132_105])
def test_integers_stay_integers_where_floats_could_not_hold_them(channels: int) -> None:
    """127 times so many ones are less than 2^24, or not: then casts to int32 and back matter."""
    net = Net(18)
    net.input("x", [1, channels])
    q = net.clip(net.op("Round", "x"), -127, 127)
    sums = net.op("MatMul", q, net.const(np.ones((channels, 1))))
    whole = net.op("Cast", sums, to=onnx.TensorProto.INT32)
    net.output(net.op("Relu", net.cast(whole)))
    before, physical, _ = passed(net.model())
    assert any(n.op == "Cast" for n in physical.nodes) == (127 * channels >= 2**24)
    feeds = {"x": np.full((1, channels), 127, np.float32)}
    assert evaluated(physical, before, feeds)[before.outputs[0]].item() == np.float32(
        127 * channels
    )


def test_modules_of_pytorch_are_found_and_right(tmp_path: Path) -> None:
    """Zeros, a constant row and an outlier are among the rows; torch says what is right."""
    model = as_onnx(pytorch_files.write("bitnet", tmp_path))
    x, wanted = pytorch_files.arrays("bitnet")
    before, physical, layers = passed(model, "x86-64-v3")
    assert [layer.kind for layer in layers] == ["few_bit"] * len(pytorch_files.BITNET)
    feeds = {before.inputs[0]: x}
    made = evaluated(physical, before, feeds)
    for name, want in zip(before.outputs, wanted, strict=True):
        size = np.abs(want).max(axis=-1, keepdims=True)
        assert (np.abs(made[name] - want) <= 2e-6 * size).all(), name
    assert not compare_passes(physical, before, feeds)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_all_linears_of_a_block_are_found(kind: str, tmp_path: Path) -> None:
    """An integer may be the next one where a norm rounds otherwise: a 127th of the largest."""
    path = pytorch_files.write(f"bitnet_{kind}", tmp_path)
    x, (wanted,) = pytorch_files.arrays(f"bitnet_{kind}")
    artifact = compile_model(path, CompileOptions(threads=1))
    layers = artifact.report["layers"]
    weighted = [layer for layer in layers if layer["kind"] != "float"]
    assert [layer["kind"] for layer in weighted] == ["few_bit"] * 7
    assert len(layers) == 9  # with both products of attention
    (made,) = artifact.run({artifact.inputs[0].name: x}).values()
    assert np.abs(made - wanted).max() <= 0.02 * np.abs(wanted).max()
    assert verify(path, artifact)["passed"]


@pytest.mark.parametrize("target", ["native", pytest.param("x86-64-v3", marks=pytest.mark.slow)])
def test_signs_times_a_scale_of_rows_are_bits(target: str) -> None:
    """XNOR-Net's dense layer: bits are multiplied, and the scale of a row follows."""
    net = Net(18, seed=1)
    net.input("x", [7, 70])
    size = net.op("ReduceMean", net.op("Abs", "x"), net.ints([-1]), keepdims=1)
    w = np.where(net.rng.random((70, 37)) < 0.5, -1, 1).astype(np.float32)
    positive = net.op("GreaterOrEqual", "x", net.const(0.0))
    sign = net.op("Where", positive, net.const(1.0), net.const(-1.0))
    net.output(net.op("MatMul", net.op("Mul", sign, size), net.const(w)))
    artifact = compile_model(net.model(), CompileOptions(target=target, threads=1))
    (layer,) = artifact.report["layers"]
    assert layer["kind"] == "binary"
    assert "scales of rows" in layer["reason"]
    x = net.rng.standard_normal((7, 70)).astype(np.float32)
    (made,) = artifact.run({"x": x}).values()
    wanted = (np.where(x >= 0, 1, -1) @ w) * np.abs(x).mean(axis=1, keepdims=True)
    np.testing.assert_allclose(made, wanted, rtol=1e-6)


def test_a_matrix_that_broadcasts_over_images_is_no_number_of_rows() -> None:
    """Of shape (4, 1), it differs along the height of an image of four rows."""
    net = Net(18, seed=2)
    net.input("x", [4, 3, 4, 5])
    net.input("s", [4, 1])
    net.output(net.op("Mul", net.op("Relu", "x"), "s"))
    before, physical, _ = passed(net.model())
    x = net.rng.standard_normal((4, 3, 4, 5)).astype(np.float32)
    s = np.arange(4, dtype=np.float32).reshape(4, 1)
    made = evaluated(physical, before, {"x": x, "s": s})[before.outputs[0]]
    np.testing.assert_array_equal(made, np.maximum(x, 0) * s)


@pytest.mark.parametrize(("top", "products"), [(1, 1), (127, 2)])
def test_integer_weights_are_cut_only_where_sums_may_pass_float32(top: int, products: int) -> None:
    """1,100 products of 128 and 1 are less than 2^24; those of 128 and 127 are not."""
    rng = np.random.default_rng(top)
    whole = rng.integers(-top, top + 1, (1, 1100))
    w = Weight(np.vstack([whole, -whole]), np.float32([1.0]), "int8")
    net = Net(18)
    net.input("x", [1, 1100])
    net.output(SPELLINGS["MatMulInteger"].write(net, "x", w, "MatMul"))
    physical = passed(net.model())[1]
    specs = [node.attrs["spec"] for node in physical.nodes if node.op == KERNEL]
    assert sum(spec.macs > 0 for spec in specs) == products


@pytest.mark.sampled(3)
@pytest.mark.parametrize("spelling", ["divided before", "scales after the product"])
@pytest.mark.parametrize("first", [True, False])
def test_a_function_of_its_own_argument_follows(spelling: str, first: bool) -> None:
    """GELU as transformers spell it: a scalar times the layer's result, which is read twice."""
    net, rng = Net(18, seed=5), np.random.default_rng(5)
    net.input("x", [2, 4, 48])
    w = weight(rng, 48, 48, "float", "1.58")

    def scaled(x: str, factor: float) -> str:
        return net.op("Mul", *[net.const(factor), x][:: 1 if first else -1])

    y = SPELLINGS[spelling].write(net, "x", w, "MatMul")
    cube = net.op("Pow", y, net.const(3.0))
    bent = net.op("Tanh", scaled(net.op("Add", y, scaled(cube, 0.044715)), 0.7978846))
    y = net.op("Mul", scaled(y, 0.5), net.op("Add", net.const(1.0), bent))
    net.output(SPELLINGS[spelling].write(net, y, weight(rng, 33, 48, "float", "1.58"), "MatMul"))
    artifact = compile_model(net.model(), CompileOptions(threads=1))
    assert [layer["kind"] for layer in artifact.report["layers"]] == ["few_bit"] * 2
    assert verify(net.model(), artifact)["passed"]


def dynamic(net: Net, x: str, axes: list[int] | None) -> str:
    """Write levels with a scale of some axes, or of all."""
    given = [] if axes is None else [net.ints(axes)]
    top = net.op("ReduceMax", net.op("Abs", x), *given, keepdims=axes is not None)
    scale = net.op("Div", net.const(127.0), net.op("Max", top, net.const(1e-5)))
    q = net.clip(net.op("Round", net.op("Mul", x, scale)), -128, 127)
    return net.op("Div", q, scale)


CONVOLUTIONS = {
    "of an image": ([1, 2, 3], (16, 8, 3, 3), {"pads": [1, 1, 0, 1], "strides": [2, 1]}),
    "of all images": (None, (16, 8, 3, 3), {"pads": [1, 1, 1, 1]}),
    "of pixels, 1x1": ([1], (16, 8, 1, 1), {}),
    "of an image, in groups": ([1, 2, 3], (32, 4, 3, 3), {"group": 2}),
    "of an image, depthwise": ([1, 2, 3], (8, 1, 3, 3), {"group": 8, "pads": [1, 1, 1, 1]}),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_scales_follow_convolutions(name: str) -> None:
    axes, shape, attrs = CONVOLUTIONS[name]
    net, rng = Net(18, seed=4), np.random.default_rng(4)
    net.input("x", [2, 8, 7, 6])
    whole = rng.integers(-1, 2, shape).astype(np.float32)
    bias = rng.standard_normal(shape[0]).astype(np.float32)
    real = dynamic(net, "x", axes)
    net.output(net.op("Conv", real, net.const(whole * np.float32(0.3)), net.const(bias), **attrs))
    model = net.model()
    before, physical, (layer,) = passed(model, "x86-64-v3")
    assert layer.kind == "few_bit"
    assert "scales of rows" in layer.reason
    x = rng.standard_normal((2, 8, 7, 6)).astype(np.float32)
    x[0, :, 2, 3], x[1] = 0, x[1] * 1e5
    made = evaluated(physical, before, {"x": x})[before.outputs[0]]
    (wanted,) = ort.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    size = 127 * np.abs(x).max((1, 2, 3), keepdims=True)
    assert (np.abs(made - wanted) <= 1e-6 * size).all()
    assert not compare_passes(physical, before, {"x": x})


@pytest.mark.parametrize("name", ["pixels, 3x3", "zero point, padded", "pixels, strided"])
def test_what_cannot_follow_a_convolution_stays(name: str) -> None:
    net, rng = Net(18, seed=4), np.random.default_rng(4)
    net.input("x", [2, 8, 7, 6])
    net.input("z", [2, 1, 1, 1])
    kernel = 1 if name.endswith("strided") else 3
    real = dynamic(net, "x", [1, 2, 3] if "zero" in name else [1])
    if "zero" in name:
        real = net.op("Sub", real, "z")
    whole = rng.integers(-1, 2, (16, 8, kernel, kernel)).astype(np.float32)
    attrs = {"strides": [2, 2]} if kernel == 1 else {"pads": [1, 1, 1, 1]}
    net.output(net.op("Conv", real, net.const(whole), **attrs))
    model = net.model()
    before, physical, (layer,) = passed(model, "x86-64-v3")
    assert layer.kind == "float"
    feeds = {"x": rng.standard_normal((2, 8, 7, 6)), "z": rng.standard_normal((2, 1, 1, 1))}
    feeds = {key: value.astype(np.float32) for key, value in feeds.items() if key in before.inputs}
    made = evaluated(physical, before, feeds)[before.outputs[0]]
    (wanted,) = ort.InferenceSession(model.SerializeToString()).run(None, feeds)
    np.testing.assert_allclose(made, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("offset", [False, True])
def test_weights_of_two_values_have_scales_of_rows(offset: bool) -> None:
    """FBI-LLM: signs times a scale and plus an offset, both of an output."""
    net, rng = Net(18, seed=6), np.random.default_rng(6)
    net.input("x", [3, 5, 40])
    net.input("z", [3, 5, 1])
    signs = np.where(rng.random((12, 40)) < 0.5, -1, 1)
    alpha, beta = rng.uniform(0.5, 1, (12, 1)), rng.uniform(-0.1, 0.1, (12, 1))
    w = (signs * alpha + beta).astype(np.float32)
    real = dynamic(net, "x", [-1])
    real = net.op("Add", real, "z") if offset else real
    net.output(net.op("MatMul", real, net.const(w.T)))
    model = net.model()
    before, physical, (layer,) = passed(model, "x86-64-v3")
    assert layer.kind == "few_bit"
    x, z = data(rng, (3, 5, 40)), rng.standard_normal((3, 5, 1)).astype(np.float32)
    feeds = {name: {"x": x, "z": z}[name] for name in before.inputs}
    made = evaluated(physical, before, feeds)[before.outputs[0]]
    scale = np.float32(127) / np.maximum(np.abs(x).max(-1, keepdims=True), np.float32(1e-5))
    q = np.clip(np.rint(x * scale), -128, 127).astype(np.float64)
    wanted = (q / scale + z * offset) @ w.astype(np.float64).T
    size = np.abs(q / scale).sum(-1, keepdims=True) + 40 * np.abs(z)
    assert (np.abs(made - wanted) <= 1e-6 * size).all()


def test_queries_keys_and_values_share_their_rows() -> None:
    """Three products of one flattened tensor: its levels are decided once."""
    net, rng = Net(18, seed=7), np.random.default_rng(7)
    net.input("x", [2, 5, 40])
    flat = net.op("Reshape", dynamic(net, "x", [-1]), net.ints([-1, 40]))
    ws = [weight(rng, 12, 40, "float", "1.58") for _ in range(3)]
    net.output(*(net.op("MatMul", flat, w.floats(net)) for w in ws))
    physical, layers = passed(net.model(), "x86-64-v3")[1:]
    assert [layer.kind for layer in layers] == ["few_bit"] * 3
    kernels = [n.attrs["spec"].macs > 0 for n in physical.nodes if n.op == KERNEL]
    assert sorted(kernels) == [False, True, True, True]


@pytest.mark.parametrize(
    ("shape", "axes", "equation", "size", "kind"),
    [
        ((2, 5, 4, 10), [-2, -1], "bthd,hdo->bto", (4, 10, 12), "few_bit"),
        ((2, 5, 4, 10), [-1], "bthd,hdo->bto", (4, 10, 12), "float"),
        ((2, 5, 4, 10), [-1], "bthd,hdo->btho", (4, 10, 12), "few_bit"),
        ((2, 5, 4, 10), [-2, -1], "bthd,do->btho", (10, 12), "few_bit"),
        ((2, 5, 40), [-1], "bti,oi->bto", (12, 40), "few_bit"),
        ((2, 5, 40), [-1], "oi,bti->bot", (12, 40), "few_bit"),
    ],
)
def test_sums_over_heads(
    shape: tuple[int, ...], axes: list[int], equation: str, size: tuple[int, ...], kind: str
) -> None:
    """A scale of all heads of a token follows a sum over them; one of each head does not."""
    net, rng = Net(18, seed=8), np.random.default_rng(8)
    net.input("x", shape)
    real, w = dynamic(net, "x", axes), net.const(rng.integers(-1, 2, size) * np.float32(0.3))
    given = [w, real] if equation.startswith("oi") else [real, w]
    net.output(net.op("Einsum", *given, equation=equation))
    before, physical, (layer,) = passed(net.model(), "x86-64-v3")
    assert layer.kind == kind
    x = data(rng, shape)
    made = evaluated(physical, before, {"x": x})[before.outputs[0]]
    (wanted,) = ort.InferenceSession(net.model().SerializeToString()).run(None, {"x": x})
    size_of = np.abs(x).max(axis=tuple(range(2, len(shape))))  # tokens
    size_of = size_of.reshape(
        (2, 1, 5) if equation.endswith("bot") else (2, 5) + (1,) * (made.ndim - 2)
    )
    assert (np.abs(made - wanted) <= 2e-5 * size_of).all()


def test_heads_split_after_the_quantizer() -> None:
    """A scale of a token is one of each of its heads, too."""
    net, rng = Net(18, seed=9), np.random.default_rng(9)
    net.input("x", ["N", 5, 40])
    real = net.op("Reshape", dynamic(net, "x", [-1]), net.ints([0, 5, 4, 10]))
    real = net.op("Transpose", real, perm=[0, 2, 1, 3])
    net.output(net.op("MatMul", real, net.const(rng.integers(-1, 2, (4, 10, 12)) * 0.3)))
    before, physical, (layer,) = passed(net.model(), "x86-64-v3")
    assert layer.kind == "few_bit"
    x = data(rng, (3, 5, 40))
    made = evaluated(physical, before, {"x": x})[before.outputs[0]]
    (wanted,) = ort.InferenceSession(net.model().SerializeToString()).run(None, {"x": x})
    assert (np.abs(made - wanted) <= 2e-5 * np.abs(x).max(-1)[:, None, :, None]).all()
