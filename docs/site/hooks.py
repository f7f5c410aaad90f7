"""What mkdocs adds to the pages of docs/: those made from the program, and those at its top.

The reference of the command line comes from its parser, the list of operators from the tables
of the readers, the Python reference from docstrings; CONTRIBUTING and CHANGELOG join the site.
Links to files that are no pages become their names.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
AT_TOP = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
MORE = ("bnncc.runtime.session.Session", "bnncc.remote.connect", "bnncc.errors")
"""What the Python reference shows besides `bnncc.__all__`."""

OF_DATA = {"Compress", "NonMaxSuppression", "NonZero", "Unique"}
ELSEWHERE = {"ImageDecoder", "MaxRoiPool", "RegexFullMatch", "TfIdfVectorizer"}
"""`OF_DATA`, `ELSEWHERE`: operators of ONNX whose shape depends on data, and others that TVM's
importer knows but bnncc does not take."""
_LINK = re.compile(r"\[([^]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made."""
    made = {
        "reference/cli.md": command_line(),
        "reference/python.md": python(),
        "reference/operators.md": operators(),
        **{to: (ROOT / name).read_text(encoding="utf-8") for name, to in AT_TOP.items()},
    }
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links lead to pages of the site, or be words."""

    def turned(found: re.Match[str]) -> str:
        text, target = found.groups()
        if ":" in target or target.startswith("#"):
            return found[0]
        path, _, anchor = target.partition("#")
        if page.file.src_uri in AT_TOP.values():
            place = (ROOT / path).resolve()
        else:
            place = (ROOT / "docs" / Path(page.file.src_uri).parent / path).resolve()
        known = {ROOT / name: to for name, to in AT_TOP.items()} | {ROOT / "README.md": "index.md"}
        if place in known:
            return f"[{text}]({known[place]}{'#' + anchor if anchor else ''})"
        if place.is_relative_to(ROOT / "docs"):
            return f"[{text}]({place.relative_to(ROOT / 'docs')}{'#' + anchor if anchor else ''})"
        return text

    return _LINK.sub(turned, markdown)


def command_line() -> str:
    """Return a section for each verb of the command line."""
    from bnncc.cli import main

    said = "Made from the parser; `bnncc VERB --help` prints the same."
    lines = ["# Command line reference", "", said]
    for name, parser in _parsers(main._parser(), "bnncc"):
        lines += ["", f"## {name}", "", _escaped(parser.description or ""), "", "```text"]
        lines += [parser.format_usage().strip(), "```"]
        for group in parser._action_groups:
            actions = [a for a in group._group_actions if a.help != argparse.SUPPRESS]
            actions = [a for a in actions if not isinstance(a, argparse._SubParsersAction)]
            if actions:
                lines += ["", f"**{group.title}**", "", "| option | what |", "|---|---|"]
                lines += [f"| {_names(action)} | {_help(action)} |" for action in actions]
    return "\n".join(lines) + "\n"


def _parsers(
    parser: argparse.ArgumentParser, name: str
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb, inner in action.choices.items():
                yield from _parsers(inner, f"{name} {verb}")


def _names(action: argparse.Action) -> str:
    names = ", ".join(f"`{option}`" for option in action.option_strings)
    value = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
    if action.choices:
        value = "|".join(map(str, action.choices))
    said = f"`{value}`".replace("|", "\\|") if value else ""
    return f"{names} {said}".strip()


def _help(action: argparse.Action) -> str:
    text = (action.help or "").replace("%(default)s", str(action.default))
    if action.option_strings and action.default not in (None, False, 0, [], argparse.SUPPRESS):
        text += f" (default: {action.default})"
    return _escaped(text)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("%%", "%")


def python() -> str:
    """Return what mkdocstrings fills with docstrings."""
    import bnncc

    names = [f"bnncc.{name}" for name in bnncc.__all__ if not name.startswith("_")]
    parts = ["# Python reference", ""]
    for name in (*names, *MORE):
        parts += [f"::: {name}", ""]
    return "\n".join(parts)


def operators() -> str:
    """Return the operators that each reader takes."""
    import onnx
    from tvm.relax.frontend.onnx import onnx_frontend

    from bnncc.codegen import converters
    from bnncc.frontend import checks, control, custom, expansions, mxnet_ops, qonnx, tflite_ops
    from bnncc.frontend.pytorch import convert
    from bnncc.ir.operators import FUNCTIONS

    schemas = [s for s in onnx.defs.get_all_schemas() if not s.domain and not s.deprecated]
    by_definition = {s.name for s in schemas if s.has_function or s.has_context_dependent_function}
    read = {*converters._TABLE, *expansions._TABLE, *control.RULES, *FUNCTIONS, *by_definition}
    read |= set(onnx_frontend._get_convert_map())
    strange = {n for n in read if "Optional" in n or "String" in n} | OF_DATA | ELSEWHERE
    onnx_names = ({s.name for s in schemas} & read) - set(checks.RANDOM) - strange
    lists = {
        "ONNX": onnx_names,
        "QONNX, FINN and Brevitas": {*custom._GENERAL, *custom._CHANNELS_LAST, *qonnx.OPERATORS},
        "PyTorch": convert.RULES,
        "TensorFlow Lite": {name for name, _ in tflite_ops.OPERATORS.values()},
        "MXNet": mxnet_ops.OPERATORS,
    }
    parts = [
        "# Supported operators",
        "",
        "Made from the tables of the readers. An operator in a list is read; a combination of "
        "attributes, types or shapes that is not supported is refused by a message that names the "
        "node. `bnncc explain MODEL` is the quickest test. Operators whose result has a size that "
        "depends on data, such as `NonZero`, run only on constants.",
    ]
    for name, found in lists.items():
        parts += ["", f"## {name}", "", _listed(found)]
    return "\n".join(parts) + "\n"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))
