"""The evaluator of physical graphs: it is right, sees mistakes of passes, and excuses only ties."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import onnx
import pytest

from bnncc import driver
from bnncc.errors import VerificationError
from bnncc.ir.evaluate import evaluate
from bnncc.ir.graph import Graph, Node
from bnncc.options import CompileOptions
from bnncc.topi_binary.build import aliases
from bnncc.topi_binary.reference import evaluate_kernel
from bnncc.topi_binary.spec import Spec
from bnncc.transform.physical import KERNEL, Form
from bnncc.transform.pipeline import Compilation
from bnncc.verification import confirm_passes, encoding
from bnncc.verification.confirm_passes import compare_passes
from bnncc.verification.evaluator import evaluate_physical
from tests.collection import handmade, oracle
from tests.collection.builder import Case, Net
from tests.physical_networks import Arrays, evaluated, passed

TARGETS = ("native", "x86-64-v3", "arm64", "armv7", "cuda-sm80")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", [c for c in handmade.cases() if c.quick], ids=lambda c: c.name)
def test_collection(case: Case, target: str) -> None:
    """Outputs equal those of the collection's oracle, and no tensor on the way is blamed."""
    before, physical, _ = passed(case.model, target)
    for feeds in case.feeds:
        verdict = oracle.compare(case.model, feeds, evaluated(physical, before, feeds))
        assert verdict.right, verdict.text
        assert not compare_passes(physical, before, feeds)


@pytest.mark.parametrize("sign_zero", ["+1", "-1"])
def test_zeros_that_were_given_up_are_no_mistake(sign_zero: str) -> None:
    case = next(c for c in handmade.cases() if c.name == "even_k_zeros")
    before, physical, _ = passed(case.model, sign_zero=sign_zero)
    for feeds in case.feeds:
        assert compare_passes(physical, before, feeds)
        assert not compare_passes(physical, before, feeds, sign_zero=sign_zero)


@pytest.mark.parametrize("seed", range(4))
def test_a_kernel_that_reads_a_product_and_what_follows_from_it(seed: int) -> None:
    """Its rounding is no mistake: the mean of a row is computed from the model's product."""
    net = Net(seed=seed)
    x = net.input("x", [2, 5, 32])
    weight, bias = net.signs((32, 48)), net.normal((48,), 3.0)
    product = net.op("MatMul", net.op("Sign", x), net.const(weight))
    y = net.op("Add", product, net.const(bias))
    z = net.op("Sub", y, net.op("ReduceMean", y, axes=[-1]))
    net.output(net.op("Mul", z, net.const(net.normal((48,)))))
    before, physical, _ = passed(net.model())
    feeds = {"x": np.random.default_rng(seed).standard_normal((2, 5, 32)).astype(np.float32)}
    assert compare_passes(physical, before, feeds) == []


def network() -> onnx.ModelProto:
    """Return a network with every kind of decision: bits, zeros, levels; packed and as numbers."""
    net = Net(seed="evaluator")
    x = net.input("x", [1, 8, 9, 9])
    net.channels[x] = 8
    first = net.bn(net.fconv(x, 32))
    signs = net.op("Sign", first)
    net.channels[signs] = 32
    y = net.bn(net.bconv(signs, 32))
    shortcut = net.op("Add", y, first)
    net.channels[shortcut] = 32
    three, low, high = net.const(3.0), net.const(0.0), net.const(1.0)
    level = net.op(
        "Div", net.op("Round", net.op("Mul", net.op("Clip", y, low, high), three)), three
    )
    net.channels[level] = 32
    weight = net.rng.integers(-3, 4, (16, 32, 3, 3)).astype(np.float32) * np.float32(0.1)
    few = net.conv(level, weight, None, pad=1)
    net.output(net.op("Sign", net.op("Sub", few, net.const(0.05))), shortcut)
    return net.model()


def kernels(graph: Graph, what: str) -> list:
    return [n for n in graph.nodes if n.op == KERNEL and type(n.attrs["spec"]).__name__ == what]


