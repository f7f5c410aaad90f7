"""Samples of cases: how many there are, and that they miss no value of a parameter."""

from __future__ import annotations

import pytest

from tests.sampling import taken


@pytest.mark.parametrize("every", range(2, 8))
def test_one_of_n_is_taken(every: int) -> None:
    assert taken(0, every)
    assert sum(taken(number, every) for number in range(every**4)) == every**3


@pytest.mark.parametrize("every", range(2, 5))
@pytest.mark.parametrize("values", range(2, 10))
def test_each_value_of_the_inner_parameter_is_met(values: int, every: int) -> None:
    numbers = range(values * every**3)
    assert {number % values for number in numbers if taken(number, every)} == set(range(values))
