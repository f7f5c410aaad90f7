"""The page of `explain --html`: what it shows, what hostile names do, how a browser takes it."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import bnncc
from benchmarks.networks import NETWORKS
from bnncc.cli.main import main
from bnncc.errors import UsageError
from bnncc.report import html
from tests.tiny import tiny

HOSTILE = '</script><script>document.title="owned"</script><img src=x onerror="alert(1)">\'"&`'


class Page(HTMLParser):
    """Tags, and the cells of tables row by row."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.inside = ""
        self.texts: dict[str, str] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = tag
        if tag == "tr":
            self.rows.append([])
        if tag == "td":
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        self.texts[self.inside] = self.texts.get(self.inside, "") + data
        if self.inside == "td":
            self.rows[-1][-1] += data

    @property
    def data(self) -> dict[str, Any]:
        """The report in the page."""
        found: dict[str, Any] = json.JSONDecoder().raw_decode(self.texts["script"])[0]
        return found


@pytest.fixture(scope="module")
def birealnet18() -> bnncc.Artifact:
    return bnncc.compile(NETWORKS["birealnet18"](), threads=1)


def figures(report: dict[str, Any]) -> dict[str, Any]:
    """Return what `bench` could print for a report."""
    kernels = [
        {"name": kernel["name"], "median_us": 2.0 * len(kernel["name"])}
        for kernel in report["kernels"]
    ]
    return {
        "cpu": "a CPU", "threads": 1, "repeat": 3, "network": {"median_us": 99.5},
        "kernels": kernels,
    }  # fmt: skip


@pytest.mark.parametrize("measured", [False, True])
def test_everything_is_in_it(birealnet18: bnncc.Artifact, measured: bool) -> None:
    report = birealnet18.report
    bench = figures(report) if measured else None
    text = html.page(report, bench)
    assert len(text.encode()) < 1_000_000
    page = Page(text)
    assert page.data == json.loads(json.dumps({"report": report, "bench": bench}))
    kernels = [row for row in page.rows if len(row) == 12]
    shown = [[*row[1:4], *(int(cell.replace(",", "")) for cell in row[6:11])] for row in kernels]
    assert shown == [
        [
            k["name"], ", ".join(k["layers"]), ", ".join(k["nodes"]), k["macs"],
            k["input_bytes"], k["output_bytes"], k["workspace_bytes"], k["live_bytes"],
        ]
        for k in report["kernels"]
    ]  # fmt: skip
    times = [float(row[5].replace(",", "")) for row in kernels]
    if bench is None:
        assert times == [round(k["estimated_us"], 2) for k in report["kernels"]]
    else:
        assert times == [k["median_us"] for k in bench["kernels"]]
    layers = [row for row in page.rows if len(row) == 8]
    assert [row[0] for row in layers] == [layer["name"] for layer in report["layers"]]
    summary = report["summary"]
    for total in (
        f"{report['bytes']['total']:,} bytes",
        f"{report['memory']['high_water_bytes']:,} bytes",
        f"{report['memory']['arena_bytes']:,} bytes",
        f"{summary['binary']} binary, {summary['float']} float",
    ):
        assert total in text
    picture = [attrs for tag, attrs in page.tags if tag == "circle"]
    assert len(picture) == len(report["kernels"])


def test_shortcuts_are_drawn(birealnet18: bnncc.Artifact) -> None:
    """A block that halves the image reads the block before and the shortcut beside it."""
    reads = [kernel["reads"] for kernel in birealnet18.report["kernels"]]
    assert [at for at, found in enumerate(reads) if not found] == [0]
    assert all(source < at for at, found in enumerate(reads) for source in found)
    skips = sum(at - source > 1 for at, found in enumerate(reads) for source in found)
    assert skips == 3  # stages two to four
    assert html.page(birealnet18.report).count('class="skip"') == skips


def hostile_report() -> dict[str, Any]:
    report = json.loads(json.dumps(tiny().report))
    report["model"] = HOSTILE
    report["layers"][0] |= {"name": HOSTILE, "reason": HOSTILE, "remedy": HOSTILE}
    report["kernels"][0] |= {"name": HOSTILE, "layers": [HOSTILE]}
    report["warnings"] = [HOSTILE]
    report["sign_zero"] = [{"node": HOSTILE, "decision": HOSTILE}]
    return report


