"""Elementwise operators, and tensors made of numbers."""

from __future__ import annotations

import functools
import math
from typing import Any

import ml_dtypes
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
        if dtype == "bool":
            return site.emit(_OF_BOOLS[op], [self, other])
        alpha = site.get("alpha", 1)
        if alpha != 1:
            other = site.emit("Mul", [other, site.operand(alpha, dtype)])
        return site.emit(op, [self, other])

    return rule


_OF_BOOLS = {"Add": "Or", "Mul": "And", "Max": "Or", "Min": "And"}


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
    if mode == "floor":
        return floor_divided(site, self, other, dtype)
    quotient = site.emit("Div", [self, other])  # of integers: towards 0
    return _truncated(site, quotient) if mode == "trunc" and dtype in _FLOATS else quotient


def floor_divided(site: Site, one: Name, two: Name, dtype: str) -> Name:
    """Return a quotient rounded down, as torch finds it: from the remainder, which is exact."""
    zero = site.const(0, dtype)
    rest = site.emit("Mod", [one, two], fmod=1)
    falls = _falls_short(site, rest, two, zero)
    whole = site.emit("Div", [site.emit("Sub", [one, rest]), two])
    less = site.emit("Sub", [whole, site.const(1, dtype)])
    whole = site.emit("Where", [falls, less, whole])
    if dtype not in _FLOATS:
        return whole
    down = site.emit("Floor", [whole])
    half = site.emit("Greater", [site.emit("Sub", [whole, down]), site.const(0.5, dtype)])
    more = site.emit("Add", [down, site.const(1, dtype)])
    return site.emit("Where", [half, more, down])


def _falls_short(site: Site, rest: Name, divisor: Name, zero: Name) -> str:
    """Whether a remainder is not 0 and has another sign than the divisor."""
    signs = [site.emit("Less", [v, zero]) for v in (rest, divisor)]
    other = site.emit("Xor", signs)
    return site.emit("And", [other, site.emit("Not", [site.emit("Equal", [rest, zero])])])


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
    x, dtype = _float(site), site.out.dtype
    beta, limit = site.get("beta", 1), site.get("threshold", 20)
    scaled = x if beta == 1 else site.emit("Mul", [x, site.const(beta, dtype)])
    made = site.emit("Softplus", [scaled])
    if beta != 1:
        made = site.emit("Div", [made, site.const(beta, dtype)])
    if limit >= 20:  # where it differs from x by less than 3e-9
        return made
    over = site.emit("Greater", [scaled, site.const(limit, dtype)])
    return site.emit("Where", [over, x, made])


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
    rest = site.emit("Mod", [self, other], fmod=1)
    if site.call.target.startswith("fmod"):
        return rest
    falls = _falls_short(site, rest, other, site.const(0, dtype))
    return site.emit("Where", [falls, site.emit("Add", [rest, other]), rest])


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


def _logarithm(base: float) -> Rule:
    """Return the rule of a logarithm: of a power of the base, it is a whole number."""

    def rule(site: Site) -> Name:
        wide = site.cast(site.tensor("self"), "float64")
        made = site.emit("Div", [site.emit("Log", [wide]), site.const(math.log(base), "float64")])
        return site.cast(made, site.out.dtype, "float64")

    return rule


def _exp2(site: Site) -> Name:
    return site.emit("Pow", [site.const(2, site.out.dtype), _float(site)])


def _erfc(site: Site) -> Name:
    return site.emit("Sub", [site.const(1, site.out.dtype), site.emit("Erf", [_float(site)])])


def _frac(site: Site) -> Name:
    x = _float(site)
    return site.emit("Sub", [x, _truncated(site, x)])


def _logit(site: Site) -> Name:
    x, dtype, eps = _float(site), site.out.dtype, site.get("eps")
    if eps is not None:
        x = site.emit("Clip", [x, site.const(eps, dtype), site.const(1 - eps, dtype)])
    rest = site.emit("Sub", [site.const(1, dtype), x])
    return site.emit("Log", [site.emit("Div", [x, rest])])


def _glu(site: Site) -> Name:
    x = site.tensor("self")
    parts = site.emit_many("Split", [x], 2, axis=site.axis("dim", x.rank, -1), num_outputs=2)
    return site.emit("Mul", [parts[0], site.emit("Sigmoid", [parts[1]])])


def _shrink(soft: bool) -> Rule:
    def rule(site: Site) -> Name:
        width = float(site.get("lambd", 0.5))
        return site.emit("Shrink", [_float(site)], lambd=width, bias=width if soft else 0.0)

    return rule


