"""The steps of an epilogue, defined once over an abstract algebra.

A step is an expression over a small algebra. Each code generator (definitions, templates, CUDA)
supplies an algebra that writes a sum or a selection in its own form: scalar or vector, TensorIR or
text. Only the NumPy oracle (`reference.epilogue`) is independent of it, for comparison.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bnncc.topi_binary.step import Step

Term = Any

WHOLE = 1.5 * 2.0**23
"""Floats in [2^23, 2^24) are integers, so adding this to a float below 2^22 rounds it."""


@dataclass(frozen=True)
class Algebra:
    """Operations on terms. Each result is rounded to float32.

    Attributes
    ----------
    zero : Term
        The float 0.
    number, count : callable
        Convert a Python float, or a small integer, to a float constant.
    shared : callable
        Binds a term to a name, so that it is computed once.
    fma : callable
        Takes value, scale and bias; returns ``value * scale + bias``, rounded once.
    add, sub, mul, div, max, min : callable
        Take two float terms.
    swish : callable
        Takes a float; returns ``x / (1 + exp(-x))``.
    compare : callable
        Takes a term, a C comparison operator and a term; returns a condition.
    both : callable
        Takes two conditions; returns their conjunction.
    not_negative : callable
        Takes a float; returns whether it is at least 0. Of -0 and NaN, either answer will do.
    select : callable
        Takes a condition, and the terms for true and false.
    real, whole : callable
        Convert int32 to float, and float to int32 (truncating).
    place : callable
        Takes a float; returns its rank among float32 numbers as int32, 0 for 0.
    apart : callable
        Takes two positive floats; returns, as int32, how many float32 numbers the first is above
        the second.
    """

    zero: Term
    number: Callable[[float], Term]
    count: Callable[[int], Term]
    shared: Callable[[Term], Term]
    fma: Callable[[Term, Term, Term], Term]
    add: Callable[[Term, Term], Term]
    sub: Callable[[Term, Term], Term]
    mul: Callable[[Term, Term], Term]
    div: Callable[[Term, Term], Term]
    max: Callable[[Term, Term], Term]
    min: Callable[[Term, Term], Term]
    swish: Callable[[Term], Term]
    compare: Callable[[Term, str, Term], Term]
    both: Callable[[Term, Term], Term]
    not_negative: Callable[[Term], Term]
    select: Callable[[Term, Term, Term], Term]
    real: Callable[[Term], Term]
    whole: Callable[[Term], Term]
    place: Callable[[Term], Term]
    apart: Callable[[Term, Term], Term]


def _prelu(a: Algebra, step: Step, v: Term, slope: Term) -> Term:
    v = a.shared(v)
    return a.select(a.not_negative(v), v, a.mul(v, slope))


_FAR, _SHIFT = -64.0, 37.0
"""Below `_FAR`, sigmoid(x) equals exp(x) in float32, and so exp(-shift) * sigmoid(x + shift), whose
second factor is never subnormal where it matters. exp(-37) is nearly exact in float32."""


def swish_by_exp(a: Algebra, x: Term, exp: Callable[[Term], Term]) -> Term:
    """Return ``x / (1 + exp(-x))`` for targets that have a function `exp`; `x` is read often."""
    far = a.compare(x, "<", a.number(_FAR))
    factor = a.select(far, a.mul(x, a.number(math.exp(-_SHIFT))), x)
    shifted = a.select(far, a.add(x, a.number(_SHIFT)), x)
    return a.div(factor, a.add(a.number(1.0), exp(a.sub(a.zero, shifted))))


STEPS: dict[str, Callable[..., Term]] = {
    "affine": lambda a, step, v, scale, bias: a.fma(v, scale, bias),
    "scale": lambda a, step, v, scale: a.mul(v, scale),
    "shift": lambda a, step, v, bias: a.add(v, bias),
    "add": lambda a, step, v, tensor: a.add(v, tensor),
    "rsub": lambda a, step, v, tensor: a.sub(tensor, v),
    "mul": lambda a, step, v, tensor: a.mul(v, tensor),
    "div": lambda a, step, v, tensor: a.div(v, tensor),
    "gate": lambda a, step, v, tensor: a.mul(v, tensor),
    "relu": lambda a, step, v: a.max(v, a.zero),
    "clip": lambda a, step, v: a.min(a.max(v, a.number(step.lo)), a.number(step.hi)),
    "prelu": _prelu,
    "swish": lambda a, step, v: a.swish(v),
}
"""The value after each step that changes it, as a function of the algebra, the step, the value
before it, and the parameters that the step reads for this value."""


def changed(algebra: Algebra, step: Step, value: Term, params: Sequence[Term]) -> Term:
    """Return the value after a step in `STEPS`."""
    return STEPS[step.op](algebra, step, value, *params)


def conditions(algebra: Algebra, step: Step, seen: Term, limits: Sequence[Term]) -> list[Term]:
    """Return the contents of each plane of a ``bits`` or ``threshold`` step.

    Parameters
    ----------
    algebra : Algebra
        Algebra to use.
    step : Step
        A step of one of the two kinds.
    seen : Term
        The value for ``bits``, the accumulator for ``threshold``.
    limits : sequence of Term
        Inputs of ``threshold``.
    """
    if step.op == "threshold":
        made = [algebra.compare(seen, "<=", limits[0])]
        if step.zero:
            below = algebra.compare(seen, ">", limits[1])
            made.append(algebra.both(algebra.compare(seen, "<=", limits[0]), below))
        return made
    made = [algebra.compare(seen, ">=" if step.compare == "ge" else ">", algebra.zero)]
    if step.zero:
        made.append(algebra.compare(seen, "==", algebra.zero))
    return made


def compared(algebra: Algebra, step: Step, seen: Term, how: str, limit: Term) -> Term:
    """Compare the input of ``levels`` with a threshold; `how` is a C comparison operator."""
    if step.compare == "place":
        seen, limit = algebra.place(seen), algebra.place(limit)
    return algebra.compare(seen, how, limit)


def nearest(algebra: Algebra, step: Step, value: Term, scale: Term, bias: Term) -> Term:
    """Return ``trunc(clip(value * scale + bias, 0, count))``, the level for way ``acc-scale``."""
    found = algebra.fma(value, scale, bias)
    top = algebra.count(step.count)
    return algebra.whole(algebra.min(algebra.max(found, algebra.zero), top))


def rounded(algebra: Algebra, value: Term, first: Term, last: Term) -> Term:
    """Return ``rint(clip(value, first, last)) - first``, the level for way ``round``."""
    inside, far = algebra.min(algebra.max(value, first), last), algebra.number(WHOLE)
    return algebra.apart(algebra.add(inside, far), algebra.add(first, far))


def stands_for(algebra: Algebra, step: Step, level: Term) -> Term:
    """Return the number that a level stands for, in the form ``value``."""
    return algebra.fma(algebra.real(level), algebra.number(step.hi), algebra.number(step.lo))
