"""Modules and exported programs in memory; needs torch (the files' tests do not)."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'bnncc[torch]'")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import bnncc  # noqa: E402
from bnncc.agreement import verify  # noqa: E402
from bnncc.errors import BnnccError, UsageError  # noqa: E402
from bnncc.frontend import pytorch  # noqa: E402
from bnncc.frontend.formats import as_onnx  # noqa: E402
from bnncc.frontend.onnx import load  # noqa: E402
from bnncc.ir.evaluate import evaluate  # noqa: E402
from bnncc.runtime.compare import agree  # noqa: E402
from tests.pytorch_files import LINES  # noqa: E402
from tests.pytorch_models import CHANNELS, SIZE, Lines, halves, outputs  # noqa: E402
from tests.pytorch_networks import NETWORKS, randomised  # noqa: E402

BATCH = torch.export.Dim("batch", min=1, max=64)


@pytest.fixture(scope="module")
def lines() -> dict[str, tuple[str, np.ndarray, np.ndarray]]:
    """Return each line's kind, what is computed and what torch computes."""
    model, x = randomised(Lines()), halves(1, CHANNELS, SIZE, SIZE, seed=1)
    artifact = bnncc.compile(model, (x,), threads=1)
    made = artifact.run({"x": x.numpy()}).values()
    kinds = [layer["kind"] for layer in artifact.report["layers"]]
    found = zip(kinds, made, outputs(model, x), strict=True)
    return dict(zip(LINES, found, strict=True))


@pytest.mark.parametrize("line", LINES)
def test_line_is_binary_and_right(line: str, lines: Any) -> None:
    kind, made, wanted = lines[line]
    assert kind == "binary"
    assert agree(made, wanted)


def test_lines_have_their_names() -> None:
    with torch.no_grad():
        assert tuple(Lines().eval()(halves(1, CHANNELS, SIZE, SIZE))) == LINES


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name: str, dynamic: bool) -> None:
    build, shape, binary = NETWORKS[name]
    model = randomised(build())
    x = torch.randn(shape)
    artifact = bnncc.compile(
        model, (x,), dynamic_shapes=({0: BATCH},) if dynamic else None, threads=1
    )
    assert artifact.report["summary"]["binary"] == binary
    (made,) = artifact.run({"x": x.numpy()}).values()
    (wanted,) = outputs(model, x)
    assert agree(made, wanted)


def test_exported_program_and_file_are_the_same(tmp_path: Path) -> None:
    model, x = randomised(NETWORKS["perceptron"][0]()), torch.randn(2, 1, 8, 8)
    program = torch.export.export(model, (x,))
    path = tmp_path / "net.pt2"
    torch.export.save(program, path)
    artifact = bnncc.compile(program)
    assert bnncc.compile(path).run({"x": x.numpy()})["linear_2"].tobytes() == (
        artifact.run({"x": x.numpy()})["linear_2"].tobytes()
    )
    assert verify(program, artifact)["right"]


def test_training_mode_is_put_back() -> None:
    model = NETWORKS["xnor"][0]().train()
    model.norm1.eval()
    as_before = {name: module.training for name, module in model.named_modules()}
    graph = load(pytorch.read_module(model, torch.zeros(1, 3, 16, 16)))
    assert {n.op for n in graph.nodes} >= {"BatchNormalization", "Conv"}
    assert {name: module.training for name, module in model.named_modules()} == as_before


# ---------------------------------------------------------------------------------------- operators


