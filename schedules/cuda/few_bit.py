"""GPU kernels of few-bit layers: the convolution, and the levels that an epilogue computes."""

from __future__ import annotations

from collections.abc import Iterator

from bnncc.schedules.cuda import text
from bnncc.schedules.cuda.terms import TEXT
from bnncc.topi_binary import borders, few_bit_data, layout
from bnncc.topi_binary.algebra import compared, nearest, rounded
from bnncc.topi_binary.spec import FewBitConv2d
from bnncc.topi_binary.step import Step

TILE = 32
"""Output channels per warp, with tensor cores."""

PIXELS = 16
"""Pixels per warp, with tensor cores."""

_STEP_WORDS = 8  # 256 bits
_METHODS = {"xor": 0, "and": 1, "bytes": 2, "pairs": 3, "floats": 4}


def tiled(spec: FewBitConv2d) -> bool:
    """Whether tensor cores are used: bit planes, and groups that fill tiles."""
    per_group = spec.out_channels // spec.groups
    planes = spec.form == "planes"
    return planes and (spec.groups == 1 or per_group % TILE == 0)


def constants(spec: FewBitConv2d) -> dict[str, text.Constant]:
    """Return the constants of a few-bit convolution besides those of its window."""
    form = spec.form
    run = spec.window_size * few_bit_data.group_words(spec)
    return {
        "METHOD": _METHODS[spec.method], "DATA_PLANES": spec.data_tensors,
        "WEIGHT_PLANES": few_bit_data.weight_planes(spec),
        "GROUP_WORDS": few_bit_data.group_words(spec),
        "PIXEL_WORDS": layout.level_words(spec.channels, form),
        "GROUPS": spec.groups, "GROUP_OUT": spec.out_channels // spec.groups,
        "RUN": run, "STEPS": layout.blocks(run, _STEP_WORDS), "STARTS": spec.starts,
        "DOUBLED": spec.doubled, "PIXELS_FIRST": True,
        "FILLED_CHANNELS": layout.blocks(spec.out_channels) * layout.LANES,
    }  # fmt: skip


def anchor(spec: FewBitConv2d) -> str:
    """Return an expression that constructs the anchor, with a placeholder for the layer's name."""
    count = spec.data_tensors
    data = ", ".join(f"(const unsigned*)in{i}" for i in range(count))
    starts = f"in{count + 1}" if spec.starts else "nullptr"
    return f"bnncc::FewBits<{{layer}}>{{{{{{{{{data}}}}}, (const unsigned*)in{count}, {starts}}}}}"


def border_class(spec: FewBitConv2d) -> str:
    """Return the function that maps pixels to border classes."""
    firsts = [tuple(borders.classes(spec, axis)) for axis in (0, 1)]
    return text.border_class(*firsts)


def levels(step: Step, taken: list[str], filled: int) -> Iterator[str]:
    """Generate the code that finds the levels of four channels.

    Parameters
    ----------
    step : Step
        A ``levels`` step.
    taken : list of str
        Its parameters.
    filled : int
        Length of a row of thresholds.

    Yields
    ------
    str
        A line of code; it computes ``level[k]`` from ``raw[i + k]`` or ``v[k]``.
    """
    yield "  int level[4];"
    if step.way == "whole":
        yield from text.each(f"level[k] = {TEXT.whole('v[k]')};")
    elif step.way == "acc-scale":
        yield f"  float p0[4]; bnncc::load4(p0, {taken[0]} + {text.HERE});"
        yield f"  float p1[4]; bnncc::load4(p1, {taken[1]} + {text.HERE});"
        found = nearest(TEXT, step, TEXT.real("raw[i + k]"), "p0[k]", "p1[k]")
        yield from text.each(f"level[k] = {found};")
    elif step.way == "round":
        ends = (f"__ldg({taken[0]} + {k})" for k in range(2))
        yield from text.each(f"level[k] = {rounded(TEXT, 'v[k]', *ends)};")
    elif step.way == "search":
        table = taken[0]
        found = nearest(TEXT, step, "v[k]", f"__ldg({table})", f"__ldg({table} + 1)")
        yield from text.each(f"level[k] = {found};")
        below, above = (f"__ldg({table} + level[k] + {n})" for n in (2, 3))
        up, down = (
            compared(TEXT, step, "v[k]", how, limit) for how, limit in ((">=", above), ("<", below))
        )
        yield from text.each(f"level[k] += (int)({up}) - (int)({down});")
    else:
        kind = "float" if step.way == "value" else "int"
        yield f"  {kind} seen[4];"
        yield from text.each(f"seen[k] = {'v[k]' if kind == 'float' else 'raw[i + k]'};")
        if step.flip:
            yield f"  int flip[4]; bnncc::load4(flip, {taken[1]} + {text.HERE});"
            yield from text.each("seen[k] ^= flip[k];")
        yield from text.each("level[k] = 0;")
        yield f"  for (int n = 0; n < {step.count}; ++n) {{"
        yield f"    {kind} limit[4];"
        yield f"    bnncc::load4(limit, {taken[0]} + n * {filled} + {text.HERE});"
        reached = compared(TEXT, step, "seen[k]", ">=", "limit[k]")
        yield from text.each(f"level[k] += {reached};")
        yield "  }"


def packed(form: str, pointer: str, words: int) -> list[str]:
    """Return code that stores the levels of four channels in a form other than planes."""
    place = f"{pointer} + (size_t)at.pixel * {words}"
    if form == "bytes":
        value = "level[0] | level[1] << 8 | level[2] << 16 | level[3] << 24"
        return [f"  if (at.exists) *({place} + c / 4) = {value};"]
    if form == "pairs":
        value = "make_uint2(level[0] | level[1] << 16, level[2] | level[3] << 16)"
        return [f"  if (at.exists) *(uint2*)({place} + c / 2) = {value};"]
    numbers = ", ".join(f"(float)level[{k}]" for k in range(4))
    return [f"  if (at.exists) *(float4*)({place} + c) = make_float4({numbers});"]
