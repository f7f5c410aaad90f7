"""PyTorch for the encoder of `transformer_networks`, in the type that is fast on the CPU.

Linear layers multiply by the ternary weights and their scale, without quantizing the data; norms
and attention are PyTorch's own functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx
import torch
from torch.nn import functional as F

EPSILON = 1e-5


@dataclass
class Layer:
    """Parameters of one layer, in the order of the file."""

    norms: list[torch.Tensor]
    linears: list[torch.Tensor]
    """Query, key, value, output, up, gate, down; each ``[units, depth]``."""


class Encoder(torch.nn.Module):
    """The layers of a file that `transformer_networks.bitnet` wrote as an encoder.

    Parameters
    ----------
    model : onnx.ModelProto
        Constants are in the order of use: cosines and sines, then those of each layer.
    dtype : torch.dtype
        Type of parameters and of everything that is computed.
    """

    def __init__(self, model: onnx.ModelProto, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        arrays = [onnx.numpy_helper.to_array(item) for item in model.graph.initializer]
        self.hidden = model.graph.input[0].type.tensor_type.shape.dim[-1].dim_value
        matrices = [a for a in arrays if a.ndim == 2]
        self.cosine, self.sine = map(self._held, matrices[:2])
        self.size = self.cosine.shape[-1]
        norms = iter(self._held(a) for a in arrays if a.shape == (self.hidden,))
        linears = self._linears(matrices[2:])
        self.layers = [
            Layer([next(norms) for _ in range(2)], [next(linears) for _ in range(7)])
            for _ in range(len(matrices[2:]) // 7)
        ]
        self.last = next(norms)

    def _held(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.array(array, np.float32)).to(self._dtype)

    def _linears(self, matrices: list[np.ndarray]) -> Iterator[torch.Tensor]:
        for weight in matrices:
            yield self._held(weight.T * np.float32((1.5 * len(weight)) ** -0.5))

    def _norm(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (self.hidden,), scale, EPSILON)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.size)).transpose(1, 2)

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, -1)
        return x * self.cosine + torch.cat([-high, low], -1) * self.sine

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the hidden states after the last norm."""
        for layer in self.layers:
            query, key, value, output, up, gate, down = layer.linears
            y = self._norm(x, layer.norms[0])
            q, k, v = (self._heads(F.linear(y, w)) for w in (query, key, value))
            q, k = self._rotated(q), self._rotated(k)
            y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            x = x + F.linear(y.transpose(1, 2).flatten(-2), output)
            y = self._norm(x, layer.norms[1])
            x = x + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)
        return self._norm(x, self.last)
