"""Operators of PyTorch one by one, and the modules around them; needs torch.

Each is read, evaluated and compared with what torch computes: as exported, which is how a ``.pt2``
file is, too. Those in `REFUSED` are refused by name.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'bnncc[torch]'")

import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.utils import parametrizations, parametrize, prune  # noqa: E402

from bnncc.errors import ModelError  # noqa: E402
from bnncc.frontend import pytorch  # noqa: E402
from bnncc.frontend.onnx import load  # noqa: E402
from bnncc.frontend.pytorch import convert, views  # noqa: E402
from bnncc.ir.evaluate import evaluate  # noqa: E402

GENERATOR = torch.Generator().manual_seed(0)


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR)


X, ODD, ROWS, LINE = rand(2, 4, 8, 8), rand(2, 4, 7, 7), rand(3, 6, 5), rand(2, 3, 7)
CUBE, SEQUENCE, ABOVE = rand(1, 2, 4, 5, 6), rand(2, 6, 8), X.abs() + 1.1
WITHIN, INDEX = X.clamp(-0.9, 0.9), torch.randint(0, 4, (2, 4, 8, 8), generator=GENERATOR)
ORDER = torch.argsort(rand(2, 4, 8, 8), 1)
QUERY, KEY, VALUE = rand(2, 4, 6, 8), rand(2, 4, 9, 8), rand(2, 4, 9, 8)
IDS = torch.randint(0, 10, (2, 5), generator=GENERATOR)
HALVES = {"float16": 2e-2, "bfloat16": 8e-2, "float64": 1e-6}


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


CASES: dict[str, tuple[nn.Module, tuple[Tensor, ...]]] = {}


def case(name: str, what: Any, *inputs: Tensor) -> None:
    assert name not in CASES
    CASES[name] = (what if isinstance(what, nn.Module) else Function(what), inputs or (X,))


# ---------------------------------------------------------------------------------------- recurrent

for kind in (nn.LSTM, nn.GRU, nn.RNN):
    name = kind.__name__.lower()
    for first in (False, True):
        for layers in (1, 2):
            options = {"batch_first": first, "bidirectional": first != (layers == 1)}
            case(f"{name}-{first}-{layers}", kind(5, 7, layers, **options), ROWS)
    case(f"{name}-no-bias", kind(5, 7, bias=False), ROWS)
    case(f"{name}-no-batch", kind(5, 7), ROWS[0])
    case(f"{name}-half", kind(5, 7).half(), ROWS.half())
    case(f"{name}-double", kind(5, 7).double(), ROWS.double())
case("lstm-proj", nn.LSTM(5, 7, 2, proj_size=3, bidirectional=True, batch_first=True), ROWS)
case("rnn-relu", nn.RNN(5, 7, nonlinearity="relu"), ROWS)
for cell in (nn.LSTMCell, nn.GRUCell, nn.RNNCell):
    case(cell.__name__, cell(5, 7), ROWS[0])


class Stated(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, *states: Tensor) -> Any:
        y, after = self.layer(x, states if len(states) > 1 else states[0])
        return y, after


case("lstm-state", Stated(nn.LSTM(5, 7, 2)), ROWS, rand(2, 6, 7), rand(2, 6, 7))
case("gru-state", Stated(nn.GRU(5, 7, 1, bidirectional=True)), ROWS, rand(2, 6, 7))

# ------------------------------------------------------------------------------- resizing, sampling

SIZES: tuple[dict[str, Any], ...] = (
    {"scale_factor": 2}, {"scale_factor": 1.7}, {"scale_factor": (0.6, 1.3)}, {"size": (5, 13)},
    {"scale_factor": 1.7, "recompute_scale_factor": True}, {"size": (3, 16)},
)  # fmt: skip


def resized(mode: str, **options: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: F.interpolate(x, mode=mode, **options)


for mode in ("nearest", "nearest-exact", "area"):
    for k, size in enumerate(SIZES):
        case(f"{mode}-{k}", resized(mode, **size))
    for k, size in enumerate(({"scale_factor": 3}, {"size": 11}, {"scale_factor": 0.45})):
        case(f"{mode}-line-{k}", resized(mode, **size), LINE)
    case(f"{mode}-cube", resized(mode, size=(3, 7, 5)), CUBE)
for mode in ("bilinear", "bicubic"):
    for corners in (False, True):
        for smooth in (False, True):
            for k, size in enumerate(SIZES[1:4]):
                options = {"align_corners": corners, "antialias": smooth, **size}
                case(f"{mode}-{corners}-{smooth}-{k}", resized(mode, **options))
for corners in (False, True):
    case(f"linear-{corners}", resized("linear", size=11, align_corners=corners), LINE)
    case(
        f"trilinear-{corners}", resized("trilinear", scale_factor=1.3, align_corners=corners), CUBE
    )


def sampled(mode: str, padding: str, corners: bool) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, grid: F.grid_sample(x, grid, mode, padding, corners)


for mode in ("bilinear", "nearest", "bicubic"):
    for padding in ("zeros", "border", "reflection"):
        for corners in (False, True):
            function = sampled(mode, padding, corners)
            case(f"grid-{mode}-{padding}-{corners}", function, X, rand(2, 5, 6, 2) * 0.9)
            if mode != "bicubic":
                case(f"grid-cube-{mode}-{padding}-{corners}", function, CUBE, rand(1, 3, 5, 6, 3))
case(
    "affine-grid",
    lambda x, t: F.grid_sample(
        x, F.affine_grid(t, list(x.shape), align_corners=False), align_corners=False
    ),
    X, rand(2, 2, 3),
)  # fmt: skip
case("affine-cube", lambda t: F.affine_grid(t, [1, 2, 4, 5, 6], align_corners=True), rand(1, 3, 4))

# -------------------------------------------------------------------------------- pools and windows

for shape in ((5, 3), (3, 9), (7, 2), (None, 3)):
    case(f"adaptive-average-{shape}", nn.AdaptiveAvgPool2d(shape), ODD)
    case(f"adaptive-maximum-{shape}", nn.AdaptiveMaxPool2d(shape), ODD)
case("adaptive-line", nn.AdaptiveAvgPool1d(5), LINE)
case("adaptive-cube", nn.AdaptiveMaxPool3d((3, 2, 4)), CUBE)
case("adaptive-no-batch", nn.AdaptiveAvgPool2d((5, 3)), ODD[0])
case("places", lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), ODD)
case("places-line", lambda x: F.max_pool1d(x, 3, 2, 1, return_indices=True), LINE)
case("places-cube", lambda x: F.max_pool3d(x, 2, return_indices=True), CUBE)
case("unpool", lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2))
case("unpool-line", lambda x: F.max_unpool1d(*F.max_pool1d(x, 3, return_indices=True), 3), LINE)
case("lp-pool", lambda x: F.lp_pool2d(x, 2, 2))
case("average-divisor", lambda x: F.avg_pool2d(x, 3, 2, 1, True, divisor_override=4), ODD)
case("unfold", lambda x: F.unfold(x, (2, 3), dilation=2, padding=1, stride=(1, 2)))
case("unfold-no-batch", lambda x: F.unfold(x, 3), X[0])
case("fold", lambda x: F.fold(x, (6, 7), (2, 3), dilation=(2, 1), padding=(1, 0)), rand(2, 12, 30))
case("fold-rest", lambda x: F.fold(F.unfold(x, 3, stride=2), (8, 8), 3, stride=2))
case("tensor-unfold", lambda x: x.unfold(2, 3, 2).unfold(3, 3, 1))

# -------------------------------------------------------------------- parametrizations and wrappers

warnings.simplefilter("ignore")
case("weight-norm", parametrizations.weight_norm(nn.Conv2d(4, 6, 3)))
case("weight-norm-1", parametrizations.weight_norm(nn.ConvTranspose2d(4, 6, 3), dim=1))
case("weight-norm-all", parametrizations.weight_norm(nn.Linear(8, 5), dim=None))
case("weight-norm-old", nn.utils.weight_norm(nn.Conv2d(4, 6, 3)))
case("spectral-norm", parametrizations.spectral_norm(nn.Conv2d(4, 6, 3)))
case("orthogonal", parametrizations.orthogonal(nn.Linear(8, 8)))
PACKED = torch.randint(0, 256, (4, 9), generator=GENERATOR, dtype=torch.uint8)


def bases(x: Tensor, w: Tensor) -> Tensor:
    """ABC-Net's weights: bases, and factors that solve a linear regression."""
    signs = torch.stack([(w - shift).sign() for shift in (-0.5, 0.5)], 1)
    factors = torch.inverse(signs.T @ signs) @ signs.T @ w
    return sum(
        f * F.conv2d(x, b.reshape(4, 4, 3, 3)) for f, b in zip(factors, signs.T, strict=True)
    )


