"""Check the prose of what people read with proselint: `make site` runs this.

Read are the pages without code, and the docstrings, help texts and messages of the program: every
string of at least `WORDS` words. Code between backquotes stands for a noun.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from proselint.checks import __register__
from proselint.config import DEFAULT, Config
from proselint.registry import CheckRegistry
from proselint.tools import LintFile

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("bnncc", "schedules", "targets", "topi_binary", "tune_logs", "examples")
WORDS = 4
# Quotes and signs are plain ASCII, as in the program's output; "in a word" is where bits are.
OFF = ("typography", "cliches", "dates_times")
PAGES = Config(max_errors=1000, checks={**DEFAULT["checks"], **dict.fromkeys(OFF, False)})
# Strings of a program hold code, which repeats words.
STRINGS = Config(max_errors=1000, checks={**PAGES["checks"], "lexical_illusions": False})
CODE = re.compile(r"^```.*?^```$|^    .*$|<!--.*?-->|``.*?``|`[^`]*`", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^#+ .*$", re.MULTILINE)
PLACES = re.compile(r"\]\([^)]*\)|\{[^{}]*\}|^\|.*\|$|\d+(?: x \d+)+", re.MULTILINE)


def prose(text: str) -> str:
    """Return `text` with code, tables and addresses replaced, its lines staying where they are."""
    number = itertools.count()

    def blank(found: re.Match[str]) -> str:
        return f"code{next(number)}n" + "\n" * found[0].count("\n")  # no digit meets another

    text = HEADING.sub(r"\g<0>.", PLACES.sub(blank, CODE.sub(blank, text)))
    return text.replace("ultiply-a", "ultiply a")  # no adverb, though it ends in -ly


def strings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of the strings of a program that are sentences."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if len(node.value.split()) >= WORDS:
                yield node.lineno, node.value
        elif isinstance(node, ast.JoinedStr):
            parts = (str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values)
            yield node.lineno, "".join(parts)


def texts() -> Iterator[tuple[Path, int, str]]:
    """Yield file, first line and text of everything that is checked."""
    for path in (*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md"))):
        yield path, 1, path.read_text(encoding="utf-8")
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for line, text in strings(path):
                yield path, line, text


def main() -> int:
    """Print what is wrong, one line each; return the exit code."""
    CheckRegistry().register_many(__register__)
    wrong: dict[str, None] = {}  # in order; parts of a string are read twice
    for path, first, text in texts():
        config = STRINGS if path.suffix == ".py" else PAGES
        for found in LintFile(str(path), prose(text)).lint(config):
            line = first + found.pos[0] - 1
            said = " ".join(found.check_result.message.split())
            wrong[f"{path.relative_to(ROOT)}:{line}: {said}"] = None
    print("\n".join(wrong), end="\n" * bool(wrong))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
