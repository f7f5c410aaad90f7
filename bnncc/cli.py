"""The command line: parse, dispatch, and report what went wrong in one line.

Data goes to stdout, everything else to stderr. Nothing here imports TVM before a verb needs it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from bnncc import commands
from bnncc._version import __version__
from bnncc.console import Console, library_output_hidden
from bnncc.errors import BnnccError
from bnncc.options import FIRST_LAYER, FLOAT_CONV, SIGN_ZERO, parse_input_shape, parse_input_uint8

EXIT_OK, EXIT_BUG, EXIT_INTERRUPTED = 0, 70, 130


class _Parser(argparse.ArgumentParser):
    """argparse, with its messages in the form of ours."""

    def error(self, message: str) -> NoReturn:
        """Print `message` and how to get help; exit with 2."""
        self.exit(2, f"error: {message}\n\nhint: `{self.prog} --help` lists the options\n")


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults where there are any."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, 0, []):
            return action.help
        return super()._get_help_string(action)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments without the program's name; by default those of the process.

    Returns
    -------
    int
        Exit code: 0 done, 1 failed, 2 bad usage, 70 bug in bnncc, 130 interrupted.
    """
    parser = _parser()
    try:
        args = parser.parse_args(argv)
    except SystemExit as done:
        return int(done.code or 0)
    args.own_process = argv is None
    if args.own_process and args.verbose < 2:
        with library_output_hidden() as written:
            return _dispatch(args, written)
    return _dispatch(args, lambda: "")


