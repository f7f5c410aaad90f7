"""Functions of float32, such as exp and tanh, as polynomials, not calls to the C library.

LLVM and C compilers would call the library for one number at a time. Here a function is additions
and multiplications on vectors of any length. The error is below 2 ulp everywhere. Subnormal
results, infinities, NaN and the sign of zero agree with the C library, with and without fused
multiply-add. sigmoid(0) is exactly 0.5, and tanh and erf have the sign of their argument, so a sign
computed from the result is that of the exact function.

Coefficients are minimax, weighted by the relative error of the result, and rounded to float32 one
by one; the remaining ones are refitted after each rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from bnncc.schedules.intrin_portable import multiply_add

Expr = Any

FUNCTIONS = ("exp", "log", "log1p", "sigmoid", "swish", "tanh", "erf")
"""Names of TVM's operators; `benchmarks/float_functions.py` measures their errors."""

_OF_LANES = ("log1p", "erf")
"""Those that TVM applies to one lane after another, unless told that they take vectors."""

for _name in _OF_LANES:
    tvm.ir.register_op_attr(f"tirx.{_name}", "TVectorizable", True)

_LN2 = (0.693359375, -2.12194440e-4)
"""ln 2 in two parts; the product of the first part and an exponent is exact."""

_EXP = (0.49999985098838806, 0.16666525602340698, 0.04167012497782707, 0.008368261158466339,
        0.001372785773128271)  # fmt: skip
"""Coefficients of ``(exp(r) - 1 - r) / r**2``, for abs(r) up to ln(2) / 2, weighted so that the
error is small relative to ``exp(r) - 1``, too."""

_LOG = (0.3333333134651184, -0.2500081956386566, 0.2000124156475067, -0.166234090924263,
        0.14201579988002777, -0.13159610331058502, 0.12762217223644257,
        -0.07636439055204391)  # fmt: skip
"""Coefficients of ``(log(1 + f) - f + f**2 / 2) / f**3``, for 1 + f in [sqrt(1/2), sqrt(2)]."""

_TANH = (-0.33333322405815125, 0.1333114206790924, -0.052715279161930084)
"""Coefficients of ``(tanh(r) / r - 1) / r**2`` in ``r**2``, for abs(r) up to ln(2) / 4."""

_ERF = (0.12837916612625122, -0.6366196274757385, 0.10277402400970459, 0.019135333597660065,
        -0.00019712460925802588, -0.0017061051912605762, -0.0006549801910296082,
        -0.00012396926467772573, -9.970613064069767e-06)  # fmt: skip
"""Coefficients of ``log(1 + erf(x)) / x - 1``, for x from -4 to 0. The result is up to 0.2 ulp too
small near -0.22, where rounding errors are largest and of the other sign."""

_VANISHED = 110.0
"""For larger x, ``x * exp(-x)`` is less than half of the smallest float32 number."""

_SQRT_HALF, _SIGN = 0x3F3504F3, -(2**31)
"""Bits of sqrt(1/2) and of -0."""
_TO_WHOLE = 1.5 * 2.0**23
"""Added to a number below 2**22, it leaves the nearest integer in the low bits."""


