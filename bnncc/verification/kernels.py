"""Run every kernel of an artifact alone, on the inputs it has in the network, and compare.

The network is lowered again, up to code generation, with the options in the manifest. This gives
the calls of kernels; values between kernels come from NumPy oracles
(`bnncc.topi_binary.reference`). Operators that TVM legalized have no oracle in bnncc: TVM's
unscheduled definition, compiled for this machine, takes its place. So each kernel of the artifact
is compared with an independent result, from correct inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx

from bnncc.codegen import memory
from bnncc.codegen.pipeline import NO_SLP
from bnncc.errors import VerificationError
from bnncc.ir.halves import is_float
from bnncc.runtime.compare import differs, gap, largest, overflows
from bnncc.topi_binary.build import aliases
from bnncc.topi_binary.layout import LANES, blocks
from bnncc.topi_binary.reference import evaluate_kernel
from bnncc.topi_binary.signature import spec_of
from bnncc.topi_binary.spec import Spec, from_json
from bnncc.topi_binary.step import output_kinds

Array = np.ndarray[Any, Any]
Compute = Callable[[Sequence[Array]], list[Array]]

_NUDGES = 24
_NUDGE = 2e-6
"""How far inputs are moved, relatively, to see what rounding decides."""

_CALLS = "relax.call_tir", "relax.call_tir_inplace"

_WORDS = {"bytes": "<u1", "pairs": "<u2", "floats": "<f4"}


class NotFollowed(VerificationError):
    """The values in a network cannot be followed."""


@dataclass(frozen=True)
class KernelCase:
    """One call of a kernel."""

    name: str
    """The kernel."""
    inputs: list[Array]
    """In its order."""
    sizes: dict[int, int]
    """By position among the arguments: what symbols stand for."""
    over: list[int]
    """For each output, which input it is stored over; -1 where it has an argument of its own."""
    outputs: list[Array]
    """What is right."""
    compute: Compute
    """Makes right outputs of other inputs."""
    meaningful: list[Array | None]
    """For each output, which elements mean something; None where all do."""

    def differences(self, made: Sequence[Array]) -> tuple[int, float]:
        """Compare the results of the kernel with the correct ones.

        What overflows is not compared: sums of large terms, in another order, give other infinities
        or none, and processors choose between NaN and a number as they like.

        Returns
        -------
        count : int
            Number of wrong elements, not counting those that rounding decides; a word counts once.
        largest : float
            The largest difference of floats.
        """
        if len(made) != len(self.outputs):
            return sum(o.size for o in self.outputs), float("inf")
        if any(bool(np.isnan(a).any()) for a in self.inputs if is_float(a)):
            return 0, 0.0
        wrong = [
            _wrong(mine, want, mask)
            for mine, want, mask in zip(made, self.outputs, self.meaningful, strict=True)
        ]
        both = list(zip(made, self.outputs, strict=True))
        gaps = [
            gap(np.where(overflows(mine, want), want, mine), want)
            for mine, want in both
            if want.dtype.kind == "f" and mine.shape == want.shape
        ]
        rng = np.random.default_rng(0)
        for _ in range(_NUDGES):
            if not any(w.any() for w in wrong):
                break
            other = self.compute([_nudged(a, rng) for a in self.inputs])
            for k, (mine, want, moved) in enumerate(zip(made, self.outputs, other, strict=True)):
                wrong[k] = _left(wrong[k], mine, want, moved)
        return sum(int(np.count_nonzero(w)) for w in wrong), max(gaps, default=0.0)


def _wrong(mine: Array, want: Array, mask: Array | None) -> Array:
    """Return which elements differ; of words, which bits."""
    same = mine.shape == want.shape and mine.dtype == want.dtype
    if same and want.dtype == np.uint32:
        return (mine ^ want) if mask is None else (mine ^ want) & mask
    wrong = differs(mine, want)
    if same:
        wrong &= ~overflows(mine, want)
    return wrong & mask if same and mask is not None and want.dtype.kind == "f" else wrong


def _left(wrong: Array, mine: Array, want: Array, moved: Array) -> Array:
    """Return what is still wrong if a small change of the inputs turns `want` into `moved`."""
    if wrong.dtype == np.uint32:
        return wrong & ~(want ^ moved)
    if want.dtype.kind == "f":
        return wrong & ~_wrong(moved, want, None)
    return wrong & (want == moved)


def _nudged(array: Array, rng: np.random.Generator) -> Array:
    """Return floats with a small change, and everything else, integral values too, unchanged."""
    if array.dtype.kind != "f" or not array.size or bool((np.rint(array) == array).all()):
        return array
    move = rng.uniform(-_NUDGE, _NUDGE, array.shape)
    top = largest(array)
    return (array + move * np.maximum(np.abs(array), 1e-3 * top)).astype(array.dtype)


class KernelWalk:
    """Goes through a legalized network, kernel by kernel.

    Parameters
    ----------
    module : tvm.IRModule
        From `bnncc.codegen.pipeline.legalize`.
    """

    def __init__(self, module: tvm.IRModule) -> None:
        self._module = module
        self._foreign: Any = None
        self._symbols: dict[str, int] = {}

    def constants(self) -> list[Array]:
        """Return the constants that kernels read."""
        found: dict[Any, Array] = {}
        for binding in self._bindings():
            for arg in _arguments(binding.value):
                if isinstance(arg, tvm.ir.GenericConst):
                    found.setdefault(arg, arg.value.numpy())
        return list(found.values())

    def calls(self) -> list[str]:
        """Return the name of the kernel of each call."""
        values = [binding.value for binding in self._bindings()]
        return [value.args[0].name_hint for value in values if _operator(value) in _CALLS]

    def cases(self, feeds: Sequence[Array]) -> Iterator[KernelCase]:
        """Yield every call in order, for given inputs of the network.

        Yields
        ------
        KernelCase

        Raises
        ------
        NotFollowed
            If a value cannot be followed.
        """
        params = self._module["main"].params
        values: dict[Any, Any] = dict(zip(params, feeds, strict=True))
        for param, array in values.items():
            for dim, extent in zip(param.ty.shape.values, array.shape, strict=True):
                if isinstance(dim, tirx.Var):
                    self._symbols[dim.name] = extent
        for binding in self._bindings():
            value = binding.value
            op = _operator(value)
            if op in _CALLS:
                given = [
                    self._size(arg) if tvm.ir.is_prim_expr(arg) else _held(arg, values)
                    for arg in _arguments(value)
                ]
                case = self._case(value, given)
                yield case
                kinds = binding.var.ty
                single = not isinstance(kinds, relax.TupleType)
                values[binding.var] = case.outputs[0] if single else tuple(case.outputs)
            elif op in ("relax.reshape", "relax.memory.view"):
                shape = [self._size(d) for d in binding.var.ty.shape.values]
                values[binding.var] = _held(value.args[0], values).reshape(shape)
            elif isinstance(value, relax.Call):
                raise NotFollowed(f"cannot follow `{op or value.op}` in the network")
            else:
                values[binding.var] = _held(value, values)

    def _size(self, dim: Any) -> int:
        return int(dim) if isinstance(dim, int) else memory.at_one(dim, self._symbols)

    def _bindings(self) -> Iterator[Any]:
        for block in self._module["main"].body.blocks:
            yield from block.bindings

    def _case(self, call: Any, inputs: list[Any]) -> KernelCase:
        name = call.args[0].name_hint
        func = self._module[call.args[0]]
        made = list(call.ty.fields) if isinstance(call.ty, relax.TupleType) else [call.ty]
        sizes = {k: v for k, v in enumerate(inputs) if isinstance(v, int)}
        arrays = [np.asarray(v, order="C") for k, v in enumerate(inputs) if k not in sizes]
        if text := spec_of(func):
            spec = from_json(text)
            outputs = evaluate_kernel(spec, arrays)
            over = list(aliases(spec))
            return KernelCase(
                name, arrays, sizes, over, outputs, lambda given: evaluate_kernel(spec, given),
                _meaningful(spec, outputs),
            )  # fmt: skip
        shapes = [([self._size(d) for d in t.shape.values], str(t.dtype)) for t in made]
        compute = self._definition(name, shapes, sizes)
        none = [-1] * len(made)
        empty: list[Array | None] = [None] * len(made)
        return KernelCase(name, arrays, sizes, none, compute(arrays), compute, empty)

    def _definition(
        self, name: str, shapes: Sequence[tuple[list[int], str]], sizes: Mapping[int, int]
    ) -> Compute:
        """Return TVM's own definition of a kernel as a function of arrays."""
        if self._foreign is None:
            functions = {
                var.name_hint: func.with_attr("global_symbol", var.name_hint)
                for var, func in self._module.functions_items()
                if isinstance(func, tirx.PrimFunc) and not spec_of(func)
            }
            target = tvm.target.Target({"kind": "llvm", **NO_SLP})
            with memory.lowering():
                self._foreign = tvm.compile(tvm.IRModule(functions), target=target)

        def compute(arrays: Sequence[Array]) -> list[Array]:
            outputs = [tvm.runtime.tensor(np.zeros(shape, dtype)) for shape, dtype in shapes]
            given = [tvm.runtime.tensor(np.asarray(a, order="C")) for a in arrays]
            self._foreign[name](*_with_sizes(given, sizes), *outputs)
            return [out.numpy() for out in outputs]

        return compute


