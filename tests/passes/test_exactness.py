"""What docs/exactness.md promises of the passes: proofs, not samples; zeros that stay zeros."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import bnncc
from bnncc.frontend.onnx import load
from bnncc.ir.evaluate import evaluate
from bnncc.ir.graph import Node
from bnncc.ir.numeric import multiples
from bnncc.recognise.filters import few_bit_weights
from bnncc.recognise.lattice import as_multiples, exact_line
from bnncc.recognise.monotone import chain_direction
from bnncc.verification.confirm_passes import compare_passes
from tests.collection import oracle
from tests.collection.builder import Net
from tests.physical_networks import evaluated, passed

pytestmark = pytest.mark.sampled(3)

TARGETS = ("x86-64-v3", "arm64", "cuda-sm80")


def check(model: onnx.ModelProto, x: np.ndarray, run: bool = True) -> None:
    """Compare physical graphs with the independent oracle, and the code made for this machine."""
    feeds = {"x": x.astype(np.float32)}
    for target in TARGETS:
        before, physical, _ = passed(model, target)
        assert not compare_passes(physical, before, feeds)
        verdict = oracle.compare(model, feeds, evaluated(physical, before, feeds))
        assert verdict.right, f"{target}: {verdict.text}"
    if run:
        verdict = oracle.compare(model, feeds, bnncc.compile(model, threads=1).run(feeds))
        assert verdict.right, verdict.text


def levels(net: Net, x: str, form: str) -> str:
    """Return a quantizer; none of its values is a product of the others in float32."""
    if form == "thirds":
        whole = net.op("Round", net.op("Mul", net.clip(x, -1, 1), net.const(3.0)))
        return net.op("Div", whole, net.const(3.0))
    if form == "scaled":
        whole = net.clip(net.op("Round", net.op("Div", x, net.const(0.1))), -5, 10)
        return net.op("Mul", whole, net.const(0.1))
    whole = net.op("Round", net.op("Mul", net.clip(x, 0, 1), net.const(7.0)))
    centred = net.op("Sub", net.op("Mul", whole, net.const(2 / 7)), net.const(1.0))
    return net.op("Mul", centred, net.const(0.7))


def test_levels_stand_for_exactly_what_the_model_says() -> None:
    """Comparing them with their own values, 0 among them, gives what the model gives."""
    net = Net(seed=0)
    x = net.input("x", [1, 16, 6, 6])
    limits = {"thirds": 1 / 3, "scaled": np.float32(7) * np.float32(0.1), "sevenths": 0.7}
    for form, limit in limits.items():
        level = levels(net, x, form)
        above = net.cast(net.op("GreaterOrEqual", level, net.const(limit)))
        net.output(net.op("Sign", level), above, level)
    check(net.model(), np.random.default_rng(0).standard_normal((1, 16, 6, 6)))


@pytest.mark.parametrize("form", ["thirds", "scaled", "sevenths"])
@pytest.mark.parametrize("groups", [1, 16])
def test_products_of_levels_that_are_zero_are_zero(form: str, groups: int) -> None:
    """Behind them another tensor is multiplied, so that no threshold of integers hides it."""
    net = Net(seed=(form, groups))
    x = net.input("x", [1, 16, 6, 6])
    level = levels(net, x, form)
    weight = net.rng.integers(-2, 3, (16, 16 // groups, 3, 3)).astype(np.float32)
    weight *= net.rng.choice([0.3, 0.7, 1.1], (16, 1, 1, 1)).astype(np.float32)
    net.channels[level] = 16
    made = net.conv(level, weight, pad=1, group=groups)
    gate = net.op("Sigmoid", net.reduce_mean(x, [2, 3]))
    net.output(net.cast(net.op("Greater", net.op("Mul", made, gate), net.const(0.0))), made)
    x = np.random.default_rng(0).integers(-1, 2, (1, 16, 6, 6)) * 0.3
    check(net.model(), x, run=(form, groups) == ("scaled", 16))


@pytest.mark.parametrize("kind", ["signs", "levels"])
@pytest.mark.parametrize("mean", [0, 2])
def test_sums_that_are_the_mean_leave_the_offset(kind: str, mean: int) -> None:
    """Large scales behind a sum of integers: nothing of it is left where it is taken away."""
    net = Net(seed=0)
    x = net.input("x", [1, 6, 6, 6])
    if kind == "signs":
        data = net.where(net.op("Greater", x, net.const(0.0)), np.float32(1), np.float32(-1))
    else:  # -3, -1, 1, 3
        whole = net.op("Round", net.op("Mul", net.clip(x, 0, 1), net.const(3.0)))
        data = net.op("Sub", net.op("Mul", whole, net.const(2.0)), net.const(3.0))
    net.channels[data] = 6
    weight = net.signs((20, 6, 1, 1))
    summed = net.conv(data, weight)
    arrays = (1.1e30, 0.3, mean, 0.7)
    made = net.op(
        "BatchNormalization", summed, *(net.const(np.full(20, v)) for v in arrays), epsilon=1e-5
    )
    feeds = {"x": np.random.default_rng(0).standard_normal((1, 6, 6, 6)).astype(np.float32)}
    net.output(summed)
    sums = evaluate(load(net.model()), feeds)[summed]
    net.outputs = [made]
    model = net.model()
    for target in TARGETS:
        before, physical, _ = passed(model, target)
        (value,) = evaluated(physical, before, feeds).values()
        there = value[sums == mean]
        assert there.size > 20
        assert (np.abs(there) <= 1).all()
        if mean == 0:
            np.testing.assert_array_equal(there, np.float32(0.3))


def test_signs_of_unequal_size() -> None:
    """Sums of 0.5 and -0.3 are multiples of 0.1: what is 0 is exactly that."""
    net = Net(seed=0)
    x = net.input("x", [1, 16, 6, 6])
    bits = net.where(net.op("Greater", x, net.const(0.0)), np.float32(0.5), np.float32(-0.3))
    net.channels[bits] = 16
    made = net.bconv(bits, 31, 2, scale=0.37, pad=0)
    net.output(net.op("Sign", made), net.op("Neg", made))
    check(net.model(), np.random.default_rng(0).standard_normal((1, 16, 6, 6)))


def test_an_exact_zero_before_a_scale_stays_one() -> None:
    """``(x - 128) / 127.5`` is 0 for the byte 128; as one multiplication and addition it is not."""
    net = Net(seed=0)
    x = net.input("x", [1, 3, 4, 4])
    centred = net.op("Sub", x, net.const(128.0))
    net.output(net.op("Sign", net.op("Mul", centred, net.const(1 / 127.5))))
    check(net.model(), np.arange(104, 152).reshape(1, 3, 4, 4))


def pooled_sign(body: str) -> onnx.ModelProto:
    text = f"""<ir_version: 9, opset_import: ["" : 18]>
    net (float[1,4,6,6] x) => (float[1,4,3,3] y) {{
      m = MaxPool<kernel_shape=[2,2], strides=[2,2]>(x) {body} y = Sign(s) }}"""
    return onnx.parser.parse_model(text)


@pytest.mark.parametrize(
    ("body", "scale"),
    [
        # Neither monotone nor seen between -1e6 and 1e6; falling, but flat there.
        ("low = Constant<value_float=150.0>() high = Constant<value_float=250.0>() "
         "c = Clip(m, low, high) t = Constant<value_float=200.0>() d = Sub(c, t) "
         "a = LeakyRelu<alpha=-0.9>(d) u = Constant<value_float=20.0>() s = Sub(a, u)", 255.0),
        ("k = Constant<value_float=-1e-15>() p = Mul(m, k) h = Constant<value_float=0.5>() "
         "s = Add(p, h)", 1e15),
        ("k = Constant<value_float=-1e-30>() p = Mul(m, k) h = Constant<value_float=1e-8>() "
         "s = Add(p, h)", 1e22),
    ],
)  # fmt: skip
def test_poolings_and_signs_commute_only_where_that_is_proved(body: str, scale: float) -> None:
    x = np.random.default_rng(0).random((1, 4, 6, 6)) * scale
    check(pooled_sign(body), x, run=scale == 255.0)


def test_a_window_in_the_padding_is_no_bit() -> None:
    """Its maximum is -inf, which is no value of the data."""
    net = Net(seed=0)
    x = net.input("x", [1, 8, 1, 4])
    bits = net.where(net.op("GreaterOrEqual", x, net.const(0.0)), np.float32(1), np.float32(0))
    pooled = net.op("MaxPool", bits, kernel_shape=[2, 2], dilations=[3, 1], pads=[2, 0, 2, 0])
    net.output(net.op("Greater", pooled, net.const(-5.0)))
    check(net.model(), np.random.default_rng(0).standard_normal((1, 8, 1, 4)))


NODES = [
    (Node("Add", ["x", "c"], ["y"]), [1, 1, 1]),
    (Node("Sub", ["c", "x"], ["y"]), [-1, -1, -1]),
    (Node("Mul", ["x", "c"], ["y"]), [1, -1, 0]),
    (Node("Div", ["x", "c"], ["y"]), None),
    (Node("Div", ["c", "x"], ["y"]), None),
    (Node("Relu", ["x"], ["y"]), [1, 1, 1]),
    (Node("PRelu", ["x", "c"], ["y"]), None),
    (Node("LeakyRelu", ["x"], ["y"], {"alpha": -0.1}), None),
    (Node("LeakyRelu", ["x"], ["y"], {"alpha": 0.0}), [1, 1, 1]),
    (Node("BatchNormalization", ["x", "c", "c", "c", "v"], ["y"]), [1, -1, 0]),
    (Node("Tanh", ["x"], ["y"]), None),
    (Node("Add", ["x", "inf"], ["y"]), None),
]


@pytest.mark.parametrize(("node", "ways"), NODES, ids=lambda v: getattr(v, "op", ""))
def test_directions(node: Node, ways: list[int] | None) -> None:
    """A direction is right for values of any magnitude; what has none gets none."""
    graph = load(pooled_sign("s = Relu(m)"))
    graph.constants |= {
        "c": np.array([2.5, -1e-20, 0.0], np.float32), "v": np.ones(3, np.float32),
        "inf": np.array(np.inf, np.float32),
    }  # fmt: skip
    found = chain_direction([node], graph, 3, 2)
    assert (None if found is None else found.tolist()) == ways
    if ways is None:
        return
    from bnncc.ir.evaluate import evaluate_node

    sizes = 10.0 ** np.arange(-30, 20, 0.25)[:, None]
    x = np.sort(np.random.default_rng(0).standard_normal((200, 1)) * sizes, axis=0)
    rows = np.repeat(x.astype(np.float32), 3, axis=1)
    args = [rows if i == "x" else graph.constants[i] for i in node.inputs]
    moves = np.diff(evaluate_node(node, args)[0], axis=0) * np.array(ways)
    assert (moves >= 0).all()


def test_multiples_of_a_unit() -> None:
    assert as_multiples([-1.0, -1 / 3, 1 / 3, 1.0]) == (-3, 2, 1 / 3)
    assert as_multiples((np.arange(16) - 13) * np.float32(0.3))[:2] == (-13, 1)  # type: ignore[index]
    assert as_multiples([np.float32(-0.3), 0.5])[:2] == (-3, 8)  # type: ignore[index]
    assert as_multiples([-0.14285707, 0.1428572])[:2] == (-1, 2)  # type: ignore[index]
    assert as_multiples([0.1, 0.1 + np.pi]) is None


def test_lines_give_every_value_or_there_is_none() -> None:
    assert exact_line((np.arange(4) / np.float32(3)).astype(np.float32)) is not None
    centred = (np.arange(7) - 3).astype(np.float32) / np.float32(3)
    assert exact_line(centred) is None
    first, step = exact_line((np.arange(256) * np.float32(0.25) - 5).astype(np.float32)) or (0, 0)
    assert (first, step) == (-5.0, 0.25)


@pytest.mark.parametrize("top", [3, 6, 11, 13, 100])
def test_definition_knows_multiples_of_any_small_count(top: int) -> None:
    """The exact sum does not depend on how large the largest datum of an image happens to be."""
    rng = np.random.default_rng(top)
    whole = rng.integers(-top, top + 1, (2, 5, 7))
    whole[0, 0, 0] = top
    found = multiples((whole * np.float32(0.3)).astype(np.float32))
    assert found is not None
    unit = found[1].item() / 0.3
    np.testing.assert_allclose(found[0] * unit, whole, atol=1e-4)
    assert multiples(rng.standard_normal((4, 5)).astype(np.float32)) is None
    filters = whole[:, :, :] * np.array([0.1, 0.7]).reshape(2, 1, 1)
    of_filters = multiples(filters.astype(np.float32), 0)
    assert of_filters is not None
    assert of_filters[1].shape == (2, 1, 1)


@pytest.mark.parametrize("kind", ["signs", "levels"])
def test_moves_that_end_in_no_whole_channels(kind: str) -> None:
    """They look like a channel shuffle until their last step mixes pixels and channels."""
    net = Net(seed=kind)
    x = net.input("x", [1, 16, 4, 4])
    held = levels(net, x, "thirds") if kind == "levels" else net.sign(x)
    cut = net.op("Reshape", held, net.ints([0, 4, 4, 4, 4]))
    turned = net.op("Transpose", cut, perm=[0, 2, 3, 1, 4])
    mixed = net.op("Reshape", turned, net.ints([0, 16, 4, 4]))
    net.channels[mixed] = 16
    net.output(net.bconv(mixed, 8), net.op("Relu", mixed))
    check(net.model(), np.random.default_rng(0).standard_normal((1, 16, 4, 4)), run=False)


def test_three_values_of_which_one_is_never_met() -> None:
    """A sum of three signs is not 0, so its sign has one plane; the weights have few bits."""
    net = Net(seed=0)
    x = net.input("x", [1, 3, 8, 7])
    odd = net.bconv(net.sign(x), 2, 1, pad=0)
    three = net.op("Sign", odd)
    net.channels[three] = 2
    weight = net.rng.integers(-3, 4, (17, 2, 3, 2)).astype(np.float32)
    net.output(net.conv(three, weight, pad=1))
    check(net.model(), np.random.default_rng(0).standard_normal((1, 3, 8, 7)), run=False)


@pytest.mark.parametrize("zero", [-128, -3, 0, 3, 127])
def test_levels_around_any_zero_point_are_multiples_of_the_step(zero: int) -> None:
    # 256 levels of 0.2: the largest may be more than 128 steps from 0.
    numbers = np.arange(-128, 128, dtype=np.float32) - np.float32(zero)
    found = as_multiples((numbers * np.float32(0.2)).tolist())
    assert found is not None
    first, step, unit = found
    assert (first, step) == (-128 - zero, 1)
    assert unit == pytest.approx(0.2, rel=1e-6)


def two(net: Net, x: str, high: float, low: float) -> str:
    return net.where(net.op("GreaterOrEqual", x, net.const(0.0)), np.float32(high), np.float32(low))


@pytest.mark.parametrize("pair", [(0.15, 0.5), (-0.3432031, 1.0), (0.5, -0.3), (-1.0, 1e-9)])
def test_two_values_are_read_as_exactly_what_they_are(pair: tuple[float, float]) -> None:
    """As numbers and compared with themselves; of the last pair no sum gives both."""
    net = Net(seed=pair)
    x = net.input("x", [1, 8, 4, 4])
    bits = two(net, x, *pair)
    net.channels[bits] = 8
    numbers = net.op("Mul", bits, net.op("Sigmoid", net.reduce_mean(x, [2, 3])))
    level = net.cast(net.op("Greater", net.op("Mul", bits, net.op("Abs", bits)), net.const(0.0)))
    net.output(net.bconv(bits, 16), net.op("MaxPool", bits, kernel_shape=[2, 2]), numbers, level)
    feeds = {"x": np.random.default_rng(0).standard_normal((1, 8, 4, 4)).astype(np.float32)}
    for target in TARGETS:
        before, physical, _ = passed(net.model(), target)
        made = evaluated(physical, before, feeds)
        right = oracle.run(net.model(), feeds)
        held = made[net.outputs[1]]
        assert np.array_equal(held, right[net.outputs[1]])
        assert set(np.unique(held)) <= set(np.float32(pair))
    made = bnncc.compile(net.model(), threads=1).run(feeds)
    assert np.array_equal(made[net.outputs[1]], right[net.outputs[1]])


def test_offsets_turn_with_weights_that_are_stored_negated() -> None:
    """A sign that falls with the sum has channels negated; levels of the same sum go with them."""
    net = Net(seed=0)
    x = net.input("x", [1, 8, 5, 5])
    bits = two(net, x, 0.5, -0.3)
    weight = net.signs((32, 8, 1, 1)) * net.rng.choice([0.25, 0.5], (32, 1, 1, 1))
    net.channels[bits] = 8
    bias = (net.rng.integers(-4, 5, 32) / 4).astype(np.float32)
    made = net.op("Neg", net.conv(bits, weight.astype(np.float32), bias))
    net.channels[made] = 32
    level = net.op("Round", net.clip(made, -1, 2))
    net.channels[level] = 32
    sign = net.op("Sign", made)
    net.channels[sign] = 32
    net.output(net.bconv(level, 16), net.bconv(sign, 16))
    check(net.model(), np.random.default_rng(0).standard_normal((1, 8, 5, 5)))


def test_real_filters_of_two_weights_are_no_multiples() -> None:
    """73 and 3 units are within 1e-5 of the larger one, but not as near as float32 can be."""
    weight = np.array([[1.0, 3 / 73 + 5e-6], [1.0, 5 / 67 - 5e-6]], np.float32)
    assert few_bit_weights(weight) is None
    whole = np.array([[7, -3, 1], [100, 3, -77]]) * np.array([[0.3], [0.0171]])
    found = few_bit_weights(whole.astype(np.float32))
    assert found is not None
    assert np.abs(found.whole).tolist() == [[7, 3, 1], [100, 3, 77]]


def test_a_sign_behind_an_inverted_pool_keeps_its_three_values() -> None:
    """No sum gives its 0, but the few-bit layer behind it was made for data that have one."""
    net = Net(seed=0)
    x = net.input("x", [1, 33, 6, 6])
    bits = net.where(net.op("GreaterOrEqual", x, net.const(0.0)), np.float32(1), np.float32(-1))
    net.channels[bits] = 33
    pooled = net.op("MaxPool", net.bconv(bits, 33, 3, pad=0), kernel_shape=[2, 2], strides=[2, 2])
    falling = net.op("Mul", pooled, net.const(np.float32(-0.5)))
    sign = net.op("Sign", net.op("Add", falling, net.const(np.float32(0.125))))
    net.channels[sign] = 33
    weight = net.rng.integers(-1, 2, (8, 33, 1, 1)).astype(np.float32)
    net.output(net.conv(sign, weight))
    check(net.model(), np.random.default_rng(0).standard_normal((1, 33, 6, 6)))