def unpacked(x: Tensor, packed: Tensor) -> Tensor:
    bits = (packed[:, None] >> torch.arange(4, dtype=torch.uint8)[:, None]) & 1
    return F.conv2d(x, bits.reshape(4, 4, 3, 3) * 2.0 - 1)


class Weighted(nn.Module):
    def __init__(self, function: Callable[..., Tensor], weight: Tensor) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("weight", weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


case("bases", Weighted(bases, rand(144)))
case("unpacked", Weighted(unpacked, PACKED))


class Signs(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.sign() * w.abs().mean()


signed = nn.Conv2d(4, 6, 3)
parametrize.register_parametrization(signed, "weight", Signs())
case("parametrized", signed)
pruned = nn.Conv2d(4, 6, 3)
prune.l1_unstructured(pruned, "weight", 0.4)
case("pruned", pruned)
case("compiled", torch.compile(nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU())))
case("compiled-part", nn.Sequential(torch.compile(nn.Conv2d(4, 6, 3)), nn.ReLU()))
case("data-parallel", nn.DataParallel(nn.Conv2d(4, 6, 3)))

# --------------------------------------------------------------------------------- sorting and such

SORTED: dict[str, Callable[[Tensor], Any]] = {
    "topk": lambda x: x.topk(3),
    "topk-small": lambda x: torch.topk(x, 2, dim=1, largest=False),
    "sort": lambda x: x.sort(1),
    "sort-down": lambda x: torch.sort(x, stable=True, dim=2, descending=True),
    "argsort": lambda x: x.argsort(1),
    "msort": torch.msort,
    "kthvalue": lambda x: x.kthvalue(3, 1),
    "median": lambda x: (x.median(1), x.median()),
    "quantile": lambda x: x.quantile(0.3, dim=1),
    "cumulated": lambda x: (x.cummax(1), x.cummin(2), x.cumprod(1), x.logcumsumexp(1)),
    "diff": lambda x: (x.diff(dim=1), x.diff(2, 0, prepend=x[:1])),
    "extremes": lambda x: x.aminmax(dim=1),
    "count": lambda x: x.relu().count_nonzero(1),
    "moments": lambda x: (torch.std_mean(x, 1), torch.var_mean(x, (1, 2), keepdim=True)),
    "nan": lambda x: (x.nansum(1), x.nanmean(1), torch.nan_to_num(x / 0), torch.isfinite(x / 0)),
    "norms": lambda x: (x.norm(p=0, dim=1), x.norm(p=3, dim=1), x.norm(), x.norm(p=torch.inf)),
    "distances": lambda x: (
        torch.cdist(x, x * 0.5), torch.cdist(x, x - 1, p=1.0), F.cosine_similarity(x, x.flip(1)),
    ),
    "trace": lambda x: x[0, 0].trace(),
    "buckets": lambda x: (
        torch.bucketize(x, torch.tensor([-1.0, 0.0, 0.5])),
        torch.searchsorted(torch.tensor([-1.0, 0.0, 0.5]), x.round(), right=True),
    ),
    "one-hot": lambda x: F.one_hot((x[:, 0] > 0).long(), 3),
    "mean-of-types": lambda x: (
        x.sum(1, dtype=torch.float64), (x * 3).int().mean(1, dtype=torch.float32), (x > 0).sum(1),
    ),
}  # fmt: skip
for name, function in SORTED.items():
    case(name, function)

# ----------------------------------------------------------------------------------------- products

PRODUCTS: dict[str, Callable[[Tensor], Any]] = {
    "baddbmm": lambda x: torch.baddbmm(x[0], x[0], x[1], alpha=0.5, beta=2),
    "addbmm": lambda x: torch.addbmm(x[0, 0], x[0], x[1]),
    "addmv": lambda x: torch.addmv(x[0, 0, 0], x[0, 0], x[0, 1, 0], beta=0.3),
    "vectors": lambda x: (
        torch.dot(x[0, 0, 0], x[0, 0, 1]), torch.outer(x[0, 0, 0], x[0, 0, 1]),
        torch.addr(x[0, 0], x[0, 0, 0], x[0, 0, 1], alpha=2), x @ x[0, 0, 0],
    ),
    "einsum": lambda x: (
        torch.einsum("b...d,b...d->b...", x, x), torch.einsum("bcii->bci", x),
        torch.einsum("bhqd,bhkd,bhkv->bqv", x, x, x),
    ),
    "tensordot": lambda x: torch.tensordot(x, x, dims=([1, 3], [1, 3])),
    "multi": lambda x: torch.linalg.multi_dot([x[0, 0], x[0, 1], x[1, 0]]),
    "cross": lambda x: torch.cross(x[:, :3], x[:, 1:], dim=1),
    "det": lambda x: torch.det(x[:, :, :3, :3]),
}  # fmt: skip
for name, function in PRODUCTS.items():
    case(name, function)
case("bilinear", nn.Bilinear(8, 8, 3), X[:, 0, 0], X[:, 1, 1])


def attended(**options: Any) -> Callable[..., Tensor]:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)


