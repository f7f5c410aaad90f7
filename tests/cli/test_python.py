"""The package in Python: what it exports, at what price, and what it says of wrong types."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

import bnncc
from bnncc import options
from bnncc.errors import TuningError, UsageError
from tests.cli.test_cli import ENVIRONMENT
from tests.devices import DIGITS
from tests.tiny import tiny

MODEL = str(DIGITS / "digits.onnx")


def test_exports_are_lazy_and_complete() -> None:
    program = (
        "import sys, bnncc\n"
        "bnncc.BnnccError, bnncc.Uint8Input\n"
        "heavy = [m for m in ('numpy', 'tvm', 'onnx', 'bnncc.driver') if m in sys.modules]\n"
        "assert not heavy, heavy\n"
        "assert set(bnncc.__all__) <= set(dir(bnncc))\n"
        "for name in bnncc.__all__: getattr(bnncc, name)\n"
        "import bnncc.agreement, bnncc.tuning\n"
        "assert callable(bnncc.verify) and callable(bnncc.tune) and callable(bnncc.bench)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="has no attribute"):
        _ = bnncc.nothing


def test_bench_needs_no_compiler(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "for name in ('xgboost', 'torch', 'bnncc.driver'): sys.modules[name] = None\n"
        "import bnncc\n"
        "print(bnncc.bench(sys.argv[1], repeat=3)['repeat'])\n"
    )
    tiny().save(tmp_path / "a.bnncc")
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "a.bnncc")],
        env=ENVIRONMENT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout == "3\n", done.stderr


def test_artifacts_need_no_onnx(tmp_path: Path) -> None:
    program = (
        "import os, sys\n"
        "for name in ('onnx', 'onnxruntime', 'google.protobuf', 'bnncc.driver', 'psutil',\n"
        "             'cloudpickle', 'tornado', 'torch', 'scipy'): sys.modules[name] = None\n"
        "os.environ['TVM_USE_RUNTIME_LIB'] = '1'\n"
        "import numpy as np, bnncc\n"
        "from bnncc.cli import main as cli\n"
        "artifact = bnncc.Artifact.load('a.bnncc', selfcheck=True)\n"
        "x = np.ones((2, 8), np.float32)\n"
        "np.savez('in.npz', **{'x/in:0': x, 'y': x})\n"
        "outputs = artifact.run({'x/in:0': x, 'y': x})\n"
        "assert bnncc.bench(artifact, repeat=3)['repeat'] == 3\n"
        "assert bnncc.explain('a.bnncc') == artifact.report\n"
        "for command in ('run a.bnncc --input in.npz --output out.npz --selfcheck',\n"
        "                'bench a.bnncc --repeat 3', 'explain a.bnncc', 'targets'):\n"
        "    assert cli.main(command.split()) == 0, command\n"
        "with np.load('out.npz') as found:\n"
        "    assert all((found[k] == outputs[k]).all() for k in outputs)\n"
        "for name in ('bnncc.driver', 'bnncc.agreement'): sys.modules.pop(name, None)\n"
        "for call in (lambda: bnncc.compile('m.onnx'), lambda: bnncc.verify('m.onnx', 'a.bnncc'),\n"
        "             lambda: bnncc.explain('m.onnx'), lambda: bnncc.tune('m.onnx')):\n"
        "    try: call()\n"
        "    except bnncc.BnnccError as error: print(error, file=sys.stderr)\n"
        "assert cli.main(['verify', 'in.npz', 'a.bnncc']) == 1\n"
    )
    tiny().save(tmp_path / "a.bnncc")
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    missing = "this needs onnx, which is not installed; only artifacts can be used without it\n"
    said = f"{missing * 4}error: {missing}\nhint: pip install onnx\n"
    assert (done.returncode, done.stderr) == (0, said)


def test_only_tune_needs_xgboost(tmp_path: Path) -> None:
    program = (
        "import os, sys\n"
        "sys.modules['xgboost'] = None\n"
        "from bnncc.cli import main as cli\n"
        "model, images = sys.argv[1:]\n"
        "for command in (f'compile {model} -o a', f'run a --input {images} --output o.npz',\n"
        "                f'verify {model} a', f'explain {model}', 'bench a --repeat 3'):\n"
        "    assert cli.main(command.split()) == 0, command\n"
        "before = os.listdir()\n"
        "sys.stderr = open('said', 'w')\n"
        "assert cli.main(['tune', model]) == 1\n"
        "assert sorted(os.listdir()) == sorted([*before, 'said'])\n"
    )
    arguments = [sys.executable, "-c", program, MODEL, str(DIGITS / "test_images.npz")]
    done = subprocess.run(arguments, env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "said").read_text() == (
        "error: tuning needs XGBoost, which is not installed\n\nhint: pip install 'bnncc[tune]'\n"
    )


def test_verbs(tmp_path: Path) -> None:
    artifact = bnncc.compile(MODEL, threads=1)
    path = tmp_path / "a.bnncc"
    artifact.save(path)
    assert bnncc.verify(MODEL, path)["passed"]
    assert bnncc.verify(MODEL, artifact, seed=1)["verdict"] == "pass"
    timed = bnncc.bench(path, repeat=3, threads=1, batch=2)
    assert (timed["repeat"], timed["network"]["batch"]) == (3, 2)
    report = bnncc.explain(path)
    assert report == artifact.report == bnncc.explain(artifact)
    assert bnncc.explain(MODEL, threads=1) == report
    with pytest.raises(UsageError, match="options are for models"):
        bnncc.explain(path, threads=1)


def test_tune_checks_its_arguments(tmp_path: Path) -> None:
    with pytest.raises(TuningError, match="no kernel matches zzz"):
        bnncc.tune(MODEL, tuning_dir=tmp_path / "logs", kernels="zzz")
    with pytest.raises(UsageError, match="not a regular expression"):
        bnncc.tune(MODEL, kernels="(")
    with pytest.raises(UsageError, match="measure is `watts`"):
        bnncc.tune(MODEL, measure="watts")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="unexpected keyword argument 'colour'"):
        bnncc.tune(MODEL, colour=1)
    assert list(tmp_path.iterdir()) == []


def compiled(**wrong: Any) -> Callable[[], Any]:
    return lambda: bnncc.compile(MODEL, **wrong)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: bnncc.compile(3), "model is of type int, expected a path, an onnx.ModelProto"),
        (lambda: bnncc.compile(None), "model is of type NoneType, expected a path"),
        (compiled(target=7), "target is of type int, expected a name, a path or a TargetSpec"),
        (compiled(threads="2"), "threads is of type str, expected an int"),
        (compiled(threads=True), "threads is of type bool, expected an int"),
        (compiled(seed=None), "seed is of type NoneType, expected an int"),
        (compiled(assume=None), "assume is of type NoneType, expected str"),
        (compiled(few_bit=["auto"]), "few_bit is of type list, expected str"),
        (compiled(check_finite=1), "check_finite is of type int, expected True or False"),
        (compiled(input_shapes=[1, 2]), "input_shapes is of type list, expected a mapping"),
        (compiled(input_shapes={"images": 3}), r"input_shapes\['images'\] is of type int"),
        (compiled(input_uint8=3), "input_uint8 is of type int, expected a sequence"),
        (compiled(input_uint8=["x:0,1"]), "input_uint8 is of type str, expected bnncc.Uint8Input"),
        (compiled(input_transform=5), "input_transform is of type int, expected text"),
        (compiled(tuning_dir=5), "tuning_dir is of type int, expected a sequence"),
        (compiled(tuning_dir=[5]), "tuning_dir is of type int, expected a path"),
        (compiled(tuning_dir=["x"], untuned=True), "tuning_dir cannot be combined with untuned"),
        (compiled(params=5), "params is of type int, expected a path"),
        (compiled(first_layer="int4"), "first_layer is `int4`, not one of float32, bfloat16"),
        (lambda: bnncc.Artifact.load(None), "path is of type NoneType"),
        (lambda: bnncc.bench(5), "path is of type int"),
        (lambda: bnncc.bench(tiny(), repeat="9"), "repeat is of type str, expected an int"),
        (lambda: bnncc.bench(tiny(), batch=1.5), "batch is of type float, expected an int"),
        (
            lambda: bnncc.bench(tiny(), dims={"N": "2"}),
            r"dims\['N'\] is of type str, expected an int",
        ),
        (lambda: bnncc.verify(MODEL, None), "path is of type NoneType"),
        (lambda: bnncc.verify(MODEL, tiny(), seed="a"), "seed is of type str, expected an int"),
        (lambda: tiny().run([1, 2]), "inputs are of type list, expected arrays by name"),
        (lambda: tiny().run(np.zeros(3)), "inputs are of type ndarray, expected arrays by name"),
        (lambda: bnncc.Uint8Input("x", 3, 1), "x`: mean and scale must be tuples of numbers"),
    ],
)
def test_wrong_types_are_one_line(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(bnncc.BnnccError, match=said) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_literals_are_the_choices() -> None:
    for name, kind in (
        ("assume", options.Assume),
        ("sign_zero", options.SignZero),
        ("float_conv", options.FloatConv),
        ("first_layer", options.FirstLayer),
        ("float_type", options.FloatType),
        ("few_bit", options.FewBit),
    ):
        assert options.CHOICES[name] == get_args(kind)
        assert getattr(options.CompileOptions(), name) in get_args(kind)


def test_one_folder_of_records_is_enough(tmp_path: Path) -> None:
    one = bnncc.compile(MODEL, tuning_dir=tmp_path, threads=1)
    assert one.manifest["options"]["records"] == 1


def test_shown() -> None:
    artifact = tiny()
    text = repr(artifact)
    assert text.startswith("<Artifact ")
    assert "x/in:0 float32[n, 8], y float32[n, 8] -> product float32[n, 8]" in text
    html = artifact._repr_html_()
    assert html.startswith("<table><caption>bnncc artifact of ")
    assert html.count("<tr>") == html.count("</tr>") == 6
    assert "product float32[n, 8]" in html
    artifact.manifest["model"] = "<script>"
    assert "<script>" not in artifact._repr_html_()
    image = bnncc.Uint8Input("x", (0.5,), (2.0,))
    assert eval(repr(image), {"Uint8Input": bnncc.Uint8Input}) == image
    assert pickle.loads(pickle.dumps(image)) == image
