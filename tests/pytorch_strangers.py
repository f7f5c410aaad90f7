"""Networks as many different people write them; needs torch.

None is trained. Each is small, and has what people's networks have beside layers: estimators of
gradients, buffers, views, shapes computed from shapes, parametrizations. This file is over 700
lines because it is one collection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

# -------------------------------------------------------------------------------- ways to binarize


class SignSTE(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * (x.abs() <= 1)


class HeavisideSTE(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.where(x >= 0, torch.ones_like(x), -torch.ones_like(x))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class RoundSTE(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


def detach_sign(x: Tensor) -> Tensor:
    clipped = x.clamp(-1, 1)
    return (torch.where(x >= 0, 1.0, -1.0) - clipped).detach() + clipped


def ternary(w: Tensor) -> Tensor:
    t = 0.7 * w.abs().mean()
    mask = (w.abs() > t).to(w.dtype)
    alpha = (w.abs() * mask).sum() / mask.sum()
    return alpha * mask * w.sign()


def dorefa(w: Tensor, bits: int) -> Tensor:
    n = 2**bits - 1
    t = torch.tanh(w)
    t = t / (2 * t.abs().max()) + 0.5
    return 2 * RoundSTE.apply(t * n) / n - 1


class BinConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        alpha = self.weight.abs().mean((1, 2, 3), keepdim=True)
        w = HeavisideSTE.apply(self.weight) * alpha
        return self._conv_forward(HeavisideSTE.apply(x), w, self.bias)


class BinLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(detach_sign(x), detach_sign(self.weight), self.bias)


class BinConv1d(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(detach_sign(x), detach_sign(self.weight), self.bias)


class TernConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, ternary(self.weight), self.bias)


class FewBitConv(nn.Conv2d):
    bits = 2

    def forward(self, x: Tensor) -> Tensor:
        n = 2**self.bits - 1
        x = RoundSTE.apply(x.clamp(0, 1) * n) / n
        return self._conv_forward(x, dorefa(self.weight, self.bits), self.bias)


class ToSign(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return torch.where(w >= 0, 1.0, -1.0)


class LearnedStep(nn.Module):
    def __init__(self, bits: int = 2) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.tensor(0.25))
        self.low, self.high = 0, 2**bits - 1

    def forward(self, x: Tensor) -> Tensor:
        y = (x / self.step).clamp(self.low, self.high)
        return ((y.round() - y).detach() + y) * self.step


def bn(c: int) -> nn.Module:
    return nn.BatchNorm2d(c)


# ---------------------------------------------------------------------------------------- networks


class BinMobile(nn.Module):
    """Depthwise binary layers, squeeze and excite, hard swish."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), bn(16), nn.Hardswish(True))
        self.dw, self.n1 = BinConv(16, 16, 3, 1, 1, groups=16, bias=False), bn(16)
        self.pw, self.n2 = BinConv(16, 32, 1, bias=False), bn(32)
        self.squeeze, self.excite = nn.Conv2d(32, 8, 1), nn.Conv2d(8, 32, 1)
        self.head = nn.Linear(32, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.n1(self.dw(x))
        x = self.n2(self.pw(x))
        gate = F.adaptive_avg_pool2d(x, 1)
        gate = F.hardsigmoid(self.excite(F.relu(self.squeeze(gate), inplace=True)))
        x = x * gate
        return self.head(torch.flatten(F.adaptive_avg_pool2d(x, (1, 1)), 1))


class UNet(nn.Module):
    def __init__(self, up: str = "bilinear") -> None:
        super().__init__()
        self.up = up
        self.a, self.b = BinConv(8, 16, 3, padding=1), BinConv(16, 8, 3, padding=1)
        self.inp, self.na, self.nb = nn.Conv2d(3, 8, 3, padding=1), bn(16), bn(8)
        self.turn = nn.ConvTranspose2d(16, 16, 2, 2)
        self.out = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.inp(x))
        y = F.prelu(self.na(self.a(F.max_pool2d(x, 2))), torch.tensor([0.2]))
        if self.up == "turn":
            y = self.turn(y)
        else:
            kw = (
                {}
                if self.up.startswith("nearest") or self.up == "area"
                else {"align_corners": True}
            )
            y = F.interpolate(y, size=x.shape[-2:], mode=self.up, **kw)
        y = self.nb(self.b(y))
        return self.out(torch.cat([x, y], dim=1))


