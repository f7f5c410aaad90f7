"""Options shared by several verbs, and how argparse shows and refuses them."""

from __future__ import annotations

import argparse
import difflib
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NoReturn

from bnncc import options
from bnncc.console import Console
from bnncc.errors import BnnccError, UsageError
from bnncc.options import (
    CHOICES,
    OPTIMIZE_FOR,
    CompileOptions,
    parse_dim,
    parse_in_place,
    parse_input_shape,
    parse_input_uint8,
)


class Parser(argparse.ArgumentParser):
    """argparse with messages in the form of bnncc's."""

    def error(self, message: str) -> NoReturn:
        """Print `message`, what may have been meant and how to get help; exit with 2."""
        near = ""
        message = message.replace("the following arguments are required:", "missing argument:")
        if wrong := _CHOICE.search(message):
            near = _meant(wrong["given"], re.findall(r"[^\s,']+", wrong["choices"]))
            if wrong["what"] in ("VERB", "ACTION"):
                message = f"unknown {wrong['what'].lower()} `{wrong['given']}`"
        self._leave(message, near)

    def knows(self, word: str) -> bool:
        """Tell whether a word is an option."""
        return word.partition("=")[0] in self._option_string_actions

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """Refuse what was left over; exit with 2."""
        word, _, _ = words[0].partition("=")
        if not word.startswith("-"):
            self.error(f"unexpected argument `{word}`")
        near = _meant(word, [o for o in self._option_string_actions if o.startswith("--")])
        self._leave(f"unknown option `{word}`", near)

    def _leave(self, message: str, near: str) -> NoReturn:
        listed = "the options" if self._subparsers is None else "all"
        self.exit(2, f"error: {message}\n\nhint: {near}`{self.prog} --help` lists {listed}\n")


_CHOICE = re.compile(
    r"argument (?P<what>.+): invalid choice: '(?P<given>.*)' \(choose from (?P<choices>.*)\)"
)


def _meant(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, 1)
    return f"did you mean `{close[0]}`? " if close else ""


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults where there are any."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, 0, []):
            return action.help
        return super()._get_help_string(action)


def option(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """Let argparse report what `convert` refuses."""

    def parse(text: str) -> Any:
        try:
            return convert(text)
        except BnnccError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse


def path(text: str) -> Path:
    """Read the name of a file or folder.

    Raises
    ------
    ArgumentTypeError
        If it is empty.
    """
    if not text:
        raise argparse.ArgumentTypeError("an empty name is given")
    return Path(text)


def seed(text: str) -> int:
    """Read the seed of random numbers, 0 or more.

    Raises
    ------
    ArgumentTypeError
        If it is something else.
    """
    return _within(text, range(2**32), "a number from 0 to 2**32 - 1")


def count(text: str) -> int:
    """Read a number from 1 to 10**9.

    Raises
    ------
    ArgumentTypeError
        If it is something else.
    """
    most = 10**9
    what = "a positive number" if not text.isdigit() or not int(text) else f"at most {most:,}"
    return _within(text, range(1, most + 1), what)


def _within(text: str, numbers: range, what: str) -> int:
    if not text.isdigit() or int(text) not in numbers:
        raise argparse.ArgumentTypeError(f"`{text}` is not {what}")
    return int(text)


def fraction(text: str) -> float:
    """Read a number from 0 to 1, or a percentage.

    Raises
    ------
    ArgumentTypeError
        If it is something else.

    Examples
    --------
    >>> fraction("0.9"), fraction("90%"), fraction("99.9%")
    (0.9, 0.9, 0.999)
    """
    try:  # as binary floats, 99.9 / 100 is more than 999 / 1000
        value = float(Decimal(text.removesuffix("%")) / (100 if text.endswith("%") else 1))
    except ArithmeticError:  # no number, or one beyond all bounds
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"`{text}` is not a number from 0 to 1 or a percentage")
    return value


