"""One entry for every kernel: its PrimFunc and the types of its inputs and outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnncc.topi_binary import few_bit_data, filtering, layout, quantization, sliced_data, tiles
from bnncc.topi_binary.bits_table import needs_table
from bnncc.topi_binary.spec import (
    BinaryConv2d,
    BitwiseMaxPool,
    ConcatBits,
    Conv2d,
    Dim,
    Elementwise,
    FewBitConv2d,
    ImageBits,
    PadBits,
    Pool2d,
    SliceBits,
    Spec,
    WeightsOfRows,
    output_size,
)
from bnncc.topi_binary.step import FORMS, Step, output_kinds, step_inputs, step_outputs

if TYPE_CHECKING:
    from tvm import tirx

Type = tuple[tuple[Dim, ...], str]
"""Shape and dtype of a kernel's tensor. The batch may be the name of a symbol."""

SPEC_ATTR = "bnncc.spec"
"""PrimFunc attribute that holds the spec as JSON."""


def prim_func(spec: Spec) -> tirx.PrimFunc:
    """Return the operator of `spec`: its parameters, and the spec as an attribute, without a body.

    A schedule writes the body.

    Parameters
    ----------
    spec : Spec
        Any of the spec classes.

    Returns
    -------
    tirx.PrimFunc
        Inputs in the order of `input_types`, then outputs in the order of `output_types`.
    """
    from bnncc.topi_binary.signature import signature

    return signature(spec)


def output_hw(spec: Spec) -> tuple[int, int]:
    """Return height and width of the outputs of `spec`."""
    if isinstance(spec, PadBits):
        top, left, bottom, right = spec.pads
        return spec.height + top + bottom, spec.width + left + right
    if isinstance(spec, (Elementwise, ImageBits, ConcatBits, SliceBits, WeightsOfRows)):
        return spec.height, spec.width
    if isinstance(spec, Conv2d) and spec.pool is not None:
        return output_hw(pool_of(spec))
    extra = spec.ceil_extra if isinstance(spec, (Pool2d, BitwiseMaxPool)) else (0, 0)
    pads = spec.pads[0] + spec.pads[2], spec.pads[1] + spec.pads[3]
    height, width = (
        output_size(size, spec.kernel[i], spec.strides[i], spec.dilations[i], pads[i], extra[i])
        for i, size in enumerate((spec.height, spec.width))
    )
    return height, width


def pool_of(spec: Conv2d) -> Pool2d:
    """Return the pooling fused into `spec` as one of its own, with the steps after it."""
    assert spec.pool is not None
    height, width = output_hw(spec.unpooled)
    pool = spec.pool
    return Pool2d(
        spec.n, height, width, spec.out_channels, "max", pool.kernel, pool.strides,
        pads=pool.pads, ceil_extra=pool.ceil_extra, steps=spec.steps,
    )  # fmt: skip


def output_channels(spec: Spec) -> int:
    """Return how many channels the outputs of `spec` have."""
    if isinstance(spec, (BinaryConv2d, FewBitConv2d, Conv2d, ImageBits)):
        return spec.out_channels
    if isinstance(spec, ConcatBits):
        return sum(spec.channels)
    return len(spec.index) if isinstance(spec, SliceBits) else spec.channels


def output_rank(spec: Spec) -> int:
    """Return 4, or 2 where the outputs of `spec` are ``[n, channels]``."""
    return 2 if getattr(spec, "squeeze", False) else getattr(spec, "rank", 4)


def input_types(spec: Spec) -> list[Type]:
    """Return shape and dtype of each kernel input of `spec`, in order."""
    if isinstance(spec, WeightsOfRows):
        return [((spec.n, spec.rows, layout.words(spec.channels)), "uint32")]
    if isinstance(spec, ConcatBits):
        return [_image(spec, layout.words(c), "uint32") for c in spec.channels]
    types = [_data(spec)]
    if getattr(spec, "ternary", False):
        types.append(types[0])
    if isinstance(spec, Elementwise) and spec.planes:
        types *= spec.planes
    if isinstance(spec, FewBitConv2d):
        types *= few_bit_data.data_tensors(spec)
        types += few_bit_data.constants(spec)
    if isinstance(spec, (BinaryConv2d, Conv2d)):
        types.append(_weight(spec))
    if isinstance(spec, BinaryConv2d) and spec.per_image:
        types += types[-1:] * spec.weight_zeros
        lanes = layout.blocks(spec.out_channels) * layout.LANES
        types += [((spec.n, lanes), "int32")] * (spec.mode == "and")
    if isinstance(spec, BitwiseMaxPool):
        types *= spec.planes
    if isinstance(spec, BitwiseMaxPool) and spec.flip:
        types.append(((layout.words(spec.channels),), "uint32"))
    if isinstance(spec, SliceBits) and needs_table(spec):
        types.append(((layout.words(len(spec.index)) * layout.WORD_BITS,), "int32"))
    before = spec.pool.before if isinstance(spec, Conv2d) and spec.pool is not None else ()
    for step in (*before, *getattr(spec, "steps", ())):
        types += step_input_types(spec, step)
    return types


def weight_position(spec: BinaryConv2d | FewBitConv2d) -> int:
    """Return which kernel input of `spec` are the weights."""
    return 1 + spec.ternary if isinstance(spec, BinaryConv2d) else few_bit_data.data_tensors(spec)


