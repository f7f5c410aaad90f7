"""Schedules: how each operator runs on each instruction set."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from bnncc.schedules.registry import function, row
from bnncc.schedules.space import Point, Space, UnfitPoint
from bnncc.schedules.weight_order import in_slices, weight_orders, with_weight_order
from bnncc.topi_binary.spec import Conv2d, Spec, from_json

if TYPE_CHECKING:
    from tvm import tirx

    from bnncc.targets.spec import TargetSpec


def schedule(
    func: tirx.PrimFunc, target: TargetSpec, threads: int = 1, point: Point | None = None
) -> tirx.PrimFunc:
    """Schedule the definition of a kernel for `target`.

    Parameters
    ----------
    func : tirx.PrimFunc
        From ``topi_binary.definitions``; its spec is the attribute ``bnncc.spec``.
    threads : int, default 1
        Threads that the kernel may use. Short kernels run on one thread.
    point : mapping of str to int, optional
        A point of `space_of`; choices that it omits take the rule's default.

    Returns
    -------
    tirx.PrimFunc
        The scheduled function, with the same name and parameters.

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
    elif target.kind == "c":
        from bnncc.schedules import portable

        result = portable.schedule(func)
    else:
        own, result = row(spec), None
        if own.apply:
            result = function(own.apply)(func, spec, target, threads, chosen)
        if result is None:
            result = function(own.template)(spec, target, threads, chosen)
    if "global_symbol" in func.attrs:
        result = result.with_attr("global_symbol", func.attrs["global_symbol"])
    return result.with_attr("tirx.is_scheduled", True)


def space_of(spec: Spec, target: TargetSpec, threads: int = 1) -> Space:
    """Return the search space of the kernel of `spec`, for autotuning.

    Parameters
    ----------
    threads : int, default 1
        Threads that the kernel may use.

    Returns
    -------
    Space
        Its default is the point that `schedule` uses.
    """
    own = row(spec)
    made: Space
    if target.kind == "cuda":
        made = function(own.gpu_space)(spec, target)
    elif target.kind == "c":
        made = function("space:no_choice")(spec, target, threads)
    else:
        made = function(own.space)(spec, target, threads)
    return made


def writes_nchw(spec: Spec, target: TargetSpec) -> bool:
    """Return whether the kernel of `spec` should write NCHW results itself, where they are needed.

    Otherwise a separate kernel transposes them. The steps of `spec` do not matter.
    """
    own = row(spec).nchw if target.kind == "llvm" else ""
    return bool(own and function(own)(spec, target))


def dot_product_missing(operands: str, target: TargetSpec) -> str:
    """Return the feature that `target` lacks for instructions on several `operands`, or ""."""
    from bnncc.schedules import float_layers

    lacking = float_layers.packed(operands, target) == 1
    return float_layers.INSTRUCTION.get(operands, "tensor cores for it") if lacking else ""


def with_packed_operands(spec: Conv2d, target: TargetSpec | None) -> Conv2d:
    """Return `spec` with as many operands per word as an instruction of `target` multiplies.

    Like `with_weight_order`, for convolutions whose operands are not float32.
    """
    from bnncc.schedules import float_layers, tile_choice
    from bnncc.topi_binary import quantization

    cpu = target is None or not target.gpus
    apart = spec.operands == "bfloat16" and cpu and not quantization.side_by_side(spec)
    if target is None:
        return replace(spec, packed=1, apart=apart)
    made = replace(spec, packed=float_layers.packed(spec.operands, target), apart=apart)
    if tile_choice.pays(tiled := replace(made, apart=True), target):
        return tiled
    return replace(made, packed=1) if tile_choice.slow_pairs(made, target) else made


def uses_tiles(spec: Conv2d, target: TargetSpec) -> bool:
    """Return whether AMX tiles compute a float convolution, which then is not filtered."""
    from bnncc.schedules import tile_choice

    return tile_choice.pays(spec, target)


def reads_codes(spec: Conv2d, target: TargetSpec | None) -> bool:
    """Return whether the kernel of a float layer can read its weights as codes."""
    from bnncc.topi_binary.definitions.taps import flattened

    plain = spec.method == "direct" and spec.operands == "float32" and spec.groups == 1
    rows = spec.rank == 2 or flattened(spec) is not spec
    return plain and rows and target is not None and target.kind != "cuda"


def with_three_terms(spec: Conv2d, target: TargetSpec | None) -> Conv2d:
    """Return `spec` with bfloat16 operands in three terms, if that is faster."""
    from bnncc.schedules import tile_choice

    made = replace(spec, operands="bfloat16x3", packed=2, apart=True)
    return made if target is not None and tile_choice.pays(made, target) else spec


def with_half_operands(spec: Conv2d, target: TargetSpec) -> Conv2d:
    """Return a convolution of float16 data with float16 operands, if that is faster."""
    from bnncc.schedules.cuda import float_tiles

    half = with_packed_operands(replace(spec, operands="float16"), target)
    return half if half.packed > 1 and float_tiles.many(spec) else spec


__all__ = [
    "Point",
    "Space",
    "Spec",
    "UnfitPoint",
    "dot_product_missing",
    "in_slices",
    "reads_codes",
    "schedule",
    "space_of",
    "uses_tiles",
    "weight_orders",
    "with_half_operands",
    "with_packed_operands",
    "with_three_terms",
    "with_weight_order",
    "writes_nchw",
]
