"""Binary layers as people write them in PyTorch; needs torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

ROOT = Path(__file__).resolve().parents[1]
CHANNELS, UNITS, SIZE = 5, 4, 5


# ------------------------------------------------------------------------------ ways to take a sign


class Straight(torch.autograd.Function):
    """torch.sign with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Take the sign."""
        ctx.save_for_backward(x)
        return torch.sign(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Pass what lies between -1 and 1."""
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= 1)


def where(x: Tensor) -> Tensor:
    return torch.where(x >= 0, 1.0, -1.0)


def where_like(x: Tensor) -> Tensor:
    return torch.where(x >= 0, torch.ones_like(x), -torch.ones_like(x))


def greater(x: Tensor) -> Tensor:
    return torch.where(x > 0, 1.0, -1.0)


def of_bools(x: Tensor) -> Tensor:
    return (x >= 0).float() * 2 - 1


def detached(x: Tensor) -> Tensor:
    return (x.sign() - F.hardtanh(x)).detach() + F.hardtanh(x)


def detached_clamp(x: Tensor) -> Tensor:
    inside = x.clamp(-1, 1)
    return (x.sign() - inside).detach() + inside


def thrice_detached(x: Tensor) -> Tensor:
    return x.sign().detach() - x.detach() + x


def without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        sign = x.sign()
    return sign


def approx_sign(x: Tensor) -> Tensor:
    """Bi-Real-Net's piecewise polynomial, as its authors wrote it."""
    out = torch.sign(x)
    below, negative, small = x < -1, x < 0, x < 1
    one = (-1) * below.type(torch.float32) + (x * x + 2 * x) * (1 - below.type(torch.float32))
    two = one * negative.type(torch.float32) + (-x * x + 2 * x) * (1 - negative.type(torch.float32))
    three = two * small.type(torch.float32) + 1 * (1 - small.type(torch.float32))
    return out.detach() - three.detach() + three


def nudged(x: Tensor) -> Tensor:
    return torch.sign(x + 1e-20)


def without_zeros(x: Tensor) -> Tensor:
    sign = torch.sign(x)
    return torch.where(sign == 0, torch.ones_like(sign), sign)


def masked(x: Tensor) -> Tensor:
    sign = x.sign()
    sign[sign == 0] = 1
    return sign


def copysign(x: Tensor) -> Tensor:
    return torch.copysign(torch.ones_like(x), x)


SIGNS: dict[str, Callable[[Tensor], Tensor]] = {
    "sign": torch.sign,
    "where": where,
    "where-ones_like": where_like,
    "where-greater": greater,
    "float*2-1": of_bools,
    "autograd.Function": Straight.apply,
    "hardtanh-detach": detached,
    "clamp-detach": detached_clamp,
    "detach-detach": thrice_detached,
    "no_grad": without_gradient,
    "ApproxSign": approx_sign,
    "sign(x+1e-20)": nudged,
    "zeros-replaced": without_zeros,
    "zeros-assigned": masked,
    "copysign": copysign,
}
"""Of activations."""


# ----------------------------------------------------------------------------------- and of weights


def real(weight: Tensor) -> Tensor:
    """Bi-Real-Net's and ReActNet's weights: a scale for each filter, a clip to train through."""
    rows = torch.mean(abs(weight), dim=3, keepdim=True)
    scale = torch.mean(torch.mean(rows, dim=2, keepdim=True), dim=1, keepdim=True).detach()
    binary = scale * torch.sign(weight)
    clipped = torch.clamp(weight, -1.0, 1.0)
    return binary.detach() - clipped.detach() + clipped


def scaled(weight: Tensor) -> Tensor:
    return weight.sign() * weight.abs().mean((1, 2, 3), keepdim=True)


def one_scale(weight: Tensor) -> Tensor:
    return weight.sign() * weight.abs().mean()


def retained(weight: Tensor) -> Tensor:
    """IR-Net's weights: standardised, with a power of two as scale."""
    flat = weight.size(0), -1
    w = weight - weight.view(flat).mean(-1).view(-1, 1, 1, 1)
    w = w / w.view(flat).std(-1).view(-1, 1, 1, 1)
    power = (torch.log(w.abs().view(flat).mean(-1)) / np.log(2.0)).round().float()
    return torch.sign(w) * torch.pow(torch.tensor([2.0]), power).view(-1, 1, 1, 1)


WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "sign": torch.sign,
    "where": where,
    "autograd.Function": Straight.apply,
    "ReActNet": real,
    "mean-of-filter": scaled,
    "mean-of-all": one_scale,
    "IR-Net": retained,
}


class Binary(nn.Module):
    """A parametrization that takes signs."""

    def forward(self, weight: Tensor) -> Tensor:
        return where(weight)


class RSign(nn.Module):
    """ReActNet's sign with a threshold for each channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.arange(channels).float().view(1, -1, 1, 1) / 4 - 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sign(x + self.bias.expand_as(x))


class RPReLU(nn.Module):
    """ReActNet's PReLU between two offsets."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.full((1, channels, 1, 1), 0.25))
        self.after = nn.Parameter(torch.full((1, channels, 1, 1), -0.5))
        self.prelu = nn.PReLU(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.prelu(x + self.before.expand_as(x)) + self.after.expand_as(x)


class Lines(nn.Module):
    """One layer, and one output, for each way to write a binary layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        count = len(SIGNS) + len(WEIGHTS) + 5
        self.weights = nn.ParameterList(torch.randn(UNITS, CHANNELS, 3, 3) for _ in range(count))
        self.parametrized = nn.Conv2d(CHANNELS, UNITS, 3, padding=1, bias=False)
        parametrize.register_parametrization(self.parametrized, "weight", Binary())
        self.rsign, self.rprelu = RSign(CHANNELS), RPReLU(UNITS)
        self.linear = nn.Parameter(torch.randn(UNITS, SIZE))
        self.norm = nn.BatchNorm2d(UNITS)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        out, weights = {}, iter(self.weights)
        for name, sign in SIGNS.items():
            out[f"sign {name}"] = F.conv2d(sign(x), torch.sign(next(weights)), padding=1)
        for name, rule in WEIGHTS.items():
            out[f"weight {name}"] = F.conv2d(where(x), rule(next(weights)), padding=1)
        out["parametrize"] = self.parametrized(where(x))
        out["RSign"] = F.conv2d(self.rsign(x), where(next(weights)), padding=1)
        out["RPReLU"] = self.rprelu(F.conv2d(where(x), where(next(weights))))
        out["BatchNorm"] = self.norm(F.conv2d(where(x), where(next(weights))))
        out["pad -1"] = F.conv2d(F.pad(where(x), (1, 1, 1, 1), value=-1.0), where(next(weights)))
        out["linear"] = F.linear(where(x), torch.sign(self.linear))
        out["mean"] = F.conv2d(where(x), where(next(weights))).mean((2, 3))
        return out


def halves(*shape: int, seed: int = 0) -> Tensor:
    """Return halves between -2 and 2, zeros among them."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy((rng.integers(-4, 5, shape) / 2).astype(np.float32))


def outputs(model: nn.Module, x: Tensor) -> list[np.ndarray]:
    """Return what torch computes, in the order in which it is exported."""
    with torch.no_grad():
        made = model(x.clone())
    values = made.values() if isinstance(made, dict) else [made]
    return [value.numpy() for value in values]
