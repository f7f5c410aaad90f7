"""Test cases of few-bit layers: operands, parameters of the threshold steps, and ties."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from bnncc.topi_binary import few_bit_data, layout
from bnncc.topi_binary.build import input_types, step_input_types
from bnncc.topi_binary.spec import FewBitConv2d, Spec, Step
from bnncc.topi_binary.step import output_kinds
from bnncc.tuning.draws import Draws

Array = np.ndarray
Oracle = Callable[[Any, Sequence[Array]], list[Array]]

WORDS = {"bytes": "<u1", "pairs": "<u2", "floats": "<f4"}
"""Type of a level in each form of `step.FORMS` that is numbers."""


def levels(shape: tuple[int, ...], top: int, form: str, rng: Draws) -> list[Array]:
    """Return random levels up to `top` in one of `step.FORMS`; numbers beyond the channels are too.

    Parameters
    ----------
    shape : tuple of int
        Channels last.
    top : int
        The highest level.
    form : str
        Planes, or what numbers.

    Returns
    -------
    list of ndarray
        The tensors that hold them.
    """
    *outer, channels = shape
    data = rng.integers(0, top + 1, shape)
    if form == "planes":
        return [layout.pack_bits((data >> j & 1).astype(bool)) for j in range(top.bit_length())]
    dtype = WORDS[form]
    wide = rng.integers(0, 100, (*outer, layout.blocks(channels) * layout.LANES)).astype(dtype)
    wide[..., :channels] = data
    return [wide.view("<f4" if form == "floats" else "<u4")]


def weights(spec: FewBitConv2d, rng: Draws) -> Array:
    """Return random integer weights that `spec` can multiply by."""
    shape = (spec.out_channels, *spec.kernel, spec.channels_per_group)
    top = 2**spec.weight_bits
    if spec.method == "xor" or (spec.method == "packed" and spec.weight_bits == 1):
        return 2 * rng.integers(0, top, shape) - top + 1
    return rng.integers(-top // 2, top // 2, shape)


def operands(spec: FewBitConv2d, n: int, rng: Draws, outside: float = 0) -> list[Array]:
    """Return data, weights and start values of a few-bit kernel.

    Parameters
    ----------
    spec : FewBitConv2d
        The kernel.
    n : int
        Images.
    outside : float
        The level of pixels outside the image.
    """
    image = (n, spec.channels) if spec.rank == 2 else (n, spec.height, spec.width, spec.channels)
    arrays = levels(image, 2**spec.data_bits - 1, spec.form, rng)
    weight = weights(spec, rng)
    arrays.append(few_bit_data.pack_weight(weight, spec))
    if spec.starts:
        arrays.append(few_bit_data.start_values(weight, spec, outside))
    return arrays


def fill(spec: Any, inputs: list[Array], given: list[Array], oracle: Oracle,
         rng: Draws) -> None:  # fmt: skip
    """Replace the inputs of steps that find levels by some among the values they meet.

    Parameters
    ----------
    spec : Spec
        The kernel, as the oracle takes it.
    inputs, given : list of ndarray
        Of the kernel, and of the oracle; both are changed.
    oracle : callable
        Computes outputs from `spec` and `given`.
    """
    steps = spec.steps
    place = len(input_types(replace(spec, steps=()))) if steps else 0
    for number, step in enumerate(steps):
        types = step_input_types(spec, step)
        if step.op == "levels" and types:
            values = _values(spec, number, given, oracle)
            lanes = int(types[0][0][-1])
            made = [] if step.way == "whole" else _parameters(step, values, lanes, rng)
            if "table" in step.forms:
                made.append(rng.standard_normal(step.count + 1).astype(np.float32))
            for i, array in enumerate(made):
                inputs[place + i] = given[place + i] = array
        place += len(types)


def margin(values: Array, tolerance: float) -> float:
    """Return how far values may be off: relative to the largest, or absolute if that is below 1."""
    return tolerance * max(1.0, float(np.abs(values).max(initial=0)))


def unsure(spec: Any, number: int, given: list[Array], oracle: Oracle, tolerance: float) -> Any:
    """Return masks of what rounding may change in the outputs of a step that finds levels.

    Parameters
    ----------
    spec : Spec
        The kernel, as the oracle takes it.
    number : int
        Of the step.
    given : list of ndarray
        The oracle's inputs.
    oracle : callable
        Computes outputs from both.
    tolerance : float
        How far values may be off, relative to the largest.

    Returns
    -------
    list of ndarray
        Bits of words, or bools of floats. Numbers beyond the channels are anything.
    """
    step: Step = spec.steps[number]
    values = _values(spec, number, given, oracle)
    own = given[len(input_types(replace(spec, steps=spec.steps[:number]))) :]
    channels = spec.output_channels
    far = margin(values, tolerance)
    if step.way in ("whole", "acc-scale"):
        if step.way == "acc-scale":
            values = values * own[0][:channels].astype(np.float64) + own[1][:channels]
            far = tolerance * max(1.0, step.count)
        off = np.abs(values - np.round(values))
        near = (off <= far) & ((off > 0) | (step.way != "whole"))  # levels as they are, are sure
    elif step.way == "round":
        near = np.abs(values - np.floor(values) - 0.5) <= far
    elif step.way == "acc":
        near = np.zeros(values.shape, bool)
    else:
        limits = own[0][3:-1, None] if step.way == "search" else own[0][:, :channels]
        near = np.zeros(values.shape, bool)
        for limit in limits:
            near |= np.abs(values - limit) <= far
    return [_mask(kind, near, step) for kind in output_kinds(step)]


def _mask(kind: str, near: Array, step: Step) -> Array:
    if kind == "planes":
        return layout.pack_bits(near)
    if kind in ("value", "table"):
        turned = near.ndim == 4 and step.layout == "NCHW"
        return np.ascontiguousarray(near.transpose(0, 3, 1, 2)) if turned else near
    *outer, channels = near.shape
    wide = np.ones((*outer, layout.blocks(channels) * layout.LANES), bool)
    wide[..., :channels] = near
    if kind == "floats":
        return wide
    return np.where(wide, -1, 0).astype(WORDS[kind].replace("u", "i")).view("<u4")


def _values(spec: Any, number: int, given: list[Array], oracle: Oracle) -> Array:
    """Return what the step of that number looks at, channels last."""
    before = () if spec.steps[number].way.startswith("acc") else spec.steps[:number]
    shown = replace(spec, steps=(*before, Step("store")))
    return oracle(shown, given)[-1].astype(np.float64)


def _parameters(step: Step, values: Array, lanes: int, rng: Draws) -> list[Array]:
    middle, spread = float(np.median(values)), max(1.0, float(values.std()))
    if step.way == "search":  # thresholds in even steps, so that a line finds the level
        width = 2 * spread / step.count
        limits = (middle - spread + width * np.arange(1, step.count + 1)).astype(np.float32)
        slope = np.float32(1 / width)
        line = [slope, np.float32(1) - limits[0] * slope, -np.inf]
        return [np.array([*line, *limits, np.inf], np.float32)]
    if step.way == "acc-scale":  # a power of two: exact, whether products are rounded or not
        scale = 2.0 ** -np.ceil(np.log2(2 * spread / step.count))
        bias = np.round(step.count / 2 - middle * scale) + rng.integers(-4, 5, lanes) / 8 + 1 / 16
        return [np.full(lanes, scale, np.float32), bias.astype(np.float32)]
    if step.way == "round":
        first = np.round(middle - step.count / 2)
        return [np.array([first, first + step.count], np.float32)]
    limits = np.sort(rng.normal(middle, spread, (step.count, lanes)), axis=0)
    if step.way == "value":
        return [limits.astype(np.float32)]
    made = [np.round(limits).astype(np.int32)]
    if step.flip:
        falling = rng.integers(0, 2, lanes).astype(bool)
        made[0] = np.where(falling, np.sort(-made[0], axis=0), made[0])
        made.append(-falling.astype(np.int32))
    return made


def whole(spec: Spec) -> int:
    """Return the highest level of the data if they are levels already, else 0."""
    return max((s.count for s in spec.steps if s.way == "whole"), default=0)