SEEN = torch.ones(6, 9).tril(-1).bool()  # the first query sees nothing
case("attention", attended(scale=0.3), QUERY, KEY, VALUE)
case("attention-causal", attended(is_causal=True), QUERY, KEY, VALUE)
case("attention-mask", attended(attn_mask=SEEN), QUERY, KEY, VALUE)
case(
    "attention-added",
    attended(attn_mask=torch.zeros(6, 9).masked_fill(~SEEN, -torch.inf)), QUERY, KEY, VALUE,
)  # fmt: skip
case(
    "attention-shared",
    lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True),
    QUERY, KEY, VALUE,
)  # fmt: skip


class Heads(nn.Module):
    def __init__(self, call: dict[str, Any], **options: Any) -> None:
        super().__init__()
        self.call, self.heads = call, nn.MultiheadAttention(8, 2, **options)

    def forward(self, x: Tensor) -> Any:
        return self.heads(x, x, x, **self.call)


case("heads", Heads({}, batch_first=True), SEQUENCE)
case("heads-more", Heads({"need_weights": False}, add_bias_kv=True, add_zero_attn=True), SEQUENCE)
case(
    "heads-mask", Heads({"attn_mask": torch.ones(6, 6).triu(1).bool()}, batch_first=True), SEQUENCE
)
case("encoder", nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), SEQUENCE)
case("decoder", nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), SEQUENCE, rand(2, 5, 8))

