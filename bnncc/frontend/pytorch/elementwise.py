"""Elementwise operators, and tensors made of numbers."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from bnncc.frontend.pytorch.program import Ref
from bnncc.frontend.pytorch.site import Name, Rule, Site

_FLOATS = ("bfloat16", "float16", "float32", "float64")
_KINDS = {"b": 0, "u": 1, "i": 1, "f": 2}


def _kind(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else _KINDS[np.dtype(dtype).kind]


def promoted(site: Site, *given: Any) -> str:
    """Return the dtype that torch computes operands in: tensors count more than numbers.

    Parameters
    ----------
    site : Site
        Of the call.
    *given
        `Ref` of tensors and of numbers, and numbers.

    Returns
    -------
    str
    """
    groups: tuple[list[str], list[str], list[str]] = ([], [], [])
    for item in given:
        if isinstance(item, Ref):
            value = site.value(item)
            groups[0 if value.rank else 1].append(value.dtype)
        else:
            kind = "bool" if isinstance(item, bool) else "int64"
            groups[2].append("float32" if isinstance(item, float) else kind)
    best = ""
    for group in filter(None, groups):
        widest = functools.reduce(_wider, group)
        if not best or _kind(widest) > _kind(best):
            best = widest
    return best


def _wider(a: str, b: str) -> str:
    if _kind(a) != _kind(b):
        return a if _kind(a) > _kind(b) else b
    if "bfloat16" in (a, b):
        return a if a == b else "float32" if "float16" in (a, b) else b if a == "bfloat16" else a
    return np.promote_types(a, b).name


def _float(site: Site, key: str = "self") -> Name:
    """Return an argument as the floating type of the result."""
    return site.cast(site.tensor(key), site.out.dtype)


def unary(op: str, **attrs: Any) -> Rule:
    """Return the rule of an operator that ONNX has for the result's own type."""

    def rule(site: Site) -> Name:
        first = site.cast(site.value(site.first()), site.out.dtype)
        return site.emit(op, [first], **attrs)

    return rule


def binary(op: str) -> Rule:
    """Return the rule of arithmetic on two operands, the second times ``alpha``."""

    def rule(site: Site) -> Name:
        dtype = site.out.dtype
        self, other = site.operand(site.get("self"), dtype), site.operand(site.get("other"), dtype)
        alpha = site.get("alpha", 1)
        if alpha != 1:
            other = site.emit("Mul", [other, site.operand(alpha, dtype)])
        return site.emit(op, [self, other])

    return rule


def compare(op: str) -> Rule:
    """Return the rule of a comparison."""

    def rule(site: Site) -> Name:
        self, other = site.get("self"), site.get("other")
        dtype = promoted(site, self, other)
        if dtype == "bool" and op != "Equal":
            dtype = "int32"
        made = site.emit(op, [site.operand(self, dtype), site.operand(other, dtype)])
        return site.emit("Not", [made]) if site.call.target.startswith("ne.") else made

    return rule


def _rsub(site: Site) -> Name:
    dtype = site.out.dtype
    self, other = site.operand(site.get("self"), dtype), site.operand(site.get("other"), dtype)
    if site.get("alpha", 1) != 1:
        self = site.emit("Mul", [self, site.operand(site.get("alpha"), dtype)])
    return site.emit("Sub", [other, self])


def _divide(site: Site) -> Name:
    dtype = site.out.dtype
    self, other = site.operand(site.get("self"), dtype), site.operand(site.get("other"), dtype)
    mode = site.get("rounding_mode")
    mode = "floor" if "floor_divide" in site.call.target else mode
    if mode is None:
        return site.emit("Div", [self, other])
    if dtype not in _FLOATS:
        raise site.refuse("integers are divided and rounded")
    quotient = site.emit("Div", [self, other])
    return site.emit("Floor", [quotient]) if mode == "floor" else _truncated(site, quotient)


def _truncated(site: Site, value: Name) -> str:
    size = site.emit("Floor", [site.emit("Abs", [value])])
    return site.emit("Mul", [site.emit("Sign", [value]), size])


def _pow(site: Site) -> Name:
    dtype, power = site.out.dtype, site.get("exponent")
    base = site.operand(site.get("self"), dtype)
    if power == 2:
        return site.emit("Mul", [base, base])
    if power == 0.5:
        return site.emit("Sqrt", [base])
    return site.emit("Pow", [base, site.operand(power, dtype)])


def _clamp(site: Site) -> Name:
    """With bounds of tensors or of numbers."""
    dtype = site.out.dtype
    x = _float(site)
    low, high = site.get("min", site.get("min_val")), site.get("max", site.get("max_val"))
    if not isinstance(low, Ref) and not isinstance(high, Ref):
        bounds = [_bound(site, b, dtype) for b in (low, high)]
        return site.emit("Clip", [x, *bounds])
    if low is not None:
        x = site.emit("Max", [x, site.operand(low, dtype)])
    if high is not None:
        x = site.emit("Min", [x, site.operand(high, dtype)])
    return x


