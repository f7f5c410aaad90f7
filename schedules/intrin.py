"""Named instructions: what each computes, as a plain loop, and how it is written.

An `Intrinsic` is a pair. Its ``desc`` is a loop over lanes that runs on any machine and says what
is computed; its ``impl`` is the instruction. Kernels call the intrinsic, which writes the ``impl``;
`test_intrin.py` runs both halves of every pair on every target that has the instruction.

Names say instruction set, operation, lanes and type: ``avx2_lookup_32_u8``. Those of x86 are in
`intrin_x86` and `intrin_amx`, of Arm in `intrin_arm`, of WebAssembly in `intrin_wasm`; what LLVM
writes for any machine is in `intrin_portable`.
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
"""Every intrinsic by its name; the modules ``intrin_*`` enter theirs."""


@dataclass(frozen=True)
class Operand:
    """A tensor that an instruction reads or changes."""

    shape: tuple[int, ...]
    """Its extents."""
    dtype: str
    """Of an element."""
    strided: bool = False
    """Whether rows may lie apart in memory; elements of the last axis never do."""
    bounds: tuple[int, int] | None = None
    """Range of its elements: what a desc says holds for those alone."""
    scope: str = "global"
    """Where it lies; TVM gives tensors that are ``local`` memory of their own."""


class Pair:
    """Two halves that compute the same: ``desc`` as a plain loop, ``impl`` as an instruction."""

    fresh = True
    """Whether the tensor that changes is not read."""

    source = ""
    """LLVM code that the instruction calls."""

    name: str
    """Under which TVM knows it."""

    @property
    def tensors(self) -> Sequence[Operand]:
        """What the halves take, as functions; the last one changes."""
        raise NotImplementedError

    def write(self, half: str, buffers: list[Buffer]) -> None:
        """Write the body of one half."""
        raise NotImplementedError

    def register(self) -> str:
        """Let schedules put it in the place of a loop: by the name that is returned."""
        if s_tir.TensorIntrin.get(self.name, allow_missing=True) is None:
            halves = (self.function(half, alone=False) for half in ("desc", "impl"))
            s_tir.TensorIntrin.register(self.name, *halves)
        return self.name

    def function(self, half: str, alone: bool = True) -> tirx.PrimFunc:
        """Return one half as a function of its own.

        Parameters
        ----------
        half : {"desc", "impl"}
            Which.
        alone : bool, default True
            Whether it is to run as it is: with `source`.

        Returns
        -------
        tirx.PrimFunc
            With one block, whose parameters are `tensors`.
        """
        with IRBuilder() as builder:
            with T.prim_func(s_tir=True):
                T.func_name("main")
                buffers = [_declared(f"operand_{i}", t) for i, t in enumerate(self.tensors)]
                with T.sblock("root"):
                    whole = [b[tuple(slice(0, e) for e in b.shape)] for b in buffers]
                    # In the order in which TVM finds them.
                    T.reads(*([] if self.fresh else whole[-1:]), *whole[:-1])
                    T.writes(whole[-1])
                    with imported(self.source if alone and half == "impl" else ""):
                        self.write(half, buffers)
            return builder.get()


@dataclass(frozen=True)
class Intrinsic(Pair):
    """One instruction, or a few that belong together, on whole vectors."""

    name: str
    """Instruction set, operation, lanes and type."""
    feature: str
    """The feature of a `TargetSpec` that it needs; empty for any machine."""
    operands: tuple[str, ...]
    """Their types: ``uint8x32``, ``float32x16``; ``boolx16`` is the result of a comparison."""
    result: str
    """Its type; without ``x``, one number."""
    desc: Callable[..., Expr]
    """Takes the number of a lane and one function for each operand, which takes the number of a
    lane; returns the result in that lane. Scalars only."""
    impl: Callable[..., Expr]
    """Takes vectors, returns the result."""
    source: str = ""
    """LLVM code that `impl` calls, where TVM has no word for the instruction. Kernels import it
    with `imported`."""
    bounds: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Operands, by number, that must lie in a range: what `desc` says holds for those alone."""

    def __post_init__(self) -> None:
        """Enter it in `PAIRS`."""
        PAIRS[self.name] = self

    def __call__(self, *operands: Expr) -> Expr:
        """Write the instruction."""
        return self.impl(*operands)

    @property
    def tensors(self) -> list[Operand]:
        """One vector for each operand (uint8 for booleans), then one for the result."""
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
    """Return what to open around kernels that call intrinsics with a `source`."""
    code = "".join(dict.fromkeys(sources))
    if not code:
        return nullcontext()
    attr: AbstractContextManager[Any] = T.attr(tirx.IntImm("int32", 0), "pragma_import_llvm", code)
    return attr


def lanes(kind: str) -> int:
    """Return how many lanes a type has."""
    return int(kind.partition("x")[2] or 1)


def stored(kind: str) -> str:
    """Return the type of a lane in memory."""
    base = kind.partition("x")[0]
    return "uint8" if base == "bool" else base


@dataclass(frozen=True)
class TensorPair(Pair):
    """An instruction that a schedule puts in the place of a loop: a TVM ``TensorIntrin``.

    It changes its last operand in place; lanes are its last axis.
    """

    name: str
    feature: str
    """`name`, `feature`: as of an `Intrinsic`."""
    operands: tuple[Operand, ...]
    """What it reads, then what it changes."""
    lanes: int
    """Extent of the loop in ``desc``."""
    desc: Callable[..., Sequence[tuple[Expr, Expr]]]
    """Takes the number of a lane (with `terms`, that of a term too) and the buffers; returns which
    elements of the last one change, and what they become, as pairs."""
    impl: Callable[..., Sequence[tuple[Expr, Expr]]]
    """Takes the buffers; returns the same for whole vectors."""
    terms: int = 0
    """Extent of a second loop in ``desc``, over what is added to a lane."""
    fresh: bool = False
    """Whether the last operand is written without being read."""
    source: str = ""
    """LLVM code that `impl` calls; a rule has to import it."""

    def __post_init__(self) -> None:
        """Enter it in `TENSOR_PAIRS`."""
        TENSOR_PAIRS[self.name] = self

    @property
    def tensors(self) -> Sequence[Operand]:
        """The operands."""
        return self.operands

    @property
    def dtype(self) -> str:
        """The type of what changes."""
        return self.operands[-1].dtype

    def write(self, half: str, buffers: list[Buffer]) -> None:
        """Write the body of one half."""
        if half == "impl":
            _store(buffers[-1], self.impl(*buffers))
        else:
            self.loop("update", *(Window(buffer) for buffer in buffers))

    def loop(self, name: str, *operands: Window) -> None:
        """Write ``desc`` as a block of its own, in which a schedule can put the instruction."""
        with T.grid(self.lanes, *[self.terms][: self.terms]) as loops, T.sblock(name):
            axes = T.axis.remap("SR" if self.terms else "S", loops if self.terms else [loops])
            for where, value in self.desc(*(axes if self.terms else [axes]), *operands):
                T.buffer_store(operands[-1].buffer, value, list(operands[-1].index(where)))


class Window:
    """Part of a tensor as an operand with one axis.

    Parameters
    ----------
    buffer : Buffer
        The tensor.
    *first : Expr
        Where element 0 lies; by default, at the start of a tensor of any number of axes.
    """

    def __init__(self, buffer: Buffer, *first: Expr) -> None:
        self.buffer, self._first = buffer, first

    def index(self, where: Any) -> tuple[Expr, ...]:
        """Return where in the tensor element `where` lies."""
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
"""Every pair of a loop and an instruction by its name, entered in the same way."""


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
