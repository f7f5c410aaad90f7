"""Options that several verbs share, and how argparse shows and refuses them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from bnncc.console import Console
from bnncc.errors import BnnccError
from bnncc.input_transforms import parse_input_transform
from bnncc.options import CHOICES, CompileOptions, parse_input_shape, parse_input_uint8


class Parser(argparse.ArgumentParser):
    """argparse, with its messages in the form of ours."""

    def error(self, message: str) -> NoReturn:
        """Print `message` and how to get help; exit with 2."""
        self.exit(2, f"error: {message}\n\nhint: `{self.prog} --help` lists the options\n")


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
    """Read a number that seeds random ones, 0 or more.

    Raises
    ------
    ArgumentTypeError
        If it is something else.
    """
    value = int(text) if text.isdigit() else -1
    if not 0 <= value < 2**32:
        raise argparse.ArgumentTypeError(f"`{text}` is no number from 0 to 2**32 - 1")
    return value


def count(text: str) -> int:
    """Read a positive number.

    Raises
    ------
    ArgumentTypeError
        If it is something else.
    """
    value = int(text) if text.isdigit() else 0
    if not 0 < value <= 10**9:
        raise argparse.ArgumentTypeError(f"`{text}` is not a positive number")
    return value


def add_verb(
    verbs: Any, name: str, text: str, run: Callable[[argparse.Namespace, Console], int]
) -> argparse.ArgumentParser:
    """Return the parser of a new verb, with the options that all have."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        formatter_class=Help,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    group = parser.add_argument_group("messages")
    add(group, "-v --verbose", "say more", action="count", default=0)
    add(group, "-q --quiet", "say errors only", action="count", default=0)
    return parser


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


FORMATS = ("artifact", "c")
"""What `compile` writes."""


_CHOICES = {
    "assume": "what the model implies: dabnn puts signs before convolutions with binary weights",
    "sign_zero": "sign of an exact zero where the model says 0, or NaN as x / |x| does",
    "float_conv": "how float convolutions may be computed: with all products, or fewer, rounding "
    "more",
    "few_bit": "how few-bit layers are computed: the way that should be fastest, or as bit planes; "
    "all give the same numbers",
    "first_layer": "what data and weights of convolutions that read an input are rounded to",
    "float_type": "what float tensors between kernels are on a GPU, and what convolutions of them "
    "multiply",
    "float_precision": "what data and weights of all float convolutions and dense layers are "
    "rounded to, on a CPU",
    "float_products": "how products of float32 are computed in 1x1 convolutions and dense layers: "
    "bf16x3 makes six of three bfloat16 terms each, on AMX",
}
"""What the `CHOICES` of `CompileOptions` are for."""


def model_options(parser: argparse.ArgumentParser) -> None:
    """Add what a compilation may be asked."""
    group = parser.add_argument_group("model")
    params_option(group)
    add(
        group,
        "--input-shape",
        "shape of an input in place of the file's; a word is a symbolic dimension; repeatable",
        "NAME:1x3x224x224",
        option(parse_input_shape),
        action="append",
        default=[],
    )
    add(
        group,
        "--input-uint8",
        "take an image input as bytes: the network sees (pixel - mean) * scale, each a number "
        "or a/b/c per channel; repeatable",
        "NAME:mean,scale[:nhwc]",
        option(parse_input_uint8),
        action="append",
        default=[],
    )
    add(
        group,
        "--input-transform",
        "take an image input as bytes and binarise it; with :nhwc behind it, bytes in that "
        "order; with NAME= in front, that input",
        "rgb-threshold:FILE.json|gray-threshold:V|lbp",
        option(parse_input_transform),
    )
    for name, text in _CHOICES.items():
        default = getattr(CompileOptions, name)
        add(group, f"--{name.replace('_', '-')}", text, choices=CHOICES[name], default=default)
    add(
        group,
        "--check-finite",
        "refuse inputs with NaN or infinity at run time",
        action="store_true",
    )
    group = parser.add_argument_group("code")
    add(
        group, "--target", "name (`bnncc targets` lists them) or target file", "T", default="native"
    )
    threads_option(group, "threads that kernels are cut for, and that the self-check uses")
    add(
        group,
        "--records",
        "tuning records of your own, from `bnncc tune`, before those of bnncc; repeatable",
        "DIR",
        path,
        action="append",
        default=[],
    )
    add(group, "--untuned", "use no tuning records, not even those of bnncc", action="store_true")


def params_option(parser: Any) -> None:
    """Add ``--params``."""
    add(
        parser,
        "--params",
        "parameters of an MXNet network; by default NAME-0000.params beside NAME-symbol.json",
        "FILE",
        path,
    )


def json_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    add(parser, "--json", "print JSON", action="store_true")


def threads_option(parser: Any, help_text: str = "threads that kernels use at most") -> None:
    """Add ``--threads``."""
    add(parser, "--threads", f"{help_text}; by default the CPUs this process may use", "N", count)


def bundle_options(parser: argparse.ArgumentParser, text: str, bundle: str, results: str) -> None:
    """Add what is written for another machine, and what came back; the texts say why."""
    group = parser.add_argument_group("bundle", text)
    add(group, "--bundle", bundle, "FOLDER", path)
    add(
        group,
        "--python",
        "version of Python there; repeatable; by default all that bnncc supports",
        "3.X",
        action="append",
        default=[],
    )
    add(group, "--import", results, "RESULTS", path, dest="results")


def device_options(parser: argparse.ArgumentParser) -> None:
    """Add where a device is."""
    group = parser.add_argument_group("device", "Run there instead of here; see docs/deploy.md.")
    add(group, "--rpc", "where the device's server listens", "HOST:PORT")
    add(group, "--tracker", "TVM RPC tracker that knows devices", "HOST:PORT")
    add(group, "--key", "kind of device to ask the tracker for", "K")
    add(
        group,
        "--timeout",
        "how long to wait for a free device of the tracker, and for any answer (300)",
        "SECONDS",
        count,
    )
