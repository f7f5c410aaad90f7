"""Options that several verbs share, and how argparse shows and refuses them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from bnncc.console import Console
from bnncc.errors import BnnccError
from bnncc.input_transforms import parse_input_transform
from bnncc.options import (
    ASSUMPTIONS,
    FEW_BIT,
    FIRST_LAYER,
    FLOAT_CONV,
    SIGN_ZERO,
    parse_input_shape,
    parse_input_uint8,
)


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
    group.add_argument("-v", "--verbose", action="count", default=0, help="say more")
    group.add_argument("-q", "--quiet", action="count", default=0, help="say errors only")
    return parser


def model_options(parser: argparse.ArgumentParser) -> None:
    """Add what a compilation may be asked."""
    group = parser.add_argument_group("model")
    params_option(group)
    group.add_argument(
        "--input-shape",
        metavar="NAME:1x3x224x224",
        action="append",
        default=[],
        type=option(parse_input_shape),
        help="shape of an input in place of the file's; a word is a symbolic dimension; repeatable",
    )
    group.add_argument(
        "--input-uint8",
        metavar="NAME:mean,scale[:nhwc]",
        action="append",
        default=[],
        type=option(parse_input_uint8),
        help="take an image input as bytes: the network sees (pixel - mean) * scale, each a number "
        "or a/b/c per channel; repeatable",
    )
    group.add_argument(
        "--input-transform",
        metavar="rgb-threshold:FILE.json|gray-threshold:V|lbp",
        default=None,
        type=option(parse_input_transform),
        help="take an image input as bytes and binarise it; with :nhwc behind it, bytes in that "
        "order; with NAME= in front, that input",
    )
    group.add_argument(
        "--assume",
        choices=ASSUMPTIONS,
        default="nothing",
        help="what the model implies: dabnn puts signs before convolutions with binary weights",
    )
    group.add_argument(
        "--sign-zero",
        choices=SIGN_ZERO,
        default="exact",
        help="sign of an exact zero where the model says 0, or NaN as x / |x| does",
    )
    group.add_argument(
        "--float-conv",
        choices=FLOAT_CONV,
        default="filtered",
        help="how float convolutions may be computed: with all products, or fewer, rounding more",
    )
    group.add_argument(
        "--few-bit",
        choices=FEW_BIT,
        default="auto",
        help="how few-bit layers are computed: the way that should be fastest, or as bit planes; "
        "all give the same numbers",
    )
    group.add_argument(
        "--first-layer",
        choices=FIRST_LAYER,
        default="float32",
        help="what data and weights of convolutions that read an input are rounded to",
    )
    group.add_argument(
        "--check-finite",
        action="store_true",
        help="refuse inputs with NaN or infinity at run time",
    )
    group = parser.add_argument_group("code")
    group.add_argument(
        "--target",
        metavar="T",
        default="native",
        help="name (`bnncc targets` lists them) or target file",
    )
    threads_option(group, "threads that kernels are cut for, and that the self-check uses")
    group.add_argument(
        "--records",
        metavar="DIR",
        action="append",
        default=[],
        type=Path,
        help="tuning records of your own, from `bnncc tune`, before those of bnncc; repeatable",
    )
    group.add_argument(
        "--untuned", action="store_true", help="use no tuning records, not even those of bnncc"
    )


def params_option(parser: Any) -> None:
    """Add ``--params``."""
    parser.add_argument(
        "--params",
        metavar="FILE",
        type=Path,
        default=None,
        help="parameters of an MXNet network; by default NAME-0000.params beside NAME-symbol.json",
    )


def json_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def threads_option(parser: Any, help_text: str = "threads that kernels use at most") -> None:
    """Add ``--threads``."""
    parser.add_argument(
        "--threads",
        metavar="N",
        type=count,
        default=None,
        help=f"{help_text}; by default the CPUs this process may use",
    )


def bundle_options(parser: argparse.ArgumentParser, text: str, bundle: str, results: str) -> None:
    """Add what is written for another machine, and what came back; the texts say why."""
    group = parser.add_argument_group("bundle", text)
    group.add_argument("--bundle", metavar="FOLDER", type=Path, default=None, help=bundle)
    group.add_argument(
        "--python",
        metavar="3.X",
        action="append",
        default=[],
        help="version of Python there; repeatable; by default all that bnncc supports",
    )
    group.add_argument(
        "--import", metavar="RESULTS", dest="results", type=Path, default=None, help=results
    )


def device_options(parser: argparse.ArgumentParser) -> None:
    """Add where a device is."""
    group = parser.add_argument_group("device", "Run there instead of here; see docs/deploy.md.")
    group.add_argument(
        "--rpc", metavar="HOST:PORT", default=None, help="where the device's server listens"
    )
    group.add_argument(
        "--tracker", metavar="HOST:PORT", default=None, help="TVM RPC tracker that knows devices"
    )
    group.add_argument(
        "--key", metavar="K", default=None, help="kind of device to ask the tracker for"
    )
    group.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=count,
        default=None,
        help="how long to wait for a free device of the tracker, and for any answer (300)",
    )
