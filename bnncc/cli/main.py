"""The command line: parse, dispatch, and report what went wrong in one line.

Data goes to stdout, everything else to stderr. Nothing here imports TVM before a verb needs it.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from bnncc._version import __version__
from bnncc.cli import commands, tune_commands
from bnncc.cli.arguments import (
    FORMATS,
    Parser,
    add,
    add_verb,
    arranged,
    bundle_options,
    count,
    device_options,
    dims_option,
    fraction,
    json_option,
    limit_options,
    model_options,
    params_option,
    path,
    renamed,
    seed,
    threads_option,
)
from bnncc.cli.asked import check_inputs
from bnncc.console import Bar, Console, library_output_hidden
from bnncc.errors import BnnccError, onnx_needed
from bnncc.progress import SHARES, listening
from bnncc.report import SORTS

EXIT_OK, EXIT_BUG, EXIT_INTERRUPTED = 0, 70, 130
_MODEL = "ONNX, PyTorch (.pt2), TensorFlow Lite or MXNet (NAME-symbol.json) file"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments without the program's name; by default those of the process.

    Returns
    -------
    int
        Exit code: 0 success, 1 failure, 2 bad usage, 70 bug in bnncc, 130 interrupted.
    """
    if argv is None:
        _open_streams()
    parser = _parser()
    try:
        words, old = renamed(sys.argv[1:] if argv is None else list(argv))
        words = arranged(words)
        if words and words[0].startswith("-") and not parser.knows(words[0]):
            parser.refuse(words)
        args, left = parser.parse_known_args(words)
        if left:
            args.parser.refuse(left)
    except SystemExit as done:
        try:
            Console().data("")  # so that help that cannot be written is a failure
        except BrokenPipeError:
            pass
        except BnnccError as error:
            Console().error(error)
            return error.exit_code
        finally:
            _flush_stdout()
        return int(done.code or 0)
    args.own_process, args.deprecated = argv is None, old
    if args.own_process:
        # TVM imports torch where it is installed, for two seconds; no verb has a use for it.
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    with _interrupts() as interrupted:
        if args.own_process and args.verbose < 2:
            with library_output_hidden() as written:
                return _dispatch(args, written, interrupted)
        return _dispatch(args, lambda: "", interrupted)


