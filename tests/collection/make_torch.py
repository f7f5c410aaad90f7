"""Export the PyTorch part of the collection.

Needs torch, onnxscript and onnx; not run by the tests. It is over 700 lines because it is a table
of models.

    python -m tests.collection.make_torch            # from the repository root

Each function below the table's decorator returns a module in eval mode; `MODELS` lists through
which exporters it goes. Weights are random but as training leaves them: BatchNorm statistics fit
the layers, gammas have both signs and some zeros. Every exported file is compared with the module
itself before it is written.
"""

from __future__ import annotations

import io
import sys
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tests.collection import exporting, oracle

LEGACY, DYNAMO, RAW = "torch-legacy", "torch-dynamo", "torch-dynamo-unoptimized"


@dataclass(frozen=True)
class Spec:
    """A module, its inputs, the exports to make of it, and what should be found in each."""

    build: Callable[[], nn.Module]
    name: str
    pattern: str
    binary: int | None
    float_: int | None
    shapes: tuple[tuple[int, ...], ...]
    exports: tuple[tuple[str, int], ...]
    dynamic: bool
    domain: str
    notes: str
    quick: bool


SPECS: list[Spec] = []
ALL = ((LEGACY, 13), (DYNAMO, 18), (RAW, 20))


def model(
    pattern: str,
    binary: int | None,
    float_: int | None,
    *,
    shape: tuple[int, ...] = (1, 3, 8, 8),
    more: tuple[tuple[int, ...], ...] = (),
    exports: tuple[tuple[str, int], ...] = ALL,
    dynamic: bool = False,
    domain: str = "normal",
    notes: str = "",
    quick: bool = False,
) -> Callable:
    """Register the decorated function under its own name."""

    def register(function: Callable[[], nn.Module]) -> Callable:
        SPECS.append(
            Spec(
                function,
                function.__name__,
                pattern,
                binary,
                float_,
                (shape, *more),
                exports,
                dynamic,
                domain,
                notes,
                quick,
            )
        )
        return function

    return register


# ----------------------------------------------------------------------------- spellings of sign


class SignFunction(torch.autograd.Function):
    """Sign with a clipped straight-through gradient, as most repositories write it."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.sign(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= 1)


class StepFunction(torch.autograd.Function):
    """+1 where x >= 0, else -1."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return torch.where(x >= 0, torch.ones_like(x), -torch.ones_like(x))

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


def approx_sign(x: Tensor) -> Tensor:
    """Bi-Real's and ReActNet's BinaryActivation, literally."""
    forward = torch.sign(x)
    mask1, mask2, mask3 = x < -1, x < 0, x < 1
    out1 = (-1) * mask1.type(torch.float32) + (x * x + 2 * x) * (1 - mask1.type(torch.float32))
    out2 = out1 * mask2.type(torch.float32) + (-x * x + 2 * x) * (1 - mask2.type(torch.float32))
    out3 = out2 * mask3.type(torch.float32) + 1 * (1 - mask3.type(torch.float32))
    return forward.detach() - out3.detach() + out3


def ste_clamp(x: Tensor) -> Tensor:
    clipped = torch.clamp(x, -1.0, 1.0)
    return (torch.sign(x) - clipped).detach() + clipped


def ste_hardtanh(x: Tensor) -> Tensor:
    return (torch.sign(x) - F.hardtanh(x)).detach() + F.hardtanh(x)


def ste_tanh(x: Tensor) -> Tensor:
    soft = torch.tanh(2 * x)
    return torch.sign(x).detach() + soft - soft.detach()


def zeros_replaced(x: Tensor) -> Tensor:
    s = torch.sign(x)
    return torch.where(s == 0, torch.ones_like(s), s)


def masked_fill(x: Tensor) -> Tensor:
    s = torch.sign(x)
    return s.masked_fill(s == 0, 1.0)


SPELLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "sign": torch.sign,
    "function": SignFunction.apply,
    "where_scalar": lambda x: torch.where(x >= 0, 1.0, -1.0),
    "where_tensor": lambda x: torch.where(x > 0, torch.tensor(1.0), torch.tensor(-1.0)),
    "where_ones_like": StepFunction.apply,
    "where_full_like": lambda x: torch.where(x < 0, torch.full_like(x, -1), torch.full_like(x, 1)),
    "cast": lambda x: (x >= 0).float() * 2 - 1,
    "cast_gt_methods": lambda x: x.gt(0).to(x.dtype).mul(2).sub(1),
    "ste_clamp": ste_clamp,
    "ste_hardtanh": ste_hardtanh,
    "ste_tanh": ste_tanh,
    "approx_sign": approx_sign,
    "zeros_replaced": zeros_replaced,
    "masked_fill": masked_fill,
    "sign_of_clamp": lambda x: torch.sign(torch.clamp(x, -1, 1)),
    "heaviside": lambda x: (x > 0).float(),
}


# ----------------------------------------------------------------------------- layers


class BinConv(nn.Conv2d):
    """Convolution with `binarize` on its weights and `act` on its input, in forward."""

    def __init__(self, *args, act=torch.sign, binarize=torch.sign, **kwargs):
        super().__init__(*args, **{"bias": False, **kwargs})
        self.act, self.binarize = act, binarize

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(
            self.act(x),
            self.binarize(self.weight),
            self.bias,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
        )


class BinLinear(nn.Linear):
    """Linear layer with sign of its weights and of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.sign(x), torch.sign(self.weight), self.bias)


def scaled_ste(w: Tensor) -> Tensor:
    """ReActNet's HardBinaryConv: alpha * sign(w) with a clip residue, literally."""
    scale = torch.mean(
        torch.mean(torch.mean(abs(w), dim=3, keepdim=True), dim=2, keepdim=True),
        dim=1,
        keepdim=True,
    )
    scale = scale.detach()
    hard = scale * torch.sign(w)
    clipped = torch.clamp(w, -1.0, 1.0)
    return hard.detach() - clipped.detach() + clipped


def scaled(w: Tensor) -> Tensor:
    return w.abs().mean((1, 2, 3), keepdim=True) * torch.sign(w)


def ir_weight(w: Tensor) -> Tensor:
    flat = w.view(w.size(0), -1)
    centred = w - flat.mean(-1).view(-1, 1, 1, 1)
    standard = centred / flat.std(-1).view(-1, 1, 1, 1)
    flat = standard.abs().view(w.size(0), -1).mean(-1)
    scale = torch.pow(torch.tensor(2.0), (torch.log(flat) / np.log(2)).round()).view(-1, 1, 1, 1)
    return torch.sign(standard) * scale


def dorefa_weight(w: Tensor) -> Tensor:
    return torch.sign(w) * torch.mean(torch.abs(w)).detach()


class RSign(nn.Module):
    """LearnableBias + sign."""

    def __init__(self, channels: int):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1, channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return approx_sign(x + self.bias.expand_as(x))


class Bias(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1, channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias.expand_as(x)


class Residual(nn.Module):
    def __init__(self, *body: nn.Module, shortcut: nn.Module | None = None):
        super().__init__()
        self.body = nn.Sequential(*body)
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + (x if self.shortcut is None else self.shortcut(x))


class Map(nn.Module):
    """Any function as a module."""

    def __init__(self, function: Callable[..., Tensor]):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Head(nn.Module):
    def __init__(self, channels: int, classes: int = 5):
        super().__init__()
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.adaptive_avg_pool2d(x, 1).view(x.size(0), -1))


def stem(channels: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels))


def _spelled(key: str) -> None:
    act = SPELLINGS[key]
    step = key == "heaviside"

    def build() -> nn.Module:
        return nn.Sequential(
            BinConv(6, 12, 3, padding=1, act=act),
            nn.BatchNorm2d(12),
            BinConv(12, 16, 3, act=act),
            nn.BatchNorm2d(16),
        )

    build.__name__ = f"act_{key}"
    dynamic = key in ("where_ones_like", "where_full_like", "sign", "zeros_replaced")
    model(
        "1,4 spellings of sign" if not step else "1 activations in {0,1}",
        2,
        0,
        shape=(2, 6, 6, 7) if dynamic else (1, 6, 6, 7),
        dynamic=dynamic,
        domain="zeros",
        notes="inputs may hold exact zeros",
        quick=key == "where_ones_like",
    )(build)


