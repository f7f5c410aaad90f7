"""What LLVM is asked for exists: it ends the process, or crashes, where it does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bnncc.codegen.pipeline import require_instructions
from bnncc.errors import TargetError
from bnncc.targets import catalog
from bnncc.targets.spec import TargetSpec


def made(base: str, **fields: Any) -> TargetSpec:
    """Return a target as a file with these fields describes it."""
    return replace(catalog.resolve(base), **fields)


@pytest.mark.parametrize("name", catalog.names())
def test_llvm_has_all_targets(name: str) -> None:
    require_instructions(catalog.resolve(name))


@pytest.mark.parametrize(
    ("base", "fields", "message"),
    [
        ("x86-64-v3", {"triple": "nonsense"}, "no architecture `nonsense`"),
        ("x86-64-v3", {"mcpu": "zilog80"}, "no `mcpu` zilog80 for x86_64-unknown-linux-gnu"),
        ("cuda-sm80", {"mcpu": "zilog80"}, "no `mcpu` zilog80"),
        ("x86-64-v3", {"mattr": ("+nosuch",)}, "no feature `\\+nosuch` of `mattr`"),
        ("x86-64-v3", {"mattr": ("-avx2",)}, "instructions of `avx2`, and LLVM's x86-64-v3 has"),
        ("x86-64-v3", {"vector_bits": 512}, "instructions of `avx512bw`"),
        ("x86-64-v4", {"popcount": "vector"}, "instructions of `avx512vpopcntdq`"),
        ("x86-64-v3", {"popcount": "neon"}, "instructions of `neon`"),
        ("arm64", {"popcount": "neon-dot"}, "instructions of `dotprod`"),
        ("arm64", {"popcount": "lookup"}, "lookup, for which aarch64 has no vectors of 128 bits"),
        ("wasm32-simd128", {"vector_bits": 256}, "for which wasm32 has no vectors of 256 bits"),
        ("native", {"popcount": "lookup", "vector_bits": 32}, "has no vectors of 32 bits"),
    ],
)
def test_what_llvm_lacks_is_one_line(base: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(TargetError, match=message):
        require_instructions(made(base, **fields))