def _operator(value: Any) -> str:
    """Return the name of the operator that is called, if one is."""
    return str(getattr(getattr(value, "op", None), "name", ""))


def _with_sizes(arrays: Sequence[Any], sizes: Mapping[int, int]) -> list[Any]:
    """Return the arguments of a kernel in its order: fusion may put sizes before tensors."""
    made = list(arrays)
    for place in sorted(sizes):
        made.insert(place, sizes[place])
    return made


def _arguments(value: Any) -> list[Any]:
    if not isinstance(value, relax.Call) or len(value.args) < 2:
        return []
    return list(value.args[1].fields) if isinstance(value.args[1], relax.Tuple) else []


def _held(expr: Any, values: Mapping[Any, Any]) -> Any:
    if isinstance(expr, tvm.ir.GenericConst):
        return expr.value.numpy()
    if isinstance(expr, relax.Tuple):
        return tuple(_held(f, values) for f in expr.fields)
    if isinstance(expr, relax.TupleGetItem):
        return _held(expr.tuple_value, values)[expr.index]
    if expr in values:
        return values[expr]
    raise NotFollowed(f"cannot follow `{type(expr).__name__}` in the network")


def _meaningful(spec: Spec, outputs: Sequence[Array]) -> list[Array | None]:
    """Return which parts of outputs are defined: values of absent channels are not."""
    kinds = [kind for step in spec.steps for kind in output_kinds(step)]
    if len(kinds) != len(outputs):
        return [None] * len(outputs)
    masks: list[Array | None] = []
    for kind, out in zip(kinds, outputs, strict=True):
        if kind not in _WORDS:
            masks.append(None)
            continue
        channels = spec.output_channels
        wide = np.zeros((*out.shape[:-1], blocks(channels) * LANES), bool)
        wide[..., :channels] = True
        if kind == "floats":
            masks.append(wide)
        else:
            dtype = _WORDS[kind].replace("u", "i")
            masks.append(np.where(wide, -1, 0).astype(dtype).view("<u4"))
    return masks


def garbage(array: Array) -> Array:
    """Return an array like `array` filled with values that no kernel writes by chance."""
    size = -(-array.nbytes // 4)
    raw = np.full(size, 0x5A5A5A5A, "uint32").view(np.uint8)[: array.nbytes]
    if array.dtype.kind == "b":
        raw = raw & np.uint8(1)
    return np.ascontiguousarray(raw).view(array.dtype).reshape(array.shape)


def run(session: Any, case: KernelCase) -> list[Array]:
    """Run a kernel of an artifact.

    Returns
    -------
    list of ndarray
        Its outputs; none if it fails.
    """
    fresh = [garbage(o) for o, over in zip(case.outputs, case.over, strict=True) if over < 0]
    try:
        after = session.run_kernel(case.name, [*_with_sizes(case.inputs, case.sizes), *fresh])
    except (RuntimeError, ValueError, TypeError):  # what TVM raises for a kernel's own checks
        return []
    own = iter(after[len(case.inputs) + len(case.sizes) :])
    return [
        (after[over] if over >= 0 else next(own)).reshape(want.shape)
        for over, want in zip(case.over, case.outputs, strict=True)
    ]
