"""The layers of CONTRIBUTING.md, read from syntax trees; and what every source file must keep."""

from __future__ import annotations

import ast
import functools
import graphlib
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("bnncc", "schedules", "targets", "topi_binary", "tune_logs")
# What each room (a package, or a folder or module of bnncc) may import besides itself: of what
# stands above it in this table, and nothing else.
MAY_IMPORT = {
    "_version": "",
    "errors": "",
    "osutil": "",
    "report": "errors",
    "progress": "",
    "tune_logs": "",
    "topi_binary": "errors",
    "targets": "errors",
    "schedules": "errors topi_binary targets",
    "console": "errors osutil",
    "files": "errors osutil",
    "input_transforms": "errors",
    "options": "errors targets input_transforms",
    "ir": "errors topi_binary",
    "trace": "errors files progress ir",
    "records": "errors osutil files topi_binary targets schedules tune_logs",
    "frontend": "errors files ir",
    "runtime": "_version errors files report options targets ir",
    "recognise": "errors report topi_binary ir frontend",
    "transform": (
        "errors trace options input_transforms report topi_binary targets schedules ir frontend "
        "recognise"
    ),
    "notices": "report options targets schedules records transform",
    "codegen": (
        "_version errors osutil files report topi_binary targets schedules ir records transform "
        "runtime"
    ),
    "remote": "_version errors osutil progress report targets runtime codegen",
    "verification": (
        "errors options input_transforms topi_binary targets ir frontend recognise transform "
        "runtime codegen"
    ),
    "driver": (
        "errors trace options input_transforms report notices topi_binary targets schedules ir "
        "frontend recognise transform codegen runtime records verification"
    ),
    "agreement": (
        "errors progress options input_transforms report ir frontend recognise transform runtime "
        "verification driver"
    ),
    "tuning": (
        "_version errors osutil console progress files options topi_binary targets schedules "
        "records codegen runtime remote verification driver"
    ),
    "api": "errors files options targets frontend runtime driver tuning",
    "bnncc": "_version api agreement driver errors options runtime",
    "bundle": (
        "_version errors console files options topi_binary targets schedules records runtime "
        "driver tuning bnncc"
    ),
    "cli": (
        "_version errors progress trace console files options input_transforms report targets "
        "records frontend codegen runtime remote verification driver agreement tuning bundle"
    ),
    "__main__": "cli",
}
# Modules that import nothing of ours, not even their own package.
ALONE = ("bnncc.errors", "bnncc.topi_binary.layout")
MAX_LINES = 700
EXCUSE = "over 700 lines because"
# Folders of one person's or one service's machine, and the hosts packages were fetched from.
MACHINE = re.compile(
    rb"(?<![\w.~-])/(?:work|root|home|farm|mnt|Users)/|pypi\.(?:org)|python(?:hosted)\.org"
)


def project_files() -> Iterator[Path]:
    """Yield every file of the project once, not following links."""
    for folder, folders, files in os.walk(ROOT):
        at_root = Path(folder) == ROOT
        folders[:] = [
            f
            for f in folders
            if not (f.startswith(".") and f != ".ci")
            and f != "__pycache__"
            and not f.endswith(".egg-info")
            and not (at_root and f in ("build", "dist"))
        ]
        for name in files:
            path = Path(folder, name)
            if not path.is_symlink() and name != ".git":  # a linked worktree's
                yield path


def module_name(path: Path) -> str:
    """Return the name under which the file at `path` is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] != "bnncc":
        parts = ("bnncc", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_name(p): p
    for p in project_files()
    if p.suffix == ".py" and p.relative_to(ROOT).parts[0] in PACKAGES
}


def room(module: str) -> str:
    """Return which row of `MAY_IMPORT` the module stands in."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else module


