"""Networks as strangers write them, as modules and as both of torch's exporters give them."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'bnncc[torch]'")

import bnncc  # noqa: E402
from bnncc.frontend import pytorch  # noqa: E402
from bnncc.frontend.onnx import load  # noqa: E402
from bnncc.ir.evaluate import evaluate  # noqa: E402
from tests import pytorch_strangers as strangers  # noqa: E402

TOLERANCE = {"float16": 2e-2, "float32": 1e-4, "float64": 1e-6}
SEQUENCES = {"tagger"}
"""What the newer exporter writes with sequences, which are not supported."""


def flat(made: Any) -> list[Any]:
    if isinstance(made, torch.Tensor):
        return [made.detach().numpy()]
    return [t for part in (made.values() if isinstance(made, dict) else made) for t in flat(part)]


def exported(
    model: Any, inputs: tuple[Any, ...], newer: bool
) -> tuple[onnx.ModelProto, dict[str, np.ndarray], list[np.ndarray]] | None:
    """Return what an exporter of torch makes, inputs, and what ONNX Runtime computes, if it can."""
    buffer = io.BytesIO()
    options = {} if newer else {"opset_version": 18}
    plain = ort.SessionOptions()
    plain.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        with torch.no_grad():
            torch.onnx.export(model, inputs, buffer, dynamo=newer, verbose=False, **options)
        proto = onnx.load_from_string(buffer.getvalue())
        feeds = {i.name: t.numpy() for i, t in zip(proto.graph.input, inputs, strict=True)}
        session = ort.InferenceSession(buffer.getvalue(), plain, providers=["CPUExecutionProvider"])
        return proto, feeds, session.run(None, feeds)
    except Exception:  # of any kind: exporters make mistakes of their own
        return None


def assert_close(made: list[Any], wanted: list[Any]) -> None:
    assert len(made) == len(wanted)
    for mine, theirs in zip(made, wanted, strict=True):
        mine = np.asarray(mine)
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        if theirs.dtype.kind != "f":
            np.testing.assert_array_equal(mine, theirs)
            continue
        bound = TOLERANCE[theirs.dtype.name] * np.abs(theirs.astype(np.float64)).max(initial=1e-30)
        np.testing.assert_allclose(
            mine.astype(np.float64), theirs.astype(np.float64), rtol=0, atol=bound
        )


@pytest.mark.parametrize("name", strangers.STRANGERS)
def test_module_is_read_right(name: str) -> None:
    model, inputs = strangers.made(name)
    with torch.no_grad():
        wanted = flat(model(*(t.clone() for t in inputs)))
    graph = load(proto := pytorch.read_module(model, inputs))
    feeds = {i.name: t.numpy() for i, t in zip(proto.graph.input, inputs, strict=True)}
    found = evaluate(graph, feeds)
    assert_close([found[o] for o in graph.outputs], wanted)


@pytest.mark.parametrize("name", ["unet-nearest", "unet-bilinear", "lstm", "detector", "written"])
def test_batch_may_be_dynamic(name: str) -> None:
    model, (x,) = strangers.made(name)
    shapes = ({0: torch.export.Dim("batch", min=1, max=64)},)
    graph = load(proto := pytorch.read_module(model, (x,), shapes))
    several = torch.cat([x, x[:1] * 0.5, x])
    with torch.no_grad():
        wanted = flat(model(several.clone()))
    found = evaluate(graph, {proto.graph.input[0].name: several.numpy()})
    assert_close([found[o] for o in graph.outputs], wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", strangers.STRANGERS)
def test_module_is_compiled_right(name: str) -> None:
    model, inputs = strangers.made(name)
    with torch.no_grad():
        wanted = flat(model(*(t.clone() for t in inputs)))
    proto = pytorch.read_module(model, inputs)
    feeds = {i.name: t.numpy() for i, t in zip(proto.graph.input, inputs, strict=True)}
    assert_close(list(bnncc.compile(proto, threads=1).run(feeds).values()), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("newer", [False, True], ids=["TorchScript", "dynamo"])
@pytest.mark.parametrize("name", strangers.STRANGERS)
def test_exported_file_is_as_onnx_runtime_says(name: str, newer: bool) -> None:
    """The file is compared, not the module: exporters make mistakes of their own."""
    model, inputs = strangers.made(name)
    made = exported(getattr(model, "_orig_mod", model), inputs, newer)
    if made is None:
        pytest.skip("torch cannot export it, or not so that ONNX Runtime runs it")
    if newer and name in SEQUENCES:
        pytest.skip("has sequences")
    proto, feeds, wanted = made
    found = evaluate(graph := load(proto), feeds)
    assert_close([found[o] for o in graph.outputs], wanted)
    assert_close(list(bnncc.compile(proto, threads=1).run(feeds).values()), wanted)