def add_verb(
    verbs: Any, name: str, text: str, run: Callable[[argparse.Namespace, Console], int]
) -> argparse.ArgumentParser:
    """Return the parser of a new verb, with the options common to all."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        formatter_class=Help,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, parser=parser, verb=name)
    group = parser.add_argument_group("messages")
    for names, help_text in _MESSAGES.items():
        add(group, names, help_text, action="count", default=0)
    return parser


_MESSAGES = {
    "-v --verbose": "also name each phase and its time",
    "-q --quiet": "errors only",
}
_LEADING = re.compile(r"-v+|-q+|--verbose|--quiet")


def arranged(words: Sequence[str]) -> list[str]:
    """Move options before the verb behind it, and turn ``help`` into an option.

    Examples
    --------
    >>> arranged(["-v", "compile", "m.onnx"])
    ['compile', '-v', 'm.onnx']
    >>> arranged(["help", "records", "list"])
    ['records', 'list', '--help']
    """
    leading = list(itertools.takewhile(_LEADING.fullmatch, words))
    verb, rest = list(words[len(leading) :][:1]), list(words[len(leading) + 1 :])
    if verb == ["help"]:
        return [*rest, "--help"]
    return [*verb, *leading, *rest] if verb else []


def add(
    to: Any,
    names: str,
    text: str,
    metavar: str | None = None,
    convert: Callable[[str], Any] | None = None,
    **more: Any,
) -> None:
    """Add an option, or an argument, to a parser or group; `more` is as argparse has it."""
    given = {"metavar": metavar, "type": convert}
    more |= {key: value for key, value in given.items() if value is not None}
    to.add_argument(*names.split(), help=text, **more)


def add_repeatable(
    to: Any, name: str, text: str, metavar: str, convert: Callable[[str], Any], **more: Any
) -> None:
    """Add an option that can be given several times, as a list."""
    more |= {"action": "append", "default": []}
    add(to, name, f"{text}; repeatable", metavar, convert, **more)


RENAMED = {"--records": "--tuning-dir", "--lock": "--lock-file"}
"""Deprecated options, and what they are called now."""

OLD_VALUES = {
    **{options.flag(name): renamed for name, renamed in options.OLD_VALUES.items()},
    "--measure": {"clock": "time"},
}
"""Deprecated values of options."""


def renamed(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Replace deprecated names by new ones; also return the warnings.

    Examples
    --------
    >>> renamed(["tune", "m.onnx", "--lock=f", "--assume", "nothing"])[0]
    ['tune', 'm.onnx', '--lock-file=f', '--assume', 'none']
    """
    made: list[str] = []
    said: list[str] = []

    def current(old: str, table: Mapping[str, str], what: str) -> str:
        if old not in table:
            return old
        said.append(
            f"{what}{old} is deprecated and will be removed in the next version: use {table[old]}"
        )
        return table[old]

    before = ""
    for word in words:
        if not word.startswith("--"):
            made.append(current(word, OLD_VALUES.get(before, {}), f"{before} "))
            before = ""
            continue
        option, equals, value = word.partition("=")
        option = current(option, RENAMED, "")
        made.append(option + equals + current(value, OLD_VALUES.get(option, {}), f"{option} "))
        before = "" if equals else option
    return made, said


FORMATS = ("artifact", "c", "wasm")
"""Output formats of `compile`."""


_CHOICES = {
    "assume": "what to assume beyond the model: dabnn applies sign() to the input of every "
    "convolution with binary weights",
    "sign_zero": "result of a sign for an input of exactly zero: what the model gives (0, or NaN "
    "as x / |x| does), or always +1 or -1, which can be faster",
    "float_conv": "algorithm of float convolutions: direct, or minimal filtering (Winograd) along "
    "rows or in both directions, which is faster and rounds more",
    "few_bit": "algorithm of few-bit layers: the fastest by estimate, or always bit planes; the "
    "results are the same",
    "first_layer": "type to which the data and weights of convolutions on an input are rounded",
    "activations": "type to which the data of float dense layers with weights of few bits are "
    "quantized at run time, a scale per row, on a CPU",
    "float_type": "type of float tensors between kernels, and of their convolutions, on a GPU",
    "float_precision": "type to which the data and weights of float convolutions and dense layers "
    "are rounded, on a CPU",
    "float_products": "algorithm of float32 products in 1x1 convolutions and dense layers: bf16x3 "
    "computes each from three bfloat16 terms, on AMX",
}
"""What the `CHOICES` of `CompileOptions` are for."""


