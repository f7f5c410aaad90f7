"""Read the JSON of an exported program, in the schema of torch.export."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from bnncc.errors import ModelError, ShapeError, UnsupportedOp
from bnncc.frontend.checks import MAX_NODES
from bnncc.frontend.pytorch.archive import DTYPES, Archive
from bnncc.frontend.pytorch.program import Call, Meta, Program, Ref, check_order
from bnncc.ir.graph import Dim

SCHEMA = 8
"""Major version of the files' schema."""

_ATEN = "torch.ops.aten."
_DEEPEST = 32
_UNBOUNDED = 1 << 31
"""Greatest sizes from here on are none."""


def read(archive: Archive) -> Program:
    """Read the program of an archive.

    Raises
    ------
    ModelError
        If the JSON is damaged, or says what cannot be compiled.
    """
    data = archive.program
    try:
        major = data["schema_version"]["major"]
        if major != SCHEMA:
            raise ModelError(
                f"schema version {str(major)[:20]} of exported programs, expected {SCHEMA} "
                "(what torch 2.13 writes)"
            )
        module = data["graph_module"]
        calls, metas = _graph(module["graph"], "", {}, 0)
        inputs, stored = _inputs(module["signature"]["input_specs"])
        outputs, mutated = _outputs(module["signature"]["output_specs"], stored)
        listed = [_value(a, _Names("", {})) for a in module["graph"]["inputs"]]
        ranges = data.get("range_constraints", {}).items()
        most = {symbol: span["max_val"] for symbol, span in ranges if "max_val" in span}
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise ModelError(
            f"the exported program's JSON is damaged: {type(error).__name__} {error}"
        ) from error
    known = {r.name for r in listed if isinstance(r, Ref)}
    for name in (*inputs, *stored):
        if name not in known or name not in metas:
            raise ModelError(f"input `{name[:80]}` of the exported program has no type")
    bounds = {s: n for s, n in most.items() if isinstance(n, int) and 0 < n < _UNBOUNDED}
    program = Program(calls, inputs, outputs, stored, metas, mutated, bounds)
    check_order(program)
    return program


def _graph(
    graph: Mapping[str, Any], prefix: str, given: Mapping[str, str], depth: int
) -> tuple[list[Call], dict[str, Meta]]:
    """Read a graph; names get `prefix`, but for those in `given`."""
    if depth > _DEEPEST:
        raise ModelError(f"graphs within graphs, more than {_DEEPEST} deep")
    names = _Names(prefix, given)
    metas = {names[k]: _meta(v) for k, v in graph["tensor_values"].items() if k not in given}
    calls: list[Call] = []
    for node in graph["nodes"]:
        call = _call(node, names)
        inner = _WRAPPERS.get(call.target)
        if inner is None:
            calls.append(call)
        else:
            more, types = _inlined(node, call, inner, names, depth)
            calls += more
            metas.update(types)
        if len(calls) > MAX_NODES:
            raise ModelError(f"more than {MAX_NODES} nodes")
    return calls, metas


class _Names(dict[str, str]):
    """Names of the file to names of the program."""

    def __init__(self, prefix: str, given: Mapping[str, str]) -> None:
        super().__init__(given)
        self._prefix = prefix

    def __missing__(self, key: str) -> str:
        if not isinstance(key, str):
            raise TypeError(f"{key!r} is not a name")
        return self._prefix + key


_WRAPPERS = {
    "torch.ops.higher_order.wrap_with_set_grad_enabled": 1,
    "torch.ops.higher_order.wrap_with_autocast": 4,
}
"""Operators that call a graph, and which of their inputs it is."""


