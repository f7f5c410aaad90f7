"""What a binary convolution in groups reads.

Small groups are computed in bit slices, on planes as they are (`topi_binary.sliced_data`); where a
group has more channels out than in, its channels are repeated. Everywhere else each group is moved
to words of its own.
"""

from __future__ import annotations

from dataclasses import replace

from bnncc.schedules import with_weight_order
from bnncc.topi_binary import sliced_data
from bnncc.topi_binary.layout import WORD_BITS, words
from bnncc.topi_binary.spec import BinaryConv2d
from bnncc.transform.physical import Physical


def operands(
    spec: BinaryConv2d, planes: list[str], name: str, physical: Physical
) -> tuple[BinaryConv2d, list[str]]:
    """Bring data into the form that a layer's kernel reads.

    Parameters
    ----------
    spec : BinaryConv2d
        The layer, in any number of groups.
    planes : list of str
        Its data: the sign plane, perhaps the zero plane.
    name : str
        The logical tensor that they are.

    Returns
    -------
    BinaryConv2d
        With the channels that are read. The order of weights says whether in bit slices; which
        other one it is, is decided when they are packed.
    list of str
        The planes to read.
    """
    target = physical.target
    depth, made = spec.channels // spec.groups, spec.out_channels // spec.groups
    if spec.groups > 1 and target is not None and made % depth == 0:
        groups = spec.out_channels // depth
        repeated = replace(spec, channels=spec.out_channels, groups=groups)
        chosen = with_weight_order(repeated, target)
        if chosen.weight_order == sliced_data.ORDER:
            index = [g * depth + j % depth for g in range(spec.groups) for j in range(made)]
            return chosen, [physical.pick(plane, name, tuple(index)) for plane in planes]
    if spec.groups > 1 and depth % WORD_BITS:
        held = words(depth) * WORD_BITS
        index = [
            g * depth + i if i < depth else -1 for g in range(spec.groups) for i in range(held)
        ]
        planes = [physical.pick(plane, name, tuple(index)) for plane in planes]
    return with_weight_order(spec, target) if target is not None else spec, planes
