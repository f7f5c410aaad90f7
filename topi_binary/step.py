"""One step of an epilogue, as plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One step of an epilogue, applied to the vector value ``v`` (float32, one lane per channel).

    ``v`` starts as the anchor's raw value: the float result of a float anchor, or ``float(acc)`` of
    a binary anchor, where ``acc`` is the integer accumulator of the anchor's definition (NOT the
    dot product: passes fold ``dot = K - 2 * acc`` into the first ``affine``).

    ==============  ===========================  ==================================================
    op              parameters (kernel inputs)   effect
    ==============  ===========================  ==================================================
    ``affine``      scale, bias: f32 vectors     ``v = fma(v, scale[c], bias[c])``
    ``scale``       scale: f32 vector            ``v = v * scale[c]``
    ``shift``       bias: f32 vector             ``v = v + bias[c]``
    ``add``         tensor, `layout`             ``v = v + t``; shape of the output
    ``rsub``        tensor, `layout`             ``v = t - v``
    ``mul``         tensor, `layout`             ``v = v * t``
    ``div``         tensor, `layout`             ``v = v / t``
    ``gate``        tensor f32 ``[N, C]``        ``v = v * t[n, c]`` (squeeze-and-excite)
    ``relu``                                     ``v = max(v, 0)``
    ``clip``        `lo`, `hi` (attributes)      ``v = min(max(v, lo), hi)``
    ``prelu``       slope: f32 vector            ``v = v >= 0 ? v : v * slope[c]``
    ``store``       output, `layout`             ``out = v``
    ``bits``        output(s) uint32             sign plane of ``v``; bit = ``v >= 0`` if `compare`
                                                 is ``ge``, ``v > 0`` if ``gt``; with `zero` a
                                                 second output: the plane ``v == 0``
    ``threshold``   thr: i32 vector [, gthr]     bit = ``acc <= thr[c]``; with `zero` a second
                                                 vector and output: the zero plane
                                                 ``gthr[c] < acc <= thr[c]``. Binary anchors
                                                 only; reads ``acc``, leaves ``v``
    ``levels``      see `levels`                 ``k`` = number of a level, 0 to `count`; stored in
                                                 `forms`; leaves ``v``
    ==============  ===========================  ==================================================

    Vectors are padded to whole blocks by `layout.pad_lanes`. Bits beyond the last channel are
    stored as 0. `layout` is ``NHWC`` or ``NCHW`` for 4-d tensors, ignored for 2-d ones. Tensors are
    of `dtype`, and ``v`` is float32 always: what is stored as float16 is rounded to nearest even.
    """

    op: str
    layout: str = "NHWC"
    lo: float = 0.0
    hi: float = 0.0
    compare: str = "ge"
    """For ``bits``: how with 0. For ``levels`` of values: ``place`` compares how many float32
    numbers a value and a threshold are above 0, which decides next to 0 as it should where
    processors take denormal numbers for 0."""
    zero: bool = False
    period: int = 0
    """For ``add`` in a binary convolution: the tensor (NHWC) has so many channels, whole blocks of
    lanes, and repeats: channel ``c`` adds its channel ``c % period``. For all steps with tensors, 1
    means one number for each pixel."""
    in_place: bool = False
    """For ``store``: over the tensor of the nearest ``add`` before it, which nobody reads later
    (binary convolutions only; the kernel then has no output of its own for this step)."""
    count: int = 0
    """For ``levels``: the highest level."""
    way: str = ""
    """For ``levels``: how the level is found, one of `WAYS`."""
    flip: bool = False
    """For ``levels`` by ``acc``: one more input, an int32 vector XORed to ``acc`` first."""
    forms: tuple[str, ...] = ()
    """For ``levels``: what is stored, each an output, in this order; of `FORMS`."""
    dtype: str = "float32"
    """For steps with tensors and ``store``: of the tensor; ``float16`` on GPUs."""


INPUTS_OF_STEP = {
    "affine": 2, "scale": 1, "shift": 1, "add": 1, "rsub": 1, "mul": 1, "div": 1, "gate": 1,
    "relu": 0, "clip": 0, "prelu": 1, "store": 0, "bits": 0, "threshold": 1,
    "levels": 1,
}  # fmt: skip
"""Kernel inputs each step takes, but for `step_inputs`."""


TENSORS = ("add", "rsub", "mul", "div")
"""Steps that read a tensor of the shape of the output."""

FETCHED = (*TENSORS, "gate")
"""Steps that read a tensor; the others read vectors of one number for each channel."""

FORMS = {
    "planes": "uint32", "bytes": "uint32", "pairs": "uint32", "floats": "float32",
    "value": "float32", "table": "float32",
}  # fmt: skip
"""How ``levels`` are stored, with the type of a word: bit j of the level in plane j; four or two
levels in a word; as float32 numbers; or as what they stand for: ``value`` is ``fma(k, hi, lo)``,
``table`` is element ``k`` of the step's last input, f32 ``[count + 1]``.
"""

NUMBERS = {"bytes": "uint8", "pairs": "uint16", "floats": "float32"}
"""Type of one level, in those of `FORMS` where each is a number."""

WAYS = ("acc", "acc-scale", "value", "search", "round", "whole")
"""How ``levels`` are found.

* ``acc``: ``k`` = how many of the thresholds, int32 ``[count, lanes]``, ``acc`` reaches.
* ``acc-scale``: from two f32 vectors, ``k = trunc(clip(float(acc) * scale + bias, 0, count))``.
* ``value``: ``k`` = how many of the thresholds, f32 ``[count, lanes]``, ``v`` reaches.
* ``search``: the same for thresholds common to all channels: a f32 vector of slope, offset, -inf,
  the thresholds in ascending order, inf. ``trunc(clip(v * slope + offset, 0, count))`` is the
  level or next to it.
* ``round``: ``k = rint(clip(v, first, last)) - first``, ties to even, from a f32 vector of first
  and last, whole numbers.
* ``whole``: ``v`` is the level.
"""


def plane_count(levels: int) -> int:
    """Return how many bits hold the numbers from 0 to `levels`."""
    return levels.bit_length()


def step_inputs(step: Step) -> int:
    """Return how many kernel inputs `step` takes."""
    if step.op == "levels":
        by_way = {"acc-scale": 2, "whole": 0}.get(step.way, 1)
        return by_way + step.flip + ("table" in step.forms)
    return INPUTS_OF_STEP[step.op] + (step.op == "threshold" and step.zero)


def step_outputs(step: Step) -> int:
    """Return how many kernel outputs `step` makes."""
    return len(output_kinds(step))


def output_kinds(step: Step) -> list[str]:
    """Return what each output of `step` is: ``store``, ``bits`` or one of `FORMS`."""
    if step.op == "levels":
        kinds = [[f] * (plane_count(step.count) if f == "planes" else 1) for f in step.forms]
        return [kind for some in kinds for kind in some]
    if step.op == "store":
        return ["store"]
    return ["bits"] * (1 + step.zero) if step.op in ("bits", "threshold") else []