def model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a compilation."""
    group = parser.add_argument_group("model")
    params_option(group)
    add_repeatable(
        group,
        "--input-shape",
        "shape of an input, instead of the one in the model; a word in place of a number is a "
        "symbolic dimension",
        "NAME:1x3x224x224",
        option(parse_input_shape),
    )
    add_repeatable(
        group,
        "--max-dim",
        "largest size of a symbolic dimension, for example a number of tokens",
        "NAME=SIZE",
        option(parse_dim),
    )
    add_repeatable(
        group,
        "--in-place",
        "store an output, which appends to an input or writes rows of it, in that input's memory, "
        "as for a key/value cache",
        "INPUT=OUTPUT",
        option(parse_in_place),
    )
    add_repeatable(
        group,
        "--input-uint8",
        "read an image input as bytes: the network gets (pixel - mean) * scale, with one number "
        "for all channels or one for each, as a/b/c",
        "NAME:mean,scale[:nhwc]",
        option(parse_input_uint8),
    )
    add(
        group,
        "--input-transform",
        "read an image input as bytes and binarize it; append :nhwc if the bytes are in that "
        "order; prepend NAME= to choose the input",
        "rgb-threshold:FILE.json|gray-threshold:V|lbp",
    )
    for name, text in _CHOICES.items():
        default = getattr(CompileOptions, name)
        add(group, f"--{name.replace('_', '-')}", text, choices=CHOICES[name], default=default)
    add(
        group,
        "--check-finite",
        "reject inputs with NaN or infinity at run time",
        action="store_true",
    )
    _code_options(parser.add_argument_group("code"))


def _code_options(group: Any) -> None:
    """Add the options of the machine code, and of how its tiles are chosen."""
    add(
        group, "--target", "target name (see `bnncc targets`) or target file", "T", default="native"
    )
    threads_option(group, "number of threads to compile for")
    add(
        group,
        "--optimize-for",
        "for C: memory runs layers a few rows at a time where that takes less memory, speed does "
        "not; auto is memory for c99 and processors without an operating system, else speed",
        choices=OPTIMIZE_FOR,
        default=CompileOptions.optimize_for,
    )
    add_repeatable(
        group,
        "--tuning-dir",
        "folder of tuning records from `bnncc tune`, used before those that come with bnncc",
        "DIR",
        path,
        dest="records",
    )
    add(
        group,
        "--untuned",
        "use no tuning records, not even bnncc's own",
        action="store_true",
    )
    add(
        group,
        "--no-measure",
        "for native: do not time alternative schedules, nor options that are meant to be faster",
        action="store_true",
    )


def limit_options(parser: argparse.ArgumentParser) -> None:
    """Add limits of a device, for networks compiled to C."""
    group = parser.add_argument_group("device")
    for kind, name in (("ram", "RAM"), ("flash", "flash")):
        text = f"fail if the network, compiled to C, needs more {name}"
        add(group, f"--{kind}", text, "BYTES[k|M]", option(parse_bytes))


def parse_bytes(text: str) -> int:
    """Read a number of bytes: 65536, 64k or 1M.

    Raises
    ------
    UsageError
        If it is not one.
    """
    digits, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS else (text, "")
    if not digits.isdecimal():
        raise UsageError(f"`{text}` is not a number of bytes, such as 65536, 64k or 1M")
    return int(digits) * _UNITS.get(unit, 1)


_UNITS = {"k": 1 << 10, "M": 1 << 20}


def params_option(parser: Any) -> None:
    """Add ``--params``."""
    add(
        parser,
        "--params",
        "weights for a model, by name: a .safetensors file, or the .index.json of several; or the "
        "parameters of an MXNet network, by default NAME-0000.params beside NAME-symbol.json",
        "FILE",
        path,
    )


def dims_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--dim``."""
    add_repeatable(
        parser,
        "--dim",
        "size of a symbolic dimension, such as a number of tokens (default: 1)",
        "NAME=SIZE",
        option(parse_dim),
    )


def json_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    add(parser, "--json", "print JSON", action="store_true")


def threads_option(parser: Any, help_text: str = "maximum number of threads") -> None:
    """Add ``--threads``."""
    add(parser, "--threads", f"{help_text}; default: the number of CPUs available", "N", count)


def bundle_options(parser: argparse.ArgumentParser, text: str, bundle: str, results: str) -> None:
    """Add ``--bundle`` and ``--import``, with these help texts."""
    group = parser.add_argument_group("bundle", text)
    add(group, "--bundle", bundle, "FOLDER", path)
    add(
        group,
        "--python",
        "Python version of that machine; repeatable; default: all that bnncc supports",
        "3.X",
        action="append",
        default=[],
    )
    add(group, "--import", results, "RESULTS", path, dest="results")


def device_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a device."""
    group = parser.add_argument_group(
        "device", "Run on a device, not on this machine; see docs/deploy.md."
    )
    add(group, "--rpc", "address of the device's server", "HOST:PORT")
    add(group, "--tracker", "address of a TVM RPC tracker", "HOST:PORT")
    add(group, "--key", "device key to request from the tracker", "K")
    add(
        group,
        "--timeout",
        "how long to wait for a free device and for each answer (default: 300)",
        "SECONDS",
        count,
    )
