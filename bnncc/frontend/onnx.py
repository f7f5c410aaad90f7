"""Load an ONNX model into a graph: check, inline, convert to the newest opset, fold, type."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from bnncc.errors import BnnccError, ModelError, ShapeError, UnsupportedOp, UsageError
from bnncc.frontend import checks
from bnncc.frontend.annotations import declared, rounded_input
from bnncc.frontend.external import to_array
from bnncc.frontend.halves import widen
from bnncc.frontend.inline import inline, local_functions
from bnncc.frontend.narrow import CARRIERS
from bnncc.frontend.reader import Reader, graph_nodes
from bnncc.frontend.text import check_text
from bnncc.ir.dims import MAX_DIM, readable, symbols_of
from bnncc.ir.fold import Folder
from bnncc.ir.graph import MAX_RANK, Dim, Graph, Node, TensorType, elements


def load(
    model: str | os.PathLike[str] | onnx.ModelProto,
    *,
    input_shapes: Mapping[str, Sequence[Dim]] | None = None,
    max_dims: Mapping[str, int] | None = None,
) -> Graph:
    """Load an ONNX model.

    Parameters
    ----------
    model : str, path-like or onnx.ModelProto
        File (external data is read from its folder only) or model.
    input_shapes : mapping of str to sequence of int or str, optional
        Shapes of graph inputs, replacing symbolic dimensions or the batch size; a str is a
        symbolic dimension.
    max_dims : mapping of str to int, optional
        Maximum sizes of symbolic dimensions.

    Returns
    -------
    Graph
        Nodes in the form of the newest opset, with constants folded and every tensor typed. An
        output that does not depend on an input is a constant.

    Raises
    ------
    ModelError
        If the file is damaged or not supported; may be `UnsupportedOp` or `ShapeError`.
    UsageError
        If `input_shapes` names a tensor that is not an input, or `max_dims` an unknown dimension.
    """
    if isinstance(model, onnx.ModelProto):
        proto, folder, source = model, None, model.graph.name or "model"
    else:
        path = Path(model)
        proto, folder, source = checks.read(path), path.absolute().parent, path.name
    try:
        return _load(proto, folder, source, input_shapes or {}, max_dims or {})
    except BnnccError as error:
        raise error.within(source) from error.__cause__


def _load(
    proto: onnx.ModelProto,
    folder: Path | None,
    source: str,
    input_shapes: Mapping[str, Sequence[Dim]],
    max_dims: Mapping[str, int],
) -> Graph:
    check_text(proto)
    versions = checks.opsets(proto)
    if proto.graph.sparse_initializer:
        raise UnsupportedOp("sparse initializers are not supported")
    functions = local_functions(proto)
    located = inline(proto.graph.node, functions, versions)
    if len(located) > checks.MAX_NODES:
        raise ModelError(f"{len(located)} nodes, expected at most {checks.MAX_NODES}")
    nodes, opsets = [], {}
    for node, imported in graph_nodes(located):
        nodes.append(node)
        opsets[id(node)] = {**imported, "": imported.get("", versions[""])}
    checks.check_names(proto.graph, nodes)
    graph = Graph([], [], [], {}, {}, source)
    read = {i for n in nodes for i in n.inputs} | {o.name for o in proto.graph.output}
    _initializers(proto.graph, graph, folder, read)
    _inputs(proto.graph, graph, input_shapes)
    _bounds(graph, max_dims, {p.key: p.value for p in proto.metadata_props})
    graph.outputs = [o.name for o in proto.graph.output]
    graph.reserved.update(o for n in nodes for o in n.outputs)
    order = _in_order(nodes, graph)
    checks.check_finite(order, infinities=False)
    folding = Folder(graph)
    reader = Reader(graph, functions, folder, folding)
    graph.datatypes = declared(proto.graph, graph)
    read_as = _read_as(graph, reader, folding)
    for node in order.nodes:
        node.inputs = [read_as.get(i, i) for i in node.inputs]
        reader.read(node, opsets[id(node)])
    _outputs(proto.graph, graph, bool(input_shapes))
    for name in graph.outputs:
        reader.narrow_output(name)
    graph = folding.finish()
    widen(graph)
    checks.check_finite(graph, infinities=True)
    return graph


def _in_order(nodes: list[Node], graph: Graph) -> Graph:
    """Return a graph of nodes that are not read yet, in topological order."""
    order = Graph(nodes, graph.inputs, graph.outputs, graph.constants, {})
    try:
        order.sort()
    except ValueError as error:
        stuck = _in_cycle(nodes)
        raise ModelError(f"{stuck.where}: the graph has a cycle through it") from error
    return order


def _read_as(graph: Graph, reader: Reader, folding: Folder) -> dict[str, str]:
    """Return what nodes read instead of inputs of few values, narrow types or no elements."""
    found = {name: graph.fresh(f"{name}.rounded") for name in graph.datatypes}
    for name, kind in graph.datatypes.items():
        for piece in rounded_input(name, found[name], kind, graph):
            folding.emit(piece)
    for name in graph.inputs:
        shape, dtype = graph.types[name].shape, graph.types[name].dtype
        if graph.types[name].static and 0 in shape:
            empty = np.zeros([int(d) for d in shape], dtype)
            found[name] = graph.constant(empty, f"{name}.empty")
            graph.types[name] = TensorType(shape, CARRIERS.get(dtype, dtype))
        elif dtype in CARRIERS:
            found[name] = reader.narrow_input(name)
    return found


def _initializers(
    proto: onnx.GraphProto, graph: Graph, folder: Path | None, read: set[str]
) -> None:
    total = 0
    for tensor in proto.initializer:
        where = f"initializer `{tensor.name}`"
        checks.check_tensor(tensor, where)
        total += checks.stored_bytes(tensor.data_type, elements(tensor.dims, where))
        if total > checks.MAX_CONSTANT_BYTES:
            raise ShapeError(
                f"{where}: the initializers need more than {checks.MAX_CONSTANT_BYTES} bytes"
            )
    for tensor in proto.initializer:
        if tensor.name in read:
            value = to_array(tensor, folder, f"initializer `{tensor.name}`")
            graph.set_constant(tensor.name, value)


def _inputs(
    proto: onnx.GraphProto, graph: Graph, input_shapes: Mapping[str, Sequence[Dim]]
) -> None:
    stored = {t.name for t in proto.initializer}
    values = [v for v in proto.input if v.name not in stored]
    if not values:
        raise ModelError("the graph has no inputs besides its initializers")
    unknown = [n for n in input_shapes if n not in {v.name for v in values}]
    if unknown:
        listed = ", ".join(f"`{v.name}`" for v in values)
        raise UsageError(f"no input is called `{unknown[0]}`; the model has {listed}")
    used = {d.dim_param for v in values for d in v.type.tensor_type.shape.dim if d.dim_param}
    batch = next(n for n in ("N", "batch", "batch_size", "N_") if n not in used)
    for value in values:
        where = f"input `{value.name}`"
        if not value.type.HasField("tensor_type"):
            raise ModelError(f"{where}: is not a tensor")
        kind = value.type.tensor_type
        if kind.elem_type not in checks.DTYPES:
            names = {number: name for name, number in TensorProto.DataType.items()}
            found = names.get(kind.elem_type, str(kind.elem_type))
            raise ModelError(f"{where}: tensors of type {found.lower()} are not supported")
        given = input_shapes.get(value.name)
        if given is None and not kind.HasField("shape"):
            raise ShapeError(
                f"{where}: its number of axes is not given; pass --input-shape "
                f"{value.name}:1x3x224x224"
            )
        shape = _shape(kind, where, batch, value.name) if kind.HasField("shape") else ()
        if given is not None:
            shape = _given(given, shape if kind.HasField("shape") else None, where)
        elements(shape, where)
        if len(shape) > MAX_RANK:
            raise ShapeError(f"{where}: has {len(shape)} axes, at most {MAX_RANK}")
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(kind.elem_type)).name
        graph.types[value.name] = TensorType(shape, dtype)
        graph.inputs.append(value.name)


def _bounds(graph: Graph, max_dims: Mapping[str, int], said: Mapping[str, str]) -> None:
    """Name dimensions with symbols that no input gives by itself; bound symbolic dimensions."""
    shapes = [graph.types[name].shape for name in graph.inputs]
    known = {d for shape in shapes for d in shape if isinstance(d, str) and d.isidentifier()}
    for name in graph.inputs:
        kind = graph.types[name]
        dims = [d if symbols_of(d) <= known else _word(str(d)) for d in kind.shape]
        graph.types[name] = TensorType(tuple(dims), kind.dtype)
    for name in max_dims:
        if name not in known:
            listed = f"there are {', '.join(f'`{d}`' for d in sorted(known))}"
            raise UsageError(
                f"--max-dim {name}={max_dims[name]}: no dimension is called `{name}`; "
                + (listed if known else "all are fixed"),
                hint="--input-shape names dimensions: NAME:batch,tokens",
            )
    stated = {d: said.get(f"{MAX_DIM}{d}", "") for d in known}
    graph.bounds = {d: int(n) for d, n in sorted(stated.items()) if n.isdecimal()} | dict(max_dims)


def _shape(kind: Any, where: str, batch: str, name: str) -> tuple[Dim, ...]:
    dims: list[Dim] = []
    for axis, dim in enumerate(kind.shape.dim):
        if dim.WhichOneof("value") == "dim_value":
            if dim.dim_value < 0:
                # some exporters write -1 for a dynamic batch
                if dim.dim_value != -1:
                    raise ShapeError(f"{where}: dimension {axis} is {dim.dim_value}")
                dims.append(batch if axis == 0 else f"{_word(name)}_dim{axis}")
            else:
                dims.append(dim.dim_value)
        elif dim.dim_param:
            said = readable(dim.dim_param)
            dims.append(dim.dim_param if said is None else said)
        else:
            dims.append(batch if axis == 0 else f"{_word(name)}_dim{axis}")
    return tuple(dims)


def _word(name: str) -> str:
    return re.sub(r"\W", "_", name)


def _given(given: Sequence[Dim], shape: tuple[Dim, ...] | None, where: str) -> tuple[Dim, ...]:
    dims = tuple((readable(d) or d) if isinstance(d, str) else int(d) for d in given)
    if shape is not None and len(dims) != len(shape):
        raise UsageError(
            f"{where}: --input-shape is {'x'.join(map(str, dims))}, expected {len(shape)} "
            f"dimensions as in the model's shape {'x'.join(map(str, shape))}"
        )
    if any(isinstance(d, int) and d < 0 for d in dims):
        raise UsageError(f"{where}: --input-shape gives {list(dims)}, with a negative size")
    return dims


def _outputs(proto: onnx.GraphProto, graph: Graph, overridden: bool) -> None:
    """Compare the declared types of outputs with the inferred ones."""
    for value in proto.output:
        kind = value.type.tensor_type
        where = f"output `{value.name}`"
        if value.name not in graph.types:
            raise UnsupportedOp(f"{where}: is not a tensor")
        found = graph.types[value.name]
        if 0 in found.shape:
            _without_elements(graph, value.name, where)
        if kind.elem_type in checks.DTYPES:
            declared = np.dtype(helper.tensor_dtype_to_np_dtype(kind.elem_type)).name
            if declared != found.dtype:
                raise ModelError(f"{where}: is declared {declared} but computed as {found.dtype}")
        if not kind.HasField("shape") or overridden:
            continue
        dims = [d.dim_value if d.HasField("dim_value") else None for d in kind.shape.dim]
        differs = len(dims) != len(found.shape) or any(
            axis and isinstance(want, int) and isinstance(have, int) and want >= 0 and want != have
            for axis, (want, have) in enumerate(zip(dims, found.shape, strict=False))
        )
        if differs:
            raise ShapeError(
                f"{where}: is declared with shape {dims} but computed with {list(found.shape)}"
            )


def _without_elements(graph: Graph, name: str, where: str) -> None:
    """Make an empty output a constant."""
    found = graph.types[name]
    if found.shape[0] != 0 or not found.static:  # TVM cannot read others back
        raise ShapeError(
            f"{where}: has no elements, its shape is {list(found.shape)}; only a first axis of "
            "0 is supported"
        )
    if name in graph.constants:
        return
    for node in graph.nodes:
        node.outputs = [graph.fresh(f"{name}.made") if o == name else o for o in node.outputs]
        graph.types.update(dict.fromkeys(set(node.outputs) - set(graph.types), graph.types[name]))
    graph.constants[name] = np.zeros([int(d) for d in found.shape], found.dtype)


def _in_cycle(nodes: Sequence[Node]) -> Node:
    """Return a node on a cycle."""
    made = {o: n for n in nodes for o in n.outputs if o}
    alive = {id(n): n for n in nodes}
    changed = True
    ready: set[str] = set()
    while changed:
        changed = False
        for key, node in list(alive.items()):
            if all(i not in made or i in ready for i in node.inputs):
                ready.update(node.outputs)
                del alive[key]
                changed = True
    node = next(iter(alive.values()))
    seen: set[int] = set()
    while id(node) not in seen:  # go backwards until a node repeats
        seen.add(id(node))
        node = next(made[i] for i in node.inputs if i in made and id(made[i]) in alive)
    return node


def read_model(model: str | Path | onnx.ModelProto) -> onnx.ModelProto:
    """Return a model with its external data; it must have passed `load`.

    Raises
    ------
    ModelError
        If the file cannot be read.
    """
    if isinstance(model, onnx.ModelProto):
        return model
    try:
        return onnx.load(str(model))
    except Exception as error:
        raise ModelError(f"{model}: cannot be read: {error}") from error
