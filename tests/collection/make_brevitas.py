"""Write small networks as Brevitas exports them, with what the `qonnx` executor computes for them.

    python tests/collection/make_brevitas.py FOLDER  # needs brevitas, torch, onnxoptimizer, qonnx

The files of tests/data/brevitas were made with brevitas 0.13.4, torch 2.13.0, onnx 1.22.0 and qonnx
1.0.0, in an environment of their own. Each NAME.onnx has a NAME.npz: inputs `x`, outputs `y`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import brevitas.nn as qnn
import numpy as np
import onnx
import torch
from brevitas.core.restrict_val import RestrictValueType
from brevitas.core.scaling import ScalingImplType
from brevitas.export import export_onnx_qcdq, export_qonnx
from brevitas.inject.enum import QuantType
from brevitas.quant import (
    Int8ActPerTensorFloat,
    Int8WeightPerChannelFloat,
    Int8WeightPerTensorFloat,
    ShiftedUint8ActPerTensorFloat,
    SignedBinaryActPerTensorConst,
    SignedBinaryWeightPerTensorConst,
    SignedTernaryWeightPerTensorConst,
    TruncTo8bit,
    Uint8ActPerTensorFloat,
)
from torch import nn

SAMPLES = 4


def weights(bits: int, per_channel: bool = False) -> dict:
    if bits == 1:
        return {"weight_quant": SignedBinaryWeightPerTensorConst}
    kind = Int8WeightPerChannelFloat if per_channel else Int8WeightPerTensorFloat
    return {"weight_quant": kind, "weight_bit_width": bits}


def act(bits: int) -> nn.Module:
    """Return an activation: signs for one bit, else a quantized ReLU."""
    if bits == 1:
        return qnn.QuantIdentity(act_quant=SignedBinaryActPerTensorConst)
    return qnn.QuantReLU(act_quant=Uint8ActPerTensorFloat, bit_width=bits)


def signed(bits: int) -> nn.Module:
    if bits == 1:
        return qnn.QuantIdentity(act_quant=SignedBinaryActPerTensorConst)
    return qnn.QuantIdentity(act_quant=Int8ActPerTensorFloat, bit_width=bits)


def mlp(w: int, a: int, per_channel: bool = False) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten(), signed(a)]
    for before, after in ((36, 16), (16, 16)):
        layers += [qnn.QuantLinear(before, after, bias=False, **weights(w, per_channel))]
        layers += [nn.BatchNorm1d(after), act(a)]
    return nn.Sequential(*layers, qnn.QuantLinear(16, 10, bias=True, **weights(w, per_channel)))


def cnv(w: int, a: int, padding: int = 0) -> nn.Module:
    def conv(before: int, after: int) -> list[nn.Module]:
        options = {"bias": False, "padding": padding, **weights(w)}
        made = qnn.QuantConv2d(before, after, 3, **options)
        return [made, nn.BatchNorm2d(after), act(a)]

    last = qnn.QuantLinear(8 * 16 if padding else 8 * 4, 10, bias=False, **weights(w))
    pool = nn.MaxPool2d(2)
    return nn.Sequential(signed(8), *conv(3, 8), *conv(8, 8), pool, nn.Flatten(), last)


class Separable(nn.Module):
    """Depthwise and pointwise convolutions, a residual, and a truncating average pool."""

    def __init__(self, w: int, a: int) -> None:
        super().__init__()
        options = {"bias": False, **weights(w, per_channel=True)}
        self.first = nn.Sequential(
            qnn.QuantConv2d(3, 16, 3, stride=2, padding=1, bias=False, **weights(8, True)),
            nn.BatchNorm2d(16), qnn.QuantReLU(bit_width=a, return_quant_tensor=True),
        )  # fmt: skip
        self.depth = nn.Sequential(
            qnn.QuantConv2d(16, 16, 3, padding=1, groups=16, **options), nn.BatchNorm2d(16),
            qnn.QuantReLU(bit_width=a),
        )  # fmt: skip
        self.point = nn.Sequential(qnn.QuantConv2d(16, 16, 1, **options), nn.BatchNorm2d(16))
        self.sum = qnn.QuantReLU(bit_width=a, return_quant_tensor=True)
        self.pool = qnn.TruncAvgPool2d(
            4, trunc_quant=TruncTo8bit, bit_width=a, float_to_int_impl_type="floor",
            return_quant_tensor=True,
        )  # fmt: skip
        self.last = qnn.QuantLinear(16, 10, bias=True, **weights(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = self.sum(self.point(self.depth(x)) + x)
        return self.last(self.pool(x).flatten(1))


def radio(w: int, a: int) -> nn.Module:
    def conv(before: int, after: int) -> list[nn.Module]:
        made = qnn.QuantConv1d(before, after, 3, padding=1, bias=False, **weights(w))
        return [made, nn.BatchNorm1d(after), act(a), nn.MaxPool1d(2)]

    return nn.Sequential(
        signed(8), *conv(2, 8), *conv(8, 16), nn.Flatten(),
        qnn.QuantLinear(16 * 4, 16, bias=False, **weights(w)), nn.BatchNorm1d(16), act(a),
        qnn.QuantLinear(16, 10, bias=False, **weights(w)),
    )  # fmt: skip


def ternary() -> nn.Module:
    options = {"weight_quant": SignedTernaryWeightPerTensorConst, "bias": False}
    return nn.Sequential(
        signed(4), qnn.QuantConv2d(3, 8, 3, **options), nn.BatchNorm2d(8), act(2),
        qnn.QuantConv2d(8, 8, 3, **options), nn.BatchNorm2d(8), act(2), nn.Flatten(),
        qnn.QuantLinear(8 * 16, 10, bias=False, weight_quant=SignedTernaryWeightPerTensorConst),
    )  # fmt: skip


def shifted() -> nn.Module:
    """Return a network whose activations have a zero point."""
    quant = {"act_quant": ShiftedUint8ActPerTensorFloat}
    return nn.Sequential(
        qnn.QuantIdentity(bit_width=4, **quant),
        qnn.QuantConv2d(3, 8, 3, bias=False, **weights(4)), nn.BatchNorm2d(8),
        qnn.QuantIdentity(bit_width=4, **quant), qnn.QuantConv2d(8, 8, 3, bias=True, **weights(4)),
        qnn.QuantIdentity(bit_width=8, **quant), nn.Flatten(),
        qnn.QuantLinear(8 * 16, 10, bias=False, **weights(4)),
    )  # fmt: skip


def power_of_two() -> nn.Module:
    quant = {
        "restrict_scaling_type": RestrictValueType.POWER_OF_TWO,
        "scaling_impl_type": ScalingImplType.CONST, "scaling_init": 2.0, "min_val": -2.0,
        "max_val": 2.0, "quant_type": QuantType.INT,
    }  # fmt: skip
    return nn.Sequential(
        nn.Flatten(), qnn.QuantHardTanh(bit_width=3, **quant),
        qnn.QuantLinear(36, 16, bias=True, **weights(3)),
        qnn.QuantHardTanh(bit_width=3, **quant), qnn.QuantLinear(16, 10, bias=False, **weights(2)),
    )  # fmt: skip


ROW, IMAGE = (1, 1, 6, 6), (1, 3, 8, 8)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp_1w1a": (lambda: mlp(1, 1), ROW),
    "mlp_1w2a": (lambda: mlp(1, 2), ROW),
    "mlp_2w2a": (lambda: mlp(2, 2, per_channel=True), ROW),
    "mlp_8w1a": (lambda: mlp(8, 1), ROW),
    "cnv_1w1a": (lambda: cnv(1, 1), IMAGE),
    "cnv_1w2a": (lambda: cnv(1, 2), IMAGE),
    "cnv_2w2a_padded": (lambda: cnv(2, 2, padding=1), IMAGE),
    "cnv_1w1a_padded": (lambda: cnv(1, 1, padding=1), IMAGE),
    "separable_4w4a": (lambda: Separable(4, 4), IMAGE),
    "radio_8w8a": (lambda: radio(8, 8), (1, 2, 16)),
    "radio_4w3a": (lambda: radio(4, 3), (1, 2, 16)),
    "ternary": (ternary, IMAGE),
    "shifted": (shifted, IMAGE),
    "power_of_two": (power_of_two, ROW),
}
LEGACY = ("cnv_1w1a", "mlp_2w2a", "separable_4w4a", "shifted")
QCDQ = ("mlp_2w2a", "cnv_2w2a_padded", "shifted", "radio_8w8a", "ternary")


def trained(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> nn.Module:
    """Return a network with statistics and scales of some data, as if it had been trained."""
    torch.manual_seed(0)
    module = make()
    for part in module.modules():
        if isinstance(part, (nn.BatchNorm1d, nn.BatchNorm2d)):
            nn.init.uniform_(part.weight, -1, 1)
            nn.init.normal_(part.bias, 0, 0.5)
    module.train()
    with torch.no_grad():
        for _ in range(40):
            module(torch.randn(8, *shape[1:]))
    return module.eval()


def shrink(path: Path) -> None:
    """Leave out what says where nodes come from, and put data that lie beside the file into it."""
    model = onnx.load(path)
    for part in (model, model.graph, *model.graph.node, *model.graph.initializer):
        part.doc_string = ""
        if hasattr(part, "metadata_props"):
            del part.metadata_props[:]
    del model.graph.value_info[:]
    onnx.save(model, path)
    path.with_name(path.name + ".data").unlink(missing_ok=True)


def run(path: Path, x: np.ndarray) -> np.ndarray:
    from qonnx.core.modelwrapper import ModelWrapper
    from qonnx.core.onnx_exec import execute_onnx
    from qonnx.transformation.infer_shapes import InferShapes

    model = ModelWrapper(str(path)).transform(InferShapes())
    name = model.graph.input[0].name
    return np.stack([next(iter(execute_onnx(model, {name: one}).values())) for one in x])


def main() -> None:
    """Write the files."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    for name, (make, shape) in NETWORKS.items():
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        forms = {name: (export_qonnx, {"dynamo": True})}
        if name in LEGACY:
            forms[f"{name}.legacy"] = (export_qonnx, {"dynamo": False})
        if name in QCDQ:
            forms[f"{name}.qcdq"] = (export_onnx_qcdq, {"dynamo": True})
            forms[f"{name}.qcdq-legacy"] = (export_onnx_qcdq, {"dynamo": False})
        for form, (export, options) in forms.items():
            path = folder / f"{form}.onnx"
            try:
                export(trained(make, shape), x, str(path), **options)
                shrink(path)
                samples = np.random.default_rng(0).standard_normal((SAMPLES, *shape))
                data = samples.astype(np.float32) * 2
                np.savez_compressed(path.with_suffix(".npz"), x=data, y=run(path, data))
                print(form, path.stat().st_size)
            except Exception as error:
                print(form, "FAILED", type(error).__name__, str(error)[:300])


if __name__ == "__main__":
    main()
