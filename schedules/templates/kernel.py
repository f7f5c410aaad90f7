"""Small helpers to write kernels whose vectors, tiles and loops are explicit TensorIR.

Kernels of this package are loops around vectors of `LANES` values. Written out they say exactly
which registers they need, on every target: LLVM cuts a vector of 16 lanes into as many registers as
the machine asks for. All indices are int64, as Relax shapes are. Everything here works inside a
`Kernel` context, on TVM's IRBuilder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from bnncc.topi_binary.build import SPEC_ATTR, Type, aliases, input_types, output_types
from bnncc.topi_binary.layout import LANES
from bnncc.topi_binary.spec import Dim, Spec, to_json

Buffer = Any
Expr = Any


class Kernel:
    """The PrimFunc of one spec while it is being written.

    Parameters
    ----------
    spec : Spec
        What it computes; gives parameters and attributes.

    Attributes
    ----------
    n : Expr
        The batch.
    inputs, outputs : list of Buffer
        Parameters, in the order of `build.input_types` and `build.output_types`.

    Examples
    --------
    A kernel that copies its input::

        with Kernel(spec) as kernel:
            with T.serial(kernel.n) as i:
                T.buffer_store(kernel.outputs[0], load(kernel.inputs[0], [i, 0]), [i, ramp(0)])
        return kernel.func
    """

    def __init__(self, spec: Spec) -> None:
        n = spec.n
        self.n: Expr = const(n) if isinstance(n, int) else tirx.Var(n, "int64")
        self.spec = spec
        self._builder = IRBuilder()
        self._frame = T.prim_func(s_tir=True)

    def __enter__(self) -> Kernel:
        """Open the function and declare its parameters."""
        self._builder.__enter__()
        self._frame.__enter__()
        T.func_name("main")
        T.func_attr({"tirx.noalias": True, "op_pattern": 8, SPEC_ATTR: to_json(self.spec)})
        self.inputs = self._declare("in", input_types(self.spec))
        over = aliases(self.spec)
        types = [kind for kind, i in zip(output_types(self.spec), over, strict=True) if i < 0]
        fresh = iter(self._declare("out", types))
        # Where a result is stored over an input, it is one parameter and two buffers.
        self.outputs = [next(fresh) if i < 0 else _again(self.inputs[i]) for i in over]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the function."""
        self._frame.__exit__(kind, error, trace)
        self._builder.__exit__(kind, error, trace)

    @property
    def func(self) -> tirx.PrimFunc:
        """The finished function."""
        return self._builder.get()

    def reshape(self, spec: Spec) -> None:
        """Look at the parameters as those of `spec`, which describes the same memory."""

        def view(buffers: list[Buffer], types: Sequence[Type]) -> list[Buffer]:
            return [
                T.decl_buffer(self._dims(shape), dtype, data=buffer.data)
                for buffer, (shape, dtype) in zip(buffers, types, strict=True)
            ]

        if isinstance(spec.n, int):
            self.n = const(spec.n)
        self.inputs = view(self.inputs, input_types(spec))
        self.outputs = view(self.outputs, output_types(spec))

    def _dims(self, shape: Sequence[Dim]) -> list[Expr]:
        return [self.n if isinstance(d, str) else const(d) for d in shape]

    def _declare(self, prefix: str, types: Sequence[Type]) -> list[Buffer]:
        return [
            T.arg(f"{prefix}{number}", T.buffer(self._dims(shape), dtype))
            for number, (shape, dtype) in enumerate(types)
        ]


def _again(buffer: Buffer) -> Buffer:
    return T.decl_buffer(list(buffer.shape), buffer.dtype, data=buffer.data)


def const(value: int) -> Expr:
    """Return an int64 constant."""
    return tirx.IntImm("int64", value)


def index(value: Expr | int) -> Expr:
    """Return `value` as an index expression."""
    return const(value) if isinstance(value, int) else value


def ramp(base: Expr | int, lanes: int = LANES, stride: int = 1) -> Expr:
    """Return the indices ``base, base + stride, ...``."""
    return tirx.Ramp(index(base), const(stride), lanes)


def splat(value: Expr, lanes: int = LANES) -> Expr:
    """Return the scalar `value` in every lane."""
    return tirx.Broadcast(value, lanes)


def f32(value: float, lanes: int = LANES) -> Expr:
    """Return a float constant in every lane."""
    return splat(tirx.FloatImm("float32", value), lanes)


def u32(value: int, lanes: int = LANES) -> Expr:
    """Return a word in every lane."""
    return splat(tirx.IntImm("uint32", value), lanes)


