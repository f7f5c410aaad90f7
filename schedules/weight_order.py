"""Selection of the order of a binary layer's weights: by rule, or from tuning records.

The order determines which kernel computes a layer (on a GPU, its engine and tile width), and the
layout of the packed weights. So it is chosen when weights are packed, before there is a kernel to
schedule, and is a field of the kernel's spec. A record of a kernel with another order contributes
the time measured for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from bnncc.topi_binary.layout import LANES, WORD_BITS
from bnncc.topi_binary.spec import BinaryConv2d

if TYPE_CHECKING:
    from bnncc.targets.spec import TargetSpec


class Recorded(Protocol):
    """Measured weight orders: `bnncc.records.database.Records`."""

    def weight_order(self, spec: BinaryConv2d, orders: Sequence[str]) -> str | None:
        """Return the fastest of `orders` on record for a layer, or None."""


def with_weight_order(
    spec: BinaryConv2d, target: TargetSpec, records: Recorded | None = None
) -> BinaryConv2d:
    """Return `spec` with the weight order that the fastest kernel on `target` reads.

    The order is chosen here only: passes pack weights in it, and it determines the kernel.

    Parameters
    ----------
    spec : BinaryConv2d
        A layer; the rule ignores its steps.
    records : Recorded, optional
        Measurements, which take precedence over the rule.
    """
    orders = weight_orders(spec, target)
    chosen = records.weight_order(spec, orders) if records is not None and orders[1:] else None
    return replace(spec, weight_order=chosen or orders[0])


def weight_orders(spec: BinaryConv2d, target: TargetSpec) -> tuple[str, ...]:
    """Return the weight orders that kernels on `target` support for a layer.

    Returns
    -------
    tuple of str
        The rule's own choice first. The others read the same data, and can be tuned.
    """
    if target.kind == "cuda":
        return _on_gpu(spec, target)
    from bnncc.schedules import tile_choice

    chosen = _on_cpu(spec, target)
    return (chosen, "words") if chosen == tile_choice.ORDER else (chosen,)


_KINDS = {"wgmma": ("strips", "fragments", "cores"), "mma": ("strips", "fragments")}
"""Weight orders worth measuring, by the engine of a GPU; by default those of ``mma``."""


def _on_gpu(spec: BinaryConv2d, target: TargetSpec) -> tuple[str, ...]:
    """Return the orders of all engines of `target`, except with tiles that are half empty."""
    from bnncc.schedules.cuda import binary
    from bnncc.topi_binary import tiles

    kinds = _KINDS.get(target.engine, _KINDS["mma"])
    per_group = spec.out_channels // spec.groups

    def fits(order: str) -> bool:
        kind, _, width = order.partition("-")
        if kind not in kinds or not width:
            return kind in kinds
        tile = int(width)
        filled = tile == tiles.WIDTHS[-1] or tile < 2 * spec.out_channels
        return filled and (spec.groups == 1 or per_group % tile == 0)

    chosen = binary.weight_order(spec, target.engine)
    return tuple(dict.fromkeys([chosen, *filter(fits, tiles.ORDERS)]))


def _on_cpu(spec: BinaryConv2d, target: TargetSpec) -> str:
    from bnncc.schedules import binary_lookup, binary_neon, tile_choice
    from bnncc.topi_binary import sliced_data
    from bnncc.topi_binary.definitions import folded

    if sliced_data.fits(spec) and in_slices(spec.channels_per_group, target):
        return sliced_data.ORDER
    if spec.per_image:
        return "words"
    chosen = ""
    if tile_choice.pays(spec, target):
        chosen = tile_choice.ORDER
    elif target.popcount == "lookup" and binary_lookup.pays(spec):
        chosen = "nibbles"
    elif target.popcount in ("neon", "neon-dot") and not folded.fits(spec):
        chosen = binary_neon.order(spec)
    return chosen or "words"


def in_slices(channels: int, target: TargetSpec) -> bool:
    """Return whether groups of `channels` channels in and out are computed in bit slices."""
    if target.kind != "llvm" or channels >= WORD_BITS:
        return False
    # Groups that are whole vectors share data words; popcount instructions are faster there.
    return target.popcount != "vector" or channels % LANES > 0
