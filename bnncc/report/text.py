"""The report as text for a terminal."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bnncc.report.facts import FLOAT_BITS, KINDS
from bnncc.report.rows import OTHER, Row, by_reason, computed, rows

WIDTH = 80
"""Columns of a terminal of unknown width."""
SORTS = ("order", "time")
"""Orders of the rows: as kernels run, or the slowest first."""

_NAME = 12
"""Minimum width of names that are wrapped."""


def text(
    report: Mapping[str, Any],
    *,
    width: int = WIDTH,
    sort: str = "order",
    bench: Mapping[str, Any] | None = None,
) -> str:
    """Render `report` for a terminal.

    Parameters
    ----------
    report : mapping
        From `build`, with the sizes of the file.
    width : int
        Columns of the terminal.
    sort : str
        One of `SORTS`.
    bench : mapping, optional
        From ``bnncc bench --json``: its medians replace the estimates.

    Returns
    -------
    str
        A line for each layer and each other kernel, the reasons why layers are not binary, the
        memory of each kernel, and totals.
    """
    found = rows(report, bench)
    if sort == "time":
        found.sort(key=lambda row: -(row.us or 0))
    parts = [
        _operators(found, width),
        _reasons(report, width),
        _memory(report, [row for row in found if row.kernel], width),
        _totals(report, found, bench, width),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _operators(found: Sequence[Row], width: int) -> list[str]:
    """Return a line for each layer and each kernel without one."""
    lines: list[tuple[str, ...]] = [
        ("", "", "bits", "output", "mult-adds", "time", "time"),
        ("layer or node", "kind", "data x w", "shape", "M", "us", "%"),
    ]
    digits = 1 if sum(row.us or 0 for row in found) >= 100 else 2
    for row in found:
        us = "?" if row.us is None else f"{row.us:.{digits}f}"
        share = "" if row.share is None else f"{100 * row.share:.1f}"
        for layer in row.layers:
            bits = _operands(layer)
            shape, kind = _shape(layer["output_shape"]), layer["kind"].replace("_", "-")
            macs = f"{layer['macs'] / 1e6:.2f}"
            lines.append((layer["name"], kind, bits, shape, macs, us, share))
            us, share = '"', ""  # one kernel computes several layers
        if not row.layers:
            args = row.kernel["args"]
            shape = _shape(args[-1]["shape"]) if args else ""
            lines.append((row.name, OTHER, "", shape, "", us, share))
    if len(lines) == 2:
        return ["no layer and no kernel"]
    columns = 7 if any(row.us is not None for row in found) else 5
    lines = [line[:columns] for line in lines]
    return fitted(lines, width, right=range(4, columns), wraps=(0, 3), drops=(4, 2, 3))


def _operands(layer: Mapping[str, Any]) -> str:
    data, weight = layer["bits"]
    if layer["kind"] != "float":
        return f"{data}x{weight}"
    return f"floatx{weight}" if weight < data == FLOAT_BITS else "float"


def _shape(dims: Iterable[int | str]) -> str:
    return "x".join(str(d) for d in dims)


def _reasons(report: Mapping[str, Any], width: int) -> list[str]:
    """Say why layers are not binary, once for all layers with the same reason."""
    lines = []
    for (kind, why, remedy), layers in by_reason(report).items():
        if not why:
            continue
        names = ", ".join(layer["name"] for layer in layers)
        lines += wrapped(f"{kind.replace('_', '-')}: {names}", width, "    ")
        lines += wrapped(f"  {why}", width, "    ")
        lines += wrapped(f"  -> {remedy}", width, "     ") if remedy else []
    return lines


def _memory(report: Mapping[str, Any], found: Sequence[Row], width: int) -> list[str]:
    keys = ("input", "output", "workspace", "live")
    lines = [
        ("", "input", "output", "scratch", "in use", ""),
        ("kernel", *["KiB"] * 4, "layers or nodes"),
    ]
    for row in found:
        sizes = (f"{row.kernel[f'{key}_bytes'] / 1024:,.1f}" for key in keys)
        lines.append((row.kernel["name"], *sizes, computed(row.kernel)))
    return (
        fitted(lines, width, right=range(1, 5), wraps=(0, 5), drops=(5, 3, 1, 2)) if found else []
    )


def _totals(
    report: Mapping[str, Any],
    found: Sequence[Row],
    bench: Mapping[str, Any] | None,
    width: int,
) -> list[str]:
    summary, size, memory = report["summary"], report["bytes"], report["memory"]
    kinds = (
        f"{summary[kind]} {kind.replace('_', '-')} ({summary[f'{kind}_macs'] / 1e6:.1f} M)"
        for kind in KINDS
    )
    parts = ("code", "binary", "float", "selfcheck", "manifest")
    lines = [
        ("layers", f"{', '.join(kinds)} multiply-adds"),
        ("kernels", f"{summary['kernels']}, {summary['tuned']} tuned"),
        ("time", _time(report, found, bench)),
        (
            "memory",
            f"{memory['arena_bytes']:,} bytes for activations, {memory['workspace_bytes']:,} for "
            f"scratch; at most {memory['high_water_bytes']:,} in use at once, in "
            f"{memory['high_water_kernel'] or 'no kernel'}",
        ),
        *_row_wise(report),
        ("file", f"{size['total']:,} bytes: " + ", ".join(f"{k} {size[k]:,}" for k in parts)),
        *(("sign(0)", f"{item['node']}: {item['decision']}") for item in report["sign_zero"]),
        *(("warning", line) for line in report["warnings"]),
    ]
    return [line for key, said in lines for line in wrapped(f"{key:9}{said}", width, " " * 9)]


def _row_wise(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the kernels that run row-wise, by the number of rows that they compute at a time."""
    by_rows: dict[int, list[str]] = {}
    for kernel in report["kernels"]:
        if rows := kernel.get("band_rows"):
            by_rows.setdefault(rows, []).append(kernel["name"])
    said = (
        f"{rows} row{'s' * (rows > 1)} at a time: {', '.join(dict.fromkeys(names))}"
        for rows, names in sorted(by_rows.items())
    )
    return [("row-wise", "; ".join(said))] if by_rows else []