for _key in SPELLINGS:
    _spelled(_key)


@model("4 sign(x + 1e-20): dynamo drops the addition", 1, 1, exports=((LEGACY, 17), (DYNAMO, 18)))
def act_tiny() -> nn.Module:
    return nn.Sequential(
        stem(16), BinConv(16, 16, 3, padding=1, act=lambda x: torch.sign(x + 1e-20))
    )


@model(
    "1 opsets of the legacy exporter",
    2,
    2,
    exports=tuple((LEGACY, o) for o in (9, 10, 11, 12, 14, 16, 19, 21, 23)),
    dynamic=True,
    shape=(2, 3, 7, 7),
)
def opsets_legacy() -> nn.Module:
    return nn.Sequential(
        stem(12),
        Residual(
            BinConv(
                12, 12, 3, padding=1, act=lambda x: torch.where(x >= 0, 1.0, -1.0), binarize=scaled
            ),
            nn.BatchNorm2d(12),
        ),
        nn.MaxPool2d(2),
        BinConv(12, 12, 3, padding=1, act=ste_clamp),
        nn.BatchNorm2d(12),
        nn.Hardtanh(),
        Head(12),
    )


@model(
    "1 opsets of the dynamo exporter",
    2,
    2,
    exports=(*((DYNAMO, o) for o in (19, 21, 22, 23, 24, 25)), (RAW, 23)),
    dynamic=True,
    shape=(2, 3, 7, 7),
)
def opsets_dynamo() -> nn.Module:
    return opsets_legacy()


# ----------------------------------------------------------------------------- blocks


@model("8 Bi-Real", 3, 3, quick=True)
def bi_real() -> nn.Module:
    return nn.Sequential(
        stem(8),
        Residual(
            BinConv(8, 8, 3, padding=1, act=approx_sign, binarize=scaled_ste), nn.BatchNorm2d(8)
        ),
        Residual(
            BinConv(8, 12, 3, stride=2, padding=1, act=approx_sign, binarize=scaled_ste),
            nn.BatchNorm2d(12),
            shortcut=nn.Sequential(
                nn.AvgPool2d(2), nn.Conv2d(8, 12, 1, bias=False), nn.BatchNorm2d(12)
            ),
        ),
        Residual(
            BinConv(12, 12, 3, padding=1, act=approx_sign, binarize=scaled_ste), nn.BatchNorm2d(12)
        ),
        Head(12),
    )


class ReactBlock(nn.Module):
    """ReActNet-A stage: 3x3 with stride 2, then two 1x1 from one sign, concatenated."""

    def __init__(self, c: int):
        super().__init__()
        self.move1, self.move2 = RSign(c), RSign(c)
        self.conv3 = BinConv(c, c, 3, stride=2, padding=1, act=lambda x: x, binarize=scaled_ste)
        self.bn1, self.bn2a, self.bn2b = nn.BatchNorm2d(c), nn.BatchNorm2d(c), nn.BatchNorm2d(c)
        self.pool = nn.AvgPool2d(2, 2)
        self.post = nn.Sequential(Bias(c), nn.PReLU(c), Bias(c))
        self.pw1 = BinConv(c, c, 1, act=lambda x: x, binarize=scaled_ste)
        self.pw2 = BinConv(c, c, 1, act=lambda x: x, binarize=scaled_ste)
        self.post2 = nn.Sequential(Bias(2 * c), nn.PReLU(2 * c), Bias(2 * c))

    def forward(self, x: Tensor) -> Tensor:
        x = self.post(self.bn1(self.conv3(self.move1(x))) + self.pool(x))
        s = self.move2(x)
        return self.post2(
            torch.cat([self.bn2a(self.pw1(s)) + x, self.bn2b(self.pw2(s)) + x], dim=1)
        )