# ------------------------------------------------------------------------------------------ indices

pick = torch.tensor


def written(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, [0, 2]] = x[:, [1, 3]] * 2
    y[0, 1, 2, 3] = 7
    y[:, :, 1:7:2, 0] = x[:, :, 0:3, 1]
    y[torch.arange(2), :, torch.arange(2)] = 1
    torch.diagonal(y, dim1=2, dim2=3).mul_(2)
    y.mT[0, 0] += 1
    return y


def stale(x: Tensor) -> Any:
    """Return views of what is written later."""
    y = x.clone()
    seen = (y.mT, y.unfold(2, 2, 2), y.as_strided((2, 3), (1, 2)), y.split([1, 3], 1)[1], +y)
    apart = (y.contiguous(memory_format=torch.channels_last), y.to(torch.float32, copy=True))
    y.mul_(2)
    return *(s * 1 for s in seen), *(a * 1 for a in apart)


INDEXED: dict[str, Callable[[Tensor], Any]] = {
    "several": lambda x: (
        x[pick([0, 1]), pick([2, 3])], x[:, pick([0, 1]), :, pick([2, 3])], x[:, pick([-1, 0])],
        x[:, :, pick([[0, 1], [2, 3]]), pick([1, 0])], x[:, None, pick([0, 2])],
    ),
    "stored-mask": lambda x: x[:, pick([True, False, True, True])],
    "take": lambda x: (x.take(pick([0, 5, -1])), x.take_along_dim(INDEX, 1)),
    "along": lambda x: (
        x.index_add(1, pick([0, 2, 0]), x[:, :3], alpha=2), x.index_fill(1, pick([0, 2]), -1.0),
        x.index_copy(1, pick([3, 0]), x[:, :2]),
    ),
    "put": lambda x: (
        x.index_put((pick([0, 1]), pick([2, 3])), x[:, 0]),
        x.index_put((pick([0, 0]), pick([2, 2])), x[:, 0], accumulate=True),
    ),
    "written": written,
    "stale": stale,
    "masked": lambda x: (x.masked_scatter(x > 0, x.flip(0)), x.masked_fill(x > 0, pick(1.5))),
    "diagonals": lambda x: (
        x.diagonal(dim1=2, dim2=3), x.diagonal(1, 1, 2), x[0, 0].diag(-1), x[0, 0, 0].diag(1),
        torch.diag_embed(x[:, 0, 0], 1), torch.diagonal_scatter(x[0, 0], torch.zeros(8)),
    ),
    "parts": lambda x: (
        torch.slice_scatter(x, x[:, :2], 1, 0, 4, 2), torch.select_scatter(x, x[:, 0], 1, 2),
        x.tensor_split((1, 5), 2), x.rot90(1, (2, 3)), x.roll(5), x.movedim((0, 1), (2, 3)),
    ),
    "repeats": lambda x: (
        x.repeat_interleave(3, 1), x.repeat_interleave(pick([1, 2, 0, 3]), dim=1),
        x.repeat_interleave(2),
    ),
    "made": lambda x: (
        torch.eye(8) @ x, torch.linspace(-1, 1, 8) + x, torch.arange(0, 4, 0.5) + x,
        torch.ones(8, 8).tril() * x, torch.tril_indices(3, 3), torch.hann_window(8) * x,
    ),
    "scalars": lambda x: torch.stack([pick(2.0), x[0, 0, 0, 0]]) * pick(3.0),
    "stacked": lambda x: (
        torch.hstack([x, x]), torch.dstack([x, x]), torch.meshgrid(x[0, 0, 0], x[0, 0, 1]),
        torch.block_diag(x[0, 0], x[0, 1]), torch.atleast_3d(x[0, 0, 0]), x.ravel(),
    ),
    "pixels": lambda x: (F.pixel_shuffle(x[None], 2), F.pixel_unshuffle(x[None], 2)),
}  # fmt: skip
for name, function in INDEXED.items():
    case(name, function)
