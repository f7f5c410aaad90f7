"""Networks on devices: results as here, and what is refused before anything is sent."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from bnncc.cli.main import main
from bnncc.errors import ArtifactError, DeviceError, InputError, TargetError, UsageError
from bnncc.remote import network as remote
from bnncc.remote.connection import parse_address, request
from bnncc.runtime import container
from bnncc.runtime.artifact import Artifact
from bnncc.runtime.selfcheck import LEAST_BYTES, Check, pack
from bnncc.targets.catalog import resolve
from tests import devices
from tests.devices import DIGITS, SECONDS, Server, fails, succeeds, until
from tests.tiny import BASELINE, expected, tiny


def changed(artifact: Artifact, **fields: object) -> Artifact:
    """Return `artifact` with other fields in its manifest."""
    content = {**artifact.manifest, **fields}
    return Artifact(container.sealed(content, artifact._members), artifact._members)


# What devices are for.


def test_deploy(
    machine: str, server: Server, digits: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--rpc", server.address)
    result = json.loads(succeeds(capsys, "deploy", digits[machine], *where, "--json"))
    assert result["passed"]
    assert result["outputs"][0]["max_abs_error"] < 1e-4
    assert result["device"]["machine"] == {"host": os.uname().machine, "arm64": "aarch64"}[machine]
    assert result["network"]["min_us"] > 0
    text = succeeds(capsys, "deploy", digits[machine], *where, "--repeat", 3, "--threads", 1)
    assert "logits: PASS" in text
    assert "(3 runs, 1 thread)" in text


def test_run_is_as_here(
    machine: str,
    server: Server,
    digits: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    images = DIGITS / "test_images.npz"
    made = {}
    for name, artifact, where in (
        ("here", digits["host"], ()),
        ("there", digits[machine], ("--rpc", server.address)),
    ):
        output = tmp_path / f"{name}.npz"
        succeeds(capsys, "run", artifact, "--input", images, "--output", output, *where)
        made[name] = np.load(output)["logits"]
    np.testing.assert_allclose(made["there"], made["here"], rtol=1e-4, atol=1e-4)
    assert (made["there"].argmax(1) == np.load(images)["labels"]).mean() > 0.95


def test_bench_and_verify(
    machine: str, server: Server, digits: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--rpc", server.address)
    options = ("--threads", 1, "--repeat", 5, "--json")
    result = json.loads(succeeds(capsys, "bench", digits[machine], *options, *where))
    named = [k["name"] for k in Artifact.load(digits["host"]).report["kernels"]]
    if machine == "host":
        assert [kernel["name"] for kernel in result["kernels"]] == named
    assert all(kernel["min_us"] > 0 for kernel in result["kernels"])
    assert result["threads"] == 1
    model = DIGITS / "digits.onnx"
    verdict = json.loads(succeeds(capsys, "verify", model, digits[machine], *where, "--json"))
    assert verdict["verdict"] == "pass"
    assert len(verdict["layers"]) > 5
    if machine == "host":  # each run alone on the device
        assert [kernel["name"] for kernel in verdict["kernels"]] == named
        assert all(kernel["passed"] for kernel in verdict["kernels"])


def test_names_shapes_and_dynamic_batch(host: Server) -> None:
    with remote.connect(host.address) as device:
        artifact = tiny().on_device(device)
        for batch in (1, 5):
            x = np.random.default_rng(batch).standard_normal((batch, 8)).astype(np.float32)
            made = artifact.run({"x/in:0": x, "y": x[::-1]})
            for name, wanted in expected(x, x[::-1]).items():
                np.testing.assert_allclose(made[name], wanted, rtol=1e-5, atol=1e-5)
        with pytest.raises(InputError, match=r"`y` has shape \[1, 7\]"):
            artifact.run({"x/in:0": x[:1], "y": x[:1, :7]})
        finite = tiny(check_finite=True).on_device(device)
        with pytest.raises(InputError, match="--check-finite"):
            finite.run({"x/in:0": x * np.nan, "y": x})
        again = artifact.run({"x/in:0": x, "y": x})  # refusals leave the session usable
        np.testing.assert_allclose(again["sum"], expected(x, x)["sum"], rtol=1e-5, atol=1e-5)


def test_several_threads_share_a_device(host: Server) -> None:
    wrong: list[object] = []
    with remote.connect(host.address) as device:
        artifact = tiny().on_device(device)

        def work(seed: int) -> None:
            x = np.full((1, 8), seed, np.float32)
            for _ in range(20):
                made = artifact.run({"x/in:0": x, "y": x})["sum"]
                if not np.allclose(made, expected(x, x)["sum"]):
                    wrong.append(made)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
            assert not thread.is_alive()
    assert not wrong


@pytest.mark.sampled(2)
def test_tracker(
    machine: str,
    kits: dict[str, Path],
    digits: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with devices.tvm_process("tvm.exec.rpc_tracker") as port:
        address = f"127.0.0.1:{port}"
        where = ("--tracker", address, "--key", "board")
        deploy = ("deploy", digits[machine], "--repeat", 1)
        assert "no device with key `board`" in fails(capsys, *deploy, *where)
        options = ("--tracker", address, "--key", "board")
        with devices.running(machine, kits[machine], tmp_path / "log", *options) as server:
            until(lambda: known(address, "board"), "the tracker to know the device")
            for _ in range(2):
                assert "PASS" in succeeds(capsys, *deploy, *where)
            other = fails(capsys, *deploy, "--tracker", address, "--key", "phone")
            assert "hint: it has: board" in other
            assert "give --tracker" in fails(capsys, *deploy, "--rpc", server.address)
            with remote.connect(tracker=address, key="board"):
                busy = fails(capsys, *deploy, *where, "--timeout", 1)
                assert "every device with key `board` was busy for 1 s" in busy
            assert "PASS" in succeeds(capsys, *deploy, *where)


def known(tracker: str, key: str) -> bool:
    try:
        remote.connect(tracker=tracker, key=key, timeout=5).close()
    except DeviceError:
        return False
    return True


@pytest.mark.slow
def test_a_device_given_to_nobody_comes_back(
    kits: dict[str, Path], tmp_path: Path, digits: dict[str, Path]
) -> None:
    folder = devices.have(kits, "host")
    with devices.tvm_process("tvm.exec.rpc_tracker") as port:
        address = f"127.0.0.1:{port}"
        options = ("--tracker", address, "--key", "board")
        with devices.running("host", folder, tmp_path / "log", *options):
            until(lambda: known(address, "board"), "the tracker to know the device")
            request(parse_address(address), "board", 10)  # and never connect
            remote.connect(tracker=address, key="board", timeout=SECONDS).close()


def test_tvms_own_server(digits: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    with devices.tvm_process("tvm.exec.rpc_server") as port:
        where = ("--rpc", f"127.0.0.1:{port}")
        assert "logits: PASS" in succeeds(capsys, "deploy", digits["host"], *where)
        result = json.loads(
            succeeds(capsys, "bench", digits["host"], "--repeat", 5, "--json", *where)
        )
        assert result["kernels"] == []
        assert result["network"]["min_us"] > 0
        message = fails(capsys, "deploy", digits["arm64"], *where)
        assert "loading failed" in message
        assert "for the architecture of the device?" in message
        assert "logits: PASS" in succeeds(capsys, "deploy", digits["host"], *where)


# What is refused before anything is sent.


def test_wrong_architecture(
    machine: str, server: Server, digits: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = digits["arm64" if machine == "host" else "host"]
    message = fails(capsys, "deploy", wrong, "--rpc", server.address)
    names = {"x86_64": "x86_64", "aarch64": "aarch64"}
    here = names.get(os.uname().machine, os.uname().machine)
    is_for, device = ("aarch64", here) if machine == "host" else (here, "aarch64")
    assert f"is for {is_for} (" in message
    assert f"the device at {server.address} is {device}" in message
    # Not even where nobody looks first.
    with remote.connect(server.address) as device_:
        library = Artifact.load(wrong, check_host=False)._members[container.LIBRARY]
        with pytest.raises(ArtifactError, match="loading failed"):
            device_.load(library)
    assert "PASS" in succeeds(capsys, "deploy", digits[machine], "--rpc", server.address)


def test_missing_feature_and_other_tvm(host: Server) -> None:
    target = dataclasses.replace(resolve(BASELINE), name="x", features=("time_travel",))
    with remote.connect(host.address) as device:
        with pytest.raises(TargetError, match=r"needs CPU features .* lacks: time_travel"):
            tiny(target=target).on_device(device)
        with pytest.raises(ArtifactError, match=r"compiled with TVM 0\.26\.0, the device at"):
            changed(tiny(), tvm="0.26.0").on_device(device)
        right, wanted = tiny().on_device(device), tiny().selfcheck_arrays()
        np.testing.assert_allclose(right.run(wanted[0])["sum"], wanted[1]["sum"], rtol=1e-5)


def test_truncated_artifact(
    machine: str,
    server: Server,
    digits: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = digits[machine].read_bytes()
    for share in (0.0, 0.3, 0.9, 0.999):
        cut = tmp_path / "cut.bnncc"
        cut.write_bytes(data[: int(len(data) * share)])
        assert "not an intact" in fails(capsys, "deploy", cut, "--rpc", server.address)
    assert "session" not in server.said()
    # A library that is cut short where the artifact's checksums are right.
    with remote.connect(server.address) as device:
        library = Artifact.load(digits[machine], check_host=False)._members["lib.so"]
        with pytest.raises((ArtifactError, DeviceError)):
            device.load(library[: len(library) // 2])
    server.settled()
    assert "PASS" in succeeds(capsys, "deploy", digits[machine], "--rpc", server.address)


def test_wrong_result_is_an_error(
    host: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = tiny()
    given, wanted = artifact.selfcheck_arrays()
    check = Check(given, {**wanted, "product": wanted["product"] + 1})
    stored = pack([check], artifact.inputs, artifact.outputs, (), LEAST_BYTES)
    members = {**artifact._members, "selfcheck.npz": stored}
    path = tmp_path / "wrong.bnncc"
    Artifact(container.sealed(artifact.manifest, members), members).save(path)
    assert main(["deploy", str(path), "--rpc", host.address]) == 1
    out, err = capsys.readouterr()
    assert "product: FAIL, max abs error 1" in out
    assert "sum: PASS" in out
    assert "wrong outputs on the device" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "deploy needs a device"),
        (("--rpc", "nowhere"), "`nowhere` is not HOST:PORT"),
        (("--rpc", "a:1", "--tracker", "b:2", "--key", "k"), "either an address"),
        (("--tracker", "127.0.0.1:1"), "--tracker needs --key"),
    ],
)
def test_bad_usage(
    options: tuple[str, ...],
    message: str,
    digits: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert message in fails(capsys, "deploy", digits["host"], *options, code=2)


def test_device_options_need_a_device(
    digits: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    message = fails(capsys, "bench", digits["host"], "--key", "k", code=2)
    assert "--key needs --rpc or --tracker" in message


def test_addresses() -> None:
    for text in ("", ":1", "a:", "a:0", "a:70000", "a:-1", "a"):
        with pytest.raises(UsageError, match="is not HOST:PORT"):
            parse_address(text)
    with pytest.raises(UsageError, match="timeout"):
        remote.connect("a:1", timeout=0)
    with pytest.raises(UsageError, match="timeout is of type str, expected seconds"):
        remote.connect("a:1", timeout="9")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the address is of type int, expected HOST:PORT"):
        remote.connect(9090)  # type: ignore[arg-type]
