"""Interface for the rules of operators: arguments of a call, and methods that emit ONNX nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from onnx import helper

from bnncc.errors import ShapeError, UnsupportedOp
from bnncc.frontend.formula import Number
from bnncc.frontend.pytorch.program import Call, Meta, Ref
from bnncc.ir.dims import is_static
from bnncc.ir.graph import Dim, Node, elements


class Value(NamedTuple):
    """A tensor of the ONNX model, with the type that torch gave it."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.shape)


class Converter(Protocol):
    """Interface of `bnncc.frontend.pytorch.convert.Converter` that a site uses."""

    nodes: list[Node]
    initializers: dict[str, np.ndarray]
    metas: dict[str, Meta]

    def value(self, name: str) -> Value:
        """Return the ONNX tensor that currently holds a tensor of the program."""

    def constant(self, name: str) -> np.ndarray | None:
        """Return the value of an ONNX tensor, if it is known."""

    def owns(self, name: str) -> bool:
        """Whether a tensor of the program shares its elements with no other tensor."""

    def fresh(self, stem: str) -> str:
        """Return an unused name of an ONNX tensor."""


Name = Value | str
Rule = Callable[["Site"], Name | list[Any]]
"""Emits the nodes of a call; returns its first result, or a list of its results."""

FLOATS = ("bfloat16", "float16", "float32", "float64")
EVAL = "call model.eval() before torch.export.export"

_MISSING = object()
MAX_PARAMETER = 1 << 22