def _rrelu(site: Site) -> Name:
    if site.get("training"):
        raise site.refuse(
            "is in training mode", hint="call model.eval() before torch.export.export"
        )
    slope = (site.get("lower", 0.125) + site.get("upper", 1 / 3)) / 2
    return site.emit("LeakyRelu", [_float(site)], alpha=float(slope))


def _atan2(site: Site) -> Name:
    """Return angles of all quadrants; of 0 and 0 it is 0."""
    dtype = site.out.dtype
    y, x = site.operand(site.get("self"), dtype), site.operand(site.get("other"), dtype)
    zero, one, pi = (site.const(v, dtype) for v in (0, 1, math.pi))
    at_zero = site.emit("Equal", [x, zero])
    ratio = site.emit("Div", [y, site.emit("Where", [at_zero, one, x])])
    turned = _sign_of(site, y, dtype)
    behind = site.emit("Mul", [turned, pi])
    angle = site.emit("Atan", [ratio])
    left = site.emit("Less", [x, zero])
    angle = site.emit("Where", [left, site.emit("Add", [angle, behind]), angle])
    upright = site.emit("Mul", [site.emit("Sign", [y]), site.const(math.pi / 2, dtype)])
    return site.emit("Where", [at_zero, upright, angle])


def _hypot(site: Site) -> Name:
    dtype = site.out.dtype
    squares = []
    for key in ("self", "other"):
        value = site.operand(site.get(key), dtype)
        squares.append(site.emit("Mul", [value, value]))
    return site.emit("Sqrt", [site.emit("Add", squares)])


def _log_add_exp(base: float) -> Rule:
    def rule(site: Site) -> Name:
        dtype, scale = site.out.dtype, math.log(base)
        one, two = (site.operand(site.get(k), dtype) for k in ("self", "other"))
        high = site.emit("Max", [one, two])
        far = site.emit("Neg", [site.emit("Abs", [site.emit("Sub", [one, two])])])
        if scale != 1:
            far = site.emit("Mul", [far, site.const(scale, dtype)])
        more = site.emit("Exp", [far])
        more = site.emit("Log", [site.emit("Add", [more, site.const(1, dtype)])])
        if scale != 1:
            more = site.emit("Div", [more, site.const(scale, dtype)])
        return site.emit("Add", [high, more])

    return rule


def _xlogy(site: Site) -> Name:
    dtype = site.out.dtype
    one, two = (site.operand(site.get(k), dtype) for k in ("self", "other"))
    zero = site.const(0, dtype)
    made = site.emit("Mul", [one, site.emit("Log", [two])])
    return site.emit("Where", [site.emit("Equal", [one, zero]), zero, made])


def _heaviside(site: Site) -> Name:
    x, values = site.tensor("self"), site.tensor("values")
    zero = site.const(0, x.dtype)
    made = site.cast(site.emit("Greater", [x, zero]), x.dtype, "bool")
    return site.emit("Where", [site.emit("Equal", [x, zero]), values, made])


def _round(site: Site) -> Name:
    places = site.get("decimals", 0)
    x, scale = _float(site), site.const(10.0 ** abs(places), site.out.dtype)
    there, back = ("Mul", "Div") if places > 0 else ("Div", "Mul")
    return site.emit(back, [site.emit("Round", [site.emit(there, [x, scale])]), scale])


def _is_close(site: Site) -> Name:
    one, two = site.tensor("self"), site.tensor("other")
    dtype = promoted(site, site.get("self"), site.get("other"))
    if dtype not in _FLOATS:
        dtype = "float64"
    a, b = site.cast(one, dtype), site.cast(two, dtype)
    apart = site.emit("Abs", [site.emit("Sub", [a, b])])
    relative = site.const(site.get("rtol", 1e-5), dtype)
    bound = site.emit("Mul", [relative, site.emit("Abs", [b])])
    bound = site.emit("Add", [site.const(site.get("atol", 1e-8), dtype), bound])
    near = site.emit("LessOrEqual", [apart, bound])
    return site.emit("Or", [near, site.emit("Equal", [a, b])])


def _is_finite(site: Site) -> Name:
    x = site.tensor("self")
    if x.dtype not in _FLOATS:
        return site.emit("Equal", [x, x])
    other = site.emit("Or", [site.emit("IsInf", [x]), site.emit("IsNaN", [x])])
    return site.emit("Not", [other])


def _infinite(positive: bool) -> Rule:
    def rule(site: Site) -> Name:
        signs = {"detect_positive": int(positive), "detect_negative": int(not positive)}
        return site.emit("IsInf", [site.tensor("self")], **signs)

    return rule