class _Writer:
    """Writes expressions of one type; those used twice are bound to names."""

    def __init__(self, lanes: int, multiply_add: Callable[..., Expr]) -> None:
        self.lanes, self.multiply_add = lanes, multiply_add
        self.names: list[tuple[tirx.Var, Expr]] = []

    def kind(self, base: str) -> str:
        return base if self.lanes == 1 else f"{base}x{self.lanes}"

    def number(self, value: float) -> Expr:
        return self._all(tirx.const(value, "float32"))

    def whole(self, value: int) -> Expr:
        return self._all(tirx.const(value, "int32"))

    def _all(self, value: Expr) -> Expr:
        return value if self.lanes == 1 else tirx.Broadcast(value, self.lanes)

    def shared(self, value: Expr) -> Expr:
        var = tirx.Var(f"t{len(self.names)}", value.ty)
        self.names.append((var, value))
        return var

    def bits(self, value: Expr) -> Expr:
        return tirx.reinterpret(self.kind("int32"), value)

    def floats(self, bits: Expr) -> Expr:
        return tirx.reinterpret(self.kind("float32"), bits)

    def power(self, exponent: Expr) -> Expr:
        """Return 2 to the power of an integer from -126 to 127."""
        return self.floats((exponent + self.whole(127)) << self.whole(23))

    def least(self, limit: float, value: Expr) -> Expr:
        """Return the minimum; NaN is preserved."""
        value = self.shared(value)
        return tirx.Select(self.number(limit) < value, self.number(limit), value)

    def most(self, limit: float, value: Expr) -> Expr:
        value = self.shared(value)
        return tirx.Select(self.number(limit) > value, self.number(limit), value)

    def polynomial(self, x: Expr, factors: Sequence[float]) -> Expr:
        total = self.number(factors[-1])
        for factor in reversed(factors[:-1]):
            total = self.multiply_add(total, x, self.number(factor))
        return total

    def magnitude(self, x: Expr) -> Expr:
        return self.floats(self.bits(x) & self.whole(~_SIGN))

    def negative(self, x: Expr) -> Expr:
        """Return minus the magnitude."""
        return self.floats(self.bits(x) | self.whole(_SIGN))

    def signed(self, size: Expr, x: Expr) -> Expr:
        return self.floats(self.bits(size) | (self.bits(x) & self.whole(_SIGN)))

    def minus(self, x: Expr) -> Expr:
        """Return whether the sign is set, which costs AVX2 no comparison."""
        return self.bits(x) < self.whole(0)

    def raising(self, by: int) -> Expr:
        """Return what `reduced` adds so that its factor is 2**by times as large."""
        return self.number(_TO_WHOLE + 127 + by)

    def divided(self, x: Expr, to_whole: Expr, period: Sequence[float] = _LN2) -> tuple[Expr, Expr]:
        """Return a power of two, and r: the argument is ``n * period + r``, with an integer n.

        The power is 2**n, times what `raising` says, and must be a normal number or infinity.

        Parameters
        ----------
        period : sequence of float, default _LN2
            Its parts. One is enough where the result hardly depends on r if n is large.
        """
        shifted = self.shared(self.multiply_add(x, self.number(1 / sum(period)), to_whole))
        n = self.shared(shifted - to_whole)
        for part in period:
            x = self.multiply_add(n, self.number(-part), x)
        # The low bits are the exponent; the others are shifted out.
        bits = tirx.reinterpret(self.kind("uint32"), shifted)
        power = self.floats(bits << self._all(tirx.const(23, "uint32")))
        return self.shared(power), self.shared(x)

    def reduced(self, x: Expr, to_whole: Expr, period: Sequence[float] = _LN2) -> tuple[Expr, Expr]:
        """Return a power of two and ``exp(r) - 1`` for what `divided` returns."""
        power, r = self.divided(x, to_whole, period)
        # Not one after the other: processors wait for results more than for units.
        square, (c0, c1, c2, c3, c4) = self.shared(r * r), map(self.number, _EXP)
        high = self.multiply_add(square, c4, self.multiply_add(r, c3, c2))
        terms = self.multiply_add(high, square, self.multiply_add(r, c1, c0))
        return power, self.shared(self.multiply_add(terms, square, r))

    def exp(self, x: Expr) -> Expr:
        x = self.shared(self.most(-105.0, self.least(89.0, x)))
        small = self.minus(x)
        # Two factors, because 2**n may be outside the range of float32.
        to_whole = tirx.Select(small, self.raising(64), self.raising(-64))
        factor, rest = self.reduced(x, self.shared(to_whole))
        rest_of_factor = tirx.Select(small, self.number(2.0**-64), self.number(2.0**64))
        return self.multiply_add(rest, factor, factor) * rest_of_factor

    def log(self, x: Expr) -> Expr:
        x, tiny = self.shared(x), self.number(2.0**-126)
        scaled = tirx.Select(x < tiny, x * self.number(2.0**23), x)
        exponent, f = self.parts(self.shared(scaled))
        return self.logarithm(x, exponent - tirx.Select(x < tiny, self.whole(23), self.whole(0)), f)

    def log1p(self, x: Expr) -> Expr:
        x, one = self.shared(x), self.number(1)
        total = self.shared(x + one)
        exponent, f = self.parts(total)
        scale = self.power(self.whole(0) - tirx.min(exponent, self.whole(126)))
        found = self.logarithm(total, exponent, self.multiply_add(x - (total - one), scale, f))
        return tirx.Select(x == self.number(0), x, found)

    def parts(self, x: Expr) -> tuple[Expr, Expr]:
        """Return integer n and f between sqrt(1/2) - 1 and sqrt(2) - 1: ``x = 2**n * (1 + f)``."""
        bits = self.shared(tirx.max(self.bits(x), self.whole(0)))
        exponent = self.shared((bits - self.whole(_SQRT_HALF)) >> self.whole(23))
        return exponent, self.floats(bits - (exponent << self.whole(23))) - self.number(1)

    def logarithm(self, x: Expr, exponent: Expr, f: Expr) -> Expr:
        """Return ``exponent * log(2) + log(1 + f)``; `x` selects the special cases."""
        count = self.shared(tirx.Cast(self.kind("float32"), exponent))
        f = self.shared(f)
        square = self.shared(f * f)
        rest = self.multiply_add(count, self.number(_LN2[1]), self.polynomial(f, _LOG) * f * square)
        rest = self.multiply_add(square, self.number(-0.5), rest)
        found = self.multiply_add(count, self.number(_LN2[0]), f + rest)
        zero, nan, infinity = (self.number(float(name)) for name in ("0", "nan", "inf"))
        found = tirx.Select(x > zero, found, tirx.Select(x < zero, nan, self.number(0) - infinity))
        return tirx.Select(x < infinity, found, x)

    def sigmoid(self, x: Expr) -> Expr:
        x, one, lowered = self.shared(x), self.number(1), self.number(2.0**-64)
        size = self.shared(self.least(105.0, self.magnitude(x)))
        power, rest = self.reduced(size, self.raising(-64))
        above = self.one_more(power, rest, lowered)
        low = self.shared(lowered / above)
        return tirx.Select(self.minus(x), low, one - low)

    def swish(self, x: Expr) -> Expr:
        x = self.shared(x)
        minus, one = self.minus(x), self.number(1)
        # For negative x, all is divided by 2**64, because exp(-x) may be outside of float32.
        lowered = self.shared(tirx.Select(minus, self.number(2.0**-64), one))
        to_whole = self.shared(tirx.Select(minus, self.raising(-64), self.raising(0)))
        opposite = self.floats(self.bits(x) ^ self.whole(_SIGN))
        opposite = self.shared(self.most(-40.0, self.least(_VANISHED + 1, opposite)))
        power, rest = self.reduced(opposite, to_whole)
        # By 0, other negative numbers become -0, and -inf becomes NaN.
        vanished = self.number(_VANISHED) < opposite
        last = tirx.Select(vanished, self.number(0), lowered)
        return x / self.one_more(power, rest, lowered) * last

    def one_more(self, power: Expr, rest: Expr, one: Expr) -> Expr:
        """Return ``power * (1 + rest) + one``, hardly ever rounded twice.

        What the sum of the two powers of two loses, where one is 2**24 of the other, is added.
        """
        total = self.shared(power + one)
        lost = (power - total) + one
        return self.multiply_add(power, rest, lost) + total

    def tanh(self, x: Expr) -> Expr:
        x, one = self.shared(x), self.number(1)
        size = self.shared(self.most(-10.0, self.negative(x)))
        power, r = self.divided(size, self.raising(0), (math.log(2) / 2,))
        square = self.shared(r * r)
        t = self.shared(self.multiply_add(self.polynomial(square, _TANH), square * r, r))
        # tanh(a + r) = (tanh(a) + t) / (1 + tanh(a) * t), for tanh(a) = less / more. The numerator
        # is the difference from a number near the result, so that its rounding counts less.
        less, more = self.shared(power - one), self.shared(power + one)
        near = self.shared(less * less)
        factor, rest = self.multiply_add(near, less, more), self.multiply_add(near, more, less)
        off = self.multiply_add(factor, t, rest) / self.multiply_add(less, t, more)
        return self.signed(near - off, x)

    def erf(self, x: Expr) -> Expr:
        x, one = self.shared(x), self.number(1)
        size = self.shared(self.most(-4.0, self.negative(x)))
        square = self.shared(size * size)
        even, odd = self.polynomial(square, _ERF[2::2]), self.polynomial(square, _ERF[1::2])
        terms = self.multiply_add(size, even, odd)
        terms = self.multiply_add(terms, size, self.number(_ERF[0]))
        logarithm = self.shared(self.multiply_add(size, terms, size))
        # 2**256 in an exponent of eight bits is its sign: the power is negative.
        power, rest = self.reduced(logarithm, self.raising(256), (math.log(2),))
        return self.signed(self.multiply_add(power, rest, power + one), x)


