"""Types of the inputs and outputs of a kernel, for any spec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from bnncc.topi_binary import (
    few_bit_data,
    filtering,
    layout,
    quantization,
    sliced_data,
    tiles,
    weight_codes,
)
from bnncc.topi_binary.bits_table import needs_table
from bnncc.topi_binary.kind import Type as Type
from bnncc.topi_binary.spec import (
    BinaryConv2d,
    BitwiseMaxPool,
    Conv2d,
    FewBitConv2d,
    SliceBits,
    Spec,
)
from bnncc.topi_binary.step import FORMS, TENSORS, Step, output_kinds, step_inputs, step_outputs

SPEC_ATTR = "bnncc.spec"
"""Attribute of a PrimFunc that holds its spec as JSON."""


def input_types(spec: Spec) -> list[Type]:
    """Return shape and dtype of each kernel input of `spec`, in order."""
    types = list(spec.data_types)
    if type(spec) in _CONSTANTS:
        types += _CONSTANTS[type(spec)](spec)
    for step in spec.all_steps:
        types += step_input_types(spec, step)
    return types


def step_input_types(spec: Spec, step: Step) -> list[Type]:
    """Return shape and dtype of each kernel input of `step`, in order."""
    lanes = layout.blocks(spec.output_channels) * layout.LANES
    if step.op in TENSORS:
        (*image, channels), _ = _float_output(spec, step)
        return [((*image, step.period or channels), step.dtype)]
    if step.op == "gate":
        return [((spec.n, spec.output_channels), "float32")]
    if step.op == "threshold":
        if sliced_data.limited(spec):
            return [(sliced_data.limit_shape(spec), "uint32")] * (1 + step.zero)
        return [((lanes,), "int32")] * (1 + step.zero)
    if step.op == "levels":
        shared: dict[str, list[Type]] = {
            "acc": [((step.count, lanes), "int32")],
            "acc-scale": [((lanes,), "float32")] * 2,
            "value": [((step.count, lanes), "float32")],
            "search": [((step.count + 4,), "float32")],
            "round": [((2,), "float32")],
            "whole": [],
        }
        table: list[Type] = [((step.count + 1,), "float32")] * ("table" in step.forms)
        return shared[step.way] + [((lanes,), "int32")] * step.flip + table
    return [((lanes,), "float32")] * step_inputs(step)


def output_types(spec: Spec) -> list[Type]:
    """Return shape and dtype of each kernel output of `spec`, in order."""
    if not spec.epilogue:
        return spec.plane_types
    types: list[Type] = []
    for step in spec.steps:
        for kind in output_kinds(step):
            if kind in ("store", "value", "table"):
                shape, dtype = _float_output(spec, step)
                types.append((shape, step.dtype if kind == "store" else dtype))
            else:
                form = "planes" if kind == "bits" else kind
                size = layout.level_words(spec.output_channels, form)
                types.append(spec.made(size, FORMS[form]))
    return types


def first_step_input(spec: Spec) -> int:
    """Return the position of the first kernel input of the steps, which are last."""
    return len(input_types(spec)) - sum(step_inputs(step) for step in spec.steps)


def aliases(spec: Spec) -> list[int]:
    """Return for each output of `spec` the index of the input it is stored over, or -1.

    Raises
    ------
    ValueError
        If a step is in place without a preceding ``add``.
    """
    position = first_step_input(spec)
    added, found = -1, []
    for step in spec.steps:
        if step.op == "add":
            added = position
        position += step_inputs(step)
        if step.in_place and added < 0:
            raise ValueError("a step is in place, but nothing is added before it")
        found += [added if step.in_place else -1] * step_outputs(step)
    return found or [-1] * len(output_types(spec))


def over_residual(spec: BinaryConv2d) -> BinaryConv2d:
    """Return a layer of images that stores its first result over the tensor it adds before.

    That result must be NHWC. If there is none, or nothing is added before it, the layer is returned
    unchanged.
    """
    for index, step in enumerate(spec.steps):
        if step.op == "store":
            nhwc = spec.rank == 4 and step.layout == "NHWC"
            if nhwc and any(one.op == "add" for one in spec.steps[:index]):
                changed = replace(step, in_place=True)
                steps = (*spec.steps[:index], changed, *spec.steps[index + 1 :])
                return replace(spec, steps=steps)
            break
    return spec


def _float_output(spec: Spec, step: Step) -> Type:
    return spec.made(spec.output_channels, "float32", step.layout)


def _binary_weight(spec: BinaryConv2d) -> list[Type]:
    if spec.per_image:
        lanes = layout.blocks(spec.out_channels) * layout.LANES
        plane: Type = ((spec.n, lanes * layout.words(spec.channels_per_group)), "uint32")
        starts: list[Type] = [((spec.n, lanes), "int32")] * (spec.mode == "and")
        return [plane] * (1 + spec.weight_zeros) + starts
    if spec.weight_order in tiles.ORDERS:
        size = tiles.of(spec).words
    elif spec.weight_order == sliced_data.ORDER:
        size = sliced_data.weight_size(spec)
    else:
        depth = spec.channels_per_group
        size = layout.weight_words(spec.out_channels, spec.kernel, depth, spec.weight_order)
    return [((size,), "uint32")]


def _float_weight(spec: Conv2d) -> list[Type]:
    if spec.method != "direct":
        return [((filtering.weight_size(spec),), "float32")]
    if spec.operands != "float32":
        size, dtype = quantization.weight_type(spec)
        return [((size,), dtype)]
    if spec.code_bits:
        return weight_codes.constants(spec)
    spare = layout.LANES if spec.out_channels % layout.LANES else 0
    return [((spec.out_channels * spec.taps + spare,), "float32")]


def _mask(spec: BitwiseMaxPool) -> list[Type]:
    return [((layout.words(spec.channels),), "uint32")] * spec.flip


def _table(spec: SliceBits) -> list[Type]:
    bits = layout.words(len(spec.index)) * layout.WORD_BITS
    return [((bits,), "int32")] * needs_table(spec)


_CONSTANTS: dict[type, Callable[[Any], Sequence[Type]]] = {
    BinaryConv2d: _binary_weight,
    FewBitConv2d: few_bit_data.constants,
    Conv2d: _float_weight,
    BitwiseMaxPool: _mask,
    SliceBits: _table,
}
"""By kind: types of the inputs between data and epilogue (weights, masks, tables)."""
