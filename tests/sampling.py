"""Which cases of a parametrized test `make test` runs: see the marker ``sampled``."""

from __future__ import annotations


def taken(number: int, every: int) -> bool:
    """Whether a case is in the sample: one of `every`, and the first one in any case.

    Not each n-th: that would be the same one of n targets for each kind of layer. The sum of a
    number's digits has no period (Thue and Morse), so each target meets some of the kinds.
    """
    digits = 0
    while number:
        number, digit = divmod(number, every)
        digits += digit
    return digits % every == 0
