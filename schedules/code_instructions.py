"""Instructions of a target for products of levels with packed weight codes, and their rates."""

from __future__ import annotations

from bnncc.schedules import intrin_arm, intrin_x86
from bnncc.schedules.intrin import TensorPair
from bnncc.schedules.intrin_portable import DOT_ADD_CODES
from bnncc.targets.spec import TargetSpec

_RATES = {
    "": 0.05e6, "ssse3": 0.5e6, "avx2": 0.5e6, "avx512bw": 0.34e6, "avx_vnni": 0.56e6,
    "avx512_vnni": 0.56e6, "neon": 0.08e6, "asimd": 0.08e6, "asimddp": 0.17e6,
}  # fmt: skip
"""Products per microsecond with 512-bit vectors, by required feature: on Zen 4, relative to the
method ``bytes``; for Arm, from instruction counts."""


def of(target: TargetSpec) -> dict[int, TensorPair]:
    """Return, by bits per code, the pairs for products of codes on `target`."""
    made = DOT_ADD_CODES
    for bits, pairs in (*intrin_x86.DOT_ADD_CODES, *intrin_arm.DOT_ADD_CODES):
        if bits == target.vector_bits and pairs[1].feature in target.features:
            made = pairs
    return made


def short(target: TargetSpec) -> tuple[TensorPair, TensorPair] | None:
    """Return the pairs for sums that begin in 16 bits, on targets without instructions for 32."""
    pairs = intrin_x86.SHORT_ADD.get(target.vector_bits)
    if of(target)[1].feature or pairs is None or pairs[0].feature not in target.features:
        return None
    return pairs


def _feature(target: TargetSpec) -> str:
    return (short(target) or [of(target)[1]])[0].feature


def exist(target: TargetSpec) -> bool:
    """Return whether `target` has instructions that add several such products."""
    return bool(_feature(target))


def rate(target: TargetSpec) -> float:
    """Return the products per microsecond with 512-bit vectors."""
    return _RATES[_feature(target)]