def _time(report: Mapping[str, Any], found: Sequence[Row], bench: Mapping[str, Any] | None) -> str:
    known = [row.us for row in found if row.us is not None]
    if bench is not None:
        return (
            f"{sum(known):,.1f} us in kernels, each timed alone; network "
            f"{bench['network']['median_us']:,.1f} us (medians, {bench['cpu']})"
        )
    if not known:
        return "not estimated for this target"
    dims = {d for k in report["kernels"] for arg in k["args"] for d in arg["shape"]}
    symbols = sorted({name for d in dims for name in re.findall(r"[^\W\d]\w*", str(d))})
    sizes = f" for {', '.join(f'{name} = 1' for name in symbols)}" if symbols else ""
    return f"{sum(known):,.1f} us estimated{sizes}, one thread; `bnncc bench` measures it"


def fitted(
    rows: Sequence[Sequence[str]],
    width: int,
    *,
    right: Iterable[int],
    wraps: Sequence[int],
    drops: Sequence[int],
    heads: int = 2,
) -> list[str]:
    """Return a table with `heads` rows of headings, without the columns that do not fit.

    Columns are dropped in the order of `drops`; a last line names them.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    kept, dropped = list(range(len(widths))), []
    for column in drops:
        least = sum(min(widths[i], _NAME) if i in wraps else widths[i] for i in kept)
        if least + 2 * (len(kept) - 1) <= width:
            break
        kept.remove(column)
        dropped.append(" ".join(filter(None, (row[column] for row in rows[:heads]))))
    lines = table(
        [[row[i] for i in kept] for row in rows],
        right=[kept.index(i) for i in right if i in kept],
        width=width,
        wraps=[kept.index(i) for i in wraps if i in kept],
    )
    note = f"not shown in {width} columns: {', '.join(dropped)}"
    return lines + wrapped(note, width) if dropped else lines


def wrapped(line: str, width: int, indent: str = "") -> list[str]:
    """Break a line at spaces; lines after the first start with `indent`."""
    return textwrap.wrap(line, max(width, 40), subsequent_indent=indent, break_on_hyphens=False)


def plural(count: int, noun: str) -> str:
    """Return a count with its noun.

    Examples
    --------
    >>> plural(1, "thread"), plural(2000, "run")
    ('1 thread', '2,000 runs')
    """
    return f"{count:,} {noun}{'s' * (count != 1)}"


def table(
    rows: Sequence[Sequence[str]],
    *,
    right: Iterable[int] = (),
    width: int | None = None,
    wraps: Sequence[int] = (),
) -> list[str]:
    """Align `rows` in columns two spaces apart.

    Parameters
    ----------
    right : iterable of int
        Columns that are aligned to the right.
    width : int, optional
        Maximum width of a line, if columns can be wrapped.
    wraps : sequence of int
        Columns that are wrapped, the widest first.

    Examples
    --------
    >>> table([("a", "bits"), ("long", "1")], right=[1])
    ['a     bits', 'long     1']
    >>> table([("name", "us"), ("a name that takes two lines", "1")], width=20, wraps=[0])
    ['name              us', 'a name that       1', 'takes two lines']
    """
    right = set(right)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    if width is not None and wraps:
        _narrow(widths, width - 2 * (len(widths) - 1), wraps)
    lines = []
    for row in rows:
        cells = [
            (textwrap.wrap(cell, space, break_on_hyphens=False) if len(cell) > space else [cell])
            for cell, space in zip(row, widths, strict=True)
        ]
        for at in range(max(map(len, cells))):
            parts = [
                (cell[at] if at < len(cell) else "").rjust(space)
                if i in right
                else (cell[at] if at < len(cell) else "").ljust(space)
                for i, (cell, space) in enumerate(zip(cells, widths, strict=True))
            ]
            lines.append("  ".join(parts).rstrip())
    return lines


def _narrow(widths: list[int], width: int, wraps: Sequence[int]) -> None:
    """Narrow the widest columns of `wraps` until the table fits in `width`, or all are narrow."""
    while sum(widths) > width:
        widest = max(wraps, key=lambda i: widths[i])
        if widths[widest] <= _NAME:
            return
        widths[widest] -= 1
