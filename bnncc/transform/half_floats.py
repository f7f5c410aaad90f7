"""Store float tensors as float16, if the model does or `--float-type float16` asks for it.

    before: y = Kernel(x, r; conv, affine, add r, store y)              r, y: float32
    after:  the same                                                    r, y: float16

On a GPU, reading and writing tensors between kernels takes longer than the computation. Kernels
still compute in float32; float convolutions of float16 tensors multiply float16 on tensor cores and
accumulate in float32.

With the option, the graph is first rewritten as a float16 network would be: `round_floats` inserts
a `ROUND` after residuals, pooled tensors and first convolutions. So evaluation, self-check and
`verify` see the roundings. `store_halves` runs after the passes were compared with the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from bnncc.ir.graph import Graph, Node, TensorType
from bnncc.ir.halves import COARSE, ROUND
from bnncc.ir.magnitude import coarseness
from bnncc.ir.quantizers import QUANTIZED_CONV
from bnncc.schedules import with_half_operands
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import layout, quantization
from bnncc.topi_binary.build import aliases, first_step_input, output_types
from bnncc.topi_binary.spec import Conv2d, Spec
from bnncc.topi_binary.step import TENSORS, step_inputs, with_tensors, writers
from bnncc.transform.first_layer import reads_input
from bnncc.transform.physical import KERNEL

KIND = "float16"

_POOLS = ("AveragePool", "MaxPool")
_OF_TWO = ("Add", "Sub", "Mul", "Sum")


def round_floats(graph: Graph) -> None:
    """Insert roundings to float16 for the float tensors that kernels exchange.

    Runs on the graph as loaded. Its inputs and outputs stay float32.
    """
    producers, nodes = graph.producers(), []
    for node in graph.nodes:
        nodes.append(node)
        if not _makes_floats(node, graph, producers):
            continue
        name = node.outputs[0]
        if name in graph.outputs or graph.types[name].dtype != "float32":
            continue
        raw = graph.fresh(f"{name}.sum")
        graph.types[raw] = graph.types[name]
        node.outputs = [raw, *node.outputs[1:]]
        nodes.append(Node(ROUND, [raw], [name], {"to": KIND}, node.name))
    graph.nodes = nodes


def _makes_floats(node: Node, graph: Graph, producers: dict[str, Node]) -> bool:
    if node.op in ("Conv", QUANTIZED_CONV):
        return reads_input(node.inputs[0], graph, producers)
    if node.op in _OF_TWO:
        return len(graph.computed(node.inputs)) > 1
    return node.op in _POOLS


def store_halves(physical: Graph, model: Graph, target: TargetSpec) -> None:
    """Change the tensors between kernels that the model rounds to float16 to that type.

    Parameters
    ----------
    physical : Graph
        Modified in place.
    model : Graph
        The model's graph.
    target : TargetSpec
        Only GPU kernels read and write such tensors.
    """
    if target.kind != "cuda":
        return
    rounded = {
        name for name, slack in coarseness(model, computed=False).items() if slack == COARSE[KIND]
    }
    rounded |= {n.inputs[0] for n in model.nodes if n.op == ROUND and n.attrs["to"] == KIND}
    halves = {
        name
        for name, held in physical.forms.items()
        if physical.types[name].dtype == "float32"
        and any(form.kind in ("NHWC", "NCHW") and form.tensor in rounded for form in held)
    }
    halves -= {*physical.inputs, *physical.outputs, *physical.constants}
    halves &= set(_stored(physical))
    for node in physical.nodes:
        spec = node.attrs.get("spec") if node.op == KERNEL else None
        readable = set() if spec is None else set(_readable(spec))
        halves -= {name for place, name in enumerate(node.inputs) if place not in readable}
    _keep_together(physical, halves)
    for node in physical.nodes:
        if node.op == KERNEL and halves.intersection([*node.inputs, *node.outputs]):
            _rewrite(node, physical, halves, target)


def _stored(physical: Graph) -> Iterator[str]:
    """Yield the tensors written by the ``store`` steps of kernels."""
    for node in physical.nodes:
        if node.op == KERNEL and node.attrs["spec"].epilogue:
            for name, step in zip(node.outputs, writers(node.attrs["spec"].steps), strict=True):
                if step.op == "store":
                    yield name


def _readable(spec: Spec) -> Iterator[int]:
    """Yield the positions of inputs that may be float16."""
    if getattr(spec, "dtype", "") == spec.data_types[0][1] == "float32":
        yield 0
    readers = [step for step in spec.steps for _ in range(step_inputs(step))]
    for place, step in enumerate(readers, first_step_input(spec)):
        if step.op in TENSORS:
            yield place


def _keep_together(physical: Graph, halves: set[str]) -> None:
    """Remove tensors from `halves` that share memory with a tensor of the other type."""
    pairs = [
        {node.outputs[place], node.inputs[over]}
        for node in physical.nodes
        if node.op == KERNEL
        for place, over in enumerate(aliases(node.attrs["spec"]))
        if over >= 0
    ]
    while torn := [pair for pair in pairs if pair & halves and not pair <= halves]:
        halves.difference_update(*torn)


def _rewrite(node: Node, physical: Graph, halves: set[str], target: TargetSpec) -> None:
    """Update the spec of a kernel to the types of its tensors."""
    spec: Any = node.attrs["spec"]
    steps = list(spec.steps)
    params = node.inputs[first_step_input(spec) :]
    for number, (_, taken, made) in enumerate(with_tensors(spec.steps, params, node.outputs)):
        if not halves.isdisjoint([*taken, *made]):
            steps[number] = replace(steps[number], dtype=KIND)
    spec = replace(spec, steps=tuple(steps))
    if node.inputs[0] in halves:
        spec = replace(spec, dtype=KIND)
        if isinstance(spec, Conv2d):
            spec = _multiplied(node, spec, physical, target)
    node.attrs["spec"] = spec
    for name, (shape, dtype) in zip(node.outputs, output_types(spec), strict=True):
        physical.types[name] = TensorType(tuple(shape), dtype)


def _multiplied(node: Node, spec: Conv2d, physical: Graph, target: TargetSpec) -> Conv2d:
    """Return a convolution of float16 data with float16 weights, if that is faster."""
    half = with_half_operands(spec, target)
    if half == spec:
        return spec
    depth = spec.channels_per_group
    filters = layout.unpack_float_weight(
        physical.constants[node.inputs[1]], spec.out_channels, (*spec.kernel, depth)
    )
    if np.abs(filters).max(initial=0.0) > np.finfo(np.float16).max:
        return spec
    node.inputs[1] = physical.constant(quantization.pack_weight(filters, half), f"{node.name}.half")
    return half
