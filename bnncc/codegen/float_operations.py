"""Count the float operations of kernels, and find those that are library functions."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from bnncc.codegen.memory import at_one

_BINARY = (
    tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Min, tirx.Max,
    tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.EQ, tirx.NE,
)  # fmt: skip

_SYMBOLS = re.compile(
    rb"(?<=\0)__(?:(?:add|sub|mul|div|eq|ne|lt|le|gt|ge|unord|fix|fixuns)(?P<of>[sd])f"
    rb"|float(?:un)?[sd]i(?P<to>[sd])f"
    rb"|aeabi_(?:(?P<arm>[fd])(?:add|r?sub|mul|div|cmp|2u?iz)|u?i2(?P<made>[fd])))\w*(?=\0)"
)
"""Functions that compilers call if there is no instruction, and Arm's names of them."""

_SIZES = {b"s": "float32", b"f": "float32", b"d": "float64"}


def count(func: tirx.PrimFunc) -> Counter[str]:
    """Return an upper bound of the operations that a kernel executes, by type.

    Parameters
    ----------
    func : PrimFunc
        Lowered, with static shapes.

    Returns
    -------
    Counter of str
        By ``float32`` and ``float64``: arithmetic, comparisons, conversions, calls.
    """
    return _of(func.body)


def in_software(library: bytes) -> set[str]:
    """Return the float types for which an object file calls functions instead of instructions."""
    return {_SIZES[next(filter(None, found.groups()))] for found in _SYMBOLS.finditer(library)}


def _of(stmt: Any) -> Counter[str]:
    if isinstance(stmt, tirx.SeqStmt):
        return sum(map(_of, stmt.seq), Counter())
    if isinstance(stmt, tirx.For):
        times = at_one(stmt.extent)
        return Counter({kind: times * number for kind, number in _of(stmt.body).items()})
    if isinstance(stmt, tirx.IfThenElse):
        either = _of(stmt.then_case)
        if stmt.else_case is not None:
            either |= _of(stmt.else_case)
        return either + _within(stmt.condition)
    return _of(stmt.body) if isinstance(stmt, tirx.AttrStmt) else _within(stmt)


def _within(node: Any) -> Counter[str]:
    found = Counter[str]()

    def take(dtype: Any) -> None:
        kind, _, lanes = str(dtype).partition("x")
        if kind in _SIZES.values():
            found[kind] += int(lanes or 1)

    def converted(cast: Any) -> None:
        have, made = str(cast.value.ty.dtype), str(cast.ty.dtype)
        if have != made:
            take(made if "float" in made else have)

    def called(call: Any) -> None:
        if str(getattr(call.op, "name", "")) not in _MOVES:
            take(getattr(call.ty, "dtype", ""))

    visit = [
        *((kind, lambda binary: take(binary.a.ty.dtype)) for kind in _BINARY),
        (tirx.Cast, converted),
        (tvm.ir.Call, called),
    ]
    tvm_ffi.structural_walk(node, visit, order="pre")
    return found


_MOVES = "prim.if_then_else", "tirx.if_then_else", "tirx.reinterpret", "tirx.likely"
"""Calls that compute nothing."""
