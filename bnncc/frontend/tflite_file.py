"""The tables of a TensorFlow Lite file: tensors and operators, checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bnncc.errors import ModelError, ShapeError, UnsupportedOp
from bnncc.frontend import checks
from bnncc.frontend.flatbuffer import Table
from bnncc.ir.graph import MAX_RANK, Dim, elements

Array = np.ndarray[Any, Any]

IDENTIFIER = b"TFL3"
"""Identifier at byte 4 of a file."""

_TYPES = {
    0: "float32", 1: "float16", 2: "int32", 3: "uint8", 4: "int64", 6: "bool", 7: "int16",
    9: "int8", 10: "float64", 12: "uint64", 15: "uint32", 16: "uint16",
}  # fmt: skip
_TYPE_NAMES = {5: "string", 8: "complex64", 11: "complex128", 13: "resource", 14: "variant",
               17: "int4"}  # fmt: skip
CUSTOM = 32
_LONGEST_NAME = 120
"""Maximum length of a name: the converter joins the names of all fused operators."""
_OLD_CODES = 127
"""Largest operator code in old files; newer codes have a separate field."""


@dataclass(frozen=True)
class Quantization:
    """Quantization of a tensor: ``scale * (q - zero_point)``."""

    scale: Array
    """float32: one scale, or one per index of `axis`."""
    zero_point: Array
    """int64: the same number of zero points."""
    axis: int
    """Axis of multiple scales."""

    def same(self, other: Quantization | None) -> bool:
        """Whether integers have the same meaning with both."""
        return (
            other is not None
            and np.array_equal(self.scale, other.scale)
            and np.array_equal(self.zero_point, other.zero_point)
        )


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor of the file."""

    name: str
    """Unique name, usually the file's."""
    dtype: str
    """NumPy name."""
    shape: tuple[Dim, ...]
    """A str is a dynamic dimension."""
    data: Array | None = None
    """The value of a constant."""
    quantization: Quantization | None = None
    """Quantization of integers that represent real numbers."""


@dataclass(frozen=True, eq=False)
class Operator:
    """An operator of the file."""

    code: int
    """Code of a builtin operator."""
    op: str
    """Name of a custom operator, otherwise empty."""
    inputs: tuple[Tensor | None, ...]
    outputs: tuple[Tensor, ...]
    """`inputs`, `outputs`: an absent input is None."""
    options: Table | None
    """Options of a builtin operator."""
    custom: bytes
    """Options of a custom operator."""


