"""The report as one self-contained page, without network, fonts or libraries.

All text passes through `element`, which escapes it: names come from the model and are arbitrary.
"""

from __future__ import annotations

import html
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

from bnncc.report.facts import FLOAT_BITS, KINDS
from bnncc.report.rows import OTHER, Row, by_reason, rows
from bnncc.report.text import plural

TIMES = " \N{MULTIPLICATION SIGN} "
ROW = 44
"""Height of a row of the picture, in CSS pixels."""
LANE = 9
"""Distance between the lines beside the rows."""

_EXPLAINED = {
    "binary": "one bit per value",
    "few_bit": "a few bits per value",
    "float": "floating point",
    OTHER: "pooling, activations, data movement",
}
_NO_NETWORK = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


class Markup(str):
    """HTML that is safe as it is."""


def element(tag: str, *children: str, **attributes: object) -> Markup:
    """Return an element; text that is not `Markup` is escaped. ``class_`` gives ``class``.

    Examples
    --------
    >>> element("b", "1 < 2", class_="x")
    '<b class="x">1 &lt; 2</b>'
    """
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for name, value in attributes.items()
    )
    inner = "".join(c if isinstance(c, Markup) else html.escape(c) for c in children)
    return Markup(f"<{tag}{given}>{inner}</{tag}>")


def prose(said: str) -> list[Markup]:
    """Return text as elements, with code for text in backticks."""
    return [
        element("code" if at % 2 else "span", part)
        for at, part in enumerate(said.split("`"))
        if part
    ]


def page(report: Mapping[str, Any], bench: Mapping[str, Any] | None = None) -> str:
    """Render `report` as a page.

    Parameters
    ----------
    report : mapping
        From `report.build`, with the sizes of the file.
    bench : mapping, optional
        From ``bnncc bench --json`` of the same network.
    """
    found = rows(report, bench)
    kernels = [row for row in found if row.kernel]
    timed = any(row.us for row in kernels)
    parts = [
        _head(report, bench, kernels),
        _section("The network", _picture(kernels, timed)),
        *([_section("Where the time goes", *_time(kernels, bench))] if timed else []),
        _section("Memory over the run", *_memory(report, kernels)),
        _section("Layers that are not binary", *_reasons(report, found)),
        _section("Kernels", _kernel_table(kernels, timed)),
        _section("Layers", _layer_table(report)),
        _section("The file", *_file(report)),
        _section("Notes", *_notes(report)),
    ]
    data = json.dumps({"report": report, "bench": bench}).replace("<", "\\u003c")
    return (
        "<!doctype html>\n"
        + element(
            "html",
            element(
                "head",
                Markup('<meta charset="utf-8">'),
                Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
                Markup(f'<meta http-equiv="Content-Security-Policy" content="{_NO_NETWORK}">'),
                Markup('<meta name="color-scheme" content="light dark">'),
                element("title", f"{report['model']}: bnncc report"),
                element("style", Markup(_asset("page.css"))),
            ),
            element("body", element("main", *parts)),
            element("script", Markup(data), type="application/json", id="data"),
            element("script", Markup(_asset("page.js"))),
            lang="en",
        )
        + "\n"
    )


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _section(title: str, *parts: str) -> Markup:
    return element("section", element("h2", title), *parts)


def _words(kind: str) -> str:
    return kind.replace("_", "-")


def _bytes(count: int) -> str:
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def _us(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value / 1000:,.2f} ms" if value >= 1000 else f"{value:.{1 + (value < 10)}f} µs"


def _macs(count: int) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return str(count)


def _shape(dims: Iterable[int | str]) -> str:
    return TIMES.join(str(d) for d in dims)


def _percent(part: float | None) -> str:
    return "" if part is None else f"{100 * part:.1f} %"