class Ghost(nn.Module):
    """Channels split, shuffled and put back in place."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.n = BinConv(8, 8, 3, padding=1, groups=2), bn(8)
        self.register_buffer("order", torch.randperm(16))

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=1)
        b = b + self.n(self.c(b))
        y = torch.cat((a, b), 1)[:, self.order]
        y[:, ::2] *= 0.5
        n, c, h, w = y.size()
        return y.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, c, h, w)


class StochasticDepth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(bn(8), BinConv(8, 8, 3, padding=1)) for _ in range(3)
        )
        self.p = 0.3

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.training and torch.rand(1).item() < self.p:
                continue
            x = x + (1 - self.p if not self.training else 1.0) * block(x)
        return x.mean(dim=[-2, -1])


class BinaryAttention(nn.Module):
    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), BinLinear(16, 16)
        self.norm, self.causal = nn.LayerNorm(16), causal

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (
            self.qkv(self.norm(x)).reshape(b, t, 3, 4, c // 4).permute(2, 0, 3, 1, 4).unbind(0)
        )
        q, k = detach_sign(q), detach_sign(k)
        s = (q @ k.transpose(-2, -1)) * (c // 4) ** -0.5
        if self.causal:
            mask = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
            s = s.masked_fill(mask, float("-inf"))
        y = (s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, c)
        return x + self.out(y)


class Sdpa(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.q, self.kv, self.options = BinLinear(16, 16), BinLinear(16, 32), options

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q(x).view(b, t, 4, 4).transpose(1, 2)
        k, v = (y.view(b, t, 4, 4).transpose(1, 2) for y in self.kv(x).split(16, dim=-1))
        return F.scaled_dot_product_attention(q, k, v, **self.options).transpose(1, 2).flatten(2)


class Vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, 4)
        self.token, self.place = (
            nn.Parameter(torch.randn(1, 1, 16)),
            nn.Parameter(torch.randn(1, 17, 16)),
        )
        self.block, self.head = BinaryAttention(), BinLinear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.place
        return self.head(self.block(x)[:, 0])


class Detector(nn.Module):
    """A head of anchors: boxes and scores as lists, decoded."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.n = BinConv(8, 16, 3, 2, 1), bn(16)
        self.boxes, self.scores = nn.Conv2d(16, 3 * 4, 1), nn.Conv2d(16, 3 * 2, 1)
        self.register_buffer("anchors", torch.rand(3, 2) + 0.5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = F.leaky_relu(self.n(self.trunk(x)), 0.1)
        n, _, h, w = x.shape
        y, xx = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        grid = torch.stack((xx, y), -1).float().view(1, 1, h, w, 2)
        box = self.boxes(x).view(n, 3, 4, h, w).permute(0, 1, 3, 4, 2)
        place = (box[..., :2].sigmoid() + grid) / torch.tensor([w, h])
        size = box[..., 2:].exp() * self.anchors.view(1, 3, 1, 1, 2)
        score = self.scores(x).view(n, 3, 2, h, w).permute(0, 1, 3, 4, 2).softmax(-1)
        flat = torch.cat([place, size], -1).reshape(n, -1, 4)
        best, index = score[..., 1].reshape(n, -1).topk(5, dim=1)
        chosen = flat.gather(1, index.unsqueeze(-1).expand(-1, -1, 4))
        return {"boxes": chosen, "scores": best}


class Audio(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Conv1d(1, 16, 9, 4, 4)
        self.norms = nn.ModuleList(nn.BatchNorm1d(16) for _ in range(3))
        self.convs = nn.ModuleList(
            BinConv1d(16, 16, 3, padding=2**k, dilation=2**k) for k in range(3)
        )
        self.head = weight_norm(nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x.unsqueeze(1))
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = x + conv(norm(x))
        return self.head(torch.cat([x.mean(-1, keepdim=True)], -1).squeeze(-1))


class BinaryLSTM(nn.Module):
    """A cell by hand, with binary weights by parametrization, over time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 12)
        for name in ("weight_ih", "weight_hh"):
            parametrize.register_parametrization(self.cell, name, ToSign())
        self.out = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, c = x.new_zeros(x.size(0), 12), x.new_zeros(x.size(0), 12)
        for t in range(x.size(1)):
            h, c = self.cell(detach_sign(x[:, t]), (h, c))
        return self.out(h)


class Recurrent(nn.Module):
    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.rnn = kind(8, 10, batch_first=True, **options)
        size = options.get("proj_size") or 10
        self.head = BinLinear(size * (2 if options.get("bidirectional") else 1), 3)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.rnn(x)
        return self.head(y[:, -1])


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.tags = (
            nn.Embedding(20, 8, padding_idx=0),
            nn.EmbeddingBag(20, 8, mode="mean"),
        )
        self.gru, self.out = nn.GRU(8, 6, 2, bidirectional=True, batch_first=True), BinLinear(12, 5)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        y, _ = self.gru(self.words(ids))
        return self.out(y).argmax(-1), self.tags(ids)


class Upsampler(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 8 * 4 * 4)
        self.a, self.b = (
            BinConv(8, 16, 3, padding=1),
            nn.Conv2d(4, 3, 3, padding=1, padding_mode="reflect"),
        )
        self.norm, self.mode = nn.InstanceNorm2d(8, affine=True), mode

    def forward(self, z: Tensor) -> Tensor:
        x = F.leaky_relu(self.fc(z), 0.2).view(-1, 8, 4, 4)
        x = F.interpolate(self.norm(x), scale_factor=2, mode=self.mode)
        return torch.tanh(self.b(F.pixel_shuffle(self.a(x), 2)))


class Stn(nn.Module):
    """A spatial transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.locate = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 6))
        nn.init.constant_(self.locate[1].weight, 0.001)
        self.locate[1].bias.data = torch.tensor([1.0, 0.1, 0.05, -0.1, 0.9, 0.0])
        self.conv = BinConv(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        theta = self.locate(x).view(-1, 2, 3)
        grid = F.affine_grid(theta, list(x.size()), align_corners=False)
        x = F.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False)
        return self.conv(x - 0.1)


