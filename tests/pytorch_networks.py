"""Small copies of published binary networks, as their authors wrote them; needs torch.

    python -m tests.pytorch_networks

writes the files of `tests/data/pytorch`: what torch.export.save makes of some networks, compressed,
and what torch computes. `test_pytorch_files.py` reads them without torch.
"""

from __future__ import annotations

import io
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.conftest import ROOT
from tests.pytorch_files import FOLDER
from tests.pytorch_models import (
    CHANNELS,
    SIZE,
    Lines,
    Straight,
    approx_sign,
    detached,
    halves,
    outputs,
    real,
    scaled,
    where,
)


class RealConv(nn.Module):
    """A convolution of signs with weights like `real`."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> None:
        super().__init__()
        self.stride, self.padding = stride, kernel // 2
        self.weight = nn.Parameter(torch.rand(outputs, inputs, kernel, kernel) * 0.02 - 0.01)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(approx_sign(x), real(self.weight), stride=self.stride, padding=self.padding)


class Offset(nn.Module):
    """A learnt offset for each channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(1, channels, 1, 1) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias.expand_as(x)


class ReactBlock(nn.Module):
    """A 3x3 and a pointwise binary layer; twice the pointwise one where channels double."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            Offset(inputs), RealConv(inputs, inputs, 3, stride), nn.BatchNorm2d(inputs)
        )
        self.act1 = nn.Sequential(Offset(inputs), nn.PReLU(inputs), Offset(inputs))
        self.offset = Offset(inputs)
        self.points = nn.ModuleList(
            nn.Sequential(RealConv(inputs, inputs, 1), nn.BatchNorm2d(inputs))
            for _ in range(outputs // inputs)
        )
        self.act2 = nn.Sequential(Offset(outputs), nn.PReLU(outputs), Offset(outputs))
        self.pool = nn.AvgPool2d(2, 2) if stride == 2 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.act1(self.first(x) + self.pool(x))
        z = self.offset(y)
        return self.act2(torch.cat([point(z) + y for point in self.points], dim=1))


class React(nn.Module):
    """ReActNet, small."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8))
        self.layers = nn.Sequential(ReactBlock(8, 16, 1), ReactBlock(16, 16, 2))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.layers(self.stem(x)))
        return self.fc(x.view(x.size(0), -1))


class BiRealBlock(nn.Module):
    """A binary layer with a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv, self.norm = RealConv(inputs, outputs, 3, stride), nn.BatchNorm2d(outputs)
        self.shortcut = None
        if stride == 2:
            self.shortcut = nn.Sequential(
                nn.AvgPool2d(2, 2), nn.Conv2d(inputs, outputs, 1, bias=False),
                nn.BatchNorm2d(outputs),
            )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        y += x if self.shortcut is None else self.shortcut(x)
        return y


class BiReal(nn.Module):
    """Bi-Real-Net, small."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16), nn.MaxPool2d(3, 2, 1)
        )
        self.layers = nn.Sequential(BiRealBlock(16, 16, 1), BiRealBlock(16, 32, 2))
        self.fc = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(self.layers(self.stem(x)), (1, 1))
        return self.fc(torch.flatten(x, 1))


class Xnor(nn.Module):
    """XNOR-Net as reimplementations have it: BatchNorm, sign, convolution, ReLU in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 5, 1, 2), nn.BatchNorm2d(16, eps=1e-4), nn.ReLU(inplace=True),
            nn.MaxPool2d(2, 2),
        )  # fmt: skip
        self.norm1, self.norm2 = nn.BatchNorm2d(16, eps=1e-4), nn.BatchNorm2d(32, eps=1e-4)
        self.conv, self.fc1, self.fc2 = (
            nn.Conv2d(16, 32, 3, padding=1), nn.Linear(32 * 16, 64), nn.Linear(64, 10)
        )  # fmt: skip
        self.relu = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.stem(x))
        x = self.relu(
            F.conv2d(Straight.apply(x), scaled(self.conv.weight), self.conv.bias, padding=1)
        )
        x = self.dropout(Straight.apply(self.norm2(F.max_pool2d(x, 2))).view(x.size(0), -1))
        weight = self.fc1.weight.sign() * self.fc1.weight.abs().mean(1, keepdim=True)
        return F.log_softmax(self.fc2(self.relu(F.linear(x, weight, self.fc1.bias))), dim=1)


class Melius(nn.Module):
    """MeliusNet's blocks: channels are added by concatenation, then improved in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(16 + 16 * k) for k in range(2))
        self.dense = nn.ParameterList(torch.randn(16, 16 + 16 * k, 3, 3) for k in range(2))
        self.improve = nn.ParameterList(torch.randn(16, 32 + 16 * k, 3, 3) for k in range(2))
        self.fc = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for norm, dense, improve in zip(self.norms, self.dense, self.improve, strict=True):
            y = F.conv2d(where(norm(x)), where(dense), padding=1)
            x = torch.cat([x, y], dim=1)
            x[:, -16:] += F.conv2d(where(x), where(improve), padding=1)
        return self.fc(F.relu(x).mean((2, 3)))