case("scatter", lambda x, i: (x.scatter(1, i, x * 2), x.scatter(1, i, 2.5)), X, ORDER)
case("scatter-part", lambda x, i: x.scatter(1, i[:, :2, :5], x[:, :3]), X, ORDER)
case(
    "scatter-add", lambda x, i: (x.scatter_add(1, i, x), x.scatter(1, i, x, reduce="add")), X, INDEX
)


def reduced(how: str, own: bool) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, i: x.scatter_reduce(1, i, x * 2, how, include_self=own)


for how in ("sum", "prod", "mean", "amax", "amin"):
    for own in (True, False):
        case(f"scatter-{how}-{own}", reduced(how, own), X, INDEX)

# -------------------------------------------------------------------------------------- elementwise

NAMES = (
    *("abs", "asinh", "atan", "sinh", "cosh", "tan", "exp2", "expm1", "erf", "erfc", "frac"),
    *("sinc", "isinf", "isposinf", "isneginf", "positive", "deg2rad", "rad2deg", "sgn", "round"),
)
case("functions", lambda x: tuple(getattr(torch, name)(x) for name in NAMES))
case(
    "functions-within",
    lambda x: (x.acos(), x.asin(), x.atanh(), torch.logit(x.abs() + 0.05)),
    WITHIN,
)
case("functions-above", lambda x: (x.acosh(), x.log2(), x.log10(), x.log1p(), x.rsqrt()), ABOVE)
case("log2-of-powers", lambda x: torch.floor(torch.log2(x)), 2.0 ** torch.arange(-20, 20))
ELEMENTWISE: dict[str, Callable[[Tensor], Any]] = {
    "activations": lambda x: (
        F.hardshrink(x, 0.3), F.softshrink(x), F.tanhshrink(x), F.rrelu(x), F.glu(x, 1),
        F.softplus(x, 2.0, 1.0), F.softmin(x, 1),
    ),
    "two": lambda x: (
        torch.atan2(x, x.flip(1)), torch.hypot(x, x.flip(1)), torch.logaddexp(x, x.flip(1)),
        torch.logaddexp2(x, x.flip(1)), torch.xlogy(x, x.abs()), torch.fmax(x, x.flip(0)),
        torch.heaviside(x, pick(0.5)), torch.max(x, x.flip(0)), torch.isclose(x, x.round()),
    ),
    "integers": lambda x: (
        (x * 9).int() // 2, torch.div((x * 9).int(), 4, rounding_mode="trunc"), (x * 9).int() % 4,
        (x * 9).int() % -4, torch.fmod((x * 9).int(), 4), (x * 9).int() << 2, (x * 9).int() >> 1,
        (x * 9).int() // -4, (x > 0) + (x < 1), (x > 0) * (x < 1), (x * 3).int() ** 3,
    ),
    "rounded": lambda x: (x.round(decimals=2), x.round(decimals=-1), torch.float_power(x, 2)),
}  # fmt: skip
for name, function in ELEMENTWISE.items():
    case(name, function)