def weights(graph: Graph) -> None:
    (node,) = kernels(graph, "BinaryConv2d")
    name = next(i for i in node.inputs if graph.types[i].dtype == "uint32" and i in graph.constants)
    changed = graph.constants[name].copy()
    changed[0] ^= 1
    graph.constants[name] = changed


def level_threshold(graph: Graph) -> None:
    """Move one level of one channel by one accumulator step."""
    for node in graph.nodes:
        for name in node.inputs:
            if name in graph.constants and graph.constants[name].ndim == 2:
                changed = graph.constants[name].copy()
                changed[1, 2] += 2
                graph.constants[name] = changed
                return
    raise AssertionError("no levels are found by thresholds")


def swapped_planes(graph: Graph) -> None:
    (node,) = kernels(graph, "FewBitConv2d")
    node.inputs[:2] = node.inputs[1], node.inputs[0]


def swapped_zeros(graph: Graph) -> None:
    (node,) = kernels(graph, "BinaryConv2d")
    node.inputs[:2] = node.inputs[1], node.inputs[0]


def few_bit_weights(graph: Graph) -> None:
    (node,) = kernels(graph, "FewBitConv2d")
    name = next(i for i in node.inputs if i in graph.constants)
    changed = graph.constants[name].copy()
    changed.reshape(-1).view(np.uint32)[:16] ^= 0xFFFFFFFF
    graph.constants[name] = changed


def scales(graph: Graph) -> None:
    node = next(n for n in kernels(graph, "Conv2d"))
    name = node.inputs[2]
    graph.constants[name] = np.roll(graph.constants[name], 1)


def filters(graph: Graph) -> None:
    node = next(n for n in kernels(graph, "Conv2d"))
    graph.constants[node.inputs[1]] = np.roll(graph.constants[node.inputs[1]], 16)


@pytest.mark.parametrize(
    "mistake",
    [weights, level_threshold, swapped_planes, swapped_zeros, few_bit_weights, scales, filters],
)
def test_sees_a_mistake(mistake: Callable[[Graph], None]) -> None:
    before, physical, _ = passed(network(), "arm64", few_bit="bitplanes")
    feeds = {"x": np.random.default_rng(0).standard_normal((1, 8, 9, 9)).astype(np.float32)}
    assert not compare_passes(physical, before, feeds)
    mistake(physical)
    assert compare_passes(physical, before, feeds)


def test_names_where_the_mistake_is() -> None:
    before, physical, _ = passed(network(), "arm64")
    feeds = {"x": np.random.default_rng(0).standard_normal((1, 8, 9, 9)).astype(np.float32)}
    weights(physical)
    wrong = compare_passes(physical, before, feeds)
    (binary,) = kernels(physical, "BinaryConv2d")
    assert {one.node for one in wrong} == {binary.name}


def plant_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the passes change weights."""
    real = driver.to_physical

    def wrong(graph: Graph, made: Compilation) -> Graph:
        physical = real(graph, made)
        weights(physical)
        return physical

    monkeypatch.setattr(driver, "to_physical", wrong)


@pytest.mark.parametrize("target", ["native", "arm64"])
def test_no_target_ships_a_mistake(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that is wrong stops the compilation, also where the code cannot run (or link)."""
    plant_a_mistake(monkeypatch)
    with pytest.raises(VerificationError, match=r"the passes change `.*` .made by"):
        driver.compile_model(network(), CompileOptions(target=target))


def float_sum(offset: float) -> tuple[onnx.ModelProto, Arrays]:
    """Return ``sign(conv(x) + offset)``, and an input for which one sum is `offset` away from 0."""
    net = Net(seed=0)
    x = net.input("x", [1, 4, 1, 1])
    weight = np.array([0.1, 0.2, 0.3, 0.7], np.float32).reshape(1, 4, 1, 1)
    net.output(net.op("Sign", net.op("Add", net.conv(x, weight), net.const(offset))))
    return net.model(), {"x": np.array([1, 1, 1, 1], np.float32).reshape(1, 4, 1, 1)}


