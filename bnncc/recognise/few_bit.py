"""Recognise few-bit layers.

    before: x = bnncc.Levels(a); y = Conv(x, W)         W = s[o] * integers of 1 to 8 bits
    after:  x = bnncc.Levels(a); y = bnncc.FewBitConv(x)

With data ``x = unit * (step * k + first)`` of level k and weights ``w = s * q``, ``y = s * unit *
dot + bias``, where ``dot = step * acc + first * sum(q)`` and ``acc = sum(k * q)``, over all taps.
Taps outside the image count as the level of the padding value. If that is a half-integer (zero
padding of signs), the accumulator counts everything twice. Step and first are integers if the data
are multiples of one unit, so a dot product of 0 is exact; otherwise first is part of the bias.
Where ``dot`` may pass 2^24, which float32 does not hold, ``first * sum(q)`` is in the start value
of the accumulator: added later, it would leave the rounding error of the larger ``acc``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from bnncc.ir.graph import Graph, Node
from bnncc.recognise import reasons
from bnncc.recognise.borders import constants_outside, outside_sums, with_border
from bnncc.recognise.channel_scales import scaled_source
from bnncc.recognise.filters import Weights
from bnncc.recognise.lattice import Lattice, as_multiples
from bnncc.recognise.operands import (
    bias_of,
    channels_last,
    flattened_source,
    padded_source,
)
from bnncc.topi_binary.few_bit_data import MAX_FLOAT, PER_WORD, code_bits, packs, start_values
from bnncc.topi_binary.layout import LANES, WORD_BITS
from bnncc.topi_binary.spec import LEVEL_FORM, FewBitConv2d

FEW_BIT_CONV = "bnncc.FewBitConv"
"""Operator of a few-bit layer. Attributes: ``spec`` (without steps), ``weight`` (int16
``[out_channels, kernel_h, kernel_w, channels]``), ``outside`` (level of the padding), ``offset``
(added to every level, by start values: ``acc = sum((k + offset) * q)``), ``dot``
(exact a and b such that ``dot = a * acc + b``, b by channel), ``scale`` and ``bias`` (float64, ``y
= scale * dot + bias``), ``top`` (a bound of ``|acc|``), ``bits`` of data and weights, and for the
report ``reason`` (of the method) and ``remedy`` (what would make the layer binary)."""

MAX_ACCUMULATOR = 2**30

MAX_MERGED = 16
"""Maximum number of groups merged into one; with more, float32 would be faster."""

Choose = Callable[[Sequence[FewBitConv2d]], tuple[FewBitConv2d, str] | None]
"""Selects one of several specs of a layer, with a reason; None if none can run."""


def planes_only(candidates: Sequence[FewBitConv2d]) -> tuple[FewBitConv2d, str]:
    """Select the spec with the fewest planes.

    Parameters
    ----------
    candidates : sequence of FewBitConv2d
        All ways to compute the layer.

    Returns
    -------
    tuple
        The spec, and the reason for the report.
    """
    planes = [spec for spec in candidates if spec.form == "planes"]
    if not planes:
        return candidates[0], "as numbers"
    return min(planes, key=lambda spec: spec.weight_bits), "as planes"


def attempt(
    node: Node,
    graph: Graph,
    filters: np.ndarray,
    few: Callable[[], Weights | None],
    held: dict[str, Lattice],
    producers: dict[str, Node],
    choose: Choose | None,
) -> list[Node] | tuple[str, str] | None:
    """Return `node` as a few-bit layer with the nodes after it, or a reason and a remedy.

    Parameters
    ----------
    node : Node
        A Conv, Gemm or MatMul that is not binary.
    filters : ndarray
        From `layer_filters`.
    few : callable
        Returns their `few_bit_weights`.
    held : dict of str to Lattice
        From `lattices`.
    choose : callable or None
        Selects the method; default: `planes_only`.

    Returns
    -------
    list of Node, tuple of str, or None
        None if neither data nor weights suggest a few-bit layer.
    """
    image = None
    if node.op == "Conv":
        name, pads, pad_value = padded_source(node, graph, producers)
    else:
        name, pads, pad_value = node.inputs[0], (0, 0, 0, 0), 0.0
        flat = flattened_source(name, graph, producers)
        if flat is not None and _fills_words(flat[1]):
            name, image = flat
    factor = None
    if name not in held:
        multiple = scaled_source(name, graph, producers)
        if multiple is not None and _one_each(node, multiple, held):
            name, factor = multiple
    known = held.get(name)
    if known is None:
        return None
    if factor is not None and (int(node.attrs.get("group", 1)) != factor.size or pad_value):
        return (
            "its data have a separate scale for each channel, and its sums run over channels",
            "give the quantizer one scale; depthwise layers can have one for each channel",
        )
    found = few()
    if found is None:
        return reasons.weights(filters, known.count + 1)
    if factor is not None:
        unit = np.repeat(factor, filters.shape[0] // factor.size)
        found = replace(found, scale=found.scale * unit)
    outside = known.level_of(pad_value) if any(pads) else 0.0
    between, outside = outside is None, outside or 0.0
    whole = channels_last(node, found.whole, image)
    candidates = _candidates(node, graph, name, known, found, whole, pads, outside)
    if (top := _bound(known, whole, outside != int(outside))) >= MAX_ACCUMULATOR:
        return (
            f"its sums may reach {top}, beyond the {MAX_ACCUMULATOR} that integer sums may hold",
            "data or weights of fewer bits have smaller sums",
        )
    if not candidates:
        return (
            f"no {MAX_MERGED} of its groups or fewer fill words of data and vectors of outputs",
            f"a multiple of {LANES} output channels in each group does",
        )
    chosen = (choose or planes_only)(candidates)
    if chosen is None:
        return "the target has no kernel for such a few-bit layer", "compile for a CPU"
    spec, why = chosen
    made = _made(node, graph, name, known, found, spec, whole, outside, why)
    return _padded_between(node, graph, made, found, known, pads, pad_value) if between else [made]


def _padded_between(
    node: Node, graph: Graph, made: Node, found: Weights, known: Lattice,
    pads: tuple[int, int, int, int], pad_value: float,
) -> list[Node]:  # fmt: skip
    """Return a layer padded by level 0, and a constant that corrects for the padding value."""
    kinds = (graph.types[name] for name in (made.inputs[0], node.outputs[0]))
    outside = outside_sums(node, found.whole, pads, *kinds)
    sums = found.whole.reshape(found.whole.shape[0], -1).sum(axis=1)
    multiples = _multiples(known, made.attrs["top"])
    whole = multiples is not None or bool(made.attrs["offset"])
    first, _, unit = multiples or (known.values[0], 1, 1.0)
    if made.attrs["offset"]:
        first, unit = made.attrs["offset"], known.step
    counted, rest = constants_outside(outside, sums, first, pad_value / unit, whole=whole)
    column, bias = (1, -1, 1, 1), bias_of(node, graph, len(sums))
    added = rest * (found.scale * unit).reshape(column) + bias.reshape(column)
    return with_border(made, graph, counted, added)


def _one_each(node: Node, multiple: tuple[str, np.ndarray], held: dict[str, Lattice]) -> bool:
    """Whether data with a scale per channel are levels, or signs with one group per scale."""
    known = held.get(multiple[0])
    groups = int(node.attrs.get("group", 1))
    return known is not None and (not known.signs or groups == multiple[1].size)


def _fills_words(image: tuple[int, int, int]) -> bool:
    """Whether pixels of an image fill enough of their words to be read without repacking."""
    channels, height, width = image
    return channels >= WORD_BITS // 2 or height * width == 1


def _candidates(
    node: Node, graph: Graph, name: str, known: Lattice, found: Weights, whole: np.ndarray,
    pads: tuple[int, int, int, int], outside: float,
) -> list[FewBitConv2d]:  # fmt: skip
    """Return the specs of all methods that can compute the layer."""
    shape = graph.types[name].shape
    channels = int(shape[1])
    height, width = (int(shape[2]), int(shape[3])) if len(shape) == 4 else (1, 1)
    groups = int(node.attrs.get("group", 1)) if node.op == "Conv" else 1
    out_channels, kernel = whole.shape[0], whole.shape[1:3]
    rank = 2 if (node.op != "Conv" and (height, width) == (1, 1)) else 4
    doubled = outside != int(outside)
    specs = []
    for method, form in LEVEL_FORM.items():
        if method == "xor" and not found.odd:
            continue
        if form != "planes" and found.complement_bits > 8 * (method != "bytes") + 8:
            continue
        together = _together(method, groups, channels, out_channels)
        if not together:
            continue
        bits = found.bits if method == "xor" else found.complement_bits
        if method == "packed":
            signs = found.odd and found.bits == 1 and together == 1  # merged groups need weights 0
            bits = code_bits(bits, signs)
        specs.append(
            FewBitConv2d(
                shape[0], height, width, channels, out_channels, (kernel[0], kernel[1]),
                tuple(node.attrs.get("strides", (1, 1))),
                tuple(node.attrs.get("dilations", (1, 1))), pads, groups // together,
                known.bits, bits, method,
                method == "xor" or (any(pads) and outside != 0), doubled, (), rank,
            )
        )  # fmt: skip
    top = _bound(known, whole, doubled)
    fits = {"floats": lambda _: top < MAX_FLOAT, "packed": packs}
    return [spec for spec in specs if fits.get(spec.method, bool)(spec)]


def _together(method: str, groups: int, channels: int, out_channels: int) -> int:
    """Return how many adjacent groups are merged, with weights of 0 between them; 0 if impossible.

    Groups must fill words of data and vectors of outputs, or be single channels stored as floats.
    """
    if groups == channels == out_channels and method == "floats":
        return 1
    unit = PER_WORD.get(LEVEL_FORM[method], WORD_BITS)
    for count in range(1, min(groups, MAX_MERGED) + 1):
        data, made = channels * count // groups, out_channels * count // groups
        fills = data % unit == 0 and made % LANES == 0
        if groups % count == 0 and (count == groups or fills):
            # Signs cannot represent 0.
            return count if count == 1 or method != "xor" else 0
    return 0


def _joined(weight: np.ndarray, groups: int, joined: int) -> np.ndarray:
    """Merge weights of `groups` into `joined` wider groups: blocks on a diagonal."""
    count = groups // joined
    if count == 1:
        return weight
    out, height, width, depth = weight.shape
    wide = np.zeros((out, height, width, count, depth), weight.dtype)
    group = np.arange(out) // (out // groups)
    wide[np.arange(out), :, :, group % count] = weight
    return wide.reshape(out, height, width, count * depth)


def _bound(known: Lattice, whole: np.ndarray, doubled: bool) -> int:
    """Return a bound of the accumulator, with and without start values."""
    total = int(np.abs(whole).reshape(whole.shape[0], -1).sum(axis=1).max())
    return (2 if doubled else 1) * 2 ** (known.bits + 1) * total


def _multiples(known: Lattice, top: int) -> tuple[int, int, float] | None:
    """Return `as_multiples` of the levels, if sums of up to `top` levels are exact in that unit."""
    found = as_multiples(known.values)
    return found if found is not None and top * abs(found[1]) < MAX_FLOAT else None


def _offset(known: Lattice, spec: FewBitConv2d) -> int:
    """Return what makes levels multiples of their step; 0 if nothing does, or sums are floats."""
    found = as_multiples(known.values)
    if found is None or found[0] % found[1] or spec.method == "floats":
        return 0
    return found[0] // found[1]


def _made(
    node: Node, graph: Graph, name: str, known: Lattice, found: Weights, spec: FewBitConv2d,
    whole: np.ndarray, outside: float, why: str,
) -> Node:  # fmt: skip
    sums = whole.reshape(whole.shape[0], -1).sum(axis=1)
    bias, times = bias_of(node, graph, whole.shape[0]), 2 if spec.doubled else 1
    top, offset = _bound(known, whole, spec.doubled), 0
    if (multiples := _multiples(known, top)) is not None:
        first, step, unit = multiples
        dot, scale = (step, times * first * sums.astype(np.float64)), found.scale * unit / times
    else:
        dot, scale = (1, np.zeros(len(sums))), found.scale * known.step / times
        if offset := _offset(known, spec):
            spec = replace(spec, starts=True)
        else:
            bias = bias + found.scale * known.values[0] * sums
    sides = reasons.described(known, found)
    groups = int(node.attrs.get("group", 1)) if node.op == "Conv" else 1
    if spec.groups < groups:
        why += f"; {groups // spec.groups} groups at a time, with weights of 0 between"
    attrs = {
        "spec": spec,
        "weight": _joined(whole, groups, spec.groups),
        "outside": outside,
        "offset": offset,
        "dot": dot,
        "scale": scale,
        "bias": bias,
        "top": top,
        "bits": (known.bits, found.bits),
        "reason": f"{sides[0]} data, {sides[1]} weights, {why}",
        "remedy": reasons.of_zeros(*sides),
    }
    return Node(FEW_BIT_CONV, [name], list(node.outputs), attrs, node.name, (node.name,))


def starts_of(node: Node) -> np.ndarray:
    """Return the initial values of a few-bit layer's accumulator."""
    a = node.attrs
    return start_values(a["weight"], a["spec"], a["outside"], a["offset"])
