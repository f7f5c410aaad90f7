"""Read an ONNX model into a graph: checked, inlined, in the newest opset's form, folded, typed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper

from bnncc.errors import BnnccError, ModelError, ShapeError, UnsupportedOp, UsageError
from bnncc.frontend import checks, custom
from bnncc.frontend.annotations import declared, rounded_input
from bnncc.frontend.channels_last import Columns
from bnncc.frontend.external import to_array
from bnncc.frontend.fold import Folder
from bnncc.frontend.inline import Located, inline
from bnncc.frontend.linear import as_floats
from bnncc.frontend.normalise import normalise
from bnncc.frontend.sequences import plain_tensors
from bnncc.frontend.text import check_text
from bnncc.ir.evaluate import OPSET
from bnncc.ir.graph import Dim, Graph, Node, TensorType


def load(
    model: str | os.PathLike[str] | onnx.ModelProto,
    *,
    input_shapes: Mapping[str, Sequence[Dim]] | None = None,
) -> Graph:
    """Load an ONNX model.

    Parameters
    ----------
    model : str, path-like or onnx.ModelProto
        File (external data is read from its folder only) or model.
    input_shapes : mapping of str to sequence of int or str, optional
        Shapes of graph inputs, in place of symbolic dimensions or of another batch size; a str is a
        symbolic dimension.

    Returns
    -------
    Graph
        Nodes in the newest opset's form, constants folded, every tensor typed. An output that does
        not depend on an input is a constant.

    Raises
    ------
    ModelError
        If the file is damaged or not supported; `UnsupportedOp` and `ShapeError` are its kinds.
    UsageError
        If `input_shapes` names no input of the model.
    """
    if isinstance(model, onnx.ModelProto):
        proto, folder, source = model, None, model.graph.name or "model"
    else:
        path = Path(model)
        proto, folder, source = checks.read(path), path.absolute().parent, path.name
    try:
        return _load(proto, folder, source, input_shapes or {})
    except BnnccError as error:
        raise type(error)(f"{source}: {error}", hint=error.hint) from error.__cause__


def _load(
    proto: onnx.ModelProto,
    folder: Path | None,
    source: str,
    input_shapes: Mapping[str, Sequence[Dim]],
) -> Graph:
    check_text(proto)
    versions = checks.opsets(proto)
    if proto.graph.sparse_initializer:
        raise UnsupportedOp("sparse initializers are not supported")
    located = inline(proto, versions)
    if len(located) > checks.MAX_NODES:
        raise ModelError(f"{len(located)} nodes, at most {checks.MAX_NODES} are wanted")
    names = _names(located)
    checks.check_operators(
        [(node, name, opsets) for (node, opsets), name in zip(located, names, strict=True)]
    )
    nodes = [_node(node, name) for (node, _), name in zip(located, names, strict=True)]
    opset_of = {
        id(node): opsets.get("", versions[""])
        for node, (_, opsets) in zip(nodes, located, strict=True)
    }
    checks.check_names(proto.graph, nodes)
    graph = Graph([], [], [], {}, {}, source)
    read = {i for n in nodes for i in n.inputs} | {o.name for o in proto.graph.output}
    _initializers(proto.graph, graph, folder, read)
    _inputs(proto.graph, graph, input_shapes)
    graph.outputs = [o.name for o in proto.graph.output]
    order = Graph(nodes, graph.inputs, graph.outputs, graph.constants, {})
    try:
        order.sort()
    except ValueError as error:
        stuck = _in_cycle(nodes)
        raise ModelError(f"{stuck.op} `{stuck.name}`: the graph has a cycle through it") from error
    checks.check_finite(order, infinities=False)
    folder_pass = Folder(graph)
    state = _State()
    graph.datatypes = declared(proto.graph, graph)
    read_as = {name: graph.fresh(f"{name}.rounded") for name in graph.datatypes}
    for name, kind in graph.datatypes.items():
        for piece in rounded_input(name, read_as[name], kind, graph):
            folder_pass.emit(piece)
    for node in order.nodes:
        node.inputs = [read_as.get(i, i) for i in node.inputs]
        if node.op == "Constant":
            _constant(node, graph)
            continue
        for piece in _pieces(node, opset_of[id(node)], graph, state):
            folder_pass.emit(piece)
    graph = folder_pass.finish()
    _outputs(proto.graph, graph, bool(input_shapes))
    checks.check_finite(graph, infinities=True)
    return graph


@dataclass(frozen=True)
class _State:
    """What is known of tensors that other operators make than those which read them."""

    sequences: dict[str, list[str]] = field(default_factory=dict)
    twins: dict[str, str] = field(default_factory=dict)
    lowered: dict[str, Columns] = field(default_factory=dict)


def _pieces(node: Node, version: int, graph: Graph, state: _State) -> Iterator[Node]:
    """Yield a node of the file in the newest form; each is added before the next is asked for."""
    if custom.known(node.op) or (node.op == "MatMul" and node.inputs[0] in state.lowered):
        for part in custom.read(node, graph, state.lowered):
            yield from normalise(part, OPSET, graph)
        return
    for piece in normalise(plain_tensors(node, graph, state.sequences), version, graph):
        floats = as_floats(piece, graph, state.twins)
        yield from [piece] if floats is None else floats


def _names(located: Sequence[Located]) -> list[str]:
    """Return a unique name for each node: the file's, or one made of its first output."""
    names: list[str] = []
    used: set[str] = set()
    for node, _ in located:
        first = next((o for o in node.output if o), "")
        stem = node.name or f"{node.op_type}_{first}"
        name, serial = stem, 1
        while name in used:
            serial += 1
            name = f"{stem}_{serial}"
        used.add(name)
        names.append(name)
    return names


