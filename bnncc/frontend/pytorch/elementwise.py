"""Elementwise operators, and type promotion."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from bnncc.frontend.formula import Number
from bnncc.frontend.pytorch.program import Ref
from bnncc.frontend.pytorch.site import FLOATS, Name, Rule, Site

_KINDS = {"b": 0, "u": 1, "i": 1, "f": 2}


def _kind(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else _KINDS[np.dtype(dtype).kind]


def promoted(site: Site, *given: Any) -> str:
    """Return the dtype in which torch computes: tensors take precedence over numbers.

    Parameters
    ----------
    site : Site
        The call.
    *given
        `Ref` of tensors and of numbers, or numbers.
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


def _float(site: Site) -> Name:
    """Return the first argument as the floating type of the result."""
    return site.cast(site.tensor("self"), site.out.dtype)


def formula(function: Callable[..., Number], *names: str) -> Rule:
    """Return a rule that applies a formula to arguments, in the dtype of the result.

    Parameters
    ----------
    function : callable
        Takes a `Number` for each argument.
    *names : str
        Names of the arguments; default: the first one.
    """

    def rule(site: Site) -> Name:
        given = [site.number(name) for name in names] or [site.number(site.value(site.first()))]
        return function(*given).name

    return rule


def unary(op: str, site: Site, **attrs: Any) -> Name:
    """Write an operator that ONNX supports for the dtype of the result."""
    first = site.cast(site.value(site.first()), site.out.dtype)
    return site.emit(op, [first], **attrs)


def binary(op: str, site: Site) -> Name:
    """Write an arithmetic operator on two operands, the second multiplied by ``alpha``."""
    dtype = site.out.dtype
    self, other = site.operand(site.get("self"), dtype), site.operand(site.get("other"), dtype)
    if dtype == "bool":
        return site.emit(_OF_BOOLS[op], [self, other])
    alpha = site.get("alpha", 1)
    if alpha != 1:
        other = site.emit("Mul", [other, site.operand(alpha, dtype)])
    return site.emit(op, [self, other])


_LOGICAL = ("And", "Or", "Xor")
_OF_BOOLS = {
    **{"Add": "Or", "Mul": "And", "Max": "Or", "Min": "And"},
    **{f"Bitwise{k}": k for k in _LOGICAL},
}


def compare(op: str, site: Site) -> Name:
    """Write a comparison."""
    self, other = site.get("self"), site.get("other")
    dtype = promoted(site, self, other)
    if dtype == "bool" and op != "Equal":
        dtype = "int32"
    made = site.emit(op, [site.operand(self, dtype), site.operand(other, dtype)])
    return site.emit("Not", [made]) if site.call.target.startswith("ne.") else made


def _rsub(site: Site) -> Name:
    this, other = site.number("self"), site.number("other")
    if site.get("alpha", 1) != 1:
        this = this * site.number("alpha")
    return (other - this).name


def _divide(site: Site) -> Name:
    one, two, mode = site.number("self"), site.number("other"), site.get("rounding_mode")
    if mode == "floor" or "floor_divide" in site.call.target:
        return floor_divided(one, two).name
    quotient = one / two  # for integers: truncated
    truncated = mode == "trunc" and one.dtype in FLOATS
    return (_truncated(quotient) if truncated else quotient).name


def floor_divided(one: Number, two: Number) -> Number:
    """Return a quotient rounded down, computed from the exact remainder, as torch does."""
    rest = one("Mod", two, fmod=1)
    whole = (one - rest) / two
    whole = whole.choose(_falls_short(rest, two), whole - 1, whole)
    if one.dtype not in FLOATS:
        return whole
    down = whole("Floor")
    return whole.choose(whole - down > 0.5, down + 1, down)


def _falls_short(rest: Number, divisor: Number) -> Number:
    """Whether a remainder is not 0 and differs in sign from the divisor."""
    return ((rest < 0) ^ (divisor < 0)) & ~rest.equals(0)


def _truncated(x: Number) -> Number:
    return x("Sign") * abs(x)("Floor")


def _pow(site: Site) -> Name:
    dtype, power = site.out.dtype, site.get("exponent")
    base = site.operand(site.get("self"), dtype)
    if power == 2:
        return site.emit("Mul", [base, base])
    if power == 0.5:
        return site.emit("Sqrt", [base])
    return site.emit("Pow", [base, site.operand(power, dtype)])


