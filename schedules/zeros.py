"""Data that may hold exact zeros: one version of a kernel for data without zeros, one for all.

Zero planes are scanned first. Usually they are empty, and a copy of the function runs from which
all code for zeros has been removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import prim
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from bnncc.schedules import ranges

Buffer = Any
Expr = Any

_ALL = tirx.IntImm("uint32", 2**32 - 1)


def without(func: tirx.PrimFunc, planes: Sequence[int], blocks: Sequence[str]) -> tirx.PrimFunc:
    """Return a copy of a definition, specialized for zero planes that are empty.

    Parameters
    ----------
    func : tirx.PrimFunc
        Loop nests around one block each.
    planes : sequence of int
        Indices of the parameters that are zero planes.
    blocks : sequence of str
        Blocks whose results are then 0, and which may be omitted, see `ranges.part`.

    Returns
    -------
    tirx.PrimFunc
    """
    absent = ranges.views(func, (func.params[i] for i in planes))
    for block in ranges.blocks(func):
        if block.name_hint in blocks:
            absent |= {region.source for region in block.writes}

    def load(expr: Expr) -> Expr:
        return tirx.const(0, expr.source.dtype) if expr.source in absent else expr

    def read(old: s_tir.SBlock) -> s_tir.SBlock:
        reads = [region for region in old.reads if region.source not in absent]
        return ranges.changed_block(old, reads=reads)

    left_out = (
        (tvm.ir.TensorLoad, load), (prim.BitwiseNot, _inverted), (prim.BitwiseOr, _joined),
        (prim.BitwiseAnd, _met), (s_tir.SBlock, read),
    )  # fmt: skip
    return func.with_body(tvm_ffi.structural_map(func.body, left_out))


def _inverted(expr: Expr) -> Expr:
    return _ALL if _is(expr.a, 0) else expr


def _joined(expr: Expr) -> Expr:
    return expr.b if _is(expr.a, 0) else expr.a if _is(expr.b, 0) else expr


def _met(expr: Expr) -> Expr:
    return expr.b if _is(expr.a, _ALL.value) else expr.a if _is(expr.b, _ALL.value) else expr


def _is(expr: Expr, value: int) -> bool:
    return isinstance(expr, tirx.IntImm) and int(expr.value) == value


def either(
    func: tirx.PrimFunc, planes: Sequence[int], clear: tirx.PrimFunc, other: tirx.PrimFunc
) -> tirx.PrimFunc:
    """Return a function that scans the zero planes and selects one of two versions.

    Parameters
    ----------
    func : tirx.PrimFunc
        The definition.
    planes : sequence of int
        Indices of the parameters that are zero planes.
    clear, other : tirx.PrimFunc
        Scheduled versions of `func`: for empty zero planes, and for any.

    Returns
    -------
    tirx.PrimFunc
    """
    with IRBuilder() as builder, T.sblock("root"):
        seen = scan([func.params[i] for i in planes])
    looked, roots = builder.get().block, [part.body.block for part in (clear, other)]
    test = tirx.IfThenElse(seen[0] == T.uint32(0), *(root.body for root in roots))
    tensors = [tensor for root in (looked, *roots) for tensor in root.alloc_buffers]
    body = tirx.SeqStmt([*ranges.statements(looked.body), test])
    return func.with_body(ranges.rooted(func, body, list(dict.fromkeys(tensors))))


def scan(planes: Sequence[Buffer]) -> Buffer:
    """Write a block that ORs all words of `planes` into one word (``scan``)."""
    flats = []
    for plane in planes:
        size = 1
        for extent in plane.shape:
            size = size * extent
        flats.append(T.decl_buffer([size], "uint32", data=plane.data))
    seen = T.sblock_alloc_buffer((1,), "uint32")
    with T.sblock("scan"):
        T.reads(*(flat[0 : flat.shape[0]] for flat in flats))
        T.writes(seen[0])
        T.buffer_store(seen, T.uint32(0), [0])
        for flat in flats:
            with T.serial(0, flat.shape[0]) as i:
                T.buffer_store(seen, seen[0] | flat[i], [0])
    return seen