class Function(nn.Module):
    """A module of one function, with parameters to use."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.weight = nn.Parameter(torch.randn(4, 4, 3, 3))
        self.linear, self.norm = nn.Linear(8, 6), nn.BatchNorm2d(4)
        self.conv, self.prelu = nn.Conv2d(4, 6, 3, padding=1, groups=2), nn.PReLU(4)
        self.register_buffer("number", torch.tensor([0.3]))
        self.register_buffer("zeros", torch.zeros(4, dtype=torch.int32))
        self.register_buffer("scales", torch.rand(4) + 0.1)

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


def _written(m: Any, x: Any) -> Any:
    y = x.clone()
    y[:, 2:] += x[:, :2]
    y[:, 0] = 3
    y[..., 1] *= 2
    flat = y.view(2, -1)
    flat.relu_()
    first, second = y.chunk(2, 1)
    first.neg_()
    turned = y.transpose(1, 2)
    turned.add_(1)
    second.unbind(1)[1].mul_(2)
    return y, second, flat


def _index_put(m: Any, x: Any) -> Any:
    y = x.clone()
    y[x < 0] = 1
    return y


FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "activations": lambda m, x: (
        *(F.gelu(x), F.gelu(x, approximate="tanh"), F.silu(x), F.hardswish(x), F.hardsigmoid(x)),
        *(F.elu(x), F.celu(x, 0.5), F.selu(x), F.mish(x), F.softplus(x), F.leaky_relu(x)),
        *(F.relu6(x), F.hardtanh(x), m.prelu(x), F.logsigmoid(x), x.tanh(), F.softsign(x)),
        *(F.threshold(x, 0.1, 0.2), x.sigmoid(), F.elu(x, 0.3)),
    ),
    "arithmetic": lambda m, x: (
        *(x / 3, 3 / (x.abs() + 1), 1 - x, x**2, x.abs() ** 0.5, x.abs() ** 1.5, x % 0.7, x // 0.5),
        *(torch.maximum(x, -x), torch.minimum(x, m.number), x.floor(), x.round(), x.trunc()),
        *(torch.sub(x, x.abs(), alpha=2), x.exp().rsqrt(), torch.addcmul(x, x, x, value=0.5)),
        *(torch.lerp(x, -x, 0.3), x.square(), x.abs().log1p(), x.clamp(min=0), x.clamp(max=0.5)),
        *(
            torch.fmod(x, 0.7),
            x.clamp(torch.tensor(-1.0), torch.tensor(1.0)),
            x * m.number[0].item(),
        ),
    ),
    "attention": lambda m, x: (
        F.scaled_dot_product_attention(x, x, x),
        F.scaled_dot_product_attention(x, x, x, is_causal=True),
        F.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(8, 8, dtype=bool).tril()),
    ),
    "comparisons": lambda m, x: (
        *(
            (x > 0) & (x < 1),
            torch.logical_not(x > 0),
            ~(x > 0),
            (x != 0).int(),
            (x > 0).long() + 1,
        ),
        *((x * 3).int() > 1.5, (x > 0) * x, torch.where(x > 0, m.number, 0.0), (x > 0).any(1)),
        *(torch.isnan(x), (x > 0).all((2, 3)), (x > 0).long() + 1),
    ),
    "convolutions": lambda m, x: (
        *(m.conv(x), F.conv2d(x, m.weight, dilation=2), F.conv2d(x, m.weight, padding="same")),
        *(F.conv1d(x[:, :, 0], m.weight[:, :, 0]), F.conv2d(x[0], m.weight, stride=2)),
        F.conv_transpose2d(x, m.weight, stride=2, padding=1, output_padding=1),
    ),
    "in place": _written,
    "mask": _index_put,
    "norms": lambda m, x: (
        *(m.norm(x), F.layer_norm(x, (8, 8)), F.group_norm(x, 2), F.rms_norm(x, (8,))),
        *(F.normalize(x, dim=1), F.softmax(x, 1), F.log_softmax(x, -1)),
    ),
    "outputs": lambda m, x: (x, x, x.detach(), m.weight.detach(), x + 1),
    "pads": lambda m, x: (
        *(F.pad(x, (1, 2, 0, 1), value=-1.0), F.pad(x, (1, 1, 1, 1), mode="reflect")),
        *(F.pad(x, (1, 1, 1, 1), mode="replicate"), F.pad(x, (-1, 0))),
        F.pad(x, (0, 0, 0, 0, 1, 1)),
    ),
    "pools": lambda m, x: (
        *(
            F.max_pool2d(x, 3, 2, 1),
            F.max_pool2d(x, 3, 2, ceil_mode=True),
            F.avg_pool2d(x, 3, 2, 1),
        ),
        *(F.max_pool2d(x, 2, dilation=2), F.avg_pool2d(x, 3, 2, 1, count_include_pad=False)),
        *(F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), F.avg_pool2d(x, 2, divisor_override=3)),
        *(F.avg_pool2d(x, 3, 2, 1, True, False), F.max_pool1d(x[:, 0], 2), F.max_pool2d(x[0], 2)),
        *(F.adaptive_avg_pool2d(x, 1), F.adaptive_avg_pool2d(x, 4), F.adaptive_max_pool2d(x, 2)),
    ),
    "products": lambda m, x: (
        *(m.linear(x), m.linear(x[:, 0, 0]), x @ x, torch.bmm(x[0], x[1])),
        torch.einsum("bchw,bdhw->bcd", x, x),
        torch.addmm(m.linear.bias, x[0, 0], m.linear.weight.t()),
    ),
    "reductions": lambda m, x: (
        *(x.mean((2, 3)), x.mean(), x.sum(1, keepdim=True), x.amax((1, 2)), *x.max(1), x.min()),
        *(x.std((1, 2)), x.var(1, unbiased=False), x.norm(dim=1), x.abs().prod(3), x.argmax(1)),
        *(x.cumsum(1), torch.logsumexp(x, 1), torch.norm(x, p=1, dim=2)),
    ),
    "resizing": lambda m, x: (
        F.interpolate(x, scale_factor=2, mode="nearest"),
        F.interpolate(x, scale_factor=2, mode="bilinear"),
        F.interpolate(x, size=(5, 7), mode="bilinear", align_corners=True),
        *(F.pixel_shuffle(x, 2), F.pixel_unshuffle(x, 2), F.channel_shuffle(x, 2)),
    ),
    "shapes": lambda m, x: (
        *(x[:, [0, 2]], x[..., 1], x[None], x[:, -2:, ::2], x.flip(1), x.roll(3, 2), x.flatten(2)),
        *(x.permute(0, 2, 3, 1), x.transpose(1, -1), x.unflatten(1, (2, 2)), x.repeat(1, 2, 1, 1)),
        *(x.expand(3, 2, 4, 8, 8), torch.stack([x, x], 1), torch.cat([x, -x], 1), x.tile(2), x.mT),
        *(x.narrow(1, 1, 2), x.movedim(1, 3), x.reshape(2, -1).unsqueeze(1).squeeze(1), x.tril()),
        *(x.unbind(1)[2], x.split(3, 1)[1], x.split([1, 3], 1)[1], x.select(1, -1)),
        F.embedding((x > 0).long()[:, 0, 0], m.linear.weight[:, :3]),
    ),
    "quantizers": lambda m, x: (
        torch.fake_quantize_per_tensor_affine(x * 3, 0.3, 2, 0, 15),
        torch.fake_quantize_per_tensor_affine(x, m.number, m.zeros[:1] + 1, -8, 7),
        torch.fake_quantize_per_channel_affine(m.weight, m.scales, m.zeros, 1, -2, 1),
    ),
    "types": lambda m, x: (
        *(x.double(), x.half().float(), x.int(), x.to(torch.int8).float(), (x > 0).float().mean()),
        *(torch.arange(8) + x, torch.full_like(x, 2.0), x.new_zeros(3) + x[..., :3], x.int() * 2),
    ),
}


@pytest.mark.parametrize("decomposed", [False, True], ids=["as exported", "decomposed"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_operators(name: str, decomposed: bool) -> None:
    model, x = Function(FUNCTIONS[name]).eval(), torch.randn(2, 4, 8, 8)
    program = torch.export.export(model, (x,))
    if decomposed:
        program = program.run_decompositions()
    graph = load(as_onnx(program))
    found = evaluate(graph, {"x": x.numpy()})
    with torch.no_grad():
        made = model(x.clone())
    wanted = made if isinstance(made, Sequence) else (made,)
    for k, (output, value) in enumerate(zip(graph.outputs, wanted, strict=True)):
        assert agree(found[output], value.numpy()), (k, output)


def test_shapes_may_depend_on_the_batch() -> None:
    def function(m: Any, x: Any) -> Any:
        n, c, h, w = x.shape
        y = x.reshape(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, -1)
        return y.view(x.size(0), 2, -1).transpose(1, 2).reshape(n, c, h * w), y[:, :3]

    model, x = Function(function).eval(), torch.randn(3, 4, 8, 8)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: BATCH},), strict=False)
    graph = load(as_onnx(program))
    assert graph.types["x"].shape == ("N", 4, 8, 8)
    found = evaluate(graph, {"x": x.numpy()})
    for output, value in zip(graph.outputs, model(x), strict=True):
        assert agree(found[output], value.detach().numpy())


# ------------------------------------------------------------------------------------------ refused


class Counter(nn.Module):
    """Its result changes from run to run."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Any) -> Any:
        self.count.add_(1)
        return x + self.count