def _node(proto: onnx.NodeProto, name: str) -> Node:
    attrs = {a.name: _attribute(a, f"{proto.op_type} `{name}`") for a in proto.attribute}
    covers = (name,) if proto.op_type in ("Conv", "Gemm", "MatMul") else ()
    op = checks.op_name(proto)
    return Node(op, list(proto.input), list(proto.output), attrs, name, covers)


def _attribute(attribute: onnx.AttributeProto, where: str) -> Any:
    if attribute.ref_attr_name:
        raise ModelError(f"{where}: attribute `{attribute.name}` refers to one of a function")
    kind = attribute.type
    if kind == AttributeProto.TENSOR:
        return to_array(attribute.t, None, f"{where}: attribute `{attribute.name}`")
    if kind == AttributeProto.STRING:
        return attribute.s.decode("utf-8", "replace")
    if kind == AttributeProto.STRINGS:
        return [s.decode("utf-8", "replace") for s in attribute.strings]
    if kind in (AttributeProto.FLOAT, AttributeProto.INT):
        return helper.get_attribute_value(attribute)
    if kind in (AttributeProto.FLOATS, AttributeProto.INTS):
        return list(helper.get_attribute_value(attribute))
    raise UnsupportedOp(f"{where}: the type of attribute `{attribute.name}` is not supported")


def _constant(node: Node, graph: Graph) -> None:
    where = f"Constant `{node.name}`"
    if len(node.attrs) != 1:
        raise ModelError(f"{where}: has {len(node.attrs)} attributes, one value is wanted")
    key, value = next(iter(node.attrs.items()))
    if key == "value":
        array = value
    elif key in ("value_int", "value_ints"):
        array = np.array(value, np.int64)
    elif key in ("value_float", "value_floats"):
        array = np.array(value, np.float32)
    else:
        raise UnsupportedOp(f"{where}: `{key}` is not supported")
    _add_constant(graph, node.outputs[0], array)


def _add_constant(graph: Graph, name: str, value: np.ndarray[Any, Any]) -> None:
    graph.constants[name] = value
    graph.types[name] = TensorType(tuple(value.shape), value.dtype.name)


def _initializers(
    proto: onnx.GraphProto, graph: Graph, folder: Path | None, read: set[str]
) -> None:
    total = 0
    for tensor in proto.initializer:
        where = f"initializer `{tensor.name}`"
        checks.check_tensor(tensor, where)
        total += checks.stored_bytes(tensor.data_type, checks.elements(tensor.dims, where))
        if total > checks.MAX_CONSTANT_BYTES:
            raise ShapeError(
                f"{where}: the initializers need more than {checks.MAX_CONSTANT_BYTES} bytes"
            )
    for tensor in proto.initializer:
        if tensor.name in read:
            value = to_array(tensor, folder, f"initializer `{tensor.name}`")
            _add_constant(graph, tensor.name, value)


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
        raise UsageError(f"no input is called `{unknown[0]}`; there are {listed}")
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
        checks.elements(shape, where)
        if len(shape) > checks.MAX_RANK:
            raise ShapeError(f"{where}: has {len(shape)} axes, at most {checks.MAX_RANK}")
        if 0 in shape:
            raise ShapeError(f"{where}: has shape {list(shape)}, sizes above 0 are wanted")
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(kind.elem_type)).name
        _refuse_packed(where, dtype)
        graph.types[value.name] = TensorType(shape, dtype)
        graph.inputs.append(value.name)


def _refuse_packed(where: str, dtype: str) -> None:
    if dtype in checks.PACKED:
        raise UnsupportedOp(
            f"{where}: is {dtype}, which has less than a byte; only weights and tensors inside of "
            "the network can be",
            hint="cast it to int8 or float32 in the model",
        )


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
            dims.append(dim.dim_param)
        else:
            dims.append(batch if axis == 0 else f"{_word(name)}_dim{axis}")
    return tuple(dims)


def _word(name: str) -> str:
    return re.sub(r"\W", "_", name)


def _given(given: Sequence[Dim], shape: tuple[Dim, ...] | None, where: str) -> tuple[Dim, ...]:
    dims = tuple(d if isinstance(d, str) else int(d) for d in given)
    if shape is not None and len(dims) != len(shape):
        raise ShapeError(
            f"{where}: --input-shape gives {len(dims)} axes, the model's shape is {list(shape)}"
        )
    for axis, (new, old) in enumerate(zip(dims, shape or dims, strict=True)):
        if (isinstance(new, int) and new <= 0) or (axis and isinstance(old, int) and new != old):
            raise ShapeError(
                f"{where}: --input-shape gives {list(dims)}, the model's shape is "
                f"{list(shape or ())}"
            )
    return dims


def _outputs(proto: onnx.GraphProto, graph: Graph, overridden: bool) -> None:
    """Compare the declared types of the outputs with what was found."""
    for value in proto.output:
        kind = value.type.tensor_type
        where = f"output `{value.name}`"
        if value.name not in graph.types:
            raise UnsupportedOp(f"{where}: is not a tensor")
        found = graph.types[value.name]
        _refuse_packed(where, found.dtype)
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


def _in_cycle(nodes: Sequence[Node]) -> Node:
    """Return a node that lies on a cycle."""
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
    while id(node) not in seen:  # walk back until a node comes again
        seen.add(id(node))
        node = next(made[i] for i in node.inputs if i in made and id(made[i]) in alive)
    return node