def first_lanes(valid: int, lanes: int = LANES) -> Expr:
    """Return the mask of the first `valid` lanes."""
    numbers = tirx.Ramp(tirx.IntImm("int32", 0), tirx.IntImm("int32", 1), lanes)
    return numbers < tirx.Broadcast(tirx.IntImm("int32", valid), lanes)


def lane(vector: Expr, number: int) -> Expr:
    """Return one lane of `vector` as a scalar."""
    return tirx.Shuffle([vector], [tirx.IntImm("int32", number)])


def load(
    buffer: Buffer, where: Sequence[Expr | int], valid: int = LANES, lanes: int = LANES
) -> Expr:
    """Load `lanes` consecutive values of the last axis, reading only the first `valid` of them."""
    *outer, last = (index(i) for i in where)
    if valid == lanes:
        return buffer[tuple([*outer, ramp(last, lanes)])]
    dtype = f"{buffer.dtype}x{lanes}"
    return T.masked_load(dtype, buffer, *outer, ramp(last, lanes), first_lanes(valid, lanes))


def store(
    buffer: Buffer,
    where: Sequence[Expr | int],
    value: Expr,
    valid: int = LANES,
    lanes: int = LANES,
) -> None:
    """Store the first `valid` of the `lanes` of `value` along the last axis."""
    *outer, last = (index(i) for i in where)
    if valid == lanes:
        T.buffer_store(buffer, value, [*outer, ramp(last, lanes)])
    else:
        mask = first_lanes(valid, lanes)
        T.evaluate(T.masked_store(buffer, value, *outer, ramp(last, lanes), mask))


def flat(buffer: Buffer) -> Buffer:
    """Declare `buffer` once more, with one axis."""
    total: Expr = const(1)
    for extent in buffer.shape:
        total = total * extent
    return T.decl_buffer([total], buffer.dtype, data=buffer.data)


def gather(memory: Buffer, shape: Sequence[Expr], where: Sequence[Expr], axis: int) -> Expr:
    """Load a vector of values that are not neighbours.

    Parameters
    ----------
    memory : Buffer
        What `flat` returned.
    shape : sequence of Expr
        Shape of the tensor.
    where : sequence of Expr
        Index in the tensor; that of `axis` is a vector of `LANES`.
    axis : int
        Which one.

    Returns
    -------
    Expr
        The values.
    """
    rest: Expr = const(0)
    step: Expr = const(1)
    for number, extent in enumerate(shape):
        rest = rest * extent + (const(0) if number == axis else where[number])
        if number > axis:
            step = step * extent
    return memory[where[axis] * splat(step) + splat(rest)]


class Register:
    """One vector variable.

    Parameters
    ----------
    dtype : str, default "float32"
        Of one lane.
    lanes : int, default LANES
        How many.
    """

    def __init__(self, dtype: str = "float32", lanes: int = LANES) -> None:
        self._buffer = T.sblock_alloc_buffer((lanes,), dtype)
        self._range = ramp(0, lanes) if lanes > 1 else const(0)

    @property
    def value(self) -> Expr:
        """What it holds."""
        return self._buffer[self._range]

    def set(self, value: Expr) -> None:
        """Assign to it."""
        T.buffer_store(self._buffer, value, [self._range])


@contextmanager
def loop(extent: Expr | int, *, parallel: bool = False) -> Iterator[Expr]:
    """Open ``for i in range(extent)``; a constant extent of 1 makes no loop."""
    if isinstance(extent, tirx.IntImm):
        extent = int(extent.value)
    if isinstance(extent, int) and extent == 1:
        yield const(0)
        return
    with (T.parallel if parallel else T.serial)(index(extent)) as i:
        yield i


def bind(value: Expr | int) -> Expr:
    """Name an index expression, unless it is a constant or a name already."""
    if isinstance(value, (int, tirx.IntImm, tirx.Var)):
        return index(value)
    return T.Bind(value)


@contextmanager
def loops(extents: Sequence[Expr | int], *, parallel: bool = False) -> Iterator[list[Expr]]:
    """Open nested loops, fused into one; if `parallel`, that one is divided among threads."""
    total: Expr = 1
    for extent in extents:
        value = int(extent.value) if isinstance(extent, tirx.IntImm) else extent
        total = total * value
    if not parallel:
        with _nest(list(extents)) as indices:
            yield indices
        return
    with loop(total, parallel=True) as flat:
        indices = []
        for extent in reversed(extents[1:]):
            indices.append(bind(flat % index(extent)))
            flat = bind(flat // index(extent))
        yield [flat, *reversed(indices)]


@contextmanager
def _nest(extents: list[Expr | int]) -> Iterator[list[Expr]]:
    if not extents:
        yield []
        return
    with loop(extents[0]) as first, _nest(extents[1:]) as rest:
        yield [first, *rest]
