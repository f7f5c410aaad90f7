"""The documentation site builds strictly, its links lead somewhere, and it holds what is made."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from bnncc.cli import main

ROOT = Path(__file__).resolve().parents[2]

pytest.importorskip("mkdocs", reason="no mkdocs: pip install 'bnncc[site]'")
pytest.importorskip("mkdocstrings", reason="no mkdocstrings: pip install 'bnncc[site]'")


class Page(HTMLParser):
    """Links, anchors and words of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors.add(found.get("id") or "")
        for name in ("href", "src"):
            if found.get(name):
                self.links.add(str(found[name]))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    """Build the site; return its pages."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    return {path: Page(path) for path in folder.rglob("*.html")}


def test_links_lead_somewhere(site: dict[Path, Page]) -> None:
    dead = []
    for path, page in site.items():
        if path.name == "404.html":  # its links are those of a server's root
            continue
        for link in page.links:
            if ":" in link or link.startswith("//"):
                continue
            name, _, anchor = unquote(link).partition("#")
            target = (path.parent / name).resolve() if name else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists() or (
                anchor and target in site and anchor not in site[target].anchors
            ):
                dead.append(f"{path.name}: {link}")
    assert not dead


def test_nothing_is_fetched_from_elsewhere(site: dict[Path, Page]) -> None:
    for path in site:
        for line in path.read_text(encoding="utf-8").splitlines():
            if "<script src=" in line or 'rel="stylesheet"' in line:
                assert "://" not in line, f"{path.name}: {line}"


def options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from options(inner)
        elif action.help != argparse.SUPPRESS:
            yield from action.option_strings


def test_reference_is_whole(site: dict[Path, Page]) -> None:
    pages = {path.name: page.text for path, page in site.items() if path.parent.name == "reference"}
    assert all(option in pages["cli.html"] for option in options(main._parser()))
    for name in ("compile", "Artifact", "BnnccError", "Returns"):
        assert name in pages["python.html"]
    for name in ("GatherND", "LSTM", "IntQuant", "conv2d", "CONV_2D", "Convolution"):
        assert name in pages["operators.html"], name
    assert "RandomNormal" not in pages["operators.html"]


def test_every_page_is_listed() -> None:
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert not [name for name in sorted(pages) if f"({name})" not in index]


def test_prose_is_checked_where_it_is_prose() -> None:
    pytest.importorskip("proselint", reason="no proselint: pip install 'bnncc[site]'")
    program = (
        "import sys; sys.path.insert(0, 'docs/site')\n"
        "import prose\n"
        "from pathlib import Path\n"
        "page = '# Runs\\n\\nruns `very` fast\\n\\n```\\nvery very\\n```\\n{}\\n'\n"
        "for wrong in ('', 'it is very fast', 'the the network'):\n"
        "    prose.texts = lambda: [(Path.cwd() / 'a.md', 1, page.format(wrong))]\n"
        "    print(prose.main())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[0] == "0"
    assert [line[:8] for line in said[1:]] == ["a.md:8: ", "1", "a.md:8: ", "1"]
