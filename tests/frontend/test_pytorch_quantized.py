"""Layers quantized by torch's own training for quantization."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bnncc
from bnncc.errors import BnnccError

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402


class Quantized(nn.Module):
    """Layers of few bits, as torch's own training for quantization has them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.weight = nn.Parameter(torch.randn(16, 4, 3, 3))
        self.register_buffer("scales", torch.rand(16) + 0.1)
        self.register_buffer("zeros", torch.zeros(16, dtype=torch.int64))
        self.register_buffer("scale", torch.tensor([0.3]))
        self.register_buffer("place", torch.tensor([2], dtype=torch.int32))
        self.register_buffer("off", torch.tensor([0]))
        self.register_buffer("on", torch.tensor([1]))
        self.register_buffer("low", torch.tensor([torch.inf]))
        self.register_buffer("high", torch.tensor([-torch.inf]))

    def forward(self, x: Any) -> Any:
        if self.kind == "fake":
            data = torch.fake_quantize_per_tensor_affine(x, self.scale, self.place, 0, 7)
            zeros = self.zeros.int()
            weight = torch.fake_quantize_per_channel_affine(
                self.weight, self.scales, zeros, 0, -2, 1
            )
        elif self.kind in ("observed", "then quantized"):
            on = self.on if self.kind == "observed" else self.off
            observe = torch.ops.aten.fused_moving_avg_obs_fake_quant
            state = (on, self.on, self.low, self.high, self.scale, self.place)
            data = observe(x, *state, 0.01, 0, 7, -1)
            weight = torch.fake_quantize_per_tensor_affine(self.weight, 0.7, 0, -1, 1)
        else:
            of = torch.ops.quantized_decomposed
            limits = (0.3, 2, 0, 7, torch.uint8)
            data = of.quantize_per_tensor.default(x, *limits)
            data = of.dequantize_per_tensor.default(data, *limits)
            columns = (self.scales, self.zeros, 0, -2, 1, torch.int8)
            weight = of.quantize_per_channel.default(self.weight, *columns)
            weight = of.dequantize_per_channel.default(weight, *columns)
        return F.conv2d(data, weight, padding=1)


@pytest.mark.parametrize("kind", ["fake", "observed", "decomposed"])
def test_quantized_layers_are_of_few_bits(kind: str) -> None:
    if kind == "decomposed":
        pytest.importorskip("torch.ao.quantization.fx._decomposed")
    model, x = Quantized(kind).eval(), torch.randn(1, 4, 6, 6)
    x[0, 0, 0] = torch.arange(6) * 0.3 + 0.15  # ties
    if kind == "observed":
        model(x)
        model.kind = "then quantized"
    artifact = bnncc.compile(torch.export.export(model, (x,)))
    (layer,) = artifact.report["layers"]
    assert (layer["kind"], layer["bits"]) == ("few_bit", [3, 2])
    (found,) = artifact.run({"x": x.numpy()}).values()
    np.testing.assert_allclose(found, model(x).detach().numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "text", "hint"),
    [("observed", "observer_on", "disable_observer"), ("then quantized", "seen no data", "data")],
)
def test_observers_are_refused(kind: str, text: str, hint: str) -> None:
    program = torch.export.export(Quantized(kind).eval(), (torch.zeros(1, 4, 8, 8),))
    with pytest.raises(BnnccError, match=text) as caught:
        bnncc.compile(program)
    assert hint in (caught.value.hint or "")


def ternary(weight: Any) -> Any:
    unit = weight.abs().mean().clamp(min=1e-5)
    return (weight / unit).round().clamp(-1, 1), unit


def integers(x: Any, weight: Any) -> Any:
    """``torch._int_mm`` of flattened int8 tensors, and both scales behind it."""
    scale = 127 / x.abs().amax(-1, keepdim=True).clamp(min=1e-5)
    q = (x * scale).round().clamp(-128, 127).to(torch.int8)
    whole, unit = ternary(weight)
    sums = torch._int_mm(q.view(-1, x.shape[-1]), whole.to(torch.int8).t())
    return sums.view(*x.shape[:-1], -1).float() / scale * unit


def expanded(x: Any, weight: Any) -> Any:
    """TernaryBERT's quantizer: nothing exceeds the largest number, so there is no clamp."""
    top = torch.max(x.abs(), dim=-1, keepdim=True)[0].expand_as(x).detach()
    scale = 127 / (top + 1e-6)
    whole, unit = ternary(weight)
    return F.linear(torch.round(x * scale).div(scale), whole * unit)


def spanned(x: Any, weight: Any) -> Any:
    """Return TernaryBERT's product where the smallest number of each row becomes 0."""
    least = x.min(-1)[0].unsqueeze(-1).expand_as(x).detach()
    span = (x.max(-1)[0] - x.min(-1)[0]).unsqueeze(-1).expand_as(x).detach() + 1e-8
    whole, unit = ternary(weight)
    q = torch.round((x - least) / span * 255).div(255) * span + least
    return F.linear(q, whole * unit)


def flattened(x: Any, weight: Any) -> Any:
    """GPT-2's ``Conv1D``."""
    scale = 127 / x.abs().amax(-1, keepdim=True).clamp(min=1e-5)
    q = (x * scale).round().clamp(-128, 127) / scale
    whole, unit = ternary(weight)
    rows = torch.addmm(torch.arange(12.0), q.view(-1, x.shape[-1]), (whole * unit).t())
    return rows.view(*x.shape[:-1], -1)


@pytest.mark.parametrize("form", [integers, expanded, spanned, flattened])
def test_dynamic_quantizers_are_found(form: Any) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(12, 40), torch.randn(2, 10, 40)
    x[0, 1], x[0, 2], x[1, 0, 3], x[1, 1] = 0, 0.25, 1e4, x[1, 1] * 1e-7
    x[1, 2], x[1, 2, 0] = torch.arange(40) - 20.5, 127

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(weight, requires_grad=False)

        def forward(self, x: Any) -> Any:
            return form(x, self.weight)

    artifact = bnncc.compile(torch.export.export(Layer().eval(), (x,)))
    assert [layer["kind"] for layer in artifact.report["layers"]] == ["few_bit"]
    (found,) = artifact.run({"x": x.numpy()}).values()
    size = 40 * x.abs().amax(-1, keepdim=True).numpy() + 12 * (form is flattened)
    assert (np.abs(found - form(x, weight).numpy()) <= 1e-6 * size).all()