def test_a_tie_is_excused_and_nothing_else() -> None:
    """The sum is 1.3 but for rounding; a decision beside it is none."""
    for offset, tie in ((-1.3, True), (-1.30001, False)):
        model, feeds = float_sum(offset)
        before, physical, _ = passed(model)
        node = next(n for n in kernels(physical, "Conv2d"))
        bias = node.inputs[2]
        moved = 2e-7 if tie else 3e-5
        for way in (-moved, moved):
            physical.constants[bias] = np.full_like(physical.constants[bias], offset + way)
            assert bool(compare_passes(physical, before, feeds)) == (not tie and way > 0)


def quantized_sum(offset: float, written: str) -> tuple[onnx.ModelProto, Arrays]:
    """Return a rounding of ``10 * conv(x)`` to 0..15, and an input that makes 1.3 + `offset`."""
    net = Net(seed=0)
    x = net.input("x", [1, 4, 1, 1])
    weight = np.array([0.1, 0.2, 0.3, 0.7], np.float32).reshape(1, 4, 1, 1)
    moved = net.op("Add", net.conv(x, weight), net.const(offset))
    level = net.clip(net.op("Mul", moved, net.const(10.0)), 0, 15)
    if written == "Round":
        level = net.op("Round", level)
    else:
        whole = net.op("Cast", net.op("Add", level, net.const(0.5)), to=onnx.TensorProto.INT32)
        level = net.op("Cast", whole, to=onnx.TensorProto.FLOAT)
    net.channels[level] = 1
    net.output(net.conv(level, np.full((1, 1, 1, 1), 3, np.float32)))
    return net.model(), {"x": np.ones((1, 4, 1, 1), np.float32)}


@pytest.mark.parametrize("written", ["Round", "Cast"])
def test_a_tie_excuses_the_levels_beside_it_and_no_others(written: str) -> None:
    """The sum is 12.5 but for rounding: level 12 or 13."""
    model, feeds = quantized_sum(-0.05, written)
    before, physical, _ = passed(model, "arm64")
    (node,) = kernels(physical, "Conv2d")
    (limits,) = (i for i in node.inputs if i.endswith(("value", "search")) or ".value." in i)
    right = physical.constants[limits]
    for moved, noticed in ((-1e-7, False), (1e-7, False), (0.2, True), (-0.2, True)):
        physical.constants[limits] = (right + np.float32(moved)).astype(np.float32)
        assert bool(compare_passes(physical, before, feeds)) == noticed


def test_a_float_may_be_off_by_its_own_rounding_only() -> None:
    """What another channel holds, a million times as large, is no excuse."""
    net = Net(seed=3)
    x = net.input("x", [1, 4, 3, 3])
    weight = net.normal((2, 4, 1, 1)) * np.float32([1e-6, 1.0]).reshape(2, 1, 1, 1)
    net.output(net.conv(x, weight.astype(np.float32), np.float32([1e-6, 1.0])))
    feeds = {"x": np.random.default_rng(0).standard_normal((1, 4, 3, 3)).astype(np.float32)}
    before, physical, _ = passed(net.model())
    assert not compare_passes(physical, before, feeds)
    (node,) = kernels(physical, "Conv2d")
    bias = physical.constants[node.inputs[2]].copy()
    bias[0] *= np.float32(1 + 1e-4)
    physical.constants[node.inputs[2]] = bias
    assert compare_passes(physical, before, feeds)


def test_what_follows_a_value_that_ties_alone_can_give() -> None:
    """``|x| - |x - 1| + 1`` below 0 is 0 but for rounding, of which Floor may make -1."""
    net = Net(seed=2)
    x = net.input("x", [1, 8, 6, 6])
    one = net.const(1.0)
    left, right = net.op("Abs", x), net.op("Abs", net.op("Sub", x, one))
    bent = net.op("Add", net.op("Sub", left, right), one)
    level = net.op("Floor", net.op("Mul", net.op("Mul", bent, net.const(0.5)), net.const(3.0)))
    net.output(net.conv(net.op("Mul", level, net.const(1 / 3)), net.signs((4, 8, 3, 3))))
    feeds = {"x": np.random.default_rng(0).standard_normal((1, 8, 6, 6)).astype(np.float32)}
    before, physical, _ = passed(net.model())
    assert evaluate(before, feeds, [level])[level].min() == -1
    assert not compare_passes(physical, before, feeds)
    scale = next(n.inputs[-1] for n in kernels(physical, "FewBitConv2d"))
    physical.constants[scale] = physical.constants[scale] * np.float32(1 + 1e-4)
    (wrong,) = compare_passes(physical, before, feeds)
    assert wrong.tensor == before.outputs[0]


