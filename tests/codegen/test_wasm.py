"""Networks in WebAssembly: run in Node and in a browser, without TVM."""

from __future__ import annotations

import functools
import http.server
import itertools
import json
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper

from bnncc.cli import main as cli
from bnncc.codegen import link, wasm_text
from bnncc.driver import compile_c
from bnncc.errors import TargetError
from bnncc.frontend.onnx import load
from bnncc.ir.evaluate import evaluate
from bnncc.options import CompileOptions
from tests.codegen.test_c_network import all_ties, odd_network, unpacked
from tests.devices import DIGITS
from tests.node import NODE, needs_node

pytestmark = pytest.mark.sampled(3)

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WEB = DIGITS.parent / "web"

_RUN = """\
import { readFileSync } from "node:fs";
import { load } from "./digits.mjs";
const images = new Float32Array(Uint8Array.from(readFileSync("images.bin")).buffer);
const network = await load(), made = [];
for (let i = 0; i < images.length; i += 64) {
  made.push(...network.run({ images: images.subarray(i, i + 64) }).logits);
}
console.log(JSON.stringify(made));
"""


def wasm(model: object, target: str = "wasm32-simd128") -> dict[str, bytes]:
    return compile_c(model, CompileOptions(target=target), form="wasm").files


def written(files: dict[str, bytes], folder: Path) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def node(folder: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [NODE, *arguments], cwd=folder, capture_output=True, text=True, timeout=300
    )
    return done.returncode, done.stdout + done.stderr


