"""The self-check: inputs that find what is wrong, stored in few bytes, the same everywhere."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from bnncc import agreement as verify
from bnncc.cli import main as cli
from bnncc.driver import compile_model
from bnncc.errors import ArtifactError, InputError, VerificationError
from bnncc.frontend.onnx import load
from bnncc.ir.evaluate import evaluate
from bnncc.options import CompileOptions
from bnncc.runtime import container, selfcheck
from bnncc.runtime.artifact import Artifact
from bnncc.runtime.manifest import TensorInfo, infos
from bnncc.runtime.selfcheck import LEAST_BYTES, STYLES, Check, Source, draw, pack, unpack
from bnncc.verification import confirm, inputs
from tests.devices import DIGITS
from tests.kernel_harness import HERE

FLOATS = TensorInfo("x", (1, 3, 40, 50), "float32")


def parsed(text: str, **constants: Any) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 17]> net {text}')
    for name, value in constants.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), name))
    return model


def f4(*values: float) -> np.ndarray:
    return np.array(values if len(values) > 1 else values[0], np.float32)


def compiled(model: Any, **options: Any) -> Artifact:
    return compile_model(model, CompileOptions(threads=1, **options))


def test_inputs_are_the_same_everywhere() -> None:
    """They are drawn again on other machines, with other versions of NumPy."""
    source = Source(points=(-1.0, 0.1, 127.5), scale=2.0)
    info = dataclasses.replace(FLOATS, shape=(7, 11))
    digests = {
        style: hashlib.sha256(draw([info], [source], style, 5)["x"].tobytes()).hexdigest()[:12]
        for style in STYLES
    }
    assert digests == DIGESTS
    integers = TensorInfo("i", (1000,), "int64")
    values = draw([integers], [Source.of("int64")], "ordinary", 0)["i"]
    assert (values.min(), values.max()) == (-128, 127)


DIGESTS = {
    "ordinary": "70bf4cfa7feb", "edges": "9c24f4cfd360", "zeros": "f5d6141be8e9",
    "wide": "3f00d6669eb6",
}  # fmt: skip


def test_styles() -> None:
    source = Source(points=(3.0, 5.0))
    made = {style: draw([FLOATS], [source], style, 0)["x"] for style in STYLES}
    ordinary = made["ordinary"]
    assert abs(ordinary.mean()) < 0.1
    assert abs(ordinary.std() - 1) < 0.1
    edges = made["edges"]
    for point in (3.0, 5.0, 0.0):
        assert (edges == point).mean() > 0.1
    zeros = made["zeros"]
    assert 0.7 < (zeros == 0).mean() < 0.8
    assert 0.3 < np.signbit(zeros[zeros == 0]).mean() < 0.7
    wide = np.abs(made["wide"])
    assert wide.min() < 1e-6
    assert wide.max() > 300
    limited = Source.of("int32", dataclasses.replace(selfcheck.NO_LIMITS, low=-4, high=3))
    for style in STYLES:
        values = draw([TensorInfo("i", (500,), "int32")], [limited], style, 1)["i"]
        assert (values.min(), values.max()) == (-4, 3)
    nonzero = Source.of("int8", dataclasses.replace(selfcheck.NO_LIMITS, nonzero=True))
    for style in STYLES:
        values = draw([TensorInfo("i", (500,), "int8")], [nonzero], style, 1)["i"]
        assert values.all()
        assert values.min() < 0 < values.max()


def points_of(model: onnx.ModelProto) -> set[float]:
    graph = load(model)
    (source,) = inputs.sources(graph, infos(graph, graph.inputs)).sources
    return set(source.points)


def test_points_are_where_a_graph_changes() -> None:
    """Each point has neighbours on which the model itself gives something else."""
    text = "(float[1, 64] x) => (float[1, 64] y) {{ {} }}"
    clip = parsed(text.format("y = Clip(x, low, high)"), low=f4(-6), high=f4(0.75))
    assert {-6.0, 0.75} <= points_of(clip)
    assert float(np.nextafter(f4(0.75), f4(1))) in points_of(clip)
    levels = parsed(
        text.format("a = Clip(x, zero, one) b = Mul(a, k) c = Round(b) y = Div(c, k)"),
        zero=f4(0), one=f4(1), k=f4(3),
    )  # fmt: skip
    shifted = parsed(
        text.format("a = Mul(x, s) b = Add(a, t) c = Greater(b, zero) y = Where(c, s, t)"),
        s=f4(-0.7), t=f4(100), zero=f4(0),
    )  # fmt: skip
    for model, wanted in ((levels, (0.5 / 3, 1.5 / 3, 2.5 / 3)), (shifted, (100 / 0.7,))):
        found = np.array(sorted(points_of(model)), np.float32)
        session = ort.InferenceSession(model.SerializeToString())
        for place in wanted:
            near = found[np.abs(found / place - 1) < 1e-3]
            assert near.size >= 2, (place, found)
            x = np.resize(near, (1, 64)).astype(np.float32)
            assert len(set(session.run(None, {"x": x})[0].ravel())) == 2, place


@pytest.mark.parametrize(
    "indices",
    [
        "f = Floor(x) i = Cast<to = 7>(f)",  # only 0 <= x < 10
        "f = Mul(x, ten) g = Round(f) i = Cast<to = 7>(g)",
        "s = Sub(x, three) f = Floor(s) i = Cast<to = 7>(f)",
        "f = Ceil(x) j = Cast<to = 7>(f) i = Div(nine, j)",
    ],
)
def test_floats_that_indices_are_computed_from(indices: str) -> None:
    text = f"(float[4] x) => (float[4, 3] y) {{ {indices} y = Gather<axis = 0>(t, i) }}"
    table = np.arange(30, dtype=np.float32).reshape(10, 3)
    model = parsed(text, t=table, ten=f4(10), three=f4(3), nine=np.int64(9))
    artifact = compile_model(model, CompileOptions(threads=1))
    x = np.array([0.25, 0.5, 0.75, 0.9], np.float32) + (3 if "three" in indices else 0)
    (wanted,) = ort.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    np.testing.assert_array_equal(artifact.run({"x": x})["y"], wanted)
    with pytest.raises(InputError, match=r"index lies outside|division by 0"):
        artifact.run({"x": np.array([0.5, 0, 1e3, -1e3], np.float32)})


def test_indices_that_nothing_leads_inside() -> None:
    far = "i = Cast<to = 7>(x) j = Add(i, far) y = Gather(t, j)"
    text = f"(float[4] x) => (float[4, 3] y) {{ {far} }}"
    model = parsed(text, t=np.zeros((10, 3), np.float32), far=np.int64(10**6))
    with pytest.raises(InputError, match="index lies outside"):
        compile_model(model, CompileOptions())


def test_ranges_that_a_graph_tells() -> None:
    text = "(float[1, 64] x) => (uint8[1, 64] y) { y = QuantizeLinear(x, s, z) }"
    graph = load(parsed(text, s=f4(0.5), z=np.uint8(0)))
    (source,) = inputs.sources(graph, infos(graph, graph.inputs)).sources
    made = draw(infos(graph, graph.inputs), [source], "ordinary", 0)
    assert len(set(evaluate(graph, made)["y"].ravel().tolist())) > 20


def test_integers_on_which_a_graph_can_be_evaluated() -> None:
    text = (
        "(int64[1, 4] i, int32[4] d) => (float[1, 4] y, int32[4] q) "
        "{ j = Mul(i, two) y = Gather(table, j) e = Sub(d, three) q = Div(d, e) }"
    )
    constants = {"two": np.array([2]), "three": np.array([3], np.int32)}
    table = np.arange(7, dtype=np.float32)
    artifact = compiled(parsed(text, table=table, **constants))
    for check in artifact.selfchecks():
        assert (np.abs(check.inputs["i"]) <= 3).all()
        assert (check.inputs["d"] != 3).all()
    assert all(result["passed"] for result in artifact.selfcheck())


def sample(size: int, checks: int = 3) -> tuple[list[Check], list[TensorInfo], list[TensorInfo]]:
    given = [TensorInfo("x", (size,), "float32")]
    made = [TensorInfo("y", (size,), "float32"), TensorInfo("b", (size,), "bool")]
    out = []
    for number in range(checks):
        x = draw(given, [Source()], STYLES[number], number)
        out.append(Check(x, {"y": x["x"] * 3, "b": x["x"] > 0}, STYLES[number], number))
    return out, given, made


@pytest.mark.parametrize("size", [1, 1000, 300_000])
def test_stored_and_read_back(size: int) -> None:
    checks, given, made = sample(size)
    data = pack(checks, given, made, [Source()], LEAST_BYTES)
    assert len(data) <= LEAST_BYTES
    stored = unpack(data, given, made)
    assert [s.style for s in stored] == list(STYLES[:3])
    for check, read in zip(checks, stored, strict=True):
        np.testing.assert_array_equal(read.inputs["x"], check.inputs["x"])
        for expected in read.expected:
            right = check.outputs[expected.name]
            assert expected.compare(right)["passed"]
            assert not expected.compare(right[::-1] if size > 1 else ~right.view("?")[:1])["passed"]
            assert not expected.compare(right.reshape(1, -1))["passed"]
            if size == 300_000:
                assert expected.where is not None
                assert expected.where.size > 500
                # Wherever a tenth of the values is wrong, some places see it.
                for start in range(0, size, size // 10):
                    wrong = right.copy()
                    part = wrong[start : start + size // 10]
                    part[...] = ~part if part.dtype == bool else part + 1
                    assert not expected.compare(wrong)["passed"]


def test_what_is_not_sure_is_left_out() -> None:
    checks, given, made = sample(100, 1)
    sure = np.arange(100) % 2 == 0
    checks = [dataclasses.replace(checks[0], sure={"y": sure, "b": np.zeros(100, bool)})]
    (read,) = unpack(pack(checks, given, made, [Source()], LEAST_BYTES), given, made)
    y = checks[0].outputs["y"].copy()
    y[~sure] += 1
    assert read.expected[0].compare(y)["passed"]
    y[0] += 1
    assert not read.expected[0].compare(y)["passed"]
    assert read.expected[0].compare(y)["compared"] == 50
    nothing = read.expected[1].compare(~checks[0].outputs["b"])
    assert nothing["passed"]
    assert nothing["compared"] == 0


@pytest.mark.parametrize(
    "recipe",
    [b"", b"{}", b"[]", b'{"checks": [], "sources": []}', b'{"checks": [{}], "sources": [{}]}',
     b'{"sources":[{"points":[]}],"checks":[{"style":"odd","seed":1,"inputs":[""],"outputs":[]}]}',
     b'{"sources":[{"points":[]}],"checks":[{"style":"wide","seed":1,"inputs":[""],"outputs":[]}]}',
     b'{"sources":[{"points":[],"low":5,"high":1}],"checks":[{"style":"wide","seed":-1,"inputs":[]}]}'],
)  # fmt: skip
def test_hostile_recipes(recipe: bytes) -> None:
    _, given, made = sample(10)
    from bnncc.files import npz_bytes

    data = npz_bytes({"recipe": np.frombuffer(recipe, np.uint8)})
    with pytest.raises(ArtifactError, match=r"selfcheck\.npz"):
        unpack(data, given, made)


def test_absurd_inputs_are_not_drawn() -> None:
    checks, given, made = sample(10)
    data = pack(checks, given, made, [Source()], 100)
    huge = [dataclasses.replace(given[0], shape=(2**38,))]
    with pytest.raises(ArtifactError, match=r"more than 1,073,741,824 bytes"):
        unpack(data, huge, made)
    with pytest.raises(ArtifactError, match=r"input `x` does not match its checksum"):
        unpack(data, [dataclasses.replace(given[0], shape=(11,))], made)


def test_large_images_are_not_stored() -> None:
    model = parsed(
        "(float[1, 16, 96, 96] x) => (float[1, 16, 96, 96] y) "
        "{ s = Sign(x) y = Conv <pads = [1, 1, 1, 1]> (s, w) }",
        w=np.where(np.random.default_rng(0).random((16, 16, 3, 3)) < 0.5, -1, 1).astype("f4"),
    )
    artifact = compiled(model)
    assert artifact.report["bytes"]["selfcheck"] <= LEAST_BYTES
    assert len(artifact.selfchecks()) == 4
    assert all(result["passed"] for result in artifact.selfcheck())
    with pytest.raises(ArtifactError, match="only some values"):
        artifact.selfcheck_arrays()
    whole = verify.whole_check(model, artifact, 1)
    session = ort.InferenceSession(model.SerializeToString())
    np.testing.assert_array_equal(session.run(None, dict(whole.inputs))[0], whole.outputs["y"])
    np.testing.assert_array_equal(whole.inputs["x"], artifact.selfchecks()[1].inputs["x"])


def test_all_targets_have_the_same_inputs() -> None:
    made = [compiled(DIGITS / "digits.onnx", target=t) for t in HERE[:2]]
    one, other = (a.selfchecks() for a in made)
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a.inputs["images"], b.inputs["images"])
        np.testing.assert_array_equal(a.expected[0].values, b.expected[0].values)


def test_many_checks_where_outputs_say_little() -> None:
    text = (
        "(float[1, 64] x) => (int64[1] y) "
        "{ a = MatMul(x, w) y = ArgMax <axis = 1, keepdims = 0> (a) }"
    )
    w = np.random.default_rng(0).standard_normal((64, 10)).astype("f4")
    assert len(compiled(parsed(text, w=w)).selfchecks()) == 24


def other_weights(artifact: Artifact) -> Artifact:
    """Return an artifact whose library holds another constant, under the right checksums."""
    weight = np.float32(1.2345).tobytes() * 3
    assert artifact.library.count(weight) == 1
    library = artifact.library.replace(weight, np.float32(1.3).tobytes() * 3)
    members = {**artifact._members, container.LIBRARY: library}
    return Artifact(container.sealed(artifact.manifest, members), members)


def test_loading_with_a_self_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "(float[N, 3] x) => (float[N, 3] y) { a = Mul(x, w) y = Tanh(a) }"
    artifact = compiled(parsed(text, w=np.full(3, 1.2345, "f4")))
    artifact.save(tmp_path / "good.bnncc")
    other_weights(artifact).save(tmp_path / "bad.bnncc")
    Artifact.load(tmp_path / "good.bnncc", selfcheck=True)
    Artifact.load(tmp_path / "bad.bnncc")
    said = r"bad\.bnncc: the self-check fails: `y` has a max abs error"
    with pytest.raises(VerificationError, match=said):
        Artifact.load(tmp_path / "bad.bnncc", selfcheck=True)
    np.savez(tmp_path / "in.npz", x=np.ones((2, 3), np.float32))
    for name, code in (("good", 0), ("bad", 1)):
        out = tmp_path / f"{name}.npz"
        arguments = ["--input", str(tmp_path / "in.npz"), "--output", str(out), "--selfcheck"]
        assert cli.main(["run", str(tmp_path / f"{name}.bnncc"), *arguments]) == code
        assert out.exists() == (name == "good")
    assert "the self-check fails" in capsys.readouterr().err


def test_verify_finds_another_constant() -> None:

    text = (
        "(float[N, 3] x) => (int64[N] y) { a = Mul(x, w) y = ArgMax <axis = 1, keepdims = 0> (a) }"
    )
    model = parsed(text, w=np.full(3, 1.2345, "f4"))
    artifact = compiled(model)
    assert verify.verify(model, artifact)["verdict"] == "pass"
    result = verify.verify(model, other_weights(artifact))
    assert result["verdict"] == "fail"
    assert "lib.so lacks 1 constants of the model" in result["note"]


def test_a_library_for_other_inputs_is_refused(tmp_path: Path) -> None:
    text = "(float[1, {0}] x) => (float[1, {0}] y) {{ y = Tanh(x) }}"
    small, large = (compiled(parsed(text.format(n))) for n in (8, 16))
    members = {**large._members, container.LIBRARY: small.library}
    mixed = Artifact(container.sealed(large.manifest, members), members)
    with pytest.raises(ArtifactError, match=r"lib\.so cannot run the inputs that the manifest"):
        mixed.run({"x": np.zeros((1, 16), np.float32)})
    mixed.save(tmp_path / "mixed.bnncc")
    with pytest.raises(ArtifactError, match=r"lib\.so cannot run the inputs"):
        Artifact.load(tmp_path / "mixed.bnncc", selfcheck=True)


class Wrong:
    """An artifact whose outputs are changed on the way."""

    def __init__(self, artifact: Artifact, change: Any) -> None:
        self._artifact, self._change = artifact, change

    def run(self, feeds: Any) -> Any:
        return self._change(self._artifact.run(feeds))

    def session(self, threads: int | None = None) -> Any:
        return self._artifact.session(threads=threads)


def tied_and_not() -> onnx.ModelProto:
    """Return a model with two outputs: `s` has ties wherever x is 1, `t` depends on none."""
    return parsed(
        "(float[1, 3, 4, 4] x) => (float[1, 1, 4, 4] s, float[1, 3, 4, 4] t) "
        "{ c = Conv(x, w) g = GreaterOrEqual(c, zero) s = Where(g, one, minus) t = Abs(x) }",
        w=f4(0.1, 0.2, -0.3).reshape(1, 3, 1, 1), zero=f4(0), one=f4(1), minus=f4(-1),
    )  # fmt: skip


def test_a_tie_excuses_only_what_depends_on_it() -> None:
    from bnncc.driver import lowered

    model, options = tied_and_not(), CompileOptions(threads=1)
    artifact = compile_model(model, options)
    network = lowered(model, options)
    judge = confirm.Judge(network.module, network.checks, artifact)
    x = np.random.default_rng(0).standard_normal((1, 3, 4, 4)).astype(np.float32)
    x[..., 0] = 1  # 0.1 + 0.2 - 0.3
    check = Check({"x": x}, evaluate(load(model), {"x": x}))

    def changed(name: str, where: Any) -> Any:
        def change(outputs: Any) -> Any:
            outputs[name] = outputs[name].copy()
            outputs[name][where] = -check.outputs[name][where]
            return outputs

        return Wrong(artifact, change)

    tie, other = (0, 0, slice(None), 0), (0, 0, 1, 1)
    (kept,) = confirm.confirmed(changed("s", tie), [check], judge)
    assert kept.sure is not None
    assert not kept.sure["s"][tie].any()
    assert kept.sure["s"][other]
    assert kept.sure["t"].all()
    for name, where, many in (("s", other, "1 of 16"), ("t", tie, "4 of 48"), ("t", other, "1 of")):
        with pytest.raises(VerificationError, match=f"{many} .*values of `{name}` are wrong"):
            confirm.confirmed(changed(name, where), [check], judge)
