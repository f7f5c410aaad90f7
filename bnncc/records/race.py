"""Decide whether one of two kernels is faster, or whether the difference is noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

TURNS = 10
"""Of a race, each with the tensors somewhere else in memory."""

QUANTILES = (12.71, 4.31, 3.19, 2.78, 2.58, 2.45, 2.37, 2.31, 2.27)
"""Of Student's distribution with 1 to 9 degrees of freedom, for intervals of 95 %, rounded up."""


@dataclass(frozen=True)
class Gain:
    """Time of a candidate relative to a default, in interleaved measurements."""

    ratio: float
    """Geometric mean of the turns: below 1 is faster."""
    low: float
    high: float
    """`low`, `high`: ends of its confidence interval of 95 %."""

    @classmethod
    def of(cls, default: Sequence[float], candidate: Sequence[float]) -> Gain:
        """Compare the times of the same turns, by Student's interval of their logarithms.

        Examples
        --------
        >>> Gain.of([1.0, 1.0, 1.0], [0.5, 0.5, 0.5])
        Gain(ratio=0.5, low=0.5, high=0.5)
        """
        logs = [math.log(b / a) for a, b in zip(default, candidate, strict=True)]
        half = 0.0
        if len(logs) > 1 and (spread := stdev(logs)):
            half = QUANTILES[min(len(logs) - 2, len(QUANTILES) - 1)] * spread / len(logs) ** 0.5
        middle = mean(logs)
        return cls(*(math.exp(x) for x in (middle, middle - half, middle + half)))

    @property
    def faster(self) -> bool:
        """Whether the candidate is faster by more than the noise of the race."""
        return self.high < 1

    @property
    def text(self) -> str:
        """The gain as text."""
        gained, least, most = (100 * (1 - x) for x in (self.ratio, self.high, self.low))
        if self.faster or self.slower:
            verb = "gained" if self.faster else "lost"
            return f"{verb} {abs(gained):.1f} % ({abs(least):.1f} to {abs(most):.1f})"
        return f"no difference beyond noise ({least:+.1f} to {most:+.1f} %)"

    @property
    def slower(self) -> bool:
        """Whether it is slower by more than that."""
        return self.low > 1