class Unfolded(nn.Module):
    """A binary convolution as a product of unfolded patches."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4 * 9))

    def forward(self, x: Tensor) -> Tensor:
        h, w = x.shape[2:]
        patches = F.unfold(HeavisideSTE.apply(x), 3, padding=0)
        y = HeavisideSTE.apply(self.weight) @ patches
        return F.fold(y, (h - 2, w - 2), 1)


class Spp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c = FewBitConv(3, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.c(x)
        return torch.cat([F.adaptive_max_pool2d(x, k).flatten(1) for k in (1, 2, 3, 5)], 1)


class Written(nn.Module):
    """Writes into parts of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.c = BinConv(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros(x.size(0), 8, *x.shape[2:])
        out[:, :4] = x
        out[:, 4:] = self.c(x)
        out[:, [0, 2]] = out[:, [1, 3]] * 2
        out[..., 0].add_(1)
        out[:, :, 1:7:2, 3] = 0
        out.relu_().sub_(0.5)
        torch.diagonal(out, dim1=2, dim2=3).fill_(1.0)
        return out


class Moe(nn.Module):
    """The two best of four experts, each computed, weighted by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 4), nn.ModuleList(BinLinear(8, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.gate(x)
        top, index = logits.topk(2, dim=-1)
        weights = torch.zeros_like(logits).scatter(-1, index, F.softmax(top, -1))
        made = torch.stack([e(x) for e in self.experts], dim=-2)
        return torch.einsum("be,beo->bo", weights, made)


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gn, self.ln, self.rms = nn.GroupNorm(2, 8), nn.LayerNorm([8, 6, 6]), nn.RMSNorm(6)
        self.lrn, self.inorm = (
            nn.LocalResponseNorm(3),
            nn.InstanceNorm2d(8, track_running_stats=True),
        )
        self.c = BinConv(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.c(self.gn(x)) + self.ln(x) + self.rms(x)
        return F.normalize(self.inorm(self.lrn(x)), p=2, dim=1)


class Residuals(nn.Module):
    """ReActNet's biases, RSign and RPReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(1, 8, 1, 1) * 0.1)
        self.c, self.n, self.act = nn.Conv2d(8, 8, 3, 1, 1, bias=False), bn(8), nn.PReLU(8)
        self.zeta = nn.Parameter(torch.randn(8) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        s = SignSTE.apply(x - self.shift)
        w = self.c.weight
        w = w - w.mean([1, 2, 3], keepdim=True)
        w = w / w.std([1, 2, 3], keepdim=True)
        scale = 2.0 ** torch.round(torch.log2(w.abs().mean([1, 2, 3], keepdim=True)))
        y = F.conv2d(s, w.sign(), padding=1) * scale.view(1, -1, 1, 1)
        return self.act(self.n(y) + x) + self.zeta[:, None, None]


class Cascade(nn.Module):
    def __init__(self, act: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), act, bn(8), BinConv(8, 8, 3), nn.Flatten())
        self.head = nn.Linear(8 * 16, 4)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(self.head(self.layers(x)), dim=1)


class Lsq(nn.Module):
    def __init__(self, bits: int) -> None:
        super().__init__()
        self.q, self.c, self.d = (
            LearnedStep(bits),
            nn.Conv2d(4, 8, 3, padding=1),
            nn.Conv2d(8, 4, 3),
        )
        self.q2, self.n = LearnedStep(bits), bn(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.n(F.conv2d(self.q(x), dorefa(self.c.weight, 2), self.c.bias, padding=1))
        return F.conv2d(self.q2(x), ternary(self.d.weight), self.d.bias, stride=2)


class Functional(nn.Module):
    """A dictionary of parameters, and no modules."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.ParameterDict(
            {"a": torch.randn(16, 12), "b": torch.randn(12, 16), "c": torch.randn(4, 16)}
        )

    def forward(self, x: Tensor) -> Tensor:
        h = x.flatten(1) @ self.p["a"]
        h = torch.sign(h + 1e-7) @ torch.sign(self.p["b"])
        return torch.addmm(torch.ones(4), (h > 0).float() * 2 - 1, self.p["c"].sign().t())


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(BinConv(3, 8, 3), nn.AdaptiveAvgPool2d((3, 2)), nn.Flatten())

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.net(x), self.net(y)
        return F.cosine_similarity(a, b), F.pairwise_distance(a, b)


class Pyramid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.ModuleList(BinConv(4, 4, 3, 2, 1) for _ in range(2))
        self.side = nn.ModuleList(nn.Conv2d(4, 4, 1) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        maps = [x]
        for c in self.c:
            maps.append(c(maps[-1]))
        made = [s(m) for s, m in zip(self.side, maps, strict=True)]
        for k in (1, 0):
            made[k] = made[k] + F.interpolate(made[k + 1], size=made[k].shape[-2:], mode="nearest")
        return made


class Unpooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c = BinConv(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y, places = F.max_pool2d(x, 2, return_indices=True)
        return F.max_unpool2d(self.c(y), places, 2, output_size=x.shape[-2:])


class Mixture(nn.Module):
    """Conditions, sorting, cumulated sums."""

    def __init__(self) -> None:
        super().__init__()
        self.c = BinLinear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.c(x)
        ordered, index = y.sort(dim=-1, descending=True)
        share = F.softmax(ordered, -1).cumsum(-1)
        keep = torch.where(share < 0.9, ordered, torch.full_like(ordered, -1e4))
        return torch.zeros_like(y).scatter_(-1, index, keep).clamp(min=-5).nan_to_num()


class PixelBranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c = TernConv(12, 8, 3, padding="same")

    def forward(self, x: Tensor) -> Tensor:
        y = self.c(F.pixel_unshuffle(x, 2))
        y = F.glu(torch.roll(y, shifts=(1, -1), dims=(2, 3)), dim=1)
        return y.unfold(2, 2, 2).unfold(3, 2, 2).amax((-1, -2))


class Popcount(nn.Module):
    """Bits as zeros and ones, compared and counted."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bits", (torch.rand(6, 16) > 0.5))

    def forward(self, x: Tensor) -> Tensor:
        a = (x > 0)[:, None, :]
        return (a == self.bits[None]).sum(-1) * 2 - 16


class Separable3d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (
            nn.Conv3d(2, 4, (1, 3, 3), padding=(0, 1, 1)),
            nn.Conv3d(4, 4, (3, 1, 1), padding=(1, 0, 0)),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.conv3d(detach_sign(self.a(x)), detach_sign(self.b.weight), padding=(1, 0, 0))
        return F.avg_pool3d(y, 2).flatten(1)


class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c, self.fc = BinConv(4, 8, 3), nn.Linear(8, 8)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = self.c(x.contiguous(memory_format=torch.channels_last))
        return self.fc(x.permute(0, 2, 3, 1)).view(x.shape[0], -1, 8).amax(1)


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.channels = BinLinear(9, 9), BinLinear(8, 8)
        self.n = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.n(x).mT).mT
        return (x + self.channels(self.n(x))).mean(1)


class Scaled(nn.Module):
    """XNOR-Net's map of scales of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Conv2d(4, 8, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        k = F.avg_pool2d(x.abs().mean(1, keepdim=True), 3, 1)
        w = self.c.weight
        return F.conv2d(SignSTE.apply(x), w.sign()) * k * w.abs().mean((1, 2, 3)).view(1, -1, 1, 1)


class Stranger(NamedTuple):
    """What builds a network, and the inputs that it is given."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]


def _images(c: int, h: int, w: int | None = None, n: int = 2) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(n, c, h, w or h),)


