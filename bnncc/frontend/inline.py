"""Inline local functions, each with its own opset imports, and copy subgraphs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import onnx
from onnx import AttributeProto, helper

from bnncc.errors import ModelError
from bnncc.frontend.checks import DEFAULT_DOMAINS, MAX_NODES

Versions = Mapping[str, int]
Located = tuple[onnx.NodeProto, Versions]
Functions = Mapping[tuple[str, str], onnx.FunctionProto]
_Key = tuple[str, str]


def _domain(name: str) -> str:
    return "" if name in DEFAULT_DOMAINS else name


def local_functions(model: onnx.ModelProto) -> Functions:
    """Return a model's functions by domain and name.

    Raises
    ------
    ModelError
        If functions are recursive or defined twice, or expand to too many nodes.
    """
    functions: dict[_Key, onnx.FunctionProto] = {}
    for function in model.functions:
        key = (_domain(function.domain), function.name)
        if key in functions:
            raise ModelError(f"function `{function.name}` is defined twice")
        functions[key] = function
    order = _check(functions)
    sizes: dict[_Key, int] = {}
    for key in order:
        sizes[key] = sum(_cost(n, sizes) for n in functions[key].node)
    total = sum(_cost(n, sizes) for n in model.graph.node)
    if total > MAX_NODES:
        raise ModelError(f"the graph unfolds to {total} nodes, expected at most {MAX_NODES}")
    return functions


def inline(
    nodes: Iterable[onnx.NodeProto], functions: Functions, versions: Versions
) -> list[Located]:
    """Return nodes with calls of local functions replaced by their bodies.

    Parameters
    ----------
    nodes : iterable of NodeProto
        Not changed; subgraphs are left as they are.
    functions : mapping
        From `local_functions`.
    versions : mapping of str to int
        Opsets of the nodes.

    Returns
    -------
    list of (NodeProto, mapping)
        Each node with the opsets that it was written for.
    """
    result: list[Located] = [(node, versions) for node in nodes]
    taken = 0
    while any((_domain(n.domain), n.op_type) in functions for n, _ in result):
        expanded: list[Located] = []
        for node, opsets in result:
            function = functions.get((_domain(node.domain), node.op_type))
            if function is None:
                expanded.append((node, opsets))
            else:
                label = node.name or node.op_type
                expanded.extend(body_of(node, function, opsets, f"{label}.{taken}/"))
                taken += 1
        result = expanded
    return result


def _cost(node: onnx.NodeProto, sizes: Mapping[_Key, int]) -> int:
    return sizes.get((_domain(node.domain), node.op_type), 1)


def _check(functions: Mapping[_Key, onnx.FunctionProto]) -> list[_Key]:
    """Return the functions with callees before callers."""
    calls = {
        key: {
            (_domain(n.domain), n.op_type)
            for n in _all_nodes(function.node)
            if (_domain(n.domain), n.op_type) in functions
        }
        for key, function in functions.items()
    }
    order: list[_Key] = []
    done: set[_Key] = set()
    while len(order) < len(functions):
        ready = [k for k, callees in calls.items() if k not in done and callees <= done]
        if not ready:
            stuck = next(k for k in calls if k not in done)
            raise ModelError(f"function `{stuck[1]}` calls itself, directly or through others")
        order.extend(ready)
        done.update(ready)
    return order


def subgraphs(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """Return the graphs among a node's attributes."""
    graphs: list[onnx.GraphProto] = []
    for attribute in node.attribute:
        graphs += [attribute.g] if attribute.HasField("g") else list(attribute.graphs)
    return graphs


def _all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from _all_nodes(graph.node)


def reads(node: onnx.NodeProto) -> list[str]:
    """Return the tensors that a node reads, including those read in its subgraphs."""
    names = [name for name in node.input if name]
    for graph in subgraphs(node):
        names += captures(graph)
    return names


def captures(graph: onnx.GraphProto) -> list[str]:
    """Return the outer tensors that a subgraph reads, in order, without duplicates."""
    inner = {i.name for i in graph.input} | {t.name for t in graph.initializer}
    found: dict[str, None] = {}
    for node in graph.node:
        found.update((name, None) for name in reads(node) if name not in inner)
        inner.update(node.output)
    found.update((o.name, None) for o in graph.output if o.name not in inner)
    return list(found)