def _clamp(site: Site, *, least: float | None = None, most: float | None = None) -> Name:
    """Write bounds that are tensors or numbers; defaults: `least` and `most`."""
    x, dtype = _float(site), site.out.dtype
    low, high = (
        site.get("min", site.get("min_val", least)),
        site.get("max", site.get("max_val", most)),
    )
    if not isinstance(low, Ref) and not isinstance(high, Ref):
        ends = ["" if b is None or math.isinf(b) else site.const(b, dtype) for b in (low, high)]
        return site.emit("Clip", [x, *ends])
    if low is not None:
        x = site.emit("Max", [x, site.operand(low, dtype)])
    if high is not None:
        x = site.emit("Min", [x, site.operand(high, dtype)])
    return x


def _sign_of(x: Number) -> Number:
    """Return +1 if `x` >= 0, otherwise -1: torch.copysign, except that -0.0 counts as 0."""
    return x.choose(x >= 0, 1, -1)


def _prelu(site: Site) -> Name:
    x, slope = site.tensor("self"), site.tensor("weight")
    size = slope.shape[0] if slope.rank == 1 else 0
    if slope.rank == 1 and x.rank > 1 and size != 1:
        return site.emit("PRelu", [x, site.reshape(slope, [size, *[1] * (x.rank - 2)])])
    return site.emit("PRelu", [x, slope])


def _elu(site: Site) -> Name:
    if site.get("input_scale", 1) != 1:
        raise site.refuse("with an input scale")
    made = site.emit("Elu", [_float(site)], alpha=float(site.get("alpha", 1.0)))
    scale = site.get("scale", 1)
    return made if scale == 1 else site.emit("Mul", [made, site.const(scale, site.out.dtype)])


def _alpha(op: str, key: str, default: float) -> Rule:
    """Write an activation whose ``alpha`` is the argument `key`."""
    return lambda site: site.emit(op, [_float(site)], alpha=float(site.get(key, default)))


def _gelu(site: Site) -> Name:
    return site.emit("Gelu", [_float(site)], approximate=site.get("approximate", "none"))


def _softplus(site: Site) -> Name:
    x = site.number("self")
    beta, limit = site.get("beta", 1), site.get("threshold", 20)
    scaled = x if beta == 1 else x * beta
    made = scaled("Softplus")
    made = made if beta == 1 else made / beta
    if limit < 20:  # above, it differs from x by less than 3e-9
        made = made.choose(scaled > limit, x, made)
    return made.name


def _remainder(one: Number, two: Number) -> Number:
    rest = one("Mod", two, fmod=1)
    return rest.choose(_falls_short(rest, two), rest + two, rest)


def _logical(op: str, site: Site) -> Name:
    return site.emit(op, [site.operand(site.get(k), "bool") for k in ("self", "other")])


def _not(site: Site) -> Name:
    return site.emit("Not", [site.cast(site.tensor("self"), "bool")])


def _bitwise_not(site: Site) -> Name:
    x = site.tensor("self")
    return site.emit("Not" if x.dtype == "bool" else "BitwiseNot", [x])


def _addc(op: str, site: Site) -> Name:
    """``self + value * (tensor1 op tensor2)``."""
    one, two, x = (site.number(k) for k in ("tensor1", "tensor2", "self"))
    term = one(op, two)
    if site.get("value", 1) != 1:
        term = term * site.number("value")
    return (x + term).name


def _logarithm(base: float, site: Site) -> Name:
    """Write a logarithm; for a power of the base, the result is an exact integer."""
    wide = site.cast(site.tensor("self"), "float64")
    made = site.emit("Div", [site.emit("Log", [wide]), site.const(math.log(base), "float64")])
    return site.cast(made, site.out.dtype, "float64")


def _logit(site: Site) -> Name:
    x, eps = site.number("self"), site.get("eps")
    x = x if eps is None else x("Clip", eps, 1 - eps)
    return (x / (1 - x))("Log").name


def _glu(site: Site) -> Name:
    x = site.tensor("self")
    parts = site.emit_many("Split", [x], 2, axis=site.axis("dim", x.rank, -1), num_outputs=2)
    return site.emit("Mul", [parts[0], site.emit("Sigmoid", [parts[1]])])


def _shrink(site: Site, *, soft: bool) -> Name:
    width = float(site.get("lambd", 0.5))
    return site.emit("Shrink", [_float(site)], lambd=width, bias=width if soft else 0.0)


def _rrelu(site: Site) -> Name:
    site.refuse_training("training")
    slope = (site.get("lower", 0.125) + site.get("upper", 1 / 3)) / 2
    return site.emit("LeakyRelu", [_float(site)], alpha=float(slope))


def _atan2(y: Number, x: Number) -> Number:
    """Return angles in all quadrants; 0 for (0, 0)."""
    level = x.equals(0)
    angle = (y / x.choose(level, 1, x))("Atan")
    angle = x.choose(x < 0, angle + _sign_of(y) * math.pi, angle)
    return x.choose(level, y("Sign") * (math.pi / 2), angle)