@functools.cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return the images, and what the model makes of them."""
    with np.load(DIGITS / "test_images.npz") as data:
        images = data["images"]
    graph = load(DIGITS / "digits.onnx")
    made = [evaluate(graph, {graph.inputs[0]: x[None]})[graph.outputs[0]] for x in images]
    return images, np.concatenate(made)


@needs_node
@pytest.mark.parametrize("target", ["wasm32", "wasm32-simd128"])
def test_all_digits_in_node(target: str, tmp_path: Path) -> None:
    asked = ("--target", target, "-o", str(tmp_path / "web"))
    assert cli.main(["compile", str(DIGITS / "digits.onnx"), *asked]) == 0
    folder = tmp_path / "web"
    assert node(folder, "check.mjs") == (0, "logits: 0 of 10 values wrong\n")
    images, right = digits()
    (folder / "images.bin").write_bytes(images.tobytes())
    (folder / "run.mjs").write_text(_RUN)
    code, said = node(folder, "run.mjs")
    assert code == 0, said
    made = np.array(json.loads(said), np.float32).reshape(right.shape)
    np.testing.assert_allclose(made, right, rtol=1e-4, atol=1e-4)
    assert (made.argmax(1) == right.argmax(1)).all()
    wrong = right[0] + np.eye(10, dtype=np.float32)[3]
    (folder / "check" / "images.bin").write_bytes(images[0].tobytes())
    (folder / "check" / "logits.bin").write_bytes(wrong.tobytes())
    assert node(folder, "check.mjs") == (1, "logits: 1 of 10 values wrong\n")


@needs_node
def test_digits_in_a_browser(tmp_path: Path) -> None:
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    page = tmp_path / "page"
    subprocess.run([sys.executable, WEB / "build.py", page], check=True, timeout=300)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def guess_type(self, path: str) -> str:
            return {".mjs": "text/javascript", ".html": "text/html"}.get(Path(path).suffix, "")

        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Handler, directory=str(page))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=60000")
        place = (f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom")
        url = f"http://127.0.0.1:{server.server_port}/index.html"
        command = [CHROMIUM, *flags, *place, url]
        for _ in range(3):  # on a busy machine the virtual clock may run out before the files come
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            if ">Loading ...<" not in done.stdout:
                break
        server.shutdown()
    found = re.search(r'id="said" data-digits="(\d+)">(\d+) of 450 images right', done.stdout)
    assert found, done.stdout[-2000:] + done.stderr[-2000:]
    assert found[1] == "".join(map(str, digits()[1].argmax(1)))


@needs_node
def test_outputs_of_every_kind(tmp_path: Path) -> None:
    """Outputs that are inputs, constants and each other are copied."""
    folder = written(wasm(odd_network()), tmp_path)
    code, said = node(folder, "check.mjs")
    assert (code, said.count(": 0 of ")) == (0, 6), said


@needs_node
def test_kernels_read_what_the_one_before_wrote(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sizes = (37, 128, 65, 131, 64)
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> dense (float[1, 37] x) => (float[1, 64] y) '
        "{ s0 = Sign(x) "
        + " ".join(
            f"c{i} = MatMul(s{i}, w{i}) n{i} = Add(c{i}, b{i}) s{i + 1} = Sign(n{i})"
            for i in range(4)
        )
        + " y = Identity(s4) }"
    )
    for number, (inner, outer) in enumerate(itertools.pairwise(sizes)):
        arrays = {
            "w": rng.choice([-1.0, 1.0], (inner, outer)),
            "b": rng.integers(-8, 8, outer) + 0.3,
        }
        for name, array in arrays.items():
            stored = onnx.numpy_helper.from_array(array.astype(np.float32), f"{name}{number}")
            model.graph.initializer.append(stored)
    assert node(written(wasm(model), tmp_path), "check.mjs") == (0, "y: 0 of 64 values wrong\n")


def network_of(op: str, kind: int = TensorProto.FLOAT, operands: int = 1) -> onnx.ModelProto:
    names = ["x", "y"][:operands]
    graph = helper.make_graph(
        [helper.make_node(op, names, ["z"])], "one",
        [helper.make_tensor_value_info(name, kind, (1, 40)) for name in names],
        [helper.make_tensor_value_info("z", kind, (1, 40))],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@needs_node
@pytest.mark.parametrize(
    "op", ["Exp", "Tanh", "Sigmoid", "Sin", "Atan", "Erf", "Round", "Softmax", "Log", "Cosh"]
)
def test_functions_of_floats(op: str, tmp_path: Path) -> None:
    folder = written(wasm(network_of(op)), tmp_path)
    code, said = node(folder, "check.mjs")
    assert code == 0, said


@needs_node
@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_halves(kind: int, tmp_path: Path) -> None:
    folder = written(wasm(network_of("Mul", kind, 2)), tmp_path)
    code, said = node(folder, "check.mjs")
    assert code == 0, said


def test_powers_are_those_of_c() -> None:
    """Where JavaScript says NaN and C says 1."""
    if NODE is None:
        pytest.skip("needs node")
    values = "[1, -1, -1, 2, 1, -1]", "[NaN, Infinity, -Infinity, 3, -Infinity, NaN]"
    asked = f"{values[0]}.map((x, i) => ({wasm_text.FUNCTIONS['powf']})(x, {values[1]}[i]))"
    assert node(Path.cwd(), "-p", asked)[1].strip() == "[ 1, 1, 1, 8, 1, NaN ]"
    rounded = "[0.5, -0.5, 2.5, -2.5, 0.49999997, 8388607.5].map"
    asked = f"{rounded}({wasm_text.FUNCTIONS['roundf']}).join()"
    assert node(Path.cwd(), "-p", asked)[1].strip() == "1,-1,3,-3,0,8388608"


@needs_node
def test_wrong_inputs_are_named(tmp_path: Path) -> None:
    folder = written(wasm(DIGITS / "digits.onnx"), tmp_path)
    program = (
        'import { load } from "./digits.mjs"; const n = await load();'
        "for (const images of [new Float32Array(63), new Float64Array(64), undefined])"
        "  try { n.run({ images }) } catch (e) { console.log(`${e}`) }"
    )
    (folder / "wrong.mjs").write_text(program)
    assert node(folder, "wrong.mjs")[1].splitlines() == [
        "TypeError: input images: found Float32Array of 63, expected Float32Array of 64",
        "TypeError: input images: found Float64Array of 64, expected Float32Array of 64",
        "TypeError: input images: found undefined of undefined, expected Float32Array of 64",
    ]


@needs_node
def test_an_index_outside_its_tensor_is_an_error(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("Gather", ["data", "index"], ["y"], axis=0)], "gather",
        [
            helper.make_tensor_value_info("data", TensorProto.FLOAT, (4,)),
            helper.make_tensor_value_info("index", TensorProto.INT64, (2,)),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (2,))],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    folder = written(wasm(model), tmp_path)
    (name,) = [
        n.removesuffix(".mjs") for n in wasm(model) if n.endswith(".mjs") and n[:5] != "check"
    ]
    program = (
        f'import {{ load }} from "./{name}.mjs"; const n = await load();'
        "const data = Float32Array.of(1, 2, 3, 4);"
        "console.log(n.run({ data, index: BigInt64Array.of(3n, -4n) }).y.join());"
        "try { n.run({ data, index: BigInt64Array.of(0n, 4n) }) } catch (e) { console.log(e.name) }"
        "console.log(n.run({ data, index: BigInt64Array.of(1n, 1n) }).y.join());"
    )
    (folder / "run.mjs").write_text(program)
    assert node(folder, "run.mjs") == (0, "4,1\nRangeError\n2,2\n")


@needs_node
def test_files_are_the_same_each_time_and_in_a_tar(tmp_path: Path) -> None:
    network = compile_c(
        DIGITS / "digits.onnx", CompileOptions(target="wasm32-simd128"), form="wasm"
    )
    network.save(tmp_path / "x.tar")
    folder = unpacked((tmp_path / "x.tar").read_bytes(), tmp_path / "unpacked")
    for name, data in wasm(DIGITS / "digits.onnx").items():
        assert (folder / name).read_bytes() == data
    parts = network.report["bytes"]
    assert parts["total"] == (tmp_path / "x.tar").stat().st_size
    assert network.files["digits.wasm"].find(b"TVM") < 0


def test_what_is_no_webassembly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, output = str(DIGITS / "digits.onnx"), tmp_path / "x"
    asked = ("--format", "wasm", "--target", "arm64", "-o", str(output))
    assert cli.main(["compile", model, *asked]) == 2
    said = "--format wasm needs a WebAssembly target, and arm64 is not one"
    assert said in capsys.readouterr().err
    output.mkdir()
    (output / "file").touch()
    assert cli.main(["compile", model, "--target", "wasm32", "-o", str(output)]) == 2
    assert "is not an empty folder" in capsys.readouterr().err
    assert [p.name for p in output.iterdir()] == ["file"]


@needs_node
def test_functions_that_no_host_has_are_refused_by_name() -> None:
    from tvm import te, tirx

    from bnncc.codegen import bare
    from bnncc.codegen.pipeline import tvm_target
    from bnncc.targets.catalog import resolve

    x = te.placeholder((4,), "float32", name="x")
    y = te.compute((4,), lambda i: tirx.call_pure_extern("float32", "lgammaf", x[i]))
    func = te.create_prim_func([x, y])
    content, *_ = bare.build({"kernel": func}, tvm_target(resolve("wasm32")))
    with pytest.raises(TargetError, match="calls `lgammaf`, which WebAssembly lacks"):
        link.link_wasm(content, exports=["kernel"], imports=wasm_text.FUNCTIONS)


def test_a_linker_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_wasm_linkers", lambda: iter(()))
    with pytest.raises(TargetError, match="no linker for WebAssembly found"):
        link.link_wasm(b"", exports=[])


def test_an_object_for_other_tools() -> None:
    made = compile_c(DIGITS / "digits.onnx", CompileOptions(target="wasm32"))
    assert made.files["digits_kernels.o"].startswith(b"\0asm")
    assert "emcc" in made.files["README.md"].decode()
    assert "device" not in made.report


@needs_node
def test_an_output_without_values_to_compare(tmp_path: Path) -> None:
    said = node(written(wasm(all_ties()), tmp_path), "check.mjs")
    assert said == (0, "y: no values to compare\nz: 0 of 8 values wrong\n")
