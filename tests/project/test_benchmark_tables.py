"""The tables of the documentation say what the files of benchmarks/results/ say."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tables():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("tables")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def test_pages_are_current(tables) -> None:
    made = tables.declared()
    for page in tables.PAGES:
        text = page.read_text(encoding="utf-8")
        assert tables.fill(text, made) == text, f"{page.name}: run benchmarks/tables.py"


def test_plots_are_current(tables) -> None:
    made = tables.plots()
    assert set(tables.DRAWN.iterdir()) == set(made)
    assert len(made) >= 3
    pages = "".join(page.read_text(encoding="utf-8") for page in tables.PAGES)
    for path, drawn in made.items():
        assert path.read_text(encoding="utf-8") == drawn, f"{path.name}: run benchmarks/tables.py"
        assert f"plots/{path.name})" in pages, path.name


def test_bars_show_every_number(tables) -> None:
    plots = importlib.import_module("plots")
    drawn = plots.bars("<t> & x", ["a", "b"], [("first", [2.0, None]), ("<b>", [0.5, 8.0])])
    root = ElementTree.fromstring(drawn)
    space = "{http://www.w3.org/2000/svg}"
    shown = {
        rect.find(f"{space}title").text: float(rect.get("width"))
        for rect in root.iter(f"{space}rect")
        if rect.find(f"{space}title") is not None
    }
    assert set(shown) == {"first, a: 2.00 x", "<b>, a: 0.50 x", "<b>, b: 8.00 x"}
    # On a logarithmic axis 2 and 1/2 are as far from 1, and 8 three times as far.
    assert shown["first, a: 2.00 x"] == pytest.approx(shown["<b>, a: 0.50 x"], abs=0.2)
    assert shown["<b>, b: 8.00 x"] == pytest.approx(3 * shown["first, a: 2.00 x"], abs=0.3)


def test_every_result_is_made_by_a_run_and_shown(tables) -> None:
    results = {path.stem for path in tables.RESULTS.glob("**/*.json")}
    assert results <= {run.result for run in tables.RUNS}
    pages = "".join(page.read_text(encoding="utf-8") for page in tables.PAGES)
    for marker in tables.declared():
        assert f"<!-- table: {marker} -->" in pages, marker


def test_fill_leaves_what_was_not_measured(tables) -> None:
    page = "a\n<!-- table: x -->\nold\n<!-- end of table -->\nb\n"
    assert tables.fill(page, {"x": ""}) == page
    assert "old" not in tables.fill(page, {"x": "| new |"})
    with pytest.raises(SystemExit, match="no script has a table x"):
        tables.fill(page, {})


def test_ratios_in_the_readme_follow_from_the_times(tables) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    paths = list(tables.RESULTS.glob("*/networks.json"))
    assert paths
    for row in (row for path in paths for row in json.loads(path.read_text())["networks"]):
        peer = row["peers"].get("openvino-binary")
        if peer is None:
            continue
        shown = re.search(rf"\| {row['ms']['where']:.2f}(?: \([\d.]+\))? \| ([\d.]+) x", readme)
        assert shown is not None, row["network"]
        assert float(shown[1]) == pytest.approx(peer["ms"] / row["ms"]["where"], abs=0.06)


def test_results_of_machines_stand_side_by_side(tables, tmp_path, monkeypatch) -> None:
    content = {"cpu": "one", "layers": []}
    for name in ("old", "new"):
        (tmp_path / "results" / name).mkdir(parents=True)
    (tmp_path / "results/old/x.json").write_text(json.dumps(content))
    facts = {"identity": "A-1-2-3", "mhz": 2300.0, "commit": "abc", "date": "2026-01-02"}
    (tmp_path / "results/new/x.json").write_text(json.dumps({**content, **facts}))
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "RESULTS", tmp_path / "results")
    old, new = tables.shown(tables.where, ("x",)).split("\n\nOn `new`:\n\n")
    assert old == "On `old`:\n\n`results/old/x.json`: one."
    assert new == "`results/new/x.json`: one, A-1-2-3, 2.3 GHz, commit abc, 2026-01-02."
    assert tables.shown(tables.where, ("y",)) == ""


def test_a_head_says_what_machine_it_was(tables) -> None:
    machine = importlib.import_module("machine")
    head = machine.head(rows=[1], cpu="another")
    assert head["rows"] == [1]
    assert head["cpu"] != "another"
    assert {"identity", "features", "commit", "flags", "mhz"} <= set(head)
    assert not any("/" in word for word in head["flags"].split())
