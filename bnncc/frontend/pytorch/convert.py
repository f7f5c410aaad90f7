"""Convert an exported program to an ONNX model: one walk, with one rule per ATen operator.

Exported programs may modify tensors in place, also through views (``x[:, :8] += y``). Each tensor
of the program has a current ONNX value here. A write creates a new value, and updates the tensor of
which the written one is a view; other views are recomputed when they are read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from bnncc.errors import BnnccError, ModelError, UnsupportedOp
from bnncc.frontend.pytorch import (
    elementwise,
    layers,
    numbers,
    picking,
    products,
    quantizers,
    recurrent,
    reductions,
    resizing,
    shapes,
    views,
    windows,
)
from bnncc.frontend.pytorch.archive import Archive
from bnncc.frontend.pytorch.program import Call, Meta, Program, Ref, live_calls
from bnncc.frontend.pytorch.schema import read
from bnncc.frontend.pytorch.site import Name, Rule, Site, Value
from bnncc.ir.dims import MAX_DIM, readable
from bnncc.ir.evaluate import make_attribute
from bnncc.ir.graph import Node

OPSET = 22
"""Opset of the models."""

RULES: dict[str, Rule] = {
    **elementwise.RULES,
    **numbers.RULES,
    **shapes.RULES,
    **reductions.RULES,
    **products.RULES,
    **layers.RULES,
    **picking.RULES,
    **quantizers.RULES,
    **recurrent.RULES,
    **resizing.RULES,
    **windows.RULES,
}
"""Rule of each ATen operator."""

_IN_PLACE = re.compile(r"(_?[a-z]\w*[^_\W])_(\.\w+)")
_COPIES = ("Cast", "Identity", "Reshape")
_PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_RESHAPING = {"squeeze", "unsqueeze", "transpose", "t", "swapaxes", "set", "resize", "as_strided"}
"""Operators whose in-place form changes the shape of a tensor and all its aliases."""


def is_known(target: str) -> bool:
    """Whether there is a rule for an operator (``conv2d.default``) or its functional form."""
    match = _IN_PLACE.fullmatch(target)
    return target in RULES or (match is not None and match[1] + match[2] in RULES)


def to_onnx(content: bytes) -> onnx.ModelProto:
    """Return the ONNX model of a ``.pt2`` file.

    Returns
    -------
    onnx.ModelProto
        Inputs have the names of ``forward``'s arguments, layers those of their modules.

    Raises
    ------
    ModelError
        If the file is damaged or has another format; may be `UnsupportedOp` or `ShapeError`.
    """
    archive = Archive(content)
    return Converter(read(archive), archive).model()


@dataclass
class _View:
    """A tensor that shares its elements with another."""

    call: Call
    parent: str
    version: int


class Converter:
    """Converts a program, whose weights are in an archive."""

    def __init__(self, program: Program, archive: Archive) -> None:
        self.program, self.archive = program, archive
        self.nodes: list[Node] = []
        self.initializers: dict[str, np.ndarray] = {}
        self.metas: dict[str, Meta] = dict(program.metas)
        self._names: set[str] = {*program.inputs}
        self._labels: set[str] = set()
        self._current: dict[str, str] = {name: name for name in program.inputs}
        self._views: dict[str, _View] = {}
        self._versions: dict[str, int] = {}
        self._stored: dict[object, str] = {}
        self._lacking: dict[str, Call] = {}

    def model(self) -> onnx.ModelProto:
        """Walk the program and return the model."""
        program = self.program
        calls = live_calls(program, lambda call: functional(call) is not None)
        self._check_known(calls)
        for call in calls:
            self._convert(call)
        outputs = self._outputs()
        inputs = [self._input(name) for name in program.inputs]
        used = {i for node in self.nodes for i in node.inputs} | set(outputs)
        graph = helper.make_graph(
            [self._proto(node) for node in self.nodes],
            "model",
            inputs,
            [onnx.ValueInfoProto(name=name) for name in outputs],
            [numpy_helper.from_array(v, k) for k, v in self.initializers.items() if k in used],
        )
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10
        )
        bounds = {self._renamed(s): str(n) for s, n in self.program.max_dims.items()}
        helper.set_model_props(model, {f"{MAX_DIM}{s}": n for s, n in bounds.items()})
        return model

    def _check_known(self, calls: list[Call]) -> None:
        """Raise an error that lists all unsupported operators."""
        unknown = [c for c in calls if (functional(c) or c.target) not in RULES]
        if not unknown:
            return
        kinds = {c.target for c in unknown}
        more = f", and {len(kinds) - 1} other kinds" if len(kinds) > 1 else ""
        first = unknown[0]
        inside = f" in `{first.module}`" if first.module else ""
        raise UnsupportedOp(
            f"{len(unknown)} nodes have an operator that is not supported: {first.where}{inside}"
            f"{more}",
            hint="write it with other operators, or export with "
            "torch.export.export(...).run_decompositions()",
        )

    # ------------------------------------------------------------------------------------- one call

    def _convert(self, call: Call) -> None:
        target = functional(call)
        if target is None:
            values = self._results(call, call.target)
            for name, value in zip(call.outputs, values, strict=False):
                if name:
                    self._current[name] = value
                    self._note_number(call, name)
            for name in call.outputs[len(values) :]:
                self._lacking[name] = call
            self._note_views(call)
            return
        changed = next(iter(call.args.values()))
        if not isinstance(changed, Ref) or target.partition(".")[0] in _RESHAPING:
            raise UnsupportedOp(f"{call.where}: changes a tensor in a way that is not supported")
        value = self._results(call, target)[0]
        self._write(changed.name, value, call)
        for name in filter(None, call.outputs):
            alias = Call("alias.default", {"self": changed}, (name,), call.name, call.module)
            self._current[name] = value
            self._note_views(alias)

    def _results(self, call: Call, target: str) -> list[str]:
        """Emit the nodes of a call; the last ones get the names of its outputs if possible."""
        start = len(self.nodes)
        site = Site(self, call)
        try:
            made = RULES[target](site)
        except BnnccError as error:
            kind = type(error) if isinstance(error, ModelError) else ModelError
            text = str(error)
            if not text.startswith(call.target.removesuffix(".default")):
                text = f"{call.where}: {text}"
            raise kind(text, hint=error.hint) from error
        except Exception as error:  # damaged files may contain arbitrary arguments
            reason = f"{type(error).__name__} {error}"[:200]
            raise ModelError(f"{call.where}: its arguments make no sense: {reason}") from error
        if nodes := self.nodes[start:]:
            main = next((n for n in reversed(nodes) if n.op in _PRODUCTS), nodes[-1])
            main.name = main.name or self._label(call, main.op in _PRODUCTS)
        values = made if isinstance(made, list) else [made]
        names = [_text(v) for v in values]
        wanted = dict(zip(names, call.outputs, strict=False))
        for node in self.nodes[start:]:
            for k, old in enumerate(node.outputs):
                new = wanted.get(old)
                if new and new not in self._names:
                    self._names.add(new)
                    self._rename(start, old, new)
                    names = [new if n == old else n for n in names]
                    node.outputs[k] = new
        return names

    def _rename(self, start: int, old: str, new: str) -> None:
        for node in self.nodes[start:]:
            node.inputs = [new if i == old else i for i in node.inputs]

    # ----------------------------------------------------------------------------- values and views

    def value(self, name: str) -> Value:
        """Return the current value of a tensor, or of a number computed at run time."""
        meta = self.metas[name]
        if not meta.dtype:
            raise UnsupportedOp(f"tensor `{name}` has a type that is not supported")
        return Value(self._read(name), meta.dtype, meta.shape)

    def _read(self, name: str) -> str:
        if name in self._lacking:
            call = self._lacking[name]
            place = call.outputs.index(name)
            raise UnsupportedOp(f"{call.where}: result {place} is read, which is not supported")
        chain: list[str] = []
        root = name
        while root in self._views:
            chain.append(root)
            root = self._views[root].parent
        version = self._versions.get(root, 0)
        if version and root in self.program.stored:
            raise UnsupportedOp(
                f"`{self.program.stored[root]}` is changed while the network runs, and read again",
                hint="a network whose state changes from run to run cannot be compiled; call "
                "model.eval() before torch.export.export",
            )
        if root not in self._current:
            self._current[root] = self._load(root)
        for view in reversed(chain):
            if self._views[view].version != version:
                call = self._views[view].call
                values = self._results(call, call.target)
                for out, value in zip(call.outputs, values, strict=False):
                    if out:
                        self._current[out] = value
                        self._views[out].version = version
        return self._current[name]

    def constant(self, name: str) -> np.ndarray | None:
        """Return a value known at compile time: stored, or a reshaped copy of a stored one."""
        steps: list[Node] = []
        makers = {out: node for node in self.nodes for out in node.outputs}
        while name not in self.initializers:
            node = makers.get(name)
            if node is None or node.op not in _COPIES:
                return None
            steps.append(node)
            name = node.inputs[0]
        value = self.initializers[name]
        for node in reversed(steps):
            if node.op == "Cast":
                value = value.astype(helper.tensor_dtype_to_np_dtype(node.attrs["to"]))
            elif node.op == "Reshape":
                shape = self.initializers.get(node.inputs[1])
                if shape is None or 0 in shape:
                    return None
                value = value.reshape(shape)
        return value

    def owns(self, name: str) -> bool:
        """Whether a tensor is not a view of another."""
        return name not in self._views

    def _load(self, name: str) -> str:
        """Add a parameter, buffer or constant to the model; tied ones only once."""
        key = self.program.stored[name]
        if name in self.program.mutated:
            raise UnsupportedOp(
                f"`{key}` changes from run to run", hint="export the model after model.eval()"
            )
        payload = self.archive.weights.get(key) or self.archive.constants.get(key)
        if payload is None:
            raise ModelError(f"parameter `{key[:80]}` is not in the archive")
        if payload not in self._stored:
            value = self.archive.tensor(payload, f"parameter `{key[:80]}`")
            self._stored[payload] = self.fresh(f"{key}.value" if key in self.metas else key)
            self.initializers[self._stored[payload]] = value
        meta = self.metas[name]
        if meta.shape != payload.shape or meta.dtype != payload.dtype.name:
            raise ModelError(
                f"parameter `{key[:80]}`: stored as {payload.dtype.name} {list(payload.shape)}, "
                f"expected {meta.dtype} {list(meta.shape)}"
            )
        return self._stored[payload]

    def _note_number(self, call: Call, name: str) -> None:
        """Record the dtype of a result that torch does not treat as a tensor."""
        if name not in self.metas:
            item = call.target in ("item.default", "_local_scalar_dense.default")
            dtype = self.value(call.refs()[0]).dtype if item else "int64"
            self.metas[name] = Meta(dtype, () if item else (1,))

    def _note_views(self, call: Call) -> None:
        parent = views.shares(call, self.metas)
        if parent is None:
            return
        root = parent
        while root in self._views:
            root = self._views[root].parent
        for name in filter(None, call.outputs):
            self._views[name] = _View(call, parent, self._versions.get(root, 0))

    def _write(self, name: str, written: str, call: Call) -> None:
        chain: list[str] = []
        value: Name = written
        while name in self._views:
            view = self._views[name]
            parent = self._read(view.parent)
            self._current[name] = _text(value)
            chain.append(name)
            value = views.put_back(Site(self, view.call), name, parent, value, call)
            name = view.parent
        self._current[name] = _text(value)
        self._versions[name] = self._versions.get(name, 0) + 1
        for view_name in chain:
            self._views[view_name].version = self._versions[name]

    # ------------------------------------------------------------------------------- names and ONNX

    def fresh(self, stem: str) -> str:
        """Return an unused tensor name."""
        return _unused(stem, self._names)

    def _label(self, call: Call, product: bool) -> str:
        """Return an unused node name: the module's path for its first product."""
        stem = call.module if call.leaf or product else ""
        if not stem or stem in self._labels:
            stem = f"{call.module}/{call.name}" if call.module else call.name
        return _unused(stem, self._labels)

    def _proto(self, node: Node) -> onnx.NodeProto:
        proto = helper.make_node(node.op, node.inputs, node.outputs, node.name or node.outputs[0])
        for key, value in node.attrs.items():
            try:
                proto.attribute.append(make_attribute(key, value))
            except (ValueError, OverflowError) as error:
                raise ModelError(
                    f"{node.where}: attribute `{key}` has a number outside of 64 bits"
                ) from error
        return proto

    def _input(self, name: str) -> onnx.ValueInfoProto:
        meta = self.metas[name]
        if not meta.dtype:
            raise UnsupportedOp(f"input `{name}` has a type that is not supported")
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(meta.dtype))
        dims: list[int | str] = []
        for axis, dim in enumerate(meta.shape):
            if isinstance(dim, str):
                said = readable(self._renamed(dim))
                dim = f"{name}_dim{axis}" if said is None else said
            dims.append(dim)
        return helper.make_tensor_value_info(name, kind or TensorProto.UNDEFINED, dims)

    def _renamed(self, dim: str) -> str:
        """Return a dimension, renamed to N if it is the first axis of the first input."""
        leading = self.metas[self.program.inputs[0]].shape[:1] if self.program.inputs else ()
        first = next((d for d in leading if isinstance(d, str) and d.isidentifier()), None)
        return dim if first is None else re.sub(rf"\b{first}\b", "N", dim)

    def _outputs(self) -> list[str]:
        names: list[str] = []
        for out in self.program.outputs:
            if not isinstance(out, Ref) or out.name not in self.program.metas:
                continue  # None, or a number that forward returned unchanged
            name = self._read(out.name)
            if name in names or name in self.program.inputs or name in self.initializers:
                source, name = name, self.fresh(f"{out.name}.output")
                self.nodes.append(Node("Identity", [source], [name]))
            names.append(name)
        return names


def _text(value: Name) -> str:
    return value.name if isinstance(value, Value) else value


def functional(call: Call) -> str | None:
    """Return the functional form of an in-place operator; None for others."""
    match = _IN_PLACE.fullmatch(call.target)
    if match is None or call.target in RULES:
        return None
    return match[1] + match[2]


def _unused(stem: str, names: set[str]) -> str:
    """Return a name that is none of `names` yet."""
    name, serial = stem, 0
    while name in names:
        serial += 1
        name = f"{stem}.{serial}"
    names.add(name)
    return name