def _bound(site: Site, bound: float | None, dtype: str) -> str:
    return "" if bound is None or math.isinf(bound) else site.const(bound, dtype)


def _hardtanh(site: Site) -> Name:
    dtype = site.out.dtype
    low, high = site.get("min_val", -1.0), site.get("max_val", 1.0)
    return site.emit("Clip", [_float(site), _bound(site, low, dtype), _bound(site, high, dtype)])


def _clip(low: float, high: float) -> Rule:
    def rule(site: Site) -> Name:
        dtype = site.out.dtype
        return site.emit("Clip", [_float(site), site.const(low, dtype), site.const(high, dtype)])

    return rule


def _sign_of(site: Site, x: Name, dtype: str) -> str:
    """+1 where `x` >= 0, else -1: torch.copysign, but for -0.0, which counts as 0."""
    at_least = site.emit("GreaterOrEqual", [x, site.const(0, dtype)])
    return site.emit("Where", [at_least, site.const(1, dtype), site.const(-1, dtype)])


def _copysign(site: Site) -> Name:
    dtype = site.out.dtype
    sign = _sign_of(site, site.operand(site.get("other"), dtype), dtype)
    size = site.emit("Abs", [site.operand(site.get("self"), dtype)])
    return site.emit("Mul", [size, sign])


def _prelu(site: Site) -> Name:
    x, slope = site.tensor("self"), site.tensor("weight")
    size = slope.shape[0] if slope.rank == 1 else 0
    if slope.rank == 1 and x.rank > 1 and size != 1:
        return site.emit("PRelu", [x, site.reshape(slope, [size, *[1] * (x.rank - 2)])])
    return site.emit("PRelu", [x, slope])


def _leaky(site: Site) -> Name:
    return site.emit("LeakyRelu", [_float(site)], alpha=float(site.get("negative_slope", 0.01)))


def _elu(site: Site) -> Name:
    if site.get("input_scale", 1) != 1:
        raise site.refuse("with an input scale")
    made = site.emit("Elu", [_float(site)], alpha=float(site.get("alpha", 1.0)))
    scale = site.get("scale", 1)
    return made if scale == 1 else site.emit("Mul", [made, site.const(scale, site.out.dtype)])


def _celu(site: Site) -> Name:
    return site.emit("Celu", [_float(site)], alpha=float(site.get("alpha", 1.0)))


def _gelu(site: Site) -> Name:
    return site.emit("Gelu", [_float(site)], approximate=site.get("approximate", "none"))


def _softplus(site: Site) -> Name:
    if site.get("beta", 1) != 1:
        raise site.refuse("with a beta other than 1")
    return site.emit("Softplus", [_float(site)])


def _silu(site: Site) -> Name:
    x = _float(site)
    return site.emit("Mul", [x, site.emit("Sigmoid", [x])])


def _rsqrt(site: Site) -> Name:
    return site.emit("Reciprocal", [site.emit("Sqrt", [_float(site)])])


def _square(site: Site) -> Name:
    x = _float(site)
    return site.emit("Mul", [x, x])


def _log_sigmoid(site: Site) -> Name:
    return site.emit("Neg", [site.emit("Softplus", [site.emit("Neg", [_float(site)])])])


def _log1p(site: Site) -> Name:
    return site.emit("Log", [site.emit("Add", [_float(site), site.const(1, site.out.dtype)])])


def _expm1(site: Site) -> Name:
    return site.emit("Sub", [site.emit("Exp", [_float(site)]), site.const(1, site.out.dtype)])


def _trunc(site: Site) -> Name:
    return _truncated(site, _float(site))


def _threshold(site: Site) -> Name:
    dtype, x = site.out.dtype, _float(site)
    over = site.emit("Greater", [x, site.const(site.get("threshold"), dtype)])
    return site.emit("Where", [over, x, site.const(site.get("value"), dtype)])


def _remainder(site: Site) -> Name:
    dtype = site.out.dtype
    self, other = site.operand(site.get("self"), dtype), site.operand(site.get("other"), dtype)
    if site.call.target.startswith("fmod"):
        return site.emit("Mod", [self, other], fmod=1)
    if dtype not in _FLOATS:
        return site.emit("Mod", [self, other])
    floor = site.emit("Floor", [site.emit("Div", [self, other])])
    return site.emit("Sub", [self, site.emit("Mul", [floor, other])])


def _logical(op: str) -> Rule:
    def rule(site: Site) -> Name:
        return site.emit(op, [site.operand(site.get(k), "bool") for k in ("self", "other")])

    return rule


def _not(site: Site) -> Name:
    return site.emit("Not", [site.cast(site.tensor("self"), "bool")])


def _bitwise(op: str, logical: str) -> Rule:
    def rule(site: Site) -> Name:
        dtype = site.out.dtype
        operands = [site.operand(site.get(k), dtype) for k in ("self", "other")]
        return site.emit(logical if dtype == "bool" else op, operands)

    return rule