@dataclass(frozen=True)
class Network:
    """The graph of a file."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    """`inputs`, `outputs`: in file order."""
    operators: tuple[Operator, ...]
    """In execution order."""
    size: int
    """Size of the file in bytes."""


def parse(data: bytes) -> Network:
    """Read the tables of a TensorFlow Lite file.

    Raises
    ------
    ModelError
        If the file is damaged.
    UnsupportedOp
        If it has several subgraphs, variables or sparse tensors.
    """
    if len(data) < 8 or data[4:8] != IDENTIFIER:
        raise ModelError("not a TensorFlow Lite file, or a truncated one")
    model = Table.root(data)
    if (version := model.scalar(0, "uint32")) != 3:
        raise ModelError(f"schema version {version}, expected 3")
    graphs = model.tables(2)
    if len(graphs) != 1:
        raise UnsupportedOp(f"{len(graphs)} subgraphs (control flow?), expected one")
    graph = graphs[0]
    codes = [_code(table) for table in model.tables(1)]
    buffers = model.tables(4)
    names: set[str] = set()
    tensors = [_tensor(t, k, buffers, names) for k, t in enumerate(graph.tables(0))]
    tables = graph.tables(3)
    if len(tables) > checks.MAX_NODES:
        raise ModelError(f"{len(tables)} operators, expected at most {checks.MAX_NODES}")
    operators = tuple(_operator(t, k, codes, tensors) for k, t in enumerate(tables))
    inputs = _listed(graph.numbers(1, "int32"), tensors, "input")
    outputs = _listed(graph.numbers(2, "int32"), tensors, "output")
    for tensor in inputs:
        if tensor.data is not None:
            raise ModelError(f"input `{tensor.name}`: holds a constant")
    return Network(inputs, outputs, operators, len(data))


def _code(table: Table) -> tuple[int, str]:
    old, new = table.scalar(0, "int8"), table.scalar(3, "int32")
    code = max(old, new) if old <= _OLD_CODES else new
    if code != CUSTOM:
        return int(code), ""
    return CUSTOM, table.text(1)[:_LONGEST_NAME] or "a custom operator without a name"


def _tensor(table: Table, index: int, buffers: Sequence[Table], names: set[str]) -> Tensor:
    stem = table.text(3) or f"tensor_{index}"
    stem = stem if len(stem) <= _LONGEST_NAME else f"{stem[:_LONGEST_NAME]}..."
    name, serial = stem, 1
    while name in names:
        serial += 1
        name = f"{stem}_{serial}"
    names.add(name)
    where = f"tensor `{name}`"
    kind = int(table.scalar(1, "int8"))
    if kind not in _TYPES:
        found = _TYPE_NAMES.get(kind, f"number {kind}")
        raise ModelError(f"{where}: tensors of type {found} are not supported")
    if table.scalar(5, "bool"):
        raise UnsupportedOp(f"{where}: is a variable, which keeps its value between runs")
    if table.has(6):
        raise UnsupportedOp(f"{where}: is stored sparsely; store it densely")
    sizes = [int(d) for d in table.numbers(0, "int32")]
    signature = [int(d) for d in table.numbers(7, "int32")] or sizes
    if len(sizes) > MAX_RANK or len(signature) != len(sizes):
        raise ShapeError(
            f"{where}: has {len(sizes)} dimensions and a signature of {len(signature)}, "
            f"expected the same number, at most {MAX_RANK}"
        )
    shape = tuple(d if d != -1 else f"dim{k}" for k, d in enumerate(signature))
    elements(shape, where)
    data = _constant(table, _TYPES[kind], sizes, buffers, where)
    return Tensor(name, _TYPES[kind], shape, data, _quantization(table.table(4), sizes, where))


def _constant(
    table: Table, dtype: str, sizes: Sequence[int], buffers: Sequence[Table], where: str
) -> Array | None:
    index = int(table.scalar(2, "uint32"))
    if index == 0:
        return None
    if index >= len(buffers):
        raise ModelError(f"{where}: buffer {index} of {len(buffers)}")
    if buffers[index].scalar(1, "uint64") > 1:
        raise UnsupportedOp(f"{where}: its data lies behind the FlatBuffer (a file above 2 GiB)")
    raw = buffers[index].numbers(0, "uint8")
    if not raw.size:
        return None
    wanted = math.prod(sizes) * np.dtype(dtype).itemsize
    if raw.size != wanted or min(sizes, default=0) < 0:
        raise ModelError(f"{where}: holds {raw.size} bytes, shape {list(sizes)} needs {wanted}")
    return raw.view(np.dtype(dtype).newbyteorder("<")).astype(dtype, copy=False).reshape(sizes)


def _quantization(table: Table | None, sizes: Sequence[int], where: str) -> Quantization | None:
    if table is None:
        return None
    scale, zero = table.numbers(2, "float32"), table.numbers(3, "int64")
    if not scale.size:
        return None
    if zero.size not in (0, scale.size):
        raise ModelError(f"{where}: {scale.size} scales and {zero.size} zero points")
    if not np.isfinite(scale).all() or (scale <= 0).any():
        raise ModelError(f"{where}: a scale is {float(scale.min())}, expected positive ones")
    axis = int(table.scalar(6, "int32"))
    if scale.size > 1 and (not 0 <= axis < len(sizes) or sizes[axis] != scale.size):
        raise ModelError(f"{where}: {scale.size} scales for axis {axis} of shape {list(sizes)}")
    if (np.abs(zero) > 1 << 16).any():
        raise ModelError(f"{where}: a zero point is {int(np.abs(zero).max())}")
    points = zero.astype(np.int64) if zero.size else np.zeros(scale.size, np.int64)
    return Quantization(scale.astype(np.float32), points, axis)


def _operator(
    table: Table, index: int, codes: Sequence[tuple[int, str]], tensors: Sequence[Tensor]
) -> Operator:
    number = int(table.scalar(0, "uint32"))
    if number >= len(codes):
        raise ModelError(f"operator {index}: operator code {number} of {len(codes)}")
    code, op = codes[number]
    outputs = _listed(table.numbers(2, "int32"), tensors, f"operator {index}: output")
    if not outputs:
        raise ModelError(f"operator {index}: has no outputs")
    inputs = tuple(
        None if k == -1 else _at(int(k), tensors, f"operator {index}: input")
        for k in table.numbers(1, "int32")
    )
    options = table.table(4) if table.scalar(3, "uint8") else None
    if table.scalar(9, "uint64") > 1:
        raise UnsupportedOp(f"{op} `{outputs[0].name}`: its options lie behind the FlatBuffer")
    return Operator(code, op, inputs, outputs, options, table.numbers(5, "uint8").tobytes())


def _listed(indices: Array, tensors: Sequence[Tensor], where: str) -> tuple[Tensor, ...]:
    return tuple(_at(int(k), tensors, where) for k in indices)


def _at(index: int, tensors: Sequence[Tensor], where: str) -> Tensor:
    if not 0 <= index < len(tensors):
        raise ModelError(f"{where}: tensor {index} of {len(tensors)}")
    return tensors[index]
