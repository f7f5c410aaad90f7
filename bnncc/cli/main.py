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
from typing import Any

from bnncc._version import __version__
from bnncc.cli import commands, tune_commands
from bnncc.cli.arguments import (
    FORMATS,
    Parser,
    add,
    add_verb,
    bundle_options,
    count,
    device_options,
    json_option,
    limit_options,
    model_options,
    params_option,
    path,
    seed,
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
    for verb in (
        *(_compile, _run, _bench, _explain, _verify, _tune, _records),
        *(_deploy, _device_kit, _targets),
    ):
        verb(verbs)
    return parser


def _compile(verbs: Any) -> None:
    parser = add_verb(verbs, "compile", "compile a model to an artifact", commands.compile_)
    add(parser, "model", _MODEL, "MODEL", path)
    model_options(parser)
    group = parser.add_argument_group("output")
    add(
        group,
        "-o --output",
        "artifact to write; by default MODEL.TARGET.bnncc in the current folder",
        "OUT",
        path,
    )
    add(
        group,
        "--format",
        "an artifact, or (of CPUs) MODEL.TARGET.tar of kernels and C that need no runtime; by "
        "default an artifact where there is a runtime",
        choices=FORMATS,
    )
    limit_options(parser)
    add(group, "--report", "write the report too", "FILE.json", path)
    add(group, "--dump-ir", "write a file for each step to DIR", "DIR", path)
    add(group, "--time-passes", "print the seconds that each step took", action="store_true")


def _run(verbs: Any) -> None:
    parser = add_verb(verbs, "run", "run an artifact on arrays from a file", commands.run)
    add(parser, "artifact", "from `bnncc compile`", "ARTIFACT", path)
    group = parser.add_argument_group("data")
    add(group, "--input", "arrays by input name", "IN.npz", path, required=True)
    add(group, "--output", "arrays by output name", "OUT.npz", path, required=True)
    add(parser, "--selfcheck", "first run it on inputs with known outputs", action="store_true")
    threads_option(parser)
    device_options(parser)


def _bench(verbs: Any) -> None:
    parser = add_verb(verbs, "bench", "time an artifact and each of its kernels", commands.bench)
    add(parser, "artifact", "from `bnncc compile`", "ARTIFACT", path)
    threads_option(parser)
    device_options(parser)
    bundle_options(
        parser,
        "Time it on a machine without bnncc and TVM, as one with a GPU; see docs/tuning.md.",
        "write a bundle that times it there",
        "print the times in a bundle's results",
    )
    add(parser, "--repeat", "timed runs of the network", "N", count, default=200)
    json_option(parser)


def _explain(verbs: Any) -> None:
    parser = add_verb(
        verbs, "explain", "say how each layer is computed, or why not in bits", commands.explain
    )
    add(parser, "file", f"{_MODEL}, or compiled artifact", "MODEL|ARTIFACT", path)
    model_options(parser)
    limit_options(parser)
    json_option(parser)


def _verify(verbs: Any) -> None:
    parser = add_verb(
        verbs, "verify", "compare an artifact with its model, layer by layer", commands.verify
    )
    add(parser, "model", _MODEL, "MODEL", path)
    add(parser, "artifact", "compiled from it", "ARTIFACT", path)
    params_option(parser)
    group = parser.add_argument_group("data")
    add(group, "--input", "arrays instead of random ones", "IN.npz", path)
    add(group, "--seed", "of the random inputs", "N", seed, default=0)
    threads_option(parser)
    device_options(parser)
    json_option(parser)


def _deploy(verbs: Any) -> None:
    parser = add_verb(
        verbs, "deploy", "bring an artifact to a device, check and time it there", commands.deploy
    )
    add(parser, "artifact", "from `bnncc compile`", "ARTIFACT", path)
    device_options(parser)
    threads_option(parser)
    add(parser, "--repeat", "timed runs; by default about two seconds of them", "N", count)
    json_option(parser)


def _device_kit(verbs: Any) -> None:
    parser = add_verb(
        verbs, "device-kit", "put together the server and runtime of a device", commands.device_kit
    )
    add(parser, "--target", "name (`bnncc targets` lists them) or target file", "T", required=True)
    add(parser, "-o --output", "folder to make", "DIR", path, required=True)


def _targets(verbs: Any) -> None:
    parser = add_verb(verbs, "targets", "list the targets, or describe one", commands.targets)
    add(parser, "name", "target or file", "NAME", nargs="?")
    json_option(parser)


def _tune(verbs: Any) -> None:
    parser = add_verb(
        verbs, "tune", "search the fastest schedule of each kernel of a model", tune_commands.tune
    )
    add(parser, "models", f"{_MODEL}; several with --bundle", "MODEL", path, nargs="*")
    model_options(parser)
    group = parser.add_argument_group("search")
    add(
        group,
        "--trials",
        "kernels to try in all, those of earlier runs into the same records included; with "
        "--bundle, to build",
        "N",
        count,
        default=512,
    )
    add(group, "--time-limit", "begin nothing later", "SECONDS", count)
    add(
        group,
        "--kernels",
        "only kernels whose description, as the table shows it, matches",
        "REGEX",
    )
    add(group, "--jobs", "kernels built at a time", "N", count)
    add(
        group,
        "--measure",
        "time on a machine, or instructions in an emulated Arm processor, which stands in for "
        "hardware that is not there",
        choices=("clock", "instructions"),
        default="clock",
    )
    add(
        group,
        "--lock",
        "hold a lock on this file while kernels are measured, where others measure too",
        "FILE",
        path,
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
            add(action, "sources", "folder", "FROM", path, nargs="+")
        add(
            action,
            "folder",
            "folder of records" + ("; by default bnncc's own" if name == "list" else ""),
            "DIR" if name != "list" else "[DIR]",
            path,
            nargs="?" if name == "list" else None,
        )
        add(action, "--target", "of this target only, a name or file", "T")
        if name == "prune":
            add(action, "--keep", "records of each kernel (1)", "N", count, default=1)
        json_option(action)