def _dispatch(args: argparse.Namespace, written: Callable[[], str]) -> int:
    """Run the verb; `written` returns what libraries had to say meanwhile."""
    console = Console(verbosity=args.verbose - args.quiet)
    try:
        with _quiet_libraries(args.verbose):
            code = int(args.run(args, console))
        sys.stdout.flush()
        return code
    except BnnccError as error:
        console.error(error)
        return error.exit_code
    except KeyboardInterrupt:
        console.line("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of stdout is gone; keep Python from complaining when it flushes at exit.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except MemoryError:
        console.error(BnnccError("out of memory"))
        return 1
    except Exception:
        sys.stderr.write(written())
        traceback.print_exc()
        console.line("error: this is a bug in bnncc; the lines above say where")
        return EXIT_BUG


@contextlib.contextmanager
def _quiet_libraries(verbose: int) -> Iterator[None]:
    """Keep Python warnings, and what TVM and LLVM log, off the user's terminal unless asked for."""
    import logging
    import warnings

    if verbose > 1:
        yield
        return
    os.environ.setdefault("TVM_LOG_DEBUG", "DEFAULT=0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def _option(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """Let argparse report what `convert` refuses."""

    def parse(text: str) -> Any:
        try:
            return convert(text)
        except BnnccError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse


def _count(text: str) -> int:
    value = int(text) if text.isdigit() else 0
    if not 0 < value <= 10**9:
        raise argparse.ArgumentTypeError(f"`{text}` is not a positive number")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="bnncc",
        description="Compile binary and few-bit neural networks to exact, fast machine code.",
        epilog="`bnncc VERB --help` lists a verb's options.",
    )
    parser.add_argument("--version", action="version", version=f"bnncc {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for add in (_compile, _run, _bench, _explain, _verify, _deploy, _device_kit, _targets):
        add(verbs)
    return parser


def _verb(
    verbs: Any, name: str, text: str, run: Callable[[argparse.Namespace, Console], int]
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        formatter_class=_Help,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    group = parser.add_argument_group("messages")
    group.add_argument("-v", "--verbose", action="count", default=0, help="say more")
    group.add_argument("-q", "--quiet", action="count", default=0, help="say errors only")
    return parser


def _model_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--input-shape",
        metavar="NAME:1x3x224x224",
        action="append",
        default=[],
        type=_option(parse_input_shape),
        help="shape of an input in place of the file's; a word is a symbolic dimension; repeatable",
    )
    group.add_argument(
        "--input-uint8",
        metavar="NAME:mean,scale[:nhwc]",
        action="append",
        default=[],
        type=_option(parse_input_uint8),
        help="take an image input as bytes: the network sees (pixel - mean) * scale, each a number "
        "or a/b/c per channel; repeatable",
    )
    group.add_argument(
        "--sign-zero",
        choices=SIGN_ZERO,
        default="exact",
        help="sign of an exact zero where the model says 0",
    )
    group.add_argument(
        "--float-conv",
        choices=FLOAT_CONV,
        default="filtered",
        help="how float convolutions may be computed: with all products, or fewer, rounding more",
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
    _threads_option(group, "threads that kernels are cut for, and that the self-check uses")


def _json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _threads_option(parser: Any, help_text: str = "threads that kernels use at most") -> None:
    parser.add_argument(
        "--threads",
        metavar="N",
        type=_count,
        default=None,
        help=f"{help_text}; by default the CPUs this process may use",
    )


def _device_options(parser: argparse.ArgumentParser) -> None:
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
        type=_count,
        default=None,
        help="how long to wait for a free device of the tracker, and for any answer (300)",
    )


def _compile(verbs: Any) -> None:
    parser = _verb(verbs, "compile", "compile a model to an artifact", commands.compile_)
    parser.add_argument("model", metavar="MODEL", type=Path, help="ONNX file")
    _model_options(parser)
    group = parser.add_argument_group("output")
    group.add_argument(
        "-o",
        "--output",
        metavar="OUT",
        type=Path,
        default=None,
        help="artifact to write; by default MODEL.TARGET.bnncc in the current folder",
    )
    group.add_argument(
        "--report", metavar="FILE.json", type=Path, default=None, help="write the report too"
    )
    group.add_argument(
        "--dump-ir", metavar="DIR", type=Path, default=None, help="write one file per phase to DIR"
    )


def _run(verbs: Any) -> None:
    parser = _verb(verbs, "run", "run an artifact on arrays from a file", commands.run)
    parser.add_argument("artifact", metavar="ARTIFACT", type=Path, help="from `bnncc compile`")
    group = parser.add_argument_group("data")
    group.add_argument(
        "--input", metavar="IN.npz", type=Path, required=True, help="arrays by input name"
    )
    group.add_argument(
        "--output", metavar="OUT.npz", type=Path, required=True, help="arrays by output name"
    )
    _threads_option(parser)
    _device_options(parser)


def _bench(verbs: Any) -> None:
    parser = _verb(verbs, "bench", "time an artifact and each of its kernels", commands.bench)
    parser.add_argument("artifact", metavar="ARTIFACT", type=Path, help="from `bnncc compile`")
    _threads_option(parser)
    _device_options(parser)
    parser.add_argument(
        "--repeat", metavar="N", type=_count, default=200, help="timed runs of the network"
    )
    _json_option(parser)


def _explain(verbs: Any) -> None:
    parser = _verb(
        verbs, "explain", "say how each layer is computed, or why not in bits", commands.explain
    )
    parser.add_argument(
        "file", metavar="MODEL|ARTIFACT", type=Path, help="ONNX file or compiled artifact"
    )
    _model_options(parser)
    _json_option(parser)


def _verify(verbs: Any) -> None:
    parser = _verb(
        verbs, "verify", "compare an artifact with its model, layer by layer", commands.verify
    )
    parser.add_argument("model", metavar="MODEL", type=Path, help="ONNX file")
    parser.add_argument("artifact", metavar="ARTIFACT", type=Path, help="compiled from it")
    group = parser.add_argument_group("data")
    group.add_argument(
        "--input", metavar="IN.npz", type=Path, default=None, help="arrays instead of random ones"
    )
    group.add_argument("--seed", metavar="N", type=int, default=0, help="of the random inputs")
    _threads_option(parser)
    _device_options(parser)
    _json_option(parser)


def _deploy(verbs: Any) -> None:
    parser = _verb(
        verbs, "deploy", "bring an artifact to a device, check and time it there", commands.deploy
    )
    parser.add_argument("artifact", metavar="ARTIFACT", type=Path, help="from `bnncc compile`")
    _device_options(parser)
    _threads_option(parser)
    parser.add_argument(
        "--repeat",
        metavar="N",
        type=_count,
        default=None,
        help="timed runs; by default about two seconds of them",
    )
    _json_option(parser)


def _device_kit(verbs: Any) -> None:
    parser = _verb(
        verbs, "device-kit", "put together the server and runtime of a device", commands.device_kit
    )
    parser.add_argument(
        "--target",
        metavar="T",
        required=True,
        help="name (`bnncc targets` lists them) or target file",
    )
    parser.add_argument(
        "-o", "--output", metavar="DIR", type=Path, required=True, help="folder to make"
    )


def _targets(verbs: Any) -> None:
    parser = _verb(verbs, "targets", "list the targets, or describe one", commands.targets)
    parser.add_argument("name", metavar="NAME", nargs="?", default=None, help="target or file")
    _json_option(parser)
