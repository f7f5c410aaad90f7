"""Rounding modes in ONNX's operators."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from bnncc.ir.graph import Node
from bnncc.ir.pieces import Pieces

PLAIN = {"ROUND": "Round", "HALF_EVEN": "Round", "FLOOR": "Floor", "CEIL": "Ceil"}
"""The modes that are an operator of ONNX."""


def rounded(make: Pieces, mode: str, x: str, out: str) -> Iterator[Node]:
    """Yield nodes that round as the mode of `bnncc.ir.quantizers.ROUNDING` says.

    Parameters
    ----------
    make : Pieces
        Makes them.
    mode : str
        One of `ROUNDING`.
    x, out : str
        Tensors.

    Yields
    ------
    Node
    """
    if mode in PLAIN:
        yield make(PLAIN[mode], [x], out)
        return
    sign, size, whole = (make.tensor(k) for k in ("sign", "size", "whole"))
    yield make("Sign", [x], sign)
    yield make("Abs", [x], size)
    if mode.startswith("HALF"):
        moved = make.tensor("moved")
        # 0.5 itself would bring the float before a half to the next whole number.
        half = float(np.nextafter(np.float32(0.5), np.float32(0))) if mode == "HALF_UP" else -0.5
        yield make("Add", [size, make.constant(half)], moved)
        size = moved
    yield make("Ceil" if mode in ("UP", "HALF_DOWN") else "Floor", [size], whole)
    yield make("Mul", [sign, whole], out)
