"""The command line: messages, exit codes, streams and files."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest

from bnncc.cli import commands
from bnncc.cli import main as cli
from bnncc.errors import BnnccError, UsageError
from bnncc.files import npz_bytes
from bnncc.options import CompileOptions, parse_input_shape, parse_input_uint8
from tests.tiny import expected, tiny

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    tiny().save("tiny.bnncc")
    return tmp_path / "tiny.bnncc"


def bnncc(*args: object, **kwargs: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bnncc", *map(str, args)],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        **kwargs,
    )


def fails(capsys: pytest.CaptureFixture[str], code: int, *args: object) -> str:
    """Run a command that must fail with `code`; return its message."""
    assert cli.main([str(a) for a in args]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert "Traceback" not in err
    return err


def test_help_is_instant_and_loads_no_tvm() -> None:
    program = (
        "import sys; from bnncc.cli.main import main; code = main(['--help'])\n"
        "sys.exit(code or any(m in sys.modules for m in ('tvm', 'numpy', 'onnx')))"
    )
    done = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True)
    assert done.returncode == 0


def test_help_of_each_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    overview = capsys.readouterr().out
    verbs = ["compile", "run", "bench", "explain", "verify", "deploy", "device-kit", "targets"]
    for verb in verbs:
        assert verb in overview
        assert cli.main([verb, "--help"]) == 0
        text = capsys.readouterr().out
        assert "None" not in text
        assert "[]" not in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    from bnncc import __version__

    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"bnncc {__version__}\n"


def test_targets(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["targets"]) == 0
    assert "x86-64-v4-vpopcntdq" in capsys.readouterr().out
    assert cli.main(["targets", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {"x86-64-v2", "x86-64-v3", "x86-64-v4", "native"} <= {t["name"] for t in listed}
    assert cli.main(["targets", "x86-64-v3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mcpu"] == "x86-64-v3"


def test_unknown_target(capsys: pytest.CaptureFixture[str]) -> None:
    err = fails(capsys, 2, "targets", "x86-64-v33")
    assert err == (
        "error: unknown target `x86-64-v33`\n\n"
        "hint: did you mean `x86-64-v3`? `bnncc targets` lists all\n"
    )
    model = ROOT / "examples/digits/digits.onnx"
    assert "unknown target `arm65`" in fails(capsys, 2, "compile", model, "--target", "arm65")
    err = fails(capsys, 2, "targets", "cuda-sm70")
    assert "hint: GPUs are cuda, cuda-sm75, " in err
    assert "did you mean" not in err


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("fly",),
        ("compile",),
        ("compile", "a.onnx", "--sign-zero", "0"),
        ("compile", "a.onnx", "--first-layer", "int4"),
        ("compile", "a.onnx", "--input-shape", "x"),
        ("compile", "a.onnx", "--input-uint8", "x:1"),
        ("bench", "a.bnncc", "--repeat", "0"),
        ("bench", "a.bnncc", "--threads", "-1"),
        ("compile", "a.onnx", "--targe", "native"),
    ],
)
def test_bad_usage(args: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert re.search(r"\n\nhint: (did you mean `.*`\? )?`bnncc", fails(capsys, 2, *args))


def test_bad_paths(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = ROOT / "examples/digits/digits.onnx"
    assert "none.onnx: cannot be read: No such file" in fails(capsys, 2, "compile", "none.onnx")
    assert "none.onnx: cannot be read" in fails(capsys, 2, "explain", "none.onnx")
    assert "cannot be read: Is a directory" in fails(capsys, 2, "compile", tmp_path)
    read_and_written = ("--input", tmp_path / "in.npz", "--output", tmp_path / "out.npz")
    for verb in (("bench",), ("explain",), ("verify", model), ("deploy", "--rpc", "here:1")):
        assert "none.bnncc: cannot be read" in fails(capsys, 2, *verb, "none.bnncc")
    assert "none.bnncc: cannot be read" in fails(capsys, 2, "run", "none.bnncc", *read_and_written)
    err = fails(capsys, 2, "compile", model, "-o", "no/where.bnncc")
    assert "folder no does not exist" in err
    assert "is a folder" in fails(capsys, 2, "compile", model, "-o", tmp_path)
    assert list(tmp_path.iterdir()) == []


TWICE = ("--max-dim", "n=4", "--max-dim", "n=5")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("compile", "x" * 300), "cannot be read: File name too long"),
        (("compile", "tiny.bnncc", "-o", "x" * 300), "cannot be written: File name too long"),
        (("verify", "m.onnx", "tiny.bnncc", "--seed", "-1"), "`-1` is not a number from 0"),
        (("tune", "tiny.bnncc", "--lock-file", "nowhere/lock"), "lock: folder nowhere does not"),
        (("compile", "m.onnx", "--input-uint8", "x:1,0"), "the scale must not be 0"),
        (("compile", "tiny.bnncc", "-o", ""), "-o/--output: an empty name is given"),
        (("compile", "tiny.bnncc", "--dump-ir", "tiny.bnncc"), "is a file, expected a folder"),
        (("tune", "tiny.bnncc", "--tuning-dir", "tiny.bnncc"), "not a folder of records"),
        (("tune", "tiny.bnncc", "--untuned"), "--untuned cannot be combined with `tune`"),
        (("tune", "tiny.bnncc", *["--tuning-dir", "a"] * 2), "at most one --tuning-dir, which"),
        (("verify", "m.onnx", "tiny.bnncc", "--seed", "x"), "`x` is not a number from 0"),
        (("compile", "tiny.bnncc", *TWICE), "--max-dim is given twice for `n`"),
        (("compile", "tiny.bnncc", *["--input-shape", "x:1"] * 2), "--input-shape is given twice"),
        (("compile", "tiny.bnncc", *["--in-place", "a=b"] * 2), "--in-place is given twice"),
        (("bench", "tiny.bnncc", *["--dim", "n=2"] * 2), "--dim is given twice for `n`"),
    ],
)  # fmt: skip
def test_refused_before_anything_is_done(
    asked: tuple[str, ...], said: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in fails(capsys, 2, *asked)


def test_run(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = np.arange(16, dtype=np.float32).reshape(2, 8)
    np.savez("in.npz", **{"x/in:0": x, "y": x, "labels": np.zeros(9)})
    assert cli.main(["run", "tiny.bnncc", "--input", "in.npz", "--output", "out.npz"]) == 0
    assert capsys.readouterr() == ("", "")
    with np.load("out.npz") as got:
        for name, value in expected(x, x).items():
            np.testing.assert_array_equal(got[name], value)
    np.savez_compressed("in.npz", **{"x/in:0": np.asfortranarray(x), "y": x})
    assert cli.main(["run", "tiny.bnncc", "--input", "in.npz", "--output", "out.npz"]) == 0
    assert sorted(p.name for p in path.parent.iterdir()) == ["in.npz", "out.npz", "tiny.bnncc"]
    err = fails(capsys, 2, "run", "tiny.bnncc", "--input", "in.npz", "--output", "out.npy")
    assert (
        "out.npy: an .npy file has one array, the network 2 outputs\n\nhint: write out.npz" in err
    )


class Evil:
    """Would make a file if it were unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("unpickled",)