def _log_add_exp(one: Number, two: Number, base: float = math.e) -> Number:
    scale = math.log(base)
    far = -abs(one - two)
    more = ((far if scale == 1 else far * scale)("Exp") + 1)("Log")
    return one("Max", two) + (more if scale == 1 else more / scale)


def _heaviside(site: Site) -> Name:
    x, values = site.tensor("self"), site.tensor("values")
    number = site.number(x, x.dtype)
    made = site.cast((number > 0).name, x.dtype, "bool")
    return site.emit("Where", [number.equals(0).name, values, made])


def _round(site: Site) -> Name:
    places = site.get("decimals", 0)
    x, scale = _float(site), site.const(10.0 ** abs(places), site.out.dtype)
    there, back = ("Mul", "Div") if places > 0 else ("Div", "Mul")
    return site.emit(back, [site.emit("Round", [site.emit(there, [x, scale])]), scale])


def _is_close(site: Site) -> Name:
    dtype = promoted(site, site.get("self"), site.get("other"))
    dtype = dtype if dtype in FLOATS else "float64"
    a, b = (site.number(site.tensor(key), dtype) for key in ("self", "other"))
    bound = site.get("rtol", 1e-5) * abs(b) + site.get("atol", 1e-8)
    return ((abs(a - b) <= bound) | a.equals(b)).name


def _is_finite(site: Site) -> Name:
    x = site.number("self", site.tensor("self").dtype)
    known = x.equals(x) if x.dtype not in FLOATS else ~(x("IsInf") | x("IsNaN"))
    return known.name


def _infinite(site: Site, *, positive: bool) -> Name:
    signs = {"detect_positive": int(positive), "detect_negative": int(not positive)}
    return site.emit("IsInf", [site.tensor("self")], **signs)


def _numbers(site: Site) -> Name:
    """``nan_to_num``."""
    x, info = site.number("self"), ml_dtypes.finfo(site.out.dtype)
    ends = ((math.inf, "posinf", float(info.max)), (-math.inf, "neginf", float(info.min)))
    for value, key, default in ends:
        given = site.get(key)
        x = x.choose(x.equals(value), default if given is None else given, x)
    return x.choose(x("IsNaN"), site.get("nan") or 0, x).name


def _of_numbers(one: Number, two: Number, op: str) -> Number:
    """Return ``fmax`` or ``fmin``, which ignore NaN."""
    made = one(op, two)
    if one.dtype not in FLOATS:
        return made
    made = made.choose(two("IsNaN"), one, made)
    return made.choose(one("IsNaN"), two, made)


def _shift(left: bool, site: Site) -> Name:
    """Write a shift of integers; a right shift is arithmetic, so it rounds down.

    It is a product or a quotient by powers of 2. Where its own type may lack one, as int8 lacks
    128, it is computed in int64.
    """
    dtype, given = site.out.dtype, site.get("other")
    known = site.held(site.tensor("other")) if isinstance(given, Ref) else np.array(given)
    bits = np.iinfo(dtype).bits
    if known is not None and not ((known >= 0) & (known < min(bits, 63))).all():
        raise site.refuse("shifts by a value that is not a number from 0 to the bits of its type")
    fits = known is not None and bool((known < bits - 1).all())
    wide = dtype if fits else "int64"
    x = site.number("self", wide)
    if known is None:
        factor = x.of(2)("Pow", site.number("other", wide))
    else:
        factor = site.number(1 << known.astype(np.int64), wide)
    made = x * factor if left else floor_divided(x, factor)
    return site.cast(made.name, dtype, wide)


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

_FORMULAS: dict[str, Callable[[Number], Number]] = {
    "erfc": lambda x: 1 - x("Erf"),
    "exp2": lambda x: x.of(2)("Pow", x),
    "expm1": lambda x: x("Exp") - 1,
    "frac": lambda x: x - _truncated(x),
    "log1p": lambda x: (x + 1)("Log"),
    "log_sigmoid": lambda x: -(-x)("Softplus"),
    "rsqrt": lambda x: x("Sqrt")("Reciprocal"),
    "silu": lambda x: x * x("Sigmoid"),
    "special_erfc": lambda x: 1 - x("Erf"),
    "square": lambda x: x * x,
    "trunc": _truncated,
}
_OF_TWO: dict[str, Callable[[Number, Number], Number]] = {
    "atan2.default": _atan2,
    "copysign.Scalar": lambda x, y: abs(x) * _sign_of(y),
    "copysign.Tensor": lambda x, y: abs(x) * _sign_of(y),
    "fmax.default": lambda x, y: _of_numbers(x, y, "Max"),
    "fmin.default": lambda x, y: _of_numbers(x, y, "Min"),
    "fmod.Scalar": lambda x, y: x("Mod", y, fmod=1),
    "fmod.Tensor": lambda x, y: x("Mod", y, fmod=1),
    "hypot.default": lambda x, y: (x * x + y * y)("Sqrt"),
    "logaddexp.default": _log_add_exp,
    "logaddexp2.default": lambda x, y: _log_add_exp(x, y, 2),
    "remainder.Scalar": _remainder,
    "remainder.Tensor": _remainder,
    **dict.fromkeys(
        ("xlogy.Tensor", "xlogy.Scalar_Self", "xlogy.Scalar_Other"),
        lambda x, y: x.choose(x.equals(0), 0, x * y("Log")),
    ),
}