def _head(
    report: Mapping[str, Any], bench: Mapping[str, Any] | None, kernels: Sequence[Row]
) -> Markup:
    summary, memory = report["summary"], report["memory"]
    macs = {kind: summary[f"{kind}_macs"] for kind in KINDS}
    total = sum(macs.values())
    counts = ", ".join(f"{summary[kind]} {_words(kind)}" for kind in KINDS if summary[kind])
    tiles = [
        ("Layers", str(sum(summary[kind] for kind in KINDS)), counts or "none"),
        (
            "Multiply-adds",
            _macs(total),
            f"{_percent(macs['binary'] / total)} binary" if total else "none",
        ),
    ]
    if bench is not None:
        used = plural(bench["threads"], "thread")
        told = f"median of {plural(bench['repeat'], 'run')}, {used}, {bench['cpu']}"
        tiles.append(("Time", _us(bench["network"]["median_us"]), told))
    elif all(row.us is not None for row in kernels):
        told = "estimated, one thread; `bnncc bench` measures it"
        tiles.append(("Time", _us(sum(row.us or 0 for row in kernels)), told))
    tiles += [
        ("Activations", _bytes(memory["high_water_bytes"]), "maximum in use"),
        ("File", _bytes(report["bytes"]["total"]), f"{report['bytes']['total']:,} bytes"),
    ]
    made = [
        element(
            "div",
            element("dt", name),
            element("dd", value),
            element("dd", *prose(told), class_="told"),
            class_="tile",
        )
        for name, value, told in tiles
    ]
    return element(
        "header",
        element("h1", report["model"]),
        element("p", "compiled by bnncc for ", element("code", report["target"])),
        element("dl", *made, class_="tiles"),
    )


def _legend(entries: Iterable[tuple[str, str]]) -> Markup:
    return element(
        "ul",
        *(
            element("li", element("i", class_=f"swatch {kind}"), f" {said}")
            for kind, said in entries
        ),
        class_="legend",
    )


def _picture(kernels: Sequence[Row], timed: bool) -> Markup:
    kinds = [kind for kind in (*KINDS, OTHER) if any(row.kind == kind for row in kernels)]
    most = max((row.us or 0 for row in kernels), default=0) or 1
    lines = [_picture_row(row, most, timed) for row in kernels]
    lanes, wires = _wires(kernels)
    width = 24 + LANE * lanes
    drawing = element(
        "svg", *wires, *_dots(kernels, width), class_="wires", width=width,
        height=ROW * len(kernels), aria_hidden="true",
    )  # fmt: skip
    legend = _legend((kind, f"{_words(kind)}: {_EXPLAINED[kind]}") for kind in kinds)
    listed = element("ol", *lines, class_="rows")
    return element("div", legend, element("div", drawing, listed, class_="picture"))


def _picture_row(row: Row, most: float, timed: bool) -> Markup:
    kernel = row.kernel
    bits = sorted({_operands(layer["bits"]) for layer in row.layers})
    shape = _shape(row.layers[-1]["output_shape"]) if row.layers else _result(kernel)
    told = f"{kernel['output_bytes']:,} bytes out"
    parts = [
        element(
            "span",
            element("b", row.name),
            element("small", kernel["name"]),
            class_="name",
        ),
        element("span", ", ".join(bits), class_="bits"),
        element("span", shape, class_="shape"),
        element(
            "span",
            _bytes(kernel["output_bytes"]) if kernel["output_bytes"] else "in place",
            class_="bytes",
            title=told,
        ),
    ]
    if timed:
        bar = element("i", class_=row.kind, style=_width(row, most))
        parts.append(
            element(
                "span", element("span", bar, class_="track"), element("span", _us(row.us)),
                class_="time",
            )
        )  # fmt: skip
    told = ", ".join(kernel.get("nodes", ())) or row.name
    return element("li", *parts, class_=row.kind, title=f"{kernel['name']}: {told}")


def _width(row: Row, most: float) -> str:
    return f"width:{100 * (row.us or 0) / most:.1f}%"


def _operands(bits: Sequence[int]) -> str:
    data, weight = bits
    if data == FLOAT_BITS:
        return "float" if weight == FLOAT_BITS else f"float{TIMES}{weight} bit"
    return f"{data}{TIMES}{weight} bit"


def _result(kernel: Mapping[str, Any]) -> str:
    return _shape(kernel["args"][-1]["shape"]) if kernel["args"] else ""


def _wires(kernels: Sequence[Row]) -> tuple[int, list[Markup]]:
    """Return the number of lanes beside the rows, and the lines between kernels."""
    edges = [
        (source, at) for at, row in enumerate(kernels) for source in row.kernel.get("reads", ())
    ]
    straight = [edge for edge in edges if edge[1] - edge[0] == 1]
    ends: list[int] = []  # of each lane: the last row that is taken
    lane_of = {}
    for source, at in sorted(edge for edge in edges if edge[1] - edge[0] > 1):
        lane = next((k for k, end in enumerate(ends) if end <= source), len(ends))
        ends[lane:lane + 1] = [at]  # fmt: skip
        lane_of[source, at] = lane
    lanes = len(ends)
    x = 12 + LANE * lanes

    def middle(at: int) -> float:
        return ROW * (at + 0.5)

    made = [
        element("line", x1=x, x2=x, y1=middle(source), y2=middle(at)) for source, at in straight
    ]
    for (source, at), lane in lane_of.items():
        side = x - LANE * (lane + 1) - 2
        top, end = middle(source), middle(at)
        made.append(
            element(
                "path",
                d=f"M{x} {top} C{side} {top} {side} {top} {side} {top + 16} L{side} {end - 16} "
                f"C{side} {end} {side} {end} {x} {end}",
                class_="skip",
            )
        )
    return lanes, made