def imports(module: str, tree: ast.AST, *, is_package: bool) -> Iterator[tuple[int, str]]:
    """Yield line and absolute name of everything imported, at any depth of the tree."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [base])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield node.lineno, full if full in MODULES else base


@functools.cache
def imports_of(module: str) -> list[tuple[int, str]]:
    """Return what a module of `MODULES` imports."""
    path = MODULES[module]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return list(imports(module, tree, is_package=path.name == "__init__.py"))


def violations(module: str, made: Iterable[tuple[int, str]]) -> list[str]:
    """Return one line for each import that `module` must not make."""
    found = []
    for line, name in made:
        top = name.split(".")[0]
        where = f"{module}:{line}: imports {name}"
        if top in PACKAGES and top != "bnncc":
            found.append(f"{where}; write bnncc.{name}")
        elif room(module) == "targets" and top in ("tvm", "tvm_ffi"):
            found.append(f"{where}; targets are plain data, without TVM")
        elif top != "bnncc":
            continue
        elif module in ALONE:
            found.append(f"{where}; it imports nothing of ours")
        elif room(name) not in (room(module), *MAY_IMPORT[room(module)].split()):
            found.append(f"{where}; {room(module)} may not import {room(name)}")
    return found


def test_imports_point_down() -> None:
    found: list[str] = []
    for module in MODULES:
        found += violations(module, imports_of(module))
    assert not found


def test_rooms_import_what_is_below_them() -> None:
    below: set[str] = set()
    for name, allowed in MAY_IMPORT.items():
        assert below >= set(allowed.split()), name
        below.add(name)
    assert {room(module) for module in MODULES} == below


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = {}
    for module in MODULES:
        graph[module] = {n for _, n in imports_of(module) if n in MODULES and n != module}
    graphlib.TopologicalSorter(graph).prepare()  # raises if there is a circle


@pytest.mark.parametrize(
    ("module", "source", "count"),
    [
        ("bnncc.schedules.words", "from bnncc import driver, errors", 1),
        (
            "bnncc.schedules.words",
            "from bnncc.topi_binary import layout\nimport bnncc.targets",
            0,
        ),
        ("bnncc.schedules.words", "from ..driver import compile_model", 1),
        ("bnncc.schedules.words", "from . import popcount", 0),
        ("bnncc.schedules.words", "def f():\n    import bnncc", 1),
        ("bnncc.topi_binary.pool", "from bnncc.targets import catalog", 1),
        ("bnncc.topi_binary.pool", "from bnncc.errors import ShapeError", 0),
        ("bnncc.topi_binary.layout", "from bnncc.errors import ShapeError", 1),
        ("bnncc.targets.host", "from bnncc.topi_binary import layout", 1),
        ("bnncc.targets.host", "import tvm.target", 1),
        ("bnncc.errors", "from bnncc import topi_binary", 1),
        ("bnncc.ir.graph", "from bnncc.transform import fuse", 1),
        ("bnncc.transform.fuse", "from bnncc.ir.graph import Graph", 0),
        ("bnncc.transform.fuse", "from bnncc import driver", 1),
        ("bnncc.ir.graph", "from bnncc import transform", 1),
        ("bnncc.recognise.signs", "from bnncc.transform.rows import flatten_rows", 1),
        ("bnncc.driver", "import schedules", 1),
        ("bnncc.driver", "import tvm\nfrom bnncc.schedules import binary_words", 0),
    ],
)
def test_the_check_itself(module: str, source: str, count: int) -> None:
    made = imports(module, ast.parse(source), is_package=False)
    assert len(violations(module, made)) == count


def test_links_are_relative() -> None:
    for name in PACKAGES[1:]:
        assert (ROOT / "bnncc" / name).is_symlink()
        assert os.readlink(ROOT / "bnncc" / name) == f"../{name}"


def test_source_files_are_short() -> None:
    long = []
    for path in project_files():
        if path.suffix != ".py":
            continue
        source = path.read_text(encoding="utf-8")
        count = source.count("\n")
        if count <= MAX_LINES:
            continue
        head = " ".join((ast.get_docstring(ast.parse(source)) or "").split())
        if EXCUSE not in head:
            long.append(f"{path.relative_to(ROOT)}: {count} lines, and its head gives no reason")
    assert not long


def test_no_machine_paths() -> None:
    found = []
    for path in project_files():
        for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
            if match := MACHINE.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {match[0].decode()}")
    assert not found


@pytest.mark.parametrize("module", ["bnncc", "bnncc.cli.main"])
def test_importing_leaves_tvm_out(module: str) -> None:
    # TVM takes seconds to import; `bnncc --help` must answer at once.
    code = f"import sys, {module}; sys.exit(int('tvm' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
