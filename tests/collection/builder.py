"""A small builder of ONNX graphs that writes each operator as the chosen opset wants it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.collection import oracle

F32 = TensorProto.FLOAT
DEFAULT_OPSET = 17


class Net:
    """A graph under construction: methods append nodes and return tensor names.

    Parameters
    ----------
    opset : int
        Default-domain opset; chooses between attribute and input forms.
    seed : object
        Anything printable; weights are drawn from its checksum.
    constants : str
        How constants are stored: "initializer", "node" (Constant nodes) or "input" (initializers
        that are also graph inputs, as before IR 4).
    """

    def __init__(
        self, opset: int = DEFAULT_OPSET, *, seed: object = 0, constants: str = "initializer"
    ):
        self.opset = opset
        self.rng = np.random.default_rng(zlib.crc32(repr(seed).encode()))
        self.constants = constants
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[str] = []
        self.functions: list[onnx.FunctionProto] = []
        self.domains: dict[str, int] = {}
        self.channels: dict[str, int] = {}
        self.prefix = ""
        self._count = 0

    # ------------------------------------------------------------------ plumbing

    def fresh(self, stem: str) -> str:
        self._count += 1
        return f"{self.prefix}{stem}_{self._count}"

    def input(self, name: str, shape: Sequence[int | str], dtype: int = F32) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        if len(shape) > 1:
            self.channels[name] = shape[1]
        return name

    def const(self, value: object, dtype: type = np.float32, name: str | None = None) -> str:
        array = np.asarray(value, dtype=dtype)
        name = name or self.fresh("c")
        tensor = numpy_helper.from_array(array, name)
        if self.constants == "node":
            self.nodes.append(helper.make_node("Constant", [], [name], value=tensor))
        else:
            self.initializers.append(tensor)
            if self.constants == "input":
                self.inputs.append(
                    helper.make_tensor_value_info(name, tensor.data_type, array.shape)
                )
        return name

    def op(self, kind: str, *inputs: str, n: int = 1, node_name: str | None = None, **attrs):
        """Append a node; return its output name, or a list of `n` names if `n` > 1."""
        outs = [self.fresh(kind.lower()) for _ in range(n)]
        attrs = {k: v for k, v in attrs.items() if v is not None}
        name = self.fresh("n") if node_name is None else node_name
        self.nodes.append(helper.make_node(kind, list(inputs), outs, name=name, **attrs))
        known = next((self.channels[i] for i in inputs if i in self.channels), None)
        if known is not None:
            self.channels.update(dict.fromkeys(outs, known))
        return outs[0] if n == 1 else outs

    def output(self, *names: str) -> None:
        self.outputs.extend(names)

    def model(self, *, ir: int | None = None, check: bool = True) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes,
            "net",
            self.inputs,
            [onnx.ValueInfoProto(name=o) for o in self.outputs],
            self.initializers,
        )
        opsets = [helper.make_opsetid("", self.opset)]
        opsets += [helper.make_opsetid(d, v) for d, v in self.domains.items()]
        if ir is None:
            ir = max(helper.find_min_ir_version_for(opsets, ignore_unknown=True), 3)
            ir = max(ir, 8) if self.functions else ir
            ir = max(ir, 4) if self.constants != "input" else ir
        model = helper.make_model(
            graph, opset_imports=opsets, ir_version=ir, functions=self.functions
        )
        shapes = onnx.shape_inference.infer_shapes(
            onnx.inliner.inline_local_functions(model), data_prop=True
        )
        known = {
            v.name: v for v in [*shapes.graph.value_info, *shapes.graph.output, *shapes.graph.input]
        }
        for info in model.graph.output:
            if info.name in known:
                info.CopyFrom(known[info.name])
        if check:
            onnx.checker.check_model(model)
        return model

    # ---------------------------------------------------- operators whose form depends on the opset

    def ints(self, values: Sequence[int]) -> str:
        return self.const(values, np.int64)

    def clip(self, x: str, low: float, high: float) -> str:
        if self.opset < 11:
            return self.op("Clip", x, min=float(low), max=float(high))
        return self.op("Clip", x, self.const(low), self.const(high))

    def pad(
        self, x: str, pads: Sequence[int], value: float | None = 0.0, mode: str | None = None
    ) -> str:
        if self.opset < 11:
            return self.op("Pad", x, pads=list(pads), value=value, mode=mode)
        rest = [] if value is None else [self.const(value)]
        return self.op("Pad", x, self.ints(pads), *rest, mode=mode)

    def pad_hw(self, x: str, amount: int | Sequence[int], value: float | None = 0.0) -> str:
        """Pad an NCHW tensor: one amount, or (top, left, bottom, right)."""
        t, le, b, r = (amount,) * 4 if isinstance(amount, int) else amount
        return self.pad(x, [0, 0, t, le, 0, 0, b, r], value)

    def reduce_mean(self, x: str, axes: Sequence[int], keep: int = 1) -> str:
        if self.opset < 18:
            return self.op("ReduceMean", x, axes=list(axes), keepdims=keep)
        return self.op("ReduceMean", x, self.ints(axes), keepdims=keep)

    def unsqueeze(self, x: str, axes: Sequence[int]) -> str:
        if self.opset < 13:
            return self.op("Unsqueeze", x, axes=list(axes))
        return self.op("Unsqueeze", x, self.ints(axes))

    def slice(self, x: str, starts: Sequence[int], ends: Sequence[int], axes: Sequence[int]) -> str:
        if self.opset < 10:
            return self.op("Slice", x, starts=list(starts), ends=list(ends), axes=list(axes))
        return self.op("Slice", x, self.ints(starts), self.ints(ends), self.ints(axes))

    def split(self, x: str, sizes: Sequence[int], axis: int = 1) -> list[str]:
        if self.opset < 13:
            outs = self.op("Split", x, n=len(sizes), axis=axis, split=list(sizes))
        else:
            outs = self.op("Split", x, self.ints(sizes), n=len(sizes), axis=axis)
        for out, size in zip(outs, sizes, strict=True):
            self.channels[out] = size
        return outs

    def concat(self, *xs: str, axis: int = 1) -> str:
        out = self.op("Concat", *xs, axis=axis)
        if axis == 1:
            self.channels[out] = sum(self.channels[x] for x in xs)
        return out

    # ------------------------------------------------------------------ layers

    def signs(self, shape: Sequence[int]) -> np.ndarray:
        return np.where(self.rng.random(shape) < 0.5, -1.0, 1.0).astype(np.float32)

    def normal(self, shape: Sequence[int], scale: float = 1.0) -> np.ndarray:
        return (self.rng.standard_normal(shape) * scale).astype(np.float32)

    def bn_arrays(
        self, channels: int, spread: float = 3.0, *, gamma: str = "mixed"
    ) -> tuple[np.ndarray, ...]:
        """Return gamma, beta, mean, var.

        Gamma "mixed" has both signs, "positive", "negative", or
        "zeros".

        "zeros" sets gamma to 0 in every third channel, and beta as well in every sixth.
        """
        g = self.rng.uniform(0.3, 1.5, channels)
        b = self.rng.uniform(-0.7, 0.7, channels)
        if gamma == "mixed":
            g *= np.where(np.arange(channels) % 4 == 1, -1, 1)
        elif gamma == "negative":
            g = -g
        elif gamma == "zeros":
            g[::3] = 0
            b[::6] = 0
        mean = self.rng.standard_normal(channels) * spread / 3
        var = self.rng.uniform(0.5, 1.5, channels) * spread**2
        return tuple(a.astype(np.float32) for a in (g, b, mean, var))

    def bn(
        self, x: str, spread: float = 3.0, *, gamma: str = "mixed", channels: int | None = None
    ) -> str:
        arrays = self.bn_arrays(channels or self.channels[x], spread, gamma=gamma)
        return self.op("BatchNormalization", x, *[self.const(a) for a in arrays], epsilon=1e-5)

    def conv(
        self, x: str, weight: np.ndarray | str, bias: np.ndarray | None = None, *, pad=0, **attrs
    ) -> str:
        """Convolve; `pad` is one amount or the pads attribute."""
        if isinstance(weight, str):
            out = self.op(
                "Conv", x, weight, pads=[pad] * 4 if isinstance(pad, int) else list(pad), **attrs
            )
            return out
        rank = weight.ndim - 2
        pads = [pad] * 2 * rank if isinstance(pad, int) else list(pad)
        if "auto_pad" in attrs:
            pads = None
        ins = [x, self.const(weight)] + ([] if bias is None else [self.const(bias)])
        out = self.op("Conv", *ins, pads=pads, kernel_shape=list(weight.shape[2:]), **attrs)
        self.channels[out] = weight.shape[0]
        return out

    def bconv(
        self,
        x: str,
        units: int,
        k: int | tuple[int, int] = 3,
        *,
        scale: object = 1.0,
        group: int = 1,
        pad=None,
        **attrs,
    ) -> str:
        """Convolve with random signs times `scale`."""
        kh, kw = (k, k) if isinstance(k, int) else k
        pad = k // 2 if pad is None and isinstance(k, int) else (pad or 0)
        weight = self.signs((units, self.channels[x] // group, kh, kw))
        weight = weight * np.asarray(scale, np.float32).reshape(-1, 1, 1, 1)
        return self.conv(x, weight, pad=pad, group=group if group > 1 else None, **attrs)

    def fconv(self, x: str, units: int, k: int = 3, *, pad: int | None = None, **attrs) -> str:
        """Convolve with random real weights and a bias."""
        channels = self.channels[x]
        weight = self.normal((units, channels, k, k), (channels * k * k) ** -0.5)
        return self.conv(
            x, weight, self.normal(units, 0.1), pad=k // 2 if pad is None else pad, **attrs
        )

    def head(self, x: str, classes: int = 10) -> str:
        """Append global average pool, flatten and a float Gemm."""
        channels = self.channels[x]
        x = self.op("Flatten", self.op("GlobalAveragePool", x))
        return self.op(
            "Gemm",
            x,
            self.const(self.normal((classes, channels), 0.3)),
            self.const(self.normal(classes)),
            transB=1,
        )

    # ------------------------------------------------------------------ sign

    def sign(self, x: str, how: str = "where_ge") -> str:
        """Append a spelling of sign; see `SIGNS`."""
        return SIGNS[how](self, x)

    def compare(self, kind: str, a: str, b: str) -> str:
        """Append a comparison; the OrEqual ones by Not below opset 12."""
        if kind.endswith("OrEqual") and self.opset < 12:
            return self.op("Not", self.op({"G": "Less", "L": "Greater"}[kind[0]], a, b))
        return self.op(kind, a, b)

    def where(self, condition: str, a: object, b: object) -> str:
        a, b = (v if isinstance(v, str) else self.const(v) for v in (a, b))
        return self.op("Where", condition, a, b)

    def cast(self, x: str, to: int = F32) -> str:
        return self.op("Cast", x, to=to)


def _ones_dynamic(net: Net, x: str) -> str:
    one = numpy_helper.from_array(np.ones(1, np.float32))
    return net.op("ConstantOfShape", net.op("Shape", x), value=one)


def _where_dynamic(net: Net, x: str) -> str:
    return net.where(
        net.compare("GreaterOrEqual", x, net.const(0.0)),
        _ones_dynamic(net, x),
        net.op("Neg", _ones_dynamic(net, x)),
    )


def _where_expand(net: Net, x: str) -> str:
    one = net.op("Expand", net.const([1.0]), net.op("Shape", x))
    other = net.op("Neg", net.op("Expand", net.const([1.0]), net.op("Shape", x)))
    return net.where(net.compare("GreaterOrEqual", x, net.const(0.0)), one, other)


def _affine(net: Net, bits: str, form: str) -> str:
    if form == "2x-1":
        return net.op("Sub", net.op("Mul", bits, net.const(2.0)), net.const(1.0))
    if form == "2x+-1":
        return net.op("Add", net.op("Mul", net.const(2.0), bits), net.const(-1.0))
    if form == "1-2x":
        return net.op("Sub", net.const(1.0), net.op("Mul", bits, net.const(2.0)))
    if form == "x+x-1":
        return net.op("Sub", net.op("Add", bits, bits), net.const(1.0))
    return net.op("Div", net.op("Sub", bits, net.const(0.5)), net.const(0.5))  # (x-.5)/.5


def _sign_fixed(net: Net, x: str) -> str:
    s = net.op("Sign", x)
    return net.where(
        net.op("Equal", net.cast(s, TensorProto.INT32), net.const(0, np.int32)), 1.0, s
    )


def _sign_plus_is_zero(net: Net, x: str) -> str:
    s = net.op("Sign", x)
    return net.op("Add", s, net.cast(net.op("Not", net.cast(s, TensorProto.BOOL))))


def _cast_int(net: Net, x: str) -> str:
    i = net.cast(net.compare("GreaterOrEqual", x, net.const(0.0)), TensorProto.INT64)
    i = net.op("Sub", net.op("Mul", i, net.const(2, np.int64)), net.const(1, np.int64))
    return net.cast(i)


def _two_products(net: Net, x: str) -> str:
    """Write tf.where as tf2onnx does: Cast(c) * a + Cast(Not c) * b."""
    c = net.compare("GreaterOrEqual", x, net.const(0.0))
    a = net.op("Mul", net.cast(c), net.const(1.0))
    return net.op("Add", a, net.op("Mul", net.cast(net.op("Not", c)), net.const(-1.0)))


def _rounded(net: Net, x: str) -> str:
    """Round a hard sigmoid: BinaryNet's deterministic binarization (opset 11, which has Round)."""
    if net.opset < 11:
        return net.op("Sub", net.cast(net.op("Greater", x, net.const(0.0))), net.const(0.5))
    half = net.clip(net.op("Div", net.op("Add", x, net.const(1.0)), net.const(2.0)), 0, 1)
    return net.op("Sub", net.op("Mul", net.op("Round", half), net.const(2.0)), net.const(1.0))


