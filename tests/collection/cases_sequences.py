"""Cases: attention, recurrence, experts and tables, as people write them with binary weights."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper

from tests.collection.builder import Net, case

BLOCKS = "blocks beyond convolutions"


def _linear(net: Net, x: str, inputs: int, units: int, scale: float = 0.25) -> str:
    """Append a product with signs of one size, and a bias of eighths."""
    product = net.op("MatMul", x, net.const(net.signs((inputs, units)) * np.float32(scale)))
    return net.op("Add", product, net.const(np.rint(8 * net.normal(units)) / 8))


def _heads(net: Net, x: str) -> str:
    split = net.op("Reshape", x, net.ints([0, 0, 2, 8]))
    return net.op("Transpose", split, perm=[0, 2, 1, 3])


@case("attention_of_signs", BLOCKS, 5, 1)
def _(net: Net) -> None:
    x = net.input("x", [2, 6, 16])
    s = net.sign(x)
    q, k, v = (_heads(net, _linear(net, s, 16, 16)) for _ in range(3))
    turned = net.op("Transpose", net.sign(k), perm=[0, 1, 3, 2])
    scores = net.op("Mul", net.op("MatMul", net.sign(q), turned), net.const(8**-0.5))
    causal = net.const(np.tril(np.ones((6, 6))), bool)
    mix = net.op("Softmax", net.where(causal, scores, -1e9), axis=-1)
    mixed = net.op("Transpose", net.op("MatMul", mix, v), perm=[0, 2, 1, 3])
    joined = net.op("Reshape", mixed, net.ints([0, 0, 16]))
    net.output(net.op("Add", _linear(net, net.sign(joined), 16, 16), x))


@case("linear_attention", BLOCKS, 4, 1)
def _(net: Net) -> None:
    x = net.input("x", [2, 8, 16])
    s = net.sign(x)
    q, k, v = (net.sign(_linear(net, s, 16, 16)) for _ in range(3))
    table = net.op("MatMul", net.op("Transpose", k, perm=[0, 2, 1]), v)
    net.output(net.op("MatMul", q, table))


@case("mixer", BLOCKS, 2, 0)
def _(net: Net) -> None:
    x = net.input("x", [2, 6, 8])
    ones, zeros = net.const(np.ones(8)), net.const(np.zeros(8))
    turned = net.op("Transpose", net.sign(x), perm=[0, 2, 1])
    tokens = net.op("Transpose", _linear(net, turned, 6, 6), perm=[0, 2, 1])
    x = net.op("Add", x, tokens)
    normed = net.op("LayerNormalization", x, ones, zeros, axis=-1)
    net.output(net.op("Add", x, _linear(net, net.sign(normed), 8, 8)))


@case("unrolled_cell", BLOCKS, 7, 0)
def _(net: Net) -> None:
    x = net.input("x", [2, 4, 8])
    inner = net.const(net.signs((8, 8)) * 0.125)
    outer = net.const(net.signs((8, 8)) * 0.25)
    state = net.const(np.ones((2, 8)))
    kept = []
    for step in net.split(x, [1] * 4, axis=1):
        new = net.op("MatMul", net.sign(net.op("Reshape", step, net.ints([2, 8]))), inner)
        state = net.op("Tanh", net.op("Add", new, net.op("MatMul", net.sign(state), outer)))
        kept.append(net.unsqueeze(state, [1]))
    net.output(net.concat(*kept))


@case("scan_of_signs", BLOCKS, None, None)
def _(net: Net) -> None:
    x = net.input("x", [4, 2, 8])
    weight = net.const(net.signs((8, 8)))
    make, info = helper.make_node, helper.make_tensor_value_info
    body = helper.make_graph(
        [
            make("Add", ["h", "t"], ["a"]), make("Greater", ["a", "c"], ["g"]),
            make("Where", ["g", "p", "m"], ["s"]), make("MatMul", ["s", weight], ["next"]),
            make("Identity", ["next"], ["kept"]),
        ],
        "body",
        [info("h", onnx.TensorProto.FLOAT, [2, 8]), info("t", onnx.TensorProto.FLOAT, [2, 8])],
        [info(n, onnx.TensorProto.FLOAT, [2, 8]) for n in ("next", "kept")],
    )  # fmt: skip
    for name, value in (("c", 0.1), ("p", 1.0), ("m", -1.0)):
        net.const(value, name=name)
    start = net.const(np.zeros((2, 8)))
    net.output(*net.op("Scan", start, x, n=2, body=body, num_scan_inputs=1))


@case("experts", BLOCKS, 3, 1)
def _(net: Net) -> None:
    x = net.input("x", [3, 12])
    gate = net.op("Softmax", net.op("MatMul", x, net.const(net.normal((12, 3)))), axis=-1)
    s = net.sign(x)
    parts = net.split(gate, [1, 1, 1], axis=1)
    net.output(net.op("Sum", *[net.op("Mul", p, _linear(net, s, 12, 6)) for p in parts]))


@case("highway", BLOCKS, 3, 0)
def _(net: Net) -> None:
    x = net.input("x", [4, 24])
    s = net.sign(x)
    gate = net.op("Sigmoid", _linear(net, s, 24, 24))
    kept = net.op("Mul", net.op("Sub", net.const(1.0), gate), x)
    mixed = net.op("Add", net.op("Mul", gate, _linear(net, s, 24, 24)), kept)
    net.output(_linear(net, net.sign(mixed), 24, 3))


@case("low_rank_beside_float", BLOCKS, 1, 2)
def _(net: Net) -> None:
    x = net.input("x", [2, 8, 16])
    down = net.op("MatMul", net.sign(x), net.const(net.signs((16, 3))))
    up = net.op("MatMul", down, net.const(net.normal((3, 16))))
    net.output(net.op("Add", net.op("MatMul", x, net.const(net.normal((16, 16)))), up))


@case("table_behind_a_sum", BLOCKS, 2, 0)
def _(net: Net) -> None:
    """Look up what a sum of signs says: no direction, every attainable sum its own value."""
    x = net.input("x", [4, 24])
    total = net.op("MatMul", net.sign(x), net.const(net.signs((24, 8))))
    place = net.cast(net.op("Add", total, net.const(24.0)), onnx.TensorProto.INT64)
    found = net.op("Gather", net.const(net.normal(49)), place)
    net.output(net.op("MatMul", net.sign(found), net.const(net.signs((8, 3)))), total)


@case("majority_of_three", BLOCKS, 4, 0)
def _(net: Net) -> None:
    x = net.input("x", [4, 24])
    s = net.sign(x)
    votes = [net.sign(net.op("MatMul", s, net.const(net.signs((24, 8))))) for _ in range(3)]
    vote = net.sign(net.op("Sum", *votes))
    net.output(net.op("MatMul", vote, net.const(net.signs((8, 3)))))


@case("patches_behind_weights", BLOCKS, 1, 0)
def _(net: Net) -> None:
    """Convolve by hand: slices of the image, and the filters as the left operand."""
    x = net.input("x", [2, 6, 4, 4])
    s = net.sign(x)
    cuts = [net.slice(s, [i, j], [i + 3, j + 3], [2, 3]) for i in (0, 1) for j in (0, 1)]
    columns = net.op("Reshape", net.concat(*cuts), net.ints([2, 24, 9]))
    net.output(net.op("MatMul", net.const(net.signs((5, 24))), columns))


@case("bias_from_elsewhere", BLOCKS, 2, 0)
def _(net: Net) -> None:
    """Add a bias that is an input, and what torch.addmm adds."""
    x, bias = net.input("x", [3, 16]), net.input("b", [16])
    y = net.op("Gemm", net.sign(x), net.const(net.signs((16, 16))), bias)
    net.output(net.op("Gemm", net.sign(y), net.const(net.signs((16, 16))), x, beta=2.0))


@case("transposed_with_the_weights_of_another", BLOCKS, 2, 0)
def _(net: Net) -> None:
    x = net.input("x", [1, 12, 6, 6])
    weight = net.const(net.signs((12, 12, 3, 3)) * 0.5)
    y = net.conv(net.sign(x), weight, pad=1)
    net.output(net.op("ConvTranspose", net.sign(y), weight, strides=[2, 2]))
