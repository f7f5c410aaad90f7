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

_LN2 = (0.693359375, -2.12194440e-4)
"""ln 2 in two parts; the product of the first part and an exponent is exact."""

_EXP = (0.4999999701976776, 0.1666654646396637, 0.04166743531823158, 0.00836627185344696,
        0.0013870694674551487)  # fmt: skip
"""Coefficients of ``(exp(r) - 1 - r) / r**2``, for abs(r) up to ln(2) / 2."""

_LOG = (0.3333333134651184, -0.2500081956386566, 0.2000124156475067, -0.166234090924263,
        0.14201579988002777, -0.13159610331058502, 0.12762217223644257,
        -0.07636439055204391)  # fmt: skip
"""Coefficients of ``(log(1 + f) - f + f**2 / 2) / f**3``, for 1 + f in [sqrt(1/2), sqrt(2)]."""

_TANH_HALF = 0.5493061542510986
"""Argument for which tanh is 0.5."""

_TANH_NEAR = (-0.33333316445350647, 0.13332544267177582, -0.0538475476205349, 0.02105071395635605,
              -0.00624284939840436)  # fmt: skip
"""Coefficients of ``(tanh(x) / x - 1) / x**2`` in ``x**2``, for x up to `_TANH_HALF`."""

_ERF_NEAR = (0.12837916612625122, -0.3761262595653534, 0.11283578723669052, -0.026853347197175026,
             0.005187162198126316, -0.0007997853099368513, 7.806903886375949e-05)  # fmt: skip
"""Coefficients of ``erf(x) / x - 1`` in ``x**2``, for x up to 1."""

_ERF_FAR = (0.00035371718695387244, 1.1270400285720825, 0.6382257342338562, 0.1030372679233551,
            -0.02180524170398712, 0.0029395809397101402, -0.00018557067960500717)  # fmt: skip
"""Coefficients of ``-log(1 - erf(x))``, for x from 1 to 4."""

_VANISHED = -110.0
"""Below, ``x * exp(x)`` is less than half of the smallest float32 number."""

_INVERSE = 1.4571067811865475
"""Less half of x, it is ``1 / x`` to within 0.043, for x from 1 to 2."""

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

    def signed(self, size: Expr, x: Expr) -> Expr:
        return self.floats(self.bits(size) | (self.bits(x) & self.whole(_SIGN)))

    def minus(self, x: Expr) -> Expr:
        """Return whether the sign is set, which costs AVX2 no comparison."""
        return self.bits(x) < self.whole(0)

    def raising(self, by: int) -> Expr:
        """Return what `reduced` adds so that its factor is 2**by times as large."""
        return self.number(_TO_WHOLE + 127 + by)

    def reduced(self, x: Expr, to_whole: Expr) -> tuple[Expr, Expr]:
        """Return a power of two, and ``exp(r) - 1``.

        The argument is ``n * ln(2) + r``, with an integer n and a small r. The power is 2**n, times
        what `raising` says, and must be a normal number.
        """
        shifted = self.shared(self.multiply_add(x, self.number(1 / math.log(2)), to_whole))
        n = self.shared(shifted - to_whole)
        r = self.multiply_add(n, self.number(-_LN2[0]), x)
        r = self.shared(self.multiply_add(n, self.number(-_LN2[1]), r))
        # The low bits are the exponent; the others are shifted out.
        bits = tirx.reinterpret(self.kind("uint32"), shifted)
        power = self.floats(bits << self._all(tirx.const(23, "uint32")))
        return self.shared(power), self.multiply_add(self.polynomial(r, _EXP), r * r, r)

    def exp(self, x: Expr) -> Expr:
        x = self.shared(self.most(-105.0, self.least(89.0, x)))
        small = self.minus(x)
        # Two factors, because 2**n may be outside the range of float32.
        to_whole = tirx.Select(small, self.raising(64), self.raising(-64))
        factor, rest = self.reduced(x, self.shared(to_whole))
        rest_of_factor = tirx.Select(small, self.number(2.0**-64), self.number(2.0**64))
        return (rest + self.number(1)) * factor * rest_of_factor

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
        x = self.shared(x)
        below, factor, rest = self.logistic(x, -105.0)
        dividend = (rest + self.number(1)) * factor
        dividend = tirx.Select(self.minus(x), dividend, self.number(2.0**64))
        return dividend / below * self.number(2.0**-64)

    def swish(self, x: Expr) -> Expr:
        x, one = self.shared(x), self.number(1)
        # Results below are -0, and NaN for -inf. TVM would simplify a product with 0.
        vanished = self.floats(self.bits(x - x) | self.whole(_SIGN))
        near = self.shared(tirx.Select(x < self.number(_VANISHED), vanished, x))
        below, factor, rest = self.logistic(near, _VANISHED)
        minus, lower_by = self.minus(near), self.number(2.0**-64)
        dividend = tirx.Select(minus, self.multiply_add(near, rest, near) * factor, near)
        return dividend / below * tirx.Select(minus, lower_by, one)

    def logistic(self, x: Expr, least: float) -> tuple[Expr, Expr, Expr]:
        """Return ``1 + p`` for ``p = exp(max(-abs(x), least))``, a factor and a small number.

        The quotient of p and the sum is that of ``(1 + small) * factor * 2**-64`` and the sum as it
        is rounded. The factor is a power of two; p may be subnormal.
        """
        one, lower_by = self.number(1), self.number(2.0**-64)
        minus = self.floats(self.bits(x) | self.whole(_SIGN))
        factor, rest = self.reduced(self.shared(self.most(least, minus)), self.raising(64))
        rest = self.shared(rest)
        whole = self.shared(rest + one)
        power = self.shared(whole * factor)
        below = self.shared(self.multiply_add(power, lower_by, one))
        lost = self.multiply_add(power, lower_by, one - below) * whole
        inverse = self.multiply_add(below, self.number(0.5), self.number(-_INVERSE))
        return below, factor, self.multiply_add(lost, inverse, rest)

    def tanh(self, x: Expr) -> Expr:
        x, one = self.shared(x), self.number(1)
        size = self.shared(self.magnitude(x))
        square = self.shared(size * size)
        near = self.multiply_add(self.polynomial(square, _TANH_NEAR), square * size, size)
        factor, rest = self.reduced(
            self.shared(self.most(-20.0, size * self.number(-2))), self.raising(0)
        )
        power = self.shared((rest + one) * factor)
        far = self.multiply_add(power / (power + one), self.number(-2), one)
        return self.signed(tirx.Select(size < self.number(_TANH_HALF), near, far), x)

    def erf(self, x: Expr) -> Expr:
        x = self.shared(x)
        size = self.shared(self.least(4.0, self.magnitude(x)))
        near = self.multiply_add(size, self.polynomial(self.shared(size * size), _ERF_NEAR), size)
        factor, rest = self.reduced(
            self.shared(self.number(0) - self.polynomial(size, _ERF_FAR)), self.raising(0)
        )
        far = self.number(1) - (rest + self.number(1)) * factor
        return self.signed(tirx.Select(size < self.number(1), near, far), x)


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
        if name not in FUNCTIONS or not str(node.ty).startswith("float32"):
            return node
        names, body = written(name, node.args[0], tvm.DataType(str(node.ty)).lanes, multiply_add)
        return reduce(lambda inner, one: tirx.Let(*one, inner), reversed(names), body)

    return func.with_body(tvm_ffi.structural_map(func.body, (tvm.ir.Call, call)))
