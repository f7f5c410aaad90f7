"""Files of torch.export.save: compiled without torch, and never unpickled."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bnncc
from bnncc.cli import main as cli
from bnncc.errors import BnnccError
from bnncc.files import npz_bytes
from bnncc.frontend.formats import as_onnx
from bnncc.frontend.onnx import load
from bnncc.runtime.compare import agree
from tests import pytorch_files as files
from tests.tiny import BASELINE


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return what the compiled ``lines.pt2`` computes, and its layers' kinds, by line."""
    path = files.write("lines", tmp_path_factory.mktemp("lines"))
    artifact = bnncc.compile(path, threads=1)
    made = artifact.run({"x": files.arrays("lines")[0]})
    kinds = [layer["kind"] for layer in artifact.report["layers"]]
    return (
        dict(zip(files.LINES, made.values(), strict=True)),
        dict(zip(files.LINES, kinds, strict=True)),
    )


@pytest.mark.parametrize("line", files.LINES)
def test_line_is_binary_and_right(line: str, lines: Any) -> None:
    made, kinds = lines
    wanted = dict(zip(files.LINES, files.arrays("lines")[1], strict=True))
    assert kinds[line] == "binary"
    assert agree(made[line], wanted[line])


def test_zeros_tell_the_signs_apart() -> None:
    wanted = dict(zip(files.LINES, files.arrays("lines")[1], strict=True))
    assert (files.arrays("lines")[0] == 0).any()
    assert len({wanted[line].tobytes() for line in files.LINES if line.startswith("sign")}) > 3


@pytest.mark.parametrize(("name", "batch"), [("react", 3), ("perceptron", 5)])
def test_batch_is_dynamic(name: str, batch: int, tmp_path: Path) -> None:
    x, (wanted,) = files.arrays(name)
    artifact = bnncc.compile(files.write(name, tmp_path), threads=1)
    assert artifact.inputs[0].shape[0] == "N"
    (made,) = artifact.run({"x": x}).values()
    assert agree(made, wanted)
    repeated = np.concatenate([x] * batch)[:batch]
    (made,) = artifact.run({"x": repeated}).values()
    assert agree(made, np.concatenate([wanted] * batch)[:batch])


def test_layers_are_called_as_their_modules(tmp_path: Path) -> None:
    graph = load(as_onnx(files.write("react", tmp_path)))
    names = {node.name for node in graph.nodes}
    assert {"stem.0", "layers.0.first.1", "layers.0.act1.1", "layers.1.points.0.0", "fc"} <= names


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files.write("perceptron", tmp_path)
    assert cli.main(["compile", "perceptron.pt2"]) == 0
    assert cli.main(["verify", "perceptron.pt2", "perceptron.native.bnncc"]) == 0


def test_torch_is_not_imported(workplace: tuple[Path, dict[str, str]]) -> None:
    folder, environment = workplace
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')\n")
    environment["PYTHONPATH"] = f"{folder}{os.pathsep}{environment['PYTHONPATH']}"
    command = ["bnncc", "compile", str(files.write("perceptron", folder)), "--target", BASELINE]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------------------ pickles


class Planted:
    """What runs when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def _refused(path: Path) -> BnnccError:
    with pytest.raises(BnnccError) as caught:
        load(as_onnx(path))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    assert path.name in str(caught.value)
    return caught.value


def _weight(use_pickle: bool) -> Callable[[Any], None]:
    def change(config: Any) -> None:
        config["config"]["fc.weight"]["use_pickle"] = use_pickle

    return change


def test_pickles_are_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    bomb = pickle.dumps(Planted(mark))
    pickle.loads(bomb)
    assert mark.exists()  # so it would be noticed
    mark.unlink()
    whole = files.entries(files.content("perceptron"))
    config = "data/weights/model_weights_config.json"
    flagged = files.entries(files.edited("perceptron", _weight(True), config))
    place = next(n for n in whole if n.startswith("data/weights/weight_"))
    old = {k: v for k, v in whole.items() if not k.startswith("data/weights/")}
    cases = {
        "weight.pt2": files.packed({**flagged, place: bomb}),
        "weights.pt2": files.packed({**old, "data/weights/model.pt": bomb}),
        "constants.pt2": files.packed({**whole, "data/constants/model.pt": bomb}),
        "torch-2.8.pt2": files.packed(
            {"serialized_exported_program.json": b"{}", "serialized_state_dict.pt": bomb}
        ),
        "checkpoint.pt": files.packed({"data.pkl": bomb, "version": b"3"}),
        "script.pt": files.packed({"constants.pkl": bomb, "code/net.py": b""}),
        "old.pth": bomb,
        "net.pkl": bomb,
    }
    for name, data in cases.items():
        path = tmp_path / name
        path.write_bytes(data)
        error = _refused(path)
        assert "torch.export.save" in (error.hint or ""), name
    sample = tmp_path / "sample.pt2"
    sample.write_bytes(files.packed({**whole, "data/sample_inputs/model.pt": bomb}))
    load(as_onnx(sample))  # its inputs are not looked at
    assert not mark.exists()


# --------------------------------------------------------------------------------- damaged archives


def _without(name: str) -> bytes:
    whole = files.entries(files.content("perceptron"))
    return files.packed({k: v for k, v in whole.items() if k != name})


def _with(**changed: bytes) -> bytes:
    named = {k.replace("__", "/").replace("_json", ".json"): v for k, v in changed.items()}
    return files.packed({**files.entries(files.content("perceptron")), **named})


def _graph(change: Callable[[Any], object]) -> bytes:
    return files.edited("perceptron", lambda model: change(model["graph_module"]["graph"]))


def _node(change: Callable[[Any], object], index: int = 2) -> bytes:
    return _graph(lambda graph: change(graph["nodes"][index]))


def _sizes(config: Any, sizes: list[int]) -> None:
    config["config"]["fc.weight"]["tensor_meta"]["sizes"] = [{"as_int": n} for n in sizes]


def _meta(change: Callable[[Any], object]) -> bytes:
    entry = "data/weights/model_weights_config.json"
    return files.edited("perceptron", change, entry)


def _compressed() -> bytes:
    bomb = {**files.entries(files.content("perceptron")), "models/model.json": b" " * (1 << 24)}
    return files.packed(bomb, zipfile.ZIP_DEFLATED)


def _overlapping() -> bytes:
    data = bytearray(files.packed({"archive_format": b"pt2" * 5000, "b": b""}))
    at = data.rindex(b"PK\x01\x02")
    size = (1 << 31).to_bytes(4, "little")
    data[at + 20 : at + 28] = size * 2
    return bytes(data)


def _long_name() -> bytes:
    """Let the header of an entry claim what follows it for its name."""
    data = bytearray(files.content("perceptron"))
    at = data.rindex(b"PK\x03\x04", 0, data.index(b"models/model.json"))
    data[at + 26 : at + 28] = (10_000).to_bytes(2, "little")
    return bytes(data)


def _flat(name: str) -> bytes:
    """Return a zip file with an entry outside folders."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr(name, "")
    return stream.getvalue()


