"""What a physical tensor should hold for a tensor of the model, and where it differs."""

from __future__ import annotations

from typing import Any

import numpy as np

from bnncc.ir.halves import is_float
from bnncc.ir.numeric import NOISE
from bnncc.runtime.compare import apart
from bnncc.topi_binary.reference import bits_to_words
from bnncc.topi_binary.step import FORMS, NUMBERS
from bnncc.transform.physical import Form

Array = np.ndarray[Any, Any]

OFF = NOISE
"""How far a value may be from the one that bits stand for, relative to the largest."""


def encoded(value: Array, form: Form, near: float = OFF) -> tuple[Array, Array]:
    """Return what a physical tensor should hold.

    Parameters
    ----------
    value : ndarray
        The logical tensor.
    form : Form
        How it is stored.
    near : float
        Tolerance relative to the largest value.

    Returns
    -------
    right : ndarray
        The physical tensor.
    off : ndarray of bool
        Which elements of `value` the form cannot represent.
    """
    last = np.moveaxis(value, 1, -1) if value.ndim == 4 else value
    if form.kind in ("NCHW", "NHWC"):
        right = last if form.kind == "NHWC" else value
        return np.asarray(right, order="C"), np.zeros(value.shape, bool)
    values, level = np.array(form.values), _level(value, form)
    off = ~(np.abs(values[level] - value) <= near * np.abs(values).max())
    level = np.moveaxis(level, 1, -1) if value.ndim == 4 else level
    stored = code(level, form)
    if form.kind in _BITS:
        return bits_to_words(stored.astype(bool)), off
    wide = np.zeros((*level.shape[:-1], -(-level.shape[-1] // 16) * 16), NUMBERS[form.kind])
    wide[..., : level.shape[-1]] = stored
    return wide.view(FORMS[form.kind]), off


def nearest(value: Array, form: Form) -> Array:
    """Return the nearest values to those of a logical tensor that `form` can represent."""
    held = np.array(form.values)[_level(value, form)]
    return np.where(np.isnan(value), value, held).astype(value.dtype)


def _level(value: Array, form: Form) -> Array:
    values = np.array(form.values)
    order = np.argsort(values)
    middles = (values[order][1:] + values[order][:-1]) / 2
    return np.asarray(order[np.searchsorted(middles, value)])


_BITS = ("sign", "zero", "plane")


def code(level: Array, form: Form) -> Array:
    """Return the stored codes of levels.

    Parameters
    ----------
    level : ndarray of int
        Numbers of values of the form.
    form : Form
        How they are stored.
    """
    if form.kind == "sign":
        return level > 0
    if form.kind == "zero":
        return level == 1
    return level >> form.number & 1 == 1 if form.kind == "plane" else level


def codes(value: Array, form: Form, shape: tuple[int, ...]) -> Array:
    """Return what a physical tensor of bits or levels stores for each element of the logical one.

    If bits are set beyond the last channel, where there should be none, the code is one that no
    level has. Other numbers there are arbitrary (`layout.level_words`).

    Parameters
    ----------
    value : ndarray
        The physical tensor.
    form : Form
        How it stores the logical one.
    shape : tuple of int
        Of the logical tensor.
    """
    if form.kind in _BITS:
        words = np.ascontiguousarray(value).view(np.uint8)
        every = np.unpackbits(words, axis=-1, bitorder="little").astype(np.int16)
    else:
        every = value.view(NUMBERS[form.kind]).astype(np.float32)
    channels = shape[1]
    made = every[..., :channels]
    if form.kind in _BITS and every[..., channels:].any():
        made = np.full_like(made, -1)
    return np.moveaxis(made, -1, 1) if len(shape) == 4 else made


def differs(value: Array, right: Array, form: Form, shape: tuple[int, ...]) -> Array:
    """Return which elements of the logical tensor differ.

    Parameters
    ----------
    value, right : ndarray
        Physical tensors of one type.
    form : Form
        How they store the logical one.
    shape : tuple of int
        Of the logical tensor.
    """
    if form.kind in ("NCHW", "NHWC"):
        off = apart(value, right) != 0 if is_float(value) else np.asarray(value != right)
        return np.moveaxis(off, -1, 1) if form.kind == "NHWC" and value.ndim == 4 else off
    if np.array_equal(value.view(np.uint32), right.view(np.uint32)):
        return np.zeros(shape, bool)
    return codes(value, form, shape) != codes(right, form, shape)
