"""Run ONNX models, whole or in parts, with another runtime, as the reference."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper

from bnncc.frontend.inline import reads
from bnncc.frontend.onnx import load
from bnncc.ir.evaluate import evaluate
from bnncc.ir.graph import Graph
from bnncc.ir.magnitude import JUMPS

Array = np.ndarray[Any, Any]

ONNX_RUNTIME, ONNX_REFERENCE, OWN = "onnxruntime", "onnx.reference", "bnncc.evaluate"

DECISIONS = frozenset((
    "Sign", "Round", "Floor", "Ceil", "Greater", "GreaterOrEqual", "Less", "LessOrEqual",
    "Equal", "QuantizeLinear", "BipolarQuant", "Quant", "IntQuant", "MultiThreshold", "Trunc",
    *JUMPS,
))  # fmt: skip
"""Operators whose output jumps where their first input crosses a threshold."""

PRODUCTS = frozenset(("Conv", "Gemm", "MatMul", "XnorPopcountMatMul"))


@dataclass
class Reference:
    """Runs models with the first available runtime that supports them."""

    used: dict[str, int] = field(default_factory=dict)
    """How many models each runtime ran."""
    without: str = ""
    """A runtime that is not asked."""

    def run(self, model: onnx.ModelProto, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run `model`; return its outputs by name."""
        for name, function in (
            (ONNX_RUNTIME, _onnxruntime),
            (ONNX_REFERENCE, _onnx_reference),
            (OWN, _own),
        ):
            outputs = None if name == self.without else function(model, feeds)
            if outputs is not None:
                self.used[name] = self.used.get(name, 0) + 1
                return outputs
        raise AssertionError("_own returns or raises")

    def loaded(
        self, model: onnx.ModelProto, feeds: Mapping[str, Array]
    ) -> tuple[Graph, Mapping[str, Array]]:
        """Return the graph of `model` and its inputs."""
        return load(model, input_shapes={k: v.shape for k, v in feeds.items()}), feeds

    @property
    def name(self) -> str:
        """Name and version of the runtime."""
        names = []
        for key in self.used:
            version = ""
            if key == ONNX_RUNTIME:
                import onnxruntime

                version = f" {onnxruntime.__version__}"
            elif key == ONNX_REFERENCE:
                version = f" {onnx.__version__}"
            names.append(key + version)
        return " and ".join(names)


_KNOWN_IR = 10
"""Version of the file format that any ONNX Runtime reads; newer ones add types, which it knows or
refuses by themselves."""