def _inlined(
    node: Mapping[str, Any], call: Call, position: int, names: _Names, depth: int
) -> tuple[list[Call], dict[str, Meta]]:
    """Return the graph of a ``with`` statement, in place of the node that calls it."""
    if "autocast" in call.target and node["inputs"][2]["arg"].get("as_bool") is not False:
        kind = "torch.autocast in a program"
        raise UnsupportedOp(f"{call.where}: {kind} is not supported; export without it")
    graph = node["inputs"][position]["arg"]["as_graph"]["graph"]
    operands = [_value(i["arg"], names) for i in node["inputs"][position + 1 :]]
    slots = [next(iter(a.values()))["name"] for a in graph["inputs"]]
    given = {slot: operand.name for slot, operand in zip(slots, operands, strict=True)}
    calls, metas = _graph(graph, f"{names._prefix}{call.name}.", given, depth + 1)
    inner = _Names(f"{names._prefix}{call.name}.", given)
    results = [_value(a, inner) for a in graph["outputs"]]
    for name, result in zip(call.outputs, results, strict=True):
        if name:
            calls.append(Call("alias.default", {"self": result}, (name,), name, call.module))
    return calls, metas


def _call(node: Mapping[str, Any], names: Mapping[str, str]) -> Call:
    target = node["target"]
    outputs: list[str] = []
    for out in node["outputs"]:
        for ref in _listed(_value(out, names)):
            outputs.append(ref.name if isinstance(ref, Ref) else "")
    name = names[node.get("name") or next((o for o in outputs if o), target)]
    args: dict[str, Any] = {}
    try:
        for k, entry in enumerate(node["inputs"]):
            value = None if "as_graph" in entry["arg"] else _value(entry["arg"], names)
            args[entry["name"] or f"arg{k}"] = value
    except UnsupportedOp as error:
        raise UnsupportedOp(f"{_short(target)} `{name}`: {error}") from error
    meta = node["metadata"]
    module, leaf = _module(meta.get("nn_module_stack", ""))
    return Call(
        _short(target), args, tuple(outputs), name, module, leaf,
        _line(meta.get("stack_trace", "")),
    )  # fmt: skip


def _short(target: str) -> str:
    return target.removeprefix(_ATEN)[:120]


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else [value]


def _module(stack: str) -> tuple[str, bool]:
    """Return path and kind of the innermost module of ``key,path,class;...``."""
    path, kind = "", ""
    for entry in stack.split(";"):
        parts = entry.split(",")
        if len(parts) == 3 and not parts[0].startswith("_empty"):
            path, kind = parts[1], parts[2]
    return path, kind.startswith("torch.nn.modules.")


def _line(trace: str) -> str:
    """Return the user's innermost line of a stack trace."""
    found = re.findall(r'File "([^"\n]{1,500})", line (\d{1,9})', trace)
    own = [(f.replace("\\", "/"), n) for f, n in found]
    own = [(f, n) for f, n in own if not _TORCH_FILE.search(f)]
    return f"{own[-1][0].rpartition('/')[2]}:{own[-1][1]}" if own else ""


_TORCH_FILE = re.compile(r"(^|/)torch/(nn|_\w+|autograd|export|functional\.py|fx|utils)")


def _meta(meta: Mapping[str, Any]) -> Meta:
    kind = meta["dtype"]
    shape = tuple(_dim(d) for d in meta["sizes"])
    strides = [_dim(d) for d in meta["strides"]]
    dense: Any = 1
    contiguous = True
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if isinstance(stride, int) and isinstance(dense, int) and size != 1 and stride != dense:
            contiguous = False
        dense = dense * size if isinstance(dense, int) and isinstance(size, int) else None
    return Meta(DTYPES[kind].name if kind in DTYPES else "", shape, contiguous)


def _dim(dim: Mapping[str, Any]) -> Dim:
    if "as_int" in dim:
        if not isinstance(dim["as_int"], int) or dim["as_int"] < 0:
            raise ShapeError(f"a tensor has a dimension of {str(dim['as_int'])[:40]}")
        return dim["as_int"]
    text = dim["as_expr"]["expr_str"]
    match = re.fullmatch(r"Symbol\('(\w{1,60})'[\w\s,=]{0,200}\)", text)
    return match[1] if match else str(text)


_NUMBERS: Mapping[str, float] = {
    "Infinity": np.inf, "-Infinity": -np.inf, "NaN": np.nan
}  # fmt: skip


def _number(value: Any) -> Any:
    if isinstance(value, str):
        return _NUMBERS[value]
    if not isinstance(value, int | float):
        raise TypeError(f"{str(value)[:40]} is not a number")
    return value