def written(
    name: str, x: Expr, lanes: int, multiply_add: Callable[..., Expr]
) -> tuple[list[tuple[tirx.Var, Expr]], Expr]:
    """Write a function as an expression.

    Parameters
    ----------
    name : str
        A name in `FUNCTIONS`.
    x : Expr
        Argument, float32.
    lanes : int
        Number of lanes of the argument.
    multiply_add : callable
        Takes a, b and c; returns ``a * b + c``, rounded once or twice.

    Returns
    -------
    names : list of (tirx.Var, Expr)
        Intermediate results; each may use those before it.
    body : Expr
        The result.
    """
    writer = _Writer(lanes, multiply_add)
    write: Callable[[Expr], Expr] = getattr(writer, name)
    body = write(x)
    return writer.names, body


def expanded(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Replace calls of `FUNCTIONS` on float32 by polynomials.

    Parameters
    ----------
    func : tirx.PrimFunc
        Lowered: loops are vectorized, and no later pass simplifies floating-point expressions.
    """

    def call(node: Any) -> Any:
        name = str(getattr(node.op, "name", "")).removeprefix("tirx.")
        if name not in FUNCTIONS:
            return node
        kind = tvm.DataType(str(node.ty))
        if str(kind).startswith("float32"):
            names, body = written(name, node.args[0], kind.lanes, multiply_add)
            return reduce(lambda inner, one: tirx.Let(*one, inner), reversed(names), body)
        if name in _OF_LANES and kind.lanes > 1:
            return _one_by_one(node, kind)
        return node

    return func.with_body(tvm_ffi.structural_map(func.body, (tvm.ir.Call, call)))


def _one_by_one(call: Any, kind: tvm.DataType) -> Expr:
    """Apply a function of the C library to each lane."""
    x, each = tirx.Var("lanes", call.args[0].ty), range(kind.lanes)
    base = str(kind).partition("x")[0]
    found = [tirx.call_intrin(base, call.op.name, tirx.Shuffle([x], [i])) for i in each]
    return tirx.Let(x, call.args[0], tirx.Shuffle(found, [*each]))
