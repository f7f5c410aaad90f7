"""Train the digits network and export it as plain ONNX.

Writes ``digits.onnx`` and ``test_images.npz`` beside this file. It needs what neither bnncc nor its
demo does::

    pip install torch==2.13.0 onnx onnxscript scikit-learn
    python examples/digits/train.py

The data are scikit-learn's 1797 handwritten digits of 8x8 pixels; a quarter is held out and only
ever used to state the accuracy. On one core training takes a few minutes.

The network, with 99 % of its multiply-accumulates binary::

    image -> conv 3x3 float -> BN -> x
    x -> sign -> binary conv 3x3, zero padding -> BN -> + x          residual block
      -> sign -> binary conv 3x3, zero padding -> BN -> max-pool     pooled as bits
      -> sign -> binary conv 3x3, no padding -> BN
      -> sign -> flatten -> linear float
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F

HERE = Path(__file__).resolve().parent
SEED = 0
EPOCHS = 150
BATCH = 64
HELD_OUT = 450
LEARNING_RATE = 3e-3
# Fraction of multiply-accumulates that must be binary, and of held-out images that must be right.
MIN_BINARY = 0.70
MIN_ACCURACY = 0.95


def sign(x: Tensor) -> Tensor:
    """Binarize with sign(0) = +1, so that no third value can occur."""
    return torch.where(x >= 0, 1.0, -1.0)


class _SignSTE(torch.autograd.Function):
    """`sign` whose gradient passes where the input lies within [-1, 1]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return sign(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= 1)


class Sign(nn.Module):
    """Binary activation; trains by the straight-through estimator."""

    def forward(self, x: Tensor) -> Tensor:
        """Return +1 or -1 for every value of `x`."""
        return _SignSTE.apply(x) if self.training else sign(x)


class BinaryConv2d(nn.Conv2d):
    """Convolution with the signs of its weights; the BatchNorm behind it gives the scale."""

    def __init__(self, in_channels: int, out_channels: int, *, padding: int) -> None:
        super().__init__(in_channels, out_channels, 3, padding=padding, bias=False)
        nn.init.uniform_(self.weight, -0.5, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve two-valued `x` with two-valued weights."""
        weight = _SignSTE.apply(self.weight) if self.training else sign(self.weight)
        return F.conv2d(x, weight, padding=self.padding)


class DigitsNet(nn.Module):
    """The network drawn at the top of this file."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 32, 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(32)
        self.conv1 = BinaryConv2d(32, 32, padding=1)
        self.norm1 = nn.BatchNorm2d(32)
        self.conv2 = BinaryConv2d(32, 64, padding=1)
        self.norm2 = nn.BatchNorm2d(64)
        self.pool = nn.MaxPool2d(2)
        self.conv3 = BinaryConv2d(64, 64, padding=0)
        self.norm3 = nn.BatchNorm2d(64)
        self.sign = Sign()
        self.classifier = nn.Linear(64 * 2 * 2, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return ten logits for each 8x8 image."""
        x = self.stem_norm(self.stem(images))
        x = x + self.norm1(self.conv1(self.sign(x)))
        x = self.pool(self.norm2(self.conv2(self.sign(x))))
        x = self.sign(self.norm3(self.conv3(self.sign(x))))
        return self.classifier(x.flatten(1))


def count_macs(model: nn.Module) -> dict[str, int]:
    """Count the multiply-accumulates of one image, as ``{"binary": ..., "float": ...}``."""
    macs = {"binary": 0, "float": 0}

    def count(module: nn.Module, _inputs: Any, output: Tensor) -> None:
        weight: Any = module.weight
        kind = "binary" if isinstance(module, BinaryConv2d) else "float"
        macs[kind] += output[0].numel() * weight[0].numel()

    counted = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    hooks = [m.register_forward_hook(count) for m in counted]
    with torch.no_grad():
        model.eval()(torch.zeros(1, 1, 8, 8))
    for hook in hooks:
        hook.remove()
    return macs


def shift(images: Tensor) -> Tensor:
    """Move each image by -1, 0 or +1 pixel along each axis, as augmentation."""
    padded = F.pad(images, (1, 1, 1, 1))
    rows, columns = torch.randint(0, 3, (2, len(images))).tolist()
    crops = [p[:, r : r + 8, c : c + 8] for p, r, c in zip(padded, rows, columns, strict=True)]
    return torch.stack(crops)


def train(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Fit `model` in place."""
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    steps = EPOCHS * (len(images) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.train()
    for epoch in range(EPOCHS):
        # The last, smaller batch is left out: its statistics would be noisy.
        order = torch.randperm(len(images))[: len(images) // BATCH * BATCH]
        total = 0.0
        for batch in order.split(BATCH):
            loss = F.cross_entropy(model(shift(images[batch])), labels[batch], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            with torch.no_grad():  # beyond 1 the straight-through gradient is zero for good
                for module in model.modules():
                    if isinstance(module, BinaryConv2d):
                        module.weight.clamp_(-1, 1)
            total += loss.item() * len(batch)
        if epoch % 10 == 9:
            print(f"epoch {epoch + 1:3d}: loss {total / len(order):.4f}", flush=True)


def export(model: nn.Module, path: Path) -> None:
    """Write `model` as ONNX with a dynamic batch ``N``, without the exporter's annotations."""
    images = torch.zeros(2, 1, 8, 8)
    shapes = {"images": {0: torch.export.Dim("N")}}
    program = torch.onnx.export(
        model.eval(),
        (images,),
        dynamo=True,
        dynamic_shapes=shapes,
        input_names=["images"],
        output_names=["logits"],
        external_data=False,
    )
    assert program is not None
    exported = program.model_proto
    # The exporter records where in which file each node was made; that is nobody's business.
    for item in (exported, exported.graph, *exported.graph.node, *exported.graph.initializer):
        del item.metadata_props[:]
        item.doc_string = ""
    for value in (*exported.graph.value_info, *exported.graph.input, *exported.graph.output):
        del value.metadata_props[:]
    onnx.checker.check_model(exported, full_check=True)
    path.write_bytes(exported.SerializeToString(deterministic=True))


def main() -> None:
    """Train, check and export."""
    torch.manual_seed(SEED)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)  # sums in one order, whatever the machine
    digits = load_digits()
    images = (digits.images[:, None] / 16).astype(np.float32)
    labels = digits.target.astype(np.int64)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels, test_size=HELD_OUT, random_state=SEED, stratify=labels
    )

    model = DigitsNet()
    macs = count_macs(model)
    binary = macs["binary"] / sum(macs.values())
    assert binary >= MIN_BINARY, macs
    train(model, torch.from_numpy(train_images), torch.from_numpy(train_labels))

    with torch.no_grad():
        predicted = model.eval()(torch.from_numpy(test_images)).argmax(1).numpy()
    accuracy = float((predicted == test_labels).mean())
    print(f"{binary:.1%} of {sum(macs.values())} MACs binary; held-out accuracy {accuracy:.2%}")
    assert accuracy >= MIN_ACCURACY, accuracy

    export(model, HERE / "digits.onnx")
    np.savez_compressed(HERE / "test_images.npz", images=test_images, labels=test_labels)


if __name__ == "__main__":
    main()