def test_a_bias_beside_signs_that_are_all_zero() -> None:
    """A kernel of lines computes ``K + 0.3 - 2 * acc``, whatever its data are."""
    net = Net(seed=6)
    x = net.input("x", [1, 16, 9])
    y = net.conv(x, net.signs((16, 1, 3)) * np.float32(0.75), group=16)
    net.output(net.conv(net.op("Sign", y), net.signs((8, 16, 3)), np.full(8, 0.3, np.float32)))
    before, physical, _ = passed(net.model(), "arm64")
    assert not compare_passes(physical, before, {"x": np.zeros((1, 16, 9), np.float32)})


def test_floats_that_are_near_multiples_may_be_added_as_floats() -> None:
    """1.5e-8 is within 1e-5 of nothing times 0.9; a layer that stays float reads what it is."""
    net = Net(seed=6)
    x = net.input("x", [1, 2, 1, 1])
    weight = np.float32([-1, -1]).reshape(2, 1, 1, 1)
    net.output(net.op("Sign", net.conv(x, weight, group=2)))
    feeds = {"x": np.float32([0.9, 1.5e-8]).reshape(1, 2, 1, 1)}
    before, physical, _ = passed(net.model())
    assert not compare_passes(physical, before, feeds)


def test_decisions_by_integers_have_no_ties() -> None:
    """The sum is exactly at the threshold of a batch normalization with any constants."""
    net = Net(seed=4)
    x = net.input("x", [1, 32, 5, 5])
    net.channels[x] = 32
    bits = net.sign(x)
    made = net.bconv(bits, 16)
    gamma, mean = net.const(np.full(16, 0.37, np.float32)), net.const(np.full(16, 4.0, np.float32))
    zero, one = net.const(np.zeros(16, np.float32)), net.const(np.full(16, 1.7, np.float32))
    normal = net.op("BatchNormalization", made, gamma, zero, mean, one)
    up = net.op("GreaterOrEqual", normal, net.const(0.0))
    net.channels[last := net.where(up, 1.0, -1.0)] = 16
    net.output(net.bconv(last, 16))
    feeds = {"x": np.random.default_rng(0).standard_normal((1, 32, 5, 5)).astype(np.float32)}
    before, physical, _ = passed(net.model())
    assert not compare_passes(physical, before, feeds)
    node = kernels(physical, "BinaryConv2d")[0]
    name = next(i for i in node.inputs if i in physical.constants and "threshold" in i)
    inside = np.abs(physical.constants[name].astype(np.int64)) < 2**30
    physical.constants[name] = np.where(inside, physical.constants[name] - 1, 0).astype(np.int32)
    assert compare_passes(physical, before, feeds)


def test_what_cancels_in_front_of_a_decision_is_rounded() -> None:
    """``(x + y) - x`` is y but for numbers of the size of x: y at a threshold is a tie there."""
    net = Net(seed=8)
    x = net.input("x", [1, 16, 8, 8])
    made = net.conv(net.op("Sign", x), net.signs((16, 16, 3, 3)) * np.float32(0.2), pad=1)
    left = net.op("Sub", net.op("Add", x, made), x)
    up = net.op("GreaterOrEqual", left, net.const(1.2))
    net.channels[last := net.where(up, 1.0, -1.0)] = 16
    net.output(net.bconv(last, 16))
    feeds = {"x": np.random.default_rng(0).standard_normal((1, 16, 8, 8)).astype(np.float32)}
    before, physical, _ = passed(net.model())
    assert not compare_passes(physical, before, feeds)
    node = kernels(physical, "BinaryConv2d")[0]
    name = next(i for i in node.inputs if i in physical.constants and "threshold" in i)
    physical.constants[name] = physical.constants[name] - np.int32(4)  # 8 is no tie
    assert compare_passes(physical, before, feeds)


