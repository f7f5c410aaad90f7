"""What the steps of an epilogue compute, once for all who write code: definitions, kernels, CUDA.

A step is an expression over a small algebra. Who writes code gives the algebra, which says how a
sum or a choice is written: for one number or for a vector, as TensorIR or as text. Only the NumPy
oracle (`reference.epilogue`) says it again, so that there is something to compare with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from bnncc.topi_binary.step import Step

Term = Any


class Algebra(Protocol):
    """How terms are written. Results are rounded to float32 after each operation."""

    @property
    def zero(self) -> Term:
        """The float 0."""

    def number(self, value: float) -> Term:
        """Return a float."""

    def count(self, value: int) -> Term:
        """Return a small whole number, as a float."""

    def shared(self, value: Term) -> Term:
        """Return `value` under a name, to be used twice."""

    def fma(self, value: Term, scale: Term, bias: Term) -> Term:
        """Return ``value * scale + bias``, rounded once."""

    def add(self, left: Term, right: Term) -> Term:
        """Return a sum."""

    def sub(self, left: Term, right: Term) -> Term:
        """Return a difference."""

    def mul(self, left: Term, right: Term) -> Term:
        """Return a product."""

    def max(self, left: Term, right: Term) -> Term:
        """Return the larger one."""

    def min(self, left: Term, right: Term) -> Term:
        """Return the smaller one."""

    def compare(self, left: Term, how: str, right: Term) -> Term:
        """Return a condition; `how` is a comparison of C."""

    def both(self, one: Term, other: Term) -> Term:
        """Return whether two conditions hold."""

    def not_negative(self, value: Term) -> Term:
        """Return whether `value` is at least 0."""

    def select(self, condition: Term, yes: Term, no: Term) -> Term:
        """Return one of two terms."""

    def real(self, value: Term) -> Term:
        """Return an int32 as a float."""

    def whole(self, value: Term) -> Term:
        """Return a float as an int32, rounded towards 0."""


def _prelu(a: Algebra, step: Step, v: Term, slope: Term) -> Term:
    v = a.shared(v)
    return a.select(a.not_negative(v), v, a.mul(v, slope))


STEPS: dict[str, Callable[..., Term]] = {
    "affine": lambda a, step, v, scale, bias: a.fma(v, scale, bias),
    "scale": lambda a, step, v, scale: a.mul(v, scale),
    "shift": lambda a, step, v, bias: a.add(v, bias),
    "add": lambda a, step, v, tensor: a.add(v, tensor),
    "rsub": lambda a, step, v, tensor: a.sub(tensor, v),
    "mul": lambda a, step, v, tensor: a.mul(v, tensor),
    "gate": lambda a, step, v, tensor: a.mul(v, tensor),
    "relu": lambda a, step, v: a.max(v, a.zero),
    "clip": lambda a, step, v: a.min(a.max(v, a.number(step.lo)), a.number(step.hi)),
    "prelu": _prelu,
}
"""The value after each step that changes it. Takes the algebra, the step, the value before it, and
what the step reads for this value."""


def changed(algebra: Algebra, step: Step, value: Term, params: Sequence[Term]) -> Term:
    """Return the value after a step of `STEPS`."""
    return STEPS[step.op](algebra, step, value, *params)


def conditions(algebra: Algebra, step: Step, seen: Term, limits: Sequence[Term]) -> list[Term]:
    """Return what each plane of ``bits`` or ``threshold`` holds.

    Parameters
    ----------
    algebra : Algebra
        How it is written.
    step : Step
        Of one of the two kinds.
    seen : Term
        The value for ``bits``, the accumulator for ``threshold``.
    limits : sequence of Term
        Inputs of ``threshold``.

    Returns
    -------
    list of Term
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


def nearest(algebra: Algebra, step: Step, value: Term, scale: Term, bias: Term) -> Term:
    """Return ``trunc(clip(value * scale + bias, 0, count))``, the level by ``acc-scale``."""
    found = algebra.fma(value, scale, bias)
    top = algebra.count(step.count)
    return algebra.whole(algebra.min(algebra.max(found, algebra.zero), top))


def stands_for(algebra: Algebra, step: Step, level: Term) -> Term:
    """Return what a level stands for, in the form ``value``."""
    return algebra.fma(algebra.real(level), algebra.number(step.hi), algebra.number(step.lo))
