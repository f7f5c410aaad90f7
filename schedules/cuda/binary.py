"""Selection and constants of the GPU kernel that computes a binary convolution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from bnncc.schedules.cuda import epilogue, text, wgmma
from bnncc.schedules.space import Space
from bnncc.schedules.space import space as chosen_from
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import layout, tiles
from bnncc.topi_binary.spec import BinaryConv2d
from bnncc.topi_binary.step import FETCHED, step_inputs, step_outputs

_FUNCTION = {
    "strips": "conv_by_popcount",
    "fragments": "conv_by_mma",
    "cores": "conv_by_wgmma",
}

WARPS = 4
"""Warps per block."""

BUSY = 8 * text.PROCESSORS
"""Warps that occupy a large GPU: two for each quarter of a multiprocessor."""

WGMMA_WIDTH = 64
"""Output channels per tile for ``wgmma``: with 128, registers suffice for too few warps."""

ROOMY = 32 * text.PROCESSORS
"""Number of warps from which on each takes twice the pixels, if registers suffice."""

CROWD = 4 * text.PROCESSORS
"""Number of tiles of 64 pixels from which ``wgmma`` is faster than ``mma`` on an H200."""


def weight_order(spec: BinaryConv2d, engine: str) -> str:
    """Return the weight order that the kernel of `engine` reads.

    Layers whose groups share a word of the result use ordinary threads. For layers with few pixels,
    or with filters that do not fit shared memory, ``mma`` is used instead of ``wgmma``. Tiles are
    the widest of which there are enough.
    """
    narrow = tiles.WIDTHS[-1]
    if engine == "simt" or (spec.groups > 1 and spec.out_channels // spec.groups % narrow):
        return "strips"
    pixels = _pixels(spec)
    widths = [width for width in tiles.WIDTHS if width == narrow or _fills(spec, width)]
    if engine == "wgmma":
        full = spec.ternary and _crowded(spec)  # registers hold the sums of a zero plane as well
        order = f"cores-{WGMMA_WIDTH if WGMMA_WIDTH in widths and not full else narrow}"
        how = tiles.of(replace(spec, weight_order=order))
        crowd = layout.blocks(pixels, wgmma.PIXELS) * how.count
        if crowd >= CROWD and wgmma.shared_bytes(how) <= wgmma.SHARED_BYTES:
            return order
    for width in widths:
        warps = layout.blocks(pixels, 16) * layout.blocks(spec.out_channels, width)
        if warps >= BUSY or width == narrow:
            break
    return f"fragments-{width}"


def _fills(spec: BinaryConv2d, width: int) -> bool:
    """Whether tiles of `width` channels are whole groups, with little padding."""
    if spec.groups > 1:
        return spec.out_channels // spec.groups % width == 0
    narrow = tiles.WIDTHS[-1]
    needed = layout.blocks(spec.out_channels, narrow) * narrow
    return layout.blocks(spec.out_channels, width) * width <= 1.3 * needed


def _pixels(spec: BinaryConv2d) -> int:
    """Return the number of rows of the product; a symbolic batch counts as 1."""
    height, width = spec.window_hw
    return spec.images * height * width


@dataclass(frozen=True)
class Cut:
    """Partition of the work.

    Attributes
    ----------
    rows : int
        Pixels per warp, in units of 16 (``mma``).
    splits : int
        Warps, or threads, that divide the words of a pixel among them.
    teams : int
        Warp groups per block, which share the filters in shared memory (``wgmma``).
    eager : int
        1 if the next pixels are loaded before the current ones are finished (``wgmma``).
    """

    rows: int = 1
    splits: int = 1
    teams: int = 1
    eager: int = 0


def default_cut(spec: BinaryConv2d, engine: str = "mma") -> Cut:
    """Return the default partition: more pixels per warp if there are many, split words if few.

    Registers hold at most 32 pixels x 128 channels, or fewer if operands need more.
    """
    how = tiles.of(spec)
    pixels = _pixels(spec)
    if how.kind == "strips":
        parts = 32
        while parts > 1 and pixels * how.count * parts > 32 * 4 * BUSY:
            parts //= 2
        return Cut(splits=min(parts, _power(how.steps)))
    if how.kind == "cores":
        known = [n for n in _teams(spec, how) if n <= 2 or how.steps <= wgmma.SHARED_STEPS]
        return Cut(
            teams=min(known, key=lambda n: (wgmma.turns(how, pixels, n, _fetching(spec)), -n))
        )
    warps = layout.blocks(pixels, 16) * how.count
    if warps >= ROOMY and _roomy(spec, how, engine):
        return Cut(rows=2)
    splits = 1
    while splits < min(WARPS, how.steps) and warps * splits < BUSY:
        splits *= 2
    return Cut(splits=splits)


def space(spec: BinaryConv2d, target: TargetSpec) -> Space:
    """Return the search space of the kernel of `spec`: the fields of its `Cut`.

    Parameters
    ----------
    spec : BinaryConv2d
        Has choices if its weight order is in `tiles.ORDERS`.
    target : TargetSpec
        The GPU target.

    Returns
    -------
    Space
    """
    if spec.weight_order not in tiles.ORDERS:
        return Space()
    how, most = tiles.of(spec), _power(tiles.of(spec).steps)
    choices: dict[str, dict[str, Sequence[int]]] = {
        "strips": {"splits": [n for n in (1, 2, 4, 8, 16, 32) if n <= most]},
        "fragments": {
            "rows": (1, 2) if _roomy(spec, how, target.engine) else (1,),
            "splits": [n for n in (1, 2, 4) if n <= min(WARPS, most)],
        },
        "cores": {"teams": _teams(spec, how), "eager": (0,) if spec.ternary else (0, 1)},
    }
    own = choices[how.kind]
    default = asdict(default_cut(spec, target.engine))
    return chosen_from(own, {name: default[name] for name in own})


def _teams(spec: BinaryConv2d, how: tiles.Tiles) -> tuple[int, ...]:
    """Return the numbers of warp groups per ``wgmma`` block for which registers suffice."""
    parameters = sum(step_inputs(step) for step in spec.steps if step.op not in FETCHED)
    long = any(
        step.op in FETCHED and (parameters > 2 or step.layout == "NCHW") for step in spec.steps
    )
    few = how.width == tiles.WIDTHS[0] or spec.ternary or long or _crowded(spec)
    return (1, 2) if few else (1, 2, 4)


def _fetching(spec: BinaryConv2d) -> bool:
    """Whether the epilogue reads tensors."""
    return any(step.op in FETCHED for step in spec.steps)


def _roomy(spec: BinaryConv2d, how: tiles.Tiles, engine: str) -> bool:
    """Whether registers hold the sums of 32 pixels."""
    crowded = spec.ternary or _crowded(spec)
    return engine != "int8" and (how.width < tiles.WIDTHS[0] or not crowded)


_OUTPUTS = 8
"""Number of outputs up to which an epilogue fits in registers that are full of sums."""


def _crowded(spec: BinaryConv2d) -> bool:
    """Whether the epilogue has more tensors and outputs than fit in registers with many sums."""
    fetched = sum(step.op in FETCHED for step in spec.steps)
    return fetched > 1 or sum(map(step_outputs, spec.steps)) > _OUTPUTS


def _power(limit: int) -> int:
    """Return the largest power of two that is at most `limit`."""
    return 1 << (limit.bit_length() - 1)


def kernel(name: str, spec: BinaryConv2d, cut: Cut | None = None) -> text.Kernel:
    """Generate the kernel of `spec`.

    Parameters
    ----------
    name : str
        Name of its function.
    spec : BinaryConv2d
        A spec whose weight order is in `tiles.ORDERS`.
    cut : Cut, optional
        Partition of the work; default: `default_cut`.

    Returns
    -------
    Kernel
    """
    cut = cut or default_cut(spec)
    how = tiles.of(spec)
    headers, products = ["common", "products", "binary_conv"], []
    operands = f"in0, {'in1' if spec.ternary else 'nullptr'}, in{1 + spec.ternary}"
    if how.kind == "cores":
        headers = [*headers, "wgmma_conv"]
        products = [wgmma.product(how.width + wgmma.ONES)]
    shared = "" if how.kind == "strips" else ", (int*)shared"
    body = f"bnncc::{_FUNCTION[how.kind]}<{{layer}}>({operands}, images{shared}, {{finish}});"
    constants, border = _constants(spec, how, cut), text.border_class(how.rows, how.columns)
    source = epilogue.source(name, spec, headers, constants, body, border, products)
    height, width = spec.window_hw
    pixels = height * width
    threads, units, per_block, taken, most = {
        "strips": (32 * WARPS, pixels * cut.splits, 32 * WARPS, 0, 0),
        "fragments": (
            32 * WARPS, pixels, 16 * cut.rows * (WARPS // cut.splits), _split_bytes(how, cut), 0
        ),
        "cores": (
            wgmma.TEAM_THREADS * cut.teams, pixels, wgmma.PIXELS * cut.teams,
            wgmma.shared_bytes(how), wgmma.blocks(how, cut.teams, _fetching(spec)),
        ),
    }[how.kind]  # fmt: skip
    return text.Kernel(name, source, threads, units, per_block, how.count, taken, most)


def _split_bytes(how: tiles.Tiles, cut: Cut) -> int:
    """Return the bytes in which warps pass their sums to the warp that finishes."""
    leaving = WARPS // cut.splits * (cut.splits - 1)
    return leaving * 32 * cut.rows * how.width // 2 * 4


def _constants(spec: BinaryConv2d, how: tiles.Tiles, cut: Cut) -> dict[str, text.Constant]:
    per_group = layout.words(spec.channels_per_group)
    constants: dict[str, text.Constant] = {
        **text.window(spec), "CHANNELS": spec.out_channels,
        "GROUPS": spec.groups, "GROUP_OUT": spec.out_channels // spec.groups,
        "GROUP_WORDS": per_group, "PIXEL_WORDS": spec.groups * per_group,
        "RUN": how.run, "STEPS": how.steps, "TILE": how.width,
        "FILTER_WORDS": how.filter_words, "FILLED_CHANNELS": how.count * how.width,
        "CLASSES": how.classes, "TERNARY": spec.ternary, "DOUBLED": spec.doubled,
        "ONE_GROUP": spec.groups == 1 or spec.out_channels // spec.groups % tiles.STRIP == 0,
    }  # fmt: skip
    if how.kind == "cores":
        return {**constants, "TEAMS": cut.teams, "EAGER": bool(cut.eager)}
    if how.kind == "strips":
        return {**constants, "PARTS": cut.splits}
    return {**constants, "ROWS": cut.rows, "SPLITS": cut.splits}