@pytest.mark.parametrize("scale", [0.25, 1e6])
def test_bent_lines_are_ramps_but_for_the_rounding_of_their_sums(scale: float) -> None:
    """``|x| - |x - 1|`` is 0 or 2 where x is beyond 2^24; one step beside 0 is a mistake."""
    net = Net(seed=11)
    x = net.input("x", [1, 16, 8, 8])
    net.channels[x] = 16
    one, half, three = (net.const(value) for value in (1.0, 0.5, 3.0))
    y = net.op("Mul", net.bconv(net.sign(x), 16), net.const(scale))
    bent = net.op("Sub", net.op("Abs", y), net.op("Abs", net.op("Sub", y, one)))
    clipped = net.op("Mul", net.op("Add", bent, one), half)
    level = net.op("Div", net.op("Round", net.op("Mul", clipped, three)), three)
    net.channels[level] = 16
    net.output(net.bconv(level, 16))
    feeds = {"x": np.random.default_rng(0).standard_normal((1, 16, 8, 8)).astype(np.float32)}
    before, physical, layers = passed(net.model())
    assert [layer.kind for layer in layers] == ["binary", "few_bit"]
    assert not compare_passes(physical, before, feeds)
    node = kernels(physical, "BinaryConv2d")[0]
    name = next(i for i in node.inputs if i in physical.constants and "acc" in i)
    physical.constants[name] = physical.constants[name] + np.int32(2)
    if scale < 1:  # else any level is within the rounding of the model's own sum
        assert compare_passes(physical, before, feeds)


def test_a_constant_that_is_lost_beside_a_huge_one_is_rounding() -> None:
    """``1e30 * (dot - mean) + 0.5`` where the sum is the mean: the terms are 1e31."""
    net = Net(seed=5)
    x = net.input("x", [1, 16, 5, 5])
    net.channels[x] = 16
    signs = net.op("Sign", x)
    net.channels[signs] = 16
    made = net.conv(signs, net.rng.integers(-1, 2, (16, 16, 1, 1)).astype(np.float32))
    arrays = np.full(16, 1e30), np.full(16, 0.5), np.zeros(16), np.full(16, 1.3)
    constants = [net.const(v.astype(np.float32)) for v in arrays]
    net.output(net.op("BatchNormalization", made, *constants))
    feeds = {"x": np.random.default_rng(0).integers(-1, 2, (1, 16, 5, 5)).astype(np.float32)}
    for target in TARGETS:
        before, physical, _ = passed(net.model(), target)
        assert not compare_passes(physical, before, feeds)


def test_constants_that_are_joined_are_rounded_as_one() -> None:
    """A product of zeros and a constant: the kernel's own constant is small beside that."""
    net = Net(seed=0)
    x = net.input("x", [1, 1, 2, 3])
    sign = net.op("Sign", x)
    net.channels[sign] = 1
    made = net.conv(sign, net.rng.uniform(-3, 3, (256, 1, 1, 1)).astype(np.float32))
    moved = net.op("Add", net.op("Mul", made, net.const(-0.031)), net.const(1.408084))
    net.output(moved)
    before, physical, _ = passed(net.model())
    assert not compare_passes(physical, before, {"x": np.zeros((1, 1, 2, 3), np.float32)})


def test_filters_of_two_values_are_two_products() -> None:
    """What is left of a filter's large number beside its small one is rounded as the former."""
    net = Net(seed=0)
    x = net.input("x", [1, 2, 3, 3])
    bits = net.op("Round", net.clip(x, 0, 1))
    net.channels[bits] = 2
    weight = net.rng.standard_normal((256, 2, 1, 1)).astype(np.float32)
    weight[:, 1] *= np.float32(0.01)
    net.output(net.conv(bits, weight))
    before, physical, layers = passed(net.model())
    assert layers[0].kind == "binary"
    x = np.zeros((1, 2, 3, 3), np.float32)
    x[:, 1] = 1
    assert not compare_passes(physical, before, {"x": x})
    # The same bound for what is 0 would excuse anything.
    node = next(n for n in physical.nodes if n.op == KERNEL and ".scale" in "".join(n.inputs))
    scale = next(i for i in node.inputs if ".scale" in i)
    physical.constants[scale] = physical.constants[scale] * np.float32(1 + 1e-5)
    assert compare_passes(physical, before, {"x": x})