def _onnxruntime(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> dict[str, Array] | None:
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    names = [o.name for o in model.graph.output]
    stored = model.SerializeToString()
    if model.ir_version > _KNOWN_IR:  # of a field that comes twice, the last one counts
        stored += onnx.ModelProto(ir_version=_KNOWN_IR).SerializeToString()
    try:
        session = ort.InferenceSession(stored, options, providers=["CPUExecutionProvider"])
        values = session.run(names, dict(feeds))
    except Exception:  # ORT's errors have no common base; another runtime gets its chance
        return None
    return dict(zip(names, values, strict=True))


def _onnx_reference(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> dict[str, Array] | None:
    from onnx.reference import ReferenceEvaluator

    names = [o.name for o in model.graph.output]
    if _adds_bfloat16(model, feeds):
        return None
    try:
        values = ReferenceEvaluator(model).run(names, dict(feeds))
    except Exception:  # it raises anything, for operators it does not know too
        return None
    return {n: np.asarray(v) for n, v in zip(names, values, strict=True)}


def _adds_bfloat16(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> bool:
    """Whether tensors are bfloat16: onnx.reference rounds after each addition of such numbers.

    The error of a sum then grows with its length; bnncc sums in float32 and rounds once.
    """
    stored = any(t.data_type == onnx.TensorProto.BFLOAT16 for t in model.graph.initializer)
    return stored or any(value.dtype.name == "bfloat16" for value in feeds.values())


def _own(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> dict[str, Array]:
    shapes = {k: v.shape for k, v in feeds.items()}
    return evaluate(load(model, input_shapes=shapes), feeds)


def tap_points(model: onnx.ModelProto) -> list[str]:
    """Return the tensors between layers: data of Conv, Gemm and MatMul, and inputs of decisions.

    Parameters
    ----------
    model : ModelProto
        Tensors inside functions and subgraphs are left out.

    Returns
    -------
    list of str
        Floats that depend on an input, in topological order, without the inputs and outputs.
    """
    graph = model.graph
    made = computed(model)
    ends = {i.name for i in graph.input} | {o.name for o in graph.output}
    order: list[str] = []
    wanted: set[str] = set()
    for node in graph.node:
        if made.intersection(node.output):
            order += [o for o in node.output if o]
            if node.op_type in PRODUCTS:
                wanted.update(node.input[:2] if node.op_type != "Conv" else node.input[:1])
            elif node.op_type in DECISIONS:
                wanted.update(node.input[:1])
                if node.op_type in ("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal"):
                    wanted.update(node.input)
    return [name for name in order if name in wanted and name not in ends]


def computed(model: onnx.ModelProto) -> set[str]:
    """Return the tensors that nodes of the main graph compute from inputs, and not from constants.

    Parameters
    ----------
    model : ModelProto
        Its nodes are in order.
    """
    fixed = {t.name for t in model.graph.initializer}
    inputs = {i.name for i in model.graph.input if i.name not in fixed}
    made: set[str] = set()
    for node in model.graph.node:
        if any(name in inputs or name in made for name in reads(node)):
            made.update(o for o in node.output if o)
    return made


def in_order(model: onnx.ModelProto, names: Collection[str]) -> list[str]:
    """Return tensors in the order in which the model's nodes compute them; others come last."""
    made = [o for node in model.graph.node for o in node.output if o in names]
    return [*made, *sorted(set(names) - set(made))]


def with_outputs(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """Return a copy of `model` that also outputs the tensors `names`."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    result.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return result


@dataclass(frozen=True)
class Segment:
    """The part of a model between some tensors and one that depends on them."""

    model: onnx.ModelProto
    """Inputs are `leaves`, the output is `tensor`."""
    tensor: str
    """What it computes."""
    leaves: tuple[str, ...]
    """What it computes it from."""
    ops: tuple[str, ...]
    """Types of its nodes."""
    node: str
    """Name of its Conv, Gemm or MatMul, else of its last node."""


class Splitter:
    """Cuts a model at given tensors.

    Parameters
    ----------
    model : ModelProto
        The whole.
    cuts : iterable of str
        Names of tensors whose values are known, including model inputs.
    """

    def __init__(self, model: onnx.ModelProto, cuts: Iterable[str]) -> None:
        self._model = model
        self._cuts = set(cuts)
        self._producer = {o: n for n in model.graph.node for o in n.output if o}
        self._position = {id(n): k for k, n in enumerate(model.graph.node)}
        self._fixed = {t.name: t for t in model.graph.initializer}

    def segment(self, tensor: str, values: Mapping[str, Array]) -> Segment:
        """Return the segment from the nearest cuts to `tensor`; `values` gives their types."""
        nodes: dict[int, onnx.NodeProto] = {}
        leaves: dict[str, None] = {}
        fixed: dict[str, onnx.TensorProto] = {}
        stack = [tensor]
        while stack:
            name = stack.pop()
            if name in self._fixed:
                fixed[name] = self._fixed[name]
            elif name in self._cuts and name != tensor:
                leaves[name] = None
            elif name in self._producer:
                node = self._producer[name]
                if id(node) not in nodes:
                    nodes[id(node)] = node
                    stack += reads(node)
        ordered = sorted(nodes.values(), key=lambda n: self._position[id(n)])
        given = tuple(name for name in leaves if name in values)
        infos = [
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(values[name].dtype), values[name].shape
            )
            for name in given
        ]
        part = onnx.ModelProto()
        part.ir_version = self._model.ir_version
        part.opset_import.extend(self._model.opset_import)
        part.functions.extend(self._model.functions)
        part.graph.name = tensor
        part.graph.node.extend(_without(node, leaves) for node in ordered)
        part.graph.initializer.extend(fixed.values())
        part.graph.input.extend(infos)
        part.graph.output.append(onnx.ValueInfoProto(name=tensor))
        layer = next((n for n in reversed(ordered) if n.op_type in PRODUCTS), ordered[-1])
        return Segment(
            part, tensor, given, tuple(n.op_type for n in ordered), layer.name or layer.output[0]
        )


def _without(node: onnx.NodeProto, given: Collection[str]) -> onnx.NodeProto:
    """Return `node` with unused names for those outputs that are `given`."""
    if not any(name in given for name in node.output):
        return node
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.output[:] = [f"{name}/again" if name in given else name for name in node.output]
    return copy
