"""Files to write: what is refused, what is written through, and what is there after a failure."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import socket
import stat
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from bnncc.cli import main as cli
from bnncc.errors import BnnccError, UsageError
from bnncc.files import npz_bytes, write_atomic
from bnncc.remote import kit
from bnncc.targets.catalog import resolve
from tests.cli.test_cli import ENVIRONMENT, fails
from tests.devices import DIGITS
from tests.tiny import expected, tiny

X = np.arange(16, dtype=np.float32).reshape(2, 8)


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a folder with a model, an artifact and its inputs the current one."""
    monkeypatch.chdir(tmp_path)
    tiny().save("a.bnncc")
    shutil.copy(DIGITS / "digits.onnx", "m.onnx")
    Path("in.npz").write_bytes(npz_bytes({"x/in:0": X, "y": X}))


def run(output: object, *more: str) -> int:
    return cli.main(["run", "a.bnncc", "--input", "in.npz", "--output", str(output), *more])


def check(data: bytes) -> None:
    """Compare the bytes of an npz file with what the artifact computes."""
    with np.load(io.BytesIO(data)) as got:
        for name, value in expected(X, X).items():
            np.testing.assert_array_equal(got[name], value)


@contextlib.contextmanager
def unchanged() -> Iterator[None]:
    """Check that no file here is changed, made or gone."""

    def content() -> dict[Path, bytes]:
        return {p: p.read_bytes() for p in Path().rglob("*") if p.is_file()}

    before = content()
    yield
    assert content() == before


# ----------------------------------------------------------------------------------- refused


def external() -> None:
    """Write ``big.onnx``, whose weights are in ``weights/big.bin``."""
    weight = np.ones((4, 4), np.float32)
    tensor = numpy_helper.from_array(weight, "w")
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", "weights/big.bin"
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [info("x", TensorProto.FLOAT, [1, 4])],
        [info("y", TensorProto.FLOAT, [1, 4])],
        [tensor],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    Path("weights").mkdir()
    Path("weights/big.bin").write_bytes(weight.tobytes())
    Path("big.onnx").write_bytes(model.SerializeToString())


def test_inputs_are_not_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    external()
    Path("link").symlink_to("m.onnx")
    os.link("m.onnx", "hard")
    os.link("weights/big.bin", "alias")
    shutil.copy(DIGITS / "digits.onnx", "x-0000.params")
    Path("x-symbol.json").write_text("{}")
    Path("t.json").write_text("[1, 2, 3]")
    Path("target.json").write_text('{"base": "x86-64-v2"}')
    Path("logs/native").mkdir(parents=True)
    Path("logs/native/records.jsonl").write_text("")
    uint8 = ("--input-transform", "rgb-threshold:t.json:nhwc")
    cases = (
        (("compile", "m.onnx", "-o", "m.onnx"), "m.onnx: is the model,"),
        (("compile", "m.onnx", "-o", "./m.onnx"), "m.onnx: is the model,"),
        (("compile", "m.onnx", "-o", "link"), "link: is the model,"),
        (("compile", "m.onnx", "-o", "hard"), "hard: is the model,"),
        (("compile", "m.onnx", "--report", "hard"), "hard: is the model,"),
        (("compile", "big.onnx", "-o", "weights/big.bin"), "is the model's external data,"),
        (("compile", "big.onnx", "-o", "alias"), "alias: is the model's external data,"),
        (("compile", "x-symbol.json", "-o", "x-0000.params"), "is the model's parameter file,"),
        (("compile", "x-symbol.json", "--params", "hard", "-o", "hard"), "is the parameter file,"),
        (
            ("compile", "m.onnx", "--target", "target.json", "-o", "target.json"),
            "is the target file,",
        ),
        (("compile", "m.onnx", *uint8, "-o", "t.json"), "t.json: is the file of thresholds,"),
        (
            ("compile", "m.onnx", "--tuning-dir", "logs", "-o", "logs/native/records.jsonl"),
            "is the tuning record,",
        ),
        (("run", "a.bnncc", "--input", "in.npz", "--output", "in.npz"), "in.npz: is the input,"),
        (("run", "a.bnncc", "--input", "in.npz", "--output", "a.bnncc"), "is the artifact,"),
        (("tune", "m.onnx", "--lock-file", "hard"), "hard: is the model,"),
    )
    with unchanged():
        for asked, said in cases:
            assert f"{said} and would be overwritten" in fails(capsys, 2, *asked)


