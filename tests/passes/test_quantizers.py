"""Quantizers of QONNX: every rounding mode and range, against formulas by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bnncc.errors import UnsupportedOp
from bnncc.ir.evaluate import evaluate_node
from bnncc.ir.graph import Node
from bnncc.ir.quantizers import MULTI_THRESHOLD, QUANT

X = np.array([-9, -2.5, -1.5, -0.75, -0.5, -0.25, 0, 0.25, 0.5, 1.25, 1.5, 2.5, 9], np.float32)

BY_HAND = {
    "ROUND": round,
    "half_even": round,
    "CEIL": math.ceil,
    "floor": math.floor,
    "UP": lambda v: math.copysign(math.ceil(abs(v)), v),
    "DOWN": lambda v: math.copysign(math.floor(abs(v)), v),
    "HALF_UP": lambda v: math.copysign(math.floor(abs(v) + 0.5), v),
    "HALF_DOWN": lambda v: math.copysign(math.ceil(abs(v) - 0.5), v),
}


def quant(x: np.ndarray, scale: float, zero: float, bits: float, **attrs: object) -> np.ndarray:
    node = Node(QUANT, ["x", "s", "z", "b"], ["y"], attrs)
    args = [x, *(np.asarray(v, np.float32) for v in (scale, zero, bits))]
    return evaluate_node(node, args)[0]


@pytest.mark.parametrize("mode", BY_HAND)
@pytest.mark.parametrize(("signed", "narrow"), [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("bits", [2, 3])
def test_quant_clips_before_it_rounds(mode: str, signed: int, narrow: int, bits: int) -> None:
    low = -(2 ** (bits - 1)) + narrow if signed else 0
    high = 2 ** (bits - 1) - 1 if signed else 2**bits - 1 - narrow
    wanted = [0.5 * BY_HAND[mode](min(max(float(v), low), high)) for v in X]
    made = quant(X * 0.5, 0.5, 0, bits, signed=signed, narrow=narrow, rounding_mode=mode)
    assert made.dtype == np.float32
    assert made.tolist() == wanted


def test_quant_with_a_zero_point_takes_it_away_again() -> None:
    made = quant(X, 1, 3, 3, signed=0, narrow=0)
    wanted = [round(min(max(float(v) + 3, 0), 7)) - 3 for v in X]
    assert made.tolist() == wanted


def test_quant_of_one_signed_bit_is_a_sign() -> None:
    assert quant(X, 0.25, 0, 1, signed=1).tolist() == [0.25 if v >= 0 else -0.25 for v in X]


def test_quant_refuses_modes_it_does_not_know() -> None:
    with pytest.raises(UnsupportedOp, match="rounding mode is `STOCHASTIC`"):
        quant(X, 1, 0, 2, rounding_mode="stochastic")


@pytest.mark.parametrize("rows", [1, 3])
def test_multi_threshold_counts_thresholds_reached(rows: int) -> None:
    x = np.random.default_rng(0).integers(-5, 6, (2, 3, 4, 4)).astype(np.float32)
    limits = np.sort(np.random.default_rng(1).integers(-4, 5, (rows, 3)).astype(np.float32), axis=1)
    node = Node(MULTI_THRESHOLD, ["x", "t"], ["y"], {"out_scale": 0.5, "out_bias": -1.0})
    made = evaluate_node(node, [x, limits])[0]
    for at in np.ndindex(x.shape):
        reached = sum(x[at] >= limit for limit in limits[at[1] % rows])
        assert made[at] == 0.5 * reached - 1
