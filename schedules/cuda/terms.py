"""The algebra of an epilogue's steps on one value, as CUDA C++."""

from __future__ import annotations

from bnncc.schedules.cuda.text import number


class Text:
    """Numbers as expressions of CUDA C++, each rounded; see `bnncc.topi_binary.algebra`."""

    zero = "0.0f"

    def number(self, value: float) -> str:
        """Return a float, exactly."""
        return number(value)

    def count(self, value: int) -> str:
        """Return a small whole number, as a float."""
        return f"{value}.0f"

    def shared(self, value: str) -> str:
        """Return `value`, which is a variable."""
        return value

    def fma(self, value: str, scale: str, bias: str) -> str:
        """Return ``value * scale + bias``, rounded once."""
        return f"__fmaf_rn({value}, {scale}, {bias})"

    def add(self, left: str, right: str) -> str:
        """Return a sum."""
        return f"__fadd_rn({left}, {right})"

    def sub(self, left: str, right: str) -> str:
        """Return a difference."""
        return f"__fsub_rn({left}, {right})"

    def mul(self, left: str, right: str) -> str:
        """Return a product."""
        return f"__fmul_rn({left}, {right})"

    def max(self, left: str, right: str) -> str:
        """Return the larger one."""
        return f"fmaxf({left}, {right})"

    def min(self, left: str, right: str) -> str:
        """Return the smaller one."""
        return f"fminf({left}, {right})"

    def compare(self, left: str, how: str, right: str) -> str:
        """Return a condition."""
        return f"{left} {how} {right}"

    def both(self, one: str, other: str) -> str:
        """Return whether two conditions hold."""
        return f"{one} && {other}"

    def not_negative(self, value: str) -> str:
        """Return whether `value` is at least 0."""
        return f"{value} >= 0.0f"

    def select(self, condition: str, yes: str, no: str) -> str:
        """Return one of two terms."""
        return f"{condition} ? {yes} : {no}"

    def real(self, value: str) -> str:
        """Return an int as a float."""
        return f"(float){value}"

    def whole(self, value: str) -> str:
        """Return a float as an int."""
        return f"(int){value}"


TEXT = Text()