def test_run_refuses_bad_arrays(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(match: str, data: bytes | None = None, **arrays: np.ndarray) -> None:
        Path("in.npz").write_bytes(npz_bytes(arrays) if data is None else data)
        err = fails(capsys, 1, "run", "tiny.bnncc", "--input", "in.npz", "--output", "out.npz")
        assert match in err
        assert err.startswith("error: in.npz: ")
        assert not Path("out.npz").exists()

    x = np.zeros((2, 8), np.float32)
    good = npz_bytes({"x/in:0": x, "y": x})
    run("input `y` is missing", **{"x/in:0": x})
    run("input `y` has dtype float64", **{"x/in:0": x, "y": x.astype(float)})
    run("input `y` has shape [8], expected [n, 8]", **{"x/in:0": x, "y": x[0]})
    run("dimension `n` is 1, but 2 in `x/in:0`", **{"x/in:0": x, "y": x[:1]})
    run("not an intact .npz file", data=b"")
    run("not an intact .npz file", data=b"x" * 100)
    run("not an intact .npz file", data=good[: len(good) // 2])
    run("not an intact .npz file", data=good[30:])
    run("input `y` holds text, expected float32", **{"x/in:0": x, "y": np.array("abc")})
    middle = good.index(b"NUMPY")
    run("", data=good[:middle] + b"X" + good[middle + 1 :])
    run("", data=good[: middle + 100] + b"\xff" + good[middle + 101 :])
    buffer = io.BytesIO()
    np.savez(buffer, **{"x/in:0": x, "y": np.array([Evil()], object)})
    run("holds object, not numbers", data=buffer.getvalue())
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("y.npy", pickle.dumps(Evil()))
    run("cannot be read", data=buffer.getvalue())
    assert not Path("unpickled").exists()
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f4", "fortran_order": False, "shape": (2**40, 8)}
    )
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("y.npy", header.getvalue())
    run("is truncated", data=buffer.getvalue())


def test_missing_arrays_file(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    err = fails(capsys, 2, "run", path, "--input", "none.npz", "--output", "out.npz")
    assert "none.npz: cannot be read: No such file" in err


def test_damaged_artifact(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_bytes(path.read_bytes()[:5000])
    for verb in ("bench", "explain"):
        assert "not an intact bnncc artifact" in fails(capsys, 1, verb, path)


def test_explain_artifact(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    renamed = path.rename("other.name")
    err = fails(capsys, 2, "explain", renamed, "--target", "arm64")
    assert "is an artifact, which is compiled already" in err
    assert cli.main(["explain", str(renamed)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert " ".join(lines[2].split()) == "mm float float nx8 0.00"
    assert " ".join(lines[3].split()) == "bias +1 other nx8"
    why = lines.index("float: mm")
    assert lines[why + 1 : why + 3] == [
        "  weights of `mm` are not two-valued", "  -> train them binary"
    ]  # fmt: skip
    assert any(line.startswith("layers   0 binary") for line in lines)
    assert cli.main(["explain", str(renamed), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["summary"]["float"] == 1
    sizes = report["bytes"]
    assert sizes.pop("total") == renamed.stat().st_size == sum(sizes.values())


def test_bench(path: Path) -> None:
    done = bnncc("bench", path, "--repeat", 5, "--threads", 1, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    result = json.loads(done.stdout)
    assert result["threads"] == 1
    assert result["network"]["min_us"] > 0
    assert [k["name"] for k in result["kernels"]] == ["matmul", "add"]
    assert result["kernels"][0]["layers"] == ["mm"]
    text = bnncc("bench", path, "--repeat", 5).stdout
    assert "matmul" in text
    assert "network  min" in text


def test_closed_pipe_is_no_error(path: Path) -> None:
    command = f"'{sys.executable}' -m bnncc explain tiny.bnncc --json | head -c 10"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.stderr == ""
    assert done.returncode == 0


def test_bugs_say_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], path: Path
) -> None:
    def broken(*args: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(commands, "_loaded", broken)
    assert cli.main(["bench", "tiny.bnncc"]) == 70
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("error: this is a bug in bnncc; the lines above say where\n")


def test_interrupt(path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "bnncc", "bench", path, "--repeat", "100000000"],
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts its background jobs, and so these tests and their children, deaf to it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        maps = Path(f"/proc/{process.pid}/maps")
        deadline = time.monotonic() + 120
        while "lib.so" not in maps.read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        while process.poll() is None and time.monotonic() < deadline:
            process.send_signal(signal.SIGINT)  # one that meets a library being loaded is lost
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
        _, err = process.communicate(timeout=10)
    finally:
        process.kill()
    assert process.returncode == 130
    assert err == "interrupted\n"


@pytest.mark.parametrize("turned_into", [RuntimeError(), BnnccError("cannot be compiled")])
def test_interrupt_in_a_callback_of_tvm(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    path: Path,
    turned_into: Exception,
) -> None:
    def loaded(*args: object) -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)
        except KeyboardInterrupt:
            raise turned_into from None  # as TVM does, of which not even a cause is left

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(commands, "_loaded", loaded)
    assert cli.main(["bench", "tiny.bnncc"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert signal.getsignal(signal.SIGINT) is before


# ------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("x:1x3x224x224", ("x", (1, 3, 224, 224))),
        ("input:0:7", ("input:0", (7,))),
        ("x:batchx3x8x8", ("x", ("batch", 3, 8, 8))),
        ("x:max_nx3", ("x", ("max_n", 3))),
        ("x:NxCx8xW", ("x", ("N", "C", 8, "W"))),
        ("x:batch,maximum", ("x", ("batch", "maximum"))),
    ],
)
def test_input_shapes(text: str, wanted: object) -> None:
    assert parse_input_shape(text) == wanted


@pytest.mark.parametrize(
    "text", ["x", "x:", ":1", "x:0x1", "x:1x-2", "x:1x2x", "x:9999999999999x1"]
)
def test_bad_input_shapes(text: str) -> None:
    with pytest.raises(UsageError, match="input shape"):
        parse_input_shape(text)


def test_input_uint8() -> None:
    spec = parse_input_uint8("a:b:127.5,0.0078")
    assert (spec.name, spec.mean, spec.scale, spec.layout) == ("a:b", (127.5,), (0.0078,), "nchw")
    for text in ("x", "x:1", "x:1,2,3", "x:a,b", ":1,2", "x:nan,1", "x:1,2:hwcn"):
        with pytest.raises(UsageError):
            parse_input_uint8(text)


def test_options_check_themselves() -> None:
    for wrong in (
        {"sign_zero": "0"},
        {"float_conv": "winograd"},
        {"first_layer": "float64"},
        {"float_type": "bfloat16"},
        {"input_shapes": {"x": (0,)}},
        {"input_shapes": {"x": ("a b",)}},
        {"seed": -1},
    ):
        with pytest.raises(UsageError):
            CompileOptions(**wrong)
