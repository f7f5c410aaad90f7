"""The commands of the README and of docs/ work, and relative links lead somewhere."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
# A fenced block, with the comment before it that says why it is not run, if any.
BLOCK = re.compile(
    r"(?:<!-- not run: (?P<why>[^>]+) -->\n)?```(?P<language>bash|python)\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
OUTPUT = re.compile(r"(?:-o|--output|--tuning-dir) (\S+)")
LINK = re.compile(r"(?<!!)\[[^]]*\]\((?P<to>[^)\s]+)\)")
# A heading becomes an anchor: lower case, spaces to hyphens, nothing else but letters and digits.
HEADING = re.compile(r"^#+ (?P<text>.*)$", re.MULTILINE)


def runnable(page: Path) -> list[tuple[str, str]]:
    """Return language and code of the blocks of `page` that are to be run."""
    found = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [(m["language"], m["code"]) for m in found if not m["why"]]


def anchors(page: Path) -> set[str]:
    """Return the anchors that the headings of `page` make."""
    headings = HEADING.findall(page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "page", [p for p in PAGES if runnable(p)], ids=lambda p: str(p.relative_to(ROOT))
)
def test_blocks_run(page: Path, workplace: tuple[Path, dict[str, str]]) -> None:
    blocks_run(page.name, runnable(page), workplace)


def blocks_run(
    name: str, blocks: list[tuple[str, str]], workplace: tuple[Path, dict[str, str]]
) -> str:
    """Run blocks in order, for later ones may use earlier ones' files; return their output."""
    folder, environment = workplace
    shells = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}
    said = ""
    for language, code in blocks:
        done = subprocess.run(
            [*shells[language], code], cwd=folder, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{name}:\n{code}\n{done.stdout}\n{done.stderr}"
        said += done.stdout
    return said


def test_demo_runs(workplace: tuple[Path, dict[str, str]]) -> None:
    # `make demo` itself would set up .venv again; this is what it runs.
    assert "$(PY) examples/digits/demo.py" in (ROOT / "Makefile").read_text()
    folder, environment = workplace
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/digits/demo.py")],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "450 of 450 predictions equal" in done.stdout


def test_make_alone_lists_the_targets() -> None:
    makefile = (ROOT / "Makefile").read_text()
    listed = re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE)
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony is not None
    assert listed == phony[1].split()


def test_git_ignores_what_the_readme_writes() -> None:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("no git, or no checkout")
    blocks = BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    written = set(OUTPUT.findall("\n".join(code for _, _, code in blocks)))
    assert {"digits.bnncc", "logits.npz", "digits.tar", "my_logs"} <= written
    # A folder is told from a file by its lack of a suffix: it need not exist.
    names = sorted(name if Path(name).suffix else f"{name}/" for name in written)
    done = subprocess.run(
        ["git", "check-ignore", "--", *names], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.split() == names, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_relative_links(page: Path) -> None:
    dead = []
    for match in LINK.finditer(FENCED.sub("", page.read_text(encoding="utf-8"))):
        path, _, anchor = match["to"].partition("#")
        if ":" in path:
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in anchors(target)
        ):
            dead.append(match["to"])
    assert not dead