@model("8 ReActNet", 3, 2, quick=True)
def react() -> nn.Module:
    return nn.Sequential(stem(10), ReactBlock(10), Head(20))


@model(
    "8 ReActNet, dynamic batch: Expand of the learnable bias",
    3,
    2,
    exports=((LEGACY, 13), (DYNAMO, 18)),
    dynamic=True,
    shape=(2, 3, 8, 8),
)
def react_dynamic() -> nn.Module:
    return react()


class XnorConv(nn.Module):
    """XNOR-Net convolution: alpha per filter, K map from the mean magnitude."""

    def __init__(self, c: int, o: int):
        super().__init__()
        self.conv = BinConv(c, o, 3, padding=1, binarize=scaled)
        self.register_buffer("box", torch.full((1, 1, 3, 3), 1 / 9))

    def forward(self, x: Tensor) -> Tensor:
        k = F.conv2d(x.abs().mean(1, keepdim=True), self.box, padding=1)
        return self.conv(x) * k


@model("8 XNOR-Net with K", 1, 3)
def xnor_net() -> nn.Module:
    return nn.Sequential(stem(14), XnorConv(14, 16), nn.ReLU(), Head(16))


@model("8 XNOR-Net without K: BN, sign, conv, ReLU, pool", 2, 2)
def xnor_net_simple() -> nn.Module:
    def block(c: int) -> list[nn.Module]:
        return [
            nn.BatchNorm2d(c, eps=1e-4, momentum=0.1),
            BinConv(c, c, 3, padding=1, bias=True, binarize=scaled),
            nn.ReLU(inplace=True),
        ]

    return nn.Sequential(
        nn.Conv2d(3, 14, 3, padding=1),
        nn.ReLU(),
        *block(14),
        nn.MaxPool2d(3, 2, 1),
        *block(14),
        Head(14),
    )


@model("8 IR-Net", 2, 2)
def ir_net() -> nn.Module:
    return nn.Sequential(
        stem(10),
        *[
            Residual(BinConv(10, 10, 3, padding=1, binarize=ir_weight), nn.BatchNorm2d(10))
            for _ in range(2)
        ],
        nn.Hardtanh(),
        Head(10),
    )


@model("8 DoReFa 1W1A", 2, 2)
def dorefa_1w1a() -> nn.Module:
    def act(x: Tensor) -> Tensor:
        return torch.round(torch.clamp(x, 0, 1))

    return nn.Sequential(
        stem(14),
        *[
            nn.Sequential(
                BinConv(14, 14, 3, padding=1, act=act, binarize=dorefa_weight), nn.BatchNorm2d(14)
            )
            for _ in range(2)
        ],
        Head(14),
    )


@model("8 DoReFa 1W2A (few-bit or float)", 0, 4)
def dorefa_1w2a() -> nn.Module:
    def act(x: Tensor) -> Tensor:
        return torch.round(torch.clamp(x, 0, 1) * 3) / 3

    return nn.Sequential(
        stem(14),
        *[
            nn.Sequential(
                BinConv(14, 14, 3, padding=1, act=act, binarize=dorefa_weight), nn.BatchNorm2d(14)
            )
            for _ in range(2)
        ],
        Head(14),
    )


class Gate(nn.Module):
    """Real-to-Binary: a squeeze-and-excite gate from the real input scales the binary output."""

    def __init__(self, c: int, o: int):
        super().__init__()
        self.conv = BinConv(c, o, 3, padding=1, binarize=scaled)
        self.down, self.up = nn.Linear(c, 4), nn.Linear(4, o)

    def forward(self, x: Tensor) -> Tensor:
        g = torch.sigmoid(self.up(F.relu(self.down(x.mean((2, 3))))))
        return self.conv(x) * g[:, :, None, None]


@model("8 Real-to-Binary gate", 1, 4, dynamic=True, shape=(2, 3, 7, 7))
def real_to_binary() -> nn.Module:
    return nn.Sequential(stem(14), Gate(14, 16), nn.BatchNorm2d(16), nn.PReLU(), Head(16))