def _numbers(site: Site) -> Name:
    """``nan_to_num``."""
    x, dtype = _float(site), site.out.dtype
    info = ml_dtypes.finfo(dtype)
    for value, key, default in (
        (math.inf, "posinf", float(info.max)),
        (-math.inf, "neginf", float(info.min)),
    ):
        given = site.get(key)
        number = site.const(default if given is None else given, dtype)
        met = site.emit("Equal", [x, site.const(value, dtype)])
        x = site.emit("Where", [met, number, x])
    nan = site.get("nan")
    return site.emit("Where", [site.emit("IsNaN", [x]), site.const(nan or 0, dtype), x])


def _of_numbers(op: str) -> Rule:
    """Return the rule of ``fmax`` and ``fmin``, which pass over what is no number."""

    def rule(site: Site) -> Name:
        dtype = site.out.dtype
        one, two = (site.operand(site.get(k), dtype) for k in ("self", "other"))
        made = site.emit(op, [one, two])
        if dtype not in _FLOATS:
            return made
        made = site.emit("Where", [site.emit("IsNaN", [two]), one, made])
        return site.emit("Where", [site.emit("IsNaN", [one]), two, made])

    return rule


def _shift(left: bool) -> Rule:
    """Return the rule of a shift of integers: arithmetic, so that a right one rounds down."""

    def rule(site: Site) -> Name:
        dtype = site.out.dtype
        x, count = site.operand(site.get("self"), dtype), site.get("other")
        if not isinstance(count, int) or not 0 <= count < np.iinfo(dtype).bits - 1:
            raise site.refuse("shifts by what is no number from 0 to the bits of its type")
        factor = site.const(1 << count, dtype)
        if left:
            return site.emit("Mul", [x, factor])
        return floor_divided(site, x, factor, dtype)

    return rule


_UNARY = {
    **{"abs": "Abs", "neg": "Neg", "sign": "Sign", "sgn": "Sign", "exp": "Exp", "log": "Log"},
    **{"relu": "Relu", "sigmoid": "Sigmoid", "tanh": "Tanh", "sqrt": "Sqrt", "floor": "Floor"},
    **{"ceil": "Ceil", "round": "Round", "reciprocal": "Reciprocal", "erf": "Erf", "sin": "Sin"},
    **{"cos": "Cos", "mish": "Mish", "selu": "Selu", "hardswish": "HardSwish", "tan": "Tan"},
    **{"atan": "Atan", "softsign": "Softsign", "acos": "Acos", "asin": "Asin", "acosh": "Acosh"},
    **{"asinh": "Asinh", "atanh": "Atanh", "sinh": "Sinh", "cosh": "Cosh", "positive": "Identity"},
}
_BINARY = {"add": "Add", "sub": "Sub", "mul": "Mul", "multiply": "Mul", "subtract": "Sub"}
_COMPARE = {
    **{"eq": "Equal", "ne": "Equal", "lt": "Less", "le": "LessOrEqual", "gt": "Greater"},
    "ge": "GreaterOrEqual",
}

_SIDES, _OPERANDS = ("left", "right"), ("Tensor", "Scalar")
_SHIFTED = ("Tensor", "Tensor_Scalar")

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
    **{f"__{k[0]}shift__.{f}": _shift(k == "left") for k in _SIDES for f in _OPERANDS},
    **{f"bitwise_{k}_shift.{f}": _shift(k == "left") for k in _SIDES for f in _SHIFTED},
    "floor_divide.Scalar": _divide,
    **dict.fromkeys(("xlogy.Tensor", "xlogy.Scalar_Self", "xlogy.Scalar_Other"), _xlogy),
    "atan2.default": _atan2,
    "erfc.default": _erfc,
    "special_erfc.default": _erfc,
    "exp2.default": _exp2,
    "fmax.default": _of_numbers("Max"),
    "fmin.default": _of_numbers("Min"),
    "frac.default": _frac,
    "glu.default": _glu,
    "hardshrink.default": _shrink(soft=False),
    "heaviside.default": _heaviside,
    "hypot.default": _hypot,
    "isclose.default": _is_close,
    "isfinite.default": _is_finite,
    "isneginf.default": _infinite(positive=False),
    "isposinf.default": _infinite(positive=True),
    "log10.default": _logarithm(10),
    "log2.default": _logarithm(2),
    "logaddexp.default": _log_add_exp(math.e),
    "logaddexp2.default": _log_add_exp(2),
    "logit.default": _logit,
    "max.other": binary("Max"),
    "min.other": binary("Min"),
    "nan_to_num.default": _numbers,
    "round.decimals": _round,
    "rrelu.default": _rrelu,
    "softshrink.default": _shrink(soft=True),
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
