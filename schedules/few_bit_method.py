"""How a few-bit layer is computed: the method that takes least by an estimate.

Work is counted as it is done: words and vectors filled up, and a product of bits for every pair of
planes. Rates are those of the nine layers of ``benchmarks/few_bit.py``; between them, W bits times
A bits as planes cost W * A products of bits, so that 3 x 8 bits lose to bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from bnncc.schedules import few_bit_conv2d as tiles
from bnncc.schedules.templates.few_bit_conv2d import NUMBERS
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import few_bit_data, layout
from bnncc.topi_binary.spec import FewBitConv2d

FEW_BIT = ("auto", "planes")
"""What may choose: the estimate, or nobody."""

_PLANES = {"vector": 2.7e6, "neon": 0.7e6, "neon-dot": 0.7e6}
"""Products of bits in a microsecond with vectors of 512 bits, by how bits are counted."""

_OTHER_PLANES = 0.55e6
_NUMBERS = {"bytes": 0.55e6, "pairs": 0.23e6, "floats": 0.125e6}
"""Products of numbers in a microsecond with vectors of 512 bits."""


def offered(method: str, target: TargetSpec) -> bool:
    """Return whether `target` has what makes `method` worth a look."""
    dtype = NUMBERS.get(method)
    return dtype is None or dtype in tiles.instructions(target)


def microseconds(spec: FewBitConv2d, target: TargetSpec) -> float:
    """Estimate how long one thread takes for the sums of `spec` (a symbolic batch counts as 1).

    Parameters
    ----------
    spec : FewBitConv2d
        The layer.
    target : TargetSpec
        The machine.

    Returns
    -------
    float
    """
    height, width = spec.output_hw
    pixels = height * width * spec.images
    form = spec.form
    per_word = few_bit_data.PER_WORD.get(form, layout.WORD_BITS)
    depth = few_bit_data.group_words(spec) * per_word * spec.kernel[0] * spec.kernel[1]
    products_done = pixels * layout.blocks(spec.out_channels) * layout.LANES * depth
    products_done *= few_bit_data.weight_planes(spec) * spec.data_tensors
    rate = _NUMBERS.get(spec.method, _PLANES.get(target.popcount, _OTHER_PLANES))
    return products_done / (rate * target.vector_bits / 512)


def choose(
    candidates: Sequence[FewBitConv2d], target: TargetSpec, allowed: str = "auto"
) -> tuple[FewBitConv2d, str] | None:
    """Choose how a layer is computed.

    Parameters
    ----------
    candidates : sequence of FewBitConv2d
        The ways to compute it; planes are among them.
    target : TargetSpec
        The machine.
    allowed : {"auto", "planes"}
        Whether other ways than planes may be chosen.

    Returns
    -------
    tuple or None
        The spec, and why, in words; None where the target has no kernel for it.
    """
    if target.kind == "cuda":
        return _on_gpu(candidates)
    times = sorted(
        (microseconds(spec, target), number)
        for number, spec in enumerate(candidates)
        if offered(spec.method, target) or len(candidates) == 1
    )
    planes = [t for t in times if candidates[t[1]].form == "planes"]
    best = planes[0] if allowed == "planes" and planes else times[0]
    seen = {_words(candidates[i]): f"{time:.3g}" for time, i in reversed(times)}
    mine = _words(candidates[best[1]])
    others = ", ".join(f"{k} {v}" for k, v in reversed(seen.items()) if k != mine)
    by_option = " by --few-bit planes" if allowed == "planes" and best != times[0] else ""
    why = f"as {mine}{by_option}: about {best[0]:.3g} us"
    return candidates[best[1]], f"{why} ({others})" if others else why


def _on_gpu(candidates: Sequence[FewBitConv2d]) -> tuple[FewBitConv2d, str] | None:
    """Choose the fewest pairs of planes, which tensor cores multiply; numbers only if need be."""
    fit = [spec for spec in candidates if not spec.depthwise]
    planes = [spec for spec in fit if spec.form == "planes"]
    best = min(planes or fit[:1], key=lambda spec: spec.weight_bits, default=None)
    return None if best is None else (best, f"as {_words(best)}")


def chooser(
    target: TargetSpec, allowed: str
) -> Callable[[Sequence[FewBitConv2d]], tuple[FewBitConv2d, str] | None]:
    """Return `choose` for one machine."""
    return partial(choose, target=target, allowed=allowed)


def _words(spec: FewBitConv2d) -> str:
    if spec.form == "planes":
        pairs = spec.data_bits * spec.weight_bits
        return f"{pairs} pair{'s' * (pairs > 1)} of planes"
    return {"bytes": "int8", "pairs": "int16", "floats": "float32"}[spec.method]
