"""Phrases that needed a second reading are gone from everything that people read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.project.test_layering import ROOT, project_files

SHIPPED = ("bnncc", "schedules", "targets", "topi_binary", "tune_logs", "docs", "examples")
# Whatever is between the words: a line of prose or of code may break anywhere.
PHRASES = (
    "how much longer others",
    "how much longer the",
    "all taking turns",
    "say more",
    "say errors only",
    "says errors only",
    "images of one row",
    "if it should be",
    "binarise both with a sign",
    "verdict right",
    "off by {",
    "is there already, and",
    "is no kit",
    "begin nothing later",
    "and their kin",
    "are cut for",
    "is cut for",
    "was cut for",
    "passed over",
    "passes over",
    "pass over",
    "what became of",
    "for ever",
    "is cut short",
    "C does without",
    "is no number of",
    "which C does",
    "WebAssembly has not",
    "is none that",
    "no longer expects us",
    "in a way this bnncc",
    "give one that is not there",
    "nobody vouches for",
    "if it may be",
    "is wanted",
    "are wanted",
)
GAP = r"[\s\"'#*|]+f?[\"']?"
STYLE = re.compile(r"^## Style\n.*?(?=^## )", re.DOTALL | re.MULTILINE)


def texts() -> dict[Path, str]:
    """Return what ships, but for the changelog, which quotes, and the page on style."""
    found = {}
    for path in project_files():
        place = path.relative_to(ROOT)
        if place.suffix not in (".md", ".py", ".cc", ".h", ".toml") and place.name != "Makefile":
            continue
        if len(place.parts) > 1 and place.parts[0] not in SHIPPED:
            continue
        if place.name != "CHANGELOG.md":
            found[place] = STYLE.sub("", path.read_text(encoding="utf-8"))
    return found


TEXTS = texts()


@pytest.mark.parametrize("phrase", PHRASES)
def test_gone(phrase: str) -> None:
    pattern = re.compile(r"(?<!\w)" + GAP.join(map(re.escape, phrase.split())) + r"(?!\w)", re.I)
    assert [str(path) for path, text in TEXTS.items() if pattern.search(text)] == []


def test_the_spelling_is_that_of_the_field() -> None:
    stems = "binar|quant|normal|optim|minim|initial|special|synchron|organ"
    pattern = re.compile(rf"(?<![a-z])({stems})is(e|ed|es|er|ers|ing|ation|ations)\b", re.I)
    assert {str(path) for path, text in TEXTS.items() if pattern.search(text)} == set()


def test_phrases_are_found_where_they_are() -> None:
    style = STYLE.search((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert style is not None
    assert "others are passed over" in style[0]
    assert "passed over" not in TEXTS[Path("CONTRIBUTING.md")]
    broken = 'f"they are passed "\n    f"over"'
    assert re.search(GAP.join(("passed", "over")), broken)