def test_padding_between_the_data_is_a_constant_that_is_rounded() -> None:
    net = Net(seed=0)
    x = net.input("x", [1, 62, 6, 6])
    bits = net.where(net.op("Greater", x, net.const(0.0)), np.float32(1), np.float32(-1))
    padded = net.pad_hw(bits, [1, 1, 1, 0], 1 / 3)
    net.channels[padded] = 62
    weight = net.rng.integers(-1, 2, (64, 31, 2, 2)).astype(np.float32) * np.float32(0.37)
    net.output(net.op("Relu", net.conv(padded, weight, None, pad=[0] * 4, group=2)))
    before, physical, _ = passed(net.model())
    for seed in range(4):
        data = np.random.default_rng(seed).standard_normal((1, 62, 6, 6)).astype(np.float32)
        assert not compare_passes(physical, before, {"x": data})


def test_shapes_are_those_that_kernels_read() -> None:
    before, physical, _ = passed(network())
    feeds = {"x": np.random.default_rng(0).standard_normal((1, 8, 9, 9)).astype(np.float32)}
    (node,) = kernels(physical, "BinaryConv2d")
    node.attrs["spec"] = replace(node.attrs["spec"], height=8)
    with pytest.raises(VerificationError, match=r"kernel `.*` reads uint32.* as its input 0"):
        compare_passes(physical, before, feeds)


def test_outputs_have_the_shape_of_the_model() -> None:
    """The right numbers in another shape are wrong."""
    before, physical, _ = passed(network())
    feeds = {"x": np.random.default_rng(0).standard_normal((1, 8, 9, 9)).astype(np.float32)}

    def flat(spec: Spec, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        made = evaluate_kernel(spec, arrays)
        return [one.reshape(-1) for one in made] if spec is last else made

    last = next(n for n in physical.nodes if set(n.outputs) <= set(physical.outputs)).attrs["spec"]
    assert compare_passes(physical, before, feeds) == []
    wrong = compare_passes(physical, before, feeds, compute=flat)
    assert wrong
    assert {one.tensor for one in wrong} & set(before.outputs)
    assert all(one.count == one.size for one in wrong)


def test_dynamic_batch() -> None:
    net = Net(seed=1)
    x = net.input("x", ["N", 8, 5, 5])
    net.channels[x] = 8
    net.output(net.bconv(net.sign(x), 16))
    before, physical, _ = passed(net.model())
    feeds = {"x": np.random.default_rng(0).standard_normal((3, 8, 5, 5)).astype(np.float32)}
    assert not compare_passes(physical, before, feeds)
    (got,) = evaluated(physical, before, feeds).values()
    assert got.shape == (3, 16, 5, 5)


def test_what_is_too_large_to_compare_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confirm_passes, "_SECONDS", (0.0, 0.0))
    report = driver.compile_model(network(), CompileOptions(target="native", threads=1)).report
    assert any("too large to check" in line for line in report["warnings"])
    assert report["compared"] == {"passes": "none", "detail": "the network is too large"}


def test_what_is_not_compared_is_in_the_report() -> None:
    """An artifact says of its passes what is known of them."""
    case = next(c for c in handmade.cases() if c.name == "even_k_zeros")
    for sign_zero, passes in (("exact", "whole"), ("+1", "none")):
        made = driver.compile_model(case.model, CompileOptions(threads=1, sign_zero=sign_zero))
        assert made.report["compared"]["passes"] == passes


def large(batch: int | str = 2, side: int = 128) -> onnx.ModelProto:
    net = Net(seed=3)
    x = net.input("x", (batch, 8, side, side))
    s = net.op("Sign", x)
    y = net.op("Conv", s, net.const(net.signs((8, 8, 3, 3))), pads=[1, 1, 1, 1])
    net.output(
        net.op("Add", net.op("GlobalAveragePool", y), net.op("MaxPool", y, kernel_shape=[2, 2]))
    )
    return net.model()