class Site:
    """One call of an operator."""

    def __init__(self, converter: Converter, call: Call) -> None:
        self._converter, self.call = converter, call

    @property
    def where(self) -> str:
        """Description of the call for messages."""
        return self.call.where

    @property
    def out(self) -> Meta:
        """Type of the first result."""
        return self._converter.metas[self.call.outputs[0]]

    def outs(self) -> list[Meta]:
        """Return the types of all results."""
        return [self._converter.metas[name] for name in self.call.outputs]

    # ------------------------------------------------------------------------------------ arguments

    def get(self, key: str, default: Any = None) -> Any:
        """Return an argument; a tensor or symbol as `Ref`."""
        value = self.call.args.get(key, _MISSING)
        return default if value is _MISSING else value

    def first(self) -> Any:
        """Return the first argument, whatever its name."""
        return next(iter(self.call.args.values()))

    def has(self, key: str) -> bool:
        """Whether an argument is given and not None."""
        return self.call.args.get(key) is not None

    def tensor(self, key: str) -> Value:
        """Return a tensor argument."""
        return self.value(self.call.args[key])

    def contiguous(self, key: str) -> bool:
        """Whether a tensor argument has storage of its own with default strides."""
        name = self.call.args[key].name
        return self._converter.owns(name) and self._converter.metas[name].contiguous

    def optional(self, key: str) -> Name:
        """Return a tensor argument, or ``""``."""
        return self.value(self.call.args[key]) if self.has(key) else ""

    def value(self, ref: Any) -> Value:
        """Return the current value of a `Ref`."""
        if not isinstance(ref, Ref):
            raise TypeError(f"{str(ref)[:40]} is not a tensor")
        return self._converter.value(ref.name)

    def stored(self, key: str) -> np.ndarray | None:
        """Return the value of a tensor argument that is stored in the file; None for others."""
        return self._converter.initializers.get(self.tensor(key).name)

    def held(self, value: Value) -> np.ndarray | None:
        """Return the value of a tensor that is stored in the file or constant; None for others."""
        return self._converter.constant(value.name)

    def ints(self, key: str, count: int, default: int | Sequence[int]) -> list[int]:
        """Return `count` numbers; a single one is repeated."""
        value = self.get(key)
        value = default if value is None or value == [] else value
        value = list(value) if isinstance(value, list | tuple) else [value]
        value = value * count if len(value) == 1 else value
        if len(value) != count or not all(isinstance(v, int) for v in value):
            raise UnsupportedOp(f"{self.where}: `{key}` is not {count} numbers known beforehand")
        return value

    def axis(self, key: str, rank: int, default: int = 0) -> int:
        """Return an axis as a non-negative number."""
        axis = self.get(key, default)
        if not -max(rank, 1) <= axis < max(rank, 1):
            raise UnsupportedOp(f"{self.where}: axis {axis} of a tensor with {rank}")
        return int(axis) % max(rank, 1)

    def refuse(self, what: str, hint: str | None = None) -> UnsupportedOp:
        """Return an error about an unsupported property of this call."""
        return UnsupportedOp(f"{self.where}: {what}", hint=hint)

    def refuse_training(self, *keys: str) -> None:
        """Raise that error if one of the arguments indicates training mode."""
        if any(self.get(key) for key in keys):
            raise self.refuse("is in training mode", hint=EVAL)

    def known(self, size: Any, axis: int) -> int:
        """Return the size of an axis, which must be known."""
        if not isinstance(size, int):
            raise self.refuse(f"axis {axis} is dynamic")
        return size

    def sizes(self, dims: Sequence[Any], unknown: str) -> list[int]:
        """Return sizes, which must be known; otherwise raise an error with the text `unknown`."""
        if not is_static(dims):
            raise self.refuse(unknown)
        return list(dims)

    # ------------------------------------------------------------------------------------- emitting

    def emit(self, op: str, inputs: Sequence[Name], **attrs: Any) -> str:
        """Emit a node with one result.

        Parameters
        ----------
        op : str
            ONNX operator.
        inputs : sequence
            Values, or names of emitted values; ``""`` for an absent input.
        **attrs
            Attributes; those that are None are omitted.
        """
        return self.emit_many(op, inputs, 1, **attrs)[0]

    def emit_many(self, op: str, inputs: Sequence[Name], count: int, **attrs: Any) -> list[str]:
        """Emit a node with `count` results; otherwise as `emit`."""
        names = [i.name if isinstance(i, Value) else i for i in inputs]
        while names and not names[-1]:
            names.pop()
        results = [self._converter.fresh(f"{self.call.name}_") for _ in range(count)]
        given = {k: v for k, v in attrs.items() if v is not None}
        self._converter.nodes.append(Node(op, names, results, given))
        return results

    def const(self, value: Any, dtype: str) -> str:
        """Return a constant tensor."""
        array = np.asarray(value, np.dtype(_numpy(dtype)))
        name = self._converter.fresh(f"{self.call.name}_const")
        self._converter.initializers[name] = array
        return name

    def full(self, shape: Sequence[int], number: float, dtype: str) -> str:
        """Return a tensor filled with one number, for an absent parameter of a layer."""
        if elements(shape, self.where) > MAX_PARAMETER:
            raise ShapeError(f"{self.where}: parameters of shape {list(shape)} are too large")
        return self.const(np.full(shape, number), dtype)

    def ints_const(self, values: Sequence[int]) -> str:
        """Return a constant vector of int64."""
        return self.const(list(values), "int64")

    def cast(self, value: Name, dtype: str, have: str = "") -> Name:
        """Convert `value` (of dtype `have`) to another dtype."""
        if isinstance(value, Value):
            have = value.dtype
        if have == dtype:
            return value
        to = int(helper.np_dtype_to_tensor_dtype(np.dtype(_numpy(dtype))))
        return self.emit("Cast", [value], to=to)

    def typed(self, value: Value, dtype: str) -> Value:
        """Convert `value` to another dtype, keeping its shape."""
        name = self.cast(value, dtype)
        return name if isinstance(name, Value) else Value(name, dtype, value.shape)

    def operand(self, given: Any, dtype: str) -> Name:
        """Return a tensor or number as an operand of type `dtype`."""
        if isinstance(given, Ref):
            return self.cast(self.value(given), dtype)
        return self.const(given, dtype)

    def number(self, given: Any, dtype: str = "") -> Number:
        """Return a tensor, number, or named argument as an operand of formulas.

        Parameters
        ----------
        given : str, Ref, Value or number
            The operand.
        dtype : str, optional
            Dtype of the formula; default: that of the result.
        """
        dtype = dtype or self.out.dtype
        given = self.get(given) if isinstance(given, str) else given
        name = self.cast(given, dtype) if isinstance(given, Value) else self.operand(given, dtype)
        return Number(self.emit, self.const, name, dtype)

    def reshape(self, value: Name, shape: Sequence[Any]) -> str:
        """Reshape `value` to numbers and symbols."""
        return self.emit("Reshape", [value, self.shape(shape)])

    def transpose(self, value: Name, perm: Sequence[int]) -> str:
        """Return `value` with its axes in another order."""
        return self.emit("Transpose", [value], perm=list(perm))

    def slice(self, value: Name, axis: int, start: int, end: int, step: int = 1) -> str:
        """Return a part of `value` along an axis."""
        bounds = [self.ints_const([n]) for n in (start, end, axis, step)]
        return self.emit("Slice", [value, *bounds])

    def shape(self, dims: Sequence[Any]) -> str:
        """Return a vector of numbers and symbols (`Ref`)."""
        if is_static(dims):
            return self.ints_const(dims)
        parts = [self.value(d) if isinstance(d, Ref) else self.ints_const([d]) for d in dims]
        only = parts[0]
        if len(parts) == 1:
            return only.name if isinstance(only, Value) else only
        return self.emit("Concat", parts, axis=0)

    def shape_of(self, value: Value) -> str:
        """Return the shape of `value` as a vector."""
        if is_static(value.shape):
            return self.ints_const([d for d in value.shape if isinstance(d, int)])
        return self.emit("Shape", [value])

    def expand(self, value: Name, like: Value) -> str:
        """Return `value` broadcast to the shape of `like`."""
        return self.emit("Expand", [value, self.shape_of(like)])

    def filled(self, shape: str, number: Any, dtype: str) -> str:
        """Return a tensor filled with one number; `shape` is a vector."""
        value = np.full(1, number, np.dtype(_numpy(dtype)))
        return self.emit("ConstantOfShape", [shape], value=value)


def _numpy(dtype: str) -> Any:
    if dtype == "bfloat16":
        import ml_dtypes

        return ml_dtypes.bfloat16
    return dtype
