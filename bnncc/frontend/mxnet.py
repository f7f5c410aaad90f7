"""Read MXNet's and BMXNet's networks: ``NAME-symbol.json`` with ``NAME-0000.params``, as ONNX.

The files do not contain the input's shape. It is given by the user, by an attribute in the file
(Gluon), or derived from the weights if the first layer is fully connected.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx

from bnncc.errors import BnnccError, ModelError, ShapeError, UnsupportedOp, UsageError
from bnncc.files import model_stem
from bnncc.frontend.mxnet_build import Builder
from bnncc.frontend.mxnet_ops import OPERATORS
from bnncc.frontend.mxnet_params import read_params
from bnncc.frontend.mxnet_symbol import Symbol, SymbolNode, read_symbol
from bnncc.ir.graph import Dim

_LAYERS = ("Convolution", "QConvolution", "FullyConnected", "QFullyConnected", "Deconvolution")


def read_mxnet(
    path: str | os.PathLike[str],
    params: str | os.PathLike[str] | None = None,
    input_shapes: Mapping[str, Sequence[Dim]] | None = None,
) -> onnx.ModelProto:
    """Read a network with its parameters.

    Parameters
    ----------
    path : str or path-like
        The network, ``NAME-symbol.json``.
    params : str or path-like, optional
        The parameters; default: the only ``NAME-0000.params`` (any four digits) next to it.
    input_shapes : mapping of str to sequence of int or str, optional
        Shapes of its inputs.

    Returns
    -------
    onnx.ModelProto
        Layers keep their names. Layers of BMXNet become signs, convolutions, and a map of sums to
        0 .. n (see `bnncc.frontend.bmxnet`).

    Raises
    ------
    ModelError
        If a file is damaged, an operator is not supported, or a shape is missing.
    """
    file = Path(path)
    symbol = read_symbol(file)
    stored = beside(file) if params is None else Path(params)
    values = read_params(stored)
    builder = Builder(values, stored.name)
    try:
        outputs = _converted(symbol, builder, dict(input_shapes or {}))
        shapes = _input_shapes(symbol, builder, outputs, dict(input_shapes or {}))
        return builder.proto(shapes, outputs, file.name)
    except BnnccError as error:
        raise error.within(file) from None


def is_symbol(path: Path) -> bool:
    """Whether a file looks like MXNet's JSON."""
    try:
        with open(path, "rb") as file:
            head = file.read(64)
    except OSError:
        return False
    return head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{")


def beside(path: Path) -> Path:
    """Return the only parameter file next to a network.

    Raises
    ------
    UsageError
        If there is none, or more than one.
    """
    name = model_stem(path)
    try:
        found = sorted(
            f.name for f in path.absolute().parent.iterdir()
            if re.fullmatch(re.escape(name) + r"(-\d{4,})?\.params", f.name)
        )  # fmt: skip
    except OSError:
        found = []
    if len(found) == 1:
        return path.parent / found[0]
    if found:
        raise UsageError(
            f"{path}: {len(found)} parameter files lie beside it, {found[0]} to {found[-1]}",
            hint="choose one: --params FILE",
        )
    raise UsageError(
        f"{path}: no {name}-0000.params (of any number) lies beside it",
        hint="name it: --params FILE",
    )


class _Inputs(list[str]):
    """Inputs of a node; access to a missing one raises an error about the file."""

    def __init__(self, tensors: Iterable[str], where: str) -> None:
        super().__init__(tensors)
        self._where = where

    def __getitem__(self, key: Any) -> Any:
        """Return one tensor, or a slice.

        Raises
        ------
        ModelError
            If there are fewer tensors.
        """
        if isinstance(key, int) and key >= len(self):
            raise ModelError(f"{self._where}: reads {len(self)} tensors, expected more")
        return super().__getitem__(key)


def _converted(symbol: Symbol, b: Builder, shapes: dict[str, Sequence[Dim]]) -> list[str]:
    """Add all nodes; return the names of the network's outputs."""
    b.variables.update(n.name for n in symbol.nodes if n.op == "null")
    made: list[list[str]] = []
    for node in symbol.nodes:
        if node.op == "null":
            given = shapes.get(node.name) or _noted(node)
            if given is not None:
                b.ranks[node.name] = len(given)
            made.append([node.name])
            continue
        convert = OPERATORS.get(node.op)
        if convert is None:
            near = difflib.get_close_matches(node.op, OPERATORS, 1)
            raise UnsupportedOp(
                f"{node.where}: this operator is not supported",
                hint=f"a similar one that is: {near[0]}" if near else None,
            )
        tensors = (_tensor(made, reference, node) for reference in node.inputs)
        inputs = _Inputs(tensors, node.where)
        if not inputs:
            raise ModelError(f"{node.where}: reads nothing")
        made.append(convert(b, node, inputs))
        node.attrs.done()
    heads = [_tensor(made, head, None) for head in symbol.heads]
    return list(dict.fromkeys(heads))


def _tensor(made: list[list[str]], reference: tuple[int, int], node: SymbolNode | None) -> str:
    number, output = reference
    if output >= len(made[number]):
        where = node.where if node is not None else "heads"
        raise UnsupportedOp(
            f"{where}: reads output {output} of `{made[number][0]}`, which has {len(made[number])}"
        )
    return made[number][output]


def _input_shapes(
    symbol: Symbol, b: Builder, outputs: list[str], given: dict[str, Sequence[Dim]]
) -> dict[str, Sequence[Dim]]:
    """Return the shape of each variable that has no value and is used."""
    nodes = {n.name: n for n in symbol.nodes if n.op == "null"}
    free = b.free(outputs)
    unknown = [name for name in given if name not in free]
    if unknown:
        listed = ", ".join(f"`{name}`" for name in free)
        raise UsageError(f"no input is called `{unknown[0]}`; the model has {listed}")
    shapes: dict[str, Sequence[Dim]] = {}
    for name in free:
        shape = given.get(name) or _noted(nodes[name])
        if shape is None:
            shape = _from_weights(name, symbol, b)
        shapes[name] = shape
    return shapes


def _noted(node: SymbolNode) -> tuple[int, ...] | None:
    """Return the shape that Gluon stores with an input, if it is complete."""
    if "__shape__" not in node.attrs.values:
        return None
    shape = node.attrs.integers("__shape__", ())
    return shape if shape and min(shape) > 0 else None


def _from_weights(name: str, symbol: Symbol, b: Builder) -> tuple[Dim, ...]:
    """Derive the shape of an input from a fully connected layer; otherwise raise an error."""
    tip = next(k for k, n in enumerate(symbol.nodes) if n.name == name)
    tips, seen = {tip}, name
    for number, node in enumerate(symbol.nodes):
        if not node.inputs or node.inputs[0][0] not in tips:
            continue
        if node.op in _LAYERS:
            weight = b.stored.get(f"{node.name}.weight")
            if weight is None:
                weight = b.params.get(symbol.nodes[node.inputs[1][0]].name)
            if weight is None or weight.ndim < 2:
                break
            if "FullyConnected" in node.op:
                return ("N", int(weight.shape[1]))
            channels = weight.shape[1] * node.attrs.integer("num_group", 1)
            axes = "x".join(("H", "W", "D")[: weight.ndim - 2])
            raise ShapeError(
                f"input `{name}`: its height and width are not in the file",
                hint=f"`{node.name}` reads {channels} channel{'s' * (channels != 1)}: give "
                f"--input-shape {name}:1x{channels}x{axes} with numbers for {axes}",
            )
        tips.add(number)
        seen = node.name
    raise ShapeError(
        f"input `{name}`: its shape is not in the file, nor does it follow from `{seen}`",
        hint=f"give it: --input-shape {name}:1x3x224x224",
    )