def _dots(kernels: Sequence[Row], width: int) -> list[Markup]:
    return [
        element("circle", cx=width - 12, cy=ROW * (at + 0.5), r=6, class_=row.kind)
        for at, row in enumerate(kernels)
    ]


def _stack(parts: Sequence[tuple[str, float, str]]) -> list[Markup]:
    """Return a bar of parts (class, size, text) with its legend."""
    total = sum(size for _, size, _ in parts) or 1
    shown = [part for part in parts if part[1]]
    pieces = [
        element("i", class_=kind, style=f"flex-grow:{size / total:.5f}", title=said)
        for kind, size, said in shown
    ]
    return [
        element("div", *pieces, class_="stack"),
        _legend((kind, said) for kind, _, said in shown),
    ]


def _time(kernels: Sequence[Row], bench: Mapping[str, Any] | None) -> list[Markup]:
    total = sum(row.us or 0 for row in kernels)
    spent: Counter[str] = Counter()
    for row in kernels:
        spent[row.kind] += row.us or 0  # type: ignore[assignment]
    parts = [
        (kind, spent[kind], f"{_words(kind)} {_us(spent[kind])}, {_percent(spent[kind] / total)}")
        for kind in (*KINDS, OTHER)
    ]
    how = (
        "Median of each kernel timed alone; the network as a whole took "
        f"{_us(bench['network']['median_us'])}."
        if bench is not None
        else "Estimated for one thread from what each kernel multiplies and moves, within a factor "
        "of about two. `bnncc bench --json` measures; give its output to `--bench`."
    )
    slow = sorted(kernels, key=lambda row: -(row.us or 0))
    most = slow[0].us or 1
    bars = [
        element(
            "li",
            element("span", row.name, class_="name", title=row.kernel["name"]),
            element(
                "span", element("i", class_=row.kind, style=_width(row, most)), class_="track"
            ),
            element("span", f"{_us(row.us)}  {_percent(row.share)}", class_="figure"),
        )
        for row in slow
    ]  # fmt: skip
    made = [
        element("p", *prose(f"{_us(total)} in all kernels. {how}")),
        *_stack(parts),
        element("ol", *bars[:10], class_="bars"),
    ]
    if bars[10:]:
        rest = element("ol", *bars[10:], class_="bars")
        made.append(element("details", element("summary", f"{len(bars) - 10} more"), rest))
    return made


def _memory(report: Mapping[str, Any], kernels: Sequence[Row]) -> list[Markup]:
    memory = report["memory"]
    high = memory["high_water_bytes"] or 1
    columns = []
    for row in kernels:
        kernel = row.kernel
        live, scratch = kernel["live_bytes"], kernel["workspace_bytes"]
        told = f"{row.name} ({kernel['name']}): {live:,} bytes, {scratch:,} of them scratch"
        columns.append(
            element(
                "li",
                element("i", class_="scratch", style=f"height:{100 * scratch / high:.2f}%"),
                element(
                    "i", class_="tensors", style=f"height:{100 * (live - scratch) / high:.2f}%"
                ),
                title=told,
                **({"class_": "high"} if kernel["name"] == memory["high_water_kernel"] else {}),
            )
        )
    return [
        element(
            "p",
            f"At most {memory['high_water_bytes']:,} bytes are in use at a time, in ",
            element("code", memory["high_water_kernel"] or "no kernel"),
            f"; {memory['arena_bytes']:,} bytes are reserved for activations and "
            f"{memory['workspace_bytes']:,} for scratch. Each column is a "
            "kernel, in the order they run; weights and the network's inputs are not counted.",
        ),
        element(
            "div",
            element("span", _bytes(high), class_="top"),
            element("ol", *columns, class_="columns"),
            class_="chart",
        ),
        _legend([("tensors", "tensors between kernels"), ("scratch", "scratch memory")]),
    ]  # fmt: skip


