"""Inline a model's local functions, each with its own opset imports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
from onnx import AttributeProto, helper

from bnncc.errors import ModelError
from bnncc.frontend.checks import DEFAULT_DOMAINS, MAX_NODES

Versions = Mapping[str, int]
Located = tuple[onnx.NodeProto, Versions]
_Key = tuple[str, str]


def _domain(name: str) -> str:
    return "" if name in DEFAULT_DOMAINS else name


def inline(model: onnx.ModelProto, versions: Versions) -> list[Located]:
    """Return the nodes of the graph with calls of local functions replaced by their bodies.

    Parameters
    ----------
    model : onnx.ModelProto
        Not changed.
    versions : mapping of str to int
        Opsets of the graph.

    Returns
    -------
    list of (NodeProto, mapping)
        Each node with the opsets it was written for.

    Raises
    ------
    ModelError
        If functions call each other in a circle, are defined twice, or unfold to too many nodes.
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
        raise ModelError(f"the graph unfolds to {total} nodes, at most {MAX_NODES} are wanted")
    result: list[Located] = [(node, versions) for node in model.graph.node]
    taken = 0
    while any((_domain(n.domain), n.op_type) in functions for n, _ in result):
        expanded: list[Located] = []
        for node, opsets in result:
            function = functions.get((_domain(node.domain), node.op_type))
            if function is None:
                expanded.append((node, opsets))
            else:
                expanded.extend(_body(node, function, opsets, taken))
                taken += 1
        result = expanded
    return result


def _cost(node: onnx.NodeProto, sizes: Mapping[_Key, int]) -> int:
    return sizes.get((_domain(node.domain), node.op_type), 1)


def _check(functions: Mapping[_Key, onnx.FunctionProto]) -> list[_Key]:
    """Return the functions, callees first."""
    calls = {
        key: {
            (_domain(n.domain), n.op_type)
            for n in function.node
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


def _body(
    call: onnx.NodeProto, function: onnx.FunctionProto, outer: Versions, serial: int
) -> Sequence[Located]:
    label = call.name or call.op_type
    if len(call.input) > len(function.input) or len(call.output) > len(function.output):
        raise ModelError(f"{call.op_type} `{label}`: more inputs or outputs than the function has")
    names = dict.fromkeys(function.input, "")
    names.update(zip(function.input, call.input, strict=False))
    copies: list[Located] = []
    own = {_domain(e.domain): e.version for e in function.opset_import}
    versions = {**outer, **own}
    for formal, actual in zip(function.output, call.output, strict=False):
        if not actual:
            continue
        if formal in names:  # an input passed through
            node = helper.make_node("Identity", [names[formal]], [actual], f"{label}/{formal}")
            copies.append((node, versions))
        else:
            names[formal] = actual
    given = {a.name: a for a in call.attribute}
    defaults = {a.name: a for a in function.attribute_proto}
    prefix = f"{label}.{serial}/"
    for inner in function.node:
        node = onnx.NodeProto()
        node.CopyFrom(inner)
        node.name = prefix + (inner.name or (inner.output[0] if inner.output else inner.op_type))
        del node.input[:], node.output[:], node.attribute[:]
        node.input.extend(names[i] if i in names else prefix + i if i else "" for i in inner.input)
        for out in inner.output:
            if out and out not in names:
                names[out] = prefix + out
            node.output.append(names[out] if out else "")
        for attribute in inner.attribute:
            if not attribute.ref_attr_name:
                node.attribute.append(attribute)
                continue
            source = given.get(attribute.ref_attr_name) or defaults.get(attribute.ref_attr_name)
            if source is not None:
                copy = AttributeProto()
                copy.CopyFrom(source)
                copy.name = attribute.name
                node.attribute.append(copy)
        copies.append((node, versions))
    return copies
