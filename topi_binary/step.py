"""Steps of an epilogue, as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


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
    ``swish``                                    ``v = v / (1 + exp(-v))``
    ``store``       output, `layout`             ``out = v``
    ``bits``        output(s) uint32             sign plane of ``v``; bit = ``v >= 0`` if `compare`
                                                 is ``ge``, ``v > 0`` if ``gt``; with `zero` a
                                                 second output: the plane ``v == 0``
    ``threshold``   thr: i32 vector [, gthr]     bit = ``acc <= thr[c]``; with `zero` a second
                                                 vector and output: the zero plane
                                                 ``gthr[c] < acc <= thr[c]``. Binary anchors
                                                 only; reads ``acc``, leaves ``v``
    ``levels``      see `WAYS`                   ``k`` = number of a level, 0 to `count`; stored in
                                                 `forms`; leaves ``v``
    ==============  ===========================  ==================================================

    Vectors are padded to whole blocks by `layout.pad_lanes`. Bits beyond the last channel are
    stored as 0. `layout` is ``NHWC`` or ``NCHW`` for 4-d tensors and ignored for 2-d ones. Tensors
    have type `dtype`, but ``v`` is always float32; values are rounded to nearest even when stored
    as float16.
    """

    op: str
    layout: str = "NHWC"
    lo: float = 0.0
    hi: float = 0.0
    compare: str = "ge"
    """For ``bits``: the comparison with 0. For ``levels`` of values: ``place`` compares ranks among
    the float32 numbers, which is exact next to 0 even on processors that flush subnormal numbers to
    0."""
    zero: bool = False
    period: int = 0
    """For ``add`` in a binary convolution: the tensor (NHWC) has `period` channels, whole blocks of
    lanes, and channel ``c`` adds its channel ``c % period``. For all steps with tensors, 1 means
    one number per pixel."""
    in_place: bool = False
    """For ``store``: overwrite the tensor of the nearest preceding ``add``, which has no later
    reader (binary convolutions only; the kernel then has no separate output for this step)."""
    count: int = 0
    """For ``levels``: the highest level."""
    way: str = ""
    """For ``levels``: the way in which the level is found, one of `WAYS`."""
    flip: bool = False
    """For ``levels`` by ``acc``: an additional int32 vector is XORed with ``acc`` first."""
    forms: tuple[str, ...] = ()
    """For ``levels``: the forms that are stored, one output each, in this order; see `FORMS`."""
    dtype: str = "float32"
    """For steps with tensors and ``store``: type of the tensor; ``float16`` on GPUs only."""


INPUTS_OF_STEP = {
    "affine": 2, "scale": 1, "shift": 1, "add": 1, "rsub": 1, "mul": 1, "div": 1, "gate": 1,
    "relu": 0, "clip": 0, "prelu": 1, "swish": 0, "store": 0, "bits": 0, "threshold": 1,
    "levels": 1,
}  # fmt: skip
"""Number of kernel inputs of each step, with exceptions in `step_inputs`."""


TENSORS = ("add", "rsub", "mul", "div")
"""Steps that read a tensor with the shape of the output."""

FETCHED = (*TENSORS, "gate")
"""Steps that read a tensor; the others read vectors with one number per channel."""

FORMS = {
    "planes": "uint32", "bytes": "uint32", "pairs": "uint32", "floats": "float32",
    "value": "float32", "table": "float32",
}  # fmt: skip
"""Forms in which ``levels`` are stored, with the type of a word: bit j of the level in plane j;
four or two levels per word; float32 numbers; or the values of levels: ``value`` is ``fma(k, hi,
lo)``, ``table`` is element ``k`` of the step's last input, f32 ``[count + 1]``.
"""

NUMBERS = {"bytes": "uint8", "pairs": "uint16", "floats": "float32"}
"""Type of a level, for those of `FORMS` in which each level is a number."""

WAYS = ("acc", "acc-scale", "value", "search", "round", "whole")
"""Ways in which ``levels`` are found.

* ``acc``: ``k`` is the number of thresholds, int32 ``[count, lanes]``, that ``acc`` reaches.
* ``acc-scale``: with two f32 vectors, ``k = trunc(clip(float(acc) * scale + bias, 0, count))``.
* ``value``: ``k`` is the number of thresholds, f32 ``[count, lanes]``, that ``v`` reaches.
* ``search``: the same for thresholds common to all channels, given as an f32 vector: slope, offset,
  -inf, the thresholds in ascending order, inf. ``trunc(clip(v * slope + offset, 0, count))`` is the
  level, or an adjacent one.
* ``round``: ``k = rint(clip(v, first, last)) - first``, ties to even; an f32 vector holds first and
  last, which are integers.
* ``whole``: ``v`` is the level.
"""


def plane_count(levels: int) -> int:
    """Return the number of bits for integers from 0 to `levels`."""
    return levels.bit_length()


def step_inputs(step: Step) -> int:
    """Return the number of kernel inputs of `step`."""
    if step.op == "levels":
        by_way = {"acc-scale": 2, "whole": 0}.get(step.way, 1)
        return by_way + step.flip + ("table" in step.forms)
    return INPUTS_OF_STEP[step.op] + (step.op == "threshold" and step.zero)


def step_outputs(step: Step) -> int:
    """Return the number of kernel outputs of `step`."""
    return len(output_kinds(step))


def writers(steps: Iterable[Step]) -> list[Step]:
    """Return the step that writes each kernel output."""
    return [step for step in steps for _ in range(step_outputs(step))]


def with_tensors(
    steps: Iterable[Step], inputs: Iterable[T], outputs: Iterable[T]
) -> Iterator[tuple[Step, list[T], list[T]]]:
    """Yield each step with those of its kernel's inputs and outputs that belong to it."""
    given, made = iter(inputs), iter(outputs)
    for step in steps:
        taken = [next(given) for _ in range(step_inputs(step))]
        yield step, taken, [next(made) for _ in range(step_outputs(step))]


def output_kinds(step: Step) -> list[str]:
    """Return the kind of each output of `step`: ``store``, ``bits`` or one of `FORMS`."""
    if step.op == "levels":
        kinds = [[f] * (plane_count(step.count) if f == "planes" else 1) for f in step.forms]
        return [kind for some in kinds for kind in some]
    if step.op == "store":
        return ["store"]
    return ["bits"] * (1 + step.zero) if step.op in ("bits", "threshold") else []
