"""What a user types by mistake or by habit: suggestions, help, places of options, batches."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from bnncc.cli import main as cli
from bnncc.errors import ArtifactError, InputError, ModelError
from bnncc.files import kind_of, read_npz
from bnncc.frontend.checks import read
from bnncc.runtime.artifact import Artifact
from tests.cli.test_cli import fails
from tests.devices import DIGITS
from tests.tiny import tiny

MODEL = str(DIGITS / "digits.onnx")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "complie m.onnx",
            "`complie`\n\nhint: did you mean `compile`? `bnncc --help`",
        ),
        ("--hepl", "unknown option `--hepl`\n\nhint: did you mean `--help`? `bnncc --help` lists"),
        ("", "missing argument: VERB\n\nhint: `bnncc --help` lists all"),
        ("compile", "missing argument: MODEL\n\nhint: `bnncc compile --help` lists the options"),
        ("zzz", "unknown verb `zzz`\n\nhint: `bnncc --help` lists all"),
        (
            "records lst",
            "action `lst`\n\nhint: did you mean `list`? `bnncc records --help`",
        ),
        (
            "compile m.onnx --targe native",
            "unknown option `--targe`\n\nhint: did you mean `--target`? `bnncc compile --help`",
        ),
        ("compile m.onnx --tuning-dr=x", "unknown option `--tuning-dr`\n\nhint: did you mean `--t"),
        ("records list --taget x", "unknown option `--taget`\n\nhint: did you mean `--target`?"),
        (
            "compile m.onnx --zzz",
            "unknown option `--zzz`\n\nhint: `bnncc compile --help` lists",
        ),
        ("compile m.onnx other.onnx", "unexpected argument `other.onnx`"),
        ("compile m.onnx --assume dabn", "hint: did you mean `dabnn`?"),
    ],
)
def test_did_you_mean(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in fails(capsys, 2, *words.split())


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    for asked, wanted in (
        ("help", "--help"),
        ("help compile", "compile --help"),
        ("-v help records list", "records list --help"),
    ):
        assert cli.main(wanted.split()) == 0
        text = capsys.readouterr().out
        assert cli.main(asked.split()) == 0
        assert capsys.readouterr().out == text
    assert "unknown verb `complie`" in fails(capsys, 2, "help", "complie")


def test_options_before_the_verb(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tiny().save(tmp_path / "a.bnncc")
    asked = ["explain", str(tmp_path / "a.bnncc")]
    assert cli.main(asked) == 0
    text = capsys.readouterr().out
    for leading in (["-v"], ["-q"], ["-vv"], ["--verbose", "-q"]):
        assert cli.main([*leading, *asked]) == 0
        assert capsys.readouterr().out == text


def test_kinds_of_files_are_named(tmp_path: Path) -> None:
    artifact, npz = tmp_path / "a", tmp_path / "x.npz"
    tiny().save(artifact)
    np.savez(npz, x=np.zeros(3))
    np.save(tmp_path / "x.npy", np.zeros(3))
    assert kind_of(MODEL) == "an ONNX model"
    assert kind_of(artifact) == "a bnncc artifact"
    assert kind_of(tmp_path / "none") == kind_of(b"") == kind_of(b"hello") == ""
    with pytest.raises(ArtifactError, match="this is an ONNX model; `bnncc compile` it first"):
        Artifact.load(MODEL)
    with pytest.raises(ArtifactError, match=r"x\.npy: this is a \.npy file, not a bnncc artifact"):
        Artifact.load(tmp_path / "x.npy")
    with pytest.raises(ModelError, match="this is a bnncc artifact, which is compiled already"):
        read(artifact)
    for path, kind in (
        (MODEL, "an ONNX model"),
        (tmp_path / "x.npy", "a .npy file"),
        (artifact, "a bnncc artifact"),
    ):
        with pytest.raises(InputError, match=f"this is {kind}, not an .npz file"):
            read_npz(path, names=["x", "y"], check=lambda *_: None)
    for path in (npz, tmp_path / "x.npy"):  # which may hold the only array
        assert read_npz(path, names=["x"], check=lambda *_: None).keys() == {"x"}


def test_why_targets_do_not_run_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["targets"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert rows["cortex-m4"].endswith("no: code for thumbv7em")
    assert rows["wasm32"].endswith("no: code for wasm32")
    assert rows["c99"].endswith("yes")
    assert rows["native"].endswith("yes")
    monkeypatch.setenv("COLUMNS", "60")
    assert cli.main(["targets"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 60
    assert cli.main(["targets", "cortex-m4"]) == 0
    keys = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert "runs_here" in keys
    assert not {"base", "gpus", "engine", "missing"} & set(keys)  # which it has not


def test_files_that_are_not_there_are_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for asked in (
        ("compile", "none"),
        ("compile", MODEL, "--params", "none"),
        ("compile", MODEL, "--target", "none.json"),
        ("explain", "none"),
        ("run", "none", "--input", "x", "--output", "y"),
        ("verify", MODEL, "none"),
        ("tune", "none"),
        ("tune", "--import", "none"),
    ):
        err = fails(capsys, 2, *asked)
        assert err.startswith("error: none")
        assert "cannot be read: No such file or directory\n" in err


def network(*shape: int | str) -> onnx.ModelProto:
    """Return two binary convolutions and an average over the image, for inputs of `shape`."""
    rng = np.random.default_rng(0)
    weights = [rng.choice(np.float32([-1, 1]), (8, c, 3, 3)) for c in (3, 8)]
    info = helper.make_tensor_value_info
    nodes = []
    for i in range(2):
        nodes.append(helper.make_node("Sign", [f"c{i}" if i else "x"], [f"s{i}"]))
        nodes.append(helper.make_node("Conv", [f"s{i}", f"w{i}"], [f"c{i + 1}"], pads=[1] * 4))
    nodes.append(helper.make_node("GlobalAveragePool", ["c2"], ["y"]))
    graph = helper.make_graph(
        nodes,
        "g",
        [info("x", TensorProto.FLOAT, shape)],
        [info("y", TensorProto.FLOAT, [shape[0], 8, 1, 1])],
        [numpy_helper.from_array(w, f"w{i}") for i, w in enumerate(weights)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def test_shapes_of_any_axis(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(network(1, 3, 8, 8), path)
    made = str(tmp_path / "a")
    asked = ("compile", path, "-o", made, "--input-shape")
    assert cli.main([*map(str, asked), "x:2x3x12x10", "-q"]) == 0
    assert Artifact.load(made).inputs[0].shape == (2, 3, 12, 10)
    assert cli.main(["verify", str(path), made]) == 0
    assert capsys.readouterr().out.endswith("\nPASS\n")
    err = fails(capsys, 1, *asked, "x:1x3xHx8")
    assert "its shape depends on dimension 2 (`H`) of input `x`, which is not fixed" in err
    assert "input has 4 channels" in fails(capsys, 1, *asked, "x:1x4x8x8")
    err = fails(capsys, 2, *asked, "x:3x8x8")
    assert "--input-shape is 3x8x8, expected 4 dimensions as in the model's shape 1x3x8x8" in err
    err = fails(capsys, 2, "verify", made, path)
    assert f"{made}: this is a bnncc artifact, expected its model" in err
    assert "hint: the model comes first" in err


def test_batches(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    results = {}
    for name, shape in (("n", ("N", 3, 8, 8)), ("two", (2, 3, 8, 8))):
        onnx.save(network(*shape), tmp_path / f"{name}.onnx")
        made = str(tmp_path / name)
        assert cli.main(["compile", str(tmp_path / f"{name}.onnx"), "-o", made, "-q"]) == 0
        for batch in ([], ["--batch", "2"]):
            assert cli.main(["bench", made, "--repeat", "3", "--json", *batch]) == 0
            results[name, bool(batch)] = json.loads(capsys.readouterr().out)["network"]
    assert [r["batch"] for r in results.values()] == [1, 2, 2, 2]
    one = results["n", False]["macs"]
    assert [r["macs"] for r in results.values()] == [one, 2 * one, 2 * one, 2 * one]
    for r in results.values():
        wanted = r["batch"] / (r["median_us"] * 1e-6)
        assert r["items_per_second"] == pytest.approx(wanted, rel=1e-2)
    err = fails(capsys, 2, "bench", tmp_path / "two", "--batch", "3")
    assert "--batch 3: the network was compiled for 2" in err
    assert "hint: compile it with --input-shape x:Nx3x8x8 for batches of any size" in err
    assert "cannot be combined" in fails(
        capsys, 2, "bench", tmp_path / "two", "--batch", "3", "--bundle", tmp_path / "b"
    )


def test_sizes_of_symbolic_dimensions(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> '
        "net (float[N, T, 16] x) => (float[N, T, 24] y) "
        "{ s = Sign(x) y = MatMul(s, w) }"
    )
    signs = np.where(np.arange(16 * 24).reshape(16, 24) % 3 > 0, 1, -1).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(signs, "w"))
    onnx.save(model, tmp_path / "m.onnx")
    made = str(tmp_path / "m.bnncc")
    options = ["--max-dim", "T=64", "-q"]
    assert cli.main(["compile", str(tmp_path / "m.onnx"), "-o", made, *options]) == 0
    for asked, macs in (
        ([], 384), (["--dim", "T=10"], 3840), (["--dim", "T=10", "--dim", "N=3"], 11520),
        (["--dim", "T=10", "--batch", "3"], 11520), (["--batch", "3"], 1152),
    ):  # fmt: skip
        assert cli.main(["bench", made, "--repeat", "3", "--json", *asked]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["network"]["macs"] == macs
        assert sum(kernel["macs"] for kernel in result["kernels"]) == macs
    err = fails(capsys, 2, "bench", made, "--dim", "tokens=3")
    assert "--dim tokens=3: no symbolic dimension is called `tokens`; the network has N, T" in err
    err = fails(capsys, 2, "bench", made, "--dim", "N=3", "--batch", "2")
    assert "--batch 2 and --dim N=3: `N` is the batch" in err
    err = fails(capsys, 2, "bench", made, "--repeat", "9" * 12)
    assert "`999999999999` is not at most 1,000,000,000" in err
    assert "`T=0` is not NAME=SIZE" in fails(capsys, 2, "bench", made, "--dim", "T=0")
    err = fails(capsys, 1, "bench", made, "--dim", "T=65")
    assert "T" in err
    assert "64" in err
    err = fails(capsys, 2, "bench", made, "--dim", "T=3", "--bundle", tmp_path / "b")
    assert "--dim and --bundle cannot be combined" in err


def test_completion(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("shtab")
    for shell in ("bash", "zsh", "fish"):
        assert cli.main(["completion", shell]) == 0
        script = capsys.readouterr().out
        assert "device-kit" in script
        assert "tuning-dir" in script
        if shell == "bash":
            (tmp_path / "script").write_text(script)
            subprocess.run(["bash", "-n", tmp_path / "script"], check=True)
            for words, wanted in (
                ("bnncc comp", ["compile", "completion"]),
                ("bnncc compile --target cortex-m5", ["cortex-m55"]),
            ):
                # What bash does on a tab behind these words.
                ask = (
                    f"source ./script; COMP_WORDS=({words}); COMP_CWORD={words.count(' ')}; "
                    "$(complete -p bnncc | sed 's/.*-F \\([^ ]*\\).*/\\1/'); "
                    'echo "${COMPREPLY[@]}"'
                )
                done = subprocess.run(
                    ["bash", "-c", ask], cwd=tmp_path, capture_output=True, text=True, check=True
                )
                assert done.stdout.split() == wanted


def test_completion_without_shtab(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "shtab", None)
    assert "hint: pip install 'bnncc[completion]'" in fails(capsys, 1, "completion", "bash")