class Shuffle(nn.Module):
    """Groups, a channel shuffle, a split and a depthwise layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm = nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.grouped = nn.Parameter(torch.randn(32, 16, 3, 3))
        self.point = nn.Parameter(torch.randn(16, 16, 1, 1))
        self.deep = nn.Parameter(torch.randn(32, 1, 3, 3))
        self.fc = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = where(self.norm(self.stem(x)))
        n, c, h, w = x.shape
        x = x.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, -1, h, w)
        one, two = F.conv2d(x, self.grouped.sign(), padding=1, groups=2).chunk(2, dim=1)
        x = torch.cat([F.conv2d(where(one), self.point.sign()), two], dim=1)
        x = F.conv2d(where(x), self.deep.sign(), padding=1, groups=32)
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Perceptron(nn.Module):
    """Dense layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(64, 32, bias=False), nn.Linear(32, 32, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm1d(32) for _ in range(2))
        self.fc = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 64)
        x = self.norms[0](F.linear(x.sign(), self.a.weight.sign()))
        x = self.norms[1](F.linear(detached(x), detached(self.b.weight)))
        return self.fc(x)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "react": (React, (2, 3, 16, 16), 5),
    "bireal": (BiReal, (2, 3, 32, 32), 2),
    "xnor": (Xnor, (2, 3, 16, 16), 2),
    "melius": (Melius, (2, 3, 8, 8), 4),
    "shuffle": (Shuffle, (2, 3, 8, 8), 3),
    "perceptron": (Perceptron, (3, 1, 8, 8), 2),
}
"""What makes a network, the shape of its input, and how many of its layers are binary."""


def randomised(model: nn.Module) -> nn.Module:
    """Return `model` in eval mode, with running statistics as training leaves them."""
    torch.manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, 0, 0.3)
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias, 0, 0.3)
    return model.eval()


def write(folder: Path = FOLDER) -> None:
    """Write the files that tests read without torch."""
    batch = torch.export.Dim("batch", min=1, max=64)
    x = halves(1, CHANNELS, SIZE, SIZE)
    cases: dict[str, tuple[nn.Module, Tensor, Any]] = {"lines": (randomised(Lines()), x, None)}
    for name in ("react", "perceptron"):
        build, shape, _ = NETWORKS[name]
        cases[name] = (randomised(build()), torch.randn(shape), ({0: batch},))
    for name, (model, x, shapes) in cases.items():
        program = torch.export.export(model, (x,), dynamic_shapes=shapes)
        for node in program.graph.nodes:  # folders of this machine
            trace = node.meta.get("stack_trace") or ""
            for folder_here in (ROOT, Path(torch.__file__).parents[1]):
                trace = trace.replace(f"{folder_here}/", "")
            node.meta["stack_trace"] = trace
        buffer = io.BytesIO()
        torch.export.save(program, buffer)
        (folder / f"{name}.pt2.xz").write_bytes(lzma.compress(buffer.getvalue(), preset=9))
        values = {f"output{k:02}": v for k, v in enumerate(outputs(model, x))}
        np.savez_compressed(folder / f"{name}.npz", input=x.numpy(), **values)


if __name__ == "__main__":
    write()