def test_outputs_are_not_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    Path("link").symlink_to("new")
    for one, other in (("new", "new"), ("new", "link"), ("link", "./new"), ("-", "-")):
        err = fails(capsys, 2, "compile", "m.onnx", "-o", one, "--report", other)
        assert "cannot be both output and report" in err
    assert not Path("new").exists()


def test_what_cannot_be_written_is_refused_first(capsys: pytest.CaptureFixture[str]) -> None:
    Path("loop").symlink_to("loop")
    Path("dangling").symlink_to("no/where")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        for path, said in (
            ("loop", "loop: cannot be written: Too many levels of symbolic links"),
            ("dangling", "no does not exist"),
            ("no/where", "no/where: folder no does not exist"),
            ("socket", "socket: is a socket"),
            ("m.onnx/x", "m.onnx/x: cannot be written: Not a directory"),
            (".", "is a folder, not a file to write"),
        ):
            with unchanged():
                assert said in fails(capsys, 2, "compile", "m.onnx", "-o", path)
                assert said in fails(
                    capsys, 2, "run", "a.bnncc", "--input", "in.npz", "--output", path
                )


# --------------------------------------------------------------------------- written through


def test_links_and_permissions_stay() -> None:
    Path("link").symlink_to("real")
    assert run("link") == 0
    assert Path("link").is_symlink()
    check(Path("real").read_bytes())
    os.chmod("real", 0o640)
    os.link("real", "other")
    assert run("link") == 0
    assert stat.S_IMODE(os.stat("real").st_mode) == 0o640


def test_fifos_are_written_through() -> None:
    os.mkfifo("pipe")
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(Path("pipe").read_bytes()))
    reader.start()
    assert run("pipe") == 0
    reader.join(60)
    check(got[0])
    assert stat.S_ISFIFO(os.stat("pipe").st_mode)


def test_devices_are_written_through() -> None:
    assert run("/dev/null") == 0
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


@pytest.mark.parametrize("name", ["-", "/dev/stdout", "/dev/fd/1"])
def test_standard_output(name: str) -> None:
    command = f"'{sys.executable}' -m bnncc run a.bnncc --input in.npz --output {name}"
    done = subprocess.run(["bash", "-c", f"{command} | cat"], capture_output=True, env=ENVIRONMENT)
    assert done.stderr == b""
    check(done.stdout)
    script = f"echo before > out; {command} >> out; echo after >> out"
    subprocess.run(["bash", "-c", script], check=True, env=ENVIRONMENT)
    data = Path("out").read_bytes()
    assert data.startswith(b"before\n")
    assert data.endswith(b"after\n")
    check(data[len("before\n") : -len("after\n")])


def test_compile_to_standard_output(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert cli.main(["compile", "m.onnx", "-o", "-", "--time-passes"]) == 0
    out, err = capfdbinary.readouterr()
    assert b"standard output: " in err
    assert b"link" in err  # the table of times
    with tarfile.open(fileobj=io.BytesIO(out)) as archive:
        assert archive.getnames() == ["manifest.json", "lib.so", "selfcheck.npz"]
    assert cli.main(["compile", "m.onnx", "-o", "x.bnncc", "--report", "-", "-q"]) == 0
    assert capfdbinary.readouterr().out.startswith(b"{\n")
    given = ["run", "x.bnncc", "--input", str(DIGITS / "test_images.npz"), "--output"]
    for name in ("out.npz", "out.npy"):
        assert cli.main([*given, name]) == 0
    alone = np.load("out.npy")
    assert isinstance(alone, np.ndarray)
    with np.load("out.npz") as outputs:
        np.testing.assert_array_equal(alone, outputs["logits"])


# -------------------------------------------------------------------------------- failures

FULL = os.strerror(errno.ENOSPC)


def test_full_disk(capsys: pytest.CaptureFixture[str]) -> None:
    assert f"/dev/full: cannot be written: {FULL}\n" in fails(
        capsys, 1, "run", "a.bnncc", "--input", "in.npz", "--output", "/dev/full"
    )


@pytest.mark.parametrize(
    ("verb", "code"),
    [
        ("explain a.bnncc", 1),
        ("explain a.bnncc --json", 1),
        ("targets", 1),
        ("--help", 1),
        ("run a.bnncc --input in.npz --output -", 1),
    ],
)
def test_full_and_closed_standard_output(verb: str, code: int) -> None:
    for to, reason in ((">/dev/full", FULL), (">&-", "it is closed")):
        if verb == "--help" and to == ">&-":
            continue
        command = f"'{sys.executable}' -m bnncc {verb} {to}"
        done = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, env=ENVIRONMENT
        )
        assert done.stderr == f"error: standard output: cannot be written: {reason}\n"
        assert done.returncode == code


