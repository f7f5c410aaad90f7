"""The report of a compilation: its data, and its forms as JSON, text and HTML."""

from bnncc.report.facts import (
    FORMAT,
    KINDS,
    RENAMED,
    Compared,
    Kernel,
    KernelArg,
    Layer,
    Plan,
    SignZero,
    build,
    with_file_size,
    with_new_keys,
    with_old_keys,
)
from bnncc.report.rows import computed, verdicts
from bnncc.report.text import SORTS, WIDTH, fitted, plural, table, text, wrapped

__all__ = [
    "FORMAT",
    "KINDS",
    "RENAMED",
    "SORTS",
    "WIDTH",
    "Compared",
    "Kernel",
    "KernelArg",
    "Layer",
    "Plan",
    "SignZero",
    "build",
    "computed",
    "fitted",
    "plural",
    "table",
    "text",
    "verdicts",
    "with_file_size",
    "with_new_keys",
    "with_old_keys",
    "wrapped",
]
