"""Rounding modes in ONNX's operators."""

from __future__ import annotations

import numpy as np

from bnncc.ir.pieces import Expression

PLAIN = {"ROUND": "Round", "HALF_EVEN": "Round", "FLOOR": "Floor", "CEIL": "Ceil"}
"""The modes that are an operator of ONNX."""


def rounded(write: Expression, mode: str, x: str) -> str:
    """Return `x`, rounded as the mode of `bnncc.ir.quantizers.ROUNDING` says."""
    if mode in PLAIN:
        return write(PLAIN[mode], x)
    sign, size = write("Sign", x), write("Abs", x)
    if mode.startswith("HALF"):
        # 0.5 itself would bring the float before a half to the next whole number.
        half = float(np.nextafter(np.float32(0.5), np.float32(0))) if mode == "HALF_UP" else -0.5
        size = write("Add", size, write.constant(half))
    whole = write("Ceil" if mode in ("UP", "HALF_DOWN") else "Floor", size)
    return write("Mul", sign, whole)