# Value at 0: `Sign` forms are three-valued there, `_ge` gives +1, `_gt` gives -1.
SIGNS: dict[str, Callable[[Net, str], str]] = {
    "sign": lambda n, x: n.op("Sign", x),
    "where_ge": lambda n, x: n.where(n.compare("GreaterOrEqual", x, n.const(0.0)), 1.0, -1.0),
    "where_gt": lambda n, x: n.where(n.op("Greater", x, n.const(0.0)), 1.0, -1.0),
    "where_lt": lambda n, x: n.where(n.op("Less", x, n.const(0.0)), -1.0, 1.0),
    "where_le": lambda n, x: n.where(n.compare("LessOrEqual", x, n.const(0.0)), -1.0, 1.0),
    "where_zero_le": lambda n, x: n.where(n.compare("LessOrEqual", n.const(0.0), x), 1.0, -1.0),
    "where_zero_lt": lambda n, x: n.where(n.op("Less", n.const([0.0]), x), 1.0, -1.0),
    "where_not_less": lambda n, x: n.where(n.op("Not", n.op("Less", x, n.const(0.0))), 1.0, -1.0),
    "where_not_greater": lambda n, x: n.where(
        n.op("Not", n.op("Greater", x, n.const(0.0))), -1.0, 1.0
    ),
    "where_full_dynamic": _where_dynamic,
    "where_expand_dynamic": _where_expand,
    "cast_ge": lambda n, x: _affine(
        n, n.cast(n.compare("GreaterOrEqual", x, n.const(0.0))), "2x-1"
    ),
    "cast_gt": lambda n, x: _affine(n, n.cast(n.op("Greater", x, n.const(0.0))), "2x+-1"),
    "cast_lt": lambda n, x: _affine(n, n.cast(n.op("Less", x, n.const(0.0))), "1-2x"),
    "cast_sum": lambda n, x: _affine(n, n.cast(n.op("Greater", x, n.const(0.0))), "x+x-1"),
    "cast_half": lambda n, x: _affine(
        n, n.cast(n.compare("GreaterOrEqual", x, n.const(0.0))), "half"
    ),
    "cast_int": _cast_int,
    "larq": lambda n, x: n.op("Sign", n.op("Add", n.op("Sign", x), n.const(0.1))),
    "sign_tiny": lambda n, x: n.op("Sign", n.op("Add", x, n.const(1e-20))),
    "sign_fixed": _sign_fixed,
    "sign_plus_is_zero": _sign_plus_is_zero,
    "neg_sign_neg": lambda n, x: n.op("Neg", n.op("Sign", n.op("Neg", x))),
    "sign_of_scaled": lambda n, x: n.op("Sign", n.op("Mul", x, n.const(2.5))),
    "sign_of_sign": lambda n, x: n.op("Sign", n.op("Sign", x)),
    "sign_of_clip": lambda n, x: n.op("Sign", n.clip(x, -1, 1)),
    "difference": lambda n, x: n.op(
        "Sub", n.cast(n.op("Greater", x, n.const(0.0))), n.cast(n.op("Less", x, n.const(0.0)))
    ),
    "scaled": lambda n, x: n.op("Mul", n.op("Sign", x), n.const(0.37)),
    "where_scaled": lambda n, x: n.where(n.compare("GreaterOrEqual", x, n.const(0.0)), 0.37, -0.37),
    "where_inverted": lambda n, x: n.where(n.compare("GreaterOrEqual", x, n.const(0.0)), -1.0, 1.0),
    "two_products": _two_products,
    "rounded_hard_sigmoid": _rounded,
    "minus_half": lambda n, x: n.op("Sub", n.cast(n.op("Greater", x, n.const(0.0))), n.const(0.5)),
    "threshold": lambda n, x: n.where(n.op("Greater", x, n.const(0.25)), 1.0, -1.0),
}