BYTES = torch.arange(256, dtype=torch.uint8)[:, None]
TWICE = 2 * torch.arange(4)  # of fields of two bits
for kind in (torch.uint8, torch.int8, torch.int32, torch.int64):
    case(
        f"shifts-of-{str(kind)[6:]}",
        lambda x, kind=kind: (
            x >> 7, x << 7, x >> torch.arange(8), torch.bitwise_left_shift(x, TWICE.to(kind)),
            (x >> (2 * torch.arange(4, dtype=kind))) & 3, x << (x & 7), 1 << (x & 5),
        ),
        BYTES.to(kind),
    )  # fmt: skip
case("shifts-of-whole-words", lambda x: (x >> 31, x >> torch.tensor([0, 31])), BYTES.int() << 24)
TENTHS = torch.arange(-30, 31) * 0.1
case("floors-of-tenths", lambda x: (x // 0.1, x % 0.1, x // -0.3, x % -0.3), TENTHS)
case("divided", lambda x: torch.div(x, 0.2, rounding_mode="floor"), TENTHS)

# ------------------------------------------------------------------------------------------- layers

case("embedding", nn.Embedding(10, 4, padding_idx=0), IDS)
for mode in ("mean", "sum", "max"):
    case(f"bag-{mode}", nn.EmbeddingBag(10, 4, mode=mode), IDS)
case("lrn", nn.LocalResponseNorm(3))
case("batch-norm-of-batch", nn.BatchNorm2d(4, track_running_stats=False))
case("group-norm", nn.GroupNorm(2, 4))
case("instance-norm", nn.InstanceNorm2d(4, affine=True))
case("padded", nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"))
case("turned-no-batch", nn.ConvTranspose2d(4, 4, 3), X[0])
case("alpha-dropout", nn.Sequential(nn.AlphaDropout(0.5), nn.FeatureAlphaDropout(0.5)))
for kind in (torch.float16, torch.bfloat16, torch.float64):
    name = str(kind)[6:]
    network = nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3))
    case(f"network-{name}", network.to(kind), X.to(kind))
    case(
        f"layers-{name}",
        lambda x: (
            F.layer_norm(x, (8,)), F.group_norm(x, 2), F.softmax(x, 1), F.rms_norm(x, (8,)),
            F.gelu(x), F.silu(x), x.mean((2, 3)), x.std(1), F.max_pool2d(x, 2), x @ x,
            F.interpolate(x, scale_factor=2, mode="bilinear"), x.topk(3, 1)[0], x.cumsum(1),
        ),
        X.to(kind),
    )  # fmt: skip

REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "mask": (lambda x: x[x > 0], "depends on data"),
    "nonzero": (lambda x: x.nonzero(), "nonzero"),
    "unique": (lambda x: x.round().unique(), "unique"),
    "fft": (lambda x: torch.fft.rfft(x).abs(), "fft_rfft"),
    "random": (lambda x: x + torch.randn(8), "randn"),
    "bytes": (lambda x: x.view(torch.int32), "view"),
    "places": (lambda x: F.adaptive_max_pool2d(x, (5, 3), return_indices=True), "result 1"),
    "script": (torch.jit.script(nn.Conv2d(4, 6, 3)), "cannot export"),
}