def step_input_types(spec: Spec, step: Step) -> list[Type]:
    """Return shape and dtype of each kernel input that `step` of `spec` takes, in order."""
    lanes = layout.blocks(output_channels(spec)) * layout.LANES
    if step.op in ("add", "rsub", "mul"):
        (*image, channels), dtype = _float_output(spec, step)
        return [((*image, step.period or channels), dtype)]
    if step.op == "gate":
        return [((spec.n, output_channels(spec)), "float32")]
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
            "whole": [],
        }
        table: list[Type] = [((step.count + 1,), "float32")] * ("table" in step.forms)
        return shared[step.way] + [((lanes,), "int32")] * step.flip + table
    vectors = {"affine": 2, "scale": 1, "shift": 1, "prelu": 1}
    return [((lanes,), "float32")] * vectors.get(step.op, 0)


def output_types(spec: Spec) -> list[Type]:
    """Return shape and dtype of each kernel output of `spec`, in order."""
    if isinstance(spec, WeightsOfRows):
        lanes = layout.blocks(spec.rows) * layout.LANES
        weight: Type = ((spec.n, lanes * layout.words(spec.channels)), "uint32")
        return [weight, ((spec.n, lanes), "int32")] if spec.count else [weight]
    height, width = output_hw(spec)
    channels = output_channels(spec)

    def packed(form: str) -> Type:
        size = layout.level_words(channels, form)
        return _shape(spec.n, height, width, size, output_rank(spec)), FORMS[form]

    plane = packed("planes")
    if isinstance(spec, (ImageBits, BitwiseMaxPool, ConcatBits, SliceBits, PadBits)):
        return [plane] * (spec.planes if isinstance(spec, BitwiseMaxPool) else 1)
    types: list[Type] = []
    for step in spec.steps:
        for kind in output_kinds(step):
            if kind in ("store", "value", "table"):
                types.append(_float_output(spec, step))
            else:
                types.append(plane if kind == "bits" else packed(kind))
    return types


def aliases(spec: Spec) -> list[int]:
    """Return for each output of `spec` the kernel input it is stored over; -1: its own tensor.

    Raises
    ------
    ValueError
        If a step is in place with no ``add`` before it.
    """
    steps = getattr(spec, "steps", ())
    position = len(input_types(spec)) - sum(step_inputs(step) for step in steps)
    added, found = -1, []
    for step in steps:
        if step.op == "add":
            added = position
        position += step_inputs(step)
        if step.in_place and added < 0:
            raise ValueError("a step is in place, but nothing is added before it")
        found += [added if step.in_place else -1] * step_outputs(step)
    return found or [-1] * len(output_types(spec))


def _shape(
    n: Dim, height: int, width: int, last: int, rank: int, where: str = "NHWC"
) -> tuple[Dim, ...]:
    if rank == 2:
        return (n, last)
    return (n, last, height, width) if where == "NCHW" else (n, height, width, last)


def _image(spec: Spec, last: int, dtype: str) -> Type:
    where = getattr(spec, "data_layout", "NHWC") if dtype != "uint32" else "NHWC"
    rank = getattr(spec, "rank", 4)
    return _shape(spec.n, spec.height, spec.width, last, rank, where), dtype


def _data(spec: Spec) -> Type:
    if isinstance(spec, BinaryConv2d):
        last = spec.groups * layout.words(spec.channels // spec.groups)
        dense = spec.weight_order == sliced_data.ORDER
        return _image(spec, layout.words(spec.channels) if dense else last, "uint32")
    if isinstance(spec, FewBitConv2d):
        form = few_bit_data.FORM[spec.method]
        return _image(spec, layout.level_words(spec.channels, form), FORMS[form])
    if isinstance(spec, (Conv2d, Pool2d)):
        bytewise = isinstance(spec, Conv2d) and spec.zero_points
        return _image(spec, spec.channels, "uint8" if bytewise else "float32")
    if isinstance(spec, ImageBits):
        return _image(spec, spec.channels, "uint8")
    if isinstance(spec, Elementwise) and not spec.packed:
        return _image(spec, spec.channels, spec.dtype)
    assert isinstance(spec, (Elementwise, BitwiseMaxPool, SliceBits, PadBits))
    return _image(spec, layout.words(spec.channels), "uint32")


def _weight(spec: BinaryConv2d | Conv2d) -> Type:
    if isinstance(spec, Conv2d) and spec.method != "direct":
        return (filtering.weight_size(spec),), "float32"
    if isinstance(spec, Conv2d) and spec.operands != "float32":
        size, dtype = quantization.weight_type(spec)
        return (size,), dtype
    per_group, taps = spec.channels // spec.groups, spec.kernel[0] * spec.kernel[1]
    if isinstance(spec, BinaryConv2d) and spec.weight_order in tiles.ORDERS:
        return (tiles.of(spec).words,), "uint32"
    if isinstance(spec, BinaryConv2d) and spec.weight_order == sliced_data.ORDER:
        return (sliced_data.weight_size(spec),), "uint32"
    if isinstance(spec, BinaryConv2d) and spec.per_image:
        columns = layout.blocks(spec.out_channels) * layout.LANES
        return (spec.n, columns * layout.words(per_group)), "uint32"
    if isinstance(spec, BinaryConv2d):
        order = spec.weight_order
        return (layout.weight_words(spec.out_channels, spec.kernel, per_group, order),), "uint32"
    spare = layout.LANES if spec.out_channels % layout.LANES else 0
    return (spec.out_channels * taps * per_group + spare,), "float32"


def _float_output(spec: Spec, step: Step) -> Type:
    height, width = output_hw(spec)
    return (
        _shape(spec.n, height, width, output_channels(spec), output_rank(spec), step.layout),
        "float32",
    )