# {0, 1} activations.
STEPS: dict[str, Callable[[Net, str], str]] = {
    "heaviside": lambda n, x: n.op("Sign", n.op("Relu", x)),
    "cast_gt": lambda n, x: n.cast(n.op("Greater", x, n.const(0.0))),
    "cast_ge": lambda n, x: n.cast(n.compare("GreaterOrEqual", x, n.const(0.0))),
    "where": lambda n, x: n.where(n.op("Greater", x, n.const(0.0)), 1.0, 0.0),
    "relu_sign": lambda n, x: n.op("Relu", n.op("Sign", x)),
    "clip_sign": lambda n, x: n.clip(n.op("Sign", x), 0, 1),
    "half_sign": lambda n, x: n.op("Mul", n.op("Add", n.sign(x), n.const(1.0)), n.const(0.5)),
}


@dataclass
class Case:
    """A model built on demand, what should be found in it, and how to feed it.

    Attributes
    ----------
    name, pattern : str
        Identifier, and the section of the frontends notes it stands for.
    build : callable
        Returns the ModelProto.
    binary, float_ : int | None
        Conv, Gemm and MatMul nodes of the file that must be found binary, and all others (float, or
        few-bit where the compiler has that). None: not asserted, only the outputs are.
    domain : str
        Where inputs are drawn from, see `oracle.make_feeds`.
    batches : tuple of int
        Batch sizes to feed; more than one only where the batch is dynamic.
    quick : bool
        Part of `make test` (`handmade.QUICK`, or the index).
    """

    name: str
    pattern: str
    build: Callable[[], onnx.ModelProto]
    binary: int | None
    float_: int | None
    domain: str = "normal"
    batches: tuple[int, ...] = (1,)
    quick: bool = False

    @cached_property
    def model(self) -> onnx.ModelProto:
        return self.build()

    @cached_property
    def feeds(self) -> list[dict[str, np.ndarray]]:
        """Inputs that meet no tie: per batch one of the domain and one plain normal."""
        domains = [self.domain] if self.domain == "normal" else [self.domain, "normal"]
        return [
            oracle.tie_free_feeds(self.model, domain=d, seed=7 * i + 1, batch=b)
            for i, d in enumerate(domains)
            for b in self.batches
        ]


CASES: list[Case] = []


def case(name: str, pattern: str, binary: int | None, float_: int | None, **rest) -> Callable:
    """Register the decorated function: it finishes a fresh `Net`, or returns a ModelProto."""
    opset = rest.pop("opset", DEFAULT_OPSET)
    constants = rest.pop("constants", "initializer")

    def register(function: Callable) -> Callable:
        def build() -> onnx.ModelProto:
            net = Net(opset, seed=name, constants=constants)
            result = function(net)
            return result if isinstance(result, onnx.ModelProto) else net.model()

        CASES.append(Case(name, pattern, build, binary, float_, **rest))
        return function

    return register
