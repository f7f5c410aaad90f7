"""Internal operators on rows: names and NumPy semantics."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

ROW_NORM = "bnncc.RowNorm"
"""Normalization with attributes ``epsilon`` and ``centred``: ``v / sqrt(mean(v * v) + epsilon)``
along the last axis, where v is the first input, minus its mean if `centred`; the result is
multiplied by the second input, and the third is added."""

ROW_SOFTMAX = "bnncc.RowSoftmax"
"""Softmax along the last axis of the first input times ``scale`` (attribute), plus the second."""

ROTARY = "bnncc.Rotary"
"""``x * c + h * s``, where h is the negated second half of x's last axis, then the first half."""

SWISH = "bnncc.Swish"
"""``x * sigmoid(x)``."""


def row_norm(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    """Evaluate `ROW_NORM` in float64."""
    x, scale, bias = [*ins, None, None][:3]
    v = x.astype(np.float64)
    v = v - v.mean(-1, keepdims=True) if attrs["centred"] else v
    y = v / np.sqrt((v * v).mean(-1, keepdims=True) + attrs["epsilon"])
    y = y if scale is None else y * scale
    return [(y if bias is None else y + bias).astype(x.dtype)]


def row_softmax(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    """Evaluate `ROW_SOFTMAX` in float64."""
    x = ins[0].astype(np.float64) * attrs["scale"]
    x = x + ins[1] if len(ins) > 1 else x
    power = np.exp(x - x.max(-1, keepdims=True))
    return [(power / power.sum(-1, keepdims=True)).astype(ins[0].dtype)]


def rotary(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    """Evaluate `ROTARY` in the type of its inputs."""
    x, cos, sin = ins
    first, second = np.split(x, 2, -1)
    return [x * cos + np.concatenate([-second, first], -1) * sin]