@contextlib.contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Note whether Ctrl-C is pressed: TVM's C++ code makes a `RuntimeError` of the exception.

    Yields
    ------
    Callable
        Returns whether it was pressed in this context.
    """
    pressed = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        signal.default_int_handler(number, frame)

    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a shell may ignore it
    try:
        if usual:
            signal.signal(signal.SIGINT, note)
    except ValueError:  # not in the main thread, which gets all signals
        usual = False
    try:
        yield lambda: pressed
    finally:
        if usual:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _dispatch(
    args: argparse.Namespace, written: Callable[[], str], interrupted: Callable[[], bool]
) -> int:
    """Run the verb; `written` returns what libraries had to say meanwhile."""
    console = Console(verbosity=args.verbose - args.quiet)
    for line in args.deprecated:
        console.warning(line)
    try:
        check_inputs(args)
        bar = Bar(console, SHARES.get(args.verb, SHARES[""]))
        with _quiet_libraries(args.verbose), listening(bar), onnx_needed():
            return int(args.run(args, console))
    except KeyboardInterrupt:
        return _stopped(console)
    except BnnccError as error:
        if interrupted():
            return _stopped(console)
        console.error(error)
        return error.exit_code
    except BrokenPipeError:  # who read standard output has seen enough
        return EXIT_OK
    except MemoryError:
        console.error(BnnccError("out of memory"))
        return 1
    except Exception as error:
        if interrupted():
            return _stopped(console)
        if isinstance(error, OSError) and error.errno in _MACHINE:
            console.error(_machine_error(error))
            return 1
        console.line(written() + traceback.format_exc().rstrip())
        console.line("error: this is a bug in bnncc; the lines above say where")
        return EXIT_BUG
    finally:
        _flush_stdout()


def _stopped(console: Console) -> int:
    console.line("interrupted")
    return EXIT_INTERRUPTED


_MACHINE = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ENOMEM),
    *(errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM),
}
"""What the machine, not bnncc, is to blame for, wherever it happens."""


def _machine_error(error: OSError) -> BnnccError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return BnnccError(
        f"{error.filename or 'temporary files'}: {error.strerror}",
        hint="free some space, or set TMPDIR to a folder that has some" if full else None,
    )


def _flush_stdout() -> None:
    """Flush standard output, or keep Python from complaining at exit that it cannot be flushed."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_streams() -> None:
    """Give closed standard streams a file, whose number the next file opened would get else."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stdout is not None and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # the locale may lack a name's letters


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


def _parser() -> Parser:
    parser = Parser(
        prog="bnncc",
        description="Compile binary and few-bit neural networks to exact, fast machine code.",
        epilog="`bnncc help VERB` lists the options of a verb.",
    )
    parser.add_argument("--version", action="version", version=f"bnncc {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for verb in (
        *(_compile, _run, _bench, _explain, _verify, _tune, _records),
        *(_deploy, _device_kit, _targets, _completion),
    ):
        verb(verbs)
    return parser


def _completion(verbs: Any) -> None:
    parser = add_verb(verbs, "completion", "print a shell's completion script", _complete)
    add(parser, "shell", "which shell", choices=("bash", "zsh", "fish"))


def _complete(args: argparse.Namespace, console: Console) -> int:
    """Print a script that completes verbs, options, targets and files.

    Raises
    ------
    BnnccError
        If shtab is not installed.
    """
    try:
        import shtab
    except ImportError as error:
        raise BnnccError(
            "completion scripts are written by shtab, which is not installed",
            hint="pip install 'bnncc[completion]'",
        ) from error

    from bnncc.targets.catalog import names

    def mark(parser: argparse.ArgumentParser) -> None:
        for action in parser._actions:
            if action.type is path:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            elif "--target" in action.option_strings:
                action.choices = names()
            elif isinstance(action, argparse._SubParsersAction):
                for child in action.choices.values():
                    mark(child)

    parser = _parser()
    mark(parser)
    console.data(shtab.complete(parser, args.shell))
    return 0


def _compile(verbs: Any) -> None:
    parser = add_verb(verbs, "compile", "compile a model to an artifact", commands.compile_)
    add(parser, "model", _MODEL, "MODEL", path)
    model_options(parser)
    group = parser.add_argument_group("output")
    add(
        group,
        "-o --output",
        "file to write, `-` for standard output; default: MODEL.TARGET.bnncc, or .tar, in the "
        "current folder",
        "OUT",
        path,
    )
    add(
        group,
        "--format",
        "artifact: one file for `bnncc run` and TVM's runtime; c (CPUs only): kernels and C code "
        "that need no runtime; wasm: for browsers and Node.js; c and wasm are MODEL.TARGET.tar, or "
        "a folder if OUT has no suffix; default: the first of these that the target supports",
        choices=FORMATS,
    )
    limit_options(parser)
    add(group, "--report", "also write the report", "FILE.json", path)
    add(group, "--dump-ir", "write the result of each step to DIR", "DIR", path)
    add(group, "--time-passes", "print how long each step took", action="store_true")


def _run(verbs: Any) -> None:
    parser = add_verb(verbs, "run", "run an artifact on the arrays in a file", commands.run)
    add(parser, "artifact", "from `bnncc compile`", "ARTIFACT", path)
    group = parser.add_argument_group("data")
    add(
        group,
        "--input",
        "an array per input, by name; or .npy, for one input",
        "IN.npz",
        path,
        required=True,
    )
    add(
        group,
        "--output",
        "an array per output; or .npy, for one output; `-`: standard output",
        "OUT.npz",
        path,
        required=True,
    )
    add(parser, "--selfcheck", "first check it on inputs with known outputs", action="store_true")
    threads_option(parser)
    device_options(parser)


def _bench(verbs: Any) -> None:
    parser = add_verb(verbs, "bench", "time an artifact and each of its kernels", commands.bench)
    add(parser, "artifact", "from `bnncc compile`", "ARTIFACT", path)
    threads_option(parser)
    device_options(parser)
    bundle_options(
        parser,
        "Time it on a machine without bnncc and TVM; see docs/tuning.md.",
        "write a bundle to run on that machine",
        "print the times that a bundle measured",
    )
    add(parser, "--repeat", "number of timed runs", "N", count, default=200)
    add(
        parser,
        "--trace",
        "also write the times as a trace for Perfetto or Chrome",
        "FILE.json",
        path,
    )
    add(parser, "--batch", "size of a dynamic batch (default: 1)", "N", count)
    dims_option(parser)
    json_option(parser)


def _explain(verbs: Any) -> None:
    parser = add_verb(
        verbs,
        "explain",
        "show how each layer is computed, and why not in bits",
        commands.explain,
    )
    add(parser, "file", f"{_MODEL}, or an artifact", "MODEL|ARTIFACT", path)
    group = parser.add_argument_group("output")
    add(group, "--html", "write a page to look at, instead of printing text", "FILE.html", path)
    add(
        group,
        "--annotate",
        "write the model as ONNX, with the verdict on each node in its metadata, for Netron",
        "OUT.onnx",
        path,
    )
    add(
        group,
        "--bench",
        "show these times, from `bnncc bench --json`, instead of estimates",
        "FILE.json",
        path,
    )
    add(group, "--sort", "order of the rows of the text", choices=SORTS, default="order")
    model_options(parser)
    limit_options(parser)
    json_option(parser)


def _verify(verbs: Any) -> None:
    parser = add_verb(
        verbs, "verify", "check an artifact against its model, layer by layer", commands.verify
    )
    add(parser, "model", _MODEL, "MODEL", path)
    add(parser, "artifact", "compiled from MODEL", "ARTIFACT", path)
    params_option(parser)
    group = parser.add_argument_group("data")
    add(group, "--input", "inputs to use instead of random ones", "IN.npz", path)
    add(group, "--seed", "seed of the random inputs", "N", seed, default=0)
    group = parser.add_argument_group("accuracy")
    add(
        group,
        "--labels",
        "class numbers of the examples in --input: .npy, or .npz with the array `labels`",
        "FILE",
        path,
    )
    add(group, "--min-accuracy", "fail below this accuracy, such as 0.9 or 90%%", "A", fraction)
    add(group, "--scores", "output with a score per class; default: the only output", "NAME")
    threads_option(parser)
    device_options(parser)
    json_option(parser)


def _deploy(verbs: Any) -> None:
    parser = add_verb(
        verbs,
        "deploy",
        "upload an artifact to a device, check and time it there",
        commands.deploy,
    )
    add(parser, "artifact", "from `bnncc compile`", "ARTIFACT", path)
    device_options(parser)
    threads_option(parser)
    add(
        parser,
        "--repeat",
        "number of timed runs; default: as many as take 2 s",
        "N",
        count,
    )
    json_option(parser)


def _device_kit(verbs: Any) -> None:
    parser = add_verb(
        verbs, "device-kit", "build the server and runtime that a device needs", commands.device_kit
    )
    add(parser, "--target", "target name (see `bnncc targets`) or target file", "T", required=True)
    add(parser, "-o --output", "folder to create", "DIR", path, required=True)


def _targets(verbs: Any) -> None:
    parser = add_verb(verbs, "targets", "list the targets, or show one in full", commands.targets)
    add(parser, "name", "target name or target file", "NAME", nargs="?")
    json_option(parser)


def _tune(verbs: Any) -> None:
    parser = add_verb(
        verbs, "tune", "search for the fastest schedule of each kernel", tune_commands.tune
    )
    add(parser, "models", f"{_MODEL}; several are allowed with --bundle", "MODEL", path, nargs="*")
    model_options(parser)
    group = parser.add_argument_group("search")
    add(
        group,
        "--trials",
        "total number of kernels to try, including those of earlier runs with the same records; "
        "with --bundle, the number to build",
        "N",
        count,
        default=512,
    )
    add(group, "--time-limit", "start no trial after SECONDS", "SECONDS", count)
    add(
        group,
        "--kernels",
        "tune only kernels whose description, as shown in the table, matches",
        "REGEX",
    )
    text = "number of kernels to build in parallel; default: the number of CPUs available"
    add(group, "--jobs", text, "N", count)
    add(
        group,
        "--measure",
        "what to minimize: time on this machine or a device, or the number of instructions in an "
        "emulated Arm processor, without hardware",
        choices=("time", "instructions"),
        default="time",
    )
    add(
        group,
        "--lock-file",
        "lock this file while measuring, so that several programs can take turns",
        "FILE",
        path,
    )
    device_options(parser)
    bundle_options(
        parser,
        "Measure on a machine without bnncc and TVM; see docs/tuning.md.",
        "write a bundle to run on that machine, instead of measuring",
        "add the results of a bundle to the records, instead of measuring",
    )
    json_option(parser)


def _records(verbs: Any) -> None:
    parser = add_verb(
        verbs, "records", "list, prune or merge tuning records", tune_commands.records
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    for name, text in (
        ("list", "list the kernels and their times"),
        ("prune", "keep only the best records of each kernel"),
        ("merge", "add the records of other folders to DIR"),
    ):
        action = actions.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False
        )
        action.set_defaults(parser=action)
        if name == "merge":
            add(action, "sources", "folder of records to add", "FROM", path, nargs="+")
        add(
            action,
            "folder",
            "folder of records"
            + ("; default: those that come with bnncc" if name == "list" else ""),
            "DIR",
            path,
            nargs="?" if name == "list" else None,
        )
        add(action, "--target", "only this target (name or file)", "T")
        if name == "prune":
            add(
                action,
                "--keep",
                "records to keep per kernel (default: 1)",
                "N",
                count,
                default=1,
            )
        json_option(action)
