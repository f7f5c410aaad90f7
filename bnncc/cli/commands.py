"""The verbs of the command line; each imports the heavy modules it needs."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnncc.cli import bundle_commands
from bnncc.cli.asked import (
    as_json,
    by_name,
    check_bundle,
    check_outputs,
    device_of,
    options_of,
    read_json,
)  # fmt: skip
from bnncc.console import Console
from bnncc.errors import BnnccError, TargetError, UsageError, VerificationError, unreadable
from bnncc.options import CompileOptions
from bnncc.progress import START, phase

if TYPE_CHECKING:
    from bnncc.codegen.c_network import CNetwork
    from bnncc.runtime.artifact import Artifact
    from bnncc.targets.spec import TargetSpec
    from bnncc.trace import Trace

_TAR_NAME = (b"manifest.json\0", b"lib.so\0", b"selfcheck.npz\0", b"./")


def compile_(args: Namespace, console: Console) -> int:
    """Compile a model and write the artifact."""
    start = time.perf_counter()
    options = options_of(args)
    from bnncc.files import check_folder, model_stem, names_folder, output_name, write_atomic
    from bnncc.targets.catalog import resolve
    from bnncc.trace import Trace

    target = resolve(args.target)
    form = args.format or target.default_format
    _check_limits(args, form, target)
    suffix = "bnncc" if form == "artifact" else "tar"
    output = args.output or Path(f"{model_stem(args.model)}.{_target_label(args.target)}.{suffix}")
    if form != "artifact" and names_folder(output):
        check_folder(output)
        check_outputs(args, report=args.report)
    else:
        check_outputs(args, output=output, report=args.report)
    trace = Trace(args.dump_ir)
    artifact = _compiled(args.model, options, console, trace, form)
    report = artifact.report
    _require_fits(args, report, console)
    size = artifact.save(output)
    if args.report is not None:
        write_atomic(args.report, [as_json(report).encode()])
    summary = report["summary"]
    layers = f"{summary['binary']} binary, {summary['few_bit']} few-bit, {summary['float']} float"
    tuned = f"tuning records used for {summary['tuned']} of {summary['kernels']} kernels"
    if not summary["tuned"]:
        tuned = "no tuning records used"
    console.result(
        f"{output_name(output)}: {size:,} bytes, layers: {layers}, {tuned}, "
        f"{time.perf_counter() - start:.1f} s"
    )
    if args.time_passes:
        table = "\n".join(trace.table())
        if Path("-") in (output, args.report):
            console.line(table)
        else:
            console.data(table + "\n")
    from bnncc.verification.confirm import not_run

    if note := not_run(target, output, form):
        console.result(note)
    return 0


def run(args: Namespace, console: Console) -> int:
    """Run an artifact on arrays from a file.

    Raises
    ------
    UsageError
        If the file to write cannot have all outputs.
    """
    _runtime_only(args)
    from bnncc.files import npy_bytes, npz_bytes, output_name, write_atomic

    check_outputs(args, output=args.output)
    alone = args.output.suffix == ".npy"
    with _loaded(args) as artifact:
        if args.selfcheck:
            artifact.require_selfcheck()
        if alone and len(artifact.outputs) > 1:
            raise UsageError(
                f"{args.output}: an .npy file has one array, the network {len(artifact.outputs)} "
                "outputs",
                hint=f"write {args.output.with_suffix('.npz')}",
            )
        arrays = artifact.read_inputs(args.input)
        with phase("run"):
            outputs = artifact.run(arrays)
    content = npy_bytes(*outputs.values()) if alone else npz_bytes(outputs)
    write_atomic(args.output, [content])
    made = (f"{name} {array.dtype}{list(array.shape)}" for name, array in outputs.items())
    console.progress(f"{output_name(args.output)}: {', '.join(made)}")
    return 0


def bench(args: Namespace, console: Console) -> int:
    """Time an artifact."""
    check_bundle(args)
    if args.bundle is not None:
        if args.trace is not None:
            raise UsageError("--trace needs times, and --bundle measures none here")
        for name in ("batch", "dim"):
            if getattr(args, name):
                raise UsageError(f"--{name} and --bundle cannot be combined")
        return bundle_commands.write_bench(args, console)
    _runtime_only(args)
    from bnncc.files import STDOUT, write_atomic
    from bnncc.runtime import runner

    for name in ("batch", "dim") if args.results is not None else ():
        if getattr(args, name):
            raise UsageError(f"--{name} and --import cannot be combined")
    check_outputs(args, trace=args.trace, **{"printed times": STDOUT})
    if args.results is not None:
        result = bundle_commands.imported_bench(args, console)
    else:
        with _loaded(args) as artifact:
            result = runner.bench(
                artifact, threads=args.threads, repeat=args.repeat, batch=args.batch,
                dims=by_name("dim", args.dim),
            )  # fmt: skip
    if args.trace is not None:
        from bnncc.report.trace import trace

        write_atomic(args.trace, [as_json(trace(result)).encode()])
    console.data(as_json(result) if args.json else runner.bench_text(result, _width()) + "\n")
    return 0


def explain(args: Namespace, console: Console) -> int:
    """Show how each layer of a model or artifact is computed: as text, JSON or a page."""
    from bnncc import report
    from bnncc.files import STDOUT, output_name, write_atomic
    from bnncc.report import device, html
    from bnncc.runtime.artifact import Artifact
    from bnncc.targets.catalog import resolve

    bench = None if args.bench is None else read_json(args.bench)
    printed = args.json or (args.html is None and args.annotate is None)
    outputs = {
        "page": args.html,
        "model": args.annotate,
        "printed data": STDOUT if printed else None,
    }
    check_outputs(args, **outputs)
    if _is_artifact(args.file):
        if args.annotate is not None:
            raise UsageError(
                f"{args.file}: is an artifact, and --annotate needs the model it was compiled from"
            )
        if options_of(args) != CompileOptions():
            raise UsageError(
                f"{args.file}: is an artifact, which is compiled already",
                hint="`--target` and other options of `bnncc compile` need its model",
            )
        _check_limits(args, "artifact")
        content = Artifact.load(args.file, check_host=False).report
    else:
        target = resolve(args.target)
        _check_limits(args, target.default_format, target)
        content = _compiled(args.file, options_of(args), console).report
    _require_fits(args, content, console)
    if args.annotate is not None:
        from bnncc.frontend.annotate import annotated

        verdicts = report.verdicts(content, bench)
        model = annotated(args.file, verdicts, args.annotate.absolute().parent, params=args.params)
        write_atomic(args.annotate, [model])
        console.result(f"{output_name(args.annotate)}: {len(model):,} bytes")
    if args.html is not None:
        page = html.page(content, bench).encode("utf-8", "replace")
        write_atomic(args.html, [page])
        console.result(f"{output_name(args.html)}: {len(page):,} bytes")
    if args.json:
        console.data(as_json(content))
    elif printed:
        said = report.text(content, width=_width(), sort=args.sort, bench=bench)
        console.data("\n".join([said, *device.footprint(content, _width())]) + "\n")
    return 0


def verify(args: Namespace, console: Console) -> int:
    """Compare an artifact with its model.

    Returns
    -------
    int
        Exit code: 1 if they differ, or if accuracy is below the minimum.

    Raises
    ------
    UsageError
        If options cannot be combined.
    """
    if args.labels is None and (args.min_accuracy is not None or args.scores is not None):
        raise UsageError("--min-accuracy and --scores need --labels")
    if args.labels is not None and args.input is None:
        raise UsageError(
            "--labels needs the labelled examples: give --input",
            hint="one file may hold both: --input test.npz --labels test.npz",
        )
    if _is_artifact(args.model):
        raise UsageError(
            f"{args.model}: this is a bnncc artifact, expected its model",
            hint="the model comes first: bnncc verify MODEL ARTIFACT",
        )
    with phase(START):
        from bnncc import agreement
        from bnncc.runtime.accuracy import read_examples

    with _loaded(args) as artifact:
        arrays = labels = None
        if args.labels is not None:
            arrays, labels = read_examples(artifact, args.input, args.labels)
        elif args.input is not None:
            arrays = artifact.read_inputs(args.input)
        result = agreement.verify(
            args.model, artifact, arrays, seed=args.seed, params=args.params,
            labels=labels, scores=args.scores, min_accuracy=args.min_accuracy,
        )  # fmt: skip
    console.data(as_json(result) if args.json else agreement.text(result, _width()) + "\n")
    return 0 if result["passed"] else 1


def deploy(args: Namespace, console: Console) -> int:
    """Upload an artifact to a device, check it and time it.

    Returns
    -------
    int
        Exit code: 1 if its outputs are wrong.

    Raises
    ------
    UsageError
        If there is no device among the options.
    VerificationError
        If the device's outputs are wrong.
    """
    if args.rpc is None and args.tracker is None:
        raise UsageError(
            "deploy needs a device: give --rpc HOST:PORT, or --tracker HOST:PORT --key K"
        )
    _runtime_only(args)
    from bnncc.remote import deploy as deployment

    with _loaded(args) as artifact:
        result = deployment.deploy(artifact, threads=args.threads, repeat=args.repeat)
    console.data(as_json(result) if args.json else deployment.text(result) + "\n")
    if not result["passed"]:
        raise VerificationError(
            f"{args.artifact}: wrong outputs on the device",
            hint="`bnncc verify MODEL ARTIFACT` with the same device finds the layer, or that a "
            "value lies within rounding of a sign's zero",
        )
    return 0


def device_kit(args: Namespace, console: Console) -> int:
    """Build the server and runtime that a device needs."""
    from bnncc.remote import kit
    from bnncc.targets.catalog import resolve

    start = time.perf_counter()
    made = kit.make(args.output, resolve(args.target), progress=console.progress)
    console.result(
        f"{args.output}: {made.size:,} bytes, server and TVM {made.tvm} for {made.arch}, "
        f"needs glibc {made.glibc} or newer, {time.perf_counter() - start:.1f} s"
    )
    return 0


def targets(args: Namespace, console: Console) -> int:
    """List targets or describe one.

    Raises
    ------
    BnnccError
        If there is no target of that name.
    """
    from dataclasses import asdict

    from bnncc.report import table
    from bnncc.targets import catalog

    names = catalog.names() if args.name is None else [args.name]
    rows = [("target", "processor", "vector", "runs here")]
    data: list[dict[str, Any]] = []
    for name in names:
        try:
            spec = catalog.resolve(name)
        except BnnccError:
            if args.name is not None:
                raise
            continue
        missing = catalog.missing_features(spec)
        data.append({**asdict(spec), "runs_here": not missing, "missing": missing})
        here = _obstacle(spec, missing) or "yes"
        vector = spec.engine or f"{spec.vector_bits} bits"
        rows.append((name, ", ".join(spec.gpus) or spec.mcpu, vector, here))
    if args.json:
        console.data(as_json(data if args.name is None else data[0]))
    elif args.name is None:
        console.data("\n".join(table(rows, width=_width(), wraps=(1, 3))) + "\n")
    else:
        shown = {**data[0], "runs_here": rows[1][-1], "missing": ""}
        pairs = [
            (key, " ".join(value) if isinstance(value, tuple | list) else str(value))
            for key, value in shown.items()
            if value
        ]
        console.data("\n".join(table(pairs, width=_width(), wraps=(1,))) + "\n")
    return 0


def _obstacle(spec: TargetSpec, missing: Sequence[str]) -> str:
    """Return why this machine does not run code for `spec`, which needs `missing`; else nothing."""
    from bnncc.targets.host import normal_arch

    if missing and spec.arch and normal_arch(spec.arch) != normal_arch(platform.machine()):
        return f"no: code for {spec.arch}"
    return f"no: lacks {', '.join(missing)}" if missing else ""


def _compiled(
    model: Path, options: CompileOptions, console: Console, trace: Trace | None = None,
    form: str = "",
) -> Artifact | CNetwork:  # fmt: skip
    from bnncc.targets.catalog import resolve
    from bnncc.trace import Trace

    target = resolve(str(options.target))  # before TVM costs seconds
    console.progress(f"compiling {model}")
    trace = trace or Trace()
    with trace.timed(START, "load TVM's libraries and Python modules"):
        from bnncc.driver import compile_c, compile_model

    form = form or target.default_format
    artifact: Artifact | CNetwork
    if form == "artifact":
        artifact = compile_model(model, options, trace)
    else:
        artifact = compile_c(model, options, trace, form)
    for line in artifact.report["warnings"]:
        console.warning(line)
    return artifact


def _check_limits(args: Namespace, form: str, target: TargetSpec | None = None) -> None:
    """Refuse limits of flash and RAM where bnncc does not know them, before it compiles."""
    if args.ram is None and args.flash is None:
        return
    if form != "c":
        raise UsageError(
            "--ram and --flash need a network compiled to C",
            hint="`bnncc compile --format c`, or a target such as cortex-m4",
        )
    if target is not None and target.kind != "cuda" and not target.has_known_size:
        raise UsageError(
            f"--ram and --flash cannot be checked for {target.name}: your C compiler determines "
            "the size of code and stack",
            hint="name the processor, for example --target cortex-m4",
        )


def _require_fits(args: Namespace, content: dict[str, Any], console: Console) -> None:
    """Fail if a network does not fit the device, and print its memory table."""
    if args.ram is None and args.flash is None:
        return
    from bnncc.report import device

    if over := device.beyond(content, ram=args.ram, flash=args.flash):
        console.result("\n".join(device.footprint(content)))
        raise TargetError(
            f"{content['model']}: does not fit {content['target']}: {'; '.join(over)}",
            hint="the table above lists what needs the memory",
        )


@contextlib.contextmanager
def _loaded(args: Namespace) -> Iterator[Artifact]:
    """Load ``args.artifact`` to be run here, or on the device that the options name."""
    from bnncc.runtime.artifact import Artifact

    where = device_of(args)
    if where is None:
        from bnncc.runtime.threads import prepare

        prepare(args.threads)
        with phase("load"):
            artifact = Artifact.load(args.artifact)
        yield artifact
        return
    artifact = Artifact.load(args.artifact, check_host=False)  # damaged, it stays here
    from bnncc import remote

    with remote.connect(**where) as device:
        if args.threads is not None:
            device.set_threads(args.threads)
        yield artifact.on_device(device)


def _is_artifact(path: Path) -> bool:
    """Tell by its content whether `path` is an artifact, so that any name works."""
    try:
        with open(path, "rb") as file:
            head = file.read(512)
    except OSError as error:
        raise UsageError(unreadable(path, error)) from error
    if head[257:262] == b"ustar" or head.startswith(_TAR_NAME):
        return True
    return path.suffix == ".bnncc"


def _width() -> int:
    from bnncc.report import WIDTH

    return shutil.get_terminal_size((WIDTH, 24)).columns


def _target_label(target: str) -> str:
    return Path(target).stem if target.endswith(".json") else target


def _runtime_only(args: Namespace) -> None:
    """Load TVM without its compiler, which is all that running needs."""
    if args.own_process and "tvm" not in sys.modules:
        os.environ.setdefault("TVM_USE_RUNTIME_LIB", "1")