def body_of(
    call: onnx.NodeProto, function: onnx.FunctionProto, outer: Versions, prefix: str
) -> Sequence[Located]:
    """Return the nodes of a function that replace a call.

    Parameters
    ----------
    call : NodeProto
        The node that calls it.
    function : FunctionProto
        The called function.
    outer : mapping of str to int
        Opsets of the call; the function's own imports take precedence.
    prefix : str
        Prefix of the names of tensors and nodes inside.

    Returns
    -------
    sequence of (NodeProto, mapping)

    Raises
    ------
    ModelError
        If the call has more inputs or outputs than the function.
    """
    label = call.name or call.op_type
    if len(call.input) > len(function.input) or len(call.output) > len(function.output):
        raise ModelError(f"{call.op_type} `{label}`: more inputs or outputs than the function has")
    names = dict.fromkeys(function.input, "")
    names.update(zip(function.input, call.input, strict=False))
    own = {_domain(e.domain): e.version for e in function.opset_import}
    versions = {**outer, **own}
    passed: list[Located] = []
    for formal, actual in zip(function.output, call.output, strict=False):
        if not actual:
            continue
        if formal in names:  # an input passed through
            node = helper.make_node("Identity", [names[formal]], [actual], f"{label}/{formal}")
            passed.append((node, versions))
        else:
            names[formal] = actual
    given = {a.name: a for a in (*function.attribute_proto, *call.attribute)}
    for inner in function.node:  # unsorted bodies read names that are defined below
        for name in (*inner.input, *inner.output):
            if name and name not in names:
                names[name] = prefix + name
    copies = [_copy(n, names, prefix, given) for n in function.node]
    return [*passed, *((node, versions) for node in copies)]


def copy_of_subgraph(
    graph: onnx.GraphProto, inputs: Sequence[str], prefix: str
) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto], list[str]]:
    """Return nodes, initializers and outputs of a subgraph, renamed to be unique.

    Parameters
    ----------
    graph : GraphProto
        Body of an If, Loop or Scan.
    inputs : sequence of str
        Tensors for its inputs.
    prefix : str
        Prefix of names that are defined inside.

    Returns
    -------
    nodes : list of NodeProto
    initializers : list of TensorProto
    outputs : list of str
    """
    names = {value.name: actual for value, actual in zip(graph.input, inputs, strict=True)}
    fixed: list[onnx.TensorProto] = []
    for tensor in graph.initializer:
        copy = onnx.TensorProto()
        copy.CopyFrom(tensor)
        copy.name = names.setdefault(tensor.name, prefix + tensor.name)
        fixed.append(copy)
    for node in graph.node:
        names.update((o, prefix + o) for o in node.output if o and o not in names)
    nodes = [_copy(node, names, prefix, None) for node in graph.node]
    return nodes, fixed, [names.get(o.name, o.name) for o in graph.output]


def _copy(
    inner: onnx.NodeProto,
    names: Mapping[str, str],
    prefix: str,
    given: Mapping[str, AttributeProto] | None,
) -> onnx.NodeProto:
    """Return a renamed node; `given` are the attributes of the function call, if any."""
    node = onnx.NodeProto()
    node.CopyFrom(inner)
    node.name = prefix + (inner.name or (inner.output[0] if inner.output else inner.op_type))
    del node.input[:], node.output[:], node.attribute[:]
    node.input.extend(names.get(i, i) for i in inner.input)
    node.output.extend(names.get(o, o) for o in inner.output)
    for attribute in inner.attribute:
        copy = AttributeProto()
        if attribute.ref_attr_name and given is not None:
            source = given.get(attribute.ref_attr_name)
            if source is None:
                continue
            copy.CopyFrom(source)
            copy.name = attribute.name
        else:
            copy.CopyFrom(attribute)
            for graph in [copy.g] if copy.HasField("g") else copy.graphs:
                _rename(graph, names, given)
        node.attribute.append(copy)
    return node


def _rename(
    graph: onnx.GraphProto, names: Mapping[str, str], given: Mapping[str, AttributeProto] | None
) -> None:
    """Rename the outer tensors that a subgraph reads."""
    own = {i.name for i in graph.input} | {t.name for t in graph.initializer}
    own.update(o for node in graph.node for o in node.output)
    outer = {old: new for old, new in names.items() if old not in own}
    nodes = [_copy(node, outer, "", given) for node in graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    for value in graph.output:
        value.name = outer.get(value.name, value.name)
