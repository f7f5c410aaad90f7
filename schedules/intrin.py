"""Tensor intrinsics: pairs of a plain loop and the instructions that compute the same.

A `Pair` has two halves. ``desc`` is a loop over scalars that runs on any machine and defines the
result; ``impl`` is the instruction. An `Intrinsic` is called, and writes its ``impl``; a
`TensorPair` replaces a loop of a schedule (``tensorize``). `test_intrin.py` runs both halves of
every pair on every target that has the instruction.

Names give instruction set, operation, lanes and type: ``avx2_lookup_32_u8``. Pairs for x86 are in
`intrin_x86` and `intrin_amx`, for Arm in `intrin_arm`, for WebAssembly in `intrin_wasm`; those that
LLVM can generate for any machine are in `intrin_portable`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from tvm import s_tir, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

Buffer = Any
Expr = Any

PAIRS: dict[str, Intrinsic] = {}
"""All intrinsics by name, registered by the modules ``intrin_*``."""


@dataclass(frozen=True)
class Operand:
    """A tensor operand of an instruction."""

    shape: tuple[int, ...]
    """Extents."""
    dtype: str
    """Element type."""
    strided: bool = False
    """Whether rows may be apart in memory; the last axis is always contiguous."""
    bounds: tuple[int, int] | None = None
    """Range of the elements for which ``desc`` holds; None: all values."""
    scope: str = "global"
    """TVM storage scope; each ``local`` tensor gets memory of its own."""


class Pair:
    """Two implementations of an operation: ``desc`` as a loop, ``impl`` as an instruction."""

    fresh = True
    """Whether the output tensor is overwritten without being read."""

    source = ""
    """LLVM IR that the instruction calls."""

    name: str
    """Name under which it is registered with TVM."""

    @property
    def tensors(self) -> Sequence[Operand]:
        """Parameters of the two functions; the last one is the output."""
        raise NotImplementedError

    def write(self, half: str, buffers: list[Buffer]) -> None:
        """Write the body of one half."""
        raise NotImplementedError

    def register(self) -> str:
        """Register the pair as a ``TensorIntrin`` of TVM, once; return its name."""
        if s_tir.TensorIntrin.get(self.name, allow_missing=True) is None:
            halves = (self.function(half, alone=False) for half in ("desc", "impl"))
            s_tir.TensorIntrin.register(self.name, *halves)
        return self.name

    def function(self, half: str, alone: bool = True) -> tirx.PrimFunc:
        """Return one half as a function.

        Parameters
        ----------
        half : {"desc", "impl"}
            Which half.
        alone : bool, default True
            Whether the function must run as it is, so that `source` is imported.

        Returns
        -------
        tirx.PrimFunc
            A function with one block, whose parameters are `tensors`.
        """
        with IRBuilder() as builder:
            with T.prim_func(s_tir=True):
                T.func_name("main")
                buffers = [_declared(f"operand_{i}", t) for i, t in enumerate(self.tensors)]
                with T.sblock("root"):
                    whole = [b[tuple(slice(0, e) for e in b.shape)] for b in buffers]
                    # In the order in which TVM detects them.
                    T.reads(*([] if self.fresh else whole[-1:]), *whole[:-1])
                    T.writes(whole[-1])
                    with imported(self.source if alone and half == "impl" else ""):
                        self.write(half, buffers)
            return builder.get()


@dataclass(frozen=True)
class Intrinsic(Pair):
    """One instruction, or a short sequence, on whole vectors."""

    name: str
    """Instruction set, operation, lanes and type."""
    feature: str
    """Feature of a `TargetSpec` that it requires; empty for any machine."""
    operands: tuple[str, ...]
    """Operand types: ``uint8x32``, ``float32x16``; ``boolx16`` is the result of a comparison."""
    result: str
    """Result type; a scalar if it has no ``x``."""
    desc: Callable[..., Expr]
    """Takes a lane and, for each operand, a function from lane to element; returns the result in
    that lane. Scalars only."""
    impl: Callable[..., Expr]
    """Takes vectors, returns the result."""
    source: str = ""
    """LLVM IR that `impl` calls if TVM has no operator for the instruction. Kernels import it with
    `imported`."""
    bounds: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """By operand index: the range of values for which `desc` holds."""

    def __post_init__(self) -> None:
        """Register it in `PAIRS`."""
        PAIRS[self.name] = self

    def __call__(self, *operands: Expr) -> Expr:
        """Write the instruction."""
        return self.impl(*operands)

    @property
    def tensors(self) -> list[Operand]:
        """One vector per operand (uint8 for booleans), then one for the result."""
        return [
            Operand((lanes(kind),), stored(kind), bounds=self.bounds.get(i))
            for i, kind in enumerate((*self.operands, self.result))
        ]

    def write(self, half: str, buffers: list[Buffer]) -> None:
        """Write the body of one half."""
        *operands, result = buffers
        if half == "desc":
            read = [self._of(number, buffer) for number, buffer in enumerate(operands)]
            with T.serial(lanes(self.result)) as lane:
                T.buffer_store(result, self.desc(lane, *read), [lane])
            return
        values = [self._of(i, b)(T.Ramp(0, 1, b.shape[0])) for i, b in enumerate(operands)]
        where = T.Ramp(0, 1, lanes(self.result)) if lanes(self.result) > 1 else T.int32(0)
        T.buffer_store(result, self.impl(*values), [where])

    def _of(self, number: int, buffer: Buffer) -> Callable[[Expr], Expr]:
        if not self.operands[number].startswith("bool"):
            return lambda where: buffer[where]
        return lambda where: buffer[where] != _zeros(where)


def imported(*sources: str) -> AbstractContextManager[Any]:
    """Return a context in which kernels may call intrinsics with a `source`."""
    code = "".join(dict.fromkeys(sources))
    if not code:
        return nullcontext()
    attr: AbstractContextManager[Any] = T.attr(tirx.IntImm("int32", 0), "pragma_import_llvm", code)
    return attr


def lanes(kind: str) -> int:
    """Return the number of lanes of a type."""
    return int(kind.partition("x")[2] or 1)


def stored(kind: str) -> str:
    """Return the type in which a lane is stored in memory."""
    base = kind.partition("x")[0]
    return "uint8" if base == "bool" else base


@dataclass(frozen=True)
class TensorPair(Pair):
    """An instruction that replaces a loop of a schedule: a ``TensorIntrin`` of TVM.

    It updates its last operand in place; the last axis of each operand is lanes.
    """

    name: str
    feature: str
    """`name`, `feature`: as in `Intrinsic`."""
    operands: tuple[Operand, ...]
    """Input operands, then the operand that is updated."""
    lanes: int
    """Extent of the loop over lanes in ``desc``."""
    desc: Callable[..., Sequence[tuple[Expr, Expr]]]
    """Takes a lane (and, with `terms`, the index of a term) and the buffers; returns pairs of an
    index into the last operand and its new value."""
    impl: Callable[..., Sequence[tuple[Expr, Expr]]]
    """Takes the buffers; returns such pairs for whole vectors."""
    terms: int = 0
    """Extent of a second loop in ``desc``, over the terms that are added to a lane."""
    fresh: bool = False
    """Whether the last operand is overwritten without being read."""
    source: str = ""
    """LLVM IR that `impl` calls; a rule must import it."""

    def __post_init__(self) -> None:
        """Register it in `TENSOR_PAIRS`."""
        TENSOR_PAIRS[self.name] = self

    @property
    def tensors(self) -> Sequence[Operand]:
        """The operands."""
        return self.operands

    @property
    def dtype(self) -> str:
        """Type of the operand that is updated."""
        return self.operands[-1].dtype

    def write(self, half: str, buffers: list[Buffer]) -> None:
        """Write the body of one half."""
        if half == "impl":
            _store(buffers[-1], self.impl(*buffers))
        else:
            self.loop("update", *(Window(buffer) for buffer in buffers))

    def loop(self, name: str, *operands: Window) -> None:
        """Write ``desc`` as a separate block, which a schedule can tensorize."""
        with T.grid(self.lanes, *[self.terms][: self.terms]) as loops, T.sblock(name):
            axes = T.axis.remap("SR" if self.terms else "S", loops if self.terms else [loops])
            for where, value in self.desc(*(axes if self.terms else [axes]), *operands):
                T.buffer_store(operands[-1].buffer, value, list(operands[-1].index(where)))


class Window:
    """Part of a tensor, seen as a 1-d operand.

    Parameters
    ----------
    buffer : Buffer
        The tensor.
    *first : Expr
        Index of element 0; default: the start of the tensor.
    """

    def __init__(self, buffer: Buffer, *first: Expr) -> None:
        self.buffer, self._first = buffer, first

    def index(self, where: Any) -> tuple[Expr, ...]:
        """Return the index in the tensor of element `where`."""
        if not self._first:
            return where if isinstance(where, tuple) else (where,)
        return (*self._first[:-1], self._first[-1] + where)

    def __getitem__(self, where: Any) -> Expr:
        """Return element `where`."""
        return self.buffer[self.index(where)]

    def region(self, count: int) -> Expr:
        """Return the region of the first `count` elements."""
        *outer, first = self._first
        return self.buffer[tuple([*outer, slice(first, first + count)])]


TENSOR_PAIRS: dict[str, TensorPair] = {}
"""All tensor pairs by name, registered by the same modules."""


def _declared(name: str, operand: Operand) -> Buffer:
    if not operand.strided:
        made = T.buffer(operand.shape, operand.dtype, scope=operand.scope, offset_factor=1)
        return T.arg(name, made)
    strides = [tirx.Var(f"{name}_{i}", "int32") for i in range(len(operand.shape) - 1)]
    handle = T.arg(name, T.handle())
    return T.match_buffer(
        handle, operand.shape, operand.dtype, strides=[*strides, 1], offset_factor=1
    )


def _store(buffer: Buffer, made: Sequence[tuple[Expr, Expr]]) -> None:
    for where, value in made:
        T.buffer_store(buffer, value, list(where) if isinstance(where, tuple) else [where])


def _zeros(where: Expr) -> Expr:
    count = getattr(where, "lanes", 1)
    return T.Broadcast(T.uint8(0), int(count)) if isinstance(where, tirx.Ramp) else T.uint8(0)