def test_closed_pipe() -> None:
    command = f"'{sys.executable}' -m bnncc run a.bnncc --input in.npz --output"
    for script, name in (
        (f"{command} - | true", "standard output"),
        (f"{command} >(exec 0<&-; sleep 3)", "/dev/fd/"),
    ):
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", f"sleep 0; {script}"],
            capture_output=True, text=True, env=ENVIRONMENT,
        )  # fmt: skip
        assert done.returncode == 1, script
        assert done.stderr.startswith(f"error: {name}")
        assert done.stderr.endswith("cannot be written: Broken pipe\n")
        assert done.stderr.count("\n") == 1


def test_closed_standard_error() -> None:
    command = f"'{sys.executable}' -m bnncc compile m.onnx -o x.bnncc 2>&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, env=ENVIRONMENT)
    assert (done.returncode, done.stdout) == (0, b"")
    assert cli.main(["run", "x.bnncc", "--input", str(DIGITS / "test_images.npz"),
                     "--output", "out.npz"]) == 0  # fmt: skip


def test_what_was_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("old").write_bytes(b"old")

    def chunks() -> Iterator[bytes]:
        yield b"new"
        raise OSError(errno.ENOSPC, FULL)

    with unchanged(), pytest.raises(BnnccError, match="old: cannot be written: No space left"):
        write_atomic("old", chunks())
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(1, "Denied")))
    with unchanged(), pytest.raises(BnnccError, match="old: cannot be written: Denied"):
        write_atomic("old", [b"new"])


def test_a_full_disk_elsewhere_is_no_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, FULL, "/scratch/x")

    monkeypatch.setattr("bnncc.driver.build_library", full)
    with unchanged():
        err = fails(capsys, 1, "compile", "m.onnx", "-o", "new")
    assert err.startswith(f"error: /scratch/x: {FULL}\n\nhint: free some space")


def test_kits_keep_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    native = resolve("native")
    Path("full").mkdir()
    Path("full/mine").write_text("")
    Path("kit/lib").mkdir(parents=True)
    Path("kit/lib", kit.LIBRARIES[1]).write_text("old")
    Path("kit/mine").write_text("")
    with unchanged():
        with pytest.raises(UsageError, match="full: exists and is not a bnncc kit"):
            kit.make(Path("full"), native)
        with pytest.raises(UsageError, match="exists and is not a bnncc kit"):
            kit.make(Path("m.onnx"), native)
        with pytest.raises(UsageError, match="`mine` is not part of it"):
            kit.make(Path("kit"), native)
    Path("kit/mine").unlink()
    with unchanged(), pytest.raises(RuntimeError), kit._aside(Path("kit"), Path("old")):
        raise RuntimeError


def test_bundles_keep_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compile", "m.onnx", "-q", "-o", "b.tar.xz"]) == 0
    with unchanged():
        err = fails(capsys, 2, "bench", "b.tar.xz", "--bundle", "b")
        assert "b.tar.xz: exists, and the bundle's archive would overwrite it" in err
        err = fails(capsys, 2, "bench", "b.tar.xz", "--bundle", ".")
        assert "is not an empty folder" in err
