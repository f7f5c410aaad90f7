"""Selection of the method of a few-bit layer, by estimated time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from bnncc.schedules.multithreading import multiplying
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import few_bit_data
from bnncc.topi_binary.spec import FewBitConv2d

READ = 3e4
"""Bytes of weights per microsecond that a core streams: 25 to 30 GB/s from the memory of a Zen 4 or
an Emerald Rapids, more from the last-level cache."""

SLOWER, SMALLER = 1.25, 4096
"""Where memory matters more than time, weights that take this many times as long are chosen if
they are this many bytes smaller, which their longer code is not."""


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
    times = sorted((_microseconds(spec, target), k) for k, spec in enumerate(candidates))
    fastest = times[0]
    times = _smaller_first(times, candidates) if target.saves_memory else times
    planes = [t for t in times if candidates[t[1]].form == "planes"]
    best = planes[0] if allowed == "bitplanes" and planes else times[0]
    seen = {_words(candidates[i]): f"{time:.3g}" for time, i in reversed(times)}
    mine = _words(candidates[best[1]])
    others = ", ".join(f"{k} {v}" for k, v in reversed(seen.items()) if k != mine)
    wish = " to save memory" if best != fastest else ""
    if allowed == "bitplanes" and best != times[0]:
        wish = " by --few-bit bitplanes"
    why = f"as {mine}{wish}: about {best[0]:.3g} us"
    return candidates[best[1]], f"{why} ({others})" if others else why


def weight_bytes(spec: FewBitConv2d) -> int:
    """Return the size of the weights of a layer."""
    (shape, _), *_ = few_bit_data.constants(spec)
    return 4 * shape[0]


def _microseconds(spec: FewBitConv2d, target: TargetSpec) -> float:
    """Estimate the time of a layer; weights that the L2 cache does not hold are read from memory.

    Reading is added, not hidden behind products: of methods with equally large weights, the one
    with less work is faster.
    """
    size = weight_bytes(spec)
    reading = size / READ if size > target.l2_bytes else 0.0
    return multiplying(spec, target) + reading


def _smaller_first(
    times: list[tuple[float, int]], candidates: Sequence[FewBitConv2d]
) -> list[tuple[float, int]]:
    """Move the method with the smallest weights to the front, unless it is much slower."""
    best = weight_bytes(candidates[times[0][1]])
    near = [one for one in times if one[0] <= SLOWER * times[0][0]]
    least = min(near, key=lambda one: weight_bytes(candidates[one[1]]))
    if best - weight_bytes(candidates[least[1]]) < SMALLER:
        return times
    return [least, *(one for one in times if one is not least)]


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