def _value(argument: Mapping[str, Any], names: Mapping[str, str]) -> Any:
    """Return what an argument of the file says."""
    ((kind, value),) = argument.items()
    rule = _ARGUMENTS.get(kind)
    if rule is None:
        raise UnsupportedOp(f"arguments of kind `{str(kind)[:40]}` are not supported")
    return rule(value, names)


Rule = Callable[[Any, Mapping[str, str]], Any]


def _ref(value: Any, names: Mapping[str, str]) -> Any:
    return Ref(names[value["name"]])


def _symbol(key: str, value: Any, names: Mapping[str, str]) -> Any:
    return _number(value[key]) if key in value else Ref(names[value["as_name"]])


def _optional(value: Any, names: Mapping[str, str]) -> Any:
    return _ref(value["as_tensor"], names) if "as_tensor" in value else None


def _plain(value: Any, names: Mapping[str, str]) -> Any:
    if not isinstance(value, bool | int | str):
        raise TypeError(f"{str(value)[:40]} is not a plain value")
    return value


def _float(value: Any, names: Mapping[str, str]) -> Any:
    return _number(value)


def _many(rule: Rule, value: Any, names: Mapping[str, str]) -> Any:
    return [rule(item, names) for item in value]


def _none(value: Any, names: Mapping[str, str]) -> Any:
    return None


def _dtype(value: Any, names: Mapping[str, str]) -> Any:
    if value not in DTYPES:
        raise UnsupportedOp(f"tensors of torch's type number {str(value)[:20]} are not supported")
    return DTYPES[value]


_KINDS: Mapping[str, Rule] = {
    "tensor": _ref,
    "optional_tensor": _optional,
    "int": _plain,
    "float": _float,
    "bool": _plain,
    "string": _plain,
    **{f"sym_{kind}": partial(_symbol, f"as_{kind}") for kind in ("int", "float", "bool")},
}
"""Arguments that also come as lists."""
_ARGUMENTS: Mapping[str, Rule] = {
    **{f"as_{kind}": rule for kind, rule in _KINDS.items()},
    **{f"as_{kind}s": partial(_many, rule) for kind, rule in _KINDS.items()},
    **{f"as_{kind}": _none for kind in ("none", "memory_format", "layout", "device")},
    "as_scalar_type": _dtype,
    "as_operator": _plain,
}


def _inputs(specs: Sequence[Mapping[str, Any]]) -> tuple[list[str], dict[str, str]]:
    inputs: list[str] = []
    stored: dict[str, str] = {}
    for spec in specs:
        ((kind, value),) = spec.items()
        if kind == "user_input":
            ((form, arg),) = value["arg"].items()
            if form == "as_tensor":
                inputs.append(_text(arg["name"]))
            elif form not in _PYTHON:
                raise UnsupportedOp(f"an input is `{form[:40]}`, only tensors are supported")
        elif kind in _STORED:
            stored[_text(value["arg"]["name"])] = _text(value[_STORED[kind]])
        elif kind != "constant_input":
            raise UnsupportedOp(f"inputs of kind `{kind[:40]}` are not supported")
    return inputs, stored


_PYTHON = {"as_none", "as_int", "as_float", "as_bool", "as_string"}
_STORED = {
    "parameter": "parameter_name",
    "buffer": "buffer_name",
    "tensor_constant": "tensor_constant_name",
}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:40]} is not a name")
    return value


def _outputs(
    specs: Sequence[Mapping[str, Any]], stored: Mapping[str, str]
) -> tuple[list[Any], set[str]]:
    outputs: list[Any] = []
    mutated: set[str] = set()
    of = {name: key for key, name in stored.items()}
    for spec in specs:
        ((kind, value),) = spec.items()
        if kind == "user_output":
            outputs.append(_value(value["arg"], _Names("", {})))
        elif kind in ("buffer_mutation", "parameter_mutation"):
            mutated.add(of[value[kind.replace("mutation", "name")]])
        elif kind not in ("user_input_mutation", "token"):
            raise UnsupportedOp(f"outputs of kind `{kind[:40]}` are not supported")
    return outputs, mutated