_SIDES, _OPERANDS = ("left", "right"), ("Tensor", "Scalar")
_SHIFTED = ("Tensor", "Tensor_Scalar", "Scalar_Tensor")

RULES: dict[str, Rule] = {
    **{f"{name}.default": partial(unary, op) for name, op in _UNARY.items()},
    **{f"{name}.default": formula(one) for name, one in _FORMULAS.items()},
    **{name: formula(two, "self", "other") for name, two in _OF_TWO.items()},
    **dict.fromkeys(
        ("lerp.Scalar", "lerp.Tensor"),
        formula(lambda start, end, part: start + part * (end - start), "self", "end", "weight"),
    ),
    "threshold.default": formula(
        lambda x, limit, value: x.choose(x > limit, x, value), "self", "threshold", "value"
    ),
    **{f"{name}.{k}": partial(binary, op) for name, op in _BINARY.items() for k in _OPERANDS},
    **{f"{name}.{k}": partial(compare, op) for name, op in _COMPARE.items() for k in _OPERANDS},
    **dict.fromkeys(("clamp.default", "clamp.Tensor", "clip.default"), _clamp),
    **{f"clamp_{k}.{form}": _clamp for k in ("min", "max") for form in ("default", "Tensor")},
    **dict.fromkeys(("div.Tensor", "div.Scalar", "div.Tensor_mode", "div.Scalar_mode"), _divide),
    **dict.fromkeys(("true_divide.Tensor", "divide.Tensor", "floor_divide.default"), _divide),
    **dict.fromkeys(("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar"), _pow),
    **dict.fromkeys(("rsub.Tensor", "rsub.Scalar"), _rsub),
    **dict.fromkeys(("prelu.default", "_prelu_kernel.default"), _prelu),
    **{
        f"{name}.{form}": partial(binary, f"Bitwise{k}")
        for k in _LOGICAL
        for name in (f"bitwise_{k.lower()}", f"__{k.lower()}__")
        for form in _OPERANDS
    },
    **{f"logical_{k.lower()}.default": partial(_logical, k) for k in _LOGICAL},
    **{f"__{k[0]}shift__.{f}": partial(_shift, k == "left") for k in _SIDES for f in _OPERANDS},
    **{f"bitwise_{k}_shift.{f}": partial(_shift, k == "left") for k in _SIDES for f in _SHIFTED},
    "floor_divide.Scalar": _divide,
    "glu.default": _glu,
    "hardshrink.default": partial(_shrink, soft=False),
    "heaviside.default": _heaviside,
    "isclose.default": _is_close,
    "isfinite.default": _is_finite,
    "isneginf.default": partial(_infinite, positive=False),
    "isposinf.default": partial(_infinite, positive=True),
    "log10.default": partial(_logarithm, 10),
    "log2.default": partial(_logarithm, 2),
    "logit.default": _logit,
    "max.other": partial(binary, "Max"),
    "min.other": partial(binary, "Min"),
    "nan_to_num.default": _numbers,
    "round.decimals": _round,
    "rrelu.default": _rrelu,
    "softshrink.default": partial(_shrink, soft=True),
    "addcdiv.default": partial(_addc, "Div"),
    "addcmul.default": partial(_addc, "Mul"),
    "bitwise_not.default": _bitwise_not,
    "celu.default": _alpha("Celu", "alpha", 1.0),
    "elu.default": _elu,
    "gelu.default": _gelu,
    "hardsigmoid.default": partial(unary, "HardSigmoid", alpha=1 / 6, beta=0.5),
    "hardtanh.default": partial(_clamp, least=-1.0, most=1.0),
    "isinf.default": lambda site: site.emit("IsInf", [site.tensor("self")]),
    "isnan.default": lambda site: site.emit("IsNaN", [site.tensor("self")]),
    "leaky_relu.default": _alpha("LeakyRelu", "negative_slope", 0.01),
    "logical_not.default": _not,
    "maximum.default": partial(binary, "Max"),
    "minimum.default": partial(binary, "Min"),
    "relu6.default": partial(_clamp, least=0, most=6),
    "softplus.default": _softplus,
}