def _rows(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(*shape),)


def _ids() -> tuple[Tensor, ...]:
    return (torch.randint(0, 20, (2, 7)),)


def _compiled(model: nn.Module) -> Any:
    return torch.compile(model)


def _encoder(**options: Any) -> nn.Module:
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, **options),
        1,
        enable_nested_tensor=False,
    )


_ACTS: dict[str, nn.Module] = {
    **{"relu6": nn.ReLU6(True), "gelu": nn.GELU("tanh"), "mish": nn.Mish(), "rrelu": nn.RReLU()},
    **{"softplus": nn.Softplus(2, 5), "shrink": nn.Softshrink(0.2), "celu": nn.CELU(0.7)},
}

STRANGERS: dict[str, Stranger] = {
    "mobile": Stranger(BinMobile, _images(3, 16)),
    **{
        f"unet-{up}": Stranger(lambda up=up: UNet(up), _images(3, 12))  # type: ignore[misc]
        for up in ("bilinear", "bicubic", "nearest", "nearest-exact", "area", "turn")
    },
    "ghost": Stranger(Ghost, _images(16, 6)),
    "stochastic-depth": Stranger(StochasticDepth, _images(8, 7, 5)),
    "attention": Stranger(BinaryAttention, _rows(2, 9, 16)),
    "causal": Stranger(lambda: BinaryAttention(True), _rows(2, 9, 16)),
    "sdpa": Stranger(Sdpa, _rows(2, 9, 16)),
    "sdpa-causal": Stranger(lambda: Sdpa(is_causal=True, scale=0.3), _rows(1, 9, 16)),
    "vit": Stranger(Vit, _images(3, 16)),
    "detector": Stranger(Detector, _images(8, 10)),
    "audio": Stranger(Audio, _rows(2, 64)),
    "binary-lstm": Stranger(BinaryLSTM, _rows(2, 5, 8)),
    "lstm": Stranger(lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True), _rows(2, 6, 8)),
    "lstm-projected": Stranger(lambda: Recurrent(nn.LSTM, proj_size=4), _rows(2, 6, 8)),
    "gru": Stranger(lambda: Recurrent(nn.GRU, bidirectional=True), _rows(2, 6, 8)),
    "rnn": Stranger(lambda: Recurrent(nn.RNN, nonlinearity="relu", bias=False), _rows(2, 6, 8)),
    "tagger": Stranger(Tagger, _ids),
    "upsampler": Stranger(lambda: Upsampler("nearest"), _rows(3, 6)),
    "upsampler-smooth": Stranger(lambda: Upsampler("bilinear"), _rows(3, 6)),
    "transformer-of-places": Stranger(Stn, _images(3, 8)),
    "unfolded": Stranger(Unfolded, _images(4, 7)),
    "pyramid-pool": Stranger(Spp, _images(3, 7, 9)),
    "written": Stranger(Written, _images(4, 8)),
    "experts": Stranger(Moe, _rows(5, 8)),
    "norms": Stranger(Norms, _images(8, 6)),
    "react": Stranger(Residuals, _images(8, 6)),
    **{
        f"cascade-{name}": Stranger(lambda act=act: Cascade(act), _images(3, 8))  # type: ignore[misc]
        for name, act in _ACTS.items()
    },
    "cascade-double": Stranger(
        lambda: Cascade(nn.SiLU(), torch.float64), lambda: (torch.randn(2, 3, 8, 8).double(),)
    ),
    "cascade-half": Stranger(
        lambda: Cascade(nn.ReLU(), torch.float16), lambda: (torch.randn(2, 3, 8, 8).half(),)
    ),
    "lsq-2": Stranger(lambda: Lsq(2), _images(4, 9)),
    "lsq-4": Stranger(lambda: Lsq(4), _images(4, 9)),
    "functional": Stranger(Functional, _images(1, 4)),
    "siamese": Stranger(Siamese, lambda: (torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9, 8))),
    "pyramid": Stranger(Pyramid, _images(4, 9)),
    "unpooled": Stranger(Unpooled, _images(4, 8)),
    "mixture": Stranger(Mixture, _rows(3, 8)),
    "pixels": Stranger(PixelBranch, _images(3, 12)),
    "popcount": Stranger(Popcount, _rows(3, 16)),
    "video": Stranger(Separable3d, lambda: (torch.randn(1, 2, 4, 6, 6),)),
    "channels-last": Stranger(ChannelsLast, _images(4, 7)),
    "mixer": Stranger(Mixer, _rows(2, 9, 8)),
    "scaled": Stranger(Scaled, _images(4, 7)),
    "ternary": Stranger(
        lambda: nn.Sequential(TernConv(3, 8, 3), bn(8), TernConv(8, 4, 3)), _images(3, 8)
    ),
    "few-bit": Stranger(
        lambda: nn.Sequential(FewBitConv(3, 8, 3), bn(8), FewBitConv(8, 4, 3, groups=2)),
        _images(3, 8),
    ),
    "compiled": Stranger(lambda: _compiled(nn.Sequential(bn(4), BinConv(4, 4, 3))), _images(4, 7)),
    "compiled-inside": Stranger(
        lambda: nn.Sequential(bn(4), _compiled(BinConv(4, 4, 3)), nn.Flatten()), _images(4, 7)
    ),
    "encoder": Stranger(_encoder, _rows(2, 5, 16)),
    "encoder-norm-first": Stranger(
        lambda: _encoder(norm_first=True, activation="gelu"), _rows(2, 5, 16)
    ),
    "dense": Stranger(
        lambda: nn.Sequential(
            nn.Flatten(), weight_norm(nn.Linear(48, 16)), nn.Tanh(), BinLinear(16, 4)
        ),
        _images(3, 4),
    ),
    "double-sign": Stranger(
        lambda: nn.Sequential(BinConv(3, 8, 3), nn.MaxPool2d(3, 2, 1), bn(8), BinConv(8, 4, 3)),
        _images(3, 12),
    ),
    "average-of-signs": Stranger(
        lambda: nn.Sequential(
            BinConv(3, 8, 3), nn.AvgPool2d(3, 2, ceil_mode=True), BinConv(8, 4, 2)
        ),
        _images(3, 10),
    ),
    "reflected": Stranger(
        lambda: nn.Sequential(
            BinConv(3, 8, 3, padding=1, padding_mode="reflect"),
            BinConv(8, 4, 3, padding=1, padding_mode="circular"),
        ),
        _images(3, 8),
    ),
}
"""By name."""


def made(name: str) -> tuple[Any, tuple[Tensor, ...]]:
    """Return a network in eval mode, with statistics as training leaves them, and its inputs."""
    torch.manual_seed(sum(map(ord, name)))
    model, inputs = STRANGERS[name].build(), STRANGERS[name].inputs()
    for module in model.modules():
        if getattr(module, "running_mean", None) is not None:
            nn.init.normal_(module.running_mean, 0, 0.3)
            nn.init.uniform_(module.running_var, 0.5, 2)
            if module.weight is not None:
                nn.init.normal_(module.weight)
                nn.init.normal_(module.bias, 0, 0.3)
    return model.eval(), inputs