def _reasons(report: Mapping[str, Any], found: Sequence[Row]) -> list[Markup]:
    share = {
        layer["name"]: row.share / len(row.layers)
        for row in found
        if row.share is not None
        for layer in row.layers
    }
    groups = by_reason(report)
    if not groups:
        return [element("p", "Every layer is binary.")]
    made = []
    for (kind, reason, remedy), layers in groups.items():
        parts = sum(share.get(layer["name"], 0) for layer in layers)
        names = [element("code", layer["name"]) for layer in layers]
        listed = [piece for name in names for piece in (name, ", ")][:-1]
        took = f", {_percent(parts)} of the time" if parts else ""
        said = reason or _words(kind)
        made.append(
            element(
                "article",
                element(
                    "h3",
                    element("i", class_=f"swatch {kind}"),
                    " ",
                    *prose(said[:1].upper() + said[1:]),
                ),
                *([element("p", element("b", "What to do: "), *prose(remedy))] if remedy else []),
                element("p", f"{len(layers)} {_words(kind)}{took}: ", *listed, class_="told"),
                class_="reason",
            )
        )
    return made


def _table(
    columns: Sequence[tuple[str, Callable[[Any], Any]]], items: Iterable[Any]
) -> Markup:  # fmt: skip
    """Return a table that can be sorted by its headings; numbers are aligned to the right."""
    body = []
    for item in items:
        cells = []
        for _, value in columns:
            found = value(item)
            if isinstance(found, int | float):
                said = f"{found:,}" if isinstance(found, int) else f"{found:,.2f}"
                cells.append(element("td", said, class_="number", data_value=found))
            else:
                cells.append(element("td", found or "", title=found or ""))
        body.append(element("tr", *cells))
    heads = [
        element("th", element("button", name, type="button"), scope="col") for name, _ in columns
    ]
    table = element("table", element("thead", element("tr", *heads)), element("tbody", *body))
    return element("div", table, class_="scroll", tabindex="0")


def _kernel_table(kernels: Sequence[Row], timed: bool) -> Markup:
    def field(name: str) -> Callable[[tuple[int, Row]], Any]:
        return lambda item: item[1].kernel[name]

    columns: list[tuple[str, Callable[[tuple[int, Row]], Any]]] = [
        ("#", lambda item: item[0]),
        ("kernel", field("name")),
        ("layers", lambda item: ", ".join(item[1].kernel["layers"])),
        ("nodes", lambda item: ", ".join(item[1].kernel.get("nodes", ()))),
        ("kind", lambda item: _words(item[1].kind)),
        *([("time, µs", lambda item: item[1].us)] if timed else []),
        ("multiply-adds", field("macs")),
        ("input, bytes", field("input_bytes")),
        ("output, bytes", field("output_bytes")),
        ("scratch, bytes", field("workspace_bytes")),
        ("in use, bytes", field("live_bytes")),
        ("tuned", lambda item: "yes" if item[1].kernel["tuned"] else "no"),
    ]
    return _table(columns, enumerate(kernels, 1))


def _layer_table(report: Mapping[str, Any]) -> Markup:
    return _table(
        [
            ("layer", lambda layer: layer["name"]),
            ("operator", lambda layer: layer["op"]),
            ("kind", lambda layer: _words(layer["kind"])),
            (f"data{TIMES}weight", lambda layer: _operands(layer["bits"])),
            ("output", lambda layer: _shape(layer["output_shape"])),
            ("weight", lambda layer: _shape(layer["weight_shape"])),
            ("multiply-adds", lambda layer: layer["macs"]),
            ("kernel", lambda layer: layer["kernel"]),
        ],
        report["layers"],
    )


_PARTS = {
    "code": ("code", "other"),
    "binary": ("packed weights", "binary"),
    "float": ("float constants", "float"),
    "selfcheck": ("inputs with known outputs", "tensors"),
    "manifest": ("manifest", "scratch"),
}


def _file(report: Mapping[str, Any]) -> list[Markup]:
    sizes = report["bytes"]
    parts = [
        (kind, sizes[key], f"{said} {sizes[key]:,} bytes") for key, (said, kind) in _PARTS.items()
    ]
    return [element("p", f"{sizes['total']:,} bytes."), *_stack(parts)]


def _notes(report: Mapping[str, Any]) -> list[Markup]:
    compared = report["compared"]
    checked = {
        "whole": "The compiled network was compared with the model, tensor by tensor.",
        "smaller": "The compiler's passes were compared with the model on smaller inputs: ",
        "none": "The compiler's passes were not compared with the model: ",
    }[compared["passes"]]
    lines = [checked + compared["detail"]]
    lines += [f"{item['node']}: {item['decision']}" for item in report["sign_zero"]]
    lines += report["warnings"]
    return [element("ul", *(element("li", *prose(line)) for line in lines))]