def _huge(model: Any) -> None:
    """Let a convolution have a padding that fits no integer of ONNX."""
    nodes = model["graph_module"]["graph"]["nodes"]
    node = next(n for n in nodes if ".conv" in n["target"])
    (padding,) = (i for i in node["inputs"] if i["name"] == "padding")
    padding["arg"]["as_ints"] = [10**30 for _ in padding["arg"]["as_ints"]]


DAMAGED: dict[str, tuple[Callable[[], bytes], str]] = {
    "truncated": (lambda: files.content("perceptron")[:3000], "truncated"),
    "no-graph": (lambda: _without("models/model.json"), "0 exported programs"),
    "no-weight": (lambda: _without("data/weights/weight_0"), "weight_0`: missing"),
    "short-weight": (lambda: _with(data__weights__weight_0=b"1234"), "needs"),
    "long-name": (_long_name, "model.json`: damaged"),
    "two-graphs": (lambda: _with(models__b_json=b"{}"), "2 exported programs"),
    "version": (lambda: _with(archive_version=b"7"), "version"),
    "big-endian": (lambda: _with(byteorder=b"big"), "byte order"),
    "not-json": (lambda: _with(models__model_json=b"{"), "JSON"),
    "deep-json": (lambda: _with(models__model_json=b"[" * 10**6), "JSON"),
    "list-json": (lambda: _with(models__model_json=b"[]"), "JSON object"),
    "compressed": (_compressed, "compressed"),
    "too-large": (_overlapping, "more bytes than the file"),
    "other-zip": (lambda: files.packed({"word/document.xml": b""}), "not of an exported"),
    "flat-zip": (lambda: _flat("document.xml"), "not of an exported"),
    "npz": (lambda: npz_bytes({"a": np.zeros(1)}), "this is an .npz file of arrays, not a model"),
    "outside": (lambda: _with(**{"..__evil": b""}), "not a plain path"),
    "schema": (
        lambda: files.edited("perceptron", lambda m: m["schema_version"].update(major=99)),
        "schema version 99",
    ),
    "half-characters": (lambda: _node(lambda n: n.update(name="\ud800")), "JSON"),
    "compiled": (
        lambda: files.packed(
            {"archive_format": b"pt2", "archive_version": b"0", "data/aotinductor/m/m.so": b""}
        ),
        "AOTInductor",
    ),
    "sizes": (lambda: _meta(lambda c: _sizes(c, [1 << 20, 1 << 20])), "more than the limit"),
    "negative": (lambda: _meta(lambda c: _sizes(c, [-1, 4])), "damaged"),
    "wrong-shape": (lambda: _meta(lambda c: _sizes(c, [4, 4])), "stored as float32 [4, 4]"),
    "undefined": (
        lambda: _node(lambda n: n["inputs"][0]["arg"]["as_tensor"].update(name="ghost")),
        "defined nowhere",
    ),
    "twice": (lambda: _graph(lambda g: g["nodes"].append(g["nodes"][2])), "exists already"),
    "unknown": (lambda: _node(lambda n: n.update(target="torch.ops.mylib.f.default")), "mylib"),
    "huge-number": (lambda: files.edited("lines", _huge), "outside of 64 bits"),
    "no-arguments": (lambda: _node(lambda n: n.update(inputs=[])), "make no sense"),
    "strange-argument": (
        lambda: _node(lambda n: n["inputs"][0].update(arg={"as_custom_obj": {"name": "x"}})),
        "as_custom_obj",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_archives(name: str, tmp_path: Path) -> None:
    make, text = DAMAGED[name]
    path = tmp_path / f"{name}.pt2"
    path.write_bytes(make())
    assert text in str(_refused(path))
