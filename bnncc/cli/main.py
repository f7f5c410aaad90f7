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
from typing import Any

from bnncc._version import __version__
from bnncc.cli import commands, tune_commands
from bnncc.cli.arguments import (
    Parser,
    add_verb,
    bundle_options,
    count,
    device_options,
    json_option,
    model_options,
    params_option,
    threads_option,
)
from bnncc.console import Console, library_output_hidden
from bnncc.errors import BnnccError

EXIT_OK, EXIT_BUG, EXIT_INTERRUPTED = 0, 70, 130
_MODEL = "file of ONNX, PyTorch (.pt2) or TensorFlow Lite, or network of MXNet (NAME-symbol.json)"


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
    if args.own_process:
        # TVM imports torch where it is installed, for two seconds; no verb has a use for it.
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
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


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="bnncc",
        description="Compile binary and few-bit neural networks to exact, fast machine code.",
        epilog="`bnncc VERB --help` lists a verb's options.",
    )
    parser.add_argument("--version", action="version", version=f"bnncc {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for add in (
        *(_compile, _run, _bench, _explain, _verify, _tune, _records),
        *(_deploy, _device_kit, _targets),
    ):
        add(verbs)
    return parser


def _compile(verbs: Any) -> None:
    parser = add_verb(verbs, "compile", "compile a model to an artifact", commands.compile_)
    parser.add_argument("model", metavar="MODEL", type=Path, help=_MODEL)
    model_options(parser)
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
        "--dump-ir",
        metavar="DIR",
        type=Path,
        default=None,
        help="write a file for each step to DIR",
    )
    group.add_argument(
        "--time-passes", action="store_true", help="print the seconds that each step took"
    )


def _run(verbs: Any) -> None:
    parser = add_verb(verbs, "run", "run an artifact on arrays from a file", commands.run)
    parser.add_argument("artifact", metavar="ARTIFACT", type=Path, help="from `bnncc compile`")
    group = parser.add_argument_group("data")
    group.add_argument(
        "--input", metavar="IN.npz", type=Path, required=True, help="arrays by input name"
    )
    group.add_argument(
        "--output", metavar="OUT.npz", type=Path, required=True, help="arrays by output name"
    )
    parser.add_argument(
        "--selfcheck", action="store_true", help="first run it on inputs with known outputs"
    )
    threads_option(parser)
    device_options(parser)


def _bench(verbs: Any) -> None:
    parser = add_verb(verbs, "bench", "time an artifact and each of its kernels", commands.bench)
    parser.add_argument("artifact", metavar="ARTIFACT", type=Path, help="from `bnncc compile`")
    threads_option(parser)
    device_options(parser)
    bundle_options(
        parser,
        "Time it on a machine without bnncc and TVM, as one with a GPU; see docs/tuning.md.",
        "write a bundle that times it there",
        "print the times in a bundle's results",
    )
    parser.add_argument(
        "--repeat", metavar="N", type=count, default=200, help="timed runs of the network"
    )
    json_option(parser)


def _explain(verbs: Any) -> None:
    parser = add_verb(
        verbs, "explain", "say how each layer is computed, or why not in bits", commands.explain
    )
    parser.add_argument(
        "file", metavar="MODEL|ARTIFACT", type=Path, help=f"{_MODEL}, or compiled artifact"
    )
    model_options(parser)
    json_option(parser)


def _verify(verbs: Any) -> None:
    parser = add_verb(
        verbs, "verify", "compare an artifact with its model, layer by layer", commands.verify
    )
    parser.add_argument("model", metavar="MODEL", type=Path, help=_MODEL)
    parser.add_argument("artifact", metavar="ARTIFACT", type=Path, help="compiled from it")
    params_option(parser)
    group = parser.add_argument_group("data")
    group.add_argument(
        "--input", metavar="IN.npz", type=Path, default=None, help="arrays instead of random ones"
    )
    group.add_argument("--seed", metavar="N", type=int, default=0, help="of the random inputs")
    threads_option(parser)
    device_options(parser)
    json_option(parser)


def _deploy(verbs: Any) -> None:
    parser = add_verb(
        verbs, "deploy", "bring an artifact to a device, check and time it there", commands.deploy
    )
    parser.add_argument("artifact", metavar="ARTIFACT", type=Path, help="from `bnncc compile`")
    device_options(parser)
    threads_option(parser)
    parser.add_argument(
        "--repeat",
        metavar="N",
        type=count,
        default=None,
        help="timed runs; by default about two seconds of them",
    )
    json_option(parser)


def _device_kit(verbs: Any) -> None:
    parser = add_verb(
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
    parser = add_verb(verbs, "targets", "list the targets, or describe one", commands.targets)
    parser.add_argument("name", metavar="NAME", nargs="?", default=None, help="target or file")
    json_option(parser)


def _tune(verbs: Any) -> None:
    parser = add_verb(
        verbs, "tune", "search the fastest schedule of each kernel of a model", tune_commands.tune
    )
    parser.add_argument(
        "models", metavar="MODEL", type=Path, nargs="*", help=f"{_MODEL}; several with --bundle"
    )
    model_options(parser)
    group = parser.add_argument_group("search")
    group.add_argument(
        "--trials",
        metavar="N",
        type=count,
        default=512,
        help="kernels to try in all, those of earlier runs into the same records included; with "
        "--bundle, to build",
    )
    group.add_argument(
        "--time-limit", metavar="SECONDS", type=count, default=None, help="begin nothing later"
    )
    group.add_argument(
        "--kernels",
        metavar="REGEX",
        default=None,
        help="only kernels whose description, as the table shows it, matches",
    )
    group.add_argument(
        "--jobs", metavar="N", type=count, default=None, help="kernels built at a time"
    )
    group.add_argument(
        "--measure",
        choices=("clock", "instructions"),
        default="clock",
        help="time on a machine, or instructions in an emulated Arm processor, which stands in for "
        "hardware that is not there",
    )
    group.add_argument(
        "--lock",
        metavar="FILE",
        type=Path,
        default=None,
        help="hold a lock on this file while kernels are measured, where others measure too",
    )
    device_options(parser)
    bundle_options(
        parser,
        "Measure on a machine without bnncc and TVM, as one with a GPU; see docs/tuning.md.",
        "write a bundle that tries kernels there, instead of measuring",
        "put a bundle's results on record, instead of measuring",
    )
    json_option(parser)


def _records(verbs: Any) -> None:
    parser = add_verb(
        verbs, "records", "list, prune or merge tuning records", tune_commands.records
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    for name, text in (
        ("list", "what is on record"),
        ("prune", "keep the best records of each kernel"),
        ("merge", "add the records of other folders"),
    ):
        action = actions.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False
        )
        if name == "merge":
            action.add_argument("sources", metavar="FROM", type=Path, nargs="+", help="folder")
        action.add_argument(
            "folder",
            metavar="DIR" if name != "list" else "[DIR]",
            type=Path,
            nargs="?" if name == "list" else None,
            help="folder of records" + ("; by default bnncc's own" if name == "list" else ""),
        )
        action.add_argument(
            "--target", metavar="T", default=None, help="of this target only, a name or file"
        )
        if name == "prune":
            action.add_argument(
                "--keep", metavar="N", type=count, default=1, help="records of each kernel (1)"
            )
        json_option(action)
