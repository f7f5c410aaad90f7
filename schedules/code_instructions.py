"""What multiplies levels and packed codes of weights on a target, and how fast."""

from __future__ import annotations

from bnncc.schedules import intrin_arm, intrin_x86
from bnncc.schedules.intrin import TensorPair
from bnncc.schedules.intrin_portable import DOT_ADD_CODES
from bnncc.targets.spec import TargetSpec

_RATES = {
    "": 0.05e6, "ssse3": 0.5e6, "avx2": 0.5e6, "avx512bw": 0.34e6, "avx_vnni": 0.56e6,
    "avx512_vnni": 0.56e6, "neon": 0.08e6, "asimd": 0.08e6, "asimddp": 0.17e6,
}  # fmt: skip
"""Products in a microsecond with vectors of 512 bits, by the feature that instructions need: on
Zen 4, relative to the method ``bytes``; of Arm by counts of instructions."""


def of(target: TargetSpec) -> dict[int, TensorPair]:
    """Return what adds products of codes on `target`, by their bits."""
    made = DOT_ADD_CODES
    for bits, pairs in (*intrin_x86.DOT_ADD_CODES, *intrin_arm.DOT_ADD_CODES):
        if bits == target.vector_bits and pairs[1].feature in target.features:
            made = pairs
    return made


def exist(target: TargetSpec) -> bool:
    """Return whether `target` has instructions that add several such products."""
    return bool(of(target)[1].feature)


def rate(target: TargetSpec) -> float:
    """Return how many products vectors of 512 bits make in a microsecond."""
    return _RATES[of(target)[1].feature]