def _assigned(m: Any, x: Any) -> Any:
    m.weight.data = torch.sign(m.weight.data)
    return F.conv2d(x, m.weight)


def _untrained(model: nn.Module) -> Any:
    return torch.export.export(model.train(), (torch.zeros(2, 3, 16, 16),))


def _saved(model: object) -> Callable[[Path], Any]:
    def save(path: Path) -> Any:
        torch.save(model, path)
        return path

    return save


X = torch.zeros(1, 4, 8, 8)
REFUSED: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "no-inputs": (lambda p: bnncc.compile(Counter()), "example_inputs", "torch.zeros"),
    "inputs-twice": (lambda p: bnncc.compile("a.onnx", X), "torch.nn.Module", ""),
    "tensor": (lambda p: bnncc.compile(X, X), "cannot be compiled", ""),
    "state": (lambda p: bnncc.compile(Counter(), X), "count", "eval"),
    "data": (lambda p: bnncc.compile(Function(_assigned), X), "cannot export", "detach"),
    "control-flow": (
        lambda p: bnncc.compile(Function(lambda m, x: x if x.sum() > 0 else -x), X),
        "cannot export", "torch.export.export",
    ),
    "training": (
        lambda p: bnncc.compile(_untrained(NETWORKS["xnor"][0]())), "training mode", "eval",
    ),
    "unknown": (
        lambda p: bnncc.compile(Function(lambda m, x: torch.linalg.svd(x)[1]), X),
        "linalg_svd", "other operators",
    ),
    "module": (lambda p: load(as_onnx(_saved(nn.Linear(2, 2))(p / "m.pt"))), "pickle", "export"),
    "state-dict": (
        lambda p: load(as_onnx(_saved(nn.Linear(2, 2).state_dict())(p / "m.pth"))), "pickle",
        "export",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    action, text, hint = REFUSED[name]
    with pytest.raises(BnnccError) as caught:
        action(tmp_path)
    assert text in str(caught.value)
    assert hint in (caught.value.hint or "")


def test_message_names_the_line(tmp_path: Path) -> None:
    with pytest.raises(BnnccError, match=r"linalg_svd `linalg_svd` \(test_pytorch\.py:\d+\)"):
        pytorch.read_module(Function(lambda m, x: torch.linalg.svd(x)[1]), X)


def test_weights_that_are_subclasses(tmp_path: Path) -> None:
    class Tagged(torch.Tensor):
        """A tensor that torch pickles."""

    program = torch.export.export(nn.Linear(2, 2), (torch.zeros(1, 2),))
    program.state_dict["weight"] = torch.zeros(2, 2).as_subclass(Tagged)
    buffer = io.BytesIO()
    try:
        torch.export.save(program, buffer)
    except Exception:
        pytest.skip("this torch does not save subclasses")
    path = tmp_path / "net.pt2"
    path.write_bytes(buffer.getvalue())
    with pytest.raises(BnnccError, match="pickle"):
        as_onnx(path)


def test_usage_errors_are_usage_errors() -> None:
    with pytest.raises(UsageError):
        bnncc.compile(nn.Linear(2, 2))
