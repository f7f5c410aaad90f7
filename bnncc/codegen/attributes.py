"""Attributes of the Relax operators: a typed class for each kind of kernel, derived from its spec.

Each field of the spec is an attribute, with its type and default, except ``n``, ``height`` and
``width``, which follow from the first operand. Nested data (steps, a fused pooling) are lists of
maps, or maps, of the fields that differ from their defaults; they print and parse like Python.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin, get_type_hints

import tvm_ffi
from tvm import tirx
from tvm.ir import Attrs
from tvm_ffi.dataclasses import py_class

from bnncc.topi_binary.spec import RowPool, Spec, Step

EXTENTS = ("n", "height", "width")
"""Fields that follow from the first operand."""

_NESTED = tvm_ffi.Map[str, Any]


@functools.cache
def of_kind(kind: type[Any]) -> type[Attrs]:
    """Return the attribute class for a spec class."""
    hints = get_type_hints(kind)
    fields = [field for field in dataclasses.fields(kind) if field.name not in EXTENTS]
    types = {field.name: _type(hints[field.name]) for field in fields}
    defaults = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
    name = f"{kind.__name__}Attrs"
    body = {"__annotations__": types, "__module__": __name__, "__doc__": kind.__doc__, **defaults}
    made: type[Attrs] = py_class(f"bnncc.attrs.{name}")(type(name, (Attrs,), body))
    return made


def _type(hint: Any) -> Any:
    """Return TVM's type for a field."""
    if hint in (bool, float, int, str):
        return hint
    if hint is Step:
        return _NESTED
    if hint == RowPool | None:
        return _NESTED | None
    if get_origin(hint) is tuple:
        return tvm_ffi.Array[_type(get_args(hint)[0])]
    raise TypeError(f"no attribute can be a {hint}")


def of_spec(spec: Spec) -> Attrs:
    """Return the attributes of a call that computes `spec`."""
    given = {key: _nested(value) for key, value in _fields(spec) if key not in EXTENTS}
    kind: Any = type(spec)
    return of_kind(kind)(**given)


def to_spec(kind: type[Any], attrs: Attrs, data: Any) -> Spec:
    """Return the spec of a call.

    Parameters
    ----------
    kind : type
        Class of the spec.
    attrs : Attrs
        Of the call, from `of_spec` or from the text of a module.
    data : relax.TensorType
        Type of the first operand.

    Raises
    ------
    TypeError
        If an attribute or the operand does not fit this kind.
    """
    own = {field.name for field in dataclasses.fields(kind)}
    given = {key: _plain(getattr(attrs, key)) for key in own - set(EXTENTS)}
    if "steps" in given:
        given["steps"] = tuple(_step(one) for one in given["steps"])
    if given.get("pool") is not None:
        before = tuple(_step(one) for one in given["pool"].pop("before", ()))
        given["pool"] = RowPool(**given["pool"], before=before)
    found = _extents(given, data)
    spec: Spec = kind(**given, **{key: value for key, value in found.items() if key in own})
    return spec


def _extents(given: Mapping[str, Any], data: Any) -> dict[str, int | str]:
    """Return batch and extents of the image in the first operand."""
    shape = None if data.shape is None else [_dim(d) for d in data.shape.values]
    if shape is None or not 2 <= len(shape) <= 4:
        raise TypeError(f"data of 2 to 4 dimensions with known extents expected, got {data}")
    planar = given.get("data_layout") == "NCHW" and str(data.dtype) != "uint32"
    image = (shape[2:] if planar else shape[1:3]) if len(shape) == 4 else [1, 1]
    return dict(zip(EXTENTS, [shape[0], *image], strict=True))


def _dim(value: Any) -> int | str:
    """Return a dimension as a number, the name of a symbol, or a product of both (``9*N``)."""
    if isinstance(value, tirx.Mul):
        return f"{_dim(value.a)}*{_dim(value.b)}"
    return int(value) if isinstance(value, tirx.IntImm) else str(value)


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    return ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))


def _nested(value: Any) -> Any:
    """Convert dataclasses in a field's value to maps, omitting defaults."""
    if isinstance(value, tuple):
        return [_nested(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # in TVM's notation
    if not isinstance(value, (Step, RowPool)):
        return value
    defaults = {field.name: field.default for field in dataclasses.fields(value)}
    # Compare texts, because -0.0 == 0.0.
    return {k: _nested(one) for k, one in _fields(value) if repr(one) != repr(defaults[k])}


def _step(given: Mapping[str, Any]) -> Step:
    floats = {key: float(given[key]) for key in ("lo", "hi") if isinstance(given.get(key), str)}
    return Step(**{**given, **floats})


def _plain(value: Any) -> Any:
    """Convert a field's value from TVM's types to Python's."""
    if isinstance(value, tvm_ffi.Array):
        return tuple(_plain(one) for one in value)
    if isinstance(value, tvm_ffi.Map):
        return {str(key): _plain(one) for key, one in value.items()}
    return value
