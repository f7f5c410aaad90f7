"""Instructions of a target for products of levels with integer weights, and their rates."""

from __future__ import annotations

from bnncc.schedules import intrin_arm, intrin_wasm, intrin_x86
from bnncc.schedules.intrin import TensorPair
from bnncc.schedules.intrin_levels import DOT_ADD_CODES
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary.spec import FewBitConv2d

_PLANES = {
    "vector": 2.7e6, "lookup": 0.55e6, "bytes": 0.55e6, "neon": 1.05e6, "neon-dot": 1.2e6
}  # fmt: skip
"""Products per microsecond with 512-bit vectors of a pair of bit planes, by `TargetSpec.popcount`;
W-bit weights and A-bit data have W * A pairs.

Rates of x86 are those of the nine layers of ``benchmarks/few_bit.py`` on Zen 4 and Zen 5, of Arm
from instruction counts, relative to float32. Without an instruction, LLVM's code for any machine
multiplies numbers one after the other."""

_FLOATS = 0.125e6

_NUMBERS = {
    "avx512_vnni": 0.55e6, "avx_vnni": 0.55e6, "ssse3": 0.28e6, "avx2": 0.28e6, "avx512bw": 0.28e6,
    "asimddp": 0.2e6, "asimd": 0.126e6, "neon": 0.126e6, "": 0.07e6,
}  # fmt: skip
"""The same for levels and weights in bytes, by required feature. With plain NEON, floats take as
many instructions, and four times the memory."""

_SEVEN_BITS = {"asimddp": 0.48e6}
"""The same for levels of up to 7 bits, where that differs."""

_PAIRS = {False: 0.05e6, True: 0.23e6}
"""The same for int16: without, and with an instruction."""

_CODES = {
    "": 0.05e6, "ssse3": 0.5e6, "avx2": 0.5e6, "avx512bw": 0.34e6, "avx_vnni": 0.56e6,
    "avx512_vnni": 0.56e6, "neon": 0.13e6, "asimd": 0.1e6, "asimddp": 0.3e6,
}  # fmt: skip
"""The same for packed codes."""

_INSTRUCTIONS = {"planes": 0.55, "bytes": 3.0, "packed": 3.3, "pairs": 4.0, "floats": 5.5}
_DSP = {"planes": 0.45, "bytes": 2.1, "packed": 2.4, "floats": 2.8}
_SOFT_FLOATS = 120.0
"""Instructions per product on processors without vectors: of any kind, of a Cortex-M with the DSP
extension, and of floats without a unit for them (``benchmarks/level_instructions.py``)."""


def dot_add(spec: FewBitConv2d, target: TargetSpec) -> dict[str, TensorPair]:
    """Return, by data type, the instructions that add several products of a layer at once."""
    found: dict[str, TensorPair] = {}
    short = spec.data_bits + spec.weight_bits <= intrin_x86.SHORT_BITS
    for bits, pair in (*intrin_x86.DOT_ADD, *intrin_arm.DOT_ADD, *intrin_wasm.DOT_ADD):
        data, *_ = pair.operands
        fits = data.bounds is None or data.bounds[1] >= 2**spec.data_bits - 1
        fits |= short and pair in intrin_x86.SHORT_BYTES
        if fits and bits == target.vector_bits and pair.feature in target.features:
            found[data.dtype] = pair
    return found


def codes(target: TargetSpec) -> dict[int, TensorPair]:
    """Return, by bits per code, the pairs for products of packed codes."""
    made = DOT_ADD_CODES
    for bits, pairs in (*intrin_x86.DOT_ADD_CODES, *intrin_arm.DOT_ADD_CODES):
        if bits == target.vector_bits and pairs[1].feature in target.features:
            made = pairs
    return made


def short(target: TargetSpec) -> tuple[TensorPair, TensorPair] | None:
    """Return the pairs for sums that begin in 16 bits, on targets without instructions for 32."""
    pairs = intrin_x86.SHORT_ADD.get(target.vector_bits)
    if codes(target)[1].feature or pairs is None or pairs[0].feature not in target.features:
        return None
    return pairs


def rate(spec: FewBitConv2d, target: TargetSpec) -> float:
    """Return the products per microsecond with 512-bit vectors; for bit planes, those of a pair."""
    method = "planes" if spec.form == "planes" else spec.method
    if target.scalar:
        taken = _INSTRUCTIONS | (_DSP if "dsp" in target.features else {})
        if not target.float_unit:
            taken |= {"floats": _SOFT_FLOATS}
        return 16e3 / taken[method]
    if method == "bytes":
        pair = dot_add(spec, target).get("uint8")
        feature = pair.feature if pair is not None else ""
        few = _SEVEN_BITS if spec.data_bits < 8 else {}
        return few.get(feature, _NUMBERS[feature])
    if method == "pairs":
        return _PAIRS["int16" in dot_add(spec, target)]
    if method == "packed":
        return _CODES[_feature_of_codes(target)]
    return _FLOATS if method == "floats" else _PLANES[target.popcount]


def _feature_of_codes(target: TargetSpec) -> str:
    return (short(target) or [codes(target)[1]])[0].feature
