"""NumPy oracle of the epilogue, on whole tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from bnncc.topi_binary.kind import Kind
from bnncc.topi_binary.reference.packing import bits_to_words
from bnncc.topi_binary.step import Step, output_kinds

Array = Any


def apply_steps(
    steps: Sequence[Step], value: Array, stream: Iterator[Array], acc: Array | None = None
) -> list[Array]:
    """Apply an epilogue to a whole tensor with channels last.

    Parameters
    ----------
    value : ndarray of float32, shape (n, height, width, channels)
        Initial value.
    stream : iterator of ndarray
        The steps' inputs.
    acc : ndarray of int64, optional
        Accumulators, for ``threshold``.

    Returns
    -------
    list of ndarray
        The steps' outputs, with four dimensions.
    """
    outputs: list[Array] = []
    channels = value.shape[-1]

    for step in steps:
        if step.op == "levels":
            outputs += level_outputs(step, value, acc, stream)
        elif step.op == "threshold":
            assert acc is not None
            limit = next(stream)[:channels]
            outputs.append(bits_to_words(acc <= limit))
            if step.zero:
                outputs.append(bits_to_words((acc <= limit) & (acc > next(stream)[:channels])))
        elif step.op == "bits":
            outputs.append(bits_to_words(value >= 0 if step.compare == "ge" else value > 0))
            if step.zero:
                outputs.append(bits_to_words(value == 0))
        elif step.op == "store":
            with np.errstate(over="ignore"):  # beyond 65504, float16 is infinite
                stored = value.astype(step.dtype)
            outputs.append(_laid_out(stored, step))
        else:
            value = _apply(step, value, stream, channels)
    return outputs


def nhwc(array: Array, where: str = "NHWC") -> Array:
    """Return a tensor, or rows, as an image with channels last."""
    if array.ndim == 2:
        return array[:, None, None, :]
    return array.transpose(0, 2, 3, 1) if where == "NCHW" else array


def _laid_out(array: Array, step: Step) -> Array:
    """Return an output in NHWC in the layout of its step."""
    return array.transpose(0, 3, 1, 2) if step.layout == "NCHW" else array


@np.errstate(all="ignore")  # networks may overflow
def finished(
    spec: Kind, value: Array, stream: Iterator[Array], acc: Array | None = None,
    steps: Sequence[Step] | None = None,
) -> list[Array]:  # fmt: skip
    """Apply the `steps` of `spec`, or others, to NHWC values, rounded to float32 as in a register.

    Outputs have the rank of the kernel's.
    """
    steps, rows = spec.steps if steps is None else steps, spec.output_rank == 2
    if rows:
        steps = [replace(step, layout="NHWC") for step in steps]
    made = apply_steps(steps, value.astype(np.float32), stream, acc)
    return [array[:, 0, 0] if rows else array for array in made]


def _apply(step: Step, value: Array, stream: Iterator[Array], channels: int) -> Array:
    if step.op == "affine":
        scale, bias = (next(stream)[:channels].astype(np.longdouble) for _ in range(2))
        return (value.astype(np.longdouble) * scale + bias).astype(np.float32)
    if step.op == "scale":
        return value * next(stream)[:channels]
    if step.op == "shift":
        return value + next(stream)[:channels]
    if step.op == "relu":
        return np.maximum(value, np.float32(0))
    if step.op == "clip":
        return np.minimum(np.maximum(value, np.float32(step.lo)), np.float32(step.hi))
    if step.op == "prelu":
        return np.where(value >= 0, value, value * next(stream)[:channels])
    if step.op == "swish":
        wide = value.astype(np.float64)
        with np.errstate(over="ignore"):  # exp(-x) is infinite, and the quotient 0
            return (wide / (1 + np.exp(-wide))).astype(np.float32)
    if step.op == "gate":
        return value * next(stream)[:, None, None, :]
    other = nhwc(next(stream).astype(np.float32), step.layout)
    if step.period:
        other = np.tile(other, channels // step.period)
    if step.op == "rsub":
        return other - value
    if step.op == "div":
        return value / other
    return value + other if step.op == "add" else value * other


def level_outputs(
    step: Step, value: Array, acc: Array | None, stream: Iterator[Array]
) -> list[Array]:
    """Return the outputs of a step ``levels``, four-dimensional, channels last."""
    channels = value.shape[-1]
    if step.way == "whole":
        level = value.astype(np.int64)
    elif step.way == "acc-scale":
        assert acc is not None
        scale, bias = (next(stream)[:channels].astype(np.longdouble) for _ in range(2))
        found = (acc.astype(np.float32).astype(np.longdouble) * scale + bias).astype(np.float32)
        level = np.trunc(np.clip(found, 0, step.count)).astype(np.int64)
    elif step.way == "round":
        first, last = next(stream)
        level = np.rint(np.clip(value, first, last)).astype(np.int64) - int(first)
    elif step.way == "search":
        limits = next(stream)[3:-1]
        level = sum((value >= limit).astype(np.int64) for limit in limits)
    else:
        seen = value if step.way == "value" else acc
        limits = next(stream)[:, :channels]
        if step.flip:
            seen = seen ^ next(stream)[:channels].astype(np.int64)
        level = sum((seen >= limit).astype(np.int64) for limit in limits)
    made: list[Array] = []
    table = next(stream) if "table" in step.forms else None
    plane = 0
    for kind in output_kinds(step):
        if kind == "planes":
            made.append(bits_to_words((level >> plane & 1).astype(bool)))
            plane += 1
        elif kind == "value":
            out = (level.astype(np.longdouble) * np.float32(step.hi) + np.float32(step.lo)).astype(
                np.float32
            )
            made.append(_laid_out(out, step))
        elif kind == "table":
            assert table is not None
            out = table[level]
            made.append(_laid_out(out, step))
        else:
            dtype = {"bytes": "<u1", "pairs": "<u2", "floats": "<f4"}[kind]
            wide = np.zeros((*level.shape[:-1], -(-channels // 16) * 16), dtype)
            wide[..., :channels] = level
            made.append(wide.view("<f4" if kind == "floats" else "<u4"))
    return made