def _bitwise_not(site: Site) -> Name:
    x = site.tensor("self")
    return site.emit("Not" if x.dtype == "bool" else "BitwiseNot", [x])


def _addc(op: str) -> Rule:
    """``self + value * (tensor1 op tensor2)``."""

    def rule(site: Site) -> Name:
        dtype = site.out.dtype
        one, two, x = (site.operand(site.get(k), dtype) for k in ("tensor1", "tensor2", "self"))
        term = site.emit(op, [one, two])
        if site.get("value", 1) != 1:
            term = site.emit("Mul", [term, site.operand(site.get("value"), dtype)])
        return site.emit("Add", [x, term])

    return rule


def _lerp(site: Site) -> Name:
    dtype = site.out.dtype
    start, end, weight = (site.operand(site.get(k), dtype) for k in ("self", "end", "weight"))
    return site.emit("Add", [start, site.emit("Mul", [weight, site.emit("Sub", [end, start])])])


_UNARY = {
    **{"abs": "Abs", "neg": "Neg", "sign": "Sign", "sgn": "Sign", "exp": "Exp", "log": "Log"},
    **{"relu": "Relu", "sigmoid": "Sigmoid", "tanh": "Tanh", "sqrt": "Sqrt", "floor": "Floor"},
    **{"ceil": "Ceil", "round": "Round", "reciprocal": "Reciprocal", "erf": "Erf", "sin": "Sin"},
    **{"cos": "Cos", "mish": "Mish", "selu": "Selu", "hardswish": "HardSwish", "tan": "Tan"},
    **{"atan": "Atan", "softsign": "Softsign"},
}
_BINARY = {"add": "Add", "sub": "Sub", "mul": "Mul", "multiply": "Mul", "subtract": "Sub"}
_COMPARE = {
    **{"eq": "Equal", "ne": "Equal", "lt": "Less", "le": "LessOrEqual", "gt": "Greater"},
    "ge": "GreaterOrEqual",
}

RULES: dict[str, Rule] = {
    **{f"{name}.default": unary(op) for name, op in _UNARY.items()},
    **{f"{name}.{k}": binary(op) for name, op in _BINARY.items() for k in ("Tensor", "Scalar")},
    **{f"{name}.{k}": compare(op) for name, op in _COMPARE.items() for k in ("Tensor", "Scalar")},
    **dict.fromkeys(("clamp.default", "clamp.Tensor", "clip.default"), _clamp),
    **dict.fromkeys(("clamp_min.default", "clamp_min.Tensor"), _clamp),
    **dict.fromkeys(("clamp_max.default", "clamp_max.Tensor"), _clamp),
    **dict.fromkeys(("div.Tensor", "div.Scalar", "div.Tensor_mode", "div.Scalar_mode"), _divide),
    **dict.fromkeys(("true_divide.Tensor", "divide.Tensor", "floor_divide.default"), _divide),
    **dict.fromkeys(("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar"), _pow),
    **dict.fromkeys(("rsub.Tensor", "rsub.Scalar"), _rsub),
    **{f"{name}.{k}": _remainder for name in ("remainder", "fmod") for k in ("Tensor", "Scalar")},
    **dict.fromkeys(("copysign.Tensor", "copysign.Scalar"), _copysign),
    **dict.fromkeys(("lerp.Scalar", "lerp.Tensor"), _lerp),
    **dict.fromkeys(("prelu.default", "_prelu_kernel.default"), _prelu),
    **{
        f"{name}.{form}": _bitwise(f"Bitwise{k.title()}", k.title())
        for k in ("and", "or", "xor")
        for name in (f"bitwise_{k}", f"__{k}__")
        for form in ("Tensor", "Scalar")
    },
    **{f"logical_{k}.default": _logical(k.title()) for k in ("and", "or", "xor")},
    "addcdiv.default": _addc("Div"),
    "addcmul.default": _addc("Mul"),
    "bitwise_not.default": _bitwise_not,
    "celu.default": _celu,
    "elu.default": _elu,
    "expm1.default": _expm1,
    "gelu.default": _gelu,
    "hardsigmoid.default": unary("HardSigmoid", alpha=1 / 6, beta=0.5),
    "hardtanh.default": _hardtanh,
    "isinf.default": lambda site: site.emit("IsInf", [site.tensor("self")]),
    "isnan.default": lambda site: site.emit("IsNaN", [site.tensor("self")]),
    "leaky_relu.default": _leaky,
    "log1p.default": _log1p,
    "log_sigmoid.default": _log_sigmoid,
    "logical_not.default": _not,
    "maximum.default": binary("Max"),
    "minimum.default": binary("Min"),
    "relu6.default": _clip(0, 6),
    "rsqrt.default": _rsqrt,
    "silu.default": _silu,
    "softplus.default": _softplus,
    "square.default": _square,
    "threshold.default": _threshold,
    "trunc.default": _trunc,
}