def cast_down(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.linear(x, torch.ones(8, 8)).float()


REFUSED["autocast"] = (cast_down, "autocast")


def flat(made: Any) -> list[Tensor]:
    if made is None or isinstance(made, Tensor):
        return [] if made is None else [made]
    return [t for part in made for t in flat(part)]


def array(tensor: Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.detach().float().numpy().astype(ml_dtypes.bfloat16)
    return tensor.detach().numpy()


@pytest.mark.parametrize("name", CASES)
def test_operator(name: str) -> None:
    module, inputs = CASES[name]
    with torch.no_grad():
        wanted = [array(t) for t in flat(module.eval()(*(t.clone() for t in inputs)))]
    model = pytorch.read_module(module, inputs)
    feeds = {i.name: array(t) for i, t in zip(model.graph.input, inputs, strict=True)}
    graph = load(model)
    found = evaluate(graph, feeds)
    assert len(graph.outputs) == len(wanted)
    for k, (output, want) in enumerate(zip(graph.outputs, wanted, strict=True)):
        made = found[output]
        assert (made.shape, made.dtype) == (want.shape, want.dtype), k
        if want.dtype.kind in "biu":
            np.testing.assert_array_equal(made, want, err_msg=str(k))
            continue
        mine, theirs = made.astype(np.float64), want.astype(np.float64)
        top = np.abs(theirs[np.isfinite(theirs)]).max(initial=1e-30)
        tolerance = HALVES.get(want.dtype.name, 1e-4) * top
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=tolerance, err_msg=str(k))


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    what, text = REFUSED[name]
    module = what if isinstance(what, nn.Module) else Function(what)
    with pytest.raises(ModelError, match=text):
        pytorch.read_module(module.eval(), (X,))


def test_operators_whose_results_share_elements_are_known() -> None:
    """What torch says aliases its argument must be a view here, or writes are lost."""
    for target in convert.RULES:
        name, _, form = target.partition(".")
        operator = getattr(getattr(torch.ops.aten, name, None), form, None)
        returns = operator._schema.returns if operator is not None else ()
        if any(r.alias_info is not None and not r.alias_info.is_write for r in returns):
            assert target in views.ALIASING
