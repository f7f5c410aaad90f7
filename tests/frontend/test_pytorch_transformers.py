"""Classes of Hugging Face transformers with random weights, by torch.export."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bnncc

torch = pytest.importorskip("torch", reason="needs torch: make test-torch")
transformers = pytest.importorskip("transformers", reason="needs transformers: make test-torch")

SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 40,
    "num_attention_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
DECODER = {
    **SMALL, "num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


class Hidden(torch.nn.Module):
    """The last hidden states of a model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Any) -> Any:
        return self.model(input_ids=input_ids).last_hidden_state


class Step(torch.nn.Module):
    """One step of a decoder of one layer, with its cache."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Any, key: Any, value: Any) -> Any:
        cache = transformers.cache_utils.DynamicCache()
        cache.update(key, value, 0)
        out = self.model(input_ids=input_ids, past_key_values=cache, use_cache=True)
        return out.last_hidden_state, cache.layers[0].keys, cache.layers[0].values


def built(kind: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")
    sizes = dict(SMALL if kind == "Bert" else {**DECODER, "use_cache": False})
    return getattr(transformers, f"{kind}Model")(config(**sizes)).eval()


def right(artifact: Any, module: Any, *args: Any) -> None:
    with torch.no_grad():
        wanted = module(*args)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    feeds = {i.name: a.numpy() for i, a in zip(artifact.inputs, args, strict=True)}
    for got, want in zip(artifact.run(feeds).values(), wanted, strict=True):
        np.testing.assert_allclose(got, want.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["Bert", "Qwen3", "BitNet"])
def test_any_number_of_tokens(kind: str) -> None:
    module, rng = Hidden(built(kind)), np.random.default_rng(0)
    sizes = {0: torch.export.Dim("batch", max=8), 1: torch.export.Dim("tokens", max=60)}
    ids = torch.tensor(rng.integers(3, 40, (2, 11)))
    artifact = bnncc.compile(module, (ids,), dynamic_shapes={"input_ids": sizes})
    for shape in ((1, 1), (3, 20), (2, 60)):
        right(artifact, module, torch.tensor(rng.integers(3, 40, shape)))
    with pytest.raises(bnncc.BnnccError, match="is 61, the network was compiled for at most 60"):
        artifact.run({artifact.inputs[0].name: np.zeros((1, 61), np.int64)})


def test_a_step_with_a_cache() -> None:
    module, rng = Step(built("BitNet")), np.random.default_rng(0)
    past = torch.export.Dim("past", max=60)

    def inputs(count: int) -> tuple[Any, ...]:
        cache = torch.tensor(rng.standard_normal((1, 1, count, 16)).astype(np.float32))
        return torch.tensor(rng.integers(3, 40, (1, 1))), cache, cache + 1

    shapes = {"input_ids": None, "key": {2: past}, "value": {2: past}}
    artifact = bnncc.compile(module, inputs(5), dynamic_shapes=shapes)
    for count in (1, 5, 60):
        right(artifact, module, *inputs(count))
