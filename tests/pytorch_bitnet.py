"""Linear layers and blocks of BitNet as PyTorch modules; needs torch.

``python -m tests.pytorch_bitnet`` writes them, and what torch computes, to `tests/data/pytorch`.
"""

from __future__ import annotations

import io
import lzma
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.pytorch_files import BITNET, FOLDER


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(channels))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def unpacked(packed: Tensor) -> Tensor:
    """Return ternary weights that lie four to a byte."""
    rows = len(packed)
    made = torch.zeros((4 * rows, packed.shape[1]), dtype=torch.uint8)
    for k in range(4):
        made[k * rows : (k + 1) * rows] = (packed & (3 << (2 * k))) >> (2 * k)
    return made.to(torch.float32) - 1


class Packed(nn.Module):
    """Integers of 8 bits times packed weights; both scales divide the product."""

    def __init__(self, channels: int, units: int) -> None:
        super().__init__()
        parts = torch.randint(0, 3, (4, units // 4, channels)).to(torch.uint8)
        packed = parts[0] | parts[1] << 2 | parts[2] << 4 | parts[3] << 6
        self.register_buffer("weight", packed)
        self.register_buffer("weight_scale", torch.tensor([17.3]))
        self.bias = nn.Parameter(torch.randn(units))

    def forward(self, x: Tensor) -> Tensor:
        scale = 127 / x.abs().max(dim=-1, keepdim=True).values.clamp(min=1e-5)
        q = (x * scale).round().clamp(-128, 127).to(torch.int8)
        y = F.linear(q.to(torch.float32), unpacked(self.weight))
        return y / (self.weight_scale * scale) + self.bias


class Divided(nn.Linear):
    """Both operands are quantized and scaled back before the product."""

    def forward(self, x: Tensor) -> Tensor:
        unit = 1.0 / self.weight.abs().mean().clamp_(min=1e-5)
        weight = (self.weight * unit).round().clamp(-1, 1) / unit
        scale = 127 / x.abs().amax(dim=-1, keepdim=True).clamp_(min=1e-5)
        return F.linear((x * scale).round().clamp(-128, 127) / scale, weight, self.bias)


class Trained(nn.Linear):
    """As in training: a norm, and straight-through estimators around both quantizers."""

    def __init__(self, channels: int, units: int) -> None:
        super().__init__(channels, units, bias=False)
        self.norm = Norm(channels)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        scale = 127.0 / x.abs().max(dim=-1, keepdim=True).values.clamp_(min=1e-5)
        q = x + ((x * scale).round().clamp_(-128, 127) / scale - x).detach()
        w, unit = self.weight, 1.0 / self.weight.abs().mean().clamp_(min=1e-5)
        return F.linear(q, w + ((w * unit).round().clamp_(-1, 1) / unit - w).detach())


class OneBit(nn.Linear):
    """Signs of weights around their mean, times their mean size."""

    def forward(self, x: Tensor) -> Tensor:
        signs = torch.sign(self.weight - self.weight.mean()) * self.weight.abs().mean()
        scale = x.abs().max(dim=-1, keepdim=True).values / 127 + 1e-6
        return F.linear(torch.clamp(torch.round(x / scale), -128, 127), signs) * scale


class ZeroPoint(nn.Linear):
    """A scale and a zero point of each token."""

    def forward(self, x: Tensor) -> Tensor:
        low, high = torch.aminmax(x, dim=-1, keepdim=True)
        none = torch.zeros_like(low)
        low, high = torch.minimum(low, none), torch.maximum(high, none)
        scale = ((high - low) / 255).clamp(min=1e-5)
        zero = (-128 - torch.round(low / scale)).clamp(-128, 127)
        q = (torch.round(x / scale) + zero).clamp(-128, 127)
        unit = self.weight.abs().mean()
        return F.linear((q - zero) * scale, torch.round(self.weight / unit).clamp(-1, 1) * unit)


class Linears(nn.Module):
    """One layer of each kind, all with the same data."""

    def __init__(self) -> None:
        super().__init__()
        kinds: tuple[Callable[[int, int], nn.Module], ...] = (
            Packed, Divided, Trained, OneBit, ZeroPoint,
        )  # fmt: skip
        self.layers = nn.ModuleList(kind(40, 12) for kind in kinds)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {name: layer(x) for name, layer in zip(BITNET, self.layers, strict=True)}


class Block(nn.Module):
    """Grouped-query attention and a gated squared ReLU, with a norm before each projection."""

    def __init__(self, causal: bool, width: int = 32, heads: int = 4, inner: int = 48) -> None:
        super().__init__()
        self.causal, self.heads, self.size = causal, heads, width // heads
        kept = width // 2
        self.before, self.between = Norm(width), Norm(width)
        self.q, self.k, self.v = Divided(width, width), Divided(width, kept), Divided(width, kept)
        self.o, self.down = Trained(width, width), Trained(inner, width)
        self.gate, self.up = Packed(width, inner), Packed(width, inner)

    def split(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        x = x.view(batch, tokens, width // self.size, self.size).transpose(1, 2)
        return x.repeat_interleave(self.heads // x.shape[1], dim=1)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.before(x)
        q, k, v = (self.split(layer(normed)) for layer in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) / self.size**0.5
        if self.causal:
            hidden = torch.triu(torch.full((x.shape[1], x.shape[1]), -1e9), diagonal=1)
            scores = scores + hidden
        made = torch.softmax(scores, dim=-1) @ v
        x = x + self.o(made.transpose(1, 2).reshape(x.shape))
        normed = self.between(x)
        return x + self.down(torch.relu(self.gate(normed)) ** 2 * self.up(normed))


def _write(name: str, model: nn.Module, x: Tensor) -> None:
    model = model.eval()
    with torch.no_grad():
        made = model(x)
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(model, (x,)), buffer)
    packed = lzma.compress(buffer.getvalue(), preset=9)
    (FOLDER / f"{name}.pt2.xz").write_bytes(packed)
    results = made.values() if isinstance(made, dict) else [made]
    named = {f"output_{k}": y.numpy() for k, y in enumerate(results)}
    np.savez_compressed(FOLDER / f"{name}.npz", input=x.numpy(), **named)


if __name__ == "__main__":
    torch.manual_seed(0)
    rows = torch.randn(2, 5, 40)
    rows[0, 0], rows[0, 1], rows[1, 2, 3] = 0, 0.25, 1e4
    _write("bitnet", Linears(), rows)
    for causal, name in ((True, "bitnet_decoder"), (False, "bitnet_encoder")):
        _write(name, Block(causal), torch.randn(2, 5, 32))