class DenseBlock(nn.Module):
    def __init__(self, c: int, k: int, pad: float):
        super().__init__()
        self.bn = nn.BatchNorm2d(c)
        self.conv = BinConv(c, k, 3, padding=0, act=lambda x: x)
        self.pad = pad

    def forward(self, x: Tensor) -> Tensor:
        s = torch.where(self.bn(x) >= 0, 1.0, -1.0)
        return torch.cat([x, self.conv(F.pad(s, (1, 1, 1, 1), value=self.pad))], 1)


@model("2,8 BinaryDenseNet: Pad(-1), Concat", 2, 2)
def binary_densenet() -> nn.Module:
    return nn.Sequential(stem(12), DenseBlock(12, 8, -1.0), DenseBlock(20, 8, -1.0), Head(28))


@model("2 Pad(+1), dynamic batch", 2, 2, dynamic=True, shape=(2, 3, 7, 7))
def dense_pad_plus() -> nn.Module:
    return nn.Sequential(stem(12), DenseBlock(12, 8, 1.0), DenseBlock(20, 8, 1.0), Head(28))


class Melius(nn.Module):
    def __init__(self, c: int, k: int):
        super().__init__()
        self.bn, self.conv = nn.BatchNorm2d(c), BinConv(c, k, 3, padding=1)
        self.bn2, self.conv2 = nn.BatchNorm2d(c + k), BinConv(c + k, k, 3, padding=1)
        self.k = k

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x, self.conv(self.bn(x))], 1)
        y = self.conv2(self.bn2(x))
        return torch.cat([x[:, : -self.k], x[:, -self.k :] + y], 1)


@model("8 MeliusNet: Slice, Add, Concat", 2, 2)
def meliusnet() -> nn.Module:
    return nn.Sequential(stem(12), Melius(12, 8), nn.BatchNorm2d(20), Head(20))


@model("8 daBNN recipe with the sign present: ConstantPad2d(-1)", 2, 2)
def dabnn() -> nn.Module:
    def block() -> nn.Module:
        return Residual(
            Map(torch.sign),
            nn.ConstantPad2d(1, -1.0),
            BinConv(14, 14, 3, act=lambda x: x),
            nn.BatchNorm2d(14),
        )

    return nn.Sequential(stem(14), block(), block(), Head(14))


@model("8 BNN (Hubara): Hardtanh, sign, pools, binary linear, LogSoftmax", 4, 1, quick=True)
def bnn_hubara() -> nn.Module:
    return nn.Sequential(
        stem(10),
        nn.Hardtanh(),
        BinConv(10, 10, 3, padding=1, bias=True),
        nn.MaxPool2d(2),
        nn.BatchNorm2d(10),
        nn.Hardtanh(),
        BinConv(10, 8, 3, padding=1, bias=True),
        nn.BatchNorm2d(8),
        nn.Hardtanh(),
        nn.Flatten(),
        BinLinear(128, 16),
        nn.BatchNorm1d(16),
        nn.Hardtanh(),
        nn.Dropout(0.5),
        BinLinear(16, 5),
        nn.BatchNorm1d(5, affine=False),
        nn.LogSoftmax(dim=1),
    )


@model("0 MLP, Linear without bias, dynamic batch", 3, 0, shape=(2, 30), dynamic=True)
def mlp() -> nn.Module:
    return nn.Sequential(
        BinLinear(30, 33, bias=False),
        nn.BatchNorm1d(33),
        BinLinear(33, 40, bias=True),
        nn.BatchNorm1d(40),
        BinLinear(40, 5, bias=False),
    )


@model("0 Linear over the last axis of three", 2, 0, shape=(1, 5, 33))
def linear_3d() -> nn.Module:
    return nn.Sequential(BinLinear(33, 40, bias=False), BinLinear(40, 9, bias=True))


