"""Rounding modes in ONNX's operators."""

from __future__ import annotations

from collections.abc import Iterator

from bnncc.frontend.pieces import Pieces
from bnncc.ir.graph import Node

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
        yield make("Add", [size, make.constant(0.5 if mode == "HALF_UP" else -0.5)], moved)
        size = moved
    yield make("Ceil" if mode in ("UP", "HALF_DOWN") else "Floor", [size], whole)
    yield make("Mul", [sign, whole], out)