def test_names_are_escaped() -> None:
    page = Page(html.page(hostile_report()))
    tags = [tag for tag, _ in page.tags]
    assert tags.count("script") == 2
    assert "img" not in tags
    assert page.texts["title"].startswith(HOSTILE)
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
    assert page.data["report"] == hostile_report()


def test_nothing_is_fetched(birealnet18: bnncc.Artifact) -> None:
    page = Page(html.page(birealnet18.report))
    assert not [attrs for _, attrs in page.tags if {"src", "href"} & attrs.keys()]
    assert "url(" not in html.page(birealnet18.report)
    (policy,) = [a["content"] for _, a in page.tags if "http-equiv" in a]
    assert str(policy).startswith("default-src 'none'")


def test_figures_of_another_network() -> None:
    report = tiny().report
    other = figures(report)
    other["kernels"][0]["name"] = "another"
    with pytest.raises(UsageError, match="are of another network: kernel `another`"):
        html.page(report, other)
    for broken in (
        [], {}, {"kernels": [{"name": "matmul"}]}, {"kernels": 3},
        {key: value for key, value in figures(report).items() if key != "cpu"},
        {**figures(report), "threads": "one"},
    ):  # fmt: skip
        with pytest.raises(UsageError, match=r"not what `bnncc bench --json` prints$"):
            html.page(report, broken)  # type: ignore[arg-type]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    artifact, page, times = (tmp_path / name for name in ("a.bnncc", "page.html", "bench.json"))
    made = tiny()
    made.save(artifact)
    times.write_text(json.dumps(figures(made.report)))
    assert main(["explain", str(artifact), "--html", str(page), "--bench", str(times)]) == 0
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", f"{page}: {page.stat().st_size:,} bytes\n")
    assert Page(page.read_text()).data["report"]["layers"][0]["name"] == "mm"
    assert main(["explain", str(artifact), "--html", str(artifact)]) == 2
    assert "would be overwritten" in capsys.readouterr().err
    times.write_text("no JSON")
    assert main(["explain", str(artifact), "--bench", str(times)]) == 2
    assert "is not JSON" in capsys.readouterr().err


def chromium(page: Path, *options: str) -> str:
    """Open a page in a browser without a window; return its document and what it logged."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("no chromium")
    done = subprocess.run(
        [
            browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--enable-logging=stderr", f"--user-data-dir={page.parent / 'profile'}",
            "--virtual-time-budget=1000", *options, page.as_uri(),
        ],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


def test_in_a_browser(tmp_path: Path, birealnet18: bnncc.Artifact) -> None:
    page = tmp_path / "page.html"
    page.write_text(html.page(birealnet18.report), encoding="utf-8")
    document = Page(chromium(page, "--dump-dom"))
    # The script has run: headings above numbers stand to the right as those do.
    assert any(tag == "th" and attrs.get("class") == "number" for tag, attrs in document.tags)
    page.write_text(html.page(hostile_report()), encoding="utf-8")
    document = Page(chromium(page, "--dump-dom"))
    assert document.texts["title"].startswith(HOSTILE)
    assert "img" not in [tag for tag, _ in document.tags]


@pytest.mark.parametrize(("scheme", "dark"), [(0, True), (1, False)])
def test_light_and_dark(tmp_path: Path, scheme: int, dark: bool) -> None:
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    page.write_text(html.page(tiny().report), encoding="utf-8")
    chromium(
        page, f"--blink-settings=preferredColorScheme={scheme}", "--window-size=400,300",
        f"--screenshot={picture}",
    )  # fmt: skip
    data = picture.read_bytes()
    at, pixels = 8, b""
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        if data[at + 4 : at + 8] == b"IDAT":
            pixels += data[at + 8 : at + 8 + length]
        at += 12 + length
    corner = zlib.decompressobj().decompress(pixels, 4)[1:]  # of the first row, whatever its filter
    assert max(corner) < 60 if dark else min(corner) > 200
