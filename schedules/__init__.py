"""How each operator runs on each instruction set."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bnncc.schedules.space import Point, Space, UnfitPoint
from bnncc.schedules.weight_order import in_slices, weight_orders, with_weight_order
from bnncc.topi_binary.spec import Conv2d, Spec, from_json

if TYPE_CHECKING:
    from tvm import tirx

    from bnncc.targets.spec import TargetSpec


def schedule(
    func: tirx.PrimFunc, target: TargetSpec, threads: int = 1, point: Point | None = None
) -> tirx.PrimFunc:
    """Schedule the kernel of a spec for `target`.

    Parameters
    ----------
    func : tirx.PrimFunc
        An operator of ``topi_binary``, with its spec as the attribute ``bnncc.spec``.
    target : TargetSpec
        The machine.
    threads : int, default 1
        How many threads the kernel may use. Only kernels long enough to gain from it do.
    point : mapping of str to int, optional
        Values for choices of `space_of`; the rule's own for those left out.

    Returns
    -------
    tirx.PrimFunc
        Same name and parameters.

    Raises
    ------
    UnfitPoint
        If `point` is not in the space of the kernel.
    """
    spec = from_json(str(func.attrs["bnncc.spec"]))
    chosen = space_of(spec, target, threads).complete(point)
    if target.kind == "cuda":
        from bnncc.schedules import cuda

        result = cuda.schedule(spec, target, chosen)
    else:
        result = _function(spec, 1)(spec, target, threads, chosen)
    if "global_symbol" in func.attrs:
        result = result.with_attr("global_symbol", func.attrs["global_symbol"])
    return result.with_attr("tirx.is_scheduled", True)


def space_of(spec: Spec, target: TargetSpec, threads: int = 1) -> Space:
    """Return what can be chosen for the kernel of `spec`: what autotuning searches.

    Parameters
    ----------
    spec : Spec
        The kernel.
    target : TargetSpec
        The machine.
    threads : int, default 1
        How many threads the kernel may use.

    Returns
    -------
    Space
        Its default is what `schedule` takes by itself.
    """
    if target.kind == "cuda":
        from bnncc.schedules import cuda

        return cuda.space(spec, target)
    made: Space = _function(spec, 0)(spec, target, threads)
    return made


def dot_product_missing(operands: str, target: TargetSpec) -> str:
    """Return the feature that `target` lacks to multiply several `operands` at once, if any."""
    from bnncc.schedules import quantized_operands

    lacking = quantized_operands.packed(operands, target) == 1
    return quantized_operands.INSTRUCTION[operands] if lacking else ""


def with_packed_operands(spec: Conv2d, target: TargetSpec | None) -> Conv2d:
    """Return `spec` with as many operands in a word as `target` multiplies at once.

    Like `with_weight_order`, for convolutions whose operands are not float32.
    """
    from bnncc.schedules import quantized_operands

    packed = quantized_operands.packed(spec.operands, target) if target is not None else 1
    return replace(spec, packed=packed)


_RULES = {
    "BinaryConv2d": ("binary_words", "space", "apply"),
    "BitwiseMaxPool": ("float_layers", "bitwise_maxpool_space", "bitwise_maxpool"),
    "ConcatBits": ("bit_layers", "moves_space", "moves"),
    "Conv2d": ("float_layers", "conv2d_space", "conv2d"),
    "Elementwise": ("bit_layers", "elementwise_space", "elementwise"),
    "FewBitConv2d": ("few_bit_conv2d", "space", "apply"),
    "ImageBits": ("bit_layers", "moves_space", "image_bits"),
    "PadBits": ("bit_layers", "moves_space", "moves"),
    "Pool2d": ("float_layers", "pool2d_space", "pool2d"),
    "SliceBits": ("bit_layers", "moves_space", "moves"),
    "WeightsOfRows": ("bit_layers", "moves_space", "moves"),
}
"""Module of the rule for each class of spec, and its two functions.

The first takes spec, target and number of threads, and returns the space. The second takes these
and a point of that space, and returns a function.
"""


def _function(spec: Spec, number: int) -> Callable[..., Any]:
    module, *names = _RULES[type(spec).__name__]
    return getattr(importlib.import_module(f"bnncc.schedules.{module}"), names[number])


__all__ = [
    "Point",
    "Space",
    "Spec",
    "UnfitPoint",
    "dot_product_missing",
    "in_slices",
    "schedule",
    "space_of",
    "weight_orders",
    "with_packed_operands",
    "with_weight_order",
]