@model("4 parametrised weight, evaluated twice", 2, 1)
def parametrized() -> nn.Module:
    class Binarize(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return torch.where(w >= 0, 1.0, -1.0)

    net = nn.Sequential(
        stem(12),
        Map(torch.sign),
        nn.Conv2d(12, 12, 3, padding=1, bias=False),
        nn.BatchNorm2d(12),
        Map(torch.sign),
        nn.Conv2d(12, 12, 3),
    )
    parametrize.register_parametrization(net[2], "weight", Binarize())
    parametrize.register_parametrization(net[5], "weight", Binarize())
    return net


@model("0 depthwise and pointwise", 4, 2)
def mobilenet() -> nn.Module:
    def pair(c: int, o: int, stride: int) -> list[nn.Module]:
        return [
            BinConv(c, c, 3, stride=stride, padding=1, groups=c),
            nn.BatchNorm2d(c),
            BinConv(c, o, 1),
            nn.BatchNorm2d(o),
        ]

    return nn.Sequential(stem(20), *pair(20, 33, 2), *pair(33, 40, 1), Head(40))


class Shuffle(nn.Module):
    def __init__(self, groups: int):
        super().__init__()
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        return x.view(n, self.groups, c // self.groups, h, w).transpose(1, 2).reshape(n, c, h, w)


@model("8 groups and channel shuffle, static", 2, 2)
def shuffle() -> nn.Module:
    return nn.Sequential(
        stem(18),
        BinConv(18, 18, 3, padding=1, groups=3),
        nn.BatchNorm2d(18),
        Map(torch.sign),
        Shuffle(3),
        BinConv(18, 18, 3, groups=2, act=lambda x: x),
        Head(18),
    )


@model("8 channel shuffle, dynamic batch: shape chains", 2, 2, dynamic=True, shape=(2, 3, 7, 7))
def shuffle_dynamic() -> nn.Module:
    return shuffle()


class Branches(nn.Module):
    """chunk, two binary branches, cat, and the sign kept for a residual."""

    def __init__(self, c: int):
        super().__init__()
        self.a, self.b = (
            BinConv(c, c, 3, padding=1, act=lambda x: x),
            BinConv(c, c, 1, act=lambda x: x),
        )
        self.bn = nn.BatchNorm2d(2 * c)

    def forward(self, x: Tensor) -> Tensor:
        s = torch.sign(x)
        left, right = s.chunk(2, dim=1)
        return self.bn(torch.cat((self.a(left), self.b(right)), dim=1)) + s


@model("0 chunk, cat, shared sign with residual", 2, 2)
def branches() -> nn.Module:
    return nn.Sequential(stem(26), Branches(13), Head(26))


@model("8 pool before BN with gammas of both signs, then sign", 2, 2)
def pool_bn() -> nn.Module:
    return nn.Sequential(
        stem(14),
        BinConv(14, 14, 3, padding=1),
        nn.MaxPool2d(2, 2),
        nn.BatchNorm2d(14),
        BinConv(14, 14, 3, padding=1),
        nn.BatchNorm2d(14),
        Head(14),
    )


@model("8 padded pool on signs", 2, 2)
def pool_signs() -> nn.Module:
    return nn.Sequential(
        stem(14),
        BinConv(14, 14, 3, padding=1),
        nn.BatchNorm2d(14),
        Map(SPELLINGS["cast"]),
        nn.MaxPool2d(3, 2, 1, ceil_mode=True),
        BinConv(14, 14, 3, padding=1, act=lambda x: x),
        nn.BatchNorm2d(14),
        Head(14),
    )


@model("0 dilation, stride, asymmetric kernels and pads", 3, 1, shape=(1, 3, 9, 9))
def shapes() -> nn.Module:
    return nn.Sequential(
        stem(12),
        BinConv(12, 12, 3, padding=2, dilation=2),
        nn.BatchNorm2d(12),
        BinConv(12, 14, (1, 3), padding=(0, 1), stride=(2, 1)),
        nn.BatchNorm2d(14),
        BinConv(14, 9, (5, 2), padding=(2, 0)),
    )


@model("4 padding='same' with an even kernel", 1, 1)
def padding_same() -> nn.Module:
    class Same(BinConv):
        def forward(self, x: Tensor) -> Tensor:
            return F.conv2d(torch.sign(x), torch.sign(self.weight), padding="same")

    return nn.Sequential(stem(12), Same(12, 9, 4))


@model("1c BN with gamma = beta = 0, even K", 3, 1, notes="whole channels of zeros reach Sign")
def zero_gamma() -> nn.Module:
    net = nn.Sequential(
        stem(12),
        BinConv(12, 12, 2),
        nn.BatchNorm2d(12),
        BinConv(12, 12, 3),
        nn.BatchNorm2d(12),
        BinConv(12, 9, 1),
    )
    net.zeroed = [net[2], net[4]]
    return net


@model(
    "1b even K, no BN: attainable zeros",
    3,
    0,
    shape=(1, 8, 7, 7),
    domain="zeros",
    notes="accumulators of 0 reach Sign",
)
def even_k() -> nn.Module:
    return nn.Sequential(
        BinConv(8, 16, 2, act=SPELLINGS["where_scalar"]), BinConv(16, 16, 3), BinConv(16, 9, 1)
    )


@model("8 LayerNorm transformer block with binary projections", 2, 0, shape=(1, 5, 32))
def transformer() -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(32),
        Residual(BinLinear(32, 48), nn.LayerNorm(48), BinLinear(48, 32)),
        nn.LayerNorm(32),
    )


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.head = (
            BinConv(3, 9, 3, padding=1),
            nn.BatchNorm2d(9),
            BinLinear(9, 33),
        )

    def forward(self, image: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        y = self.bn(self.conv(image))
        return self.head(y.mean((2, 3)) + state), torch.sign(y)


@model("0 two inputs, two outputs, a sign as output", 2, 0, more=((1, 9),))
def two_inputs() -> nn.Module:
    return TwoInputs()


@model("8 LCE order: conv, ReLU, BN", 2, 2)
def quicknet() -> nn.Module:
    return nn.Sequential(
        stem(10),
        *[
            Residual(
                BinConv(10, 10, 3, padding=1, act=StepFunction.apply), nn.ReLU(), nn.BatchNorm2d(10)
            )
            for _ in range(2)
        ],
        nn.ReLU(),
        Head(10),
    )


@model("0 real weights on signs, binary weights on real data: float", 0, 3)
def not_binary() -> nn.Module:
    return nn.Sequential(
        BinConv(3, 12, 3, act=lambda x: x),
        nn.BatchNorm2d(12),
        Map(torch.sign),
        nn.Conv2d(12, 12, 3),
        Head(12),
    )


@model("0 ternary weights (TWN): not binary", 0, 3)
def ternary() -> nn.Module:
    def twn(w: Tensor) -> Tensor:
        delta = 0.7 * w.abs().mean()
        return torch.where(w > delta, 1.0, torch.where(w < -delta, -1.0, 0.0))

    return nn.Sequential(
        stem(14), BinConv(14, 14, 3, padding=1, binarize=twn), nn.BatchNorm2d(14), Head(14)
    )


@model("0 nothing binary: residual network", 0, 5, dynamic=True, shape=(2, 3, 8, 8))
def float_resnet() -> nn.Module:
    def block(c: int) -> list[nn.Module]:
        return [
            nn.Conv2d(c, c, 3, padding=1, bias=False),
            nn.BatchNorm2d(c),
            nn.ReLU(),
            nn.Conv2d(c, c, 3, padding=1, bias=False),
            nn.BatchNorm2d(c),
        ]

    return nn.Sequential(
        stem(10),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        Residual(*block(10)),
        nn.SiLU(),
        nn.Conv2d(10, 10, 3, groups=2),
        nn.GELU(),
        Head(10),
        nn.Softmax(-1),
    )


# ----------------------------------------------------------------------------- exporting


def settle(net: nn.Module, shapes: tuple[tuple[int, ...], ...]) -> nn.Module:
    """Give BatchNorms realistic statistics and gammas of both signs; biases some spread."""
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.reset_running_stats()
            module.momentum = None
    net.train()
    with torch.no_grad():
        for _ in range(3):
            net(*[torch.randn(16, *s[1:]) for s in shapes])
        for module in net.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine:
                n = module.num_features
                module.weight.copy_(torch.rand(n) + 0.3)
                module.weight[1::4] *= -1
                module.weight[5::7] = 0
                module.bias.copy_(torch.randn(n) * 0.4)
            elif isinstance(module, Bias | RSign):
                module.bias.normal_(0, 0.2)
            elif isinstance(module, nn.PReLU):
                module.weight.uniform_(0.1, 0.4)
        for module in getattr(net, "zeroed", []):
            module.weight[::3] = 0
            module.bias[::3] = 0
    return net.eval()


def export(
    net: nn.Module, args: tuple[Tensor, ...], exporter: str, opset: int, dynamic: bool
) -> onnx.ModelProto:
    """Export through one of torch's exporters."""
    names = ["x"] if len(args) == 1 else ["image", "state"]
    outputs = [f"y{i}" for i in range(len(net(*args)))] if isinstance(net(*args), tuple) else ["y"]
    common = {"opset_version": opset, "input_names": names, "output_names": outputs}
    if exporter == LEGACY:
        buffer = io.BytesIO()
        axes = {n: {0: "batch"} for n in [*names, *outputs]} if dynamic else None
        torch.onnx.export(net, args, buffer, dynamo=False, dynamic_axes=axes, **common)
        return onnx.load_from_string(buffer.getvalue())
    shapes = [{0: torch.export.Dim("batch")} for _ in names] if dynamic else None
    program = torch.onnx.export(
        net,
        args,
        dynamo=True,
        dynamic_shapes=tuple(shapes) if shapes else None,
        optimize=exporter == DYNAMO,
        verbose=False,
        **common,
    )
    return program.model_proto


def check(spec: Spec, net: nn.Module, model_proto: onnx.ModelProto, name: str) -> None:
    """Compare the file, by the oracle, with the module itself."""
    for domain in {"normal", spec.domain}:
        batch = 2 if spec.dynamic else 1
        feeds = oracle.tie_free_feeds(model_proto, domain=domain, batch=batch)
        with torch.no_grad():
            got = net(*[torch.from_numpy(v) for v in feeds.values()])
        got = got if isinstance(got, tuple) else (got,)
        outputs = {o.name: g.numpy() for o, g in zip(model_proto.graph.output, got, strict=True)}
        verdict = oracle.compare(model_proto, feeds, outputs)
        if not verdict.right or verdict.ties:
            print(f"{name} ({domain}): {verdict.kind}: {verdict.text} {verdict.ties[:2]}")


def main() -> None:
    """Export everything, or what is named on the command line (then the index is left alone)."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    chosen = sys.argv[1:]
    entries = []
    for spec in SPECS:
        if chosen and spec.name not in chosen:
            continue
        torch.manual_seed(zlib.crc32(spec.name.encode()))
        net = settle(spec.build(), spec.shapes)
        args = tuple(torch.randn(*s) for s in spec.shapes)
        for exporter, opset in spec.exports:
            short = {LEGACY: "legacy", DYNAMO: "dynamo", RAW: "raw"}[exporter]
            name = f"torch_{spec.name}_{short}{opset}"
            try:
                proto = export(net, args, exporter, opset, spec.dynamic)
            except Exception as error:
                print(f"{name}: not exportable: {str(error).splitlines()[0][:200]}")
                continue
            proto = exporting.clean(proto)
            check(spec, net, proto, name)
            entries.append(
                exporting.write(
                    proto,
                    name=name,
                    exporter=exporter,
                    pattern=spec.pattern,
                    binary=spec.binary,
                    float_=spec.float_,
                    domain=spec.domain,
                    batches=(1, 3) if spec.dynamic else (1,),
                    notes=spec.notes,
                    quick=spec.quick and exporter == (DYNAMO if spec.name == "bi_real" else LEGACY),
                )
            )
    if not chosen:
        exporting.merge(entries, "torch_")


if __name__ == "__main__":
    main()
