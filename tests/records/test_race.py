"""Races: what is faster, and what was luck."""

from __future__ import annotations

import numpy as np
import pytest

from bnncc.records.race import TURNS, Gain


def times(seed: int, noise: float) -> np.ndarray:
    """Return times of turns with a noise, the same for all in a turn but for a tenth of it."""
    random = np.random.default_rng(seed)
    disturbed = 1 + noise * random.random((TURNS, 1))
    return 1e-5 * disturbed * (1 + 0.1 * noise * random.standard_normal((TURNS, 2)))


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.5])
def test_the_same_kernel_seldom_wins(noise: float) -> None:
    wins = sum(Gain.of(*times(seed, noise).T).faster for seed in range(200))
    assert wins <= 12  # one in forty is what the interval allows


def test_a_gain_above_the_noise_wins() -> None:
    default, same = times(1, 0.5).T
    gain = Gain.of(default, 0.8 * same)
    assert gain.faster
    assert not gain.slower
    assert gain.low < gain.ratio < gain.high
    assert gain.ratio == pytest.approx(0.8, abs=0.05)
    assert gain.text.startswith(f"gained {100 * (1 - gain.ratio):.1f} %")
    assert Gain.of(0.8 * same, default).slower


def test_one_turn_decides_where_nothing_varies() -> None:
    assert Gain.of([100.0], [99.0]) == Gain(0.99, 0.99, 0.99)
    assert not Gain.of([100.0], [100.0]).faster