@pytest.mark.parametrize(("target", "batch"), [("native", 2), ("arm64", 2), ("native", "N")])
def test_a_large_network_is_compared_as_its_twin(
    target: str, batch: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confirm_passes, "_SECONDS", (0.01, 0.0))
    options = CompileOptions(target=target, threads=1)
    made = driver.lowered(large(batch), options)
    said = made.warnings
    assert (made.compared.passes, made.compared.detail) == ("smaller", "x 1x8x32x32")
    assert any("checked against the model for x 1x8x32x32" in line for line in said)
    plant_a_mistake(monkeypatch)
    with pytest.raises(VerificationError, match=r"the passes change `.*` .made by"):
        driver.lowered(large(batch), options)


@pytest.mark.parametrize("batch", [1, 4])
def test_a_network_of_one_size(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be taken image by image, but its images cannot be smaller."""
    monkeypatch.setattr(confirm_passes, "_SECONDS", (0.005 if batch > 1 else 0.001, 0.0))
    net = Net(seed=4)
    s = net.op("Sign", net.input("x", (batch, 8, 64, 64)))
    y = net.op("Conv", s, net.const(net.signs((8, 8, 3, 3))), pads=[1, 1, 1, 1])
    rows = net.op("Reshape", y, net.const([batch, 8 * 64 * 64], np.int64))
    net.output(net.op("MatMul", rows, net.const(net.signs((8 * 64 * 64, 4)))))
    said = driver.lowered(net.model(), CompileOptions(threads=1)).warnings
    text = "too large to check" if batch == 1 else "checked against the model for x 1x8x64x64"
    assert any(text in line for line in said)


def test_a_tensor_that_was_stored_over_is_gone() -> None:
    """Residuals are added in place: whoever read the old tensor later would read the sum."""
    net = Net(seed=2)
    x = net.input("x", [1, 32, 6, 6])
    net.channels[x] = 32
    first = net.bn(net.bconv(net.sign(x), 32))
    total = net.op("Add", net.bn(net.bconv(net.sign(first), 32)), first)
    net.output(net.sign(total), net.op("GlobalAveragePool", total))
    before, physical, _ = passed(net.model())
    feeds = {"x": np.random.default_rng(0).standard_normal((1, 32, 6, 6)).astype(np.float32)}
    assert not compare_passes(physical, before, feeds)
    over = next(n for n in physical.nodes if n.op == KERNEL and max(aliases(n.attrs["spec"])) >= 0)
    gone = over.inputs[max(aliases(over.attrs["spec"]))]
    physical.nodes.append(Node("Identity", [gone], ["late"], {}, "late"))
    physical.outputs.append("late")
    with pytest.raises(KeyError):
        evaluate_physical(physical, feeds)


def test_bits_beyond_the_last_channel_count_and_numbers_there_do_not() -> None:
    """Kernels that read levels as numbers multiply them by 0 there (`layout.level_words`)."""
    shape = (1, 5, 2, 3)
    value = np.random.default_rng(0).integers(0, 2, shape).astype(np.float32)
    for kind, same in (("plane", False), ("pairs", True), ("bytes", True), ("floats", True)):
        form = Form("x", kind, (0.0, 1.0))
        right, off = encoding.encoded(value, form)
        assert not off.any()
        made = right.copy()
        made.view(np.uint8)[..., -1] = 3
        assert encoding.differs(made, right, form, shape).any() != same


def test_what_comparing_costs_counts_the_whole_batch() -> None:
    """The report counts the products of one image."""
    for batch, affordable in ((1, True), (64, False)):
        net = Net(seed=0)
        x = net.input("x", [batch, 512, 7, 7])
        net.output(net.conv(net.sign(x), net.signs((512, 512, 3, 3)), pad=[1] * 4))
        before, physical, layers = passed(net.model(), "native")
        macs = sum(layer.macs for layer in layers)
        assert confirm_passes.affordable(physical, before, macs) == affordable
