"""Bars of the documentation: pictures in SVG, for light and dark pages, without a library."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

WIDTH, RIGHT, TOP = 720, 24, 66
BAR, GAP = 9, 14
COLOURS = (("#2a78d6", "#3987e5"), ("#168f64", "#199e70"), ("#d99a2b", "#c98500"),
           ("#d95926", "#e0683a"), ("#6b5fc7", "#9085e9"))  # fmt: skip
"""For light pages and for dark ones."""

_STYLE = """
text { font: 12px system-ui, "DejaVu Sans", sans-serif; fill: #52514e; }
.title { font-size: 15px; font-weight: 600; fill: #0b0b0b; }
.name, .legend { fill: #0b0b0b; }
.grid { stroke: #e1e0d9; } .one { stroke: #898781; } rect.page { fill: #fcfcfb; }
"""
_DARK = """
text { fill: #c3c2b7; } .title, .name, .legend { fill: #f5f5f2; }
.grid { stroke: #2c2c2a; } .one { stroke: #8f8d86; } rect.page { fill: #1a1a19; }
"""

Row = tuple[str, Sequence[float | None]]
"""A name, and a number for each series; None if there is none."""


def bars(title: str, series: Sequence[str], rows: Sequence[Row], unit: str = " x") -> str:
    """Return bars from 1 on a logarithmic axis, those of a row below one another.

    Parameters
    ----------
    title : str
        What is shown, and in what unit.
    series : sequence of str
        Names of the bars of each row, at most as many as `COLOURS`.
    rows : sequence of Row
        From top to bottom.
    unit : str
        Behind each number.
    """
    numbers = [value for _, values in rows for value in values if value is not None]
    low, high = math.log(min(1.0, *numbers) * 0.98), math.log(max(numbers) * 1.15)
    height = TOP + sum(_height(values) for _, values in rows) + 30

    left = 28 + 6.6 * max(len(name) for name, _ in rows)

    def place(value: float) -> float:
        return left + (math.log(value) - low) / (high - low) * (WIDTH - left - RIGHT)

    parts = [f'<rect class="page" width="{WIDTH}" height="{height}" rx="8"/>',
             _text(16, 26, title, "title")]  # fmt: skip
    x = 16.0
    for at, name in enumerate(series):
        parts.append(f'<rect class="s{at}" x="{x:.0f}" y="38" width="11" height="11" rx="3"/>')
        parts.append(_text(x + 16, 48, name, "legend"))
        x += 40 + 7 * len(name)
    ticks = [t for t in (0.5, 1, 2, 5, 10, 20, 50, 100) if low <= math.log(t) <= high]
    for tick in ticks:
        kind = "one" if tick == 1 else "grid"
        spot, end = f"{place(tick):.1f}", height - 26
        line = f'<line class="{kind}" x1="{spot}" x2="{spot}" y1="{TOP - 4}" y2="{end}"/>'
        parts.append(line)
        parts.append(_text(place(tick), height - 10, f"{tick:g}{unit}", "tick", "middle"))
    y = TOP
    for name, values in rows:
        parts.append(_text(left - 12, y + (_height(values) - GAP) / 2 + 4, name, "name", "end"))
        for at, value in enumerate(values):
            if value is None:
                continue
            start, end = sorted((place(1.0), place(value)))
            size = max(end - start, 1)
            said = f"{name}, {series[at]}: {value:.2f}{unit}"
            parts.append(
                f'<rect class="s{at}" x="{start:.1f}" y="{y}" width="{size:.1f}" '
                f'height="{BAR - 1}" rx="2"><title>{html.escape(said)}</title></rect>'
            )
            y += BAR
        y += GAP
    light, dark = (
        "".join(f".s{at} {{ fill: {pair[k]}; }}" for at, pair in enumerate(COLOURS)) for k in (0, 1)
    )
    style = f"{_STYLE}{light}\n@media (prefers-color-scheme: dark) {{{_DARK}{dark}}}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'role="img" aria-label="{html.escape(title)}">\n<style>{style}</style>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _height(values: Sequence[float | None]) -> int:
    return BAR * sum(value is not None for value in values) + GAP


def _text(x: float, y: float, said: str, kind: str, anchor: str = "start") -> str:
    words = html.escape(said)
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'
