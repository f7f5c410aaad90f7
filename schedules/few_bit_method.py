"""Selection of the method of a few-bit layer, by estimated time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from bnncc.schedules import code_instructions
from bnncc.schedules import few_bit_conv2d as tiles
from bnncc.schedules.multithreading import multiplying
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary.definitions.few_bit_conv2d import NUMBERS
from bnncc.topi_binary.spec import FewBitConv2d


def offered(method: str, target: TargetSpec) -> bool:
    """Return whether `target` has the instructions that make `method` worthwhile."""
    if method == "packed":
        return code_instructions.exist(target)
    dtype = NUMBERS.get(method)
    return dtype is None or dtype in tiles.instructions(target)


def choose(
    candidates: Sequence[FewBitConv2d], target: TargetSpec, allowed: str = "auto"
) -> tuple[FewBitConv2d, str] | None:
    """Select the method of a layer.

    Parameters
    ----------
    candidates : sequence of FewBitConv2d
        Specs of all possible methods, including bit planes.
    allowed : {"auto", "bitplanes"}
        Whether methods other than bit planes may be selected.

    Returns
    -------
    tuple or None
        The spec, and a reason for the report; None if the target has no kernel for it.
    """
    if target.kind == "cuda":
        return _on_gpu(candidates)
    times = sorted(
        (multiplying(spec, target), number)
        for number, spec in enumerate(candidates)
        if offered(spec.method, target) or len(candidates) == 1
    )
    planes = [t for t in times if candidates[t[1]].form == "planes"]
    best = planes[0] if allowed == "bitplanes" and planes else times[0]
    seen = {_words(candidates[i]): f"{time:.3g}" for time, i in reversed(times)}
    mine = _words(candidates[best[1]])
    others = ", ".join(f"{k} {v}" for k, v in reversed(seen.items()) if k != mine)
    by_option = " by --few-bit bitplanes" if allowed == "bitplanes" and best != times[0] else ""
    why = f"as {mine}{by_option}: about {best[0]:.3g} us"
    return candidates[best[1]], f"{why} ({others})" if others else why


def _on_gpu(candidates: Sequence[FewBitConv2d]) -> tuple[FewBitConv2d, str] | None:
    """Select the fewest pairs of planes, for tensor cores; other methods only if necessary."""
    fit = [spec for spec in candidates if not spec.depthwise]
    planes = [spec for spec in fit if spec.form == "planes"]
    best = min(planes or fit[:1], key=lambda spec: spec.weight_bits, default=None)
    return None if best is None else (best, f"as {_words(best)}")


def chooser(
    target: TargetSpec, allowed: str
) -> Callable[[Sequence[FewBitConv2d]], tuple[FewBitConv2d, str] | None]:
    """Return `choose` for a target."""
    return partial(choose, target=target, allowed=allowed)


def _words(spec: FewBitConv2d) -> str:
    if spec.form == "planes":
        pairs = spec.data_bits * spec.weight_bits
        return f"{pairs} pair{'s' * (pairs > 1)} of planes"
    if spec.method == "packed":
        return f"int8 from {spec.weight_bits} bit{'s' * (spec.weight_bits > 1)}"
    return {"bytes": "int8", "pairs": "int16", "floats": "float32"}[spec.method]
