"""The calls of a network without a runtime, and the place of every tensor in its arena."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx

from bnncc.codegen import arena, memory, row_wise
from bnncc.codegen.arena import aligned
from bnncc.codegen.c_text import Call, Order, Place
from bnncc.codegen.row_wise import VALUE, Chain, Program, Traced, Value
from bnncc.errors import TargetError
from bnncc.schedules import weight_orders
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary.definitions import define
from bnncc.topi_binary.signature import spec_of
from bnncc.topi_binary.spec import BinaryConv2d, Spec, from_json

Planned = tuple[Order, dict[str, tirx.PrimFunc]]
"""The calls of a network, and definitions of the kernels for bands."""


def planned(
    module: tvm.IRModule, given: Sequence[str], made: Sequence[str], target: TargetSpec | None
) -> Planned:
    """Return the calls of ``main`` with the place of every tensor.

    Parameters
    ----------
    module : tvm.IRModule
        From `pipeline.in_calls`.
    given, made : sequence of str
        Names of inputs and outputs.
    target : TargetSpec or None
        The target whose kernels may run row-wise, if that lowers the peak of memory.

    Returns
    -------
    order : Order
        The calls.
    bands : dict of str to PrimFunc
        Definitions of the kernels for bands.

    Raises
    ------
    TargetError
        If the network needs TVM's runtime.
    """
    trace = _traced(module, given, made)
    whole = _placed(trace, [])
    if target is None:
        return whole

    @cache
    def fits(spec: Spec) -> bool:
        if not isinstance(spec, BinaryConv2d) or spec.per_image:
            return True
        return spec.weight_order in weight_orders(spec, target)

    if not (chains := row_wise.chosen(trace.program, fits)):
        return whole
    return smaller(whole, _placed(trace, chains))


def smaller(whole: Planned, chained: Planned) -> Planned:
    """Return the plan with the smaller arena."""
    return chained if chained[0].arena < whole[0].arena else whole


def _traced(module: tvm.IRModule, given: Sequence[str], made: Sequence[str]) -> _Trace:
    """Read the calls of ``main``."""
    trace = _Trace(module)
    main = module["main"]
    for var, name in zip(main.params, given, strict=True):
        trace.tensors[var] = Place(name, str(var.ty.dtype))
    for block in main.body.blocks:
        for binding in block.bindings:
            trace.binding(binding.var, binding.value)
    trace.results(main.body.body, made)
    return trace


class _Trace:
    """The calls of a network, with a value for each tensor that is no input."""

    def __init__(self, module: tvm.IRModule) -> None:
        self.tensors: dict[Any, Any] = {}
        """By variable: a place, or a tuple of places."""
        self.weights: list[np.ndarray] = []
        self.weight_bytes = 0
        self.copies: list[tuple[Place, Place, int]] = []
        self.program = Program([], [], set())
        self._module = module
        self._constants: dict[Any, Place] = {}
        self._newest: dict[int, int] = {}  # by value: the one that overwrites it

    def binding(self, var: Any, expr: Any) -> None:
        """Read one binding."""
        op = str(getattr(getattr(expr, "op", None), "name", ""))
        if op == "relax.builtin.alloc_tensor":
            self.tensors[var] = self._value(str(var.ty.dtype), memory.tensor_bytes(var.ty))
        elif isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.GlobalVar):
            self._call(expr.op.name_hint, [self._now(self._held(a)) for a in expr.args])
        elif op in ("relax.reshape", "relax.memory.view"):
            self.tensors[var] = replace(self._held(expr.args[0]), dtype=str(var.ty.dtype))
        elif isinstance(expr, relax.Call):
            raise TargetError(f"`{op or expr.op}` needs TVM's runtime, which C code lacks")
        else:
            self.tensors[var] = self._held(expr)

    def results(self, body: Any, made: Sequence[str]) -> None:
        """Read the results, which are written in place unless they lie elsewhere."""
        listed = list(body.fields) if isinstance(body, relax.Tuple) else None
        whole = self._held(body)
        places = [self._held(f) for f in listed] if listed is not None else whole
        kinds = body.ty.fields if isinstance(body.ty, relax.TupleType) else [body.ty]
        values = self.program.values
        for name, place, kind in zip(
            made, places if isinstance(places, list | tuple) else [places], kinds, strict=True
        ):
            origin = self._now(place)
            output = Place(name, origin.dtype)
            if origin.root == VALUE and values[origin.offset].home is None:
                values[origin.offset] = replace(values[origin.offset], home=output)
                continue
            self.copies.append((output, origin, memory.tensor_bytes(kind)))
            self.program.kept |= {origin.offset} if origin.root == VALUE else set()

    def _value(self, dtype: str, size: int) -> Place:
        self.program.values.append(Value(size))
        return Place(VALUE, dtype, len(self.program.values) - 1)

    def _constant(self, expr: Any) -> Place:
        array = np.ascontiguousarray(expr.value.numpy())
        self.weights.append(array)
        start = self.weight_bytes
        self.weight_bytes += aligned(array.nbytes)
        return Place("constants", str(expr.ty.dtype), start)

    def _held(self, expr: Any) -> Any:
        if isinstance(expr, relax.Tuple):
            return tuple(self._held(f) for f in expr.fields)
        if isinstance(expr, relax.TupleGetItem):
            return self._held(expr.tuple_value)[expr.index]
        if isinstance(expr, relax.Var):
            return self.tensors[expr]
        if expr not in self._constants:
            self._constants[expr] = self._constant(expr)
        return self._constants[expr]

    def _now(self, place: Place) -> Place:
        while place.root == VALUE and place.offset in self._newest:
            place = replace(place, offset=self._newest[place.offset])
        return place

    def _call(self, kernel: str, args: list[Place]) -> None:
        text = spec_of(self._module[kernel])
        call = Traced(kernel, from_json(text) if text else None, args)
        fresh = iter(call.args[len(call.ins) :])
        for over in call.over:
            if over < 0:
                call.outs.append(next(fresh))
                continue
            old = call.args[over]
            call.outs.append(self._value(old.dtype, self.program.values[old.offset].size))
            self._newest[old.offset] = call.outs[-1].offset
        self.program.calls.append(call)


class _Variants:
    """Names of the kernels for bands."""

    def __init__(self, taken: set[str]) -> None:
        self.names: dict[tuple[str, Spec], str] = {}
        self._taken = taken

    def __call__(self, call: Traced, spec: Spec) -> str:
        """Return the name of the kernel that computes a band of a call."""
        if spec == call.spec:
            return call.kernel
        key = call.kernel, spec
        if key not in self.names:
            number = 1
            while (name := f"{call.kernel}_rows{number}") in self._taken:
                number += 1
            self._taken.add(name)
            self.names[key] = name
        return self.names[key]


def _placed(trace: _Trace, chains: Sequence[Chain]) -> Planned:
    """Plan the arena, and give the calls the places of all tensors; as for `planned`."""
    program = trace.program
    spans, shared = row_wise.spans(program, chains)
    starts, size = arena.offsets([*spans.values()])
    offsets = dict(zip(spans, starts, strict=True))
    homes = {shared[n]: v.home for n, v in enumerate(program.values) if v.home is not None}
    variants = _Variants({call.kernel for call in program.calls})
    order = Order(weights=trace.weights, arena=size, weight_bytes=trace.weight_bytes)

    def place(of: Place) -> Place:
        if of.root != VALUE:
            return of
        key = of.offset if of.offset in offsets else shared[of.offset]
        home = homes.get(key)
        if home is not None:
            return replace(home, dtype=of.dtype)
        return replace(of, root="base", offset=offsets[key])

    by_first = {one.first: one for one in chains}
    order.rows = [0] * len(program.calls)
    for one in chains:
        order.rows[one.first : one.last + 1] = one.units
    for number, call in enumerate(program.calls):
        if number in by_first:
            writer = row_wise.Writer(by_first[number], place, offsets, variants)
            order.statements += writer.statements()
        elif not order.rows[number]:
            order.statements.append(Call(call.kernel, tuple(map(place, call.args))))
    order.copies = [(to, place(origin), size) for to, origin, size in trace.copies]
    order.live = row_wise.live(program, chains)
    order.variants = {name: kernel for (kernel, _), name in variants.names.items()}
    return order, {name: define(spec) for (_, spec), name in variants.names.items()}
